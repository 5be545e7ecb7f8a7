"""What each of two processes must find true; test_parallel.py starts them with torchrun."""
import json
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file

import data
import evaluate
import grpo
import lora
import reward
import sample
import strategy
import train
from support import clustering, meta, parallel, tiny
from support.config import Config
from support.fast import accelerate
from tests.conftest import adapted
from tests.test_train import CORRECT, QUICK, SMALL

PROMPTS = [[3, 4, 5, 6], [7, 8], [9, 10, 11]]  # three problems: the ranks' shares differ in size
ADVANTAGES = torch.tensor([[1.0, -0.5, -0.5, 0.0], [0.0, 0.0, 0.0, 0.0], [-1.0, 2.0, 0.5, -1.5]])


def flat_gradient(model) -> torch.Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in lora.parameters(model).values()])


def share_of(rollout: sample.Rollout, samples: int = 4) -> sample.Rollout:
    """This rank's rows."""
    rows = parallel.share(list(range(len(rollout.ids) // samples)))
    rows = [samples * row + n for row in rows for n in range(samples)]
    return sample.Rollout(*(value[rows] for value in vars(rollout).values()))


def same_on_all_ranks(tensor: torch.Tensor) -> bool:
    every = parallel.gather(tensor.detach().flatten()[None])
    return len(every) == 2 and torch.equal(every[0], every[1])


class Gradients:
    """What one process makes of some rollouts, for two to compare with."""

    def __init__(self, kl: float, epochs: int):
        self.model = adapted()
        generator = torch.Generator().manual_seed(4)
        self.rollout = sample.generate(self.model, PROMPTS, 4, 12, 0.9, (1, 2), generator)
        self.config = Config(temperature=0.9, kl=kl, micro_batch=1)
        self.reference = grpo.reference_logprobs(self.model, PROMPTS, self.rollout, self.config)
        self.old = self.rollout.logprobs - 0.3 if epochs > 1 else None
        self.metrics = grpo.accumulate_gradient(self.model, PROMPTS, self.rollout, ADVANTAGES,
                                                self.config, self.reference, self.old)
        self.gradient = flat_gradient(self.model)

    def check(self) -> None:
        """Called when there are two processes."""
        mine = list(parallel.share(range(3)))
        rows = [4 * problem + n for problem in mine for n in range(4)]
        old = None if self.old is None else self.old[rows]
        self.model.zero_grad()
        found = grpo.accumulate_gradient(self.model, [PROMPTS[i] for i in mine],
                                         share_of(self.rollout), ADVANTAGES[mine], self.config,
                                         self.reference[rows], old)
        torch.testing.assert_close(flat_gradient(self.model), self.gradient, atol=1e-6, rtol=1e-5)
        assert same_on_all_ranks(flat_gradient(self.model))
        assert found.keys() == self.metrics.keys()
        assert all(abs(found[name] - self.metrics[name]) < 1e-6 for name in found)

    def check_nothing(self) -> None:
        """Nowhere an advantage: no gradient, rather than zeros."""
        mine = list(parallel.share(range(3)))
        self.model.zero_grad()
        grpo.accumulate_gradient(self.model, [PROMPTS[i] for i in mine], share_of(self.rollout),
                                 torch.zeros(len(mine), 4), replace(self.config, kl=0.0))
        assert all(parameter.grad is None for parameter in self.model.parameters())


class Evaluations:
    """One batch leaves the second rank without work; three are two and one."""

    def __init__(self, cache: str):
        config = Config(device="cpu", cache=cache, eval_samples=4, max_new_tokens=16)
        self.policy = sample.open_policy(tiny.find_base(config), config)
        accelerate(self.policy.model)
        problems = data.load("countdown", "test", 70)
        self.problems = [problems, problems[:5]]
        self.alone = [self.evaluate(some) for some in self.problems]

    def evaluate(self, problems: list) -> evaluate.Evaluation:
        return evaluate.evaluate(self.policy, problems, self.policy.config, seed=2)

    def check(self) -> None:
        for problems, alone in zip(self.problems, self.alone):
            found = self.evaluate(problems)
            assert found.metrics == alone.metrics
            for ours, theirs in zip(found.records, alone.records, strict=True):
                for a, b in zip(ours["responses"], theirs["responses"], strict=True):
                    places = torch.tensor([a.pop("place"), b.pop("place")])
                    torch.testing.assert_close(places[0], places[1], atol=1e-3, rtol=1e-2)
                assert ours == theirs


def check_exchange() -> None:
    rank = parallel.rank()
    assert parallel.world() == 2
    assert parallel.is_leader() == (rank == 0)
    assert parallel.share(list("abc")) == (["a"], ["b", "c"])[rank]
    rows = torch.full((rank + 1, 2), float(rank))
    assert parallel.gather(rows).tolist() == [[0.0, 0.0], [1.0, 1.0], [1.0, 1.0]]
    assert parallel.gather(rows[:rank]).tolist() == [[1.0, 1.0]]  # nothing from rank 0
    value = {"rank": rank, "text": "a\nb\u00e9"}
    assert parallel.gather_values(value)[1] == {"rank": 1, "text": "a\nb\u00e9"}
    assert parallel.gather_lists([rank] * rank + ["end"]) == ["end", 1, "end"]


class Networks:
    """The strategy networks see the whole batch, whoever sampled it."""

    def __init__(self, cache: str):
        self.run = train.Run(Config(**SMALL, run="unused", cache=cache))
        self.problems, self.prompts = self.run.batch(0)
        self.rollout, self.responses = self.run.roll_out(self.prompts, "rollout", 0)
        self.features = self.run.encoder.encode(self.problems, self.prompts, self.rollout,
                                                self.responses, torch.Generator().manual_seed(0))
        self.alone, self.signals = self.observe(self.features, CORRECT, self.rollout)
        _, self.surprise = reward.paid_parts(self.signals, self.run.config)
        per_response = {"correct": CORRECT, "reward": 2 * CORRECT, "ss": CORRECT + 1}
        self.summary = train.summarise(per_response, self.rollout, self.run.config)

    def observe(self, features, correct, rollout):
        networks = strategy.Strategist(features.query.shape[-1], self.run.config)
        networks.observe(features, correct)
        signals = networks.signals(features, correct, rollout, self.problems, self.responses)
        networks.learn(3, torch.Generator().manual_seed(1))
        return networks, signals

    def check(self) -> None:
        mine = list(parallel.share(range(4)))
        features = strategy.Features(*(part[mine] for part in vars(self.features).values()
                                       if part is not None))
        rollout = share_of(self.rollout)
        networks, signals = self.observe(features, CORRECT[mine], rollout)
        for name, tensor in self.alone.state_dict().items():
            assert torch.equal(networks.state_dict()[name], tensor), name
        _, surprise = reward.paid_parts(signals, self.run.config)
        torch.testing.assert_close(surprise, self.surprise[mine], atol=1e-6, rtol=0)
        torch.testing.assert_close(signals.success, self.signals.success[mine])
        per_response = {"correct": CORRECT[mine], "reward": 2 * CORRECT[mine],
                        "ss": CORRECT[mine] + 1}
        found = train.summarise(per_response, rollout, self.run.config)
        assert found.keys() == self.summary.keys()
        assert all(abs(found[name] - self.summary[name]) < 1e-5 for name in found)
        self.check_shares()

    def check_shares(self) -> None:
        """Every problem is somebody's; what is drawn for a rank is its own."""
        run = self.run
        every = parallel.gather_lists([problem.prompt for problem in run.batch(0)[0]])
        assert every == [problem.prompt for problem in self.problems]
        shared = torch.rand(3, generator=run.generator("replay", 5))
        own = torch.rand(3, generator=run.generator("rollout", 5, shared=False))
        assert same_on_all_ranks(shared)
        assert not same_on_all_ranks(own)


# Whole runs.


def train_on(folder: Path, cache: str, *flags: str) -> train.Run:
    """A run of train.py on both ranks -> this rank's part of it."""
    opened, make = [], train.Run

    def keep(config):
        opened.append(make(config))
        return opened[0]
    train.Run = keep
    try:
        train.main(["--run", str(folder), "--cache", cache, *QUICK, *flags])
    finally:
        train.Run = make
    return opened[0]


def check_same_state(run: train.Run) -> None:
    learned = run.learned()
    for name, tensor in learned.tensors().items():
        assert same_on_all_ranks(tensor.float()), name
    assert {"strategist"} <= learned.modules.keys()


def check_runs(folder: Path, cache: str) -> None:
    """All ranks learn the same; interrupted and resumed by two is the same as undisturbed."""
    flags = ["--steps", "4", "--checkpoint-every", "2", "--learn-lambdas", "--gate", "none"]
    run = train_on(folder / "whole", cache, *flags)
    check_same_state(run)
    assert run.lambdas.raw[0] != meta.LearnedLambdas(run.config, 1).raw[0]
    evaluate.main([str(folder / "whole"), "--output", str(folder / "again.json")])
    for method in ("rnd", "oracle"):
        name = f"experiments.rewards:{method}"
        run = train_on(folder / method, cache, "--steps", "2", "--method", name, "--gate", "none")
        check_same_state(run)

    original = train.train_step

    def interrupted(run, step):
        if step == 2 and parallel.rank() == 1:  # one rank is told, all must stop
            os.kill(os.getpid(), signal.SIGTERM)
        return original(run, step)
    train.train_step = interrupted
    try:
        train_on(folder / "part", cache, *flags)
        raise AssertionError("it was not interrupted")
    except SystemExit as end:
        assert end.code == 130
    train.train_step = original
    train.main(["--run", str(folder / "part"), "--resume"])
    names = ("whole", "part")
    checkpoints = [load_file(folder / name / "checkpoint" / "step-000004.safetensors")
                   for name in names]
    assert checkpoints[0].keys() == checkpoints[1].keys()
    for name, tensor in checkpoints[0].items():
        assert torch.equal(tensor, checkpoints[1][name]), name
    lines = [(folder / name / "metrics.jsonl").read_text().splitlines() for name in names]
    correct = [[json.loads(line)["correct"] for line in each] for each in lines]
    assert len(correct[0]) == 4
    assert correct[0] == correct[1]


def check_loss(folder: Path, cache: str) -> None:
    """Rank 1 goes away in the third step: rank 0 says so, and does not wait for ever."""
    original = train.train_step

    def killed(run, step):
        if step == 2 and parallel.rank() == 1:
            os._exit(0)
        return original(run, step)
    train.train_step = killed
    try:
        train_on(folder / "lost", cache, "--steps", "9", "--checkpoint-every", "1", "--alpha-decay",
                 "0")
    except SystemExit as end:
        assert end.code == 2
        print("rank 0 has noticed")


def main(folder: str, cache: str) -> None:
    data.COUNTDOWN_TRAINING = 60  # as quick_world does
    # The tests' base model is hardly ever right, and makes hardly any legal play.
    data.Countdown.judge = lambda self, response: float(sum(response.encode()) % 2)
    data.Countdown.strategy_of = lambda self, response: response[:1]
    clustering.EPOCHS = 4
    meta.EVERY = 2
    gradients = [Gradients(kl, epochs) for kl in (0.0, 0.1) for epochs in (1, 2)]
    evaluations, networks = Evaluations(cache), Networks(cache)
    assert parallel.world() == 1
    parallel.start("cpu")
    check_exchange()
    for each in gradients:
        each.check()
    gradients[0].check_nothing()
    evaluations.check()
    networks.check()
    check_runs(Path(folder), cache)
    print(f"rank {parallel.rank()} agrees", flush=True)
    check_loss(Path(folder), cache)


if __name__ == "__main__":
    main(*sys.argv[1:])
