"""The fp64 oracle of the norm family: the formulas without a single rounding to a smaller dtype."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Gradients(NamedTuple):
    x: Tensor
    weight: Tensor
    gate: Tensor | None


def rms_norm_ref(
    x: Tensor, weight: Tensor, eps: float, form: str, gate: Tensor | None = None, activation: str | None = None
) -> Tensor:
    """y in fp64, for every form (they differ in rounding only, but for zero_centred's 1 + weight)."""
    x, weight = x.double(), weight.double()
    y = x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)
    y = y * (1.0 + weight) if form == "zero_centred" else y * weight
    if gate is None:
        return y
    z = gate.double()
    return y * torch.sigmoid(z) * (z if activation == "silu" else 1.0)


def rms_norm_grads_ref(
    x: Tensor,
    weight: Tensor,
    dy: Tensor,
    eps: float,
    form: str,
    gate: Tensor | None = None,
    activation: str | None = None,
) -> Gradients:
    """dx, dweight and dgate in fp64 for the gradient dy of y."""
    inputs = [t.detach().double().requires_grad_() for t in (x, weight, *(() if gate is None else (gate,)))]
    y = rms_norm_ref(inputs[0], inputs[1], eps, form, inputs[2] if gate is not None else None, activation)
    found = torch.autograd.grad(y, inputs, dy.double())
    return Gradients(found[0], found[1], found[2] if gate is not None else None)
