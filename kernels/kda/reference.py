"""The fp64 oracle of KDA: its gate, and the recurrence of the gated delta rule with a decay per key channel."""

from __future__ import annotations

import torch
from torch import Tensor

from ..gated_delta_rule.reference import gated_delta_rule_reference, softplus_gate


def kda_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None = None,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool | None = False,
    use_qk_l2norm: bool = False,
    use_gate: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_beta_sigmoid: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    lower_bound: float | None = None,
    safe_gate: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """(o, final state or None) in fp64; arguments as in `kda` and `recurrent_kda`."""
    decay = g.double()
    if use_gate and lower_bound is None:
        assert A_log is not None
        decay = softplus_gate(decay, A_log.double().reshape(-1, 1), dt_bias)
    elif use_gate and lower_bound is not None:
        decay = decay if dt_bias is None else decay + dt_bias.double().reshape(g.shape[2:])
        rate = 1.0 if A_log is None else A_log.double().exp().reshape(-1, 1)
        decay = lower_bound * torch.sigmoid(rate * decay)
    return gated_delta_rule_reference(
        q,
        k,
        v,
        None,
        beta,
        gk=decay,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm=use_qk_l2norm,
        use_beta_sigmoid=use_beta_sigmoid,
        allow_neg_eigval=allow_neg_eigval,
        state_v_first=state_v_first,
        cu_seqlens=cu_seqlens,
    )
