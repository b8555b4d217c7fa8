"""C = A @ B.T for sm_90a: bf16 or fp16, fp32 accumulators, warp specialised, persistent, B multicast in a cluster.

It exists to test the building blocks: one producer warp, two consumer warpgroups of 64 rows each, a ring of (A, B)
stages, an epilogue through shared memory and TMA stores that drain under the next tile's products.
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from . import pipeline, roles, scheduler, tma, wgmma
from .gemm_config import GemmConfig

CHUNK = 64  #: columns of an output buffer
BUFFERS = 2  #: of a warpgroup


class Gemm:
    """Traceable host function `(a, b, c, sms, stream)`: a (m, k), b (n, k), c (m, n), the number of CTAs to run."""

    def __init__(self, config: GemmConfig) -> None:
        self.config = config
        self.dtype = wgmma.DTYPES[config.dtype]

    def layouts(self):
        c = self.config
        return (
            wgmma.smem_layout(self.dtype, c.tile_m, c.tile_k, c.stages),
            wgmma.smem_layout(self.dtype, c.tile_n, c.tile_k, c.stages),
            wgmma.smem_layout(self.dtype, wgmma.M, CHUNK, BUFFERS * c.warpgroups),
        )

    @cute.jit
    def __call__(self, mA: cute.Tensor, mB: cute.Tensor, mC: cute.Tensor, sms: Int32, stream: cuda.CUstream):
        c = self.config
        layout_a, layout_b, layout_c = self.layouts()
        atom_a, tA = tma.load_atom(mA, wgmma.one_stage(layout_a), (c.tile_m, c.tile_k))
        atom_b, tB = tma.load_atom(mB, wgmma.one_stage(layout_b), (c.tile_n, c.tile_k), c.cluster_m)
        atom_c, tC = tma.store_atom(mC, wgmma.one_stage(layout_c), (wgmma.M, CHUNK))
        rows = cute.ceil_div(mC.shape[0], c.tile_m * c.cluster_m)
        columns = cute.ceil_div(mC.shape[1], c.tile_n)
        clusters = cutlass.max(cutlass.min(rows * columns, sms // c.cluster_m), 1)
        self.kernel(atom_a, tA, atom_b, tB, atom_c, tC, rows, columns).launch(
            grid=[clusters * c.cluster_m, 1, 1],
            block=[roles.threads(c.warpgroups), 1, 1],
            cluster=[c.cluster_m, 1, 1],
            min_blocks_per_mp=1,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, atom_a, mA, atom_b, mB, atom_c, mC, rows: Int32, columns: Int32):
        c = self.config
        layout_a, layout_b, layout_c = self.layouts()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            tma.prefetch(atom_a, atom_b, atom_c)

        @cute.struct
        class Storage:
            barriers: pipeline.barrier_storage(c.stages)
            tiles_a: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(layout_a)], 1024]
            tiles_b: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(layout_b)], 1024]
            tiles_c: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(layout_c)], 1024]

        storage = cutlass.memory.SmemAllocator().allocate(Storage)
        cluster = (c.cluster_m, 1)
        ring = pipeline.ring(storage.barriers, c.stages, 4 * c.warpgroups, c.stage_bytes, cluster)
        pipeline.init_fence(cluster)
        sA = storage.tiles_a.get_tensor(layout_a.outer, swizzle=layout_a.inner)
        sB = storage.tiles_b.get_tensor(layout_b.outer, swizzle=layout_b.inner)
        sC = storage.tiles_c.get_tensor(layout_c.outer, swizzle=layout_c.inner)
        pipeline.init_wait(cluster)

        if warp < 4:
            cute.arch.setmaxregister_decrease(roles.REGISTERS[c.warpgroups][0])
            if warp == 0:
                self.load(atom_a, mA, atom_b, mB, sA, sB, ring, rows, columns)
        else:
            cute.arch.setmaxregister_increase(roles.REGISTERS[c.warpgroups][1])
            self.multiply(atom_c, mC, sA, sB, sC, ring, rows, columns, cute.size(mA.shape[1]))

    @cute.jit
    def load(self, atom_a, mA, atom_b, mB, sA, sB, ring, rows: Int32, columns: Int32):
        """The producer warp: every (A, B) stage of every tile, as soon as its place in the ring is free."""
        c = self.config
        gA = cute.local_tile(mA, (c.tile_m, c.tile_k), (None, None))
        gB = cute.local_tile(mB, (c.tile_n, c.tile_k), (None, None))
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        tAsA, tAgA = tma.partition(atom_a, sA, gA)
        tBsB, tBgB = tma.partition(atom_b, sB, gB, rank, cute.make_layout(c.cluster_m))
        steps = cute.size(gA, mode=[3])
        state = pipeline.producer_state(c.stages)
        tile, stride = cute.arch.block_idx()[0] // c.cluster_m, cute.arch.grid_dim()[0] // c.cluster_m
        while tile < rows * columns:
            row, column = scheduler.grouped(tile, rows, columns, c.group)
            row = row * c.cluster_m + rank
            for k in cutlass.range(steps, unroll=1):
                ring.producer_acquire(state)
                full = ring.producer_get_barrier(state)
                cute.copy(atom_a, tAgA[None, row, k], tAsA[None, state.index], tma_bar_ptr=full)
                if const_expr(c.cluster_m == 1):
                    cute.copy(atom_b, tBgB[None, column, k], tBsB[None, state.index], tma_bar_ptr=full)
                else:
                    cute.copy(
                        atom_b,
                        tBgB[None, column, k],
                        tBsB[None, state.index],
                        tma_bar_ptr=full,
                        mcast_mask=cutlass.Int16((1 << c.cluster_m) - 1),
                    )
                state.advance()
            tile += stride
        ring.producer_tail(state)  # a CTA must not leave while others of its cluster signal its barriers

    @cute.jit
    def multiply(self, atom_c, mC, sA, sB, sC, ring, rows: Int32, columns: Int32, depth: Int32):
        """A consumer warpgroup: 64 rows of every tile. One product is in flight while the stage before is released."""
        c = self.config
        thread = cute.arch.thread_idx()[0] % roles.WARPGROUP
        group = roles.consumer_warpgroup()
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        mma = wgmma.product(self.dtype, c.tile_n)
        store_mma = wgmma.product(self.dtype, CHUNK)
        sA_group = cute.local_tile(sA, (wgmma.M, c.tile_k, c.stages), (group, 0, 0))
        rA, rB = wgmma.a_operand(mma, sA_group), wgmma.b_operand(mma, sB)
        acc = wgmma.accumulator(mma, c.tile_n)
        rC = cute.make_rmem_tensor(CHUNK // 2, self.dtype)
        gC = cute.local_tile(mC, (wgmma.M, CHUNK), (None, None))
        tCsC, tCgC = tma.partition(atom_c, sC, gC)
        steps = cute.ceil_div(depth, c.tile_k)
        read, release = pipeline.consumer_state(c.stages), pipeline.consumer_state(c.stages)
        tile, stride = cute.arch.block_idx()[0] // c.cluster_m, cute.arch.grid_dim()[0] // c.cluster_m
        while tile < rows * columns:
            row, column = scheduler.grouped(tile, rows, columns, c.group)
            row = (row * c.cluster_m + rank) * c.warpgroups + group
            ring.consumer_wait(read)
            wgmma.issue(mma, acc, rA[None, None, None, read.index], rB[None, None, None, read.index], False)
            read.advance()
            for _ in cutlass.range(steps - 1, unroll=1):
                ring.consumer_wait(read)
                wgmma.issue(mma, acc, rA[None, None, None, read.index], rB[None, None, None, read.index], True)
                read.advance()
                wgmma.wait(1)
                ring.consumer_release(release)
                release.advance()
            wgmma.wait(0)
            ring.consumer_release(release)
            release.advance()
            for chunk in cutlass.range_constexpr(c.tile_n // CHUNK):
                buffer = group * BUFFERS + chunk % BUFFERS
                if warp_in_group(thread) == 0:
                    cute.arch.cp_async_bulk_wait_group(BUFFERS - 1, read=True)
                roles.sync_warpgroup(group)
                part = cute.make_tensor(acc.iterator + chunk * (CHUNK // 2), cute.make_layout(CHUNK // 2))
                wgmma.round_to(part, rC)
                registers = cute.make_tensor(rC.iterator, wgmma.accumulator(store_mma, CHUNK).layout)
                wgmma.store_to_smem(store_mma, registers, sC[None, None, buffer], thread)
                roles.sync_warpgroup(group)
                if warp_in_group(thread) == 0:
                    place = column * (c.tile_n // CHUNK) + chunk
                    cute.copy(atom_c, tCsC[None, buffer], tCgC[None, row, place])
                    cute.arch.cp_async_bulk_commit_group()
            tile += stride
        if warp_in_group(thread) == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)


@cute.jit
def warp_in_group(thread: Int32) -> Int32:
    return cute.arch.make_warp_uniform(thread // 32)


def build(config: GemmConfig):
    """(host function, stand-in arguments) for the compiler."""
    dtype = wgmma.DTYPES[config.dtype]
    m, n, k = (cute.sym_int32() for _ in range(3))

    def matrix(rows, columns):
        stride = (cute.sym_int64(divisibility=8), 1)
        return cute.runtime.make_fake_tensor(dtype, (rows, columns), stride=stride, assumed_align=16)

    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    return Gemm(config), (matrix(m, k), matrix(n, k), matrix(m, n), Int32(1), stream)
