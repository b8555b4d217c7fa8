"""The causal convolution in plain torch, on any device: fp32 arithmetic, rounded once to x's dtype."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    width = weight.shape[1]
    if cu_seqlens is None:
        y, seen = _one(x, weight, bias, activation, initial_state)
        return y, _last(seen, width).to(x.dtype) if output_final_state else None
    y, states = torch.zeros_like(x, memory_format=torch.contiguous_format), []
    for n, (start, stop) in enumerate(pairwise(cu_seqlens.tolist())):
        state = None if initial_state is None else initial_state[n : n + 1]
        y[:, start:stop], seen = _one(x[:, start:stop], weight, bias, activation, state)
        states.append(_last(seen, width))
    if not output_final_state:
        return y, None
    return y, torch.cat(states).to(x.dtype) if states else x.new_zeros(0, x.shape[2], width)


def causal_conv1d_update(
    x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None
) -> Tensor:
    y, seen = _one(x, weight, bias, activation, state)
    state.copy_(_last(seen, state.shape[2]))
    return y


def _one(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(y [B, T, C], state and tokens [B, C, S + T] in fp32)."""
    width, compute = weight.shape[1], torch.float64 if x.dtype == torch.float64 else torch.float32
    seen = x.mT.to(compute)
    if state is not None:
        seen = torch.cat([state.to(compute), seen], 2)
    padded = F.pad(seen, (width - 1, 0))
    first = padded.shape[2] - x.shape[1]
    total = x.new_zeros(x.shape[0], x.shape[2], x.shape[1], dtype=compute)
    if bias is not None:
        total = total + bias.to(compute)[:, None]
    for j in range(width):
        at = first - width + 1 + j
        total = total + weight[:, j, None].to(compute) * padded[:, :, at : at + x.shape[1]]
    total = F.silu(total) if activation == "silu" else total
    return total.mT.contiguous().to(x.dtype), seen


def _last(seen: Tensor, count: int) -> Tensor:
    return F.pad(seen, (max(count - seen.shape[2], 0), 0))[:, :, max(seen.shape[2] - count, 0) :]
