"""Estimates beside what autograd really keeps, and beside the shapes that people know."""
import dataclasses

import pytest
import torch

import data
import grpo
import lora
import train
from model import Transformer
from support import budget, tiny
from support.config import PRESETS, Config
from support.fast import accelerate
from support.hub import ModelConfig
from tests.conftest import small_config

SHAPES = [dict(hidden_size=64, intermediate_size=160, num_attention_heads=4, num_key_value_heads=2),
          dict(hidden_size=96, intermediate_size=400, num_attention_heads=6, num_key_value_heads=1)]
PAPER = dataclasses.replace(Config(), **PRESETS["paper"])


@pytest.mark.parametrize("dtype, width", [(torch.float32, 4), (torch.bfloat16, 2)])
@pytest.mark.parametrize("shape", SHAPES)
def test_activations_are_what_autograd_saves(shape, dtype, width):
    raw = small_config("qwen2", head_dim=16, num_hidden_layers=6, max_position_embeddings=256)
    config = ModelConfig.from_dict({**raw, **shape})
    model = accelerate(lora.apply(Transformer(config).to(dtype), 8))
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    ids, saved = torch.randint(5, 30, (8, 60)), {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = (storage.nbytes(), tensor)  # keeps its address taken
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        grpo.score(model, [[7] * 40] * 2, ids, torch.ones_like(ids).bool(), 1.0)
    tokens = 2 * (40 + 4 * 59)
    measured = sum(size for size, _ in saved.values()) / tokens / config.layers
    assert budget.activation_bytes(config, width, 8) == pytest.approx(measured, rel=0.1)


def test_the_papers_model_and_a_dry_run_that_touches_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    train.main(["--preset", "paper", "--dry-run", "--steps", "7"])
    text = capsys.readouterr().out
    assert "1,543,714,304" in text and "9,232,384" in text  # as PEFT counts them at rank 8
    values = {line.split()[0]: line.split()[-1] for line in text.splitlines() if line.strip()}
    assert values["model"] == "Qwen/Qwen2.5-1.5B" and values["steps"] == "7"
    assert values["alpha"] == "0.3" and values["learning_rate"] == "2e-05"
    assert not list(tmp_path.iterdir())


def test_the_default_run_is_the_tiny_model(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    train.main(["--dry-run"])
    text = capsys.readouterr().out
    with torch.device("meta"):
        model = Transformer(budget.find_shape("tiny"))
    count = sum(parameter.numel() for parameter in model.parameters())
    assert f"{count:,}" in text and 0.7e6 < count < 0.9e6
    assert f"{32 * 8 * 32:,}" in text  # tokens per step, at most
    assert not list(tmp_path.iterdir())


def test_recomputing_and_smaller_micro_batches_save_memory():
    shape = budget.find_shape(PAPER.model)
    changes = ({}, {"recompute": True}, {"micro_batch": 2})
    plain, recomputed, larger = (
        budget.estimate(dataclasses.replace(PAPER, **change), shape, 2)["update, GB"]
        for change in changes)
    assert recomputed < plain / 5
    assert larger > 1.9 * plain


def test_arithmetic_is_eight_operations_per_weight_and_token():
    """8 problems of 150 tokens with 8 x 256 each: sampled, referred to, and updated."""
    estimate = budget.estimate(PAPER, budget.find_shape(PAPER.model), 2)
    tokens = 8 * (150 + 8 * 256)
    expected = tokens * estimate["base parameters"] * 8 / 1e12
    assert estimate["arithmetic per step, TFLOP, at most"] == pytest.approx(expected)


@pytest.mark.parametrize("flags, word", [
    (["--preset", "paper", "--model", "tiny"], "tiny model"),
    (["--max-new-tokens", "500"], "context"), (["--method", "magic"], "magic"),
    (["--data", "chess"], "chess"),
    (["--learn-lambdas", "--method", "ss"], "--learn-lambdas")])
def test_a_dry_run_refuses_what_the_run_would_refuse(flags, word, capsys):
    with pytest.raises(SystemExit) as caught:
        train.main(["--dry-run", *flags])
    assert caught.value.code == 2
    assert word in capsys.readouterr().err


def test_a_shape_is_not_guessed():
    with pytest.raises(ValueError, match="cannot tell the shape"):
        budget.find_shape("someone/something")


@pytest.mark.parametrize("task", data.COUNTDOWN)
def test_prompts_are_as_long_as_the_budget_says(task):
    prompts = [problem.prompt for problem in data.load(task, "test", 20)]
    lengths = {len(ids) for ids in tiny.make_tokenizer()(prompts).input_ids}
    assert lengths == {budget.count_prompt_tokens(task)}
    assert budget.count_prompt_tokens("gsm8k") == budget.QUESTION_TOKENS
