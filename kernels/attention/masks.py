"""Boolean masks, host side: classified on the device, and the result kept for the next call with the same mask.

A model hands the same mask to every layer. What `any_classify.py` makes of it is kept as long as the mask lives, and
used again if nothing that it depends on has changed:

- the storage itself (not its address, which the next mask may get), the view of it, and its version: every operation of
  torch that writes to a tensor raises the version of all its views. Writes that torch is not told of (through `.data`,
  DLPack, numpy, another library's kernel, the replay of a CUDA graph) do not; after one, call `forget()` or hand the
  mask on as a new tensor.
- causality, the window, and the shape of the scores.
- the stream: work of one stream runs in order, so there is no waiting for events; another stream classifies anew.
- the capture of a CUDA graph. A replay must classify what is in the mask then, so nothing made outside of a capture is
  used inside, and the other way round; inside, one classification serves all layers.

A tensor made in inference mode has no version, and compiled code may put another mask into the same memory without
raising one: both are classified in every call.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..runtime import arch as archs
from ..runtime.capture import capture_id
from ..runtime.compile import Kernel, function
from .mask_config import BLOCK, CHUNK, TILE, ClassifyConfig

FAMILY, KERNEL = "attention", "any_classify"
FAR = 2**30  #: a bound that cuts nothing; lengths stay below it
KEPT = 16  #: classified masks that are kept at once; each takes an eighth of its mask's memory

Lists = tuple[Tensor, Tensor, Tensor]  #: counts, lists, bits: see any_classify.py


@dataclass(frozen=True, slots=True)
class _Entry:
    storage: weakref.ref[Any]
    capture: int  #: 0: none
    lists: Lists


_entries: dict[tuple[Any, ...], _Entry] = {}
_lock = threading.Lock()
_loaded: dict[int, Callable[..., Any]] = {}


def tile_lists(
    mask: Tensor,
    batch: int,
    heads_q: int,
    seqlen_q: int,
    offset: int = 0,
    left: int = FAR,
    right: int = FAR,
    *,
    reuse: bool = True,
) -> Lists:
    """counts, lists and bits of a boolean mask (batch or 1, heads_q or 1, seqlen_q or 1, seqlen_k) of any strides.

    Query i also sees only the keys from i + offset - left to i + offset + right. What comes back is expanded to
    (batch, heads_q, blocks of queries, ...), and must not be written to. `reuse`: it may be that of an earlier call.

    Raises Decline during graph capture if the kernel is not loaded yet.
    """
    index = mask.get_device()
    load(mask.device)
    if not reuse or mask.is_inference():
        return _classified(mask, batch, heads_q, seqlen_q, offset, left, right)
    capture, stream = _place(index)
    if capture is None:
        return _classified(mask, batch, heads_q, seqlen_q, offset, left, right)
    storage = mask.untyped_storage()
    key = (
        mask.data_ptr(), mask.shape, mask.stride(), mask._version, index, stream, capture,
        batch, heads_q, seqlen_q, offset, left, right,
    )  # fmt: skip
    with _lock:
        entry = _entries.get(key)
        if entry is not None and entry.storage() is storage:
            return entry.lists
        lists = _classified(mask, batch, heads_q, seqlen_q, offset, left, right)
        _keep(key, storage, capture, lists)
        return lists


def forget() -> None:
    """Drop every result that is kept."""
    _entries.clear()


def load(device: torch.device) -> Callable[..., Any]:
    """The classifying kernel of a device, loaded or compiled on first use."""
    index = torch.cuda.current_device() if device.index is None else device.index
    launch = _loaded.get(index)
    if launch is None:
        target = archs.compile_target(archs.dispatch_arch(device))
        launch = _loaded[index] = function(Kernel(FAMILY, KERNEL, ClassifyConfig()), target)
    return launch


def _keep(key: tuple[Any, ...], storage: Any, capture: int, lists: Lists) -> None:
    """Remember `lists` as long as `storage` lives; the oldest ones go, and those of captures that are over."""
    for other, entry in list(_entries.items()):
        if entry.capture not in (0, capture) or entry.storage() is None:
            _entries.pop(other, None)
    while len(_entries) >= KEPT:
        _entries.pop(next(iter(_entries)), None)
    # The callback takes no lock: it may run anywhere, also in a thread that holds it.
    _entries[key] = _Entry(weakref.ref(storage, lambda _: _entries.pop(key, None)), capture, lists)


def _place(index: int) -> tuple[int | None, int]:
    """(the capture under way, 0 without one, None if it cannot be told apart from others; the stream)."""
    stream = torch._C._cuda_getCurrentRawStream(index)
    if not torch._C._cuda_isCurrentStreamCapturing():
        return 0, stream
    return capture_id(stream), stream


def _classified(mask: Tensor, batch: int, heads_q: int, seqlen_q: int, offset: int, left: int, right: int) -> Lists:
    """Two kernels on the current stream."""
    for dimension in range(3):
        if mask.size(dimension) > 1 and mask.stride(dimension) == 0:
            mask = mask.narrow(dimension, 0, 1)
    mask_batch, mask_heads, rows, seqlen_k = mask.shape
    free = left >= FAR and right >= FAR
    queries = 1 if rows == 1 and free else seqlen_q
    blocks, tiles = -(-queries // BLOCK), -(-seqlen_k // TILE)

    def empty(*shape: int) -> Tensor:
        return torch.empty(mask_batch, mask_heads, blocks, *shape, dtype=torch.int32, device=mask.device)

    states, counts, lists = empty(-(-seqlen_k // CHUNK)), empty(2), empty(tiles)
    bits = empty(tiles, 1 if queries == 1 else BLOCK, 4)
    launch = load(mask.device)
    launch(mask.view(torch.uint8), states, counts, lists, bits, access(mask), queries, offset, left, right)
    shape = (batch, heads_q, -(-seqlen_q // BLOCK))
    return counts.expand(*shape, 2), lists.expand(*shape, tiles), bits.expand(*shape, tiles, BLOCK, 4)


def access(mask: Tensor) -> int:
    """How the kernel may read the rows of a mask: 2, 1 or 0, see `Classify`."""
    *strides, along = mask.stride()
    if along != 1 and mask.size(3) > 1:
        return 0
    bits = mask.data_ptr()
    for size, stride in zip(mask.shape[:3], strides, strict=True):
        if size > 1:
            bits |= stride
    return 1 if bits % 16 else 2


__all__ = ["FAR", "KEPT", "Lists", "access", "forget", "load", "tile_lists"]
