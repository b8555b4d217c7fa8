"""Kimi delta attention in plain torch, on any device: checks and activations here, the cores in `linear_attention`.

Computes in fp32 whatever the input dtype (in fp64 if an input is fp64); autocast does not change that.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..linear_attention import inputs
from ..linear_attention.ops import chunked_delta_rule, recurrent_delta_rule


def kda(
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
    lower_bound: float | None = None,
    safe_gate: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """See the package."""
    inputs.check_shapes(q, k, v, cu_seqlens, initial_state, state_v_first)
    inputs.check_beta_options(use_beta_sigmoid, allow_neg_eigval)
    check_safe_gate(safe_gate, use_gate, lower_bound)
    inputs.check_tensor("g", g, [*v.shape[:3], q.shape[3]])
    inputs.check_tensor("beta", beta, list(v.shape[:3]))
    dtype = inputs.compute_dtype(q, k, v, g)
    decay = log_decay(g, dtype, use_gate, A_log, dt_bias, lower_bound)
    beta = inputs.activate_beta(beta.to(dtype), use_beta_sigmoid, allow_neg_eigval)
    state = inputs.start_state(initial_state, q, v, cu_seqlens, state_v_first, dtype)
    query, key = inputs.prepare_qk(q, k, dtype, use_qk_l2norm)
    scale = q.shape[3] ** -0.5 if scale is None else scale
    out, final = chunked_delta_rule(query, key, v.to(dtype), decay, beta, state, cu_seqlens, scale)
    return out.to(q.dtype), inputs.end_state(final, output_final_state, state_v_first)


def recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None,
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
) -> tuple[Tensor, Tensor | None]:
    """See the package."""
    inputs.check_shapes(q, k, v, cu_seqlens, initial_state, state_v_first)
    inputs.check_beta_options(use_beta_sigmoid, allow_neg_eigval)
    inputs.check_tensor("g", g, [*v.shape[:3], q.shape[3]])
    dtype = inputs.compute_dtype(q, k, v, g)
    decay = log_decay(g, dtype, use_gate, A_log, dt_bias, lower_bound)
    beta = inputs.prepare_recurrent_beta(beta, v, dtype, use_beta_sigmoid, allow_neg_eigval)
    state = inputs.start_state(initial_state, q, v, cu_seqlens, state_v_first, dtype)
    query, key = inputs.prepare_qk(q, k, dtype, use_qk_l2norm)
    scale = q.shape[3] ** -0.5 if scale is None else scale
    out, final = recurrent_delta_rule(query, key, v.to(dtype), decay, None, beta, state, cu_seqlens, scale)
    return out.to(v.dtype), inputs.end_state(final, output_final_state, state_v_first)


def check_safe_gate(safe_gate: bool, use_gate: bool, lower_bound: float | None) -> None:
    """Raise ValueError where `safe_gate` promises log decays in [-5, 0) that the gate options do not give."""
    if not (safe_gate and use_gate):
        return
    if lower_bound is None:
        raise ValueError("safe_gate=True with use_gate=True needs lower_bound, got None")
    if not -5 <= lower_bound < 0:
        raise ValueError(f"safe_gate=True needs lower_bound in [-5, 0), got {lower_bound}")


def log_decay(
    g: Tensor,
    dtype: torch.dtype,
    use_gate: bool,
    a_log: Tensor | None,
    dt_bias: Tensor | None,
    lower_bound: float | None,
) -> Tensor:
    """g itself, or with `use_gate` the softplus gate, or the bounded one where there is a `lower_bound`."""
    g = g.to(dtype)
    if not use_gate:
        return g
    heads, dim = g.shape[2:]
    if a_log is not None:
        inputs.check_tensor("A_log", a_log, [heads])
        a_log = a_log.to(dtype)[:, None]
    if dt_bias is not None:
        if list(dt_bias.shape) != [heads, dim]:
            inputs.check_tensor("dt_bias", dt_bias, [heads * dim])
        dt_bias = dt_bias.to(dtype).reshape(heads, dim)
    if lower_bound is not None:
        return inputs.bounded_decay(g, a_log, dt_bias, lower_bound)
    if a_log is None:
        raise ValueError("use_gate=True without lower_bound needs A_log, got None")
    return inputs.softplus_decay(g, a_log, dt_bias)
