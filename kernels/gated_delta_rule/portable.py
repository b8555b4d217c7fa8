"""The gated delta rule in plain torch, on any device: checks and activations here, the cores in `linear_attention`."""

from __future__ import annotations

import torch
from torch import Tensor

from ..linear_attention import inputs
from ..linear_attention.ops import chunked_delta_rule, recurrent_delta_rule


def gated_delta_rule(
    q: Tensor,  # [B, T, H, K]
    k: Tensor,  # [B, T, H, K]
    v: Tensor,  # [B, T, HV, V]
    g: Tensor,  # [B, T, HV]
    beta: Tensor,  # [B, T, HV]
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,  # [N, HV, K, V], or [N, HV, V, K] with state_v_first
    output_final_state: bool | None = False,
    use_qk_l2norm: bool = False,
    use_gate: bool = False,
    A_log: Tensor | None = None,  # HV values, of any shape
    dt_bias: Tensor | None = None,  # HV values, of any shape
    use_beta_sigmoid: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,  # [N + 1]
) -> tuple[Tensor, Tensor | None]:
    """(o [B, T, HV, V] in q's dtype, final state or None), in chunks of up to 64 tokens: see `chunked`."""
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
    q: Tensor,  # [B, T, H, K]
    k: Tensor,  # [B, T, H, K]
    v: Tensor,  # [B, T, HV, V]
    g: Tensor | None = None,  # [B, T, HV]
    *,
    gk: Tensor | None = None,  # [B, T, HV, K]
    gv: Tensor | None = None,  # [B, T, HV, V]
    beta: Tensor | None = None,  # [B, T, HV] or [B, T, HV, V]
    scale: float | None = None,
    initial_state: Tensor | None = None,  # [N, HV, K, V], or [N, HV, V, K] with state_v_first
    output_final_state: bool | None = False,
    use_qk_l2norm: bool = False,
    use_gate: bool = False,
    A_log: Tensor | None = None,  # HV values, of any shape
    dt_bias: Tensor | None = None,  # HV values, of any shape
    use_beta_sigmoid: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,  # [N + 1]
) -> tuple[Tensor, Tensor | None]:
    """(o [B, T, HV, V] in v's dtype, final state or None), token by token; otherwise as `gated_delta_rule`.

    Args:
        g, gk, gv: log decays of the whole state, of its key channels and of its value channels, which add up; None is
            no decay. Only g has a gate.
        beta: per head or per value channel; None is 1.

    With gradients it keeps one K x V state per token and value head: use `gated_delta_rule` to train on long sequences.
    """
    inputs.check_shapes(q, k, v, cu_seqlens, initial_state, state_v_first)
    inputs.check_beta_options(use_beta_sigmoid, allow_neg_eigval)
    per_head = list(v.shape[:3])
    for name, x, shape in (("g", g, per_head), ("gk", gk, [*per_head, q.shape[3]]), ("gv", gv, list(v.shape))):
        if x is not None:
            inputs.check_tensor(name, x, shape)
    dtype = inputs.compute_dtype(q, k, v, g)
    if use_gate and g is None:
        raise ValueError("use_gate=True needs g, got None")
    if g is None:
        decay = q.new_zeros(*per_head, 1, dtype=dtype)
    else:
        decay = log_decay(g, dtype, use_gate, A_log, dt_bias)[..., None]
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
    heads = [g.shape[2]]
    a_log = inputs.parameter("A_log", a_log, heads, dtype)
    if dt_bias is not None:
        dt_bias = inputs.parameter("dt_bias", dt_bias, heads, dtype)
    return inputs.softplus_decay(g, a_log, dt_bias)
