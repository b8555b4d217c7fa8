"""Kimi delta attention in plain torch, on any device: checks and activations here, the cores in `linear_attention`."""

from __future__ import annotations

import torch
from torch import Tensor

from ..linear_attention import inputs
from ..linear_attention.ops import chunked_delta_rule, recurrent_delta_rule


def kda(
    q: Tensor,  # [B, T, H, K]
    k: Tensor,  # [B, T, H, K]
    v: Tensor,  # [B, T, HV, V]
    g: Tensor,  # [B, T, HV, K]
    beta: Tensor,  # [B, T, HV]
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,  # [N, HV, K, V], or [N, HV, V, K] with state_v_first
    output_final_state: bool | None = False,
    use_qk_l2norm: bool = False,
    use_gate: bool = False,
    A_log: Tensor | None = None,  # HV values, of any shape
    dt_bias: Tensor | None = None,  # HV * K values, of any shape
    use_beta_sigmoid: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,  # [N + 1]
    lower_bound: float | None = None,
    safe_gate: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """(o [B, T, HV, V] in q's dtype, final state or None), in chunks of up to 64 tokens.

    Args:
        q, k, v: queries, keys and values, of any floating-point dtypes and strides.
        g: log decay per key channel; finite values of any size and -inf (a reset) are exact. With `use_gate` the raw
            gate: the log decay is then -exp(A_log) * softplus(g + dt_bias), or with `lower_bound`
            lower_bound * sigmoid(exp(A_log) * (g + dt_bias)), where A_log may be None for a factor of 1. Without it
            A_log, dt_bias and lower_bound are ignored.
        beta: how far the value stored under a key moves to the new one. With `use_beta_sigmoid` logits of it, in which
            case `allow_neg_eigval` doubles it.
        scale: of the output; None is K ** -0.5.
        initial_state: the state before each sequence's first token, of any floating-point dtype; None is zeros.
        output_final_state: also return the state after each sequence's last token: a new contiguous tensor, fp32.
        use_qk_l2norm: divide each query and key by sqrt(its squared norm + 1e-6).
        state_v_first: both states are [N, HV, V, K].
        cu_seqlens: int32 or int64, where the packed sequences start and end, read on the host. A sequence may be empty;
            tokens outside [cu_seqlens[0], cu_seqlens[-1]) get zero outputs and zero gradients.
        safe_gate: a promise that log decays lie in [-5, 0), which nothing here relies on; with `use_gate` it needs a
            `lower_bound` in that range.

    Everything is computed in fp32 (fp64, including the final state, if q, k, v or g is fp64), also under autocast.
    Differentiable once in q, k, v, g, beta, initial_state, A_log and dt_bias, through both results; gradients come in
    each input's dtype. A second derivative raises RuntimeError; there is no forward mode and no vmap. Deterministic
    on a CPU.

    Under torch.compile a call is one opaque op, whose backward runs the forward once more.

    Raises:
        ValueError: shapes that do not belong together, a bad `cu_seqlens`, `use_gate` with neither A_log nor
            lower_bound, `safe_gate` without a fitting lower_bound, or `allow_neg_eigval` without `use_beta_sigmoid`.
        TypeError: a tensor that is not floating point, or a `cu_seqlens` that is not int32 or int64.
    """
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
    q: Tensor,  # [B, T, H, K]
    k: Tensor,  # [B, T, H, K]
    v: Tensor,  # [B, T, HV, V]
    g: Tensor,  # [B, T, HV, K]
    beta: Tensor | None,  # [B, T, HV] or [B, T, HV, V]
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,  # [N, HV, K, V], or [N, HV, V, K] with state_v_first
    output_final_state: bool | None = False,
    use_qk_l2norm: bool = False,
    use_gate: bool = False,
    A_log: Tensor | None = None,  # HV values, of any shape
    dt_bias: Tensor | None = None,  # HV * K values, of any shape
    use_beta_sigmoid: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,  # [N + 1]
    lower_bound: float | None = None,
) -> tuple[Tensor, Tensor | None]:
    """(o [B, T, HV, V] in v's dtype, final state or None), token by token; otherwise as `kda`.

    `beta` may be per value channel; None is 1. With gradients it keeps one K x V state per token and value head: use
    `kda` to train on long sequences.
    """
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
        a_log = inputs.parameter("A_log", a_log, [heads, 1], dtype)
    if dt_bias is not None:
        dt_bias = inputs.parameter("dt_bias", dt_bias, [heads, dim], dtype)
    if lower_bound is not None:
        return inputs.bounded_decay(g, a_log, dt_bias, lower_bound)
    if a_log is None:
        raise ValueError("use_gate=True without lower_bound needs A_log, got None")
    return inputs.softplus_decay(g, a_log, dt_bias)
