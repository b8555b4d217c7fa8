"""Named inputs of the norm family, for certificates, tests and benchmarks.

A case is small enough for a GPU to run all of them in seconds, and named by what it stresses.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Case:
    """One call of rms_norm (activation None) or rms_norm_gated, with its gradients."""

    name: str
    rows: tuple[int, ...]
    hidden: int
    dtype: torch.dtype
    weight_dtype: torch.dtype
    form: str
    activation: str | None = None
    layout: str = "contiguous"  #: contiguous | rows (strided) | heads (a slice of packed q, k, v) | misaligned
    scale: float = 1.0  #: of x
    eps: float = 1e-6


@dataclass(frozen=True, slots=True)
class Inputs:
    x: Tensor
    weight: Tensor
    gate: Tensor | None
    dy: Tensor


def make_inputs(case: Case, device: torch.device | str, seed: int = 0) -> Inputs:
    """The tensors of a case, the same on every device for one seed; x, weight and gate require gradients."""
    generator = torch.Generator().manual_seed(seed)

    def draw(dtype: torch.dtype, scale: float = 1.0) -> Tensor:
        return laid_out(torch.randn(*case.rows, case.hidden, generator=generator) * scale, dtype, case.layout, device)

    centre = 0.0 if case.form == "zero_centred" else 1.0
    weight = (centre + 0.3 * torch.randn(case.hidden, generator=generator)).to(case.weight_dtype).to(device)
    promoted = case.form == "cast_then_weight" and case.activation is None
    out_dtype = torch.promote_types(case.dtype, case.weight_dtype) if promoted else case.dtype
    gate = None if case.activation is None else draw(case.dtype, 2.0).requires_grad_()
    return Inputs(draw(case.dtype, case.scale).requires_grad_(), weight.requires_grad_(), gate, draw(out_dtype))


def laid_out(values: Tensor, dtype: torch.dtype, layout: str, device: torch.device | str) -> Tensor:
    """The values in a tensor of the given layout."""
    *rows, hidden = values.shape
    vector = 16 // dtype.itemsize
    if layout == "contiguous":
        return values.to(device, dtype)
    if layout == "rows":
        holder = torch.full((*rows, hidden + 3 * vector), torch.nan, dtype=dtype, device=device)
        view = holder[..., vector : vector + hidden]
    elif layout == "heads":
        outer, inner = rows[:-1], rows[-1]
        holder = torch.full((*outer, 3 * inner, hidden), torch.nan, dtype=dtype, device=device)
        view = holder[..., inner : 2 * inner, :]
    elif layout == "misaligned":
        holder = torch.full((*rows, hidden + 1), torch.nan, dtype=dtype, device=device)
        view = holder[..., 1:]
    else:
        raise ValueError(f"layout must be contiguous, rows, heads or misaligned, got {layout!r}")
    view.copy_(values.to(device, dtype))
    return view


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def cases() -> tuple[Case, ...]:
    """Every form, dtype pair and layout, the ends of the hidden range, and values at the ends of fp32."""
    made = []
    forms = ("cast_then_weight", "weight_in_fp32", "zero_centred")
    for form in forms:
        for dtype, weight_dtype in ((BF16, BF16), (BF16, FP32), (FP16, FP16), (FP16, FP32), (FP32, FP32)):
            name = f"{form}-{_short(dtype)}-{_short(weight_dtype)}"
            made.append(Case(name, (3, 67), 2048, dtype, weight_dtype, form))
            if form == "zero_centred":
                continue
            for activation in ("silu", "sigmoid"):
                made.append(Case(f"{name}-{activation}", (2, 33, 8), 128, dtype, weight_dtype, form, activation))
    for hidden in (64, 72, 256, 1000, 1536, 4096, 5120, 8192, 12288, 16384):
        made.append(Case(f"hidden{hidden}-bf16", (301,), hidden, BF16, BF16, forms[0]))
        made.append(Case(f"hidden{hidden}-fp32", (97,), hidden, FP32, FP32, forms[1]))
        made.append(Case(f"hidden{hidden}-silu", (83,), hidden, BF16, BF16, forms[0], "silu"))
    made.append(Case("hidden68-fp32", (45,), 68, FP32, FP32, forms[0]))
    made.append(Case("hidden16384-fp32-silu", (45,), 16384, FP32, FP32, forms[0], "silu"))
    for layout in ("rows", "heads", "misaligned"):
        made.append(Case(f"layout-{layout}", (2, 37, 6), 128, BF16, BF16, forms[2], layout=layout))
        made.append(Case(f"layout-{layout}-silu", (2, 37, 6), 128, BF16, BF16, forms[0], "silu", layout))
    made.append(Case("one-row", (1,), 4096, BF16, BF16, forms[0]))
    made.append(Case("many-small-rows", (40, 1024, 5), 64, BF16, BF16, forms[2]))
    made.append(Case("tiny-values", (65,), 512, FP32, FP32, forms[0], scale=1e-12))
    made.append(Case("huge-values", (65,), 512, BF16, BF16, forms[1], scale=1e15))
    made.append(Case("large-fp16", (65,), 512, FP16, FP16, forms[0], scale=1e4))
    return tuple(made)


def _short(dtype: torch.dtype) -> str:
    return {BF16: "bf16", FP16: "fp16", FP32: "fp32"}[dtype]
