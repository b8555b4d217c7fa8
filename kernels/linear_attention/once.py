"""Gradients that refuse to be differentiated again, rather than pass for constants."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class _Once(torch.autograd.Function):
    """The first `count` tensors as they are; they depend on all tensors, by a derivative that raises."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.view_as(x) for x in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        raise RuntimeError("linear attention has no second derivative: its gradients can be taken once only")


def once(gradients: Sequence[Tensor | None], sources: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """The gradients, which a backward computed from `sources`. With create_graph=True, differentiating them raises."""
    if not torch.is_grad_enabled():
        return tuple(gradients)
    present = [x for x in gradients if x is not None]
    wrapped = iter(_Once.apply(len(present), *present, *(x for x in sources if x is not None)))
    return tuple(None if x is None else next(wrapped) for x in gradients)
