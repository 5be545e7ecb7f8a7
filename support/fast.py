"""The same results sooner: faster twins of textbook modules, behind one call, accelerate(model).

    LoRALinear     the thin products are added in place; only x and A x are kept for the gradient
    RMSNorm        one kernel, on a GPU
    logprobs       a chunk of rows at a time, its gradient made on the way: no logits are kept
    Decoder        one token of many rows at a time: support/decoder.py

Values and gradients equal those of the textbook modules up to rounding: tests hold both together.
docs/speed.md has what each trick is worth. Freed memory is kept in the process.
"""
import ctypes
import sys

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from lora import LoRALinear
from model import RMSNorm, Transformer
from support.decoder import Decoder

LOGITS_AT_ONCE = 2 ** 23  # at most this many logits exist at a time: 32 MB in fp32


class FusedLoRA(torch.autograd.Function):
    """y = W x + b + scale B A x. There is no gradient for W and b.

    Thin matrices are multiplied with their long side in the rows, several times as fast on a CPU:
    hence B.t().contiguous().t() and (inner.t() @ wide).t().
    """

    @staticmethod
    def forward(ctx, x, weight, bias, A, B, scale):
        rows = x.flatten(0, -2)  # (n, in)
        inner = rows.float() @ A.t() * scale  # (n, rank)
        y = F.linear(rows, weight, bias)
        y = y.addmm_(inner, B.t()) if y.dtype == B.dtype else y + (inner @ B.t()).to(y.dtype)
        ctx.save_for_backward(rows, inner, weight, A, B)
        ctx.scale = scale
        return y.unflatten(0, x.shape[:-1])

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        rows, inner, weight, A, B = ctx.saved_tensors
        flat = grad.flatten(0, -2)  # (n, out)
        wide = flat.float()
        thin = wide @ B.t().contiguous().t() * ctx.scale  # (n, rank)
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = flat @ weight
            if grad_x.dtype == A.dtype:
                grad_x.addmm_(thin, A)
            else:
                grad_x = grad_x + (thin @ A).to(grad_x.dtype)
            grad_x = grad_x.unflatten(0, grad.shape[:-1])
        grad_A = thin.t() @ rows.float()
        grad_B = (inner.t() @ wide).t()
        return grad_x, None, None, grad_A, grad_B, None


class FastLoRALinear(LoRALinear):
    def forward(self, x: Tensor) -> Tensor:
        if not self.enabled:
            return F.linear(x, self.weight, self.bias)
        return FusedLoRA.apply(x, self.weight, self.bias, self.lora_A, self.lora_B, self.scale)


class FusedLogprobs(torch.autograd.Function):
    """hidden (n, D), head (V, D), targets (n,) -> log-probability of each target (n,), in fp32.

    The head is frozen, so all that backward needs is
        d logp / d hidden = (onehot(target) - softmax(logits)) head / temperature,  (n, D)
    and it is computed in the forward pass: no logits are kept, and none are computed twice.
    """

    @staticmethod
    def forward(ctx, hidden, head, targets, temperature):
        logprobs = hidden.new_empty(len(hidden), dtype=torch.float32)
        slopes = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        size = max(1, LOGITS_AT_ONCE // len(head))
        for i in range(0, len(hidden), size):
            rows, target = slice(i, i + size), targets[i:i + size, None]  # (size, 1)
            logits = F.linear(hidden[rows], head).float().div_(temperature)  # (size, V)
            every = F.log_softmax(logits, dim=1)
            logprobs[rows] = every.gather(1, target)[:, 0]
            if slopes is not None:
                # softmax - onehot, in fp32: for a nearly sure token it is a small difference.
                slope = every.exp_().scatter_add_(1, target, -torch.ones_like(target).float())
                slopes[rows] = slope.to(head.dtype) @ head / -temperature
        ctx.save_for_backward(slopes)
        return logprobs

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        slopes, = ctx.saved_tensors
        return grad[:, None].to(slopes.dtype) * slopes, None, None, None


class FastRMSNorm(RMSNorm):
    """One kernel instead of six, where a GPU has it."""

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type == "cpu":
            return super().forward(x)
        return F.rms_norm(x, x.shape[-1:], self.weight, self.eps)


class FastTransformer(Transformer):
    decoder = Decoder

    def logprobs(self, hidden: Tensor, targets: Tensor, temperature: float) -> Tensor:
        return FusedLogprobs.apply(hidden, self.head, targets, temperature)


FAST = {LoRALinear: FastLoRALinear, RMSNorm: FastRMSNorm, Transformer: FastTransformer}


def accelerate(model: nn.Module) -> nn.Module:
    """Modules become their fast twins, if they have one: same parameters, names and results."""
    reuse_memory()
    for module in model.modules():
        module.__class__ = FAST.get(type(module), type(module))
    return model


def reuse_memory() -> None:
    """Let freed memory be used again at once; outside Linux this does nothing.

    By default glibc gives large blocks back to the system, and every new tensor then pays for fresh
    pages: a quarter or more of the time of an update on a CPU.
    """
    library = ctypes.CDLL(None) if sys.platform == "linux" else None
    if hasattr(library, "mallopt"):
        library.mallopt(-8, 1)  # M_ARENA_MAX: one pool for all threads
        if not library.mallopt(-3, 2 ** 30):  # M_MMAP_THRESHOLD
            library.mallopt(-3, 2 ** 25)  # an old glibc takes no more
        library.mallopt(-1, 2 ** 31 - 1)  # M_TRIM_THRESHOLD
