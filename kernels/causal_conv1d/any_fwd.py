"""Depthwise causal convolution over [B, T, C] with contiguous channels, one source for every target.

A thread owns 16 bytes of channels over a run of tokens: their taps, and the window of the last tokens, stay in
registers, so each token is read once (and the few before a run once more, from the cache). With cu_seqlens the window
starts anew at every sequence; sequences are found on the device.
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr

from ..blocks.dtypes import WIDTH
from ..blocks.words import ELEMENT, copy, load_number, load_words, packed, store_words, unpack
from .config import RUN, ConvConfig
from .taps import activated, rounded, store_number, tap_sum


class Forward:
    """Traceable host function for one configuration. What the configuration does without is given any tensor."""

    def __init__(self, config: ConvConfig) -> None:
        self.config = config

    @cute.jit
    def launch(
        self,
        mX: cute.Tensor,
        mW: cute.Tensor,
        mBias: cute.Tensor,
        mInitial: cute.Tensor,
        mFinal: cute.Tensor,
        mCu: cute.Tensor,
        mO: cute.Tensor,
        stream: cuda.CUstream,
    ):
        c = self.config
        groups = cute.ceil_div(mX.shape[2], c.channels * c.threads)
        runs = cute.ceil_div(mX.shape[1], RUN)
        self.kernel(mX, mW, mBias, mInitial, mFinal, mCu, mO, groups, runs).launch(
            grid=[groups * runs * mX.shape[0], 1, 1],
            block=[c.threads, 1, 1],
            use_pdl=c.overlap,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, mX, mW, mBias, mInitial, mFinal, mCu, mO, groups: Int32, runs: Int32):
        c = self.config
        tid, _, _ = cute.arch.thread_idx()
        bid, _, _ = cute.arch.block_idx()
        channel = (bid % groups * c.threads + tid) * c.channels
        run, b = bid // groups % runs, bid // groups // runs
        if const_expr(c.overlap):
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
        if channel < mX.shape[2]:
            self.run(mX, mW, mBias, mInitial, mFinal, mCu, mO, b, run * RUN, channel)

    @cute.jit
    def run(self, mX, mW, mBias, mInitial, mFinal, mCu, mO, b, first, channel):
        """Tokens first to first + RUN - 1 of one batch entry, for the channels of one thread."""
        c = self.config
        width: cutlass.Constexpr = WIDTH[c.dtype]
        length = mX.shape[1]
        last = cutlass.min(first + RUN, length)
        gX = mX.iterator.toint() + (Int64(b) * mX.stride[0] + channel) * width
        row = Int64(mX.stride[1]) * width
        gO = mO.iterator.toint() + (Int64(b) * mO.stride[0] + channel) * width
        out_row = Int64(mO.stride[1]) * width

        # The sequence that the run starts in: tokens start to stop - 1.
        n, start, stop, end = b, Int32(0), length, length
        if const_expr(c.packed is not None):
            n, start, stop, end = self.find(mCu, first, length)

        raw = cute.make_rmem_tensor((4 * c.ahead,), Uint32)
        rW = cute.make_rmem_tensor((4 * c.width,), Uint32)
        rBias = cute.make_rmem_tensor((4,), Uint32)
        rBias.fill(0)
        gW = mW.iterator.toint() + Int64(channel) * (c.width * width)
        for i in cutlass.range_constexpr(c.width):
            load_words(gW + 16 * i, rW, 4 * i, 4)
        if const_expr(c.bias):
            load_words(mBias.iterator.toint() + Int64(channel) * width, rBias, 0, 4)

        # window[j * channels + i]: channel i, j tokens after the oldest that the next token needs.
        window = cute.make_rmem_tensor(((c.width - 1) * c.channels,), Float32)
        self.before(mInitial, gX, row, n, start, first, channel, window)

        for base in cutlass.range(first, last, c.ahead, unroll=1):
            for i in cutlass.range_constexpr(c.ahead):
                if base + i < last:
                    load_words(gX + Int64(base + i) * row, raw, 4 * i, 4)
            for i in cutlass.range_constexpr(c.ahead):
                t = base + i
                if t < last:
                    if const_expr(c.packed is not None):
                        n, start, stop, end = self.sequence_at(
                            mCu, mInitial, gX, row, t, length, channel, window, n, start, stop, end
                        )
                    word = cute.make_rmem_tensor((4,), Uint32)
                    copy([raw[4 * i + j] for j in range(4)], word)
                    inside = t < end and t >= start
                    self.token(word, rW, rBias, window, gO + Int64(t) * out_row, inside)
                    if const_expr(c.final):
                        last_of_all = t == stop - 1 and inside
                        self.finish(mInitial, mFinal, gX, row, n, start, stop, channel, last_of_all)

    @cute.jit
    def find(self, mCu, t, length):
        """(n, start, stop, end): sequence n has token t, and ends the last token of any; tokens of no sequence have
        start > t or end <= t.
        """
        count = mCu.shape[0] - 1
        low, high = Int32(0), count  # cu[low] <= t, if any is; cu[high] > t, or high == count
        while high - low > 1:
            middle = (low + high) // 2
            if Int32(mCu[middle]) <= t:
                low = middle
            else:
                high = middle
        start, stop = Int32(mCu[low]), Int32(mCu[low + 1])
        end = cutlass.min(Int32(mCu[count]), length)
        if t < start:  # in front of the first sequence: until it begins
            stop = start
        if t >= stop:  # behind the last
            stop = length
        return low, start, stop, end

    @cute.jit
    def sequence_at(self, mCu, mInitial, gX, row, t, length, channel, window, n, start, stop, end):
        """The sequence of token t, which is that of the token before it or a new one, with a new window."""
        if t == stop:
            n, start, stop, end = self.find(mCu, t, length)
            self.before(mInitial, gX, row, n, start, t, channel, window)
        return n, start, stop, end

    @cute.jit
    def before(self, mInitial, gX, row, n, start, t, channel, window):
        """The width - 1 tokens in front of token t: of the sequence, of the state in front of it, or zeros."""
        c = self.config
        width: cutlass.Constexpr = WIDTH[c.dtype]
        for j in cutlass.range_constexpr(c.width - 1):
            at = t - (c.width - 1) + j
            words = cute.make_rmem_tensor((4,), Uint32)
            words.fill(0)
            if at >= start:
                load_words(gX + Int64(at) * row, words, 0, 4)
            copy_to(unpack(words, c.channels, c.dtype), window, j * c.channels)
            if const_expr(c.initial):
                # `start - at` tokens in front of the sequence
                slot = mInitial.shape[2] - (start - at)
                if at < start and slot >= 0 and t >= start:
                    origin = mInitial.iterator.toint() + Int64(n) * mInitial.stride[0] * width
                    for i in cutlass.range_constexpr(c.channels):
                        place = Int64(channel + i) * mInitial.stride[1] + Int64(slot) * mInitial.stride[2]
                        window[j * c.channels + i] = load_number(origin + place * width, c.dtype)

    def token(self, words, rW, rBias, window, address, inside):
        """One output; the window moves on. Tokens of no sequence get zeros."""
        c = self.config
        x = unpack(words, c.channels, c.dtype)
        taps = unpack(rW, c.width * c.channels, c.dtype)
        bias = unpack(rBias, c.channels, c.dtype)
        out = []
        for i in range(c.channels):
            seen = [window[j * c.channels + i] for j in range(c.width - 1)]
            y = tap_sum(taps[i * c.width : (i + 1) * c.width], [*seen, x[i]], bias[i])
            y = activated(y, c.activation, c.dtype == "float32")
            if c.packed is not None:
                y = zero_unless(inside, y)
            out.append(y)
        for j in range(c.width - 2):
            copy_to([window[(j + 1) * c.channels + i] for i in range(c.channels)], window, j * c.channels)
        copy_to(x, window, (c.width - 2) * c.channels)
        store_words(address, packed(out, c.dtype))

    @cute.jit
    def finish(self, mInitial, mFinal, gX, row, n, start, stop, channel, due):
        """The last tokens of a sequence into its final state, at its last token (`due`)."""
        c = self.config
        width: cutlass.Constexpr = WIDTH[c.dtype]
        size = mFinal.shape[2]
        for slot in cutlass.range(size if due else 0, unroll=1):
            at = stop - size + slot
            origin = mFinal.iterator.toint() + Int64(n) * mFinal.stride[0] * width
            if at >= start:
                words = cute.make_rmem_tensor((4,), Uint32)
                load_words(gX + Int64(at) * row, words, 0, 4)
                values = unpack(words, c.channels, c.dtype)
                for i in cutlass.range_constexpr(c.channels):
                    place = Int64(channel + i) * mFinal.stride[1] + Int64(slot) * mFinal.stride[2]
                    store_number(origin + place * width, rounded(values[i], c.dtype), c.dtype)
            elif const_expr(c.initial):
                source = mInitial.shape[2] - (start - at)
                if source >= 0:
                    begin = mInitial.iterator.toint() + Int64(n) * mInitial.stride[0] * width
                    for i in cutlass.range_constexpr(c.channels):
                        there = Int64(channel + i) * mInitial.stride[1] + Int64(source) * mInitial.stride[2]
                        place = Int64(channel + i) * mFinal.stride[1] + Int64(slot) * mFinal.stride[2]
                        value = load_number(begin + there * width, c.dtype)
                        store_number(origin + place * width, rounded(value, c.dtype), c.dtype)


@cute.jit
def zero_unless(condition, y):
    return y if condition else Float32(0.0)


def copy_to(values, target, first: int) -> None:
    for i, value in enumerate(values):
        target[first + i] = value


def build(config: ConvConfig):
    """(host function, stand-in arguments) for the compiler."""
    c = config
    batch, tokens, channels = (cute.sym_int32() for _ in range(3))

    def rows():
        stride = (cute.sym_int64(), cute.sym_int64(), 1)
        return cute.runtime.make_fake_tensor(
            ELEMENT[c.dtype], (batch, tokens, channels), stride=stride, assumed_align=16
        )  # fmt: skip

    def state(used: bool):
        if not used:
            return rows()
        shape = (cute.sym_int32(), channels, cute.sym_int32())
        stride = tuple(cute.sym_int64() for _ in range(3))
        return cute.runtime.make_fake_tensor(ELEMENT[c.dtype], shape, stride=stride, assumed_align=WIDTH[c.dtype])

    weight = cute.runtime.make_fake_tensor(
        ELEMENT[c.dtype], (channels, c.width), stride=(c.width, 1), assumed_align=16
    )  # fmt: skip
    bias = cute.runtime.make_fake_tensor(ELEMENT[c.dtype], (channels,), stride=(1,), assumed_align=16)
    cu_seqlens = rows()
    if c.packed is not None:
        cu_seqlens = cute.runtime.make_fake_tensor(
            ELEMENT[c.packed], (cute.sym_int32(),), stride=(1,), assumed_align=4 if c.packed == "int32" else 8
        )  # fmt: skip
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    arguments = (rows(), weight, bias if c.bias else rows(), state(c.initial), state(c.final), cu_seqlens, rows())
    return Forward(c).launch, (*arguments, stream)
