"""Warp roles: the first warpgroup of a CTA produces (one warp of it loads), the others consume.

Registers move from the producer to the consumers. A CTA is launched with 65536 / threads registers a thread, rounded
down to a multiple of 8; the sums below stay within it.
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Int32, const_expr

WARPGROUP = 128  #: threads
#: consumer warpgroups -> (registers of a producer thread, of a consumer thread)
REGISTERS = {1: (56, 256), 2: (24, 240), 3: (32, 160)}
#: Named barriers (16 to a CTA; 0 is the whole CTA's). One a warpgroup: its turn, and its own 128 threads.
TURN, OWN = 1, 4


def threads(consumer_warpgroups: int) -> int:
    return WARPGROUP * (consumer_warpgroups + 1)


@cute.jit
def consumer_warpgroup() -> Int32:
    """Number of the consumer warpgroup that a thread belongs to, the same in all lanes; -1 in the producer's."""
    return cute.arch.make_warp_uniform(cute.arch.warp_idx()) // 4 - 1


@cute.jit
def sync_warpgroup(warpgroup: Int32) -> None:
    """A barrier among the 128 threads of one consumer warpgroup."""
    cute.arch.barrier(barrier_id=OWN + warpgroup, number_of_threads=WARPGROUP)


@cute.jit
def first_turn(warpgroup: Int32) -> None:
    """Called once by every consumer: warpgroup 0 has the first turn."""
    if warpgroup == 0:
        cute.arch.barrier_arrive(barrier_id=TURN, number_of_threads=2 * WARPGROUP)


@cute.jit
def wait_turn(warpgroup: Int32) -> None:
    """Wait until the warpgroup before this one has passed its turn on."""
    cute.arch.barrier(barrier_id=TURN + warpgroup, number_of_threads=2 * WARPGROUP)


@cute.jit
def pass_turn(warpgroup: Int32, count: int) -> None:
    """Let the next of `count` warpgroups go on."""
    following = warpgroup + 1
    if const_expr(count == 2):
        following = 1 - warpgroup
    else:
        following = following % count
    cute.arch.barrier_arrive(barrier_id=TURN + following, number_of_threads=2 * WARPGROUP)
