"""Decode, host side: the configuration of a call, how many CTAs share its keys, the scratch buffer, the launch.

Kept short on purpose: every token of every layer pays for each line of `decode`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from accel.outcome import Decline

from ..runtime import arch as archs
from ..runtime.capture import capture_id
from ..runtime.compile import Kernel, build_object, function
from ..runtime.launch import sm_count
from .decode_config import COUNTERS, DTYPES, HEAD_DIMS, DecodeConfig
from .decode_plan import KERNEL, bundle_for, decode_config, splits_for

FAMILY = "attention"
_NAMES = {torch.bfloat16: "bfloat16", torch.float16: "float16"}
_loaded: dict[tuple[Any, ...], tuple[Callable[..., Any], DecodeConfig, int]] = {}


def decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None = None,
    causal: str = "none",
    scale: float | None = None,
    lse: bool = False,
    splits: int | None = None,
    seqlen_dim: int = 2,
) -> tuple[Tensor, Tensor | None]:
    """softmax(scale * q @ k.T + mask) @ v for up to 16 q positions, 64 packed rows (q positions x q heads of a group).

    q (batch, heads_q, seqlen_q, head_dim), k and v (batch, heads_kv, seqlen_k, ...), contiguous last dimension, rows at
    multiples of 16 bytes. mask: boolean (batch or 1, heads_q or 1, seqlen_q or 1, seqlen_k), any strides, True: attend.
    causal: "none", "top_left" (query i sees key j if j <= i) or "bottom_right" (if j - seqlen_k <= i - seqlen_q).
    `splits`, the CTAs that share the keys of a (batch, kv head), is chosen from the shapes.

    Returns (batch, heads_q, seqlen_q, head_dim_v), or with `seqlen_dim=1` (batch, seqlen_q, heads_q, head_dim_v), which
    is how it lies in memory, and the (batch, heads_q, seqlen_q) log-sum-exp or None. A row that sees no key gives 0 and
    -inf.

    Raises Decline during graph capture if the kernel is not loaded yet, and for tensors that no kernel can reach.
    """
    batch, heads_q, seqlen_q, head_dim = q.shape
    _, heads_kv, seqlen_k, head_dim_v = v.shape
    if mask is None:
        kind = "none"
    else:
        kind, mask = flattened(mask)
    rows = heads_q // heads_kv * seqlen_q
    index = q.get_device()
    key = (q.dtype, head_dim, head_dim_v, (rows + 15) >> 4, kind, lse, index)
    found = _loaded.get(key)
    if found is None:
        found = _loaded[key] = load(_NAMES.get(q.dtype, str(q.dtype)), head_dim, head_dim_v, rows, kind, lse, q.device)
    launch, config, slots = found
    out = q.new_empty(batch, seqlen_q, heads_q, head_dim_v)  # 0.8 us less than torch.empty with its keywords
    sums = q.new_empty(batch, heads_q, seqlen_q, dtype=torch.float32) if lse else None
    if seqlen_k == 0:
        out.zero_()
        return out if seqlen_dim == 1 else out.transpose(1, 2), None if sums is None else sums.fill_(-math.inf)
    if (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15:
        raise Decline("q, k or v does not start at a multiple of 16 bytes")
    pairs = batch * heads_kv
    partial_bytes, threads = rows * head_dim_v * 4, config.threads
    if splits is None:
        stretches = -(-seqlen_k // config.stretch)
        splits = splits_for(pairs, stretches, slots, config.ctas_per_sm, config.stretch_bytes, partial_bytes, threads)
    bundle = bundle_for(pairs, splits, partial_bytes, threads)
    scratch = _scratch(index, pairs * partials_of(splits, bundle) * rows * (head_dim_v + 4))
    numbers = (
        splits,
        bundle,
        (head_dim**-0.5 if scale is None else scale) * 1.4426950408889634,
        seqlen_k if causal == "none" else 0 if causal == "top_left" else seqlen_k - seqlen_q,
    )
    tensors = (q, k, v, out) if mask is None else (q, k, v, mask, out)
    if sums is None:
        launch(*tensors, scratch, *numbers)
    else:
        launch(*tensors, sums, scratch, *numbers)
    return out if seqlen_dim == 1 else out.transpose(1, 2), sums


def partials_of(splits: int, bundle: int) -> int:
    """Partial results of a (batch, kv head): of its CTAs, and the sums of their bundles."""
    return 0 if splits == 1 else splits if bundle >= splits else splits - splits // -bundle


def flattened(mask: Tensor) -> tuple[str, Tensor]:
    """(mask kind, the mask as bytes), without dimensions that only repeat."""
    _, heads, positions, _ = mask.shape
    _, per_head, per_q, _ = mask.stride()
    if heads > 1 and per_head == 0:
        mask, heads = mask[:, :1], 1
    if positions > 1 and per_q == 0:
        mask, positions = mask[:, :, :1], 1
    return "keys" if heads == 1 and positions == 1 else "rows", mask.view(torch.uint8)


def load(
    dtype: str, head_dim: int, head_dim_v: int, rows: int, mask: str, lse: bool, device: torch.device
) -> tuple[Callable[..., Any], DecodeConfig, int]:
    """(launch function, configuration, CTAs that run at once). Raises Decline where there is no such kernel."""
    on_cuda(device)
    arch = archs.dispatch_arch(device)
    config = decode_config(dtype, head_dim, head_dim_v, rows, mask, lse, arch)
    if config is None:
        raise Decline(
            f"no decode kernel on {arch} for {dtype}, head dims {head_dim} and {head_dim_v}, {rows} packed rows"
        )
    index = torch.cuda.current_device() if device.index is None else device.index
    return function(Kernel(FAMILY, KERNEL, config), archs.compile_target(arch)), config, slots_of(config, index)


def on_cuda(device: torch.device) -> None:
    """Decline everything else."""
    if device.type != "cuda":
        raise Decline(f"the attention kernels take CUDA tensors, these are on {device.type}")


def slots_of(config: DecodeConfig, index: int) -> int:
    return sm_count(index) * config.ctas_per_sm


# --- Scratch -------------------------------------------------------------------------------------------------------

_eager: dict[tuple[int, int], Tensor] = {}
_captured: dict[tuple[int, int], tuple[int, Tensor]] = {}
_unused: dict[int, Tensor] = {}


def _scratch(index: int, floats: int) -> Tensor:
    """Counters, all zero between kernels, and room for `floats` partial results, for the current stream alone.

    Kernels of one stream run one after the other, so they can share it; it grows, never shrinks. What a graph captures
    gets a buffer of that capture, from its memory pool, zeroed in the graph: replays of two graphs may overlap, and no
    buffer of the outside may be replaced under them.
    """
    if floats == 0:
        found = _unused.get(index)
        if found is None:
            found = _unused[index] = torch.empty(COUNTERS, dtype=torch.float32, device=f"cuda:{index}")
        return found
    stream = torch._C._cuda_getCurrentRawStream(index)
    needed = COUNTERS + floats
    if torch._C._cuda_isCurrentStreamCapturing():
        return _capture_scratch(index, stream, needed)
    buffer = _eager.get((index, stream))
    if buffer is None or buffer.numel() < needed:
        buffer = _eager[index, stream] = _zeroed(index, needed)
    return buffer


def _zeroed(index: int, floats: int) -> Tensor:
    size = max(1 << (floats - 1).bit_length(), 1 << 20)
    buffer = torch.empty(size, dtype=torch.float32, device=f"cuda:{index}")
    buffer[:COUNTERS].zero_()
    return buffer


def _capture_scratch(index: int, stream: int, needed: int) -> Tensor:
    capture = capture_id(stream)
    held = _captured.get((index, stream))
    if capture is not None and held is not None and held[0] == capture and held[1].numel() >= needed:
        return held[1]
    buffer = _zeroed(index, needed)
    if capture is not None:
        _captured[index, stream] = (capture, buffer)
    return buffer


def builds(target: str) -> Iterator[tuple[str, Callable[[], object]]]:
    """(name, thunk that compiles into the disk cache) for all head dims and masks, on a target's archs."""
    for arch in archs.archs_of(target):
        for dtype in DTYPES:
            for head_dim, head_dim_v in HEAD_DIMS:
                for mask, rows in (("none", 16), ("keys", 16), ("rows", 16), ("none", 32)):
                    config = decode_config(dtype, head_dim, head_dim_v, rows, mask, False, arch)
                    if config is not None:
                        name = f"{KERNEL} {dtype} {head_dim}/{head_dim_v} {rows} rows, mask {mask} ({arch})"
                        yield name, partial(build_object, Kernel(FAMILY, KERNEL, config), target)
