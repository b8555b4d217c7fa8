"""From a kernel's description to a function that launches it: memory, then the disk cache, then the compiler.

A kernel is (family, module, config, target). Its device module lives in kernels/<family>/<module>.py and offers
`build(config) -> (traceable host function, stand-in arguments)`. Stand-ins have symbolic shapes, so one compiled kernel
serves every length. What comes back is the raw tvm-ffi function: positional arguments, torch tensors passed as they
are, torch's current stream, argument checks compiled in.

The compiler is imported only to compile. A warm start loads an object file: linked by the C compiler into a library
that needs the DSL's runtime library alone, or, without a C compiler, by the DSL's own loader. Compiling needs no GPU,
for any target.
"""

from __future__ import annotations

import ast
import ctypes
import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accel.outcome import CompileError, Decline

from . import cache

FUNCTION = "accel_kernel"  #: the exported symbol; every object file holds one function
_KERNELS = Path(__file__).resolve().parent.parent
_PACKAGE = __package__.rpartition(".")[0]
_lock = threading.RLock()
_functions: dict[tuple[Any, ...], Callable[..., Any]] = {}


@dataclass(frozen=True, slots=True)
class Kernel:
    """One compiled kernel: which device module, in which configuration."""

    family: str
    module: str  #: file name under kernels/<family>/, without .py
    config: Hashable  #: a frozen dataclass; its repr is part of the cache key

    def __str__(self) -> str:
        return f"{self.family}.{self.module} {self.config}"


@dataclass(frozen=True, slots=True)
class Compiled:
    """What compiling for a target produced, for checks on a machine without a GPU."""

    object_file: bytes = field(repr=False)
    cubin: bytes = field(repr=False)
    ptx: str = field(repr=False)


def function(kernel: Kernel, target: str) -> Callable[..., Any]:
    """The launch function, loaded or compiled on first use. One compilation per kernel, whatever the number of threads.

    Raises Decline during CUDA graph capture if the kernel is not loaded yet, CompileError if it cannot be built.
    """
    loaded = _functions.get((kernel, target))
    if loaded is not None:
        return loaded
    if _is_capturing():
        raise Decline(f"{kernel.family}.{kernel.module} is not loaded during graph capture: run one call before")
    with _lock:
        loaded = _functions.get((kernel, target))
        if loaded is None:
            loaded = _functions[kernel, target] = _load(kernel, target)
        return loaded


def is_loaded(kernel: Kernel, target: str) -> bool:
    return (kernel, target) in _functions


def build_object(kernel: Kernel, target: str) -> str:
    """Fill the cache for a target without loading anything; returns the cache key. No GPU is needed."""
    with _lock:
        _object_path(kernel, target)
    return cache_key(kernel, target)


def compile_only(kernel: Kernel, target: str) -> Compiled:
    """Compile and hand back the artefacts; touches no cache and no GPU."""
    with _lock, tempfile.TemporaryDirectory(prefix="accel-") as folder:
        compiled = _compile(kernel, target, f"--keep-cubin --keep-ptx --dump-dir={folder}")
        path = Path(folder) / "kernel.o"
        compiled.export_to_c(str(path), function_name=FUNCTION)
        return Compiled(path.read_bytes(), compiled.__cubin__, compiled.__ptx__)


def cache_key(kernel: Kernel, target: str) -> str:
    """sha256 over everything the object file depends on."""
    parts = (source_digest(kernel.family, kernel.module), *_versions(), target, repr(kernel.config), kernel.module)
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


@functools.cache
def source_digest(family: str, module: str) -> str:
    """sha256 over the device module and the kernels/ files that it imports, however deep."""
    digest = hashlib.sha256()
    seen: set[Path] = set()
    pending = [_KERNELS / family / f"{module}.py"]
    while pending:
        path = pending.pop()
        if path in seen:
            continue
        seen.add(path)
        pending.extend(_imported(path))
    for path in sorted(seen):
        digest.update(path.relative_to(_KERNELS).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _imported(path: Path) -> list[Path]:
    """The files under kernels/ that a file imports with `from ... import`."""
    found = []
    for node in ast.walk(ast.parse(path.read_bytes())):
        if not isinstance(node, ast.ImportFrom):
            continue
        parts = node.module.split(".") if node.module else []
        if node.level or parts[:2] == ["accel", "kernels"]:
            folder = path.parents[node.level - 1].joinpath(*parts) if node.level else _KERNELS.joinpath(*parts[2:])
            candidates = [folder.with_suffix(".py"), *(folder / f"{name.name}.py" for name in node.names)]
            found += [c for c in candidates if c.is_file() and _KERNELS in c.parents]
    return found


@functools.cache
def _versions() -> tuple[str, ...]:
    return tuple(importlib.metadata.version(name) for name in ("nvidia-cutlass-dsl", "apache-tvm-ffi"))


def _is_capturing() -> bool:
    torch = sys.modules.get("torch")
    return bool(torch is not None and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())


def _object_path(kernel: Kernel, target: str) -> Path:
    """The object file of a kernel, from the disk cache or freshly compiled into it."""
    key = cache_key(kernel, target)
    return cache.load(key) or cache.store(
        key, lambda path: _compile(kernel, target).export_to_c(str(path), function_name=FUNCTION)
    )


def _compile(kernel: Kernel, target: str, options: str = "") -> Any:
    try:
        cute = importlib.import_module("cutlass.cute")
        device = importlib.import_module(f"{_PACKAGE}.{kernel.family}.{kernel.module}")
        host, arguments = device.build(kernel.config)
        return cute.compile(host, *arguments, options=f"--enable-tvm-ffi --gpu-arch={target} {options}".strip())
    except Exception as error:
        raise CompileError(f"{kernel} does not compile for {target}: {type(error).__name__}: {error}") from error


@functools.cache
def _private_folder() -> tempfile.TemporaryDirectory[str]:
    """A folder of this process alone (0700, removed at exit)."""
    return tempfile.TemporaryDirectory(prefix="accel-kernels-")


def _load(kernel: Kernel, target: str) -> Callable[..., Any]:
    """Load a kernel; an entry of the cache that passes its hash and still does not load is built once more."""
    key = cache_key(kernel, target)
    load = _load_linked if _c_compiler() and _runtime_library() else _load_object
    for attempt in range(2):
        try:
            return load(kernel, target, key)
        except CompileError:
            raise
        except Exception as error:
            if attempt == 1:
                raise CompileError(f"{kernel} does not load for {target}: {type(error).__name__}: {error}") from error
            for stored in (key, _linked_key(key)):
                cache.discard(stored, f"it does not load: {error}")
    raise AssertionError("unreachable")


def _load_linked(kernel: Kernel, target: str, key: str) -> Callable[..., Any]:
    """From a shared library, which needs the DSL's runtime library only: under a millisecond."""
    import tvm_ffi

    def link(path: Path) -> None:
        command = [str(_c_compiler()), "-shared", "-o", str(path), str(_object_path(kernel, target))]
        subprocess.run(command, check=True, capture_output=True)

    stored = cache.load(_linked_key(key)) or cache.store(_linked_key(key), link)
    _preload(_runtime_library())
    # tvm-ffi chooses its loader by the suffix; the cache names every entry .o
    name = Path(_private_folder().name) / f"{key}-{os.getpid()}.so"
    name.unlink(missing_ok=True)
    name.symlink_to(stored)
    return tvm_ffi.load_module(str(name))[FUNCTION]


def _load_object(kernel: Kernel, target: str, key: str) -> Callable[..., Any]:
    """Through the DSL's own loader, where there is no C compiler: imports the whole DSL, which takes seconds."""
    cute = importlib.import_module("cutlass.cute")
    module = cute.runtime.load_module(str(_object_path(kernel, target)), enable_tvm_ffi=True)
    return getattr(module, FUNCTION)


def _linked_key(key: str) -> str:
    return hashlib.sha256(f"{key} linked".encode()).hexdigest()


@functools.cache
def _c_compiler() -> str | None:
    return next(filter(None, (shutil.which(name) for name in (os.environ.get("CC", "cc"), "gcc", "clang"))), None)


@functools.cache
def _preload(runtime: Path) -> ctypes.CDLL:
    return ctypes.CDLL(str(runtime), mode=ctypes.RTLD_GLOBAL)


@functools.cache
def _runtime_library() -> Path | None:
    """The DSL's runtime library for torch's CUDA version, found without importing the DSL."""
    spec = importlib.util.find_spec("cutlass")
    if spec is None or spec.origin is None:
        return None
    root = Path(spec.origin).parents[2]
    torch = sys.modules.get("torch")
    major = (getattr(torch.version, "cuda", None) or "13").split(".")[0] if torch is not None else "13"
    for folder in (f"cu{major}", "cu13", "cu12"):
        path = root / folder / "lib" / "libcute_dsl_runtime.so"
        if path.exists():
            return path
    return None


def _after_fork() -> None:
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_after_fork)
