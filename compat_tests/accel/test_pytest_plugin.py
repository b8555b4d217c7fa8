"""`pytest -p accel.pytest_plugin` on small suites, each run in a process of its own."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest

import accel

ROOT = Path(accel.__file__).resolve().parent.parent

SUITE = """
    import torch
    from made_up_library import scale

    def test_small():
        assert torch.equal(scale(torch.ones(3)), torch.full((3,), 2.0))

    def test_large():
        assert torch.equal(scale(torch.ones(1001)), torch.full((1001,), 2.0))
"""
LIBRARY = """
    def scale(x):
        return x * 2
"""
#: Loaded before the plugin: a target "made_up_library.scale" that serves up to SIZE elements.
TARGET = """
    import sys, types
    from accel import activation, targets
    from accel.outcome import Choice, Declined
    from accel.state import STATES, TargetState

    SIZE = {size}

    class Adapter:
        family, in_place = "made_up", False
        def facts(self, x):
            return x.shape[-1], x.device
        def plan(self, size, arch):
            return Choice("made_up", "portable") if size <= SIZE else Declined(f"size={{size}} > {{SIZE}}")
        def run(self, choice, x):
            return x + x
        def compiled(self, original, x):
            return original(x)

    def patch(module, state):
        from accel import serve
        return serve.everywhere(module, "scale", Adapter(), state)

    package = "accel.patches.made_up_library"
    for name, members in (
        ("package", dict(IMPORT_NAME="made_up_library", DISTRIBUTIONS=("pytest",), SUPPORTED=">=1")),
        ("adapter", dict(patch=patch)),
    ):
        module = sys.modules[f"{{package}}.{{name}}"] = types.ModuleType(f"{{package}}.{{name}}")
        vars(module).update(members)
    sys.modules[package] = types.ModuleType(package)
    target = targets.Target("made_up_library.scale", None, "", "made_up_library.adapter", ("made_up_library",))
    targets.TARGETS = activation.TARGETS = (*targets.TARGETS, target)
    targets.BY_NAME[target.name], STATES[target.name] = target, TargetState(target)
"""


def run(folder: Path, *options: str, before: tuple[str, ...] = (), **environ: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("ACCEL_")}
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            *before,
            "-p",
            "accel.pytest_plugin",
            "-p",
            "no:cacheprovider",
            "-q",
            *options,
        ],
        cwd=folder,
        env={**inherited, "PYTHONPATH": str(ROOT), **environ},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def suite(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        (folder / f"{name}.py").write_text(textwrap.dedent(text))
    return folder


def run_made_up(folder: Path, size: int) -> subprocess.CompletedProcess[str]:
    suite(folder, test_it=SUITE, made_up_library=LIBRARY, made_up_target=TARGET.format(size=size))
    path = f"{folder}{os.pathsep}{ROOT}"
    return run(folder, before=("-p", "made_up_target"), ACCEL_TARGETS="made_up_library.scale", PYTHONPATH=path)


def test_a_run_that_serves_passes_and_says_what(tmp_path: Path) -> None:
    done = run_made_up(tmp_path, size=1000)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "= accel =" in done.stdout
    assert "made_up_library.scale: served 1, declined 1" in done.stdout
    assert "1  by portable" in done.stdout
    assert "1  declined: size=1001 > 1000" in done.stdout


def test_a_run_in_which_nothing_is_served_fails(tmp_path: Path) -> None:
    done = run_made_up(tmp_path, size=0)
    assert "2 passed" in done.stdout
    assert done.returncode == 1, done.stdout + done.stderr
    assert "made_up_library.scale: served 0, declined 2" in done.stdout
    assert "nothing was served" in done.stdout


def test_options(tmp_path: Path) -> None:
    text = "import os\ndef test_it():\n    assert os.environ.get('FLA_DISABLE_BACKEND_DISPATCH') == '1'\n"
    suite(tmp_path, test_it=text, fla="")
    done = run(tmp_path, "--accel-allow-unserved", "--accel-fla-gva")
    assert done.returncode == 4, "the suite has to import fla first"
    assert "the suite has not imported fla" in done.stdout + done.stderr
    suite(tmp_path, conftest="import os, fla\nassert 'FLA_DISABLE_BACKEND_DISPATCH' not in os.environ\n")
    done = run(tmp_path, "--accel-allow-unserved", "--accel-fla-gva", PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_failing_suite_and_a_bad_target(tmp_path: Path) -> None:
    suite(tmp_path, test_it="def test_it():\n    assert False\n")
    assert run(tmp_path, "--accel-allow-unserved").returncode == 1
    done = run(tmp_path, ACCEL_TARGETS="nonsense")
    assert done.returncode == 4
    assert "unknown target 'nonsense'" in done.stdout + done.stderr


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch):
    """The plugin's module, imported here without its targets."""
    monkeypatch.setattr("accel.autoload._done", False)
    spec = importlib.util.find_spec("accel.pytest_plugin")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with monkeypatch.context() as patched:
        patched.setattr("accel.activation.accelerate", lambda wanted: "active: none")
        spec.loader.exec_module(module)
    return module


def test_counts_of_xdist_workers_are_added_up(plugin, upstream) -> None:
    """What pytest-xdist does: each worker sends its `workeroutput` to the process that prints the summary."""
    upstream.module("ops")
    upstream.on("scale")
    import torch

    upstream.module("ops").scale(torch.ones(1))
    upstream.module("ops").scale(torch.ones(1001))
    worker = SimpleNamespace(config=SimpleNamespace(workeroutput={}))
    plugin.pytest_sessionfinish(worker, 0)
    accel.restore()
    for _ in range(2):
        plugin.pytest_testnodedown(SimpleNamespace(workeroutput=worker.config.workeroutput), None)
    plugin.pytest_testnodedown(SimpleNamespace(), "it crashed")
    row = next(row for row in plugin._rows() if row.name == f"{upstream.name}.scale")
    assert row.served == 1 + 2
    assert row.declined == {"size=1001 > 1000 on cpu": 3}
