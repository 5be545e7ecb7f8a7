"""Files on disk: JSON and safetensors only, read with a clear error, never seen half written.

A file is written under a temporary name beside its place and then renamed, so a crash leaves the
old file or the new one. JSONL files grow by one line at a time; a last line that was cut short does
not count. Every reader turns a missing or damaged file into a ValueError that names it.
"""
import json
import os
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

UMASK = os.umask(0)  # can only be read by setting it
os.umask(UMASK)
MOMENTS = ("step", "exp_avg", "exp_avg_sq")  # what AdamW keeps of a parameter


def write_atomically(file: Path, write) -> None:
    """Call write(temporary path), flush it to the disk, then rename it to `file`."""
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f"{file.name}.{os.getpid()}.tmp")  # two processes never share one
    try:
        write(temporary)
        with open(temporary, "rb+") as handle:
            os.fsync(handle.fileno())
        os.chmod(temporary, 0o666 & ~UMASK)  # safetensors' files are for their owner only
        os.replace(temporary, file)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(file: Path, text: str) -> None:
    write_atomically(file, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def write_json(file: Path, value: dict) -> None:
    write_text(file, json.dumps(value, indent=2) + "\n")


def write_tensors(file: Path, tensors: dict[str, Tensor], header: dict | None = None) -> None:
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    header = {"format": "pt", **(header or {})}
    try:
        write_atomically(file, lambda temporary: save_file(tensors, temporary, header))
    except SafetensorError as error:  # most likely a full disk
        raise OSError(f"{file} cannot be written: {error}") from None


def read_json(file: Path) -> dict:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{file}: expected a JSON object, found {type(value).__name__}")
    return value


def read_tensors(file: Path) -> dict[str, Tensor]:
    return read_safetensors(file, lambda shard: {
        key: shard.get_tensor(key) for key in shard.keys()})


def read_header(file: Path) -> dict[str, str]:
    """The strings in a safetensors file's header."""
    return read_safetensors(file, lambda shard: shard.metadata() or {})


def read_safetensors(file: Path, read):
    try:
        if not file.is_file():
            raise ValueError(f"{file} is missing")
        with safe_open(file, framework="pt") as shard:
            return read(shard)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} is not a readable safetensors file ({error})") from None


def check_tensors(tensors: dict[str, Tensor], expected: dict[str, Tensor], where: str) -> None:
    """Tensors from a file must have the expected names, shapes and kinds, and be finite."""
    for name in sorted(tensors.keys() | expected.keys()):
        if name not in tensors or name not in expected:
            what = "unexpected" if name in tensors else "missing"
            raise ValueError(f"{where}: tensor {name} is {what}")
        tensor, wanted = tensors[name], expected[name]
        same_shape = tensor.shape == wanted.shape or name.endswith("_extra_state")
        if not same_shape or tensor.is_floating_point() != wanted.is_floating_point():
            raise ValueError(f"{where}: tensor {name} is {tensor.dtype} {tuple(tensor.shape)}, "
                             f"expected {wanted.dtype} {tuple(wanted.shape)}")
        require_finite(name, tensor, where)


def require_finite(name: str, tensor: Tensor, where: str) -> None:
    if not tensor.isfinite().all():
        raise ValueError(f"{where}: tensor {name} holds a number that is not finite")


def pack_optimizer(optimizer: torch.optim.AdamW) -> Tensor:
    """AdamW's step count and two moments of every parameter, as one flat tensor; empty at first."""
    states = [state for state in optimizer.state.values() if state]
    parts = [state[key].detach().cpu().flatten() for state in states for key in MOMENTS]
    return torch.cat([torch.empty(0), *parts])


def unpack_optimizer(optimizer: torch.optim.AdamW, packed: Tensor) -> None:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    sizes = [size for parameter in parameters for size in (1, parameter.numel(), parameter.numel())]
    optimizer.state.clear()
    if not packed.numel():
        return
    if packed.dtype != torch.float32 or packed.numel() != sum(sizes):
        raise ValueError(f"the optimizer's state has {packed.numel()} numbers, not {sum(sizes)}")
    parts = iter(packed.clone().split(sizes))
    for parameter in parameters:
        step, *moments = (next(parts) for _ in MOMENTS)
        if not 0 <= step < 2 ** 24:
            raise ValueError(f"the optimizer's step count is {step.item()}")
        # AdamW keeps its step count on the CPU, unless it is fused.
        step = step[0].to(parameter.device if optimizer.defaults["fused"] else "cpu")
        moments = [moment.view_as(parameter).to(parameter.device) for moment in moments]
        optimizer.state[parameter] = dict(zip(MOMENTS, (step, *moments)))


def append_line(file: Path, record: dict) -> None:
    with open(file, "a", encoding="utf-8") as handle:
        handle.write(json.dumps(record) + "\n")


def write_lines(file: Path, records: list[dict]) -> None:
    write_text(file, "".join(json.dumps(record) + "\n" for record in records))


def read_lines(file: Path, key: str = "step") -> list[dict]:
    """The records of a JSONL file, each with this key; a last line that was cut does not count."""
    if not file.exists():
        return []
    records, number = [], 0
    try:
        lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
        for number, line in enumerate(lines, 1):
            if line.endswith("\n"):
                records.append(json.loads(line))
                if type(records[-1][key]) is not (int if key == "step" else str):
                    raise TypeError(key)
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        raise ValueError(f"{file}, line {number} is damaged: expected a JSON object with a {key}; "
                         "move the file away to go on without it") from None
    return records
