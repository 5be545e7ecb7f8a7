"""Files on disk: JSON and safetensors only, read with a clear error, written so that nobody sees half a file.

A file is written under a temporary name beside its place and then renamed, so a crash leaves the old
file or the new one. JSONL files grow by one line at a time; a last line that a crash cut short does not
count. Every reader turns a missing or damaged file into a ValueError that names it.
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
        os.chmod(temporary, 0o666 & ~UMASK)  # safetensors makes files that only their owner can read
        os.replace(temporary, file)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(file: Path, text: str) -> None:
    write_atomically(file, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def write_json(file: Path, value: dict) -> None:
    write_text(file, json.dumps(value, indent=2) + "\n")


def write_tensors(file: Path, tensors: dict[str, Tensor], header: dict[str, str] | None = None) -> None:
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


def read_tensors(file: Path, wanted=None) -> dict[str, Tensor]:
    """The tensors of a safetensors file; with `wanted`, only those of these names that it has."""
    if not file.is_file():
        raise ValueError(f"{file} is missing")
    try:
        with safe_open(file, framework="pt") as shard:
            names = [key for key in shard.keys() if wanted is None or key in wanted]
            return {key: shard.get_tensor(key) for key in names}
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} is not a readable safetensors file ({error}): download or save it "
                         "again") from None


def read_header(file: Path) -> dict[str, str]:
    """The strings in a safetensors file's header."""
    try:
        with safe_open(file, framework="pt") as shard:
            return shard.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} is not a readable safetensors file ({error})") from None


def check_tensors(tensors: dict[str, Tensor], expected: dict[str, Tensor], where: str) -> None:
    """Tensors from a file must have the expected names, shapes and kinds, and be finite."""
    for name in sorted(tensors.keys() | expected.keys()):
        if name not in tensors or name not in expected:
            what = "unexpected" if name in tensors else "missing"
            raise ValueError(f"{where}: tensor {name} is {what}")
        tensor, wanted = tensors[name], expected[name]
        if tensor.shape != wanted.shape and not name.endswith("_extra_state"):
            raise ValueError(f"{where}: tensor {name} has shape {tuple(tensor.shape)}, expected "
                             f"{tuple(wanted.shape)}")
        if tensor.is_floating_point() != wanted.is_floating_point():
            raise ValueError(f"{where}: tensor {name} is {tensor.dtype}, expected {wanted.dtype}")
        if not tensor.isfinite().all():
            raise ValueError(f"{where}: tensor {name} holds a number that is not finite")


def load_module(module: torch.nn.Module, tensors: dict[str, Tensor], where: str) -> None:
    """Give a module its state_dict back."""
    check_tensors(tensors, module.state_dict(), where)
    module.load_state_dict(tensors)


def pack_optimizer(optimizer: torch.optim.AdamW) -> Tensor:
    """AdamW's step count and two moments of every parameter, as one flat tensor; empty before a step."""
    parts = [torch.empty(0)]
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            if state:
                parts += [state[key].detach().cpu().flatten() for key in MOMENTS]
    return torch.cat(parts)


def unpack_optimizer(optimizer: torch.optim.AdamW, packed: Tensor) -> None:
    """The reverse. All parameters have moments, or none has."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    sizes = [size for parameter in parameters for size in (1, parameter.numel(), parameter.numel())]
    if packed.dtype != torch.float32 or packed.numel() not in (0, sum(sizes)):
        raise ValueError(f"the optimizer's state has {packed.numel()} numbers of {packed.dtype}, "
                         f"expected {sum(sizes)} of torch.float32")
    optimizer.state.clear()
    if not packed.numel():
        return
    parts = iter(packed.split(sizes))
    for parameter in parameters:
        step, first, second = next(parts)[0], next(parts), next(parts)
        if not 0 <= step < 2 ** 24:
            raise ValueError(f"the optimizer's step count is {step.item()}")
        # AdamW keeps its step count on the CPU, unless it is fused.
        device = parameter.device if optimizer.defaults["fused"] else "cpu"
        moments = [moment.view_as(parameter).to(parameter.device).clone() for moment in (first, second)]
        values = step.clone().to(device), *moments
        optimizer.state[parameter] = dict(zip(MOMENTS, values))


def append_line(file: Path, record: dict) -> None:
    with open(file, "a", encoding="utf-8") as handle:
        handle.write(json.dumps(record) + "\n")


def write_lines(file: Path, records: list[dict]) -> None:
    write_text(file, "".join(json.dumps(record) + "\n" for record in records))


def read_lines(file: Path, key: str = "step") -> list[dict]:
    """The records of a JSONL file, each with this key; a last line that was cut short does not count."""
    if not file.exists():
        return []
    try:
        lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} cannot be read ({error}): move it away to go on without it") from None
    records = []
    for number, line in enumerate(lines, 1):
        if not line.endswith("\n"):
            break
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        kind = int if key == "step" else str
        if not isinstance(record, dict) or type(record.get(key)) is not kind:
            raise ValueError(f"{file}, line {number} is damaged: expected a JSON object with a {key}; "
                             "move the file away to go on without it")
        records.append(record)
    return records
