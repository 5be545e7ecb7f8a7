"""Estimates beside what autograd really keeps, and beside the shapes that people know."""
import dataclasses

import pytest
import torch
from conftest import small_config

import budget
import grpo
import lora
import train
from model import ModelConfig, Transformer


@pytest.mark.parametrize("dtype, bytes", [(torch.float32, 4), (torch.bfloat16, 2)])
@pytest.mark.parametrize("shape", [dict(hidden_size=64, intermediate_size=160, num_attention_heads=4, num_key_value_heads=2),
                                   dict(hidden_size=96, intermediate_size=400, num_attention_heads=6, num_key_value_heads=1)])
def test_activations_are_what_autograd_saves(shape, dtype, bytes):
    config = ModelConfig.from_dict(small_config("qwen2", head_dim=16, num_hidden_layers=6, max_position_embeddings=256, **{**shape}))
    model = lora.apply(Transformer(config).to(dtype), 8)
    ids, saved = torch.randint(5, 30, (8, 60)), {}
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = (storage.nbytes(), tensor)         # the tensor keeps its address taken
        return tensor
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        grpo.score(model, [[7] * 40] * 2, ids, torch.ones_like(ids).bool(), 1.0)
    measured = sum(size for size, _ in saved.values()) / (2 * (40 + 4 * 59)) / 6
    assert budget.activation_bytes(config, bytes, 8) == pytest.approx(measured, rel=0.1)


def test_the_papers_model_and_a_dry_run_that_touches_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    train.main(["--preset", "paper", "--dry-run", "--steps", "7"])
    text = capsys.readouterr().out
    assert "1,543,714,304" in text and "9,232,384" in text                 # as PEFT counts them at rank 8
    values = {line.split()[0]: line.split()[-1] for line in text.splitlines() if line.strip()}
    assert values["model"] == "Qwen/Qwen2.5-1.5B" and values["steps"] == "7" and values["alpha"] == "0.3"
    assert values["learning_rate"] == "2e-05" and not list(tmp_path.iterdir())


def test_recomputing_and_smaller_micro_batches_save_memory():
    config = dataclasses.replace(train.Config(), **train.PRESETS["paper"])
    shape = budget.shape_of(config.model)
    plain, recomputed = (budget.estimate(dataclasses.replace(config, recompute=r), shape, 2)["update, GB"] for r in (False, True))
    assert recomputed < plain / 5
    found = budget.estimate(config, shape, 2)               # 8 problems of 150 tokens with 8 x 256 each, eight passes with KL
    tokens = 8 * (150 + 8 * 256)
    assert found["arithmetic a step, TFLOP, at most"] == pytest.approx(tokens * found["base parameters"] * 8 / 1e12)
    with pytest.raises(ValueError, match="cannot tell the shape"):
        budget.shape_of("someone/something")
