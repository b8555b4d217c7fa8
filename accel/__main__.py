"""`accel`, or `python -m accel`: doctor, status, demo, run, build, certify, bench.

Exit codes: 0, 1 where what was asked for failed, 2 for misuse. `run` passes on the exit code of the script.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import accel

Command = Callable[[argparse.Namespace], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["run"]:  # everything after the script is the script's own
        from . import running

        return running.main(words[1:])
    if words[:1] in (["demo"], ["certify"]) and _without_torch(words[0]):
        return 1
    arguments = _parser(words[:1]).parse_args(words)
    command: Command = arguments.command
    try:
        code = command(arguments)
        sys.stdout.flush()
    except BrokenPipeError:  # whoever reads it, `head` for one, has seen enough; nor is there anybody to tell at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return code


def _parser(wanted: list[str]) -> argparse.ArgumentParser:
    """The parser; options of `build` and `certify` are read from their modules only when one of them is wanted."""
    parser = argparse.ArgumentParser(prog="accel", description="Fast kernels under the models you already have.")
    parser.add_argument("--version", action="version", version=f"accel {accel.__version__}")
    commands = parser.add_subparsers(metavar="command", required=True)

    def add(name: str, command: Command, help: str) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=help, description=help)
        made.set_defaults(command=command)
        return made

    doctor = add("doctor", _doctor, "what is here, which targets would serve, and why the others would not")
    doctor.add_argument("--json", action="store_true", help="as data")
    status = add("status", _status, "every target: what it replaces and whether it would be on here")
    status.add_argument("--json", action="store_true", help="as data")
    add("demo", _demo, "small models before, under and after accelerate()")
    add("run", _help_run, "run a script or module with targets on: accel run script.py ...")
    build = add("build", _build, "compile kernels into the cache ahead of time; needs no GPU")
    certify = add("certify", _certify, "measure kernels on this GPU against upstream and the fp64 oracle")
    if wanted == ["build"]:
        from . import building

        building.add_arguments(build)
    if wanted == ["certify"]:
        from . import certifying

        certifying.add_arguments(certify)
    bench = add("bench", _bench, "run a benchmark script of a source checkout")
    bench.add_argument("name", nargs="?", help="for example ops/norm; without a name they are listed")
    bench.add_argument("rest", nargs=argparse.REMAINDER, help="arguments of the benchmark")
    return parser


def _doctor(arguments: argparse.Namespace) -> int:
    from . import doctor

    return doctor.command(as_json=arguments.json)


def _status(arguments: argparse.Namespace) -> int:
    from . import doctor

    return doctor.command_status(as_json=arguments.json)


def _demo(arguments: argparse.Namespace) -> int:
    from . import demo

    return demo.main()


def _help_run(arguments: argparse.Namespace) -> int:
    from . import running

    return running.main(["--help"])


def _build(arguments: argparse.Namespace) -> int:
    from . import building

    return building.command(arguments)


def _certify(arguments: argparse.Namespace) -> int:
    from . import certifying

    return certifying.command(arguments)


def _without_torch(command: str) -> bool:
    """Whether torch cannot be imported, which is said."""
    try:
        import torch  # noqa: F401
    except Exception as error:
        print(f"accel {command} needs torch, which cannot be imported: {error}", file=sys.stderr)
        return True
    return False


def _bench(arguments: argparse.Namespace) -> int:
    """Run `benchmarks/<name>.py` of the checkout that accel was imported from."""
    folder = Path(__file__).resolve().parent.parent / "benchmarks"
    found = sorted([*folder.glob("ops/*.py"), *folder.glob("models/*.py")])
    scripts = {path.relative_to(folder).with_suffix("").as_posix(): path for path in found}
    if not scripts:
        print("accel bench needs a source checkout: the benchmarks are not part of the package", file=sys.stderr)
        return 2
    if arguments.name is None:
        print("\n".join(scripts))
        return 0
    if arguments.name not in scripts:
        print(f"no benchmark {arguments.name!r}; there is {', '.join(scripts)}", file=sys.stderr)
        return 2
    from . import running

    return running.execute([str(scripts[arguments.name]), *arguments.rest])


if __name__ == "__main__":
    sys.exit(main())
