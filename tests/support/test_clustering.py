"""k-means by hand, and one clustering that all policies share."""
from collections import Counter

import pytest
import torch

from strategy import Features
from support import files
from support.clustering import CLUSTERS, Clustering, k_means, nearest, spread_centres
from tests.conftest import mutual_information, small_model


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def test_the_nearest_centre():
    points = torch.tensor([[[0.0, 1.0], [4.0, 4.0]], [[9.0, 9.0], [0.0, 0.0]]])
    centres = torch.tensor([[0.0, 0.0], [5.0, 5.0]])
    assert nearest(points, centres).tolist() == [[0, 1], [1, 0]]


def test_centres_start_far_from_each_other():
    points = torch.tensor([[0.0], [1.0], [10.0], [4.0], [9.0]])
    assert spread_centres(points, 1).tolist() == [[0.0]]
    assert spread_centres(points, 4).tolist() == [[0.0], [10.0], [4.0], [1.0]]


def test_more_centres_than_points_are_copies():
    centres = spread_centres(torch.tensor([[0.0], [1.0]]), 4)
    assert centres.shape == (4, 1)
    assert set(centres.flatten().tolist()) == {0.0, 1.0}


def test_one_round_moves_each_centre_to_the_mean_of_its_points():
    points = torch.tensor([[0.0], [2.0], [10.0], [14.0]])
    centres = k_means(points, torch.tensor([[0.0], [10.0]]), 1)
    assert centres.tolist() == [[1.0], [12.0]]
    # Two rounds: [2] belongs to the second centre only until that centre has moved.
    points = torch.tensor([[0.0], [4.0], [20.0]])
    start = torch.tensor([[0.0], [6.0]])
    assert k_means(points, start, 0).tolist() == [[0.0], [6.0]]
    assert k_means(points, start, 1).tolist() == [[0.0], [12.0]]
    assert k_means(points, start, 2).tolist() == [[2.0], [20.0]]


def test_k_means_finds_what_is_there():
    middles = torch.tensor([[0.0, 0.0], [5.0, 0.0], [0.0, 5.0]])
    points = torch.cat([middle + 0.1 * torch.randn(50, 2, generator=seeded(i))
                        for i, middle in enumerate(middles)])
    centres = k_means(points, points[[0, 60, 149]], 10)
    torch.testing.assert_close(centres, middles, atol=0.1, rtol=0)
    most = [Counter(part.tolist()).most_common(1)[0][1]
            for part in nearest(points, centres).split(50)]
    assert most == [50, 50, 50]


def test_an_empty_cluster_keeps_its_centre():
    points = torch.randn(20, 2, generator=seeded())
    centres = k_means(points, torch.tensor([[0.0, 0.0], [99.0, 99.0]]), 3)
    torch.testing.assert_close(centres[0], points.mean(0))
    assert centres[1].tolist() == [99.0, 99.0]


def make_features(groups: int = 96, samples: int = 6, kinds: int = 4, seed: int = 0):
    """Responses of a few kinds, hidden behind large features that a whole group has in common."""
    size, generator = 16, seeded(seed)
    directions = torch.randn(kinds, size, generator=seeded(1234))
    kind = torch.randint(kinds, (groups, samples), generator=generator)
    query = torch.randn(groups, size, generator=generator)
    numbers = torch.randn(2, size, generator=seeded(4321))  # the plane of what a group shares
    common = 2 * torch.randn(groups, 1, 2, generator=generator) @ numbers
    response = directions[kind] + common
    noise = 0.3 * torch.randn(groups, samples, 2, size, generator=generator)
    views = response[:, :, None] + noise
    return Features(query, response, views), kind


@pytest.fixture(scope="module")
def fitted() -> Clustering:
    return Clustering.fit(make_features()[0])


def test_clusters_see_kinds_of_responses_that_the_raw_features_hide(fitted):
    features, kind = make_features(seed=1)  # groups that were not there when it was fitted
    cluster, _ = fitted.read(features)
    labels = kind.flatten().tolist()
    raw = features.response.flatten(0, 1)
    raw_cluster = nearest(raw, k_means(raw, spread_centres(raw, CLUSTERS), 20))
    ours = mutual_information(cluster.flatten().tolist(), labels)
    theirs = mutual_information(raw_cluster.tolist(), labels)
    print(f"mutual information with the kinds: clusters {ours:.2f}, raw features {theirs:.2f}")
    assert ours > 0.6
    assert theirs < 0.2


def test_what_is_read_has_the_shape_of_the_responses(fitted):
    features, _ = make_features(groups=7, seed=2)
    cluster, places = fitted.read(features)
    assert cluster.shape == (7, 6)
    assert places.shape == (7, 6, 2)
    assert cluster.min() >= 0
    assert cluster.max() < CLUSTERS


def test_responses_are_standardised_by_the_responses_that_it_was_fitted_to(fitted):
    rows = make_features()[0].response.flatten(0, 1)
    torch.testing.assert_close(fitted.norm.mean, rows.mean(0), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(fitted.norm.variance, rows.var(0, unbiased=False))


def test_centres_are_the_means_of_their_members(fitted):
    """Twenty rounds are enough to settle, and every cluster that was found has members."""
    features, _ = make_features()
    points = fitted.embed(features)
    member = nearest(points, fitted.centres)
    for number in member.unique().tolist():
        mean = points[member == number].mean(0)
        torch.testing.assert_close(fitted.centres[number], mean, atol=1e-3, rtol=0)
    assert len(member.unique()) > 5


def test_the_map_shows_the_two_directions_of_most_variance(fitted):
    features, _ = make_features()
    points = fitted.embed(features)
    _, places = fitted.read(features)
    places = places.flatten(0, 1)
    torch.testing.assert_close(places.mean(0), torch.zeros(2), atol=1e-4, rtol=0)
    variances = torch.linalg.svdvals(points - points.mean(0))[:2].square()
    torch.testing.assert_close(places.square().sum(0), variances, atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(fitted.plane.T @ fitted.plane, torch.eye(2), atol=1e-4, rtol=0)
    largest = fitted.plane.gather(0, fitted.plane.abs().argmax(0, keepdim=True))
    assert (largest > 0).all()  # the sign of a direction is not left to chance


def test_the_same_responses_give_the_same_clustering(fitted):
    torch.manual_seed(99)  # whatever was drawn before
    again = Clustering.fit(make_features()[0])
    for name, tensor in fitted.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name


def test_equal_responses_do_not_break_it():
    features = Features(torch.zeros(3, 5), torch.ones(3, 2, 5), torch.ones(3, 2, 2, 5))
    cluster, places = Clustering.fit(features).read(features)
    assert len(cluster.unique()) == 1
    assert places.abs().max() < 1e-4


def test_a_clustering_comes_back_from_its_file_bit_for_bit(tmp_path):
    model = small_model()  # its hidden size is 36
    generator = seeded()
    features = Features(*(torch.randn(*shape, 36, generator=generator)
                          for shape in ((8,), (8, 4), (8, 4, 2))))
    assert Clustering.load_if_there(tmp_path, model) is None
    clustering = Clustering.fit(features)
    files.write_tensors(tmp_path / "clustering.safetensors", clustering.state_dict())
    loaded = Clustering.load_if_there(tmp_path, model)
    for before, after in zip(clustering.read(features), loaded.read(features)):
        assert torch.equal(before, after)


def test_a_clustering_of_another_model_is_refused(tmp_path):
    tensors = Clustering(20).state_dict()
    files.write_tensors(tmp_path / "clustering.safetensors", tensors)
    with pytest.raises(ValueError, match="clustering.safetensors: tensor"):
        Clustering.load_if_there(tmp_path, small_model())
