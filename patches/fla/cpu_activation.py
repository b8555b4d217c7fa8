"""FLA's gated activations in plain torch: SwiGLU and PowGLU, alone and followed by a linear layer.

Signatures are upstream's; CPU tensors only. Arithmetic is fp32 (fp64 for fp64 tensors), rounded once, to x's dtype,
before the linear layer as well. Gradients come from autograd. What upstream rejects is declined.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from accel.outcome import Decline

from .cpu_norm import compute_dtype


def swiglu(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """silu(x) * y, contiguous, in x's dtype. Shapes are equal."""
    _check(x, y)
    dtype = compute_dtype(x, y)
    return (F.silu(x.contiguous().to(dtype)) * y.to(dtype)).to(x.dtype)


def swiglu_linear(x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`swiglu`, then a linear layer: x, y [..., D], weight [O, D], bias [O] or None."""
    return F.linear(swiglu(x, y), weight, bias)


def powglu(x: torch.Tensor, y: torch.Tensor, power: float = 3.0) -> torch.Tensor:
    """gate(x) * y with gate(x) = x^(power / (sqrt(x) + 1)) * sigmoid(x) for x > 0, else silu(x) (arXiv:2605.25704)."""
    _check(x, y)
    dtype = compute_dtype(x, y)
    gate = x.contiguous().to(dtype)
    positive = gate > 0
    # 1 where x <= 0 keeps the branch that is not taken, and its gradient, finite
    base = torch.where(positive, gate, 1.0)
    grown = torch.exp(power / (base.sqrt() + 1.0) * base.log())
    return (torch.where(positive, grown, gate) * torch.sigmoid(gate) * y.to(dtype)).to(x.dtype)


def powglu_linear(
    x: torch.Tensor,
    y: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    power: float = 3.0,
) -> torch.Tensor:
    """`powglu`, then a linear layer: x, y [..., D], weight [O, D], bias [O] or None."""
    return F.linear(powglu(x, y, power), weight, bias)


def _check(x: torch.Tensor, y: torch.Tensor) -> None:
    if x.shape != y.shape:
        raise Decline(f"x has shape {tuple(x.shape)}, y has {tuple(y.shape)}")
