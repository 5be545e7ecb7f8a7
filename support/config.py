"""Every flag of a run, with its limits and its line in `train.py --help`; presets; the parser.

A frozen dataclass becomes the flags, the manual and the checks of a script: each field is made by
`flag`, and `parse` turns a command line into a config. It also returns the names that were typed,
so that a preset or a resumed run can tell a wish from a default. `guard` is every command's error
wrapper.
"""
import argparse
import importlib
import signal
import sys
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace

import torch

from support import parallel

OUT_OF_MEMORY = (MemoryError, torch.OutOfMemoryError)
MEMORY_WORDS = ("can't allocate memory", "Storage size calculation overflowed")
MEMORY_ADVICE = ("not enough memory: lower the number of problems, samples or new tokens, or, in "
                 "training, --micro-batch; --recompute saves more; --dry-run says what a run needs")


def flag(default, help: str, low: float = 0, high: float = 1e9, choices=(), group: str = "",
         bare: str = ""):
    """A dataclass field that is a flag; `group` starts a new section of --help.

    A flag with a `bare` value may stand without any, and then has that one.
    """
    limits = {"low": low, "high": high, "choices": choices, "bare": bare}
    return field(default=default, metadata={"help": help, "group": group, **limits})


@dataclass(frozen=True)
class Config:
    run: str = flag("", "folder of the run; empty picks runs/METHOD-DATA-SEED", group="The run")
    resume: bool = flag(False, "continue the run in --run from its last checkpoint")
    steps: int = flag(400, "policy updates", low=1)
    seed: int = flag(0, "of everything random but evaluations, which all use 0", high=2 ** 32 - 1)
    checkpoint_every: int = flag(50, "steps between checkpoints", low=1)
    device: str = flag("auto", "where to compute", choices=("auto", "cpu", "cuda", "mps"))
    preset: str = flag("none", "other defaults: Qwen2.5-1.5B on GSM8K as near as can be to the "
                       "paper, or to what its authors' repository does since March 2026",
                       choices=("none", "paper", "repository"))
    dry_run: bool = flag(False, "print the settings and the memory and tokens they need, then stop")
    wandb: bool = flag(False, "also log to Weights & Biases")
    tensorboard: bool = flag(False, "also log to TensorBoard, into the run's folder")

    model: str = flag("tiny", "a Hugging Face folder or hub id (Qwen2, Qwen3, Llama), or tiny",
                      group="The model")
    dtype: str = flag("auto", "of the base weights; auto is bfloat16 on cuda, else float32",
                      choices=("auto", "float32", "bfloat16"))
    rank: int = flag(8, "LoRA rank", low=1, high=2 ** 14)
    cache: str = flag("cache", "folder for the tiny base model")

    data: str = flag("countdown-many", "countdown-many, countdown-calculations, countdown, "
                     "countdown4, gsm8k, a JSONL file or folder with questions and answers, or "
                     "module:function", group="The problems")
    prompt: str = flag("auto", "chat uses the tokenizer's chat template, plain does not, auto does "
                       "if there is one", choices=("auto", "plain", "chat"))
    system: str = flag("", "system text of the chat")
    instruction: str = flag("", "how to answer, instead of the task's own words; in a plain prompt "
                            "it comes first and may hold examples")
    stop: str = flag("", "text whose tokens end a response too, such as \\n; for plain prompts")
    problems: int = flag(32, "problems per step", low=1, high=10 ** 6)
    samples: int = flag(8, "responses to each problem, the group of GRPO", low=2, high=10 ** 5)
    temperature: float = flag(1.0, "sampling temperature in training", low=1e-6)
    max_new_tokens: int = flag(32, "longest response", low=1)

    method: str = flag("sus", "what is rewarded beside correctness: sus, ss, surprise, perplexity, "
                       "grpo (nothing), or module:function", group="The intrinsic reward")
    alpha: float = flag(4.0, "scale of the intrinsic reward; the paper has 0.3")
    alpha_decay: float = flag(1.0, "share of the run over which alpha falls to zero; 0: constant",
                              high=1)
    bonus: str = flag("scaled", "r = c + alpha r_int, or correct responses scaled by 1 + alpha "
                      "r_int over its mean, which only redistributes", choices=("added", "scaled"))
    gate: str = flag("correct", "who may earn a bonus: correct responses, correct ones in groups "
                     "that are partly right; with --bonus added also all responses of such "
                     "groups, or (none) all responses",
                     choices=("correct", "mixed", "group", "none"))
    reading: str = flag("algorithm", "SS and SuS as in the paper's Algorithm 1, or in Eq. 2 and 3",
                        choices=("algorithm", "equations"))
    expectation: str = flag("group", "what Algorithm 1's SS compares a response with: E(query), "
                            "or E(query) and the group's other correct responses",
                            choices=("query", "group"))
    lambda_ss: float = flag(1.0, "weight of SS")
    lambda_sus: float = flag(0.5, "weight of SuS")
    sus_baseline: str = flag("batch", "what is subtracted from SuS: its mean over the batch's "
                             "correct responses, or nothing, as in the paper",
                             choices=("batch", "none"))
    learn_lambdas: bool = flag(False, "learn both weights by meta-gradient, from these values on")

    encoder: str = flag("", "sentence encoder (folder or hub id); empty: the policy's own base",
                        group="The strategy networks")
    negatives: str = flag("group", "contrast with other responses to the same query, or with all",
                          choices=("group", "batch"))
    strategy_updates: int = flag(4, "minibatches per step")
    strategy_warmup: int = flag(400, "minibatches before the first step, on base responses")

    normalise: str = flag("none", "advantage: reward minus group mean, divided by the group's "
                          "deviation or by nothing", choices=("std", "none"), group="The update")
    kl: float = flag(0.03, "weight of the KL penalty to the base model; 0 saves a pass")
    kl_decay: float = flag(1.0, "share of that weight that is left at the end; 1: constant",
                           low=1e-6, high=1)
    kl_form: str = flag("k3", "the penalty's estimator; its gradient is that of KL(base || policy) "
                        "for k3, of KL(policy || base) for k2", choices=("k3", "k2"))
    learning_rate: float = flag(2e-3, "of AdamW on the adapters", low=1e-12, high=1e3)
    epochs: int = flag(1, "updates on each batch of responses", low=1)
    micro_batch: int = flag(32, "problems that go through the model at a time: less saves memory",
                            low=1)
    recompute: bool = flag(False, "gradient checkpointing: much less memory, more time")

    eval_every: int = flag(0, "steps between evaluations; 0: before and after only",
                           group="The evaluation")
    eval_split: str = flag("test", "problems to evaluate on: test to report, validation to tune "
                           "(no problem twice); test-drawn: with repeats, as in training",
                           choices=("test", "validation", "test-drawn"))
    eval_temperature: float = flag(1.0, "sampling temperature of evaluations; 0 is greedy")
    eval_problems: int = flag(150, "how many problems of that split", low=1)
    eval_samples: int = flag(16, "responses to each", low=1, high=10 ** 5)


# The paper's Table 3, but for its lambda_SuS of 0.0, which the text contradicts; the encoder and
# the KL weight are those of the authors' first code, the response length is in neither. 3 epochs
# over 7,473 problems, 8 per update, are 2,802 updates.
PAPER = dict(
    model="Qwen/Qwen2.5-1.5B", data="gsm8k", prompt="plain", steps=2802, problems=8, micro_batch=1,
    samples=8, max_new_tokens=256, learning_rate=2e-5, rank=8, alpha=0.3, alpha_decay=0.0,
    bonus="added", lambda_ss=1.0, lambda_sus=0.5, sus_baseline="none", gate="correct",
    expectation="query", normalise="std", kl=0.1, negatives="batch",
    encoder="sentence-transformers/all-MiniLM-L6-v2", strategy_warmup=0, eval_problems=200,
    eval_samples=8, eval_every=934, checkpoint_every=100)
# The README of the authors' repository, and its reward, but for the 0.2 that it pays for the right
# format.
REPOSITORY = dict(
    model="Qwen/Qwen2.5-1.5B-Instruct", data="gsm8k", prompt="chat", steps=2000, problems=2,
    micro_batch=1, samples=8, max_new_tokens=1024, learning_rate=5e-6, rank=64,
    method="experiments.rewards:repository", bonus="added", alpha=1.0, alpha_decay=0.0,
    gate="mixed", normalise="std", kl=0.001, encoder="sentence-transformers/all-MiniLM-L6-v2",
    strategy_warmup=0, strategy_updates=0, eval_problems=200, eval_samples=8, eval_every=500,
    checkpoint_every=100)
PRESETS = {"none": {}, "paper": PAPER, "repository": REPOSITORY}


def exit_with(message) -> None:
    """One line for a person, exit code 2 for a program."""
    if sys.flags.dev_mode and sys.exc_info()[1]:
        raise
    print(f"error: {' '.join(str(message).split())}", file=sys.stderr)
    sys.exit(2)


@contextmanager
def guard(how_to_continue=lambda: ""):
    """Inside, a user's mistake, a full disk or too little memory ends the program with one line.

    SIGTERM is like Ctrl-C. `python -X dev train.py` shows the traceback behind the line.
    """
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    except (ValueError, FloatingPointError) as error:
        exit_with(error)
    except OSError as error:
        exit_with(f"{error}. {how_to_continue()}")
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, OUT_OF_MEMORY) or any(words in str(error) for words in MEMORY_WORDS):
            exit_with(MEMORY_ADVICE)
        if not parallel.is_lost(error):
            raise
        exit_with(f"a process of this run is gone. {how_to_continue()}")
    except KeyboardInterrupt:
        parallel.say(f"\nstopped. {how_to_continue()}")
        sys.exit(130)
    finally:
        signal.signal(signal.SIGTERM, previous)


def find_fault(value, kind: type, limits: dict) -> str | None:
    """What is wrong with a value, or None."""
    if type(value) is not kind and not (kind is float and type(value) is int):
        return f"{value!r} is not a {kind.__name__}"
    if limits["choices"] and value not in limits["choices"]:
        return f"{value!r} is not one of {', '.join(limits['choices'])}"
    if kind in (int, float) and not limits["low"] <= value <= limits["high"]:
        return f"{value} is not between {limits['low']:g} and {limits['high']:g}"
    return None


def from_saved(config_class: type, saved: dict, where: str):
    """A config from its JSON, held to the same limits as the flags."""
    known = {each.name: each for each in fields(config_class)}
    odd = sorted(saved.keys() ^ known.keys())
    if odd:
        raise ValueError(f"{where} was written by another version (see {', '.join(odd)})")
    for name, value in saved.items():
        fault = find_fault(value, type(known[name].default), known[name].metadata)
        if fault:
            raise ValueError(f"{where}: {name}: {fault}")
    return config_class(**saved)


def import_function(flag_name: str, name: str, expected: str):
    """`module:function` -> the function."""
    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute) if attribute else None
    except Exception as error:  # a module of the user's may raise anything
        raise ValueError(f"{flag_name} {name} cannot be imported: {type(error).__name__}: {error}"
                         ) from None
    if not callable(found):
        raise ValueError(f"{flag_name} {name}: expected {expected}, or module:function")
    return found


class Parser(argparse.ArgumentParser):
    def error(self, message: str):
        exit_with(f"{message} (--help explains every flag)")


def make_converter(kind: type, limits: dict):
    """-> a function from a flag's text to its checked value."""
    def convert(text: str):
        try:
            text.encode()
            value = kind(text)
        except ValueError:
            wanted = {int: "a whole number", float: "a number", str: "UTF-8"}[kind]
            raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}") from None
        fault = find_fault(value, kind, limits)
        if fault:
            raise argparse.ArgumentTypeError(fault)
        return value
    return convert


def parse(config_class: type, description: str, argv: list[str] | None = None, positional: str = "",
          only: set | None = None) -> tuple:
    """-> (config, the set of fields that were given).

    The field named `positional` takes no dashes; with `only`, no other fields become flags.
    """
    parser = Parser(description=description, allow_abbrev=False,
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    group = parser
    for each in fields(config_class):
        limits, kind, flag_name = each.metadata, type(each.default), each.name.replace("_", "-")
        group = parser.add_argument_group(limits["group"]) if limits["group"] else group
        if only is not None and each.name not in only:
            continue
        options = {"help": limits["help"].replace("%", "%%"), "default": argparse.SUPPRESS}
        if kind is bool:
            group.add_argument(f"--{flag_name}", action="store_true", **options)
            continue
        if each.default != "":
            options["help"] += f" (default {each.default})"
        options["type"] = make_converter(kind, limits)
        if limits["bare"]:
            options |= {"nargs": "?", "const": limits["bare"]}
        if each.name == positional:
            group.add_argument(each.name, **options)
        else:
            words = {int: "N", float: "X", str: "TEXT"}[kind]
            metavar = "|".join(limits["choices"]) or words
            group.add_argument(f"--{flag_name}", metavar=metavar, **options)
    given = vars(parser.parse_args(argv))
    return config_class(**given), set(given)


def with_preset(config: Config, given: set[str]) -> Config:
    """The preset's values, where the command line says nothing else."""
    values = PRESETS[config.preset].items()
    return replace(config, **{name: value for name, value in values if name not in given})


def check_config(config: Config) -> None:
    """What no single flag's limits can say."""
    if config.learn_lambdas and config.method != "sus":
        raise ValueError("--learn-lambdas weighs the two parts of --method sus, which "
                         f"{config.method} does not have")
    if config.bonus == "scaled" and config.gate in ("group", "none") and config.method != "grpo":
        raise ValueError(f"--gate {config.gate} pays wrong responses too, whose reward of 0 cannot "
                         "be scaled: add --bonus added")
    if config.encoder and config.method == "grpo":
        raise ValueError("--encoder is of no use with --method grpo: leave one of them out")
    if 0 < config.eval_temperature < 1e-6:
        raise ValueError("--eval-temperature: expected 0, which is greedy, or at least 1e-6")
    if config.problems < parallel.world():
        raise ValueError(f"--problems {config.problems} leaves some of {parallel.world()} "
                         "processes without work: raise it")
