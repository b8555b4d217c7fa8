"""RMSNorm forward, plain and gated, one source for every target.

Each CTA takes rows_per_cta rows. A row is read once with 16-byte loads, all of them in flight together, kept in
registers as it came, summed in fp32 by warp shuffles (and shared memory where a row spans warps), then scaled and
written.
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
from .config import FwdConfig


class NormForward:
    """Traceable host function `(x, [gate], weight, out, eps, stream)` for one configuration."""

    def __init__(self, config: FwdConfig) -> None:
        self.config = config

    @cute.jit
    def plain(self, mX: cute.Tensor, mW: cute.Tensor, mO: cute.Tensor, eps: Float32, stream: cuda.CUstream):
        self.launch(mX, None, mW, mO, eps, stream)

    @cute.jit
    def gated(
        self, mX: cute.Tensor, mG: cute.Tensor, mW: cute.Tensor, mO: cute.Tensor, eps: Float32, stream: cuda.CUstream
    ):
        self.launch(mX, mG, mW, mO, eps, stream)

    @cute.jit
    def launch(self, mX, mG, mW, mO, eps, stream):
        c = self.config
        inner = mX.shape[1] if const_expr(c.two_level) else None
        rows = mX.shape[0] * inner if const_expr(c.two_level) else mX.shape[0]
        self.kernel(mX, mG, mW, mO, rows, inner, eps).launch(
            grid=[cute.ceil_div(rows, c.rows_per_cta), 1, 1],
            block=[c.threads, 1, 1],
            use_pdl=c.overlap,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, mX, mG, mW, mO, rows: Int32, inner, eps: Float32):
        c = self.config
        dtype, wdtype, odtype = DTYPES[c.dtype], DTYPES[c.weight_dtype], DTYPES[c.out_dtype]
        vec, tpr, count = c.vector, c.threads_per_row, c.vectors_per_thread
        tid, _, _ = cute.arch.thread_idx()
        bid, _, _ = cute.arch.block_idx()
        lane = tid % tpr
        row = bid * c.rows_per_cta + tid // tpr

        if const_expr(c.overlap):
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()

        rX = cute.make_rmem_tensor((vec, count), dtype)
        rW = cute.make_rmem_tensor((vec, count), wdtype)
        rG = cute.make_rmem_tensor((vec, count), dtype) if const_expr(c.gated) else None
        if const_expr(c.vectors % tpr != 0 or c.rows_per_cta > 1):
            rX.fill(0.0)
        stream_x, load_w = load_atom(dtype, True), load_atom(wdtype, False)
        if row < rows:
            gX = thread_view(row_of(mX, row, inner), lane, vec, tpr, count)
            for i in cutlass.range_constexpr(count):
                if const_expr((i + 1) * tpr <= c.vectors) or lane + i * tpr < c.vectors:
                    copy_vector(stream_x, gX[None, i], rX[None, i])
            if const_expr(c.gated):
                gG = thread_view(row_of(mG, row, inner), lane, vec, tpr, count)
                for i in cutlass.range_constexpr(count):
                    if const_expr((i + 1) * tpr <= c.vectors) or lane + i * tpr < c.vectors:
                        copy_vector(stream_x, gG[None, i], rG[None, i])
        gW = thread_view(mW.iterator, lane, vec, tpr, count)
        for i in cutlass.range_constexpr(count):
            if const_expr((i + 1) * tpr <= c.vectors) or lane + i * tpr < c.vectors:
                copy_vector(load_w, gW[None, i], rW[None, i])

        squares = cute.make_rmem_tensor((vec,), Float32)
        squares.fill(0.0)
        for i in cutlass.range_constexpr(count):
            x = rX[None, i].load().to(Float32)
            squares.store(squares.load() + x * x)
        total = squares.load().reduce(cute.ReductionOp.ADD, 0.0, 0)
        total = group_sum(total, min(tpr, 32))
        if const_expr(c.warps_per_row > 1):
            total = self.sum_over_warps(total, tid)
        rstd = cute.math.rsqrt(total * (1.0 / c.hidden) + eps)

        if row < rows:
            gO = thread_view(row_of(mO, row, inner), lane, vec, tpr, count)
            rO = cute.make_rmem_tensor((vec,), odtype)
            for i in cutlass.range_constexpr(count):
                if const_expr((i + 1) * tpr <= c.vectors) or lane + i * tpr < c.vectors:
                    gate = rG[None, i].load() if const_expr(c.gated) else None
                    rO.store(self.scale(rX[None, i].load(), rW[None, i].load(), gate, rstd))
                    copy_vector(plain_atom(odtype), rO, gO[None, i])

    @cute.jit
    def sum_over_warps(self, value: Float32, tid: Int32):
        c = self.config
        warps: cutlass.Constexpr = c.warps_per_row
        smem = cutlass.memory.SmemAllocator()
        sums = smem.allocate_tensor(Float32, cute.make_layout((warps, c.rows_per_cta)), byte_alignment=16)
        if tid % 32 == 0:
            sums[tid // 32 % warps, tid // c.threads_per_row] = value
        cute.arch.barrier()
        total = Float32(0.0)
        for w in cutlass.range_constexpr(warps):
            total += sums[w, tid // c.threads_per_row]
        return total

    @cute.jit
    def scale(self, x, w, gate, rstd: Float32):
        """The rounding points of the form: what is cast to x's dtype before the weight, before the gate, at the end."""
        c = self.config
        dtype, odtype = DTYPES[c.dtype], DTYPES[c.out_dtype]
        normed = x.to(Float32) * rstd
        weight = w.to(Float32)
        if const_expr(c.form == "cast_then_weight"):
            y = normed.to(dtype).to(Float32) * weight
            if const_expr(c.gated and c.weight_dtype == c.dtype):
                y = y.to(dtype).to(Float32)
        elif const_expr(c.form == "zero_centred"):
            y = normed * (1.0 + weight)
        else:
            y = normed * weight
        if const_expr(c.gated):
            z = gate.to(Float32)
            s = sigmoid(z, c.dtype == "float32")
            y = y * (z * s if const_expr(c.activation == "silu") else s)
        return y.to(odtype)


def build(config: FwdConfig):
    """(host function, stand-in arguments) for the compiler."""
    c = config
    rows = tuple(cute.sym_int32() for _ in range(2 if c.two_level else 1))
    x = fake_rows(c.dtype, c.hidden, rows)
    gate = (fake_rows(c.dtype, c.hidden, rows),) if c.gated else ()
    weight = fake_vector(c.weight_dtype, c.hidden)
    out = fake_rows(c.out_dtype, c.hidden, rows)
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    kernel = NormForward(c)
    return (kernel.gated if c.gated else kernel.plain), (x, *gate, weight, out, Float32(0.0), stream)
