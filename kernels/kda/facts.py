"""What decides how a KDA call is computed: shapes, dtypes, layout and options; no tensors."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KdaFacts:
    """One call of kda (mode "chunk") or recurrent_kda (mode "recurrent")."""

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
    has_lower_bound: bool = False  #: the gate is the bounded one
    safe_gate: bool = False  #: log decays are promised to lie in [-5, 0)
    use_beta_sigmoid: bool = False
    allow_neg_eigval: bool = False
    beta_per_channel: bool = False  #: recurrent only: beta is [B, T, HV, V]
    needs_grad: bool = False
    device_type: str = "cuda"
