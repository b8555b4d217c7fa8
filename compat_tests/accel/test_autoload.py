"""ACCEL_TARGETS: by the .pth of a wheel, by torch's entry point, in child processes; bad values; what it never does."""

from __future__ import annotations

import ast
import logging
import os
import textwrap
from pathlib import Path

import pytest

import accel
from accel import autoload
from accel.state import policy

#: Prints what is on, here and in a child of each kind.
CHILDREN = """
import multiprocessing as mp, sys

def seen(_=None):
    import accel
    return [row.name for row in accel.status() if row.state == "pending import"], "torch" in sys.modules

if __name__ == "__main__":
    print("main", *seen())
    for method in ("spawn", "fork", "forkserver"):
        with mp.get_context(method).Pool(1) as pool:
            print(method, *pool.map(seen, [0])[0])
"""
BY_PTH = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}  #: the entry point is off, so what happens comes from the .pth


def test_the_pth_reaches_every_process(from_wheel, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(CHILDREN)
    done = from_wheel.run(str(script), cwd=tmp_path, environ={"ACCEL_TARGETS": "transformers.mlp", **BY_PTH})
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        f"{process} ['transformers.mlp'] False" for process in ("main", "spawn", "fork", "forkserver")
    ]
    assert done.stderr == ""


def test_without_the_variable_nothing_is_imported(from_wheel, tmp_path: Path) -> None:
    code = "import sys; print([name for name in sys.modules if name.startswith(('accel', 'wrapt'))])"
    done = from_wheel.run("-c", code, cwd=tmp_path)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "[]", "")
    done = from_wheel.run("-c", code, cwd=tmp_path, environ={"ACCEL_TARGETS": ""})
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "[]", "")


def test_with_the_variable_no_upstream_is_imported(from_wheel, tmp_path: Path) -> None:
    code = "import sys; print(sorted({'accel', 'torch', 'transformers', 'fla', 'diffusers'} & set(sys.modules)))"
    done = from_wheel.run("-c", code, cwd=tmp_path, environ={"ACCEL_TARGETS": "all"})
    assert (done.returncode, done.stdout.strip()) == (0, "['accel']"), done.stderr


def test_a_venv_reads_its_pth_twice_and_boots_once(from_wheel, tmp_path: Path) -> None:
    environ = {"ACCEL_TARGETS": "transformers.mlp", "ACCEL_LOG": "info", **BY_PTH}
    done = from_wheel.run("-c", "import site; print(site.execsitecustomize.__name__)", cwd=tmp_path, environ=environ)
    assert done.stderr.count("ACCEL_TARGETS=transformers.mlp") == 1
    assert "pending import: transformers.mlp" in done.stderr
    assert done.stdout.strip() == "execsitecustomize"


def test_libraries_in_a_folder_that_site_adds_later_are_found(from_wheel) -> None:
    """The tests above rest on it: transformers comes from a .pth that is read after ours."""
    assert sorted(path.name for path in from_wheel.site.glob("*.pth"))[0] == "accel_autoload.pth"
    assert not (from_wheel.site / "transformers").exists()


def test_sitecustomize_still_runs_and_may_fail(from_wheel, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('customized')\nraise RuntimeError('broken')\n")
    environ = {"ACCEL_TARGETS": "transformers.mlp", "PYTHONPATH": str(tmp_path), **BY_PTH}
    done = from_wheel.run("-c", "import accel; print(accel.is_accelerated())", cwd=tmp_path, environ=environ)
    assert done.stdout.split() == ["customized", "True"], done.stderr


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"ACCEL_TARGETS": "nonsense"}, "unknown target 'nonsense'"),
        ({"ACCEL_TARGETS": "mlp,,"}, None),
        ({"ACCEL_TARGETS": "mlp", "ACCEL_VERIFY": "often"}, "ACCEL_VERIFY='often': allowed is a whole number"),
        ({"ACCEL_TARGETS": "mlp", "ACCEL_CACHE_DIR": "here"}, "ACCEL_CACHE_DIR='here'"),
    ],
)
def test_a_bad_value_is_one_error_and_the_process_goes_on(
    from_wheel, tmp_path: Path, environ: dict[str, str], said: str | None
) -> None:
    code = "import accel; print('served', accel.is_accelerated())"
    done = from_wheel.run("-c", code, cwd=tmp_path, environ={**environ, **BY_PTH})
    assert done.returncode == 0
    assert done.stdout.split() == ["served", str(said is None)]
    assert done.stderr.count("has no effect") == (said is not None)
    assert (said or "") in done.stderr


def test_a_library_that_cannot_be_patched_is_one_error(from_wheel, tmp_path: Path) -> None:
    """A folder named like the library, without metadata, in front of the installed one's."""
    (tmp_path / "diffusers").mkdir()
    (tmp_path / "diffusers" / "__init__.py").write_text("")
    (tmp_path / "diffusers-9.9.dist-info").mkdir()
    (tmp_path / "diffusers-9.9.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: diffusers\nVersion: 9.9\n"
    )
    environ = {"ACCEL_TARGETS": "transformers.mlp,diffusers", "PYTHONPATH": str(tmp_path), **BY_PTH}
    code = "import accel; print(accel.is_accelerated())"
    done = from_wheel.run("-c", code, cwd=tmp_path, environ=environ)
    assert (done.returncode, done.stdout.strip()) == (0, "False")
    assert done.stderr.count("diffusers 9.9 is outside the supported range") == 1
    assert "applied nothing" in done.stderr


def test_restore_and_accelerate_in_a_process_that_was_started_with_targets(from_wheel, tmp_path: Path) -> None:
    code = """
        import subprocess, sys, accel
        on = lambda: [row.name for row in accel.status() if row.state == "pending import"]
        print(on())
        accel.accelerate("diffusers.sdpa")
        print(on())
        accel.restore()
        print(on())
        if sys.argv[1:] != ["child"]:
            print(subprocess.run([sys.executable, __file__, "child"], capture_output=True, text=True).stdout)
    """
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(code))
    done = from_wheel.run(str(script), cwd=tmp_path, environ={"ACCEL_TARGETS": "transformers.mlp", **BY_PTH})
    once = ["['transformers.mlp']", "['transformers.mlp', 'diffusers.sdpa']", "[]"]
    assert done.stdout.split("\n")[:6] == once * 2, done.stderr


def test_a_broken_accel_does_not_stop_python(from_wheel, tmp_path: Path) -> None:
    (tmp_path / "accel").mkdir()
    (tmp_path / "accel" / "__init__.py").write_text("raise RuntimeError('half an upgrade')\n")
    environ = {"ACCEL_TARGETS": "all", "PYTHONPATH": str(tmp_path), **BY_PTH}
    done = from_wheel.run("-c", "print('goes on')", cwd=tmp_path, environ=environ)
    assert (done.returncode, done.stdout.strip()) == (0, "goes on")
    assert "half an upgrade" in done.stderr


def test_isolated_and_siteless_pythons(from_wheel, tmp_path: Path) -> None:
    environ = {"ACCEL_TARGETS": "transformers.mlp", **BY_PTH}
    code = "import sys; print('accel' in sys.modules)"
    assert from_wheel.run("-I", "-c", code, cwd=tmp_path, environ=environ).stdout.strip() == "True"
    assert from_wheel.run("-S", "-c", code, cwd=tmp_path, environ=environ).stdout.strip() == "False"


# --- torch's entry point ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def unpacked(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """accel and its metadata in a folder for PYTHONPATH, whose .pth files nobody reads."""
    import zipfile

    folder = tmp_path_factory.mktemp("unpacked")
    zipfile.ZipFile(wheel).extractall(folder)
    return folder


TARGET = """
    import sys, types
    from accel import activation, targets
    from accel.outcome import Choice
    from accel.state import STATES, TargetState

    class Adapter:
        family, in_place = "made_up", False
        def facts(self, x):
            return x.shape[-1], x.device
        def plan(self, size, arch):
            return Choice("made_up", "portable")
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
        module = sys.modules[f"{package}.{name}"] = types.ModuleType(f"{package}.{name}")
        vars(module).update(members)
    sys.modules[package] = types.ModuleType(package)
    target = targets.Target("made_up_library.scale", None, "", "made_up_library.adapter", ("made_up_library.ops",))
    targets.TARGETS = activation.TARGETS = (*targets.TARGETS, target)
    targets.BY_NAME[target.name], STATES[target.name] = target, TargetState(target)
"""


def test_the_entry_point_reaches_modules_that_import_torch_first(from_wheel, unpacked: Path, tmp_path: Path) -> None:
    """At the end of `import torch`, the module that imports it is half initialised: its `scale` is not there yet."""
    library = tmp_path / "made_up_library"
    library.mkdir()
    (library / "__init__.py").write_text("import made_up_library.ops\n")
    (library / "ops.py").write_text(
        "import torch, accel, sys\n"
        "from accel.imports import being_imported\n"
        "half = being_imported(sys.modules[__name__]), accel.is_accelerated('made_up_library.scale')\n"
        "def scale(x):\n    return x * 2\n"
        "also = scale\n"
    )
    (tmp_path / "made_up_target.py").write_text(textwrap.dedent(TARGET))
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, made_up_target\nassert 'torch' not in sys.modules\n"
        "import made_up_library, torch, accel\nfrom made_up_library import ops\n"
        "ops.scale(torch.ones(2)), ops.also(torch.ones(2))\n"
        "row = next(row for row in accel.status() if row.name == 'made_up_library.scale')\n"
        "print(ops.half, row.state, row.served)\n"
        "accel.restore()\nprint(hasattr(ops.scale, '__wrapped__'))\n"
    )
    environ = {"ACCEL_TARGETS": "made_up_library.scale", "PYTHONPATH": f"{unpacked}{os.pathsep}{tmp_path}"}
    (from_wheel.site / "accel_autoload.pth").rename(from_wheel.site / "accel_autoload.off")
    try:
        done = from_wheel.run(str(script), cwd=tmp_path, environ=environ)
    finally:
        (from_wheel.site / "accel_autoload.off").rename(from_wheel.site / "accel_autoload.pth")
    assert done.stdout.splitlines() == ["(True, True) active 2", "False"], done.stderr


def test_the_entry_point_in_children_and_its_switch(from_wheel, unpacked: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import torch\n" + CHILDREN.replace('("spawn", "fork", "forkserver")', '("spawn", "fork")'))
    environ = {"ACCEL_TARGETS": "transformers.mlp", "PYTHONPATH": str(unpacked)}
    (from_wheel.site / "accel_autoload.pth").rename(from_wheel.site / "accel_autoload.off")
    try:
        done = from_wheel.run(str(script), cwd=tmp_path, environ=environ)
        off = from_wheel.run("-c", "import torch, sys; print('accel' in sys.modules)", cwd=tmp_path, environ=BY_PTH)
        bad = from_wheel.run(
            "-c", "import torch; print('goes on')", cwd=tmp_path, environ={**environ, "ACCEL_TARGETS": "nonsense"}
        )
    finally:
        (from_wheel.site / "accel_autoload.off").rename(from_wheel.site / "accel_autoload.pth")
    assert done.stdout.splitlines() == [f"{name} ['transformers.mlp'] True" for name in ("main", "spawn", "fork")]
    assert off.stdout.strip() == "False"
    assert (bad.returncode, bad.stdout.strip()) == (0, "goes on")
    assert bad.stderr.count("unknown target 'nonsense'") == 1


# --- In this process -------------------------------------------------------------------------------------------------


@pytest.fixture
def booting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autoload, "_done", False)


def test_boot_applies_once(booting: None, upstream, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCEL_TARGETS", f"{upstream.name}.scale")
    autoload.boot()
    assert accel.is_accelerated(f"{upstream.name}.scale")
    accel.restore()
    autoload.boot()
    autoload.boot_from_torch()
    assert not accel.is_accelerated(), "restore() stands, also when torch asks later"


def test_boot_adds_to_what_is_on_and_keeps_strict(booting: None, upstream, monkeypatch: pytest.MonkeyPatch) -> None:
    upstream.on("double", strict=True)
    monkeypatch.setenv("ACCEL_TARGETS", f"{upstream.name}.scale")
    autoload.boot_from_torch()
    assert accel.is_accelerated(upstream.name)
    assert policy.strict


def test_skip_leaves_the_variable_alone(booting: None, upstream, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCEL_TARGETS", f"{upstream.name}.scale")
    autoload.skip()
    autoload.boot()
    assert not accel.is_accelerated()


def test_whatever_is_raised_is_one_logged_error(
    booting: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*args: object, **kwargs: object) -> object:
        raise OSError("the disk is gone")

    monkeypatch.setattr("accel.activation.accelerate", broken)
    monkeypatch.setenv("ACCEL_TARGETS", "all")
    with caplog.at_level(logging.ERROR, "accel"):
        autoload.boot_from_torch()
        autoload.boot_from_torch()
    assert [record.getMessage() for record in caplog.records] == [
        "accel: ACCEL_TARGETS='all' has no effect: the disk is gone"
    ]


def test_a_pth_read_after_start_up_boots_at_once(booting: None, upstream, monkeypatch: pytest.MonkeyPatch) -> None:
    import site

    monkeypatch.setenv("ACCEL_TARGETS", f"{upstream.name}.scale")
    was = site.execsitecustomize
    autoload.boot_from_site()
    assert site.execsitecustomize is was
    assert accel.is_accelerated(f"{upstream.name}.scale")


def test_the_pth_is_one_guarded_line_of_the_standard_library() -> None:
    text = (Path(accel.__file__).resolve().parent.parent / "accel_autoload.pth").read_text()
    assert text.count("\n") == 1
    tree = ast.parse(text)
    imported = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    assert imported == ["os"]
    assert ast.unparse(tree.body[1]).startswith("os.environ.get('ACCEL_TARGETS') and ")
