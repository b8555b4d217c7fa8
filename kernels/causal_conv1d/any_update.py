"""The causal convolution of a few new tokens, the state updated in place: one thread a channel of a sequence."""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from ..blocks.dtypes import WIDTH
from ..blocks.words import ELEMENT, load_number
from .config import UpdateConfig
from .taps import activated, rounded, store_number, tap_sum


class Update:
    """Traceable host function `(x [B, C, T], state [B, C, S], weight [C, W], bias or x, y [B, T, C], stream)`."""

    def __init__(self, config: UpdateConfig) -> None:
        self.config = config

    @cute.jit
    def launch(
        self,
        mX: cute.Tensor,
        mState: cute.Tensor,
        mW: cute.Tensor,
        mBias: cute.Tensor,
        mO: cute.Tensor,
        stream: cuda.CUstream,
    ):
        c = self.config
        total = mX.shape[0] * mX.shape[1]
        self.kernel(mX, mState, mW, mBias, mO, total).launch(
            grid=[cute.ceil_div(total, c.threads), 1, 1],
            block=[c.threads, 1, 1],
            use_pdl=c.overlap,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, mX, mState, mW, mBias, mO, total: Int32):
        c = self.config
        tid, _, _ = cute.arch.thread_idx()
        bid, _, _ = cute.arch.block_idx()
        index = bid * c.threads + tid
        if const_expr(c.overlap):
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
        if index < total:
            self.channel(mX, mState, mW, mBias, mO, index // mX.shape[1], index % mX.shape[1])

    @cute.jit
    def channel(self, mX, mState, mW, mBias, mO, b, channel):
        c = self.config
        width: cutlass.Constexpr = WIDTH[c.dtype]
        gS = mState.iterator.toint() + (Int64(b) * mState.stride[0] + Int64(channel) * mState.stride[1]) * width
        gX = mX.iterator.toint() + (Int64(b) * mX.stride[0] + Int64(channel) * mX.stride[1]) * width
        gO = mO.iterator.toint() + (Int64(b) * mO.stride[0] + channel) * width
        gW = mW.iterator.toint() + Int64(channel) * (c.width * width)
        state = cute.make_rmem_tensor((c.state_len,), Float32)
        taps = cute.make_rmem_tensor((c.width,), Float32)
        for j in cutlass.range_constexpr(c.state_len):
            state[j] = load_number(gS + Int64(j) * mState.stride[2] * width, c.dtype)
        for j in cutlass.range_constexpr(c.width):
            taps[j] = load_number(gW + j * width, c.dtype)
        bias = Float32(0.0)
        if const_expr(c.bias):
            bias = load_number(mBias.iterator.toint() + Int64(channel) * width, c.dtype)
        for t in cutlass.range(mX.shape[2], unroll=1):
            x = load_number(gX + Int64(t) * mX.stride[2] * width, c.dtype)
            seen = [state[j] for j in range(c.state_len - c.width + 1, c.state_len)]
            y = tap_sum([taps[j] for j in range(c.width)], [*seen, x], bias)
            y = activated(y, c.activation, c.dtype == "float32")
            store_number(gO + Int64(t) * mO.stride[1] * width, rounded(y, c.dtype), c.dtype)
            for j in cutlass.range_constexpr(c.state_len - 1):
                state[j] = state[j + 1]
            state[c.state_len - 1] = x
        for j in cutlass.range_constexpr(c.state_len):
            store_number(gS + Int64(j) * mState.stride[2] * width, rounded(state[j], c.dtype), c.dtype)


def build(config: UpdateConfig):
    """(host function, stand-in arguments) for the compiler."""
    c = config
    batch, channels, tokens = (cute.sym_int32() for _ in range(3))

    def tensor(*shape, strides: int):
        stride = tuple(cute.sym_int64() for _ in range(strides)) + (1,) * (len(shape) - strides)
        return cute.runtime.make_fake_tensor(ELEMENT[c.dtype], shape, stride=stride, assumed_align=WIDTH[c.dtype])

    x = tensor(batch, channels, tokens, strides=3)
    weight = cute.runtime.make_fake_tensor(
        ELEMENT[c.dtype], (channels, c.width), stride=(c.width, 1), assumed_align=WIDTH[c.dtype]
    )  # fmt: skip
    out = tensor(batch, tokens, channels, strides=2)
    bias = tensor(channels, strides=0) if c.bias else tensor(batch, tokens, channels, strides=2)
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    return Update(c).launch, (x, tensor(batch, channels, c.state_len, strides=3), weight, bias, out, stream)
