"""Rings of shared memory stages: one producer warp fills them by TMA, consumer warps read and release them.

Each stage has two barriers: full (the bytes have arrived) and empty (every consumer warp has released it). The producer
warp executes acquire and the copies as a whole; one elected lane of it does the work.
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Int64, pipeline


def barrier_storage(stages: int):
    """What a ring keeps in a cute.struct of shared memory."""
    return cute.struct.MemRange[Int64, 2 * stages]


def ring(storage, stages: int, consumer_warps: int, stage_bytes: int, cluster_mn: tuple[int, int] = (1, 1)):
    """A ring whose barriers lie in `storage`. `init_fence` and `init_wait` must follow, once for all rings.

    In a cluster, A tiles are shared by the CTAs of a row, B tiles by those of a column, and a stage is empty once the
    consumers of all of them have released it.
    """
    m, n = cluster_mn
    return pipeline.PipelineTmaAsync.create(
        barrier_storage=storage.data_ptr(),
        num_stages=stages,
        producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
        consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, consumer_warps * (m + n - 1)),
        tx_count=stage_bytes,
        cta_layout_vmnk=cute.make_layout((1, m, n, 1)),
        defer_sync=True,
    )


def init_fence(cluster_mn: tuple[int, int] = (1, 1)) -> None:
    """After the rings are made: their barriers become visible, also to the cluster."""
    pipeline.pipeline_init_arrive(cluster_shape_mn=cluster_mn, is_relaxed=True)


def init_wait(cluster_mn: tuple[int, int] = (1, 1)) -> None:
    """Before a ring is used: every thread of the cluster has come past `init_fence`."""
    pipeline.pipeline_init_wait(cluster_shape_mn=cluster_mn)


def producer_state(stages: int):
    return pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, stages)


def consumer_state(stages: int):
    return pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, stages)
