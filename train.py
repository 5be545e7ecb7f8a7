"""Train a language model to reason: GRPO, one step at a time.

    python train.py                         the tiny built-in model on Countdown, a few minutes on a CPU
    python train.py --run runs/mine --steps 400 --kl 0.05
    python train.py --run runs/mine --resume        continue after Ctrl-C, a crash or a finished run

A step: sample responses, score them, turn rewards into advantages inside each group, update the adapters.
Everything random is drawn from (seed, step), so a resumed run needs no generator state and ends on the same
bits as one that was never interrupted.

A run folder holds config.json, metrics.jsonl (a line a step), evaluations.jsonl and evaluation.json (the
last one), adapter/ in PEFT's format, and checkpoint/.
"""
import json
import signal
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from tqdm import tqdm

import data
import evaluate
import grpo
import lora
import reward
import sample
from files import read_json, read_metadata, read_tensors, write_json, write_tensors, write_text
from flags import fail, knob, parse


@dataclass(frozen=True)
class Config:
    run: str = knob("", "folder of the run; empty picks runs/METHOD-DATA-SEED", group="The run")
    resume: bool = knob(False, "continue the run in --run from its last checkpoint")
    steps: int = knob(200, "policy updates in all", low=1)
    seed: int = knob(0, "everything random follows from it", low=0)
    checkpoint_every: int = knob(50, "steps between checkpoints", low=1)
    device: str = knob("auto", "where to compute", choices=evaluate.DEVICES)

    model: str = knob("tiny", "a Hugging Face folder or hub id (Qwen2, Qwen3, Llama), or tiny", group="The model")
    dtype: str = knob("auto", "of the base weights; adapters are always float32", choices=evaluate.DTYPES)
    rank: int = knob(8, "LoRA rank", low=1)
    lora_alpha: float = knob(16.0, "LoRA scale is this over the rank", above=0)
    targets: tuple = knob(lora.TARGETS, "projections that get an adapter")
    cache: str = knob("cache", "folder for the tiny base model")
    rebuild: bool = knob(False, "build the tiny base model again")

    data: str = knob("countdown", "task", choices=tuple(data.COUNTDOWN), group="The problems")
    train_problems: int = knob(3000, "size of the training set", low=1)
    problems: int = knob(32, "problems a step", low=1)
    samples: int = knob(8, "responses to each problem, the group of GRPO", low=2)
    temperature: float = knob(1.0, "sampling temperature, in training and evaluation", above=0)
    max_new_tokens: int = knob(32, "longest response", low=1)

    method: str = knob("grpo", "what is rewarded: grpo, the task alone", choices=("grpo",), group="The objective")
    normalise: str = knob("std", "advantage: reward minus group mean, divided by the group's std or by nothing",
                          choices=("std", "none"))
    kl: float = knob(0.0, "weight of the KL penalty to the base model; 0 also saves its forward pass", low=0)
    clip_low: float = knob(0.2, "the ratio's lower bound is 1 minus this", low=0)
    clip_high: float = knob(0.2, "the ratio's upper bound is 1 plus this", low=0)
    loss: str = knob("token", "tokens weigh the same, or sequences do, or all is divided by a constant",
                     choices=("token", "sequence", "constant"))

    learning_rate: float = knob(1e-3, "of AdamW on the adapters", above=0, group="The optimizer")
    warmup: int = knob(5, "steps in which the learning rate rises", low=0)
    schedule: str = knob("constant", "learning rate after the warm-up", choices=("constant", "linear"))
    epochs: int = knob(1, "updates on each batch of responses", low=1)
    clip_gradient: float = knob(1.0, "largest gradient norm", above=0)
    micro_batch: int = knob(32, "problems that go through the model at a time: lower it to save memory", low=1)

    eval_every: int = knob(0, "steps between evaluations; 0 evaluates before and after only", low=0, group="The evaluation")
    eval_problems: int = knob(200, "test problems", low=1)
    eval_samples: int = knob(16, "responses to each", low=1)


# What a resumed run may change: nothing that alters a step already taken.
CHANGEABLE = {"run", "resume", "steps", "checkpoint_every", "device", "eval_every", "cache", "rebuild"}


class Run:
    """Everything that a step needs, and the folder it is kept in."""

    def __init__(self, config: Config):
        self.config, self.folder = config, Path(config.run)
        self.problems = data.load(config.data, "train", config.train_problems, config.seed)
        self.test = data.load(config.data, "test", config.eval_problems)
        self.policy = evaluate.open_policy(config.model, config.data, config.cache, config.device, config.dtype, config.rebuild)
        self.model = lora.apply(self.policy.model, config.rank, config.lora_alpha, config.targets, config.seed)
        self.prompts = self.policy.encode(self.problems)
        sample.check(self.prompts + self.policy.encode(self.test), config.samples, config.max_new_tokens,
                     config.temperature, self.model.config.context)
        self.adapters = lora.parameters(self.model)
        self.optimizer = torch.optim.AdamW(self.adapters.values(), lr=config.learning_rate, weight_decay=0.0)
        self.settings = grpo.LossSettings(config.temperature, config.kl, config.clip_low, config.clip_high,
                                          config.loss, config.max_new_tokens, config.micro_batch)
        self.step = 0                                       # steps taken
        if config.resume:
            self.load_checkpoint()

    def batch(self) -> list[int]:
        """This step's problems: the training set in a new order every epoch, as (seed, step) decides."""
        count, size = len(self.problems), self.config.problems
        orders = {}
        for position in range(self.step * size, (self.step + 1) * size):
            if position // count not in orders:
                generator = self.generator(position // count, 1)
                orders[position // count] = torch.randperm(count, generator=generator).tolist()
        return [orders[p // count][p % count] for p in range(self.step * size, (self.step + 1) * size)]

    def generator(self, number: int, stream: int) -> torch.Generator:
        """Random numbers for one step (stream 0) or one epoch (stream 1) of this seed."""
        return torch.Generator().manual_seed((self.config.seed * 2 + stream) * 1_000_003 + number)

    def learning_rate(self) -> float:
        config = self.config
        rise = min(1.0, (self.step + 1) / (config.warmup + 1))
        fall = 1.0 - self.step / config.steps if config.schedule == "linear" else 1.0
        return config.learning_rate * rise * fall

    def evaluate(self) -> dict:
        """The evaluation after this many steps, taken once: a resumed run finds it in its file."""
        config, file = self.config, self.folder / "evaluations.jsonl"
        known = {record["step"]: record for record in read_lines(file)}
        if self.step not in known:
            known[self.step] = {"step": self.step, **evaluate.evaluate(
                self.policy, self.test, config.eval_samples, config.temperature, config.max_new_tokens, progress=True)}
            append(file, known[self.step])
        return known[self.step]

    def save_checkpoint(self) -> None:
        """One file, renamed into place: adapters, optimizer and step. The one before it is kept as well."""
        tensors = {f"adapter.{name}": adapter for name, adapter in self.adapters.items()}
        for name, adapter in self.adapters.items():
            for key, value in self.optimizer.state[adapter].items():
                tensors[f"optimizer.{key}.{name}"] = value
        write_tensors(self.folder / "checkpoint" / f"step-{self.step:06d}.safetensors", tensors, {"step": str(self.step)})
        for old in checkpoints(self.folder)[:-2]:
            old.unlink()

    def load_checkpoint(self) -> None:
        """Go back to the last checkpoint, and forget the metrics of later steps: they will come again."""
        files = checkpoints(self.folder)
        if files:
            tensors, self.step = read_tensors(files[-1]), int(read_metadata(files[-1])["step"])
            for name, adapter in self.adapters.items():
                adapter.data.copy_(tensors[f"adapter.{name}"])
                state = {key: tensors.get(f"optimizer.{key}.{name}") for key in ("step", "exp_avg", "exp_avg_sq")}
                if state["step"] is not None:
                    self.optimizer.state[adapter] = {key: value.to(adapter.device if value.ndim else "cpu")
                                                     for key, value in state.items()}
        for name in ("metrics.jsonl", "evaluations.jsonl"):
            kept = [record for record in read_lines(self.folder / name) if record["step"] <= self.step]
            write_text(self.folder / name, "".join(json.dumps(record) + "\n" for record in kept))


def checkpoints(folder: Path) -> list[Path]:
    return sorted((folder / "checkpoint").glob("step-*.safetensors"))


def append(file: Path, record: dict) -> None:
    with open(file, "a", encoding="utf-8") as handle:
        handle.write(json.dumps(record) + "\n")


def read_lines(file: Path) -> list[dict]:
    """The records of a JSONL file; a crash may have cut the last line short, which then does not count."""
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True) if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}\n")]


class Stopwatch:
    """Seconds a stage: call it with the stage's name when the stage ends."""
    def __init__(self):
        self.seconds, self.last = {}, time.perf_counter()

    def __call__(self, stage: str) -> None:
        now = time.perf_counter()
        self.seconds[f"seconds_{stage}"], self.last = now - self.last, now


def train_step(run: Run) -> dict:
    """One step of GRPO -> its metrics."""
    config, model, clock = run.config, run.model, Stopwatch()

    # 1 rollout: G responses to each of B problems
    chosen = run.batch()
    problems, prompts = [run.problems[i] for i in chosen], [run.prompts[i] for i in chosen]
    rollout = sample.generate(model, prompts, config.samples, config.max_new_tokens, config.temperature,
                              run.policy.eos_ids, run.generator(run.step, 0))
    clock("rollout")

    # 2 score: every problem judges its responses
    correct = reward.correctness(problems, run.policy.decode(rollout))                           # (B, G)
    clock("score")

    # 3 intrinsic: none yet
    rewards = correct
    clock("intrinsic")

    # 4 advantage: better or worse than one's own group
    advantages = grpo.group_advantages(rewards, config.normalise).to(model.device)               # (B, G)
    reference = grpo.reference_logprobs(model, prompts, rollout, run.settings) if config.kl else None
    clock("advantage")

    # 5 update: one clipped step an epoch; a batch without any signal moves nothing
    for group in run.optimizer.param_groups:
        group["lr"] = run.learning_rate()
    old = rollout.logprobs if config.epochs > 1 else None
    for _ in range(config.epochs):
        run.optimizer.zero_grad()
        metrics = grpo.accumulate_gradient(model, prompts, rollout, advantages, run.settings, reference, old)
        norm = torch.nn.utils.clip_grad_norm_(run.adapters.values(), config.clip_gradient)
        run.optimizer.step()
    clock("update")

    run.step += 1
    tokens, seconds = int(rollout.lengths.sum()), sum(clock.seconds.values())
    return {"step": run.step, **metrics, "reward": rewards.mean().item(), "correct": correct.mean().item(),
            "entropy": -rollout.logprobs.sum().item() / tokens,
            "zero_signal": (correct.amax(1) == correct.amin(1)).float().mean().item(),
            "response_length": tokens / len(rollout.ids), "truncated": 1 - rollout.finished.float().mean().item(),
            "gradient_norm": float(norm), "learning_rate": run.learning_rate(),
            "tokens_per_second": tokens / seconds, **clock.seconds}


def train(run: Run) -> None:
    """Steps until the end or until Ctrl-C, which lets the step finish and saves it."""
    config, stop = run.config, []
    handlers = {number: signal.signal(number, lambda *_: stop.append(1) if not stop else sys.exit("stopped at once"))
                for number in (signal.SIGINT, signal.SIGTERM)}
    bar = tqdm(total=config.steps, initial=run.step, desc=f"training {config.method}", unit="step")
    while run.step < config.steps and not stop:
        if config.eval_every and run.step % config.eval_every == 0:
            run.evaluate()
        metrics = train_step(run)
        append(run.folder / "metrics.jsonl", metrics)
        bar.set_postfix(correct=f"{metrics['correct']:.2f}", entropy=f"{metrics['entropy']:.2f}", refresh=False)
        bar.update()
        if run.step % config.checkpoint_every == 0 or run.step == config.steps or stop:
            run.save_checkpoint()
    bar.close()
    for number, handler in handlers.items():
        signal.signal(number, handler)
    if stop:
        print(f"stopped after step {run.step} of {config.steps}, nothing is lost. To continue:\n"
              f"  python train.py --run {run.folder} --resume", file=sys.stderr)
        sys.exit(130)


def resolve(config: Config, given: set[str]) -> Config:
    """Settle the run folder and what a resumed run was started with; touch nothing."""
    if config.resume:
        if not config.run:
            raise ValueError("--resume needs --run FOLDER, the run to continue")
        saved = read_json(Path(config.run) / "config.json")
        saved = {name: tuple(value) if isinstance(value, list) else value for name, value in saved.items()}
        odd = sorted(saved.keys() ^ asdict(config).keys())
        if odd:
            raise ValueError(f"{config.run}/config.json was not written by this version of train.py: see {', '.join(odd)}")
        wrong = [f"--{name.replace('_', '-')} {getattr(config, name)} (the run has {saved[name]})"
                 for name in sorted(given - CHANGEABLE) if getattr(config, name) != saved[name]]
        if wrong:
            raise ValueError(f"{config.run} was started with other settings: {', '.join(wrong)}. Leave them out to resume")
        return replace(Config(**saved), **{name: getattr(config, name) for name in given & CHANGEABLE})
    if config.run and (Path(config.run) / "config.json").exists():
        raise ValueError(f"{config.run} already holds a run: add --resume to continue it, or choose another --run")
    if config.run and Path(config.run).exists() and not Path(config.run).is_dir():
        raise ValueError(f"{config.run} is a file, expected a folder for the run")
    name, number = f"runs/{config.method}-{config.data}-{config.seed}", 1
    while not config.run:
        candidate = name if number == 1 else f"{name}-{number}"
        config, number = (config if Path(candidate).exists() else replace(config, run=candidate)), number + 1
    return config


def main(argv: list[str] | None = None) -> None:
    config, given = parse(Config, __doc__, argv)
    try:
        run = Run(resolve(config, given))
    except ValueError as error:
        fail(error)
    except KeyboardInterrupt:
        fail("stopped before the first step: nothing was written")
    config = run.config
    run.folder.mkdir(parents=True, exist_ok=True)
    write_json(run.folder / "config.json", asdict(replace(config, resume=False, rebuild=False)))
    before = read_lines(run.folder / "evaluations.jsonl")[0] if run.step else run.evaluate()
    train(run)
    lora.save(run.model, run.folder / "adapter", base=config.model)
    after = run.evaluate()
    write_json(run.folder / "evaluation.json", after)
    print(evaluate.table({"before": before, f"after {after['step']} steps": after}))
    print(f"config.json, metrics.jsonl, evaluation.json, adapter/ and checkpoint/ are in {run.folder}")


if __name__ == "__main__":
    main()
