"""The page of clusters: the same responses twice, the most varied problems first."""
import pytest

import data
import evaluate
import lora
from experiments import clusters
from support.clustering import Clustering
from tests.test_train import quick_world, run  # noqa: F401 (a fixture)


def response(text, correct, cluster, untrained, **more):
    return {"text": text, "correct": correct, "cluster": cluster, "untrained": untrained, **more}


def test_a_page_shows_the_different_correct_responses_by_hand():
    one = {"question": "one?", "responses": [response(" 1", 1.0, 3, 0), response("1", 1.0, 3, 0)]}
    two = {"question": "two\nlines?", "responses": [
        response("1+1=2", 1.0, 5, 1, strategy="+"), response("a|b", 1.0, 2, 1, strategy="|"),
        response("3", 0.0, 0, 0), response("1+1=2", 1.0, 5, 1, strategy="+")]}
    page = clusters.make_page([one, two], 2)
    assert page.splitlines() == [
        "**two lines?**", "", "| times | response | cluster | untrained |", "|---|---|---|---|",
        "| 1 | a\\|b (|) | 2 | 1 |", "| 2 | 1+1=2 (+) | 5 | 1 |", "",
        "**one?**", "", "| times | response | cluster | untrained |", "|---|---|---|---|",
        "| 2 | 1 | 3 | 0 |"]
    assert clusters.make_page([one, two], 1).startswith("**two lines?**")


def test_a_runs_responses_are_clustered_twice(cache, tmp_path, capsys):
    folder = run(tmp_path / "mine", cache, "--steps", "2", "--gate", "none", "--learning-rate",
                 "0.1")
    policy, _, _ = evaluate.open_run(folder)
    assert all(each.any() for name, each in lora.parameters(policy.model).items()
               if "lora_B" in name)  # the trained policy, not its base model
    found = evaluate.evaluate(policy, data.load("countdown-many", "test", 6), policy.config)
    records = clusters.cluster_twice(folder, 6)
    responses = [each for record in records for each in record["responses"]]
    untrained = [each.pop("untrained") for each in responses]
    assert records == found.records
    untrained_clustering = Clustering.fit(found.features, epochs=0)
    assert untrained == untrained_clustering.read(found.features)[0].flatten().tolist()
    assert untrained != [each["cluster"] for each in responses]
    for each, cluster in zip(responses, untrained):
        each["untrained"] = cluster
    capsys.readouterr()
    clusters.main([str(folder), "--problems", "6", "--show", "2"])
    assert capsys.readouterr().out.strip() == clusters.make_page(records, 2).strip()
    for wrong in ([str(tmp_path)], [str(folder), "--show", "0"]):
        with pytest.raises(SystemExit):
            clusters.main(wrong)
