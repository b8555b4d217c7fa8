"""Attention forward for sm_80 and whatever came after it: FlashAttention-2's schedule (Dao, arXiv 2307.08691).

A CTA takes a block of queries of one head, a warp 16 or 32 of them. Tiles of k and v arrive by asynchronous copies in
one ring of slots, k of a step, v of it, k of the next one: while one is multiplied the next are on their way, and one
barrier of the CTA a tile says both that it is there and that the slot before it is free. S, P and the output stay in
registers, q where it fits; the output leaves through q's place in shared memory.

A query i sees the keys from i + offset - left to i + offset + right, where offset is 0 (a diagonal from the top left)
or seqlen_k - seqlen_q (to the bottom right). Steps are taken from the last one seen to the first; scores are looked
at one by one only in those that a bound or the end of the keys cuts.

With a mask, steps are the entries of lists that `any_classify.py` makes of it: the partial tiles of a block of queries
first, each with a bit a score, then the full ones. Tiles that nobody sees are in no list.
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr

from ..blocks import scheduler, softmax
from ..blocks import warp_mma as mma
from . import any_classify
from .mask_config import BLOCK, TILE
from .sm80_config import TILE_M, Sm80Config

LOG2_E = 1.4426950408889634
L2_BYTES = 32 * 1024 * 1024  #: of keys and values that may be in use together


class AttentionForward:
    """Traceable host function `(q, k, v, out, [lse], scale, offset, left, right, stream)`.

    q (batch, heads_q, seqlen_q, head_dim), k and v (batch, heads_kv, seqlen_k, ...), out as q with head_dim_v, any
    strides with a contiguous last dimension and rows at multiples of 16 bytes; lse (batch, heads_q, seqlen_q) fp32.
    Kind "mask" also takes what `any_classify.py` says of it after out or lse: counts (batch, heads_q, blocks, 2), lists
    (batch, heads_q, blocks, tiles) and bits (batch, heads_q, blocks, tiles, 128, 4), and no offset, left and right.
    """

    def __init__(self, config: Sm80Config) -> None:
        self.config = config

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
        stream: cuda.CUstream,
    ):
        self.launch(mQ, mK, mV, mO, mLSE, scale, offset, left, right, stream)

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
        stream: cuda.CUstream,
    ):
        self.launch(mQ, mK, mV, mO, None, scale, offset, left, right, stream)

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
        stream: cuda.CUstream,
    ):
        zero = Int32(0)
        self.launch(mQ, mK, mV, mO, mLSE, scale, zero, zero, zero, stream, (mCounts, mLists, mBits))

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
        stream: cuda.CUstream,
    ):
        zero = Int32(0)
        self.launch(mQ, mK, mV, mO, None, scale, zero, zero, zero, stream, (mCounts, mLists, mBits))

    @cute.jit
    def launch(self, mQ, mK, mV, mO, mLSE, scale, offset, left, right, stream, lists=(None, None, None)):
        c = self.config
        blocks = cute.ceil_div(mQ.shape[2], c.tile_m)
        heads = mQ.shape[1] * mQ.shape[0]
        group = mQ.shape[1] // mK.shape[1]
        head_bytes = Int64(mK.shape[2]) * (2 * (c.padded + c.padded_v))
        units = heads // group
        sections = cutlass.min(units, cute.ceil_div(units, cutlass.max(Int32(L2_BYTES // head_bytes), 1)))
        divisors = [
            cute.fast_divmod_create_divisor_v2(n) for n in (blocks, mQ.shape[1], group, units, sections, group * blocks)
        ]
        self.kernel(mQ, mK, mV, mO, mLSE, *lists, scale * LOG2_E, offset, left, right, *divisors).launch(
            grid=[blocks * heads, 1, 1],
            block=[c.threads, 1, 1],
            min_blocks_per_mp=c.ctas_per_sm,
            preferred_smem_carveout=100,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        mQ, mK, mV, mO, mLSE, mCounts, mLists, mBits,
        scale_log2: Float32,
        offset: Int32,
        left: Int32,
        right: Int32,
        blocks, heads_q, group, units, sections, unit_tiles,
    ):  # fmt: skip
        c = self.config
        work = (blocks, heads_q, group, units, sections, unit_tiles)
        block, head, batch = self.tile(cute.arch.block_idx()[0], work)
        thread, _, _ = cute.arch.thread_idx()
        lane, warp = thread % mma.WARP, thread // mma.WARP
        seqlen_q, seqlen_k = mQ.shape[2], mK.shape[2]
        first = block * c.tile_m
        if const_expr(c.kind == "mask"):
            begin, whole, cut, end = self.listed_steps(mCounts[batch, head, first // BLOCK, None])
            listed = (mLists[batch, head, first // BLOCK, None], cut, end)
            mask = self.bits_of(mBits, batch, head, first)
        else:
            begin, whole, cut, end = self.steps(first, seqlen_q, seqlen_k, offset, left, right)
            listed, mask = None, (first, seqlen_k, offset, left, right)

        smem = cutlass.memory.SmemAllocator()
        sQ = smem.allocate(c.q_bytes, byte_alignment=1024).toint()
        ring = smem.allocate(c.slots * c.slot_bytes, byte_alignment=1024).toint()
        k = (row_of(mK, batch, head // group, 0), Int64(mK.stride[2]) * 2, c.head_dim)
        v = (row_of(mV, batch, head // group, 0), Int64(mV.stride[2]) * 2, c.head_dim_v)
        mma.load_tile(
            sQ, row_of(mQ, batch, head, 0), first, Int64(mQ.stride[2]) * 2, seqlen_q,
            c.tile_m, c.head_dim, c.padded // 8, c.threads,
        )  # fmt: skip
        sources = (k, v, ring, begin, seqlen_k, listed)
        for i in cutlass.range_constexpr(c.slots - 1):
            self.load(sources, i % 2 == 0, Int32(i), end - 1 - i // 2)

        # Where this lane's rows of the matrices lie: of q as the left operand, of k (keys are columns), of v.
        warp_q = sQ + warp * (2 * c.rows * c.padded)
        place_q = mma.pair_address(warp_q, lane % 16, lane // 16, c.padded // 8)
        place_k = mma.pair_address(ring, lane // 16 * 8 + lane % 8, lane // 8 % 2, c.padded // 8)
        place_v = mma.pair_address(ring, lane % 16, lane // 16, c.padded_v // 8)
        acc = [cute.make_rmem_tensor(c.padded_v // 2, Float32) for _ in range(c.row_tiles)]
        row_max, row_sum, row_scale, lse = [
            [cute.make_rmem_tensor(2, Float32) for _ in range(c.row_tiles)] for _ in range(4)
        ]
        for m in cutlass.range_constexpr(c.row_tiles):
            acc[m].fill(0.0)
            row_max[m].fill(-Float32.inf)
            row_sum[m].fill(0.0)
        kept_q = None
        if const_expr(c.q_in_registers):
            cute.arch.cp_async_wait_group(c.slots - 2)
            cute.arch.barrier()
            kept_q = [self.load_q(place_q, s) for s in range(c.padded // 16)]

        places = (place_q, place_k, place_v, kept_q)
        rows = (acc, row_max, row_sum, row_scale, scale_log2)
        step, slot = end - 1, Int32(0)
        for _ in cutlass.range(end - begin, unroll=1):
            self.one_step(places, rows, sources, mask, step, slot, step >= cut or step < whole)
            step, slot = step - 1, self.following(slot, 2)

        # Without keys q may still be on its way to where the output goes.
        cute.arch.cp_async_wait_group(0)
        cute.arch.barrier()
        # Where the CTA is, computed again: it need not be in registers during the loop.
        block, head, batch = self.tile(mma.anew(cute.arch.block_idx()[0]), work)
        thread = mma.thread_index()
        first, lane = block * c.tile_m, thread % mma.WARP
        row = first + self.row_of_thread(thread)
        for m in cutlass.range_constexpr(c.row_tiles):
            softmax.finish(row_max[m], row_sum[m], row_scale[m], lse[m], scale_log2)
            softmax.rescale(acc[m], row_scale[m])
            if const_expr(mLSE is not None):
                for r in cutlass.range_constexpr(2):
                    at = row + m * TILE_M + 8 * r
                    if lane % 4 == 0 and at < seqlen_q:
                        mLSE[batch, head, at] = lse[m][r]
        own = thread // mma.WARP * c.rows
        self.store(acc, sQ + own * (2 * c.padded), mO, batch, head, first + own, seqlen_q, lane)

    @cute.jit
    def tile(self, number: Int32, work):
        """(block of queries, head, batch) of a CTA."""
        blocks, heads_q, group, units, sections, unit_tiles = work
        block, head = scheduler.heads_in_sections(number, blocks.divisor, group.divisor, units, sections, unit_tiles)
        return block, head % heads_q, head // heads_q

    @cute.jit
    def steps(self, first: Int32, seqlen_q: Int32, seqlen_k: Int32, offset: Int32, left: Int32, right: Int32):
        """Of queries from `first` on: (first step, first that the lower bound leaves whole, first that is cut from
        above, end).
        """
        c = self.config
        top = first + offset
        bottom = cutlass.min(first + c.tile_m, seqlen_q) - 1 + offset
        seen = cutlass.min(cutlass.max(bottom + right + 1, 0), seqlen_k)
        end = cute.ceil_div(seen, c.tile_n)
        cut = cutlass.min(cutlass.max(top + right + 1, 0), seqlen_k) // c.tile_n
        begin, whole = Int32(0), Int32(0)
        if const_expr(c.kind == "window"):
            begin = cutlass.min(cutlass.max(top - left, 0) // c.tile_n, end)
            whole = cute.ceil_div(cutlass.max(bottom - left, 0), c.tile_n)
        return begin, whole, cut, end

    @cute.jit
    def listed_steps(self, counts: cute.Tensor):
        """As `steps`, of a mask's lists: the partial tiles, the last steps, are cut."""
        parts: cutlass.Constexpr = TILE // self.config.tile_n
        full, partial = counts[0] * parts, counts[1] * parts
        return Int32(0), Int32(0), full, full + partial

    @cute.jit
    def tile_of(self, step: Int32, listed):
        """Which tile_n keys a step is about."""
        if const_expr(listed is None):
            return step
        return any_classify.key_tile(listed[0], step, listed[1], listed[2], self.config.tile_n)

    # --- The ring --------------------------------------------------------------------------------------------------

    @cute.jit
    def load(self, sources, is_k: cutlass.Constexpr, slot: Int32, step: Int32):
        """Start the copies of a step's k or v into a slot, as one group; it is empty before the first step."""
        c = self.config
        k, v, ring, begin, seqlen_k, listed = sources
        source, stride, head_dim = k if const_expr(is_k) else v
        if step >= begin:
            mma.load_tile(
                ring + slot * c.slot_bytes, source, self.tile_of(step, listed) * c.tile_n, stride, seqlen_k,
                c.tile_n, head_dim, padded_chunks(head_dim), c.threads,
            )  # fmt: skip
        cute.arch.cp_async_commit_group()

    def following(self, slot, count: int):
        """The slot `count` after one."""
        c = self.config
        if c.slots == count:
            return slot
        return (slot + count) % c.slots

    @cute.jit
    def next_tile(self, sources, step: Int32, slot: Int32, now_k: cutlass.Constexpr):
        """Wait for the tile in `slot`, k or v of `step`; then start the copy that is slots - 1 tiles ahead of it."""
        c = self.config
        cute.arch.cp_async_wait_group(c.slots - 2)
        cute.arch.barrier()
        ahead: cutlass.Constexpr = c.slots - 1 + (0 if now_k else 1)
        self.load(sources, ahead % 2 == 0, self.following(slot, c.slots - 1), step - ahead // 2)

    # --- Arithmetic of a warp --------------------------------------------------------------------------------------

    @cute.jit
    def one_step(self, places, rows, sources, mask, step: Int32, slot: Int32, masked):
        """S = q @ k.T of a step, its softmax, O += P @ v."""
        c = self.config
        acc, row_max, row_sum, row_scale, scale_log2 = rows
        self.next_tile(sources, step, slot, True)
        scores = self.scores(places, slot)
        slot_v = self.following(slot, 1)
        self.next_tile(sources, step, slot_v, False)
        if masked:
            if const_expr(c.kind == "mask"):
                self.apply_bits(scores, mask, self.tile_of(step, sources[5]))
            else:
                self.apply_mask(scores, mask, step)
        rounded = []
        for m in cutlass.range_constexpr(c.row_tiles):
            softmax_step(scores[m], row_max[m], row_sum[m], row_scale[m], scale_log2)
            softmax.rescale(acc[m], row_scale[m])
            rounded.append([mma.left_operand(c.dtype, scores[m], s) for s in range(0, c.tile_n, 16)])
        self.accumulate(rounded, acc, row_sum, places[2], slot_v)

    def row_of_thread(self, thread):
        """The first of the queries that a thread has, in its CTA."""
        return thread // mma.WARP * self.config.rows + thread % mma.WARP // 4

    def load_q(self, place_q, s: int) -> list:
        """q's columns 16 s .. 16 s + 15 as left operands."""
        c = self.config
        place, offset = mma.pair(place_q, s, c.padded // 8)
        return [mma.load_matrices(place, offset + m * 2 * TILE_M * c.padded) for m in range(c.row_tiles)]

    def scores(self, places, slot) -> list:
        """q @ k.T with the k in a slot: an accumulator for each 16 queries."""
        c = self.config
        place_q, place_k, _, kept_q = places
        scores = [cute.make_rmem_tensor(c.tile_n // 2, Float32) for _ in range(c.row_tiles)]
        for m in range(c.row_tiles):
            scores[m].fill(0.0)
        in_slot = place_k + slot * c.slot_bytes
        for s in range(c.padded // 16):
            q = kept_q[s] if c.q_in_registers else self.load_q(place_q, s)
            place, offset = mma.pair(in_slot, s, c.padded // 8)
            for n in range(0, c.tile_n, 16):
                w = mma.load_matrices(place, offset + 2 * n * c.padded)
                for m in range(c.row_tiles):
                    mma.multiply(c.dtype, scores[m], n, q[m], w[0], w[1])
                    mma.multiply(c.dtype, scores[m], n + 8, q[m], w[2], w[3])
        return scores

    def accumulate(self, rounded, acc, row_sum, place_v, slot) -> None:
        """The output plus P, rounded and packed, times the v in a slot."""
        c = self.config
        in_slot = place_v + slot * c.slot_bytes
        for s in range(0, c.tile_n, 16):
            if s == c.tile_n // 2:
                # Half of v waits for the row sums. Nothing else here wants them, and the assembler puts them off to the
                # end of the step: all exponentials stay in registers until then, and the row sums do not.
                total = row_sum[0][0] + row_sum[0][1]
                for m in range(1, c.row_tiles):
                    total = total + row_sum[m][0] + row_sum[m][1]
                in_slot = mma.address_after(total, in_slot)
            for n in range(c.padded_v // 16):
                place, offset = mma.pair(in_slot, n, c.padded_v // 8)
                w = mma.load_matrices(place, offset + 2 * s * c.padded_v, transposed=True)
                for m in range(c.row_tiles):
                    mma.multiply(c.dtype, acc[m], 16 * n, rounded[m][s // 16], w[0], w[1])
                    mma.multiply(c.dtype, acc[m], 16 * n + 8, rounded[m][s // 16], w[2], w[3])

    @cute.jit
    def apply_mask(self, scores, mask, step: Int32):
        """-inf where a row does not see a key."""
        c = self.config
        first, seqlen_k, offset, left, right = mask
        thread = mma.thread_index()
        row = first + self.row_of_thread(thread)
        start = step * c.tile_n + thread % 4 * 2
        for m in cutlass.range_constexpr(c.row_tiles):
            for r in cutlass.range_constexpr(2):
                diagonal = row + m * TILE_M + 8 * r + offset
                end = cutlass.min(diagonal + right + 1, seqlen_k)
                softmax.mask_above(scores[m], r, end - start)
                if const_expr(c.kind == "window"):
                    softmax.mask_below(scores[m], r, diagonal - left - start)

    @cute.jit
    def bits_of(self, mBits, batch: Int32, head: Int32, first: Int32):
        """Where the bits of a CTA's queries and tile 0 are, and the bytes from there to the next tile and query."""
        stride = mBits.stride
        block, row = first // BLOCK, first % BLOCK
        elements = Int64(batch) * stride[0] + Int64(head) * stride[1] + Int64(block) * stride[2]
        start = mBits.iterator.toint() + 4 * (elements + Int64(row) * stride[4])
        return start, Int64(stride[3]) * 4, Int64(stride[4]) * 4

    @cute.jit
    def apply_bits(self, scores, bits, tile: Int32):
        """-inf where a row's bit of a partial tile is not set."""
        c = self.config
        parts: cutlass.Constexpr = TILE // c.tile_n
        words: cutlass.Constexpr = c.tile_n // 32
        start, per_tile, per_row = bits
        thread = mma.thread_index()
        at = start + tile // parts * per_tile + tile % parts * (4 * words) + self.row_of_thread(thread) * per_row
        for m in cutlass.range_constexpr(c.row_tiles):
            found = cute.make_rmem_tensor((2, words), Uint32)
            for r in cutlass.range_constexpr(2):
                read = mma.load_words(at + (m * TILE_M + 8 * r) * per_row, words)
                for i in cutlass.range_constexpr(words):
                    found[r, i] = read[i] >> Uint32(thread % 4 * 2)
            softmax.mask_bits(scores[m], found)

    @cute.jit
    def store(self, acc, warp_q: Int32, mO, batch: Int32, head: Int32, first: Int32, seqlen_q: Int32, lane: Int32):
        """The output of a warp, through its own queries' place in shared memory."""
        c = self.config
        chunks: cutlass.Constexpr = c.padded_v // 8
        written: cutlass.Constexpr = c.head_dim_v // 8
        for m in cutlass.range_constexpr(c.row_tiles):
            for r in cutlass.range_constexpr(2):
                row = m * TILE_M + 8 * r + lane // 4
                for n in cutlass.range_constexpr(chunks):
                    word = mma.pack(c.dtype, acc[m][4 * n + 2 * r], acc[m][4 * n + 2 * r + 1])
                    mma.store_word(warp_q + mma.place(row, n, chunks) + lane % 4 * 4, word)
        cute.arch.sync_warp()
        stride = Int64(mO.stride[2]) * 2
        target = row_of(mO, batch, head, first)
        for i in cutlass.range_constexpr(-(-c.rows * written // mma.WARP)):
            index = i * mma.WARP + lane
            row, chunk = index // written, index % written
            if row < cutlass.min(seqlen_q - first, c.rows):
                mma.copy_vector(
                    target + Int64(row) * stride + chunk * mma.CHUNK, warp_q + mma.place(row, chunk, chunks)
                )


@cute.jit
def softmax_step(scores, row_max, row_sum, row_scale, scale_log2: Float32):
    """`softmax.step` of rows that may have nothing but -inf up to here, and as exact for large scores.

    One multiply-add an element, score * scale_log2 - shift, leaves the row's maximum with a weight of 2 ** d, where d
    is what rounding the shift lost: up to 0.004 at 65536, and weights are rounded to 16 bits where their sum is not.
    With q and k times 100 that doubled the error of some inputs.
    """
    for r in cutlass.range_constexpr(2):
        largest = cute.arch.fmax(softmax.row_maximum(scores, r), row_max[r])
        largest = cute.arch.warp_reduction_max(largest, threads_in_group=4)
        safe = Float32(0.0) if largest == -Float32.inf else largest
        row_scale[r] = cute.math.exp2((row_max[r] - safe) * scale_log2, fastmath=True)
        row_max[r] = largest
        total = [row_sum[r] * row_scale[r], Float32(0.0)]
        for c in cutlass.range_constexpr(cute.size(scores) // 4):
            for a in cutlass.range_constexpr(2):
                i = 4 * c + 2 * r + a
                scores[i] = cute.math.exp2((scores[i] - safe) * scale_log2, fastmath=True)
                total[a] = total[a] + scores[i]
        row_sum[r] = total[0] + total[1]


def padded_chunks(head_dim: int) -> int:
    return -(-head_dim // 16) * 2


def row_of(t: cute.Tensor, batch, head, row):
    """Address of a row of a (batch, heads, seqlen, head_dim) tensor of 16-bit elements."""
    elements = Int64(batch) * t.stride[0] + Int64(head) * t.stride[1] + Int64(row) * t.stride[2]
    return t.iterator.toint() + elements * 2


def build(config: Sm80Config):
    """(host function, stand-in arguments) for the compiler."""
    dtype = mma.DTYPES[config.dtype]
    batch, heads_q, heads_kv, seqlen_q, seqlen_k = (cute.sym_int32() for _ in range(5))

    def tensor(heads, seqlen, size):
        stride = (*(cute.sym_int64(divisibility=8) for _ in range(3)), 1)
        return cute.runtime.make_fake_tensor(dtype, (batch, heads, seqlen, size), stride=stride, assumed_align=16)

    q, out = tensor(heads_q, seqlen_q, config.head_dim), tensor(heads_q, seqlen_q, config.head_dim_v)
    k, v = tensor(heads_kv, seqlen_k, config.head_dim), tensor(heads_kv, seqlen_k, config.head_dim_v)
    numbers = (Float32(1.0), Int32(0), Int32(0), Int32(0))
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    kernel = AttentionForward(config)
    stride = (cute.sym_int64(), cute.sym_int64(), 1)
    lse = cute.runtime.make_fake_tensor(cutlass.Float32, (batch, heads_q, seqlen_q), stride=stride, assumed_align=4)
    if config.kind == "mask":
        lists = any_classify.stand_ins(batch, heads_q)
        if config.lse:
            return kernel.masked_with_lse, (q, k, v, out, lse, *lists, Float32(1.0), stream)
        return kernel.masked_without_lse, (q, k, v, out, *lists, Float32(1.0), stream)
    if not config.lse:
        return kernel.without_lse, (q, k, v, out, *numbers, stream)
    return kernel.with_lse, (q, k, v, out, lse, *numbers, stream)
