"""Warp products (mma.sync m16n8k16, fp32 accumulators), ldmatrix and cp.async: what every target from sm_80 on has.

A product belongs to one warp and 16 rows. In its accumulator, lane t holds for N columns the N / 2 elements
i = a + 2 r + 4 c of

    row     t / 4 + 8 r             r in 0..1
    column  8 c + 2 (t % 4) + a     a in 0..1

which is the order of a wgmma accumulator too (wgmma.py), so softmax.py serves both. Rounded to 16 bits and packed in
pairs, the elements of 16 columns are the left operand of the next product.

A tile in shared memory is rows of 16-byte chunks, an even number of them, their order exchanged by the row so that the
8 rows of a matrix lie in different banks. Its address is a byte address in the shared window.
"""

from __future__ import annotations

from math import gcd

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr

DTYPES = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16}
_NAMES = {"bfloat16": "bf16", "float16": "f16"}
WARP = 32
CHUNK = 16  #: bytes
ptx = cute.arch.inline_ptx


# --- Tiles ---------------------------------------------------------------------------------------------------------


def period(chunks: int) -> int:
    """Chunks among which a row's are exchanged; rows of an odd multiple of it repeat in the banks after 8 of them."""
    return min(chunks & -chunks, 8)


def place(row, chunk, chunks: int):
    """Byte offset of a chunk in a tile of `chunks` chunks a row; on Python ints and device values alike."""
    p = period(chunks)
    return (row * chunks + (chunk ^ (row // (8 // p) % p))) * CHUNK


def pair_address(tile, row, second, chunks: int):
    """Address of chunk `second` (0 or 1) of a row's first pair of chunks; of the other pairs: `pair`. Tiles start at
    multiples of 128 bytes. The same in every 8th row, so that its matrices lie at offsets known when compiling.
    """
    return tile + place(row, second, chunks)


def pair(address, s: int, chunks: int) -> tuple:
    """(address, offset) of the same chunk of pair s."""
    p = period(chunks) // 2
    return flipped(address, s % p * 2 * CHUNK), s // p * p * 2 * CHUNK


@cute.jit
def load_tile(
    tile: Int32,
    source: Int64,
    first: Int32,
    stride: Int64,
    rows_there: Int32,
    rows: cutlass.Constexpr,
    columns: cutlass.Constexpr,
    chunks: cutlass.Constexpr,
    threads: cutlass.Constexpr,
):
    """Start the copies of rows `first` .. `first` + `rows` - 1 of a matrix into a tile.

    The matrix has `rows_there` rows of `columns` 16-bit elements, `stride` bytes apart. Zeros stand for rows behind
    them and for chunks behind the columns: nothing is read there.
    """
    # After `rounds` copies of all threads whole rows are done, and a thread is at the same chunk, 8 n rows on.
    rounds: cutlass.Constexpr = _rounds(chunks, threads)
    down: cutlass.Constexpr = threads * rounds // chunks
    total: cutlass.Constexpr = rows * chunks
    thread = thread_index()
    for p in cutlass.range_constexpr(min(rounds, -(-total // threads))):
        index = p * threads + thread
        row, chunk = index // chunks, index % chunks
        target = tile + place(row, chunk, chunks)
        at = source + (Int64(row) * stride + chunk * CHUNK) + Int64(first) * stride
        there = rows_there - first
        if const_expr(columns % (8 * chunks) != 0):
            there = there if chunk < columns // 8 else Int32(0)
        for i in cutlass.range_constexpr(-(-rows // down)):
            if const_expr((i * rounds + p + 1) * threads <= total) or row + i * down < rows:
                size = Int32(CHUNK) if row + i * down < there else Int32(0)
                copy_async(target, i * down * chunks * CHUNK, at, size)
            at = advance(at, stride * down)


def _rounds(chunks: int, threads: int) -> int:
    rounds = chunks // gcd(chunks, threads)
    while threads * rounds // chunks % 8:
        rounds *= 2
    return rounds


# --- Instructions --------------------------------------------------------------------------------------------------


def anew(value) -> Int32:
    """The same number; what follows from it is computed where it is used, not kept in registers until then."""
    return ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[value])


def address_after(value, address) -> Int32:
    """The address, which is known only once `value` is, a number that is not negative or a NaN."""
    return ptx(
        "{ .reg .pred p; setp.lt.f32 p, {$r0}, 0f00000000; selp.b32 {$w0}, 0, {$r1}, p; }",
        write_only_types=[Int32],
        read_only_args=[value, address],
    )


def thread_index() -> Int32:
    """Number of the thread in its CTA, `anew`."""
    return anew(cute.arch.thread_idx()[0])


def copy_async(target, offset: int, source, size) -> None:
    """16 bytes from global to shared memory past the L1; of `size` 0 nothing is read and zeros are written."""
    ptx(f"cp.async.cg.shared.global [{{$r0}}+{offset}], [{{$r1}}], 16, {{$r2}};", read_only_args=[target, source, size])


def advance(address, step):
    """address + step, kept from being rewritten into a table of multiples, which would not fit the registers."""
    return ptx("add.s64 {$w0}, {$r0}, {$r1};", write_only_types=[Int64], read_only_args=[address, step])


def flipped(address, bits: int):
    """address ^ bits, computed where it is used: kept, all of them would not fit the registers."""
    if bits == 0:
        return address
    return ptx(f"xor.b32 {{$w0}}, {{$r0}}, {bits};", write_only_types=[Int32], read_only_args=[address])


def load_matrices(address, offset: int, transposed: bool = False) -> list:
    """Four 8x8 matrices of 16-bit elements, a register each; lane i has the address of row i % 8 of matrix i / 8."""
    how = ".trans" if transposed else ""
    return ptx(
        f"ldmatrix.sync.aligned.m8n8.x4{how}.shared.b16 {{{{$w0}}, {{$w1}}, {{$w2}}, {{$w3}}}}, [{{$r0}}+{offset}];",
        write_only_types=[Uint32] * 4,
        read_only_args=[address],
    )


def multiply(dtype: str, acc, column: int, a, b0, b1) -> None:
    """acc[:, column .. column + 7] += A (16 x 16, four registers) @ B (16 x 8)."""
    kind, c = _NAMES[dtype], column // 2
    out = ptx(
        f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32"
        " {{$w0}, {$w1}, {$w2}, {$w3}}, {{$r0}, {$r1}, {$r2}, {$r3}}, {{$r4}, {$r5}}, {{$r6}, {$r7}, {$r8}, {$r9}};",
        write_only_types=[Float32] * 4,
        read_only_args=[*a, b0, b1, *(acc[c + i] for i in range(4))],
    )
    for i in range(4):
        acc[c + i] = out[i]


def pack(dtype: str, low, high):
    """Two fp32 values rounded into one register, the first in its lower half."""
    return ptx(
        f"cvt.rn.{_NAMES[dtype]}x2.f32 {{$w0}}, {{$r1}}, {{$r0}};",
        write_only_types=[Uint32],
        read_only_args=[low, high],
    )


def left_operand(dtype: str, acc, column: int) -> list:
    """Columns column .. column + 15 of an accumulator as the left operand of a product."""
    c = column // 2
    return [pack(dtype, acc[c + i], acc[c + i + 1]) for i in (0, 2, 4, 6)]


def load_words(address, count: int) -> list:
    """1, 2 or 4 neighbouring words of global memory."""
    names = ", ".join(f"{{$w{i}}}" for i in range(count))
    vector, target = (f".v{count}", f"{{{names}}}") if count > 1 else ("", names)
    found = ptx(
        f"ld.global{vector}.u32 {target}, [{{$r0}}];", write_only_types=[Uint32] * count, read_only_args=[address]
    )
    return list(found) if count > 1 else [found]


def store_word(address, word) -> None:
    """A register to shared memory."""
    ptx("st.shared.b32 [{$r0}], {$r1};", read_only_args=[address, word])


def copy_vector(target, source) -> None:
    """16 bytes from shared to global memory."""
    words = ptx(
        "ld.shared.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Uint32] * 4,
        read_only_args=[source],
    )
    ptx("st.global.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};", read_only_args=[target, *words])
