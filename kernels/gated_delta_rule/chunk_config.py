"""Launch configuration of the chunked forward: frozen, checked, and all that a compiled kernel is keyed on.

Nothing here depends on a batch, a length or a number of heads: one compiled kernel serves them all.

Between the kernels lie, per slot (a chunk's place in the workspace) and value head, at entry slot * HV + head:
W [64, K] and U [64, V] in the dtype of q, P [64, 64] too, and three rows of 64 fp32 numbers. See `sm90_fwd`.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..blocks.dtypes import INDEX_DTYPES, WIDTH
from ..runtime.arch import KIB
from .config import BETAS, HEAD_DIMS

CHUNK = 64  #: tokens
SLICE = 64  #: value columns of one warpgroup of the scan
MAX_HEAD_DIM_V = 512
DTYPES = ("bfloat16", "float16")
VECTORS = 3  #: rows of fp32 numbers of an entry
VECTORS_TILE = 1024  #: bytes they take in shared memory, where rows of 128 bytes come in eights
TABLE_COLUMNS = 4  #: int32 numbers of an entry of either table
SMEM = 227 * KIB


@dataclass(frozen=True, slots=True)
class ChunkConfig:
    """Chunks of 64 tokens are prepared independently of each other, then each chain of chunks is walked."""

    head_dim: int
    head_dim_v: int
    dtype: str  #: of q, k, v, o and of the operands of every product
    g_dtype: str
    beta_dtype: str
    a_dtype: str | None  #: of A_log; None: g is the log decay itself
    bias_dtype: str | None  #: of dt_bias; None: without
    initial: str | None  #: dtype of the state before the first token; None: zeros
    final: str | None  #: dtype in which the state after the last token is written; None: it is not
    v_first: bool  #: the states are [N, HV, V, K]
    l2norm: bool
    beta: str  #: plain | sigmoid | twice_sigmoid
    packed: str | None  #: dtype of cu_seqlens; None: sequences of one length
    warpgroups: int = 1  #: of a CTA of the scan: slices of 64 value columns that share W, K, Q and P
    stages: int = 3  #: of the scan's ring
    #: Start while the kernel before it in the stream drains (programmatic dependent launch). Nothing is read or written
    #: before that kernel's results are visible.
    overlap: bool = True

    def __post_init__(self) -> None:
        floating = tuple(WIDTH)
        for name, value, known in (
            ("head_dim", self.head_dim, HEAD_DIMS),
            ("dtype", self.dtype, DTYPES),
            ("g_dtype", self.g_dtype, floating),
            ("beta_dtype", self.beta_dtype, floating),
            ("a_dtype", self.a_dtype, (None, *floating)),
            ("bias_dtype", self.bias_dtype, (None, *floating)),
            ("initial", self.initial, (None, *floating)),
            ("final", self.final, (None, "float32")),
            ("beta", self.beta, BETAS),
            ("packed", self.packed, (None, *INDEX_DTYPES)),
            ("warpgroups", self.warpgroups, (1, 2)),
            ("stages", self.stages, (2, 3, 4)),
        ):
            if value not in known:
                raise ValueError(f"{name} must be one of {known}, got {value!r}")
        if self.head_dim_v % SLICE or not SLICE <= self.head_dim_v <= MAX_HEAD_DIM_V:
            raise ValueError(f"head_dim_v must be a multiple of {SLICE} up to {MAX_HEAD_DIM_V}, got {self.head_dim_v}")
        if self.bias_dtype is not None and self.a_dtype is None:
            raise ValueError("dt_bias needs A_log, got a_dtype=None")
        if self.head_dim_v % self.columns:
            raise ValueError(f"{self.warpgroups} warpgroups need a multiple of {self.columns}, got {self.head_dim_v}")
        if self.stages * self.stage_bytes > SMEM:
            raise ValueError(f"{self.stages} stages of {self.stage_bytes} bytes of shared memory > {SMEM}")

    @property
    def columns(self) -> int:
        """Value columns of a CTA of the scan."""
        return SLICE * self.warpgroups

    @property
    def slices(self) -> int:
        """CTAs of the scan for one value head of one sequence."""
        return self.head_dim_v // self.columns

    @property
    def stage_bytes(self) -> int:
        """What a chunk brings to a CTA of the scan: W, K, Q, P, the CTA's columns of U, and the vectors."""
        return _stage_bytes(self.head_dim, self.columns)

    @property
    def in_turn(self) -> bool:
        """The scan takes a chunk after the other: the state leaves no registers for two."""
        return self.head_dim > 128


def stages(head_dim: int, warpgroups: int = 1) -> int:
    """As many stages as leave room for an output tile of each warpgroup where it has its own, at most four."""
    room = SMEM - KIB  # barriers
    if head_dim <= 128:
        room -= 2 * CHUNK * SLICE * warpgroups
    return min(4, room // _stage_bytes(head_dim, SLICE * warpgroups))


def _stage_bytes(head_dim: int, columns: int) -> int:
    return 2 * CHUNK * (3 * head_dim + CHUNK + columns) + VECTORS_TILE


def slots(total: int, sequences: int, packed: bool) -> int:
    """Chunks that `total` tokens may have; as the kernels count them."""
    return total // CHUNK + sequences if packed else sequences * -(-(total // sequences) // CHUNK)


def workspace_bytes(slots: int, sequences: int, heads_v: int, head_dim: int, head_dim_v: int) -> int:
    """W, U, P, the vectors, and the tables of chunks and sequences."""
    entry = 2 * CHUNK * (head_dim + head_dim_v + CHUNK) + 4 * VECTORS * CHUNK
    row = 4 * TABLE_COLUMNS
    return slots * heads_v * entry + -(-slots // 8) * 8 * row + sequences * row


def warpgroups(head_dim: int, head_dim_v: int, chains: int, sms: int) -> int:
    """Of a CTA of the scan: two where the chains then take fewer turns on the card, for they share what they read.

    A chunk takes two warpgroups, which wait for each other's loads, about a third longer than one.
    """
    if head_dim > 128 or head_dim_v % (2 * SLICE):
        return 1
    ctas = chains * (head_dim_v // (2 * SLICE))
    return 2 if 4 * -(-ctas // sms) < 3 * -(-2 * ctas // sms) else 1
