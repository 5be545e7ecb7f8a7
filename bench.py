"""Speed: what the shared prefix and the chunked projection save, measured beside the naive version.

    python bench.py

One update on the default Countdown batch (32 problems x 8 responses, the tiny model's shape with random
weights), by grpo.score and by grpo.score_naive in turns, and the same with prompts of 150 tokens. Prints the
ratio of the times with its spread, and the largest difference between the two gradients.
"""
import time

import torch

import grpo
import lora
import sample
import tiny
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


if __name__ == "__main__":
    for prompt_length in (14, 150):
        compare(prompt_length)
