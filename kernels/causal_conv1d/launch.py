"""The convolution kernels, host side: configurations, layouts, outputs, launches. Served calls pay for every line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from accel.outcome import Decline, Declined

from ..runtime import arch as archs
from ..runtime.compile import Kernel, build_object, function
from ..runtime.tensors import INDEX_NAMES, aligned, aligned_rows, dtype_name
from .config import ConvConfig, UpdateConfig
from .facts import ConvFacts
from .plan import FAMILY, FORWARD, UPDATE, plan

_loaded: dict[tuple[Any, ...], Callable[..., Any]] = {}


def forward(
    x: Tensor,  # [B, T, C]
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`causal_conv1d` on a CUDA device, of shapes that were checked. Raises Decline where no kernel takes the call."""
    key = (
        x.dtype, weight.dtype, weight.shape[1], x.shape[2] & 7, bias is None or bias.dtype, activation,
        initial_state is None or initial_state.dtype, output_final_state, cu_seqlens is None or cu_seqlens.dtype,
        x.get_device(),
    )  # fmt: skip
    launch = _loaded.get(key)
    if launch is None:
        launch = _loaded[key] = _load_forward(
            x, weight, bias, activation, initial_state, output_final_state, cu_seqlens
        )  # fmt: skip
    batch, tokens, channels = x.shape
    out = x.new_empty(batch, tokens, channels)
    final = _start(x, weight.shape[1], initial_state, cu_seqlens) if output_final_state else None
    if out.numel() == 0:
        return out, final
    launch(
        aligned_rows(x),
        aligned(weight),
        out if bias is None else aligned(bias),
        out if initial_state is None else initial_state,
        out if final is None else final,
        out if cu_seqlens is None else cu_seqlens,
        out,
    )
    return out, final


def update(
    x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None
) -> Tensor:
    """`causal_conv1d_update` on a CUDA device, x as [B, C, T]; returns [B, T, C]."""
    key = (
        x.dtype, weight.dtype, weight.shape[1], state.dtype, state.shape[2], bias is None or bias.dtype, activation,
        x.get_device(),
    )  # fmt: skip
    launch = _loaded.get(key)
    if launch is None:
        launch = _loaded[key] = _load_update(x, state, weight, bias, activation)
    batch, channels, tokens = x.shape
    out = x.new_empty(batch, tokens, channels)
    if out.numel():
        weight = weight if weight.is_contiguous() else weight.contiguous()
        launch(x, state, weight, out if bias is None else bias, out)
    return out


def _load_forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    initial: Tensor | None,
    final: bool,
    cu_seqlens: Tensor | None,
) -> Callable[..., Any]:
    arch = archs.dispatch_arch(x.device)
    facts = ConvFacts(
        mode="forward",
        dtype=dtype_name(x),
        weight_dtype=dtype_name(weight),
        n_channels=x.shape[2],
        width=weight.shape[1],
        activation=activation,
        state_dtype=None if initial is None else dtype_name(initial),
        state_len=0 if initial is None else initial.shape[2],
        device_type=x.device.type,
    )
    _require(facts, arch, FORWARD)
    _same(x, weight=weight, bias=bias, initial_state=initial)
    if cu_seqlens is not None and (cu_seqlens.dtype not in INDEX_NAMES or cu_seqlens.get_device() != x.get_device()):
        raise Decline(f"cu_seqlens is {cu_seqlens.dtype} on {cu_seqlens.device}, x is on {x.device}")
    packed = None if cu_seqlens is None else INDEX_NAMES[cu_seqlens.dtype]
    config = ConvConfig(
        dtype_name(x), weight.shape[1], bias is not None, activation, initial is not None, final, packed,
        archs.overlaps(arch),
    )  # fmt: skip
    return function(Kernel(FAMILY, FORWARD, config), archs.compile_target(arch))


def _load_update(
    x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None
) -> Callable[..., Any]:
    arch = archs.dispatch_arch(x.device)
    facts = ConvFacts(
        mode="update",
        dtype=dtype_name(x),
        weight_dtype=dtype_name(weight),
        n_channels=x.shape[1],
        width=weight.shape[1],
        activation=activation,
        state_dtype=dtype_name(state),
        state_len=state.shape[2],
        device_type=x.device.type,
    )
    _require(facts, arch, UPDATE)
    _same(x, weight=weight, bias=bias, state=state)
    config = UpdateConfig(
        dtype_name(x), weight.shape[1], bias is not None, activation, state.shape[2], archs.overlaps(arch)
    )  # fmt: skip
    return function(Kernel(FAMILY, UPDATE, config), archs.compile_target(arch))


def _require(facts: ConvFacts, arch: str, kernel: str) -> None:
    choice = plan(facts, arch)
    if isinstance(choice, Declined):
        raise Decline(choice.reason)
    if choice.kernel != kernel:
        raise Decline(f"the {choice.kernel} kernel launches nothing on {arch}")


def _same(x: Tensor, **others: Tensor | None) -> None:
    for name, t in others.items():
        if t is not None and (t.dtype != x.dtype or t.get_device() != x.get_device()):
            raise Decline(f"{name} is {t.dtype} on {t.device}, x is {x.dtype} on {x.device}")


def _start(x: Tensor, width: int, initial: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
    """Final states as sequences without tokens leave them; the kernel overwrites those of the others."""
    sequences = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if initial is None:
        return x.new_zeros(sequences, x.shape[2], width)
    size = initial.shape[2]
    return F.pad(initial, (max(width - size, 0), 0))[:, :, max(size - width, 0) :].clone(
        memory_format=torch.contiguous_format
    )


def builds(target: str) -> Iterator[tuple[str, Callable[[], object]]]:
    """(name, thunk that compiles into the disk cache) for bf16 and fp16, four taps, on the archs a target serves."""
    for arch in archs.archs_of(target):
        for dtype in ("bfloat16", "float16"):
            for bias in (False, True):
                for activation in (None, "silu"):
                    spoken = f"{dtype}{', bias' if bias else ''}, {activation or 'no activation'} ({arch})"
                    fwd = ConvConfig(dtype, 4, bias, activation, False, False, None, archs.overlaps(arch))
                    yield f"{FORWARD} {spoken}", partial(build_object, Kernel(FAMILY, FORWARD, fwd), target)
                    new = UpdateConfig(dtype, 4, bias, activation, 4, archs.overlaps(arch))
                    yield f"{UPDATE} {spoken}", partial(build_object, Kernel(FAMILY, UPDATE, new), target)
