"""Device helpers of the norm kernels: rows to threads, 16-byte accesses, row sums, the gate.

A thread t of a row owns the vectors t, t + threads_per_row, ...; a vector is 16 bytes of x. Fragments are (vector,
vectors per thread); tensors of another width use the same elements with two accesses each.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from .config import WIDTH

DTYPES = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16, "float32": cutlass.Float32}
LOG2_E = 1.4426950408889634


def fake_rows(dtype: str, hidden: int, rows, contiguous: bool = False):
    """A stand-in for (rows, hidden) or (outer, inner, hidden): contiguous last dimension, 16-byte aligned rows."""
    stride = (hidden,) if contiguous else tuple(cute.sym_int64(divisibility=16 // WIDTH[dtype]) for _ in rows)
    return cute.runtime.make_fake_tensor(DTYPES[dtype], (*rows, hidden), stride=(*stride, 1), assumed_align=16)


def fake_vector(dtype: str, length):
    return cute.runtime.make_fake_tensor(DTYPES[dtype], (length,), stride=(1,), assumed_align=16)


@cute.jit
def row_of(mX: cute.Tensor, row: Int32, inner):
    """The row as a pointer with its alignment; `inner` splits the index of an (outer, inner, hidden) tensor."""
    if const_expr(inner is not None):
        return mX[row // inner, row % inner, None].iterator
    else:
        return mX[row, None].iterator


@cute.jit
def thread_view(pointer, lane: Int32, vector: cutlass.Constexpr, threads: cutlass.Constexpr, count: cutlass.Constexpr):
    """(vector, count) view of the elements that thread `lane` of `threads` owns."""
    layout = cute.make_layout((vector, threads, count), stride=(1, vector, vector * threads))
    return cute.make_tensor(pointer, layout)[None, lane, None]


@cute.jit
def copy_vector(atom, src: cute.Tensor, dst: cute.Tensor):
    """One vector, in as many 16-byte accesses as its dtype needs."""
    step = const_expr(128 // src.element_type.width)
    cute.copy(atom, cute.logical_divide(src, cute.make_layout(step)), cute.logical_divide(dst, cute.make_layout(step)))


def load_atom(dtype, streaming: bool):
    """A 16-byte global load; `streaming` data does not push the weight out of the L1."""
    priority = cute.nvgpu.CacheEvictionPriority
    return cute.make_copy_atom(
        cute.nvgpu.CopyG2ROp(),
        dtype,
        num_bits_per_copy=128,
        l1c_evict_priority=priority.NO_ALLOCATE if streaming else priority.EVICT_NORMAL,
    )


def plain_atom(dtype):
    return cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), dtype, num_bits_per_copy=128)


@cute.jit
def group_sum(value: Float32, threads: cutlass.Constexpr):
    """Sum over an aligned group of `threads` lanes, the same bits in every lane."""
    offset = 1
    for _ in cutlass.range_constexpr(threads.bit_length() - 1):
        value += cute.arch.shuffle_sync_bfly(value, offset=offset)
        offset *= 2
    return value


@cute.jit
def sigmoid(z: cute.TensorSSA, exact: cutlass.Constexpr):
    """1 / (1 + exp(-z)); z = -inf gives 0. `exact` for fp32 data: the approximate division is 2 ulp off."""
    if const_expr(exact):
        return 1.0 / (1.0 + cute.math.exp(-z))
    else:
        # MUFU.EX2 and MUFU.RCP, flushing denormals: both are below an ulp of 16-bit data.
        out = cute.make_rmem_tensor(z.shape, Float32)
        out.store(1.0 + cute.math.exp2(z * (-LOG2_E), fastmath=True))
        for j in cutlass.range_constexpr(cute.size(out)):
            out[j] = cute.arch.rcp_approx(out[j])
        return out.load()
