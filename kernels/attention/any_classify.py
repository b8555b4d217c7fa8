"""A boolean mask turned into lists of the key tiles that each block of queries has to look at, on every target.

Causality and a window are folded in, so an attention kernel that walks the lists needs neither. Queries are taken 128
at a time (a block), keys 128 at a time (a tile); whoever works on smaller tiles takes them apart. A tile of a block is
empty if no query of the block sees a key of it, full if every query sees all 128 keys, else partial; a tile that
reaches past the keys is partial, queries past the last one do not count. For a mask of (mask_batch, mask_heads), each
1 where it is broadcast, `blocks` blocks and `tiles` tiles, all int32:

    counts (mask_batch, mask_heads, blocks, 2)          full tiles, partial tiles
    lists  (mask_batch, mask_heads, blocks, tiles)      the full tiles from the front, ascending: [0, full); the
                                                        partial ones from the back, descending: [tiles - partial, tiles)
                                                        and the lowest of them last; what is between is undefined
    bits   (mask_batch, mask_heads, blocks, tiles, 128, 4)  of partial tiles, and of queries that there are: bit j % 32
                                                        of word j // 32 is set if the row's query sees key
                                                        128 * tile + j; others are undefined

so n = full + partial steps counted down from n - 1, s to lists[s if s < full else s + tiles - n], take the partial
tiles first. A mask that says the same to every query, without causality and window, has one block with one row of bits:
consumers get all three with strides of 0 wherever something is the same for all.

Two launches: the first reads the mask once, 128 rows of 512 keys a CTA, and writes the states of its four tiles and
their bits; the second makes the lists. Nothing depends on what was in the memory before. Keys that causality or the
window hides are not read.
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint8, Uint32

from .mask_config import BLOCK, CHUNK, TILE, ClassifyConfig

WARP = 32
LANE_KEYS = 16  #: keys of one lane, one 16-byte read of a row
FULL, PARTIAL = 1, 2
ptx = cute.arch.inline_ptx


class Classify:
    """Traceable host function `(mask, states, counts, lists, bits, access, queries, offset, left, right, stream)`.

    mask: (mask_batch, mask_heads, rows, seqlen_k) bytes, not 0: attend; any strides; rows is `queries` or 1, for all of
    them. states: (mask_batch, mask_heads, blocks, chunks of 512 keys), a byte a tile, between the launches.
    access: 2 if every row starts at a multiple of 16 bytes, 1 if keys are contiguous, else 0. Query i sees the keys
    from i + offset - left to i + offset + right.
    """

    def __init__(self, config: ClassifyConfig) -> None:
        self.config = config

    @cute.jit
    def __call__(
        self,
        mMask: cute.Tensor,
        mStates: cute.Tensor,
        mCounts: cute.Tensor,
        mLists: cute.Tensor,
        mBits: cute.Tensor,
        access: Int32,
        queries: Int32,
        offset: Int32,
        left: Int32,
        right: Int32,
        stream: cuda.CUstream,
    ):
        rows = mStates.shape[0] * mStates.shape[1] * mStates.shape[2]
        self.states(mMask, mStates, mBits, access, queries, offset, left, right).launch(
            grid=[rows * mStates.shape[3], 1, 1], block=[self.config.warps * WARP, 1, 1], stream=stream
        )
        self.compact(mStates, mCounts, mLists).launch(grid=[rows, 1, 1], block=[WARP, 1, 1], stream=stream)

    @cute.kernel
    def states(
        self, mMask, mStates, mBits, access: Int32, queries: Int32, offset: Int32, left: Int32, right: Int32
    ):  # fmt: skip
        c = self.config
        tid, bid = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        lane, warp = tid % WARP, cute.arch.make_warp_uniform(tid // WARP)
        seqlen_k = mMask.shape[3]
        chunks, blocks = mStates.shape[3], mStates.shape[2]
        chunk, row_of_blocks = bid % chunks, bid // chunks
        block, slab = row_of_blocks % blocks, row_of_blocks // blocks
        head, batch = slab % mMask.shape[1], slab // mMask.shape[1]
        key = chunk * CHUNK + lane * LANE_KEYS
        first = block * BLOCK + warp * c.rows
        down = Int64(mMask.stride[2]) if mMask.shape[2] > 1 else Int64(0)
        along = Int64(mMask.stride[3])
        source = mMask.iterator.toint() + Int64(batch) * mMask.stride[0] + Int64(head) * mMask.stride[1]
        source = source + Int64(first) * down + Int64(key) * along

        ranges = cute.make_rmem_tensor((2, c.rows), Int32)  # of a row, the keys of this lane that are allowed
        for r in cutlass.range_constexpr(c.rows):
            diagonal = first + r + offset
            end = cutlass.min(diagonal + right + 1, seqlen_k) - key
            end = cutlass.min(cutlass.max(end, 0), LANE_KEYS) if first + r < queries else Int32(0)
            ranges[0, r] = cutlass.min(cutlass.max(diagonal - left - key, 0), LANE_KEYS)
            ranges[1, r] = end
        bits = cute.make_rmem_tensor((c.rows,), Uint32)
        bits.fill(0)
        if access == 2 and key + LANE_KEYS <= seqlen_k:
            words = cute.make_rmem_tensor((4, c.rows), Uint32)
            for r in cutlass.range_constexpr(c.rows):
                found = load_vector_if(source + r * down, ranges[0, r], ranges[1, r])
                for i in cutlass.range_constexpr(4):
                    words[i, r] = found[i]
            for r in cutlass.range_constexpr(c.rows):
                bits[r] = bits_of(words[0, r], words[1, r], words[2, r], words[3, r])
        elif access == 1 and key + LANE_KEYS + 4 <= seqlen_k:
            # Five aligned words hold the sixteen bytes wherever they start; the fifth ends within the row.
            for start in cutlass.range_constexpr(0, c.rows, c.rows // 2):
                words = cute.make_rmem_tensor((5, c.rows // 2), Uint32)
                for r in cutlass.range_constexpr(c.rows // 2):
                    address = source + (start + r) * down
                    found = load_words_if(address - (address & 3), ranges[0, start + r], ranges[1, start + r])
                    for i in cutlass.range_constexpr(5):
                        words[i, r] = found[i]
                for r in cutlass.range_constexpr(c.rows // 2):
                    shift = Uint32((source + (start + r) * down) & 3) * Uint32(8)
                    pairs = [shifted_pair(words[i, r], words[i + 1, r], shift) for i in range(4)]
                    bits[start + r] = bits_of(*pairs)
        else:
            for r in cutlass.range(c.rows, unroll=1):
                begin, end = Int32(0), Int32(0)
                for n in cutlass.range_constexpr(c.rows):  # registers have no index
                    begin, end = (ranges[0, n], ranges[1, n]) if r == n else (begin, end)
                seen = Uint32(0)
                if begin < end:
                    for i in cutlass.range_constexpr(LANE_KEYS):
                        byte = load_byte_below(source + r * down + i * along, Int32(i), end)
                        seen = seen | (Uint32(1 << i) if byte != Uint32(0) else Uint32(0))
                for n in cutlass.range_constexpr(c.rows):
                    bits[n] = seen if r == n else bits[n]

        some, all_seen = Uint32(0), Uint32(0xFFFF)
        for r in cutlass.range_constexpr(c.rows):
            below = (Uint32(1) << Uint32(ranges[1, r])) - Uint32(1)
            seen = bits[r] & below & ~((Uint32(1) << Uint32(ranges[0, r])) - Uint32(1))
            bits[r] = seen
            some = some | seen
            all_seen = all_seen & (seen if first + r < queries else Uint32(0xFFFF))

        smem = cutlass.memory.SmemAllocator()
        sWords = smem.allocate_tensor(Uint32, cute.make_layout((2, c.warps)), byte_alignment=16)
        votes_some = Uint32(cute.arch.vote_ballot_sync(some != Uint32(0)))
        votes_all = Uint32(cute.arch.vote_ballot_sync(all_seen == Uint32(0xFFFF)))
        if lane == 0:
            sWords[0, warp] = votes_some
            sWords[1, warp] = votes_all
        cute.arch.barrier()
        votes_some, votes_all = Uint32(0), Uint32(0xFFFFFFFF)
        for w in cutlass.range_constexpr(c.warps):
            votes_some = votes_some | sWords[0, w]
            votes_all = votes_all & sWords[1, w]
        four = Uint32(0)
        partial = False
        for t in cutlass.range_constexpr(CHUNK // TILE):
            seen_t, all_t = byte_of(votes_some, t), byte_of(votes_all, t)
            state = Uint32(PARTIAL) if seen_t != Uint32(0) else Uint32(0)
            state = Uint32(FULL) if all_t == Uint32(0xFF) else state
            four = four | (state << Uint32(8 * t))
            partial = partial or (lane // 8 == t and state == Uint32(PARTIAL))
        if tid == 0:
            mStates[batch, head, block, chunk] = Int32(four)
        self.store_bits(mBits, bits, batch, head, block, chunk, warp * c.rows, lane, partial)

    @cute.jit
    def store_bits(self, mBits, bits, batch, head, block, chunk, first: Int32, lane: Int32, partial):
        """The bits of this lane's tile, if it is partial: neighbouring lanes make a word of one row each out of two."""
        tile = chunk * (CHUNK // TILE) + lane // 8
        odd = lane % 2
        gBits = mBits.iterator.toint() + 4 * (
            Int64(batch) * mBits.stride[0] + Int64(head) * mBits.stride[1] + Int64(block) * mBits.stride[2]
            + Int64(tile) * mBits.stride[3]
        )  # fmt: skip
        for r in cutlass.range_constexpr(0, self.config.rows, 2):
            sent = bits[r] if odd == 1 else bits[r + 1]
            other = Uint32(cute.arch.shuffle_sync_bfly(sent, offset=1))
            word = other | (bits[r + 1] << Uint32(16)) if odd == 1 else bits[r] | (other << Uint32(16))
            row = first + r + odd
            if partial and row < mBits.shape[4]:
                store_word(gBits + (row * 4 + lane % 8 // 2) * 4, word)

    @cute.kernel
    def compact(self, mStates, mCounts, mLists):
        lane, bid = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        blocks, chunks, tiles = mStates.shape[2], mStates.shape[3], mLists.shape[3]
        block, slab = bid % blocks, bid // blocks
        head, batch = slab % mStates.shape[1], slab // mStates.shape[1]
        before = (Uint32(1) << Uint32(lane)) - Uint32(1)
        full, partial = Int32(0), Int32(0)
        for start in cutlass.range(0, chunks, WARP, unroll=1):
            four = Uint32(0)
            if start + lane < chunks:
                four = Uint32(mStates[batch, head, block, start + lane])
            at_full, at_partial = full, partial
            for t in cutlass.range_constexpr(CHUNK // TILE):
                state = byte_of(four, t)
                votes_full = Uint32(cute.arch.vote_ballot_sync(state == Uint32(FULL)))
                votes_partial = Uint32(cute.arch.vote_ballot_sync(state == Uint32(PARTIAL)))
                at_full += Int32(cute.arch.popc(votes_full & before))
                at_partial += Int32(cute.arch.popc(votes_partial & before))
                full += Int32(cute.arch.popc(votes_full))
                partial += Int32(cute.arch.popc(votes_partial))
            for t in cutlass.range_constexpr(CHUNK // TILE):
                state = byte_of(four, t)
                tile = (start + lane) * (CHUNK // TILE) + t
                if state == Uint32(FULL):
                    mLists[batch, head, block, at_full] = tile
                    at_full += 1
                if state == Uint32(PARTIAL):
                    mLists[batch, head, block, tiles - 1 - at_partial] = tile
                    at_partial += 1
        if lane == 0:
            mCounts[batch, head, block, 0] = full
            mCounts[batch, head, block, 1] = partial


@cute.jit
def byte_of(word: Uint32, i: int) -> Uint32:
    return (word >> Uint32(8 * i)) & Uint32(0xFF)


@cute.jit
def bits_of(w0: Uint32, w1: Uint32, w2: Uint32, w3: Uint32) -> Uint32:
    """Sixteen bits, set where the byte of the four words is not 0."""
    bits = Uint32(0)
    seven = Uint32(0x7F7F7F7F)
    for i, word in enumerate((w0, w1, w2, w3)):
        high = (((word & seven) + seven) | word) & Uint32(0x80808080)
        # Bits 0, 8, 16, 24 times this meet at 24 to 27, and nowhere else collide.
        bits = bits | ((((high >> Uint32(7)) * Uint32(0x01020408)) >> Uint32(24)) << Uint32(4 * i))
    return bits


def shifted_pair(low, high, shift):
    """32 bits of the pair, from bit `shift` < 32 of the lower word on."""
    return ptx(
        "shf.r.wrap.b32 {$w0}, {$r0}, {$r1}, {$r2};", write_only_types=[Uint32], read_only_args=[low, high, shift]
    )


def load_vector_if(address, begin, end):
    """Sixteen bytes where begin < end, else 0: nothing is read there."""
    return ptx(
        "{ .reg .pred p; setp.lt.s32 p, {$r1}, {$r2}; mov.b32 {$w0}, 0; mov.b32 {$w1}, 0; mov.b32 {$w2}, 0;"
        " mov.b32 {$w3}, 0; @p ld.global.v4.u32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}]; }",
        write_only_types=[Uint32] * 4,
        read_only_args=[address, begin, end],
    )


def load_words_if(address, begin, end):
    """Five words where begin < end, else 0: nothing is read there."""
    zeros = " ".join(f"mov.b32 {{$w{i}}}, 0;" for i in range(5))
    reads = " ".join(f"@p ld.global.u32 {{$w{i}}}, [{{$r0}}+{4 * i}];" for i in range(5))
    return ptx(
        "{ .reg .pred p; setp.lt.s32 p, {$r1}, {$r2}; " + zeros + " " + reads + " }",
        write_only_types=[Uint32] * 5,
        read_only_args=[address, begin, end],
    )


def load_byte_below(address, key, end):
    """The byte at `address` where key < end, else 0: nothing is read there."""
    return ptx(
        "{ .reg .pred p; setp.lt.s32 p, {$r1}, {$r2}; mov.b32 {$w0}, 0; @p ld.global.u8 {$w0}, [{$r0}]; }",
        write_only_types=[Uint32],
        read_only_args=[address, key, end],
    )


def store_word(address, word):
    ptx("st.global.u32 [{$r0}], {$r1};", read_only_args=[address, word])


# --- For those who walk the lists ----------------------------------------------------------------------------------


@cute.jit
def key_tile(gList: cute.Tensor, step: Int32, full: Int32, end: Int32, tile_n: int) -> Int32:
    """Which tile_n keys step `step` < `end` is about, of a block's list; `full` steps are unmasked, the later partial.

    Steps, and so `full` and `end`, are of tile_n keys, which divide a tile.
    """
    parts: cutlass.Constexpr = TILE // tile_n
    place = step // parts
    if step >= full:
        place += gList.shape[0] - end // parts
    return gList[place] * parts + step % parts


def load_words(address, count: int):
    """Two or four neighbouring words of bits."""
    names = ", ".join(f"{{$w{i}}}" for i in range(count))
    return ptx(
        f"ld.global.v{count}.u32 {{{names}}}, [{{$r0}}];",
        write_only_types=[Uint32] * count,
        read_only_args=[address],
    )


def stand_ins(batch, heads_q) -> list:
    """counts, lists and bits as consumers get them, expanded to all heads."""
    blocks, tiles = cute.sym_int32(), cute.sym_int32()
    shapes = ((batch, heads_q, blocks, 2), (batch, heads_q, blocks, tiles), (batch, heads_q, blocks, tiles, BLOCK, 4))
    return [
        cute.runtime.make_fake_tensor(
            Int32, shape, stride=(*(cute.sym_int64() for _ in shape[1:]), 1), assumed_align=16 if len(shape) == 6 else 4
        )
        for shape in shapes
    ]


def build(config: ClassifyConfig):
    """(host function, stand-in arguments) for the compiler."""

    def tensor(dtype, *shape, last: bool = True):
        stride = tuple(cute.sym_int64() for _ in range(len(shape) - 1))
        stride = (*stride, 1) if last else (*stride, cute.sym_int64())
        size = 1 if dtype is Uint8 else 4
        return cute.runtime.make_fake_tensor(dtype, shape, stride=stride, assumed_align=size)

    batch, heads, rows, seqlen_k, blocks, chunks, tiles, bit_rows = (cute.sym_int32() for _ in range(8))
    mask = tensor(Uint8, batch, heads, rows, seqlen_k, last=False)
    states = tensor(Int32, batch, heads, blocks, chunks)
    counts, lists = tensor(Int32, batch, heads, blocks, 2), tensor(Int32, batch, heads, blocks, tiles)
    bits = tensor(Int32, batch, heads, blocks, tiles, bit_rows, 4)
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    return Classify(config), (mask, states, counts, lists, bits, *(Int32(0) for _ in range(5)), stream)
