"""Evaluation: how often a policy is right, and how many strategies it still has.

    python evaluate.py runs/NAME            a trained run, with the settings of its config.json
    python evaluate.py MODEL --data NAME    any model folder or hub id, or tiny; no run needed
    python evaluate.py runs/NAME --export FOLDER    also write the merged model
    python evaluate.py runs/NAME --ask "use 7,3,6 to make 27:"      base and trained model answer

pass@k is the unbiased estimator of Chen et al. (2021): with c of n samples correct, 1 - C(n-c, k) /
C(n, k). Coverage is the share of a problem's correct strategies that its responses find. Entropies
are in nats: strategy entropy over the true strategies of all legal responses (it rewards
ignorance: the base model has the most), strategy choice over those of one problem's correct
responses; strategy information is the mutual information of problem and strategy; cluster entropy,
after the paper, is over clusters of embeddings (support/clustering.py). Intervals are 95 %
bootstrap intervals over problems. The same seed gives the same numbers.
"""
import math
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import support  # noqa: F401  isort: skip  before torch: it sets how torch's threads wait
import torch
from torch import Tensor
from tqdm import tqdm

import data
import lora
import reward
import sample
from sample import Policy
from strategy import BaseEncoder, Features
from support import checkpoint, files, parallel, report, tiny
from support.ask import KEEP_ASKING, talk
from support.clustering import Clustering
from support.config import Config, check_config, flag, guard, parse
from support.fast import accelerate

KS = (1, 5, 16)
BATCH = 32  # problems that are sampled at a time
DRAWS = 1000  # of the bootstrap


def pass_at_k(samples: int, correct: int, k: int) -> float:
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)


def entropy(counts: Tensor) -> Tensor:
    """counts (..., K) -> the entropy of their frequencies in nats (...)."""
    frequencies = counts / counts.sum(-1, keepdim=True).clamp(min=1e-9)
    return torch.special.entr(frequencies).sum(-1)


def corrected_entropy(counts: Tensor) -> Tensor:
    """Miller and Madow's: + (labels seen - 1) / (2 samples), since few samples show few labels."""
    seen, total = (counts > 0).sum(-1), counts.sum(-1)
    return entropy(counts) + (seen - 1).clamp(min=0) / (2 * total.clamp(min=1))


def centre(draws: Tensor) -> Tensor:
    """A draw repeats problems, so it shows fewer labels and too little entropy: shift all draws so
    that their mean is the estimate, which comes first."""
    return torch.cat((draws[:1], draws[1:] + draws[0] - draws[1:].mean()))


@dataclass
class Evaluation:
    metrics: dict
    records: list[dict]  # per problem, its responses with what is known of each
    clustering: Clustering
    features: Features


def evaluate(policy: Policy, problems: list, config: Config, clustering: Clustering | None = None,
             seed: int = 0) -> Evaluation:
    """Sample --eval-samples responses to each problem and measure.

    Without a clustering, one is fitted to these responses. Ranks share the work.
    """
    G, model = config.eval_samples, policy.model
    prompts = policy.encode(problems)
    encoder = BaseEncoder(model, BATCH)
    shapes = ((), (G,), (G, 2))
    parts = [Features(*(torch.zeros(0, *shape, encoder.size, device=model.device)
                        for shape in shapes))]  # a rank may have no batch
    responses = []
    starts = parallel.share(range(0, len(prompts), BATCH))
    for i in tqdm(starts, "evaluating", disable=not parallel.is_leader(), leave=False):
        chosen = slice(i, i + BATCH)
        rollout = sample.generate(model, prompts[chosen], G, config.max_new_tokens,
                                  config.eval_temperature, policy.eos_ids,
                                  sample.seeded(seed, "evaluation", i))
        texts = policy.decode(rollout)
        responses += texts
        parts.append(encoder.encode(problems[chosen], prompts[chosen], rollout, texts,
                                    sample.seeded(seed, "views", i)))
    responses = parallel.gather_lists(responses)
    features = Features.join(parts).gather()
    clustering = clustering or Clustering.fit(features)
    clusters, places = (part.tolist() for part in clustering.read(features))
    groups = [responses[i:i + G] for i in range(0, len(responses), G)]
    records = [report.make_record(*row) for row in zip(problems, groups, clusters, places)]
    metrics = measure(problems, groups, clusters, seed)
    metrics |= {"data": config.data, "split": config.eval_split,
                "temperature": config.eval_temperature}
    return Evaluation(metrics, records, clustering, features)


def count_labels(labels: list[list]) -> tuple[list, Tensor]:
    """Each problem's labels, None for none -> all labels, and their counts per problem (n, K)."""
    tables = [Counter(label for label in row if label is not None) for row in labels]
    names = sorted(set().union(*tables))
    counts = [[table[name] for name in names] for table in tables]
    return names, torch.tensor(counts, dtype=torch.float64)


def bootstrap_weights(n: int, seed: int) -> Tensor:
    """(1 + DRAWS, n): row 0 counts every problem once, the others draw n with replacement."""
    drawn = torch.randint(n, (DRAWS, n), generator=torch.Generator().manual_seed(seed))
    weights = torch.zeros(DRAWS, n).scatter_add_(1, drawn, torch.ones(DRAWS, n))
    return torch.cat((torch.ones(1, n), weights)).double()


def strategy_entropies(counts: Tensor, right: Tensor, weights: Tensor) -> dict[str, Tensor]:
    """counts (n, K) of each problem's legal responses by strategy, right (n, K') of the correct
    ones, weights (draws, n) of the problems -> measures (draws,)."""
    draws = entropy(weights @ counts)
    # I(problem; strategy) = H(strategy) - H(strategy | problem), among legal responses.
    legal = counts.sum(1)
    given = weights @ (corrected_entropy(counts) * legal) / (weights @ legal).clamp(min=1)
    solved = (right.sum(1) > 0).double()  # problems with a correct response
    choice = weights @ (corrected_entropy(right) * solved)
    return {"strategy_entropy": centre(draws), "strategy_information": centre(draws - given),
            "strategy_choice": choice / (weights @ solved).clamp(min=1)}


def measure(problems: list, groups: list[list[str]], clusters: list[list[int]] | None = None,
            seed: int = 0) -> dict:
    """Judge each problem's responses -> metrics and intervals; None where a task cannot tell."""
    n, samples = len(problems), len(groups[0])
    pairs = list(zip(problems, groups))
    judged = reward.correctness(problems, sum(groups, [])).tolist()  # (n, samples)
    correct = [round(sum(row)) for row in judged]
    shares = {f"pass@{k}": [pass_at_k(samples, c, k) for c in correct] for k in KS if k <= samples}
    shares["distinct"] = [len(set(group)) / samples for group in groups]
    if hasattr(problems[0], "valid"):
        shares["valid"] = [sum(map(problem.valid, group)) / samples for problem, group in pairs]
    weights, values, strategies = bootstrap_weights(n, seed), {}, None
    if clusters:
        values["cluster_entropy"] = centre(entropy(weights @ count_labels(clusters)[1]))
    if hasattr(problems[0], "strategy_of"):
        labels = [[problem.strategy_of(text) for text in group] for problem, group in pairs]
        right = [[label if c else None for label, c in zip(*rows)] for rows in zip(labels, judged)]
        names, counts = count_labels(labels)
        values |= strategy_entropies(counts, count_labels(right)[1], weights)
        total = counts.sum(0)
        shares_of = (total / total.sum().clamp(min=1)).tolist()
        strategies = dict(zip(names, shares_of))
        if hasattr(problems[0], "strategies"):
            shares["coverage"] = [len(set(row) - {None}) / max(len(problem.strategies), 1)
                                  for problem, row in zip(problems, right)]
    values |= {name: weights @ torch.tensor(share, dtype=torch.float64) / n
               for name, share in shares.items()}
    quantiles = torch.tensor([0.025, 0.975], dtype=torch.float64)
    metrics = dict.fromkeys(report.METRICS)
    metrics |= {name: value[0].item() for name, value in values.items()}
    metrics["pass_curve"] = [sum(pass_at_k(samples, c, k) for c in correct) / n
                             for k in range(1, samples + 1)]
    metrics["strategies"] = strategies
    metrics["intervals"] = {name: value[1:].quantile(quantiles).tolist()
                            for name, value in values.items()}
    return metrics | {"problems": n, "samples": samples, "seed": seed}


@dataclass(frozen=True)
class Request(Config):
    path: str = flag("", "a run folder of train.py, a model folder, a hub id, or tiny",
                     group="What to evaluate, and where the results go")
    seed: int = flag(0, "of the sampled responses and the bootstrap", high=2 ** 32 - 1)
    output: str = flag("", "also write the results to this JSON file")
    export: str = flag("", "also write a run's merged model into this folder")
    ask: str = flag("", "a problem to answer, before and after training; without a text, asks you",
                    bare=KEEP_ASKING)


OWN_FLAGS = {"path", "output", "export", "ask"}
FLAGS = OWN_FLAGS | {"data", "eval_split", "eval_problems", "eval_samples", "eval_temperature",
                     "seed", "max_new_tokens", "prompt", "system", "instruction", "stop",
                     "device", "dtype", "cache"}


def load_run(policy: Policy, folder: Path) -> tuple[Clustering | None, int]:
    """A run's adapter into its base model -> the run's clustering and step."""
    step = checkpoint.find_step(folder, {"base": checkpoint.fingerprint(policy.model)})
    if not step:
        parallel.say(f"warning: no checkpoint of {folder} tells its step and its base model")
    lora.load(policy.model, folder / "adapter")
    return Clustering.load_if_there(folder, policy.model), step


def open_run(folder: Path) -> tuple[Policy, Clustering | None, int]:
    """A run's policy with the run's settings, its clustering, and its step."""
    config = checkpoint.require_run(folder)
    policy = sample.open_policy(tiny.find_base(config, may_build=False), config)
    clustering, step = load_run(policy, folder)
    accelerate(policy.model)
    return policy, clustering, step


def evaluate_path(request: Request, given: set[str]) -> None:
    """Evaluate a run with the settings in its folder, unless flags say otherwise, or a model."""
    path = Path(request.path)
    run_config = checkpoint.read_config(path)
    report.check_targets(request, run_config is not None)
    base = run_config or replace(request, model=request.path)
    config = replace(base, **{name: getattr(request, name) for name in given - OWN_FLAGS})
    check_config(config)
    problems = data.load(config.data, config.eval_split, config.eval_problems)
    with parallel.leader_first():  # tiny is built for the run's task
        folder = tiny.find_base(replace(config, data=base.data), may_build=run_config is None)
    policy = sample.open_policy(folder, config)
    clustering, step = load_run(policy, path) if run_config else (None, 0)
    accelerate(policy.model)
    if "ask" in given:
        return talk(request.ask, policy, clustering, step, evaluate, request.seed)
    if request.export:
        Path(request.export).mkdir(parents=True, exist_ok=True)
    metrics = evaluate(policy, problems, config, clustering, request.seed).metrics
    if clustering is None:  # clusters of its own cannot be compared with any others
        metrics["cluster_entropy"] = None
    if not parallel.is_leader():
        return
    print(report.table({path.name: metrics}))
    if request.output:
        files.write_json(Path(request.output), metrics)
        print(f"written to {request.output}")
    if request.export:
        report.export(policy, Path(request.export), problems[0], step, metrics)
        print(f"written to {request.export}")


def main(argv: list[str] | None = None) -> None:
    request, given = parse(Request, __doc__, argv, positional="path", only=FLAGS)
    with guard():
        parallel.start(request.device)
        evaluate_path(request, given)


if __name__ == "__main__":
    main()
