"""Low-rank adapters (LoRA, Hu et al. 2021): the only weights that the policy learns.

    y = W x + b + (alpha / rank) B A x,      A (rank, in) small random, B (out, rank) zero, W and b frozen

B = 0 makes a fresh adapter invisible, so the model with its adapters disabled *is* the reference policy and
no second copy is ever kept. A and B stay in fp32 whatever the base's dtype: with a learning rate of 1e-5 a
bf16 adapter would round most of its updates away. Folders are PEFT's: adapter_config.json and
adapter_model.safetensors, in both directions.
"""
import math
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from files import read_json, read_tensors, write_json, write_tensors
from model import Transformer

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PEFT_PREFIX = "base_model.model.model."
UNSUPPORTED = ("use_dora", "use_rslora", "modules_to_save", "rank_pattern", "alpha_pattern", "fan_in_fan_out",
               "use_qalora", "trainable_token_indices", "lora_bias")


class LoRALinear(nn.Linear):
    """A frozen linear layer plus its adapter; keeps the names `weight` and `bias` of the layer it replaces."""
    def __init__(self, base: nn.Linear, rank: int, alpha: float, generator: torch.Generator):
        nn.Module.__init__(self)
        self.in_features, self.out_features = base.in_features, base.out_features
        self.weight, self.bias, self.scale, self.enabled = base.weight, base.bias, alpha / rank, True
        bound = 1 / math.sqrt(base.in_features)             # PEFT's initialisation, kaiming_uniform(a=sqrt(5))
        A = torch.empty(rank, base.in_features).uniform_(-bound, bound, generator=generator)
        self.lora_A = nn.Parameter(A.to(base.weight.device))
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, rank, device=base.weight.device))

    def forward(self, x: Tensor) -> Tensor:
        if not self.enabled:
            return F.linear(x, self.weight, self.bias)
        return Adapted.apply(x, self.weight, self.bias, self.lora_A, self.lora_B, self.scale)


class Adapted(torch.autograd.Function):
    """y = W x + b + scale B A x, adding the thin products in place: autograd alone would make a full-sized tensor for
    each term, forward and backward. Only x and A x are kept, and there is no gradient for W. Thin matrices are multiplied with
    their long side in the rows, several times as fast on a CPU: hence B.t().contiguous() and (inner.t() @ wide).t()."""
    @staticmethod
    def forward(ctx, x, weight, bias, A, B, scale):
        rows = x.flatten(0, -2)                                                                  # (n, in)
        inner = rows.float() @ A.t() * scale                                                     # (n, rank)
        y = F.linear(rows, weight, bias)
        y = y.addmm_(inner, B.t()) if y.dtype == B.dtype else y + (inner @ B.t()).to(y.dtype)
        ctx.save_for_backward(rows, inner, weight, A, B)
        ctx.scale = scale
        return y.unflatten(0, x.shape[:-1])

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        rows, inner, weight, A, B = ctx.saved_tensors
        flat = grad.flatten(0, -2)                                                               # (n, out)
        wide, x = flat.float(), None
        thin = wide @ B.t().contiguous().t() * ctx.scale                                         # (n, rank)
        if ctx.needs_input_grad[0]:
            x = flat @ weight
            x = x.addmm_(thin, A) if x.dtype == A.dtype else x + (thin @ A).to(x.dtype)
            x = x.unflatten(0, grad.shape[:-1])
        return x, None, None, thin.t() @ rows.float(), (inner.t() @ wide).t(), None


def layers(model: nn.Module) -> dict[str, LoRALinear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, LoRALinear)}


def parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The trainable weights under PEFT's names, in one fixed order."""
    return {f"{PEFT_PREFIX}{name}.lora_{part}.weight": getattr(layer, f"lora_{part}")
            for name, layer in layers(model).items() for part in "AB"}


def check(rank: int, alpha: float, targets: tuple[str, ...]) -> None:
    unknown = sorted(set(targets) - set(TARGETS))
    if unknown or not targets:
        raise ValueError(f"LoRA targets {', '.join(unknown) or '(none)'}: expected some of {', '.join(TARGETS)}")
    if rank < 1 or alpha <= 0:
        raise ValueError(f"LoRA rank {rank} and alpha {alpha} must be positive")


def apply(model: Transformer, rank: int = 8, alpha: float = 16, targets: tuple[str, ...] = TARGETS,
          seed: int = 0) -> Transformer:
    """Freeze the model and put an adapter on every linear layer whose last name is in `targets`."""
    check(rank, alpha, targets)
    model.requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for name, module in list(model.named_modules()):
        owner, _, leaf = name.rpartition(".")
        if leaf in targets:
            setattr(model.get_submodule(owner), leaf, LoRALinear(module, rank, alpha, generator))
    return model


@contextmanager
def disabled(model: nn.Module):
    """Inside, the model is its own reference policy."""
    wrapped = [layer for layer in layers(model).values() if layer.enabled]
    for layer in wrapped:
        layer.enabled = False
    try:
        yield model
    finally:
        for layer in wrapped:
            layer.enabled = True


@torch.no_grad()
def merge(layer: nn.Linear) -> Tensor:
    """W + scale * B A, in W's dtype."""
    if not isinstance(layer, LoRALinear) or not layer.enabled:
        return layer.weight
    return (layer.lora_B @ layer.lora_A).mul_(layer.scale).add_(layer.weight).to(layer.weight.dtype)


@contextmanager
def merged(model: nn.Module):
    """Inside, W is W + scale * B A and the adapters cost nothing. The original tensors are set aside, not
    added to and subtracted from, so afterwards they are the same bits."""
    wrapped = layers(model).values()
    originals = [layer.weight for layer in wrapped]
    try:
        for layer in wrapped:
            layer.weight = nn.Parameter(merge(layer), requires_grad=False)
        with disabled(model):
            yield model
    finally:
        for layer, weight in zip(wrapped, originals):
            layer.weight = weight


def save(model: Transformer, folder: str | Path, base: str = "") -> None:
    """Write the adapters as PEFT does; `base` is the name of the model that they belong to."""
    wrapped = layers(model)
    first = next(iter(wrapped.values()))
    rank = first.lora_A.shape[0]
    write_tensors(Path(folder) / "adapter_model.safetensors", parameters(model))
    write_json(Path(folder) / "adapter_config.json", {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "r": rank,
        "lora_alpha": first.scale * rank, "target_modules": sorted({name.rpartition(".")[2] for name in wrapped}),
        "lora_dropout": 0.0, "bias": "none", "fan_in_fan_out": False, "inference_mode": True})


def load(model: Transformer, folder: str | Path) -> Transformer:
    """Put the adapters of a PEFT folder on the model (in place of its own, if it has the same ones)."""
    file, where = Path(folder) / "adapter_model.safetensors", Path(folder) / "adapter_config.json"
    config, tensors = read_json(where), read_tensors(file)
    extra = [key for key in UNSUPPORTED if config.get(key)]
    if config.get("peft_type") != "LORA" or config.get("bias", "none") != "none" or extra:
        raise ValueError(f"{where}: expected plain LoRA without bias, found {config.get('peft_type')} {' '.join(extra)}")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if type(rank) is not int or type(alpha) not in (int, float) or not (0 < rank <= 2 ** 14 and 0 < alpha < 1e9):
        raise ValueError(f"{where}: r is {rank!r} and lora_alpha {alpha!r}, expected positive numbers, r at most {2 ** 14}")
    if not layers(model):
        targets = {part for key in tensors for part in key.split(".") if part in TARGETS}
        if not targets:
            raise ValueError(f"{file} has no adapter of {', '.join(TARGETS)}")
        apply(model, rank, alpha, tuple(targets))
    adapters = parameters(model)
    for key in sorted(adapters.keys() | tensors.keys()):
        if key not in adapters or key not in tensors:
            raise ValueError(f"{file}: tensor {key} is {'unexpected' if key in tensors else 'missing'} for this model")
        if adapters[key].shape != tensors[key].shape:
            raise ValueError(f"{file}: tensor {key} has shape {tuple(tensors[key].shape)}, "
                             f"expected {tuple(adapters[key].shape)}")
    with torch.no_grad():
        for key, adapter in adapters.items():
            adapter.copy_(tensors[key])
    for layer in layers(model).values():
        layer.scale = alpha / rank
    return model
