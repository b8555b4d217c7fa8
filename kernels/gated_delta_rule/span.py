"""A span of a sequence as what it does to the state, an affine map: what splits a sequence over devices or in time.

The step of a token, S <- exp(g) (I - beta k k^T) S + beta k v^T, is affine in S, so a whole span is

    S_after = M S_before + H

Maps of neighbouring spans compose, so each device works out (M, H) of its own tokens, they are exchanged instead of
tokens, and every device then starts from its true initial state.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import portable


def span_summary(
    k: Tensor,  # [B, T, H, K]
    v: Tensor,  # [B, T, HV, V]
    g: Tensor,  # [B, T, HV]
    beta: Tensor,  # [B, T, HV]
    *,
    use_qk_l2norm: bool = False,
    use_gate: bool = False,
    A_log: Tensor | None = None,  # HV values, of any shape
    dt_bias: Tensor | None = None,  # HV values, of any shape
    use_beta_sigmoid: bool = False,
    allow_neg_eigval: bool = False,
    cu_seqlens: Tensor | None = None,  # [N + 1]
) -> tuple[Tensor, Tensor]:
    """(M [N, HV, K, K], H [N, HV, K, V]) in fp32: the state after a sequence's tokens is M @ state before + H.

    Arguments and errors as in `gated_delta_rule`, which computes it with values [v, 0] from the state [0, I]; so it
    is served by what serves that, and differentiable where that is. A sequence of no tokens is (I, 0).
    """
    batch, tokens, heads_v, head_dim_v = v.shape
    head_dim = k.shape[3]
    sequences = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    dtype = torch.float64 if torch.float64 in (k.dtype, v.dtype, g.dtype) else torch.float32
    identity = torch.eye(head_dim, dtype=dtype, device=v.device).expand(sequences, heads_v, -1, -1)
    before = torch.cat((identity.new_zeros(sequences, heads_v, head_dim, head_dim_v), identity), -1)
    values = torch.cat((v, v.new_zeros(batch, tokens, heads_v, head_dim)), -1)
    _, after = portable.gated_delta_rule(
        k, k, values, g, beta, initial_state=before, output_final_state=True, use_qk_l2norm=use_qk_l2norm,
        use_gate=use_gate, A_log=A_log, dt_bias=dt_bias, use_beta_sigmoid=use_beta_sigmoid,
        allow_neg_eigval=allow_neg_eigval, cu_seqlens=cu_seqlens,
    )  # fmt: skip
    assert after is not None
    return after[..., head_dim_v:], after[..., :head_dim_v]


def compose_spans(later: tuple[Tensor, Tensor], earlier: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """(M, H) of two neighbouring spans as one."""
    (m_later, h_later), (m_earlier, h_earlier) = later, earlier
    return m_later @ m_earlier, m_later @ h_earlier + h_later
