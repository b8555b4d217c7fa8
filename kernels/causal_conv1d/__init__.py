"""Depthwise causal convolution of 2 to 4 taps, as linear attention layers and Mamba use it in front of their rule.

    y[t, c] = act(bias[c] + sum over j of weight[c, j] * x[t - W + 1 + j, c])

with zeros, or an initial state, in front of the first token. `causal_conv1d` does whole sequences,
`causal_conv1d_update` a few new tokens with the state moved on in place. Tensors are [B, T, C], and what is returned
has its channels next to each other, so that queries, keys and values split off it are rows. On a GPU one kernel where
the plan takes the call and no gradient is needed; elsewhere plain torch, and causal_conv1d is differentiable there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from accel.outcome import Decline

from ..runtime.tensors import needs_grad
from . import launch, portable
from .config import ACTIVATIONS

__all__ = ["causal_conv1d", "causal_conv1d_update"]


def causal_conv1d(
    x: Tensor,  # [B, T, C]
    weight: Tensor,  # [C, W]
    bias: Tensor | None = None,  # [C]
    *,
    activation: str | None = None,
    initial_state: Tensor | None = None,  # [N, C, S]
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,  # [N + 1]
) -> tuple[Tensor, Tensor | None]:
    """(y [B, T, C] in x's dtype, contiguous; final state [N, C, W] or None).

    Args:
        x: bf16, fp16 or fp32 with any strides. A GPU kernel reads it as it is where channels lie next to each other and
            tokens start at multiples of 16 bytes, and copies it first otherwise.
        weight, bias: x's dtype; the last tap is the token's own.
        activation: None or "silu".
        initial_state: the S >= W - 1 tokens in front of each sequence, oldest first, any strides.
        output_final_state: also return the last W tokens of every sequence, zeros in front of short ones.
        cu_seqlens: int32 or int64, where the packed sequences of a batch of 1 start and end, N = len - 1; read on the
            device. Tokens of no sequence get zeros.

    Everything is summed in fp32, oldest token first, and rounded once. Raises ValueError for shapes that do not belong
    together and for an unknown activation.
    """
    _check(x, weight, bias, activation)
    sequences = x.shape[0]
    if cu_seqlens is not None:
        if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] == 0 or x.shape[0] != 1:
            raise ValueError(f"cu_seqlens [N + 1] needs a batch of 1, got {list(cu_seqlens.shape)} and {x.shape[0]}")
        sequences = cu_seqlens.shape[0] - 1
    if initial_state is not None:
        _check_state("initial_state", initial_state, sequences, x, weight)
    if x.is_cuda and not torch.compiler.is_compiling() and not needs_grad(x, weight, bias, initial_state):
        try:
            return launch.forward(x, weight, bias, activation, initial_state, output_final_state, cu_seqlens)
        except Decline:
            pass
    return portable.causal_conv1d(x, weight, bias, activation, initial_state, output_final_state, cu_seqlens)


@torch.no_grad()
def causal_conv1d_update(
    x: Tensor,  # [B, T, C]
    state: Tensor,  # [B, C, S]
    weight: Tensor,  # [C, W]
    bias: Tensor | None = None,  # [C]
    *,
    activation: str | None = None,
) -> Tensor:
    """y [B, T, C] of T new tokens; `state`, the last S >= W - 1 tokens, moves on in place; else as causal_conv1d."""
    _check(x, weight, bias, activation)
    _check_state("state", state, x.shape[0], x, weight)
    if x.is_cuda and not torch.compiler.is_compiling():
        try:
            return launch.update(x.mT, state, weight, bias, activation)
        except Decline:
            pass
    return portable.causal_conv1d_update(x, state, weight, bias, activation)


def _check(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> None:
    if x.dim() != 3 or weight.dim() != 2 or weight.shape[0] != x.shape[2]:
        raise ValueError(f"x [B, T, C] and weight [C, W] expected, got {list(x.shape)} and {list(weight.shape)}")
    if bias is not None and list(bias.shape) != [x.shape[2]]:
        raise ValueError(f"bias must be [{x.shape[2]}], got {list(bias.shape)}")
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be None or 'silu', got {activation!r}")


def _check_state(name: str, state: Tensor, sequences: int, x: Tensor, weight: Tensor) -> None:
    least = weight.shape[1] - 1
    if state.dim() != 3 or list(state.shape[:2]) != [sequences, x.shape[2]] or state.shape[2] < least:
        got = list(state.shape)
        raise ValueError(f"{name} must be [{sequences}, {x.shape[2]}, at least {least}], got {got}")
