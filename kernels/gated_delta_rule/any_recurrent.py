"""The gated delta rule token by token (decoding), one source for every target.

A warp owns 16 value columns of one state, all K rows of them, in registers: read once, updated token by token, written
once. Eight lanes share a column, so products with the state are summed by three shuffles, and warps never meet. With
the decay a, the raw key and query k and q, their inverse norms r_k and r_q, and S as it was before the token

    w = beta (v - a r_k k.S),   o = scale r_q (a q.S + r_k (q.k) w),   S <- a S + k (r_k w)

so both products are with the old state and one round of shuffles serves a token. All arithmetic is fp32.
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr

from ..blocks.dtypes import WIDTH
from ..blocks.words import (
    ELEMENT,
    copy,
    evict_first,
    exp,
    fma,
    load_number,
    load_words,
    packed,
    store_words,
    unpack,
)
from .config import COLUMNS, K_LANES, VECTOR, WARP, RecurrentConfig

L2NORM_EPS = 1e-6


class Recurrent:
    """Traceable host function for one configuration. What the configuration does without is given any tensor."""

    def __init__(self, config: RecurrentConfig) -> None:
        self.config = config

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
        mInitial: cute.Tensor,
        mFinal: cute.Tensor,
        mIndex: cute.Tensor,
        mCu: cute.Tensor,
        mO: cute.Tensor,
        scale: Float32,
        stream: cuda.CUstream,
    ):
        c = self.config
        sequences = mCu.shape[0] - 1 if const_expr(c.packed is not None) else mQ.shape[0]
        total = sequences * mV.shape[2] * (mV.shape[3] // COLUMNS)
        self.kernel(mQ, mK, mV, mG, mBeta, mA, mBias, mInitial, mFinal, mIndex, mCu, mO, scale, total).launch(
            grid=[cute.ceil_div(total, c.warps), 1, 1],
            block=[c.threads, 1, 1],
            use_pdl=c.overlap,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, mQ, mK, mV, mG, mBeta, mA, mBias, mInitial, mFinal, mIndex, mCu, mO, scale: Float32, total: Int32):
        c = self.config
        tid, _, _ = cute.arch.thread_idx()
        bid, _, _ = cute.arch.block_idx()
        warp = bid * c.warps + cute.arch.make_warp_uniform(tid // WARP)
        if const_expr(c.overlap):
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
        if warp < total:
            self.columns(mQ, mK, mV, mG, mBeta, mA, mBias, mInitial, mFinal, mIndex, mCu, mO, scale, tid % WARP, warp)

    @cute.jit
    def columns(self, mQ, mK, mV, mG, mBeta, mA, mBias, mInitial, mFinal, mIndex, mCu, mO, scale, lane, warp):
        """All tokens of one sequence, for the columns of one warp."""
        c = self.config
        slices = mV.shape[3] // COLUMNS
        head_v = warp // slices % mV.shape[2]
        n = warp // slices // mV.shape[2]
        head = head_v // (mV.shape[2] // mQ.shape[2])
        # Lanes that are next to each other read what is next to each other.
        k_lane = lane % K_LANES if const_expr(c.v_first) else lane // (WARP // K_LANES)
        v_lane = lane // K_LANES if const_expr(c.v_first) else lane % (WARP // K_LANES)
        column = warp % slices * COLUMNS + v_lane * VECTOR

        b, start, tokens = n, Int32(0), mQ.shape[1]
        if const_expr(c.packed is not None):
            sequences = mCu.shape[0] - 1
            length = mQ.shape[1]
            b = Int32(0)
            start = cutlass.min(cutlass.max(Int32(mCu[n]), 0), length)
            stop = cutlass.min(cutlass.max(Int32(mCu[n + 1]), start), length)
            tokens = stop - start
            if n == 0:
                self.clear(mO, b, head_v, column, k_lane, Int32(0), start)
            if n == sequences - 1:
                self.clear(mO, b, head_v, column, k_lane, stop, length)

        slot, live = n, True
        if const_expr(c.index is not None):
            index = mIndex[n]
            live = index >= 0 and index < mInitial.shape[0]
            slot = Int32(index)

        # What a token brings, as it was loaded.
        words: cutlass.Constexpr = c.rows * WIDTH[c.dtype] // 4
        rQ = cute.make_rmem_tensor((words,), Uint32)
        rK = cute.make_rmem_tensor((words,), Uint32)
        rV = cute.make_rmem_tensor((WIDTH[c.v_dtype],), Uint32)
        rG = cute.make_rmem_tensor((2,), Float32)
        gQ = mQ.iterator.toint() + self.offset(mQ, b, start, head) * WIDTH[c.dtype]
        gK = mK.iterator.toint() + self.offset(mK, b, start, head) * WIDTH[c.dtype]
        gV = mV.iterator.toint() + (self.offset(mV, b, start, head_v) + column) * WIDTH[c.v_dtype]
        gG, gB = Int64(0), Int64(0)
        if const_expr(c.g_dtype is not None):
            gG = mG.iterator.toint() + self.offset(mG, b, start, head_v) * WIDTH[c.g_dtype]
        if const_expr(c.beta_dtype is not None):
            gB = mBeta.iterator.toint() + self.offset(mBeta, b, start, head_v) * WIDTH[c.beta_dtype]
        if const_expr(c.single):
            self.fetch(gQ, gK, gV, gG, gB, k_lane, rQ, rK, rV, rG)
        else:
            if tokens > 0:
                self.fetch(gQ, gK, gV, gG, gB, k_lane, rQ, rK, rV, rG)

        rS = cute.make_rmem_tensor((c.rows * VECTOR,), Float32)
        # With [K, V] a warp's row is half a line, and the first lines to leave the L2 leave it by halves: 78% of the
        # memory floor at batch 256 on an H200, 91% without.
        policy = evict_first() if const_expr(c.v_first) else None
        if const_expr(c.initial is None or c.index is not None):
            rS.fill(0.0)
        if live:
            self.load_state(mInitial, slot, head_v, column, k_lane, rS, policy)

        rate, bias = Float32(0.0), Float32(0.0)
        if const_expr(c.a_dtype is not None):
            rate = exp(load_number(mA.iterator.toint() + Int64(head_v) * WIDTH[c.a_dtype], c.a_dtype))
            if const_expr(c.bias_dtype is not None):
                bias = load_number(mBias.iterator.toint() + Int64(head_v) * WIDTH[c.bias_dtype], c.bias_dtype)

        if live:
            if const_expr(c.single):
                self.token(rQ, rK, rV, rG, rS, rate, bias, scale, mO, b, start, head_v, column, k_lane)
            else:
                for t in cutlass.range(tokens, unroll=1):
                    self.tokens(
                        mQ, mK, mV, mG, mBeta, gQ, gK, gV, gG, gB, t, tokens,
                        rQ, rK, rV, rG, rS, rate, bias, scale, mO, b, start, head_v, column, k_lane,
                    )  # fmt: skip
            if const_expr(c.final is not None):
                self.store_state(mFinal, slot, head_v, column, k_lane, rS, policy)
        if const_expr(c.index is not None):
            skipped = Int32(0) if live else tokens
            self.clear(mO, b, head_v, column, k_lane, start, start + skipped)

    @cute.jit
    def offset(self, m, b, t, head):
        """Elements from the start of a [B, T, heads, ..] tensor to the token's first of this head."""
        return Int64(b) * m.stride[0] + Int64(t) * m.stride[1] + Int64(head) * m.stride[2]

    # --- A token ---------------------------------------------------------------------------------------------------

    @cute.jit
    def fetch(self, gQ, gK, gV, gG, gB, k_lane, rQ, rK, rV, rG):
        """Start the loads of one token."""
        c = self.config
        self.fetch_channels(gK, k_lane, rK)
        self.fetch_channels(gQ, k_lane, rQ)
        if const_expr(c.g_dtype is not None):
            rG[0] = load_number(gG, c.g_dtype)
        if const_expr(c.beta_dtype is not None):
            rG[1] = load_number(gB, c.beta_dtype)
        load_words(gV, rV, 0, WIDTH[c.v_dtype])

    @cute.jit
    def fetch_channels(self, address, k_lane, words):
        """The thread's channels of a query or key: rows in a row, or with v_first four in each of K / 32 stretches."""
        c = self.config
        width: cutlass.Constexpr = WIDTH[c.dtype]
        if const_expr(c.v_first):
            for p in cutlass.range_constexpr(c.rows // VECTOR):
                at = address + Int64(k_lane * VECTOR + p * (K_LANES * VECTOR)) * width
                load_words(at, words, p * width, width)
        else:
            for p in cutlass.range_constexpr(c.rows * width // 16):
                load_words(address + Int64(k_lane) * (c.rows * width) + p * 16, words, 4 * p, 4)

    @cute.jit
    def tokens(
        self, mQ, mK, mV, mG, mBeta, gQ, gK, gV, gG, gB, t, tokens,
        rQ, rK, rV, rG, rS, rate, bias, scale, mO, b, start, head_v, column, k_lane,
    ):  # fmt: skip
        """Token t, while the loads of the next one are under way, or before them where registers are short."""
        c = self.config
        tQ, tK, tV, tG = rQ, rK, rV, rG
        if const_expr(c.ahead):
            tQ = cute.make_rmem_tensor(rQ.shape, Uint32)
            tK = cute.make_rmem_tensor(rK.shape, Uint32)
            tV = cute.make_rmem_tensor(rV.shape, Uint32)
            tG = cute.make_rmem_tensor(rG.shape, Float32)
            copy(rQ, tQ)
            copy(rK, tK)
            copy(rV, tV)
            if const_expr(c.g_dtype is not None):
                tG[0] = rG[0]
            if const_expr(c.beta_dtype is not None):
                tG[1] = rG[1]
        else:
            self.token(tQ, tK, tV, tG, rS, rate, bias, scale, mO, b, start + t, head_v, column, k_lane)
        if t + 1 < tokens:
            step = Int64(t) + 1
            nG, nB = gG, gB
            if const_expr(c.g_dtype is not None):
                nG = gG + step * mG.stride[1] * WIDTH[c.g_dtype]
            if const_expr(c.beta_dtype is not None):
                nB = gB + step * mBeta.stride[1] * WIDTH[c.beta_dtype]
            nQ = gQ + step * mQ.stride[1] * WIDTH[c.dtype]
            nK = gK + step * mK.stride[1] * WIDTH[c.dtype]
            nV = gV + step * mV.stride[1] * WIDTH[c.v_dtype]
            self.fetch(nQ, nK, nV, nG, nB, k_lane, rQ, rK, rV, rG)
        if const_expr(c.ahead):
            self.token(tQ, tK, tV, tG, rS, rate, bias, scale, mO, b, start + t, head_v, column, k_lane)

    @cute.jit
    def token(self, rQ, rK, rV, rG, rS, rate, bias, scale, mO, b, at, head_v, column, k_lane):
        """One step of the recurrence; o is written by the first of the lanes that share columns."""
        c = self.config
        tQ, tK = self.channels(rQ), self.channels(rK)
        dots = cute.make_rmem_tensor((3,), Float32)
        dots.fill(0.0)
        for i in cutlass.range_constexpr(c.rows):
            dots[0] += tQ[i] * tK[i]
            if const_expr(c.l2norm):
                dots[1] += tQ[i] * tQ[i]
                dots[2] += tK[i] * tK[i]
        self.sum_channels(dots)
        norm_q, norm_k = Float32(1.0), Float32(1.0)
        if const_expr(c.l2norm):
            norm_q = cute.math.rsqrt(dots[1] + L2NORM_EPS)
            norm_k = cute.math.rsqrt(dots[2] + L2NORM_EPS)
        decay, beta = self.decay(rG[0], rate, bias), self.activated(rG[1])

        products = cute.make_rmem_tensor((2 * VECTOR,), Float32)  # with the key, with the query
        products.fill(0.0)
        for i in cutlass.range_constexpr(c.rows):
            for j in cutlass.range_constexpr(VECTOR):
                products[j] += tK[i] * rS[self.place(i, j)]
                products[VECTOR + j] += tQ[i] * rS[self.place(i, j)]
        self.sum_channels(products)

        tV = unpack(rV, VECTOR, c.v_dtype)
        out = cute.make_rmem_tensor((VECTOR,), Float32)
        for j in cutlass.range_constexpr(VECTOR):
            new = beta * (tV[j] - decay * norm_k * products[j]) * norm_k
            out[j] = (decay * products[VECTOR + j] + dots[0] * new) * (norm_q * scale)
            for i in cutlass.range_constexpr(c.rows):
                place = self.place(i, j)
                rS[place] = decay * rS[place] + tK[i] * new
        if k_lane == 0:
            self.store_out(mO, b, at, head_v, column, out)

    def place(self, i: int, j: int) -> int:
        """Where a thread holds channel i of column j: in the order of memory."""
        return j * self.config.rows + i if self.config.v_first else i * VECTOR + j

    def channels(self, words):
        return unpack(words, self.config.rows, self.config.dtype)

    @cute.jit
    def sum_channels(self, values):
        """Sums over the lanes that share columns, the same bits in each of them."""
        c = self.config
        offset = 1 if const_expr(c.v_first) else WARP // K_LANES
        for _ in cutlass.range_constexpr(K_LANES.bit_length() - 1):
            for i in cutlass.range_constexpr(cute.size(values)):
                values[i] += cute.arch.shuffle_sync_bfly(values[i], offset=offset)
            offset *= 2

    @cute.jit
    def decay(self, g, rate, bias):
        """The factor of the state: exp(g), with a gate exp(-exp(A_log) softplus(g + dt_bias))."""
        c = self.config
        if const_expr(c.g_dtype is None):
            return Float32(1.0)
        elif const_expr(c.a_dtype is None):
            return exp(g)
        else:
            return exp(-rate * softplus(g + bias))

    @cute.jit
    def activated(self, beta):
        c = self.config
        if const_expr(c.beta_dtype is None):
            one = Float32(1.0)
            if const_expr(c.beta == "plain"):
                return one
            else:
                return self.sigmoid(one)
        elif const_expr(c.beta == "plain"):
            return beta
        else:
            return self.sigmoid(beta)

    @cute.jit
    def sigmoid(self, x):
        return (2.0 if const_expr(self.config.beta == "twice_sigmoid") else 1.0) / (1.0 + exp(-x))

    # --- Memory ----------------------------------------------------------------------------------------------------

    @cute.jit
    def state_address(self, m, slot, head_v, column, k_lane, width: cutlass.Constexpr):
        """(address of the thread's first access, bytes from one row of the state to the next)."""
        c = self.config
        row = column if const_expr(c.v_first) else k_lane * c.rows
        inner = k_lane * VECTOR if const_expr(c.v_first) else column
        start = Int64(slot) * m.stride[0] + Int64(head_v) * m.stride[1] + Int64(row) * m.stride[2] + inner
        return m.iterator.toint() + start * width, Int64(m.stride[2]) * width

    @cute.jit
    def load_state(self, m, slot, head_v, column, k_lane, rS, policy):
        c = self.config
        if const_expr(c.initial is not None):
            width: cutlass.Constexpr = WIDTH[c.initial]
            address, stride = self.state_address(m, slot, head_v, column, k_lane, width)
            along: cutlass.Constexpr = c.rows // VECTOR if c.v_first else 1
            raw = cute.make_rmem_tensor((c.rows * width,), Uint32)
            for r in cutlass.range_constexpr(VECTOR if c.v_first else c.rows):
                for p in cutlass.range_constexpr(along):
                    at = address + p * (K_LANES * VECTOR * width)
                    load_words(at, raw, (r * along + p) * width, width, policy)
                address = address + stride
            copy(unpack(raw, c.rows * VECTOR, c.initial), rS)

    @cute.jit
    def store_state(self, m, slot, head_v, column, k_lane, rS, policy):
        c = self.config
        width: cutlass.Constexpr = WIDTH[c.final]
        address, stride = self.state_address(m, slot, head_v, column, k_lane, width)
        along: cutlass.Constexpr = c.rows // VECTOR if c.v_first else 1
        for r in cutlass.range_constexpr(VECTOR if c.v_first else c.rows):
            for p in cutlass.range_constexpr(along):
                first: cutlass.Constexpr = (r * along + p) * VECTOR
                words = packed(tuple(rS[first + i] for i in range(VECTOR)), c.final)
                store_words(address + p * (K_LANES * VECTOR * width), words, policy)
            address = address + stride

    @cute.jit
    def store_out(self, mO, b, t, head_v, column, out):
        c = self.config
        width: cutlass.Constexpr = WIDTH[c.v_dtype]
        at = mO.iterator.toint() + (self.offset(mO, b, t, head_v) + column) * width
        store_words(at, packed(tuple(out[i] for i in range(VECTOR)), c.v_dtype))

    @cute.jit
    def clear(self, mO, b, head_v, column, k_lane, first, last):
        """Zeros for the tokens first to last - 1."""
        zero = cute.make_rmem_tensor((VECTOR,), Float32)
        zero.fill(0.0)
        if k_lane == 0:
            for t in cutlass.range(first, last, unroll=1):
                self.store_out(mO, b, t, head_v, column, zero)


# --- The gate ------------------------------------------------------------------------------------------------------


@cute.jit
def softplus(x):
    """log(1 + e ** x), as 2 artanh(y / (2 + y)) with y = e ** -|x|: accurate for small results too."""
    y = exp(-cutlass.max(x, -x))
    s = y / (2.0 + y)
    square = s * s
    return cutlass.max(x, Float32(0.0)) + 2.0 * s * series(square)


def series(square):
    """1 + square / 3 + square ** 2 / 5 + ...: square is at most 1/9."""
    total = Float32(1.0 / 17)
    for n in (15, 13, 11, 9, 7, 5, 3, 1):
        total = fma(total, square, Float32(1.0 / n))
    return total


def build(config: RecurrentConfig):
    """(host function, stand-in arguments) for the compiler."""
    c = config

    def tensor(dtype: str, *shape, strides: int):
        stride = tuple(cute.sym_int64() for _ in range(strides))
        stride = stride if strides == len(shape) else (*stride, 1)
        align = {"int32": 4, "int64": 8}.get(dtype) or (16 if len(shape) == 4 else WIDTH[dtype])
        return cute.runtime.make_fake_tensor(ELEMENT[dtype], shape, stride=stride, assumed_align=align)

    batch, tokens, heads, heads_v, head_dim_v = (cute.sym_int32() for _ in range(5))

    def out():
        return tensor(c.v_dtype, *(cute.sym_int32() for _ in range(4)), strides=3)

    def state(dtype: str | None):
        if dtype is None:
            return out()
        inner = (head_dim_v, c.head_dim) if c.v_first else (c.head_dim, head_dim_v)
        return tensor(dtype, cute.sym_int32(), heads_v, *inner, strides=3)

    def vector(dtype: str | None, length):
        return out() if dtype is None else tensor(dtype, length, strides=0)

    def per_head(dtype: str | None):
        return out() if dtype is None else tensor(dtype, batch, tokens, heads_v, strides=3)

    arguments = (
        tensor(c.dtype, batch, tokens, heads, c.head_dim, strides=3),
        tensor(c.dtype, batch, tokens, heads, c.head_dim, strides=3),
        tensor(c.v_dtype, batch, tokens, heads_v, head_dim_v, strides=3),
        per_head(c.g_dtype),
        per_head(c.beta_dtype),
        vector(c.a_dtype, heads_v),
        vector(c.bias_dtype, heads_v),
        state(c.initial),
        state(c.final),
        vector(c.index, cute.sym_int32()),
        vector(c.packed, cute.sym_int32()),
        tensor(c.v_dtype, batch, tokens, heads_v, head_dim_v, strides=3),
    )
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    return Recurrent(c).launch, (*arguments, Float32(1.0), stream)
