"""Kernels whose barriers are late at random: the same device code, with a sleep in front of each wait and arrival.

Checkers of races do not see what a copy engine writes to shared memory. A missing wait, or a stage that is released too
early, shows in wrong results once the warps of a CTA fall out of step, which they do here: every wait on a barrier or a
copy, every arrival, release and atomic is preceded, half of the time, by a sleep of random length, drawn from the clock
and the warp. Only for tests: the functions are replaced while the kernel is traced, so the device files and their
hashes, what a configuration says and the kernel that serves stay what they are.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from . import cache
from . import compile as runtime

#: What waits or tells others to go on, as device code names it: in cutlass.cute.arch, and in cutlass.pipeline's ring.
ARCH = (
    "barrier",
    "barrier_arrive",
    "sync_threads",
    "mbarrier_arrive",
    "cp_async_commit_group",
    "cp_async_wait_group",
    "cp_async_bulk_commit_group",
    "cp_async_bulk_wait_group",
    "atomic_add",
)
RING = ("producer_acquire", "consumer_wait", "consumer_release")


def function(kernel: runtime.Kernel, target: str, most: int) -> Callable[..., Any]:
    """The launch function of `kernel` with sleeps of up to about `most` nanoseconds, a power of two.

    Raises CompileError.
    """
    path = build(kernel, target, most)
    module = importlib.import_module("cutlass.cute").runtime.load_module(str(path), enable_tvm_ffi=True)
    loaded: Callable[..., Any] = getattr(module, runtime.FUNCTION)
    return loaded


def build(kernel: runtime.Kernel, target: str, most: int) -> Path:
    """The object file, kept in the cache of compiled kernels as others are; no GPU is needed."""
    key = hashlib.sha256(f"{runtime.cache_key(kernel, target)} delayed {most} {_own_source()}".encode()).hexdigest()

    def write(path: Path) -> None:
        with sleeping(most):
            compiled = runtime._compile(kernel, target)
        compiled.export_to_c(str(path), function_name=runtime.FUNCTION)

    return cache.load(key) or cache.store(key, write)


@contextmanager
def sleeping(most: int) -> Iterator[None]:
    """What is traced inside sleeps in front of every wait and arrival."""
    if most < 2 or most & (most - 1):
        raise ValueError(f"most must be a power of two, got {most}")
    arch = importlib.import_module("cutlass.cute").arch
    ring = importlib.import_module("cutlass.pipeline").PipelineTmaAsync
    replaced = [
        (holder, name, getattr(holder, name)) for holder, names in ((arch, ARCH), (ring, RING)) for name in names
    ]
    try:
        for place, (holder, name, original) in enumerate(replaced):
            setattr(holder, name, _late(original, place, most))
        yield
    finally:
        for holder, name, original in replaced:
            setattr(holder, name, original)


def _late(original: Callable[..., Any], place: int, most: int) -> Callable[..., Any]:
    @functools.wraps(original)
    def late(*args: Any, **kwargs: Any) -> Any:
        _sleep(place, most)
        return original(*args, **kwargs)

    return late


def _sleep(place: int, most: int) -> None:
    """Traced: sleep for a random number of nanoseconds below `most`, half of the time for none."""
    cutlass = importlib.import_module("cutlass")
    arch = importlib.import_module("cutlass.cute").arch
    word = cutlass.Uint32
    clock = word(arch.clock())
    warp = word(arch.thread_idx()[0]) >> word(5)  # not warp_idx(), which exchanges with lanes that may be elsewhere
    drawn = (clock ^ warp * word(0x9E3779B9) ^ word(place * 0x85EBCA6B & 0xFFFFFFFF)) * word(0xC2B2AE35)
    length = (drawn >> word(8) & word(most - 1)) * (drawn >> word(30) & word(1))
    arch.inline_ptx("nanosleep.u32 {$r0};", read_only_args=[length])


@functools.cache
def _own_source() -> str:
    return hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
