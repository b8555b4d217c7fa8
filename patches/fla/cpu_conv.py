"""FLA's short convolution in plain torch: `causal_conv1d` and the one-token `causal_conv1d_update`.

Signatures and return structures are upstream's; CPU tensors only. Arithmetic is fp32 (fp64 for fp64 tensors), summed
from the oldest token to the newest as upstream does, and rounded once, to x's dtype. What upstream rejects is declined.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.nn.functional as F

from accel.outcome import Decline

from .cpu_norm import compute_dtype


def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool | None = False,
    activation: str | None = None,
    backend: str | None = "triton",
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None,
    chunk_indices: torch.Tensor | None = None,
    cp_context: Any = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Depthwise causal convolution: y[t] = act(sum_w weight[:, w] * x[t - W + 1 + w] + bias) + residual[t].

    x [B, T, D] (or [B, T, ...] with D elements in the rest; B = 1 with `cu_seqlens` [N + 1]), weight [D, W],
    initial_state [N, D, W], the W tokens before the first (the oldest of them is never read). Returns (y, final
    state): y like x and contiguous, the last W tokens of each sequence [N, D, W] in x's dtype, or None. `chunk_indices`
    and `cu_seqlens_cpu` plan upstream's launch and are not needed here; upstream ignores further keywords.

    The gradient of the final state reaches all its W tokens; upstream drops the oldest one's, which nothing reads.
    """
    if cp_context is not None:
        raise Decline("context parallelism")
    if backend != "triton":
        raise Decline(f"backend={backend!r}; only 'triton' is replaced")
    width = _check_weight(x, weight, activation)
    assert weight is not None  # checked above
    shape = x.shape
    x = x.reshape(*shape[:2], weight.shape[0]).contiguous()
    batch, seqlen, dim = x.shape
    sequences = batch if cu_seqlens is None else len(cu_seqlens) - 1
    if cu_seqlens is not None:
        if batch != 1:
            raise Decline(f"cu_seqlens with a batch of {batch}; it must be 1")
        if int(cu_seqlens[-1]) != seqlen:
            raise Decline(f"cu_seqlens ends at {int(cu_seqlens[-1])}, x has {seqlen} tokens")
    if initial_state is not None and initial_state.shape != (sequences, dim, width):
        raise Decline(f"initial_state has shape {tuple(initial_state.shape)}, not {(sequences, dim, width)}")
    if residual is not None and residual.numel() != x.numel():
        raise Decline(f"residual has shape {tuple(residual.shape)}, x has {tuple(shape)}")

    dtype = compute_dtype(x, weight, bias, residual, initial_state)
    tokens = x.to(dtype)
    state = None if initial_state is None else initial_state.to(dtype).transpose(1, 2)  # [N, W, D], oldest first
    taps = weight.to(dtype).t()  # [W, D]
    final: torch.Tensor | None
    if cu_seqlens is None:
        y, final = _dense(tokens, state, taps)
    else:
        y, final = _packed(tokens[0], state, taps, cu_seqlens.long(), bool(output_final_state))
    y = _finish(y, bias, residual, activation, dtype).to(x.dtype).reshape(shape)
    if not output_final_state:
        return y, None
    assert final is not None
    return y, final.to(x.dtype).transpose(1, 2).contiguous()


def causal_conv1d_update(
    x: torch.Tensor,
    cache: torch.Tensor,
    residual: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token of `causal_conv1d` per sequence: x [N, D], [1, N, D] or [N, 1, D]; cache [N, D, W], written in place.

    Returns (y like x, the cache). As upstream: no gradient, and a cache that is not contiguous is copied, so that the
    updated copy is returned and the one passed in stays as it was.
    """
    width = _check_weight(x, weight, activation, min_dims=2)
    if cache is None:
        raise Decline("no cache")
    assert weight is not None  # checked above
    shape, dim = x.shape, weight.shape[0]
    sequences = x.numel() // dim
    if x.dim() > 2 and sequences not in (shape[0], shape[1]):
        raise Decline(f"x has shape {tuple(shape)}; one token per sequence is needed")
    if cache.shape != (sequences, dim, width):
        raise Decline(f"cache has shape {tuple(cache.shape)}, not {(sequences, dim, width)}")
    if residual is not None and residual.numel() != x.numel():
        raise Decline(f"residual has shape {tuple(residual.shape)}, x has {tuple(shape)}")

    with torch.no_grad():
        dtype = compute_dtype(x, weight, bias, residual)
        cache = cache.contiguous()
        window = torch.cat([cache[:, :, 1:].to(dtype), x.reshape(sequences, dim, 1).to(dtype)], dim=-1)
        y = (window * weight.to(dtype)).sum(-1)
        y = _finish(y, bias, residual, activation, dtype).to(x.dtype).reshape(shape)
        # a cache made under inference_mode may only be written there
        with torch.inference_mode() if cache.is_inference() else contextlib.nullcontext():
            cache.copy_(window)
    return y, cache


def _dense(tokens: torch.Tensor, state: torch.Tensor | None, taps: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """tokens [B, T, D], state [B, W, D], taps [W, D] -> y [B, T, D], the last W tokens [B, W, D]."""
    width, seqlen = taps.shape[0], tokens.shape[1]
    if state is None:
        state = tokens.new_zeros(tokens.shape[0], width, tokens.shape[2])
    padded = torch.cat([state, tokens], dim=1)
    y = padded[:, 1 : 1 + seqlen] * taps[0]
    for w in range(1, width):
        y = y + padded[:, 1 + w : 1 + w + seqlen] * taps[w]
    return y, padded[:, seqlen:]


def _packed(
    tokens: torch.Tensor,
    state: torch.Tensor | None,
    taps: torch.Tensor,
    cu_seqlens: torch.Tensor,
    need_final: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """tokens [T, D] of N sequences, state [N, W, D] -> y [1, T, D], the last W tokens of each [N, W, D] or None.

    A token is looked up by its row in [a zero row, the states' rows, the tokens' rows].
    """
    width, dim = taps.shape
    seqlens = cu_seqlens.diff()
    sequences = len(seqlens)
    if state is None:
        rows = torch.cat([tokens.new_zeros(1, dim), tokens])
    else:
        rows = torch.cat([tokens.new_zeros(1, dim), state.reshape(-1, dim), tokens])
    first = len(rows) - len(tokens)

    def row_of(sequence: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """Rows of the tokens at `position` (-W and up; negative: in the state) of `sequence`."""
        before = torch.zeros_like(position) if state is None else 1 + sequence * width + width + position
        return torch.where(position >= 0, first + cu_seqlens[sequence] + position, before)

    sequence = torch.repeat_interleave(torch.arange(sequences), seqlens)
    position = torch.arange(len(tokens)) - cu_seqlens[sequence]
    y = torch.zeros_like(tokens)
    for w in range(width):
        y = y + rows[row_of(sequence, position - (width - 1 - w))] * taps[w]
    if not need_final:
        return y.unsqueeze(0), None
    last = seqlens[:, None] - width + torch.arange(width)
    each = torch.arange(sequences)[:, None].expand_as(last)
    return y.unsqueeze(0), rows[row_of(each, last)]


def _finish(
    y: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    activation: str | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    if bias is not None:
        y = y + bias.to(dtype)
    if activation is not None:
        y = F.silu(y)
    if residual is not None:
        y = y + residual.reshape(y.shape).to(dtype)
    return y


def _check_weight(x: torch.Tensor, weight: torch.Tensor | None, activation: str | None, min_dims: int = 3) -> int:
    """The width of the convolution."""
    if weight is None or weight.dim() != 2:
        raise Decline(f"weight must be [D, W], got {None if weight is None else tuple(weight.shape)}")
    if x.dim() < min_dims or (x.shape[-1] if x.dim() == 2 else x.shape[2:].numel()) != weight.shape[0]:
        raise Decline(f"x has shape {tuple(x.shape)}, the weight is for {weight.shape[0]} channels")
    if activation not in (None, "silu", "swish"):
        raise Decline(f"activation={activation!r} is not silu, swish or None")
    return int(weight.shape[1])
