"""Files: never seen half written, and every damage is a ValueError that names the file."""
import errno
import json
import os
import struct

import pytest
import torch

from support import files


def leftovers(folder) -> list:
    return sorted(folder.rglob("*.tmp"))


def test_what_is_written_comes_back(tmp_path):
    files.write_json(tmp_path / "deep" / "a.json", {"x": [1, None, "\u00e9\u4e2d"]})
    assert files.read_json(tmp_path / "deep" / "a.json") == {"x": [1, None, "\u00e9\u4e2d"]}
    tensors = {"a": torch.randn(3, 2), "b": torch.arange(4), "c": torch.zeros(0, 5),
               "d": torch.randn(4, 3).T, "e": torch.randn(2).bfloat16()}
    files.write_tensors(tmp_path / "t.safetensors", tensors, {"step": "5"})
    found = files.read_tensors(tmp_path / "t.safetensors")
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)
    assert files.read_header(tmp_path / "t.safetensors") == {"format": "pt", "step": "5"}


def test_a_parameter_is_written_without_its_gradient(tmp_path):
    parameter = torch.nn.Parameter(torch.ones(2))
    files.write_tensors(tmp_path / "t.safetensors", {"a": parameter})
    assert not files.read_tensors(tmp_path / "t.safetensors")["a"].requires_grad


@pytest.mark.parametrize("name", ["text", "tensors"])
def test_a_file_is_old_or_new_and_never_half_written(name, tmp_path, monkeypatch):
    """The disk fills up while the new file is written, or before it is flushed, or renamed."""
    file = tmp_path / "file"

    def write(value):
        if name == "text":
            files.write_text(file, f"{value} " * 1000)
        else:
            files.write_tensors(file, {"x": torch.full((1000,), value)})

    write(1.0)
    before = file.read_bytes()

    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")
    for module, function in ((os, "fsync"), (os, "replace")):
        with monkeypatch.context() as patch:
            patch.setattr(module, function, full)
            with pytest.raises(OSError, match="No space left"):
                write(2.0)
        assert file.read_bytes() == before
        assert not leftovers(tmp_path)
    write(3.0)
    assert file.read_bytes() != before
    assert not leftovers(tmp_path)


def test_the_new_file_is_on_the_disk_before_it_takes_the_old_ones_place(tmp_path, monkeypatch):
    done = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda number: done.append("flushed") or fsync(number))
    monkeypatch.setattr(os, "replace", lambda *pair: done.append("renamed") or replace(*pair))
    files.write_json(tmp_path / "a.json", {})
    assert done == ["flushed", "renamed"]


def test_files_have_ordinary_permissions_and_stay_where_they_belong(tmp_path):
    files.write_json(tmp_path / "deep" / "a.json", {})
    files.write_tensors(tmp_path / "b.safetensors", {"x": torch.zeros(1)})
    made = sorted(file for file in tmp_path.rglob("*") if file.is_file())
    assert [file.name for file in made] == ["b.safetensors", "a.json"]
    (tmp_path / "plain").write_text("")
    assert {file.stat().st_mode for file in made} == {(tmp_path / "plain").stat().st_mode}


def test_tensors_that_cannot_be_written_are_an_os_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        files.write_tensors(tmp_path / "file" / "t.safetensors", {"x": torch.zeros(1)})


@pytest.mark.parametrize("content, word", [
    (b"{", "not valid JSON"), (b"", "not valid JSON"), (b"\xff\xfe", "not valid JSON"),
    (b"[1]", "expected a JSON object"), (b"null", "expected a JSON object"),
    (b"[" * 100_000, "not valid JSON"), (b'{"a": ' + b"9" * 5000 + b"}", "not valid JSON")])
def test_damaged_json_is_named(content, word, tmp_path):
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(ValueError, match=word) as caught:
        files.read_json(tmp_path / "a.json")
    assert "a.json" in str(caught.value)


def test_missing_files_are_named(tmp_path):
    with pytest.raises(ValueError, match="a.json cannot be read"):
        files.read_json(tmp_path / "a.json")
    for read in (files.read_tensors, files.read_header):
        with pytest.raises(ValueError, match="t.safetensors is missing"):
            read(tmp_path / "t.safetensors")
    (tmp_path / "folder").mkdir()
    with pytest.raises(ValueError, match="folder"):
        files.read_json(tmp_path / "folder")
    with pytest.raises(ValueError, match="folder"):
        files.read_tensors(tmp_path / "folder")
    assert files.read_lines(tmp_path / "metrics.jsonl") == []


@pytest.mark.parametrize("content", [b"", b"junk", struct.pack("<Q", 2 ** 63), bytes(8) + b"{}",
                                     struct.pack("<Q", 2) + b"[]"])
def test_damaged_tensors_are_named(content, tmp_path):
    (tmp_path / "t.safetensors").write_bytes(content)
    for read in (files.read_tensors, files.read_header):
        with pytest.raises(ValueError, match="t.safetensors is not a readable safetensors file"):
            read(tmp_path / "t.safetensors")


def test_a_cut_tensor_file_is_damaged(tmp_path):
    file = tmp_path / "t.safetensors"
    files.write_tensors(file, {"x": torch.zeros(100)})
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match="t.safetensors"):
        files.read_tensors(file)


def test_lines_grow_one_at_a_time_and_a_cut_last_line_does_not_count(tmp_path):
    file = tmp_path / "metrics.jsonl"
    for step in (1, 2):
        files.append_line(file, {"step": step, "text": "a\nb"})
    assert file.read_text().count("\n") == 2
    assert files.read_lines(file) == [{"step": 1, "text": "a\nb"}, {"step": 2, "text": "a\nb"}]
    with open(file, "a") as handle:
        handle.write('{"step": 3')
    assert [line["step"] for line in files.read_lines(file)] == [1, 2]
    with open(file, "a") as handle:  # whole, but for its end: nobody knows that it is
        handle.write("}")
    assert [line["step"] for line in files.read_lines(file)] == [1, 2]
    files.write_lines(file, [{"step": 9}])
    assert files.read_lines(file) == [{"step": 9}]
    files.write_lines(file, [])
    assert files.read_lines(file) == []


@pytest.mark.parametrize("line", ["garbage}", "", "[1]", "3", "null", "{}", '{"a": 1}',
                                  '{"step": "1"}', '{"step": 1.0}', '{"step": true}',
                                  "[" * 100_000])
def test_a_damaged_line_is_named_by_its_number(line, tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text(f'{{"step": 1}}\n{line}\n{{"step": 3}}\n')
    with pytest.raises(ValueError, match="metrics.jsonl, line 2 is damaged"):
        files.read_lines(file)


def test_lines_of_text_that_is_no_text_are_damaged(tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(b"\xff\xfe\n")
    with pytest.raises(ValueError, match="metrics.jsonl"):
        files.read_lines(tmp_path / "metrics.jsonl")


def test_lines_may_have_another_key(tmp_path):
    file = tmp_path / "samples.jsonl"
    file.write_text(json.dumps({"question": "q"}) + "\n")
    assert files.read_lines(file, "question") == [{"question": "q"}]
    with pytest.raises(ValueError, match="expected a JSON object with a step"):
        files.read_lines(file)


EXPECTED = {"a": torch.zeros(2, 3), "b": torch.zeros(4, dtype=torch.long)}


@pytest.mark.parametrize("changes, words", [
    ({"a": None}, "tensor a is missing"), ({"c": torch.zeros(1)}, "tensor c is unexpected"),
    ({"a": torch.zeros(3, 2)}, r"\(3, 2\), expected .*\(2, 3\)"),
    ({"a": torch.zeros(2, 3, dtype=torch.long)}, "int64"), ({"b": torch.zeros(4)}, "float32"),
    ({"a": torch.full((2, 3), torch.inf)}, "tensor a holds a number that is not finite"),
    ({"a": torch.full((2, 3), torch.nan)}, "tensor a holds a number that is not finite")])
def test_tensors_are_checked_before_they_are_used(changes, words):
    tensors = {name: tensor for name, tensor in {**EXPECTED, **changes}.items()
               if tensor is not None}
    with pytest.raises(ValueError, match=words) as caught:
        files.check_tensors(tensors, EXPECTED, "some file")
    assert str(caught.value).startswith("some file: ")


def test_good_tensors_pass_and_extra_state_may_have_any_length():
    files.check_tensors(EXPECTED, EXPECTED, "")
    files.check_tensors({"a": torch.zeros(2, 3).bfloat16()}, {"a": torch.zeros(2, 3)}, "")
    name = "strategist._extra_state"
    files.check_tensors({name: torch.zeros(7)}, {name: torch.zeros(0)}, "")
    with pytest.raises(ValueError, match="not finite"):
        files.check_tensors({name: torch.full((7,), torch.nan)}, {name: torch.zeros(0)}, "")


def test_an_optimizer_goes_on_from_its_packed_state_bit_for_bit():
    def make():
        torch.manual_seed(0)
        parameters = [torch.nn.Parameter(torch.randn(3, 2)), torch.nn.Parameter(torch.randn(4))]
        return parameters, torch.optim.AdamW(parameters, lr=0.1)

    def step(parameters, optimizer):
        loss = sum((parameter ** 3).sum() for parameter in parameters)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    parameters, optimizer = make()
    assert files.pack_optimizer(optimizer).numel() == 0
    step(parameters, optimizer)
    packed = files.pack_optimizer(optimizer)
    assert packed.numel() == 2 + 2 * (6 + 4)
    others, other = make()
    files.unpack_optimizer(other, packed)
    for ours, theirs in zip(others, parameters):
        ours.data.copy_(theirs.data)
    step(parameters, optimizer)
    step(others, other)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(others, parameters))
    assert torch.equal(files.pack_optimizer(other), files.pack_optimizer(optimizer))
    files.unpack_optimizer(other, packed[:0])  # back to a new one
    assert files.pack_optimizer(other).numel() == 0
