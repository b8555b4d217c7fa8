"""What `emulate` computes with: global memory that checks its accesses, and the arithmetic of PTX in numpy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np


class EmulationError(Exception):
    """The program did something that a GPU would not define, or that is not modelled."""


@dataclass
class Memory:
    """Global memory: the arrays that were passed in, at made-up addresses with unmapped space between them."""

    regions: list[tuple[int, np.ndarray]] = field(default_factory=list)
    _next: int = 1 << 32

    def place(self, array: np.ndarray) -> int:
        """Map the bytes of a C-contiguous array; returns its address, a multiple of 256."""
        flat = array.reshape(-1).view(np.uint8)
        address = self._next
        self.regions.append((address, flat))
        self._next += (len(flat) + 4096) // 256 * 256 + 256
        return address

    def span(self, address: int, size: int) -> np.ndarray:
        for start, flat in self.regions:
            if start <= address and address + size <= start + len(flat):
                return flat[address - start : address - start + size]
        raise EmulationError(f"access of {size} bytes at {address:#x}, outside every array")


def trunc(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Integer division that rounds towards zero; by zero it is by one."""
    b = np.where(b == 0, 1, b).astype(np.int64)
    return (np.abs(a.astype(np.int64)) // np.abs(b) * np.sign(a.astype(np.int64)) * np.sign(b)).astype(a.dtype)


def shift(a: np.ndarray, n: np.ndarray, function: Callable[..., np.ndarray]) -> np.ndarray:
    """PTX shifts: by the width or more gives zero, or the sign."""
    bits = 8 * a.dtype.itemsize
    shifted = function(a, np.minimum(n, bits - 1).astype(a.dtype))
    beyond = shifted if a.dtype.kind == "i" and function is np.right_shift else np.zeros_like(a)
    return np.where(n >= bits, beyond, shifted).astype(a.dtype)


def to_bf16(x: np.ndarray) -> np.ndarray:
    """The bits of x rounded to bfloat16, to nearest even."""
    bits = x.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(x), np.uint32(0x7FFF), rounded).astype(np.uint16)


def from_bf16(x: np.ndarray) -> np.ndarray:
    """float32 of bfloat16 bits."""
    return (x.astype(np.uint32) << np.uint32(16)).view(np.float32)
