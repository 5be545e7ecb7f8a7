"""The scripts beside the product."""
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import data

TOOLS = Path(__file__).parent.parent / "tools"


def call(name, *arguments):
    return subprocess.run([sys.executable, TOOLS / name, *map(str, arguments)], capture_output=True, text=True)


def test_word_problems_are_different_small_and_solvable(tmp_path):
    done = call("word_problems.py", tmp_path / "p.jsonl", 400)
    assert done.returncode == 0 and "400 problems" in done.stdout
    call("word_problems.py", tmp_path / "again.jsonl", 400)
    assert (tmp_path / "p.jsonl").read_bytes() == (tmp_path / "again.jsonl").read_bytes()
    lines = [json.loads(line) for line in (tmp_path / "p.jsonl").read_text().splitlines()]
    assert len({line["question"] for line in lines}) == 400
    for line in lines:
        a, b = map(int, re.findall(r"\d+", line["question"]))
        assert max(a, b) < 20 and int(line["answer"]) in (a + b, abs(a - b), a * b)
    problems = data.load(str(tmp_path / "p.jsonl"), "train", 0)
    assert len(problems) > 200 and problems[0].judge(f"It is {problems[0].answer}.") == 1.0


@pytest.mark.parametrize("arguments, word", [((), "FILE.gguf"), (("nowhere.gguf", "out"), "nowhere.gguf is not a file"),
                                             (("--help",), "FILE.gguf")])
def test_convert_gguf_says_what_is_wrong(arguments, word):
    done = call("convert_gguf.py", *arguments)
    assert done.returncode == 1 and word in done.stderr and "Traceback" not in done.stderr


def test_a_gguf_file_is_told_where_to_go(tmp_path, capsys):
    import evaluate
    with pytest.raises(SystemExit):
        evaluate.main([str(tmp_path / "model.gguf")])
    assert "tools/convert_gguf.py" in capsys.readouterr().err
