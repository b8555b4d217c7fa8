"""Launch configuration of the decode kernel: frozen, checked, and all that a compiled kernel is keyed on.

Nothing here depends on a length, a batch or a number of heads: one compiled kernel serves them all. The index functions
that lay tiles out in shared memory work on Python ints and on device values alike, so that they can be tested without a
GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

WARP = 32
CHUNK = 8  #: elements of one 16-byte access, fp16 and bf16
TILE_M, TILE_N, TILE_K = 16, 8, 16  #: of one mma.sync
DTYPES = ("bfloat16", "float16")
HEAD_DIMS = ((64, 64), (80, 80), (96, 96), (128, 128), (256, 256), (192, 128))
ROWS = (16, 32, 64)  #: packed rows (q heads of a group x q positions) of one CTA
MASKS = ("none", "keys", "rows")
COUNTERS = 1024  #: arrival counters at the head of the scratch buffer: of bundles of CTAs, and of (batch, kv head)s
AT_ONCE = 16  #: partial results that a thread reads at once when it adds them up


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """Warps of 16 rows each walk over blocks of keys; those of a group share their blocks, groups have their own."""

    dtype: str
    head_dim: int
    head_dim_v: int
    rows: int
    mask: str  #: "none"; "keys": one row of booleans for all packed rows; "rows": each packed row its own
    lse: bool  #: also write the log-sum-exp
    block: int  #: keys of a block
    slots: int  #: blocks of k or of v that a group keeps in flight
    warps: int = 4
    ctas_per_sm: int = 1

    def __post_init__(self) -> None:
        for name, value, known in (
            ("dtype", self.dtype, DTYPES),
            ("head dims", (self.head_dim, self.head_dim_v), HEAD_DIMS),
            ("rows", self.rows, ROWS),
            ("mask", self.mask, MASKS),
            ("block", self.block, (16, 32)),
        ):
            if value not in known:
                raise ValueError(f"{name} must be one of {known}, got {value!r}")
        if self.warps % self.m_warps or not 2 <= self.slots <= 16 or self.ctas_per_sm < 1:
            got = (self.warps, self.slots, self.ctas_per_sm)
            raise ValueError(f"whole groups of {self.m_warps} warps, 2 to 16 slots and a CTA an SM expected, got {got}")
        if self.exchange_bytes > self.ring_bytes:
            raise ValueError(f"a ring of {self.ring_bytes} bytes is too small to exchange {self.exchange_bytes} in")

    @property
    def threads(self) -> int:
        return self.warps * WARP

    @property
    def m_warps(self) -> int:
        """Warps of a group: each has 16 of the packed rows."""
        return self.rows // TILE_M

    @property
    def groups(self) -> int:
        return self.warps // self.m_warps

    @property
    def q_in_registers(self) -> bool:
        """Above 192 the accumulator leaves no room for q: its fragments are read again for every block."""
        return self.head_dim <= 192

    @property
    def slot_bytes(self) -> int:
        return self.block * max(self.head_dim, self.head_dim_v) * 2

    @property
    def ring_bytes(self) -> int:
        return self.groups * self.slots * self.slot_bytes

    @property
    def q_bytes(self) -> int:
        return self.rows * self.head_dim * 2

    @property
    def exchange_pitch(self) -> int:
        """fp32 elements of a row when the groups exchange their outputs: 8 more than needed, against bank conflicts."""
        return self.head_dim_v + 8

    @property
    def exchange_bytes(self) -> int:
        """The groups' outputs, through the ring once it is drained."""
        return self.groups * self.rows * self.exchange_pitch * 4

    @property
    def notes(self) -> int:
        """Blocks whose mask a warp remembers: those between the load of k and the scores."""
        return self.slots // 2 + 1

    @property
    def note_words(self) -> int:
        """The first key of a block and the mask bits of its rows."""
        return 1 + (self.rows if self.mask == "rows" else 1)

    @property
    def notes_bytes(self) -> int:
        return 0 if self.mask == "none" else self.warps * self.notes * self.note_words * 4

    @property
    def smem_bytes(self) -> int:
        """Shared memory of one CTA: the ring, q, the row statistics of the groups, the notes, and a word."""
        return self.ring_bytes + self.q_bytes + self.groups * self.rows * 8 + self.notes_bytes + 16

    @property
    def stretch(self) -> int:
        """Keys of one round of a CTA: a block for each group."""
        return self.groups * self.block

    @property
    def stretch_bytes(self) -> int:
        return self.stretch * (self.head_dim + self.head_dim_v) * 2


def swizzled(row: Any, chunk: Any, chunks: int) -> Any:
    """Where a 16-byte chunk of a row lies in a tile of rows of `chunks` chunks, in chunks.

    Any 8 aligned rows have a chunk in 8 different places modulo 128 bytes: ldmatrix meets no bank conflict.
    """
    period = min(chunks & -chunks, 8)  # rows this many chunks long, or an odd multiple, repeat in the banks
    if period == 1:
        return row * chunks + chunk
    return row * chunks + (chunk ^ (row // (8 // period) % period))
