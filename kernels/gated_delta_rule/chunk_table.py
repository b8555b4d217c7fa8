"""Where chunks and sequences lie, as two tables that the device writes: nobody reads `cu_seqlens` on the host.

Table of chunks, int32 [slots, 4]: the row where the chunk's sequence ends, the sequence's length, the chunk's number in
it, the sequence; length 0 is a slot without a chunk. Table of sequences, int32 [N, 4]: end row, length, first slot,
number of chunks. A sequence's chunks lie in neighbouring slots, ascending.

Packed sequences: sequence n begins at slot start // 64 + n, which leaves room for every chunk before it. So each slot
finds its sequence by itself, and total // 64 + N slots are always enough, at most N of them unused. Starts and ends
outside of the rows are moved to the nearest. Dense: N sequences of total / N tokens, N ceil(total / N / 64) slots.
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32, const_expr

from ..blocks.words import ELEMENT, load_words, store_words
from .chunk_config import CHUNK, TABLE_COLUMNS, ChunkConfig

THREADS = 128
ALIGNMENT = 16


class ChunkTable:
    """Traceable host function for one configuration. Without packed sequences any tensor stands in for mCu.

    mCu (N + 1), mTable (slots, 4), mSequences (N, 4), mO (total, HV, V), whose rows are contiguous: rows of no sequence
    are set to zero.
    """

    def __init__(self, config: ChunkConfig) -> None:
        self.config = config

    @cute.jit
    def launch(
        self, mCu: cute.Tensor, mTable: cute.Tensor, mSequences: cute.Tensor, mO: cute.Tensor, stream: cuda.CUstream
    ):
        wanted = cutlass.max(mTable.shape[0], mSequences.shape[0])
        self.kernel(mCu, mTable, mSequences, mO).launch(
            grid=[cute.ceil_div(wanted, THREADS), 1, 1],
            block=[THREADS, 1, 1],
            use_pdl=self.config.overlap,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, mCu: cute.Tensor, mTable: cute.Tensor, mSequences: cute.Tensor, mO: cute.Tensor):
        tid, _, _ = cute.arch.thread_idx()
        bid, _, _ = cute.arch.block_idx()
        i = bid * THREADS + tid
        if const_expr(self.config.overlap):
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
        sequences, rows = mSequences.shape[0], mO.shape[0]
        if i < mTable.shape[0]:
            n = self.sequence_of(mCu, i, sequences, rows)
            stop, length, first, chunks = self.sequence(mCu, n, sequences, rows)
            chunk = i - first
            length = Int32(length)
            if chunk < 0 or chunk >= chunks:
                length = Int32(0)
            write(mTable, i, stop, length, chunk, n)
        if i < sequences:
            write(mSequences, i, *self.sequence(mCu, i, sequences, rows))
        if const_expr(self.config.packed is not None):
            grid, _, _ = cute.arch.grid_dim()
            clear(mO, Int32(0), limited(mCu, 0, rows), bid, grid, tid)
            clear(mO, limited(mCu, sequences, rows), Int32(rows), bid, grid, tid)

    @cute.jit
    def sequence_of(self, mCu: cute.Tensor, slot: Int32, sequences: Int32, rows: Int32) -> Int32:
        """The last sequence whose first slot is not behind `slot`; 0 if there is none."""
        found = Int32(0)
        if const_expr(self.config.packed is None):
            found = slot // chunks_of(rows // sequences)
        else:
            behind = Int32(sequences)
            while behind - found > 1:
                middle = (found + behind) // 2
                if limited(mCu, middle, rows) // CHUNK + middle <= slot:
                    found = middle
                else:
                    behind = middle
        return found

    @cute.jit
    def sequence(self, mCu: cute.Tensor, n: Int32, sequences: Int32, rows: Int32):
        """(end row, length, first slot, chunks)."""
        if const_expr(self.config.packed is None):
            length = rows // sequences
            chunks = chunks_of(length)
            return (n + 1) * length, length, n * chunks, chunks
        else:
            start = limited(mCu, n, rows)
            stop = cutlass.max(limited(mCu, n + 1, rows), start)
            return stop, stop - start, start // CHUNK + n, chunks_of(stop - start)


@cute.jit
def limited(mCu: cute.Tensor, n: Int32, rows: Int32) -> Int32:
    return cutlass.min(cutlass.max(Int32(mCu[n]), 0), rows)


@cute.jit
def chunks_of(length: Int32) -> Int32:
    return (length + (CHUNK - 1)) // CHUNK


@cute.jit
def write(m: cute.Tensor, row: Int32, a: Int32, b: Int32, c: Int32, d: Int32) -> None:
    store_words(m.iterator.toint() + Int64(row) * (4 * TABLE_COLUMNS), tuple(Uint32(x) for x in (a, b, c, d)))


@cute.jit
def read(m: cute.Tensor, row: Int32):
    """The four numbers of a row of either table, in one access."""
    words = cute.make_rmem_tensor((TABLE_COLUMNS,), Uint32)
    load_words(m.iterator.toint() + Int64(row) * (4 * TABLE_COLUMNS), words, 0, TABLE_COLUMNS)
    return tuple(Int32(words[i]) for i in range(TABLE_COLUMNS))


@cute.jit
def clear(mO: cute.Tensor, first: Int32, stop: Int32, cta: Int32, ctas: Int32, thread: Int32) -> None:
    """Zeros in the rows first to stop - 1 of 16-bit elements, a row a CTA at a time."""
    accesses = mO.shape[1] * mO.shape[2] // (ALIGNMENT // 2)
    for row in cutlass.range(first + cta, stop, ctas, unroll=1):
        address = mO.iterator.toint() + Int64(row) * mO.stride[0] * 2
        for i in cutlass.range(thread, accesses, THREADS, unroll=1):
            store_zeros(address + i * ALIGNMENT)


@cute.jit
def store_zeros(address: Int64) -> None:
    store_words(address, tuple(Uint32(0) for _ in range(4)))


def stand_ins(config: ChunkConfig) -> tuple:
    """What the compiler knows of cu_seqlens and of the two tables."""

    def table():
        shape, stride = (cute.sym_int32(), TABLE_COLUMNS), (TABLE_COLUMNS, 1)
        return cute.runtime.make_fake_tensor(Int32, shape, stride=stride, assumed_align=ALIGNMENT)

    if config.packed is None:
        return out(config, cute.sym_int32(), cute.sym_int32()), table(), table()
    dtype, align = ELEMENT[config.packed], {"int32": 4, "int64": 8}[config.packed]
    cu = cute.runtime.make_fake_tensor(dtype, (cute.sym_int32(),), stride=(1,), assumed_align=align)
    return cu, table(), table()


def out(config: ChunkConfig, total, heads_v):
    shape = (total, heads_v, config.head_dim_v)
    stride = (cute.sym_int64(divisibility=8), config.head_dim_v, 1)
    return cute.runtime.make_fake_tensor(ELEMENT[config.dtype], shape, stride=stride, assumed_align=ALIGNMENT)


def build(config: ChunkConfig):
    """(host function, stand-in arguments) for the compiler."""
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    return ChunkTable(config).launch, (*stand_ins(config), out(config, cute.sym_int32(), cute.sym_int32()), stream)
