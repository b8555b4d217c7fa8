"""The gated MLP in plain torch: any device, differentiable. Gate, up and their product are rounded once each."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def gated_mlp(
    x: Tensor,
    gate: Tensor,
    up: Tensor | None,
    down: Tensor,
    gate_bias: Tensor | None,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    activation: str,
) -> Tensor:
    """See the package. A fused weight's bias is gate_bias, both halves of it."""
    gated = F.linear(x, gate, gate_bias)
    gated, raised = gated.chunk(2, dim=-1) if up is None else (gated, F.linear(x, up, up_bias))
    wide = torch.promote_types(x.dtype, torch.float32)
    hidden = (activate(gated.to(wide), activation) * raised.to(wide)).to(x.dtype)
    return F.linear(hidden, down, down_bias)


def activate(gate: Tensor, activation: str) -> Tensor:
    """silu, or gelu in its tanh or erf form."""
    if activation == "silu":
        return F.silu(gate)
    if activation in ("gelu_tanh", "gelu_erf"):
        return F.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none")
    raise ValueError(f"activation must be silu, gelu_tanh or gelu_erf, got {activation!r}")
