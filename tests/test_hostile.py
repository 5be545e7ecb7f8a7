"""Whatever a user's file, flag or model may contain: a result or one clear error.

Never a traceback, a hang, or code that runs. Each target gets hundreds of generated inputs;
SUS_TEST_EXAMPLES=10 in the environment makes them thousands.
"""
import ast
import io
import json
import math
import os
import struct
import time
from contextlib import redirect_stderr
from dataclasses import asdict
from fractions import Fraction
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save

import data
import lora
from model import Transformer
from support import answers, config, files, hub
from support.config import Config
from tests.conftest import adapted, small_config, small_model

ROOT = Path(__file__).parent.parent
TIMES = int(os.environ.get("SUS_TEST_EXAMPLES", "1"))


def many(count):
    """So many inputs, ten seconds for each: far from what any needs, near enough to see a hang."""
    return settings(max_examples=count * TIMES, deadline=10_000, database=None,
                    suppress_health_check=list(HealthCheck))


DIGITS = st.text(alphabet="0123456789.,/-+$%€e#\\boxed{}<answer>is =\n\u0663\uff15\u00b2\u2167\0",
                 max_size=200)
TEXT = st.text(max_size=200) | DIGITS | st.integers(1, 20_000).map("9".__mul__)
HUGE = st.integers(-10 ** 400, 10 ** 400)
ODD = (st.none() | st.booleans() | st.floats() | HUGE | st.text(max_size=20)
       | st.lists(st.integers(), max_size=3))


def nest(inner):
    return st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)


VALUE = st.recursive(ODD, nest, max_leaves=8)


@many(500)
@given(TEXT)
def test_answers(text):
    found = answers.find_answer(text)
    assert found is None or type(found) is Fraction
    assert data.Question("q", Fraction(1)).judge(text) in (0.0, 1.0)


@pytest.mark.parametrize("piece", ["9", "1/", "8*3=24;", "-", "\nQuestion:", "\0", "#### "])
def test_a_long_response_takes_no_longer_than_it_is_long(piece):
    """Ten times the text may take thirty times as long; quadratic would be a hundred, always."""
    text = piece * (300_000 // len(piece))
    judges = data.Countdown((3, 8, 5), 19), data.Question("q", Fraction(1))

    def seconds(part):
        begin = time.process_time()
        for problem in judges:
            problem.judge(part)
        return time.process_time() - begin
    ratios = []
    while not ratios or (min(ratios) > 30 and len(ratios) < 10):  # a busy machine may need some
        short = max(seconds(text[:len(text) // 10]), 1e-3)
        ratios.append(seconds(text) / short)
    assert min(ratios) < 30


@many(500)
@given(TEXT | st.text(alphabet="0123456789+-*=;", max_size=60),
       st.lists(st.integers(1, 15), min_size=3, max_size=4), HUGE)
def test_the_countdown_judge(text, numbers, target):
    problem = data.Countdown(tuple(numbers), target)
    assert problem.judge(text) in (0.0, 1.0)
    assert problem.valid(text) in (True, False)
    assert (problem.strategy_of(text) is None) is not problem.valid(text)
    assert problem.valid(text) or problem.judge(text) == 0


def as_json(value) -> bytes:
    return json.dumps(value).encode()


RECORDS = st.dictionaries(st.sampled_from(["question", "answer", "other", "step"]), VALUE | DIGITS,
                          max_size=3)
ODD_LINES = [b"[" * 5000, b'{"a":' * 3000, b"\xff\xfe", b"\0", b"NaN",
             b'{"question":"q","answer":1e400}', b'{"question":"\\ud800","answer":1}',
             b'\xef\xbb\xbf{"question":"q","answer":1}', b'{"step": ' + b"9" * 5000 + b"}"]
LINES = st.lists(st.binary(max_size=60) | RECORDS.map(as_json) | st.sampled_from(ODD_LINES),
                 max_size=5)


@many(300)
@given(LINES)
def test_question_files_and_logs(tmp_path_factory, lines):
    file = tmp_path_factory.getbasetemp() / "hostile.jsonl"
    file.write_bytes(b"\n".join(lines))
    try:
        pairs = answers.read_pairs(file)
        assert len(pairs) == sum(map(bool, map(bytes.strip, file.read_bytes().split(b"\n"))))
        for question, answer in pairs:
            assert type(answer) is Fraction
            assert data.split_of(question) in data.SPLITS
    except ValueError as error:
        assert "hostile.jsonl" in str(error)
    try:
        assert all(type(line["step"]) is int for line in files.read_lines(file))
    except ValueError as error:
        assert "hostile.jsonl" in str(error)


NAMES = ["--" + name.replace("_", "-") for name in asdict(Config())]
FLAG = st.sampled_from(NAMES) | st.text(max_size=12)
WORD = (st.text(max_size=12) | HUGE.map(str) | st.floats().map(str)
        | st.sampled_from(["nan", "inf", "1e999", "sus", "cpu", "\u0663"]))


@many(300)
@given(st.lists(FLAG | WORD | st.builds("{}={}".format, FLAG, WORD), max_size=5))
def test_the_command_line(words):
    if {"-h", "--help"} & set(words):
        return
    with redirect_stderr(io.StringIO()) as errors:
        try:
            found, typed = config.parse(Config, "", words)
        except SystemExit as end:
            assert end.code == 2
            assert errors.getvalue().startswith("error: ")
            assert errors.getvalue().count("\n") == 1
            return
    assert typed <= asdict(Config()).keys()
    saved = json.loads(json.dumps(asdict(found)))
    assert config.from_saved(Config, saved, "config.json") == found


@many(300)
@given(st.dictionaries(st.sampled_from(sorted(asdict(Config()))) | st.text(max_size=5),
                       VALUE | st.integers(-5, 300), max_size=3))
def test_saved_configs(changes):
    try:
        found = config.from_saved(Config, asdict(Config()) | changes, "config.json")
    except ValueError as error:
        assert str(error).startswith("config.json")
    else:
        assert asdict(found) == asdict(Config()) | changes


KEYS = [*sorted(small_config("llama")), "rope_parameters", "rope_scaling", "head_dim", "hidden_act"]


@many(300)
@given(st.dictionaries(st.sampled_from(KEYS), VALUE | st.integers(-5, 300), max_size=4))
def test_model_configs(changes):
    try:
        found = hub.ModelConfig.from_dict({**small_config("llama"), **changes})
    except ValueError as error:
        assert str(error).startswith("config.json: ")
        return
    assert found.heads % found.kv_heads == 0
    assert found.head_dim % 2 == 0
    assert min(found.vocab_size, found.hidden_size, found.layers, found.context) > 0


SHARDS = st.sampled_from(["../up", "/etc/passwd", "a/b", "..", "", "a\0b", "\\\\x\\y", ".", "ok"])


@many(150)
@given(st.dictionaries(st.text(max_size=10), VALUE | SHARDS, max_size=4))
def test_shard_names_stay_in_their_folder(tmp_path_factory, weight_map):
    folder = tmp_path_factory.getbasetemp() / "shards"
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    opened = []

    def look(file, read):
        opened.append(file)
        return read({})  # a file without tensors
    with mock.patch.object(files, "read_safetensors", look):
        with pytest.raises(ValueError, match="shards"):
            list(hub.read_weights(folder, {"model.norm.weight"}))
    for file in opened:
        assert file.parent == folder
        assert os.path.normpath(file) == str(file)
        assert file.resolve().parent == folder.resolve()


FIELDS = {"dtype": st.sampled_from(["F32", "F16", "BF16", "I64", "BOOL", "X9"]) | ODD,
          "shape": st.lists(HUGE | st.integers(0, 9), max_size=3) | ODD,
          "data_offsets": st.lists(HUGE | st.integers(0, 99), max_size=3) | ODD}
HEADERS = st.dictionaries(
    st.sampled_from(["model.norm.weight", "model.embed_tokens.weight", "__metadata__", "x"]),
    st.fixed_dictionaries(FIELDS) | VALUE, max_size=3).map(as_json)


def tensor_file(header: bytes, length: int | None = None, rest: bytes = bytes(99)) -> bytes:
    length = len(header) if length is None else length
    return struct.pack("<Q", min(length, 2 ** 64 - 1)) + header + rest


@many(120)
@given(st.binary(max_size=200) | HEADERS.map(tensor_file)
       | st.builds(tensor_file, HEADERS, st.integers(0, 400) | st.just(2 ** 64 - 1),
                   st.binary(max_size=99)))
def test_weight_files(tmp_path_factory, content):
    folder = tmp_path_factory.getbasetemp() / "weights"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(small_config("llama")))
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match="weights"):  # some tensor is always missing
        Transformer.from_pretrained(folder)
    try:
        header = files.read_header(folder / "model.safetensors")
        assert all(type(value) is str for value in header.values())
    except ValueError as error:
        assert "weights" in str(error)


ADAPTER_KEYS = ["peft_type", "r", "lora_alpha", "bias", "target_modules", "use_dora",
                "rank_pattern", "modules_to_save"]
ADAPTER_NAMES = sorted(lora.parameters(adapted()))[:3]
NUMBERS = st.sampled_from([0.0, 1.5, -2.0, float("nan"), float("inf")])
KINDS = st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool])


@many(100)
@given(st.just({}) | st.dictionaries(st.sampled_from(ADAPTER_KEYS), VALUE, max_size=2),
       st.dictionaries(st.sampled_from([*ADAPTER_NAMES, "", "one.more"]),
                       st.lists(st.integers(0, 5), max_size=3) | st.just("as it should be"),
                       max_size=2),
       NUMBERS, KINDS, st.booleans())
def test_adapters(tmp_path_factory, changes, shapes, number, dtype, bare):
    folder = tmp_path_factory.getbasetemp() / "adapter"
    model = small_model() if bare else adapted()
    lora.save(adapted(), folder)
    file, config_file = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    config_file.write_text(json.dumps(json.loads(config_file.read_text()) | changes))
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    for name, shape in shapes.items():
        if shape == "as it should be":
            shape = tensors[name].shape if name in tensors else (1,)
        tensors[name] = torch.full(shape, number).to(dtype)
    file.write_bytes(save(tensors))
    right = all(name in ADAPTER_NAMES and shape == "as it should be"
                for name, shape in shapes.items())
    right = right and (not shapes or math.isfinite(number) and dtype.is_floating_point)
    try:
        lora.load(model, folder)
    except ValueError as error:
        assert str(folder) in str(error)
        assert changes or not right  # what is right is not refused
        return
    assert right
    loaded = lora.parameters(model)
    assert loaded.keys() == tensors.keys()
    for name, parameter in loaded.items():
        assert tensors[name].is_floating_point()
        assert parameter.isfinite().all()
        assert torch.equal(parameter, tensors[name].float())


# Code.


FORBIDDEN = {"eval", "exec", "compile", "__import__", "pickle", "cPickle", "dill", "marshal",
             "shelve", "all_gather_object", "broadcast_object_list", "torch.load", "torch.save",
             "os.system", "os.popen", "yaml.load", "weights_only"}


def name_of(node) -> str:
    """`torch.load` of an expression that is a name or an attribute, else nothing."""
    if isinstance(node, ast.Attribute):
        return f"{name_of(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def dangers(tree: ast.AST):
    """(line, what) of each use of a function that runs code or unpickles."""
    for node in ast.walk(tree):
        found = []
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            module = getattr(node, "module", None) or ""
            for alias in node.names:
                found += [module, alias.name, f"{module}.{alias.name}"]
        elif isinstance(node, (ast.Name, ast.Attribute)):
            name = name_of(node)
            found = [name, name.rpartition(".")[2] if "object" in name else ""]
        elif isinstance(node, ast.keyword):
            value = getattr(node.value, "value", None)
            if node.arg in ("shell", "trust_remote_code", "allow_pickle") and value is not False:
                yield node.value.lineno, node.arg
            found = [node.arg]
        elif isinstance(node, ast.Call) and name_of(node.func) == "getattr":
            if isinstance(node.args[1], ast.Constant):
                found = [f"{name_of(node.args[0])}.{node.args[1].value}"]
        for word in found:
            if word in FORBIDDEN:
                yield node.lineno, word


@pytest.mark.parametrize("code", [
    "eval('1')", "import pickle", "from pickle import loads", "torch.load(f)", "__import__('os')",
    "getattr(torch, 'load')(f)", "subprocess.run(x, shell=True)", "from torch import load",
    "dist.all_gather_object(a, b)", "f(trust_remote_code=True)", "f(trust_remote_code=flag)",
    "os.system('ls')", "run = exec", "f(x, weights_only=False)"])
def test_dangerous_code_would_be_found(code):
    assert list(dangers(ast.parse(code)))


def test_no_code_is_ever_run_from_data():
    """No pickle, no eval, no shell, nobody else's code: in any file of the product."""
    folders = (ROOT, *(ROOT / name for name in ("support", "experiments", "tools", "bench")))
    checked = [file for folder in folders for file in folder.glob("*.py")]
    assert len(checked) > 25
    for file in checked:
        found = list(dangers(ast.parse(file.read_text())))
        assert not found, f"{file.relative_to(ROOT)}: {found}"


def test_transformers_is_always_told_not_to_run_a_models_code():
    opened = []
    for file in (ROOT / "support").glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and name_of(node.func).endswith(".from_pretrained"):
                opened.append(name_of(node.func))
                options = {each.arg: getattr(each.value, "value", None) for each in node.keywords}
                assert options.get("trust_remote_code") is False, f"{file}, line {node.lineno}"
    assert {"AutoTokenizer.from_pretrained", "AutoModel.from_pretrained"} <= set(opened)
