"""Launch configuration of the recurrent kernel: frozen, checked, and all that a compiled kernel is keyed on.

Nothing here depends on a batch, a length, a number of heads or a value dimension: one compiled kernel serves them all.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..blocks.dtypes import INDEX_DTYPES, WIDTH

WARP = 32
HEAD_DIMS = (64, 128, 256)
K_LANES = 8  #: lanes of a warp that share a value column
VECTOR = 4  #: elements of a thread's access to the state, and value columns of a thread
COLUMNS = WARP // K_LANES * VECTOR  #: value columns of a warp
BETAS = ("plain", "sigmoid", "twice_sigmoid")


@dataclass(frozen=True, slots=True)
class RecurrentConfig:
    """Every warp owns all K rows of 16 columns of one state and never waits for another warp."""

    head_dim: int
    dtype: str  #: of q and k
    v_dtype: str  #: of v and o
    g_dtype: str | None  #: None: no decay
    beta_dtype: str | None  #: None: beta is 1
    a_dtype: str | None  #: of A_log; None: g is the log decay itself
    bias_dtype: str | None  #: of dt_bias; None: without
    initial: str | None  #: dtype of the state before the first token; None: zeros
    final: str | None  #: dtype in which the state after the last token is written; None: it is not
    v_first: bool  #: the state is [.., V, K]
    l2norm: bool
    beta: str  #: plain | sigmoid | twice_sigmoid
    index: str | None  #: dtype of the indices into a pool of states; None: sequence n has state n
    packed: str | None  #: dtype of cu_seqlens; None: every batch entry is one sequence
    single: bool  #: one token each
    warps: int  #: of a CTA
    #: Start while the kernel before it in the stream drains (programmatic dependent launch, sm_90 and newer). Nothing
    #: is read or written before that kernel's results are visible.
    overlap: bool

    def __post_init__(self) -> None:
        floating = (None, *WIDTH)
        for name, value, known in (
            ("head_dim", self.head_dim, HEAD_DIMS),
            ("dtype", self.dtype, tuple(WIDTH)),
            ("v_dtype", self.v_dtype, tuple(WIDTH)),
            ("g_dtype", self.g_dtype, floating),
            ("beta_dtype", self.beta_dtype, floating),
            ("a_dtype", self.a_dtype, floating),
            ("bias_dtype", self.bias_dtype, floating),
            ("initial", self.initial, floating),
            ("final", self.final, floating),
            ("beta", self.beta, BETAS),
            ("index", self.index, (None, *INDEX_DTYPES)),
            ("packed", self.packed, (None, *INDEX_DTYPES)),
            ("warps", self.warps, (1, 2, 4, 8)),
        ):
            if value not in known:
                raise ValueError(f"{name} must be one of {known}, got {value!r}")
        if self.a_dtype is not None and self.g_dtype is None:
            raise ValueError("A_log needs g, got g_dtype=None")
        if self.single and self.packed is not None:
            raise ValueError("packed sequences have any lengths, got single=True")
        if self.index is not None and (self.initial is None or self.initial != self.final):
            raise ValueError(f"a pool is updated in place, got initial={self.initial}, final={self.final}")

    @property
    def rows(self) -> int:
        """Key channels of a thread."""
        return self.head_dim // K_LANES

    @property
    def ahead(self) -> bool:
        """A token's loads start before the one in front of it is done: its words need registers of their own."""
        return self.rows * WIDTH[self.dtype] <= 64

    @property
    def threads(self) -> int:
        return self.warps * WARP
