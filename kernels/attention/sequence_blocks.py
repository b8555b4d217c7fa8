"""Packed sequences: which blocks of queries there are, as a table that one warp a sequence writes on the device.

`cu_seqlens` says where a sequence begins and the next one does; `used` lengths, where given, that it ends earlier. The
table has a row for every block of `tile_m` queries of every sequence, a sequence's last block (under causality the one
with the most keys) first, and rows of zeros behind them: blocks of a sequence without queries and without keys. As the
lengths are known on the device alone, it has as many rows as there could be: total_q // tile_m + batch. A row is: the
row of q where the sequence ends, its length, the same of k, the block.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from .any_classify import load_words
from .sequence_table import FIELDS, PITCH

WARP = 32


@cute.kernel
def fill(mCuQ, mCuK, mUsedQ, mUsedK, used: Int32, mTable, tile_m: cutlass.Constexpr):
    """A warp for every sequence. `used`: bit 0 if mUsedQ counts, bit 1 if mUsedK does."""
    lane, sequence = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
    batch = cute.arch.grid_dim()[0]
    before = Int32(0)
    for i in cutlass.range(lane, sequence, WARP, unroll=1):
        before += blocks_of(length(mCuQ, mUsedQ, used & 1, i), tile_m)
    for distance in (1, 2, 4, 8, 16):
        before += cute.arch.shuffle_sync_bfly(before, offset=distance)
    q_len, k_len = length(mCuQ, mUsedQ, used & 1, sequence), length(mCuK, mUsedK, used & 2, sequence)
    blocks, rows = blocks_of(q_len, tile_m), mTable.shape[0]
    q_end, k_end = mCuQ[sequence] + q_len, mCuK[sequence] + k_len
    for i in cutlass.range(lane, blocks, WARP, unroll=1):
        if before + i < rows:
            write(mTable, before + i, q_end, q_len, k_end, k_len, blocks - 1 - i)
    if sequence == batch - 1:
        for i in cutlass.range(before + blocks + lane, rows, WARP, unroll=1):
            zero = Int32(0)
            write(mTable, i, zero, zero, zero, zero, zero)


@cute.jit
def length(mCu, mUsed, used: Int32, i: Int32) -> Int32:
    found = mCu[i + 1] - mCu[i]
    if used != 0:
        found = mUsed[i]
    return cutlass.max(found, 0)


@cute.jit
def blocks_of(rows: Int32, tile_m: int) -> Int32:
    return (rows + (tile_m - 1)) // tile_m


@cute.jit
def write(mTable, row: Int32, q_end: Int32, q_len: Int32, k_end: Int32, k_len: Int32, block: Int32) -> None:
    for field, value in enumerate((q_end, q_len, k_end, k_len, block)):
        mTable[row, field] = value


@cute.jit
def read(mTable, row: Int32):
    """(q_end, q_len, k_end, k_len), block."""
    address = mTable.iterator.toint() + Int64(row) * (4 * PITCH)
    q_end, q_len, k_end, k_len = [Int32(word) for word in load_words(address, 4)]
    return (q_end, q_len, k_end, k_len), mTable[row, FIELDS - 1]
