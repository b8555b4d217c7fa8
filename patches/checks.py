"""Checks that every adapter makes of the tensors and modules it is handed. Each raises Decline with a one-line reason."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from accel.outcome import Decline

#: Types whose storage a kernel may read. Everything else (DTensor, nested, quantised, functorch's, ...) goes upstream.
PLAIN: set[type] = {torch.Tensor, nn.Parameter}


def unknown_keywords(unknown: dict[str, Any]) -> None:
    """Decline keywords that this adapter does not know: they may change what the call means."""
    if unknown:
        raise Decline(f"unknown keyword {', '.join(sorted(unknown))}")


def plain(**tensors: torch.Tensor | None) -> torch.device:
    """Decline what is no plain strided tensor, and tensors on different devices; the device they share.

    A parameter name is given per tensor, for the reason. None is an argument that was left out.
    """
    device: torch.device | None = None
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if type(tensor) not in PLAIN:
            raise Decline(f"{name} is a {type(tensor).__name__}, not a plain tensor")
        if tensor.layout is not torch.strided:
            raise Decline(f"{name} has layout {tensor.layout}")
        if device is None:
            device = tensor.device
            if device.type not in ("cuda", "cpu"):
                raise Decline(f"{name} is on device {device.type}")
        elif tensor.device != device:
            raise Decline(f"{name} is on {tensor.device}, other tensors on {device}")
    if device is None:
        raise Decline("no tensor among the arguments")
    return device


def needs_grad(*tensors: torch.Tensor | None) -> bool:
    """Whether autograd will ask for a gradient of any of these."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype autocast casts to on this device, None where it is off."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


def dtype_name(dtype: torch.dtype) -> str:
    """ "bfloat16" for torch.bfloat16: facts hold strings."""
    return str(dtype)[6:]
