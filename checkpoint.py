"""A run's folder: who may use it, and the checkpoint in it, one safetensors file with all that the run has learned.

    adapter.*, optimizer.*      the policy and its AdamW state
    strategy.*                  the strategy networks, their optimizer, both memories, centres and statistics
    weights.*                   learned lambdas and a remembered gradient
    the header                  the step, the base model's fingerprint, the number of processes, and plain values as JSON

Random numbers need no place here: they are drawn from (seed, step). The last two checkpoints are kept.
"""
import hashlib
import json
import os
import sys
from dataclasses import asdict, replace
from pathlib import Path

import torch

import data
import lora
import parallel
from files import (pack_optimizer, read_json, read_lines, read_metadata, read_tensors, unpack_optimizer, write_json, write_lines,
                   write_tensors)
from flags import from_saved

try:
    import fcntl
except ImportError:                                         # Windows: runs are not locked
    fcntl = None

# What a resumed run may change: nothing that alters a step already taken.
CHANGEABLE = {"run", "resume", "steps", "checkpoint_every", "device", "eval_every", "cache", "rebuild", "micro_batch",
              "recompute", "dry_run", "wandb", "tensorboard"}


def resolve(config, given: set[str]):
    """Settle the run folder and what a resumed run was started with; touch nothing."""
    config = replace(config, **{name: str(Path(value).absolute()) for name in ("model", "data", "encoder")       # from anywhere
                                if (value := getattr(config, name)) not in ("", "tiny", *data.KNOWN) and Path(value).exists()})
    folder = Path(config.run)
    if config.resume:
        if not config.run:
            raise ValueError("--resume needs --run FOLDER, the run to continue")
        if not (folder / "config.json").exists():
            raise ValueError(f"--run {config.run} holds no run to resume: expected a folder that train.py has made")
        saved = from_saved(type(config), read_json(folder / "config.json"), f"{config.run}/config.json")
        fixed = given - CHANGEABLE
        if saved.schedule == "linear" or (saved.alpha_decay and saved.method != "grpo"):
            fixed |= given & {"steps"}
        wrong = [f"--{name.replace('_', '-')} {getattr(config, name)} (the run has {getattr(saved, name)})"
                 for name in sorted(fixed) if getattr(config, name) != getattr(saved, name)]
        if wrong:
            why = " (alpha or the learning rate falls over --steps, so the past depends on it)" * (
                "steps" in fixed and config.steps != saved.steps)
            raise ValueError(f"{config.run} was started with other settings: {', '.join(wrong)}. Leave them out to resume{why}")
        now = {name: getattr(config, name) for name in given & CHANGEABLE}
        return replace(saved, **{"wandb": False, "tensorboard": False, **now})         # other logs are for who asks for them
    if config.run and (folder / "config.json").exists():
        raise ValueError(f"{config.run} already holds a run: add --resume to continue it, or choose another --run")
    if config.run and folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise ValueError(f"{config.run} exists and is not an empty folder: choose another --run")
    return config


def claim(config):
    """Make the folder of a new run and put config.json into it, in one step that only one process can win."""
    name, number = f"runs/{config.method}-{Path(config.data).stem}-{config.seed}", 1
    while True:
        folder = Path(config.run or (name if number == 1 else f"{name}-{number}"))
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()) and not config.run:        # somebody's, whatever it is
            number += 1
            continue
        draft = folder / f"config.{os.getpid()}.tmp"
        try:
            config_now = replace(config, run=str(folder), cache=str(Path(config.cache).absolute()))
            write_json(draft, asdict(replace(config_now, rebuild=False)))
            try:
                os.link(draft, folder / "config.json")      # fails if it is there, and is never half there
            except FileExistsError:
                raise
            except OSError:                                 # a disk without hard links
                with open(folder / "config.json", "x", encoding="utf-8") as file:
                    file.write(draft.read_text(encoding="utf-8"))
            return config_now
        except FileExistsError:
            if config.run:
                raise ValueError(f"{config.run} already holds a run: add --resume to continue it, or choose another "
                                 "--run") from None
            number += 1
        finally:
            draft.unlink(missing_ok=True)


def release(folder: Path) -> None:
    """Take back what `claim` and `lock` made, for a run that could not be opened; anything else in the folder stays."""
    for name in ("config.json", "lock"):
        (folder / name).unlink(missing_ok=True)
    if not folder.is_symlink() and not any(folder.iterdir()):
        folder.rmdir()


def lock(folder: Path):
    """Keep other processes away from this run as long as the returned file is open; the system lets go of it on any exit."""
    if fcntl is None:
        return None
    handle = os.fdopen(os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666), "r+")
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        handle.close()
        raise ValueError(f"{folder} is being written by another process: wait for it to end, or choose another --run") from None
    except OSError:                                         # a disk without locks
        pass
    return handle


def find(folder: Path) -> list[Path]:
    """Oldest first."""
    return sorted((folder / "checkpoint").glob("step-*.safetensors"), key=lambda file: (len(file.name), file.name))


def fingerprint(model) -> str:
    """Tells base models of one shape apart: some numbers of each weight, rounded, so that fp32 and bf16 give the same."""
    numbers = [(name, weight.detach().flatten()[:16].bfloat16().tolist()) for name, weight in sorted(model.named_parameters())
               if "lora_" not in name]
    return hashlib.sha256(repr(numbers).encode()).hexdigest()[:16]


def newest(folder: Path, model) -> int:
    """The step of the last readable checkpoint, which must have been trained on this base model, or else of the metrics."""
    for file in reversed(find(folder)):
        try:
            header = read_metadata(file)
            step = int(header["step"])
        except (KeyError, ValueError):                      # `load` will tell
            continue
        if header.get("base", own := fingerprint(model)) != own:
            raise ValueError(f"{folder} was trained on a base model with other weights: put that one back (for tiny, --cache "
                             "names its folder)")
        return step
    return next((line["step"] for line in reversed(read_lines(folder / "metrics.jsonl"))), 0)


def save(run) -> None:
    """Write the checkpoint, and the adapter for everyone else to read. All ranks have the same; rank 0 writes."""
    if parallel.rank():
        return
    tensors, values = {f"adapter.{name}": adapter for name, adapter in run.adapters.items()}, {}
    tensors |= pack_optimizer("optimizer", run.adapters, run.optimizer)
    if run.strategist:
        strategy_tensors, values = run.strategist.state()
        tensors |= {f"strategy.{name}": tensor for name, tensor in strategy_tensors.items()}
    if run.weights:
        tensors["weights.raw"] = run.weights.raw
        tensors |= {} if run.weights.pending is None else {"weights.pending": run.weights.pending}
    lora.save(run.model, run.folder / "adapter", run.policy.base)      # first: it must never be older than the checkpoint
    (run.folder / "adapter" / "README.md").unlink(missing_ok=True)         # the card of an adapter that is no more
    write_tensors(run.folder / "checkpoint" / f"step-{run.step:06d}.safetensors", tensors,
                  {"step": str(run.step), "base": fingerprint(run.model), "values": json.dumps(values),
                   "processes": str(parallel.world())})
    for old in find(run.folder)[:-2]:
        old.unlink()


def load(run) -> None:
    """Go back to the last good checkpoint, if there is one, and forget what came later: it will come again."""
    files, damaged = find(run.folder), []
    newest(run.folder, run.model)                           # refuses another base model
    for file in reversed(files):
        try:
            header = read_metadata(file)
            if file.name != f"step-{int(header['step']):06d}.safetensors":
                raise ValueError(f"its header says step {header['step']}")
            restore(run, read_tensors(file), json.loads(header["values"]))
            run.step = int(header["step"])
            if (before := int(header.get("processes", 1))) != parallel.world() and not parallel.rank():
                print(f"note: {file} was written by {before} processes and goes on with {parallel.world()}: from here on the "
                      "responses are other random ones", file=sys.stderr)
            break
        except (KeyError, ValueError, RuntimeError, TypeError, AttributeError) as error:
            damaged.append(file)
            if not parallel.rank():
                print(f"warning: {file} cannot be used ({error}), trying the one before it", file=sys.stderr)
    else:
        if files:
            raise ValueError(f"no checkpoint of {run.folder} can be used: remove its checkpoint folder and metrics.jsonl to start over")
        usual = read_json(run.folder / "config.json")["checkpoint_every"]
        if (lines := read_lines(run.folder / "metrics.jsonl")) and lines[-1]["step"] > usual:
            raise ValueError(f"{run.folder} has taken {lines[-1]['step']} steps and has no checkpoint to go on from: choose another "
                             "--run, or remove its metrics.jsonl to start over in it")
    if parallel.rank():
        return
    if run.step:
        lora.save(run.model, run.folder / "adapter", run.policy.base)             # whatever became of it
    for leftover in (*run.folder.rglob("*.tmp"), *damaged):
        leftover.unlink()
    for name in ("metrics.jsonl", "evaluations.jsonl"):
        write_lines(run.folder / name, [record for record in read_lines(run.folder / name) if record["step"] <= run.step])


def restore(run, tensors: dict[str, torch.Tensor], values: dict) -> None:
    saved = {name.removeprefix("adapter."): tensor for name, tensor in tensors.items() if name.startswith("adapter.")}
    if {name: tensor.shape for name, tensor in saved.items()} != {name: a.shape for name, a in run.adapters.items()}:
        raise ValueError("its adapter has other tensors than this run's")
    if odd := [name for name, tensor in tensors.items() if tensor.is_floating_point() and not tensor.isfinite().all()]:
        raise ValueError(f"{odd[0]} is not finite")
    for name, adapter in run.adapters.items():
        adapter.data.copy_(saved[name])
    unpack_optimizer("optimizer", run.adapters, run.optimizer, tensors)
    if run.strategist:
        run.strategist.load_state({name.removeprefix("strategy."): tensor for name, tensor in tensors.items()
                                   if name.startswith("strategy.")}, values)
    if run.weights:
        run.weights.raw = tensors["weights.raw"]
        pending = tensors.get("weights.pending")
        run.weights.pending = None if pending is None else pending.to(run.model.device)
