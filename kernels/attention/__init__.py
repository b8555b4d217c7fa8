"""Scaled dot product attention, softmax(scale * q @ k.T + mask) @ v, forward.

`facts.py` says what there is to know about a call, `plan.py` decides from that alone, `launch.py` runs it. On sm_90 a
kernel serves bf16 and fp16, head dims up to 256, grouped heads, causality, windows and boolean masks, whose empty tiles
cost nothing; on other archs from sm_80 on another one does. Everything else declines. `attention_varlen` (varlen.py)
takes packed sequences, on sm_90.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..runtime.tensors import needs_grad
from . import launch
from .facts import AttentionFacts, read
from .plan import plan
from .varlen import attention_varlen

__all__ = ["AttentionFacts", "attention", "attention_varlen", "plan", "read"]


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None = None,
    causal: bool | str = False,
    window: tuple[int, int] | None = None,
    scale: float | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(scale * q @ k.T + mask) @ v over the last dimension, with fp32 scores and sums.

    q (batch, heads_q, seqlen_q, head_dim), k (batch, heads_kv, seqlen_k, head_dim), v (batch, heads_kv, seqlen_k,
    head_dim_v): bf16 or fp16 on a CUDA device; heads_kv divides heads_q, query head h reads kv head h // (heads_q /
    heads_kv). Head dims are multiples of 8 up to 256, of v the same as of q or 128 for 192. Any strides with a
    contiguous last dimension whose rows start at multiples of 16 bytes.

    mask: boolean (batch or 1, heads_q or 1, seqlen_q or 1, seqlen_k), any strides, True: attend. With up to 16 q
    positions, keys that no query of a kv head sees are not read. With more, the mask, causality and the window are
    classified together into tiles of 128 queries and 128 keys; those that no query sees are skipped. Eager calls keep
    the result for the next call with the same mask, as long as the mask lives and its version stays. Writes that torch
    does not count (`.data`, DLPack, another library's kernel, a graph's replay) go unseen: `masks.forget()` after them.

    causal: False; "top_left" (key j is seen by query i if j <= i); "bottom_right" (if j - seqlen_k <= i - seqlen_q);
    True is "top_left", as in torch. window (left, right): keys seen before and after the diagonal, which is the bottom
    right one unless causal is "top_left"; -1 is no bound. scale > 0, default head_dim ** -0.5.

    Returns (batch, heads_q, seqlen_q, head_dim_v) in q's dtype, in memory (batch, seqlen_q, heads_q, head_dim_v); with
    `return_lse` also the fp32 (batch, heads_q, seqlen_q) natural logarithm of the sum of exp(scores). A query that sees
    no key gives 0 and -inf. Deterministic. Not differentiable.

    Raises ValueError for a causal, window or scale out of range, Decline where no kernel serves the call. Dao,
    FlashAttention-2, arXiv 2307.08691; Shah et al., FlashAttention-3, arXiv 2407.08608.
    """
    diagonal = launch.arguments(causal, window, scale)
    if torch.compiler.is_compiling():
        left, right = (-2, -2) if window is None else window
        out, lse = torch.ops.accel.attention(q, k, v, mask, diagonal, left, right, scale, return_lse)
    else:
        out, lse = _eager(q, k, v, mask, diagonal, window, scale, return_lse)
    return (out, lse) if return_lse else out


def _eager(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    causal: str,
    window: tuple[int, int] | None,
    scale: float | None,
    lse: bool,
    reuse: bool = True,
) -> tuple[Tensor, Tensor | None]:
    facts = launch.facts_of(q, k, v, causal, window, lse, needs_grad(q, k, v), mask)
    config = launch.config_of(facts, q.device)
    return launch.run(config, q, k, v, mask=mask, causal=causal, window=window, scale=scale, reuse=reuse)


# --- The op for compiled callers -----------------------------------------------------------------------------------

_library = torch.library.Library("accel", "FRAGMENT")
_library.define(
    "attention(Tensor q, Tensor k, Tensor v, Tensor? mask, str causal, SymInt left, SymInt right, float? scale,"
    " bool lse) -> (Tensor, Tensor)"
)


def _op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    causal: str,
    left: int,
    right: int,
    scale: float | None,
    lse: bool,
) -> tuple[Tensor, Tensor]:
    # Compiled code reuses memory without raising a version: what was found out about a mask there may be stale.
    window = None if left < -1 else (left, right)
    out, found = _eager(q, k, v, mask, causal, window, scale, lse, reuse=False)
    return out, q.new_empty(0, dtype=torch.float32) if found is None else found


def _fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    causal: str,
    left: Any,
    right: Any,
    scale: float | None,
    lse: bool,
) -> tuple[Tensor, Tensor]:
    batch, heads, seqlen, _ = q.shape
    out = q.new_empty(batch, seqlen, heads, v.shape[3]).transpose(1, 2)
    return out, q.new_empty((batch, heads, seqlen) if lse else (0,), dtype=torch.float32)


_library.impl("attention", _op, "CUDA")
torch.library.register_fake("accel::attention", _fake, lib=_library)
