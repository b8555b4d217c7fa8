"""What the adapters of scaled dot product attention share: the part of a call that every library passes alike."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from accel.outcome import Decline

from . import checks

_STRIDED = torch.strided
_TORCH_SDPA = torch._C._nn.scaled_dot_product_attention


def call(dropout: float, scale: float | None) -> None:
    """Decline dropout, scales that are no positive number, and a torch whose attention was replaced.

    Context parallelism (torch's own), SageAttention and others put a function of their own in place of
    `torch.nn.functional.scaled_dot_product_attention`; upstream calls it, and what it does is not known here.
    """
    if dropout:
        raise Decline(f"dropout={dropout}")
    if scale is not None:
        if type(scale) is not float and type(scale) is not int:
            raise Decline(f"the scale is a {type(scale).__name__}, not a number")
        if not 0 < scale < float("inf"):
            raise Decline(f"scale={scale} is not positive")
    if functional.scaled_dot_product_attention is not _TORCH_SDPA:
        raise Decline("torch.nn.functional.scaled_dot_product_attention was replaced by somebody else")


def device_of(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, name: str, mask: Any) -> torch.device:
    """The device of the four, or Decline, as `checks.plain`, which knows the mask as `name`.

    What nearly every call passes goes through one test: 0.8 us less than tensor by tensor.
    """
    device = query.device
    if (
        mask is None
        and type(query) is torch.Tensor
        and type(key) is torch.Tensor
        and type(value) is torch.Tensor
        and not (query.is_nested or key.is_nested or value.is_nested)
        and query.layout is key.layout is value.layout is _STRIDED
        and not (query.is_neg() or key.is_neg() or value.is_neg())
        and (query.is_cuda or query.is_cpu)
        and key.device == device
        and value.device == device
    ):
        return device
    return checks.plain(query=query, key=key, value=value, **{name: mask})


def ambient(query: torch.Tensor) -> None:
    """Decline an autocast that would change the dtype, and a torch that is told to use its math backend alone."""
    kind = "cuda" if query.is_cuda else "cpu"
    if torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) != query.dtype:
        cast = checks.dtype_name(torch.get_autocast_dtype(kind))
        raise Decline(f"autocast to {cast} is on, the tensors are {checks.dtype_name(query.dtype)}")
    if query.is_cuda and not (
        torch._C._get_flash_sdp_enabled()
        or torch._C._get_mem_efficient_sdp_enabled()
        or torch._C._get_cudnn_sdp_enabled()
    ):
        raise Decline("torch is told to use no attention backend but its math one")
