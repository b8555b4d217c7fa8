"""Which CUDA graph capture is under way on a stream."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any


def capture_id(stream: int) -> int | None:
    """A number that no two captures of a process share; None where the driver does not tell."""
    try:
        ask = _driver()
    except (OSError, AttributeError):
        return None
    status, number = ctypes.c_int(0), ctypes.c_uint64(0)
    failed = ask(ctypes.c_void_p(stream), ctypes.byref(status), ctypes.byref(number))
    return None if failed or status.value != 1 else number.value


@cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1").cuStreamGetCaptureInfo
