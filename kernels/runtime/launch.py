"""Small helpers that every family's launcher needs. They run on each served call, so they count in nanoseconds."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache


@cache
def sm_count(index: int) -> int:
    """Streaming multiprocessors of a CUDA device."""
    import torch

    return int(torch.cuda.get_device_properties(index).multi_processor_count)


def collapse_rows(shape: Sequence[int], strides: Sequence[Sequence[int]]) -> tuple[int, ...] | None:
    """Leading dimensions of `shape` merged as far as every tensor allows; `strides` are theirs, one list a tensor.

    All but the last dimension are rows. Returns the merged extents (outermost first, 1 or 2 of them), or None where
    more than two levels would be left. Dimensions of extent 1 merge with anything; a tensor without rows is one level.
    """
    rows = [(n, d) for d, n in enumerate(shape[:-1]) if n != 1]
    if not rows:
        return (1,)
    if any(n == 0 for n, _ in rows):
        return (0,)
    merged = [rows[-1][0]]
    inner = rows[-1]
    for n, d in reversed(rows[:-1]):
        if all(s[d] == s[inner[1]] * inner[0] for s in strides):
            merged[0] *= n
        else:
            merged.insert(0, n)
        inner = (n, d)
    return tuple(merged) if len(merged) <= 2 else None
