"""Shadow verification: run the first calls of each configuration on both sides, compare, quarantine on a mismatch.

Switched on by ACCEL_VERIFY=n. The caller gets our result while it agrees and upstream's when it does not. Off under
graph capture, where a non-reentrant checkpoint runs a region again (the route is fixed; a reentrant one is free to
change it), for calls that write to their arguments, and where upstream cannot run.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Hashable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from . import checkpoint
from .outcome import Choice
from .state import policy

if TYPE_CHECKING:
    from .serve import ServedCall

#: ||ours - upstream|| / ||upstream|| up to which two correct results may differ: both round to the dtype, at other
#: places. About four roundings of it.
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 1e-4, torch.float64: 1e-6}
#: Configurations compared per callable. Facts may carry lengths, so there may be any number of them.
COMPARED = 4096


def due(call: ServedCall, key: tuple[Hashable, str]) -> bool:
    """Whether this call is one of the first `policy.verify` of its configuration, and may be run twice."""
    if call.adapter.in_place or key[1] in getattr(call.adapter, "upstream_cannot_run_on", ()):
        return False
    if key[1] != "cpu" and torch.cuda.is_current_stream_capturing():
        return False
    with call.state.lock:
        seen = call.verified.get(key, 0)
        if seen >= policy.verify or (seen == 0 and len(call.verified) >= COMPARED):
            return False
        call.verified[key] = seen + 1
    return True


def run_both(
    call: ServedCall, choice: Choice, key: tuple[Hashable, str], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, str | None]:
    """Our result and None if both sides agree; else nothing, and why upstream has to run the call: it is quarantined.

    Where somebody watches what is saved for backward, a checkpoint above all, the comparison is kept from them, and the
    call they see is run afterwards.
    """
    watched = checkpoint.watched()
    with checkpoint.unwatched() if watched else contextlib.nullcontext():
        try:
            theirs = call.upstream(args, kwargs)
        # Policy: to verify must not fail a call that would be served without it. A broken device fails ours as well.
        except Exception as error:
            call.state.log_once(logging.WARNING, f"not verified, upstream raised {type(error).__name__}: {error}")
            ours, problem, again = None, None, True
        else:
            ours = call.adapter.run(choice, *args, **kwargs)
            problem, again = difference(ours, theirs), watched
            if problem is None:
                call.state.log_once(logging.INFO, f"verified {choice} for {key[0]}")
    if problem is None:
        return call.adapter.run(choice, *args, **kwargs) if again else ours, None
    problem = f"{choice} disagrees with upstream: {problem}"
    call.quarantine(key, problem)
    if policy.strict:
        raise RuntimeError(f"{call.state.name}: {problem}")
    return None, problem


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
        if not torch.equal(_not_finite(x64), _not_finite(y64)):
            return f"{where} is not finite where upstream's is, or the other way round"
        x64, y64 = x64.nan_to_num(0, 0, 0), y64.nan_to_num(0, 0, 0)
        error = float((x64 - y64).norm() / y64.norm().clamp_min(1e-30)) if y64.numel() else 0.0
        limit = TOLERANCE.get(y.dtype, 0.0)
        if error > limit:
            return f"{where} differs by {error:.2e} relative, limit {limit:.0e} for {y.dtype}"
    return None


def _not_finite(x: torch.Tensor) -> torch.Tensor:
    """0 where finite, else which kind: NaN, Inf or -Inf."""
    return torch.where(x.isfinite(), 0, x.nan_to_num(2, 1, -1))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
