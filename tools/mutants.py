"""Would a test notice? One-line breakages of the method, and those that no test sees.

    python tools/mutants.py                     all of them, half an hour on two cores
    python tools/mutants.py grpo.py reward.py   those of some files

A row of MUTANTS is a file, a piece of text that occurs in it once, and what replaces it. Each row
is applied to a copy of the repository, and the tests of that file run there until one fails: then
the row is caught, as it is after a time-out. Before that, the tests of each file run once on an
unchanged copy and must pass. A row that survives is a hole in the tests, or changes nothing.
"""
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

from tqdm import tqdm

ROOT = Path(__file__).parents[1]
WORKERS = 2
SECONDS = 900  # for one row
# The tests of each file. Those that start fresh interpreters take long and see nothing more.
TESTS = {
    "data.py": ("tests/test_data.py",),
    "support/calculation.py": ("tests/test_data.py",),
    "model.py": ("tests/test_model.py", "tests/support/test_decoder.py"),
    "lora.py": ("tests/test_lora.py",),
    "sample.py": ("tests/test_sample.py",),
    "grpo.py": ("tests/test_grpo.py",),
    "strategy.py": ("tests/support/test_memory.py", "tests/test_strategy.py",
                    "tests/support/test_equations.py"),
    "reward.py": ("tests/test_reward.py",),
    "train.py": ("tests/test_train.py", "tests/test_crash.py"),
    "evaluate.py": ("tests/test_evaluate.py",),
}
LEFT_OUT = "not killed_and_resumed and not full_disk and not real_ctrl_c"

MUTANTS = (
    # The rules of play, splits and judges.
    ("data.py", "table[-1][0] != int(step[4])", "False"),
    ("data.py", "or (self.rules.use_all and len(steps) < len(self.numbers) - 1)", ""),
    ("data.py", "return Countdown(numbers, target, rules)",
     "return Countdown(numbers, target)"),
    ("data.py", "problem.target > 0", "True"),
    ("data.py", "is_clear and len(kinds) >= self.kinds", "is_clear"),
    ("data.py", "operators += step[2]", "operators = step[2]"),
    ("data.py", "rng.randint(2, len(numbers))", "len(numbers)"),
    ("data.py", "(0|[1-9][0-9]{0,4})", "([0-9]{1,5})"),
    ("data.py", "        if 0 <= table[-1] <= LARGEST_RESULT",
     "        if table[-1] <= LARGEST_RESULT"),
    ("data.py", "hashlib.sha256(key.encode()).digest()[0] %", "random.randrange(256) %"),
    ("data.py", "{sorted(problem.numbers)}", "{problem.numbers}"),
    ("data.py", " or key in seen", ""),
    ("data.py", '{split} {rules.count} {seed}"', '{split} {rules.count}"'),
    ("data.py", '.split("\\nQuestion:")[0]) ==', ") =="),
    ("data.py", "== self.answer)", "is not None)"),
    ("data.py", 'split in ("validation", "test")', 'split != "train"'),
    ("support/calculation.py", "table[:place] + table[place + 1:]", "table"),
    ("support/calculation.py", "sorted(one + other)", "one + other"),
    ("support/calculation.py", 'else -1', 'else 1'),
    ("support/calculation.py", " if term[1])", ")"),
    ("support/calculation.py", "sorted(set(numbers))", "sorted(numbers)"),
    ("support/calculation.py", " or not use_all", ""),
    # The decoder.
    ("model.py", "keepdim=True) + self.eps)", "keepdim=True))"),
    ("model.py", "a * cos - b * sin, b * cos + a * sin", "a * cos + b * sin, b * cos - a * sin"),
    ("model.py", "keep * frequencies + (1 - keep) * frequencies / factor", "frequencies / factor"),
    ("model.py", "        if self.qk_norm:", "        if False:"),
    ("model.py", "causal = mask is None and x.shape[1] > 1", "causal = False"),
    ("model.py", "((slots <= query[:, None]) & (slots >= first))", "(slots >= first)"),
    ("model.py", "& (slots >= first))", "& (first >= 0))"),
    ("model.py", "positions = query[None]", "positions = query[None] - offset"),
    ("model.py", "(query - start[:, None]).clamp(min=0)", "query[None].expand(len(ids), -1)"),
    ("model.py", "prompt_v = self.prompts[layer]", "prompt_v = self.prompts[0]"),
    ("model.py", "if layer == len(self.prompts):", "if True:"),
    ("model.py", "if self.lm_head is None else self.lm_head.weight", ""),
    ("model.py", "if self.recompute and torch.is_grad_enabled():", "if False:"),
    ("model.py", "self.head).float() / temperature", "self.head).float()"),
    # Adapters.
    ("lora.py", "self.scale = alpha / rank", "self.scale = alpha"),
    ("lora.py", "B = torch.zeros(", "B = torch.ones("),
    ("lora.py", "bound = 1 / math.sqrt(base.in_features)", "bound = 1.0"),
    ("lora.py", "if not self.enabled:", "if False:"),
    ("lora.py", "model.requires_grad_(False)", "pass"),
    ("lora.py", "manual_seed(seed)", "manual_seed(0)"),
    ("lora.py", "for layer in layers(model).values() if layer.enabled]",
     "for layer in layers(model).values()]"),
    ("lora.py", "layer.enabled = True", "pass"),
    ("lora.py", ".mul_(layer.scale)", ""),
    ("lora.py", "with disabled(model):", "if True:"),
    ("lora.py", "layer.weight = weight", "pass"),
    ("lora.py", '"base_model.model.model."', '"base_model.model."'),
    ("lora.py", "first.scale * rank", "first.scale"),
    ("lora.py", "layer.scale = alpha / rank", "pass"),
    # Sampling, prompts and text.
    ("sample.py", "< self.lengths[:, None]", "< (self.ids != 0).sum(1, keepdim=True)"),
    ("sample.py", '" ".join(map(str, key))', "str(key[0])"),
    ("sample.py", "[0] * start + prompt", "prompt + [0] * start"),
    ("sample.py", "logits.float() / temperature", "logits.float()"),
    ("sample.py", "probabilities.gather(1, tokens)[:, 0]", "probabilities.amax(1)"),
    ("sample.py", "threshold, right=True", "threshold, right=False"),
    ("sample.py", "torch.tensor(eos_ids, device", "torch.tensor(eos_ids[:1], device"),
    ("sample.py", "& ~finished[rows]", ""),
    ("sample.py", "torch.where(ended, t + 1, lengths[rows])",
     "torch.where(ended, t, lengths[rows])"),
    ("sample.py", "logprobs[:, :T] * is_response", "logprobs[:, :T]"),
    ("sample.py", "        if not instruction:", "        if True:"),
    ("sample.py", "self.config.instruction or getattr", "getattr"),
    ("sample.py", "        if self.config.system:", "        if False:"),
    ("sample.py", "add_generation_prompt=True", "add_generation_prompt=False"),
    ("sample.py", "rollout.lengths - rollout.finished.long()", "rollout.lengths"),
    ("sample.py", "batch_decode(rows)", "batch_decode(rows, skip_special_tokens=True)"),
    ("sample.py", "if longest + max_new_tokens >", "if longest + max_new_tokens >="),
    # Advantages, the clipped loss and KL.
    ("grpo.py", "rewards - rewards.mean(1, keepdim=True)", "rewards - rewards.mean()"),
    ("grpo.py", "rewards.std(1, keepdim=True)", "rewards.std()"),
    ("grpo.py", "advantages.masked_fill(equal, 0.0)", "advantages"),
    ("grpo.py", "ratio.clamp(1 - CLIP, 1 + CLIP)", "ratio.clamp(max=1 + CLIP)"),
    ("grpo.py", "1 + CLIP)", "1 + 2 * CLIP)"),
    ("grpo.py", "torch.minimum", "torch.maximum"),
    ("grpo.py", "unclipped > clipped", "unclipped < clipped"),
    ("grpo.py", "difference = (reference - logprobs)", "difference = (logprobs - reference)"),
    ("grpo.py", "difference.exp() - difference - 1", "(difference.exp() - difference - 1) / 2"),
    ("grpo.py", "loss = kl * penalty", "loss = -kl * penalty"),
    ("grpo.py", "config.kl, PENALTIES[config.kl_form])", "config.kl)"),
    ("grpo.py", "(reference - logprobs).square() / 2", "(reference - logprobs).square()"),
    ("grpo.py", "** (step / config.steps)", "** step"),
    ("grpo.py", "mask / tokens.clamp(min=1)",
     "mask / rollout.lengths[:, None].clamp(min=1) / len(mask)"),
    ("grpo.py", "parallel.gather(rollout.lengths).sum()", "torch.tensor(mask.numel())"),
    ("grpo.py", "rows_of[chosen].flatten()", "rows_of[:len(chosen)].flatten()"),
    ("grpo.py", "slice(b * samples, (b + size)", "slice(0, (0 + size)"),
    ("model.py", "start.repeat_interleave(prefix.samples)", "start.repeat(prefix.samples)"),
    ("grpo.py", "(k3(current, base) * weight)", "(k3(current, base) * weight / 2)"),
    ("grpo.py", "with lora.disabled(model):", "if True:"),
    ("grpo.py", "before = current if old is None else old[rows, :T]", "before = current"),
    ("grpo.py", "current = logprobs.detach()", "current = logprobs"),
    ("grpo.py", "if not config.kl:", "if True:"),
    ("grpo.py", "rollout.lengths[rows].max())", "rollout.lengths[rows].max()) - 1"),
    ("grpo.py", "(clipped * weight).sum()", "clipped.float().mean()"),
    # What the strategy networks see, learn and remember.
    ("strategy.py", "expectation = 1 - ", "expectation = 1 + "),
    ("strategy.py", " + expectation + success", " + success"),
    ("strategy.py", "alignment + expectation", "expectation"),
    ("strategy.py", "(whole * (slow", "(whole.detach() * (slow"),
    ("strategy.py", "(contrast + mirrored) / 2", "contrast"),
    ("strategy.py", "info_nce(first, slow_second,", "info_nce(first, second,"),
    ("strategy.py", "with_logits(logits, correct)", "with_logits(logits, 1 - correct)"),
    ("strategy.py", "success = self.P(", "success = 1 - self.P("),
    ("strategy.py", "self.E(self.query_norm(query))", "self.PSE(self.query_norm(query))"),
    ("strategy.py", "self.PSE(self.response_norm(", "self.E(self.response_norm("),
    ("strategy.py", "lerp_(fast.data, 1 - MOMENTUM)", "lerp_(fast.data, 0.0)"),
    ("strategy.py", "mask & ~heads", "mask & heads"),
    ("strategy.py", "coin.gather(1, kind)", "torch.rand(ids.shape, generator=generator)"),
    ("strategy.py", "torch.where(halves.any(2, keepdim=True), halves, mask[:, None])", "halves"),
    ("strategy.py", ".amax(-1) < 1e-4", ".amax(-1) < 0"),
    ("strategy.py", "logits.masked_fill(same, -torch.inf)", "logits"),
    ("strategy.py", 'if negatives == "batch":', "if True:"),
    ("strategy.py", "/ (self.variance.sqrt() + 1e-5)", "/ (self.variance + 1e-5)"),
    ("strategy.py", "self.variance + between)", "self.variance)"),
    ("strategy.py", "self.mean += shift * len(x) / total", "self.mean += shift"),
    ("strategy.py", "total.clamp(max=STANDARDISE_ROWS)", "total"),
    ("strategy.py", "self.added + torch.arange(", "torch.arange("),
    ("strategy.py", "rows[name][-self.capacity:]", "rows[name][:self.capacity]"),
    ("strategy.py", "torch.randperm(filled, generator=generator)", "torch.arange(filled)"),
    ("strategy.py", "BATCH = 32", "BATCH = 1"),
    ("strategy.py", "BATCH * self.config.samples", "BATCH"),
    ("strategy.py", "with lora.disabled(self.model):", "if True:"),
    ("strategy.py", "rollout.mask()[:, 1:]", "rollout.mask()[:, :-1]"),
    ("strategy.py", "self.optimizer.zero_grad()", "pass"),
    ("strategy.py", "rollout.logprobs.view(", "rollout.logprobs.exp().view("),
    # Every equation of the reward.
    ("reward.py", "return F.cosine", "return -F.cosine"),
    ("reward.py", "return 1 - F.cosine", "return 1 + F.cosine"),
    ("reward.py", ".norm(dim=-1) * (1 - ss)", ".norm(dim=-1) * ss"),
    ("reward.py", "(correct - success).abs()", "(correct - success).square()"),
    ("reward.py", "((surprise * correct).sum() / correct.sum().clamp(min=1))", "surprise.mean()"),
    ("reward.py", "sus = sus - mean_success_surprise(signals.correct, signals.success)", "pass"),
    ("reward.py", "correct[:, None, :] * (1 - torch.eye", "(1 - torch.eye"),
    ("reward.py", "(1 - torch.eye(correct.shape[1], device=correct.device))", "1"),
    ("reward.py", "return z_pre + other_successes(correct) @ z_post",
     "return other_successes(correct) @ z_post"),
    ("reward.py", 'if config.expectation == "group":', "if False:"),
    ("reward.py", "* ss + config.lambda_sus * surprise", "* surprise + config.lambda_sus * ss"),
    ("reward.py", "(-signals.logprobs.sum(-1)", "(signals.logprobs.sum(-1)"),
    ("reward.py", "signals.lengths.clamp(min=1)", "signals.logprobs.shape[-1]"),
    ("reward.py", "return correct * is_mixed if", "return is_mixed.float() if"),
    ("reward.py", 'if name == "mixed" else is_mixed.float()', 'if name == "mixed" else correct'),
    ("reward.py", "!= correct.amin(1", "== correct.amin(1"),
    ("reward.py", "(config.alpha_decay * config.steps)", "config.steps"),
    ("reward.py", "max(0.0, 1.0 - step", "(1.0 - step"),
    ("reward.py", "bonus = alpha_at(step, config)", "bonus = config.alpha"),
    ("reward.py", "(1 + bonus).clamp(min=0.0)", "(1 + bonus)"),
    ("reward.py", "weights / scale", "weights"),
    ("reward.py", "gather(weights[earns])", "gather(weights)"),
    ("reward.py", 'if config.bonus == "added":', "if True:"),
    ("reward.py", "config.gate) > 0", "config.gate) >= 0"),
    ("reward.py", "return 1.0 - ((a @ b)", "return ((a @ b)"),
    ("reward.py", "b = extrinsic.flatten() - extrinsic.mean()", "b = extrinsic.flatten()"),
    ("reward.py", "n // samples", "n % len(problems)"),
    # The step and the loop.
    ("train.py", "reward.augment(correct, run.method(signals, weighed), config, step)",
     "correct + reward.alpha_at(step, config) * run.method(signals, weighed)"),
    ("train.py", "weighed), config, step)", "weighed), config, 0)"),
    ("train.py", "run.method(signals, weighed)", "run.method(signals, config)"),
    ("train.py", "run.method(signals,",
     "run.method(replace(signals, success=torch.zeros_like(signals.success)),"),
    ("train.py", "        strategist.observe(features, correct)", "        pass"),
    ("train.py", "(signals.success - correct)", "(1 - signals.success - correct)"),
    ("train.py", "strategist.learn(config.strategy_updates,", "strategist.learn(1,"),
    ("train.py", "run.strategist.learn(count,", "run.strategist.learn(1,"),
    ("train.py", "run.config.strategy_warmup if run.strategist else 0", "0"),
    ("train.py", "warm_up(run)", "pass"),
    ("train.py", "CLIP_GRADIENT = 1.0", "CLIP_GRADIENT = 1e9"),
    ("train.py", "min(1.0, (step + 1) / (RATE_WARMUP + 1))", "1.0"),
    ("train.py", "weight_decay=0.0", "weight_decay=0.1"),
    ("train.py", "run.optimizer.zero_grad()", "pass"),
    ("train.py", "for _ in range(config.epochs):", "for _ in range(1):"),
    ("train.py", "rollout.logprobs if config.epochs > 1 else None", "None"),
    ("train.py", "        if finite:", "        if True:"),
    ("train.py", '"skipped": int(not finite)', '"skipped": 0'),
    ("train.py", 'skipped + 1 if metrics["skipped"] else 0', 'skipped + metrics["skipped"]'),
    ("train.py", "torch.randperm(count, generator=", "torch.arange(count)  # "),
    ("train.py", 'self.generator("epoch", epoch)', 'self.generator("epoch", 0)'),
    ("train.py", "key = (self.config.seed, use, number)", "key = (use, number)"),
    ("train.py", "config.temperature, self.policy.eos_ids", "1.0, self.policy.eos_ids"),
    ("train.py", "self.model.recompute = config.recompute", "pass"),
    ("train.py", "if config.kl else None", "if False else None"),
    ("train.py", '"entropy": -values', '"entropy": values'),
    ("train.py", "correct.amax(1) == correct.amin(1)", "correct.amax(1) != correct.amin(1)"),
    ("train.py", "if run.step % config.checkpoint_every == 0:", "if False:"),
    ("train.py", "kl=grpo.kl_at(step, run.config))", "kl=run.config.kl)"),
    ("train.py", '"train", seed=config.seed)', '"train")'),
    ("train.py", "config.rank, seed=config.seed)", "config.rank)"),
    ("train.py", "config.eval_split, config.eval_problems)", '"test", config.eval_problems)'),
    ("train.py", 'prompts, "rollout", step)', 'prompts, "rollout", 0)'),
    ("train.py", 'run.generator("views", step,', 'run.generator("views", 0,'),
    ("train.py", 'run.generator("replay", step)', 'run.generator("replay", 0)'),
    ("train.py", '"warm-up rollout", number)', '"warm-up rollout", 0)'),
    ("train.py", "problems, prompts = run.batch(number)", "problems, prompts = run.batch(0)"),
    # Measuring.
    ("evaluate.py", "1.0 - math.comb(samples - correct, k) / math.comb(samples, k)",
     "1.0 - (1 - correct / samples) ** k"),
    ("evaluate.py", "[0.025, 0.975]", "[0.05, 0.95]"),
    ("evaluate.py", "+ draws[0] - draws[1:].mean()", "- draws[0] + draws[1:].mean()"),
    ("evaluate.py", "map(problem.valid, group)", "map(problem.judge, group)"),
    ("evaluate.py", "len(set(group)) / samples", "1 - len(set(group)) / samples"),
    ("evaluate.py", "(total / total.sum().clamp(min=1))", "(total / samples)"),
    ("evaluate.py", "if label is not None)", "if label)"),
    ("evaluate.py", "range(1, samples + 1)", "range(samples)"),
    ("evaluate.py", 'sample.seeded(seed, "evaluation", i)', 'sample.seeded(0, "evaluation", i)'),
    ("evaluate.py", '"evaluation", i)', '"evaluation")'),
    ("evaluate.py", "manual_seed(seed)", "manual_seed(0)"),
    ("evaluate.py", "config.eval_temperature, policy.eos_ids", "1.0, policy.eos_ids"),
    ("evaluate.py", "max(len(problem.strategies), 1)", "samples"),
    ("evaluate.py", "label if c else None", "label"),
    ("evaluate.py", "centre(draws - given)", "centre(draws)"),
    ("evaluate.py", "choice / (weights @ solved)", "choice / weights.sum(1)"),
    ("evaluate.py", "entropy(counts) + (seen - 1)", "entropy(counts) - (seen - 1)"),
    ("evaluate.py", "clustering or Clustering.fit(features)", "Clustering.fit(features)"),
    ("evaluate.py", 'lora.load(policy.model, folder / "adapter")', "lora.apply(policy.model)"),
    ("evaluate.py", "replace(config, data=base.data)", "config"),
)


def break_text(file: str, old: str, new: str) -> str:
    """The text of a method file with `old` replaced."""
    text = (ROOT / file).read_text()
    count = text.count(old)
    if count != 1:
        raise ValueError(f"{file}: {old!r} occurs {count} times, expected once")
    return text.replace(old, new)


def tests_pass(file: str, text: str, cache: str) -> bool:
    """Run the tests of a method file in a copy of the repository where it holds this text."""
    with TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        ignored = shutil.ignore_patterns(".*", "__pycache__", "runs", "cache*", "figures")
        shutil.copytree(ROOT, copy, ignore=ignored)
        (copy / file).write_text(text)
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider",
                   "--basetemp", f"{folder}/temporary", "-k", LEFT_OUT, *TESTS[file]]
        settings = {**os.environ, "SUS_TEST_CACHE": cache, "OMP_NUM_THREADS": "1"}
        try:
            done = subprocess.run(command, cwd=copy, env=settings, timeout=SECONDS,
                                  stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        except subprocess.TimeoutExpired:
            return False
        return done.returncode == 0


def main(chosen: list[str]) -> None:
    files = chosen or list(TESTS)
    if not set(files) <= set(TESTS):
        sys.exit(f"{__doc__}\nerror: expected some of {', '.join(TESTS)}")
    rows = [row for row in MUTANTS if row[0] in files]
    # A broken data.py or model.py must not build a base model of its own.
    build = "from tests.conftest import build_cache; print(build_cache(steps=100).parent)"
    cache = subprocess.run([sys.executable, "-c", build], cwd=ROOT, check=True, text=True,
                           stdout=subprocess.PIPE).stdout.split()[-1]
    runs = [(file, (ROOT / file).read_text(), cache) for file in files]
    broken = [(row[0], break_text(*row), cache) for row in rows]
    with ThreadPoolExecutor(WORKERS) as workers:
        unchanged = list(tqdm(workers.map(tests_pass, *zip(*runs)), "unchanged", len(runs)))
        if not all(unchanged):
            failed = [file for file, passed in zip(files, unchanged) if not passed]
            sys.exit(f"the tests of {', '.join(failed)} fail without any change")
        passed = list(tqdm(workers.map(tests_pass, *zip(*broken)), "mutants", len(broken)))
    survivors = [row for row, survived in zip(rows, passed) if survived]
    for file, old, new in survivors:
        print(f"survived: {file}: {old}  ->  {new}")
    caught = len(rows) - len(survivors)
    print(f"{caught} of {len(rows)} caught, {100 * caught / len(rows):.1f} %")


if __name__ == "__main__":
    main(sys.argv[1:])
