"""Do clusters of strategy embeddings mean anything? Correct responses to five problems, to look at.

    python -m experiments.clusters runs/mine --problems 100 > page.md

Responses of a run's policy are clustered twice, by a strategy head that has learned to tell them
apart and by one that has learned nothing. Of the problems with the most different correct responses
the page shows each of these with both of its clusters, and, where the task has it, its strategy.
"""
import argparse
from collections import Counter
from pathlib import Path

import data
import evaluate
from support.clustering import Clustering
from support.config import Parser, guard


def cluster_twice(folder: Path, count: int) -> list[dict]:
    """A run's records on test problems; each response has `cluster` and `untrained`."""
    policy, _, _ = evaluate.open_run(folder)
    problems = data.load(policy.config.data, "test", count)
    found = evaluate.evaluate(policy, problems, policy.config)
    untrained, _ = Clustering.fit(found.features, epochs=0).read(found.features)
    for record, clusters in zip(found.records, untrained.tolist()):
        for response, cluster in zip(record["responses"], clusters):
            response["untrained"] = cluster
    return found.records


def make_page(records: list[dict], count: int) -> str:
    """Markdown: the problems with the most different correct responses, a line for each of them."""
    def right(record: dict) -> list[dict]:
        return [response for response in record["responses"] if response["correct"]]

    def different(record: dict) -> dict[str, dict]:
        return {response["text"].strip(): response for response in right(record)}

    lines = []
    for record in sorted(records, key=lambda record: -len(different(record)))[:count]:
        times = Counter(response["text"].strip() for response in right(record))
        lines += [f"**{' '.join(record['question'].split())}**", "",
                  "| times | response | cluster | untrained |", "|---|---|---|---|"]
        for text, response in sorted(different(record).items(), key=lambda each: (
                each[1]["cluster"], -times[each[0]], each[0])):
            shown = " ".join(text.split()).replace("|", "\\|")
            strategy = f" ({response['strategy']})" if "strategy" in response else ""
            lines.append(f"| {times[text]} | {shown}{strategy} | {response['cluster']} | "
                         f"{response['untrained']} |")
        lines.append("")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="a run folder of train.py")
    parser.add_argument("--problems", type=int, default=100, help="to choose from (default 100)")
    parser.add_argument("--show", type=int, default=5, help="problems on the page (default 5)")
    arguments = parser.parse_args(argv)
    with guard():
        if min(arguments.problems, arguments.show) < 1:
            raise ValueError("--problems and --show: expected 1 or more")
        print(make_page(cluster_twice(arguments.run, arguments.problems), arguments.show))


if __name__ == "__main__":
    main()
