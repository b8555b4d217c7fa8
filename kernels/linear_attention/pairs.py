"""Decayed products of the tokens of a chunk, x_t . k_i for x = q and x = k, and their gradients:

    A_ti = sum_c x_tc k_ic exp(g_{i+1,c} + ... + g_{t,c})

Every exponent is a sum of the log decays between the two tokens, formed from those alone, never a difference of two
running sums. So nothing overflows however strong the decay (-1000 a token, or -inf for a reset, are fine), nothing is
lost behind a large jump, and the gradient of a log decay is a plain sum over the pairs that span it.

Rows are [M, C, ...], M = chunks x heads, C tokens per chunk, a power of two.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Decay:
    """exp of log decay sums of a chunk; the last dimension is 1 for a scalar gate, K for a gate per channel.

    As gradients, the three stand for the gradients of the log decay sums themselves.
    """

    head: Tensor  #: [M, C, 1 or K] from the chunk's start through each token
    tail: Tensor  #: [M, C, 1 or K] after each token to the chunk's end
    total: Tensor  #: [M, 1, 1 or K] over the whole chunk


@dataclass
class Pairs:
    """Pair products of a chunk, and what their gradient reuses."""

    qk: Tensor  #: [M, C, C] lower, with the diagonal
    kk: Tensor  #: [M, C, C] strictly lower
    decay: Decay
    spans: Tensor | None = None  #: scalar gate: [M, C, C] exp of the log decay sum of every pair, lower


# --- one log decay per token ------------------------------------------------------------------------------------------


def scalar_pairs(q: Tensor, k: Tensor, g: Tensor) -> Pairs:
    """Pair products under one log decay per token: q, k [M, C, K], g [M, C, 1]."""
    # column i of the cumulative sum adds g_{i+1}, g_{i+2}, ...: the decays between i and t only
    spans = g.expand(-1, -1, g.shape[1]).tril(-1).cumsum_(1).exp_().tril_()
    head = g.cumsum(1).exp_()
    qk = torch.bmm(q, k.mT).mul_(spans)
    kk = torch.bmm(k, k.mT).mul_(spans).tril_(-1)
    return Pairs(qk, kk, Decay(head, spans[:, -1, :, None], head[:, -1:]), spans)


def scalar_pairs_backward(
    q: Tensor, k: Tensor, pairs: Pairs, d_qk: Tensor, d_kk: Tensor, d_decay: Decay
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients (dq, dk, dg) from those of `qk` (lower), `kk` (strictly lower) and of the log decay sums."""
    assert pairs.spans is not None
    by_pair = (d_qk * pairs.qk).addcmul_(d_kk, pairs.kk)
    d_qk, d_kk = d_qk * pairs.spans, d_kk * pairs.spans
    dq = torch.bmm(d_qk, k)
    dk = torch.bmm(d_qk.mT, q).baddbmm_(d_kk + d_kk.mT, k)
    # g_s takes part in the pairs (t, i) that span it, i < s <= t: sum over t from s on, then over i before s
    from_row = q.new_ones(q.shape[1], q.shape[1]).triu_()
    dg = torch.matmul(from_row, by_pair).tril_(-1).sum(2, keepdim=True)
    dg += d_decay.head.flip(1).cumsum(1).flip(1)
    dg[:, 1:] += d_decay.tail[:, :-1].cumsum(1)
    return dq, dk, dg.add_(d_decay.total)


# --- one log decay per token and channel ------------------------------------------------------------------------------
# To use matrix products, a pair's exponent must be split into one part for t and one for i. The triangle is cut in
# halves again and again: in a block of two halves of `size` tokens each, t in the second and i in the first, the
# boundary between the halves is the reference; both parts are sums of log decays on their own side of it, and neither
# exp exceeds 1.


def halves(x: Tensor, size: int) -> Tensor:
    """[M, C, D] -> view [M, blocks, 2, size, D]."""
    return x.view(x.shape[0], x.shape[1] // (2 * size), 2, size, x.shape[2])


def lower_blocks(a: Tensor, size: int) -> Tensor:
    """View [M, blocks, size, size] of [M, C, C]: pairs of a token in a block's second half with one in its first."""
    blocks = a.shape[1] // (2 * size)
    square = a.view(a.shape[0], blocks, 2 * size, blocks, 2 * size).diagonal(dim1=1, dim2=3)
    return square.permute(0, 3, 1, 2)[:, :, size:, :size]


def double_sums(head: Tensor, tail: Tensor, size: int) -> None:
    """In place: log decay sums inside blocks of `size` tokens become those inside blocks of twice as many."""
    h, t = halves(head, size), halves(tail, size)
    t[:, :, 0] += h[:, :, 1, -1:]
    h[:, :, 1] += h[:, :, 0, -1:]


def outer(x: Tensor, y: Tensor) -> Tensor:
    """[M, blocks, size, D] twice -> products of every row of x with every row of y, [M, blocks, size, size]."""
    # batched products of single rows cost 10 times what this does
    return (x * y).sum(3, keepdim=True) if x.shape[2] == 1 else torch.matmul(x, y.mT)


def combine(a: Tensor, y: Tensor) -> Tensor:
    """Sums of the rows of y [M, blocks, size, D], weighted by the rows of a [M, blocks, size, size]."""
    return a * y if y.shape[2] == 1 else torch.matmul(a, y)


def channel_pairs(q: Tensor, k: Tensor, g: Tensor) -> Pairs:
    """Pair products under one log decay per token and channel: q, k, g [M, C, K]."""
    chunk = g.shape[1]
    qk = q.new_zeros(q.shape[0], chunk, chunk)
    kk = torch.zeros_like(qk)
    qk.diagonal(dim1=1, dim2=2).copy_((q * k).sum(2))
    head, tail = g.clone(), torch.zeros_like(g)
    size = 1
    while size < chunk:
        from_reference, to_reference = halves(head, size)[:, :, 1].exp(), halves(tail, size)[:, :, 0].exp()
        earlier = halves(k, size)[:, :, 0] * to_reference
        lower_blocks(qk, size).copy_(outer(halves(q, size)[:, :, 1] * from_reference, earlier))
        lower_blocks(kk, size).copy_(outer(halves(k, size)[:, :, 1] * from_reference, earlier))
        double_sums(head, tail, size)
        size *= 2
    head.exp_()
    return Pairs(qk, kk, Decay(head, tail.exp_(), head[:, -1:]))


def channel_pairs_backward(
    q: Tensor, k: Tensor, g: Tensor, d_qk: Tensor, d_kk: Tensor, d_decay: Decay
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients (dq, dk, dg) from those of `qk` (lower), `kk` (strictly lower) and of the log decay sums."""
    diagonal = d_qk.diagonal(dim1=1, dim2=2)[..., None]
    dq, dk = diagonal * k, diagonal * q
    head, tail = g.clone(), torch.zeros_like(g)
    factors = []
    size = 1
    while size < g.shape[1]:
        factors.append((halves(head, size)[:, :, 1].exp(), halves(tail, size)[:, :, 0].exp()))
        double_sums(head, tail, size)
        size *= 2
    d_head, d_tail = d_decay.head.clone(), d_decay.tail.clone()
    d_head[:, -1:] += d_decay.total
    while factors:
        size //= 2
        from_reference, to_reference = factors.pop()
        dh, dt = halves(d_head, size), halves(d_tail, size)
        # the adjoint of double_sums
        dh[:, :, 0, -1] += dh[:, :, 1].sum(2)
        dh[:, :, 1, -1] += dt[:, :, 0].sum(2)
        earlier = halves(k, size)[:, :, 0] * to_reference
        d_earlier = torch.zeros_like(earlier)
        for x, dx, d_products in ((q, dq, lower_blocks(d_qk, size)), (k, dk, lower_blocks(d_kk, size))):
            later = halves(x, size)[:, :, 1] * from_reference
            d_earlier += combine(d_products.mT, later)
            d_later = combine(d_products, earlier)
            halves(dx, size)[:, :, 1].addcmul_(d_later, from_reference)
            dh[:, :, 1].addcmul_(d_later, later)
        halves(dk, size)[:, :, 0].addcmul_(d_earlier, to_reference)
        dt[:, :, 0].addcmul_(d_earlier, earlier)
    return dq, dk, d_head
