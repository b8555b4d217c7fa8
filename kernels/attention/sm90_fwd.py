"""Attention forward for sm_90a: FlashAttention-3's schedule (Shah et al., arXiv 2407.08608).

A CTA has one producer warp and two or three consumer warpgroups of 64 queries each. The producer fills one ring of k
and one of v; a consumer issues S = q @ k.T of the next step before O += P @ v of this one, so that the softmax runs
under a product; warpgroups take turns, so that one's softmax also runs under the other's products. P is in registers.

A query i sees the keys from i + offset - left to i + offset + right, where offset is 0 (a diagonal from the top left)
or seqlen_k - seqlen_q (to the bottom right). Steps are taken from the last one seen to the first, in three loops: those
that the upper bound or the end of the keys cuts, those that nothing cuts, those that the lower bound cuts.

With a mask, steps are the entries of lists that `any_classify.py` makes of it: the partial tiles of a block of queries
first, each with a bit a score, then the full ones without any mask code. Tiles that nobody sees are in no list.

Packed sequences (varlen) have a table of their blocks, see `sequence_blocks.py`. A sequence is a segment to the copy
engine: what lies behind its end is read as zero, whatever it is, and never written.
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr

from ..blocks import pipeline, roles, scheduler, softmax, tma, wgmma
from . import any_classify, sequence_blocks
from .config import ROWS, FwdConfig
from .mask_config import TILE
from .sequence_table import PITCH

LOG2_E = 1.4426950408889634
L2_BYTES = 32 * 1024 * 1024  #: of keys and values that may be in use together


class AttentionForward:
    """Traceable host function `(q, k, v, out, [lse], scale, offset, left, right, ctas, stream)`.

    q (batch, heads_q, seqlen_q, head_dim), k and v (batch, heads_kv, seqlen_k, ...), out as q with head_dim_v, any
    strides; lse (batch, heads_q, seqlen_q) fp32. Lengths are at least 1. At most `ctas` CTAs share the tiles.
    Kind "mask" also takes what `any_classify.py` says of it after out or lse: counts (batch, heads_q, blocks, 2), lists
    (batch, heads_q, blocks, tiles) and bits (batch, heads_q, blocks, tiles, 128, 4), and no offset, left and right.
    With `varlen` q is (total_q, heads_q, head_dim), k and v (total_k, heads_kv, ...), out as q, lse (heads_q, total_q);
    then come cu_seqlens_q and _k (batch + 1), used lengths of q and of k and `used`, see `sequence_blocks.fill`, the
    table (total_q // tile_m + batch, 8), and for offset 1 if the diagonal ends at the bottom right, else 0.
    """

    def __init__(self, config: FwdConfig) -> None:
        self.config = config
        self.dtype = wgmma.DTYPES[config.dtype]

    def layouts(self):
        """Shared memory of q, k, v and out: (rows, columns, warpgroup and stage)."""
        c = self.config
        return (
            wgmma.smem_layout(self.dtype, ROWS, c.padded, c.warpgroups * c.q_stages),
            wgmma.smem_layout(self.dtype, c.tile_n, c.padded, c.stages),
            wgmma.smem_layout(self.dtype, c.tile_n, c.padded_v, c.stages),
            wgmma.smem_layout(self.dtype, ROWS, c.padded_v, c.warpgroups),
        )

    @cute.jit
    def with_lse(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mO: cute.Tensor,
        mLSE: cute.Tensor,
        scale: Float32,
        offset: Int32,
        left: Int32,
        right: Int32,
        ctas: Int32,
        stream: cuda.CUstream,
    ):
        self.launch(mQ, mK, mV, mO, mLSE, scale, offset, left, right, ctas, stream)

    @cute.jit
    def without_lse(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mO: cute.Tensor,
        scale: Float32,
        offset: Int32,
        left: Int32,
        right: Int32,
        ctas: Int32,
        stream: cuda.CUstream,
    ):
        self.launch(mQ, mK, mV, mO, None, scale, offset, left, right, ctas, stream)

    @cute.jit
    def masked_with_lse(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mO: cute.Tensor,
        mLSE: cute.Tensor,
        mCounts: cute.Tensor,
        mLists: cute.Tensor,
        mBits: cute.Tensor,
        scale: Float32,
        ctas: Int32,
        stream: cuda.CUstream,
    ):
        zero = Int32(0)
        self.launch(mQ, mK, mV, mO, mLSE, scale, zero, zero, zero, ctas, stream, (mCounts, mLists, mBits))

    @cute.jit
    def masked_without_lse(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mO: cute.Tensor,
        mCounts: cute.Tensor,
        mLists: cute.Tensor,
        mBits: cute.Tensor,
        scale: Float32,
        ctas: Int32,
        stream: cuda.CUstream,
    ):
        zero = Int32(0)
        self.launch(mQ, mK, mV, mO, None, scale, zero, zero, zero, ctas, stream, (mCounts, mLists, mBits))

    @cute.jit
    def packed_with_lse(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mO: cute.Tensor,
        mLSE: cute.Tensor,
        mCuQ: cute.Tensor,
        mCuK: cute.Tensor,
        mUsedQ: cute.Tensor,
        mUsedK: cute.Tensor,
        mTable: cute.Tensor,
        used: Int32,
        scale: Float32,
        bottom_right: Int32,
        left: Int32,
        right: Int32,
        ctas: Int32,
        stream: cuda.CUstream,
    ):
        lengths = (mCuQ, mCuK, mUsedQ, mUsedK, used, mTable)
        self.launch_packed(mQ, mK, mV, mO, mLSE, lengths, scale, bottom_right, left, right, ctas, stream)

    @cute.jit
    def packed_without_lse(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mO: cute.Tensor,
        mCuQ: cute.Tensor,
        mCuK: cute.Tensor,
        mUsedQ: cute.Tensor,
        mUsedK: cute.Tensor,
        mTable: cute.Tensor,
        used: Int32,
        scale: Float32,
        bottom_right: Int32,
        left: Int32,
        right: Int32,
        ctas: Int32,
        stream: cuda.CUstream,
    ):
        lengths = (mCuQ, mCuK, mUsedQ, mUsedK, used, mTable)
        self.launch_packed(mQ, mK, mV, mO, None, lengths, scale, bottom_right, left, right, ctas, stream)

    @cute.jit
    def launch_packed(self, mQ, mK, mV, mO, mLSE, lengths, scale, bottom_right, left, right, ctas, stream):
        c = self.config
        mCuQ, mTable = lengths[0], lengths[5]
        sequence_blocks.fill(*lengths, c.tile_m).launch(
            grid=[mCuQ.shape[0] - 1, 1, 1], block=[sequence_blocks.WARP, 1, 1], stream=stream
        )
        mQ, mK, mV, mO = [
            tma.segmented(cute.make_tensor(t.iterator, cute.select(t.layout, mode=[0, 2, 1]))) for t in (mQ, mK, mV, mO)
        ]
        tiles = mTable.shape[0] * mQ.shape[2]
        heads, group = [cute.fast_divmod_create_divisor_v2(n) for n in (mQ.shape[2], mQ.shape[2] // mK.shape[2])]
        self.kernel(
            *self.atoms(mQ, mK, mV, mO), mLSE, None, None, None, mTable,
            scale * LOG2_E, bottom_right, left, right, tiles, None, heads, group, None, None, None,
        ).launch(
            grid=[cutlass.min(tiles, ctas), 1, 1],
            block=[roles.threads(c.warpgroups), 1, 1],
            min_blocks_per_mp=1,
            stream=stream,
        )  # fmt: skip

    @cute.jit
    def atoms(self, mQ, mK, mV, mO):
        """Of q, k, v and out: the copy atom, and the tensor of coordinates to copy from or to."""
        c = self.config
        layout_q, layout_k, layout_v, layout_o = self.layouts()
        atom_q, tQ = tma.load_atom(mQ, wgmma.one_stage(layout_q), (ROWS, c.padded))
        atom_k, tK = tma.load_atom(mK, wgmma.one_stage(layout_k), (c.tile_n, c.padded))
        atom_v, tV = tma.load_atom(mV, wgmma.one_stage(layout_v), (c.tile_n, c.padded_v))
        atom_o, tO = tma.store_atom(mO, wgmma.one_stage(layout_o), (ROWS, c.padded_v))
        return atom_q, tQ, atom_k, tK, atom_v, tV, atom_o, tO

    @cute.jit
    def launch(self, mQ, mK, mV, mO, mLSE, scale, offset, left, right, ctas, stream, lists=(None, None, None)):
        c = self.config
        # (seqlen, head_dim, heads, batch): a tile is the first two modes.
        mQ, mK, mV, mO = [
            cute.make_tensor(t.iterator, cute.select(t.layout, mode=[2, 3, 1, 0])) for t in (mQ, mK, mV, mO)
        ]
        blocks = cute.ceil_div(mQ.shape[0], c.tile_m)
        heads = mQ.shape[2] * mQ.shape[3]
        group = mQ.shape[2] // mK.shape[2]
        head_bytes = cutlass.Int64(mK.shape[0]) * (2 * (c.padded + c.padded_v))
        units = heads // group
        sections = cutlass.min(units, cute.ceil_div(units, cutlass.max(Int32(L2_BYTES // head_bytes), 1)))
        divisors = [
            cute.fast_divmod_create_divisor_v2(n) for n in (blocks, mQ.shape[2], group, units, sections, group * blocks)
        ]
        self.kernel(
            *self.atoms(mQ, mK, mV, mO), mLSE, *lists, None,
            scale * LOG2_E, offset, left, right, blocks * heads, *divisors,
        ).launch(
            grid=[cutlass.min(blocks * heads, ctas), 1, 1],
            block=[roles.threads(c.warpgroups), 1, 1],
            min_blocks_per_mp=1,
            stream=stream,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        atom_q, mQ, atom_k, mK, atom_v, mV, atom_o, mO, mLSE, mCounts, mLists, mBits, mTable,
        scale_log2: Float32,
        offset: Int32,
        left: Int32,
        right: Int32,
        tiles: Int32,
        blocks, heads_q, group, units, sections, unit_tiles,
    ):  # fmt: skip
        c = self.config
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            tma.prefetch(atom_q, atom_k, atom_v, atom_o)
        layout_q, layout_k, layout_v, layout_o = self.layouts()
        size_q, size_o = cute.cosize(layout_q), cute.cosize(layout_o)
        size_qo = max(size_q, size_o)

        @cute.struct
        class Storage:
            barriers_q: pipeline.barrier_storage(c.q_stages)
            barriers_k: pipeline.barrier_storage(c.stages)
            barriers_v: pipeline.barrier_storage(c.stages)
            tiles_q: cute.struct.Align[cute.struct.MemRange[self.dtype, size_q if c.own_out else size_qo], 1024]
            tiles_k: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(layout_k)], 1024]
            tiles_v: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(layout_v)], 1024]
            tiles_o: cute.struct.Align[cute.struct.MemRange[self.dtype, size_o if c.own_out else 0], 1024]

        storage = cutlass.memory.SmemAllocator().allocate(Storage)
        warps = 4 * c.warpgroups
        ring_q = pipeline.ring(storage.barriers_q, c.q_stages, warps, 2 * c.tile_m * c.padded)
        ring_k = pipeline.ring(storage.barriers_k, c.stages, warps, 2 * c.tile_n * c.padded)
        ring_v = pipeline.ring(storage.barriers_v, c.stages, warps, 2 * c.tile_n * c.padded_v)
        pipeline.init_fence()
        sQ = storage.tiles_q.get_tensor(layout_q.outer, swizzle=layout_q.inner)
        sK = storage.tiles_k.get_tensor(layout_k.outer, swizzle=layout_k.inner)
        sV = storage.tiles_v.get_tensor(layout_v.outer, swizzle=layout_v.inner)
        tiles_o = storage.tiles_o if const_expr(c.own_out) else storage.tiles_q
        sO = tiles_o.get_tensor(layout_o.outer, swizzle=layout_o.inner)
        work = (tiles, blocks, heads_q, group, units, sections, unit_tiles)
        limits = (mQ.shape[0], mK.shape[0], offset, left, right)
        if const_expr(c.kind == "mask"):
            limits = (*limits, mCounts)
        if const_expr(c.varlen):
            limits = (None, None, offset, left, right, mTable)
        pipeline.init_wait()

        if warp < 4:
            cute.arch.setmaxregister_decrease(roles.REGISTERS[c.warpgroups][0])
            if warp == 0:
                if const_expr(c.kind == "mask"):
                    self.load_listed(
                        atom_q, mQ, sQ, ring_q, atom_k, mK, sK, ring_k, atom_v, mV, sV, ring_v, work, limits, mLists
                    )
                else:
                    self.load(atom_q, mQ, sQ, ring_q, atom_k, mK, sK, ring_k, atom_v, mV, sV, ring_v, work, limits)
        else:
            cute.arch.setmaxregister_increase(roles.REGISTERS[c.warpgroups][1])
            self.consume(
                sQ, ring_q, sK, ring_k, sV, ring_v, atom_o, mO, sO, mLSE, scale_log2, work, limits,
                (mLists, mBits),
            )  # fmt: skip

    @cute.jit
    def tile(self, number: Int32, work, limits):
        """(block of queries, head, batch, steps) of a tile of this CTA; of packed sequences, (q_end, q_len, k_end,
        k_len) in place of the batch."""
        if const_expr(self.config.varlen):
            # The one after the last is asked for too.
            tile = cutlass.min(scheduler.back_and_forth(number), work[0] - 1)
            lengths, block = sequence_blocks.read(limits[5], tile // work[2])
            bounds = self.steps(block, lengths[1], lengths[3], diagonal(lengths, limits), *limits[3:5])
            return block, tile % work[2], lengths, bounds
        _, blocks, heads_q, group, units, sections, unit_tiles = work
        tile = scheduler.back_and_forth(number)
        if const_expr(self.config.kind == "full"):
            block, head = tile % blocks, tile // blocks
        else:
            if const_expr(self.config.kind == "mask"):
                tile = cutlass.min(tile, work[0] - 1)  # the one after the last is asked for too, and its counts read
            block, head = scheduler.heads_in_sections(tile, blocks.divisor, group.divisor, units, sections, unit_tiles)
        if const_expr(self.config.kind == "mask"):
            return block, head % heads_q, head // heads_q, self.listed_steps(block, head, heads_q, limits[5])
        return block, head % heads_q, head // heads_q, self.steps(block, *limits)

    @cute.jit
    def steps(self, block: Int32, seqlen_q: Int32, seqlen_k: Int32, offset: Int32, left: Int32, right: Int32):
        """(first step, first that the lower bound leaves whole, first that the upper bound cuts, end) of a q block."""
        c = self.config
        end = cute.ceil_div(seqlen_k, c.tile_n)
        begin, whole, cut = Int32(0), Int32(0), end
        if const_expr(c.kind != "full"):
            top = block * c.tile_m + offset
            bottom = cutlass.min((block + 1) * c.tile_m, seqlen_q) - 1 + offset
            seen = cutlass.min(cutlass.max(bottom + right + 1, 0), seqlen_k)
            end = cute.ceil_div(seen, c.tile_n)
            cut = cutlass.min(cutlass.max(top + right + 1, 0) // c.tile_n, end)
            if const_expr(c.kind == "window"):
                begin = cutlass.max(top - left, 0) // c.tile_n
                whole = cute.ceil_div(cutlass.max(bottom - left, 0), c.tile_n)
        return begin, whole, cut, end

    @cute.jit
    def listed_steps(self, block: Int32, head: Int32, heads_q, mCounts):
        """As `steps`, of a mask's lists: the upper bound cuts the partial tiles, which are the last steps."""
        parts: cutlass.Constexpr = TILE // self.config.tile_n
        counts = mCounts[head // heads_q, head % heads_q, block, None]
        full, partial = counts[0] * parts, counts[1] * parts
        return Int32(0), Int32(0), full, full + partial

    @cute.jit
    def rows(self, coordinates, head: Int32, batch, of_keys: cutlass.Constexpr):
        """(rows, columns) of a head."""
        if const_expr(self.config.varlen):
            first = 2 if of_keys else 0
            return tma.segment(coordinates, head, batch[first], batch[first + 1])
        return coordinates[None, None, head, batch]

    @cute.jit
    def load(self, atom_q, mQ, sQ, ring_q, atom_k, mK, sK, ring_k, atom_v, mV, sV, ring_v, work, limits):
        """The producer warp: q once a tile, then k a step ahead of v, in the order in which the consumers want them."""
        c = self.config
        state_q = pipeline.producer_state(c.q_stages)
        state_k, state_v = pipeline.producer_state(c.stages), pipeline.producer_state(c.stages)
        for number in cutlass.range(scheduler.tiles_of_cta(work[0]), unroll=1):
            block, head, batch, bounds = self.tile(number, work, limits)
            begin, _, _, end = bounds
            kv_head = head // work[3]
            gQ = cute.local_tile(self.rows(mQ, head, batch, False), (ROWS, c.padded), (None, 0))
            gK = cute.local_tile(self.rows(mK, kv_head, batch, True), (c.tile_n, c.padded), (None, 0))
            gV = cute.local_tile(self.rows(mV, kv_head, batch, True), (c.tile_n, c.padded_v), (None, 0))
            tQsQ, tQgQ = tma.partition(atom_q, sQ, gQ)
            k = (atom_k, *tma.partition(atom_k, sK, gK))
            v = (atom_v, *tma.partition(atom_v, sV, gV))
            if begin < end:
                self.load_step(k, ring_k, state_k, end - 1)
                state_k.advance()
            ring_q.producer_acquire(state_q)  # also without keys: the output may want q's place
            full = ring_q.producer_get_barrier(state_q)
            for w in cutlass.range_constexpr(c.warpgroups):
                place = state_q.index * c.warpgroups + w
                cute.copy(atom_q, tQgQ[None, block * c.warpgroups + w], tQsQ[None, place], tma_bar_ptr=full)
            state_q.advance()
            if begin < end:
                for i in cutlass.range(end - 1 - begin, unroll=1):
                    self.load_step(k, ring_k, state_k, end - 2 - i)
                    state_k.advance()
                    self.load_step(v, ring_v, state_v, end - 1 - i)
                    state_v.advance()
                self.load_step(v, ring_v, state_v, begin)
                state_v.advance()

    @cute.jit
    def load_listed(
        self, atom_q, mQ, sQ, ring_q, atom_k, mK, sK, ring_k, atom_v, mV, sV, ring_v, work, limits, mLists
    ):  # fmt: skip
        """As `load`, of the steps that a list says; the entry of the next step is read a step ahead."""
        c = self.config
        state_q = pipeline.producer_state(c.q_stages)
        state_k, state_v = pipeline.producer_state(c.stages), pipeline.producer_state(c.stages)
        for number in cutlass.range(scheduler.tiles_of_cta(work[0]), unroll=1):
            block, head, batch, bounds = self.tile(number, work, limits)
            _, _, full, end = bounds
            kv_head = head // work[3]
            gQ = cute.local_tile(mQ[None, None, head, batch], (ROWS, c.padded), (None, 0))
            gK = cute.local_tile(mK[None, None, kv_head, batch], (c.tile_n, c.padded), (None, 0))
            gV = cute.local_tile(mV[None, None, kv_head, batch], (c.tile_n, c.padded_v), (None, 0))
            gList = mLists[batch, head, block, None]
            last = gList[gList.shape[0] - 1]  # the first step's tile if there are partial ones: read with the counts
            tQsQ, tQgQ = tma.partition(atom_q, sQ, gQ)
            k = (atom_k, *tma.partition(atom_k, sK, gK))
            v = (atom_v, *tma.partition(atom_v, sV, gV))
            ring_q.producer_acquire(state_q)
            barrier = ring_q.producer_get_barrier(state_q)
            for w in cutlass.range_constexpr(c.warpgroups):
                place = state_q.index * c.warpgroups + w
                cute.copy(atom_q, tQgQ[None, block * c.warpgroups + w], tQsQ[None, place], tma_bar_ptr=barrier)
            state_q.advance()
            if end > 0:
                now = (last + 1) * (TILE // c.tile_n) - 1
                if end == full:
                    now = any_classify.key_tile(gList, end - 1, full, end, c.tile_n)
                following = any_classify.key_tile(gList, cutlass.max(end - 2, 0), full, end, c.tile_n)
                self.load_step(k, ring_k, state_k, now)
                state_k.advance()
                for i in cutlass.range(end - 1, unroll=1):
                    self.load_step(k, ring_k, state_k, following)
                    state_k.advance()
                    self.load_step(v, ring_v, state_v, now)
                    state_v.advance()
                    now = following
                    following = any_classify.key_tile(gList, cutlass.max(end - 3 - i, 0), full, end, c.tile_n)
                self.load_step(v, ring_v, state_v, now)
                state_v.advance()

    @cute.jit
    def load_step(self, x, ring, state, step: Int32):
        ring.producer_acquire(state)
        cute.copy(x[0], x[2][None, step], x[1][None, state.index], tma_bar_ptr=ring.producer_get_barrier(state))

    @cute.jit
    def consume(
        self, sQ, ring_q, sK, ring_k, sV, ring_v, atom_o, mO, sO, mLSE, scale_log2: Float32, work, limits, lists
    ):
        """A consumer warpgroup: 64 queries of every tile against all their keys."""
        c = self.config
        seqlen_q, seqlen_k, offset, left, right = limits[:5]
        thread = cute.arch.thread_idx()[0] % roles.WARPGROUP
        warpgroup = roles.consumer_warpgroup()
        mma_qk = wgmma.product(self.dtype, c.tile_n)
        mma_pv = wgmma.product(self.dtype, c.padded_v, b_rows_contiguous=True, a_in_registers=True)
        all_q = wgmma.a_operand(mma_qk, sQ)
        rK, rV = wgmma.b_operand(mma_qk, sK), wgmma.b_operand(mma_pv, wgmma.transposed(sV))
        rP = wgmma.a_registers(mma_pv, c.tile_n)
        acc = wgmma.accumulator(mma_pv, c.padded_v)
        first = wgmma.accumulator(mma_qk, c.tile_n) if const_expr(c.ahead) else None
        row_max, row_sum, row_scale, lse = [cute.make_rmem_tensor(2, Float32) for _ in range(4)]
        rows = (row_max, row_sum, row_scale, scale_log2)
        state_q = pipeline.consumer_state(c.q_stages)
        state_k, state_v = pipeline.consumer_state(c.stages), pipeline.consumer_state(c.stages)
        if const_expr(c.turns):
            roles.first_turn(warpgroup)

        count = scheduler.tiles_of_cta(work[0])
        block, head, batch, bounds = self.tile(Int32(0), work, limits)
        begin, whole, cut, end = bounds
        if const_expr(c.ahead):
            ring_q.consumer_wait(state_q)
            if begin < end:
                ring_k.consumer_wait(state_k)
                rQ = all_q[None, None, None, state_q.index * c.warpgroups + warpgroup]
                wgmma.issue(mma_qk, first, rQ, rK[None, None, None, state_k.index], False)
                wgmma.wait(0)
                ring_k.consumer_release(state_k)
                state_k.advance()
        for number in cutlass.range(count, unroll=1):
            row = (block * c.warpgroups + warpgroup) * ROWS + wgmma.row_in_tile(thread, 0)
            mask = (row, thread % 4 * 2, seqlen_k, offset, left, right)
            if const_expr(c.varlen):
                mask = (row, thread % 4 * 2, batch[3], diagonal(batch, limits), left, right)
            if const_expr(c.kind == "mask"):
                gList, bits = self.masks_of(lists, batch, head, block, row, thread)
                first_words = self.first_words(bits, gList, end > cut)
            rQ = all_q[None, None, None, state_q.index * c.warpgroups + warpgroup]
            following = self.tile(number + 1, work, limits)
            operands = (mma_qk, mma_pv, rQ, rK, rV, rP, acc)
            waits = (ring_k, ring_v, warpgroup)
            acc.fill(0.0)
            row_max.fill(-Float32.inf)
            row_sum.fill(0.0)
            row_scale.fill(1.0)
            if const_expr(not c.ahead):
                ring_q.consumer_wait(state_q)
            if begin < end:
                if const_expr(c.ahead):
                    scores = first
                else:
                    scores = wgmma.accumulator(mma_qk, c.tile_n)
                    ring_k.consumer_wait(state_k)
                    wgmma.issue(mma_qk, scores, rQ, rK[None, None, None, state_k.index], False)
                    wgmma.wait(0)
                    ring_k.consumer_release(state_k)
                    state_k.advance()
                if const_expr(c.kind == "mask"):
                    softmax.mask_bits(scores, first_words)
                else:
                    self.apply_mask(scores, mask, end - 1, True)
                softmax.step(scores, row_max, row_sum, row_scale, scale_log2, True, True)
                wgmma.round_to(scores, rP)
                step = end - 1
                if const_expr(c.kind == "mask"):
                    keys = any_classify.key_tile(gList, cutlass.max(step - 1, 0), cut, end, c.tile_n)
                    for _ in cutlass.range(step - cut, unroll=1):
                        step -= 1
                        words = self.mask_words(bits, keys)
                        keys = any_classify.key_tile(gList, cutlass.max(step - 1, 0), cut, end, c.tile_n)
                        self.one_step(operands, rows, waits, state_k, state_v, words, step, True)
                        state_k.advance()
                        state_v.advance()
                elif const_expr(c.kind != "full"):
                    for _ in cutlass.range(step - cutlass.max(cut, begin), unroll=1):
                        step -= 1
                        self.one_step(operands, rows, waits, state_k, state_v, mask, step, True)
                        state_k.advance()
                        state_v.advance()
                for _ in cutlass.range(step - cutlass.max(whole, begin), unroll=1):
                    step -= 1
                    self.one_step(operands, rows, waits, state_k, state_v, mask, step, False)
                    state_k.advance()
                    state_v.advance()
                if const_expr(c.kind == "window"):
                    for _ in cutlass.range(step - begin, unroll=1):
                        step -= 1
                        self.one_step(operands, rows, waits, state_k, state_v, mask, step, True)
                        state_k.advance()
                        state_v.advance()
            if const_expr(c.own_out):
                ring_q.consumer_release(state_q)
                state_q.advance()

            more, live = number + 1 < count, begin < end
            if const_expr(c.ahead):
                if more:
                    ring_q.consumer_wait(state_q)
                more = more and following[3][0] < following[3][3]
                first.fill(0.0)
            else:
                more = False
            # Whole blocks: a product in flight over a branch makes the assembler wait after every instruction.
            next_q = all_q[None, None, None, state_q.index * c.warpgroups + warpgroup]
            if const_expr(c.early_rescale):
                softmax.rescale(acc, row_scale)
            if const_expr(c.ahead):
                if more and live:
                    self.last_products(operands, waits, state_k, state_v, next_q, first, True, True)
                elif more:
                    self.last_products(operands, waits, state_k, state_v, next_q, first, True, False)
                elif live:
                    self.last_products(operands, waits, state_k, state_v, next_q, first, False, True)
            elif live:
                self.last_products(operands, waits, state_k, state_v, next_q, first, False, True)
            if more:
                state_k.advance()
            if live:
                state_v.advance()

            softmax.finish(row_max, row_sum, row_scale, lse, scale_log2)
            softmax.rescale(acc, row_scale)
            if const_expr(mLSE is not None):
                for r in cutlass.range_constexpr(2):
                    if const_expr(c.varlen):
                        if thread % 4 == 0 and row + 8 * r < batch[1]:
                            mLSE[head, batch[0] - batch[1] + row + 8 * r] = lse[r]
                    elif thread % 4 == 0 and row + 8 * r < seqlen_q:
                        mLSE[batch, head, row + 8 * r] = lse[r]
            gO = cute.local_tile(self.rows(mO, head, batch, False), (ROWS, c.padded_v), (None, 0))
            self.store(acc, mma_pv, atom_o, sO, gO, block * c.warpgroups + warpgroup, warpgroup, thread)
            if const_expr(not c.own_out):
                ring_q.consumer_release(state_q)
                state_q.advance()
            block, head, batch, bounds = following
            begin, whole, cut, end = bounds
        if cute.arch.make_warp_uniform(thread // 32) == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def last_products(
        self, operands, waits, state_k, state_v, next_q, first, ahead: cutlass.Constexpr, live: cutlass.Constexpr
    ):
        """The first S of the next tile where there is one, and the last O += P @ v of this one; both are waited for."""
        c = self.config
        mma_qk, mma_pv, _, rK, rV, rP, acc = operands
        ring_k, ring_v, warpgroup = waits
        if const_expr(ahead):
            ring_k.consumer_wait(state_k)
            if const_expr(c.turns):
                roles.wait_turn(warpgroup)
            wgmma.issue(mma_qk, first, next_q, rK[None, None, None, state_k.index], False)
        if const_expr(live):
            ring_v.consumer_wait(state_v)
            wgmma.issue(mma_pv, acc, rP, rV[None, None, None, state_v.index], True)
        if const_expr(ahead and c.turns):
            roles.pass_turn(warpgroup, c.warpgroups)
        wgmma.wait(0)
        if const_expr(ahead):
            ring_k.consumer_release(state_k)
        if const_expr(live):
            ring_v.consumer_release(state_v)

    @cute.jit
    def store(self, acc, mma_pv, atom_o, sO, gO, place: Int32, warpgroup: Int32, thread: Int32):
        """The output of 64 queries, through shared memory."""
        c = self.config
        stores = cute.arch.make_warp_uniform(thread // 32) == 0
        rO = cute.make_rmem_tensor_like(acc, self.dtype)
        wgmma.round_to(acc, rO)
        if const_expr(c.own_out):  # noqa: SIM102 - one is decided while tracing
            if stores:
                cute.arch.cp_async_bulk_wait_group(0, read=True)
        # The place is free: the store before has read it, or all four warps have read q, which was there.
        roles.sync_warpgroup(warpgroup)
        wgmma.store_to_smem(mma_pv, rO, sO[None, None, warpgroup], thread)
        roles.sync_warpgroup(warpgroup)
        if stores:
            tOsO, tOgO = tma.partition(atom_o, sO, gO)
            cute.copy(atom_o, tOsO[None, warpgroup], tOgO[None, place])
            cute.arch.cp_async_bulk_commit_group()
            if const_expr(not c.own_out):
                cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def one_step(
        self, operands, rows, waits, state_k, state_v, mask, step: Int32, masked: cutlass.Constexpr
    ):  # fmt: skip
        """S of this step, then O += P @ v of the step before it, then the softmax of S under that product."""
        c = self.config
        mma_qk, mma_pv, rQ, rK, rV, rP, acc = operands
        row_max, row_sum, row_scale, scale_log2 = rows
        ring_k, ring_v, warpgroup = waits
        scores = wgmma.accumulator(mma_qk, c.tile_n)
        ring_k.consumer_wait(state_k)
        if const_expr(c.turns):
            roles.wait_turn(warpgroup)
        wgmma.issue(mma_qk, scores, rQ, rK[None, None, None, state_k.index], False)
        if const_expr(c.early_rescale):
            softmax.rescale(acc, row_scale)
        ring_v.consumer_wait(state_v)
        wgmma.issue(mma_pv, acc, rP, rV[None, None, None, state_v.index], True)
        if const_expr(c.turns):
            roles.pass_turn(warpgroup, c.warpgroups)
        wgmma.wait(1)
        ring_k.consumer_release(state_k)
        if const_expr(masked and c.kind == "mask"):
            softmax.mask_bits(scores, mask)
        elif const_expr(masked):
            self.apply_mask(scores, mask, step, False)
        softmax.step(scores, row_max, row_sum, row_scale, scale_log2, False, True)
        wgmma.wait(0)
        ring_v.consumer_release(state_v)
        if const_expr(not c.early_rescale):
            softmax.rescale(acc, row_scale)
        wgmma.round_to(scores, rP)

    @cute.jit
    def masks_of(self, lists, batch: Int32, head: Int32, block: Int32, row: Int32, thread: Int32):
        """The list of a block, and of this thread: where its bits of tile 0 are, and how to get on from there."""
        mLists, mBits = lists
        stride = mBits.stride
        address = mBits.iterator.toint() + 4 * (
            Int64(batch) * stride[0] + Int64(head) * stride[1] + Int64(block) * stride[2]
            + Int64(row - block * self.config.tile_m) * stride[4]
        )  # fmt: skip
        return mLists[batch, head, block, None], (address, Int64(stride[3]) * 4, Int64(stride[4]) * 32, thread)

    @cute.jit
    def first_words(self, bits, gList, partial):
        """As `mask_words`, of the first step; all set where it is not `partial`."""
        words: cutlass.Constexpr = self.config.tile_n // 32
        last = gList[gList.shape[0] - 1]
        found = cute.make_rmem_tensor((2, words), Uint32)
        found.fill(0xFFFFFFFF)
        if partial:
            read = self.mask_words(bits, (last + 1) * (TILE // self.config.tile_n) - 1)
            for r in cutlass.range_constexpr(2):
                for i in cutlass.range_constexpr(words):
                    found[r, i] = read[r, i]
        return found

    @cute.jit
    def mask_words(self, bits, tile: Int32):
        """(row, word): this thread's bits of a step, shifted to its first column."""
        parts: cutlass.Constexpr = TILE // self.config.tile_n
        words: cutlass.Constexpr = self.config.tile_n // 32
        address, per_tile, down, thread = bits
        address = address + tile // parts * per_tile + tile % parts * (4 * words)
        found = cute.make_rmem_tensor((2, words), Uint32)
        for r in cutlass.range_constexpr(2):
            read = any_classify.load_words(address + r * down, words)
            for i in cutlass.range_constexpr(words):
                found[r, i] = read[i] >> Uint32(thread % 4 * 2)
        return found

    @cute.jit
    def apply_mask(self, scores: cute.Tensor, mask, step: Int32, last: cutlass.Constexpr):
        """-inf where a row does not see a key; `last`: the step that may reach beyond the keys."""
        c = self.config
        row, column, seqlen_k, offset, left, right = mask
        start = step * c.tile_n + column
        for r in cutlass.range_constexpr(2):
            diagonal = row + 8 * r + offset
            end = seqlen_k
            if const_expr(c.kind != "full"):
                end = diagonal + right + 1
                if const_expr(last):
                    end = cutlass.min(end, seqlen_k)
            softmax.mask_above(scores, r, end - start)
            if const_expr(c.kind == "window"):
                softmax.mask_below(scores, r, diagonal - left - start)


@cute.jit
def diagonal(lengths, limits) -> Int32:
    """`offset` of a packed sequence."""
    return (lengths[3] - lengths[1]) * limits[2]


def build(config: FwdConfig):
    """(host function, stand-in arguments) for the compiler."""
    if config.varlen:
        return build_packed(config)
    dtype = wgmma.DTYPES[config.dtype]
    batch, heads_q, heads_kv, seqlen_q, seqlen_k = (cute.sym_int32() for _ in range(5))

    def tensor(heads, seqlen, size):
        stride = (*(cute.sym_int64(divisibility=8) for _ in range(3)), 1)
        return cute.runtime.make_fake_tensor(dtype, (batch, heads, seqlen, size), stride=stride, assumed_align=16)

    q, out = tensor(heads_q, seqlen_q, config.head_dim), tensor(heads_q, seqlen_q, config.head_dim_v)
    k, v = tensor(heads_kv, seqlen_k, config.head_dim), tensor(heads_kv, seqlen_k, config.head_dim_v)
    numbers = (Float32(1.0), Int32(0), Int32(0), Int32(0), Int32(1))
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    kernel = AttentionForward(config)
    stride = (cute.sym_int64(), cute.sym_int64(), 1)
    lse = cute.runtime.make_fake_tensor(cutlass.Float32, (batch, heads_q, seqlen_q), stride=stride, assumed_align=4)
    if config.kind == "mask":
        lists = any_classify.stand_ins(batch, heads_q)
        if config.lse:
            return kernel.masked_with_lse, (q, k, v, out, lse, *lists, Float32(1.0), Int32(1), stream)
        return kernel.masked_without_lse, (q, k, v, out, *lists, Float32(1.0), Int32(1), stream)
    if not config.lse:
        return kernel.without_lse, (q, k, v, out, *numbers, stream)
    return kernel.with_lse, (q, k, v, out, lse, *numbers, stream)


def build_packed(config: FwdConfig):
    dtype = wgmma.DTYPES[config.dtype]
    heads_q, heads_kv, total_q, total_k, starts = (cute.sym_int32() for _ in range(5))

    def tensor(rows, heads, size):
        stride = (cute.sym_int64(divisibility=8), cute.sym_int64(divisibility=8), 1)
        return cute.runtime.make_fake_tensor(dtype, (rows, heads, size), stride=stride, assumed_align=16)

    def numbers(*shape, align: int = 4, element=Int32):
        stride = (*(cute.sym_int64() for _ in shape[1:]), 1)
        return cute.runtime.make_fake_tensor(element, shape, stride=stride, assumed_align=align)

    tensors = [
        tensor(total_q, heads_q, config.head_dim),
        tensor(total_k, heads_kv, config.head_dim),
        tensor(total_k, heads_kv, config.head_dim_v),
        tensor(total_q, heads_q, config.head_dim_v),
    ]
    if config.lse:
        tensors.append(numbers(heads_q, total_q, element=Float32))
    tensors += [numbers(starts), numbers(starts), numbers(cute.sym_int32()), numbers(cute.sym_int32())]
    tensors.append(numbers(cute.sym_int32(), PITCH, align=16))
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    kernel = AttentionForward(config)
    host = kernel.packed_with_lse if config.lse else kernel.packed_without_lse
    return host, (*tensors, Int32(0), Float32(1.0), *(Int32(0) for _ in range(3)), Int32(1), stream)
