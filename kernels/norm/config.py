"""Launch configurations of the norm kernels: frozen, checked on construction, all that a compiled kernel is keyed on.

Nothing here depends on the number of rows: one compiled kernel serves every batch and length.
"""

from __future__ import annotations

from dataclasses import dataclass

FORMS = ("cast_then_weight", "weight_in_fp32", "zero_centred")
ACTIVATIONS = ("silu", "sigmoid")
WIDTH = {"bfloat16": 2, "float16": 2, "float32": 4}  #: bytes of an element
WARP = 32


def output_dtype(dtype: str, weight_dtype: str, form: str, gated: bool) -> str:
    """The dtype of y: x's, but for the plain cast_then_weight form, where torch promotes weight * x."""
    return weight_dtype if form == "cast_then_weight" and not gated else dtype


@dataclass(frozen=True, slots=True)
class RowsConfig:
    """How rows are spread over threads; shared by the forward and the backward kernel."""

    dtype: str  #: of x, the gate and dx
    weight_dtype: str
    hidden: int  #: elements of a row
    form: str
    activation: str | None  #: of the gate; None: no gate
    two_level: bool  #: a row index is (outer, inner) with a stride each, else one stride
    threads_per_row: int  #: a power of two up to a warp, then whole warps
    rows_per_cta: int
    #: Start while the kernel before it in the stream drains (programmatic dependent launch, sm_90 and newer). Nothing
    #: is read or written before that kernel's results are visible.
    overlap: bool

    def __post_init__(self) -> None:
        for name, value, known in (
            ("dtype", self.dtype, tuple(WIDTH)),
            ("weight_dtype", self.weight_dtype, (self.dtype, "float32")),
            ("form", self.form, FORMS),
            ("activation", self.activation, (None, *ACTIVATIONS)),
        ):
            if value not in known:
                raise ValueError(f"{name} must be one of {known}, got {value!r}")
        if self.activation is not None and self.form == "zero_centred":
            raise ValueError("a gated norm is cast_then_weight or weight_in_fp32, got 'zero_centred'")
        if self.hidden <= 0 or self.hidden % self.vector:
            raise ValueError(f"hidden must be a positive multiple of {self.vector} for {self.dtype}, got {self.hidden}")
        tpr = self.threads_per_row
        if tpr <= 0 or (tpr & (tpr - 1) if tpr <= WARP else tpr % WARP):
            raise ValueError(f"threads_per_row must be a power of two or whole warps, got {tpr}")
        if self.rows_per_cta <= 0 or self.threads % WARP or self.threads > 1024:
            raise ValueError(f"threads_per_row * rows_per_cta must be whole warps up to 1024, got {self.threads}")

    @property
    def vector(self) -> int:
        """Elements of one 16-byte access to x."""
        return 16 // WIDTH[self.dtype]

    @property
    def vectors(self) -> int:
        return self.hidden // self.vector

    @property
    def vectors_per_thread(self) -> int:
        return -(-self.vectors // self.threads_per_row)

    @property
    def threads(self) -> int:
        return self.threads_per_row * self.rows_per_cta

    @property
    def warps_per_row(self) -> int:
        return max(1, self.threads_per_row // WARP)

    @property
    def gated(self) -> bool:
        return self.activation is not None

    @property
    def out_dtype(self) -> str:
        return output_dtype(self.dtype, self.weight_dtype, self.form, self.gated)


@dataclass(frozen=True, slots=True)
class FwdConfig(RowsConfig):
    """One CTA per rows_per_cta rows; each row is read once and stays in registers between its two uses."""


@dataclass(frozen=True, slots=True)
class BwdConfig(RowsConfig):
    """Persistent CTAs; inputs arrive through a ring in shared memory, dweight is summed per CTA in fp32."""

    stages: int = 2  #: depth of the ring, in groups of rows_per_cta rows
    ctas_per_sm: int = 1
    reload_weight: bool = (
        False  #: read the weight for every row (it stays in the L1) instead of holding it in registers
    )
    reduce_warps: int = 16  #: warps that share the partial sums of 32 columns in the second kernel

    def __post_init__(self) -> None:
        RowsConfig.__post_init__(self)
        if self.stages < 1 or self.ctas_per_sm < 1 or not 1 <= self.reduce_warps <= 32:
            got = (self.stages, self.ctas_per_sm, self.reduce_warps)
            raise ValueError(f"stages, ctas_per_sm >= 1 and reduce_warps in 1..32 expected, got {got}")

    @property
    def padded(self) -> int:
        """Elements of the rows of one group, each rounded up to whole vectors of every thread."""
        return self.threads * self.vectors_per_thread * self.vector

    @property
    def ring_bytes(self) -> int:
        """x, dy and the gate of every stage; also room for the fp32 sums of dweight that the row slots exchange."""
        stage = self.padded * (WIDTH[self.dtype] * (2 if self.gated else 1) + WIDTH[self.out_dtype])
        return max(self.stages * stage, self.padded * 4)

    @property
    def smem_bytes(self) -> int:
        """Shared memory of one CTA: the ring and the two-fold buffer of two row sums a warp."""
        return self.ring_bytes + 2 * 2 * 4 * self.warps_per_row * self.rows_per_cta
