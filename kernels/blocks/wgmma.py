"""Warpgroup products (wgmma, m64nNk16, fp32 accumulators): shared memory layouts, operands, and where elements are.

A product belongs to one warpgroup of 128 threads and 64 rows. In its accumulator, thread t holds for N columns the N/2
elements i = a + 2 r + 4 c of

    row     16 (t / 32) + (t % 32) / 4 + 8 r        r in 0..1
    column  8 c + 2 (t % 4) + a                     a in 0..1

which is also the order of an A operand in registers: an accumulator rounded to 16 bits, element by element, is the left
operand of the next product. Products are asynchronous: an accumulator may not be touched before `wait`.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Boolean, Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.tensor_utils import LayoutEnum

M = 64  #: rows of a product
DTYPES = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16}


def smem_layout(dtype, rows: int, columns: int, stages: int | None = None):
    """Rows of contiguous columns, swizzled as wide as the columns allow, for products and TMA alike."""
    atom = warpgroup.make_smem_layout_atom(sm90.get_smem_layout_atom(LayoutEnum.ROW_MAJOR, dtype, columns), dtype)
    if stages is None:
        return cute.tile_to_shape(atom, (rows, columns), order=(0, 1))
    return cute.tile_to_shape(atom, (rows, columns, stages), order=(0, 1, 2))


def one_stage(layout):
    """The (rows, columns) layout of one stage."""
    return cute.select(layout, mode=[0, 1])


def transposed(smem: cute.Tensor) -> cute.Tensor:
    """(rows, columns, stages) seen as (columns, rows, stages)."""
    shape = (smem.shape[1], smem.shape[0], *smem.shape[2:])
    order = (1, 0, *range(2, cute.rank(smem)))
    return cute.composition(smem, cute.make_ordered_layout(shape, order=order))


def product(dtype, columns: int, b_rows_contiguous: bool = False, a_in_registers: bool = False) -> cute.TiledMma:
    """A (64, k) times B (columns, k) transposed. B is contiguous along k, or with `b_rows_contiguous` along columns."""
    return sm90.make_trivial_tiled_mma(
        dtype,
        dtype,
        OperandMajorMode.K,
        OperandMajorMode.MN if b_rows_contiguous else OperandMajorMode.K,
        Float32,
        atom_layout_mnk=(1, 1, 1),
        tiler_mn=(M, columns),
        a_source=warpgroup.OperandSource.RMEM if a_in_registers else warpgroup.OperandSource.SMEM,
    )


def accumulator(mma: cute.TiledMma, columns: int) -> cute.Tensor:
    return cute.make_rmem_tensor(mma.partition_shape_C((M, columns)), Float32)


def a_operand(mma: cute.TiledMma, smem: cute.Tensor) -> cute.Tensor:
    """Descriptors of A in shared memory: (64, k[, stage]) -> (mma, 1, k / 16[, stage])."""
    return mma.make_fragment_A(mma.get_slice(0).partition_A(smem))


def a_registers(mma: cute.TiledMma, k: int) -> cute.Tensor:
    """A in registers: (mma, 1, k / 16)."""
    return mma.make_fragment_A(mma.get_slice(0).partition_shape_A((M, k)))


def b_operand(mma: cute.TiledMma, smem: cute.Tensor) -> cute.Tensor:
    """Descriptors of B in shared memory: (columns, k[, stage]) -> (mma, 1, k / 16[, stage])."""
    return mma.make_fragment_B(mma.get_slice(0).partition_B(smem))


@cute.jit
def issue(mma: cute.TiledMma, acc: cute.Tensor, a: cute.Tensor, b: cute.Tensor, accumulate: Boolean | bool):
    """acc (+)= a @ b.T as one group, not waited for."""
    warpgroup.fence()
    # A fresh atom: setting a field of the shared one would tie its uses in different branches together.
    atom = cute.make_mma_atom(mma.op)
    atom.set(warpgroup.Field.ACCUMULATE, accumulate)
    for k in cutlass.range_constexpr(cute.size(a.shape[2])):
        cute.gemm(atom, acc, a[None, None, k], b[None, None, k], acc)
        atom.set(warpgroup.Field.ACCUMULATE, True)
    warpgroup.commit_group()


def wait(groups_in_flight: int = 0) -> None:
    """Until at most so many of the groups issued by this warpgroup are unfinished."""
    warpgroup.wait_group(groups_in_flight)


@cute.jit
def row_in_tile(thread: Int32, r: int) -> Int32:
    """Row of accumulator elements with that r."""
    return thread // 32 * 16 + thread % 32 // 4 + 8 * r


@cute.jit
def round_to(src: cute.Tensor, dst: cute.Tensor) -> None:
    """fp32 registers to 16 bits, element by element in linear order."""
    halves = cute.make_tensor(dst.iterator, cute.make_layout(cute.size(dst)))
    floats = cute.make_tensor(src.iterator, cute.make_layout(cute.size(src)))
    for i in cutlass.range_constexpr(cute.size(dst) // 2):
        pair = cute.make_layout(2)
        low = cute.make_tensor(floats.iterator + 2 * i, pair)
        cute.make_tensor(halves.iterator + 2 * i, pair).store(low.load().to(dst.element_type))


@cute.jit
def store_to_smem(mma: cute.TiledMma, registers: cute.Tensor, smem: cute.Tensor, thread: Int32) -> None:
    """16-bit registers in accumulator order into a (64, columns) tile, by stmatrix; visible to TMA after a barrier."""
    atom = cute.make_copy_atom(
        cute.nvgpu.warp.StMatrix8x8x16bOp(transpose=False, num_matrices=4), registers.element_type
    )
    copy = cute.make_tiled_copy_C(atom, mma).get_slice(thread)
    cute.copy(atom, copy.retile(registers), copy.partition_D(smem))
    cute.arch.fence_proxy("async.shared", space="cta")
