"""Decayed pair products inside a chunk: A_ti = sum_c x_tc k_ic exp(g_{i+1,c} + ... + g_{t,c}), for x = q and x = k, and their gradients.

Every exponent is a sum of log decays that lie between the two tokens, formed from those decays alone: never a difference
of two running sums. So nothing overflows however strong the decay is (log decays of -1000 per token, or -inf for a reset,
are fine), nothing is lost behind a large jump, and the gradient of a log decay is a plain sum over the pairs that span it.

`Decay` holds what the rest of a chunk needs of the gate, in logs: from the chunk's start to each token (`head`), from each
token to the chunk's end (`tail`) and over the whole chunk (`total`). The last dimension is 1 for a scalar gate, K for a
gate per channel. M is chunks x heads, C tokens per chunk.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Decay:
    """exp of log decay sums of one chunk: `head` [M, C, 1 or K] start to token, `tail` token to end, `total` [M, 1, 1 or K]."""

    head: Tensor
    tail: Tensor
    total: Tensor


@dataclass
class Pairs:
    """Pair products of a chunk: `qk` [M, C, C] lower with the diagonal, `kk` strictly lower, and what the gradient reuses."""

    qk: Tensor
    kk: Tensor
    decay: Decay
    spans: Tensor | None = None  #: scalar gate: exp of the log decay sum of every pair, [M, C, C], lower


# --- scalar gate -------------------------------------------------------------------------------------------------


def scalar_pairs(q: Tensor, k: Tensor, g: Tensor) -> Pairs:
    """Pair products under one log decay per token: q, k [M, C, K], g [M, C, 1]."""
    chunk = g.shape[1]
    # column i of the cumulative sum adds g_{i+1}, g_{i+2}, ...: the decays between i and t only
    spans = g.expand(-1, -1, chunk).tril(-1).cumsum_(1).exp_().tril_()
    head = g.cumsum(1).exp_()
    tail = spans[:, -1, :, None]
    qk = torch.bmm(q, k.mT).mul_(spans)
    kk = torch.bmm(k, k.mT).mul_(spans).tril_(-1)
    return Pairs(qk, kk, Decay(head, tail, head[:, -1:]), spans)


def scalar_pairs_backward(
    q: Tensor, k: Tensor, g: Tensor, pairs: Pairs, d_qk: Tensor, d_kk: Tensor, d_decay: Decay
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients (dq, dk, dg) from those of `qk` (lower), `kk` (strictly lower) and of the three log decay sums."""
    assert pairs.spans is not None
    crossing = (d_qk * pairs.qk).addcmul_(d_kk, pairs.kk)
    d_qk, d_kk = d_qk * pairs.spans, d_kk * pairs.spans
    dq = torch.bmm(d_qk, k)
    dk = torch.bmm(d_qk.mT, q).baddbmm_(d_kk + d_kk.mT, k)
    # dg_s sums the pairs (t, i) that span it: i < s <= t
    ones = g.new_ones(g.shape[1], g.shape[1]).triu_()
    dg = torch.matmul(ones, crossing).tril_(-1).sum(2, keepdim=True)
    dg += suffix_sum(d_decay.head)
    dg[:, 1:] += d_decay.tail[:, :-1].cumsum(1)
    return dq, dk, dg.add_(d_decay.total)


def suffix_sum(x: Tensor) -> Tensor:
    """Inclusive sum over dimension 1 from each row to the last."""
    return x.flip(1).cumsum(1).flip(1)


# --- a gate per channel: dyadic references ---------------------------------------------------------------------------
# A pair's exponent must be split into a factor for t and one for i to use matrix products. The triangle is split in
# halves again and again; in a block of two halves of `size` tokens the reference is the boundary between them, so both
# factors are sums of log decays on their own side of it, and neither exceeds 1.


def halves(x: Tensor, size: int) -> Tensor:
    """[M, C, D] -> view [M, blocks, 2, size, D]."""
    return x.view(x.shape[0], x.shape[1] // (2 * size), 2, size, x.shape[2])


def lower_blocks(a: Tensor, size: int) -> Tensor:
    """View [M, blocks, size, size] of [M, C, C]: pairs of a token in a block's second half with one in its first."""
    blocks = a.shape[1] // (2 * size)
    square = a.view(a.shape[0], blocks, 2 * size, blocks, 2 * size).diagonal(dim1=1, dim2=3)
    return square.permute(0, 3, 1, 2)[:, :, size:, :size]


def channel_pairs(q: Tensor, k: Tensor, g: Tensor) -> Pairs:
    """Pair products under one log decay per token and channel: q, k, g [M, C, K]."""
    m, chunk, dim = g.shape
    qk = q.new_zeros(m, chunk, chunk)
    kk = torch.zeros_like(qk)
    qk.diagonal(dim1=1, dim2=2).copy_((q * k).sum(2))
    head, tail = g.clone(), torch.zeros_like(g)
    size = 1
    while size < chunk:
        row, column = halves(head, size)[:, :, 1].exp(), halves(tail, size)[:, :, 0].exp()
        later = torch.cat((halves(q, size)[:, :, 1] * row, halves(k, size)[:, :, 1] * row), 2)
        earlier = halves(k, size)[:, :, 0] * column
        product = torch.matmul(later, earlier.mT)
        lower_blocks(qk, size).copy_(product[:, :, :size])
        lower_blocks(kk, size).copy_(product[:, :, size:])
        double_sums(head, tail, size)
        size *= 2
    head.exp_()
    return Pairs(qk, kk, Decay(head, tail.exp_(), head[:, -1:]))


def double_sums(head: Tensor, tail: Tensor, size: int) -> None:
    """In place: log decay sums inside blocks of `size` tokens become those inside blocks of twice as many."""
    h, t = halves(head, size), halves(tail, size)
    t[:, :, 0] += h[:, :, 1, -1:]
    h[:, :, 1] += h[:, :, 0, -1:]


def channel_pairs_backward(
    q: Tensor, k: Tensor, g: Tensor, pairs: Pairs, d_qk: Tensor, d_kk: Tensor, d_decay: Decay
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients (dq, dk, dg) from those of `qk` (lower), `kk` (strictly lower) and of the three log decay sums."""
    chunk = g.shape[1]
    diagonal = d_qk.diagonal(dim1=1, dim2=2)[..., None]
    dq, dk = diagonal * k, diagonal * q
    sums = []
    head, tail = g.clone(), torch.zeros_like(g)
    size = 1
    while size < chunk:
        sums.append((halves(head, size)[:, :, 1].exp(), halves(tail, size)[:, :, 0].exp()))
        double_sums(head, tail, size)
        size *= 2
    d_head, d_tail = d_decay.head.clone(), d_decay.tail.clone()
    d_head[:, -1:] += d_decay.total
    while size > 1:
        size //= 2
        row, column = sums.pop()
        dh, dt = halves(d_head, size), halves(d_tail, size)
        # the adjoint of double_sums
        dh[:, :, 0, -1] += dh[:, :, 1].sum(2)
        dh[:, :, 1, -1] += dt[:, :, 0].sum(2)
        later_q, later_k = halves(q, size)[:, :, 1] * row, halves(k, size)[:, :, 1] * row
        earlier = halves(k, size)[:, :, 0] * column
        d_pairs = torch.cat((lower_blocks(d_qk, size), lower_blocks(d_kk, size)), 2)
        d_later = torch.matmul(d_pairs, earlier)
        d_earlier = torch.matmul(d_pairs.mT, torch.cat((later_q, later_k), 2))
        d_later_q, d_later_k = d_later[:, :, :size], d_later[:, :, size:]
        halves(dq, size)[:, :, 1] += d_later_q * row
        halves(dk, size)[:, :, 1] += d_later_k * row
        halves(dk, size)[:, :, 0] += d_earlier * column
        dh[:, :, 1] += d_later_q * later_q + d_later_k * later_k
        dt[:, :, 0] += d_earlier * earlier
    return dq, dk, d_head
