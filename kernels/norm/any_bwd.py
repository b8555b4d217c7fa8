"""RMSNorm backward, plain and gated, one source for every target.

Persistent CTAs walk over groups of rows_per_cta rows. x, dy and the gate arrive through a ring of asynchronous copies
in shared memory; a thread reads back only what it copied itself, so the ring needs no barrier. rstd is recomputed from
x: both row sums (x*x and x*g, g the gradient before the norm) share one reduction. dweight is summed per thread in fp32
over the CTA's rows, then over the CTA's row slots, written as one partial row per CTA, and a second kernel adds the
partial rows in a fixed order: no atomics, the same bits every time for the same grid.
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from .any_rows import (
    DTYPES,
    copy_vector,
    fake_rows,
    fake_vector,
    group_sum,
    load_atom,
    plain_atom,
    row_of,
    sigmoid,
    thread_view,
)
from .config import WARP, BwdConfig


class NormBackward:
    """Traceable host function `(x, [gate], weight, dy, dx, [dgate], partial, dweight, eps, stream)`."""

    def __init__(self, config: BwdConfig) -> None:
        self.config = config

    @cute.jit
    def plain(
        self,
        mX: cute.Tensor,
        mW: cute.Tensor,
        mDy: cute.Tensor,
        mDx: cute.Tensor,
        mPartial: cute.Tensor,
        mDw: cute.Tensor,
        eps: Float32,
        stream: cuda.CUstream,
    ):
        self.launch(mX, None, mW, mDy, mDx, None, mPartial, mDw, eps, stream)

    @cute.jit
    def gated(
        self,
        mX: cute.Tensor,
        mG: cute.Tensor,
        mW: cute.Tensor,
        mDy: cute.Tensor,
        mDx: cute.Tensor,
        mDg: cute.Tensor,
        mPartial: cute.Tensor,
        mDw: cute.Tensor,
        eps: Float32,
        stream: cuda.CUstream,
    ):
        self.launch(mX, mG, mW, mDy, mDx, mDg, mPartial, mDw, eps, stream)

    @cute.jit
    def launch(self, mX, mG, mW, mDy, mDx, mDg, mPartial, mDw, eps, stream):
        c = self.config
        inner = mX.shape[1] if const_expr(c.two_level) else None
        rows = mX.shape[0] * inner if const_expr(c.two_level) else mX.shape[0]
        self.main(mX, mG, mW, mDy, mDx, mDg, mPartial, rows, inner, eps).launch(
            grid=[mPartial.shape[0], 1, 1],
            block=[c.threads, 1, 1],
            min_blocks_per_mp=c.ctas_per_sm,
            preferred_smem_carveout=100,
            use_pdl=c.overlap,
            stream=stream,
        )
        self.reduce_partials(mPartial, mDw).launch(
            grid=[cute.ceil_div(c.hidden, WARP), 1, 1],
            block=[WARP * c.reduce_warps, 1, 1],
            use_pdl=c.overlap,
            stream=stream,
        )

    @cute.kernel
    def main(self, mX, mG, mW, mDy, mDx, mDg, mPartial, rows: Int32, inner, eps: Float32):
        c = self.config
        dtype, wdtype, odtype = DTYPES[c.dtype], DTYPES[c.weight_dtype], DTYPES[c.out_dtype]
        vec, tpr, count, stages = c.vector, c.threads_per_row, c.vectors_per_thread, c.stages
        tid, _, _ = cute.arch.thread_idx()
        bid, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        lane, slot = tid % tpr, tid // tpr
        stride = grid * c.rows_per_cta

        smem = cutlass.memory.SmemAllocator()
        ring = cute.make_layout(
            (vec, c.threads, count, stages), stride=(1, vec, vec * c.threads, vec * c.threads * count)
        )
        buffer = smem.allocate(c.ring_bytes, byte_alignment=16)
        x_bytes = stages * c.padded * dtype.width // 8
        dy_bytes = stages * c.padded * odtype.width // 8
        sX = self.ring_of(buffer, dtype, ring, tid)
        sDy = self.ring_of(buffer + x_bytes, odtype, ring, tid)
        sG = self.ring_of(buffer + x_bytes + dy_bytes, dtype, ring, tid) if const_expr(c.gated) else None
        sSums = smem.allocate_tensor(
            Float32, cute.make_layout((2, c.warps_per_row, c.rows_per_cta, 2)), byte_alignment=16
        )
        # Once the ring is drained, the row slots exchange their sums of dweight through it.
        sDw = cute.make_tensor(
            cute.recast_ptr(buffer, dtype=Float32),
            cute.make_layout((vec, c.threads, count), stride=(1, vec, vec * c.threads)),
        )

        if const_expr(c.overlap):
            cute.arch.griddepcontrol_wait()

        gW = thread_view(mW.iterator, lane, vec, tpr, count)
        tW = gW
        if const_expr(not c.reload_weight):
            tW = cute.make_rmem_tensor((vec, count), wdtype)
            for i in cutlass.range_constexpr(count):
                if const_expr((i + 1) * tpr <= c.vectors) or lane + i * tpr < c.vectors:
                    copy_vector(load_atom(wdtype, False), gW[None, i], tW[None, i])
        tDw = cute.make_rmem_tensor((vec, count), Float32)
        tDw.fill(0.0)

        first = bid * c.rows_per_cta + slot
        for s in cutlass.range_constexpr(stages - 1):
            self.fetch(mX, mDy, mG, sX, sDy, sG, first + s * stride, rows, inner, lane, s)
            cute.arch.cp_async_commit_group()

        base = bid * c.rows_per_cta
        step = Int32(0)
        while base < rows:
            row = base + slot
            stage = step % stages
            self.fetch(
                mX, mDy, mG, sX, sDy, sG, row + (stages - 1) * stride, rows, inner, lane, (step + stages - 1) % stages
            )
            cute.arch.cp_async_commit_group()
            cute.arch.cp_async_wait_group(stages - 1)
            self.one_row(mDx, mDg, sX, sDy, sG, tW, tDw, sSums, row, rows, inner, eps, lane, slot, tid, stage, step % 2)
            base += stride
            step += 1
        cute.arch.cp_async_wait_group(0)
        if const_expr(c.overlap):
            cute.arch.griddepcontrol_launch_dependents()

        # The row slots of a CTA own the same columns: slot 0 adds them in order.
        if const_expr(c.rows_per_cta > 1):
            cute.arch.barrier()
            for i in cutlass.range_constexpr(count):
                copy_vector(plain_atom(Float32), tDw[None, i], sDw[None, tid, i])
            cute.arch.barrier()
        if slot == 0:
            total = cute.make_rmem_tensor((vec,), Float32)
            gPartial = thread_view(mPartial[bid, None].iterator, lane, vec, tpr, count)
            for i in cutlass.range_constexpr(count):
                total.store(tDw[None, i].load())
                if const_expr(c.rows_per_cta > 1):
                    for other in cutlass.range(1, c.rows_per_cta, unroll=2):
                        total.store(total.load() + sDw[None, other * tpr + lane, i].load())
                if const_expr((i + 1) * tpr <= c.vectors) or lane + i * tpr < c.vectors:
                    copy_vector(plain_atom(Float32), total, gPartial[None, i])

    @cute.jit
    def ring_of(self, buffer, dtype: cutlass.Constexpr, ring, tid):
        """A tensor's part of the ring, as the thread sees it: (vector, vectors per thread, stage)."""
        return cute.make_tensor(cute.recast_ptr(buffer, dtype=dtype), ring)[None, tid, None, None]

    @cute.jit
    def fetch(self, mX, mDy, mG, sX, sDy, sG, row, rows, inner, lane, stage):
        """Start the copies of one row into a stage of the ring; rows past the end leave the stage as it is."""
        c = self.config
        vec, tpr, count = c.vector, c.threads_per_row, c.vectors_per_thread
        dtype, odtype = DTYPES[c.dtype], DTYPES[c.out_dtype]
        if row < rows:
            gX = thread_view(row_of(mX, row, inner), lane, vec, tpr, count)
            gDy = thread_view(row_of(mDy, row, inner), lane, vec, tpr, count)
            for i in cutlass.range_constexpr(count):
                if const_expr((i + 1) * tpr <= c.vectors) or lane + i * tpr < c.vectors:
                    copy_vector(async_atom(dtype), gX[None, i], sX[None, i, stage])
                    copy_vector(async_atom(odtype), gDy[None, i], sDy[None, i, stage])
            if const_expr(c.gated):
                gG = thread_view(row_of(mG, row, inner), lane, vec, tpr, count)
                for i in cutlass.range_constexpr(count):
                    if const_expr((i + 1) * tpr <= c.vectors) or lane + i * tpr < c.vectors:
                        copy_vector(async_atom(dtype), gG[None, i], sG[None, i, stage])

    @cute.jit
    def one_row(self, mDx, mDg, sX, sDy, sG, tW, tDw, sSums, row, rows, inner, eps, lane, slot, tid, stage, parity):
        """dx, dgate and the contribution to dweight of one row; every thread of the CTA takes part in the row sums."""
        c = self.config
        dtype = DTYPES[c.dtype]
        vec, tpr, count = c.vector, c.threads_per_row, c.vectors_per_thread
        squares = cute.make_rmem_tensor((vec,), Float32)
        products = cute.make_rmem_tensor((vec,), Float32)
        squares.fill(0.0)
        products.fill(0.0)
        if row < rows:
            for i in cutlass.range_constexpr(count):
                if const_expr((i + 1) * tpr <= c.vectors) or lane + i * tpr < c.vectors:
                    x = sX[None, i, stage].load().to(Float32)
                    g = sDy[None, i, stage].load().to(Float32) * self.effective(tW[None, i])
                    if const_expr(c.gated):
                        g = g * self.activate(sG[None, i, stage].load())[0]
                    squares.store(squares.load() + x * x)
                    products.store(products.load() + x * g)
        sum_squares = group_sum(squares.load().reduce(cute.ReductionOp.ADD, 0.0, 0), min(tpr, WARP))
        sum_products = group_sum(products.load().reduce(cute.ReductionOp.ADD, 0.0, 0), min(tpr, WARP))
        if const_expr(c.warps_per_row > 1):
            if tid % WARP == 0:
                sSums[0, tid // WARP % c.warps_per_row, slot, parity] = sum_squares
                sSums[1, tid // WARP % c.warps_per_row, slot, parity] = sum_products
            cute.arch.barrier()
            sum_squares, sum_products = Float32(0.0), Float32(0.0)
            for w in cutlass.range_constexpr(c.warps_per_row):
                sum_squares += sSums[0, w, slot, parity]
                sum_products += sSums[1, w, slot, parity]
        rstd = cute.math.rsqrt(sum_squares * (1.0 / c.hidden) + eps)
        mean = sum_products * rstd * (1.0 / c.hidden)
        if row < rows:
            gDx = thread_view(row_of(mDx, row, inner), lane, vec, tpr, count)
            gDg = thread_view(row_of(mDg, row, inner), lane, vec, tpr, count) if const_expr(c.gated) else None
            rOut = cute.make_rmem_tensor((vec,), dtype)
            for i in cutlass.range_constexpr(count):
                if const_expr((i + 1) * tpr <= c.vectors) or lane + i * tpr < c.vectors:
                    normed = sX[None, i, stage].load().to(Float32) * rstd
                    dy = sDy[None, i, stage].load().to(Float32)
                    weight = self.effective(tW[None, i])
                    if const_expr(c.gated):
                        act, slope = self.activate(sG[None, i, stage].load())
                        rOut.store((dy * (weight * normed) * slope).to(dtype))
                        copy_vector(plain_atom(dtype), rOut, gDg[None, i])
                        dy = dy * act
                    tDw[None, i].store(tDw[None, i].load() + dy * normed)
                    rOut.store(((dy * weight - normed * mean) * rstd).to(dtype))
                    copy_vector(plain_atom(dtype), rOut, gDx[None, i])

    @cute.jit
    def effective(self, tW):
        """A vector of the weight in fp32, from registers, or from the L1 where registers are short."""
        if const_expr(self.config.reload_weight):
            rW = cute.make_rmem_tensor((self.config.vector,), tW.element_type)
            copy_vector(load_atom(tW.element_type, False), tW, rW)
            weight = rW.load().to(Float32)
        else:
            weight = tW.load().to(Float32)
        return 1.0 + weight if const_expr(self.config.form == "zero_centred") else weight

    @cute.jit
    def activate(self, gate):
        """The gate's activation and its derivative, in fp32."""
        z = gate.to(Float32)
        s = sigmoid(z, self.config.dtype == "float32")
        if const_expr(self.config.activation == "silu"):
            return z * s, s * (1.0 + z * (1.0 - s))
        else:
            return s, s * (1.0 - s)

    @cute.kernel
    def reduce_partials(self, mPartial, mDw):
        """dweight of 32 columns a CTA: warp w adds the partial rows w, w + reduce_warps, ..., warp 0 adds the warps."""
        c = self.config
        tid, _, _ = cute.arch.thread_idx()
        bid, _, _ = cute.arch.block_idx()
        warp, column = tid // WARP, bid * WARP + tid % WARP
        smem = cutlass.memory.SmemAllocator()
        sums = smem.allocate_tensor(Float32, cute.make_layout((WARP, c.reduce_warps)), byte_alignment=16)
        if const_expr(c.overlap):
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
        total = Float32(0.0)
        if column < c.hidden:
            for r in cutlass.range(warp, mPartial.shape[0], c.reduce_warps, unroll=8):
                total += mPartial[r, column]
        sums[tid % WARP, warp] = total
        cute.arch.barrier()
        if warp == 0 and column < c.hidden:
            total = Float32(0.0)
            for w in cutlass.range_constexpr(c.reduce_warps):
                total += sums[tid, w]
            mDw[column] = total.to(mDw.element_type)


def async_atom(dtype):
    cache = cute.nvgpu.cpasync.LoadCacheMode.GLOBAL
    return cute.make_copy_atom(cute.nvgpu.cpasync.CopyG2SOp(cache_mode=cache), dtype, num_bits_per_copy=128)


def build(config: BwdConfig):
    """(host function, stand-in arguments) for the compiler."""
    c = config
    rows = tuple(cute.sym_int32() for _ in range(2 if c.two_level else 1))

    def like(dtype: str):
        return fake_rows(dtype, c.hidden, rows)

    gate = (like(c.dtype),) if c.gated else ()
    dgate = (like(c.dtype),) if c.gated else ()
    partial = fake_rows("float32", c.hidden, (cute.sym_int32(),), contiguous=True)
    dweight = fake_vector(c.weight_dtype, c.hidden)
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    kernel = NormBackward(c)
    arguments = (
        like(c.dtype),
        *gate,
        fake_vector(c.weight_dtype, c.hidden),
        like(c.out_dtype),
        like(c.dtype),
        *dgate,
        partial,
        dweight,
        Float32(0.0),
        stream,
    )
    return (kernel.gated if c.gated else kernel.plain), arguments
