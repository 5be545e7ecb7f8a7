"""Low-rank adapters (LoRA, Hu et al. 2021): the only weights that the policy learns.

    y = W x + b + (alpha / rank) B A x      A (rank, in) random, B (out, rank) zero, W, b frozen

Because B starts at zero, a fresh adapter changes nothing: the model with its adapters disabled *is*
the reference policy, and no second copy is kept. A and B stay in fp32 whatever the base's dtype:
with a learning rate of 1e-5, a bf16 adapter would round most of its updates away. Adapters are
saved and loaded in PEFT's format (adapter_config.json, adapter_model.safetensors).
"""
import math
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from model import Transformer
from support.files import check_tensors, read_json, read_tensors, write_json, write_tensors

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ALPHA = 16.0
PEFT_PREFIX = "base_model.model.model."
UNSUPPORTED = ("use_dora", "use_rslora", "modules_to_save", "rank_pattern", "alpha_pattern",
               "fan_in_fan_out", "use_qalora", "trainable_token_indices", "lora_bias")


class LoRALinear(nn.Linear):
    """A frozen linear layer plus its adapter; keeps the names `weight` and `bias`."""

    def __init__(self, base: nn.Linear, rank: int, alpha: float, generator: torch.Generator):
        nn.Module.__init__(self)
        self.in_features, self.out_features = base.in_features, base.out_features
        self.weight, self.bias = base.weight, base.bias  # shared with the layer that this replaces
        self.scale = alpha / rank
        self.enabled = True  # False: the layer is its own reference policy
        bound = 1 / math.sqrt(base.in_features)  # PEFT's initialisation
        A = torch.empty(rank, base.in_features).uniform_(-bound, bound, generator=generator)
        B = torch.zeros(base.out_features, rank)
        self.lora_A = nn.Parameter(A.to(base.weight.device))
        self.lora_B = nn.Parameter(B.to(base.weight.device))

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.weight, self.bias)
        if not self.enabled:
            return y
        update = x.float() @ self.lora_A.T @ self.lora_B.T
        return y + (self.scale * update).to(y.dtype)


def layers(model: nn.Module) -> dict[str, LoRALinear]:
    return {name: module for name, module in model.named_modules()
            if isinstance(module, LoRALinear)}


def parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The trainable weights under PEFT's names, in one fixed order."""
    return {f"{PEFT_PREFIX}{name}.lora_{part}.weight": getattr(layer, f"lora_{part}")
            for name, layer in layers(model).items() for part in "AB"}


def apply(model: Transformer, rank: int = 8, alpha: float = ALPHA,
          targets: tuple[str, ...] = TARGETS, seed: int = 0) -> Transformer:
    """Freeze the model and put an adapter on every linear layer whose last name is in `targets`."""
    model.requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for name, module in list(model.named_modules()):
        owner, _, leaf = name.rpartition(".")
        if leaf in targets:
            adapted = LoRALinear(module, rank, alpha, generator)
            setattr(model.get_submodule(owner), leaf, adapted)
    return model


@contextmanager
def disabled(model: nn.Module):
    """Inside, the model is its own reference policy."""
    enabled = [layer for layer in layers(model).values() if layer.enabled]
    for layer in enabled:
        layer.enabled = False
    try:
        yield model
    finally:
        for layer in enabled:
            layer.enabled = True


@torch.no_grad()
def merge(layer: nn.Linear) -> Tensor:
    """W + scale * B A, in W's dtype."""
    if not isinstance(layer, LoRALinear) or not layer.enabled:
        return layer.weight
    update = (layer.lora_B @ layer.lora_A).mul_(layer.scale)
    return update.add_(layer.weight).to(layer.weight.dtype)


@contextmanager
def merged(model: nn.Module):
    """Inside, every W is W + scale * B A. The originals are set aside and put back unchanged."""
    adapted = layers(model).values()
    originals = [layer.weight for layer in adapted]
    try:
        for layer in adapted:
            layer.weight = nn.Parameter(merge(layer), requires_grad=False)
        with disabled(model):
            yield model
    finally:
        for layer, weight in zip(adapted, originals):
            layer.weight = weight


def save(model: Transformer, folder: str | Path, base: str = "") -> None:
    """Write the adapters as PEFT does; `base` is the name of the model that they belong to."""
    adapted = layers(model)
    first = next(iter(adapted.values()))
    rank = first.lora_A.shape[0]
    write_tensors(Path(folder) / "adapter_model.safetensors", parameters(model))
    targets = sorted({name.rpartition(".")[2] for name in adapted})
    write_json(Path(folder) / "adapter_config.json", {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base,
        "r": rank, "lora_alpha": first.scale * rank, "target_modules": targets,
        "lora_dropout": 0.0, "bias": "none", "fan_in_fan_out": False, "inference_mode": True})


def load(model: Transformer, folder: str | Path) -> Transformer:
    """Give the model the adapters of a PEFT folder."""
    file = Path(folder) / "adapter_model.safetensors"
    where = Path(folder) / "adapter_config.json"
    config, tensors = read_json(where), read_tensors(file)
    extra = [key for key in UNSUPPORTED if config.get(key)]
    if config.get("peft_type") != "LORA" or config.get("bias", "none") != "none" or extra:
        raise ValueError(f"{where}: expected plain LoRA without bias, found "
                         f"{config.get('peft_type')} {' '.join(extra)}")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    numbers = type(rank) is int and type(alpha) in (int, float)
    if not numbers or not (0 < rank <= 2 ** 14 and 0 < alpha < 1e9):
        raise ValueError(f"{where}: r is {rank!r} and lora_alpha {alpha!r}, expected positive "
                         f"numbers, r at most {2 ** 14}")
    if not layers(model):
        targets = {part for key in tensors for part in key.split(".") if part in TARGETS}
        if not targets:
            raise ValueError(f"{file} has no adapter of {', '.join(TARGETS)}")
        apply(model, rank, alpha, tuple(targets))
    check_tensors(tensors, parameters(model), str(file))
    for layer in layers(model).values():
        layer.scale = alpha / rank
    with torch.no_grad():
        for name, parameter in parameters(model).items():
            parameter.copy_(tensors[name])
    return model
