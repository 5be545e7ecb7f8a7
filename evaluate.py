"""Evaluation: how often a policy is right, and how many ways of being right it still has.

    python evaluate.py runs/NAME            a trained run; its settings are read from its config.json
    python evaluate.py MODEL --data NAME    any model folder or hub id, or tiny; no run needed
    python evaluate.py runs/NAME --export FOLDER        also write the merged model, for transformers

pass@k is the unbiased estimator of Chen et al. (2021): with c of n samples correct, 1 - C(n-c, k) / C(n, k).
Strategy entropy is in nats, over the true strategies of all legal responses. Intervals are 95 % bootstrap
intervals over problems. The same seed gives the same numbers.

Cluster entropy is the paper's measure of diversity: the entropy of clusters of strategy embeddings.
Entropies can only be compared when the clusters are the same, so a strategy head and a k-means
clustering are fitted once, to the base policy's responses, and kept for all evaluations of a run.
"""
import math
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

import data
import lora
import sample
import strategy
from sample import Policy
from strategy import DIMENSION, BaseEncoder, Features, Strategist, mlp
from support import checkpoint, files, parallel, report, tiny
from support.config import Config, flag, guard, parse
from support.fast import accelerate, reuse_memory
from support.memory import Standardise

KS = (1, 5, 16)
BATCH = 32  # problems that are sampled at a time
DRAWS = 1000  # of the bootstrap
CLUSTERS = 12
EPOCHS = 32  # in which the strategy head of a clustering sees all groups


def pass_at_k(samples: int, correct: int, k: int) -> float:
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)


def entropy(counts: Tensor) -> Tensor:
    """counts (..., K) -> the entropy of their frequencies in nats (...)."""
    frequencies = counts / counts.sum(-1, keepdim=True).clamp(min=1e-9)
    return torch.special.entr(frequencies).sum(-1)


def nearest(points: Tensor, centres: Tensor) -> Tensor:
    """points (..., d), centres (K, d) -> the index of each point's nearest centre (...)."""
    return torch.cdist(points, centres).argmin(-1)


def spread_centres(points: Tensor, count: int) -> Tensor:
    """Starting centres (count, d): each next one is the point farthest from those chosen so far."""
    centres = points[:1]
    while len(centres) < count:
        distance = torch.cdist(points, centres).amin(1)
        centres = torch.cat((centres, points[distance.argmax()][None]))
    return centres


def k_means(points: Tensor, centres: Tensor, rounds: int) -> Tensor:
    """Lloyd's algorithm from the given centres (K, d); an empty cluster keeps its centre."""
    for _ in range(rounds):
        member = nearest(points, centres)
        sums = torch.zeros_like(centres).index_add_(0, member, points)
        counts = member.bincount(minlength=len(centres))[:, None]
        centres = torch.where(counts > 0, sums / counts.clamp(min=1), centres)
    return centres


class Clustering(nn.Module):
    """A frozen strategy head, cluster centres, and the plane that maps embeddings to two dimensions."""

    def __init__(self, size: int):
        super().__init__()
        self.head = mlp(size, DIMENSION)
        self.norm = Standardise(size)
        self.register_buffer("centres", torch.zeros(CLUSTERS, DIMENSION))
        self.register_buffer("middle", torch.zeros(DIMENSION))
        self.register_buffer("plane", torch.zeros(DIMENSION, 2))

    @classmethod
    def fit(cls, features: Features) -> "Clustering":
        """Learn to tell the responses of B problems apart, then cluster them. No label is used."""
        B, G, size = features.response.shape
        device = features.response.device
        strategist = Strategist(size, Config(samples=G), recent=B).to(device)
        strategist.remember(features, torch.zeros(B, G, device=device))
        strategist.learn(EPOCHS * math.ceil(B / strategy.BATCH), torch.Generator().manual_seed(0))
        clustering = cls(size).to(device)
        clustering.head.load_state_dict(strategist.PSE.state_dict())
        clustering.norm.load_state_dict(strategist.response_norm.state_dict())
        points = clustering.embed(features)
        clustering.centres = k_means(points, spread_centres(points, CLUSTERS), 20)
        clustering.middle = points.mean(0)
        # Principal directions, in fp64 on the CPU; the diagonal keeps equal points from being singular.
        centred = (points - clustering.middle).double().cpu()
        noise = 1e-9 * torch.eye(DIMENSION, dtype=torch.float64)
        _, vectors = torch.linalg.eigh(centred.T @ centred + noise)  # rising eigenvalues
        plane = vectors.to(points)[:, [-1, -2]]
        signs = plane.gather(0, plane.abs().argmax(0, keepdim=True)).sign()  # otherwise arbitrary
        clustering.plane = plane * signs
        return clustering

    @torch.no_grad()
    def embed(self, features: Features) -> Tensor:
        """Strategy embeddings of the responses, (B * G, d)."""
        return F.normalize(self.head(self.norm(features.response)), dim=-1).flatten(0, 1)

    def read(self, features: Features) -> tuple[Tensor, Tensor]:
        """-> the cluster (B, G) of each response and its place (B, G, 2) on the map."""
        points, shape = self.embed(features), features.response.shape[:2]
        places = (points - self.middle) @ self.plane
        return nearest(points, self.centres).view(shape), places.view(*shape, 2)

    @classmethod
    def load_if_there(cls, run: Path, model) -> "Clustering | None":
        """The clustering of a run folder, which its first evaluation has fitted."""
        file = run / "clustering.safetensors"
        if not file.exists():
            return None
        clustering = cls(model.config.hidden_size)
        files.load_module(clustering, files.read_tensors(file), str(file))
        return clustering.to(model.device)


@dataclass
class Evaluation:
    metrics: dict
    records: list[dict]  # per problem, its responses with what is known of each
    clustering: Clustering


def evaluate(policy: Policy, problems: list, config: Config, clustering: Clustering | None = None,
             seed: int = 0) -> Evaluation:
    """Sample --eval-samples responses to each problem and measure.

    Without a clustering, one is fitted to these responses. Ranks share the work.
    """
    G, model = config.eval_samples, policy.model
    prompts = policy.encode(problems)
    encoder = BaseEncoder(model, BATCH)
    shapes = ((), (G,), (G, 2), (G,))
    parts = [Features(*(torch.zeros(0, *shape, encoder.size, device=model.device)
                        for shape in shapes))]  # a rank may have no batch
    responses = []
    starts = parallel.share(range(0, len(prompts), BATCH))
    for i in tqdm(starts, "evaluating", disable=not parallel.is_leader(), leave=False):
        chosen = slice(i, i + BATCH)
        rollout = sample.generate(model, prompts[chosen], G, config.max_new_tokens, config.temperature,
                                  policy.eos_ids, sample.seeded(seed, "evaluation", i))
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
    return Evaluation(measure(problems, groups, clusters, seed), records, clustering)


def count_labels(labels: list[list]) -> tuple[list, Tensor]:
    """Each problem's labels, None for none -> all labels, and their counts per problem (n, K)."""
    tables = [Counter(label for label in row if label is not None) for row in labels]
    names = sorted(set().union(*tables)) or [""]
    counts = [[table[name] for name in names] for table in tables]
    return names, torch.tensor(counts, dtype=torch.float64)


def measure(problems: list, groups: list[list[str]], clusters: list[list[int]] | None = None,
            seed: int = 0) -> dict:
    """Judge each problem's responses -> metrics with 95 % intervals; None where a task cannot tell."""
    n, samples = len(problems), len(groups[0])
    pairs = list(zip(problems, groups))
    correct = [round(sum(map(problem.judge, group))) for problem, group in pairs]
    shares = {f"pass@{k}": [pass_at_k(samples, c, k) for c in correct] for k in KS if k <= samples}
    shares["distinct"] = [len(set(group)) / samples for group in groups]
    if hasattr(problems[0], "valid"):
        shares["valid"] = [sum(map(problem.valid, group)) / samples for problem, group in pairs]
    counts, strategies = {}, None
    if clusters:
        counts["cluster_entropy"] = count_labels(clusters)[1]
    if hasattr(problems[0], "strategy_of"):
        labels = [[problem.strategy_of(text) for text in group] for problem, group in pairs]
        names, counts["strategy_entropy"] = count_labels(labels)
        total = counts["strategy_entropy"].sum(0)
        strategies = dict(zip(names, (total / total.sum().clamp(min=1)).tolist()))

    # Row 0 counts every problem once, the others are draws of n problems with replacement.
    drawn = torch.randint(n, (DRAWS, n), generator=torch.Generator().manual_seed(seed))
    weights = torch.zeros(DRAWS, n).scatter_add_(1, drawn, torch.ones(DRAWS, n))
    weights = torch.cat((torch.ones(1, n), weights)).double()
    values = {name: weights @ torch.tensor(share, dtype=torch.float64) / n
              for name, share in shares.items()}
    for name, table in counts.items():
        draws = entropy(weights @ table)
        # Draws with repeated problems show fewer labels: centre them on the estimate itself.
        values[name] = torch.cat((draws[:1], draws[1:] + draws[0] - draws[1:].mean()))
    quantiles = torch.tensor([0.025, 0.975], dtype=torch.float64)
    metrics = dict.fromkeys(report.METRICS)
    metrics |= {name: value[0].item() for name, value in values.items()}
    metrics["pass_curve"] = [sum(pass_at_k(samples, c, k) for c in correct) / n
                             for k in range(1, samples + 1)]
    metrics["strategies"] = strategies
    metrics["intervals"] = {name: value[1:].quantile(quantiles).tolist()
                            for name, value in values.items()}
    return metrics | {"problems": n, "samples": samples, "seed": seed}


def export(policy: Policy, folder: Path, config: Config, step: int, metrics: dict) -> None:
    """Merged weights, tokenizer, end tokens and a model card, as a folder that transformers loads."""
    policy.tokenizer.save_pretrained(folder)
    end_tokens = {"eos_token_id": list(policy.eos_ids)}
    files.write_json(folder / "generation_config.json", end_tokens)
    report.write_card(folder, policy.base, config, step, metrics, merged=True)
    with lora.merged(policy.model):
        policy.model.save_pretrained(folder)  # last: config.json marks a folder that is complete


@dataclass(frozen=True)
class Request(Config):
    path: str = flag("", "a run folder of train.py, a model folder, a hub id, or tiny")
    output: str = flag("", "also write the results to this JSON file", group="The results")
    export: str = flag("", "also write a run's merged model into this folder")


OWN_FLAGS = {"path", "output", "export"}
FLAGS = OWN_FLAGS | {"data", "eval_split", "eval_problems", "eval_samples", "seed", "temperature",
                     "max_new_tokens", "prompt", "system", "instruction", "device", "dtype", "cache"}


def check_targets(request: Request, is_run: bool) -> None:
    """Bad places should fail before the evaluation, not after it."""
    output, target = Path(request.output), Path(request.export)
    if request.output and (output.is_dir() or not output.absolute().parent.is_dir()):
        raise ValueError(f"--output {output}: expected a file in a folder that exists")
    if request.export and not is_run:
        raise ValueError(f"--export needs a run folder; {request.path!r} is a model")
    if request.export and target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"--export {target} exists and is not an empty folder: choose another")


def evaluate_path(request: Request, given: set[str]) -> None:
    """Evaluate a run with the settings in its folder, unless flags say otherwise, or a model."""
    path = Path(request.path)
    run_config = checkpoint.read_config(path)
    check_targets(request, run_config is not None)
    base = run_config or replace(request, model=request.path)
    config = replace(base, **{name: getattr(request, name) for name in given - OWN_FLAGS})
    problems = data.load(config.data, config.eval_split, config.eval_problems)
    policy = sample.open_policy(tiny.find_base(base), config)
    clustering = None
    if run_config:
        step = checkpoint.find_step(path, policy.model)
        lora.load(policy.model, path / "adapter")
        clustering = Clustering.load_if_there(path, policy.model)
    accelerate(policy.model)
    if request.export:
        Path(request.export).mkdir(parents=True, exist_ok=True)
    metrics = evaluate(policy, problems, config, clustering, request.seed).metrics
    if run_config and clustering is None:  # without the base model's there is nothing to compare with
        metrics["cluster_entropy"] = None
    print(report.table({path.name: metrics}))
    if request.output:
        files.write_json(Path(request.output), metrics)
        print(f"written to {request.output}")
    if request.export:
        export(policy, Path(request.export), config, step, metrics)
        print(f"written to {request.export}")


def main(argv: list[str] | None = None) -> None:
    reuse_memory()
    request, given = parse(Request, __doc__, argv, positional="path", only=FLAGS)
    with guard():
        evaluate_path(request, given)


if __name__ == "__main__":
    main()
