"""What decides how a norm is computed: shapes, dtypes, layout and form; no tensors."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class NormFacts:
    """One call of rms_norm or rms_norm_gated."""

    n_rows: int
    hidden: int
    dtype: str  #: of x: "bfloat16", "float16", "float32", or any other torch name (declined)
    weight_dtype: str
    form: str  #: cast_then_weight | weight_in_fp32 | zero_centred
    activation: str | None = None  #: silu | sigmoid; None: not gated
    gate_dtype: str | None = None
    needs_grad: bool = False
    device_type: str = "cuda"
    row_levels: int = 1  #: strides that reach every row of x and the gate: 1, 2, or 3 for "copy first"
    weight_shape: tuple[int, ...] | None = None  #: None: (hidden,)
