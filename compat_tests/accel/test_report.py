"""status, explain and their text; doctor, also where things are broken."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import accel
from accel import doctor, report
from accel.activation import GPU_REASON
from accel.outcome import Declined
from accel.report import TargetStatus
from accel.targets import TARGETS

ROOT = Path(accel.__file__).resolve().parent.parent


def test_status_has_every_target_in_the_order_of_the_table() -> None:
    rows = accel.status()
    assert [row.name for row in rows] == [target.name for target in TARGETS]
    assert {row.state for row in rows} == {"off"}
    assert all(row == TargetStatus(row.name, "off") for row in rows)
    assert dataclasses.asdict(rows[0])["declined"] == {}


def test_status_is_a_picture_of_its_moment(upstream) -> None:
    upstream.on()
    scale = upstream.module("ops").scale
    before = accel.status()
    scale(torch.ones(1))
    scale(torch.ones(1001))
    rows = {row.name: row for row in before}
    assert (rows[f"{upstream.name}.scale"].served, rows[f"{upstream.name}.scale"].declined) == (0, {})
    with pytest.raises(dataclasses.FrozenInstanceError):
        before[0].served = 3  # type: ignore[misc]


def test_text() -> None:
    rows = [
        TargetStatus("a.one", "active", 3, {"x is too large": 2, "b comes first": 7}, {"any_fwd": 3}),
        TargetStatus("a.two", "active"),
        TargetStatus("a.three", "pending import"),
        TargetStatus("a.four", "off", 1, {}, {"portable": 1}, ("lib.f is now other.f",), ("patching lib failed: E",)),
        TargetStatus("a.five", "off"),
        TargetStatus("a.six", "refused: not installed"),
    ]
    assert report.text(rows).splitlines() == [
        "a.one: served 3, declined 9",
        "         3  by any_fwd",
        "         7  declined: b comes first",
        "         2  declined: x is too large",
        "a.four: served 1, declined 0",
        "         1  by portable",
        "a.four: patching lib failed: E",
        "a.four: left to its new owner: lib.f is now other.f",
        "on, but no call was counted (compiled calls are not): a.two, a.three",
    ]
    assert report.text([]) == "nothing is on, and no call was counted"


def test_a_target_with_several_callables_is_explained_by_the_one_that_fits(upstream) -> None:
    from accel import serve

    upstream.on("scale")
    ops = upstream.module("ops")
    other = type(upstream.adapters["scale"])(decline="it wants a module first")
    state = upstream.state("scale")
    serve.wrap(ops.shift, other, state)
    assert str(accel.explain(state.name, torch.ones(1))) == "made_up.portable"
    upstream.adapters["scale"].decline = "too small"
    assert accel.explain(state.name, torch.ones(1)) == Declined("too small")
    assert str(accel.explain(state.name, torch.ones(1))) == "declined: too small"


def test_explain_before_the_library_is_imported(upstream) -> None:
    upstream.on()
    assert accel.explain(f"{upstream.name}.scale", torch.ones(1)) == Declined(
        f"{upstream.name}.scale is pending import"
    )


# --- doctor ----------------------------------------------------------------------------------------------------------


def examine(tmp_path: Path, *options: str, path: tuple[Path, ...] = (), **environ: str) -> dict[str, object]:
    """`accel doctor --json` in a process of its own, with folders in front of everything that is installed."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("ACCEL_", "PYTHON"))}
    places = os.pathsep.join(map(str, (*path, ROOT)))
    done = subprocess.run(
        [sys.executable, "-m", "accel", "doctor", "--json", *options],
        cwd=tmp_path,
        env={**inherited, "PYTHONPATH": places, "ACCEL_CACHE_DIR": str(tmp_path / "cache"), **environ},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return dict(json.loads(done.stdout))


def fake(folder: Path, name: str, body: str, version: str) -> None:
    """A library that is installed in `folder` and whose import runs `body`."""
    (folder / name).mkdir(parents=True)
    (folder / name / "__init__.py").write_text(body)
    metadata = folder / f"{name}-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def test_doctor_where_everything_is_broken(tmp_path: Path) -> None:
    """torch raises, FLA ends the process, transformers kills it, diffusers is of another time."""
    libraries = tmp_path / "libraries"
    fake(libraries, "torch", "raise OSError('libcudart.so.13: cannot open shared object file')\n", "2.13.0")
    fake(libraries, "fla", "import sys\nprint('goodbye')\nsys.exit(7)\n", "0.6.0")
    (libraries / "fla-0.6.0.dist-info").rename(libraries / "fla_core-0.6.0.dist-info")
    (libraries / "fla_core-0.6.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: fla-core\nVersion: 0.6.0\n"
    )
    fake(libraries, "transformers", "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n", "5.24.0")
    fake(libraries, "diffusers", "raise AssertionError('imported')\n", "0.99.0")
    fake(libraries, "tvm_ffi", "raise SyntaxError('half an upgrade')\n", "1.0")
    found = examine(
        tmp_path,
        path=(libraries,),
        ACCEL_TARGETS="nonsense",
        ACCEL_VERIFY="often",
        ACCEL_SPEED="11",
        CUDA_VISIBLE_DEVICES="0",
    )
    assert found["imports"]["torch"] == "OSError: libcudart.so.13: cannot open shared object file"
    assert found["imports"]["fla"] == "the process ended with exit code 7"
    assert found["imports"]["transformers"] == "the process died of signal 11"
    assert "half an upgrade" in found["imports"]["nvidia-cutlass-dsl"]
    assert found["cuda"] == "unknown: torch cannot be imported"
    assert found["versions"]["torch"] == "2.13.0"
    assert found["variables"] == {
        "ACCEL_TARGETS": "nonsense",
        "ACCEL_VERIFY": "often",
        "ACCEL_CACHE_DIR": str(tmp_path / "cache"),
        "CUDA_VISIBLE_DEVICES": "0",
    }
    problems = "\n".join(found["problems"])
    for line in (
        "ACCEL_TARGETS='nonsense': unknown target 'nonsense'",
        "ACCEL_VERIFY='often': allowed is a whole number",
        "ACCEL_SPEED is no setting of accel",
        "torch cannot be imported: OSError: libcudart",
    ):
        assert line in problems
    outlook = {row["name"]: row for row in found["targets"]}
    assert [*outlook] == [target.name for target in TARGETS]
    assert outlook["fla.kda"]["serves"] == "nothing: fla cannot be imported: the process ended with exit code 7"
    assert outlook["diffusers.sdpa"]["library"].startswith("diffusers 0.99.0 is outside the supported range")
    assert outlook["diffusers.sdpa"]["serves"] == "nothing: the library cannot be patched"
    assert found["certificates"] == [] or all(isinstance(line, str) for line in found["certificates"])


def test_doctor_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch and FLA of this environment, as they are, with a cache folder that others can write."""
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)
    monkeypatch.setenv("ACCEL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(doctor, "GROUPS", ("fla",))
    found = doctor.examine()
    assert found.imports["torch"] == found.imports["fla"] == found.imports["nvidia-cutlass-dsl"] == "ok"
    assert found.versions["torch"] == torch.__version__
    assert found.accel == accel.__version__
    fla = {row.name: row for row in found.targets if row.name.startswith("fla.")}
    assert {row.patched for row in fla.values()} <= {"active", f"refused: {GPU_REASON}"}
    if not torch.cuda.is_available():
        assert [device.arch for device in found.devices] == ["cpu"]
        assert fla["fla.kda"].serves.startswith("cpu: portable, ")
        assert fla["fla.cpu"].serves == "cpu: plain torch, for CPU tensors"
    assert any("kernel cache" in problem and "cache" in found.cache for problem in found.problems)
    assert {*found.defaults, "ACCEL_CACHE_DIR"} == {variable.name for variable in accel.settings.describe()}


def test_a_section_that_fails_is_a_problem_and_not_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(found: object) -> None:
        raise PermissionError("no entry")

    monkeypatch.setattr(doctor, "SECTIONS", dict.fromkeys(doctor.SECTIONS, broken))
    monkeypatch.setattr(doctor, "probe", lambda name: {"failed": "not looked at"})
    monkeypatch.setattr(doctor, "_driver", lambda: 1 / 0)
    monkeypatch.setattr(doctor, "_certificates", broken)
    found = doctor.examine()
    assert [problem for problem in found.problems if "PermissionError" in problem] == [
        f"{name}: PermissionError: no entry" for name in (*doctor.SECTIONS, "certificates")
    ]
    assert "driver: ZeroDivisionError: division by zero" in found.problems
    assert found.driver == "unknown"
    assert len(found.targets) == len(TARGETS)


def test_the_text_shows_what_the_data_has(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    found = doctor.Examination(
        accel="0.1",
        python="3.11 [x]",
        devices=[doctor.Device("Made-up GPU", "sm_90", 141.0)],
        versions={"torch": "2.13.0"},
        imports={"torch": "ok", "fla": "OSError: [Errno 2] gone"},
        variables={"ACCEL_TARGETS": "all"},
        certificates=["sm90, shipped: valid norm.any_fwd; of 2"],
        targets=[doctor.TargetOutlook("fla.kda", "0.6.0", "active", "sm_90: not certified on sm_90")],
        problems=["[bold]not markup"],
    )
    doctor._print(found, Console(width=200, force_terminal=False))
    shown = capsys.readouterr().out
    for part in (
        "3.11 [x]",
        "Made-up GPU, sm_90, 141.0 GiB",
        "torch 2.13.0",
        "OSError: [Errno 2] gone",
        "ACCEL_TARGETS=all",
        "valid norm.any_fwd",
        "fla.kda",
        "not certified on sm_90",
        "problem [bold]not markup",
    ):
        assert part in shown


def test_a_look_that_takes_too_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "PATIENCE", 0.01)
    assert doctor.probe("torch") == {"failed": "the import takes longer than 0 s"}
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    assert doctor.probe("torch")["failed"].startswith("FileNotFoundError")


def test_drivers(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(code: int, out: str, err: str = ""):
        return lambda *args, **kwargs: subprocess.CompletedProcess(args, code, out, err)

    monkeypatch.setattr(subprocess, "run", answer(0, "580.1, NVIDIA H200\n"))
    assert doctor._driver() == "580.1, NVIDIA H200"
    monkeypatch.setattr(subprocess, "run", answer(9, "NVIDIA-SMI has failed\n", "no driver"))
    assert doctor._driver() == "NVIDIA-SMI has failed no driver"
    monkeypatch.setattr(subprocess, "run", answer(9, ""))
    assert doctor._driver() == "nvidia-smi failed with exit code 9"

    def late(*args: object, **kwargs: object) -> object:
        raise subprocess.TimeoutExpired("nvidia-smi", 20)

    monkeypatch.setattr(subprocess, "run", late)
    assert doctor._driver() == "nvidia-smi does not answer"


def test_a_gpu_that_torch_cannot_use_is_said_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def unusable(*args: object, **kwargs: object) -> object:
        raise RuntimeError("CUDA driver version is insufficient for CUDA runtime version")

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch, "empty", unusable)
    found = doctor._probe_torch()
    assert found["cuda"].startswith("13.0, not usable: RuntimeError: CUDA driver version is insufficient")
    assert [device["arch"] for device in found["devices"]] == ["cpu"]
