"""Every tensor is where it has to be, tested without a GPU: see other_device.py."""
from unittest import mock

import pytest
import torch
import transformers
from torch.utils._python_dispatch import _disable_current_modes

import evaluate
import grpo
import lora
import sample
import train
from support import budget, hub, parallel
from support.config import Config
from support.fast import accelerate
from tests import other_device
from tests.conftest import adapted, make_sentence_encoder
from tests.test_train import SMALL, adapter, learned, metrics, quick_world, run  # noqa: F401

SETTINGS = [
    "", "--method grpo --kl 0", "--reading equations --recompute", "--kl-form k2 --epochs 2",
    "--learn-lambdas --normalise std",
    "--micro-batch 3 --negatives batch --bonus scaled --gate correct",
    "--method experiments.rewards:rnd", *(
        pytest.param(f"--method experiments.rewards:{name}", marks=pytest.mark.slow)
        for name in ("uniqueness", "repository", "elliptical", "shuffled", "group_oracle"))]
# load_state_dict believes that "meta" holds no numbers.
pytestmark = pytest.mark.filterwarnings("ignore:for .*copying from a non-meta parameter")


@pytest.fixture
def choose_device(monkeypatch):
    """Training and evaluation choose the device that is not there; it has no fused AdamW."""
    monkeypatch.setattr(hub, "find_device", lambda name: other_device.DEVICE.type)
    make = torch.optim.AdamW
    monkeypatch.setattr(torch.optim, "AdamW", lambda *arguments, **options: make(
        *arguments, **{**options, "fused": False}))


@pytest.fixture
def device(choose_device):
    with other_device.other_device():
        yield


def test_the_device_refuses_what_cuda_refuses(device):
    ours, theirs = torch.ones(2, device="meta"), torch.ones(2)
    assert ours.device.type == "meta" and (ours + 1).tolist() == [2, 2]
    assert (ours + torch.tensor(1.0)).tolist() == [2, 2]  # a CPU number is welcome
    assert (ours.cpu() + theirs).tolist() == [2, 2] == (ours + theirs.to("meta")).tolist()
    for mix in (lambda: ours + theirs, lambda: torch.cat((ours, theirs)), lambda: theirs.mul_(ours),
                lambda: torch.where(ours > 0, ours, theirs), lambda: torch.dot(theirs, ours)):
        with pytest.raises(RuntimeError, match="same device"):
            mix()
    with pytest.raises(RuntimeError, match="generator"):
        torch.rand(2, device="meta", generator=torch.Generator())


@pytest.mark.parametrize("flags", SETTINGS)
def test_training_on_another_device(flags, cache, tmp_path, device):
    folder = run(tmp_path / "run", cache, "--steps", "2", "--gate", "none", *flags.split())
    lines = metrics(folder)
    assert len(lines) == 2 and all(line["skipped"] == 0 for line in lines)
    assert all(line["mismatch"] < 1e-4 for line in lines) or "epochs" in flags
    assert all(tensor.isfinite().all() for tensor in adapter(folder).values())


def generate_on(model, device, tokens, ends=(7,)):
    model = accelerate(model.to(device))
    other_device.counts.clear()
    return sample.generate(model, [[1, 2, 3], [4, 5]], 8, tokens, 1.0, ends, sample.seeded(0))


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
def test_responses_do_not_depend_on_how_often_their_ends_are_looked_at(family):
    expected = generate_on(adapted(family), "cpu", 40)
    with other_device.other_device():
        found = generate_on(adapted(family), "meta", 40)
        assert torch.equal(found.ids.cpu(), expected.ids)
        assert torch.equal(found.lengths.cpu(), expected.lengths)
        assert torch.equal(found.finished.cpu(), expected.finished)
        torch.testing.assert_close(found.logprobs.cpu(), expected.logprobs, atol=1e-4, rtol=1e-4)
    assert 0 < expected.finished.sum() < 16 and expected.lengths.max() == 40  # some ended, not all


def test_python_waits_for_the_device_once_in_sixteen_tokens():
    with other_device.other_device():
        waits = {}
        for tokens in (15, 31, 47):
            generate_on(adapted(), "meta", tokens, ends=(10 ** 6,))
            waits[tokens] = other_device.counts["waits"]
    assert 0 < waits[31] - waits[15] == waits[47] - waits[31] <= 3


@pytest.mark.parametrize("reading", ["algorithm", "equations"])
def test_the_numbers_are_those_of_the_cpu(reading, cache, tmp_path, request):
    flags = ("--steps", "1", "--gate", "none", "--reading", reading)
    (expected,) = metrics(run(tmp_path / "cpu", cache, *flags))
    request.getfixturevalue("choose_device")
    with other_device.other_device():
        (found,) = metrics(run(tmp_path / "other", cache, *flags))
    assert found == pytest.approx(expected, rel=1e-3, abs=1e-5)


def test_the_worst_step_comes_first_and_teaches_nothing(cache, tmp_path, device, monkeypatch):
    calls, original = [], grpo.accumulate_gradient

    def watch(model, prompts, rollout, advantages, *arguments):
        original(model, prompts, rollout, advantages, *arguments)
        norms = [adapter.grad.norm().item() for adapter in lora.parameters(model).values()]
        calls.append((len(prompts), min(map(len, prompts)), rollout.ids.shape,
                      rollout.lengths.tolist(), advantages.shape, max(norms)))
    monkeypatch.setattr(grpo, "accumulate_gradient", watch)
    values = {**SMALL, "run": str(tmp_path / "x"), "cache": str(cache), "micro_batch": 3}
    of_run = train.Run(Config(**values, max_new_tokens=20))
    before = [adapter.tolist() for adapter in of_run.adapters.values()]
    budget.try_worst_step(of_run)
    assert calls[0][:5] == (3, 9, (12, 20), [20] * 12, (3, 4)) and calls[0][5] > 0
    assert [adapter.tolist() for adapter in of_run.adapters.values()] == before
    assert all(adapter.grad is None for adapter in of_run.adapters.values())
    monkeypatch.setattr(parallel, "world", lambda: 2)  # a process has half of the problems
    monkeypatch.setattr(parallel, "gather", lambda rows: rows)
    monkeypatch.setattr(parallel, "gather_values", lambda value: [value])
    monkeypatch.setattr(parallel, "sum_gradients", lambda parameters: None)
    budget.try_worst_step(of_run)
    assert calls[1][0] == 2


def test_too_little_memory_for_the_worst_step_is_said_before_anything_is_written(
        cache, tmp_path, device, monkeypatch, capsys):
    def out_of_memory(*arguments):
        raise torch.OutOfMemoryError
    monkeypatch.setattr(grpo, "accumulate_gradient", out_of_memory)
    with pytest.raises(SystemExit) as stopped:
        run(tmp_path / "run", cache, "--steps", "1")
    assert stopped.value.code == 2 and not (tmp_path / "run").exists()
    assert "not enough memory" in capsys.readouterr().err


def test_a_run_of_another_device_goes_on_with_the_same_bits(cache, tmp_path, device):
    whole = run(tmp_path / "whole", cache, "--steps", "3", "--gate", "none", "--alpha-decay", "0")
    parts = run(tmp_path / "parts", cache, "--steps", "2", "--gate", "none", "--alpha-decay", "0")
    train.main(["--run", str(parts), "--resume", "--steps", "3"])
    tensors, others = learned(whole), learned(parts)
    assert tensors.keys() == others.keys()
    assert all(torch.equal(tensors[name], others[name]) for name in tensors)
    assert metrics(whole) == metrics(parts)


def test_evaluation_export_and_sentence_encoder_on_another_device(cache, tmp_path, device,
                                                                  monkeypatch):
    make_sentence_encoder(tmp_path / "encoder")
    read = transformers.AutoModel.from_pretrained

    def read_on_the_cpu(*arguments, **options):  # transformers uses "meta" for itself
        with _disable_current_modes(), mock.patch("torch.tensor", other_device.make_tensor):
            return read(*arguments, **options)
    monkeypatch.setattr(transformers.AutoModel, "from_pretrained", read_on_the_cpu)
    folder = run(tmp_path / "run", cache, "--steps", "1", "--encoder", str(tmp_path / "encoder"))
    evaluate.main([str(folder), "--eval-problems", "4", "--eval-samples", "2", "--export",
                   str(tmp_path / "merged")])
    assert (tmp_path / "merged" / "model.safetensors").exists()
    evaluate.main([str(folder), "--ask", "use 3,8,5 to make 19:"])
