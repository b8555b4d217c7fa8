"""RMSNorm in plain torch: any device, differentiable, with the rounding points of each form."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float, form: str) -> Tensor:
    """x (..., hidden), weight (hidden,); see kernels/norm/__init__.py for the forms."""
    normed = _normed(x, eps)
    if form == "cast_then_weight":
        return weight * normed.to(x.dtype)
    if form == "weight_in_fp32":
        return (weight.float() * normed).to(x.dtype)
    if form == "zero_centred":
        return (normed * (1.0 + weight.float())).to(x.dtype)
    raise ValueError(f"form must be cast_then_weight, weight_in_fp32 or zero_centred, got {form!r}")


def rms_norm_gated(x: Tensor, gate: Tensor, weight: Tensor, eps: float, activation: str, form: str) -> Tensor:
    """x and gate (..., hidden), weight (hidden,); the gate's activation and the product are in fp32."""
    normed = _normed(x, eps)
    if form == "cast_then_weight":
        y = weight * normed.to(x.dtype)
    elif form == "weight_in_fp32":
        y = weight.float() * normed
    else:
        raise ValueError(f"form must be cast_then_weight or weight_in_fp32, got {form!r}")
    return (y * activate(gate.float(), activation)).to(x.dtype)


def activate(gate: Tensor, activation: str) -> Tensor:
    if activation == "silu":
        return torch.nn.functional.silu(gate)
    if activation == "sigmoid":
        return torch.sigmoid(gate)
    raise ValueError(f"activation must be silu or sigmoid, got {activation!r}")


def _normed(x: Tensor, eps: float) -> Tensor:
    x = x.float()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
