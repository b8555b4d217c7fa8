"""The token-by-token core of the gated delta rule and KDA: forward, backward and their autograd function.

Serves what chunks cannot: a decay or a beta per value channel, and decoding, where a chunk has one token. The loop runs
over token positions, all sequences and heads at once. When gradients are needed it keeps the state of every token, K x
V values per head: for training on more than a few hundred tokens use the chunked rule. Differentiable once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .layout import ChunkLayout, HeadRows
from .once import once
from .precision import own_precision


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
    """(o [B, T, HV, V], final state [N, HV, K, V], what the backward reuses if `keep`).

    gk [B, T, HV, 1 or K] and gv [B, T, HV, V] are log decays of the state's rows and columns, beta [B, T, HV, 1 or V].
    """
    rows = HeadRows(layout, v.shape[2], v.shape[2] // q.shape[2])
    query, key, value, rate = rows.pack_qk(q), rows.pack_qk(k), rows.pack(v), rows.pack(beta)
    decay, decay_v = rows.pack(gk).exp().mT, None if gv is None else rows.pack(gv).exp()
    out, new = torch.empty_like(value), torch.empty_like(value)
    running = layout.sort_states(state).flatten(0, 1)
    decayed = out.new_empty(out.shape[0] if keep else 0, *running.shape[1:])
    for step in rows.steps():
        s = running[: step.stop - step.start].mul_(decay[step])
        if decay_v is not None:
            s.mul_(decay_v[step])
        if keep:
            decayed[step] = s
        u = torch.baddbmm(value[step], key[step], s, alpha=-1).mul_(rate[step])
        new[step] = u
        s.baddbmm_(key[step].mT, u)
        out[step] = torch.bmm(query[step], s)
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
    """Gradients of q, k, v, gk, gv, beta and the initial state; a gradient that comes in as None is zero."""
    rows = HeadRows(layout, v.shape[2], v.shape[2] // q.shape[2])
    query, key, value, rate = rows.pack_qk(q), rows.pack_qk(k), rows.pack(v), rows.pack(beta)
    decay, decay_v = rows.pack(gk).exp().mT, None if gv is None else rows.pack(gv).exp()
    decayed, new = saved
    do = torch.zeros_like(value) if d_out is None else rows.pack(d_out) * scale
    d_key, d_new, d_value = torch.empty_like(key), torch.empty_like(new), torch.empty_like(new)
    d_gk, d_gv = key.new_empty(*key.shape[:2], gk.shape[3]), None if decay_v is None else torch.empty_like(decay_v)
    if d_final is None:
        running = decayed.new_zeros(layout.sequences * rows.heads, *decayed.shape[1:])
    else:
        running = layout.sort_states(d_final).flatten(0, 1)
    for step in reversed(rows.steps()):
        s = running[: step.stop - step.start].baddbmm_(query[step].mT, do[step])
        d_new[step] = torch.bmm(key[step], s)
        d_value[step] = d_new[step] * rate[step]
        d_key[step] = torch.bmm(new[step], s.mT)
        s.baddbmm_(key[step].mT, d_value[step], alpha=-1)
        d_decay = s * decayed[step]
        d_gk[step] = d_decay.sum(2)[:, None] if gk.shape[3] > 1 else d_decay.sum((1, 2), keepdim=True)
        s.mul_(decay[step])
        if d_gv is not None and decay_v is not None:
            d_gv[step] = d_decay.sum(1, keepdim=True)
            s.mul_(decay_v[step])
    d_start = layout.unsort_states(running.unflatten(0, (layout.sequences, rows.heads)))
    # the rest for all tokens at once
    d_query = torch.bmm(do, decayed.mT).addcmul_(key, (new * do).sum(2, keepdim=True))
    d_key.baddbmm_(d_value, decayed.mT, alpha=-1)
    d_beta = d_new.mul_(torch.baddbmm(value, key, decayed, alpha=-1))
    d_beta = d_beta if beta.shape[3] > 1 else d_beta.sum(2, keepdim=True)
    d_qk = (rows.unpack_qk(d_query), rows.unpack_qk(d_key))
    d_rest = (rows.unpack(d_value), rows.unpack(d_gk), None if d_gv is None else rows.unpack(d_gv), rows.unpack(d_beta))
    return (*d_qk, *d_rest, d_start)


class RecurrentDeltaRule(torch.autograd.Function):
    """o, final state = f(q, k, v, gk, gv, beta, initial state); differentiable once in all seven."""

    @staticmethod
    def forward(
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
        with own_precision(q):
            out, final, saved = recurrent_forward(q, k, v, gk, gv, beta, state, layout, scale, keep=True)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, gk, gv, beta, *saved)
        ctx.layout, ctx.scale = layout, scale
        return out, final

    @staticmethod
    def backward(ctx: Any, d_out: Tensor | None, d_final: Tensor | None) -> tuple[Tensor | None, ...]:
        if d_out is None and d_final is None:
            return (None,) * 9
        q, k, v, gk, gv, beta, *saved = ctx.saved_tensors
        with torch.no_grad(), own_precision(q):
            grads = recurrent_backward(q, k, v, gk, gv, beta, ctx.layout, ctx.scale, tuple(saved), d_out, d_final)
        return (*once(grads, (q, k, v, gk, gv, beta, d_out, d_final)), None, None)
