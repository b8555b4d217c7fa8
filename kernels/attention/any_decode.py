"""Attention of a few queries over many keys (decode), one source for every target.

All q heads of one kv head, times the q positions, are the rows of one tile of 16, 32 or 64: k and v are read once. A
CTA has a share of the keys of one (batch, kv head): every splits-th stretch of blocks, which spreads padding evenly.
Inside, a group of warps has its own blocks of 16 or 32 keys, its own ring of asynchronous copies in shared memory and
its own online softmax in fp32: groups never wait for each other before the end. There those of a CTA add up through
shared memory, the CTAs of a (batch, kv head) through a scratch buffer: the last to arrive of a bundle of CTAs, found
by an atomic counter that it resets, adds the bundle up in order, and the last of these the bundles. One launch, and the
same bits every time.

A boolean mask is read ahead, 32 blocks at a time, into one bit a key: blocks without a key to attend are never loaded.
Keys that no row attends to are not loaded either (zeros stand for them): whatever lies there cannot reach the output.
"""

from __future__ import annotations

from math import gcd

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint8, Uint32, const_expr

from ..blocks import warp_mma as mma
from .any_classify import load_byte_below
from .decode_config import AT_ONCE, COUNTERS, TILE_K, TILE_M, TILE_N, WARP, DecodeConfig, swizzled

LN_2 = 0.6931471805599453
ptx = cute.arch.inline_ptx


class Decode:
    """Traceable host function
    `(q, k, v, [mask], out, [lse], scratch, splits, bundle, scale * log2(e), offset, stream)`.

    Query i sees the keys up to i + offset. The last of `bundle` CTAs adds their partial results up.
    """

    def __init__(self, config: DecodeConfig) -> None:
        self.config = config

    # One signature for each set of optional tensors: a compiled function takes tensors only.

    @cute.jit
    def plain(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mO: cute.Tensor,
        mScratch: cute.Tensor,
        splits: Int32,
        bundle: Int32,
        scale: Float32,
        offset: Int32,
        stream: cuda.CUstream,
    ):
        self.launch(mQ, mK, mV, None, mO, None, mScratch, splits, bundle, scale, offset, stream)

    @cute.jit
    def with_lse(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mO: cute.Tensor,
        mLse: cute.Tensor,
        mScratch: cute.Tensor,
        splits: Int32,
        bundle: Int32,
        scale: Float32,
        offset: Int32,
        stream: cuda.CUstream,
    ):
        self.launch(mQ, mK, mV, None, mO, mLse, mScratch, splits, bundle, scale, offset, stream)

    @cute.jit
    def masked(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mMask: cute.Tensor,
        mO: cute.Tensor,
        mScratch: cute.Tensor,
        splits: Int32,
        bundle: Int32,
        scale: Float32,
        offset: Int32,
        stream: cuda.CUstream,
    ):
        self.launch(mQ, mK, mV, mMask, mO, None, mScratch, splits, bundle, scale, offset, stream)

    @cute.jit
    def masked_with_lse(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mMask: cute.Tensor,
        mO: cute.Tensor,
        mLse: cute.Tensor,
        mScratch: cute.Tensor,
        splits: Int32,
        bundle: Int32,
        scale: Float32,
        offset: Int32,
        stream: cuda.CUstream,
    ):
        self.launch(mQ, mK, mV, mMask, mO, mLse, mScratch, splits, bundle, scale, offset, stream)

    @cute.jit
    def launch(self, mQ, mK, mV, mMask, mO, mLse, mScratch, splits, bundle, scale, offset, stream):
        c = self.config
        pairs = mK.shape[0] * mK.shape[1]
        self.kernel(mQ, mK, mV, mMask, mO, mLse, mScratch, splits, bundle, scale, offset).launch(
            grid=[pairs * splits, 1, 1],
            block=[c.threads, 1, 1],
            min_blocks_per_mp=c.ctas_per_sm,
            preferred_smem_carveout=100,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self, mQ, mK, mV, mMask, mO, mLse, mScratch, splits: Int32, bundle: Int32, scale: Float32, offset: Int32
    ):
        c = self.config
        tid, _, _ = cute.arch.thread_idx()
        bid, _, _ = cute.arch.block_idx()
        lane, warp = tid % WARP, cute.arch.make_warp_uniform(tid // WARP)
        group, m_warp = warp // c.m_warps, warp % c.m_warps
        split, pair = bid % splits, bid // splits
        head_kv, b = pair % mK.shape[1], pair // mK.shape[1]
        seqlen_q, seqlen_k = mQ.shape[2], mK.shape[2]
        q_heads = mQ.shape[1] // mK.shape[1]
        rows = q_heads * seqlen_q
        head_q = head_kv * q_heads

        smem = cutlass.memory.SmemAllocator()
        ring_ptr = smem.allocate(c.ring_bytes, byte_alignment=1024)
        sQ = smem.allocate(c.q_bytes, byte_alignment=1024).toint()
        sStats = smem.allocate_tensor(Float32, cute.make_layout((2, c.rows, c.groups)), byte_alignment=16)
        sFlag = smem.allocate_tensor(Int32, cute.make_layout(1), byte_alignment=16)
        ring = ring_ptr.toint() + group * (c.slots * c.slot_bytes)
        sNotes = None
        if const_expr(c.mask != "none"):
            notes = cute.make_layout((c.note_words, c.notes, c.warps))
            sNotes = smem.allocate_tensor(Uint32, notes, byte_alignment=16)[None, None, warp]
        policy = ptx("createpolicy.fractional.L2::evict_first.b64 {$w0}, 1.0;", write_only_types=[Int64])

        self.load_q(mQ, sQ, tid, b, head_q, rows, seqlen_q, policy)
        cute.arch.cp_async_commit_group()

        # The keys that each of a thread's two rows may see, and any row: [0, limit).
        row = m_warp * TILE_M + lane // 4
        limits = cute.make_rmem_tensor((2,), Int32)
        mask_rows = cute.make_rmem_tensor((2,), Int32)
        per_head, per_q, mask_count = self.mask_rows(mMask, q_heads, seqlen_q)
        for i in cutlass.range_constexpr(2):
            r = row + 8 * i
            limits[i] = clamp(r % seqlen_q + 1 + offset, seqlen_k)
            mask_rows[i] = cutlass.min(r, rows - 1) // seqlen_q * per_head + r % seqlen_q * per_q
        last = clamp(seqlen_q + offset, seqlen_k)
        first, step = split * c.groups + group, splits * c.groups
        blocks = cute.ceil_div(last, c.block)
        mine = cute.ceil_div(cutlass.max(blocks - first, 0), step)

        k_row, v_row = Int64(mK.stride[2]) * 2, Int64(mV.stride[2]) * 2
        gK = mK.iterator.toint() + (Int64(b) * mK.stride[0] + Int64(head_kv) * mK.stride[1]) * 2
        gV = mV.iterator.toint() + (Int64(b) * mV.stride[0] + Int64(head_kv) * mV.stride[1]) * 2
        gMask, mask_strides = None, None
        if const_expr(c.mask != "none"):
            gMask, mask_strides = self.mask_origin(mMask, b, head_q)

        # How far loading is: blocks found, candidates looked at (of a mask in chunks of 32: which of them are left, and
        # lane by lane the keys of each), the block being loaded and the bits of its keys.
        found, chunk, pending, seen = Int32(0), Int32(0), Uint32(0), Uint32(0)
        base, keys = Int32(0), Uint32(0)
        for s in cutlass.range(c.slots, unroll=1):
            if s % 2 == 0:
                found, chunk, pending, seen, base, keys = self.next_block(
                    gMask, mask_strides, mask_count, per_head, per_q, sNotes, lane,
                    first, step, mine, last, seqlen_q, found, chunk, pending, seen,
                )  # fmt: skip
                self.load(gK, k_row, c.head_dim, ring + s * c.slot_bytes, base, keys, tid, policy)
            else:
                self.load(gV, v_row, c.head_dim_v, ring + s * c.slot_bytes, base, keys, tid, policy)
            cute.arch.cp_async_commit_group()

        cute.arch.cp_async_wait_group(c.slots)
        cute.arch.barrier()
        tQ = cute.make_rmem_tensor((4, c.head_dim // TILE_K), Uint32)
        if const_expr(c.q_in_registers):
            for s in cutlass.range_constexpr(c.head_dim // TILE_K):
                self.load_q_fragment(tQ, s, sQ, m_warp, lane, s)

        tO = cute.make_rmem_tensor((4, c.head_dim_v // TILE_N), Float32)
        tO.fill(0.0)
        peak = cute.make_rmem_tensor((2,), Float32)
        total = cute.make_rmem_tensor((2,), Float32)
        peak.fill(-Float32.inf)
        total.fill(0.0)
        tP = cute.make_rmem_tensor((4, c.block // TILE_K), Uint32)

        done, slot = Int32(0), Int32(0)
        while done < found:
            block_base = (first + done * step) * c.block
            words = cute.make_rmem_tensor((2,), Uint32)
            words.fill(self.full)
            self.wait(group)
            if const_expr(c.mask != "none"):
                note = done % c.notes
                block_base = Int32(sNotes[0, note])
                for i in cutlass.range_constexpr(2):
                    words[i] = sNotes[1 + (mask_rows[i] if const_expr(c.mask == "rows") else 0), note]
            for i in cutlass.range_constexpr(2):
                words[i] = words[i] & self.below(limits[i] - block_base)

            at = ring + slot * c.slot_bytes
            tS = self.scores(tQ, sQ, at, m_warp, lane)
            self.sync(group)
            if const_expr(c.slots % 2 == 0):
                found, chunk, pending, seen, base, keys = self.next_block(
                    gMask, mask_strides, mask_count, per_head, per_q, sNotes, lane,
                    first, step, mine, last, seqlen_q, found, chunk, pending, seen,
                )  # fmt: skip
                self.load(gK, k_row, c.head_dim, at, base, keys, tid, policy)
            else:
                self.load(gV, v_row, c.head_dim_v, at, base, keys, tid, policy)
            cute.arch.cp_async_commit_group()
            slot = slot + 1 if slot + 1 < c.slots else 0

            self.softmax(tS, tP, tO, peak, total, words, scale, lane)

            self.wait(group)
            at = ring + slot * c.slot_bytes
            self.accumulate(tP, tO, at, lane)
            self.sync(group)
            if const_expr(c.slots % 2 == 1):
                found, chunk, pending, seen, base, keys = self.next_block(
                    gMask, mask_strides, mask_count, per_head, per_q, sNotes, lane,
                    first, step, mine, last, seqlen_q, found, chunk, pending, seen,
                )  # fmt: skip
                self.load(gK, k_row, c.head_dim, at, base, keys, tid, policy)
            else:
                self.load(gV, v_row, c.head_dim_v, at, base, keys, tid, policy)
            cute.arch.cp_async_commit_group()
            slot = slot + 1 if slot + 1 < c.slots else 0
            done += 1

        cute.arch.cp_async_wait_group(0)
        cute.arch.barrier()
        self.hand_over(tO, peak, total, ring_ptr, sStats, group, row, lane)
        cute.arch.barrier()
        pairs = mK.shape[0] * mK.shape[1]
        self.finish(
            mO, mLse, mScratch, ring_ptr, sStats, sFlag, tid,
            pairs, pair, split, splits, bundle, scale, b, head_q, rows, seqlen_q,
        )  # fmt: skip

    # --- Loading ---------------------------------------------------------------------------------------------------

    @cute.jit
    def load_q(self, mQ, sQ, tid, b, head_q, rows, seqlen_q, policy):
        """The packed rows of q into shared memory, head by head; zeros behind them."""
        c = self.config
        chunks = c.head_dim // 8
        gQ = mQ.iterator.toint() + (Int64(b) * mQ.stride[0] + Int64(head_q) * mQ.stride[1]) * 2
        for i in cutlass.range_constexpr(-(-c.rows * chunks // c.threads)):
            index = i * c.threads + tid
            r, chunk = index // chunks, index % chunks
            h, q = r // seqlen_q, r % seqlen_q
            source = gQ + (Int64(h) * mQ.stride[1] + Int64(q) * mQ.stride[2]) * 2 + chunk * 16
            size = Int32(16) if r < rows else Int32(0)
            if const_expr((i + 1) * c.threads <= c.rows * chunks) or index < c.rows * chunks:
                copy_async(sQ + swizzled(r, chunk, chunks) * 16, source, size, policy)

    @cute.jit
    def load(self, g, stride, head_dim: cutlass.Constexpr, slot, base, keys, tid, policy):
        """Start a group's copies of one block of k or v. `keys`: bits of the keys to load, 0: there is no block."""
        c = self.config
        threads: cutlass.Constexpr = WARP * c.m_warps
        chunks: cutlass.Constexpr = head_dim // 8
        total: cutlass.Constexpr = c.block * chunks
        # After `period` copies of all threads, whole rows are done and a thread is at the same chunk, `down` rows on.
        period: cutlass.Constexpr = chunks // gcd(chunks, threads)
        down: cutlass.Constexpr = threads * period // chunks
        if keys != 0:
            t = tid % threads
            start = g + Int64(base) * stride
            for p in cutlass.range_constexpr(min(period, -(-total // threads))):
                index = p * threads + t
                r, chunk = index // chunks, index % chunks
                # One address and one word of bits walk down the block: all of them at once would not fit the registers.
                source, bits = start + Int64(r) * stride + chunk * 16, keys >> Uint32(r)
                for i in cutlass.range_constexpr(-(-c.block // down)):
                    if const_expr((p + 1) * threads <= total) or index < total:
                        size = Int32(16) if bits & Uint32(1 << (i * down)) != 0 else Int32(0)
                        copy_async(slot + swizzled(r + i * down, chunk, chunks) * 16, source, size, policy)
                    source = mma.advance(source, stride * down)

    @cute.jit
    def wait(self, group):
        """The oldest slot of the ring has arrived, for all threads of the group."""
        cute.arch.cp_async_wait_group(self.config.slots - 1)
        self.sync(group)

    @cute.jit
    def sync(self, group):
        c = self.config
        if const_expr(c.m_warps == 1):
            cute.arch.sync_warp()
        else:
            cute.arch.barrier(barrier_id=1 + group, number_of_threads=WARP * c.m_warps)

    # --- Which blocks, which keys ----------------------------------------------------------------------------------

    @property
    def full(self) -> int:
        """The bits of a block's keys, all of them set."""
        return (1 << self.config.block) - 1

    @cute.jit
    def below(self, count):
        """The bits of the first `count` keys of a block."""
        block = self.config.block
        n = cutlass.min(cutlass.max(count, 0), block)
        return Uint32(self.full) >> Uint32(block - n) if n > 0 else Uint32(0)

    @cute.jit
    def mask_rows(self, mMask, q_heads, seqlen_q):
        """Row index of the mask per q head and per q position (0: broadcast), and the number of its rows."""
        if const_expr(self.config.mask == "rows"):
            heads = q_heads if mMask.shape[1] > 1 else 1
            positions = seqlen_q if mMask.shape[2] > 1 else 1
            per_head = positions if mMask.shape[1] > 1 else 0
            per_q = 1 if mMask.shape[2] > 1 else 0
            return Int32(per_head), Int32(per_q), Int32(heads * positions)
        else:
            return Int32(0), Int32(0), Int32(1)

    @cute.jit
    def mask_origin(self, mMask, b, head_q):
        """Address of the mask of the first packed row, and its strides per head, q position and key."""
        batch = Int64(b) * mMask.stride[0] if mMask.shape[0] > 1 else Int64(0)
        head = Int64(head_q) * mMask.stride[1] if mMask.shape[1] > 1 else Int64(0)
        return mMask.iterator.toint() + batch + head, (
            Int64(mMask.stride[1]),
            Int64(mMask.stride[2]),
            Int64(mMask.stride[3]),
        )

    @cute.jit
    def mask_row(self, gMask, strides, r, per_head, per_q, seqlen_q):
        """Address of row r of the mask, rows counted as `mask_rows` does."""
        if const_expr(self.config.mask == "rows"):
            positions = cutlass.max(per_head, 1) if per_head > 0 else seqlen_q
            h, q = r // positions, r % positions
            head = Int64(h) * strides[0] if per_head > 0 else Int64(0)
            position = Int64(q) * strides[1] if per_q > 0 else Int64(0)
            return gMask + head + position
        else:
            return gMask

    @cute.jit
    def next_block(
        self, gMask, strides, mask_count, per_head, per_q, sNotes, lane,
        first, step, mine, last, seqlen_q, found, chunk, pending, seen,
    ):  # fmt: skip
        """Find the next block with a key to attend: (found, chunk, pending, seen, first key, bits of its keys or 0)."""
        c = self.config
        base, keys = Int32(0), Uint32(0)
        if const_expr(c.mask == "none"):
            if chunk < mine:
                base = (first + chunk * step) * c.block
                keys = self.below(last - base)
                chunk += 1
                found += 1
        else:
            while pending == 0 and chunk < mine:
                seen = self.scan(gMask, strides, mask_count, per_head, per_q, seqlen_q, lane, first, step, chunk, last)
                pending = Uint32(cute.arch.vote_ballot_sync(seen != 0))
                chunk += WARP
            if pending != 0:
                i = trailing_zeros(pending)
                pending = pending & (pending - 1)
                base = (first + (chunk - WARP + i) * step) * c.block
                keys = Uint32(cute.arch.shuffle_sync(seen, i))
                note = found % c.notes
                self.note_down(
                    gMask, strides, mask_count, per_head, per_q, sNotes, lane, base, keys, note, last, seqlen_q
                )
                found += 1
        return found, chunk, pending, seen, base, keys

    @cute.jit
    def scan(self, gMask, strides, mask_count, per_head, per_q, seqlen_q, lane, first, step, chunk, last):
        """The mask over 32 blocks: lane i gets the bits of block chunk + i, each set where any row sees the key.

        A warp reads one or two blocks at once, a key a lane, and has 16 reads of one row or 8 of 4 rows under way.
        """
        c = self.config
        together: cutlass.Constexpr = WARP // c.block
        parts: cutlass.Constexpr = 4 if c.mask == "rows" else 2
        reads: cutlass.Constexpr = c.block // parts
        rows: cutlass.Constexpr = 4 if c.mask == "rows" else 1
        key = (first + (chunk + lane // c.block) * step) * c.block + lane % c.block
        down = step * (c.block * together)
        along = Int64(down) * strides[2]
        seen = Uint32(0)
        for part in cutlass.range(parts, unroll=1):
            start = key + part * (reads * down)
            bits = cute.make_rmem_tensor((reads,), Uint32)
            bits.fill(0)
            for r0 in cutlass.range(0, mask_count, rows, unroll=1):
                sources = cute.make_rmem_tensor((rows,), Int64)
                for i in cutlass.range_constexpr(rows):
                    r = cutlass.min(r0 + i, mask_count - 1)
                    row = self.mask_row(gMask, strides, r, per_head, per_q, seqlen_q)
                    sources[i] = row + Int64(start) * strides[2]
                at = start
                for n in cutlass.range_constexpr(reads):
                    for i in cutlass.range_constexpr(rows):
                        bits[n] = bits[n] | load_byte_below(sources[i], at, last)
                        sources[i] = mma.advance(sources[i], along)
                    at += down
            for n in cutlass.range_constexpr(reads):
                word = Uint32(cute.arch.vote_ballot_sync(bits[n] != 0))
                mine = lane // together == part * reads + n
                seen = (word >> Uint32(lane % together * c.block)) & Uint32(self.full) if mine else seen
        return seen

    @cute.jit
    def note_down(self, gMask, strides, mask_count, per_head, per_q, sNotes, lane, base, keys, note, last, seqlen_q):
        """Remember a block until its scores are there: its first key and, row by row, which keys are seen."""
        c = self.config
        if lane == 0:
            sNotes[0, note] = Uint32(base)
        if const_expr(c.mask == "keys"):
            if lane == 0:
                sNotes[1, note] = keys
        else:
            key = base + lane % c.block
            for r0 in cutlass.range(0, mask_count, 4, unroll=1):
                bits = cute.make_rmem_tensor((4,), Uint32)
                for i in cutlass.range_constexpr(4):
                    r = cutlass.min(r0 + i, mask_count - 1)
                    address = self.mask_row(gMask, strides, r, per_head, per_q, seqlen_q)
                    bits[i] = load_byte_below(address + Int64(key) * strides[2], key, last)
                for i in cutlass.range_constexpr(4):
                    word = Uint32(cute.arch.vote_ballot_sync(bits[i] != 0)) & Uint32(self.full)
                    if lane == 0 and r0 + i < mask_count:
                        sNotes[1 + r0 + i, note] = word

    # --- Arithmetic of a warp --------------------------------------------------------------------------------------

    @cute.jit
    def load_q_fragment(self, tQ, s: cutlass.Constexpr, sQ, m_warp, lane, k_step: cutlass.Constexpr):
        chunks: cutlass.Constexpr = self.config.head_dim // 8
        r, chunk = m_warp * TILE_M + lane % 16, 2 * k_step + lane // 16
        words = mma.load_matrices(sQ + swizzled(r, chunk, chunks) * 16, 0)
        for i in cutlass.range_constexpr(4):
            tQ[i, s] = words[i]

    @cute.jit
    def scores(self, tQ, sQ, slot, m_warp, lane):
        """q @ k.T of 16 rows and one block, as (4, block / 8) accumulators."""
        c = self.config
        chunks: cutlass.Constexpr = c.head_dim // 8
        tS = cute.make_rmem_tensor((4, c.block // TILE_N), Float32)
        tS.fill(0.0)
        for s in cutlass.range_constexpr(c.head_dim // TILE_K):
            if const_expr(not c.q_in_registers):
                self.load_q_fragment(tQ, 0, sQ, m_warp, lane, s)
            a: cutlass.Constexpr = s if c.q_in_registers else 0
            q = [tQ[i, a] for i in range(4)]
            for n in cutlass.range_constexpr(c.block // 16):
                key, chunk = n * 16 + lane // 16 * 8 + lane % 8, 2 * s + lane // 8 % 2
                w = mma.load_matrices(slot + swizzled(key, chunk, chunks) * 16, 0)
                mma.multiply(c.dtype, tS, 16 * n, q, w[0], w[1])
                mma.multiply(c.dtype, tS, 16 * n + 8, q, w[2], w[3])
        return tS

    @cute.jit
    def softmax(self, tS, tP, tO, peak, total, words, scale, lane):
        """Online softmax over one block: scores to 16-bit weights, the row maxima, sums and the output so far.

        Maxima are subtracted before anything is scaled: a multiply-add rounds scale times the maximum, which is seen in
        16-bit weights of large scores.
        """
        c = self.config
        tiles: cutlass.Constexpr = c.block // TILE_N
        if not cute.arch.vote_all_sync((words[0] & words[1]) == self.full):
            for i in cutlass.range_constexpr(2):
                word = words[i] >> Uint32(lane % 4 * 2)
                for n in cutlass.range_constexpr(tiles):
                    for e in cutlass.range_constexpr(2):
                        if (word & Uint32(1 << (n * TILE_N + e))) == 0:
                            tS[2 * i + e, n] = -Float32.inf
        factors = cute.make_rmem_tensor((2,), Float32)
        for i in cutlass.range_constexpr(2):
            top = peak[i]
            for n in cutlass.range_constexpr(tiles):
                top = cute.arch.fmax(top, cute.arch.fmax(tS[2 * i, n], tS[2 * i + 1, n]))
            top = cute.arch.fmax(top, cute.arch.shuffle_sync_bfly(top, offset=1))
            top = cute.arch.fmax(top, cute.arch.shuffle_sync_bfly(top, offset=2))
            shift = top if top > -Float32.inf else Float32(0.0)
            factors[i] = exp2((peak[i] - shift) * scale)
            peak[i] = top
            added = Float32(0.0)
            for n in cutlass.range_constexpr(tiles):
                for e in cutlass.range_constexpr(2):
                    tS[2 * i + e, n] = exp2((tS[2 * i + e, n] - shift) * scale)
                    added += tS[2 * i + e, n]
            total[i] = total[i] * factors[i] + added
        if cute.arch.vote_any_sync(factors[0] != 1.0 or factors[1] != 1.0):
            for n in cutlass.range_constexpr(c.head_dim_v // TILE_N):
                for i in cutlass.range_constexpr(4):
                    tO[i, n] = tO[i, n] * factors[i // 2]
        for n in cutlass.range_constexpr(c.block // TILE_K):
            for i in cutlass.range_constexpr(4):
                # Registers of an A operand: rows 0 and 8 of keys 0 to 7, then of keys 8 to 15.
                tile, e = 2 * n + i // 2, i % 2 * 2
                tP[i, n] = mma.pack(c.dtype, tS[e, tile], tS[e + 1, tile])

    @cute.jit
    def accumulate(self, tP, tO, slot, lane):
        """The weights of one block times its rows of v, onto the output."""
        c = self.config
        chunks: cutlass.Constexpr = c.head_dim_v // 8
        for s in cutlass.range_constexpr(c.block // TILE_K):
            p = [tP[i, s] for i in range(4)]
            for n in cutlass.range_constexpr(c.head_dim_v // 16):
                key, chunk = s * TILE_K + lane % 16, 2 * n + lane // 16
                w = mma.load_matrices(slot + swizzled(key, chunk, chunks) * 16, 0, transposed=True)
                mma.multiply(c.dtype, tO, 16 * n, p, w[0], w[1])
                mma.multiply(c.dtype, tO, 16 * n + 8, p, w[2], w[3])

    # --- Adding up -------------------------------------------------------------------------------------------------

    @cute.jit
    def hand_over(self, tO, peak, total, ring_ptr, sStats, group, row, lane):
        """What a warp has, into shared memory: outputs that are not divided yet, row maxima and row sums."""
        c = self.config
        sO = self.exchange(ring_ptr)
        for i in cutlass.range_constexpr(2):
            summed = total[i]
            summed += cute.arch.shuffle_sync_bfly(summed, offset=1)
            summed += cute.arch.shuffle_sync_bfly(summed, offset=2)
            if lane % 4 == 0:
                sStats[0, row + 8 * i, group] = peak[i]
                sStats[1, row + 8 * i, group] = summed
            for n in cutlass.range_constexpr(c.head_dim_v // TILE_N):
                for e in cutlass.range_constexpr(2):
                    sO[n * TILE_N + lane % 4 * 2 + e, row + 8 * i, group] = tO[2 * i + e, n]

    @cute.jit
    def exchange(self, ring_ptr):
        c = self.config
        layout = cute.make_layout(
            (c.head_dim_v, c.rows, c.groups), stride=(1, c.exchange_pitch, c.exchange_pitch * c.rows)
        )
        return cute.make_tensor(cute.recast_ptr(ring_ptr, dtype=Float32), layout)

    @cute.jit
    def finish(
        self, mO, mLse, mScratch, ring_ptr, sStats, sFlag, tid,
        pairs, pair, split, splits, bundle, scale, b, head_q, rows, seqlen_q,
    ):  # fmt: skip
        """Add the groups up; write the output, or a partial one that the last CTA of a bundle adds up."""
        c = self.config
        vectors: cutlass.Constexpr = c.head_dim_v // 4
        sO = self.exchange(ring_ptr)
        gStats, gPartial = self.partials(mScratch, pair * splits + split, rows)
        items = rows * vectors
        acc = cute.make_rmem_tensor((4,), Float32)
        for item in cutlass.range(tid, items, c.threads, unroll=1):
            r, column = item // vectors, item % vectors * 4
            top = sStats[0, r, 0]
            for g in cutlass.range_constexpr(1, c.groups):
                top = cute.arch.fmax(top, sStats[0, r, g])
            shift = top if top > -Float32.inf else Float32(0.0)
            summed = Float32(0.0)
            acc.fill(0.0)
            for g in cutlass.range_constexpr(c.groups):
                weight = exp2((sStats[0, r, g] - shift) * scale)
                summed += sStats[1, r, g] * weight
                for e in cutlass.range_constexpr(4):
                    acc[e] = acc[e] + sO[column + e, r, g] * weight
            if splits == 1:
                self.write(mO, mLse, acc, top, summed, scale, b, head_q, r, column, seqlen_q)
            else:
                self.store(gStats, gPartial, acc, top, summed, r, column)
        if splits > 1:
            self.add_splits(
                mO, mLse, mScratch, sFlag, tid, pairs, pair, split, splits, bundle, scale, b, head_q, rows, seqlen_q
            )

    @cute.jit
    def partials(self, mScratch, index, rows):
        """Addresses of the (maximum, sum) pairs and outputs of one partial result in the scratch buffer."""
        c = self.config
        start = mScratch.iterator.toint() + COUNTERS * 4 + Int64(index) * rows * (c.head_dim_v + 4) * 4
        return start + Int64(rows) * c.head_dim_v * 4, start

    @cute.jit
    def store(self, gStats, gPartial, acc, top, summed, r, column):
        """Four elements of a row of a partial result: not divided yet."""
        store_vector(gPartial + (Int64(r) * self.config.head_dim_v + column) * 4, acc)
        if column == 0:
            store_pair(gStats + Int64(r) * 8, top, summed)

    @cute.jit
    def add_splits(
        self, mO, mLse, mScratch, sFlag, tid, pairs, pair, split, splits, bundle, scale, b, head_q, rows, seqlen_q
    ):
        """The last CTA to arrive of a bundle adds it up; of several bundles, the last one those.

        Results of bundles lie behind those of all CTAs, counters of (batch, kv head)s behind those of all bundles.
        """
        bundles = cute.ceil_div(splits, bundle)
        mine = split // bundle
        source, count = pair * splits + mine * bundle, cutlass.min(bundle, splits - mine * bundle)
        counter, target = pair * bundles + mine, pairs * splits + pair * bundles + mine
        to_go = Int32(1) if bundles == 1 else Int32(2)
        while to_go > 0:
            cute.arch.barrier()
            address = cute.recast_ptr(mScratch.iterator + counter, dtype=Int32)
            if tid == 0:
                # One thread's fences stand for the CTA: the barriers order the others' stores and loads around them.
                cute.arch.fence_acq_rel_gpu()
                sFlag[0] = cute.arch.atomic_add(address, Int32(1), sem="relaxed", scope="gpu")
                cute.arch.fence_acq_rel_gpu()
            cute.arch.barrier()
            to_go -= 1
            if sFlag[0] == count - 1:
                self.add_up(
                    mO, mLse, mScratch, tid, source, count, target, to_go == 0, scale, b, head_q, rows, seqlen_q
                )
                if tid == 0:
                    cute.make_tensor(address, cute.make_layout(1))[0] = Int32(0)
                source, count, counter = pairs * splits + pair * bundles, bundles, pairs * bundles + pair
            else:
                to_go = Int32(0)

    @cute.jit
    def add_up(self, mO, mLse, mScratch, tid, source, count, target, last, scale, b, head_q, rows, seqlen_q):
        """Sum of `count` partial results, to the output or as another one; 16 and their weights are read at once."""
        c = self.config
        vectors: cutlass.Constexpr = c.head_dim_v // 4
        gStats, gPartial = self.partials(mScratch, source, rows)
        gSumStats, gSum = self.partials(mScratch, target, rows)
        pitch = Int64(rows) * (c.head_dim_v + 4) * 4
        acc = cute.make_rmem_tensor((4,), Float32)
        for item in cutlass.range(tid, rows * vectors, c.threads, unroll=1):
            r, column = item // vectors, item % vectors * 4
            acc.fill(0.0)
            top, summed = -Float32.inf, Float32(0.0)
            stats = gStats + Int64(r) * 8
            values = gPartial + (Int64(r) * c.head_dim_v + column) * 4
            for first in cutlass.range(0, count, AT_ONCE, unroll=1):
                tops = cute.make_rmem_tensor((AT_ONCE,), Float32)
                sums = cute.make_rmem_tensor((AT_ONCE,), Float32)
                parts = cute.make_rmem_tensor((4, AT_ONCE), Float32)
                for i in cutlass.range_constexpr(AT_ONCE):
                    tops[i], sums[i] = load_pair_below(stats, first + i, count)
                    part = load_vector_below(values, first + i, count)
                    for e in cutlass.range_constexpr(4):
                        parts[e, i] = part[e]
                    stats, values = mma.advance(stats, pitch), mma.advance(values, pitch)
                before = top
                for i in cutlass.range_constexpr(AT_ONCE):
                    top = cute.arch.fmax(top, tops[i])
                shift = top if top > -Float32.inf else Float32(0.0)
                factor = exp2((before - shift) * scale)
                summed = summed * factor
                for e in cutlass.range_constexpr(4):
                    acc[e] = acc[e] * factor
                for i in cutlass.range_constexpr(AT_ONCE):
                    weight = exp2((tops[i] - shift) * scale)
                    summed += sums[i] * weight
                    for e in cutlass.range_constexpr(4):
                        acc[e] = acc[e] + parts[e, i] * weight
            if last:
                self.write(mO, mLse, acc, top, summed, scale, b, head_q, r, column, seqlen_q)
            else:
                self.store(gSumStats, gSum, acc, top, summed, r, column)

    @cute.jit
    def write(self, mO, mLse, acc, top, summed, scale, b, head_q, r, column, seqlen_q):
        """Four elements of an output row; a row without keys is zeros and its log-sum-exp -inf."""
        c = self.config
        h, q = r // seqlen_q, r % seqlen_q
        inverse = 1.0 / summed if summed != 0.0 else Float32(0.0)
        low = mma.pack(c.dtype, acc[0] * inverse, acc[1] * inverse)
        high = mma.pack(c.dtype, acc[2] * inverse, acc[3] * inverse)
        place = Int64(b) * mO.stride[0] + Int64(q) * mO.stride[1] + Int64(head_q + h) * mO.stride[2] + column
        ptx(
            "st.global.v2.b32 [{$r0}], {{$r1}, {$r2}};",
            read_only_args=[mO.iterator.toint() + place * 2, low, high],
        )
        if const_expr(c.lse):
            self.write_lse(mLse, top * scale, summed, b, head_q + h, q, column)

    @cute.jit
    def write_lse(self, mLse, top, summed, b, head, q, column):
        if column == 0:
            value = -Float32.inf
            if summed != 0.0:
                value = (top + cute.math.log2(summed)) * LN_2
            mLse[b, head, q] = value


# --- Instructions --------------------------------------------------------------------------------------------------


def clamp(count, most):
    return cutlass.min(cutlass.max(count, 0), most)


def copy_async(target, source, size, policy):
    """16 bytes from global to shared memory past the L1; of `size` 0 nothing is read and zeros are written."""
    ptx(
        "cp.async.cg.shared.global.L2::cache_hint [{$r0}], [{$r1}], 16, {$r2}, {$r3};",
        read_only_args=[target, source, size, policy],
    )


def exp2(x):
    """2 ** x, denormals flushed; -inf gives 0."""
    return ptx("ex2.approx.ftz.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x])


def trailing_zeros(word):
    """Of a word that is not 0."""
    return Int32(cute.arch.popc((word & (~word + Uint32(1))) - Uint32(1)))


def load_pair_below(address, index, count):
    """The two floats at `address` where index < count, else what changes no maximum and no sum: nothing is read."""
    return ptx(
        "{ .reg .pred p; setp.lt.s32 p, {$r1}, {$r2}; mov.f32 {$w0}, 0fFF800000; mov.f32 {$w1}, 0f00000000;"
        " @p ld.global.v2.f32 {{$w0}, {$w1}}, [{$r0}]; }",
        write_only_types=[Float32] * 2,
        read_only_args=[address, index, count],
    )


def load_vector_below(address, index, count):
    """The four floats at `address` where index < count, else zeros: nothing is read there."""
    zeros = " ".join(f"mov.f32 {{$w{i}}}, 0f00000000;" for i in range(4))
    return ptx(
        f"{{ .reg .pred p; setp.lt.s32 p, {{$r1}}, {{$r2}}; {zeros}"
        " @p ld.global.v4.f32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}]; }",
        write_only_types=[Float32] * 4,
        read_only_args=[address, index, count],
    )


def store_vector(address, values):
    ptx(
        "st.global.v4.f32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
        read_only_args=[address, *(values[i] for i in range(4))],
    )


def store_pair(address, first, second):
    ptx("st.global.v2.f32 [{$r0}], {{$r1}, {$r2}};", read_only_args=[address, first, second])


def build(config: DecodeConfig):
    """(host function, stand-in arguments) for the compiler."""
    c = config

    def tensor(dtype, *shape, strides: int = 0):
        stride = tuple(cute.sym_int64() for _ in range(strides or len(shape) - 1))
        return cute.runtime.make_fake_tensor(
            dtype, shape, stride=stride if strides else (*stride, 1), assumed_align=16 if dtype is not Uint8 else 1
        )

    element = mma.DTYPES[c.dtype]
    batch, heads_q, heads_kv, seqlen_q, seqlen_k = (cute.sym_int32() for _ in range(5))
    q = tensor(element, batch, heads_q, seqlen_q, c.head_dim)
    k = tensor(element, batch, heads_kv, seqlen_k, c.head_dim)
    v = tensor(element, batch, heads_kv, seqlen_k, c.head_dim_v)
    mask = (tensor(Uint8, *(cute.sym_int32() for _ in range(3)), seqlen_k, strides=4),) if c.mask != "none" else ()
    out = tensor(element, batch, seqlen_q, heads_q, c.head_dim_v)
    lse = (tensor(Float32, batch, heads_q, seqlen_q),) if c.lse else ()
    scratch = tensor(Float32, cute.sym_int32())
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    kernel = Decode(c)
    if c.mask != "none":
        host = kernel.masked_with_lse if c.lse else kernel.masked
    else:
        host = kernel.with_lse if c.lse else kernel.plain
    return host, (q, k, v, *mask, out, *lse, scratch, Int32(1), Int32(1), Float32(1.0), Int32(0), stream)
