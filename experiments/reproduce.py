"""The tables and figures of RESULTS.md, on one machine: settings x seeds on Countdown.

    python -m experiments.reproduce                 main results and ablation
    python -m experiments.reproduce --quick         the first 160 steps of three methods
    python -m experiments.reproduce --part sweep    how sensitive SuS is to its settings
    python -m experiments.reproduce --part tune     as many settings of plain GRPO
    python -m experiments.reproduce --part others   the paper's Algorithm 1 to the letter, gates, ...

Each run is one process of train.py. Finished runs are kept: after Ctrl-C or a crash, the same
command goes on. Tables and figures are written into the part's folder. Intervals are 95 % (Student's
t over seeds); differences are paired by seed. Settings are chosen (sweep, tune) with seeds from 0 and
validation problems, and reported with seeds from 10 and test problems.
"""
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch
from tqdm import tqdm

from experiments import plot
from support import checkpoint, config, files
from support.config import flag, guard, parse
from support.tiny import find_tiny

IDLE = "--strategy-updates 0 --strategy-warmup 0"  # for rewards that ignore the strategy networks
MAIN = {"sus": "",
        "grpo": "--method grpo",
        "grpo-kl-0.1": "--method grpo --kl 0.1",
        "grpo-kl-0.1-rate-0.004": "--method grpo --kl 0.1 --learning-rate 0.004",
        "grpo-no-kl": "--method grpo --kl 0",
        "ss": "--method ss",
        "surprise": "--method surprise",
        "perplexity": f"--method perplexity {IDLE}",
        "oracle": f"--method experiments.rewards:oracle --alpha 4 {IDLE}"}
QUICK = {name: MAIN[name] for name in ("sus", "grpo", "grpo-no-kl")}
QUICK_DEFAULTS = {"steps": 160, "seeds": 3, "bases": 1}
SWEEP = {"sus": "", "alpha=4": "--alpha 4", "alpha=16": "--alpha 16",
         "lambda_ss=0.5": "--lambda-ss 0.5", "lambda_ss=2": "--lambda-ss 2",
         "lambda_sus=0": "--lambda-sus 0", "lambda_sus=1": "--lambda-sus 1",
         "kl=0.01": "--kl 0.01", "kl=0.1": "--kl 0.1"}
TUNE = {"grpo": "", "grpo-no-kl": "--kl 0", "grpo-kl-0.01": "--kl 0.01", "grpo-kl-0.1": "--kl 0.1",
        "grpo-kl-0.3": "--kl 0.3", "grpo-rate-0.001": "--learning-rate 0.001",
        "grpo-rate-0.004": "--learning-rate 0.004", "grpo-std": "--normalise std",
        "grpo-kl-0.1-rate-0.004": "--kl 0.1 --learning-rate 0.004"}
TUNE = {name: f"--method grpo {flags}" for name, flags in TUNE.items()}
OTHERS = {"literal": "--alpha 0.3 --alpha-decay 0"}
PARTS = {"main": MAIN, "sweep": SWEEP, "tune": TUNE, "others": OTHERS}
