"""A run's folder: who may use it, and the checkpoints in it.

A checkpoint is one safetensors file with all that the run has learned: adapter, optimizer, strategy
networks with their memories, learned lambdas, the state of a reward. Its header has the step and
the run's identity: base model, settings and problems, which must be the same when it is resumed.
Random numbers need no place in it: they are drawn from (seed, step).
"""
import hashlib
import json
import os
import shlex
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
import torch.nn as nn
from torch import Tensor

from support import files, parallel
from support.config import Config, from_saved

try:
    import fcntl
except ImportError:  # Windows: runs are not locked
    fcntl = None

# What a resumed run may change: nothing that alters a step already taken.
CHANGEABLE = {"run", "resume", "steps", "checkpoint_every", "device", "eval_every", "cache",
              "micro_batch", "recompute", "dry_run", "wandb", "tensorboard"}
BY_CONTENT = {"model", "data"}  # their weights and problems are compared, not their names
# Names of a model or a task, not of a folder.
NAMES = {"tiny", "countdown", "countdown4", "countdown-many", "countdown-calculations", "gsm8k"}
OWN_FILES = {"config.json", "lock"}  # what a run folder holds before the first evaluation


def read_config(folder: Path) -> Config | None:
    """The settings of a run; None if this is not a run's folder."""
    file = folder / "config.json"
    saved = files.read_json(file) if file.is_file() else {}
    return from_saved(Config, saved, str(file)) if "method" in saved else None


def require_run(folder: Path) -> Config:
    config = read_config(folder)
    if config is None:
        raise ValueError(f"{folder} is not a run of train.py")
    return config


def write_config(config: Config) -> None:
    if parallel.is_leader():
        file = Path(config.run) / "config.json"
        files.write_json(file, asdict(replace(config, resume=False)))


def settle(config: Config, given: set[str]) -> Config:
    """The settings of a new run, or of a resumed one as it was started. Writes nothing."""
    for name in ("model", "data", "encoder"):  # so that a run can be resumed from anywhere
        value = getattr(config, name)
        if value and value not in NAMES and Path(value).exists():
            config = replace(config, **{name: str(Path(value).absolute())})
    if not config.resume:
        return config
    saved = read_config(Path(config.run)) if config.run else None
    if saved is None:
        raise ValueError(f"--resume needs --run FOLDER, a run of train.py; found {config.run!r}")
    fixed = given & fixed_names(saved)
    changed = [name for name in sorted(fixed) if getattr(config, name) != getattr(saved, name)]
    if changed:
        wishes = [f"--{name.replace('_', '-')} {getattr(config, name)} (the run: "
                  f"{getattr(saved, name)})" for name in changed]
        why = ""
        if "steps" in changed:
            why = " (alpha or the KL weight falls over --steps, so earlier steps depend on it)"
        raise ValueError(f"{config.run} was started with other settings: {', '.join(wishes)}. "
                         f"Leave them out to resume{why}")
    taken = max(find_checkpoints(Path(config.run)), default=0)
    if "steps" in given and config.steps < taken:
        raise ValueError(f"--steps {config.steps}: {config.run} has taken {taken} steps already")
    changes = {name: getattr(config, name) for name in given & CHANGEABLE}
    return replace(saved, **{"wandb": False, "tensorboard": False, **changes})


def fixed_names(config: Config) -> set[str]:
    """The settings that a run keeps for good."""
    names = vars(config).keys() - CHANGEABLE
    alpha_falls = config.alpha_decay > 0 and config.method != "grpo"
    return names | {"steps"} if alpha_falls or config.kl_decay < 1 else names


@contextmanager
def run_folder(config: Config, given: set[str]):
    """Settle the settings, claim and lock the folder -> the config. Rank 0 does the writing.

    A run that ends before it has written anything leaves no folder behind.
    """
    leader = parallel.is_leader()
    if config.resume or leader:
        config = settle(config, given)
    if leader and not config.resume:
        config = claim(config)
    config = replace(config, run=parallel.gather_values(config.run)[0])
    folder = Path(config.run)
    handle = lock(folder) if leader else None
    try:
        yield config
    finally:
        if leader and is_untouched(folder):
            for name in OWN_FILES:
                (folder / name).unlink(missing_ok=True)
            folder.rmdir()
        if handle:
            handle.close()


def is_untouched(folder: Path) -> bool:
    return folder.is_dir() and {file.name for file in folder.iterdir()} <= OWN_FILES


def how_to_continue(config: Config) -> str:
    if not Path(config.run).exists():
        return "The run's folder is gone."
    if is_untouched(Path(config.run)):
        return "Nothing was written."
    world = parallel.world()
    launcher = f"torchrun --nproc-per-node {world} --" if world > 1 else "python"
    return f"To continue: {launcher} train.py --run {shlex.quote(config.run)} --resume"


def claim(config: Config) -> Config:
    """Make the folder of a new run and write config.json; mkdir lets only one process win."""
    method, task = config.method.rpartition(":")[2], Path(config.data.rpartition(":")[2]).stem
    number = 1
    while True:
        name = f"runs/{method}-{task}-{config.seed}" + (f"-{number}" if number > 1 else "")
        folder = Path(config.run or name)
        try:
            if config.run and folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()  # an empty folder is as good as none
            folder.mkdir(parents=True)
            config = replace(config, run=str(folder), cache=str(Path(config.cache).absolute()))
            write_config(config)
            return config
        except FileExistsError:
            number += 1
            if config.run:
                raise ValueError(f"{config.run} exists: choose another --run, or add --resume if "
                                 "it holds a run to continue") from None


def lock(folder: Path):
    """Keep other processes away from this run as long as the returned file is open."""
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)  # Windows has no such flag
    descriptor = os.open(folder / "lock", flags, 0o666)
    handle = os.fdopen(descriptor, "r+")
    try:
        if fcntl:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        handle.close()
        raise ValueError(f"{folder} is being written by another process: wait for it to end, or "
                         "choose another --run") from None
    except OSError:  # a disk without locks
        pass
    return handle


def find_checkpoints(folder: Path) -> dict[int, Path]:
    """{step: file}, oldest first; files of other names are no checkpoints."""
    found = {int(file.stem[5:]): file for file in (folder / "checkpoint").glob("step-*.safetensors")
             if file.stem[5:].isdecimal()}
    return dict(sorted(found.items()))


def fingerprint(model: nn.Module) -> str:
    """Tells base models of one shape apart, by some numbers of each weight, rounded to bf16."""
    numbers = [(name, weight.detach().flatten()[:16].bfloat16().tolist())
               for name, weight in sorted(model.named_parameters()) if "lora_" not in name]
    return hashlib.sha256(repr(numbers).encode()).hexdigest()[:16]


def identify(config: Config, model: nn.Module, problems: list) -> dict[str, str]:
    """What a checkpoint belongs to, as its header has it."""
    fixed = {name: getattr(config, name) for name in sorted(fixed_names(config) - BY_CONTENT)}
    texts = "\n".join(f"{each.prompt} {getattr(each, 'answer', '')}" for each in problems)
    digest = hashlib.sha256(texts.encode(errors="replace")).hexdigest()[:16]
    return {"base": fingerprint(model), "settings": json.dumps(fixed), "problems": digest}


def find_step(folder: Path, identity: dict[str, str]) -> int:
    """The step of the newest readable checkpoint; refuses one of another run."""
    for step, file in reversed(find_checkpoints(folder).items()):
        try:
            header = files.read_header(file)
            different = [name for name in identity if header[name] != identity[name]]
        except (KeyError, ValueError):  # `load` says what is wrong with it
            continue
        if "base" in different:
            raise ValueError(f"{folder} was trained on a base model with other weights: put that "
                             "one back (for tiny, --cache names its folder)")
        if "settings" in different:
            was, now = json.loads(header["settings"]), json.loads(identity["settings"])
            changes = [f"{name} is {now[name]}, was {was.get(name)}" for name in now
                       if now[name] != was.get(name)]
            raise ValueError(f"{folder / 'config.json'} was changed: {', '.join(changes)}")
        if different:
            raise ValueError(f"{folder} was trained on other problems: put its data back")
        return step
    return 0


class Learner(nn.Module):
    """Networks with an optimizer of their own, whose moments are a part of the state_dict."""
    rate: float  # of learning

    @cached_property
    def optimizer(self) -> torch.optim.AdamW:
        """Made at its first use, which is after .to(device)."""
        learning = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.AdamW(learning, lr=self.rate, fused=True)

    def get_extra_state(self) -> Tensor:
        return files.pack_optimizer(self.optimizer)

    def set_extra_state(self, state: Tensor) -> None:
        files.unpack_optimizer(self.optimizer, state)


@dataclass
class Learned:
    """Adapters, their optimizer, and modules whose state_dict is all that they have learned."""
    adapters: dict[str, nn.Parameter]
    optimizer: torch.optim.AdamW
    modules: dict[str, nn.Module]

    def tensors(self) -> dict[str, Tensor]:
        tensors = {f"adapter.{name}": adapter for name, adapter in self.adapters.items()}
        tensors["optimizer._extra_state"] = files.pack_optimizer(self.optimizer)
        for name, module in self.modules.items():
            tensors |= {f"{name}.{key}": value for key, value in module.state_dict().items()}
        return tensors

    @torch.no_grad()
    def restore(self, tensors: dict[str, Tensor]) -> None:
        files.check_tensors(tensors, self.tensors(), "checkpoint")
        files.unpack_optimizer(self.optimizer, tensors["optimizer._extra_state"])
        for name, adapter in self.adapters.items():
            adapter.copy_(tensors[f"adapter.{name}"])
        for name, module in self.modules.items():
            own = [key for key in tensors if key.startswith(f"{name}.")]
            module.load_state_dict({key.removeprefix(f"{name}."): tensors[key] for key in own})


def save(folder: Path, step: int, learned: Learned, identity: dict[str, str]) -> None:
    """Write a checkpoint; the last two are kept."""
    file = folder / "checkpoint" / f"step-{step:06d}.safetensors"
    if file.exists():  # the run was restored from it, or has just written it
        return
    files.write_tensors(file, learned.tensors(), {"step": str(step), **identity})
    for old in list(find_checkpoints(folder).values())[:-2]:
        old.unlink()


def load(folder: Path, learned: Learned, identity: dict[str, str]) -> int:
    """Restore the last good checkpoint and drop what came later -> its step, 0 if there is none."""
    find_step(folder, identity)  # refuses one of another run
    found, step = find_checkpoints(folder), 0
    for number, file in reversed(found.items()):
        try:
            header = files.read_header(file)
            if header.get("step") != str(number) or not identity.keys() <= header.keys():
                raise ValueError("its header is damaged")
            learned.restore(files.read_tensors(file))
            step = number
            break
        except (KeyError, ValueError, RuntimeError, TypeError, AttributeError) as error:
            parallel.say(f"warning: {file} cannot be used ({str(error)[:300]})")
    if not found and (folder / "metrics.jsonl").exists():
        parallel.say(f"warning: {folder} has no checkpoint: its steps are taken again")
    if found and not step:
        raise ValueError(f"no checkpoint of {folder} can be used: remove them to start over")
    if parallel.is_leader():
        for file in (*folder.rglob("*.tmp"), *(found[number] for number in found if number > step)):
            file.unlink()
        for name in ("metrics.jsonl", "evaluations.jsonl"):  # the later steps are repeated
            lines = files.read_lines(folder / name)
            files.write_lines(folder / name, [line for line in lines if line["step"] <= step])
    return step
