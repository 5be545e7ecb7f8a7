"""The paper's model size on this machine: Qwen2.5-1.5B's shape with random weights, one rollout and one update, memory by stage.

    python tools/large_model.py FOLDER [float32|bfloat16]

Writes a sharded Hugging Face folder (3 GB in bfloat16, the default, 6 GB in float32) unless it is there already, reads it as
train.py would, samples 8 responses of 64 tokens to one prompt of 150 and updates the adapters once. Linux only: the peak of
each stage is the process's high-water mark, which is set back in between.
"""
import json
import math
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).parent.parent))

import budget
import grpo
import lora
import sample
from files import write_json
from model import ModelConfig, Transformer

SHARD, PROMPT, SAMPLES, NEW_TOKENS = 10 ** 9, 150, 8, 64     # a shard is closed when it has this many bytes
SHAPE = budget.SHAPES["Qwen/Qwen2.5-1.5B"]


def write_folder(folder: Path, dtype: torch.dtype) -> None:
    """Random weights under the names of a Hugging Face checkpoint, in shards with their index."""
    with torch.device("meta"):
        shapes = {f"model.{name}": tensor.shape for name, tensor in Transformer(ModelConfig.from_dict(SHAPE)).named_parameters()}
    folder.mkdir(parents=True, exist_ok=True)
    shard, weight_map, generator, number = {}, {}, torch.Generator().manual_seed(0), 1
    for i, (name, shape) in enumerate(shapes.items()):
        tensor = torch.empty(shape, dtype=dtype)
        shard[name] = tensor.fill_(1.0) if "norm" in name else tensor.normal_(0, 0.02, generator=generator)
        weight_map[name] = f"model-{number:05d}.safetensors"
        if sum(t.nbytes for t in shard.values()) > SHARD or i == len(shapes) - 1:
            save_file(shard, folder / weight_map[name], {"format": "pt"})
            shard, number = {}, number + 1
    write_json(folder / "model.safetensors.index.json", {"weight_map": weight_map})
    write_json(folder / "config.json", {**SHAPE, "dtype": str(dtype).removeprefix("torch.")})


def main(arguments: list[str]) -> None:
    if len(arguments) not in (1, 2) or arguments[0].startswith("-") or arguments[1:] not in ([], ["float32"], ["bfloat16"]):
        sys.exit(__doc__)
    folder, dtype = Path(arguments[0]), getattr(torch, (arguments[1:] or ["bfloat16"])[0])
    if not (folder / "config.json").exists():
        write_folder(folder, dtype)
    found = json.loads((folder / "config.json").read_text()).get("dtype")
    if found != str(dtype).removeprefix("torch."):
        sys.exit(f"large_model.py: {folder} holds {found} weights: choose another folder")
    begin = time.perf_counter()

    def stage(name: str) -> None:
        nonlocal begin
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        peak, now = (int(status[key].split()[0]) / 1e6 for key in ("VmHWM", "VmRSS"))
        print(f"{name:32} peak {peak:6.2f} GB, afterwards {now:6.2f} GB, {time.perf_counter() - begin:6.1f} s", flush=True)
        Path("/proc/self/clear_refs").write_text("5")       # the high-water mark starts again from here
        begin = time.perf_counter()

    Path("/proc/self/clear_refs").write_text("5")
    model = lora.apply(Transformer.from_pretrained(folder, dtype))
    adapters, generator = lora.parameters(model), torch.Generator().manual_seed(0)
    stage("load")
    prompts = [torch.randint(SHAPE["vocab_size"], (PROMPT,), generator=generator).tolist()]
    rollout = sample.generate(model, prompts, SAMPLES, NEW_TOKENS, 1.0, (), generator)
    stage(f"rollout, {SAMPLES} x {NEW_TOKENS} tokens")
    optimizer = torch.optim.AdamW(adapters.values(), lr=2e-5)
    settings = grpo.LossSettings(kl=0.04, micro_batch=1, max_new_tokens=NEW_TOKENS)
    reference = grpo.reference_logprobs(model, prompts, rollout, settings)
    stage("reference")
    metrics = grpo.accumulate_gradient(model, prompts, rollout, torch.linspace(-1, 1, SAMPLES)[None], settings, reference)
    stage("update, forward and backward")
    norm = torch.nn.utils.clip_grad_norm_(adapters.values(), 1.0)
    optimizer.step()
    stage("optimizer")
    if not (math.isfinite(metrics["loss"]) and math.isfinite(norm) and norm > 0):
        sys.exit(f"large_model.py: loss {metrics['loss']} and gradient norm {norm} should be finite and not zero")
    rows = SAMPLES * NEW_TOKENS * SHAPE["vocab_size"] * 4 / 1e9
    print(f"loss {metrics['loss']:.4f}, gradient norm {norm:.4f}\nThe vocabulary projection in one piece: {rows:.2f} GB of logits, "
          f"{4 * rows:.2f} GB with their softmax and both gradients; in chunks {12 * grpo.LOGITS_AT_ONCE / 1e9:.2f} GB")


if __name__ == "__main__":
    main(sys.argv[1:])
