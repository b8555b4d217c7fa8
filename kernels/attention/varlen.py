"""Attention of packed sequences: `attention_varlen`, from its arguments to the launch.

Lengths stay on the device: nothing is read back, so a call captures in a CUDA graph and a replay takes the lengths that
are there then.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from accel.outcome import Decline

from ..runtime.tensors import needs_grad
from . import launch
from .config import FwdConfig
from .facts import AttentionFacts, read
from .sequence_table import PITCH

USED_Q, USED_K = 1, 2  #: bits of what the kernel is told: which used lengths are given


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    causal: bool | str = False,
    window: tuple[int, int] | None = None,
    scale: float | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(scale * q @ k.T) @ v, with fp32 scores and sums, of sequences that are packed behind each other.

    q (total_q, heads_q, head_dim), k (total_k, heads_kv, head_dim), v (total_k, heads_kv, head_dim_v): dtypes, head
    dims, heads and layout as `attention` takes them. cu_seqlens_q and cu_seqlens_k (batch + 1), int32 or int64 on the
    device, ascending: sequence i has the rows from cu_seqlens[i] to cu_seqlens[i + 1], and any number of them, 0 too.
    seqused_q and seqused_k (batch): only so many of its first rows count. max_seqlen_q and max_seqlen_k are upper
    bounds of the lengths. causal, window and scale as in `attention`, each sequence by its own lengths.

    Rows of no sequence, before, between and behind them, may hold anything, NaN too, and are not written: the output
    has undefined values there. Returns (total_q, heads_q, head_dim_v) in q's dtype; with `return_lse` also the
    fp32 (heads_q, total_q) natural logarithm of the sum of exp(scores). A query that sees no key gives 0 and -inf.
    Deterministic. Not differentiable.

    Raises ValueError for arguments out of range or lengths that do not belong together, TypeError for lengths that are
    no integers, Decline where no kernel serves the call. Dao, FlashAttention-2, arXiv 2307.08691.
    """
    diagonal = launch.arguments(causal, window, scale)
    checked(q, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
    if torch.compiler.is_compiling():
        left, right = (-2, -2) if window is None else window
        out, lse = torch.ops.accel.attention_varlen(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k,
            diagonal, left, right, scale, return_lse,
        )  # fmt: skip
    else:
        lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k)
        out, lse = _eager(q, k, v, *lengths, diagonal, window, scale, return_lse)
    return (out, lse) if return_lse else out


def checked(q: Tensor, cu_q: Tensor, cu_k: Tensor, used_q: Tensor | None, used_k: Tensor | None) -> None:
    """Raise for lengths that are none."""
    named = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "seqused_q": used_q, "seqused_k": used_k}
    for name, t in named.items():
        if t is None:
            continue
        if t.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"{name} must be int32 or int64, got {t.dtype}")
        if t.dim() != 1 or t.device != q.device:
            raise ValueError(
                f"{name} must have one dimension and lie on {q.device}, got {tuple(t.shape)} on {t.device}"
            )
        wanted = len(cu_q) if name.startswith("cu") else len(cu_q) - 1
        if len(t) != wanted or len(cu_q) == 0:
            raise ValueError(f"{name} has {len(t)} numbers, cu_seqlens_q {len(cu_q)}: they are of batch + 1 sequences")


def facts_of(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    batch: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: str = "none",
    window: tuple[int, int] | None = None,
    lse: bool = False,
    needs_grad: bool = False,
) -> AttentionFacts:
    """The facts of a call, from metadata alone. Raises Decline for shapes that do not fit together."""
    if q.dim() != 3 or k.dim() != 3 or v.dim() != 3:
        raise Decline(f"q, k, v have {q.dim()}, {k.dim()}, {v.dim()} dimensions, not 3")
    facts = read(q[None], k[None], v[None], causal=causal, needs_grad=needs_grad, lse=lse, seqlen_dim=1)
    rows = max_seqlen_q if q.shape[0] else 0
    return replace(facts, batch=batch, seqlen_q=rows, seqlen_k=max_seqlen_k, window=window, varlen=True)


def _eager(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    max_q: int,
    max_k: int,
    used_q: Tensor | None,
    used_k: Tensor | None,
    causal: str,
    window: tuple[int, int] | None,
    scale: float | None,
    lse: bool,
) -> tuple[Tensor, Tensor | None]:
    facts = facts_of(q, k, v, len(cu_q) - 1, max_q, max_k, causal, window, lse, needs_grad(q, k, v))
    config = launch.config_of(facts, q.device)
    assert isinstance(config, FwdConfig)
    return forward(config, q, k, v, cu_q, cu_k, used_q, used_k, causal=causal, window=window, scale=scale)


def forward(
    config: FwdConfig,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    used_q: Tensor | None = None,
    used_k: Tensor | None = None,
    *,
    causal: str = "none",
    window: tuple[int, int] | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor | None]:
    """(out, lse or None) of a call that `config` serves.

    Raises Decline during graph capture if the kernel is not loaded yet.
    """
    total_q, heads, head_dim = q.shape
    run, ctas = launch.loaded(config, q)
    out = q.new_empty(total_q, heads, v.shape[2])
    lse = q.new_empty(heads, total_q, dtype=torch.float32) if config.lse else None
    if k.shape[0] == 0:
        return out.zero_(), None if lse is None else lse.fill_(-torch.inf)
    if heads == 1 or k.shape[1] == 1 or total_q == 1 or k.shape[0] == 1:
        q, k, v = (t[0] for t in launch.reachable(q[None], k[None], v[None]))
    cu_q, cu_k = cu_q.to(torch.int32).contiguous(), cu_k.to(torch.int32).contiguous()
    used = (USED_Q if used_q is not None else 0) | (USED_K if used_k is not None else 0)
    lengths = [
        cu if given is None else given.to(torch.int32).contiguous() for cu, given in ((cu_q, used_q), (cu_k, used_k))
    ]
    table = torch.empty((total_q // config.tile_m + len(cu_q) - 1, PITCH), dtype=torch.int32, device=q.device)
    left, right = launch.bounds(causal, window)
    run(
        q, k, v, out, *(() if lse is None else (lse,)), cu_q, cu_k, *lengths, table,
        used, head_dim**-0.5 if scale is None else scale, 0 if causal == "top_left" else 1, left, right, ctas,
    )  # fmt: skip
    return out, lse


# --- The op for compiled callers -----------------------------------------------------------------------------------

_library = torch.library.Library("accel", "FRAGMENT")
_library.define(
    "attention_varlen(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q,"
    " SymInt max_seqlen_k, Tensor? seqused_q, Tensor? seqused_k, str causal, SymInt left, SymInt right, float? scale,"
    " bool lse) -> (Tensor, Tensor)"
)


def _op(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    *lengths, causal, left, right, scale, lse = rest
    out, found = _eager(q, k, v, *lengths, causal, None if left < -1 else (left, right), scale, lse)
    return out, q.new_empty(0, dtype=torch.float32) if found is None else found


def _fake(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    total, heads, _ = q.shape
    return q.new_empty(total, heads, v.shape[2]), q.new_empty((heads, total) if rest[-1] else (0,), dtype=torch.float32)


_library.impl("attention_varlen", _op, "CUDA")
torch.library.register_fake("accel::attention_varlen", _fake, lib=_library)
