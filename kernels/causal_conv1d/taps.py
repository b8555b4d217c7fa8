"""Device helpers of both convolution kernels: the sum over the taps, the activation, single elements."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Uint32, const_expr

from ..blocks.dtypes import WIDTH
from ..blocks.words import LOG2_E, exp, fma, ptx


def tap_sum(taps, window, bias):
    """bias + sum of taps[j] * window[j], oldest first."""
    total = bias
    for tap, x in zip(taps, window, strict=True):
        total = fma(tap, x, total)
    return total


@cute.jit
def activated(x, activation: cutlass.Constexpr, exact: cutlass.Constexpr):
    """x, or x / (1 + exp(-x)). `exact` for fp32 data; the approximate one is far below an ulp of 16-bit data."""
    if const_expr(activation is None):
        return x
    elif const_expr(exact):
        return x / (1.0 + exp(-x))
    else:
        power = ptx("ex2.approx.ftz.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x * (-LOG2_E)])
        return x * cute.arch.rcp_approx(1.0 + power)


def store_number(address, word, dtype: str) -> None:
    """The element in the lower half of a word, or the word."""
    kind = "b32" if WIDTH[dtype] == 4 else "b16"
    if kind == "b32":
        ptx("st.global.b32 [{$r0}], {$r1};", read_only_args=[address, word])
    else:
        ptx("{ .reg .b16 h; cvt.u16.u32 h, {$r1}; st.global.b16 [{$r0}], h; }", read_only_args=[address, word])


def rounded(x, dtype: str):
    """A word with x, rounded to `dtype`, in its lower half."""
    if WIDTH[dtype] == 4:
        return ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Uint32], read_only_args=[x])
    name = "bf16" if dtype == "bfloat16" else "f16"
    return ptx(
        f"cvt.rn.{name}x2.f32 {{$w0}}, {{$r1}}, {{$r0}};",
        write_only_types=[Uint32],
        read_only_args=[x, Float32(0.0)],
    )
