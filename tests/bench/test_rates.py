"""The numbers of bench.device for a tiny shape, and its JSON line."""
import json

import pytest

from bench import bench, device

SMALL = ["--device", "cpu", "--model", "tiny", "--problems", "2", "--samples", "2",
         "--prompt-tokens", "8", "--new-tokens", "4"]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(device, "device_rates", lambda *arguments: (1e9, 1e9))


def test_numbers_follow_from_the_times(monkeypatch, capsys):
    times = iter((2.0, 0.5))  # sampling, update
    monkeypatch.setattr(device, "seconds", lambda where, work, repeats=1: (work(), next(times))[1])
    device.main(SMALL)
    *_, line = capsys.readouterr().out.splitlines()
    found = json.loads(line)
    assert found["tokens_per_second"] == 16 / 2.0 and found["milliseconds_per_token"] == 500
    weights = 804_480  # by hand: 128 * 128 embedding, 4 layers of 196,992, a norm of 128
    read = weights + 4 * 2 * 2 * 32 * (2 * 8 + 4 * 4 / 2)  # keys and values
    assert found["sampling_of_bandwidth"] == pytest.approx(read * 4 * 4 / 1e9 / 2.0, abs=1e-4)
    tokens = 2 * 8 + 4 * 4
    share = 4 * weights * tokens / 1e9 / 0.5
    assert found["update_of_matmul_rate"] == pytest.approx(share, abs=1e-3)
    assert found["device"] == "cpu" and found["model"] == "tiny"


def test_times_are_positive_and_work_is_done_once_more_than_counted():
    calls = []
    assert device.seconds("cpu", lambda: calls.append(1), 3) > 0
    assert len(calls) == 4


def test_a_context_that_is_too_short_is_one_line(capsys):
    with pytest.raises(SystemExit) as stopped:
        device.main([*SMALL, "--prompt-tokens", "200"])
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and "context of 128" in error and error.count("\n") == 1


def test_bench_hands_a_device_over(monkeypatch):
    asked = []
    monkeypatch.setattr(device, "main", asked.append)
    bench.main(["--device", "mps"])
    assert asked == [["--device", "mps"]]
