"""What decides how a gated MLP is computed: shapes, dtypes, layout and options; no tensors."""

from __future__ import annotations

from dataclasses import dataclass

ACTIVATIONS = ("silu", "gelu_tanh", "gelu_erf")


@dataclass(frozen=True, slots=True)
class GatedMlpFacts:
    """One call of gated_mlp."""

    n_rows: int  #: tokens
    hidden: int
    intermediate: int
    out: int  #: rows of the down projection; hidden in every language model
    dtype: str  #: of x: "bfloat16", "float16", "float32", or any other torch name (declined)
    weight_dtypes: tuple[str, ...]  #: gate, up, down; gate, down where fused
    activation: str  #: silu | gelu_tanh | gelu_erf
    fused: bool = False  #: gate and up are one weight, gate first
    gate_bias: bool = False
    up_bias: bool = False
    down_bias: bool = False
    x_contiguous: bool = True  #: x's last dimension
    weights_contiguous: bool = True
    needs_grad: bool = False
    device_type: str = "cuda"
