"""From tensors to kernels: the facts of a call, its layout, the outputs, and the launch.

Kept short on purpose: a served call pays for every line here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from accel.outcome import Choice, Decline, Declined

from ..runtime import arch as archs
from ..runtime.compile import Kernel, build_object, function
from ..runtime.interned import interned
from ..runtime.launch import collapse_rows, sm_count
from ..runtime.tensors import ALIGNMENT, NAMES, aligned, dtype_name
from .config import FORMS, BwdConfig
from .facts import NormFacts
from .plan import NormConfigs, plan

COPY = 3  #: row_levels of a layout that has to be copied first
_OUT = {name: dtype for dtype, name in NAMES.items()}


@dataclass(frozen=True, slots=True)
class Loaded:
    """The functions and numbers of one configuration on one arch, looked up once per call."""

    forward: Callable[..., Any]
    backward: Callable[..., Any] | None
    out_dtype: torch.dtype
    config: BwdConfig | None


_loaded: dict[tuple[Any, ...], Loaded] = {}
_facts = interned(NormFacts)


def facts_of(
    x: Tensor, weight: Tensor, gate: Tensor | None, form: str, activation: str | None, grad: bool
) -> NormFacts:
    """The facts of a call, from metadata alone: fake tensors do."""
    shape, weight_shape = x.shape, weight.shape
    hidden = shape[-1] if shape else 0
    return _facts()(
        x.numel() // hidden if hidden else 0,
        hidden,
        dtype_name(x),
        dtype_name(weight),
        form,
        activation,
        None if gate is None else dtype_name(gate),
        grad,
        "cuda" if x.is_cuda else x.device.type,
        row_levels(x, gate),
        None if len(weight_shape) == 1 and weight_shape[0] == hidden else tuple(weight_shape),
    )


def row_levels(x: Tensor, gate: Tensor | None) -> int:
    """Strides that reach every row of x and the gate: 1, 2, or 3 where they have to be copied first."""
    if x.is_contiguous() and (gate is None or gate.is_contiguous()):
        aligned = _offset_aligned(x) and (gate is None or _offset_aligned(gate))
        return 1 if aligned else COPY
    tensors = (x,) if gate is None else (x, gate)
    if not all(_reachable(t) for t in tensors):
        return COPY
    levels = collapse_rows(x.shape, [t.stride() for t in tensors])
    return COPY if levels is None else len(levels)


def _offset_aligned(t: Tensor) -> bool:
    return t.storage_offset() * t.element_size() % ALIGNMENT == 0


def _reachable(t: Tensor) -> bool:
    """The last dimension is contiguous and every row starts on a 16-byte boundary, as far as metadata tells."""
    if t.stride(-1) != 1 or not _offset_aligned(t):
        return False
    per = ALIGNMENT // t.element_size()
    return all(s % per == 0 for s, n in zip(t.stride()[:-1], t.shape[:-1], strict=True) if n > 1)


def loaded_for(facts: NormFacts, device: torch.device) -> Loaded:
    """Compile or load what a call needs, the backward too. Raises Decline if no kernel serves it, or during capture."""
    arch = archs.dispatch_arch(device)
    choice = plan(facts, arch)
    if isinstance(choice, Declined):
        raise Decline(choice.reason)
    if not isinstance(choice.config, NormConfigs):
        raise Decline(f"the {choice.kernel} kernel launches nothing on {device}")
    target = archs.compile_target(arch)
    forward, backward = choice.config.forward, choice.config.backward
    return Loaded(
        function(Kernel("norm", "any_fwd", forward), target),
        function(Kernel("norm", "any_bwd", backward), target) if backward is not None else None,
        _OUT[forward.out_dtype],
        backward,
    )


def lookup(
    x: Tensor, weight: Tensor, gate: Tensor | None, form: str, activation: str | None, grad: bool
) -> tuple[Loaded, int]:
    """(what to launch, row levels) of a call on a CUDA device."""
    shape, device = x.shape, x.get_device()
    if gate is None:
        plain = x.is_contiguous() and not x.data_ptr() & 15
    else:
        if gate.shape != shape:
            raise Decline(f"gate shape={tuple(gate.shape)} is not x's {tuple(shape)}")
        plain = x.is_contiguous() and gate.is_contiguous() and not (x.data_ptr() | gate.data_ptr()) & 15
    levels = 1 if plain else row_levels(x, gate)
    hidden = shape[-1] if shape else 0
    key = (x.dtype, weight.dtype, weight.shape, hidden, form, activation, grad, levels, device)
    if gate is not None:
        key = (*key, gate.dtype)
    if weight.get_device() != device or (gate is not None and gate.get_device() != device):
        raise Decline(f"x is on {x.device}, the weight on {weight.device}")
    found = _loaded.get(key)
    if found is None:
        found = _loaded[key] = loaded_for(facts_of(x, weight, gate, form, activation, grad), x.device)
    return found, levels


def forward(loaded: Loaded, levels: int, x: Tensor, weight: Tensor, gate: Tensor | None, eps: float) -> Tensor:
    if x.is_contiguous() and x.dtype == loaded.out_dtype:
        out = torch.empty_like(x)  # half the host time of torch.empty
    else:
        out = torch.empty(x.shape, dtype=loaded.out_dtype, device=x.device)
    if out.numel() == 0:
        return out
    weight = aligned(weight)
    if gate is None:
        x, rows = _views(levels, x, out)
        loaded.forward(x, weight, rows, eps)
    else:
        x, gate, rows = _views(levels, x, gate, out)
        loaded.forward(x, gate, weight, rows, eps)
    return out


def backward(
    loaded: Loaded, levels: int, x: Tensor, weight: Tensor, gate: Tensor | None, dy: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(dx, dweight, dgate); dy may have any strides, what the kernel cannot reach is copied."""
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    dgate = None if gate is None else torch.empty_like(dx)
    if dx.numel() == 0:
        return dx, torch.zeros_like(weight), dgate
    config = loaded.config
    if config is None or loaded.backward is None:
        raise RuntimeError("the backward of a norm was not decided with its forward")
    hidden = x.shape[-1]
    groups = -(-(x.numel() // hidden) // config.rows_per_cta)
    ctas = min(groups, sm_count(x.device.index) * config.ctas_per_sm)
    partial = torch.empty((ctas, hidden), dtype=torch.float32, device=x.device)
    dweight = torch.empty_like(weight, memory_format=torch.contiguous_format)
    weight = aligned(weight)
    dy = fitting(dy, x, gate, levels)
    if gate is None:
        rows = _views(levels, x, dy, dx)
        loaded.backward(rows[0], weight, rows[1], rows[2], partial, dweight, eps)
    else:
        rows = _views(levels, x, gate, dy, dx, dgate)
        loaded.backward(rows[0], rows[1], weight, rows[2], rows[3], rows[4], partial, dweight, eps)
    return dx, dweight, dgate


def fitting(dy: Tensor, x: Tensor, gate: Tensor | None, levels: int) -> Tensor:
    """dy as it is where the row levels chosen for x and the gate reach its rows too, else a contiguous copy."""
    if dy.is_contiguous() and dy.data_ptr() % ALIGNMENT == 0:
        return dy
    if levels < COPY and _reachable(dy):
        tensors = (x, dy) if gate is None else (x, gate, dy)
        merged = collapse_rows(x.shape, [t.stride() for t in tensors])
        if merged is not None and len(merged) <= levels:
            return dy
    return dy.clone(memory_format=torch.contiguous_format)


def _views(levels: int, *tensors: Tensor | None) -> list[Tensor]:
    """The tensors as (rows, hidden), or (outer, inner, hidden) at two levels; copies of what a kernel cannot reach."""
    kept = [t for t in tensors if t is not None]
    first = kept[0]
    hidden = first.shape[-1]
    if levels == 1 and first.dim() == 2 and first.shape[0] != 1:
        return [_aligned(t) for t in kept]
    if levels == 1:
        return [_aligned(_one_level(t, hidden)) for t in kept]
    if levels == COPY:
        return [_aligned(t.contiguous().view(-1, hidden)) for t in kept]
    merged = collapse_rows(first.shape, [t.stride() for t in kept])
    if merged is None:
        raise RuntimeError("the row levels of a norm changed between its plan and its launch")
    outer, inner = merged if len(merged) == 2 else (1, merged[0])
    return [_aligned(_two_level(t, outer, inner, hidden)) for t in kept]


def _one_level(t: Tensor, hidden: int) -> Tensor:
    # A single row's stride is arbitrary in torch, and checked for divisibility by the kernel.
    rows = t.numel() // hidden
    if rows > 1 and not t.is_contiguous():
        stride = next(s for s, n in zip(t.stride()[-2::-1], t.shape[-2::-1], strict=True) if n != 1)
        return t.as_strided((rows, hidden), (stride, 1))
    return t.as_strided((rows, hidden), (hidden, 1))


def _two_level(t: Tensor, outer: int, inner: int, hidden: int) -> Tensor:
    """Strides of the innermost row dimension, and of the first one outside the `inner` rows."""
    strides, seen = [], 1
    for s, n in zip(t.stride()[-2::-1], t.shape[-2::-1], strict=True):
        if n == 1:
            continue
        if seen == 1 or (seen == inner and len(strides) == 1):
            strides.append(s)
        seen *= n
    inner_stride = strides[0] if strides else hidden
    outer_stride = strides[1] if len(strides) > 1 else inner * inner_stride
    return t.as_strided((outer, inner, hidden), (outer_stride, inner_stride, 1))


def _aligned(t: Tensor) -> Tensor:
    return t if t.data_ptr() % ALIGNMENT == 0 else t.clone(memory_format=torch.contiguous_format)


def builds(target: str) -> Iterator[tuple[str, Callable[[], object]]]:
    """(name, thunk that compiles into the disk cache) for the common calls on the archs that a compile target serves.

    Every hidden size has kernels of its own, so this is a list of sizes, not all that plan() can choose: the sizes of
    current models, bf16, one and two row levels. Others compile on first use, in one to three seconds.
    """
    for arch in archs.archs_of(target):
        for facts in _common_facts():
            choice = plan(facts, arch)
            if isinstance(choice, Choice) and isinstance(choice.config, NormConfigs):
                for module, config in (("any_fwd", choice.config.forward), ("any_bwd", choice.config.backward)):
                    if config is not None:
                        kernel = Kernel("norm", module, config)
                        yield f"{module} {_spoken(facts)}", partial(build_object, kernel, target)


def _common_facts() -> Iterator[NormFacts]:
    plain = [(form, None, hidden, 1) for form in FORMS for hidden in (1024, 2048, 2560, 3072, 4096, 5120, 7168, 8192)]
    heads = [(form, None, hidden, levels) for form in FORMS for hidden in (64, 128, 256) for levels in (1, 2)]
    gated = [
        (form, activation, hidden, levels)
        for form, activation in (("cast_then_weight", "silu"), ("weight_in_fp32", "sigmoid"))
        for hidden in (64, 128, 256)
        for levels in (1, 2)
    ]
    for form, activation, hidden, levels in plain + heads + gated:
        yield NormFacts(1, hidden, "bfloat16", "bfloat16", form, activation, needs_grad=True, row_levels=levels)


def _spoken(facts: NormFacts) -> str:
    parts = (facts.form, facts.activation, facts.dtype, str(facts.hidden), "heads" if facts.row_levels == 2 else None)
    return " ".join(part for part in parts if part)
