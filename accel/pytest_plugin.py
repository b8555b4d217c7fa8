"""Run any upstream test-suite accelerated: `pytest -p accel.pytest_plugin tests/`.

Targets are those of ACCEL_TARGETS, else every default, and are on before the suite's conftest is imported. The summary
says what each target served and declined, and a run that passed without a single served call fails: it tested nothing
of ours. Calls under torch.compile are not counted, so a suite that only compiles needs `--accel-allow-unserved`.

FLA's own suite skips its grouped-value-head cases unless FLA_DISABLE_BACKEND_DISPATCH=1, which FLA reads when it is
imported and which also switches off its dispatch. `--accel-fla-gva` sets the variable after that import: the cases run
and dispatch stays on. Copy FLA's `tests/` folder somewhere else and run there: inside FLA's repository its
pyproject.toml puts the checkout in front of the installed FLA.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from typing import Any

import pytest

from . import autoload, report
from .activation import accelerate
from .report import TargetStatus

FLA_VARIABLE = "FLA_DISABLE_BACKEND_DISPATCH"

_from_workers: list[TargetStatus] = []  #: under pytest-xdist, what the workers counted


def _switch_on() -> str:
    """Apply the targets; the report, for the header."""
    autoload.skip()
    wanted = os.environ.get(autoload.VARIABLE, "").strip() or None
    try:
        return str(accelerate(wanted))
    except (ValueError, ImportError) as error:
        raise pytest.UsageError(f"accel: {error}") from error


_applied = _switch_on()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("accel")
    group.addoption(
        "--accel-allow-unserved", action="store_true", help="pass although accel counted no call that it served"
    )
    group.addoption(
        "--accel-fla-gva",
        action="store_true",
        help=f"set {FLA_VARIABLE}=1 after the import of FLA, so that its suite runs its grouped-value-head cases",
    )


def pytest_report_header() -> list[str]:
    return [f"accel: {line}" for line in _applied.splitlines()]


def pytest_collection_finish(session: pytest.Session) -> None:
    if session.config.getoption("--accel-fla-gva"):
        if "fla" not in sys.modules:
            raise pytest.UsageError("--accel-fla-gva: the suite has not imported fla")
        os.environ[FLA_VARIABLE] = "1"


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    worker_output: dict[str, Any] | None = getattr(session.config, "workeroutput", None)
    if worker_output is not None:
        worker_output["accel"] = [(row.name, row.state, row.kernels, row.declined) for row in report.status()]
        return
    if exitstatus == pytest.ExitCode.OK and not _unserved_is_fine(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """A worker of pytest-xdist is done."""
    for name, state, kernels, declined in getattr(node, "workeroutput", {}).get("accel", ()):
        _from_workers.append(TargetStatus(name, state, sum(kernels.values()), declined, kernels))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    terminalreporter.section("accel")
    terminalreporter.write_line(report.text(_rows()))
    if not _unserved_is_fine(config):
        terminalreporter.write_line("nothing was served: this run says nothing about accel, and fails", red=True)


def _unserved_is_fine(config: pytest.Config) -> bool:
    return bool(config.getoption("--accel-allow-unserved")) or any(row.served for row in _rows())


def _rows() -> list[TargetStatus]:
    """Every target, with what was counted in all processes."""
    rows = {row.name: [row] for row in report.status()}
    for row in _from_workers:
        rows[row.name].append(row)
    merged = []
    for name, parts in rows.items():
        kernels: Counter[str] = Counter()
        declined: Counter[str] = Counter()
        for part in parts:
            kernels.update(part.kernels)
            declined.update(part.declined)
        first = parts[0]
        served = sum(kernels.values())
        merged.append(
            TargetStatus(name, first.state, served, dict(declined), dict(kernels), first.left, first.failures)
        )
    return merged
