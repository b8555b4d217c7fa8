"""Gated delta rule in chunks, sm_90a: what of a chunk does not depend on the state before it. See `sm90_fwd`.

A CTA of one warpgroup has a chunk of one query/key head. K K^T and Q K^T are made once and stay in registers; then, for
every value head of the group: gate, L, T = (I + L)^-1, P, W and U.

Warp w has rows 16 w .. 16 w + 15 of every 64 x 64 matrix, four blocks of 16 columns. exp(b_t - b_i) is a factor of the
row, one of the column and one of the pair of blocks, all at most 1, and only inside a block on the diagonal an
exponential of its own. With D_j the inverse of the j-th diagonal block of I + L, found by forward substitution in fp32,
block row w of the inverse follows from right to left by

    T_ww = D_w,   T_wj = sum over j < l <= w of T_wl N_lj,   N_lj = -L_lj D_j

so that T has the accumulators' order, which is that of a left operand, and blocks L_lj and N_lj, which are right
operands, are exchanged in the order in which a lane holds them. These products have pairs of bf16 numbers as operands,
whose sum has 16 bits, and leave out the product of the lower halves.
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr

from ..blocks import tma, warp_mma, wgmma
from ..blocks.dtypes import WIDTH
from ..blocks.words import ELEMENT, LOG2_E, as_float, exp, load_number
from . import chunk_table
from .any_recurrent import L2NORM_EPS, softplus
from .chunk_config import CHUNK, TABLE_COLUMNS, VECTORS, ChunkConfig

THREADS = 128
BLOCK = 16
BLOCKS = CHUNK // BLOCK
ATOM = 64  #: columns of 16-bit elements in a row of 128 bytes, the unit of swizzled tiles
ATOM_BYTES = CHUNK * ATOM * 2
#: Below, a decay in log2 is as good as 0 and would cost the sums in a block their digits.
FLOOR = -150.0
PITCH = 20  #: fp32 numbers from row to row of a diagonal block: reads of rows and of columns meet few conflicts
SQUARE_BYTES = BLOCK * PITCH * 4
PAIR_BYTES = 1024  #: a block as pairs of 16-bit numbers
#: Rows of 64 numbers: of a value head; two heads are worked out at once. Then those of the query/key head.
LOCAL, ROW, COLUMN, OF_W, OF_U = range(5)
HEAD_ROWS = 5
RK, RQ = 2 * HEAD_ROWS, 2 * HEAD_ROWS + 1
ROWS = 2 * HEAD_ROWS + 2
ptx = cute.arch.inline_ptx


class Prep:
    """Traceable host function for one configuration; see `launch`. What it does without is given any tensor."""

    def __init__(self, config: ChunkConfig) -> None:
        self.config = config
        self.dtype = wgmma.DTYPES[config.dtype]
        self.width = 128 if config.head_dim_v % 128 == 0 else 64  #: value columns that are loaded at once
        self.slices = config.head_dim_v // self.width
        self.stages = 2 if self.slices > 1 and config.head_dim <= 128 else 1  # of V; two CTAs an SM must fit

    def layouts(self):
        """Shared memory of K and Q, of V, and of P."""
        return (
            wgmma.smem_layout(self.dtype, CHUNK, self.config.head_dim),
            wgmma.smem_layout(self.dtype, CHUNK, self.width, self.stages),
            wgmma.smem_layout(self.dtype, CHUNK, CHUNK),
        )

    @cute.jit
    def launch(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mG: cute.Tensor,
        mBeta: cute.Tensor,
        mA: cute.Tensor,
        mBias: cute.Tensor,
        mTable: cute.Tensor,
        mW: cute.Tensor,
        mU: cute.Tensor,
        mP: cute.Tensor,
        mVec: cute.Tensor,
        scale: Float32,
        stream: cuda.CUstream,
    ):
        """q, k (total, H, K), v (total, HV, V), g, beta (total, HV), A_log, dt_bias (HV), the table of chunks
        (slots, 4); writes W (slots * HV, 64, K), U (.., 64, V), P (.., 64, 64), vectors (.., 3, 64)."""
        c = self.config
        heads, group = mQ.shape[1], mV.shape[1] // mQ.shape[1]
        mQ, mK, mV = [
            tma.segmented(cute.make_tensor(t.iterator, cute.select(t.layout, mode=[0, 2, 1]))) for t in (mQ, mK, mV)
        ]
        mW, mU, mP = [cute.make_tensor(t.iterator, cute.select(t.layout, mode=[1, 2, 0])) for t in (mW, mU, mP)]
        layout_k, layout_v, layout_p = self.layouts()
        slice_v = wgmma.one_stage(layout_v)
        atoms = (
            *tma.load_atom(mQ, layout_k, (CHUNK, c.head_dim)),
            *tma.load_atom(mK, layout_k, (CHUNK, c.head_dim)),
            *tma.load_atom(mV, slice_v, (CHUNK, self.width)),
            *tma.store_atom(mW, layout_k, (CHUNK, c.head_dim)),
            *tma.store_atom(mU, slice_v, (CHUNK, self.width)),
            *tma.store_atom(mP, layout_p, (CHUNK, CHUNK)),
        )
        self.kernel(*atoms, mG, mBeta, mA, mBias, mTable, mVec, scale, heads, group).launch(
            grid=[mTable.shape[0] * heads, 1, 1],
            block=[THREADS, 1, 1],
            min_blocks_per_mp=3 if c.head_dim <= 128 else 2,
            preferred_smem_carveout=100,
            use_pdl=c.overlap,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self, atom_q, mQ, atom_k, mK, atom_v, mV, atom_w, mW, atom_u, mU, atom_p, mP,
        mG, mBeta, mA, mBias, mTable, mVec, scale: Float32, heads: Int32, group: Int32,
    ):  # fmt: skip
        c = self.config
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(thread // 32)
        layout_k, layout_v, layout_p = self.layouts()

        @cute.struct
        class Storage:
            barriers: cute.struct.MemRange[Int64, 2 + self.stages]
            tiles_k: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(layout_k)], 1024]
            tiles_q: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(layout_k)], 1024]
            tiles_v: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(layout_v)], 1024]
            tile_p: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(layout_p)], 1024]
            pairs: cute.struct.Align[cute.struct.MemRange[Int32, BLOCKS * (BLOCKS - 1) // 2 * PAIR_BYTES // 4], 128]
            squares: cute.struct.Align[cute.struct.MemRange[Float32, BLOCKS * SQUARE_BYTES // 4], 128]
            vectors: cute.struct.Align[cute.struct.MemRange[Float32, ROWS * CHUNK], 128]
            totals: cute.struct.Align[cute.struct.MemRange[Float32, 2 * BLOCKS], 128]

        storage = cutlass.memory.SmemAllocator().allocate(Storage)
        sQ = storage.tiles_q.get_tensor(layout_k.outer, swizzle=layout_k.inner)
        sK = storage.tiles_k.get_tensor(layout_k.outer, swizzle=layout_k.inner)
        sV = storage.tiles_v.get_tensor(layout_v.outer, swizzle=layout_v.inner)
        sP = storage.tile_p.get_tensor(layout_p.outer, swizzle=layout_p.inner)
        bars = storage.barriers.data_ptr()
        places = tuple(
            Int32(x.data_ptr().toint())
            for x in (
                storage.tiles_q, storage.tiles_v, storage.tile_p, storage.pairs, storage.squares, storage.vectors,
                storage.totals,
            )
        )  # fmt: skip
        if const_expr(c.overlap):
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
        slot, head = cta // heads, cta % heads
        end, length, chunk, _ = chunk_table.read(mTable, slot)
        if length > 0:
            if warp == 0:
                with cute.arch.elect_one():
                    for i in cutlass.range_constexpr(2 + self.stages):
                        cute.arch.mbarrier_init(bars + i, 1)
                cute.arch.mbarrier_init_fence()
            cute.arch.barrier()
            gQ = cute.local_tile(tma.segment(mQ, head, end, length), (CHUNK, c.head_dim), (None, 0))
            gK = cute.local_tile(tma.segment(mK, head, end, length), (CHUNK, c.head_dim), (None, 0))
            first = head * group
            entry = slot * (heads * group) + first
            loads = (atom_v, mV, sV, bars, first, end, length, chunk, group)
            if warp == 0:
                load(atom_k, sK, gK, chunk, bars)
                load(atom_q, sQ, gQ, chunk, bars + 1)
                for n in cutlass.range_constexpr(self.stages):
                    self.load_v(loads, Int32(n))
            rows = cutlass.min(length - chunk * CHUNK, CHUNK)
            gates = (mG, mBeta, mA, mBias, first, group, end - length + chunk * CHUNK, rows)
            stores = (atom_w, mW, sQ, atom_u, mU, sV, atom_p, mP, sP)
            self.chunk(sQ, sK, sV, bars, places, loads, gates, stores, mVec, entry, scale, thread, warp)

    @cute.jit
    def load_v(self, loads, number: Int32):
        """Slice number % slices of value head number // slices, if there is one."""
        atom, mV, sV, bars, first, end, length, chunk, group = loads
        if number < group * self.slices:
            stage = number % self.stages
            head = first + number // self.slices
            gV = cute.local_tile(tma.segment(mV, head, end, length), (CHUNK, self.width), (chunk, None))
            tVsV, tVgV = tma.partition(atom, sV, gV)
            bar = bars + (2 + stage)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(bar, 2 * CHUNK * self.width)
            cute.copy(atom, tVgV[None, number % self.slices], tVsV[None, stage], tma_bar_ptr=bar)

    @cute.jit
    def chunk(self, sQ, sK, sV, bars, places, loads, gates, stores, mVec, entry: Int32, scale, thread: Int32, warp):
        c = self.config
        tile_q, tile_v, tile_p, pairs, squares, vectors, totals = places
        group = gates[5]
        lane = thread % 32
        # Of the 16 x 16 blocks of a tile, by ldmatrix and stmatrix: the lane's row and chunk of 16 bytes.
        place = warp * (BLOCK * 2 * ATOM) + lane % BLOCK * (2 * ATOM) + ((lane // BLOCK ^ lane % 8) << 4)
        square = squares + warp * SQUARE_BYTES
        self.gate(gates, thread, Int32(0), vectors, totals)
        zero = warp_mma.anew(Int32(0))
        for column in cutlass.range_constexpr(0, CHUNK, BLOCK):
            store_matrices(warp_mma.flipped(tile_p + place, 2 * column), [zero] * 4)

        mma = wgmma.product(self.dtype, CHUNK)
        kk, qk = wgmma.accumulator(mma, CHUNK), wgmma.accumulator(mma, CHUNK)
        rQ, rK = wgmma.a_operand(mma, sQ), wgmma.b_operand(mma, sK)
        # No branch, and so no wait for a barrier, while a product is in flight: the assembler would wait after each.
        cute.arch.mbarrier_wait(bars, 0)
        cute.arch.mbarrier_wait(bars + 1, 0)
        wgmma.issue(mma, kk, wgmma.a_operand(mma, sK), rK, False)
        wgmma.issue(mma, qk, rQ, rK, False)
        squared = cute.make_rmem_tensor((8,), Float32)
        squared.fill(0.0)
        if const_expr(c.l2norm):
            for step in cutlass.range_constexpr(c.head_dim // BLOCK):
                address, offset = tile_q + place, step // 4 * ATOM_BYTES
                a = warp_mma.load_matrices(warp_mma.flipped(address, step % 4 * 2 * BLOCK), offset)
                warp_mma.multiply(c.dtype, squared, 0, a, a[0], a[2])
                warp_mma.multiply(c.dtype, squared, 8, a, a[1], a[3])
        wgmma.wait(0)
        self.norms(kk, squared, vectors, scale, lane, warp)

        mma_t = wgmma.product(self.dtype, ATOM, b_rows_contiguous=True, a_in_registers=True)
        for j in cutlass.range(group, unroll=1):
            if j % 2 == 0:
                cute.arch.barrier()
                self.factors(gates, thread, j, vectors, totals, mVec, entry)
            cute.arch.barrier()
            here = vectors + j % 2 * (HEAD_ROWS * CHUNK * 4)
            sums = totals + j % 2 * (BLOCKS * 4)
            if warp == 0:
                self.lower(0, kk, qk, here, vectors, sums, square, pairs, tile_p + place, lane)
            elif warp == 1:
                self.lower(1, kk, qk, here, vectors, sums, square, pairs, tile_p + place, lane)
            elif warp == 2:
                self.lower(2, kk, qk, here, vectors, sums, square, pairs, tile_p + place, lane)
            else:
                self.lower(3, kk, qk, here, vectors, sums, square, pairs, tile_p + place, lane)
            self.substitute(square, lane)
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.barrier()
            if warp == 0:
                store(stores[6], stores[8], cute.local_tile(stores[7][None, None, entry + j], (CHUNK, CHUNK), (0, 0)))
                self.right_factors(0, square, pairs, lane)
            elif warp == 1:
                self.right_factors(1, square, pairs, lane)
            elif warp == 2:
                self.right_factors(2, square, pairs, lane)
            cute.arch.barrier()
            rW, rU = wgmma.a_registers(mma_t, CHUNK), wgmma.a_registers(mma_t, CHUNK)
            words = (words_of(rW), words_of(rU))
            if warp == 0:
                self.inverse_rows(0, words, here, square, pairs, lane)
            elif warp == 1:
                self.inverse_rows(1, words, here, square, pairs, lane)
            elif warp == 2:
                self.inverse_rows(2, words, here, square, pairs, lane)
            else:
                self.inverse_rows(3, words, here, square, pairs, lane)
            for i in cutlass.range_constexpr(c.head_dim // ATOM):
                store_tile(tile_q + place + i * ATOM_BYTES, self.times(mma_t, rW, sK, i))
            for s in cutlass.range_constexpr(self.slices):
                number = j * self.slices + s
                stage = number % self.stages
                cute.arch.mbarrier_wait(bars + (2 + stage), number // self.stages % 2)
                tile = tile_v + place + stage * (2 * CHUNK * self.width)
                for i in cutlass.range_constexpr(self.width // ATOM):
                    new = self.times(mma_t, rU, sV[None, None, stage], i)
                    cute.arch.barrier()  # these columns of V have been read; U takes their place
                    store_tile(tile + i * ATOM_BYTES, new)
                cute.arch.fence_proxy("async.shared", space="cta")
                cute.arch.barrier()
                if warp == 0:
                    if const_expr(s == 0):
                        gW = cute.local_tile(stores[1][None, None, entry + j], (CHUNK, c.head_dim), (0, 0))
                        store(stores[0], stores[2], gW)
                    gU = cute.local_tile(stores[4][None, None, entry + j], (CHUNK, self.width), (0, s))
                    store(stores[3], stores[5][None, None, stage], gU)
                    cute.arch.cp_async_bulk_wait_group(0, read=True)
                    self.load_v(loads, number + self.stages)
            if j % 2 == 1 and j + 1 < group:
                self.gate(gates, thread, j + 1, vectors, totals)

    # --- Gates and norms -------------------------------------------------------------------------------------------

    @cute.jit
    def gate(self, gates, thread: Int32, j: Int32, vectors: Int32, totals: Int32):
        """What of the gate needs no key, of value head j of the group and, for threads from 64 on, the next: the sum of
        the log2 decays of the token's block of 16 up to the token, that of each block, and beta."""
        c = self.config
        mG, mBeta, mA, mBias, first, group, row, rows = gates
        token, which = thread % CHUNK, thread // CHUNK
        head = first + cutlass.min(j + which, group - 1)
        g, beta = Float32(0.0), Float32(0.0)
        if token < rows:
            at = Int64(row + token) * mG.stride[0] + Int64(head) * mG.stride[1]
            g = load_number(mG.iterator.toint() + at * WIDTH[c.g_dtype], c.g_dtype)
            at = Int64(row + token) * mBeta.stride[0] + Int64(head) * mBeta.stride[1]
            beta = load_number(mBeta.iterator.toint() + at * WIDTH[c.beta_dtype], c.beta_dtype)
            if const_expr(c.a_dtype is not None):
                rate = exp(load_number(mA.iterator.toint() + Int64(head) * WIDTH[c.a_dtype], c.a_dtype))
                if const_expr(c.bias_dtype is not None):
                    g += load_number(mBias.iterator.toint() + Int64(head) * WIDTH[c.bias_dtype], c.bias_dtype)
                g = -rate * softplus(g)
            g = g * LOG2_E
            g = Float32(FLOOR) if g < FLOOR else g  # a comparison, which keeps a NaN
            if const_expr(c.beta != "plain"):
                beta = (2.0 if const_expr(c.beta == "twice_sigmoid") else 1.0) / (1.0 + exp(-beta))
        lane = thread % 32
        for i in cutlass.range_constexpr(4):
            before = cute.arch.shuffle_sync(g, cutlass.max(lane - (1 << i), 0))
            if lane % BLOCK >= 1 << i:
                g += before
        if lane % BLOCK == BLOCK - 1:
            store_float(totals + thread // BLOCK * 4, g)
        to = vectors + (which * (HEAD_ROWS * CHUNK) + token) * 4
        store_float(to + LOCAL * CHUNK * 4, g)
        store_float(to + OF_U * CHUNK * 4, beta)

    @cute.jit
    def factors(self, gates, thread: Int32, j: Int32, vectors: Int32, totals: Int32, mVec, entry: Int32):
        """What the products of a token of two value heads are scaled with, here and in the scan."""
        token, which = thread % CHUNK, thread // CHUNK
        to = vectors + (which * (HEAD_ROWS * CHUNK) + token) * 4
        (local,) = load_floats(to + LOCAL * CHUNK * 4, 1)
        (beta,) = load_floats(to + OF_U * CHUNK * 4, 1)
        sums = load_floats(totals + which * (BLOCKS * 4), BLOCKS)
        before, behind, total, block = Float32(0.0), Float32(0.0), sums[0], token // BLOCK
        for i in cutlass.range_constexpr(BLOCKS):
            if i < block:
                before += sums[i]
            if i == block:
                total = sums[i]
            if i > block:
                behind += sums[i]
        (rk,) = load_floats(vectors + (RK * CHUNK + token) * 4, 1)
        (rq,) = load_floats(vectors + (RQ * CHUNK + token) * 4, 1)
        gamma = exp2(local + before)
        last = exp2((sums[0] + sums[1]) + (sums[2] + sums[3]))
        store_float(to + ROW * CHUNK * 4, beta * rk)
        store_float(to + COLUMN * CHUNK * 4, exp2(total - local) * rk)
        store_float(to + OF_W * CHUNK * 4, -beta * gamma * rk)
        if j + which < gates[5]:
            address = mVec.iterator.toint() + (Int64(entry + j + which) * (VECTORS * CHUNK) + token) * 4
            for i, x in enumerate((rq * gamma, exp2(total - local + behind) * rk, last)):
                ptx("st.global.f32 [{$r0}], {$r1};", read_only_args=[address + i * CHUNK * 4, x])

    @cute.jit
    def norms(self, kk, squared, vectors: Int32, scale, lane: Int32, warp):
        """Reciprocal norms of the keys, from the diagonal of K K^T, and of the queries, with the scale."""
        rk, rq = cute.make_rmem_tensor((2,), Float32), cute.make_rmem_tensor((2,), Float32)
        rk.fill(1.0)
        rq.fill(1.0)
        if const_expr(self.config.l2norm):
            odd = lane // 4 % 2 == 1
            for w in cutlass.range_constexpr(BLOCKS):
                if warp == w:
                    for r in cutlass.range_constexpr(2):
                        i = 2 * r + 4 * (2 * w + r)
                        rk[r] = kk[i + 1] if odd else kk[i]
            for r in cutlass.range_constexpr(2):
                rk[r] = cute.math.rsqrt(rk[r] + L2NORM_EPS)
                rq[r] = squared[6 * r + 1] if odd else squared[6 * r]
                rq[r] = cute.math.rsqrt(rq[r] + L2NORM_EPS)
        if lane // 8 == lane % 4:
            for r in cutlass.range_constexpr(2):
                row = vectors + (warp * BLOCK + lane // 4 + 8 * r) * 4
                store_float(row + RK * CHUNK * 4, rk[r])
                store_float(row + RQ * CHUNK * 4, rq[r] * scale)

    # --- The inverse -----------------------------------------------------------------------------------------------

    def lower(self, w: cutlass.Constexpr, kk, qk, here: Int32, vectors: Int32, sums, square, pairs, tile: Int32, lane):
        """Rows of warp w of P, into its tile, and of L: its diagonal block as fp32, blocks left of it as pairs."""
        c = self.config
        row = (w * BLOCK + lane // 4) * 4
        column = lane % 4 * 8
        local, of_l, of_p = [], [], []
        for r in range(2):
            local += load_floats(here + row + (LOCAL * CHUNK + 8 * r) * 4, 1)
            of_l += load_floats(here + row + (ROW * CHUNK + 8 * r) * 4, 1)
            of_p += load_floats(vectors + row + (RQ * CHUNK + 8 * r) * 4, 1)
        total = load_floats(sums, BLOCKS)
        reach = [exp2(x) for x in local]
        between = Float32(0.0)
        for cb in range(w - 1, -1, -1):
            if cb < w - 1:
                between = between + total[cb + 1]
            decay = [x * exp2(between) for x in reach] if cb < w - 1 else reach
            row_l, row_p = [decay[r] * of_l[r] for r in range(2)], [decay[r] * of_p[r] for r in range(2)]
            block_l, block_p = [], []
            for half in range(2):
                x = load_floats(here + column + (COLUMN * CHUNK + BLOCK * cb + 8 * half) * 4, 2)
                for r in range(2):
                    for a in range(2):
                        i = a + 2 * r + 4 * (2 * cb + half)
                        block_l.append(kk[i] * (row_l[r] * x[a]))
                        block_p.append(qk[i] * (row_p[r] * x[a]))
            store_pairs(pairs + slot_of(w, cb) + lane * 16, block_l)
            store_block(tile, cb, block_p, c.dtype)
        block_p = []
        for half in range(2):
            x = load_floats(here + column + (LOCAL * CHUNK + BLOCK * w + 8 * half) * 4, 2)
            rk = load_floats(vectors + column + (RK * CHUNK + BLOCK * w + 8 * half) * 4, 2)
            for r in range(2):
                found = []
                for a in range(2):
                    i = a + 2 * r + 4 * (2 * w + half)
                    behind = lane // 4 + 8 * r - (lane % 4 * 2 + a + 8 * half)
                    decay = exp2(local[r] - x[a]) * rk[a]
                    found.append(select(behind > 0, kk[i] * (decay * of_l[r])))
                    block_p.append(select(behind >= 0, qk[i] * (decay * of_p[r])))
                store_floats(square + (lane // 4 + 8 * r) * (PITCH * 4) + column + 32 * half, found)
        store_block(tile, w, block_p, c.dtype)
        cute.arch.sync_warp()

    def substitute(self, square: Int32, lane: Int32):
        """The transposed inverse of I + L in place of the block L: a column of the inverse a lane, twice over."""
        column = lane % BLOCK
        x = []
        for t in range(BLOCK):
            value = select(column == t, Float32(1.0))
            for first in range(0, t, 4):
                numbers = load_floats(square + (t * PITCH + first) * 4, 4)
                for i in range(first, min(first + 4, t)):
                    value = value - numbers[i - first] * x[i]
            x.append(value)
        cute.arch.sync_warp()
        for first in range(0, BLOCK, 4):
            store_floats(square + (column * PITCH + first) * 4, x[first : first + 4])
        cute.arch.sync_warp()

    def right_factors(self, j: cutlass.Constexpr, square: Int32, pairs: Int32, lane: Int32):
        """N_lj of all l in place of L_lj; transposed it is -D_j^T L_lj^T."""
        across = []
        for half in range(2):
            for r in range(2):
                across += load_floats(square + (lane // 4 + 8 * r) * (PITCH * 4) + lane % 4 * 8 + 32 * half, 2)
        a = as_pairs(across)
        for other in range(j + 1, BLOCKS):
            at = pairs + slot_of(other, j) + lane * 16
            acc = [Float32(0.0)] * 8
            multiply_pairs(acc, a, load_pairs(at))
            store_pairs(at, [-x for x in acc])

    def inverse_rows(self, w: cutlass.Constexpr, words, here: Int32, square: Int32, pairs: Int32, lane: Int32):
        """Row w of blocks of T, from the diagonal to the left, its columns scaled for W and for U, as left operands."""
        block = []
        for half in range(2):
            for r in range(2):
                for a in range(2):
                    at = (lane % 4 * 2 + a + 8 * half) * PITCH + lane // 4 + 8 * r
                    block += load_floats(square + at * 4, 1)
        found = {}
        for j in range(BLOCKS - 1, -1, -1):
            if j < w:
                block = [Float32(0.0)] * 8
                for other in range(w, j, -1):
                    multiply_pairs(block, found[other], load_pairs(pairs + slot_of(other, j) + lane * 16))
            if 0 < j <= w:
                found[j] = as_pairs(block)
            for half in range(2):
                for to, which in zip(words, (OF_W, OF_U), strict=True):
                    if j <= w:
                        x = load_floats(here + lane % 4 * 8 + (which * CHUNK + BLOCK * j + 8 * half) * 4, 2)
                    for r in range(2):
                        i = 4 * half + 2 * r
                        word = Uint32(0)
                        if j <= w:
                            word = warp_mma.pack(self.config.dtype, block[i] * x[0], block[i + 1] * x[1])
                        to[4 * j + 2 * half + r] = word

    @cute.jit
    def times(self, mma, a, tile, part: cutlass.Constexpr):
        """a times 64 columns of a tile, rounded, as words. One part at a time: registers for two would be spilled."""
        found = wgmma.accumulator(mma, ATOM)
        columns = cute.local_tile(wgmma.transposed(tile), (ATOM, CHUNK), (part, 0))
        wgmma.issue(mma, found, a, wgmma.b_operand(mma, columns), False)
        wgmma.wait(0)
        return [warp_mma.pack(self.config.dtype, found[i], found[i + 1]) for i in range(0, ATOM // 2, 2)]


@cute.jit
def load(atom, smem: cute.Tensor, gmem: cute.Tensor, index: Int32, bar):
    """Tile `index` of (rows, columns, tile) into shared memory; executed by a warp."""
    shape = (*smem.shape, 1)
    staged = cute.make_tensor(smem.iterator, cute.append(smem.layout, cute.make_layout(1)))
    to, of = tma.partition(atom, staged, gmem)
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(bar, 2 * cute.size(shape))
    cute.copy(atom, of[None, index], to[None, 0], tma_bar_ptr=bar)


@cute.jit
def store(atom, smem: cute.Tensor, gmem: cute.Tensor):
    """A tile of shared memory to memory, a group of its own; executed by a warp."""
    of, to = tma.partition(atom, smem, gmem)
    cute.copy(atom, of, to)
    cute.arch.cp_async_bulk_commit_group()


# --- Numbers ---------------------------------------------------------------------------------------------------------


def slot_of(row: int, column: int) -> int:
    """Offset of a block below the diagonal among the pairs."""
    return (row * (row - 1) // 2 + column) * PAIR_BYTES


def words_of(registers: cute.Tensor) -> cute.Tensor:
    """16-bit registers as words."""
    return cute.make_tensor(
        cute.recast_ptr(registers.iterator, dtype=Uint32), cute.make_layout(cute.size(registers) // 2)
    )


def select(condition, value):
    """The value, or zero."""
    return ptx(
        "selp.f32 {$w0}, {$r0}, 0f00000000, {$r1};", write_only_types=[Float32], read_only_args=[value, condition]
    )


def exp2(x):
    return ptx("ex2.approx.ftz.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x])


def load_floats(address, count: int) -> list:
    """1, 2 or 4 fp32 numbers of shared memory."""
    return _load(address, count, "f32", Float32)


def _load(address, count: int, kind: str, dtype) -> list:
    names = ", ".join(f"{{$w{i}}}" for i in range(count))
    vector, target = (f".v{count}", f"{{{names}}}") if count > 1 else ("", names)
    found = ptx(
        f"ld.shared{vector}.{kind} {target}, [{{$r0}}];", write_only_types=[dtype] * count, read_only_args=[address]
    )
    return list(found) if count > 1 else [found]


def store_float(address, x) -> None:
    ptx("st.shared.f32 [{$r0}], {$r1};", read_only_args=[address, x])


def store_floats(address, numbers, kind: str = "f32") -> None:
    """2 or 4 neighbouring numbers to shared memory."""
    names = ", ".join(f"{{$r{i + 1}}}" for i in range(len(numbers)))
    ptx(f"st.shared.v{len(numbers)}.{kind} [{{$r0}}], {{{names}}};", read_only_args=[address, *numbers])


def store_matrices(address, words, transposed: bool = False) -> None:
    """Four 8x8 matrices of 16-bit elements; lane i has the address of row i % 8 of matrix i / 8."""
    how = ".trans" if transposed else ""
    ptx(
        f"stmatrix.sync.aligned.m8n8.x4{how}.shared.b16 [{{$r0}}], {{{{$r1}}, {{$r2}}, {{$r3}}, {{$r4}}}};",
        read_only_args=[address, *words],
    )


def store_block(tile, column: int, numbers, dtype: str) -> None:
    """The 8 numbers of a lane of a 16 x 16 block, block `column` of 64 columns, rounded."""
    words = [warp_mma.pack(dtype, numbers[i], numbers[i + 1]) for i in (0, 2, 4, 6)]
    store_matrices(warp_mma.flipped(tile, 2 * BLOCK * column), words)


def store_tile(tile, words) -> None:
    """64 columns of a warp's 16 rows."""
    for block in range(BLOCKS):
        store_matrices(warp_mma.flipped(tile, 2 * BLOCK * block), words[4 * block : 4 * block + 4])


def as_pairs(numbers) -> tuple:
    """(upper, lower) halves of 8 numbers as bf16 operands of four registers each."""
    upper, lower = [], []
    for i in (0, 2, 4, 6):
        word = warp_mma.pack("bfloat16", numbers[i], numbers[i + 1])
        rest = [numbers[i] - as_float(word << Uint32(16)), numbers[i + 1] - as_float(word & Uint32(0xFFFF0000))]
        upper.append(word)
        lower.append(warp_mma.pack("bfloat16", *rest))
    return upper, lower


def store_pairs(address, numbers) -> None:
    upper, lower = as_pairs(numbers)
    store_floats(address, upper, "b32")
    store_floats(address + PAIR_BYTES // 2, lower, "b32")


def load_pairs(address) -> tuple:
    return _load(address, 4, "b32", Uint32), _load(address + PAIR_BYTES // 2, 4, "b32", Uint32)


def multiply_pairs(acc, a, b) -> None:
    """acc += a @ b of 16 x 16 blocks, b given as its transpose is held."""
    for x, y in ((0, 1), (1, 0), (0, 0)):
        for half in range(2):
            warp_mma.multiply("bfloat16", acc, 8 * half, a[x], b[y][half], b[y][half + 2])


def build(config: ChunkConfig):
    """(host function, stand-in arguments) for the compiler."""
    c = config
    total, heads, heads_v, slots, entries = (cute.sym_int32() for _ in range(5))

    def rows(n, size):
        stride = (cute.sym_int64(divisibility=8), cute.sym_int64(divisibility=8), 1)
        return cute.runtime.make_fake_tensor(ELEMENT[c.dtype], (total, n, size), stride=stride, assumed_align=16)

    def per_head(dtype: str):
        stride = (cute.sym_int64(), cute.sym_int64())
        return cute.runtime.make_fake_tensor(
            ELEMENT[dtype], (total, heads_v), stride=stride, assumed_align=WIDTH[dtype]
        )

    def parameter(dtype: str | None):
        if dtype is None:
            return rows(heads_v, c.head_dim_v)
        return cute.runtime.make_fake_tensor(ELEMENT[dtype], (heads_v,), stride=(1,), assumed_align=WIDTH[dtype])

    def entry(dtype, *inner: int):
        stride = (inner[0] * inner[1], inner[1], 1)
        return cute.runtime.make_fake_tensor(dtype, (entries, *inner), stride=stride, assumed_align=128)

    table = cute.runtime.make_fake_tensor(Int32, (slots, TABLE_COLUMNS), stride=(TABLE_COLUMNS, 1), assumed_align=16)
    dtype = ELEMENT[c.dtype]
    tensors = (
        rows(heads, c.head_dim), rows(heads, c.head_dim), rows(heads_v, c.head_dim_v),
        per_head(c.g_dtype), per_head(c.beta_dtype), parameter(c.a_dtype), parameter(c.bias_dtype), table,
        entry(dtype, CHUNK, c.head_dim), entry(dtype, CHUNK, c.head_dim_v), entry(dtype, CHUNK, CHUNK),
        entry(Float32, VECTORS, CHUNK),
    )  # fmt: skip
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    return Prep(c).launch, (*tensors, Float32(1.0), stream)
