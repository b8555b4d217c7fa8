"""Checks that every adapter makes of the tensors it is handed. Each raises Decline with a one-line reason."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from accel.outcome import Decline

#: Types whose storage a kernel may read. Everything else (DTensor, nested, quantised, functorch's, ...) goes upstream.
PLAIN: set[type] = {torch.Tensor, nn.Parameter}
_STRIDED = torch.strided
_NAMES = {dtype: str(dtype)[6:] for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64)}


def unknown_keywords(unknown: dict[str, Any]) -> None:
    """Decline keywords that this adapter does not know: they may change what the call means."""
    if unknown:
        raise Decline(f"unknown keyword {', '.join(sorted(unknown))}")


def plain(**tensors: torch.Tensor | None) -> torch.device:
    """Decline what is no plain strided tensor, and tensors on different devices; the device they share.

    A parameter name is given per tensor, for the reason. None is an argument that was left out.
    """
    device: torch.device | None = None
    tracing = torch.compiler.is_compiling()  # Dynamo cannot ask for the negative bit
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if type(tensor) not in PLAIN:
            raise Decline(f"{name} is a {type(tensor).__name__}, not a plain tensor")
        if tensor.is_nested:  # a strided one has the type and layout of any other
            raise Decline(f"{name} is a nested tensor")
        if tensor.layout is not _STRIDED:
            raise Decline(f"{name} has layout {tensor.layout}")
        if not tracing and tensor.is_neg():
            raise Decline(f"{name} is a view that is negated when read")
        if device is None:
            device = tensor.device
            if not (tensor.is_cuda or tensor.is_cpu):
                raise Decline(f"{name} is on device {device.type}")
        elif tensor.device != device:
            raise Decline(f"{name} is on {tensor.device}, other tensors on {device}")
    if device is None:
        raise Decline("no tensor among the arguments")
    return device


def needs_grad(*tensors: torch.Tensor | None) -> bool:
    """Whether autograd will ask for a gradient of any of these."""
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                return True
    return False


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype autocast casts to on this device, None where it is off."""
    if torch._C._is_any_autocast_enabled() and torch.is_autocast_enabled(device.type):
        return torch.get_autocast_dtype(device.type)
    return None


def dtype_name(dtype: torch.dtype) -> str:
    """ "bfloat16" for torch.bfloat16: facts hold strings."""
    return _NAMES.get(dtype) or str(dtype)[6:]


def not_on_cpu(device: torch.device) -> None:
    """Decline CPU tensors, for an operation that upstream's own code does as fast there."""
    if device.type == "cpu":
        raise Decline("CPU tensors: upstream's own code is as fast on a CPU")
