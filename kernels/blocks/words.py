"""Device code: 32-bit words to and from memory, fp32 numbers out of words and back, and exact-enough exponentials.

Addresses are plain 64-bit integers, so strides need no declared divisibility: the host checks what an access needs.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int64, Uint32

from .dtypes import WIDTH

ELEMENT = {
    "bfloat16": cutlass.BFloat16,
    "float16": cutlass.Float16,
    "float32": cutlass.Float32,
    "int32": cutlass.Int32,
    "int64": cutlass.Int64,
}
PTX_NAME = {"bfloat16": "bf16", "float16": "f16"}
LOG2_E, LOG2_E_REST = 1.4426950408889634, 1.925963033500011e-08
LN_2 = 0.6931471805599453
ptx = cute.arch.inline_ptx


def evict_first():
    """A policy for data that is read or written once."""
    return ptx("createpolicy.fractional.L2::evict_first.b64 {$w0}, 1.0;", write_only_types=[Int64])


def copy(old, new) -> None:
    for i in range(cute.size(new)):
        new[i] = old[i]


def load_words(address, words, first: int, count: int, policy=None):
    """`count` (2 or 4) 32-bit words in one access. With a policy past the L1, and soonest to leave the L2."""
    targets = "{" + ", ".join(f"{{$w{i}}}" for i in range(count)) + "}"
    how, hint = (".L1::no_allocate.L2::cache_hint", ", {$r1}") if policy is not None else ("", "")
    found = ptx(
        f"ld.global{how}.v{count}.b32 " + targets + ", [{$r0}]" + hint + ";",
        write_only_types=[Uint32] * count,
        read_only_args=[address] if policy is None else [address, policy],
    )
    for i in range(count):
        words[first + i] = found[i]


def store_words(address, words, policy=None):
    count = len(words)
    sources = "{" + ", ".join(f"{{$r{i + 1}}}" for i in range(count)) + "}"
    how, hint = (".L2::cache_hint", f", {{$r{count + 1}}}") if policy is not None else ("", "")
    ptx(
        f"st.global{how}.v{count}.b32 [{{$r0}}], " + sources + hint + ";",
        read_only_args=[address, *words, *(() if policy is None else (policy,))],
    )


def load_number(address, dtype: str):
    """One element of `dtype` as fp32."""
    if WIDTH[dtype] == 4:
        return ptx("ld.global.f32 {$w0}, [{$r0}];", write_only_types=[Float32], read_only_args=[address])
    word = ptx("ld.global.u16 {$w0}, [{$r0}];", write_only_types=[Uint32], read_only_args=[address])
    return widen(word, dtype)


def widen(word, dtype: str):
    """The fp32 value of the 16-bit element in the lower half of a word."""
    if dtype == "bfloat16":
        return as_float(word << Uint32(16))
    return ptx(
        "{ .reg .b16 h; cvt.u16.u32 h, {$r0}; cvt.f32.f16 {$w0}, h; }",
        write_only_types=[Float32],
        read_only_args=[word],
    )


def as_float(word):
    return ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[word])


def as_word(x):
    return ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Uint32], read_only_args=[x])


def unpack(words, count: int, dtype: str) -> list:
    """`count` elements of `dtype` as fp32 values."""
    if WIDTH[dtype] == 4:
        return [as_float(words[i]) for i in range(count)]
    found = []
    for i in range(count // 2):
        word = words[i]
        high = as_float(word & Uint32(0xFFFF0000)) if dtype == "bfloat16" else widen(word >> Uint32(16), dtype)
        found += [widen(word, dtype), high]
    return found


def packed(values, dtype: str) -> tuple:
    """fp32 values as words of `dtype`, rounded to nearest even."""
    if WIDTH[dtype] == 4:
        return tuple(as_word(x) for x in values)
    return tuple(
        ptx(
            f"cvt.rn.{PTX_NAME[dtype]}x2.f32 {{$w0}}, {{$r1}}, {{$r0}};",
            write_only_types=[Uint32],
            read_only_args=[values[i], values[i + 1]],
        )
        for i in range(0, len(values), 2)
    )


@cute.jit
def exp(x):
    """e ** x to 2 ulp: what rounding x log2(e) loses is put back. 0 below -200, the largest of a float above 88."""
    x = Float32(-200.0) if x < -200.0 else x  # comparisons, which keep a NaN
    x = Float32(88.5) if x > 88.5 else x
    whole = x * LOG2_E
    rest = fma(x, Float32(LOG2_E), -whole) + x * LOG2_E_REST
    power = ptx("ex2.approx.ftz.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[whole])
    return fma(power, rest * LN_2, power)


def fma(a, b, c):
    return ptx("fma.rn.f32 {$w0}, {$r0}, {$r1}, {$r2};", write_only_types=[Float32], read_only_args=[a, b, c])
