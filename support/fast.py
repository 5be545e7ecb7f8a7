"""The same results sooner: faster twins of the textbook modules, behind one call, accelerate(model).

    LoRALinear      its two thin products are added in place; only x and A x are kept for the gradient
    RMSNorm         one pass over memory each way; keeps x and one number per row
    rotate          writes both halves in place; its gradient is the rotation by the opposite angle
    MLP             keeps gate and up, not silu(gate)
    logprobs        a chunk of rows at a time, its gradient made on the way: no logits are kept
    decoder         one token of many rows at a time, for sampling (decoder.py)

Values and gradients equal those of the textbook modules up to rounding: tests hold both together.
`reuse_memory` asks the C library not to return freed memory to the system.
"""
import ctypes
import sys

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from lora import LoRALinear
from model import MLP, Attention, RMSNorm, Transformer
from support.decoder import Decoder, rms_norm

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


class FusedRMSNorm(torch.autograd.Function):
    """With s = 1 / sqrt(mean(x^2) + eps) and g = grad * weight: grad_x = s (g - x s^2 mean(x g))."""

    @staticmethod
    def forward(ctx, x, weight, eps):
        y, scale = rms_norm(x, weight, eps)
        ctx.save_for_backward(x, weight, scale)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, weight, scale = ctx.saved_tensors
        wide = x.float()
        slope = (grad * weight).float()
        inner = torch.linalg.vecdot(wide, slope)[..., None]
        inner = inner.mul_(scale.square()).div_(-x.shape[-1])
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = (grad.float() * wide * scale).flatten(0, -2).sum(0).to(weight.dtype)
        grad_x = slope.addcmul_(wide, inner).mul_(scale).to(x.dtype)
        return grad_x, grad_weight, None


class FastRMSNorm(RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            return FusedRMSNorm.apply(x, self.weight, self.eps)
        return rms_norm(x, self.weight, self.eps)[0]


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """model.rotate without a copy to negate or join the halves; autograd does not see through it."""
    y = torch.empty_like(x)
    a, b = x.chunk(2, dim=-1)
    first, second = y.chunk(2, dim=-1)
    torch.mul(a, cos, out=first).addcmul_(b, sin, value=-1)
    torch.mul(b, cos, out=second).addcmul_(a, sin)
    return y


class FusedRotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cos, sin):
        ctx.save_for_backward(cos, sin)
        return turn(x, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        cos, sin = ctx.saved_tensors
        return turn(grad, cos, -sin), None, None


class FastAttention(Attention):
    rotate = staticmethod(FusedRotation.apply)


class FusedSwiGLU(torch.autograd.Function):
    """silu(gate) * up."""

    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        gate, up = ctx.saved_tensors
        return torch.ops.aten.silu_backward(grad * up, gate), F.silu(gate).mul_(grad)


class FastMLP(MLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(FusedSwiGLU.apply(self.gate_proj(x), self.up_proj(x)))


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
        room = head.new_empty(min(size, len(hidden)), len(head))  # touching new memory is slow
        for i in range(0, len(hidden), size):
            rows, target = slice(i, i + size), targets[i:i + size]
            logits = torch.mm(hidden[rows], head.t(), out=room[:len(target)])  # (size, V)
            logits = logits.float().div_(temperature)
            total = logits.logsumexp(1)
            logprobs[rows] = logits.gather(1, target[:, None])[:, 0] - total
            if slopes is not None:
                # softmax - onehot, in fp32: for a token that is nearly sure it is a small difference.
                slope = logits.sub_(total[:, None]).exp_()
                slope[torch.arange(len(target), device=target.device), target] -= 1
                slopes[rows] = slope.to(head.dtype) @ head / -temperature
        ctx.save_for_backward(slopes)
        return logprobs

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        slopes, = ctx.saved_tensors
        return grad[:, None].to(slopes.dtype) * slopes, None, None, None


class FastTransformer(Transformer):
    decoder = Decoder

    def logprobs(self, hidden: Tensor, targets: Tensor, temperature: float) -> Tensor:
        return FusedLogprobs.apply(hidden, self.head, targets, temperature)


FAST = {LoRALinear: FastLoRALinear, RMSNorm: FastRMSNorm, MLP: FastMLP, Attention: FastAttention,
        Transformer: FastTransformer}


def accelerate(model: nn.Module) -> nn.Module:
    """Every module becomes its fast twin: same parameters, same names, same results up to rounding."""
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
