"""Train a language model with GRPO and an intrinsic reward, Strategy-aware Surprise (SuS).

    python train.py                         the tiny built-in model on Countdown, minutes on a CPU
    python train.py --method grpo           the same without an intrinsic reward
    python train.py --run runs/mine --resume        continue after Ctrl-C or a crash

A step: sample responses, judge them, add the intrinsic reward, turn rewards into advantages, update
the adapters and the strategy networks. Everything random is drawn from (seed, step), so a resumed
run ends on the same bits as one that was never interrupted.
"""
import math
from dataclasses import replace
from pathlib import Path

import support  # noqa: F401  isort: skip  before torch: it sets how torch's threads wait
import torch
import torch.nn as nn
from torch import Tensor
from tqdm import tqdm

import data
import grpo
import lora
import reward
import sample
from evaluate import evaluate
from sample import Rollout
from strategy import Strategist
from support import budget, checkpoint, files, parallel, report, tiny
from support.clustering import Clustering
from support.config import Config, check_config, guard, parse, with_preset
from support.equations import EquationsStrategist
from support.fast import accelerate
from support.meta import LearnedLambdas
from support.sentences import SentenceEncoder

RATE_WARMUP = 5  # steps in which the learning rate rises
CLIP_GRADIENT = 1.0  # largest gradient norm
WARMUP_UPDATES = 16  # updates of the strategy networks per rollout of the warm-up
MOST_SKIPPED = 5  # steps in a row without a finite gradient before a run gives up


class Run:
    """Everything that a step needs, and the folder it is kept in."""

    def __init__(self, config: Config):
        self.config, self.folder = config, Path(config.run)
        self.step = 0
        check_config(config)
        self.method = reward.find_method(config.method)
        self.problems = data.load(config.data, "train", seed=config.seed)
        self.eval_problems = data.load(config.data, config.eval_split, config.eval_problems)
        report.say_overlap(self.problems, self.eval_problems)
        with parallel.leader_first():
            base = tiny.find_base(config, may_build=not config.resume)
        self.policy = sample.open_policy(base, config)
        self.model = accelerate(lora.apply(self.policy.model, config.rank, seed=config.seed))
        self.model.recompute = config.recompute
        self.prompts = self.policy.encode(self.problems)
        eval_prompts = self.policy.encode(self.eval_problems)
        sample.check_request(self.model, self.prompts + eval_prompts, config.max_new_tokens)
        self.adapters = lora.parameters(self.model)
        self.optimizer = torch.optim.AdamW(self.adapters.values(), weight_decay=0.0)
        self.strategist = self.lambdas = None
        if config.method != "grpo":
            kind = EquationsStrategist if config.reading == "equations" else Strategist
            if config.encoder:
                self.encoder = SentenceEncoder(config.encoder, self.model.device,
                                               together=config.reading == "equations")
            else:
                self.encoder = kind.encoder(self.model, config.micro_batch)
            self.strategist = kind(self.encoder.size, config).to(self.model.device)
            if isinstance(self.method, type):  # a reward with a memory
                self.method = self.method(self.encoder.size, config).to(self.model.device)
        if config.learn_lambdas:
            count = sum(adapter.numel() for adapter in self.adapters.values())
            self.lambdas = LearnedLambdas(config, count).to(self.model.device)
        self.clustering = Clustering.load_if_there(self.folder, self.model)
        self.loggers = report.open_loggers(config) if parallel.is_leader() else []
        self.identity = checkpoint.identify(config, self.model, self.problems)
        if config.resume:
            self.step = checkpoint.load(self.folder, self.learned(), self.identity)
            checkpoint.write_config(config)
        lines = files.read_lines(self.folder / "evaluations.jsonl")
        self.evaluations = {line["step"]: line for line in lines if line["step"] <= self.step}

    def learned(self) -> checkpoint.Learned:
        """All that a checkpoint must hold."""
        parts = {"strategist": self.strategist, "lambdas": self.lambdas, "method": self.method}
        modules = {name: part for name, part in parts.items() if isinstance(part, nn.Module)}
        return checkpoint.Learned(self.adapters, self.optimizer, modules)

    def save(self) -> None:
        """Write the checkpoint, and the adapter for everyone else to read."""
        if parallel.is_leader():
            # The adapter first: it must never be older than the checkpoint.
            lora.save(self.model, self.folder / "adapter", self.policy.base)
            (self.folder / "adapter" / "README.md").unlink(missing_ok=True)  # an older card
            checkpoint.save(self.folder, self.step, self.learned(), self.identity)

    def generator(self, use: str, number: int, shared: bool = True) -> torch.Generator:
        """Random numbers for one use in one step or epoch, the same on all ranks if shared."""
        key = (self.config.seed, use, number)  # rank 0 draws what a single process would
        if not shared and not parallel.is_leader():
            key += (parallel.rank(),)
        return sample.seeded(*key)

    def batch(self, step: int) -> tuple[list, list[list[int]]]:
        """This rank's share of a step's problems, and their prompts; each epoch has its order."""
        count, size = len(self.problems), self.config.problems
        chosen, orders = [], {}
        for position in range(step * size, (step + 1) * size):
            epoch, place = divmod(position, count)
            if epoch not in orders:
                orders[epoch] = torch.randperm(count, generator=self.generator("epoch", epoch))
            chosen.append(int(orders[epoch][place]))
        chosen = parallel.share(chosen)
        return [self.problems[i] for i in chosen], [self.prompts[i] for i in chosen]

    def roll_out(self, prompts: list[list[int]], use: str, step: int) -> tuple[Rollout, list[str]]:
        """G responses to each prompt, as ids and as text."""
        config, generator = self.config, self.generator(use, step, shared=False)
        rollout = sample.generate(self.model, prompts, config.samples, config.max_new_tokens,
                                  config.temperature, self.policy.eos_ids, generator)
        return rollout, self.policy.decode(rollout)

    def evaluate(self) -> dict:
        """The evaluation after this many steps; a resumed run finds it in its file."""
        if self.step not in self.evaluations:
            found = evaluate(self.policy, self.eval_problems, self.config, self.clustering)
            if self.step == 0:
                self.clustering = found.clustering  # the base model's, for all later evaluations
            elif self.clustering is None:  # it was lost: there is nothing to compare with
                found.metrics["cluster_entropy"] = None
            self.evaluations[self.step] = {"step": self.step, **found.metrics}
            if parallel.is_leader():
                report.write_evaluation(self.folder, self.evaluations[self.step], found)
        return self.evaluations[self.step]


def warm_up(run: Run) -> None:
    """Show the strategy networks the base policy's responses, before it loses its strategies."""
    updates = run.config.strategy_warmup if run.strategist else 0
    numbers = tqdm(range(math.ceil(updates / WARMUP_UPDATES)), "warming up the strategy networks",
                   leave=False, disable=not parallel.is_leader())
    for number in numbers:
        problems, prompts = run.batch(number)
        rollout, responses = run.roll_out(prompts, "warm-up rollout", number)
        correct = reward.correctness(problems, responses).to(run.model.device)
        features = run.encoder.encode(problems, prompts, rollout, responses,
                                      run.generator("warm-up views", number, shared=False))
        run.strategist.observe(features, correct)
        count = min(WARMUP_UPDATES, updates - WARMUP_UPDATES * number)
        run.strategist.learn(count, run.generator("warm-up replay", number))


def train_step(run: Run, step: int) -> dict:
    """One step of GRPO with an intrinsic reward -> its metrics."""
    config = replace(run.config, kl=grpo.kl_at(step, run.config))
    model, strategist = run.model, run.strategist
    metrics, per_response = {"kl_weight": config.kl}, {}
    watch = report.Stopwatch()

    # 1. Rollout: G responses to each of B problems.
    problems, prompts = run.batch(step)
    rollout, responses = run.roll_out(prompts, "rollout", step)
    watch.lap("rollout")

    # 2. Extrinsic reward: 1 for a correct response, else 0.
    correct = reward.correctness(problems, responses).to(model.device)  # (B, G)
    watch.lap("score")

    # 3. Intrinsic reward: how far is a response from what its query led to expect? Eq. 1 and 4.
    rewards = correct
    if strategist:
        features = run.encoder.encode(problems, prompts, rollout, responses,
                                      run.generator("views", step, shared=False))
        strategist.observe(features, correct)
        signals = strategist.signals(features, correct, rollout, problems, responses)
        weighed = run.lambdas.apply_to(config) if run.lambdas else config
        rewards = reward.augment(correct, run.method(signals, weighed), config, step)  # (B, G)
        per_response["ss"], per_response["sus"] = reward.parts(signals, config)
        per_response["brier"] = (signals.success - correct).square()
        metrics |= {"alpha": reward.alpha_at(step, config), "lambda_ss": weighed.lambda_ss,
                    "lambda_sus": weighed.lambda_sus}
    watch.lap("intrinsic")

    # 4. Advantage: better or worse than the group's mean?
    advantages = grpo.group_advantages(rewards, config.normalise)  # (B, G)
    if run.lambdas:
        run.lambdas.step(model, prompts, rollout, signals, config, step)
    watch.lap("advantage")

    # 5. Update the policy, then the strategy networks.
    reference = grpo.reference_logprobs(model, prompts, rollout, config) if config.kl else None
    metrics |= update_policy(run, config, prompts, rollout, advantages, reference, step)
    if strategist:
        metrics |= strategist.learn(config.strategy_updates, run.generator("replay", step))
    watch.lap("update")

    metrics |= summarise({**per_response, "correct": correct, "reward": rewards}, rollout, config)
    metrics["tokens_per_second"] = metrics["tokens"] / sum(watch.seconds.values())
    return {"step": step + 1, **metrics, **watch.seconds}


def summarise(per_response: dict[str, Tensor], rollout: Rollout, config: Config) -> dict:
    """What this rank knows of each response, (B, G) per name -> metrics of the whole batch."""
    values = {**per_response, "length": rollout.lengths, "finished": rollout.finished,
              "logprob": rollout.logprobs.sum(1)}
    values = {name: parallel.gather(value) for name, value in values.items()}
    correct, rewards, tokens = values["correct"], values["reward"], values["length"].sum()
    metrics = {name: values[name].mean() for name in per_response}
    if "ss" in values:
        advantages = grpo.group_advantages(rewards, config.normalise)
        extrinsic = grpo.group_advantages(correct, config.normalise)
        metrics["bonus"] = (rewards - correct).mean()
        metrics["bonus_share"] = reward.bonus_share(advantages, extrinsic)
    metrics |= {"entropy": -values["logprob"].sum() / tokens,
                "zero_signal": (correct.amax(1) == correct.amin(1)).float().mean(),
                "tokens": tokens, "response_length": tokens / correct.numel(),
                "truncated": 1 - values["finished"].float().mean()}
    return {name: float(value) for name, value in metrics.items()}


def update_policy(run: Run, config: Config, prompts: list, rollout: Rollout, advantages: Tensor,
                  reference: Tensor | None, step: int) -> dict[str, float]:
    """One clipped step of AdamW per epoch -> metrics of the last one."""
    rate = config.learning_rate * min(1.0, (step + 1) / (RATE_WARMUP + 1))
    for group in run.optimizer.param_groups:
        group["lr"] = rate
    old = rollout.logprobs if config.epochs > 1 else None
    for _ in range(config.epochs):
        metrics = grpo.accumulate_gradient(run.model, prompts, rollout, advantages, config,
                                           reference, old)
        norm = nn.utils.clip_grad_norm_(run.adapters.values(), CLIP_GRADIENT).item()
        finite = math.isfinite(metrics["loss"]) and math.isfinite(norm)
        if finite:  # one bad batch must not spoil the adapters and the optimizer
            run.optimizer.step()
        run.optimizer.zero_grad()
    return metrics | {"gradient_norm": norm, "learning_rate": rate, "skipped": int(not finite)}


def train(run: Run) -> None:
    """Steps until the end, or until Ctrl-C, which lets the step finish and saves it."""
    config, leader = run.config, parallel.is_leader()
    skipped, stopped = 0, False
    bar = tqdm(total=config.steps, initial=run.step, desc=f"training {config.method}", unit="step",
               disable=not leader)
    with bar, report.catch_signals() as asked:
        while run.step < config.steps and not stopped:
            if config.eval_every and run.step % config.eval_every == 0:
                run.evaluate()
            metrics = train_step(run, run.step)
            run.step += 1
            if leader:
                files.append_line(run.folder / "metrics.jsonl", report.only_finite(metrics))
            for log in run.loggers:
                log(metrics)
            bar.set_postfix_str(f"correct {metrics['correct']:.2f}", refresh=False)
            bar.update()
            skipped = skipped + 1 if metrics["skipped"] else 0
            if skipped == MOST_SKIPPED:
                raise FloatingPointError(f"no finite gradient in {skipped} steps in a row: start a "
                                         "new run with a lower --learning-rate, --alpha or --kl")
            if run.step % config.checkpoint_every == 0:
                run.save()
            stopped = any(parallel.gather_values(bool(asked)))  # all ranks stop after the same step
        run.save()
    if stopped:
        raise KeyboardInterrupt


def main(argv: list[str] | None = None) -> None:
    config, given = parse(Config, __doc__, argv)
    config = with_preset(config, given)
    with guard():
        if config.dry_run:
            return print(budget.report(checkpoint.settle(config, given)))
        parallel.start(config.device)
        with checkpoint.run_folder(config, given) as config:
            with guard(lambda: checkpoint.how_to_continue(config)):
                run = Run(config)
                budget.try_worst_step(run)
                if run.step == 0:
                    run.evaluate()
                    warm_up(run)
                train(run)
                after = run.evaluate()
                if parallel.is_leader():
                    report.write_card(run.folder / "adapter", run.policy, run.problems[0], run.step,
                                      after, merged=False)
                    print(report.summary(run.folder, run.evaluations.get(0), after))


if __name__ == "__main__":
    main()
