"""The loop: what one step pays and learns, runs that resume on the same bits, and Ctrl-C."""
import json
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file

import data
import evaluate
import grpo
import lora
import model
import reward
import sample
import train
from support import checkpoint, clustering, meta, tiny
from support.config import Config
from tests.conftest import make_sentence_encoder

ROOT = Path(__file__).parent.parent
QUICK = ["--problems", "4", "--samples", "4", "--eval-problems", "6", "--eval-samples", "5",
         "--strategy-warmup", "8", "--device", "cpu", "--bonus",
         "added", "--alpha", "8", "--kl", "0.03"]
SMALL = dict(problems=4, samples=4, eval_problems=6, eval_samples=5, strategy_warmup=8,
             bonus="added", alpha=8.0, kl=0.03, device="cpu")  # the same as a Config
# Bonuses without a gate: the tests' base model is hardly ever right.
WHOLE = ["--steps", "5", "--checkpoint-every", "2", "--eval-every", "2", "--learn-lambdas",
         "--gate", "none"]
TIMES = ("tokens_per_second", "seconds_")
REAL_WORLD = ((data, "COUNTDOWN_TRAINING", data.COUNTDOWN_TRAINING),
              (clustering, "EPOCHS", clustering.EPOCHS))
# Two groups that are partly right, one that is all right and one that is all wrong.
CORRECT = torch.tensor([[1.0, 0.0, 0.0, 1.0], [1.0, 1.0, 1.0, 1.0],
                        [0.0, 0.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0]])


def run(folder, cache, *flags) -> Path:
    """A quick run of train.py in this process; later flags win over the quick ones."""
    train.main(["--run", str(folder), "--cache", str(cache), *QUICK, *flags])
    return Path(folder)


def resume(folder, *flags) -> None:
    train.main(["--run", str(folder), "--resume", *flags])


def adapter(folder) -> dict:
    return load_file(Path(folder) / "adapter" / "adapter_model.safetensors")


def learned(folder) -> dict:
    """All tensors of the newest checkpoint."""
    return load_file(sorted((Path(folder) / "checkpoint").iterdir())[-1])


def read_lines(file) -> list[dict]:
    return [json.loads(line) for line in Path(file).read_text().splitlines()]


def metrics(folder, timed=False) -> list[dict]:
    """The lines of metrics.jsonl, without times unless asked for."""
    return [{name: value for name, value in line.items() if timed or not name.startswith(TIMES)}
            for line in read_lines(Path(folder) / "metrics.jsonl")]


def same(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def assert_same_run(a: Path, b: Path) -> None:
    """Bit for bit: everything learned, and every file that says what happened."""
    assert same(adapter(a), adapter(b))
    assert same(learned(a), learned(b))
    assert metrics(a) == metrics(b)
    for name in ("evaluation.json", "evaluations.jsonl", "samples.jsonl", "samples-before.jsonl",
                 "samples.md", "clustering.safetensors", "adapter/README.md"):
        assert (a / name).read_bytes() == (b / name).read_bytes(), name


def all_files(folder) -> dict:
    return {file: file.read_bytes() for file in Path(folder).rglob("*") if file.is_file()}


def send_signal_in_step(monkeypatch, number: int, which=signal.SIGINT) -> None:
    """As if somebody pressed Ctrl-C during this step."""
    original = train.train_step

    def interrupted(run, step):
        if step + 1 == number:
            os.kill(os.getpid(), which)
        return original(run, step)
    monkeypatch.setattr(train, "train_step", interrupted)


@pytest.fixture(scope="module", autouse=True)
def quick_world():
    """Fewer problems to prepare and a shorter fit of the clusters: a run takes half the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data, "COUNTDOWN_TRAINING", 60)
        patch.setattr(clustering, "EPOCHS", 4)
        yield


@pytest.fixture(scope="module")
def whole(tmp_path_factory, cache, quick_world) -> Path:
    """Five steps without interruption. No test may change this folder."""
    return run(tmp_path_factory.mktemp("runs") / "whole", cache, *WHOLE)


@pytest.fixture
def make_run(cache, tmp_path):
    def make(**settings) -> train.Run:
        values = {**SMALL, "run": str(tmp_path / "unused"), "cache": str(cache), **settings}
        return train.Run(Config(**values))
    return make


# One step, recomputed by hand.


class Watched:
    """One train_step with chosen outcomes, and what went through it."""

    def __init__(self, run: train.Run, step: int, monkeypatch, correct=CORRECT):
        self.signals = self.intrinsic = None
        self.calls = []  # of grpo.accumulate_gradient; the last one is the policy's
        self.rates, self.norms = [], []  # of each step of the optimizer
        method, gradient = run.method, grpo.accumulate_gradient
        adam, advantages_of = run.optimizer.step, grpo.group_advantages
        paid = []

        def watch_method(signals, config):
            self.signals = signals
            self.intrinsic = method(signals, config)
            return self.intrinsic

        def watch_gradient(model, prompts, rollout, advantages, config, reference=None, old=None):
            self.calls.append({"prompts": prompts, "rollout": rollout, "config": config,
                               "advantages": advantages.clone(), "reference": reference,
                               "old": old})
            return gradient(model, prompts, rollout, advantages, config, reference, old)

        def watch_adam():
            self.rates.append(run.optimizer.param_groups[0]["lr"])
            gradients = [parameter.grad for parameter in run.adapters.values()]
            self.norms.append(torch.cat([grad.flatten() for grad in gradients]).norm().item())
            return adam()

        def watch_rewards(rewards, normalise):
            paid.append(rewards.clone())
            return advantages_of(rewards, normalise)

        with monkeypatch.context() as patch:
            patch.setattr(reward, "correctness", lambda problems, responses: correct.clone())
            patch.setattr(grpo, "accumulate_gradient", watch_gradient)
            patch.setattr(grpo, "group_advantages", watch_rewards)
            patch.setattr(run.optimizer, "step", watch_adam)
            patch.setattr(run, "method", watch_method)
            self.metrics = train.train_step(run, step)
        self.rewards = paid[0]  # the first to ask is the step itself
        self.advantages = self.calls[-1]["advantages"]


def cosine(a, b) -> float:
    a, b = a.tolist(), b.tolist()
    product = sum(x * y for x, y in zip(a, b))
    return product / math.sqrt(sum(x * x for x in a)) / math.sqrt(sum(y * y for y in b))


def parts_by_hand(signals, config: Config, b: int, g: int) -> tuple[float, float]:
    """SS and SuS of one response, as the paper writes them, or with SS against the group."""
    expected = signals.z_pre[b, 0].clone()
    if config.expectation == "group" and config.reading == "algorithm":
        for other, c in enumerate(signals.correct[b].tolist()):
            if c and other != g:
                expected += signals.z_post[b, other]
    similarity = cosine(expected, signals.z_post[b, g])
    if config.reading == "algorithm":
        return 1 - similarity, abs(float(signals.correct[b, g]) - signals.success[b, 0].item())
    miss = math.dist(signals.predicted[b, g].tolist(), signals.state[b, g].tolist())
    return similarity, miss * (1 - similarity)


def usual_surprise(signals) -> float:
    """Mean SuS of all correct responses of the batch."""
    of_correct = [1 - signals.success[b, 0].item()
                  for b, row in enumerate(signals.correct.tolist()) for c in row if c]
    return statistics.mean(of_correct)


def intrinsic_by_hand(signals, config: Config, weights: tuple, b: int, g: int) -> float:
    ss, sus = parts_by_hand(signals, config, b, g)
    if config.reading == "algorithm" and config.sus_baseline == "batch":
        sus -= usual_surprise(signals)
    if config.method == "perplexity":
        length = int(signals.lengths[b, g])
        return math.exp(-sum(signals.logprobs[b, g, :length].tolist()) / length)
    weights = {"sus": weights, "ss": (weights[0], 0), "surprise": (0, weights[1])}[config.method]
    return weights[0] * ss + weights[1] * sus


def scaled_by_hand(rewards: list[list[float]], correct: list[list[float]],
                   gate: str) -> list[list[float]]:
    """--bonus scaled: what is paid to those who earn has a mean of 1."""
    earns = [[c == 1 and (gate == "correct" or sum(row) < len(row)) for c in row]
             for row in correct]
    mean = statistics.mean(max(r, 0.0) for row, who in zip(rewards, earns)
                           for r, is_paid in zip(row, who) if is_paid)
    return [[max(r, 0.0) / mean if is_paid else c for r, is_paid, c in zip(*rows)]
            for rows in zip(rewards, earns, correct)]


def rewards_by_hand(signals, config: Config, alpha: float, weights: tuple) -> list[list[float]]:
    rewards = []
    for b, row in enumerate(signals.correct.tolist()):
        mixed = 0 < sum(row) < len(row)
        rewards.append([])
        for g, c in enumerate(row):
            is_paid = {"none": True, "correct": c == 1, "mixed": c == 1 and mixed}[config.gate]
            bonus = intrinsic_by_hand(signals, config, weights, b, g) if is_paid else 0.0
            rewards[-1].append(c + alpha * bonus)
    if config.bonus == "scaled":
        return scaled_by_hand(rewards, signals.correct.tolist(), config.gate)
    return rewards


def advantages_by_hand(rewards: list[list[float]], normalise: str) -> list[list[float]]:
    advantages = []
    for row in rewards:
        scale = statistics.stdev(row) + 1e-4 if normalise == "std" else 1.0
        advantages.append([(r - statistics.mean(row)) / scale for r in row])
    return advantages


def assert_numbers(tensor, expected, tolerance=1e-5) -> None:
    torch.testing.assert_close(tensor.double(), torch.tensor(expected, dtype=torch.float64),
                               atol=tolerance, rtol=1e-4)


# (settings, step, alpha at that step)
PAID = [({}, 0, 8.0), ({}, 3, 5.0), ({}, 8, 0.0),
        ({"alpha_decay": 0.5}, 1, 6.0), ({"alpha_decay": 0.5}, 6, 0.0),
        ({"alpha_decay": 0.0}, 7, 8.0), ({"alpha": 0.3}, 4, 0.15),
        ({"gate": "mixed"}, 0, 8.0), ({"gate": "none"}, 2, 6.0),
        ({"expectation": "query"}, 0, 8.0), ({"expectation": "query", "gate": "mixed"}, 1, 7.0),
        ({"sus_baseline": "none"}, 0, 8.0), ({"lambda_ss": 0.2, "lambda_sus": 3.0}, 0, 8.0),
        ({"normalise": "std"}, 1, 7.0), ({"normalise": "std", "gate": "none"}, 0, 8.0),
        ({"reading": "equations"}, 0, 8.0), ({"reading": "equations", "gate": "none"}, 2, 6.0),
        ({"method": "ss"}, 0, 8.0), ({"method": "surprise"}, 0, 8.0),
        ({"method": "surprise", "sus_baseline": "none", "gate": "mixed"}, 0, 8.0),
        ({"method": "perplexity", "gate": "none"}, 0, 8.0), ({"bonus": "scaled"}, 3, 5.0),
        ({"bonus": "scaled", "gate": "mixed"}, 0, 8.0)]


@pytest.mark.parametrize("settings, step, alpha", PAID, ids=str)
def test_a_step_pays_what_the_paper_says(settings, step, alpha, make_run, monkeypatch):
    run = make_run(steps=8, **settings)
    with torch.no_grad():
        run.strategist.P[-1].bias.fill_(1.0)  # a P that believes in success: 1 - P is not P
    watched = Watched(run, step, monkeypatch)
    config, signals = run.config, watched.signals
    weights = config.lambda_ss, config.lambda_sus
    rewards = rewards_by_hand(signals, config, alpha, weights)
    assert_numbers(watched.rewards, rewards)
    assert_numbers(watched.advantages, advantages_by_hand(rewards, config.normalise))
    assert torch.equal(signals.correct, CORRECT)
    assert torch.equal(run.strategist.outcomes.correct[:4], CORRECT)  # what P learns from
    assert watched.metrics["alpha"] == pytest.approx(alpha)
    # With the gate `mixed`, groups without extrinsic signal keep advantages of exactly zero.
    if config.gate == "mixed":
        assert not watched.advantages[[1, 2]].any()
    # The bonus differs between responses, or these numbers would prove little.
    if alpha:
        paid = watched.rewards[0, [0, 3]]
        assert config.method == "surprise" or paid[0] != paid[1]
        assert (paid != 1).all()


def test_the_signals_of_a_step_are_those_of_the_networks(make_run, monkeypatch):
    """z_post and s' follow the reading, and P is asked about the query."""
    for reading in ("algorithm", "equations"):
        run = make_run(reading=reading)
        networks, found = run.strategist, {}

        @torch.no_grad()
        def look(signals, config, networks=networks, found=found):
            features = signals.features
            found["success"] = networks.P(networks.query_norm(features.query)).sigmoid()
            found["z_pre"] = networks.E(networks.query_norm(features.query))[:, None]
            found["z_post"] = networks.PSE(networks.response_norm(features.response))
            if signals.state is not None:
                found["z_post"] = networks.E(networks.both_norm(features.both))
                found["state"] = networks.both_norm(features.both) / math.sqrt(128)
            return torch.zeros_like(signals.correct)
        with torch.no_grad():  # E is no longer its momentum twin
            for parameter in networks.E.parameters():
                parameter.mul_(1.1)
        run.method = look
        signals = Watched(run, 0, monkeypatch).signals
        for name in ("z_pre", "z_post"):
            expected = torch.nn.functional.normalize(found.pop(name), dim=-1)
            torch.testing.assert_close(getattr(signals, name), expected)
        for name, expected in found.items():
            torch.testing.assert_close(getattr(signals, name), expected)


def test_learned_lambdas_weigh_the_bonus(make_run, monkeypatch):
    run = make_run(steps=8, learn_lambdas=True)
    weights = (0.25, 2.0)
    run.lambdas.raw.copy_(torch.tensor(weights).expm1().log())  # softplus(raw) is the weight
    watched = Watched(run, 3, monkeypatch)
    assert_numbers(watched.rewards, rewards_by_hand(watched.signals, run.config, 5.0, weights))
    assert watched.metrics["lambda_ss"] == pytest.approx(0.25)
    assert watched.metrics["lambda_sus"] == pytest.approx(2.0)


def test_learned_lambdas_move_every_second_batch_of_a_pair(make_run, monkeypatch):
    """One batch remembers what each part pulls at, the next one is asked whether it agrees."""
    monkeypatch.setattr(meta, "EVERY", 3)
    run = make_run(learn_lambdas=True)
    first, values = run.lambdas.raw.clone(), []
    for step in range(5):
        Watched(run, step, monkeypatch)
        values.append(run.lambdas.raw.clone())
    assert torch.equal(values[0], first)  # step 0 remembers
    assert not torch.equal(values[1], values[0])  # step 1 learns
    assert torch.equal(values[2], values[1])  # step 2 is neither
    assert torch.equal(values[3], values[2])  # step 3 remembers
    assert not torch.equal(values[4], values[3])


def test_the_metrics_of_a_step_by_hand(make_run, monkeypatch):
    run = make_run(normalise="std", gate="none")
    with torch.no_grad():
        run.strategist.P[-1].bias.fill_(1.0)
    watched = Watched(run, 0, monkeypatch)
    found, signals = watched.metrics, watched.signals
    rollout = watched.calls[-1]["rollout"]
    success, correct = signals.success.tolist(), CORRECT.tolist()
    responses = [(b, g) for b in range(4) for g in range(4)]
    parts = [parts_by_hand(signals, run.config, b, g) for b, g in responses]
    rewards = watched.rewards.tolist()
    brier = statistics.mean((success[b][0] - correct[b][g]) ** 2 for b, g in responses)
    paid = [a for row in advantages_by_hand(rewards, "std") for a in row]
    extrinsic = [a for row in advantages_by_hand(correct, "std") for a in row]
    tokens = sum(rollout.lengths.tolist())
    expected = {
        "step": 1, "correct": 7 / 16, "zero_signal": 0.5, "brier": brier,
        "ss": statistics.mean(ss for ss, _ in parts),
        "sus": statistics.mean(sus for _, sus in parts),
        "reward": statistics.mean(r for row in rewards for r in row),
        "bonus": statistics.mean(r for row in rewards for r in row) - 7 / 16,
        "bonus_share": 1 - statistics.correlation(paid, extrinsic) ** 2,
        "tokens": tokens, "response_length": tokens / 16,
        "entropy": -rollout.logprobs.sum().item() / tokens,
        "truncated": 1 - statistics.mean(map(float, rollout.finished.tolist())),
        "alpha": 8.0, "lambda_ss": 1.0, "lambda_sus": 0.5, "skipped": 0}
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-4)
    assert abs(expected["bonus_share"] - 0.5) > 0.01  # r^2 and 1 - r^2 differ
    stages = ("rollout", "score", "intrinsic", "advantage", "update")
    seconds = sum(found[f"seconds_{stage}"] for stage in stages)
    assert found["tokens_per_second"] == pytest.approx(tokens / seconds)


def test_plain_grpo_is_paid_for_correctness_alone(make_run, monkeypatch):
    run = make_run(method="grpo")
    watched = Watched(run, 0, monkeypatch)
    assert run.strategist is None
    assert watched.signals is None
    assert torch.equal(watched.rewards, CORRECT)
    assert_numbers(watched.advantages, advantages_by_hand(CORRECT.tolist(), "none"))
    assert not {"bonus", "ss", "alpha", "success_loss"} & watched.metrics.keys()


METHODS = [*reward.METHODS, *(f"experiments.rewards:{name}" for name in
                              ("novelty", "icm", "rnd", "count", "uniqueness", "oracle"))]


@pytest.fixture
def strategies_by_first_letter(monkeypatch):
    """The tests' base model hardly ever plays legally, and only legal plays have a strategy."""
    monkeypatch.setattr(data.Countdown, "strategy_of", lambda self, response: response[:1])


@pytest.mark.parametrize("method", METHODS)
def test_every_method_pays_its_bonus_behind_the_gate(method, make_run, monkeypatch,
                                                     strategies_by_first_letter):
    run = make_run(method=method, gate="correct", reading="equations", steps=4)
    for step in range(2):
        watched = Watched(run, step, monkeypatch)
        assert all(math.isfinite(value) for value in watched.metrics.values())
    if method == "grpo":
        return
    alpha = 8.0 * (1 - 1 / 4)
    expected = torch.where(CORRECT == 1, 1 + alpha * watched.intrinsic, 0.0)
    torch.testing.assert_close(watched.rewards, expected)
    assert watched.intrinsic[CORRECT == 1].any()
    assert watched.metrics["bonus"] != 0


def test_only_the_oracle_reads_true_strategies(make_run, monkeypatch):
    def forbidden(self, response):
        raise AssertionError("a reward looked at the true strategy")
    monkeypatch.setattr(data.Countdown, "strategy_of", forbidden)
    for method in METHODS[:-1]:
        Watched(make_run(method=method, reading="equations"), 0, monkeypatch)
    with pytest.raises(AssertionError, match="true strategy"):
        Watched(make_run(method="experiments.rewards:oracle"), 0, monkeypatch)


def test_the_reference_is_the_base_model_and_is_only_asked_for_kl(make_run, monkeypatch):
    run = make_run(method="grpo", kl=0.1)
    first = Watched(run, 0, monkeypatch)
    assert first.metrics["kl"] == pytest.approx(0, abs=1e-9)  # a fresh adapter changes nothing
    second = Watched(run, 1, monkeypatch)
    assert second.metrics["kl"] > 0
    call = second.calls[-1]
    with lora.disabled(run.model), torch.no_grad():
        base = grpo.score(run.model, call["prompts"], call["rollout"].ids, call["rollout"].mask(),
                          run.config.temperature)
    torch.testing.assert_close(call["reference"], base)
    assert not torch.allclose(call["reference"], call["rollout"].logprobs, atol=1e-4)

    run = make_run(method="grpo", kl=0.0)
    monkeypatch.setattr(grpo, "reference_logprobs", None)  # may not be called
    assert Watched(run, 0, monkeypatch).calls[-1]["reference"] is None


def test_the_kl_weight_of_a_step_falls(make_run, monkeypatch):
    run = make_run(method="grpo", kl=0.2, kl_decay=0.25, kl_form="k2", steps=8)
    config = Watched(run, 4, monkeypatch).calls[-1]["config"]
    assert config.kl == pytest.approx(0.1)
    assert config.kl_form == "k2"
    assert Watched(run, 0, monkeypatch).metrics["kl_weight"] == pytest.approx(0.2)


@pytest.mark.parametrize("epochs", [1, 3])
def test_each_epoch_is_an_update_on_the_same_responses(epochs, make_run, monkeypatch):
    watched = Watched(make_run(method="grpo", epochs=epochs), 0, monkeypatch)
    assert len(watched.calls) == len(watched.rates) == epochs
    for call in watched.calls:
        assert call["rollout"] is watched.calls[0]["rollout"]
        if epochs == 1:  # the policy has not moved since it sampled: no old policy is needed
            assert call["old"] is None
        else:
            assert torch.equal(call["old"], call["rollout"].logprobs)


def test_several_epochs_on_a_batch_clip(make_run, monkeypatch):
    monkeypatch.setattr(train, "RATE_WARMUP", 0)
    once = Watched(make_run(method="grpo", learning_rate=0.02), 0, monkeypatch)
    often = Watched(make_run(method="grpo", learning_rate=0.02, epochs=4), 0, monkeypatch)
    assert once.metrics["clip_share"] == 0
    assert often.metrics["clip_share"] > 0


@pytest.mark.parametrize("size, left", [(50.0, 1.0), (0.5, 0.5)])
def test_a_gradient_is_clipped_to_length_one(size, left, make_run, monkeypatch):
    run = make_run(method="grpo")
    original = grpo.accumulate_gradient

    def scaled(*arguments):
        metrics = original(*arguments)
        norm = torch.cat([p.grad.flatten() for p in run.adapters.values()]).norm()
        for parameter in run.adapters.values():
            parameter.grad.mul_(size / norm)
        return metrics
    monkeypatch.setattr(grpo, "accumulate_gradient", scaled)
    watched = Watched(run, 0, monkeypatch)
    assert watched.metrics["gradient_norm"] == pytest.approx(size, rel=1e-4)
    assert watched.norms == pytest.approx([left], rel=1e-4)


def test_the_learning_rate_rises_over_the_first_steps(make_run, monkeypatch):
    run = make_run(method="grpo", learning_rate=0.006, kl=0.0)
    before = {name: value.detach().clone() for name, value in run.adapters.items()}
    first = Watched(run, 0, monkeypatch)
    # The first step of AdamW moves every number by the learning rate, or not at all.
    moves = torch.cat([(value - before[name]).abs().flatten()
                       for name, value in run.adapters.items()])
    assert moves.max().item() == pytest.approx(0.001, rel=0.01)
    # While B is zero, A has no gradient: there is no weight decay, so it stays as it is.
    assert all(torch.equal(value, before[name]) for name, value in run.adapters.items()
               if "lora_A" in name)
    later = [Watched(run, step, monkeypatch) for step in (1, 4, 5, 6, 300)]
    rates = [0.001, 0.002, 0.005, 0.006, 0.006, 0.006]
    assert [watched.rates[0] for watched in (first, *later)] == pytest.approx(rates)
    assert [watched.metrics["learning_rate"] for watched in (first, *later)] == pytest.approx(rates)


def test_a_step_moves_adapters_and_nothing_of_the_base(make_run, monkeypatch):
    run = make_run()
    frozen = {name: value.clone() for name, value in run.model.named_parameters()
              if "lora_" not in name}
    Watched(run, 0, monkeypatch)
    after = {name: value for name, value in run.model.named_parameters() if "lora_" not in name}
    assert same(frozen, after)
    for name, value in run.adapters.items():
        assert "lora_A" in name or value.any(), f"{name} is still zero"
        assert value.grad is None


def test_random_numbers_follow_from_the_seed_the_use_and_the_step(make_run):
    runs = [make_run(method="grpo", seed=seed) for seed in (0, 1)]
    draws = [torch.rand(1, generator=run.generator(use, number)).item()
             for run in runs for use in ("rollout", "views") for number in (0, 1)]
    assert len(set(draws)) == 8
    assert draws[0] == torch.rand(1, generator=runs[0].generator("rollout", 0)).item()


def watch_draws(run, monkeypatch) -> list:
    """Every (use, number) that the run asks random numbers for."""
    draws, original = [], run.generator

    def watch(use, number, shared=True):
        draws.append((use, number))
        return original(use, number, shared)
    monkeypatch.setattr(run, "generator", watch)
    return draws


def test_every_step_and_every_rollout_of_the_warm_up_has_its_own_random_numbers(make_run,
                                                                                monkeypatch):
    run = make_run(strategy_warmup=17)
    draws = watch_draws(run, monkeypatch)
    train.train_step(run, 3)
    assert draws == [("epoch", 0), ("rollout", 3), ("views", 3), ("replay", 3)]
    draws.clear()
    train.warm_up(run)
    uses = ("epoch", "warm-up rollout", "warm-up views", "warm-up replay")
    assert draws == [(use, 0) for use in uses] + [("epoch", 0), *((use, 1) for use in uses[1:])]


def test_the_settings_of_a_run_reach_its_parts(make_run):
    run = make_run(method="grpo", seed=1, rank=3, eval_split="validation")
    assert run.problems == data.load("countdown-many", "train", seed=1)
    assert run.problems != data.load("countdown-many", "train", seed=0)
    assert run.eval_problems == data.load("countdown-many", "validation", 6)
    fresh = model.Transformer.from_pretrained(run.policy.base)
    assert same(run.adapters, lora.parameters(lora.apply(fresh, 3, seed=1)))


def test_responses_are_sampled_at_the_runs_temperature(make_run):
    run = make_run(method="grpo", temperature=0.5)
    _, prompts = run.batch(0)
    rollout, _ = run.roll_out(prompts, "rollout", 0)
    with torch.no_grad():
        expected = grpo.score(run.model, prompts, rollout.ids, rollout.mask(), 0.5)
    torch.testing.assert_close(rollout.logprobs, expected, atol=1e-4, rtol=1e-4)


def test_recompute_reaches_the_model(make_run):
    assert make_run(method="grpo", recompute=True).model.recompute is True
    assert make_run(method="grpo").model.recompute is False


def test_batches_cover_every_problem_once_per_epoch(make_run):
    run = make_run()
    run.problems, run.prompts = run.problems[:10], run.prompts[:10]
    chosen = []
    for step in range(5):
        problems, prompts = run.batch(step)
        assert prompts == run.policy.encode(problems)
        chosen += [next(i for i, each in enumerate(run.problems) if each is problem)
                   for problem in problems]
    assert sorted(chosen[:10]) == sorted(chosen[10:]) == list(range(10))
    assert chosen[:10] != chosen[10:]
    assert chosen[:10] != list(range(10))


# Whole runs.


def test_a_run_folder_holds_what_the_docstring_promises(whole):
    config = json.loads((whole / "config.json").read_text())
    evaluation = json.loads((whole / "evaluation.json").read_text())
    assert config["steps"] == 5
    assert config["problems"] == 4
    assert config["model"] == "tiny"
    for name in ("pass@1", "pass@5", "strategy_entropy", "cluster_entropy", "valid", "distinct"):
        low, high = evaluation["intervals"][name]
        assert low <= evaluation[name] <= high
    lines = metrics(whole, timed=True)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    for name in ("loss", "reward", "correct", "kl", "entropy", "clip_share", "zero_signal",
                 "response_length", "truncated", "gradient_norm", "learning_rate", "skipped",
                 "tokens_per_second", "seconds_rollout", "seconds_score", "seconds_intrinsic",
                 "seconds_advantage", "seconds_update", "ss", "sus", "lambda_ss", "lambda_sus",
                 "alpha", "bonus", "bonus_share", "brier", "contrastive_loss",
                 "contrastive_accuracy", "expectation_loss", "success_loss"):
        assert all(isinstance(line[name], (int, float)) for line in lines), name
    assert lines[0]["kl"] == 0
    assert lines[-1]["kl"] > 0
    assert [line["step"] for line in read_lines(whole / "evaluations.jsonl")] == [0, 2, 4, 5]
    assert read_lines(whole / "evaluations.jsonl")[-1] == evaluation
    assert (whole / "samples.md").read_text().startswith("# Samples")
    assert len(read_lines(whole / "samples.jsonl")) == 6
    assert not list(whole.rglob("*.tmp"))
    kept = sorted(file.name for file in (whole / "checkpoint").iterdir())
    assert kept == ["step-000004.safetensors", "step-000005.safetensors"]


def test_a_checkpoint_holds_everything_learned(whole):
    tensors = learned(whole)
    parts = {name.partition(".")[0] for name in tensors}
    assert parts == {"adapter", "optimizer", "strategist", "lambdas"}
    own = {name.removeprefix("adapter."): tensor for name, tensor in tensors.items()
           if name.startswith("adapter.")}
    assert same(own, adapter(whole))
    assert tensors["optimizer._extra_state"][0] == 5  # AdamW counts its steps


def test_peft_loads_the_adapter(whole, cache):
    folder = tiny.base_folder("countdown", cache)
    base = transformers.AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.arange(20).view(2, 10)
    without = base(ids).logits.detach()
    theirs = peft.PeftModel.from_pretrained(base, whole / "adapter")
    ours = lora.apply(model.Transformer.from_pretrained(folder), rank=8)
    for name, parameter in lora.parameters(ours).items():
        parameter.data.copy_(learned(whole)[f"adapter.{name}"])
    torch.testing.assert_close(ours(ids), theirs(ids).logits, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(theirs(ids).logits, without, atol=1e-2)
    loaded = lora.load(model.Transformer.from_pretrained(folder), whole / "adapter")
    assert torch.equal(loaded(ids), ours(ids))


def test_the_same_seed_gives_the_same_run_and_another_does_not(whole, cache, tmp_path):
    again = run(tmp_path / "again", cache, *WHOLE)
    assert_same_run(whole, again)
    other = run(tmp_path / "other", cache, *WHOLE, "--seed", "1", "--method", "sus")
    assert not same(adapter(whole), adapter(other))
    # The evaluation before the first step is the same whatever the seed: one ruler for all runs.
    for name in ("samples-before.jsonl", "clustering.safetensors"):
        assert (whole / name).read_bytes() == (other / name).read_bytes(), name
    assert read_lines(whole / "evaluations.jsonl")[0] == read_lines(other / "evaluations.jsonl")[0]


RESUMED = [["--learn-lambdas", "--eval-every", "2"], ["--reading", "equations"],
           ["--encoder", "ENCODER"], ["--epochs", "2", "--normalise", "std"],
           ["--method", "grpo"], ["--method", "experiments.rewards:rnd"],
           ["--method", "experiments.rewards:count"], ["--method", "experiments.rewards:oracle"]]


@pytest.mark.parametrize("flags", RESUMED, ids=" ".join)
def test_an_interrupted_run_ends_on_the_bits_of_an_undisturbed_one(flags, cache, tmp_path,
                                                                   monkeypatch, capsys,
                                                                   strategies_by_first_letter):
    monkeypatch.setattr(meta, "EVERY", 2)  # stopped while learned lambdas wait for the next batch
    if "ENCODER" in flags:
        make_sentence_encoder(tmp_path / "encoder")
        flags = ["--encoder", str(tmp_path / "encoder")]
    flags = [*flags, "--gate", "none", "--steps", "4"]
    undisturbed = run(tmp_path / "undisturbed", cache, *flags)
    with monkeypatch.context() as patch:
        send_signal_in_step(patch, 3)
        with pytest.raises(SystemExit) as caught:
            run(tmp_path / "stopped", cache, *flags)
    assert caught.value.code == 130
    stopped = f"stopped. To continue: python train.py --run {tmp_path / 'stopped'} --resume"
    assert stopped in capsys.readouterr().err
    assert [line["step"] for line in metrics(tmp_path / "stopped")] == [1, 2, 3]
    resume(tmp_path / "stopped")
    assert_same_run(undisturbed, tmp_path / "stopped")
    if "grpo" not in flags:  # the networks have learned, and what they learned was paid for
        assert metrics(undisturbed)[-1]["bonus"] != 0


def test_what_a_method_has_learned_is_in_the_checkpoint(cache, tmp_path,
                                                        strategies_by_first_letter):
    folder = run(tmp_path / "oracle", cache, "--steps", "1", "--method",
                 "experiments.rewards:oracle")
    counts = json.loads(bytes(learned(folder)["method._extra_state"].tolist()))
    assert counts
    assert all(count > 0 for count in counts.values())
    folder = run(tmp_path / "rnd", cache, "--steps", "1", "--method", "experiments.rewards:rnd")
    names = {name.split(".")[1] for name in learned(folder) if name.startswith("method.")}
    assert names == {"random", "distilled", "norm", "_extra_state"}


def test_a_run_that_lost_its_last_steps_takes_them_again(whole, tmp_path):
    """As after a crash: the last checkpoint is of step 4, the metrics go on and end in a cut."""
    folder = tmp_path / "lost"
    shutil.copytree(whole, folder)
    (folder / "checkpoint" / "step-000005.safetensors").unlink()
    (folder / "checkpoint" / "step-000005.safetensors.77.tmp").write_bytes(b"half a checkpo")
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"step": 6, "lo')
    resume(folder)
    assert_same_run(whole, folder)
    assert not list(folder.rglob("*.tmp"))


def test_a_run_without_checkpoints_starts_over(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "copy")
    shutil.rmtree(tmp_path / "copy" / "checkpoint")
    resume(tmp_path / "copy")
    assert_same_run(whole, tmp_path / "copy")


def test_resuming_a_finished_run_changes_nothing(whole):
    before = all_files(whole)
    resume(whole)
    assert before == all_files(whole)


def test_without_its_evaluations_a_run_still_goes_on(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "copy")
    (tmp_path / "copy" / "evaluations.jsonl").unlink()
    resume(tmp_path / "copy")
    again = json.loads((tmp_path / "copy" / "evaluation.json").read_text())
    assert again == json.loads((whole / "evaluation.json").read_text())


def test_the_adapter_is_as_new_as_the_checkpoint(cache, tmp_path):
    folder = run(tmp_path / "run", cache, "--steps", "1", "--gate", "none", "--alpha-decay", "0")
    before = adapter(folder)
    resume(folder, "--steps", "2")
    assert not same(before, adapter(folder))
    saved = load_file(folder / "checkpoint" / "step-000002.safetensors")
    assert all(torch.equal(tensor, saved[f"adapter.{name}"])
               for name, tensor in adapter(folder).items())


def test_real_ctrl_c_in_a_real_process(cache, tmp_path, monkeypatch):
    """The one fresh interpreter: everything else runs train.main in this process."""
    for module, name, value in REAL_WORLD:
        monkeypatch.setattr(module, name, value)
    folder = tmp_path / "stopped"
    flags = [*QUICK, "--alpha-decay", "0"]
    command = [sys.executable, "train.py", "--run", str(folder), "--cache", str(cache), *flags,
               "--steps", "2000", "--checkpoint-every", "2000"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               text=True)
    file = folder / "metrics.jsonl"
    while process.poll() is None and not (file.exists() and file.read_text().count("\n") >= 2):
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 130, errors
    assert f"To continue: python train.py --run {folder} --resume" in errors
    assert "Traceback" not in errors
    done = len(metrics(folder))
    assert 2 <= done < 2000
    assert (folder / "checkpoint" / f"step-{done:06d}.safetensors").exists()
    resume(folder, "--steps", str(done + 1))
    assert_same_run(run(tmp_path / "whole", cache, *flags, "--steps", str(done + 1)), folder)


def test_sigterm_saves_too(cache, tmp_path, monkeypatch):
    send_signal_in_step(monkeypatch, 1, signal.SIGTERM)
    with pytest.raises(SystemExit) as caught:
        run(tmp_path / "run", cache, "--steps", "4", "--method", "grpo")
    assert caught.value.code == 130
    assert checkpoint.find_checkpoints(tmp_path / "run")
    assert len(metrics(tmp_path / "run")) == 1


def test_ctrl_c_before_anything_was_written_leaves_no_folder(cache, tmp_path, monkeypatch, capsys):
    def interrupted(*arguments):
        raise KeyboardInterrupt
    monkeypatch.setattr(train, "evaluate", interrupted)
    with pytest.raises(SystemExit) as caught:
        run(tmp_path / "run", cache, "--steps", "1")
    assert caught.value.code == 130
    assert "Nothing was written" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_the_networks_learn_before_the_first_step_and_in_every_step(cache, tmp_path):
    folder = run(tmp_path / "run", cache, "--steps", "2", "--strategy-warmup", "20",
                 "--strategy-updates", "3")
    tensors = learned(folder)
    # 20 minibatches of warm-up, on rollouts of 16 and 4, and 3 in each of two steps.
    assert tensors["strategist._extra_state"][0] == 26
    assert tensors["strategist.outcomes.added"] == (2 + 2) * 4
    none = run(tmp_path / "none", cache, "--steps", "1", "--strategy-warmup", "0",
               "--strategy-updates", "0")
    assert learned(none)["strategist._extra_state"].numel() == 0
    assert learned(none)["strategist.outcomes.added"] == 4
    assert "contrastive_loss" not in metrics(none)[0]


def test_the_warm_up_shows_the_base_policys_responses(make_run, monkeypatch):
    """What the networks have seen when training begins: other responses than the first step's."""
    run = make_run(strategy_warmup=17)
    memories, updates, batches = [], [], []
    learn, batch = run.strategist.learn, run.batch

    def watch(count, generator):
        updates.append(count)
        memories.append(int(run.strategist.recent.added))
        return learn(count, generator)

    def watch_batch(step):
        batches.append(step)
        return batch(step)
    monkeypatch.setattr(run.strategist, "learn", watch)
    monkeypatch.setattr(run, "batch", watch_batch)
    monkeypatch.setattr(reward, "correctness", lambda problems, responses: CORRECT.clone())
    train.warm_up(run)
    assert updates == [16, 1]
    assert memories == [4, 8]
    assert batches == [0, 1]
    assert torch.equal(run.strategist.outcomes.correct[:8], CORRECT.repeat(2, 1))
    problems, prompts = run.batch(0)
    warm, _ = run.roll_out(prompts, "warm-up rollout", 0)
    first, _ = run.roll_out(prompts, "rollout", 0)
    assert warm.ids.shape != first.ids.shape or not torch.equal(warm.ids, first.ids)
    assert same(vars(first), vars(run.roll_out(prompts, "rollout", 0)[0]))


@pytest.mark.slow
def test_training_pays_and_costs_strategies(real_cache, tmp_path):
    """Thirty fast steps. The full story is what `python train.py` prints."""
    folder = run(tmp_path / "run", real_cache, "--steps", "30", "--problems", "32", "--samples",
                 "8", "--learning-rate", "4e-3", "--eval-problems", "100", "--eval-samples", "16",
                 "--method", "grpo", "--normalise", "std", "--kl", "0", "--data", "countdown")
    before, after = read_lines(folder / "evaluations.jsonl")
    assert after["pass@1"] > 1.15 * before["pass@1"]
    assert after["strategy_entropy"] < before["strategy_entropy"] - 0.3
    lines = metrics(folder)
    early, late = (sum(line["correct"] for line in part) for part in (lines[:5], lines[-5:]))
    assert late > 1.3 * early
    assert lines[-1]["entropy"] < lines[0]["entropy"]


def test_with_alpha_zero_sus_is_grpo_bit_for_bit(cache, tmp_path):
    bonus = run(tmp_path / "sus", cache, "--steps", "3", "--alpha", "0")
    plain = run(tmp_path / "grpo", cache, "--steps", "3", "--method", "grpo")
    some = run(tmp_path / "some", cache, "--steps", "3", "--gate", "none")
    assert same(adapter(bonus), adapter(plain))
    assert not same(adapter(some), adapter(plain))


def test_alpha_falls_over_the_run(cache, tmp_path):
    folder = run(tmp_path / "run", cache, "--steps", "4", "--alpha", "2", "--alpha-decay", "0.5")
    assert [line["alpha"] for line in metrics(folder)] == [2.0, 1.0, 0.0, 0.0]


def test_evaluate_reads_everything_from_the_run_folder(whole, tmp_path):
    evaluate.main([str(whole), "--output", str(tmp_path / "again.json")])
    again = json.loads((tmp_path / "again.json").read_text())
    assert {**again, "step": 5} == json.loads((whole / "evaluation.json").read_text())


def test_training_on_questions_of_ones_own(cache, tmp_path):
    """The tiny model cannot read, but everything between the file and the adapter works."""
    file = tmp_path / "sums.jsonl"
    sums = [{"question": f"{a}+{b}=", "answer": a + b} for a in range(9) for b in range(9)]
    file.write_text("".join(json.dumps(line) + "\n" for line in sums))
    base = str(tiny.base_folder("countdown", cache))
    folder = run(tmp_path / "run", cache, "--steps", "2", "--data", str(file), "--model", base,
                 "--max-new-tokens", "4", "--prompt", "plain")
    evaluation = json.loads((folder / "evaluation.json").read_text())
    assert evaluation["strategy_entropy"] is None
    assert evaluation["valid"] is None
    assert evaluation["cluster_entropy"] is not None
    records = read_lines(folder / "samples.jsonl")
    assert len(records) == len(data.load(str(file), "test", 6))
    assert records[0]["question"].endswith("=")
    assert len(records[0]["responses"]) == 5
    assert set(records[0]["responses"][0]) == {"text", "correct", "cluster", "place"}


def test_a_run_too_large_for_the_memory_says_so(cache, tmp_path, capsys, monkeypatch):
    def too_large(*arguments):
        return torch.empty(2 ** 62, dtype=torch.float64)
    monkeypatch.setattr(sample, "generate", too_large)
    with pytest.raises(SystemExit) as caught:
        run(tmp_path / "large", cache, "--steps", "1")
    assert caught.value.code == 2
    assert "not enough memory" in capsys.readouterr().err
    assert not (tmp_path / "large").exists()


def test_a_dry_run_writes_nothing(cache, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train.main(["--dry-run", "--cache", str(tmp_path / "cache"), "--run", "mine"])
    assert "peak, GB" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []
