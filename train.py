"""Train a language model to reason with GRPO and an intrinsic reward, Strategy-aware Surprise (SuS).

    python train.py                         the tiny built-in model on Countdown, a few minutes on a CPU
    python train.py --method grpo           the same without an intrinsic reward
    python train.py --run runs/mine --steps 400 --kl 0.05
    python train.py --run runs/mine --resume        continue after Ctrl-C, a crash or a finished run

A step: sample responses, score them, add the intrinsic reward, turn rewards into advantages inside each group,
update the adapters and then the strategy networks.
Everything random is drawn from (seed, step), so a resumed run needs no generator state and ends on the same
bits as one that was never interrupted.

A run folder holds config.json, metrics.jsonl (a line a step), evaluations.jsonl and evaluation.json (the
last one), adapter/ in PEFT's format, and checkpoint/.
"""
import hashlib
import shlex
import shutil
import signal
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

import budget
import card
import checkpoint
import data
import evaluate
import grpo
import log
import lora
import meta
import reward
import sample
import strategy
from files import append_line, read_lines, write_json, write_lines, write_text
from flags import fail, knob, parse
from ruler import Ruler


@dataclass(frozen=True)
class Config:
    run: str = knob("", "folder of the run; empty picks runs/METHOD-DATA-SEED", group="The run")
    resume: bool = knob(False, "continue the run in --run from its last checkpoint")
    steps: int = knob(400, "policy updates in all", low=1)
    seed: int = knob(0, "everything random follows from it", low=0, high=2 ** 32 - 1)
    checkpoint_every: int = knob(50, "steps between checkpoints", low=1)
    device: str = knob("auto", "where to compute", choices=evaluate.DEVICES)
    preset: str = knob("none", "other defaults: paper is Qwen2.5-1.5B on GSM8K as in the paper", choices=("none", "paper"))
    dry_run: bool = knob(False, "print the settings, the memory and the tokens that the run needs, and stop")
    wandb: bool = knob(False, "also log to Weights & Biases")
    tensorboard: bool = knob(False, "also log to TensorBoard, into the run's folder")

    model: str = knob("tiny", "a Hugging Face folder or hub id (Qwen2, Qwen3, Llama), or tiny", group="The model")
    dtype: str = knob("auto", "of the base weights; adapters are always float32", choices=evaluate.DTYPES)
    rank: int = knob(8, "LoRA rank", low=1)
    lora_alpha: float = knob(16.0, "LoRA scale is this over the rank", above=0)
    targets: tuple = knob(lora.TARGETS, "projections that get an adapter")
    cache: str = knob("cache", "folder for the tiny base model")
    rebuild: bool = knob(False, "build the tiny base model again")

    data: str = knob("countdown", f"{', '.join(data.KNOWN)}, or a JSONL file or folder with questions and answers",
                     group="The problems")
    train_problems: int = knob(3000, "largest size of the training set; 0 takes all of a file", low=0)
    prompt: str = knob("auto", "chat puts problems through the tokenizer's template, plain does not, auto does if it has one",
                       choices=evaluate.PROMPTS)
    system: str = knob("", "system text of the chat")
    instruction: str = knob("", "how to answer, instead of the task's own words")
    problems: int = knob(32, "problems a step", low=1)
    samples: int = knob(8, "responses to each problem, the group of GRPO", low=2)
    temperature: float = knob(1.0, "sampling temperature, in training and evaluation", above=0)
    max_new_tokens: int = knob(32, "longest response", low=1)

    method: str = knob("sus", "what is rewarded beside correctness: " + ", ".join(reward.METHODS),
                       choices=tuple(reward.METHODS), group="The intrinsic reward")
    alpha: float = knob(8.0, "scale of the intrinsic reward; the paper has 0.3", low=0)
    alpha_decay: float = knob(1.0, "share of the run over which alpha falls linearly to zero; 0 keeps it constant", low=0, high=1)
    gate: str = knob("mixed", "who may earn a bonus: correct responses, correct ones in mixed groups, or all",
                     choices=("correct", "mixed", "none"))
    reading: str = knob("algorithm", "SS and SuS as in the paper's Algorithm 1 or as in its Eq. 2 and 3",
                        choices=("algorithm", "equations"))
    lambda_ss: float = knob(1.0, "weight of SS", low=0)
    lambda_sus: float = knob(0.25, "weight of SuS", low=0)
    learn_lambdas: bool = knob(False, "learn both weights by meta-gradient, from these values on")
    lambda_rate: float = knob(0.1, "learning rate of the weights", above=0)
    lambda_every: int = knob(10, "steps between updates of the weights", low=2)
    scale_intrinsic: bool = knob(False, "divide the intrinsic reward by its running deviation, as RND does")

    encoder: str = knob("", "sentence encoder (folder or hub id); empty takes the policy's own base model",
                        group="The strategy networks")
    layer: int = knob(1, "layer of the base model whose states, after its attention, are pooled", low=1)
    dimension: int = knob(128, "size d of a strategy embedding", low=1)
    negatives: str = knob("group", "contrast with the other responses to the same query, or with the whole batch",
                          choices=("group", "batch"))
    contrast_temperature: float = knob(0.5, "of InfoNCE", above=0)
    momentum: float = knob(0.99, "of the momentum head", low=0, high=1)
    strategy_rate: float = knob(3e-3, "learning rate of these networks", above=0)
    strategy_updates: int = knob(4, "minibatches a step", low=0)
    strategy_batch: int = knob(32, "groups in a minibatch", low=1)
    strategy_warmup: int = knob(400, "minibatches before the first step, on the base policy's responses", low=0)
    recent: int = knob(64, "newest groups, from which all networks but P learn", low=1)
    buffer: int = knob(1024, "queries and outcomes, from which P learns", low=1)
    clusters: int = knob(12, "clusters of embeddings, for count and uniqueness", low=1)

    normalise: str = knob("none", "advantage: reward minus group mean, divided by the group's std or by nothing",
                          choices=("std", "none"), group="The objective")
    kl: float = knob(0.0, "weight of the KL penalty to the base model; 0 also saves its forward pass", low=0)
    clip_low: float = knob(0.2, "the ratio's lower bound is 1 minus this", low=0)
    clip_high: float = knob(0.2, "the ratio's upper bound is 1 plus this", low=0)
    loss: str = knob("token", "tokens weigh the same, or sequences do, or all is divided by a constant",
                     choices=("token", "sequence", "constant"))

    learning_rate: float = knob(2e-3, "of AdamW on the adapters", above=0, group="The optimizer")
    warmup: int = knob(5, "steps in which the learning rate rises", low=0)
    schedule: str = knob("constant", "learning rate after the warm-up", choices=("constant", "linear"))
    epochs: int = knob(1, "updates on each batch of responses", low=1)
    clip_gradient: float = knob(1.0, "largest gradient norm", above=0)
    micro_batch: int = knob(32, "problems that go through the model at a time: lower it to save memory", low=1)
    recompute: bool = knob(False, "gradient checkpointing: much less memory for a third more time in the update")

    eval_every: int = knob(0, "steps between evaluations; 0 evaluates before and after only", low=0, group="The evaluation")
    eval_split: str = knob("test", "problems to evaluate on: test to report, validation to tune", choices=("test", "validation"))
    eval_problems: int = knob(200, "test problems", low=1)
    eval_samples: int = knob(16, "responses to each", low=1)


# The paper's Table 3: 3 epochs over 7,473 problems, 2 at a time and 4 times accumulated, are 2,802 updates on 8 problems.
PRESETS = {"none": {}, "paper": dict(
    model="Qwen/Qwen2.5-1.5B", data="gsm8k", prompt="plain", train_problems=0, steps=2802, problems=8, micro_batch=1,
    samples=8, max_new_tokens=256, learning_rate=2e-5, rank=8, dimension=128, alpha=0.3, alpha_decay=0.0, lambda_ss=1.0,
    lambda_sus=0.5, gate="correct", normalise="std", kl=0.04, strategy_warmup=0, strategy_batch=8, eval_problems=200,
    eval_samples=8, eval_every=934, checkpoint_every=100)}


class Run:
    """Everything that a step needs, and the folder it is kept in."""

    def __init__(self, config: Config):
        self.config, self.folder = config, Path(config.run)
        lora.check(config.rank, config.lora_alpha, config.targets)      # cheap checks before the model is built
        if not config.train_problems and config.data in data.COUNTDOWN:
            raise ValueError(f"--train-problems 0 takes all problems of a file: {config.data} has no end, say how many")
        self.problems = data.load(config.data, "train", config.train_problems, config.seed)
        if config.method == "oracle" and not hasattr(self.problems[0], "strategy_of"):
            raise ValueError(f"--method oracle reads true strategies, which {config.data} cannot tell: choose another method")
        if config.learn_lambdas and config.method != "sus":
            raise ValueError(f"--learn-lambdas weighs the two parts of --method sus, which {config.method} does not have")
        self.test = data.load(config.data, config.eval_split, config.eval_problems)
        self.policy = evaluate.open_policy(config.model, config.data, config.cache, config.device, config.dtype, evaluate.Prompt(
            config.prompt, config.system, config.instruction), config.rebuild)
        self.model = lora.apply(self.policy.model, config.rank, config.lora_alpha, config.targets, config.seed)
        self.model.recompute = config.recompute
        self.prompts = self.policy.encode(self.problems)
        sample.check(self.prompts + self.policy.encode(self.test), config.samples, config.max_new_tokens,
                     config.temperature, self.model.config)
        self.adapters = lora.parameters(self.model)
        self.optimizer = torch.optim.AdamW(self.adapters.values(), lr=config.learning_rate, weight_decay=0.0)
        self.settings = grpo.LossSettings(config.temperature, config.kl, config.clip_low, config.clip_high,
                                          config.loss, config.max_new_tokens, config.micro_batch)
        self.strategist = self.weights = None
        if config.method != "grpo":
            self.strategist = strategy.Strategist(self.model, strategy.Settings(
                config.reading, config.layer, config.encoder, config.dimension, config.negatives, config.contrast_temperature,
                config.momentum, config.strategy_rate, config.strategy_batch, config.recent, config.buffer, config.clusters,
                config.seed))
        if config.learn_lambdas:
            self.weights = meta.LearnedWeights(config.lambda_ss, config.lambda_sus, config.lambda_rate)
        self.step, self.logs = 0, log.open_all(config)         # steps taken
        if config.resume:
            checkpoint.load(self)
            if self.step > config.steps:
                raise ValueError(f"{config.run} has taken {self.step} steps already: --steps {config.steps} is too few")

    def batch(self, step: int) -> list[int]:
        """A step's problems: the training set in a new order every epoch, as (seed, step) decides."""
        count, size = len(self.problems), self.config.problems
        positions = range(step * size, (step + 1) * size)
        orders = {epoch: torch.randperm(count, generator=self.generator("epoch", epoch)).tolist()
                  for epoch in {position // count for position in positions}}
        return [orders[position // count][position % count] for position in positions]

    def generator(self, use: str, number: int) -> torch.Generator:
        """Random numbers for one use in one step or epoch of this seed, unlike those for any other."""
        digest = hashlib.sha256(f"{self.config.seed} {use} {number}".encode()).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)

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
            ruler = Ruler.load(place, self.model) if (place := self.folder / "ruler.safetensors").exists() else None
            measured = evaluate.evaluate(
                self.policy, self.test, config.eval_samples, config.temperature, config.max_new_tokens, progress=True,
                ruler=ruler, rewards=self.rewards if self.strategist and self.step else None)
            if not self.step:
                measured.ruler.save(place)
            elif ruler is None:                             # without the base model's ruler there is nothing to compare with
                measured.metrics["cluster_entropy"] = None
            known[self.step] = {"step": self.step, **measured.metrics}
            for name in ("samples", *([] if self.step else ["samples-before"])):
                write_lines(self.folder / f"{name}.jsonl", measured.samples)
            write_text(self.folder / "samples.md", evaluate.show(measured.samples))
            append_line(file, known[self.step])
        return known[self.step]

    def rewards(self, problems: list, prompts: list, rollout: sample.Rollout, responses: list[str]) -> dict[str, Tensor]:
        """What the strategy networks make of responses that they do not learn from, (B, G) each."""
        correct = reward.correctness(problems, responses).to(self.model.device)
        intrinsic, _, signals = intrinsic_reward(self, problems, prompts, rollout, responses, correct,
                                                 replace(self.settings, kl=0.0), learning=False)
        return dict(zip(("intrinsic", "ss", "sus"), (intrinsic, *reward.parts(signals))))


def roll_out(run: Run, chosen: list[int], generator: torch.Generator):
    """-> the chosen problems, their prompts, G responses to each as ids and as text."""
    config, prompts = run.config, [run.prompts[i] for i in chosen]
    rollout = sample.generate(run.model, prompts, config.samples, config.max_new_tokens, config.temperature,
                              run.policy.eos_ids, generator)
    return [run.problems[i] for i in chosen], prompts, rollout, run.policy.decode(rollout)


def intrinsic_reward(run: Run, problems: list, prompts: list, rollout: sample.Rollout, responses: list[str], correct: Tensor,
                     settings: grpo.LossSettings, learning: bool = True) -> tuple[Tensor, Tensor | None, reward.Signals]:
    """-> r_int (B, G), the reference log-probabilities, the signals. When learning, the networks see the batch."""
    config, networks = run.config, run.strategist
    features, reference = networks.encode(prompts, rollout, [problem.prompt for problem in problems], responses, settings,
                                          run.generator("views", run.step))
    labels = [problems[n // correct.shape[1]].strategy_of(text) if config.method == "oracle" else None
              for n, text in enumerate(responses)]
    if learning:
        networks.observe(features, correct)
        networks.tally(features, labels)
    signals = networks.signals(features, correct, rollout, labels)
    signals.lambda_ss, signals.lambda_sus = run.weights.values() if run.weights else (config.lambda_ss, config.lambda_sus)
    return reward.METHODS[config.method](signals), reference, signals


def warm_up(run: Run) -> None:
    """Show the strategy networks the base policy's responses before it starts to change: it may lose its
    strategies within fifty steps, sooner than networks that start from nothing learn to see them."""
    config, networks = run.config, run.strategist
    for number in tqdm(range(-(-config.strategy_warmup // 16)), "warming up the strategy networks", leave=False):
        problems, prompts, rollout, responses = roll_out(run, run.batch(number), run.generator("warm-up rollout", number))
        features, _ = networks.encode(prompts, rollout, [problem.prompt for problem in problems], responses,
                                      replace(run.settings, kl=0.0), run.generator("warm-up views", number))
        networks.observe(features, reward.correctness(problems, responses).to(run.model.device))
        networks.update(min(16, config.strategy_warmup - 16 * number), run.generator("warm-up replay", number))


def train_step(run: Run) -> dict:
    """One step of GRPO -> its metrics."""
    config, model, clock = run.config, run.model, log.Stopwatch()

    # 1 rollout: G responses to each of B problems
    problems, prompts, rollout, responses = roll_out(run, run.batch(run.step), run.generator("rollout", run.step))
    clock("rollout")

    # 2 score: every problem judges its responses
    correct = reward.correctness(problems, responses).to(model.device)                           # (B, G)
    clock("score")

    # 3 intrinsic: what the strategy networks make of the responses; the reference pass serves both purposes
    alpha, rewards, more = reward.alpha_at(run.step, config.steps, config.alpha, config.alpha_decay), correct, {}
    if run.strategist:
        intrinsic, reference, signals = intrinsic_reward(run, problems, prompts, rollout, responses, correct, run.settings)
        if config.scale_intrinsic:
            intrinsic = run.strategist.scaled(intrinsic)
        gate = reward.gate(correct, config.gate)
        rewards = reward.augment(correct, intrinsic, alpha, gate)                                # (B, G)
        ss, surprise = reward.parts(signals)
        more = {"ss": ss.mean().item(), "sus": surprise.mean().item(), "lambda_ss": signals.lambda_ss,
                "lambda_sus": signals.lambda_sus, "brier": (signals.success - correct).square().mean().item(),
                "alpha": alpha, "bonus": (rewards - correct).mean().item()}
    else:
        reference = grpo.reference_logprobs(model, prompts, rollout, run.settings) if config.kl else None
    clock("intrinsic")

    # 4 advantage: better or worse than one's own group
    advantages = grpo.group_advantages(rewards, config.normalise)                                # (B, G)
    if run.strategist:
        more["bonus_share"] = grpo.unexplained(advantages, grpo.group_advantages(correct, config.normalise))
    if run.weights and (run.weights.pending is not None or run.step % config.lambda_every == 0):
        run.weights.step(model, prompts, rollout, correct, [ss * gate, surprise * gate], rewards,
                         config.normalise, run.settings)
    clock("advantage")

    # 5 update: the adapters, one clipped step an epoch, unless nothing in the batch says where to; then the networks
    for group in run.optimizer.param_groups:
        group["lr"] = run.learning_rate()
    old = rollout.logprobs if config.epochs > 1 else None
    for _ in range(config.epochs):
        run.optimizer.zero_grad()
        metrics = grpo.accumulate_gradient(model, prompts, rollout, advantages, run.settings, reference, old)
        norm = torch.nn.utils.clip_grad_norm_(run.adapters.values(), config.clip_gradient)
        run.optimizer.step()
    if run.strategist:
        more |= run.strategist.update(config.strategy_updates, run.generator("replay", run.step))
    clock("update")

    tokens, seconds, rate = int(rollout.lengths.sum()), sum(clock.seconds.values()), run.learning_rate()
    run.step += 1
    return {"step": run.step, **metrics, "reward": rewards.mean().item(), "correct": correct.mean().item(), **more,
            "entropy": -rollout.logprobs.sum().item() / tokens,
            "zero_signal": (correct.amax(1) == correct.amin(1)).float().mean().item(),
            "response_length": tokens / len(rollout.ids), "truncated": 1 - rollout.finished.float().mean().item(),
            "gradient_norm": float(norm), "learning_rate": rate, "tokens_per_second": tokens / seconds, **clock.seconds}


def train(run: Run) -> None:
    """Steps until the end or until Ctrl-C, which lets the step finish and saves it."""
    config, stop, saved = run.config, [], run.step
    handlers = {number: signal.signal(number, lambda *_: stop.append(1) if not stop else sys.exit("stopped at once"))
                for number in (signal.SIGINT, signal.SIGTERM)}
    bar = tqdm(total=config.steps, initial=run.step, desc=f"training {config.method}", unit="step")
    while run.step < config.steps and not stop:
        if config.eval_every and run.step % config.eval_every == 0:
            run.evaluate()
        metrics = train_step(run)
        append_line(run.folder / "metrics.jsonl", metrics)
        for send in run.logs:
            send(metrics)
        bar.set_postfix(correct=f"{metrics['correct']:.2f}", entropy=f"{metrics['entropy']:.2f}", refresh=False)
        bar.update()
        if run.step % config.checkpoint_every == 0:
            checkpoint.save(run)
            saved = run.step
    bar.close()
    if run.step != saved:
        checkpoint.save(run)
    for number, handler in handlers.items():
        signal.signal(number, handler)
    if stop:
        raise KeyboardInterrupt


def start(config: Config) -> Run:
    """Open everything. A new run that cannot be opened leaves no folder behind."""
    if config.resume:
        run = Run(config)
        write_json(run.folder / "config.json", asdict(replace(config, resume=False, rebuild=False)))
        return run
    config = checkpoint.claim(config)
    try:
        return Run(config)
    except BaseException:
        shutil.rmtree(config.run)
        raise


def main(argv: list[str] | None = None) -> None:
    config, given = parse(Config, __doc__, argv)
    config, run = replace(config, **{name: value for name, value in PRESETS[config.preset].items() if name not in given}), None
    try:
        config = checkpoint.resolve(config, given)
        if config.dry_run:
            data.check(config.data)
            return print(budget.report(config))
        run = start(config)
        before = run.evaluate() if not run.step else next(iter(read_lines(run.folder / "evaluations.jsonl")), None)
        if run.strategist and not run.step:
            warm_up(run)
        train(run)
        after = run.evaluate()
        write_json(run.folder / "evaluation.json", after)
        where = f"{run.config.eval_split} problems of {run.config.data}"
        card.write(run.folder / "adapter", asdict(run.config), run.step, after, where, merged=False)
    except (ValueError, OSError, FloatingPointError) as error:
        fail(error)
    except KeyboardInterrupt:
        how = f"To continue:\n  python train.py --run {shlex.quote(str(run.folder))} --resume" if run else "Nothing was written."
        print(f"\nstopped after {run.step if run else 0} steps. {how}", file=sys.stderr)
        sys.exit(130)
    log.summary(run.folder, before, after)


if __name__ == "__main__":
    main()
