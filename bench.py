"""Speed, beside what one would otherwise use, on this machine and in one run: ratios with their spread.

    pip install -r requirements-bench.txt       the peers: TRL, PEFT, accelerate
    python bench.py                             everything, about half an hour on two cores; writes bench.json and bench.png
    python bench.py --parts rollout,step        some of it

rollout     tokens a second of sample.py over those of transformers' generate: 16 and 64 sequences, prompts of 35 and 150 tokens,
            64 new tokens, none or some of them ending early
step        a whole GRPO step (rollout, reference, update, optimizer; LoRA of rank 8, KL penalty) beside TRL's GRPOTrainer with
            PEFT: 2 problems x 8 responses x 64 tokens, and the default Countdown step
memory      peak memory of the same, each in a process of its own
limits      useful arithmetic of the update over the matmul rate of this machine, and bytes of a decoding step over its bandwidth
overhead    what SuS adds to plain GRPO, with the policy's own base as encoder
growth      time and memory of a step against group size, prompt, response and vocabulary, with fitted exponents

The large shape has random weights and 135 million parameters (SmolLM2's); the tiny one is the built-in model's. Both sides take
turns, ratios are medians, in parentheses the smallest and the largest. More than 1 is in favour of this project, except for
memory and overhead. Peers that are not installed are skipped.
"""
import importlib.util
import json
import math
import os
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch

import grpo
import lora
import sample
import tiny
import train
from files import write_json
from flags import fail, knob, parse
from model import ModelConfig, Transformer

LARGE = {**tiny.CONFIG, "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
         "num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 2048}
TINY = {**tiny.CONFIG, "max_position_embeddings": 2048}
SAMPLES, NEW_TOKENS, ROUNDS = 8, 64, 3
PARTS = ("rollout", "step", "memory", "limits", "overhead", "growth")
PEERS = ("trl", "peft", "accelerate")


@dataclass(frozen=True)
class Config:
    parts: tuple = knob(PARTS, "what to measure")
    folder: str = knob(".", "where bench.json and bench.png go")
    child: tuple = knob((), "for its own processes")


RATIOS: dict[str, float] = {}


def report(name: str, values: list[float], text: str, keep: bool = True) -> None:
    """Print the median and its range; under `ratios` in bench.json if it is one of the promised figures."""
    values = sorted(values)
    print(f"{name:14} {values[len(values) // 2]:7.3f} ({values[0]:.3f} to {values[-1]:.3f})  {text}", flush=True)
    if keep:
        RATIOS[name] = values[len(values) // 2]


def timed(function, *arguments) -> tuple[float, object]:
    begin = time.perf_counter()
    result = function(*arguments)
    return time.perf_counter() - begin, result


def peak_memory() -> int:
    """Bytes. Linux counts a process's getrusage from the one that started it, its own status does not."""
    status = Path("/proc/self/status")
    if status.exists():
        return int(next(line.split()[1] for line in status.read_text().splitlines() if line.startswith("VmHWM"))) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def make_model(shape: dict) -> Transformer:
    """Random weights, frozen, with adapters that are no longer zero."""
    model = Transformer(ModelConfig.from_dict(shape))
    tiny.initialise(model, torch.Generator().manual_seed(0))
    lora.apply(model)
    for number, adapter in enumerate(lora.parameters(model).values()):
        adapter.data += 0.01 * torch.randn(adapter.shape, generator=torch.Generator().manual_seed(number))
    return model


def make_peer(shape: dict, folder: Path):
    """The same shape in transformers."""
    import transformers
    transformers.logging.set_verbosity_error()
    if not (folder / "config.json").exists():
        model = Transformer(ModelConfig.from_dict(shape))
        tiny.initialise(model, torch.Generator().manual_seed(0))
        model.save_pretrained(folder)
    return transformers.AutoModelForCausalLM.from_pretrained(folder)


def make_prompts(shape: dict, count: int, length: int) -> list[list[int]]:
    return torch.randint(2, min(100, shape["vocab_size"]), (count, length), generator=torch.Generator().manual_seed(1)).tolist()


def rollout(folder: Path) -> None:
    for name, shape, sequences, length in (("rollout_16", LARGE, 16, 35), ("rollout_64", LARGE, 64, 35), ("rollout_16_150", LARGE, 16, 150),
                                           ("rollout_64_150", LARGE, 64, 150), ("rollout_tiny", TINY, 256, 9)):
        ours, theirs = make_model(shape), make_peer(shape, folder / f"{shape['hidden_size']}")
        prompts = make_prompts(shape, sequences // SAMPLES, length)
        repeated = torch.tensor(prompts).repeat_interleave(SAMPLES, 0)
        tokens = NEW_TOKENS if shape is LARGE else 16
        for early in (False, True):
            # Ids that end a response: so many that half of the responses end early, or none.
            ends = tuple(range(shape["vocab_size"] * 2 // 100)) if early else ()
            peer = dict(attention_mask=torch.ones_like(repeated), do_sample=True, top_k=0, top_p=1.0, temperature=1.0, max_new_tokens=tokens,
                        pad_token_id=0, eos_token_id=list(ends) or None, use_cache=True)
            ratios = []
            for round in range(ROUNDS + 1):
                a, found = timed(sample.generate, ours, prompts, SAMPLES, tokens, 1.0, ends, sample.seeded(round))
                with torch.inference_mode():
                    b, ids = timed(lambda: theirs.generate(repeated, **peer))
                new = ids[:, length:]
                ended = torch.isin(new, torch.tensor(ends)).long() if ends else torch.zeros_like(new)
                count = int(((ended.cumsum(1) - ended) == 0).sum())
                if round:
                    ratios.append((int(found.lengths.sum()) / a) / (count / b))
            kind = "some ending early" if early else "none ending early"
            report(name + ("_early" if early else ""), ratios, f"times generate's tokens a second, {sequences} x {tokens}, {kind}",
                   keep=not early)


def our_step(model: Transformer, optimizer, prompts: list, tokens: int, settings: grpo.LossSettings, seed: int) -> None:
    """A GRPO step with advantages that do not depend on a judge."""
    found = sample.generate(model, prompts, SAMPLES, tokens, 1.0, (), sample.seeded(seed))
    reference = grpo.reference_logprobs(model, prompts, found, settings) if settings.kl else None
    rewards = torch.rand(len(prompts), SAMPLES, generator=sample.seeded(seed, "rewards"))
    optimizer.zero_grad()
    grpo.accumulate_gradient(model, prompts, found, grpo.group_advantages(rewards, "std"), settings, reference)
    torch.nn.utils.clip_grad_norm_(lora.parameters(model).values(), 1.0)
    optimizer.step()


def trl_trainer(shape: dict, folder: Path, prompts: list, tokens: int, kl: float, steps: int, callback):
    """GRPOTrainer on the same shape, prompts, counts and adapters; every completion has all its tokens."""
    import datasets
    import peft
    import random
    import transformers
    import trl
    from tokenizers import Tokenizer, models, pre_tokenizers
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(shape["vocab_size"])}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w1", unk_token="w0")
    texts = [" ".join(f"w{i}" for i in prompt) for prompt in prompts]
    rng = random.Random(0)
    arguments = trl.GRPOConfig(
        output_dir=str(folder / "trl"), per_device_train_batch_size=len(prompts) * SAMPLES, num_generations=SAMPLES, max_completion_length=tokens,
        beta=kl, temperature=1.0, top_k=0, top_p=1.0, learning_rate=1e-4, max_steps=steps, use_cpu=True, report_to="none", save_strategy="no",
        logging_strategy="no", disable_tqdm=True, bf16=False, fp16=False, gradient_checkpointing=False, loss_type="grpo",
        generation_kwargs={"min_new_tokens": tokens, "eos_token_id": 1})
    return trl.GRPOTrainer(
        make_peer(shape, folder / f"{shape['hidden_size']}"), lambda completions, **_: [rng.random() for _ in completions], arguments,
        datasets.Dataset.from_dict({"prompt": texts * steps}), processing_class=tokenizer, callbacks=[callback] if callback else None,
        peft_config=peft.LoraConfig(r=8, lora_alpha=16, target_modules=list(lora.TARGETS), task_type="CAUSAL_LM"))


CASES = {"step_35": (LARGE, 2, 35, NEW_TOKENS, 0.04), "step_150": (LARGE, 2, 150, NEW_TOKENS, 0.04), "step_tiny": (TINY, 32, 9, 16, 0.0)}


def our_side(name: str):
    """-> a function that takes the step of this number."""
    shape, problems, length, tokens, kl = CASES[name]
    model, prompts = make_model(shape), make_prompts(shape, problems, length)
    optimizer = torch.optim.AdamW(lora.parameters(model).values(), lr=1e-4)
    settings = grpo.LossSettings(kl=kl, max_new_tokens=tokens, micro_batch=32)
    return lambda number: our_step(model, optimizer, prompts, tokens, settings, number)


def trl_side(name: str, folder: Path, rounds: int, between=None) -> None:
    """TRL's steps; between(seconds) is called after each."""
    import transformers
    shape, problems, length, tokens, kl = CASES[name]

    class Clock(transformers.TrainerCallback):
        def on_step_begin(self, *arguments, **options):
            self.begin = time.perf_counter()

        def on_step_end(self, *arguments, **options):
            if between:
                between(time.perf_counter() - self.begin)
    trl_trainer(shape, folder, make_prompts(shape, problems, length), tokens, kl, rounds, Clock()).train()


def step(folder: Path) -> None:
    for name in CASES:
        ours, ratios = our_side(name), []
        ours(0)

        def take_turn(seconds):
            ratios.append(seconds / timed(ours, len(ratios) + 1)[0])
        trl_side(name, folder, ROUNDS + 1, take_turn)
        report(name, ratios[1:], "times as fast as TRL's GRPOTrainer")


def in_child(*words: str) -> float:
    """A figure that a process of its own prints: its peak memory, or its seconds."""
    done = subprocess.run([sys.executable, __file__, "--child", ",".join(words)], capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"a measurement failed ({' '.join(words)}): {done.stderr.strip().splitlines()[-1]}")
    return json.loads(done.stdout.splitlines()[-1])


def memory(folder: Path) -> None:
    for name in ("step_35", "step_150"):
        ours, theirs = (in_child("memory", side, name, str(folder)) for side in ("ours", "trl"))
        report("memory" if name == "step_35" else "memory_150", [ours / theirs],
               f"of TRL's peak memory ({ours / 2**30:.2f} of {theirs / 2**30:.2f} GB), prompts of {CASES[name][2]}")


def limits(folder: Path) -> None:
    """Useful arithmetic only: two operations a weight and token forward, two backward through the frozen weights."""
    square = [torch.randn(1536, 1536) for _ in range(2)]
    model, prompts = make_model(LARGE), make_prompts(LARGE, 2, 35)
    found = sample.generate(model, prompts, SAMPLES, NEW_TOKENS, 1.0, (), sample.seeded(0))
    advantages, settings = torch.randn(2, SAMPLES), grpo.LossSettings(max_new_tokens=NEW_TOKENS, micro_batch=8)
    matrices = sum(p.numel() for name, p in model.named_parameters() if p.ndim == 2 and "lora" not in name and "embed" not in name)
    adapters = sum(p.numel() for p in lora.parameters(model).values())
    tokens, scored = 2 * 35 + 2 * SAMPLES * NEW_TOKENS, 2 * SAMPLES * NEW_TOKENS
    work = tokens * (4 * matrices + 6 * adapters) + 4 * scored * model.head.numel()
    large = torch.ones(2 ** 28)
    shares, bandwidth = [], []
    for round in range(2 * ROUNDS + 1):
        peak = max(2 * 1536 ** 3 / timed(torch.mm, *square)[0] for _ in range(5))
        model.zero_grad()
        seconds, _ = timed(grpo.accumulate_gradient, model, prompts, found, advantages, settings)
        decode = (timed(sample.generate, model, prompts, SAMPLES, 33, 1.0, (), sample.seeded(0))[0]
                  - timed(sample.generate, model, prompts, SAMPLES, 1, 1.0, (), sample.seeded(0))[0]) / 32
        reading = large.nbytes / timed(large.sum)[0]
        if round:
            shares.append(work / seconds / peak)
            bandwidth.append(4 * (matrices + model.head.numel()) / decode / reading)
    report("update_of_peak", shares, f"of the matmul rate ({peak / 1e9:.0f} GFLOP/s) reached by the update")
    report("decode_of_bandwidth", bandwidth, f"of the memory bandwidth ({reading / 1e9:.0f} GB/s) reached by decoding 16 rows", keep=False)


def make_run(method: str, flags: list[str]) -> train.Run:
    """A run as train.py would start it; nothing is written until it takes a checkpoint, which it does not."""
    config, _ = parse(train.Config, "", ["--run", "unused", "--device", "cpu", "--method", method, *flags])
    return train.Run(config)


def overhead(folder: Path) -> None:
    """Steps of SuS and of plain GRPO in turns. alpha is 0, so that both policies stay the same and do the same work."""
    runs, ratios = {method: make_run(method, ["--alpha", "0"]) for method in ("sus", "grpo")}, []
    for round in range(10 * ROUNDS + 1):
        seconds = {method: timed(train.train_step, run)[0] for method, run in runs.items()}
        runs = dict(reversed(runs.items()))                 # neither always comes first
        if round:
            ratios.append(seconds["sus"] / seconds["grpo"])
    report("sus_time_tiny", ratios, "times GRPO's step on the tiny model", keep=False)
    place = folder / "large"
    if not place.exists():
        tiny.make_tokenizer().save_pretrained(place)
        make_peer(LARGE, place)
    flags = ["--model", str(place), "--problems", "2", "--max-new-tokens", "64", "--kl", "0.05", "--dtype", "float32", "--strategy-warmup", "0"]
    # On a large model SuS takes less than two whole steps differ by chance: what it does is timed inside the step.
    run, spent = make_run("sus", ["--alpha", "0", *flags]), []
    for name in ("observe", "tally", "signals", "update"):
        def wrapped(*arguments, original=getattr(run.strategist, name)):
            seconds, result = timed(original, *arguments)
            spent[-1] += seconds
            return result
        setattr(run.strategist, name, wrapped)
    base_features = train.strategy.encoder.base_features

    def pooled(*arguments):
        seconds, result = timed(base_features, *arguments)
        spent[-1] += seconds
        return result
    train.strategy.encoder.base_features, ratios = pooled, []
    for round in range(ROUNDS + 1):
        spent.append(0.0)
        seconds, _ = timed(train.train_step, run)
        if round:
            ratios.append(seconds / (seconds - spent[-1]))
    train.strategy.encoder.base_features = base_features
    report("sus_time", ratios, f"times GRPO's step on the large shape (SuS itself: {1000 * sorted(spent)[len(spent) // 2]:.0f} ms)")
    sus, plain = (in_child("overhead", method, *flags) for method in ("sus", "grpo"))
    report("sus_memory", [sus / plain], f"times GRPO's peak memory ({sus / 2**30:.2f} of {plain / 2**30:.2f} GB)")


GROWTH = {"group size": (2, 4, 8, 16, 32), "prompt length": (50, 100, 200, 400, 800), "response length": (32, 64, 128, 256, 512),
          "vocabulary": (5_000, 20_000, 50_000, 100_000, 150_000)}
SMALL = {**LARGE, "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2,
         "vocab_size": 5_000}


def grow(what: str, value: int) -> tuple[float, int]:
    """-> seconds of a step's update and the memory it adds, with this one thing changed. In a process of its own."""
    sizes = {"group size": 8, "prompt length": 100, "response length": 64, "vocabulary": 5_000, what: value}
    model = make_model({**SMALL, "vocab_size": sizes["vocabulary"]})
    prompts, rows = make_prompts(SMALL, 2, sizes["prompt length"]), 2 * sizes["group size"]
    found = sample.Rollout(torch.randint(sizes["vocabulary"], (rows, sizes["response length"])), torch.full((rows,), sizes["response length"]),
                           torch.zeros(rows, sizes["response length"]), torch.ones(rows).bool())
    advantages, settings = torch.randn(2, sizes["group size"]), grpo.LossSettings(micro_batch=1, max_new_tokens=sizes["response length"])
    before = peak_memory()
    seconds = []
    for _ in range(3):
        model.zero_grad()
        seconds.append(timed(grpo.accumulate_gradient, model, prompts, found, advantages, settings)[0])
    return min(seconds), peak_memory() - before


def growth(folder: Path) -> None:
    """Exponents of a power law fitted to the larger half of the values: 1 is linear, 0 does not grow."""
    points = {what: [in_child("growth", what, str(value)) for value in values] for what, values in GROWTH.items()}
    for what, values in GROWTH.items():
        fitted = []
        for part in (0, 1):
            x, y = ([math.log(n) for n in numbers[-3:]] for numbers in (values, [point[part] for point in points[what]]))
            mx, my = sum(x) / 3, sum(y) / 3
            fitted.append(sum((a - mx) * (b - my) for a, b in zip(x, y)) / sum((a - mx) ** 2 for a in x))
        print(f"{what:16} x {values[-1] / values[-3]:.0f}: time grows with exponent {fitted[0]:.2f}, memory with {fitted[1]:.2f}   "
              + "  ".join(f"{value}: {seconds:.2f} s {size / 2**20:.0f} MB" for value, (seconds, size) in zip(values, points[what])), flush=True)
    if importlib.util.find_spec("matplotlib"):
        draw(points)


def draw(points: dict) -> None:
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    figure, axes = pyplot.subplots(1, len(points), figsize=(3.4 * len(points), 3), constrained_layout=True)
    for axis, (what, found) in zip(axes, points.items()):
        for part, (label, unit, colour) in enumerate((("seconds", 1, "#0072B2"), ("memory, GB", 2 ** 30, "#D55E00"))):
            axis.loglog(GROWTH[what], [max(point[part], 1) / unit if part else point[0] for point in found], "o-", color=colour, label=label)
        axis.set_xlabel(what), axis.grid(alpha=0.25, which="both"), axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(frameon=False)
    figure.suptitle("An update of 2 problems: time and memory as one thing grows")
    figure.savefig("bench.png", dpi=120)


def child(kind: str, *words: str) -> None:
    if kind == "growth":
        return print(json.dumps(grow(words[0], int(words[1]))))
    if kind == "overhead":
        run = make_run(words[0], list(words[1:]))
        for _ in range(3):
            train.train_step(run)
    elif words[0] == "ours":
        take = our_side(words[1])
        for number in range(2):
            take(number)
    else:
        trl_side(words[1], Path(words[2]), 2)
    print(json.dumps(peak_memory()))


def main(argv: list[str] | None = None) -> None:
    config, _ = parse(Config, __doc__, argv)
    try:
        if config.child:
            return child(*config.child)
        if odd := set(config.parts) - set(PARTS):
            raise ValueError(f"--parts {', '.join(sorted(odd))}: expected some of {', '.join(PARTS)}")
        missing = [name for name in PEERS if importlib.util.find_spec(name) is None]
        os.chdir(config.folder)
        with tempfile.TemporaryDirectory() as folder:
            for part in config.parts:
                if part in ("step", "memory") and missing:
                    print(f"{part}: skipped, since {', '.join(missing)} is not installed (pip install -r requirements-bench.txt)")
                    continue
                globals()[part](Path(folder))
        write_json(Path("bench.json"), {"ratios": RATIOS, "cores": os.cpu_count(), "threads": torch.get_num_threads(),
                                        "torch": torch.__version__})
        print("written to bench.json")
    except (ValueError, OSError) as error:
        fail(error)


if __name__ == "__main__":
    main()
