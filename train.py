"""Train a language model to reason with GRPO and an intrinsic reward, Strategy-aware Surprise (SuS).

    python train.py                         the tiny built-in model on Countdown, a few minutes on a CPU
    python train.py --method grpo           the same without an intrinsic reward
    python train.py --run runs/mine --steps 400 --kl 0.05
    python train.py --run runs/mine --resume        continue after Ctrl-C or a crash

A step: sample responses, score them, add the intrinsic reward, turn rewards into advantages inside each group,
update the adapters and then the strategy networks.
Everything random is drawn from (seed, step), so a resumed run needs no generator state and ends on the same
bits as one that was never interrupted.

A run folder holds config.json, metrics.jsonl (a line a step), evaluations.jsonl and evaluation.json (the
last one), adapter/ in PEFT's format, and checkpoint/.
"""
import math
import shlex
import signal
import sys
from dataclasses import asdict, replace
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
import parallel
import reward
import sample
import strategy
from files import append_line, read_lines, write_json, write_lines, write_text
from flags import fail, parse
from knobs import PRESETS, Config
from ruler import Ruler


MOST_SKIPPED = 5                        # steps in a row without a finite gradient before a run gives up


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
        if config.problems < parallel.world():
            raise ValueError(f"--problems {config.problems} leaves some of {parallel.world()} processes without work: raise it")
        self.test = data.load(config.data, config.eval_split, config.eval_problems)
        prompt = evaluate.Prompt(config.prompt, config.system, config.instruction)
        with parallel.leader_first():
            self.policy = evaluate.open_policy(config.model, config.data, config.cache, config.device, config.dtype, prompt,
                                               config.rebuild and not parallel.rank())
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
        self.step, self.skipped = 0, 0                      # steps taken; the last ones in a row without an update
        self.logs = [] if parallel.rank() else log.open_all(config)
        if config.resume:
            checkpoint.load(self)
            if self.step > config.steps:
                raise ValueError(f"{config.run} has taken {self.step} steps already: --steps {config.steps} is too few")
        records = read_lines(self.folder / "evaluations.jsonl")
        try:
            evaluate.table({record["step"]: record for record in records})
        except (KeyError, TypeError, ValueError):
            raise ValueError(f"{self.folder / 'evaluations.jsonl'} is damaged: numbers are missing; move it away to go on") from None
        self.evaluations = {record["step"]: record for record in records if record["step"] <= self.step}
        place = self.folder / "ruler.safetensors"           # the base model's, for all evaluations of the run
        self.ruler = Ruler.load(place, self.model) if place.exists() else None

    def batch(self, step: int) -> list[int]:
        """A step's problems: the training set in a new order every epoch, as (seed, step) decides."""
        count, size = len(self.problems), self.config.problems
        positions = range(step * size, (step + 1) * size)
        orders = {epoch: torch.randperm(count, generator=self.generator("epoch", epoch)).tolist()
                  for epoch in {position // count for position in positions}}
        return [orders[position // count][position % count] for position in positions]

    def generator(self, use: str, number: int, shared: bool = True) -> torch.Generator:
        """Random numbers for one use in one step or epoch of this seed; shared by all ranks, or each rank's own."""
        return sample.seeded(self.config.seed, use, number, *([] if shared or not parallel.rank() else [parallel.rank()]))

    def learning_rate(self) -> float:
        config = self.config
        rise = min(1.0, (self.step + 1) / (config.warmup + 1))
        fall = 1.0 - self.step / config.steps if config.schedule == "linear" else 1.0
        return config.learning_rate * rise * fall

    def evaluate(self) -> dict:
        """The evaluation after this many steps, taken once: a resumed run finds it in its file."""
        config = self.config
        if self.step not in self.evaluations:
            measured = evaluate.evaluate(
                self.policy, self.test, config.eval_samples, config.temperature, config.max_new_tokens, progress=True,
                ruler=self.ruler, rewards=self.rewards if self.strategist and self.step else None)
            if self.step and self.ruler is None:            # without the base model's ruler there is nothing to compare with
                measured.metrics["cluster_entropy"] = None
            elif not self.step:
                self.ruler = measured.ruler
            self.evaluations[self.step] = {"step": self.step, **measured.metrics}
            if not parallel.rank():
                if not self.step:
                    self.ruler.save(self.folder / "ruler.safetensors")
                for name in ("samples", *([] if self.step else ["samples-before"])):
                    write_lines(self.folder / f"{name}.jsonl", measured.samples)
                write_text(self.folder / "samples.md", evaluate.show(measured.samples))
                write_json(self.folder / "evaluation.json", self.evaluations[self.step])
                append_line(self.folder / "evaluations.jsonl", self.evaluations[self.step])     # last: the evaluation is complete
        return self.evaluations[self.step]

    def rewards(self, problems: list, prompts: list, rollout: sample.Rollout, responses: list[str]) -> dict[str, Tensor]:
        """What the strategy networks make of responses that they do not learn from, (B, G) each."""
        correct = reward.correctness(problems, responses).to(self.model.device)
        intrinsic, _, signals = intrinsic_reward(self, problems, prompts, rollout, responses, correct,
                                                 replace(self.settings, kl=0.0), learning=False)
        return dict(zip(("intrinsic", "ss", "sus"), (intrinsic, *reward.parts(signals))))


def roll_out(run: Run, use: str, step: int):
    """-> this rank's share of the step's problems, their prompts, G responses to each as ids and as text."""
    config, chosen = run.config, parallel.share(run.batch(step))
    prompts = [run.prompts[i] for i in chosen]
    rollout = sample.generate(run.model, prompts, config.samples, config.max_new_tokens, config.temperature,
                              run.policy.eos_ids, run.generator(use, step, shared=False))
    return [run.problems[i] for i in chosen], prompts, rollout, run.policy.decode(rollout)


def intrinsic_reward(run: Run, problems: list, prompts: list, rollout: sample.Rollout, responses: list[str], correct: Tensor,
                     settings: grpo.LossSettings, learning: bool = True) -> tuple[Tensor, Tensor | None, reward.Signals]:
    """-> r_int (B, G), the reference log-probabilities, the signals. When learning, the networks see the batch."""
    config, networks = run.config, run.strategist
    features, reference = networks.encode(prompts, rollout, [problem.prompt for problem in problems], responses, settings,
                                          run.generator("views", run.step, shared=False))
    labels = [problems[n // correct.shape[1]].strategy_of(text) if config.method == "oracle" else None
              for n, text in enumerate(responses)]
    whole, outcomes = features, correct
    if learning:
        whole, outcomes = networks.observe(features, correct)
        networks.tally(whole, sum(parallel.gather_values(labels), []))
    signals = networks.signals(features, correct, rollout, labels)
    if config.sus_baseline == "batch" and config.reading == "algorithm":
        signals.usual = reward.usual_surprise(outcomes, networks.success(whole))
    signals.lambda_ss, signals.lambda_sus = run.weights.values() if run.weights else (config.lambda_ss, config.lambda_sus)
    return reward.METHODS[config.method](signals), reference, signals


def warm_up(run: Run) -> None:
    """Show the strategy networks the base policy's responses before it starts to change: it may lose its
    strategies within fifty steps, sooner than networks that start from nothing learn to see them."""
    config, networks = run.config, run.strategist
    for number in tqdm(range(-(-config.strategy_warmup // 16)), "warming up the strategy networks", leave=False,
                       disable=parallel.rank() > 0):
        problems, prompts, rollout, responses = roll_out(run, "warm-up rollout", number)
        features, _ = networks.encode(prompts, rollout, [problem.prompt for problem in problems], responses,
                                      replace(run.settings, kl=0.0), run.generator("warm-up views", number, shared=False))
        networks.observe(features, reward.correctness(problems, responses).to(run.model.device))
        networks.update(min(16, config.strategy_warmup - 16 * number), run.generator("warm-up replay", number))


def train_step(run: Run) -> dict:
    """One step of GRPO -> its metrics."""
    config, model, clock = run.config, run.model, log.Stopwatch()

    # 1 rollout: G responses to each of B problems
    problems, prompts, rollout, responses = roll_out(run, "rollout", run.step)
    clock("rollout")

    # 2 score: every problem judges its responses
    correct = reward.correctness(problems, responses).to(model.device)                           # (B, G)
    clock("score")

    # 3 intrinsic: what the strategy networks make of the responses; the reference pass serves both purposes
    alpha, rewards, seen, more = reward.alpha_at(run.step, config.steps, config.alpha, config.alpha_decay), correct, {}, {}
    if run.strategist:
        intrinsic, reference, signals = intrinsic_reward(run, problems, prompts, rollout, responses, correct, run.settings)
        if config.scale_intrinsic:
            intrinsic = run.strategist.scaled(intrinsic)
        gate = reward.gate(correct, config.gate)
        rewards = reward.augment(correct, intrinsic, alpha, gate)                                # (B, G)
        ss, surprise = reward.parts(signals)
        seen |= {"ss": ss, "sus": surprise, "brier": (signals.success - correct).square()}
        more = {"lambda_ss": signals.lambda_ss, "lambda_sus": signals.lambda_sus, "alpha": alpha}
    else:
        reference = grpo.reference_logprobs(model, prompts, rollout, run.settings) if config.kl else None
    clock("intrinsic")

    # 4 advantage: better or worse than one's own group
    advantages = grpo.group_advantages(rewards, config.normalise)                                # (B, G)
    if run.weights and (run.weights.pending is not None or run.step % config.lambda_every == 0):
        run.weights.step(model, prompts, rollout, correct, [part * gate for part in reward.paid(signals)], rewards,
                         config.normalise, run.settings)
    clock("advantage")

    # 5 update: the adapters, one clipped step an epoch, unless nothing in the batch says where to; then the networks
    for group in run.optimizer.param_groups:
        group["lr"] = run.learning_rate()
    old = rollout.logprobs if config.epochs > 1 else None
    for _ in range(config.epochs):
        metrics = grpo.accumulate_gradient(model, prompts, rollout, advantages, run.settings, reference, old)
        norm = torch.nn.utils.clip_grad_norm_(run.adapters.values(), config.clip_gradient).item()
        finite = math.isfinite(metrics["loss"]) and math.isfinite(norm)
        if finite:                                          # one bad batch must not poison the adapters and the optimizer
            run.optimizer.step()
        run.optimizer.zero_grad()                           # at once: in the next rollout gradients would lie about in the memory
        if not finite:
            break
    if run.strategist:
        more |= run.strategist.update(config.strategy_updates, run.generator("replay", run.step))
    clock("update")

    rate, run.step, run.skipped = run.learning_rate(), run.step + 1, 0 if finite else run.skipped + 1
    seen |= {"correct": correct, "reward": rewards, "tokens": rollout.lengths.view_as(correct),
             "finished": rollout.finished.view_as(correct), "logprob": rollout.logprobs.sum(1).view_as(correct)}
    whole = summarise(seen, config.normalise)
    return {"step": run.step, **metrics, **whole, **more, "gradient_norm": norm, "learning_rate": rate, "skipped": int(not finite),
            "tokens_per_second": whole["tokens"] / sum(clock.seconds.values()), **clock.seconds}


def summarise(seen: dict[str, Tensor], normalise: str) -> dict[str, float]:
    """What this rank has seen of each response, (B, G) under each name -> metrics of the whole batch."""
    whole = dict(zip(seen, parallel.gather(torch.stack([value.float() for value in seen.values()], dim=-1)).unbind(-1)))
    correct, tokens = whole["correct"], whole["tokens"].sum()
    result = {name: value.mean() for name, value in whole.items() if name in ("reward", "correct", "ss", "sus", "brier")}
    if "ss" in whole:
        advantages = grpo.group_advantages(whole["reward"], normalise)
        result |= {"bonus": (whole["reward"] - correct).mean(),
                   "bonus_share": grpo.unexplained(advantages, grpo.group_advantages(correct, normalise))}
    result |= {"entropy": -whole["logprob"].sum() / tokens, "zero_signal": (correct.amax(1) == correct.amin(1)).float().mean(),
               "tokens": tokens, "response_length": tokens / correct.numel(), "truncated": 1 - whole["finished"].mean()}
    return {name: float(value) for name, value in result.items()}


def train(run: Run) -> None:
    """Steps until the end or until Ctrl-C, which lets the step finish and saves it."""
    config, asked, stop, saved = run.config, [], False, run.step
    handlers = {number: signal.signal(number, lambda *_: asked.append(1) if not asked else sys.exit("stopped at once"))
                for number in (signal.SIGINT, signal.SIGTERM)}
    with tqdm(total=config.steps, initial=run.step, desc=f"training {config.method}", unit="step",
              disable=parallel.rank() > 0) as bar:
        while run.step < config.steps and not stop:
            if config.eval_every and run.step % config.eval_every == 0:
                run.evaluate()
            metrics = train_step(run)
            if not parallel.rank():
                append_line(run.folder / "metrics.jsonl", {name: x if math.isfinite(x) else None for name, x in metrics.items()})
            for send in run.logs:
                send(metrics)
            bar.set_postfix(correct=f"{metrics['correct']:.2f}", entropy=f"{metrics['entropy']:.2f}", refresh=False)
            bar.update()
            if run.skipped == MOST_SKIPPED:
                raise FloatingPointError(f"the loss or its gradient was not finite in {MOST_SKIPPED} steps in a row: start a new "
                                         "run with a lower --learning-rate or --alpha, or look for damage in the base model")
            if run.step % config.checkpoint_every == 0:
                checkpoint.save(run)
                saved = run.step
            stop = any(parallel.gather_values(bool(asked)))     # all ranks stop after the same step
    if run.step != saved:
        checkpoint.save(run)
    for number, handler in handlers.items():
        signal.signal(number, handler)
    if stop:
        raise KeyboardInterrupt


def start(config: Config) -> Run:
    """Open everything. A new run that cannot be opened leaves no folder behind."""
    if not config.resume and not parallel.rank():
        config = checkpoint.claim(config)
    config = replace(config, run=parallel.gather_values(config.run)[0])
    lock = None if parallel.rank() else checkpoint.lock(Path(config.run))
    try:
        run = Run(config)
    except BaseException:
        if not config.resume and not parallel.rank():
            checkpoint.release(Path(config.run))
        raise
    run.lock = lock                                         # held as long as the run is
    if config.resume and not parallel.rank():
        write_json(run.folder / "config.json", asdict(replace(config, resume=False, rebuild=False)))
    return run


def main(argv: list[str] | None = None) -> None:
    budget.reuse_memory()
    config, given = parse(Config, __doc__, argv)
    config, run = replace(config, **{name: value for name, value in PRESETS[config.preset].items() if name not in given}), None
    try:
        if config.dry_run:
            data.check(config.data)
            return print(budget.report(checkpoint.resolve(config, given)))
        parallel.start(config.device)
        if config.resume or not parallel.rank():            # a new folder is rank 0's to look at, it makes it
            config = checkpoint.resolve(config, given)
        run = start(config)
        if not run.step:
            run.evaluate()
        if run.strategist and not run.step:
            warm_up(run)
        train(run)
        after = run.evaluate()
        if not parallel.rank():
            where = f"{run.config.eval_split} problems of {run.config.data}"
            card.write(run.folder / "adapter", run.policy.base, asdict(run.config), run.step, after, where, merged=False)
            log.summary(run.folder, run.evaluations.get(0), after)
    except (ValueError, OSError, FloatingPointError) as error:
        fail(f"{error}. {how_to_continue(run)}" if run and isinstance(error, OSError) else error)
    except (RuntimeError, MemoryError) as error:
        if budget.is_out_of_memory(error):
            fail(budget.OUT_OF_MEMORY)
        if not parallel.is_lost(error):
            raise
        fail(f"a process of this run is gone. {how_to_continue(run)}")
    except KeyboardInterrupt:
        if not parallel.rank():
            print(f"\nstopped after {run.step if run else 0} steps. {how_to_continue(run)}", file=sys.stderr)
        sys.exit(130)
    finally:
        parallel.stop()


def how_to_continue(run: Run | None) -> str:
    start = "python" if parallel.world() == 1 else f"torchrun --nproc-per-node {parallel.world()} --"
    return f"To continue: {start} train.py --run {shlex.quote(str(run.folder))} --resume" if run else "Nothing was written."


if __name__ == "__main__":
    main()
