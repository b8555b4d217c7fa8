"""FLA's normalisations in plain torch: layer, RMS, group, gated, the forms fused with a linear layer, l2 and AttnRes.

Every function has the signature and the return structure of its upstream namesake and serves CPU tensors. Arithmetic
is fp32 (fp64 for fp64 tensors, where upstream would round to fp32); an output is rounded once, to the dtype upstream
stores. Gradients come from autograd. What upstream rejects is declined, so that upstream raises its own error.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from accel.outcome import Decline

#: Upstream's kernels hold one row, and refuse one of more bytes than this.
MAX_ROW_BYTES = 65536


def compute_dtype(*tensors: torch.Tensor | None) -> torch.dtype:
    """The dtype of the arithmetic: fp32, or fp64 as soon as one operand is fp64."""
    if any(tensor is not None and tensor.dtype == torch.float64 for tensor in tensors):
        return torch.float64
    return torch.float32


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    residual: torch.Tensor | None = None,
    eps: float = 1e-5,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    is_rms_norm: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Layer norm (or RMS norm) over the last dimension of `x + residual`; x [..., D], weight and bias [D] or None.

    Returns y in x's dtype; with `prenorm` (y, x + residual), the sum in the residual's dtype.
    """
    return _norm(x, weight, bias, residual, eps, prenorm, residual_in_fp32, is_rms_norm)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    residual: torch.Tensor | None = None,
    eps: float = 1e-5,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`layer_norm` without the mean."""
    return _norm(x, weight, bias, residual, eps, prenorm, residual_in_fp32, True)


def group_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    residual: torch.Tensor | None = None,
    eps: float = 1e-5,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    is_rms_norm: bool = False,
    num_groups: int = 1,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`layer_norm` over each of `num_groups` equal parts of the last dimension; weight and bias cover all of it."""
    return _norm(x, weight, bias, residual, eps, prenorm, residual_in_fp32, is_rms_norm, num_groups)


def layer_norm_linear(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    norm_bias: torch.Tensor,
    linear_weight: torch.Tensor,
    linear_bias: torch.Tensor,
    residual: torch.Tensor | None = None,
    eps: float = 1e-5,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    is_rms_norm: bool = False,
    num_groups: int = 1,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`group_norm`, rounded to x's dtype, then a linear layer in that dtype."""
    y, total = _normalised(x, norm_weight, norm_bias, residual, eps, residual_in_fp32, is_rms_norm, num_groups)
    out = _linear(y.to(x.dtype), linear_weight, linear_bias)
    return (out, total) if prenorm else out


def layer_norm_gated(
    x: torch.Tensor,
    g: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    activation: str = "swish",
    residual: torch.Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    eps: float = 1e-6,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`layer_norm` times the activated gate g [..., D]; activation "swish", "silu" or "sigmoid"."""
    return _norm(x, weight, bias, residual, eps, prenorm, residual_in_fp32, False, gate=(g, activation))


def rms_norm_gated(
    x: torch.Tensor,
    g: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    activation: str = "swish",
    residual: torch.Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    eps: float = 1e-6,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`rms_norm` times the activated gate g [..., D]; activation "swish", "silu" or "sigmoid"."""
    return _norm(x, weight, bias, residual, eps, prenorm, residual_in_fp32, True, gate=(g, activation))


def layer_norm_swish_gate_linear(
    x: torch.Tensor,
    g: torch.Tensor,
    norm_weight: torch.Tensor,
    norm_bias: torch.Tensor,
    linear_weight: torch.Tensor,
    linear_bias: torch.Tensor,
    residual: torch.Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    eps: float = 1e-6,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`layer_norm_gated` with swish, rounded to x's dtype, then a linear layer in that dtype."""
    gate = (g, "swish")
    y, total = _normalised(x, norm_weight, norm_bias, residual, eps, residual_in_fp32, False, gate=gate)
    out = _linear(y.to(x.dtype), linear_weight, linear_bias)
    return (out, total) if prenorm else out


def rms_norm_swish_gate_linear(
    x: torch.Tensor,
    g: torch.Tensor,
    norm_weight: torch.Tensor,
    norm_bias: torch.Tensor,
    linear_weight: torch.Tensor,
    linear_bias: torch.Tensor,
    residual: torch.Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    eps: float = 1e-6,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`rms_norm_gated` with swish, rounded to x's dtype, then a linear layer in that dtype."""
    gate = (g, "swish")
    y, total = _normalised(x, norm_weight, norm_bias, residual, eps, residual_in_fp32, True, gate=gate)
    out = _linear(y.to(x.dtype), linear_weight, linear_bias)
    return (out, total) if prenorm else out


def l2norm(x: torch.Tensor, eps: float = 1e-6, output_dtype: torch.dtype | None = None) -> torch.Tensor:
    """x / sqrt(sum(x^2) + eps) over the last dimension, in `output_dtype` or x's dtype."""
    _check_row(x, x.shape[-1])
    rows = x.contiguous().to(compute_dtype(x))
    return (rows * torch.rsqrt(rows.square().sum(-1, keepdim=True) + eps)).to(output_dtype or x.dtype)


def fused_attnres(
    query: torch.Tensor,
    residuals: Sequence[torch.Tensor],
    rms_weight: torch.Tensor,
    output_rms_weight: torch.Tensor | None = None,
    rms_eps: float = 1e-6,
    scale: float = 1.0,
    return_weights: bool = False,
    checkpoint_level: int = 1,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Softmax-weighted sum of residual sources [..., D], scored by their RMS norm against `query` (arXiv:2603.15031).

    Returns o in the sources' dtype; with `return_weights` (o, p), p [L, ...] in fp32 and without a gradient, as
    upstream. `checkpoint_level` trades memory upstream and changes nothing here.
    """
    if len(residuals) == 0:
        raise Decline("residuals is empty")
    if checkpoint_level not in (0, 1):
        raise Decline(f"checkpoint_level={checkpoint_level} is not 0 or 1")
    first = residuals[0]
    dtype = compute_dtype(first, query, rms_weight)
    sources = torch.stack([residual.reshape(first.shape) for residual in residuals]).to(dtype)
    keys = _rms(sources, rms_eps) * rms_weight.flatten().to(dtype)
    p = ((keys * query.flatten().to(dtype)).sum(-1) * scale).softmax(0)
    o = (p.unsqueeze(-1) * sources).sum(0)
    if output_rms_weight is not None:
        o = _rms(o, rms_eps) * output_rms_weight.to(dtype)
    o = o.to(first.dtype)
    return (o, p.detach()) if return_weights else o


def _norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    eps: float,
    prenorm: bool,
    residual_in_fp32: bool,
    is_rms_norm: bool,
    num_groups: int = 1,
    gate: tuple[torch.Tensor, str] | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    y, total = _normalised(x, weight, bias, residual, eps, residual_in_fp32, is_rms_norm, num_groups, gate)
    y = y.to(x.dtype)
    return (y, total) if prenorm else y


def _normalised(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    eps: float,
    residual_in_fp32: bool,
    is_rms_norm: bool,
    num_groups: int = 1,
    gate: tuple[torch.Tensor, str] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The unrounded result and the sum that was normalised, the latter in the dtype upstream stores it in."""
    _check_norm(x, weight, bias, residual, num_groups, gate)
    x = x.contiguous()
    dtype = compute_dtype(x, weight, bias, residual)
    total = x.to(dtype)
    if residual is not None:
        total = total + residual.contiguous().to(dtype)
        stored = total.to(residual.dtype)
    elif residual_in_fp32:
        stored = x.to(torch.float32) if x.dtype != torch.float32 else x.view_as(x)
    else:
        stored = x.view_as(x)

    groups = total.reshape(*total.shape[:-1], num_groups, total.shape[-1] // num_groups)
    if not is_rms_norm:
        groups = groups - groups.mean(-1, keepdim=True)
    y = _rms(groups, eps).flatten(-2)
    if weight is not None:
        y = y * weight.to(dtype)
    if bias is not None:
        y = y + bias.to(dtype)
    if gate is not None:
        g, activation = gate[0].contiguous().reshape(x.shape).to(dtype), gate[1]
        y = y * (torch.sigmoid(g) if activation == "sigmoid" else F.silu(g))
    return y, stored


def _rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def _linear(y: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return F.linear(y, weight.to(y.dtype), None if bias is None else bias.to(y.dtype))


def _check_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    num_groups: int,
    gate: tuple[torch.Tensor, str] | None,
) -> None:
    width = x.shape[-1]
    if width % num_groups:
        raise Decline(f"the last dimension, {width}, is not divisible by num_groups={num_groups}")
    _check_row(x, width // num_groups)
    if residual is not None and residual.shape != x.shape:
        raise Decline(f"residual has shape {tuple(residual.shape)}, x has {tuple(x.shape)}")
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and tensor.shape != (width,):
            raise Decline(f"{name} has shape {tuple(tensor.shape)}, the rows have width {width}")
    if gate is not None:
        g, activation = gate
        if g.shape[-1] != width or g.numel() != x.numel():
            raise Decline(f"the gate has shape {tuple(g.shape)}, x has {tuple(x.shape)}")
        if activation not in ("swish", "silu", "sigmoid"):
            raise Decline(f"activation={activation!r} is not swish, silu or sigmoid")


def _check_row(x: torch.Tensor, width: int) -> None:
    if width * x.element_size() > MAX_ROW_BYTES:
        raise Decline(f"a row of {width} x {x.dtype} is more than {MAX_ROW_BYTES} bytes")
