"""The cores compute in the dtype they are given, whatever autocast is set to around them."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def own_precision(x: Tensor) -> AbstractContextManager[object]:
    """A context in which autocast does not touch products on x's device; free where autocast is off."""
    device = x.device.type
    if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return nullcontext()
    return torch.autocast(device, enabled=False)
