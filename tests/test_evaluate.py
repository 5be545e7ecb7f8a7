"""pass@k by brute force, entropy by hand, intervals, and the command line on real folders."""
import itertools
import json
import math
import os
import shutil
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import data
import evaluate
import lora
import model
import sample
from support import clustering, tiny
from support.fast import accelerate
from tests.conftest import mutual_information, open_tiny, small_model
from tests.test_train import quick_world, run  # noqa: F401 (a fixture)

# Measuring: no model is needed.


@pytest.mark.parametrize("samples, correct, k", [(6, 0, 1), (6, 2, 3), (6, 6, 2), (7, 3, 5),
                                                 (5, 1, 5), (8, 5, 4)])
def test_pass_at_k_equals_brute_force(samples, correct, k):
    outcomes = [1] * correct + [0] * (samples - correct)
    draws = list(itertools.combinations(outcomes, k))
    expected = sum(any(draw) for draw in draws) / len(draws)
    assert evaluate.pass_at_k(samples, correct, k) == pytest.approx(expected)


def test_entropy_by_hand():
    counts = torch.tensor([[1.0, 1.0, 2.0], [5.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    expected = torch.tensor([0.25 * math.log(4) * 2 + 0.5 * math.log(2), 0.0, 0.0])
    torch.testing.assert_close(evaluate.entropy(counts), expected)


def test_measure_by_hand():
    problems = [data.Countdown((3, 8, 5), 19), data.Countdown((1, 2, 3), 6)]
    groups = [["8*3=24;24-5=19", "8+3=11;11+5=16", "nonsense", "nonsense"], ["1+2=3;3+3=6"] * 4]
    result = evaluate.measure(problems, groups)
    assert result["pass@1"] == pytest.approx((1 / 4 + 1) / 2)
    assert result["pass@5"] is None  # four samples cannot tell
    assert result["pass@16"] is None
    assert "pass@5" not in result["intervals"]
    assert result["valid"] == pytest.approx((2 / 4 + 1) / 2)
    assert result["distinct"] == pytest.approx((3 / 4 + 1 / 4) / 2)
    p = 5 / 6  # of six legal plays five are ++ and one is *-
    entropy = -p * math.log(p) - (1 - p) * math.log(1 - p)
    assert result["strategy_entropy"] == pytest.approx(entropy)
    assert result["strategies"] == pytest.approx({"*-": 1 / 6, "++": 5 / 6})
    low, high = result["intervals"]["pass@1"]
    assert low == pytest.approx(0.25)  # two problems: a draw may be all of one kind
    assert high == pytest.approx(1.0)
    assert (result["problems"], result["samples"], result["seed"]) == (2, 4, 0)


def test_coverage_choice_and_information_by_hand():
    one = data.Countdown((1, 2, 3), 6)  # 1+2+3 and 1*2*3, in several orders
    assert one.strategies == {"++", "**"}
    two = data.Countdown((3, 8, 5), 19)
    assert two.strategies == {"*-"}
    add, times, wrong = "1+2=3;3+3=6", "1*2=2;2*3=6", "3-2=1;1+1=2"
    groups = [[add, add, times, wrong], ["no", "no", "8+3=11;11+5=16", "8+3=11;11+5=16"]]
    found = evaluate.measure([one, two], groups)
    assert found["coverage"] == pytest.approx((2 / 2 + 0 / 1) / 2)
    entropy = -2 / 3 * math.log(2 / 3) - 1 / 3 * math.log(1 / 3)
    # The other problem has no correct response. Two labels seen in three: + 1 / 6.
    assert found["strategy_choice"] == pytest.approx(entropy + 1 / 6)
    low, high = found["intervals"]["coverage"]
    assert (low, high) == (0, 1)
    # Of six legal plays four are ++, one ** and one -+; the first problem has 2, 1, 1 of them.
    marginal = -4 / 6 * math.log(4 / 6) - 2 / 6 * math.log(1 / 6)
    given = 4 / 6 * (0.5 * math.log(2) + 0.5 * math.log(4) + 2 / 8)  # three labels seen in four
    assert found["strategy_information"] == pytest.approx(marginal - given)


def test_strategies_that_do_not_depend_on_the_problem_carry_little_information():
    """The plain estimate would be 0.3 nats with 16 responses; the true value is 0."""
    generator = torch.Generator().manual_seed(0)
    plays = ["1+2=3;3+3=6", "1*2=2;2*3=6", "3-2=1;1+1=2", "3-2=1;1*1=1", "1*2=2;2+3=5",
             "2-1=1;3-1=2", "1+2=3;3*3=9", "1+2=3;3-3=0", "1*2=2;3-2=1"]
    problem = data.Countdown((1, 2, 3), 6)
    assert len({problem.strategy_of(play) for play in plays}) == 9
    chosen = torch.randint(9, (200, 16), generator=generator).tolist()
    found = evaluate.measure([problem] * 200, [[plays[i] for i in row] for row in chosen])
    assert abs(found["strategy_information"]) < 0.12
    told = evaluate.measure([problem] * 200, [[plays[n % 9]] * 16 for n in range(200)])
    assert told["strategy_information"] == pytest.approx(math.log(9), abs=0.01)


def test_strategies_cluster_entropy_and_the_pass_curve_by_hand():
    problem = data.Countdown((1, 2, 3), 6)
    right, wrong = "1+2=3;3+3=6", "3-2=1;1+1=2"
    found = evaluate.measure([problem] * 2, [[right, wrong]] * 2, clusters=[[0, 5], [0, 0]])
    assert found["strategies"] == {"++": 0.5, "-+": 0.5}
    entropy = -0.75 * math.log(0.75) - 0.25 * math.log(0.25)
    assert found["cluster_entropy"] == pytest.approx(entropy)
    assert found["pass_curve"] == [0.5, 1.0]
    without = evaluate.measure([problem] * 2, [[right, "nonsense"]] * 2)
    assert without["strategies"] == {"++": 1.0}
    assert without["cluster_entropy"] is None


def test_a_task_that_cannot_tell_says_none():
    class Plain:
        prompt = "?"

        def judge(self, response):
            return float(response == "yes")
    found = evaluate.measure([Plain()], [["yes", "no"]])
    assert found["pass@1"] == 0.5
    assert found["valid"] is None
    assert found["strategy_entropy"] is None
    assert found["strategies"] is None


def binomial_quantile(n: int, p: float, level: float) -> int:
    """The smallest k with P(X <= k) >= level."""
    total = 0.0
    for k in range(n + 1):
        total += math.comb(n, k) * p ** k * (1 - p) ** (n - k)
        if total >= level:
            return k
    return n


@pytest.mark.parametrize("n, right", [(200, 80), (300, 30)])
def test_an_interval_holds_the_middle_95_percent(n, right):
    """The bootstrap of a share is binomial: its quantiles are known."""
    problem = data.Countdown((3, 8, 5), 19)
    groups = [["8*3=24;24-5=19" if i < right else "no"] for i in range(n)]
    intervals = [evaluate.measure([problem] * n, groups, seed=seed)["intervals"]["pass@1"]
                 for seed in range(5)]
    low, high = (statistics.mean(ends) for ends in zip(*intervals))
    expected = [binomial_quantile(n, right / n, level) for level in (0.025, 0.975)]
    assert n * low == pytest.approx(expected[0], abs=1.0)
    assert n * high == pytest.approx(expected[1], abs=1.0)
    ninety = [binomial_quantile(n, right / n, level) for level in (0.05, 0.95)]
    assert ninety[0] - expected[0] >= 2  # an interval of 90 % would be seen
    assert expected[1] - ninety[1] >= 1


def test_intervals_cover_the_truth_about_as_often_as_they_say():
    generator, covered = torch.Generator().manual_seed(0), 0
    problem = data.Countdown((3, 8, 5), 19)
    for trial in range(100):
        right = torch.rand(60, generator=generator) < 0.4
        groups = [["8*3=24;24-5=19" if r else "no"] for r in right]
        low, high = evaluate.measure([problem] * 60, groups, seed=trial)["intervals"]["pass@1"]
        covered += low <= 0.4 <= high
    assert 88 <= covered <= 99


def test_entropy_intervals_are_centred_on_the_estimate():
    """Twelve problems, each with a cluster of its own: a draw with repeats misses some of them."""
    n = 12
    found = evaluate.measure([data.Countdown((1, 2, 3), 6)] * n, [["no"]] * n,
                             clusters=[[i] for i in range(n)])
    estimate, (low, high) = found["cluster_entropy"], found["intervals"]["cluster_entropy"]
    assert estimate == pytest.approx(math.log(n))
    assert low < estimate < high
    assert (low + high) / 2 == pytest.approx(estimate, abs=0.08)
    assert 0.2 < high - low < 1.0


def test_another_seed_draws_other_intervals_and_the_same_seed_the_same():
    problem = data.Countdown((3, 8, 5), 19)
    groups = [["8*3=24;24-5=19" if i % 3 else "no"] for i in range(50)]
    first, again, other = (evaluate.measure([problem] * 50, groups, seed=seed)
                           for seed in (1, 1, 2))
    assert first == again
    assert first["pass@1"] == other["pass@1"]
    assert first["intervals"] != other["intervals"]


# The tiny model.


@pytest.fixture(scope="module")
def tiny_policy(cache):
    policy = open_tiny(cache)
    accelerate(policy.model)
    return policy


@pytest.mark.slow
def test_the_tiny_model_lands_where_exploration_matters(real_policy, monkeypatch):
    monkeypatch.setattr(clustering, "EPOCHS", 96)  # the real ones
    accelerate(real_policy.model)
    config = real_policy.config
    problems = data.load("countdown", "test", 100)
    first = evaluate.evaluate(real_policy, problems, config, seed=3)
    found = first.metrics
    assert 0.05 <= found["pass@1"] <= 0.20
    assert found["pass@5"] >= 2.5 * found["pass@1"]
    assert found["pass@16"] > found["pass@5"]
    assert found["valid"] >= 0.6
    assert found["strategy_entropy"] >= 1.5
    assert found["pass_curve"][0] == pytest.approx(found["pass@1"])
    assert found["pass_curve"][15] == pytest.approx(found["pass@16"])
    assert found["pass_curve"] == sorted(found["pass_curve"])
    assert sum(found["strategies"].values()) == pytest.approx(1)
    for name in ("pass@1", "pass@5", "pass@16", "strategy_entropy", "cluster_entropy", "valid",
                 "distinct"):
        low, high = found["intervals"][name]
        assert low < found[name] < high
    # Other responses, the same clusters: the same entropy, and clusters that follow strategies.
    other = evaluate.evaluate(real_policy, problems, config, first.clustering, seed=4)
    assert other.clustering is first.clustering
    assert abs(found["cluster_entropy"] - other.metrics["cluster_entropy"]) < 0.15
    labels = [(response["cluster"], response["strategy"]) for record in other.records
              for response in record["responses"] if response["strategy"]]
    assert mutual_information(*zip(*labels)) > 0.4  # raw features have 0.12


def test_the_same_seed_gives_the_same_evaluation_and_another_does_not(tiny_policy):
    config = replace(tiny_policy.config, eval_samples=4)
    problems = data.load("countdown", "test", 40)  # two batches
    first, again, other = (evaluate.evaluate(tiny_policy, problems, config, seed=seed)
                           for seed in (5, 5, 6))
    assert first.metrics == again.metrics
    assert first.records == again.records
    assert first.metrics["seed"] == 5
    texts = [[response["text"] for record in each.records for response in record["responses"]]
             for each in (first, other)]
    assert len(texts[0]) == 160
    assert sum(a != b for a, b in zip(*texts)) > 100
    assert first.metrics["cluster_entropy"] != other.metrics["cluster_entropy"]


def test_a_clustering_that_is_given_is_not_fitted_again(tiny_policy, monkeypatch):
    """The base model's clusters are the ruler for all later evaluations."""
    config = replace(tiny_policy.config, eval_samples=4)
    problems = data.load("countdown", "test", 10)
    first = evaluate.evaluate(tiny_policy, problems, config)
    monkeypatch.setattr(clustering.Clustering, "fit", None)  # may not be called
    again = evaluate.evaluate(tiny_policy, problems, config, first.clustering)
    assert again.clustering is first.clustering
    assert again.records == first.records


def test_every_batch_has_random_numbers_of_its_own(tiny_policy):
    config = replace(tiny_policy.config, eval_samples=2)
    problems = data.load("countdown", "test", 1) * 64  # two batches of the same problem
    records = evaluate.evaluate(tiny_policy, problems, config).records
    texts = [[response["text"] for response in record["responses"]] for record in records]
    assert texts[:32] != texts[32:]


def test_records_say_what_each_response_is(tiny_policy):
    config = replace(tiny_policy.config, eval_samples=4)
    problems = data.load("countdown", "test", 5)
    found = evaluate.evaluate(tiny_policy, problems, config)
    assert [record["question"] for record in found.records] == [each.prompt for each in problems]
    correct = 0
    for problem, record in zip(problems, found.records):
        assert len(record["responses"]) == 4
        for response in record["responses"]:
            assert response["correct"] == problem.judge(response["text"])
            assert response["strategy"] == problem.strategy_of(response["text"])
            assert response["cluster"] in range(clustering.CLUSTERS)
            assert len(response["place"]) == 2
            correct += response["correct"]
    assert found.metrics["pass@1"] == pytest.approx(correct / 20)


def test_the_tiny_model_is_an_ordinary_folder(cache):
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny.base_folder("countdown", cache))
    for text in ("use 12,9,3 to make 47:", "8*3=24;24-5=19"):
        assert tokenizer.decode(tokenizer(text).input_ids) == text
        assert tokenizer(text).input_ids == tiny.make_tokenizer()(text).input_ids
    ours = model.Transformer.from_pretrained(tiny.base_folder("countdown", cache))
    assert sum(parameter.numel() for parameter in ours.parameters()) < 1.1e6


# The command line.


@pytest.fixture(scope="module")
def trained(tmp_path_factory, cache, quick_world) -> Path:  # noqa: F811
    """Two large steps; with seed 3, since an evaluation's own seed is another one."""
    return run(tmp_path_factory.mktemp("runs") / "trained", cache, "--steps", "2", "--seed", "3",
               "--eval-split", "validation", "--learning-rate", "0.05", "--gate", "none")


def evaluated(folder, *flags, output) -> dict:
    evaluate.main([str(folder), "--output", str(output), *flags])
    return json.loads(output.read_text())


def test_a_run_is_evaluated_with_its_own_settings_unless_flags_say_otherwise(trained, tmp_path):
    own = json.loads((trained / "evaluation.json").read_text())
    again = evaluated(trained, output=tmp_path / "again.json")
    assert {**again, "step": 2} == own
    other = evaluated(trained, "--seed", "1", output=tmp_path / "other.json")
    assert other["seed"] == 1
    assert other["cluster_entropy"] != own["cluster_entropy"]
    split = evaluated(trained, "--eval-split", "test", output=tmp_path / "split.json")
    assert split["cluster_entropy"] != own["cluster_entropy"]
    more = evaluated(trained, "--eval-problems", "9", "--eval-samples", "3",
                     output=tmp_path / "more.json")
    assert (more["problems"], more["samples"]) == (9, 3)


def test_a_run_of_the_tiny_model_is_evaluated_on_another_task(trained, tmp_path):
    """The base model is that of the run's task, not of the task that is measured."""
    lines = [json.dumps({"question": f"{n}+1=", "answer": n + 1}) + "\n" for n in range(40)]
    (tmp_path / "sums.jsonl").write_text("".join(lines))
    found = evaluated(trained, "--data", str(tmp_path / "sums.jsonl"), "--prompt", "plain",
                      "--max-new-tokens", "2", output=tmp_path / "out.json")
    assert found["strategy_entropy"] is None
    assert 0 < found["problems"] <= 6


def test_at_temperature_zero_all_responses_are_alike(trained, tmp_path):
    found = evaluated(trained, "--eval-temperature", "0",
                      output=tmp_path / "greedy.json")
    assert found["distinct"] == pytest.approx(1 / found["samples"])


def test_an_evaluation_reads_the_adapter(trained, cache, tmp_path):
    """Without it the numbers are the base model's, which were measured before the first step."""
    copy = tmp_path / "copy"
    shutil.copytree(trained, copy)
    file = copy / "adapter" / "adapter_model.safetensors"
    save_file({name: torch.zeros_like(tensor) for name, tensor in load_file(file).items()}, file)
    before = json.loads((copy / "evaluations.jsonl").read_text().splitlines()[0])
    after = json.loads((copy / "evaluation.json").read_text())
    found = evaluated(copy, output=tmp_path / "zero.json")
    assert {**found, "step": 0} == before
    assert {**found, "step": 2} != after


@pytest.mark.parametrize("damage", ["nan", "whole numbers", "cut", "missing"])
def test_a_damaged_adapter_is_refused(damage, trained, tmp_path, capsys):
    shutil.copytree(trained, tmp_path / "copy")
    file = tmp_path / "copy" / "adapter" / "adapter_model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    if damage == "nan":
        next(iter(tensors.values()))[0, 0] = math.nan
        save_file(tensors, file)
    elif damage == "whole numbers":
        save_file({name: tensor.long() for name, tensor in tensors.items()}, file)
    elif damage == "cut":
        file.write_bytes(file.read_bytes()[:-5])
    else:
        file.unlink()
    with pytest.raises(SystemExit) as caught:
        evaluate.main([str(tmp_path / "copy"), "--eval-temperature", "0", "--export",
                       str(tmp_path / "out")])
    assert caught.value.code == 2
    assert "adapter_model.safetensors" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_without_the_base_models_clusters_there_is_no_cluster_entropy(trained, tmp_path, capsys):
    shutil.copytree(trained, tmp_path / "copy")
    (tmp_path / "copy" / "clustering.safetensors").unlink()
    found = evaluated(tmp_path / "copy", output=tmp_path / "out.json")
    assert found["cluster_entropy"] is None
    assert found["strategy_entropy"] is not None
    row = [line for line in capsys.readouterr().out.splitlines() if "cluster entropy" in line]
    assert row[0].split()[-1] == "-"


def test_the_command_line_on_a_model_and_a_file(cache, tmp_path, capsys):
    result = evaluated(tiny.base_folder("countdown", cache), "--eval-problems", "20",
                       "--eval-samples", "5", output=tmp_path / "out.json")
    printed = capsys.readouterr().out
    assert f"{100 * result['pass@1']:.1f}" in printed
    assert "pass@5" in printed
    assert str(tmp_path / "out.json") in printed
    assert result["pass@16"] is None
    assert result["problems"] == 20


def test_tiny_is_a_model_by_name(cache, tmp_path):
    flags = ["--eval-problems", "4", "--eval-samples", "2", "--cache", str(cache)]
    by_name = evaluated("tiny", *flags, output=tmp_path / "name.json")
    by_path = evaluated(tiny.base_folder("countdown", cache), *flags, output=tmp_path / "path.json")
    assert by_name == by_path


@pytest.mark.parametrize("argv, word", [
    ([], "path"), ([""], "empty"), (["nowhere/model/x"], "nowhere/model/x"),
    (["tiny", "--eval-problems", "0"], "--eval-problems"), (["tiny", "--data", "chess"], "chess"),
    (["tiny", "--eval-temperature", "nan"], "--eval-temperature"),
    (["tiny", "--eval-temperature", "-1"], "--eval-temperature"),
    (["tiny", "--eval-temperature", "1e-300"], "--eval-temperature"),
    (["tiny", "--device", "tpu"], "tpu"), (["tiny", "--max-new-tokens", "500"], "context"),
    (["tiny", "--nonsense"], "--nonsense"), (["tiny", "--steps", "5"], "--steps"),
    (["tiny", "--samples", "5"], "--samples"),
    (["tiny", "--seed", "9" * 30], "--seed"), (["tiny", "--system", "Be brief."], "--system"),
    (["tiny", "--prompt", "chat"], "chat template"),
    (["tiny", "--output", "/proc/x/y.json"], "--output"), (["tiny", "--output", "."], "--output"),
    (["tiny", "--export", "nowhere/new"], "--export")])
def test_bad_input_is_one_line_and_exit_code_2(argv, word, cache, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as caught:
        evaluate.main([*argv, "--cache", str(cache)])
    errors = capsys.readouterr().err.splitlines()
    assert caught.value.code == 2
    assert [line for line in errors if line.startswith("error: ")] == errors[-1:]
    assert word in errors[-1]
    assert "Traceback" not in "".join(errors)
    assert list(tmp_path.iterdir()) == []


def test_output_writes_over_earlier_results_only(trained, cache, tmp_path, capsys):
    flags = ["--eval-problems", "2", "--eval-samples", "2", "--cache", str(cache)]
    own = shutil.copy(trained / "config.json", tmp_path / "config.json")
    before = Path(own).read_bytes()
    with pytest.raises(SystemExit):
        evaluate.main(["tiny", *flags, "--output", str(own)])
    assert "--output" in capsys.readouterr().err
    assert Path(own).read_bytes() == before
    for seed in ("0", "1"):
        found = evaluated("tiny", *flags, "--seed", seed, output=tmp_path / "result.json")
        assert found["seed"] == int(seed)


def test_output_leaves_a_runs_evaluation_and_other_kinds_of_files_alone(trained, tmp_path, capsys):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere.json")
    (tmp_path / "elsewhere.json").write_text('{"pass@1": 1}')
    (tmp_path / "notes.md").write_text("# Notes")
    before = (trained / "evaluation.json").read_bytes()
    others = [tmp_path / name for name in ("pipe", "link", "notes.md")]
    for file in (trained / "evaluation.json", *others):
        with pytest.raises(SystemExit):
            evaluate.main([str(trained), "--output", str(file)])
        assert "--output" in capsys.readouterr().err
    assert (trained / "evaluation.json").read_bytes() == before
    assert (tmp_path / "notes.md").read_text() == "# Notes"


def test_an_evaluation_says_how_it_was_measured(trained, tmp_path):
    found = evaluated(trained, "--eval-temperature", "0.5", "--eval-split", "test-drawn",
                      output=tmp_path / "out.json")
    assert (found["data"], found["split"], found["temperature"]) == (
        "countdown-many", "test-drawn", 0.5)


def test_clusters_of_its_own_give_no_number_to_compare(cache, tmp_path):
    found = evaluated("tiny", "--eval-problems", "4", "--eval-samples", "2", "--cache", str(cache),
                      output=tmp_path / "out.json")
    assert found["cluster_entropy"] is None


def test_help_names_every_flag_of_an_evaluation_and_no_other(capsys):
    with pytest.raises(SystemExit) as caught:
        evaluate.main(["--help"])
    text = capsys.readouterr().out
    assert caught.value.code == 0
    words = {word.strip(",()[]") for word in text.split()}
    flags = {word for word in words if word.startswith("--")}
    expected = {"eval-split", "eval-problems", "eval-samples", "data", "eval-temperature",
                "max-new-tokens", "prompt", "system", "instruction", "stop", "seed", "device",
                "dtype", "cache", "output", "export", "ask", "help"}
    assert flags == {f"--{name}" for name in expected}


def test_a_model_folder_cannot_bring_code_along(cache, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "evil"
    shutil.copytree(tiny.base_folder("countdown", cache), folder)
    ran = tmp_path / "ran"
    (folder / "evil.py").write_text(f"open({str(ran)!r}, 'w')\nclass Evil: pass\n")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config |= {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    # transformers may ask, and people may say yes
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    try:
        evaluate.main([str(folder), "--eval-problems", "2", "--eval-samples", "2"])
    except SystemExit as end:
        assert end.code == 2
        assert capsys.readouterr().err.splitlines()[-1].startswith("error: ")
    assert not ran.exists()


def test_a_folder_without_a_tokenizer(tmp_path, capsys):
    small_model().save_pretrained(tmp_path)
    with pytest.raises(SystemExit):
        evaluate.main([str(tmp_path)])
    assert "tokenizer" in capsys.readouterr().err


def test_export_is_a_folder_that_transformers_continues_alike(trained, tiny_policy, tmp_path,
                                                              capsys):
    merged = tmp_path / "merged"
    evaluate.main([str(trained), "--export", str(merged)])
    assert str(merged) in capsys.readouterr().out
    theirs = transformers.AutoModelForCausalLM.from_pretrained(merged)
    tokenizer = transformers.AutoTokenizer.from_pretrained(merged)
    base = {name: tensor.clone() for name, tensor in tiny_policy.model.named_parameters()}
    adapted = model.Transformer.from_pretrained(tiny_policy.base)
    lora.load(adapted, trained / "adapter")
    problems = data.load("countdown", "test", 10)
    rollout = sample.generate(adapted, tiny_policy.encode(problems), 1, 16, 0.0,
                              tiny_policy.eos_ids, torch.Generator())
    for problem, text in zip(problems, tiny_policy.decode(rollout)):
        ids = tokenizer(problem.prompt, return_tensors="pt").input_ids
        continued = theirs.generate(ids, max_new_tokens=16, do_sample=False, pad_token_id=0)
        continued = continued[0, ids.shape[1]:]
        assert tokenizer.decode(continued, skip_special_tokens=True) == text
    # It is the trained model, not its base: the adapters are in the weights.
    moved = theirs.model.layers[0].self_attn.q_proj.weight
    assert not torch.equal(moved, base["layers.0.self_attn.q_proj.weight"])
    ids = torch.arange(20).view(2, 10)
    torch.testing.assert_close(theirs(ids).logits, adapted(ids), atol=1e-4, rtol=1e-4)
    end_tokens = json.loads((merged / "generation_config.json").read_text())
    assert end_tokens["eos_token_id"] == list(tiny_policy.eos_ids)
    for folder, library in ((merged, "transformers"), (trained / "adapter", "peft")):
        card = (folder / "README.md").read_text()
        assert card.startswith("---\nlicense: other\n")
        assert f"library_name: {library}" in card
        assert "pass@1" in card
        assert "2 steps" in card


def test_export_never_writes_over_anything(trained, tmp_path, capsys):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for name in ("full", "file"):
        with pytest.raises(SystemExit):
            evaluate.main([str(trained), "--export", str(tmp_path / name)])
        assert "--export" in capsys.readouterr().err
    assert (tmp_path / "full" / "mine.txt").read_text() == "mine"
    assert [file.name for file in (tmp_path / "full").iterdir()] == ["mine.txt"]
    assert (tmp_path / "file").read_text() == "mine"


def test_an_exported_model_is_a_model_like_any_other(trained, tmp_path):
    """The same responses as its run, from the merged weights."""
    own = json.loads((trained / "evaluation.json").read_text())
    evaluate.main([str(trained), "--export", str(tmp_path / "merged")])
    found = evaluated(tmp_path / "merged", "--eval-split", "validation", "--eval-problems", "6",
                      "--eval-samples", "5", output=tmp_path / "out.json")
    assert found["pass_curve"] == own["pass_curve"]
    assert found["strategies"] == own["strategies"]
    assert found["distinct"] == own["distinct"]
