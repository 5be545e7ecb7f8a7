"""Files on disk: JSON and safetensors only, read with a clear error, written so that no one sees half a file.

A file is written to a temporary name beside its place and renamed into it, so a crash leaves the old file or the new
one; JSONL grows a line at a time, and a line cut short does not count. Every reader turns a missing, corrupt or
unexpected file into a ValueError that names it; the command line prints that as one line.
"""
import json
import os
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor


os.umask(UMASK := os.umask(0))                             # it can only be read by setting it


def write_atomically(file: Path, write) -> None:
    """Call write(temporary path), flush it to the disk, then rename it to `file`."""
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f"{file.name}.{os.getpid()}.tmp")       # two processes never share one
    try:
        write(temporary)
        with open(temporary, "rb+") as handle:
            os.fsync(handle.fileno())
        os.chmod(temporary, 0o666 & ~UMASK)                 # safetensors would keep its files to their owner
        os.replace(temporary, file)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(file: Path, text: str) -> None:
    write_atomically(file, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def write_json(file: Path, value: dict) -> None:
    write_text(file, json.dumps(value, indent=2) + "\n")


def write_tensors(file: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    try:
        write_atomically(file, lambda temporary: save_file(tensors, temporary, {"format": "pt", **(metadata or {})}))
    except SafetensorError as error:                        # a full disk, most likely
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
            return {key: shard.get_tensor(key) for key in shard.keys() if wanted is None or key in wanted}
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} is not a readable safetensors file ({error}): fetch or save it again") from None


def read_metadata(file: Path) -> dict[str, str]:
    """The strings in a safetensors file's header."""
    try:
        with safe_open(file, framework="pt") as shard:
            return shard.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} is not a readable safetensors file ({error})") from None


def pack_optimizer(prefix: str, parameters: dict[str, Tensor], optimizer) -> dict[str, Tensor]:
    """AdamW's moments and step counts, named after the parameters they belong to."""
    return {f"{prefix}.{key}.{name}": value for name, parameter in parameters.items()
            for key, value in optimizer.state[parameter].items()}


def unpack_optimizer(prefix: str, parameters: dict[str, Tensor], optimizer, tensors: dict[str, Tensor]) -> None:
    for name, parameter in parameters.items():
        state = {key: tensors[f"{prefix}.{key}.{name}"] for key in ("step", "exp_avg", "exp_avg_sq")
                 if f"{prefix}.{key}.{name}" in tensors}
        if len(state) not in (0, 3) or any(value.shape != (() if key == "step" else parameter.shape) for key, value in state.items()):
            raise ValueError(f"the optimizer's moments of {name} are missing or have another shape")
        # AdamW keeps its step count on the CPU, unless it is fused.
        optimizer.state[parameter] = {key: value.to(parameter.device) if key != "step" or optimizer.defaults["fused"] else value
                                      for key, value in state.items()}


def append_line(file: Path, record: dict) -> None:
    with open(file, "a", encoding="utf-8") as handle:
        handle.write(json.dumps(record) + "\n")


def write_lines(file: Path, records: list[dict]) -> None:
    write_text(file, "".join(json.dumps(record) + "\n" for record in records))


def read_lines(file: Path, key: str = "step") -> list[dict]:
    """The records of a JSONL file, each with this key; a last line that a crash cut short does not count."""
    if not file.exists():
        return []
    try:
        lines = [line for line in file.read_text(encoding="utf-8").splitlines(keepends=True) if line.endswith("\n")]
        records = [json.loads(line) for line in lines]
        if all(isinstance(record, dict) and type(record.get(key)) is (int if key == "step" else str) for record in records):
            return records
    except (OSError, ValueError, RecursionError):
        pass
    raise ValueError(f"{file} is damaged: expected a JSON object with a {key} on every line; move it away to go on without it")


def find_model_folder(path: str | Path) -> Path:
    """A local folder as it is; what looks like a hub id is fetched, or found in the hub's own cache."""
    folder = Path(path)
    if folder.is_dir():
        return folder
    if folder.suffix == ".gguf":
        raise ValueError(f"{path} is a GGUF file: python tools/convert_gguf.py {path} FOLDER makes a model folder of it")
    if folder.exists() or str(path).count("/") != 1 or str(path).startswith((".", "/", "~")):
        raise ValueError(f"{path} is not a model: expected a folder with config.json and safetensors files, or a hub id")
    from huggingface_hub import snapshot_download           # slow to import, and needed for hub ids only
    try:
        return Path(snapshot_download(str(path), allow_patterns=["*.json", "*.safetensors", "*.txt", "*.jinja"]))
    except Exception as error:                              # the hub's client raises dozens of types
        raise ValueError(f"{path} is neither a folder nor a model that the hub gives ({type(error).__name__}): "
                         "check the name and the connection, or name a local folder") from None


def find_weight_files(folder: Path) -> list[Path]:
    """model.safetensors, or the shards that model.safetensors.index.json lists."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return [folder / "model.safetensors"]
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ValueError(f"{index}: expected a weight_map of tensor names to file names")
    names = sorted(set(weight_map.values()))
    for name in names:
        if Path(name).name != name or name in ("", "..") or "\0" in name:         # no path may lead out of the folder
            raise ValueError(f"{index}: shard {name!r} is not the name of a file in this folder")
    return [folder / name for name in names]
