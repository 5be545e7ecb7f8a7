"""Many processes: torchrun starts them, on one machine or several, and each takes its share of every batch.

    torchrun --nproc-per-node 2 -- train.py                  two processes on this machine

The base weights are on every rank. A rank samples, judges and scores its own problems. What travels in a step: one sum of
the adapters' gradients, and the pooled features and outcomes of each response. With those every rank's strategy networks see
the whole batch and take the same steps on their own, so their gradients need not travel. Rank 0 writes the run folder and all
read it: on several machines it must lie on a disk that they share.

With one process nothing here does anything. Values other than tensors travel as JSON.
"""
import json
import os
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

TIMEOUT = timedelta(minutes=20)         # the longest that one rank may keep the others waiting: building the tiny model


def start(device: str) -> None:
    """Join the others, if torchrun started this process."""
    if int(os.environ.get("WORLD_SIZE", 1)) > 1 and not dist.is_initialized():
        gpu = torch.cuda.is_available() and device in ("auto", "cuda")
        if gpu and int(os.environ["LOCAL_RANK"]) >= torch.cuda.device_count():
            raise ValueError(f"more processes than the {torch.cuda.device_count()} GPUs of this machine: lower --nproc-per-node")
        if gpu:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("cpu:gloo,cuda:nccl" if gpu else "gloo", timeout=TIMEOUT)


def stop() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def is_lost(error: RuntimeError) -> bool:
    """Whether this error says that another process no longer answers."""
    return world() > 1 and (isinstance(error, dist.DistError) or any(word in str(error).lower() for word in ("gloo", "nccl", "connection")))


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def share(items):
    """This rank's part of a list: what the ranks have, one after the other, is the list."""
    return items[len(items) * rank() // world():len(items) * (rank() + 1) // world()]


def gather(rows: Tensor) -> Tensor:
    """Every rank's rows in the order of `share`; ranks may have different numbers of them."""
    if world() == 1:
        return rows
    counts = [torch.zeros(1, dtype=torch.long, device=rows.device) for _ in range(world())]
    dist.all_gather(counts, torch.tensor([len(rows)], device=rows.device))
    longest = int(max(counts))
    padded = torch.cat((rows, rows.new_zeros(longest - len(rows), *rows.shape[1:]))).contiguous()
    parts = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(parts, padded)
    return torch.cat([part[:int(count)] for part, count in zip(parts, counts)])


def gather_values(value) -> list:
    """Every rank's value, of anything that JSON can say."""
    if world() == 1:
        return [value]
    line = torch.frombuffer(bytearray(json.dumps(value).encode() + b"\n"), dtype=torch.uint8)
    return [json.loads(line) for line in bytes(gather(line).tolist()).split(b"\n")[:-1]]


def sum_gradients(parameters) -> None:
    """Each gradient becomes the sum of all ranks'; where no rank has any, none appears."""
    parameters = list(parameters)
    if world() == 1:
        return
    found = any(parameter.grad is not None for parameter in parameters)
    flat = torch.cat([torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in parameters]
                     + [parameters[0].new_full((1,), float(found))])
    dist.all_reduce(flat)
    if flat[-1] > 0:
        for parameter, part in zip(parameters, flat[:-1].split([p.numel() for p in parameters])):
            parameter.grad = part.view_as(parameter).clone()


def total(values: dict[str, float]) -> dict[str, float]:
    """The sum over ranks under each name."""
    every = gather_values(values)
    return {name: sum(each[name] for each in every) for name in values}


@contextmanager
def leader_first():
    """Rank 0 goes through the block alone, then the others: what it builds or fetches, they find."""
    if rank() and world() > 1:
        dist.barrier()
    yield
    if not rank() and world() > 1:
        dist.barrier()
