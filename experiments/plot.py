"""Figures from run folders, as PNG files.

    python -m experiments.plot runs/reproduce/main          every figure that these runs can show
    python -m experiments.plot runs/a runs/b --output figures

Runs whose folders differ only in the number at the end are seeds of one setting: they share a line,
with the 95 % interval of their mean as a band. Needs matplotlib.

    story, diversity     pass@k and entropies over training; passes: pass@k against k
    intrinsic, losses    both parts of the bonus, and what the networks minimise, over training
    training             a single run: its own metrics, step by step
    ablation             both parts of SuS, either part, none; sensitivity: runs named FLAG=VALUE
    embeddings           strategy embeddings before and after training, coloured by true strategy
"""
import argparse
import math
import re
from collections import Counter
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from statistics import fmean, stdev

from support.checkpoint import CHANGEABLE
from support.config import Parser, guard
from support.files import read_json, read_lines

LABELS = {"sus": "SuS", "grpo": "GRPO", "ss": "SS only", "grpo-kl-0.1": "GRPO, KL 0.1",
          "surprise": "surprise only", "grpo-no-kl": "GRPO without KL", "perplexity": "perplexity",
          "oracle": "oracle", "base": "base model",
          "grpo-kl-0.1-rate-0.004": "GRPO, KL 0.1, rate 0.004"}
# Okabe and Ito's colours, which people with colour blindness can tell apart, and two more.
COLOURS = dict(zip(LABELS, ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9",
                            "#F0E442", "#000000", "#999999", "#882255")))
HEADINGS = {  # a metric whose heading has a % is a share
    "pass@1": "right at the first try (pass@1, %)", "pass@5": "right within five tries (pass@5, %)",
    "strategy_entropy": "entropy of true strategies (nats)",
    "cluster_entropy": "entropy of embedding clusters (nats)",
    "correct": "correct responses (%)", "entropy": "entropy per token (nats)",
    "ss": "SS", "sus": "SuS", "bonus_share": "share of the advantages that it decides",
    "loss": "policy", "contrastive_loss": "E, InfoNCE", "expectation_loss": "E(query)",
    "success_loss": "P, cross-entropy", "world_loss": "M, squared error"}
RESULTS = ("pass@1", "pass@5", "strategy_entropy")
METHODS = ("sus", "grpo", "grpo-kl-0.1", "grpo-no-kl", "perplexity", "oracle")
LINE_FIGURES = {  # title, file of the run, metrics, methods that it shows of the main reproduction
    "story": ("What training does to a policy's strategies", "evaluations", RESULTS, METHODS[:4]),
    "diversity": ("Diversity over training", "evaluations",
                  ("strategy_entropy", "cluster_entropy"), METHODS),
    "intrinsic": ("The two parts of the intrinsic reward (means over all responses)", "metrics",
                  ("ss", "sus", "bonus_share"), ("sus",)),
    "losses": ("Losses over training", "metrics",
               [metric for metric in HEADINGS if "loss" in metric], ("sus", "grpo")),
    "training": ("One run", "metrics", ("correct", "entropy", "ss", "sus"), METHODS)}
# Student's t, 97.5 %, by degrees of freedom; beyond them 1.96 + 2.5 / degrees is close.
STUDENT = (math.nan, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


@dataclass
class Run:
    name: str  # the folder's name without the number at its end
    seed: int
    config: dict
    records: dict[str, list[dict]]  # the lines of metrics.jsonl and of evaluations.jsonl
    folder: Path

    def final(self, metric: str) -> float | None:
        return self.records["evaluations"][-1].get(metric)


def read_run(folder: Path) -> Run | None:
    """The run in this folder, finished or not; None if there is none."""
    config = read_json(folder / "config.json")
    records = {name: read_lines(folder / f"{name}.jsonl") for name in ("metrics", "evaluations")}
    if "method" not in config or not records["evaluations"]:
        return None
    for name, lines in records.items():
        for line in lines:
            numbers = [line.get(metric) for metric in HEADINGS] + line.get("pass_curve", [])
            if not all(isinstance(number, int | float | None) for number in numbers):
                raise ValueError(f"{folder / name}.jsonl is damaged at step {line['step']}: "
                                 "expected numbers")
    name, method = re.sub(r"-\d+$", "", folder.name), config["method"].rpartition(":")[2]
    task = Path(config.get("data", "").rpartition(":")[2]).stem
    if re.fullmatch(rf"{re.escape(method)}-{re.escape(task)}(-\d+)?", name):
        name = method  # train.py chose the folder
    return Run(name, config.get("seed", 0), config, records, folder)
