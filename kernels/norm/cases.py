"""Named inputs of the norm family, for certificates, tests and benchmarks.

The smallest set that visits each branch of both kernels: every form, dtype pair and layout; rows under a warp, of whole
warps, with idle threads and idle vectors; one and two row levels; copies; no rows and one row; values at the ends of
fp32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import portable as plain
from . import rms_norm, rms_norm_gated
from .facts import NormFacts
from .launch import COPY
from .reference import rms_norm_grads_ref, rms_norm_ref

BF16, FP16, FP32 = "bfloat16", "float16", "float32"
LEVELS = {"contiguous": 1, "rows": 1, "heads": 2, "misaligned": COPY}  #: row levels of each layout


@dataclass(frozen=True, slots=True)
class Case:
    """One call of rms_norm (activation None) or rms_norm_gated, with all its gradients."""

    rows: tuple[int, ...]
    hidden: int
    dtype: str
    weight_dtype: str
    form: str
    activation: str | None = None
    layout: str = "contiguous"  #: contiguous | rows (strided) | heads (a slice of packed q, k, v) | misaligned
    scale: float = 1.0  #: of x
    eps: float = 1e-6

    @property
    def name(self) -> str:
        parts = [self.call or "", self.form, self.activation, f"{self.dtype}-{self.weight_dtype}", self.layout]
        parts += [f"{self.scale:g}" if self.scale != 1.0 else None, "x".join(map(str, (*self.rows, self.hidden)))]
        return "_".join(part for part in parts if part and part != "contiguous")

    @property
    def kernels(self) -> tuple[str, ...]:
        return ("any_fwd", "any_bwd")

    @property
    def call(self) -> str | None:
        return "rms_norm" if self.activation is None else "rms_norm_gated"

    @property
    def facts(self) -> NormFacts:
        n_rows = 1
        for n in self.rows:
            n_rows *= n
        return NormFacts(
            n_rows=n_rows,
            hidden=self.hidden,
            dtype=self.dtype,
            weight_dtype=self.weight_dtype,
            form=self.form,
            activation=self.activation,
            gate_dtype=None if self.activation is None else self.dtype,
            needs_grad=True,
            row_levels=LEVELS[self.layout],
        )

    def make(self, device: torch.device | str, generator: torch.Generator) -> dict[str, Any]:
        """x, weight, gate and d_y, the same values for a generator on every device."""
        dtype, weight_dtype = getattr(torch, self.dtype), getattr(torch, self.weight_dtype)

        def draw(dtype: torch.dtype, scale: float = 1.0) -> Tensor:
            values = torch.randn(*self.rows, self.hidden, generator=generator) * scale
            return laid_out(values.to(device, dtype), self.layout)

        centre = 0.0 if self.form == "zero_centred" else 1.0
        weight = centre + 0.3 * torch.randn(self.hidden, generator=generator)
        promoted = self.form == "cast_then_weight" and self.activation is None
        made = {
            "x": draw(dtype, self.scale).requires_grad_(),
            "weight": weight.to(device, weight_dtype).requires_grad_(),
            "d_y": draw(torch.promote_types(dtype, weight_dtype) if promoted else dtype),
        }
        if self.activation is not None:
            made["gate"] = draw(dtype, 2.0).requires_grad_()
        return made

    def run(self, inputs: dict[str, Any]) -> dict[str, Tensor]:
        """The public op and its gradients."""
        return with_gradients(inputs, self.forward(inputs))

    def forward(self, inputs: dict[str, Any]) -> Tensor:
        if self.activation is None:
            return rms_norm(inputs["x"], inputs["weight"], eps=self.eps, form=self.form)
        return rms_norm_gated(
            inputs["x"], inputs["gate"], inputs["weight"], eps=self.eps, activation=self.activation, form=self.form
        )

    def oracle(self, inputs: dict[str, Any]) -> dict[str, Tensor]:
        x, weight, gate = (
            None if t is None else t.detach() for t in (inputs["x"], inputs["weight"], inputs.get("gate"))
        )
        y = rms_norm_ref(x, weight, self.eps, self.form, gate, self.activation)
        d = rms_norm_grads_ref(x, weight, inputs["d_y"], self.eps, self.form, gate, self.activation)
        found = {"y": y, "d_x": d.x, "d_weight": d.weight}
        return found if d.gate is None else {**found, "d_gate": d.gate}


def with_gradients(inputs: dict[str, Any], y: Tensor) -> dict[str, Tensor]:
    names = [name for name in ("x", "weight", "gate") if name in inputs]
    found = torch.autograd.grad(y, [inputs[name] for name in names], inputs["d_y"])
    return {"y": y.detach(), **{f"d_{name}": grad for name, grad in zip(names, found, strict=True)}}


def portable(case: Case, inputs: dict[str, Any]) -> dict[str, Tensor]:
    """The yardstick where no upstream is at hand: the same formula, rounding points included, in plain torch."""
    x, weight = inputs["x"], inputs["weight"]
    if case.activation is None:
        return with_gradients(inputs, plain.rms_norm(x, weight, case.eps, case.form))
    y = plain.rms_norm_gated(x, inputs["gate"], weight, case.eps, case.activation, case.form)
    return with_gradients(inputs, y)


def laid_out(values: Tensor, layout: str) -> Tensor:
    """The values in a tensor of the given layout, with NaN around them."""
    *rows, hidden = values.shape
    vector = 16 // values.element_size()
    if layout == "contiguous":
        return values
    if layout == "rows":
        holder = values.new_full((*rows, hidden + 3 * vector), torch.nan)
        view = holder[..., vector : vector + hidden]
    elif layout == "heads":
        outer, inner = rows[:-1], rows[-1]
        holder = values.new_full((*outer, 3 * inner, hidden), torch.nan)
        view = holder[..., inner : 2 * inner, :]
    elif layout == "misaligned":
        holder = values.new_full((*rows, hidden + 1), torch.nan)
        view = holder[..., 1:]
    else:
        raise ValueError(f"layout must be one of {', '.join(LEVELS)}, got {layout!r}")
    view.copy_(values)
    return view


def _cases() -> tuple[Case, ...]:
    made = []
    cast, fp32_weight, zero_centred = "cast_then_weight", "weight_in_fp32", "zero_centred"
    for form in (cast, fp32_weight, zero_centred):
        for dtype, weight_dtype in ((BF16, BF16), (BF16, FP32), (FP16, FP16), (FP16, FP32), (FP32, FP32)):
            made.append(Case((3, 67), 2048, dtype, weight_dtype, form))
            if form != zero_centred:
                for activation in ("silu", "sigmoid"):
                    made.append(Case((2, 33, 8), 128, dtype, weight_dtype, form, activation))
    for hidden in (64, 72, 256, 1000, 1536, 4096, 5120, 8192, 12288, 16384):
        made.append(Case((301,), hidden, BF16, BF16, cast))
        made.append(Case((97,), hidden, FP32, FP32, fp32_weight))
        made.append(Case((83,), hidden, BF16, BF16, cast, "silu"))
    made.append(Case((45,), 68, FP32, FP32, cast))
    made.append(Case((45,), 16384, FP32, FP32, cast, "silu"))
    for layout in ("rows", "heads", "misaligned"):
        made.append(Case((2, 37, 6), 128, BF16, BF16, zero_centred, layout=layout))
        made.append(Case((2, 37, 6), 128, BF16, BF16, cast, "silu", layout))
    made.append(Case((7, 5), 128, BF16, FP32, cast, layout="rows"))  # y and d_y are fp32: strides of 4 elements
    made.append(Case((0, 4), 4096, BF16, BF16, cast))
    made.append(Case((0,), 128, BF16, BF16, cast, "silu"))
    made.append(Case((1,), 4096, BF16, BF16, cast))
    made.append(Case((40, 1024, 5), 64, BF16, BF16, zero_centred))
    made.append(Case((8192,), 4096, BF16, BF16, cast))
    made.append(Case((65,), 512, FP32, FP32, cast, scale=1e-12))
    made.append(Case((65,), 512, BF16, BF16, fp32_weight, scale=1e15))
    made.append(Case((65,), 512, FP16, FP16, cast, scale=1e4))
    return tuple(made)


CASES = _cases()
