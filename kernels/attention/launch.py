"""From tensors to the kernel: the facts of a call, the numbers that stand for its mask, the outputs, and the launch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from accel.outcome import Choice, Decline, Declined

from ..runtime import arch as archs
from ..runtime.compile import Kernel, build_object, function
from ..runtime.launch import sm_count
from . import decode as decoding
from . import masks
from .config import FwdConfig
from .decode import decode
from .decode_config import DecodeConfig
from .facts import AttentionFacts, read
from .mask_config import ClassifyConfig
from .masks import FAR
from .plan import DTYPES, FAMILY, forward_config, plan
from .sm80_config import Sm80Config, sm80_config

CAUSAL = ("none", "top_left", "bottom_right")
EVERY = 2**31 - 1  #: CTAs: one for every tile
REMEMBERED = 4096
#: by device: the function, and the CTAs to ask for, 0 where it takes no number of them
_loaded: dict[tuple[FwdConfig | Sm80Config, int], tuple[Callable[..., Any], int]] = {}
_choices: dict[tuple[AttentionFacts, int], FwdConfig | Sm80Config | DecodeConfig] = {}


def arguments(causal: bool | str, window: tuple[int, int] | None, scale: float | None) -> str:
    """`AttentionFacts.causal` of a call; raises ValueError for what no call may ask for."""
    diagonal = causal if isinstance(causal, str) else ("top_left" if causal else "none")
    if diagonal not in CAUSAL:
        raise ValueError(f"causal must be a bool or one of {', '.join(CAUSAL)}, got {causal!r}")
    if window is not None and (len(window) != 2 or min(window) < -1):
        raise ValueError(f"window must be two bounds of -1 or more, got {window!r}")
    if scale is not None and not scale > 0:
        raise ValueError(f"scale must be positive, got {scale!r}")
    return diagonal


def facts_of(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: str,
    window: tuple[int, int] | None,
    lse: bool,
    needs_grad: bool,
    mask: Tensor | None = None,
) -> AttentionFacts:
    """The facts of a call, from metadata alone: fake tensors do."""
    facts = read(q, k, v, mask, causal=causal, needs_grad=needs_grad, lse=lse)
    return facts if window is None else replace(facts, window=window)


def config_of(facts: AttentionFacts, device: torch.device) -> FwdConfig | Sm80Config | DecodeConfig:
    """What plan() chose. Raises Decline if nothing serves the call."""
    decoding.on_cuda(device)
    index = torch.cuda.current_device() if device.index is None else device.index
    config = _choices.get((facts, index))
    if config is None:
        choice = plan(facts, archs.dispatch_arch(device))
        if isinstance(choice, Declined):
            raise Decline(choice.reason)
        if len(_choices) >= REMEMBERED:
            _choices.clear()
        config = _choices[facts, index] = choice.config  # type: ignore[assignment]
    return config


def run(
    config: FwdConfig | Sm80Config | DecodeConfig,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None = None,
    causal: str = "none",
    window: tuple[int, int] | None = None,
    scale: float | None = None,
    seqlen_dim: int = 2,
    reuse: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """(out, lse or None) of a call that plan() gave `config` for, whichever kernel it belongs to.

    out is (batch, heads, seqlen_q, head_dim_v), or with `seqlen_dim=1` (batch, seqlen_q, heads, head_dim_v), which is
    how it lies in memory. `reuse`: what an earlier call found out about the same mask may be used, see masks.py.

    Raises Decline on anything but CUDA, and as `forward` does.
    """
    if isinstance(config, DecodeConfig):
        return decode(q, k, v, mask=mask, causal=causal, scale=scale, lse=config.lse, seqlen_dim=seqlen_dim)
    return forward(
        config, q, k, v, mask=mask, causal=causal, window=window, scale=scale, seqlen_dim=seqlen_dim, reuse=reuse
    )


def forward(
    config: FwdConfig | Sm80Config,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None = None,
    causal: str = "none",
    window: tuple[int, int] | None = None,
    scale: float | None = None,
    seqlen_dim: int = 2,
    reuse: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """(out, lse or None) of a call that `config` serves; out is contiguous as (batch, seqlen_q, heads, head_dim_v), the
    layout in which model code goes on, and a view of that with seqlen_q in dimension 2 unless `seqlen_dim` is 1.

    Raises Decline during graph capture if the kernel is not loaded yet.
    """
    batch, heads, seqlen_q, head_dim = q.shape
    seqlen_k = k.shape[2]
    launch, ctas = loaded(config, q)
    stored = q.new_empty(batch, seqlen_q, heads, v.shape[3])
    out = stored.transpose(1, 2)
    found = out if seqlen_dim == 2 else stored
    lse = q.new_empty(batch, heads, seqlen_q, dtype=torch.float32) if config.lse else None
    if seqlen_k == 0:
        return found.zero_(), None if lse is None else lse.fill_(-torch.inf)
    if batch == 1 or heads == 1 or seqlen_q == 1 or seqlen_k == 1 or k.shape[1] == 1:
        q, k, v = reachable(q, k, v)
    offset = 0 if causal == "top_left" else seqlen_k - seqlen_q
    left, right = bounds(causal, window)
    if scale is None:
        scale = head_dim**-0.5
    tensors = (q, k, v, out) if lse is None else (q, k, v, out, lse)
    number = (ctas,) if ctas else ()
    if mask is None:
        launch(*tensors, scale, offset, left, right, *number)
    else:
        if mask.device != q.device:
            raise ValueError(f"the mask is on {mask.device}, q on {q.device}")
        where = (0, FAR, FAR) if left == right == FAR else (offset, left, right)
        lists = masks.tile_lists(mask, batch, heads, seqlen_q, *where, reuse=reuse)
        launch(*tensors, *lists, scale, *number)
    return found, lse


def loaded(config: FwdConfig | Sm80Config, q: Tensor) -> tuple[Callable[..., Any], int]:
    """The launch function for q's device, and the CTAs to ask for; 0: it takes no number of them."""
    index = q.get_device()
    found = _loaded.get((config, index))
    return found if found is not None else _load(config, q.device, index)


def _load(config: FwdConfig | Sm80Config, device: torch.device, index: int) -> tuple[Callable[..., Any], int]:
    decoding.on_cuda(device)
    target = archs.compile_target(archs.dispatch_arch(device))
    if config.kind == "mask":
        masks.load(device)
    if isinstance(config, Sm80Config):
        found = function(Kernel(FAMILY, "sm80_fwd", config), target), 0
    else:
        ctas = sm_count(index) if config.persistent else EVERY
        found = function(Kernel(FAMILY, "sm90_fwd", config), target), ctas
    _loaded[config, index] = found
    return found


def bounds(causal: str, window: tuple[int, int] | None) -> tuple[int, int]:
    """Keys seen before and after the diagonal."""
    left, right = (-1, -1) if window is None else window
    if causal != "none":
        right = 0
    return FAR if left < 0 else min(left, FAR), FAR if right < 0 else min(right, FAR)


def reachable(*tensors: Tensor) -> list[Tensor]:
    """The same elements, with a stride that TMA takes where a dimension of size 1 has any other."""
    bits = 0
    for t in tensors:
        strides = t.stride()
        bits |= strides[0] | strides[1] | strides[2]
    if not bits % 8:
        return list(tensors)
    found = []
    for t in tensors:
        shape = t.shape
        step = -(-shape[3] // 8) * 8
        fixed = [s if n > 1 else step for n, s in zip(shape[:3], t.stride()[:3], strict=True)]
        found.append(t.as_strided(shape, (*fixed, 1)))
    return found


def builds(target: str) -> Iterator[tuple[str, Callable[[], object]]]:
    """(name, thunk that compiles into the disk cache) for the head dims of current models, on the archs of a target."""
    yield from decoding.builds(target)
    yield masks.KERNEL, partial(build_object, Kernel(FAMILY, masks.KERNEL, ClassifyConfig()), target)
    for arch in archs.archs_of(target):
        for dtype in DTYPES:
            for head_dim, head_dim_v in ((64, 64), (72, 72), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256)):
                for kind in ("full", "causal", "mask") if arch == "sm_90" else ("causal", "mask"):
                    what = (dtype, head_dim, head_dim_v, kind, False)
                    config = forward_config(*what) if arch == "sm_90" else sm80_config(*what, arch)
                    module = "sm90_fwd" if arch == "sm_90" else "sm80_fwd"
                    name = f"{module} {dtype} {head_dim}" + (f"/{head_dim_v}" if head_dim != head_dim_v else "")
                    if config is not None:
                        yield f"{name} {kind}", partial(build_object, Kernel(FAMILY, module, config), target)


__all__ = ["Choice", "bounds", "builds", "config_of", "facts_of", "forward", "run"]
