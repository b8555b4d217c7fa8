"""The gated delta rule in plain torch, on any device: checks and activations here, the cores in `linear_attention`.

Computes in fp32 whatever the input dtype (in fp64 if an input is fp64); autocast does not change that.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..linear_attention import inputs
from ..linear_attention.ops import chunked_delta_rule, recurrent_delta_rule


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
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
) -> tuple[Tensor, Tensor | None]:
    """See the package."""
    inputs.check_shapes(q, k, v, cu_seqlens, initial_state, state_v_first)
    inputs.check_beta_options(use_beta_sigmoid, allow_neg_eigval)
    inputs.check_tensor("g", g, list(v.shape[:3]))
    inputs.check_tensor("beta", beta, list(v.shape[:3]))
    dtype = inputs.compute_dtype(q, k, v, g)
    decay = log_decay(g, dtype, use_gate, A_log, dt_bias)
    beta = inputs.activate_beta(beta.to(dtype), use_beta_sigmoid, allow_neg_eigval)
    state = inputs.start_state(initial_state, q, v, cu_seqlens, state_v_first, dtype)
    query, key = inputs.prepare_qk(q, k, dtype, use_qk_l2norm)
    scale = q.shape[3] ** -0.5 if scale is None else scale
    out, final = chunked_delta_rule(query, key, v.to(dtype), decay, beta, state, cu_seqlens, scale)
    return out.to(q.dtype), inputs.end_state(final, output_final_state, state_v_first)


def recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    *,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    beta: Tensor | None = None,
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
) -> tuple[Tensor, Tensor | None]:
    """See the package."""
    inputs.check_shapes(q, k, v, cu_seqlens, initial_state, state_v_first)
    inputs.check_beta_options(use_beta_sigmoid, allow_neg_eigval)
    per_head = list(v.shape[:3])
    for name, x, shape in (("g", g, per_head), ("gk", gk, [*per_head, q.shape[3]]), ("gv", gv, list(v.shape))):
        if x is not None:
            inputs.check_tensor(name, x, shape)
    dtype = inputs.compute_dtype(q, k, v, g)
    if use_gate and g is None:
        raise ValueError("use_gate=True needs g, got None")
    decay = (
        q.new_zeros(*per_head, 1, dtype=dtype)
        if g is None
        else log_decay(g, dtype, use_gate, A_log, dt_bias)[..., None]
    )
    if gk is not None:
        decay = decay + gk.to(dtype)
    beta = inputs.prepare_recurrent_beta(beta, v, dtype, use_beta_sigmoid, allow_neg_eigval)
    state = inputs.start_state(initial_state, q, v, cu_seqlens, state_v_first, dtype)
    query, key = inputs.prepare_qk(q, k, dtype, use_qk_l2norm)
    scale = q.shape[3] ** -0.5 if scale is None else scale
    decay_v = None if gv is None else gv.to(dtype)
    out, final = recurrent_delta_rule(query, key, v.to(dtype), decay, decay_v, beta, state, cu_seqlens, scale)
    return out.to(v.dtype), inputs.end_state(final, output_final_state, state_v_first)


def log_decay(g: Tensor, dtype: torch.dtype, use_gate: bool, a_log: Tensor | None, dt_bias: Tensor | None) -> Tensor:
    """g itself, or with `use_gate` -exp(A_log) softplus(g + dt_bias)."""
    g = g.to(dtype)
    if not use_gate:
        return g
    if a_log is None:
        raise ValueError("use_gate=True needs A_log, got None")
    heads = g.shape[2]
    inputs.check_tensor("A_log", a_log, [heads])
    if dt_bias is not None:
        inputs.check_tensor("dt_bias", dt_bias, [heads])
        dt_bias = dt_bias.to(dtype)
    return inputs.softplus_decay(g, a_log.to(dtype), dt_bias)
