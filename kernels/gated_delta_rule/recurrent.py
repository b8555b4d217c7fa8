"""The public ops that go token by token: user errors, then the kernel, or plain torch where it does not take a call."""

from __future__ import annotations

import torch
from torch import Tensor

from accel.outcome import Decline

from ..linear_attention import inputs
from ..runtime.tensors import needs_grad
from . import launch, portable


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
    On a GPU, where no gradient is needed and the plan's "any_recurrent" takes the call, one kernel runs and nothing is
    read on the host: wrong contents of `cu_seqlens` then leave tokens without an output and raise nothing.
    """
    if v.is_cuda and gk is None and gv is None and not torch.compiler.is_compiling():
        tensors = (q, k, v, g, beta, initial_state, A_log, dt_bias)
        if (beta is None or beta.dim() == 3) and not needs_grad(*tensors):
            check(q, k, v, g, beta, initial_state, use_gate, A_log, dt_bias, state_v_first, cu_seqlens)
            inputs.check_beta_options(use_beta_sigmoid, allow_neg_eigval)
            try:
                return launch.recurrent(
                    q, k, v, g, beta=beta, scale=scale, initial_state=initial_state,
                    output_final_state=output_final_state, use_qk_l2norm=use_qk_l2norm, use_gate=use_gate,
                    A_log=A_log, dt_bias=dt_bias, use_beta_sigmoid=use_beta_sigmoid,
                    allow_neg_eigval=allow_neg_eigval, state_v_first=state_v_first, cu_seqlens=cu_seqlens,
                )  # fmt: skip
            except Decline:
                pass
    return portable.recurrent_gated_delta_rule(
        q, k, v, g, gk=gk, gv=gv, beta=beta, scale=scale, initial_state=initial_state,
        output_final_state=output_final_state, use_qk_l2norm=use_qk_l2norm, use_gate=use_gate, A_log=A_log,
        dt_bias=dt_bias, use_beta_sigmoid=use_beta_sigmoid, allow_neg_eigval=allow_neg_eigval,
        state_v_first=state_v_first, cu_seqlens=cu_seqlens,
    )  # fmt: skip


@torch.no_grad()
def decode_gated_delta_rule(
    q: Tensor,  # [B, T, H, K]
    k: Tensor,  # [B, T, H, K]
    v: Tensor,  # [B, T, HV, V]
    g: Tensor | None,  # [B, T, HV]
    beta: Tensor | None,  # [B, T, HV]
    state: Tensor,  # [N or P, HV, K, V], or [N or P, HV, V, K] with state_v_first
    *,
    indices: Tensor | None = None,  # [N]
    scale: float | None = None,
    use_qk_l2norm: bool = False,
    use_gate: bool = False,
    A_log: Tensor | None = None,  # HV values, of any shape
    dt_bias: Tensor | None = None,  # HV values, of any shape
    use_beta_sigmoid: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,  # [N + 1]
) -> Tensor:
    """o [B, T, HV, V] in v's dtype, with `state` moved on by each sequence's tokens, in place; no gradients.

    Args:
        state: fp32, bf16 or fp16; computed in fp32 and rounded once at the end. On a GPU any strides with a contiguous
            last dimension whose others are multiples of 4 elements.
        indices: int32 or int64 on the device of q: sequence n has state[indices[n]], a pool of P states. A sequence
            with -1 is skipped: its outputs are 0. The same index twice is undefined.

    Other arguments as in `recurrent_gated_delta_rule`. Raises ValueError and TypeError as that does.
    """
    inputs.check_beta_options(use_beta_sigmoid, allow_neg_eigval)
    pool = state if indices is None else None
    check(q, k, v, g, beta, pool, use_gate, A_log, dt_bias, state_v_first, cu_seqlens)
    sequences = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if indices is not None:
        inner = [v.shape[3], q.shape[3]] if state_v_first else [q.shape[3], v.shape[3]]
        if state.dim() != 4 or list(state.shape[1:]) != [v.shape[2], *inner]:
            raise ValueError(f"state must be [P, {v.shape[2]}, {inner[0]}, {inner[1]}], got {list(state.shape)}")
        if list(indices.shape) != [sequences] or indices.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"indices must be [{sequences}] int32 or int64, got {list(indices.shape)} {indices.dtype}")
    options = {
        "scale": scale, "use_qk_l2norm": use_qk_l2norm, "use_gate": use_gate, "A_log": A_log, "dt_bias": dt_bias,
        "use_beta_sigmoid": use_beta_sigmoid, "allow_neg_eigval": allow_neg_eigval, "state_v_first": state_v_first,
        "cu_seqlens": cu_seqlens,
    }  # fmt: skip
    if v.is_cuda and not torch.compiler.is_compiling():
        try:
            return launch.recurrent(
                q, k, v, g, beta=beta, initial_state=state, in_place=True, indices=indices, **options
            )[0]  # fmt: skip
        except Decline:
            pass
    if indices is None:
        out, final = portable.recurrent_gated_delta_rule(
            q, k, v, g, beta=beta, initial_state=state, output_final_state=True, **options
        )
        assert final is not None
        state.copy_(final)
        return out
    live = indices >= 0
    out, final = portable.recurrent_gated_delta_rule(
        q, k, v, g, beta=beta, initial_state=state[indices.clamp(min=0).long()], output_final_state=True, **options
    )
    assert final is not None
    state[indices[live].long()] = final[live].to(state.dtype)
    if cu_seqlens is None:
        return torch.where(live[:, None, None, None], out, 0)
    for n in torch.nonzero(~live).flatten().tolist():
        out[:, cu_seqlens[n] : cu_seqlens[n + 1]] = 0
    return out


def check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    state: Tensor | None,
    use_gate: bool,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    v_first: bool,
    cu_seqlens: Tensor | None,
) -> None:
    inputs.check_shapes(q, k, v, cu_seqlens, state, v_first)
    for name, x in (("g", g), ("beta", beta)):
        if x is not None:
            inputs.check_tensor(name, x, list(v.shape[:3]))
    if not use_gate:
        return
    for name, x in (("g", g), ("A_log", A_log)):
        if x is None:
            raise ValueError(f"use_gate=True needs {name}, got None")
    for name, x in (("A_log", A_log), ("dt_bias", dt_bias)):
        if x is not None and (x.numel() != v.shape[2] or not x.is_floating_point()):
            raise ValueError(f"{name} must have {v.shape[2]} floating-point values, got {list(x.shape)} {x.dtype}")
