"""Whatever a user's file, flag or model may contain: a result or one clear error, never a traceback, a hang or code that runs.

Each target gets thousands of generated inputs; the numbers add up to more than ten thousand a run.
"""
import io
import json
import re
import struct
import time
from contextlib import redirect_stderr
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from conftest import adapted, small_config, small_model
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save

import answers
import data
import files
import flags
import knobs
import lora
from model import ModelConfig, Transformer

ROOT = Path(__file__).parent.parent


def many(count):
    """So many inputs, ten seconds for each: far from what any needs on a busy machine, near enough to notice a hang."""
    return settings(max_examples=count, deadline=10_000, suppress_health_check=list(HealthCheck), database=None)


DIGITS = st.text(alphabet="0123456789.,/-+$%€e#\\boxed{}<answer>is =\n\u0663\uff15\u00b2\u2167\0", max_size=200)
TEXT = st.text(max_size=200) | DIGITS | st.integers(1, 20_000).map("9".__mul__)
HUGE = st.integers(-10 ** 400, 10 ** 400)
ODD = st.none() | st.booleans() | st.floats() | HUGE | st.text(max_size=20) | st.lists(st.integers(), max_size=3)
VALUE = st.recursive(ODD, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
                     max_leaves=8)


@many(3000)
@given(TEXT)
def test_answers(text):
    found = answers.answer_of(text)
    assert found is None or type(found) is Fraction
    assert data.Question("q", Fraction(1)).judge(text) in (0.0, 1.0)


@pytest.mark.parametrize("text", ["9" * 10 ** 6, "1/" * 500_000, "#### " * 200_000, "\\boxed{" * 150_000, "<answer>" * 120_000,
                                  "the answer is " * 70_000, "1,234," * 150_000, "-" * 10 ** 6, "\0" * 10 ** 6, "1e999999999"])
def test_a_megabyte_takes_no_longer_than_it_is_long(text):
    """Ten times as much text may take ten times as long, and thirty on a noisy machine; a hundred would be quadratic."""
    def seconds(part):
        begin = time.perf_counter()
        answers.answer_of(part), data.Countdown((3, 8, 5), 19).judge(part)
        return time.perf_counter() - begin
    short = max(min(seconds(text[:len(text) // 10]) for _ in range(3)), 1e-3)
    assert min(seconds(text) for _ in range(3)) < 30 * short


@many(2500)
@given(TEXT | st.text(alphabet="0123456789+-*=;", max_size=60), st.lists(st.integers(1, 15), min_size=3, max_size=4), HUGE)
def test_the_countdown_judge(text, numbers, target):
    problem = data.Countdown(tuple(numbers), target)
    assert problem.judge(text) in (0.0, 1.0) and problem.valid(text) in (True, False)
    assert (problem.strategy_of(text) is None) is not problem.valid(text)


LINES = st.lists(st.binary(max_size=60)
                 | st.builds(lambda record: json.dumps(record).encode(), st.dictionaries(
                     st.sampled_from(["question", "answer", "other"]), VALUE | DIGITS, max_size=3))
                 | st.sampled_from([b"[" * 5000, b'{"a":' * 3000, b"\xff\xfe", b"\0", b"NaN", b'{"question":"q","answer":1e400}',
                                     b'{"question":"\\ud800","answer":1}', b'\xef\xbb\xbf{"question":"q","answer":1}']),
                 max_size=5)


@many(1500)
@given(LINES)
def test_question_files(tmp_path_factory, lines):
    file = tmp_path_factory.getbasetemp() / "hostile.jsonl"
    file.write_bytes(b"\n".join(lines))
    try:
        for problem in data.read_questions(file):
            assert type(problem.answer) is Fraction and data.split_of(problem.question) in data.SPLITS
    except ValueError as error:
        assert "hostile.jsonl" in str(error)
    try:
        files.read_lines(file)
    except ValueError as error:
        assert "hostile.jsonl" in str(error)


FLAG = st.sampled_from(["--" + name.replace("_", "-") for name in knobs.Config.__dataclass_fields__]) | st.text(max_size=12)
WORD = st.text(max_size=12) | HUGE.map(str) | st.floats().map(str) | st.sampled_from(["nan", "inf", "1e999", "sus", "cpu", "\u0663"])


@many(1500)
@given(st.lists(FLAG | WORD | st.builds("{}={}".format, FLAG, WORD), max_size=5))
def test_the_command_line(words):
    if {"-h", "--help"} & set(words):
        return
    with redirect_stderr(io.StringIO()) as errors:
        try:
            config, given = flags.parse(knobs.Config, "", words)
            assert flags.from_saved(knobs.Config, json.loads(json.dumps(vars(config))), "config.json") == config
        except SystemExit as end:
            assert end.code == 2 and errors.getvalue().startswith("error: ") and errors.getvalue().count("\n") == 1


@many(1000)
@given(st.dictionaries(st.sampled_from(sorted(small_config("llama")) + ["rope_parameters", "rope_scaling", "head_dim", "hidden_act"]),
                       VALUE | st.integers(-5, 300), max_size=4))
def test_model_configs(changes):
    try:
        config = ModelConfig.from_dict({**small_config("llama"), **changes})
        assert config.heads % config.kv_heads == 0 and config.head_dim % 2 == 0
    except ValueError as error:
        assert str(error).startswith("config.json: ")


@many(300)
@given(st.dictionaries(st.text(max_size=10), VALUE | st.sampled_from(["../up", "/etc/passwd", "a/b", "..", "", "a\0b", "\\\\x\\y", "."]),
                       max_size=4))
def test_shard_names_stay_in_their_folder(tmp_path_factory, weight_map):
    folder = tmp_path_factory.getbasetemp() / "shards"
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    try:
        for file in files.find_weight_files(folder):
            assert file.parent == folder and file.resolve().parent in (folder.resolve(), folder.resolve().parent)
            files.read_tensors(file)
    except ValueError:
        pass


HEADERS = st.dictionaries(st.sampled_from(["model.norm.weight", "model.embed_tokens.weight", "__metadata__", "x"]), st.fixed_dictionaries(
    {"dtype": st.sampled_from(["F32", "F16", "BF16", "I64", "BOOL", "X9"]) | ODD, "shape": st.lists(HUGE | st.integers(0, 9), max_size=3) | ODD,
     "data_offsets": st.lists(HUGE | st.integers(0, 99), max_size=3) | ODD}) | VALUE, max_size=3)


@many(700)
@given(st.binary(max_size=200)
       | st.builds(lambda header, length, rest: struct.pack("<Q", min(length, 2 ** 64 - 1)) + header + rest,
                   HEADERS.map(lambda header: json.dumps(header).encode()), st.integers(0, 400) | st.just(2 ** 64 - 1), st.binary(max_size=99))
       | HEADERS.map(lambda header: struct.pack("<Q", len(line := json.dumps(header).encode())) + line + bytes(99)))
def test_weight_files(tmp_path_factory, content):
    folder = tmp_path_factory.getbasetemp() / "weights"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(small_config("llama")))
    (folder / "model.safetensors").write_bytes(content)
    for read in (Transformer.from_pretrained, lambda folder: files.read_metadata(folder / "model.safetensors")):
        try:
            read(folder)
        except ValueError as error:
            assert "weights" in str(error)


SHAPES = st.lists(st.integers(0, 5), max_size=3)


@many(300)
@given(st.dictionaries(st.sampled_from(["peft_type", "r", "lora_alpha", "bias", "target_modules", "use_dora", "rank_pattern"]), VALUE, max_size=3),
       st.dictionaries(st.sampled_from(sorted(lora.parameters(adapted()))[:3]) | st.text(max_size=30), SHAPES, max_size=2),
       st.sampled_from([torch.float32, torch.int64, torch.bool]), st.booleans())
def test_adapters(tmp_path_factory, changes, shapes, dtype, bare):
    folder, model = tmp_path_factory.getbasetemp() / "adapter", small_model() if bare else adapted()
    lora.save(adapted(), folder)
    file, config = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    tensors = files.read_tensors(file) | {name: torch.zeros(shape, dtype=dtype) for name, shape in shapes.items()}
    file.write_bytes(save(tensors))
    try:
        lora.load(model, folder)
        assert all(parameter.isfinite().all() for parameter in lora.parameters(model).values())
    except ValueError as error:
        assert "adapter" in str(error) or "LoRA" in str(error)


def test_no_code_is_ever_run_from_data():
    """No pickle, no eval, no shell, nobody else's code: in any file of the product."""
    forbidden = re.compile(r"(?<!re\.)\b(eval|exec|compile|__import__)\(|\bpickle\.|import pickle|torch\.(load|save)\(|shell=True|os\.system|trust_remote_code=True"
                           r"|all_gather_object|yaml\.load|weights_only")
    for file in [*ROOT.glob("*.py"), *ROOT.glob("tools/*.py")]:
        for number, line in enumerate(file.read_text().splitlines(), 1):
            if found := forbidden.search(line):
                assert found[0] == "eval(" and ".eval()" in line, f"{file.name}, line {number}: {line}"


def test_files_have_ordinary_permissions_and_stay_where_they_belong(tmp_path):
    files.write_json(tmp_path / "deep" / "a.json", {})
    files.write_tensors(tmp_path / "b.safetensors", {"x": torch.zeros(1)})
    made = sorted(file for file in tmp_path.rglob("*") if file.is_file())
    assert [file.name for file in made] == ["b.safetensors", "a.json"]
    (tmp_path / "plain").write_text("")
    assert {file.stat().st_mode for file in made} == {(tmp_path / "plain").stat().st_mode}
