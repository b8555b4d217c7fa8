"""RMSNorm, plain and gated, forward and backward.

    n = x * rsqrt(mean(x * x, over the last dimension) + eps)       in fp32

Forms of rms_norm, with their rounding points (Zhang and Sennrich, arXiv 1910.07467, as model code writes it):

| form | y |
|---|---|
| cast_then_weight | weight * n.to(x.dtype), torch's promotion: an fp32 weight gives an fp32 y |
| weight_in_fp32 | (weight.float() * n).to(x.dtype) |
| zero_centred | (n * (1 + weight.float())).to(x.dtype) |

rms_norm_gated multiplies the first or second of these, before its last cast, with silu(gate) or sigmoid(gate) in fp32,
and always returns x's dtype. Gradients are computed in fp32 throughout and rounded once; they are deterministic.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from accel.outcome import Decline

from . import launch, portable
from .config import ACTIVATIONS, FORMS

__all__ = ["rms_norm", "rms_norm_gated"]


def rms_norm(x: Tensor, weight: Tensor, *, eps: float, form: str = "cast_then_weight") -> Tensor:
    """RMSNorm over the last dimension.

    x (..., hidden): bf16, fp16 or fp32; any strides with a contiguous last dimension, others are copied. weight
    (hidden,): x's dtype or fp32. Returns a contiguous (..., hidden) tensor of the form's dtype. On a CUDA device hidden
    is 64..16384, a multiple of 8 (4 for fp32); CPU tensors run plain torch. Differentiable, twice through plain torch.

    Raises ValueError for an unknown form, Decline where no kernel serves the call.
    """
    if form not in FORMS:
        raise ValueError(f"form must be one of {', '.join(FORMS)}, got {form!r}")
    if not x.is_cuda:
        return portable.rms_norm(x, weight, eps, form)
    if torch.compiler.is_compiling():
        return torch.ops.accel.rms_norm(x, weight, None, eps, form, None)
    return _eager(x, weight, None, eps, form, None)


def rms_norm_gated(
    x: Tensor, gate: Tensor, weight: Tensor, *, eps: float, activation: str = "silu", form: str = "cast_then_weight"
) -> Tensor:
    """RMSNorm over the last dimension, times silu(gate) or sigmoid(gate).

    x and gate (..., hidden), one dtype and shape, each with its own strides; otherwise as rms_norm. Returns x's dtype.

    Raises ValueError for an unknown form or activation, Decline where no kernel serves the call.
    """
    if form not in FORMS[:2]:
        raise ValueError(f"form must be one of {', '.join(FORMS[:2])}, got {form!r}")
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")
    if not x.is_cuda:
        return portable.rms_norm_gated(x, gate, weight, eps, activation, form)
    if torch.compiler.is_compiling():
        return torch.ops.accel.rms_norm(x, weight, gate, eps, form, activation)
    return _eager(x, weight, gate, eps, form, activation)


def _eager(x: Tensor, weight: Tensor, gate: Tensor | None, eps: float, form: str, activation: str | None) -> Tensor:
    grad = torch.is_grad_enabled() and (
        x.requires_grad or weight.requires_grad or (gate is not None and gate.requires_grad)
    )
    loaded, levels = launch.lookup(x, weight, gate, form, activation, grad)
    if not grad:
        return launch.forward(loaded, levels, x, weight, gate, eps)
    return _Norm.apply(x, weight, gate, (eps, form, activation, loaded, levels))


class _Norm(torch.autograd.Function):
    """The eager path: no custom op, which costs 20 us a call."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, gate: Tensor | None, norm: tuple[Any, ...]) -> Tensor:
        ctx.save_for_backward(x, weight, gate)
        ctx.norm = norm  # one argument: each costs the host most of a microsecond
        eps, _, _, loaded, levels = norm
        return launch.forward(loaded, levels, x, weight, gate, eps)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, gate = ctx.saved_tensors
        eps, form, activation, loaded, levels = ctx.norm
        if torch.is_grad_enabled():  # create_graph: a gradient of the gradient is wanted
            grads = _differentiable_backward(x, weight, gate, dy, eps, form, activation)
        else:
            grads = launch.backward(loaded, levels, x, weight, gate, dy, eps)
        return (*grads, None)


def _differentiable_backward(
    x: Tensor, weight: Tensor, gate: Tensor | None, dy: Tensor, eps: float, form: str, activation: str | None
) -> tuple[Tensor | None, ...]:
    y = _portable(x, weight, gate, eps, form, activation)
    inputs = [t for t in (x, weight, gate) if t is not None and t.requires_grad]
    found = iter(torch.autograd.grad(y, inputs, dy, create_graph=True))
    return tuple(next(found) if t is not None and t.requires_grad else None for t in (x, weight, gate))


def _portable(x: Tensor, weight: Tensor, gate: Tensor | None, eps: float, form: str, activation: str | None) -> Tensor:
    if gate is None or activation is None:
        return portable.rms_norm(x, weight, eps, form)
    return portable.rms_norm_gated(x, gate, weight, eps, activation, form)


# --- Ops for compiled callers --------------------------------------------------------------------------------------

_library = torch.library.Library("accel", "FRAGMENT")
_library.define("rms_norm(Tensor x, Tensor weight, Tensor? gate, float eps, str form, str? activation) -> Tensor")
_library.define(
    "rms_norm_backward(Tensor x, Tensor weight, Tensor? gate, Tensor dy, float eps, str form, str? activation)"
    " -> (Tensor, Tensor, Tensor)"
)


def _op_forward(
    x: Tensor, weight: Tensor, gate: Tensor | None, eps: float, form: str, activation: str | None
) -> Tensor:
    # A compiled graph cannot fall back: what no kernel serves runs plain torch here.
    try:
        loaded, levels = launch.lookup(x, weight, gate, form, activation, False)
    except Decline:
        return _portable(x, weight, gate, eps, form, activation).contiguous()
    return launch.forward(loaded, levels, x, weight, gate, eps)


def _op_backward(
    x: Tensor, weight: Tensor, gate: Tensor | None, dy: Tensor, eps: float, form: str, activation: str | None
) -> tuple[Tensor, Tensor, Tensor]:
    try:
        loaded, levels = launch.lookup(x, weight, gate, form, activation, True)
    except Decline:
        with torch.enable_grad():
            inputs = [t.detach().requires_grad_() for t in (x, weight, *(() if gate is None else (gate,)))]
            y = _portable(inputs[0], inputs[1], inputs[2] if gate is not None else None, eps, form, activation)
            grads = [g.contiguous() for g in torch.autograd.grad(y, inputs, dy)]
    else:
        grads = [g for g in launch.backward(loaded, levels, x, weight, gate, dy, eps) if g is not None]
    return grads[0], grads[1], grads[2] if gate is not None else x.new_empty(0)


def _fake_forward(
    x: Tensor, weight: Tensor, gate: Tensor | None, eps: float, form: str, activation: str | None
) -> Tensor:
    dtype = torch.promote_types(x.dtype, weight.dtype) if form == "cast_then_weight" and gate is None else x.dtype
    return torch.empty(x.shape, dtype=dtype, device=x.device)


def _fake_backward(
    x: Tensor, weight: Tensor, gate: Tensor | None, dy: Tensor, eps: float, form: str, activation: str | None
) -> tuple[Tensor, Tensor, Tensor]:
    dgate = x.new_empty(0) if gate is None else torch.empty(x.shape, dtype=gate.dtype, device=x.device)
    return torch.empty(x.shape, dtype=x.dtype, device=x.device), torch.empty_like(weight), dgate


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, gate, *ctx.norm = inputs
    ctx.save_for_backward(x, weight, gate)


def _op_gradients(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, gate = ctx.saved_tensors
    dx, dweight, dgate = torch.ops.accel.rms_norm_backward(x, weight, gate, dy, *ctx.norm)
    return dx, dweight, None if gate is None else dgate, None, None, None


_library.impl("rms_norm", _op_forward, "CUDA")
_library.impl("rms_norm_backward", _op_backward, "CUDA")
torch.library.register_fake("accel::rms_norm", _fake_forward, lib=_library)
torch.library.register_fake("accel::rms_norm_backward", _fake_backward, lib=_library)
torch.library.register_autograd("accel::rms_norm", _op_gradients, setup_context=_save, lib=_library)
