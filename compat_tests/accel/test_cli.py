"""`python -m accel`: every command, misuse, and `accel run` as a stand-in for `python`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import accel
from accel import __main__ as cli
from accel import running

ROOT = Path(accel.__file__).resolve().parent.parent


def run(cwd: Path, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """`python -m accel ...` of this checkout, from another folder."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("ACCEL_", "PYTHON"))}
    return subprocess.run(
        [sys.executable, "-m", "accel", *arguments],
        cwd=cwd,
        env={**inherited, "PYTHONPATH": str(ROOT), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", **environ},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def write(folder: Path, name: str, text: str) -> Path:
    (folder / name).write_text(textwrap.dedent(text))
    return folder / name


SCRIPT = """
    import atexit, pickle, sys, threading, accel

    class Mine:
        pass

    assert __name__ == "__main__" and sys.modules["__main__"].Mine is Mine
    assert isinstance(pickle.loads(pickle.dumps(Mine())), Mine)
    print("argv", sys.argv)
    print("file", __file__)
    print("path", sys.path[0])
    print("on", [row.name for row in accel.status() if row.state != "off"])
    atexit.register(lambda: print("at exit", sys.modules["__main__"].Mine is Mine))
    sys.exit(int(sys.argv[1]))
"""


def test_a_script_finds_what_it_finds_under_python(tmp_path: Path) -> None:
    folder = tmp_path / "scripts"
    folder.mkdir()
    script = write(folder, "script.py", SCRIPT)
    done = run(tmp_path, "run", "--targets", "transformers.mlp", "scripts/script.py", "5", "--targets", "x", "-m")
    assert done.returncode == 5, done.stderr
    assert done.stdout.splitlines() == [
        "argv ['scripts/script.py', '5', '--targets', 'x', '-m']",
        "file scripts/script.py",
        f"path {script.parent}",
        "on ['transformers.mlp']",
        "at exit True",
    ]


def test_modules_folders_and_failures(tmp_path: Path) -> None:
    write(tmp_path, "module.py", "import sys\nprint(__name__, __spec__.name, sys.argv[1:], sys.path[0])\n")
    done = run(tmp_path, "run", "--targets=transformers.mlp", "-m", "module", "--flag")
    assert done.stdout.strip() == f"__main__ module ['--flag'] {tmp_path}", done.stderr
    package = tmp_path / "program"
    package.mkdir()
    write(package, "__main__.py", "import sys\nprint('in a folder', __name__, sys.argv)\n")
    assert run(tmp_path, "run", "program", "x").stdout.strip() == "in a folder __main__ ['program', 'x']"
    script = write(tmp_path, "failing.py", "raise KeyError('mine')\n")
    done = run(tmp_path, "run", str(script))
    assert done.returncode == 1
    assert done.stderr.strip().endswith("KeyError: 'mine'")


def test_the_summary_and_the_variables_of_children(tmp_path: Path) -> None:
    script = write(tmp_path, "script.py", "import os\nprint(os.environ['ACCEL_TARGETS'], os.environ['ACCEL_STRICT'])\n")
    done = run(tmp_path, "run", "--targets", "transformers.mlp", "--strict", "--summary", str(script))
    assert done.stdout.strip() == "transformers.mlp 1"
    assert "no call was counted (compiled calls are not): transformers.mlp" in done.stderr
    done = run(tmp_path, "run", str(script), ACCEL_TARGETS="diffusers", ACCEL_STRICT="0")
    assert done.stdout.strip() == "diffusers 0", "what the environment asks for holds without --targets"


def test_forked_children_of_a_checkout_have_the_targets(tmp_path: Path) -> None:
    text = """
        import multiprocessing as mp, accel
        def on(_):
            return accel.is_accelerated("transformers.mlp")
        if __name__ == "__main__":
            with mp.get_context("fork").Pool(1) as pool:
                print(pool.map(on, [0]))
            with mp.get_context("spawn").Pool(1) as pool:
                print(pool.map(on, [0]))
    """
    done = run(tmp_path, "run", "--targets", "transformers.mlp", str(write(tmp_path, "script.py", text)))
    assert done.stdout.split() == ["[True]", "[False]"], done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "the following arguments are required: command"),
        (["nonsense"], "invalid choice: 'nonsense'"),
        (["doctor", "--nonsense"], "unrecognized arguments: --nonsense"),
        (["run"], "no script and no -m module"),
        (["run", "-m"], "no script and no -m module"),
        (["run", "--targets"], "expected one argument"),
        (["run", "--nonsense", "x.py"], "unrecognized arguments: --nonsense"),
        (["run", "no_such_file.py"], "no file 'no_such_file.py'"),
        (["run", "--targets", "nonsense", "x.py"], "unknown target 'nonsense'"),
        (["run", "--targets", " , ", "x.py"], "no target named"),
        (["bench", "nonsense"], "no benchmark 'nonsense'; there is "),
        (["build", "--arch", "sm_1", "norm"], "no compile target 'sm_1'"),
    ],
)
def test_misuse_says_what_is_wrong(
    arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("accel.autoload._done", True)
    write(tmp_path, "x.py", "raise AssertionError('it ran')")
    try:
        code = cli.main(arguments)
    except SystemExit as stop:
        code = stop.code
    assert code == 2
    output = capsys.readouterr()
    assert said in " ".join((output.err + output.out).split())
    assert not accel.is_accelerated()


def test_a_library_that_is_missing_stops_the_run(tmp_path: Path) -> None:
    (tmp_path / "diffusers").mkdir()
    (tmp_path / "diffusers" / "__init__.py").write_text("")
    (tmp_path / "diffusers-9.9.dist-info").mkdir()
    (tmp_path / "diffusers-9.9.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: diffusers\nVersion: 9.9\n"
    )
    script = write(tmp_path, "script.py", "print('ran')\n")
    done = run(tmp_path, "run", "--targets", "diffusers", str(script))
    assert (done.returncode, done.stdout) == (2, "")
    assert "diffusers 9.9 is outside the supported range" in done.stderr


def test_help_of_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["--help"])
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    for command in ("doctor", "status", "demo", "run", "build", "certify", "bench"):
        assert command in shown
        with pytest.raises(SystemExit) as stop:
            cli.main([command, "--help"])
        assert stop.value.code == 0
        assert f"accel {command}" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert capsys.readouterr().out.strip() == f"accel {accel.__version__}"


def test_status_as_data_and_text(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("ACCEL_TARGETS", "mlp,transformers.sdpa")
    monkeypatch.setenv("COLUMNS", "160")
    assert cli.main(["status", "--json"]) == 0
    rows = {row["target"]: row for row in json.loads(capsys.readouterr().out)}
    assert [*rows] == [target.name for target in accel.targets.TARGETS]
    on = {name for name, row in rows.items() if row["at start"] == "on"}
    assert on == {"fla.gated_mlp", "transformers.mlp", "transformers.sdpa"}
    assert rows["fla.cpu"]["default"] == "on, without a GPU"
    assert cli.main(["status"]) == 0
    shown = capsys.readouterr().out
    assert "transformers.rms_norm_gated" in shown
    assert "ACCEL_TARGETS=mlp,transformers.sdpa" in shown
    monkeypatch.setenv("ACCEL_TARGETS", "nonsense")
    assert cli.main(["status"]) == 0
    assert "a name is unknown" in capsys.readouterr().out


def test_a_reader_that_stops_reading_is_no_error(tmp_path: Path) -> None:
    command = f"{sys.executable} -m accel status --json | true"
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_bench_lists_and_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench"]) == 0
    assert "ops/norm" in capfd.readouterr().out.split()
    (tmp_path / "accel").mkdir()
    (tmp_path / "benchmarks" / "ops").mkdir(parents=True)
    write(tmp_path / "benchmarks" / "ops", "mine.py", "import sys\nprint('measured', sys.argv[1:])\n")
    monkeypatch.setattr(cli, "__file__", str(tmp_path / "accel" / "__main__.py"))
    monkeypatch.setattr(sys, "argv", ["accel"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    assert cli.main(["bench", "ops/mine", "--rows", "3"]) == 0
    assert capfd.readouterr().out.strip() == "measured ['--rows', '3']"
    monkeypatch.setattr(cli, "__file__", str(tmp_path / "elsewhere" / "accel" / "__main__.py"))
    assert cli.main(["bench"]) == 2
    assert "needs a source checkout" in capfd.readouterr().err


def test_demo_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    from accel import demo

    monkeypatch.setattr(demo, "main", lambda: 7)
    assert cli.main(["demo"]) == 7


def test_demo_and_certify_without_torch(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('no torch here')\n")
    for command in ("demo", "certify"):
        done = run(tmp_path, command, PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")
        assert done.returncode == 1
        assert "no torch here" in done.stderr
        assert "Traceback" not in done.stderr


def test_what_precedes_the_script_is_ours() -> None:
    for words, split in (
        (["script.py", "--strict"], 0),
        (["--strict", "script.py", "--targets", "x"], 1),
        (["--targets", "a,b", "--summary", "-m", "module"], 3),
        (["--targets=a", "script.py"], 1),
        (["--targets"], 1),
        ([], 0),
    ):
        assert running._first_word(words) == split
