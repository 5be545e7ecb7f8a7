"""What people read of a run: metrics and their timing, the table of results, samples.md, model cards,
other people's loggers."""
import math
import signal
import sys
import time
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

import grpo
from support import parallel
from support.config import Config
from support.files import append_line, read_lines, write_json, write_lines, write_text

METRICS = ("pass@1", "pass@5", "pass@16", "strategy_entropy", "cluster_entropy", "valid", "distinct")
DATASETS = {"gsm8k": "openai/gsm8k"}
CARD_ROWS = {"pass@1": "pass@1", "pass@5": "pass@5", "pass@16": "pass@16",
             "strategy_entropy": "strategy entropy (nats)",
             "cluster_entropy": "cluster entropy (nats)"}


class Stopwatch:
    """Seconds per stage: call it with the stage's name when the stage ends."""

    def __init__(self):
        self.seconds = {}
        self.last = time.perf_counter()

    def __call__(self, stage: str) -> None:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # a GPU's work counts for the stage that asked for it
        now = time.perf_counter()
        self.seconds[f"seconds_{stage}"] = now - self.last
        self.last = now


@contextmanager
def catch_signals():
    """Inside, Ctrl-C and SIGTERM add to the returned list; a second one ends the program at once."""
    asked = []

    def handle(number, frame):
        if asked:
            sys.exit("stopped at once")
        asked.append(number)

    handlers = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def batch_metrics(per_response: dict[str, Tensor], config: Config) -> dict[str, float]:
    """What this rank knows of each response, (B, G) under each name -> metrics of the whole batch."""
    rows = torch.stack([value.float() for value in per_response.values()], dim=-1)
    values = dict(zip(per_response, parallel.gather(rows).unbind(-1)))
    correct, reward, tokens = values["correct"], values["reward"], values["tokens"].sum()
    means = ("reward", "correct", "ss", "sus", "brier")
    metrics = {name: values[name].mean() for name in means if name in values}
    if "ss" in values:
        advantages = grpo.group_advantages(reward, config.normalise)
        extrinsic = grpo.group_advantages(correct, config.normalise)
        metrics |= {"bonus": (reward - correct).mean(),
                    "bonus_share": unexplained_share(advantages, extrinsic)}
    metrics |= {"entropy": -values["logprob"].sum() / tokens,
                "zero_signal": (correct.amax(1) == correct.amin(1)).float().mean(),
                "tokens": tokens,
                "response_length": tokens / correct.numel(),
                "truncated": 1 - values["finished"].mean()}
    return {name: float(value) for name, value in metrics.items()}


def unexplained_share(advantages: Tensor, extrinsic: Tensor) -> float:
    """The share of the advantages' variance that correctness does not explain: 1 - correlation^2."""
    a = advantages.flatten() - advantages.mean()
    b = extrinsic.flatten() - extrinsic.mean()
    if not a.any():
        return 0.0
    return 1.0 - ((a @ b).square() / (a @ a * (b @ b)).clamp(min=1e-12)).item()


def only_finite(metrics: dict) -> dict:
    """JSON has no nan."""
    return {name: value if math.isfinite(value) else None for name, value in metrics.items()}


def make_record(problem, responses: list[str], clusters: list[int], places: list) -> dict:
    """A problem and its responses, as samples.jsonl has them."""
    records = []
    for text, cluster, place in zip(responses, clusters, places):
        record = {"text": text, "correct": problem.judge(text), "cluster": cluster, "place": place}
        if hasattr(problem, "strategy_of"):
            record["strategy"] = problem.strategy_of(text)
        records.append(record)
    return {"question": getattr(problem, "question", problem.prompt), "responses": records}


def write_evaluation(folder: Path, metrics: dict, records: list[dict]) -> None:
    if metrics["step"] == 0:
        write_lines(folder / "samples-before.jsonl", records)
    write_lines(folder / "samples.jsonl", records)
    write_text(folder / "samples.md", samples_page(records))
    write_json(folder / "evaluation.json", metrics)
    append_line(folder / "evaluations.jsonl", metrics)  # last: the evaluation is complete


def table(columns: dict[str, dict]) -> str:
    """{heading: metrics} -> the small table that an evaluation prints."""
    lines = [f"{'':18}" + "".join(f"{heading:>26}" for heading in columns)]
    for name in METRICS:
        line = f"{name.replace('_', ' '):18}"
        for metrics in columns.values():
            cell = "-"
            if metrics.get(name) is not None:
                value, (low, high) = metrics[name], metrics["intervals"][name]
                cell = f"{100 * value:.1f} ({100 * low:.1f} to {100 * high:.1f} %)"
                if "entropy" in name:
                    cell = f"{value:.2f} ({low:.2f} to {high:.2f})"
            line += f"{cell:>26}"
        lines.append(line)
    return "\n".join(lines)


def lost_strategies(before: dict, after: dict) -> list[str]:
    """Strategies that had at least 1 % of the legal responses and now have less than 0.1 %."""
    had, has = before.get("strategies") or {}, after.get("strategies") or {}
    return [name for name, share in had.items() if share >= 0.01 and has.get(name, 0.0) < 0.001]


def summary(folder: Path, before: dict | None, after: dict) -> str:
    """What train.py says at the end."""
    columns = {"before": before} if before else {}
    skipped = sum(line.get("skipped", 0) for line in read_lines(folder / "metrics.jsonl"))
    lines = [table({**columns, f"after {after['step']} steps": after})]
    lost = lost_strategies(before or {}, after)
    if lost:
        lines.append(f"lost strategies: {'  '.join(lost)}")
    if skipped:
        lines.append(f"{skipped} of {after['step']} steps were skipped, because the loss or its gradient "
                     "was not finite: see --learning-rate")
    lines.append(f"config.json, metrics.jsonl, evaluation.json, samples.md, adapter/ and checkpoint/ are "
                 f"in {folder}")
    lines.append(f"curves: pip install matplotlib && python -m experiments.plot {folder}")
    return "\n".join(lines)


def samples_page(records: list[dict], problems: int = 5) -> str:
    """samples.md: a few problems, those with the most clusters first; one response of each cluster."""
    def clusters(record: dict) -> int:
        return len({response["cluster"] for response in record["responses"]})

    lines = ["# Samples"]
    for record in sorted(records, key=clusters, reverse=True)[:problems]:
        lines.append(f"\n## {record['question']}")
        chosen: dict[int, dict] = {}
        for response in sorted(record["responses"], key=lambda response: -response["correct"]):
            chosen.setdefault(response["cluster"], response)
        for cluster, response in chosen.items():
            verdict = "Right" if response["correct"] else "Wrong"
            strategy = f", strategy {response['strategy']}" if response.get("strategy") else ""
            lines.append(f"\n{verdict}, cluster {cluster}{strategy}:\n")
            lines.append(f"```\n{response['text'].strip()}\n```")
    return "\n".join(lines) + "\n"


def write_card(folder: Path, base: str, config: Config, steps: int, metrics: dict, merged: bool) -> None:
    """The README.md that the hub shows for an adapter or a merged model, with the fields that it reads."""
    library = "transformers" if merged else "peft"
    header = ["license: other", "license_name: that-of-the-base-model", f"library_name: {library}",
              "pipeline_tag: text-generation", "tags: [grpo, exploration, strategy-aware-surprise]"]
    if not Path(base).is_dir():
        header.append(f"base_model: {base}")
    if config.data in DATASETS:
        header.append(f"datasets: [{DATASETS[config.data]}]")
    rows = []
    for name, words in CARD_ROWS.items():
        value = metrics.get(name)
        if value is not None:
            rows.append(f"| {words} | {100 * value:.1f} % |" if "pass" in name
                        else f"| {words} | {value:.2f} |")
    what = "Merged weights" if merged else "A LoRA adapter"
    reward = ""
    if config.method != "grpo":
        reward = f" and the intrinsic reward `{config.method}` (alpha {config.alpha})"
    use = 'model = AutoModelForCausalLM.from_pretrained("FOLDER")'
    if not merged:
        use = f'base = AutoModelForCausalLM.from_pretrained("{base}")\n' \
              'model = PeftModel.from_pretrained(base, "FOLDER")'
    write_text(folder / "README.md", "\n".join([
        "---", *header, "---", "",
        f"# {base}, trained with {config.method} on {config.data}", "",
        f"{what} of `{base}` after {steps} steps of GRPO{reward}, seed {config.seed}.", "",
        f"On {metrics['problems']} {config.eval_split} problems of {config.data}, "
        f"{metrics['samples']} responses each:", "",
        "| | |", "|---|---|", *rows, "",
        "```python", use, "```", ""]))


def open_loggers(config: Config) -> list:
    """Functions that take a step's metrics, for the services that were asked for."""
    loggers = []
    try:
        if config.wandb:
            import wandb
            run = wandb.init(project="sus", name=Path(config.run).name, dir=config.run,
                             config=asdict(config))
            loggers.append(run.log)
        if config.tensorboard:
            from torch.utils.tensorboard import SummaryWriter
            writer = SummaryWriter(config.run)

            def log(metrics: dict) -> None:
                for name, value in metrics.items():
                    writer.add_scalar(name, value, metrics["step"])
                writer.flush()
            loggers.append(log)
    except ImportError as error:
        raise ValueError(f"{error.name} is not installed: pip install {error.name}, or leave "
                         f"--{error.name} out") from None
    except Exception as error:  # no login, no network: a service raises what it likes
        raise ValueError(f"a logger cannot be opened ({type(error).__name__}: {error}): leave --wandb "
                         "and --tensorboard out") from None
    return loggers
