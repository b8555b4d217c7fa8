"""Kimi delta attention (KDA, arXiv 2510.26692): the gated delta rule with one decay per key channel.

    S_t = A_t S_{t-1} + k_t u_t^T,   u_t = beta_t (v_t - (A_t S_{t-1})^T k_t),   o_t = scale S_t^T q_t

with A_t = diag(exp(g_t)).

`kda` computes it in chunks, for training and prefill; `recurrent_kda` token by token, for decoding. The two agree up to
rounding. Both are plain torch, on any device (`portable.py`).

Shapes: B sequences of T tokens, H query/key heads of K channels, HV value heads of V channels, HV a multiple of H
(value head j reads query/key head j // (HV / H)). With `cu_seqlens` N sequences are packed into a batch of 1; without
it N = B.
"""

from __future__ import annotations

from .portable import kda, recurrent_kda

__all__ = ["kda", "recurrent_kda"]
