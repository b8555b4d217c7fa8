"""`accel run [options] script.py args...`: run a program that knows nothing of accel with targets on.

The program finds what it would find under plain `python`: its own `sys.argv`, `__main__`, `__file__` and `sys.path[0]`.
ACCEL_TARGETS is set for the processes it starts, which an installed accel hears; forked ones have the targets anyway.
"""

from __future__ import annotations

import argparse
import atexit
import io
import os
import runpy
import sys
from pathlib import Path
from types import ModuleType

from . import autoload


def main(argv: list[str]) -> int:
    """Parse the options, switch the targets on, run the program; its exit code, or 2 if that could not be done."""
    split = _first_word(argv)
    arguments = _parser().parse_args(argv[:split])
    program = argv[split:]
    if not program or program == ["-m"]:
        _parser().error("no script and no -m module")
    if program[0] != "-m" and not Path(program[0]).exists():
        print(f"accel run: no file {program[0]!r}", file=sys.stderr)
        return 2
    from .activation import accelerate, restore

    autoload.skip()  # what is on here is decided here, also when torch asks later
    targets = arguments.targets or os.environ.get(autoload.VARIABLE, "").strip() or "all"
    try:
        restore()
        accelerate(targets, strict=arguments.strict)
    except (ValueError, ImportError, RuntimeError) as error:
        print(f"accel run: {error}", file=sys.stderr)
        return 2
    os.environ[autoload.VARIABLE] = targets
    if arguments.strict:
        os.environ["ACCEL_STRICT"] = "1"
    if arguments.summary:
        atexit.register(_print_summary)
    return execute(program)


def execute(program: list[str]) -> int:
    """Run `[script, *args]` or `["-m", module, *args]` as `__main__`. What that raises is raised."""
    _keep_importable()
    if program[0] == "-m":
        sys.argv = program[1:]
        sys.path[0] = os.getcwd()
        runpy.run_module(program[1], run_name="__main__", alter_sys=True)
        return 0
    path = Path(program[0])
    sys.argv = list(program)
    if path.is_dir() or path.suffix not in ("", ".py", ".pyw"):  # a folder or an archive with a __main__.py
        sys.path.pop(0)
        runpy.run_path(program[0], run_name="__main__")
        return 0
    sys.path[0] = str(path.resolve().parent)
    # Not runpy: its __main__ is gone when the script's last line is, while threads and exit handlers still use it.
    module = ModuleType("__main__")
    module.__file__ = program[0]
    module.__dict__["__builtins__"] = __builtins__
    with io.open_code(str(path.resolve())) as file:
        code = compile(file.read(), program[0], "exec")
    sys.modules["__main__"] = module
    exec(code, module.__dict__)
    return 0


def _first_word(argv: list[str]) -> int:
    """Index of the script or of -m: what precedes it is ours."""
    index = 0
    while index < len(argv) and argv[index].startswith("-") and argv[index] != "-m":
        index += 2 if argv[index] == "--targets" else 1
    return min(index, len(argv))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="accel run",
        usage="accel run [--targets NAMES] [--strict] [--summary] (script | -m module) [args ...]",
        description="Run a script or module with targets on.",
    )
    parser.add_argument("--targets", metavar="NAMES", help="what to switch on (default: ACCEL_TARGETS, else all)")
    parser.add_argument("--strict", action="store_true", help="raise where a kernel fails instead of falling back")
    parser.add_argument("--summary", action="store_true", help="print what was served and declined when it ends")
    return parser


def _print_summary() -> None:
    from .report import text

    sys.stdout.flush()
    print(text(), file=sys.stderr)


def _keep_importable() -> None:
    """sys.path[0], about to become the script's own folder, may be where a bare checkout's accel was found."""
    root = str(Path(__file__).resolve().parent.parent)
    rest = [os.path.abspath(entry) for entry in sys.path[1:]]
    if root not in rest and "site-packages" not in root:
        sys.path.append(root)
