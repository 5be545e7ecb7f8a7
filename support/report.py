"""What people read of a run: metrics, the table of results, samples.md, model cards, loggers."""
import math
import signal
import sys
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import lora
from support import files, parallel
from support.config import Config

METRICS = ("pass@1", "pass@5", "pass@16", "coverage", "strategy_choice", "strategy_entropy",
           "strategy_information", "cluster_entropy", "valid", "distinct")
IN_NATS = ("strategy_choice", "strategy_entropy", "strategy_information", "cluster_entropy")


@contextmanager
def catch_signals():
    """Inside, Ctrl-C and SIGTERM add to the returned list; a second one ends the program."""
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


class Stopwatch:
    """The seconds of each stage, from one lap to the next."""

    def __init__(self):
        self.seconds: dict[str, float] = {}
        self.last = time.perf_counter()

    def lap(self, stage: str) -> None:
        now = time.perf_counter()
        self.seconds[f"seconds_{stage}"] = now - self.last
        self.last = now


def say_overlap(problems: list, eval_problems: list) -> None:
    """Warn when problems to learn from are problems to be measured on."""
    trained = {problem.prompt for problem in problems}
    shared = sum(problem.prompt in trained for problem in eval_problems)
    if shared:
        parallel.say(f"warning: {shared} of the {len(eval_problems)} problems of the evaluation "
                     "are training problems too")


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


def write_evaluation(folder: Path, metrics: dict, evaluation) -> None:
    """evaluation: as evaluate.evaluate returns it; metrics: its metrics, with the step."""
    if metrics["step"] == 0:
        files.write_tensors(folder / "clustering.safetensors", evaluation.clustering.state_dict())
        files.write_lines(folder / "samples-before.jsonl", evaluation.records)
    files.write_lines(folder / "samples.jsonl", evaluation.records)
    files.write_text(folder / "samples.md", samples_page(evaluation.records))
    files.write_json(folder / "evaluation.json", metrics)
    files.append_line(folder / "evaluations.jsonl", metrics)  # last: the evaluation is complete


def samples_page(records: list[dict]) -> str:
    """samples.md: the five problems with the most clusters, one response of each cluster."""
    def by_cluster(record: dict) -> dict[int, dict]:
        responses = sorted(record["responses"], key=lambda response: response["correct"])
        return {response["cluster"]: response for response in responses}  # right ones stay

    lines = ["# Samples"]
    for record in sorted(records, key=lambda record: -len(by_cluster(record)))[:5]:
        sizes = Counter(response["cluster"] for response in record["responses"])
        lines.append(f"\n## {' '.join(record['question'].split())}")
        for cluster, response in by_cluster(record).items():
            verdict = "Right" if response["correct"] else "Wrong"
            strategy = f", strategy {response['strategy']}" if response.get("strategy") else ""
            count = f"{sizes[cluster]} of {len(record['responses'])} responses"
            lines.append(f"\n{verdict}, cluster {cluster} ({count}){strategy}:\n")
            lines.append(f"```\n{response['text'].strip()}\n```")
    return "\n".join(lines) + "\n"


def table(columns: dict[str, dict]) -> str:
    """{heading: metrics} -> the small table that an evaluation prints."""
    lines = [f"{'':21}" + "".join(f"{heading:>26}" for heading in columns)]
    for name in METRICS:
        line = f"{name.replace('_', ' '):21}"
        for metrics in columns.values():
            cell = "-"
            if metrics.get(name) is not None:
                value, (low, high) = metrics[name], metrics["intervals"][name]
                cell = f"{100 * value:.1f} ({100 * low:.1f} to {100 * high:.1f} %)"
                if name in IN_NATS:
                    cell = f"{value:.2f} ({low:.2f} to {high:.2f})"
            line += f"{cell:>26}"
        lines.append(line)
    return "\n".join(lines)


def summary(folder: Path, before: dict | None, after: dict) -> str:
    """What train.py says at the end."""
    columns = {"before": before} if before else {}
    lines = [table({**columns, f"after {after['step']} steps": after})]
    had, has = (before or {}).get("strategies") or {}, after.get("strategies") or {}
    lost = [name for name, share in had.items() if share >= 0.01 and has.get(name, 0) < 0.001]
    if lost:
        lines.append(f"lost strategies: {'  '.join(lost)}")
    steps = files.read_lines(folder / "metrics.jsonl")
    for share, word in ((0, "correct"), (1, "wrong")):
        if steps and all(line.get("correct") == share for line in steps):
            lines.append(f"no response was ever {word}, so there was nothing to learn from: look "
                         f"at {folder / 'samples.md'}")
    skipped = sum(line.get("skipped", 0) for line in steps)
    if skipped:
        lines.append(f"{skipped} of {after['step']} steps were skipped, because the loss or its "
                     "gradient was not finite: see --learning-rate")
    lines.append(f"the run is in {folder}; for its curves: pip install matplotlib && "
                 f"python -m experiments.plot {folder}")
    return "\n".join(lines)


def write_card(folder: Path, policy, problem, step: int, metrics: dict, merged: bool) -> None:
    """The README.md that the hub shows for an adapter or a merged model, with an example prompt."""
    config, base = policy.config, policy.base
    prompt = policy.tokenizer.decode(policy.encode([problem])[0])
    header = ["license: other", "license_name: that-of-the-base-model",
              f"library_name: {'transformers' if merged else 'peft'}",
              "pipeline_tag: text-generation", "tags: [grpo, strategy-aware-surprise]"]
    if not Path(base).is_dir():
        header.append(f"base_model: {base}")
    if config.data == "gsm8k":
        header.append("datasets: [openai/gsm8k]")
    load = ('from transformers import AutoModelForCausalLM\n\n'
            'model = AutoModelForCausalLM.from_pretrained("FOLDER")')
    if not merged:
        load = ('from peft import PeftModel\nfrom transformers import AutoModelForCausalLM\n\n'
                f'base = AutoModelForCausalLM.from_pretrained("{base}")\n'
                'model = PeftModel.from_pretrained(base, "FOLDER")')
    reward = "" if config.method == "grpo" else (
        f" and the intrinsic reward `{config.method}` with alpha {config.alpha}")
    text = ["---", *header, "---", "",
            f"# {Path(base).name}, trained with {config.method} on {Path(config.data).name}", "",
            f"{'Merged weights' if merged else 'A LoRA adapter'} after {step} steps of "
            f"GRPO{reward} ([SuS](https://arxiv.org/abs/2601.10349)), seed {config.seed}, "
            f"kl {config.kl}. On {metrics['problems']} {config.eval_split} "
            f"problems, {metrics['samples']} responses each at temperature "
            f"{config.eval_temperature}:", "", f"```\n{table({'': metrics})}\n```", "",
            f"```python\n{load}\n```", "",
            f"It was trained on prompts like this one:\n\n```\n{prompt}\n```", ""]
    files.write_text(folder / "README.md", "\n".join(text))


def open_loggers(config: Config) -> list:
    """Functions that take a step's metrics, for the services that were asked for."""
    loggers = []
    try:
        if config.wandb:
            import wandb
            name = Path(config.run).name
            run = wandb.init(project="sus", name=name, dir=config.run, config=asdict(config))
            loggers.append(run.log)
        if config.tensorboard:
            from torch.utils.tensorboard import SummaryWriter
            writer = SummaryWriter(config.run)

            def log(metrics: dict) -> None:
                for name, value in metrics.items():
                    writer.add_scalar(name, value, metrics["step"])
                writer.flush()
            loggers.append(log)
    except Exception as error:  # not installed, no login, no network: services raise anything
        why = f"{type(error).__name__}: {error}"
        raise ValueError(f"a logger cannot be opened ({why}): install the package, or leave "
                         "--wandb and --tensorboard out") from None
    return loggers


def export(policy, folder: Path, problem, step: int, metrics: dict) -> None:
    """Merged weights, tokenizer, end tokens and a model card, for transformers to load."""
    policy.tokenizer.save_pretrained(folder)
    end_tokens = {"eos_token_id": list(policy.eos_ids)}
    files.write_json(folder / "generation_config.json", end_tokens)
    write_card(folder, policy, problem, step, metrics, merged=True)
    with lora.merged(policy.model):
        policy.model.save_pretrained(folder)  # last: config.json marks a folder that is complete


def is_result(file: Path) -> bool:
    """Whether a file was written by --output; a run's own evaluation has a step."""
    if file.is_symlink() or not file.is_file():
        return False
    try:
        saved = files.read_json(file)
    except ValueError:
        return False
    return "pass@1" in saved and "step" not in saved


def check_targets(request, is_run: bool) -> None:
    """Bad places should fail before the evaluation, not after it."""
    if request.ask and (request.output or request.export):
        raise ValueError("--ask only answers: leave out --output and --export")
    output, target = Path(request.output), Path(request.export)
    if request.output and (output.is_dir() or not output.absolute().parent.is_dir()):
        raise ValueError(f"--output {output}: expected a file in a folder that exists")
    if request.output and output.exists() and not is_result(output):
        raise ValueError(f"--output {output} exists and is no earlier result: choose another")
    if request.export and not is_run:
        raise ValueError(f"--export needs a run folder; {request.path!r} is a model")
    if request.export and target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"--export {target} exists and is not an empty folder: choose another")
