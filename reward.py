"""Rewards. Each is one pure function; scoring never normalises, that is grpo.group_advantages' work."""
import torch
from torch import Tensor


def correctness(problems: list, responses: list[str]) -> Tensor:
    """c (B, G) in {0, 1}: every problem judges its own responses, which come in its row's order."""
    samples = len(responses) // len(problems)
    judged = [problems[n // samples].judge(response) for n, response in enumerate(responses)]
    return torch.tensor(judged, dtype=torch.float32).view(len(problems), samples)
