"""The chains of the chunked gated delta rule, for sm_90a: the state of a value head of a sequence, chunk by chunk.

A warpgroup owns 64 value columns of a state, transposed: S^T (64 x K) is one accumulator of products, in fp32. With
what `sm90_prep` made of a chunk of 64 tokens (W is its mW, which holds minus W)

    U^T = U0^T + S^T W^T,  O^T = (S^T Q^T) diag(vec0) + U^T P^T,  S^T <- gamma S^T + (U^T diag(vec1)) K

where every left operand is an accumulator rounded to 16 bits, in registers: nothing that the next chunk waits for goes
through shared memory. The order of the products is S W, S Q, U K, U P, so that U is rounded while S Q runs, and the
next chunk's U0 is read under U K and U P. None is in flight at the head of the loop: the assembler cannot tell there
which of them a wait covers, and would wait for all, or after each.

A producer warp fills a ring of chunks. Sequences are segments to the copy engine: what lies behind an end is read as
zero and not written.

With 256 channels the state alone has 128 registers a thread and is rounded in pieces. The output takes U's place in
shared memory, without which two stages would not fit, and is stored before the next chunk begins.
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr

from ..blocks import pipeline, roles, tma, wgmma
from ..blocks.dtypes import WIDTH
from ..blocks.warp_mma import load_matrices, pack
from ..blocks.words import ELEMENT, as_word, load_number, store_words, unpack
from . import chunk_table
from .chunk_config import CHUNK, SLICE, TABLE_COLUMNS, VECTORS, VECTORS_TILE, ChunkConfig
from .sm90_prep import load_floats, store_matrices

ptx = cute.arch.inline_ptx
#: The fp32 vectors of a chunk as a tile of 16-bit elements: 6 rows of 64, and 2 of zeros that fill a swizzled atom.
VECTOR_ROWS, VECTOR_COLUMNS = 2 * VECTORS, 64
ATOM_ROWS = 8
ROW = 128  #: bytes of a row of 64 elements, and of a row of the vectors' tile
PIECE = 64  #: channels of a state of 256 that are rounded, and multiplied, at a time
BUFFERS = 2  #: pieces that are kept, rounded


class Scan:
    """Traceable host function for one configuration. What the configuration does without is given any tensor."""

    def __init__(self, config: ChunkConfig) -> None:
        self.config = config
        self.dtype = wgmma.DTYPES[config.dtype]

    def layouts(self):
        """Shared memory of W, K and Q, of P, of U, of the vectors and of O: (rows, columns, stage and warpgroup)."""
        c = self.config
        return (
            wgmma.smem_layout(self.dtype, CHUNK, c.head_dim, c.stages),
            wgmma.smem_layout(self.dtype, CHUNK, CHUNK, c.stages),
            wgmma.smem_layout(self.dtype, CHUNK, SLICE, c.stages * c.warpgroups),
            wgmma.smem_layout(self.dtype, ATOM_ROWS, VECTOR_COLUMNS, c.stages),
            wgmma.smem_layout(self.dtype, CHUNK, SLICE, c.stages * c.warpgroups if c.in_turn else c.warpgroups),
        )

    @cute.jit
    def launch(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mW: cute.Tensor,
        mU: cute.Tensor,
        mP: cute.Tensor,
        mVec: cute.Tensor,
        mInitial: cute.Tensor,
        mFinal: cute.Tensor,
        mSequences: cute.Tensor,
        mO: cute.Tensor,
        stream: cuda.CUstream,
    ):
        c = self.config
        heads, heads_v = mQ.shape[1], mO.shape[1]
        mQ, mK, mO = [
            tma.segmented(cute.make_tensor(t.iterator, cute.select(t.layout, mode=[0, 2, 1]))) for t in (mQ, mK, mO)
        ]
        # (rows, columns, entry): a tile is the first two modes.
        mW, mU, mP = [cute.make_tensor(t.iterator, cute.select(t.layout, mode=[1, 2, 0])) for t in (mW, mU, mP)]
        entry = VECTOR_ROWS * VECTOR_COLUMNS
        mVec = cute.make_tensor(
            cute.recast_ptr(mVec.iterator, dtype=self.dtype),
            cute.make_layout((VECTOR_ROWS, VECTOR_COLUMNS, mVec.shape[0]), stride=(VECTOR_COLUMNS, 1, entry)),
        )
        wide, square, own, vectors, out = [wgmma.one_stage(x) for x in self.layouts()]
        atom_q, tQ = tma.load_atom(mQ, wide, (CHUNK, c.head_dim))
        atom_k, tK = tma.load_atom(mK, wide, (CHUNK, c.head_dim))
        atom_w, tW = tma.load_atom(mW, wide, (CHUNK, c.head_dim))
        atom_u, tU = tma.load_atom(mU, own, (CHUNK, SLICE))
        atom_p, tP = tma.load_atom(mP, square, (CHUNK, CHUNK))
        atom_v, tV = tma.load_atom(mVec, vectors, (ATOM_ROWS, VECTOR_COLUMNS))
        atom_o, tO = tma.store_atom(mO, out, (CHUNK, SLICE))
        self.kernel(
            atom_q, tQ, atom_k, tK, atom_w, tW, atom_u, tU, atom_p, tP, atom_v, tV, atom_o, tO,
            mInitial, mFinal, mSequences, heads_v, heads_v // heads,
        ).launch(
            grid=[mSequences.shape[0] * heads_v * c.slices, 1, 1],
            block=[roles.threads(c.warpgroups), 1, 1],
            min_blocks_per_mp=1,
            use_pdl=c.overlap,
            stream=stream,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        atom_q, mQ, atom_k, mK, atom_w, mW, atom_u, mU, atom_p, mP, atom_v, mV, atom_o, mO,
        mInitial: cute.Tensor, mFinal: cute.Tensor, mSequences: cute.Tensor, heads_v: Int32, group: Int32,
    ):  # fmt: skip
        c = self.config
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            tma.prefetch(atom_q, atom_k, atom_w, atom_u, atom_p, atom_v, atom_o)
        wide, square, own, vectors, out = self.layouts()

        @cute.struct
        class Storage:
            barriers: pipeline.barrier_storage(c.stages)
            tiles_w: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(wide)], 1024]
            tiles_k: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(wide)], 1024]
            tiles_q: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(wide)], 1024]
            tiles_p: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(square)], 1024]
            tiles_u: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(own)], 1024]
            tiles_v: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(vectors)], 1024]
            tiles_o: cute.struct.Align[cute.struct.MemRange[self.dtype, 0 if c.in_turn else cute.cosize(out)], 1024]

        storage = cutlass.memory.SmemAllocator().allocate(Storage)
        ring = pipeline.ring(storage.barriers, c.stages, 4 * c.warpgroups, c.stage_bytes)
        pipeline.init_fence()
        tiles_o = storage.tiles_u if const_expr(c.in_turn) else storage.tiles_o
        sW, sK, sQ, sP, sU, sV, sO = [
            tiles.get_tensor(layout.outer, swizzle=layout.inner)
            for tiles, layout in (
                (storage.tiles_w, wide),
                (storage.tiles_k, wide),
                (storage.tiles_q, wide),
                (storage.tiles_p, square),
                (storage.tiles_u, own),
                (storage.tiles_v, vectors),
                (tiles_o, out),
            )
        ]
        places = [tiles.data_ptr().toint() for tiles in (storage.tiles_u, storage.tiles_v, tiles_o)]
        pipeline.init_wait()
        if const_expr(c.overlap):
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()

        chain = cute.arch.block_idx()[0]
        part, head_v, n = chain % c.slices, chain // c.slices % heads_v, chain // c.slices // heads_v
        sequence = chunk_table.read(mSequences, n)
        if warp < 4:
            cute.arch.setmaxregister_decrease(roles.REGISTERS[c.warpgroups][0])
            if warp == 0:
                self.load(
                    atom_q, mQ, sQ, atom_k, mK, sK, atom_w, mW, sW, atom_u, mU, sU, atom_p, mP, sP, atom_v, mV, sV,
                    ring, sequence, part, head_v, heads_v, group,
                )  # fmt: skip
        else:
            cute.arch.setmaxregister_increase(roles.REGISTERS[c.warpgroups][1])
            self.consume(sQ, sK, sW, sP, places, ring, atom_o, mO, sO, mInitial, mFinal, sequence, n, part, head_v)

    @cute.jit
    def load(
        self, atom_q, mQ, sQ, atom_k, mK, sK, atom_w, mW, sW, atom_u, mU, sU, atom_p, mP, sP, atom_v, mV, sV,
        ring, sequence, part: Int32, head_v: Int32, heads_v: Int32, group: Int32,
    ):  # fmt: skip
        """The producer warp: what the chain needs of every chunk, in the order of its products."""
        c = self.config
        end, length, first, chunks = sequence
        head = head_v // group
        gQ = cute.local_tile(tma.segment(mQ, head, end, length), (CHUNK, c.head_dim), (None, 0))
        gK = cute.local_tile(tma.segment(mK, head, end, length), (CHUNK, c.head_dim), (None, 0))
        tQsQ, tQgQ = tma.partition(atom_q, sQ, gQ)
        tKsK, tKgK = tma.partition(atom_k, sK, gK)
        tWsW, tWgW = tma.partition(atom_w, sW, cute.local_tile(mW, (CHUNK, c.head_dim), (0, 0, None)))
        tUsU, tUgU = tma.partition(atom_u, sU, cute.local_tile(mU, (CHUNK, SLICE), (0, None, None)))
        tPsP, tPgP = tma.partition(atom_p, sP, cute.local_tile(mP, (CHUNK, CHUNK), (0, 0, None)))
        tVsV, tVgV = tma.partition(atom_v, sV, cute.local_tile(mV, (ATOM_ROWS, VECTOR_COLUMNS), (0, 0, None)))
        state = pipeline.producer_state(c.stages)
        for i in cutlass.range(chunks, unroll=1):
            entry = (first + i) * heads_v + head_v
            ring.producer_acquire(state)
            full = ring.producer_get_barrier(state)
            for w in cutlass.range_constexpr(c.warpgroups):
                column = part * c.warpgroups + w
                place = state.index * c.warpgroups + w
                cute.copy(atom_u, tUgU[None, column, entry], tUsU[None, place], tma_bar_ptr=full)
            cute.copy(atom_w, tWgW[None, entry], tWsW[None, state.index], tma_bar_ptr=full)
            cute.copy(atom_v, tVgV[None, entry], tVsV[None, state.index], tma_bar_ptr=full)
            cute.copy(atom_q, tQgQ[None, i], tQsQ[None, state.index], tma_bar_ptr=full)
            cute.copy(atom_k, tKgK[None, i], tKsK[None, state.index], tma_bar_ptr=full)
            cute.copy(atom_p, tPgP[None, entry], tPsP[None, state.index], tma_bar_ptr=full)
            state.advance()

    @cute.jit
    def consume(
        self, sQ, sK, sW, sP, places, ring, atom_o, mO, sO, mInitial, mFinal, sequence, n: Int32, part: Int32,
        head_v: Int32,
    ):  # fmt: skip
        """A consumer warpgroup: 64 columns of the state through all chunks of the sequence."""
        c = self.config
        end, length, _, chunks = sequence
        thread = cute.arch.thread_idx()[0] % roles.WARPGROUP
        warpgroup = roles.consumer_warpgroup()
        column = part * c.warpgroups + warpgroup
        mma = wgmma.product(self.dtype, CHUNK, a_in_registers=True)
        mma_s = wgmma.product(self.dtype, c.head_dim, b_rows_contiguous=True, a_in_registers=True)
        rW, rQ, rP = [wgmma.b_operand(mma, s) for s in (sW, sQ, sP)]
        rK = wgmma.b_operand(mma_s, wgmma.transposed(sK))
        acc_s = wgmma.accumulator(mma_s, c.head_dim)
        acc_u, acc_o = wgmma.accumulator(mma, CHUNK), wgmma.accumulator(mma, CHUNK)
        if const_expr(c.in_turn):
            rS = [wgmma.a_registers(mma, PIECE) for _ in range(BUFFERS)]
        else:
            rS = wgmma.a_registers(mma, c.head_dim)
        rU, rD = wgmma.a_registers(mma, CHUNK), wgmma.a_registers(mma_s, CHUNK)
        operands = (mma, mma_s, rW, rQ, rP, rK, acc_s, acc_u, acc_o, rS, rU, rD)

        if const_expr(c.initial is None):
            acc_s.fill(0.0)
        else:
            self.load_state(mInitial, acc_s, n, head_v, column, thread)
        if chunks > 0:
            gO = cute.local_tile(tma.segment(mO, head_v, end, length), (CHUNK, SLICE), (None, column))
            where = self.addresses(places, warpgroup, thread)
            out = (atom_o, *tma.partition(atom_o, sO, gO), warpgroup, thread, where[3])
            stores = cute.arch.make_warp_uniform(thread // 32) == 0
            read, done = pipeline.consumer_state(c.stages), pipeline.consumer_state(c.stages)
            if const_expr(c.in_turn):
                for i in cutlass.range(chunks, unroll=1):
                    ring.consumer_wait(read)
                    self.first_u(acc_u, where, read.index)
                    self.with_state_in_turn(operands, where, read.index)
                    self.inside(operands, where, read.index)
                    wgmma.wait(0)
                    self.store_out(self.rounded(acc_o), out, i, read.index)
                    if stores:
                        cute.arch.cp_async_bulk_wait_group(0, read=True)
                    ring.consumer_release(read)
                    read.advance()
            else:
                ring.consumer_wait(read)
                self.first_u(acc_u, where, read.index)
                acc_o.fill(0.0)  # is rounded, not stored, before it is first made
                for i in cutlass.range(chunks, unroll=1):
                    self.with_state(operands, where, done.index, out, i)
                    self.inside(operands, where, done.index)
                    if i + 1 < chunks:
                        read.advance()
                        ring.consumer_wait(read)
                        self.first_u(acc_u, where, read.index)
                    wgmma.wait(0)
                    ring.consumer_release(done)
                    done.advance()
                self.store_out(self.rounded(acc_o), out, chunks - 1)
                if stores:
                    cute.arch.cp_async_bulk_wait_group(0, read=True)
        if const_expr(c.final is not None):
            self.store_state(mFinal, acc_s, n, head_v, column, thread)

    # --- A chunk ---------------------------------------------------------------------------------------------------

    @cute.jit
    def with_state(self, operands, where, stage: Int32, out, chunk: Int32):
        """Start U^T += S^T W^T and O^T = S^T Q^T, and store the output of the chunk before."""
        mma, _, rW, rQ, _, _, acc_s, acc_u, acc_o, rS, _, _ = operands
        wgmma.round_to(acc_s, rS)
        words = self.rounded(acc_o)
        wgmma.issue(mma, acc_u, rS, rW[None, None, None, stage], True)
        wgmma.issue(mma, acc_o, rS, rQ[None, None, None, stage], False)
        self.decay(acc_s, where, stage)
        if chunk > 0:
            self.store_out(words, out, chunk - 1)

    @cute.jit
    def decay(self, acc_s, where, stage: Int32):
        """The state times the decay of a chunk, while the products of the rounded state run."""
        (gamma,) = load_floats(where[1] + (stage * VECTORS_TILE + vector_offset(2, 0)), 1)
        for i in cutlass.range_constexpr(cute.size(acc_s)):
            acc_s[i] = acc_s[i] * gamma

    @cute.jit
    def with_state_in_turn(self, operands, where, stage: Int32):
        """Start the same products, a piece of the state after the other."""
        mma, _, rW, rQ, _, _, acc_s, acc_u, acc_o, rS, _, _ = operands
        pieces: cutlass.Constexpr = self.config.head_dim // PIECE
        for p in cutlass.range_constexpr(pieces):
            if const_expr(p >= BUFFERS):
                wgmma.wait(2 * (BUFFERS - 1))  # the products of the piece that lay here
            piece = rS[p % BUFFERS]
            wgmma.round_to(piece_of(acc_s, p), piece)
            wgmma.issue(mma, acc_u, piece, steps_of(rW[None, None, None, stage], p), True)
            wgmma.issue(mma, acc_o, piece, steps_of(rQ[None, None, None, stage], p), p > 0)
        self.decay(acc_s, where, stage)

    @cute.jit
    def inside(self, operands, where, stage: Int32):
        """From the products with the state in flight to the last two, U K and U P, in flight."""
        mma, mma_s, _, _, rP, rK, acc_s, acc_u, acc_o, _, rU, rD = operands
        after = self.vector(where, stage, 1)
        wgmma.wait(1)
        wgmma.round_to(acc_u, rU)
        scale_columns(acc_u, after)
        wgmma.round_to(acc_u, rD)
        wgmma.issue(mma_s, acc_s, rD, rK[None, None, None, stage], True)
        before = self.vector(where, stage, 0)
        wgmma.wait(1)
        scale_columns(acc_o, before)
        wgmma.issue(mma, acc_o, rU, rP[None, None, None, stage], True)

    # --- Shared memory ---------------------------------------------------------------------------------------------

    @cute.jit
    def addresses(self, places, warpgroup: Int32, thread: Int32):
        """Of this thread: in the first stage's U tile, vectors (of even and of odd rows), and in its tile of O.

        Tiles are 64 tokens x 64 columns, whose rows of 128 bytes have their 16-byte chunks exchanged by the row. Lane l
        has row l % 8 of the 8 x 8 matrix l / 8 of a 16 x 16 block of the transposed tile, as `load_matrices` and
        `store_matrices` want it.
        """
        lane, warp = thread % 32, thread // 32
        matrix, row = lane // 8, lane % 8
        inside = (matrix // 2 * 8 + row) * ROW + ((warp * 2 + matrix % 2) ^ row) * 16
        tile = warpgroup * (CHUNK * ROW) + inside
        even = thread % 4 * 8
        return places[0] + tile, places[1], (places[1] + even, places[1] + (even ^ 16)), places[2] + tile

    @cute.jit
    def first_u(self, acc_u, where, stage: Int32):
        """U^T of a chunk as it is without a state."""
        c = self.config
        address = where[0] + stage * (c.warpgroups * CHUNK * ROW)
        for block in cutlass.range_constexpr(CHUNK // 16):
            words = load_matrices(address, block * 16 * ROW, transposed=True)
            values = unpack(words, 8, c.dtype)
            for i in cutlass.range_constexpr(8):
                acc_u[block * 8 + i] = values[i]

    @cute.jit
    def vector(self, where, stage: Int32, row: cutlass.Constexpr):
        """The elements of a vector that belong to this thread's columns of an accumulator."""
        found = cute.make_rmem_tensor((CHUNK // 4,), Float32)
        for c in cutlass.range_constexpr(CHUNK // 8):
            offset: cutlass.Constexpr = vector_offset(row, 8 * c)
            base = where[2][offset // ROW % 2] + stage * VECTORS_TILE
            found[2 * c], found[2 * c + 1] = load_floats(base + offset // 32 * 32, 2)
        return found

    @cute.jit
    def rounded(self, acc_o):
        """An accumulator as words of pairs of 16-bit elements."""
        words = cute.make_rmem_tensor((CHUNK // 4,), Uint32)
        for i in cutlass.range_constexpr(CHUNK // 4):
            words[i] = pack(self.config.dtype, acc_o[2 * i], acc_o[2 * i + 1])
        return words

    @cute.jit
    def store_out(self, words, out, chunk: Int32, stage: Int32 = 0):
        """O^T of a chunk, through shared memory: its own tile of it, or U's of the stage."""
        atom_o, tOsO, tOgO, warpgroup, thread, address = out
        stores = cute.arch.make_warp_uniform(thread // 32) == 0
        if stores:
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        tile = stage * self.config.warpgroups + warpgroup
        address += stage * (self.config.warpgroups * CHUNK * ROW)
        roles.sync_warpgroup(warpgroup)
        for block in cutlass.range_constexpr(CHUNK // 16):
            store_matrices(address + block * 16 * ROW, [words[4 * block + i] for i in range(4)], transposed=True)
        cute.arch.fence_proxy("async.shared", space="cta")
        roles.sync_warpgroup(warpgroup)
        if stores:
            cute.copy(atom_o, tOsO[None, tile], tOgO[None, chunk])
            cute.arch.cp_async_bulk_commit_group()

    # --- States ----------------------------------------------------------------------------------------------------

    @cute.jit
    def state_address(self, m, n: Int32, head_v: Int32, column: Int32, thread: Int32, width: cutlass.Constexpr):
        """(address of this thread's first element, bytes from one value column to the next, from one channel)."""
        c = self.config
        if const_expr(c.v_first):
            across, along = Int64(m.stride[2]), Int64(1)
        else:
            across, along = Int64(1), Int64(m.stride[2])
        start = Int64(n) * m.stride[0] + Int64(head_v) * m.stride[1]
        start += (column * SLICE + wgmma.row_in_tile(thread, 0)) * across + thread % 4 * 2 * along
        return m.iterator.toint() + start * width, across * width, along * width

    @cute.jit
    def load_state(self, m, acc_s, n: Int32, head_v: Int32, column: Int32, thread: Int32):
        c = self.config
        address, across, along = self.state_address(m, n, head_v, column, thread, WIDTH[c.initial])
        for i in cutlass.range_constexpr(cute.size(acc_s)):
            at = address + across * (i // 2 % 2 * 8) + along * (i // 4 * 8 + i % 2)
            acc_s[i] = load_number(at, c.initial)

    @cute.jit
    def store_state(self, m, acc_s, n: Int32, head_v: Int32, column: Int32, thread: Int32):
        c = self.config
        address, across, along = self.state_address(m, n, head_v, column, thread, WIDTH[c.final])
        for i in cutlass.range_constexpr(cute.size(acc_s) // 2):
            at = address + across * (i % 2 * 8) + along * (i // 2 * 8)
            if const_expr(c.v_first):
                store_words(at, (as_word(acc_s[2 * i]), as_word(acc_s[2 * i + 1])))
            else:
                store_number(at, acc_s[2 * i])
                store_number(at + along, acc_s[2 * i + 1])


# --- Helpers -------------------------------------------------------------------------------------------------------


def piece_of(acc, p: int):
    """64 columns of an accumulator."""
    return cute.make_tensor(acc.iterator + p * (PIECE // 2), cute.make_layout(PIECE // 2))


def steps_of(operand, p: int):
    """What of a right operand (mma, 1, k / 16) meets piece p."""
    return cute.local_tile(operand, (*operand.shape[:2], PIECE // 16), (0, 0, p))


@cute.jit
def scale_columns(acc, factors):
    for i in cutlass.range_constexpr(cute.size(acc)):
        acc[i] = acc[i] * factors[i // 4 * 2 + i % 2]


def vector_offset(row: int, element: int) -> int:
    """Where an element of a vector lies in its stage, were it thread 0's: rows of 128 bytes, chunks exchanged."""
    at = row * 4 * CHUNK + 4 * element
    line = at // ROW
    return line * ROW + (at % ROW // 16 ^ line) * 16 + at % 16


def store_number(address, x) -> None:
    ptx("st.global.f32 [{$r0}], {$r1};", read_only_args=[address, x])


def build(config: ChunkConfig):
    """(host function, stand-in arguments) for the compiler."""
    c = config
    dtype = ELEMENT[c.dtype]
    total, heads, heads_v, entries = (cute.sym_int32() for _ in range(4))

    def rows(heads, size):
        stride = (cute.sym_int64(divisibility=8), cute.sym_int64(divisibility=8), 1)
        return cute.runtime.make_fake_tensor(dtype, (total, heads, size), stride=stride, assumed_align=16)

    def part(element, rows, columns):
        shape, stride = (entries, rows, columns), (rows * columns, columns, 1)
        return cute.runtime.make_fake_tensor(element, shape, stride=stride, assumed_align=128)

    def state(name):
        if name is None:
            return rows(cute.sym_int32(), c.head_dim_v)
        inner = (c.head_dim_v, c.head_dim) if c.v_first else (c.head_dim, c.head_dim_v)
        stride = (*(cute.sym_int64(divisibility=4) for _ in range(3)), 1)
        shape = (cute.sym_int32(), heads_v, *inner)
        return cute.runtime.make_fake_tensor(ELEMENT[name], shape, stride=stride, assumed_align=16)

    sequences = cute.runtime.make_fake_tensor(
        Int32, (cute.sym_int32(), TABLE_COLUMNS), stride=(TABLE_COLUMNS, 1), assumed_align=16
    )
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    tensors = (
        rows(heads, c.head_dim), rows(heads, c.head_dim),
        part(dtype, CHUNK, c.head_dim), part(dtype, CHUNK, c.head_dim_v), part(dtype, CHUNK, CHUNK),
        part(Float32, VECTORS, CHUNK), state(c.initial), state(c.final), sequences, rows(heads_v, c.head_dim_v),
    )  # fmt: skip
    return Scan(config).launch, (*tensors, stream)
