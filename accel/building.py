"""`accel build --arch sm_90a [family ...]`: compile kernels into the cache ahead of time; no GPU is needed.

A family says what there is to compile: kernels/<family>/launch.py offers `builds(target)`, pairs of a readable name and
a callable that compiles that kernel for the compile target through the runtime, which fills the cache.
"""

from __future__ import annotations

import argparse
import importlib
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import settings
from .certificates import DSL, dsl_version
from .source_hash import device_files, kernels_folder


@dataclass(slots=True)
class BuildReport:
    """What `build` did. Kernels are named "<family>: <name>"."""

    target: str
    folder: Path
    built: list[str] = field(default_factory=list)  #: compiled now, or found in the cache
    failed: dict[str, str] = field(default_factory=dict)  #: name -> why, in one line
    added: int = 0  #: entries the cache gained
    seconds: float = 0.0


def families() -> tuple[str, ...]:
    """The kernel families with device code."""
    root = kernels_folder()
    return tuple(sorted(p.parent.name for p in root.glob("*/launch.py") if device_files(root, p.parent.name)))


def build(
    target: str,
    names: Iterable[str] | None = None,
    *,
    progress: Callable[[str, int, int], None] | None = None,
) -> BuildReport:
    """Compile every kernel of the families (default: all) for a compile target, e.g. "sm_90a".

    One kernel that fails does not stop the rest. `progress` is called before each with (name, index, count). Raises
    ValueError for an unknown target or family, RuntimeError where nothing could be kept: no CuTe DSL, or a cache folder
    that cannot be used.
    """
    from accel.kernels.runtime import cache

    if target not in settings.COMPILE_TARGETS:
        raise ValueError(f"no compile target {target!r}; known are {', '.join(settings.COMPILE_TARGETS)}")
    chosen = families() if names is None else tuple(names)
    unknown = [name for name in chosen if name not in families()]
    if unknown:
        raise ValueError(f"no kernel family {', '.join(map(repr, unknown))} to build; there is {', '.join(families())}")
    if dsl_version() is None:
        raise RuntimeError(f"{DSL} is not installed: pip install 'accel-plugin[cuda]'")
    problem = cache.problem()
    if problem is not None:
        raise RuntimeError(problem)
    report = BuildReport(target, cache.folder())
    private = cache.fallback()
    before = {(entry.key, entry.written) for entry in cache.entries()}
    begin = time.monotonic()
    wanted: list[tuple[str, Callable[[], object]]] = []
    for family in chosen:
        try:
            wanted += [(f"{family}: {name}", thunk) for name, thunk in _builds(family)(target)]
        except Exception as error:  # a family that cannot even list its kernels
            report.failed[family] = _line(error)
    for index, (name, compile_it) in enumerate(wanted):
        if progress is not None:
            progress(name, index, len(wanted))
        try:
            compile_it()
        except Exception as error:
            report.failed[name] = _line(error)
        else:
            report.built.append(name)
        if cache.fallback() != private:
            raise RuntimeError(
                f"{cache.folder()} could not be written; {len(report.built)} of {len(wanted)} were built"
            )
    report.added = len({(entry.key, entry.written) for entry in cache.entries()} - before)
    report.seconds = time.monotonic() - begin
    return report


def _builds(family: str) -> Any:
    return importlib.import_module(f"accel.kernels.{family}.launch").builds


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


# --- The command line ------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("family", nargs="*", help="kernel families; all by default")
    parser.add_argument(
        "--arch",
        help=f"compile target: {', '.join(settings.COMPILE_TARGETS)} (default: ACCEL_COMPILE_TARGET, else this GPU's)",
    )


def command(arguments: argparse.Namespace) -> int:
    """Build and report; 0 if every kernel compiled, 1 if one failed, 2 if nothing could be built."""
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console()
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    try:
        target = arguments.arch or settings.read().compile_target or _target_here()
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
            task = bar.add_task("", total=None)

            def progress(name: str, index: int, count: int) -> None:
                bar.update(task, description=escape(name), completed=index, total=count)
                if not console.is_terminal:
                    console.print(f"{index + 1}/{count} {escape(name)}", soft_wrap=True)

            report = build(target, arguments.family or None, progress=progress)
    except (RuntimeError, ValueError) as error:
        console.print(f"[red]{escape(str(error))}")
        return 2
    for name, why in report.failed.items():
        console.print(f"[red]failed[/] {escape(name)}: {escape(why)}")
    console.print(
        f"{len(report.built)} kernels for {target}, {len(report.failed)} failed, {report.added} new files in "
        f"{escape(str(report.folder))}, {report.seconds:.0f} s",
        soft_wrap=True,
    )
    return 1 if report.failed else 0


def _target_here() -> str:
    import torch

    from accel.kernels.runtime.arch import compile_target, cuda_arch

    if not torch.cuda.is_available():
        raise RuntimeError(f"no GPU here: say which to build for, --arch {' | '.join(settings.COMPILE_TARGETS)}")
    return str(compile_target(cuda_arch(torch.cuda.current_device())))
