"""What a run says about itself beside metrics.jsonl: seconds a stage, other people's loggers, and the last words."""
import shlex
import time
from dataclasses import asdict
from pathlib import Path

import torch

import evaluate
import plot


class Stopwatch:
    """Seconds a stage: call it with the stage's name when the stage ends."""
    def __init__(self):
        self.seconds, self.last = {}, time.perf_counter()

    def __call__(self, stage: str) -> None:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()                        # a GPU's work counts where it was asked for
        now = time.perf_counter()
        self.seconds[f"seconds_{stage}"], self.last = now - self.last, now


def open_all(config) -> list:
    """Functions that take a step's metrics, for the services that were asked for."""
    logs = []
    try:
        if config.wandb:
            import wandb
            logs.append(wandb.init(project="sus", name=Path(config.run).name, dir=config.run, config=asdict(config)).log)
        if config.tensorboard:
            from torch.utils.tensorboard import SummaryWriter
            writer = SummaryWriter(config.run)

            def send(metrics):
                for name, value in metrics.items():
                    writer.add_scalar(name, value, metrics["step"])
                writer.flush()
            logs.append(send)
    except ImportError as error:
        raise ValueError(f"{error.name} is not installed: pip install {error.name}, or leave --{error.name} out") from None
    except Exception as error:                              # no login, no network: a service raises what it likes
        raise ValueError(f"a log cannot be opened ({type(error).__name__}: {error}): leave --wandb and --tensorboard "
                         "out") from None
    return logs


def summary(folder: Path, before: dict | None, after: dict) -> None:
    """The table before and after, what was lost on the way, and where everything is."""
    print(evaluate.table({**({"before": before} if before else {}), f"after {after['step']} steps": after}))
    try:
        if before and (gone := evaluate.lost(before, after)):
            print(f"lost strategies: {'  '.join(gone)}")
        runs = plot.find_runs([str(folder)])
        if skipped := sum(line.get("skipped", 0) for run in runs if run.folder == folder for line in run.metrics):
            print(f"{skipped} of {after['step']} steps were skipped, since the loss or its gradient was not finite: see --learning-rate")
        for file in plot.draw(runs, folder, (plot.training,)):
            print(f"curves: {file}")
    except (ValueError, OSError, TypeError, AttributeError) as error:
        print(f"no curves: {error}, then python plot.py {shlex.quote(str(folder))}")
    print(f"config.json, metrics.jsonl, evaluation.json, samples.md, adapter/ and checkpoint/ are in {folder}")
