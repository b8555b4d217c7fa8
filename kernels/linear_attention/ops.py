"""The two cores as differentiable functions, in eager mode and inside torch.compile.

Compiled code sees each call as one opaque node, `accel::chunked_delta_rule` or `accel::recurrent_delta_rule`, and its
gradient as another; so whole graphs compile, for any length. These ops keep the inputs alone and run the forward once
more in their backward: no tensor of a graph then has a size that depends on the contents of cu_seqlens. An eager call
goes straight to the autograd functions and pays nothing for this.
"""

from __future__ import annotations

from typing import Any, Optional

import torch
from torch import Tensor

from .chunked import ChunkedDeltaRule, chunked_backward, chunked_forward
from .layout import chunk_layout
from .precision import own_precision
from .recurrent import RecurrentDeltaRule, recurrent_backward, recurrent_forward


def chunked_delta_rule(
    q: Tensor,  # [B, T, H, K]
    k: Tensor,  # [B, T, H, K]
    v: Tensor,  # [B, T, HV, V]
    g: Tensor,  # [B, T, HV] or [B, T, HV, K], log decay
    beta: Tensor,  # [B, T, HV]
    state: Tensor,  # [N, HV, K, V]
    cu_seqlens: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """(o [B, T, HV, V], final state [N, HV, K, V]) in chunks; one dtype, fp32 or fp64, for all tensors."""
    if torch.compiler.is_compiling():
        return _chunked_op(q, k, v, g, beta, state, cu_seqlens, scale)
    layout = chunk_layout(q.shape[0], q.shape[1], cu_seqlens)
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v, g, beta, state)):
        return ChunkedDeltaRule.apply(q, k, v, g, beta, state, layout, scale)
    with own_precision(q):
        return chunked_forward(q, k, v, g, beta, state, layout, scale)[:2]


def recurrent_delta_rule(
    q: Tensor,  # [B, T, H, K]
    k: Tensor,  # [B, T, H, K]
    v: Tensor,  # [B, T, HV, V]
    gk: Tensor,  # [B, T, HV, 1 or K], log decay of the state's rows
    gv: Tensor | None,  # [B, T, HV, V], log decay of the state's columns
    beta: Tensor,  # [B, T, HV, 1 or V]
    state: Tensor,  # [N, HV, K, V]
    cu_seqlens: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """(o [B, T, HV, V], final state [N, HV, K, V]) token by token; one dtype for all tensors, fp32 or fp64."""
    if torch.compiler.is_compiling():
        return _recurrent_op(q, k, v, gk, gv, beta, state, cu_seqlens, scale)
    layout = chunk_layout(q.shape[0], q.shape[1], cu_seqlens, chunk=1)
    tensors = (q, k, v, gk, beta, state) if gv is None else (q, k, v, gk, gv, beta, state)
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        return RecurrentDeltaRule.apply(q, k, v, gk, gv, beta, state, layout, scale)
    with own_precision(q):
        return recurrent_forward(q, k, v, gk, gv, beta, state, layout, scale, keep=False)[:2]


# --- for compiled code; torch.library reads the schema from the annotations, which must say Optional[...] -------------


@torch.library.custom_op("accel::chunked_delta_rule", mutates_args=())
def _chunked_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    cu_seqlens: Optional[Tensor],  # noqa: UP045
    scale: float,
) -> tuple[Tensor, Tensor]:
    layout = chunk_layout(q.shape[0], q.shape[1], cu_seqlens)
    with own_precision(q):
        return chunked_forward(q, k, v, g, beta, state, layout, scale)[:2]


@torch.library.custom_op("accel::chunked_delta_rule_backward", mutates_args=())
def _chunked_backward_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    cu_seqlens: Optional[Tensor],  # noqa: UP045
    scale: float,
    d_out: Optional[Tensor],  # noqa: UP045
    d_final: Optional[Tensor],  # noqa: UP045
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    layout = chunk_layout(q.shape[0], q.shape[1], cu_seqlens)
    with own_precision(q):
        saved = chunked_forward(q, k, v, g, beta, state, layout, scale)[2]
        return chunked_backward(q, k, v, g, beta, layout, scale, saved, d_out, d_final)


@torch.library.custom_op("accel::recurrent_delta_rule", mutates_args=())
def _recurrent_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gk: Tensor,
    gv: Optional[Tensor],  # noqa: UP045
    beta: Tensor,
    state: Tensor,
    cu_seqlens: Optional[Tensor],  # noqa: UP045
    scale: float,
) -> tuple[Tensor, Tensor]:
    layout = chunk_layout(q.shape[0], q.shape[1], cu_seqlens, chunk=1)
    with own_precision(q):
        return recurrent_forward(q, k, v, gk, gv, beta, state, layout, scale, keep=False)[:2]


@torch.library.custom_op("accel::recurrent_delta_rule_backward", mutates_args=())
def _recurrent_backward_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gk: Tensor,
    gv: Optional[Tensor],  # noqa: UP045
    beta: Tensor,
    state: Tensor,
    cu_seqlens: Optional[Tensor],  # noqa: UP045
    scale: float,
    d_out: Optional[Tensor],  # noqa: UP045
    d_final: Optional[Tensor],  # noqa: UP045
) -> list[Tensor]:
    layout = chunk_layout(q.shape[0], q.shape[1], cu_seqlens, chunk=1)
    with own_precision(q):
        saved = recurrent_forward(q, k, v, gk, gv, beta, state, layout, scale, keep=True)[2]
        grads = recurrent_backward(q, k, v, gk, gv, beta, layout, scale, saved, d_out, d_final)
    return [x for x in grads if x is not None]


@_chunked_op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return v.new_empty(v.shape), state.new_empty(state.shape)


@_recurrent_op.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, gk: Tensor, gv: Tensor | None, beta: Tensor, state: Tensor, *rest: Any
) -> tuple[Tensor, Tensor]:
    return v.new_empty(v.shape), state.new_empty(state.shape)


@_chunked_backward_op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in (q, k, v, g, beta, state))


@_recurrent_backward_op.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, gk: Tensor, gv: Tensor | None, beta: Tensor, state: Tensor, *rest: Any
) -> list[Tensor]:
    return [x.new_empty(x.shape) for x in (q, k, v, gk, gv, beta, state) if x is not None]


def _keep_inputs(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors)


def _chunked_op_backward(ctx: Any, d_out: Tensor | None, d_final: Tensor | None) -> tuple[Tensor | None, ...]:
    tensors = ctx.saved_tensors
    return (*_chunked_backward_op(*tensors, ctx.scale, d_out, d_final), None, None)


def _recurrent_op_backward(ctx: Any, d_out: Tensor | None, d_final: Tensor | None) -> tuple[Tensor | None, ...]:
    tensors = ctx.saved_tensors
    grads = iter(_recurrent_backward_op(*tensors, ctx.scale, d_out, d_final))
    return (*(None if x is None else next(grads) for x in tensors[:7]), None, None)


torch.library.register_autograd(_chunked_op, _chunked_op_backward, setup_context=_keep_inputs)
torch.library.register_autograd(_recurrent_op, _recurrent_op_backward, setup_context=_keep_inputs)
