"""The fp64 oracle of the causal convolution: token by token, one sequence at a time; plain torch."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor


def causal_conv1d_reference(
    x: Tensor,  # [B, T, C]
    weight: Tensor,  # [C, W]
    bias: Tensor | None = None,  # [C]
    *,
    activation: str | None = None,
    initial_state: Tensor | None = None,  # [N, C, S]
    state_len: int | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(y [B, T, C], the last `state_len` (default W) tokens of every sequence [N, C, state_len]), in fp64."""
    x, weight = x.double(), weight.double()
    width = weight.shape[1]
    keep = width if state_len is None else state_len
    spans = [(b, 0, x.shape[1]) for b in range(x.shape[0])]
    if cu_seqlens is not None:
        spans = [(0, start, stop) for start, stop in pairwise(cu_seqlens.tolist())]
    y = torch.zeros_like(x)
    states = []
    for n, (b, start, stop) in enumerate(spans):
        before = x.new_zeros(max(width, keep), x.shape[2])
        if initial_state is not None:
            before = torch.cat([before, initial_state[n].double().mT])
        seen = torch.cat([before, x[b, start:stop]])
        for t in range(start, stop):
            at = len(before) + t - start
            total = (seen[at - width + 1 : at + 1].mT * weight).sum(1)
            total = total if bias is None else total + bias.double()
            y[b, t] = total * torch.sigmoid(total) if activation == "silu" else total
        states.append(seen[len(seen) - keep :].mT)
    return y, torch.stack(states) if states else x.new_zeros(0, x.shape[2], keep)
