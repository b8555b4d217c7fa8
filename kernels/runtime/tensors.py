"""What launchers ask of tensors: dtype names, gradients, rows that 16-byte accesses reach. Served calls pay for it."""

from __future__ import annotations

import torch
from torch import Tensor

ALIGNMENT = 16  #: bytes; every access of a kernel is that wide
NAMES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}
INDEX_NAMES = {torch.int32: "int32", torch.int64: "int64"}


def dtype_name(t: Tensor) -> str:
    return NAMES.get(t.dtype) or str(t.dtype).removeprefix("torch.")


def needs_grad(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def aligned(t: Tensor) -> Tensor:
    """The tensor as it is where it is contiguous from a multiple of 16 bytes on, else a copy."""
    if t.is_contiguous() and not t.data_ptr() & (ALIGNMENT - 1):
        return t
    return t.clone(memory_format=torch.contiguous_format)


def aligned_rows(t: Tensor) -> Tensor:
    """The tensor as it is where it is contiguous, or every row is and starts at a multiple of 16 bytes; else a copy."""
    if not t.data_ptr() & (ALIGNMENT - 1) and (t.is_contiguous() or reachable(t, ALIGNMENT // t.element_size())):
        return t
    return t.clone(memory_format=torch.contiguous_format)


def reachable(t: Tensor, vector: int) -> bool:
    """Contiguous in the last dimension, the start and every row at a multiple of `vector` elements, a power of two."""
    if t.stride(-1) != 1 or t.data_ptr() & (vector * t.element_size() - 1):
        return False
    return all(n == 1 or not s & (vector - 1) for n, s in zip(t.shape[:-1], t.stride()[:-1], strict=True))
