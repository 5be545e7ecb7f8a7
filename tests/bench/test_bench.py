"""The benchmark: both sides do the same work, answer when asked, and say why when they cannot."""
import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers

import data
from bench import bench, peers
from sample import Policy
from support import hub, tiny
from support.config import Config


@pytest.fixture
def config(cache, tmp_path) -> Config:
    """Two problems, three responses of six tokens."""
    return Config(run=str(tmp_path / "run"), cache=str(cache), device="cpu", method="grpo",
                  problems=2, samples=3, max_new_tokens=6, eval_problems=2, kl=0.0)


def with_ends(config: Config, folder: Path, ends: list[int]) -> Config:
    """The tiny model, but these tokens end a response."""
    shutil.copytree(tiny.base_folder("countdown", Path(config.cache)), folder)
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, "eos_token_id": ends}))
    return replace(config, model=str(folder))


@pytest.mark.parametrize("ends, tokens", [([127], 6 * 6), (list(range(128)), 6)])
def test_generate_counts_its_tokens(ends, tokens, config, tmp_path):
    """Up to and including the end, which never comes, or at once."""
    answer = next(peers.ask("generate", with_ends(config, tmp_path / "model", ends)))
    assert answer["tokens"] == tokens and answer["seconds"] > 0


def test_a_side_answers_each_time_and_ends_with_its_iterator(config, tmp_path):
    config = with_ends(replace(config, method="sus"), tmp_path / "model", list(range(128)))
    turns = peers.ask("train", config)
    answers = [next(turns) for _ in range(2)]
    assert [answer["step"] for answer in answers] == [1, 2]
    for answer in answers:
        assert answer["tokens"] == 6
        assert 0 < answer["seconds_intrinsic"] < answer["seconds_sus"]
        assert answer["seconds_intrinsic"] < answer["seconds"]
    if Path("/proc/self/status").exists():
        assert 0.1 < answer["gigabytes"] < 10
    process = turns.gi_frame.f_locals["process"]
    assert process.poll() is None
    turns.close()
    assert process.returncode is not None


def test_a_side_that_fails_says_why(config, tmp_path):
    turns = peers.ask("generate", replace(config, model=str(tmp_path / "nothing")))
    with pytest.raises(ValueError, match=r"peer failed \(generate\): .*nothing.*\(exit code 1\)"):
        next(turns)


def test_trl_takes_steps(config):
    pytest.importorskip("trl")
    turns = peers.ask("trl", replace(config, kl=0.03))
    first, second = next(turns), next(turns)
    assert first["seconds"] > 0 and second["seconds"] > 0


def test_prompts_and_weights_are_as_announced(tmp_path, monkeypatch):
    shapes = []

    def make(shape):
        shapes.append(shape)
        return SimpleNamespace(save_pretrained=lambda folder: None)
    monkeypatch.setattr(bench, "LlamaForCausalLM", make)
    tasks = bench.make_tasks(str(tmp_path), "cache")
    for length in ("35", "150"):
        policy = Policy(None, hub.open_tokenizer(tmp_path / "large"), (), tasks[length])
        prompts = policy.encode(data.load("countdown", "train", 20))
        assert {len(prompt) for prompt in prompts} == {int(length)}
    text = policy.tokenizer.decode([1000, 2000, 49151])
    assert len(text) == 3 and policy.tokenizer(text).input_ids == [1000, 2000, 49151]
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(shapes[0])
    assert sum(weight.numel() for weight in model.parameters()) == 134_515_008


def rows(tasks, rounds):
    yield "step_x", [3.0, 1.0, 2.0], "times something"


def test_ratios_are_medians_and_earlier_ones_stay(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench, "make_tasks", lambda folder, cache: {})
    monkeypatch.setitem(bench.PARTS, "step", rows)
    monkeypatch.setattr(bench, "find_spec", lambda name: True)
    file = tmp_path / "new" / "bench.json"
    bench.main(["--parts", "step", "--folder", str(file.parent)])
    assert "2.000 (1.000 to 3.000)  times something" in capsys.readouterr().out
    written = json.loads(file.read_text())
    file.write_text(json.dumps({**written, "ratios": {"step_x": 7.0, "memory_x": 0.5}}))
    bench.main(["--parts", "step", "--folder", str(file.parent)])
    assert json.loads(file.read_text())["ratios"] == {"step_x": 2.0, "memory_x": 0.5}


def test_missing_peers_are_skipped_and_unknown_parts_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench, "make_tasks", lambda folder, cache: {})
    monkeypatch.setattr(bench, "find_spec", lambda name: None)
    bench.main(["--parts", "memory", "--folder", str(tmp_path)])
    assert "memory is skipped: it needs pip install -r" in capsys.readouterr().out
    with pytest.raises(SystemExit) as caught:
        bench.main(["--parts", "step,speed", "--folder", str(tmp_path)])
    message = capsys.readouterr().err
    assert caught.value.code == 2 and message.count("\n") == 1
    assert message.startswith("error: --parts speed: expected some of rollout, step")
