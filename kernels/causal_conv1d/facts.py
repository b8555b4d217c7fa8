"""What decides how a causal convolution is computed: shapes, dtypes, layout and options; no tensors."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ConvFacts:
    """One call of causal_conv1d (mode "forward") or causal_conv1d_update (mode "update")."""

    mode: str  #: forward | update
    dtype: str  #: of x: "bfloat16", "float16", "float32", or any other torch name (declined)
    weight_dtype: str  #: of weight and bias
    n_channels: int
    width: int  #: taps
    activation: str | None = None  #: None | silu
    has_bias: bool = False
    channels_last: bool = True  #: x's channels lie next to each other
    state_dtype: str | None = None  #: of the state before the first token; None: there is none
    state_len: int = 0  #: tokens that it holds
    output_final_state: bool = False
    packed: bool = False  #: cu_seqlens is given
    needs_grad: bool = False
    device_type: str = "cuda"
