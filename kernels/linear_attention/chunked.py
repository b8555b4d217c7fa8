"""The chunked core of the gated delta rule and KDA: forward, backward and their autograd function.

Per chunk of C tokens with start state S (arrays are rows of [M, C, ...], M = chunks x value heads):

    L = beta * kk (strictly lower),  T = (I + L)^-1,  W = T (beta * head * k)
    U = T (beta * v) - W S,  o = scale (head * q) S + scale qk U,  S' = total * S + (tail * k)^T U

with qk, kk the decayed pair products and head, tail, total the decays of `pairs.py`. Everything but the two products of
U and S' is computed for all chunks at once; the scan over chunks is the only Python loop. Inverting the gated system
keeps T bounded wherever the recurrence is, also for keys that are not normalised.

The backward is explicit: it reads each saved tensor once and costs no graph of the forward; it cannot be differentiated again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .layout import ChunkLayout
from .pairs import Decay, Pairs, channel_pairs, channel_pairs_backward, scalar_pairs, scalar_pairs_backward

Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


class Rows:
    """The inputs of one call as chunk rows: q, k, v, g [M, C, D], beta [M, C, 1]; q and k repeated for their value heads."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, layout: ChunkLayout) -> None:
        self.heads = v.shape[2]
        self.groups = self.heads // q.shape[2]
        self.layout = layout
        self.per_channel = g.dim() == 4
        self.q, self.k = (self.pack(x.repeat_interleave(self.groups, 2) if self.groups > 1 else x) for x in (q, k))
        self.v = self.pack(v)
        self.g = self.pack(g if self.per_channel else g[..., None])
        self.beta = self.pack(beta[..., None])

    def pack(self, x: Tensor) -> Tensor:
        """[B, T, HV, D] -> [M, C, D]"""
        return self.layout.to_chunks(x).flatten(0, 1)

    def unpack(self, rows: Tensor) -> Tensor:
        """[M, C, D] -> [B, T, HV, D]"""
        return self.layout.to_tokens(rows.unflatten(0, (self.layout.chunks, self.heads)))

    def unpack_qk(self, rows: Tensor) -> Tensor:
        """[M, C, K] -> [B, T, H, K]: the value heads that share a query/key head are summed."""
        x = self.unpack(rows)
        return x if self.groups == 1 else x.unflatten(2, (self.heads // self.groups, self.groups)).sum(3)

    def pairs(self) -> Pairs:
        return (channel_pairs if self.per_channel else scalar_pairs)(self.q, self.k, self.g)


def chunked_forward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, layout: ChunkLayout, scale: float
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """(o [B, T, HV, V], final state [N, HV, K, V], what the backward reuses); all tensors in the compute dtype."""
    rows = Rows(q, k, v, g, beta, layout)
    pairs = rows.pairs()
    decay = pairs.decay
    identity = torch.eye(layout.chunk, dtype=q.dtype, device=q.device).expand_as(pairs.kk)
    inverse = torch.linalg.solve_triangular(rows.beta * pairs.kk, identity, upper=False, unitriangular=True)
    new = torch.bmm(inverse, rows.beta * rows.v)
    read = torch.bmm(inverse, rows.beta * decay.head * rows.k)
    write = (decay.tail * rows.k).mT
    total = decay.total.mT
    running = layout.sort_states(state).flatten(0, 1)
    starts = new.new_empty(new.shape[0], *running.shape[1:])
    for step in layout.steps(rows.heads):
        s = running[: step.stop - step.start]
        starts[step] = s
        new[step].baddbmm_(read[step], s, alpha=-1)
        s.mul_(total[step]).baddbmm_(write[step], new[step])
    out = torch.bmm(decay.head * rows.q, starts).baddbmm_(pairs.qk, new).mul_(scale)
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
    """Gradients of q, k, v, g, beta and the initial state, from those of the output and of the final state (None is zero)."""
    rows = Rows(q, k, v, g, beta, layout)
    inverse, new, starts, qk, kk, head, tail, *spans = saved
    pairs = Pairs(qk, kk, Decay(head, tail, head[:, -1:]), *spans)
    do = rows.pack(d_out).mul_(scale) if d_out is not None else torch.zeros_like(rows.v)
    head_q, head_k, tail_k = head * rows.q, head * rows.k, tail * rows.k
    read, total = torch.bmm(inverse, rows.beta * head_k), pairs.decay.total.mT
    # the scan backwards: the gradients of `new` and of the state at each chunk's end
    d_new, ends = torch.bmm(qk.mT, do), torch.empty_like(starts)
    if d_final is None:
        running = starts.new_zeros(layout.sequences * rows.heads, *starts.shape[1:])
    else:
        running = layout.sort_states(d_final).flatten(0, 1)
    for step in reversed(layout.steps(rows.heads)):
        s = running[: step.stop - step.start]
        ends[step] = s
        d_new[step].baddbmm_(tail_k[step], s)
        s.mul_(total[step]).baddbmm_(head_q[step].mT, do[step]).baddbmm_(read[step].mT, d_new[step], alpha=-1)
    d_start = layout.unsort_states(running.unflatten(0, (layout.sequences, rows.heads)))
    # the rest for all chunks at once
    d_rhs = torch.bmm(inverse.mT, d_new)
    d_kk = torch.bmm(d_rhs, new.mT).tril_(-1).neg_()
    rhs = rows.v - torch.bmm(head_k, starts)
    d_beta = (d_rhs * rhs).sum(2, keepdim=True).add_((d_kk * kk).sum(2, keepdim=True))
    d_v = rows.beta * d_rhs
    d_head_q = torch.bmm(do, starts.mT)
    d_head_k = torch.bmm(d_v, starts.mT).neg_()
    d_tail_k = torch.bmm(new, ends.mT)
    d_qk = torch.bmm(do, new.mT).tril_()
    d_decay = Decay(
        head=like_gate(head_q * d_head_q + head_k * d_head_k, rows),
        tail=like_gate(tail_k * d_tail_k, rows),
        total=like_gate(((starts * ends).sum(2, keepdim=True) * total).mT, rows),
    )
    through_pairs = channel_pairs_backward if rows.per_channel else scalar_pairs_backward
    d_q, d_k, d_g = through_pairs(rows.q, rows.k, rows.g, pairs, d_qk, rows.beta * d_kk, d_decay)
    d_q.addcmul_(head, d_head_q)
    d_k.addcmul_(head, d_head_k).addcmul_(tail, d_tail_k)
    d_g, d_beta = rows.unpack(d_g), rows.unpack(d_beta)[..., 0]
    d_g = d_g if rows.per_channel else d_g[..., 0]
    return rows.unpack_qk(d_q), rows.unpack_qk(d_k), rows.unpack(d_v), d_g, d_beta, d_start


def like_gate(x: Tensor, rows: Rows) -> Tensor:
    """[M, C, K] summed over the channels for a scalar gate."""
    return x if rows.per_channel else x.sum(2, keepdim=True)


class ChunkedDeltaRule(torch.autograd.Function):
    """o, final state = f(q, k, v, g, beta, initial state); differentiable once in all six."""

    @staticmethod
    def forward(  # type: ignore[override]
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
        with torch.autocast(q.device.type, enabled=False):
            out, final, saved = chunked_forward(q, k, v, g, beta, state, layout, scale)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, g, beta, *saved)
        ctx.layout, ctx.scale = layout, scale
        return out, final

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor | None, d_final: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        if d_out is None and d_final is None:
            return (None,) * 8
        q, k, v, g, beta, *saved = ctx.saved_tensors
        with torch.autocast(q.device.type, enabled=False):
            grads = chunked_backward(q, k, v, g, beta, ctx.layout, ctx.scale, tuple(saved), d_out, d_final)
        return (*grads, None, None)
