"""The gated MLP of today's language models: down(act(gate(x)) * up(x)) (Shazeer, arXiv 2002.05202).

    h = act(x @ gate.T + gate_bias) * (x @ up.T + up_bias)        act: silu, gelu (tanh form) or gelu (erf form)
    y = h @ down.T + down_bias

gate and up are two weights, or one (2 * intermediate, hidden) weight whose first half is the gate. There is no device
kernel yet: `plan` declines every CUDA device, and CPU tensors run plain torch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from accel.outcome import Decline

from ..runtime.interned import interned
from . import portable
from .facts import ACTIVATIONS, GatedMlpFacts
from .plan import plan

__all__ = ["ACTIVATIONS", "GatedMlpFacts", "facts_of", "gated_mlp", "plan"]

_facts = interned(GatedMlpFacts)
_NAMES = {dtype: str(dtype)[6:] for dtype in (torch.bfloat16, torch.float16, torch.float32)}


def gated_mlp(
    x: Tensor,
    gate: Tensor,
    up: Tensor | None,
    down: Tensor,
    *,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    activation: str = "silu",
) -> Tensor:
    """act(x gate^T) * (x up^T), times down^T.

    x (..., hidden); gate and up (intermediate, hidden), or gate (2 * intermediate, hidden) holding both and up None;
    down (out, intermediate); biases (rows of their weight,). All of one dtype. Returns (..., out) of that dtype.
    Differentiable in every tensor.

    Raises ValueError for an unknown activation or shapes that do not fit, Decline where no kernel serves the call.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")
    problem = shapes_problem(x, gate, up, down)
    if problem is not None:
        raise ValueError(problem)
    if x.is_cuda:
        raise Decline(f"there is no gated_mlp kernel to launch on {x.device}")
    return portable.gated_mlp(x, gate, up, down, gate_bias, up_bias, down_bias, activation)


def facts_of(
    x: Tensor,
    gate: Tensor,
    up: Tensor | None,
    down: Tensor,
    gate_bias: Tensor | None,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    activation: str,
    needs_grad: bool,
) -> GatedMlpFacts:
    """The facts of a call whose shapes fit, from metadata alone: fake tensors do."""
    hidden = x.shape[-1]
    out, intermediate = down.shape
    weight_dtypes = (_dtype(gate), _dtype(down)) if up is None else (_dtype(gate), _dtype(up), _dtype(down))
    contiguous = gate.is_contiguous() and down.is_contiguous() and (up is None or up.is_contiguous())
    # by position, in the order of the fields: with 15 keywords the look-up takes 0.7 us more
    return _facts()(
        x.numel() // hidden if hidden else 0,
        hidden,
        intermediate,
        out,
        _dtype(x),
        weight_dtypes,
        activation,
        up is None,
        gate_bias is not None,
        up_bias is not None,
        down_bias is not None,
        x.stride(-1) == 1,
        contiguous,
        needs_grad,
        "cpu" if x.is_cpu else x.device.type,
    )


def _dtype(tensor: Tensor) -> str:
    return _NAMES.get(tensor.dtype) or str(tensor.dtype)[6:]


def shapes_problem(x: Tensor, gate: Tensor, up: Tensor | None, down: Tensor) -> str | None:
    """How the shapes do not fit each other, None where they do."""
    gate_shape, down_shape = gate.shape, down.shape
    if x.dim() < 1 or len(gate_shape) != 2 or len(down_shape) != 2 or (up is not None and up.dim() != 2):
        return "x must have a dimension and each weight two"
    hidden, intermediate = x.shape[-1], down_shape[1]
    rows = 2 * intermediate if up is None else intermediate
    if gate_shape != (rows, hidden):
        return f"gate is {tuple(gate.shape)}, not {(rows, hidden)}: x is {tuple(x.shape)}, down {tuple(down.shape)}"
    if up is not None and up.shape != gate_shape:
        return f"up is {tuple(up.shape)}, gate {tuple(gate.shape)}"
    return None
