"""What decides how a gated delta rule is computed: shapes, dtypes, layout and options; no tensors."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GatedDeltaRuleFacts:
    """One call of gated_delta_rule (mode "chunk") or recurrent_gated_delta_rule (mode "recurrent")."""

    mode: str  #: chunk | recurrent
    dtype: str  #: of q and k: "bfloat16", "float16", "float32", "float64", or any other torch name (declined)
    n_heads: int  #: H, of q and k
    n_value_heads: int  #: HV
    head_dim: int  #: K
    head_dim_v: int  #: V
    v_dtype: str | None = None  #: None: dtype
    packed: bool = False  #: cu_seqlens is given
    has_initial_state: bool = False
    output_final_state: bool = False
    state_v_first: bool = False
    use_qk_l2norm: bool = False
    use_gate: bool = False
    use_beta_sigmoid: bool = False
    allow_neg_eigval: bool = False
    has_g: bool = True  #: recurrent only: g may be None
    has_gk: bool = False  #: recurrent only: a decay per key channel
    has_gv: bool = False  #: recurrent only: a decay per value channel
    beta_per_channel: bool = False  #: recurrent only: beta is [B, T, HV, V]
    needs_grad: bool = False
    device_type: str = "cuda"
