"""The online softmax over the rows of wgmma accumulators (Milakov and Gimelshein, arXiv 1805.02867), in fp32.

A thread holds two rows (r in 0..1) of an accumulator, each shared with the three neighbouring lanes; see wgmma.py. The
maximum is kept unscaled, and exponentials are exp2(score * scale_log2 - maximum * scale_log2): one multiply-add and one
exp2 an element. Row sums stay per thread until `finish`.
"""

from __future__ import annotations

import math

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, const_expr

LN2 = math.log(2.0)


@cute.jit
def mask_above(scores: cute.Tensor, r: int, limit: Int32) -> None:
    """Row r sees columns below `limit`, which counts from this thread's first column."""
    for c in cutlass.range_constexpr(cute.size(scores) // 4):
        for a in cutlass.range_constexpr(2):
            i = 4 * c + 2 * r + a
            scores[i] = scores[i] if 8 * c + a < limit else -Float32.inf


@cute.jit
def mask_below(scores: cute.Tensor, r: int, limit: Int32) -> None:
    """Row r sees columns from `limit` on, which counts from this thread's first column."""
    for c in cutlass.range_constexpr(cute.size(scores) // 4):
        for a in cutlass.range_constexpr(2):
            i = 4 * c + 2 * r + a
            scores[i] = scores[i] if 8 * c + a >= limit else -Float32.inf


@cute.jit
def mask_bits(scores: cute.Tensor, words: cute.Tensor) -> None:
    """Row r sees the columns whose bit is set: of columns 32 w on, bits 0, 1, 8, 9, ... of `words[r, w]`."""
    for r in cutlass.range_constexpr(2):
        for c in cutlass.range_constexpr(cute.size(scores) // 4):
            for a in cutlass.range_constexpr(2):
                i = 4 * c + 2 * r + a
                seen = words[r, c // 4] & Uint32(1 << (8 * (c % 4) + a))
                scores[i] = scores[i] if seen != Uint32(0) else -Float32.inf


@cute.jit
def row_maximum(scores: cute.Tensor, r: int) -> Float32:
    """Of the elements that this thread holds."""
    found = [scores[2 * r], scores[2 * r + 1]]
    for c in cutlass.range_constexpr(1, cute.size(scores) // 4):
        for a in cutlass.range_constexpr(2):
            found[a] = cute.arch.fmax(found[a], scores[4 * c + 2 * r + a])
    return cute.arch.fmax(found[0], found[1])


@cute.jit
def step(
    scores: cute.Tensor,
    row_max: cute.Tensor,
    row_sum: cute.Tensor,
    row_scale: cute.Tensor,
    scale_log2: Float32,
    first: cutlass.Constexpr,
    masked: cutlass.Constexpr,
) -> None:
    """Scores become exponentials; maxima and sums take them in; `row_scale` is the factor for earlier results.

    `masked`: a row may have nothing but -inf up to here.
    """
    for r in cutlass.range_constexpr(2):
        largest = row_maximum(scores, r)
        if const_expr(not first):
            largest = cute.arch.fmax(largest, row_max[r])
        largest = cute.arch.warp_reduction_max(largest, threads_in_group=4)
        safe = largest
        if const_expr(masked):
            safe = Float32(0.0) if largest == -Float32.inf else largest
        shift = safe * scale_log2
        if const_expr(first):
            row_scale[r] = Float32(1.0)
            total = [Float32(0.0), Float32(0.0)]
        else:
            row_scale[r] = cute.math.exp2((row_max[r] - safe) * scale_log2, fastmath=True)
            total = [row_sum[r] * row_scale[r], Float32(0.0)]
        row_max[r] = largest
        for c in cutlass.range_constexpr(cute.size(scores) // 4):
            for a in cutlass.range_constexpr(2):
                i = 4 * c + 2 * r + a
                scores[i] = cute.math.exp2(scores[i] * scale_log2 - shift, fastmath=True)
                total[a] = total[a] + scores[i]
        row_sum[r] = total[0] + total[1]


@cute.jit
def rescale(acc: cute.Tensor, row_scale: cute.Tensor) -> None:
    """Every row of an accumulator times its factor."""
    for c in cutlass.range_constexpr(cute.size(acc) // 4):
        for r in cutlass.range_constexpr(2):
            for a in cutlass.range_constexpr(2):
                acc[4 * c + 2 * r + a] = acc[4 * c + 2 * r + a] * row_scale[r]


@cute.jit
def finish(row_max: cute.Tensor, row_sum: cute.Tensor, row_scale: cute.Tensor, lse: cute.Tensor, scale_log2: Float32):
    """`row_scale` becomes 1 / sum, `lse` the natural logarithm of the sum of exponentials; 0 and -inf without keys."""
    for r in cutlass.range_constexpr(2):
        total = cute.arch.warp_reduction_sum(row_sum[r], threads_in_group=4)
        empty = total == 0.0
        row_scale[r] = Float32(0.0) if empty else cute.arch.rcp_approx(total)
        lse[r] = -Float32.inf if empty else (row_max[r] * scale_log2 + cute.math.log2(total, fastmath=True)) * LN2
