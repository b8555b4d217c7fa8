"""The chunked core of the gated delta rule and KDA: forward, backward and their autograd function.

Per chunk of C tokens with start state S (arrays are rows [M, C, ...], M = chunks x value heads):

    L = beta * kk (strictly lower),  T = (I + L)^-1,  W = T (beta * head * k)
    U = T (beta * v) - W S,  o = scale (head * q) S + scale qk U,  S' = total * S + (tail * k)^T U

with qk, kk the decayed pair products and head, tail, total the decays of `pairs`. Everything but U and S' is computed
for all chunks at once; the scan over chunks is the only Python loop. It is the gated system that is inverted, so T
stays bounded wherever the recurrence does, also for keys that are not normalised.

The backward is explicit and cannot be differentiated again. Beside its inputs it keeps U, S, T, qk, kk and the decays,
all in the compute dtype: with K = V = C, six to seven times the size of v.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .layout import ChunkLayout, HeadRows
from .once import once
from .pairs import Decay, Pairs, channel_pairs, channel_pairs_backward, scalar_pairs, scalar_pairs_backward
from .precision import own_precision

Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def per_channel(g: Tensor) -> bool:
    """Whether the log decay is [B, T, HV, K], one per key channel; else it is [B, T, HV]."""
    return g.dim() == 4


def chunked_forward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, layout: ChunkLayout, scale: float
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """(o [B, T, HV, V], final state [N, HV, K, V], what the backward reuses); all tensors in the compute dtype."""
    rows = HeadRows(layout, v.shape[2], v.shape[2] // q.shape[2])
    query, key, rate = rows.pack_qk(q), rows.pack_qk(k), rows.pack(beta[..., None])
    if per_channel(g):
        pairs = channel_pairs(query, key, rows.pack(g))
    else:
        pairs = scalar_pairs(query, key, rows.pack(g[..., None]))
    decay = pairs.decay
    identity = torch.eye(layout.chunk, dtype=q.dtype, device=q.device).expand_as(pairs.kk)
    inverse = torch.linalg.solve_triangular(rate * pairs.kk, identity, upper=False, unitriangular=True)
    new = torch.bmm(inverse, rate * rows.pack(v))
    read = torch.bmm(inverse, rate * decay.head * key)
    write, total = (decay.tail * key).mT, decay.total.mT
    running = layout.sort_states(state).flatten(0, 1)
    starts = new.new_empty(new.shape[0], *running.shape[1:])
    for step in rows.steps():
        s = running[: step.stop - step.start]
        starts[step] = s
        new[step].baddbmm_(read[step], s, alpha=-1)
        s.mul_(total[step]).baddbmm_(write[step], new[step])
    out = torch.bmm(decay.head * query, starts).baddbmm_(pairs.qk, new).mul_(scale)
    final = layout.unsort_states(running.view(state.shape))
    spans = () if pairs.spans is None else (pairs.spans,)
    return rows.unpack(out), final, (inverse, new, starts, pairs.qk, pairs.kk, decay.head, decay.tail, *spans)


def chunked_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    layout: ChunkLayout,
    scale: float,
    saved: tuple[Tensor, ...],
    d_out: Tensor | None,
    d_final: Tensor | None,
) -> Gradients:
    """Gradients of q, k, v, g, beta and the initial state; a gradient that comes in as None is zero."""
    rows = HeadRows(layout, v.shape[2], v.shape[2] // q.shape[2])
    query, key, value, rate = rows.pack_qk(q), rows.pack_qk(k), rows.pack(v), rows.pack(beta[..., None])
    inverse, new, starts, qk, kk, head, tail, *spans = saved
    pairs = Pairs(qk, kk, Decay(head, tail, head[:, -1:]), *spans)
    do = torch.zeros_like(value) if d_out is None else rows.pack(d_out) * scale
    head_q, head_k, tail_k = head * query, head * key, tail * key
    read, total = torch.bmm(inverse, rate * head_k), pairs.decay.total.mT
    # the scan backwards: the gradients of U and of the state at each chunk's end
    d_new, ends = torch.bmm(qk.mT, do), torch.empty_like(starts)
    if d_final is None:
        running = starts.new_zeros(layout.sequences * rows.heads, *starts.shape[1:])
    else:
        running = layout.sort_states(d_final).flatten(0, 1)
    for step in reversed(rows.steps()):
        s = running[: step.stop - step.start]
        ends[step] = s
        d_new[step].baddbmm_(tail_k[step], s)
        s.mul_(total[step]).baddbmm_(head_q[step].mT, do[step]).baddbmm_(read[step].mT, d_new[step], alpha=-1)
    d_start = layout.unsort_states(running.unflatten(0, (layout.sequences, rows.heads)))
    # the rest for all chunks at once
    d_rhs = torch.bmm(inverse.mT, d_new)
    d_system = torch.bmm(d_rhs, new.mT).tril_(-1).neg_()
    rhs = torch.baddbmm(value, head_k, starts, alpha=-1)
    d_beta = (d_rhs * rhs).sum(2, keepdim=True).add_((d_system * kk).sum(2, keepdim=True))
    d_value = rate * d_rhs
    d_head_q = torch.bmm(do, starts.mT)
    d_head_k = torch.bmm(d_value, starts.mT).neg_()
    d_tail_k = torch.bmm(new, ends.mT)
    d_qk = torch.bmm(do, new.mT).tril_()
    d_head, d_tail = head_q * d_head_q + head_k * d_head_k, tail_k * d_tail_k
    d_total = ((starts * ends).sum(2, keepdim=True) * total).mT
    if per_channel(g):
        d_decay = Decay(d_head, d_tail, d_total)
        d_query, d_key, d_g = channel_pairs_backward(query, key, rows.pack(g), d_qk, rate * d_system, d_decay)
    else:
        d_decay = Decay(*(x.sum(2, keepdim=True) for x in (d_head, d_tail, d_total)))
        d_query, d_key, d_g = scalar_pairs_backward(query, key, pairs, d_qk, rate * d_system, d_decay)
    d_query.addcmul_(head, d_head_q)
    d_key.addcmul_(head, d_head_k).addcmul_(tail, d_tail_k)
    d_g, d_beta = rows.unpack(d_g), rows.unpack(d_beta)[..., 0]
    d_g = d_g if per_channel(g) else d_g[..., 0]
    return rows.unpack_qk(d_query), rows.unpack_qk(d_key), rows.unpack(d_value), d_g, d_beta, d_start


class ChunkedDeltaRule(torch.autograd.Function):
    """o, final state = f(q, k, v, g, beta, initial state); differentiable once in all six."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        state: Tensor,
        layout: ChunkLayout,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        with own_precision(q):
            out, final, saved = chunked_forward(q, k, v, g, beta, state, layout, scale)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, g, beta, *saved)
        ctx.layout, ctx.scale = layout, scale
        return out, final

    @staticmethod
    def backward(ctx: Any, d_out: Tensor | None, d_final: Tensor | None) -> tuple[Tensor | None, ...]:
        if d_out is None and d_final is None:
            return (None,) * 8
        q, k, v, g, beta, *saved = ctx.saved_tensors
        with torch.no_grad(), own_precision(q):
            grads = chunked_backward(q, k, v, g, beta, ctx.layout, ctx.scale, tuple(saved), d_out, d_final)
        return (*once(grads, (q, k, v, g, beta, d_out, d_final)), None, None)
