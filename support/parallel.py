"""Many processes: torchrun starts them, on one machine or several; each takes a share of a batch.

    torchrun --nproc-per-node 2 -- train.py                  two processes on this machine

Every rank has the base weights and samples, judges and scores its own problems. Per step the ranks
exchange one sum of the adapters' gradients, and the features and outcomes of each response: with
those, every rank's strategy networks see the whole batch and take the same steps. Rank 0 writes the
run folder and all ranks read it. With one process nothing is exchanged.
"""
import atexit
import json
import os
import sys
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

TIMEOUT = timedelta(minutes=20)  # the longest wait for another rank: building the tiny model


def start(device: str) -> None:
    """Join the other processes, if torchrun started this one."""
    if int(os.environ.get("WORLD_SIZE", 1)) < 2 or dist.is_initialized():
        return
    gpu = torch.cuda.is_available() and device in ("auto", "cuda")
    if gpu:
        local, count = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
        if local >= count:
            raise ValueError(f"this machine has {count} GPUs: lower --nproc-per-node")
        torch.cuda.set_device(local)
    dist.init_process_group("cpu:gloo,cuda:nccl" if gpu else "gloo", timeout=TIMEOUT)
    atexit.register(dist.destroy_process_group)


def is_lost(error: RuntimeError) -> bool:
    """Whether this error says that another process no longer answers."""
    network = any(word in str(error).lower() for word in ("gloo", "nccl", "connection"))
    return world() > 1 and (network or isinstance(error, dist.DistError))


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def is_leader() -> bool:
    """Rank 0 writes files and shows progress."""
    return rank() == 0


def say(message: str) -> None:
    """A line for whoever started the program, from rank 0 alone."""
    if is_leader():
        print(message, file=sys.stderr)


def share(items):
    """This rank's part of a list; the parts of all ranks in order are the whole list."""
    return items[len(items) * rank() // world():len(items) * (rank() + 1) // world()]


def gather(rows: Tensor) -> Tensor:
    """Every rank's rows in the order of `share`; ranks may have different numbers of them."""
    if world() == 1:
        return rows
    counts = [torch.zeros(1, dtype=torch.long, device=rows.device) for _ in range(world())]
    dist.all_gather(counts, torch.tensor([len(rows)], device=rows.device))
    padding = rows.new_zeros(int(max(counts)) - len(rows), *rows.shape[1:])
    padded = torch.cat((rows, padding)).contiguous()
    parts = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(parts, padded)
    return torch.cat([part[:int(count)] for part, count in zip(parts, counts)])


def gather_values(value) -> list:
    """Every rank's value, of anything that JSON can hold."""
    if world() == 1:
        return [value]
    line = torch.frombuffer(bytearray(json.dumps(value).encode() + b"\n"), dtype=torch.uint8)
    return [json.loads(line) for line in bytes(gather(line).tolist()).split(b"\n")[:-1]]


def gather_lists(values: list) -> list:
    """Every rank's list, one after the other."""
    return [value for part in gather_values(values) for value in part]


def sum_gradients(parameters: list[Tensor]) -> None:
    """Each gradient becomes the sum over all ranks; where no rank has any, none appears."""
    if world() == 1:
        return
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    has_any = torch.tensor([any(p.grad is not None for p in parameters)]).to(gradients[0])
    flat = torch.cat([*(gradient.flatten() for gradient in gradients), has_any])
    dist.all_reduce(flat)
    if flat[-1] > 0:
        parts = flat[:-1].split([parameter.numel() for parameter in parameters])
        for parameter, part in zip(parameters, parts):
            parameter.grad = part.view_as(parameter).clone()


@contextmanager
def leader_first():
    """Rank 0 goes through the block first: the others find what it builds or downloads."""
    if not is_leader():
        dist.barrier()
    yield
    if is_leader() and world() > 1:
        dist.barrier()
