"""The gated delta rule (Gated DeltaNet, arXiv 2412.06464), chunked and token by token.

    S_t = exp(g_t) S_{t-1} + k_t u_t^T,   u_t = beta_t (v_t - (exp(g_t) S_{t-1})^T k_t),   o_t = scale S_t^T q_t

`gated_delta_rule` computes it in chunks, for training and prefill; `recurrent_gated_delta_rule` token by token, for
decoding and for the decays and betas per channel that chunks cannot express; `decode_gated_delta_rule` token by token
with the states updated where they lie. They agree up to rounding. All are plain torch on any device (`portable.py`);
on a GPU they launch kernels where those take the call (`plan.py`) and no gradient is needed. `span_summary` is
what a span of tokens does to the state, for those who split sequences.

Shapes: B sequences of T tokens, H query/key heads of K channels, HV value heads of V channels, HV a multiple of H
(value head j reads query/key head j // (HV / H)). With `cu_seqlens` N sequences are packed into a batch of 1; without
it N = B.
"""

from __future__ import annotations

from .chunked import gated_delta_rule
from .recurrent import decode_gated_delta_rule, recurrent_gated_delta_rule
from .span import compose_spans, span_summary

__all__ = [
    "compose_spans",
    "decode_gated_delta_rule",
    "gated_delta_rule",
    "recurrent_gated_delta_rule",
    "span_summary",
]
