"""From a caller's tensors to what the cores take: checks, compute dtype, l2 norm, log decay, beta, state layout.

All of it is elementwise, differentiated by torch itself, and casts gradients back to the dtype of each input.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

#: Added to the squared norm of a query or key before its root: a zero row stays zero, with a finite gradient.
L2NORM_EPS = 1e-6


def check_shapes(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, initial_state: Tensor | None, v_first: bool
) -> None:
    """Raise ValueError or TypeError, naming the value, unless q, k, v, cu_seqlens and initial_state belong together."""
    if q.dim() != 4 or v.dim() != 4:
        raise ValueError(f"q, k, v must be [B, T, heads, dim], got q {list(q.shape)} and v {list(v.shape)}")
    if q.shape != k.shape:
        raise ValueError(f"q and k must have the same shape, got {list(q.shape)} and {list(k.shape)}")
    batch, tokens, heads, dim = q.shape
    if v.shape[:2] != q.shape[:2]:
        raise ValueError(f"v must have q's batch and length [{batch}, {tokens}], got {list(v.shape)}")
    if heads == 0 or v.shape[2] % heads:
        raise ValueError(f"the value heads must be a multiple of the {heads} query/key heads, got {v.shape[2]}")
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not x.is_floating_point():
            raise TypeError(f"{name} must be a floating-point tensor, got {x.dtype}")
    sequences = batch
    if cu_seqlens is not None:
        if cu_seqlens.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"cu_seqlens must be int32 or int64, got {cu_seqlens.dtype}")
        if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] == 0:
            raise ValueError(f"cu_seqlens must be [N + 1], got {list(cu_seqlens.shape)}")
        if batch != 1:
            raise ValueError(f"with cu_seqlens the batch must be 1, got {batch}")
        sequences = cu_seqlens.shape[0] - 1
    if initial_state is not None:
        inner = [v.shape[3], dim] if v_first else [dim, v.shape[3]]
        if list(initial_state.shape) != [sequences, v.shape[2], *inner]:
            expected = [sequences, v.shape[2], *inner]
            raise ValueError(f"initial_state must be {expected}, got {list(initial_state.shape)}")
        if not initial_state.is_floating_point():
            raise TypeError(f"initial_state must be a floating-point tensor, got {initial_state.dtype}")


def check_tensor(name: str, x: Tensor, shape: list[int]) -> None:
    """Raise ValueError unless `x` has `shape`, TypeError unless it is floating point."""
    if list(x.shape) != shape:
        raise ValueError(f"{name} must be {shape}, got {list(x.shape)}")
    if not x.is_floating_point():
        raise TypeError(f"{name} must be a floating-point tensor, got {x.dtype}")


def parameter(name: str, x: Tensor, shape: list[int], dtype: torch.dtype) -> Tensor:
    """A per-head parameter in `shape` and `dtype`; ValueError unless it has that many values."""
    if x.numel() != math.prod(shape):
        raise ValueError(f"{name} must have {math.prod(shape)} values, got {list(x.shape)}")
    if not x.is_floating_point():
        raise TypeError(f"{name} must be a floating-point tensor, got {x.dtype}")
    return x.to(dtype).reshape(shape)


def check_beta_options(use_beta_sigmoid: bool, allow_neg_eigval: bool) -> None:
    if allow_neg_eigval and not use_beta_sigmoid:
        raise ValueError("allow_neg_eigval=True needs use_beta_sigmoid=True, got use_beta_sigmoid=False")


def compute_dtype(*tensors: Tensor | None) -> torch.dtype:
    """float64 if any input is, else float32."""
    return torch.float64 if any(x is not None and x.dtype == torch.float64 for x in tensors) else torch.float32


def l2norm(x: Tensor) -> Tensor:
    """x / sqrt(sum x^2 + 1e-6) over the last dimension."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2NORM_EPS)


def prepare_qk(q: Tensor, k: Tensor, dtype: torch.dtype, use_l2norm: bool) -> tuple[Tensor, Tensor]:
    """Queries and keys in the compute dtype, normalised there if asked."""
    q, k = q.to(dtype), k.to(dtype)
    return (l2norm(q), l2norm(k)) if use_l2norm else (q, k)


def activate_beta(beta: Tensor, use_sigmoid: bool, allow_neg_eigval: bool) -> Tensor:
    """beta, sigmoid(beta) or 2 sigmoid(beta); with the last, a step may flip the sign of a direction of the state."""
    if not use_sigmoid:
        return beta
    return beta.sigmoid() * 2 if allow_neg_eigval else beta.sigmoid()


def prepare_recurrent_beta(
    beta: Tensor | None, v: Tensor, dtype: torch.dtype, use_sigmoid: bool, allow_neg_eigval: bool
) -> Tensor:
    """[B, T, HV, 1 or V]: beta per head or per value channel, activated; ones where there is none."""
    if beta is None:
        beta = v.new_ones(v.shape[:3])
    check_tensor("beta", beta, list(v.shape if beta.dim() == 4 else v.shape[:3]))
    beta = activate_beta(beta.to(dtype), use_sigmoid, allow_neg_eigval)
    return beta if beta.dim() == 4 else beta[..., None]


def softplus_decay(g: Tensor, a_log: Tensor, dt_bias: Tensor | None) -> Tensor:
    """-exp(A_log) * softplus(g + dt_bias): a log decay without a lower bound."""
    return -a_log.exp() * F.softplus(g if dt_bias is None else g + dt_bias)


def bounded_decay(g: Tensor, a_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float) -> Tensor:
    """lower_bound * sigmoid(exp(A_log) * (g + dt_bias)): a log decay between lower_bound and 0."""
    g = g if dt_bias is None else g + dt_bias
    return lower_bound * torch.sigmoid(g if a_log is None else a_log.exp() * g)


def start_state(
    initial_state: Tensor | None, q: Tensor, v: Tensor, cu_seqlens: Tensor | None, v_first: bool, dtype: torch.dtype
) -> Tensor:
    """The state before the first token, [N, HV, K, V] in the compute dtype: zeros where the caller gave none."""
    if initial_state is None:
        sequences = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        return q.new_zeros(sequences, v.shape[2], q.shape[3], v.shape[3], dtype=dtype)
    state = initial_state.to(dtype)
    return state.mT if v_first else state


def end_state(state: Tensor, wanted: bool | None, v_first: bool) -> Tensor | None:
    """The caller's final state: contiguous in the layout asked for, or None."""
    if not wanted:
        return None
    return state.mT.contiguous() if v_first else state
