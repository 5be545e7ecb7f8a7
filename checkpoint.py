"""Checkpoints: one safetensors file with all that a run has learned, renamed into place.

    adapter.*, optimizer.*      the policy and its AdamW state
    strategy.*                  the strategy networks, their optimizer, the replay buffer, centres and statistics
    weights.*                   learned lambdas and a remembered gradient
    the header                  the step, and plain values as JSON

Random numbers need no place here: they are drawn from (seed, step). The last two checkpoints are kept.
"""
import json
from pathlib import Path

import torch

from files import pack_optimizer, read_lines, read_metadata, read_tensors, unpack_optimizer, write_lines, write_tensors


def find(folder: Path) -> list[Path]:
    """Oldest first."""
    return sorted((folder / "checkpoint").glob("step-*.safetensors"))


def save(run) -> None:
    tensors, values = {f"adapter.{name}": adapter for name, adapter in run.adapters.items()}, {}
    tensors |= pack_optimizer("optimizer", run.adapters, run.optimizer)
    if run.strategist:
        strategy_tensors, values = run.strategist.state()
        tensors |= {f"strategy.{name}": tensor for name, tensor in strategy_tensors.items()}
    if run.weights:
        tensors["weights.raw"] = run.weights.raw
        tensors |= {} if run.weights.pending is None else {"weights.pending": run.weights.pending}
    write_tensors(run.folder / "checkpoint" / f"step-{run.step:06d}.safetensors", tensors,
                  {"step": str(run.step), "values": json.dumps(values)})
    for old in find(run.folder)[:-2]:
        old.unlink()


def load(run) -> None:
    """Go back to the last checkpoint, if there is one, and forget the metrics of later steps: they will come again."""
    if files := find(run.folder):
        tensors, header = read_tensors(files[-1]), read_metadata(files[-1])
        try:
            restore(run, tensors, json.loads(header["values"]))
            run.step = int(header["step"])
        except (KeyError, ValueError, RuntimeError) as error:
            raise ValueError(f"{files[-1]} does not belong to this run ({type(error).__name__}: {error})") from None
    for name in ("metrics.jsonl", "evaluations.jsonl"):
        write_lines(run.folder / name, [record for record in read_lines(run.folder / name) if record["step"] <= run.step])


def restore(run, tensors: dict[str, torch.Tensor], values: dict) -> None:
    for name, adapter in run.adapters.items():
        adapter.data.copy_(tensors[f"adapter.{name}"])
    unpack_optimizer("optimizer", run.adapters, run.optimizer, tensors)
    if run.strategist:
        run.strategist.load_state({name.removeprefix("strategy."): tensor for name, tensor in tensors.items()
                                   if name.startswith("strategy.")}, values)
    if run.weights:
        run.weights.raw = tensors["weights.raw"]
        pending = tensors.get("weights.pending")
        run.weights.pending = None if pending is None else pending.to(run.model.device)
