"""The fp64 oracle of the gated delta rule: the recurrence, token by token, one sequence at a time; plain torch."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor


def gated_delta_rule_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    *,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
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
    """(o, final state or None) in fp64; arguments as in `gated_delta_rule` and `recurrent_gated_delta_rule`."""
    groups = v.shape[2] // q.shape[2]
    q, k, v = q.double(), k.double(), v.double()
    if use_qk_l2norm:
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    q, k = (x.repeat_interleave(groups, 2) for x in (q, k))
    scale = q.shape[3] ** -0.5 if scale is None else scale
    decay = torch.zeros(*v.shape[:3], 1, 1, dtype=v.dtype, device=v.device)
    if g is not None:
        log_decay = g.double()
        if use_gate:
            assert A_log is not None
            log_decay = softplus_gate(log_decay, A_log.double().flatten(), dt_bias)
        decay = decay + log_decay[..., None, None]
    if gk is not None:
        decay = decay + gk.double()[..., :, None]
    if gv is not None:
        decay = decay + gv.double()[..., None, :]
    rate = torch.ones_like(v[..., :1]) if beta is None else beta.double()
    rate = rate[..., None] if rate.dim() == 3 else rate
    if use_beta_sigmoid:
        rate = torch.sigmoid(rate) * (2 if allow_neg_eigval else 1)
    tokens = q.shape[1]
    if cu_seqlens is None:
        spans = [(b, 0, tokens) for b in range(q.shape[0])]
    else:
        bounds = cu_seqlens.tolist()
        spans = [(0, start, stop) for start, stop in pairwise(bounds)]
    outs, states = [], []
    for n, (b, start, stop) in enumerate(spans):
        if initial_state is None:
            state = v.new_zeros(v.shape[2], q.shape[3], v.shape[3])
        else:
            state = initial_state[n].double().mT if state_v_first else initial_state[n].double()
        steps = [x[b, start:stop].unbind(0) for x in (q, k, v, decay, rate)]
        for q_t, k_t, v_t, g_t, beta_t in zip(*steps, strict=True):
            state = g_t.exp() * state
            u_t = beta_t * (v_t - torch.einsum("hkv,hk->hv", state, k_t))
            state = state + torch.einsum("hk,hv->hkv", k_t, u_t)
            outs.append(scale * torch.einsum("hkv,hk->hv", state, q_t))
        states.append(state.mT if state_v_first else state)
    if cu_seqlens is not None:
        nothing = torch.zeros_like(v[0, 0]) if tokens else v
        outs = [nothing] * bounds[0] + outs + [nothing] * (tokens - bounds[-1])
    out = torch.stack(outs).view(v.shape) if outs else torch.zeros_like(v)
    inner = (v.shape[3], q.shape[3]) if state_v_first else (q.shape[3], v.shape[3])
    final = torch.stack(states) if states else v.new_zeros(0, v.shape[2], *inner)
    return out, final if output_final_state else None


def softplus_gate(g: Tensor, a_log: Tensor, dt_bias: Tensor | None) -> Tensor:
    """-exp(A_log) log(1 + exp(g + dt_bias)), without a threshold above which softplus is taken for the identity."""
    g = g if dt_bias is None else g + dt_bias.double().reshape(g.shape[2:])
    return -a_log.exp() * torch.logaddexp(g, torch.zeros_like(g))
