"""pass@k by brute force, entropy by hand, intervals, and the command line on real folders."""
import itertools
import json
import math
import shutil
from fractions import Fraction

import pytest
import torch
import transformers
from conftest import mutual_information, small_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer

import data
import evaluate
import tiny


@pytest.mark.parametrize("samples, correct, k", [(6, 0, 1), (6, 2, 3), (6, 6, 2), (7, 3, 5), (5, 1, 5), (8, 5, 4)])
def test_pass_at_k_equals_brute_force(samples, correct, k):
    outcomes = [1] * correct + [0] * (samples - correct)
    draws = list(itertools.combinations(outcomes, k))
    assert evaluate.pass_at_k(samples, correct, k) == pytest.approx(sum(any(draw) for draw in draws) / len(draws))


def test_entropy_by_hand():
    counts = torch.tensor([[1.0, 1.0, 2.0], [5.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    expected = torch.tensor([0.25 * math.log(4) * 2 + 0.5 * math.log(2), 0.0, 0.0])
    torch.testing.assert_close(evaluate.entropy(counts), expected)


def test_measure_by_hand():
    problems = [data.Countdown((3, 8, 5), 19), data.Countdown((1, 2, 3), 6)]
    groups = [["8*3=24;24-5=19", "8+3=11;11+5=16", "nonsense", "nonsense"], ["1+2=3;3+3=6"] * 4]
    result = evaluate.measure(problems, groups)
    assert result["pass@1"] == pytest.approx((1 / 4 + 1) / 2)
    assert result["pass@5"] is None and result["pass@16"] is None       # four samples cannot tell
    assert result["valid"] == pytest.approx((2 / 4 + 1) / 2)
    assert result["distinct"] == pytest.approx((3 / 4 + 1 / 4) / 2)
    p = 5 / 6                                                           # of six legal plays five are ++ and one *-
    assert result["strategy_entropy"] == pytest.approx(-p * math.log(p) - (1 - p) * math.log(1 - p))
    low, high = result["intervals"]["pass@1"]
    assert low == pytest.approx(0.25) and high == pytest.approx(1.0)    # two problems: a draw may be all of one kind
    assert "pass@5" not in result["intervals"]


def test_lost_strategies_and_cluster_entropy_by_hand():
    problem = data.Countdown((1, 2, 3), 6)
    before = evaluate.measure([problem] * 2, [["1+2=3;3+3=6", "3-2=1;1+1=2"]] * 2, clusters=[[0, 5], [0, 0]])
    after = evaluate.measure([problem] * 2, [["1+2=3;3+3=6", "nonsense"]] * 2)
    assert before["strategies"] == {"++": 0.5, "-+": 0.5} and after["strategies"] == {"++": 1.0}
    assert before["cluster_entropy"] == pytest.approx(-0.75 * math.log(0.75) - 0.25 * math.log(0.25)) and after["cluster_entropy"] is None
    assert before["pass_curve"] == [0.5, 1.0]
    assert evaluate.lost(before, after) == ["-+"] and evaluate.lost(after, before) == [] and evaluate.lost({}, after) == []


def test_intervals_cover_the_truth_about_as_often_as_they_say():
    generator, covered = torch.Generator().manual_seed(0), 0
    problem = data.Countdown((3, 8, 5), 19)
    for trial in range(100):
        right = torch.rand(60, generator=generator) < 0.4
        groups = [["8*3=24;24-5=19" if r else "no"] for r in right]
        low, high = evaluate.measure([problem] * 60, groups, trial)["intervals"]["pass@1"]
        covered += low <= 0.4 <= high
    assert 85 <= covered <= 100


def test_the_tiny_model_lands_where_exploration_matters(policy):
    problems = data.load("countdown", "test", 200)
    whole = evaluate.evaluate(policy, problems, 16, 1.0, 32, seed=3)
    first = whole.metrics
    assert 0.05 <= first["pass@1"] <= 0.20
    assert first["pass@5"] >= 2.5 * first["pass@1"] and first["pass@16"] > first["pass@5"]
    assert first["valid"] >= 0.6 and first["strategy_entropy"] >= 1.5
    assert first == evaluate.evaluate(policy, problems, 16, 1.0, 32, seed=3).metrics        # the ruler included
    other = evaluate.evaluate(policy, problems, 16, 1.0, 32, seed=4, ruler=whole.ruler)
    assert first != other.metrics and abs(first["cluster_entropy"] - other.metrics["cluster_entropy"]) < 0.1
    labels = [(response["cluster"], response["strategy"]) for record in other.samples for response in record["responses"] if response["strategy"]]
    assert mutual_information(*zip(*labels)) > 0.4          # raw features have 0.12
    assert first["pass_curve"][0] == pytest.approx(first["pass@1"]) and first["pass_curve"] == sorted(first["pass_curve"])
    assert first["pass_curve"][15] == pytest.approx(first["pass@16"]) and sum(first["strategies"].values()) == pytest.approx(1)
    for name in ("pass@1", "pass@5", "pass@16", "strategy_entropy", "cluster_entropy", "valid", "distinct"):
        low, high = first["intervals"][name]
        assert low < first[name] < high


def test_the_tiny_model_is_an_ordinary_folder(cache):
    tokenizer = AutoTokenizer.from_pretrained(cache / "tiny-countdown")
    for text in ("use 12,9,3 to make 47:", "8*3=24;24-5=19"):
        assert tokenizer.decode(tokenizer(text).input_ids) == text
        assert tokenizer(text).input_ids == tiny.make_tokenizer()(text).input_ids
    assert sum(p.numel() for p in evaluate.Transformer.from_pretrained(cache / "tiny-countdown").parameters()) < 1.1e6


def test_end_tokens_come_from_every_file_and_sampling_settings_from_none(tmp_path, cache):
    tokenizer = AutoTokenizer.from_pretrained(cache / "tiny-countdown")
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 3}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 3], "top_k": 1, "temperature": 9}))
    assert evaluate.find_eos_ids(tmp_path, tokenizer, 40) == (1, 3, 5)
    tokenizer.eos_token = None
    for name in ("config.json", "generation_config.json"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(ValueError, match="no end token"):
        evaluate.find_eos_ids(tmp_path, tokenizer, 40)


def test_the_command_line_on_a_model_and_a_file(cache, tmp_path, capsys):
    evaluate.main([str(cache / "tiny-countdown"), "--problems", "20", "--samples", "5", "--output", str(tmp_path / "out.json")])
    printed = capsys.readouterr().out
    result = json.loads((tmp_path / "out.json").read_text())
    assert f"{100 * result['pass@1']:.1f}" in printed and "pass@5" in printed
    assert result["pass@16"] is None and result["problems"] == 20


@pytest.mark.parametrize("argv, word", [
    ([], "path"), (["nowhere/model/x"], "nowhere/model/x"), (["tiny", "--problems", "0"], "at least 1"),
    (["tiny", "--data", "chess"], "countdown"), (["tiny", "--temperature", "nan"], "finite"),
    (["tiny", "--device", "tpu"], "tpu"), (["tiny", "--max-new-tokens", "500"], "context"), (["tiny", "--nonsense"], "nonsense"),
    (["tiny", "--seed", "9" * 30], "too large"), (["tiny", "--output", "/proc/x/y.json"], "--output"), (["tiny", "--output", "."], "--output")])
def test_bad_input_is_one_line_and_exit_code_2(argv, word, cache, capsys):
    with pytest.raises(SystemExit) as caught:
        evaluate.main([*argv, "--cache", str(cache)])
    errors = capsys.readouterr().err.splitlines()
    assert caught.value.code == 2 and word in errors[-1] and errors[-1].startswith("error: ")
    assert sum(line.startswith("error") for line in errors) == 1 and "Traceback" not in "".join(errors)


def test_the_judge_sees_what_the_model_said(policy):
    ids = policy.tokenizer("8*3=24;24-5=19").input_ids
    said = [ids + [1], ids[:4] + [0] + ids[4:] + [1], ids]
    rollout = evaluate.sample.Rollout(torch.tensor([row + [0] * (20 - len(row)) for row in said]),
                                      torch.tensor([len(row) for row in said]), torch.zeros(3, 20), torch.tensor([True, True, False]))
    assert policy.decode(rollout) == ["8*3=24;24-5=19", "8*3=<pad>24;24-5=19", "8*3=24;24-5=19"]


def test_a_model_folder_cannot_bring_code_along(cache, tmp_path, monkeypatch, capsys):
    shutil.copytree(cache / "tiny-countdown", folder := tmp_path / "evil")
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Evil: pass\n")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}}))
    monkeypatch.setattr("builtins.input", lambda *_: "y")       # transformers may ask, and people may say yes
    try:
        evaluate.main([str(folder), "--problems", "2", "--samples", "2"])
    except SystemExit as end:
        assert end.code == 2 and capsys.readouterr().err.splitlines()[-1].startswith("error: ")
    assert not (tmp_path / "ran").exists()


def test_a_folder_without_a_tokenizer(tmp_path, capsys):
    small_model().save_pretrained(tmp_path)
    with pytest.raises(SystemExit):
        evaluate.main([str(tmp_path)])
    assert "tokenizer" in capsys.readouterr().err


CHAT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"


def test_prompts_follow_the_chat_template(policy):
    problem, plain = data.Question("What is 2+3?", Fraction(5)), policy.encode([data.Countdown((3, 8, 5), 19)])
    assert plain == [policy.tokenizer("use 3,8,5 to make 19:").input_ids]
    policy.tokenizer.chat_template = CHAT
    policy.prompt = evaluate.Prompt("auto", "Be brief.", "Only a number.")
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 2+3?\nOnly a number."}]
    assert policy.chat(problem) == messages
    assert policy.encode([problem]) == [policy.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)]
    policy.prompt = evaluate.Prompt()
    assert policy.chat(problem)[0]["content"].endswith(data.Question.instruction) and len(policy.chat(problem)) == 1
    policy.prompt = evaluate.Prompt("plain")
    assert policy.encode([data.Countdown((3, 8, 5), 19)]) == plain


CHATML = ("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
          "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")


def byte_tokenizer(folder):
    """Every byte a token, and the two marks of a chat."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", chat_template=CHATML,
                                                additional_special_tokens=["<|im_start|>"])
    fast.save_pretrained(folder)
    return len(fast)


@pytest.mark.parametrize("family", ["qwen2", "llama", "qwen3"])
def test_chat_prompts_go_through_each_family_as_in_transformers(family, tmp_path):
    size = byte_tokenizer(tmp_path)
    small_model(family, vocab_size=size, max_position_embeddings=512, eos_token_id=None).save_pretrained(tmp_path)
    policy = evaluate.open_policy(str(tmp_path), "", "", "cpu", "float32", evaluate.Prompt(system="Be brief: \u00e9\u4e2d."))
    problems = [data.Question("What is 2+3?", Fraction(5)), data.Question("A <|im_end|> \U0001f600 trick?\n", Fraction(1))]
    theirs, tokenizer = transformers.AutoModelForCausalLM.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    ours = policy.encode(problems)
    for problem, ids in zip(problems, ours):
        chat = [{"role": "system", "content": "Be brief: \u00e9\u4e2d."},
                {"role": "user", "content": f"{problem.question}\n{problem.instruction}"}]
        assert ids == tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
        assert tokenizer.decode(ids) == tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        torch.testing.assert_close(policy.model(torch.tensor([ids])), theirs(torch.tensor([ids])).logits, atol=1e-4, rtol=1e-4)
    greedy = evaluate.sample.generate(policy.model, ours, 1, 12, 0.0, policy.eos_ids, torch.Generator())
    for row, ids in enumerate(ours):
        expected = theirs.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False, pad_token_id=0)[0, len(ids):]
        assert greedy.ids[row, :greedy.lengths[row]].tolist() == expected.tolist()


def test_chat_without_a_template_is_refused(cache):
    with pytest.raises(ValueError, match="no chat template"):
        evaluate.open_policy("tiny", "countdown", str(cache), "cpu", "float32", evaluate.Prompt("chat"))


def test_samples_for_people():
    def response(text, correct, cluster):
        return {"text": text, "correct": correct, "cluster": cluster, "strategy": "++" if correct else None, "place": [0, 0]}
    text = evaluate.show([{"question": "one", "responses": [response("a", 1.0, 0)] * 3},
                          {"question": "two", "responses": [response("b", 0.0, 0), response("c", 1.0, 0), response("d", 0.0, 4)]}])
    assert text.index("## two") < text.index("## one") and "Right, cluster 0, strategy ++:" in text and "Wrong, cluster 4:" in text
    assert "```\nc\n```" in text and "```\nb\n```" not in text         # the right one stands for its cluster
