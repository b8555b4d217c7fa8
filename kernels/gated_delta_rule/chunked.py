"""The public op in chunks: user errors, then the kernels, or plain torch where they do not take a call."""

from __future__ import annotations

import torch
from torch import Tensor

from accel.outcome import Decline

from ..linear_attention import inputs
from ..runtime.tensors import needs_grad
from . import chunk, portable
from .recurrent import check


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
    """(o [B, T, HV, V] in q's dtype, final state or None), in chunks of up to 64 tokens.

    Args:
        q, k, v: queries, keys and values, of any floating-point dtypes and strides.
        g: log decay; finite values of any size and -inf (a reset) are exact. With `use_gate` the raw gate: the log
            decay is then -exp(A_log) * softplus(g + dt_bias). Without it A_log and dt_bias are ignored.
        beta: how far the value stored under a key moves to the new one. With `use_beta_sigmoid` logits of it, in which
            case `allow_neg_eigval` doubles it.
        scale: of the output; None is K ** -0.5.
        initial_state: the state before each sequence's first token, of any floating-point dtype; None is zeros.
        output_final_state: also return the state after each sequence's last token: a new contiguous tensor, fp32.
        use_qk_l2norm: divide each query and key by sqrt(its squared norm + 1e-6).
        state_v_first: both states are [N, HV, V, K].
        cu_seqlens: int32 or int64, where the packed sequences start and end. A sequence may be empty; tokens outside
            [cu_seqlens[0], cu_seqlens[-1]) get zero outputs and zero gradients.

    On a GPU, where no gradient is needed and the plan's "sm90_fwd" takes the call, the chunked kernels run: nothing is
    read on the host, so wrong contents of `cu_seqlens` raise nothing and leave the outputs undefined. Products then
    have operands of q's dtype; sums, gates, norms and the state are fp32.

    Elsewhere `cu_seqlens` is read on the host and everything is computed in fp32 (fp64, including the final state, if
    q, k, v or g is fp64), also under autocast. Differentiable once in q, k, v, g, beta, initial_state, A_log and
    dt_bias, through both results; gradients come in each input's dtype. A second derivative raises RuntimeError; there
    is no forward mode and no vmap. Deterministic on a CPU, and in the kernels.

    Under torch.compile a call is one opaque op, whose backward runs the forward once more.

    Raises:
        ValueError: shapes that do not belong together, a bad `cu_seqlens`, `use_gate` without A_log, or
            `allow_neg_eigval` without `use_beta_sigmoid`.
        TypeError: a tensor that is not floating point, or a `cu_seqlens` that is not int32 or int64.
    """
    if (
        v.is_cuda
        and not torch.compiler.is_compiling()
        and not needs_grad(q, k, v, g, beta, initial_state, A_log, dt_bias)
    ):
        check(q, k, v, g, beta, initial_state, use_gate, A_log, dt_bias, state_v_first, cu_seqlens)
        inputs.check_beta_options(use_beta_sigmoid, allow_neg_eigval)
        try:
            return chunk.chunk(
                q, k, v, g, beta, scale=scale, initial_state=initial_state, output_final_state=output_final_state,
                use_qk_l2norm=use_qk_l2norm, use_gate=use_gate, A_log=A_log, dt_bias=dt_bias,
                use_beta_sigmoid=use_beta_sigmoid, allow_neg_eigval=allow_neg_eigval, state_v_first=state_v_first,
                cu_seqlens=cu_seqlens,
            )  # fmt: skip
        except Decline:
            pass
    return portable.gated_delta_rule(
        q, k, v, g, beta, scale=scale, initial_state=initial_state, output_final_state=output_final_state,
        use_qk_l2norm=use_qk_l2norm, use_gate=use_gate, A_log=A_log, dt_bias=dt_bias,
        use_beta_sigmoid=use_beta_sigmoid, allow_neg_eigval=allow_neg_eigval, state_v_first=state_v_first,
        cu_seqlens=cu_seqlens,
    )  # fmt: skip
