"""Evaluation: how often a policy is right, and how many ways of being right it still has.

    python evaluate.py runs/NAME            a trained run: everything else is read from its config.json
    python evaluate.py MODEL --data NAME    any model folder or hub id, no run needed
    python evaluate.py runs/NAME --export FOLDER        and write the merged model for others to load

pass@k is the unbiased estimator of Chen et al. (2021): with c of n samples correct, 1 - C(n-c, k) / C(n, k).
Strategy entropy is in nats, over the true strategies of all legal responses. Intervals are 95 % bootstrap
intervals over problems. The same seed gives the same numbers.
"""
import math
import sys
from collections import Counter
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import AutoTokenizer

import budget
import card
import checkpoint
import data
import encoder
import knobs
import lora
import parallel
import sample
import strategy
import tiny
from files import find_model_folder, read_json, write_json
from flags import fail, from_saved, knob, parse
from model import Transformer
from ruler import Ruler

KS = (1, 5, 16)
OF_A_RUN = {"data", "split", "problems", "samples", "temperature", "max_new_tokens", "prompt", "system", "instruction",
            "dtype", "cache"}                               # what a run brings with it


@dataclass(frozen=True)
class Config:
    path: str = knob("", "a run folder of train.py, a model folder, or a hub id")
    data: str = knob("countdown", f"{', '.join(data.KNOWN)}, or a JSONL file or folder; a run brings its own",
                     group="What is measured")
    split: str = knob("test", "of the data; a run brings its own", choices=("test", "validation"))
    problems: int = knob(200, "how many problems; a run brings its own", low=1)
    samples: int = knob(16, "responses to each; a run brings its own", low=1)
    temperature: float = knob(1.0, "sampling temperature, 0 is greedy; a run brings its own", low=0)
    max_new_tokens: int = knob(32, "longest response; a run brings its own", low=1)
    prompt: str = knob("auto", "chat uses the tokenizer's template, plain does not; a run brings its own", choices=knobs.PROMPTS)
    system: str = knob("", "system text of the chat; a run brings its own")
    instruction: str = knob("", "how to answer, instead of the task's own words; a run brings its own")
    seed: int = knob(0, "seed of the sampling", low=0, high=2 ** 32 - 1)
    output: str = knob("", "also write the results to this JSON file", group="Where")
    export: str = knob("", "also write a run's merged model into this folder, for transformers to load")
    device: str = knob("auto", "where to compute", choices=knobs.DEVICES)
    dtype: str = knob("auto", "of the base weights; auto is bfloat16 on cuda, else float32; a run brings its own",
                      choices=knobs.DTYPES)
    cache: str = knob("cache", "folder of the tiny base model; a run brings its own")


@dataclass(frozen=True)
class Prompt:
    """How a problem is put to a model: as it stands, or as a chat through the tokenizer's template."""
    style: str = "auto"                 # auto: chat if the tokenizer has a template
    system: str = ""                    # the chat's system text
    instruction: str = ""               # instead of the problem's own


@dataclass
class Policy:
    """A model that reads and writes text."""
    model: Transformer
    tokenizer: object
    eos_ids: tuple[int, ...]
    prompt: Prompt = Prompt()
    base: str = ""                      # where others find its base model: a folder or a hub id

    @property
    def is_chat(self) -> bool:
        return self.prompt.style == "chat" or (self.prompt.style == "auto" and bool(self.tokenizer.chat_template))

    def chat(self, problem) -> list[dict[str, str]]:
        instruction = self.prompt.instruction or getattr(problem, "instruction", "")
        content = "\n".join(filter(None, (getattr(problem, "question", problem.prompt), instruction)))
        system = [{"role": "system", "content": self.prompt.system}] if self.prompt.system else []
        return [*system, {"role": "user", "content": content}]

    def plain(self, problem) -> str:
        own, instruction = getattr(problem, "instruction", ""), self.prompt.instruction
        if not instruction:
            return problem.prompt
        if own and own in problem.prompt:
            return problem.prompt.replace(own, instruction)
        return f"{instruction}\n{problem.prompt}"

    def encode(self, problems: list) -> list[list[int]]:
        """Token ids of what the model reads."""
        if self.is_chat:
            try:
                return self.tokenizer.apply_chat_template([self.chat(problem) for problem in problems],
                                                          add_generation_prompt=True, return_dict=False)
            except Exception as error:                      # a template may refuse, and raises what it likes
                raise ValueError(f"the tokenizer's chat template fails ({type(error).__name__}: {error}): "
                                 "use --prompt plain, or leave out --system") from None
        return self.tokenizer([self.plain(problem) for problem in problems]).input_ids

    def decode(self, rollout: sample.Rollout) -> list[str]:
        """Without the end token, and with everything else that was sampled: a judge sees what the model said."""
        kept = (rollout.lengths - rollout.finished.long()).tolist()
        return self.tokenizer.batch_decode([ids[:n] for ids, n in zip(rollout.ids.tolist(), kept)])


def open_policy(name: str, task: str, cache: str, device: str, dtype: str, prompt: Prompt = Prompt(),
                rebuild: bool = False) -> Policy:
    """`tiny` is built when it is not in the cache; anything else is a Hugging Face folder or a hub id."""
    if not name:
        raise ValueError("an empty --model: expected tiny, a Hugging Face folder or a hub id")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    if device != "cpu" and not getattr(torch, device).is_available():
        raise ValueError(f"device {device} is not available on this machine: use --device cpu or auto")
    folder = tiny.find(task, Path(cache), rebuild) if name == "tiny" else find_model_folder(name)
    if dtype == "auto":
        dtype = "bfloat16" if device == "cuda" else "float32"
    model = Transformer.from_pretrained(folder, getattr(torch, dtype), device)
    if not any((folder / name).exists() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        raise ValueError(f"{folder} has no tokenizer.json: a model folder holds its tokenizer too")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:                              # transformers raises whatever its readers raise
        raise ValueError(f"{folder}: its tokenizer cannot be read ({type(error).__name__}: {error})") from None
    if prompt.style == "chat" and not tokenizer.chat_template:
        raise ValueError(f"--prompt chat: {folder} has no chat template; use --prompt plain or auto")
    policy = Policy(model, tokenizer, find_eos_ids(folder, tokenizer, model.config.vocab_size), prompt,
                    str(folder.absolute()) if name == "tiny" else name)
    if prompt.system and not policy.is_chat:
        raise ValueError("--system is a chat's: leave it out, or use --prompt chat and a model with a chat template")
    return policy


def find_eos_ids(folder: Path, tokenizer, vocab_size: int) -> tuple[int, ...]:
    """Every id that ends a response: generation_config.json knows most, and nothing else is taken from it."""
    found = {tokenizer.eos_token_id}
    for name in ("config.json", "generation_config.json"):
        value = read_json(folder / name).get("eos_token_id") if (folder / name).exists() else None
        found |= {i for i in (value if isinstance(value, list) else [value]) if type(i) is int}
    found = {i for i in found if i is not None and 0 <= i < vocab_size}
    if not found:
        raise ValueError(f"{folder}: no end token, neither in its tokenizer nor as eos_token_id in its config.json")
    return tuple(sorted(found))


def pass_at_k(samples: int, correct: int, k: int) -> float:
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)


def entropy(counts: Tensor) -> Tensor:
    """counts (..., K) -> the entropy of their frequencies in nats (...)."""
    frequencies = counts / counts.sum(-1, keepdim=True).clamp(min=1e-9)
    return torch.special.entr(frequencies).sum(-1)


@dataclass
class Measured:
    """An evaluation: its metrics, a record a problem for people to read, and the ruler that was used."""
    metrics: dict
    samples: list[dict]
    ruler: Ruler


def evaluate(policy: Policy, problems: list, samples: int, temperature: float, max_new_tokens: int, seed: int = 0,
             progress: bool = False, ruler: Ruler | None = None, rewards=None, batch: int = 32) -> Measured:
    """Sample and measure. Without a ruler one is fitted to these very responses. rewards(problems, prompts, rollout,
    responses), if there is one, names more that is known of each response, as tensors (B, G)."""
    responses, found, known = [], [], {}
    prompts = policy.encode(problems)
    starts = range(0, len(prompts), batch)
    mine = parallel.share(starts)
    for i in tqdm(mine or starts[:1], "evaluating", disable=not progress or parallel.rank(), leave=False):
        rollout = sample.generate(policy.model, prompts[i:i + batch], samples, max_new_tokens, temperature,
                                  policy.eos_ids, sample.seeded(seed, "evaluation", i))
        texts = policy.decode(rollout)
        responses += texts
        for name, value in (rewards(problems[i:i + batch], prompts[i:i + batch], rollout, texts) if rewards else {}).items():
            known.setdefault(name, []).extend(value.tolist())
        found.append(encoder.base_features(policy.model, prompts[i:i + batch], rollout, strategy.Settings().layer, batch,
                                           sample.seeded(seed, "views", i)))
    if not mine:                                            # a rank too many: it looked at a batch for the shapes alone
        responses, found, known = [], [encoder.Features(*(part[:0] for part in vars(found[0]).values()))], dict.fromkeys(known, [])
    responses = sum(parallel.gather_values(responses), [])
    known = {name: sum(parallel.gather_values(values), []) for name, values in known.items()}
    features = encoder.gather(encoder.join(found))
    ruler = ruler or Ruler.fit(policy.model, features)
    known["cluster"], known["place"] = (part.tolist() for part in ruler.read(features))
    groups = [responses[i:i + samples] for i in range(0, len(responses), samples)]
    metrics = measure(problems, groups, seed, known["cluster"])
    return Measured(metrics, [record(problem, group, {name: value[n] for name, value in known.items()})
                              for n, (problem, group) in enumerate(zip(problems, groups))], ruler)


def record(problem, group: list[str], known: dict[str, list]) -> dict:
    """A problem and its responses, as samples.jsonl has them; known: one value a response under each name."""
    responses = [{"text": text, "correct": problem.judge(text), **dict(zip(known, more))}
                 for text, *more in zip(group, *known.values())]
    if hasattr(problem, "strategy_of"):
        responses = [{**response, "strategy": problem.strategy_of(response["text"])} for response in responses]
    return {"question": getattr(problem, "question", problem.prompt), "responses": responses}


def measure(problems: list, groups: list[list[str]], seed: int = 0, clusters: list[list[int]] | None = None) -> dict:
    """Judge each problem's responses -> metrics with their intervals. None where a task cannot tell."""
    samples = len(groups[0])
    correct = [round(sum(map(problem.judge, group))) for problem, group in zip(problems, groups)]
    shares = {f"pass@{k}": [pass_at_k(samples, c, k) for c in correct] for k in KS if k <= samples}
    shares["distinct"] = [len(set(group)) / samples for group in groups]
    if hasattr(problems[0], "valid"):
        shares["valid"] = [sum(map(problem.valid, group)) / samples for problem, group in zip(problems, groups)]
    counts = {"cluster_entropy": count(clusters)[1]} if clusters else {}
    strategies = None
    for name, reader in (("path_entropy", "path_of"), ("strategy_entropy", "strategy_of")):
        if hasattr(problems[0], reader):
            labels = [list(map(getattr(problem, reader), group)) for problem, group in zip(problems, groups)]
            names, counts[name] = count(labels)
            shown = counts[name].sum(0)
            strategies = dict(zip(names, (shown / shown.sum().clamp(min=1)).tolist()))
    # Row 0 weighs every problem once, the others are 1,000 draws of the problems with replacement.
    n, generator = len(problems), torch.Generator().manual_seed(seed)
    drawn = torch.randint(n, (1000, n), generator=generator)
    weights = torch.cat((torch.ones(1, n), torch.zeros(1000, n).scatter_add_(1, drawn, torch.ones(1000, n)))).double()
    values = {name: weights @ torch.tensor(share, dtype=torch.float64) / n for name, share in shares.items()}
    for name, table in counts.items():
        found = entropy(weights @ table)                    # fewer different problems show fewer strategies: centre the draws
        values[name] = torch.cat((found[:1], found[1:] + found[0] - found[1:].mean()))
    quantiles = torch.tensor([0.025, 0.975], dtype=torch.float64)
    result = dict.fromkeys(("pass@1", "pass@5", "pass@16", "strategy_entropy", "path_entropy", "cluster_entropy", "valid",
                            "distinct"))
    result |= {name: value[0].item() for name, value in values.items()}
    result["pass_curve"] = [sum(pass_at_k(samples, c, k) for c in correct) / n for k in range(1, samples + 1)]
    result["strategies"] = strategies
    result["intervals"] = {name: value[1:].quantile(quantiles).tolist() for name, value in values.items()}
    return result | {"problems": n, "samples": samples, "seed": seed}


def count(labels: list[list]) -> tuple[list, Tensor]:
    """Each problem's labels, None for none -> the labels there are, and how often each problem shows each (problems, K)."""
    tables = [Counter(label for label in row if label is not None) for row in labels]
    names = sorted(set().union(*tables)) or [""]
    return names, torch.tensor([[table[name] for name in names] for table in tables], dtype=torch.float64)


def show(samples: list[dict], problems: int = 5) -> str:
    """A few problems for people to read, those with the most clusters first: a response of each cluster, right ones first."""
    text = ["# Samples"]
    def clusters(record):
        return len({response["cluster"] for response in record["responses"]})
    for record in sorted(samples, key=clusters, reverse=True)[:problems]:
        chosen: dict[int, dict] = {}
        for response in sorted(record["responses"], key=lambda r: -r["correct"]):
            chosen.setdefault(response["cluster"], response)
        text.append(f"\n## {record['question']}")
        for cluster, response in chosen.items():
            strategy = f", strategy {response['strategy']}" if response.get("strategy") else ""
            text.append(f"\n{'Right' if response['correct'] else 'Wrong'}, cluster {cluster}{strategy}:\n")
            text.append(f"```\n{response['text'].strip()}\n```")
    return "\n".join(text) + "\n"


def export(policy: Policy, folder: Path, config: dict, steps: int, metrics: dict, where: str) -> None:
    """Merged weights, tokenizer, end tokens and a model card, as a folder that transformers loads."""
    policy.tokenizer.save_pretrained(folder)
    write_json(folder / "generation_config.json", {"eos_token_id": list(policy.eos_ids)})
    card.write(folder, policy.base, config, steps, metrics, where, merged=True)
    with lora.merged(policy.model):
        policy.model.save_pretrained(folder)                # last: config.json marks a folder that is complete


def lost(before: dict, after: dict) -> list[str]:
    """The strategies that had at least 1 % of the legal responses and have less than 0.1 % now."""
    had, has = before.get("strategies") or {}, after.get("strategies") or {}
    return [name for name, share in had.items() if share >= 0.01 and has.get(name, 0.0) < 0.001]


def table(columns: dict[str, dict]) -> str:
    """{heading: result} -> the small table that people read."""
    lines = [f"{'':18}" + "".join(f"{heading:>26}" for heading in columns)]
    for name in ("pass@1", "pass@5", "pass@16", "strategy_entropy", "cluster_entropy", "valid", "distinct"):
        cells = []
        for result in columns.values():
            if result.get(name) is None:
                cells.append("-")
                continue
            unit, digits, low_high = (1, 2, "{:.2f} to {:.2f}") if "entropy" in name else (100, 1, "{:.1f} to {:.1f} %")
            low, high = (unit * bound for bound in result["intervals"][name])
            cells.append(f"{unit * result[name]:.{digits}f} ({low_high.format(low, high)})")
        lines.append(f"{name.replace('_', ' '):18}" + "".join(f"{cell:>26}" for cell in cells))
    return "\n".join(lines)


def evaluate_path(config: Config, given: set[str]) -> None:
    """Evaluate what the command line names and report: a run with the settings in its folder, unless flags say otherwise."""
    path, model, base_task, ruler = Path(config.path), config.path, config.data, None
    is_run = (path / "config.json").is_file() and "method" in read_json(path / "config.json")
    if config.export and not is_run:
        raise ValueError(f"--export writes a trained run: {config.path} is none")
    if is_run:
        saved = from_saved(knobs.Config, read_json(path / "config.json"), str(path / "config.json"))
        settings = {**asdict(saved), "split": saved.eval_split, "problems": saved.eval_problems,
                    "samples": saved.eval_samples}
        config = replace(config, **{name: settings[name] for name in OF_A_RUN - given})
        model, base_task = saved.model, saved.data
    problems = data.load(config.data, config.split, config.problems)
    policy = open_policy(model, base_task, config.cache, config.device, config.dtype,
                         Prompt(config.prompt, config.system, config.instruction))
    if is_run and not (path / "adapter" / "adapter_config.json").exists():
        raise ValueError(f"{path} has no adapter yet: it stopped before its first checkpoint, resume it")
    if is_run:
        step = checkpoint.newest(path, policy.model)
        lora.load(policy.model, path / "adapter")
        ruler = Ruler.load(path / "ruler.safetensors", policy.model) if (path / "ruler.safetensors").exists() else None
    if config.export:
        Path(config.export).mkdir(parents=True, exist_ok=True)             # a bad place should fail now, not after the evaluation
    result = evaluate(policy, problems, config.samples, config.temperature, config.max_new_tokens, config.seed, True, ruler).metrics
    if is_run and ruler is None:                            # without the base model's ruler there is nothing to compare with
        result["cluster_entropy"] = None
    print(table({path.name: result}))
    if config.output:
        write_json(Path(config.output), result)
        print(f"written to {config.output}")
    if config.export:
        export(policy, Path(config.export), asdict(saved), step, result, f"{config.split} problems of {config.data}")
        print(f"written to {config.export}")


def main(argv: list[str] | None = None) -> None:
    budget.reuse_memory()
    config, given = parse(Config, __doc__, argv, positional="path")
    try:
        if not config.path:
            raise ValueError("an empty path: expected a run folder, a model folder or a hub id")
        if config.output and (Path(config.output).is_dir() or not Path(config.output).absolute().parent.is_dir()):
            raise ValueError(f"--output {config.output}: expected a file in a folder that exists")
        target = Path(config.export)
        if config.export and target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise ValueError(f"--export {config.export} exists and is not an empty folder: choose another")
        evaluate_path(config, given)
    except (ValueError, OSError, FloatingPointError) as error:
        fail(error)
    except (RuntimeError, MemoryError) as error:
        if not budget.is_out_of_memory(error):
            raise
        fail(budget.OUT_OF_MEMORY)
    except KeyboardInterrupt:
        sys.exit("stopped")


if __name__ == "__main__":
    main()
