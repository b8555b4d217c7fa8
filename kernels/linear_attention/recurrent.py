"""The token-by-token core of the gated delta rule and KDA: forward, backward and their autograd function.

Serves what chunks cannot: a decay per value channel (`gv`) and a beta per value channel, and decoding, where a chunk has
one token. The loop runs over token positions, all sequences and heads at once. When gradients are needed it keeps the
state of every token, K x V values each: for training on more than a few hundred tokens use the chunked rule.
Differentiable once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .layout import ChunkLayout


class TokenRows:
    """The inputs of one call as rows [M, D], M = tokens x value heads, in the order in which the loop takes them."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, gk: Tensor, gv: Tensor | None, beta: Tensor, layout: ChunkLayout
    ) -> None:
        self.layout = layout
        self.heads = v.shape[2]
        self.groups = self.heads // q.shape[2]
        self.q, self.k = (self.pack(x.repeat_interleave(self.groups, 2) if self.groups > 1 else x) for x in (q, k))
        self.v, self.gk, self.beta = self.pack(v), self.pack(gk), self.pack(beta)
        self.gv = None if gv is None else self.pack(gv)

    def pack(self, x: Tensor) -> Tensor:
        """[B, T, HV, D] -> [M, D]"""
        return self.layout.to_chunks(x).flatten(0, 2)

    def unpack(self, rows: Tensor) -> Tensor:
        """[M, D] -> [B, T, HV, D]"""
        return self.layout.to_tokens(rows.view(self.layout.chunks, self.heads, 1, rows.shape[1]))

    def unpack_qk(self, rows: Tensor) -> Tensor:
        """[M, K] -> [B, T, H, K]: the value heads that share a query/key head are summed."""
        x = self.unpack(rows)
        return x if self.groups == 1 else x.unflatten(2, (self.heads // self.groups, self.groups)).sum(3)


def recurrent_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gk: Tensor,
    gv: Tensor | None,
    beta: Tensor,
    state: Tensor,
    layout: ChunkLayout,
    scale: float,
    keep: bool,
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """(o [B, T, HV, V], final state, what the backward reuses if `keep`); gk [B, T, HV, 1 or K], beta [B, T, HV, 1 or V]."""
    rows = TokenRows(q, k, v, gk, gv, beta, layout)
    decay = rows.gk.exp()[:, :, None]
    decay_v = None if rows.gv is None else rows.gv.exp()[:, None]
    out, new = torch.empty_like(rows.v), torch.empty_like(rows.v)
    running = layout.sort_states(state).flatten(0, 1)
    decayed = out.new_empty(out.shape[0] if keep else 0, *running.shape[1:])
    for step in layout.steps(rows.heads):
        s = running[: step.stop - step.start].mul_(decay[step])
        if decay_v is not None:
            s.mul_(decay_v[step])
        if keep:
            decayed[step] = s
        key = rows.k[step, None]
        u = (rows.v[step, None] - torch.bmm(key, s)).mul_(rows.beta[step, None])
        new[step] = u[:, 0]
        s.baddbmm_(key.mT, u)
        out[step] = torch.bmm(rows.q[step, None], s)[:, 0]
    final = layout.unsort_states(running.view(state.shape))
    return rows.unpack(out.mul_(scale)), final, (decayed, new)


def recurrent_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gk: Tensor,
    gv: Tensor | None,
    beta: Tensor,
    layout: ChunkLayout,
    scale: float,
    saved: tuple[Tensor, ...],
    d_out: Tensor | None,
    d_final: Tensor | None,
) -> tuple[Tensor | None, ...]:
    """Gradients of q, k, v, gk, gv, beta and the initial state, from those of the output and of the final state (None is zero)."""
    rows = TokenRows(q, k, v, gk, gv, beta, layout)
    decayed, new = saved
    do = rows.pack(d_out).mul_(scale) if d_out is not None else torch.zeros_like(rows.v)
    decay = rows.gk.exp()[:, :, None]
    decay_v = None if rows.gv is None else rows.gv.exp()[:, None]
    d_new, d_v, d_key = torch.empty_like(new), torch.empty_like(new), torch.empty_like(rows.k)
    d_gk, d_gv = torch.empty_like(rows.gk), None if rows.gv is None else torch.empty_like(rows.gv)
    if d_final is None:
        running = decayed.new_zeros(layout.sequences * rows.heads, *decayed.shape[1:])
    else:
        running = layout.sort_states(d_final).flatten(0, 1)
    for step in reversed(layout.steps(rows.heads)):
        key, u = rows.k[step, :, None], new[step, :, None]
        s = running[: step.stop - step.start].baddbmm_(rows.q[step, :, None], do[step, None])
        d_u = torch.bmm(key.mT, s)
        d_rhs = d_u * rows.beta[step, None]
        d_key[step] = torch.bmm(s, u)[:, :, 0]
        d_new[step], d_v[step] = d_u[:, 0], d_rhs[:, 0]
        s.baddbmm_(key, d_rhs, alpha=-1)
        d_decay = s * decayed[step]
        d_gk[step] = d_decay.sum(2) if gk.shape[3] > 1 else d_decay.sum((1, 2))[:, None]
        s.mul_(decay[step])
        if d_gv is not None and decay_v is not None:
            d_gv[step] = d_decay.sum(1)
            s.mul_(decay_v[step])
    d_start = layout.unsort_states(running.unflatten(0, (layout.sequences, rows.heads)))
    # the rest for all tokens at once
    read = torch.bmm(rows.k[:, None], decayed)[:, 0]
    d_q = torch.bmm(decayed, do[:, :, None])[:, :, 0].addcmul_(rows.k, (new * do).sum(1, keepdim=True))
    d_key -= torch.bmm(decayed, d_v[:, :, None])[:, :, 0]
    d_beta = d_new.mul_(rows.v - read)
    d_beta = d_beta if beta.shape[3] > 1 else d_beta.sum(1, keepdim=True)
    d_value_decay = None if d_gv is None else rows.unpack(d_gv)
    unpacked = (rows.unpack_qk(d_q), rows.unpack_qk(d_key), rows.unpack(d_v), rows.unpack(d_gk), d_value_decay)
    return (*unpacked, rows.unpack(d_beta), d_start)


class RecurrentDeltaRule(torch.autograd.Function):
    """o, final state = f(q, k, v, gk, gv, beta, initial state); differentiable once in all seven."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        gk: Tensor,
        gv: Tensor | None,
        beta: Tensor,
        state: Tensor,
        layout: ChunkLayout,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        with torch.autocast(q.device.type, enabled=False):
            out, final, saved = recurrent_forward(q, k, v, gk, gv, beta, state, layout, scale, keep=True)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, gk, gv, beta, *saved)
        ctx.layout, ctx.scale = layout, scale
        return out, final

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor | None, d_final: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        if d_out is None and d_final is None:
            return (None,) * 9
        q, k, v, gk, gv, beta, *saved = ctx.saved_tensors
        with torch.autocast(q.device.type, enabled=False):
            grads = recurrent_backward(q, k, v, gk, gv, beta, ctx.layout, ctx.scale, tuple(saved), d_out, d_final)
        return (*grads, None, None)
