"""Shadow verification: run the first calls of each configuration on both sides, compare, quarantine on a mismatch.

Switched on by ACCEL_VERIFY=n. The caller gets our result while it agrees and upstream's when it does not. Off under
graph capture, in a checkpoint's recomputation, and for calls that write to their arguments.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Hashable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from .outcome import Choice
from .state import policy

if TYPE_CHECKING:
    from .serve import ServedCall

#: ||ours - upstream|| / ||upstream|| up to which two correct results may differ: both round to the dtype, at other
#: places. About four roundings of it.
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 1e-4, torch.float64: 1e-6}

_lock = threading.Lock()
_seen: dict[tuple[int, Hashable], int] = {}


def due(call: ServedCall, key: Hashable) -> bool:
    """Whether this call is one of the first `policy.verify` of its configuration, and may be run twice."""
    if torch._C._current_graph_task_id() != -1:
        return False
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return False
    with _lock:
        seen = _seen.get((id(call), key), 0)
        if seen >= policy.verify or len(_seen) >= 4096:
            return False
        _seen[id(call), key] = seen + 1
    return True


def run_both(
    call: ServedCall, choice: Choice, key: tuple[Hashable, str], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Both results; ours if they agree, else upstream's with the configuration quarantined."""
    theirs = call.upstream(args, kwargs)
    ours = call.adapter.run(choice, *args, **kwargs)
    problem = difference(ours, theirs)
    if problem is None:
        call.state.log_once(logging.INFO, f"verified {choice} for {key[0]}")
        return ours
    call.quarantine(key, f"{choice} disagrees with upstream: {problem}")
    if policy.strict:
        raise RuntimeError(f"{call.state.name}: {choice} disagrees with upstream: {problem}")
    return theirs


def difference(ours: Any, theirs: Any) -> str | None:
    """The first way in which two results differ by more than rounding, as a line; None if they agree."""
    a, b = list(_tensors(ours)), list(_tensors(theirs))
    if len(a) != len(b):
        return f"{len(a)} tensors, upstream returns {len(b)}"
    for index, (x, y) in enumerate(zip(a, b, strict=True)):
        where = f"output {index}" if len(a) > 1 else "the output"
        if x.shape != y.shape or x.dtype != y.dtype:
            return f"{where} is {tuple(x.shape)} {x.dtype}, upstream's {tuple(y.shape)} {y.dtype}"
        x64, y64 = x.detach().double(), y.detach().double()
        if not torch.equal(x64.isfinite(), y64.isfinite()):
            return f"{where} is not finite where upstream's is, or the other way round"
        x64, y64 = x64.nan_to_num(0, 0, 0), y64.nan_to_num(0, 0, 0)
        error = float((x64 - y64).norm() / y64.norm().clamp_min(1e-30)) if y64.numel() else 0.0
        limit = TOLERANCE.get(y.dtype, 0.0)
        if error > limit:
            return f"{where} differs by {error:.2e} relative, limit {limit:.0e} for {y.dtype}"
    return None


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
