"""What each of two processes must find true; test_parallel.py starts them with torchrun."""
import sys
from dataclasses import replace

import torch
from conftest import adapted

import evaluate
import grpo
import lora
import parallel
import sample
import train
from flags import parse
from knobs import Config

PROMPTS = [[3, 4, 5, 6], [7, 8], [9, 10, 11]]                # three problems: the ranks' shares differ in size
ADVANTAGES = torch.tensor([[1.0, -0.5, -0.5, 0.0], [0.0, 0.0, 0.0, 0.0], [-1.0, 2.0, 0.5, -1.5]])


def flat_gradient(model):
    return torch.cat([parameter.grad.flatten() for parameter in lora.parameters(model).values()])


def gradients_of_one():
    """What one process makes of some rollouts, for two to compare with."""
    for normalise in ("token", "sequence", "constant"):
        for kl in (0.0, 0.1):
            model = adapted()
            rollout = sample.generate(model, PROMPTS, 4, 12, 0.9, (1, 2), torch.Generator().manual_seed(4))
            settings = grpo.LossSettings(0.9, kl, normalise=normalise, max_new_tokens=12, micro_batch=1)
            reference = grpo.reference_logprobs(model, PROMPTS, rollout, settings)
            metrics = grpo.accumulate_gradient(model, PROMPTS, rollout, ADVANTAGES, settings, reference)
            yield model, rollout, settings, reference, metrics, flat_gradient(model)


def share_of(rollout):
    mine = parallel.share(range(len(PROMPTS)))
    rows = [4 * problem + n for problem in mine for n in range(4)]
    return mine, rows, sample.Rollout(*(value[rows] for value in vars(rollout).values()))


def same_on_all_ranks(tensor):
    every = parallel.gather(tensor.detach().flatten()[None])
    return len(every) == 2 and torch.equal(every[0], every[1])


def main(folder, cache):
    alone = list(gradients_of_one())
    policy = evaluate.open_policy("tiny", "countdown", cache, "cpu", "float32")
    problems = evaluate.data.load("countdown", "test", 70)
    expected = evaluate.evaluate(policy, problems, 4, 1.0, 16)
    few = evaluate.evaluate(policy, problems[:5], 4, 1.0, 16)

    parallel.start("cpu")
    assert parallel.world() == 2
    for model, rollout, settings, reference, metrics, gradient in alone:
        mine, rows, part = share_of(rollout)
        model.zero_grad()
        found = grpo.accumulate_gradient(model, [PROMPTS[i] for i in mine], part, ADVANTAGES[list(mine)], settings, reference[rows])
        torch.testing.assert_close(flat_gradient(model), gradient, atol=1e-6, rtol=1e-5)
        assert all(abs(found[name] - metrics[name]) < 1e-6 for name in metrics), (found, metrics)
    model.zero_grad()                                       # nowhere an advantage: no gradient, rather than zeros
    grpo.accumulate_gradient(model, [PROMPTS[i] for i in mine], part, torch.zeros(len(mine), 4), replace(settings, kl=0.0))
    assert all(parameter.grad is None for parameter in model.parameters())

    for some, alone in ((problems, expected), (problems[:5], few)):    # of one batch the second rank has nothing to do
        measured = evaluate.evaluate(policy, some, 4, 1.0, 16)
        assert measured.metrics == alone.metrics
        for ours, theirs in zip(measured.samples, alone.samples, strict=True):
            for a, b in zip(ours["responses"], theirs["responses"], strict=True):
                torch.testing.assert_close(torch.tensor(a.pop("place")), torch.tensor(b.pop("place")), atol=1e-3, rtol=1e-2)
            assert ours == theirs
    assert parallel.gather_values({"rank": parallel.rank(), "text": "a\nb\u00e9"})[1] == {"rank": 1, "text": "a\nb\u00e9"}

    config, _ = parse(Config, "", ["--run", folder, "--cache", cache, "--problems", "5", "--samples", "4", "--eval-problems", "4",
                                   "--eval-samples", "2", "--train-problems", "40", "--strategy-warmup", "8", "--recent", "20",
                                   "--buffer", "30", "--strategy-batch", "4", "--learn-lambdas", "--lambda-every", "3",
                                   "--scale-intrinsic", "--kl", "0.01", "--device", "cpu"])
    run = train.start(config)
    train.warm_up(run)
    for _ in range(20):
        train.train_step(run)
    assert all(same_on_all_ranks(adapter) for adapter in run.adapters.values())
    tensors, values = run.strategist.state()
    assert all(same_on_all_ranks(tensor.float()) for tensor in tensors.values())
    assert same_on_all_ranks(run.weights.raw) and run.weights.raw[0] != train.meta.LearnedWeights(1.0, 0.25, 1.0).raw[0]
    every = parallel.gather_values(values)
    assert every[0] == every[1]
    print(f"rank {parallel.rank()} agrees")
    parallel.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
