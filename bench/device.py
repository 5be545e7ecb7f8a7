"""How near this code comes to what a device can do, in numbers that can be compared.

    python -m bench.device                  the paper's shape, Qwen2.5-1.5B, with random weights
    python -m bench.device --model tiny --prompt-tokens 64      a quick look

Prints milliseconds and the shares of memory bandwidth and matmul rate that sampling and the update
reach, and one JSON line: please paste it into an issue, whatever it says.
"""
import json
import platform
import time
from dataclasses import asdict, dataclass

import torch

import grpo
import lora
import sample
from model import Transformer
from support import budget, hub
from support.config import Config, flag, guard, parse
from support.fast import accelerate


@dataclass(frozen=True)
class Request:
    device: str = flag("auto", "where to compute", choices=("auto", "cpu", "cuda", "mps"))
    model: str = flag("Qwen/Qwen2.5-1.5B", "shape of the model: a name, a folder or a hub id")
    problems: int = flag(8, "prompts", low=1)
    samples: int = flag(8, "responses to each", low=1)
    prompt_tokens: int = flag(128, "tokens of each prompt", low=1)
    new_tokens: int = flag(64, "tokens of each response", low=2)
    micro_batch: int = flag(1, "prompts that go through the update at a time", low=1)


def seconds(device: str, work, repeats: int = 1) -> float:
    """Of one call, after one that does not count."""
    def wait() -> None:
        if device != "cpu":
            getattr(torch, device).synchronize()
    work()
    wait()
    start = time.perf_counter()
    for _ in range(repeats):
        work()
    wait()
    return (time.perf_counter() - start) / repeats


def make_model(request: Request, device: str, dtype: torch.dtype) -> Transformer:
    """Random weights, with fresh adapters."""
    with torch.device("meta"):
        model = Transformer(budget.find_shape(request.model))
    model = model.to_empty(device=device).to(dtype)
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.02)
        parameter.requires_grad_(False)
    return accelerate(lora.apply(model))


def device_rates(device: str, dtype: torch.dtype) -> tuple[float, float]:
    """-> bytes per second of reading memory, operations per second of a large product."""
    size = 1024 if device == "cpu" else 4096
    long = torch.ones(2 ** 26 if device == "cpu" else 2 ** 28, device=device)
    square = torch.randn(size, size, device=device).to(dtype)
    bandwidth = long.numel() * 4 / seconds(device, lambda: long.sum(), 5)
    return bandwidth, 2 * size ** 3 / seconds(device, lambda: square @ square, 10)


def measure(request: Request) -> dict:
    device = hub.find_device(request.device)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    shape = budget.find_shape(request.model)
    rows, new = request.problems * request.samples, request.new_tokens
    if request.prompt_tokens + new > shape.context:
        raise ValueError(f"{request.model} has a context of {shape.context} tokens: lower "
                         "--prompt-tokens or --new-tokens")
    model, (bandwidth, rate) = make_model(request, device, dtype), device_rates(device, dtype)
    prompts = [[1] * request.prompt_tokens] * request.problems
    config = Config(samples=request.samples, micro_batch=request.micro_batch, kl=0.0)

    def generate() -> sample.Rollout:  # to the last token, since no token ends a response
        return sample.generate(model, prompts, request.samples, new, 1.0, (-1,), sample.seeded(0))
    rollout = generate()
    advantages = torch.ones(request.problems, request.samples, device=device)

    def update() -> None:
        grpo.accumulate_gradient(model, prompts, rollout, advantages, config)
        model.zero_grad()
    sampling, updating = seconds(device, generate), seconds(device, update)
    weights = sum(parameter.numel() for name, parameter in model.named_parameters()
                  if "lora_" not in name)
    kept = shape.layers * 2 * shape.kv_heads * shape.head_dim  # numbers of a token's keys, values
    read = weights + kept * (request.problems * request.prompt_tokens + rows * new / 2)
    tokens = request.problems * request.prompt_tokens + rows * new
    name = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or device
    return {"device": device, "name": name, "torch": torch.__version__, "dtype": str(dtype),
            **{key: value for key, value in asdict(request).items() if key != "device"},
            "tokens_per_second": rows * new / sampling,
            "milliseconds_per_token": 1000 * sampling / new,
            "sampling_of_bandwidth": read * dtype.itemsize * new / bandwidth / sampling,
            "update_seconds": updating,
            "update_of_matmul_rate": 4 * weights * tokens / rate / updating,
            "bandwidth_gigabytes": bandwidth / 1e9, "matmul_teraflops": rate / 1e12}


def main(argv: list[str] | None = None) -> None:
    request, _ = parse(Request, __doc__, argv)
    with guard():
        found = {name: round(value, 4) if type(value) is float else value
                 for name, value in measure(request).items()}
        for name, value in found.items():
            print(f"{name:26} {value}")
        print(json.dumps(found))


if __name__ == "__main__":
    main()
