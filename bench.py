"""Speed: the fast scorer beside the naive one, and what SuS adds to plain GRPO.

    python bench.py

1. One update on the default Countdown batch (32 problems x 8 responses, the tiny model's shape with random weights), by
   grpo.score and by grpo.score_naive in turns, and the same with prompts of 150 tokens: ratio of the times with its
   spread, and the difference of the two gradients.
2. Whole steps with `--method sus` and `--method grpo` in turns on the tiny model: ratio of the times.
3. Random weights in the shape of a 135 million parameter model (2 problems x 8 responses x 64 tokens, KL penalty on): the
   time that SuS itself takes in a step, and peak memory with and without it, each in a process of its own.

Ratios are medians of interleaved rounds, in parentheses the smallest and the largest. About five minutes on two cores.
"""
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

import encoder
import grpo
import lora
import sample
import tiny
import train
from model import ModelConfig, Transformer

PROBLEMS, SAMPLES, NEW_TOKENS, ROUNDS = 32, 8, 16, 5


def update(model: Transformer, prompts: list, rollout: sample.Rollout, advantages: torch.Tensor) -> tuple[float, torch.Tensor]:
    """-> (seconds, gradient) of one accumulated update."""
    model.zero_grad()
    begin = time.perf_counter()
    grpo.accumulate_gradient(model, prompts, rollout, advantages, grpo.LossSettings(max_new_tokens=NEW_TOKENS))
    seconds = time.perf_counter() - begin
    return seconds, torch.cat([parameter.grad.flatten() for parameter in lora.parameters(model).values()])


def compare(prompt_length: int) -> None:
    generator = torch.Generator().manual_seed(0)
    model = Transformer(ModelConfig.from_dict({**tiny.CONFIG, "max_position_embeddings": 1024}))
    tiny.initialise(model, generator)
    lora.apply(model)
    prompts = torch.randint(40, (PROBLEMS, prompt_length), generator=generator).tolist()
    rollout = sample.generate(model, prompts, SAMPLES, NEW_TOKENS, 1.0, (), generator)
    advantages = torch.randn(PROBLEMS, SAMPLES, generator=generator)
    fast_score, ratios = grpo.score, []
    for round in range(ROUNDS + 1):                         # the first round warms up
        fast, gradient = update(model, prompts, rollout, advantages)
        grpo.score = grpo.score_naive
        naive, naive_gradient = update(model, prompts, rollout, advantages)
        grpo.score = fast_score
        if round:
            ratios.append(naive / fast)
    difference = ((gradient - naive_gradient).norm() / naive_gradient.norm()).item()
    print(f"prompts of {prompt_length:3d} tokens: the naive update takes {sorted(ratios)[ROUNDS // 2]:.1f} times as long "
          f"({min(ratios):.1f} to {max(ratios):.1f}); relative difference of the gradients {difference:.0e}")


LARGE = {**tiny.CONFIG, "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
         "num_attention_heads": 9, "num_key_value_heads": 3}
LARGE_FLAGS = ["--problems", "2", "--max-new-tokens", "64", "--kl", "0.05", "--dtype", "float32", "--strategy-warmup", "0"]


def make_large(folder: Path) -> None:
    model = Transformer(ModelConfig.from_dict(LARGE))
    tiny.initialise(model, torch.Generator().manual_seed(0))
    tiny.make_tokenizer().save_pretrained(folder)
    model.save_pretrained(folder)


def make_run(method: str, flags: list[str]) -> train.Run:
    """A run as train.py would start it; nothing is written until it takes a checkpoint, which it does not."""
    config, _ = train.parse(train.Config, "", ["--run", "unused", "--device", "cpu", "--method", method, *flags])
    return train.Run(config)


def overhead(name: str, flags: list[str], rounds: int) -> None:
    """Steps of SuS and of plain GRPO in turns -> how much longer SuS takes. Its alpha is 0, so that both policies stay the
    same and do the same work: a policy that keeps its strategies has fewer groups without signal to skip."""
    runs = {method: make_run(method, ["--alpha", "0", *flags]) for method in ("sus", "grpo")}
    ratios = []
    for round in range(rounds + 1):
        seconds = {}
        for method, run in runs.items():
            begin = time.perf_counter()
            train.train_step(run)
            seconds[method] = time.perf_counter() - begin
        runs = dict(reversed(runs.items()))                 # neither always comes first
        if round:
            ratios.append(seconds["sus"] / seconds["grpo"])
    print(f"{name}: a step of SuS takes {sorted(ratios)[rounds // 2]:.3f} times as long as one of GRPO "
          f"({min(ratios):.3f} to {max(ratios):.3f})")


def share(name: str, flags: list[str]) -> None:
    """What SuS itself adds to a step: pooling the tapped states, signals and one minibatch. On a large model this is far
    below the noise of two whole steps compared, so it is timed alone."""
    run = make_run("sus", ["--alpha", "0", *flags])
    begin = time.perf_counter()
    train.train_step(run)
    step, generator = time.perf_counter() - begin, torch.Generator().manual_seed(0)
    prompts = [run.prompts[i] for i in run.batch(0)]
    N, T, D = len(prompts) * SAMPLES, run.config.max_new_tokens, run.model.config.hidden_size
    tapped = [torch.randn(len(prompts), max(map(len, prompts)), D), torch.randn(N, T - 1, D)]
    rollout = sample.Rollout(torch.zeros(N, T, dtype=torch.long), torch.full((N,), T), torch.zeros(N, T), torch.ones(N).bool())
    correct, seconds = torch.zeros(len(prompts), SAMPLES), []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        found = encoder.base_features(run.model, prompts, rollout, 1, len(prompts), generator, tapped)
        run.strategist.observe(found, correct)
        run.strategist.signals(found, correct, rollout, [None] * N)
        run.strategist.update(1, generator)
        seconds.append(time.perf_counter() - begin)
    print(f"{name}: SuS itself takes {1000 * sorted(seconds)[ROUNDS // 2]:.0f} ms of a step of {step:.1f} s")


def peak_memory(method: str, folder: str) -> int:
    """Bytes, of three steps in a process of its own."""
    command = [sys.executable, __file__, "--memory", method, folder]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def main() -> None:
    if sys.argv[1:2] == ["--memory"]:
        run = make_run(sys.argv[2], ["--model", sys.argv[3], *LARGE_FLAGS])
        for _ in range(3):
            train.train_step(run)
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
        return
    for prompt_length in (14, 150):
        compare(prompt_length)
    overhead("tiny model", [], 30)
    with tempfile.TemporaryDirectory() as folder:
        make_large(Path(folder))
        share("135 M shape", ["--model", folder, *LARGE_FLAGS])
        with_sus, without = peak_memory("sus", folder), peak_memory("grpo", folder)
        print(f"135 M shape: peak memory {with_sus / 2**30:.2f} GB with SuS, {without / 2**30:.2f} GB without: "
              f"{with_sus / without:.3f} times")


if __name__ == "__main__":
    main()
