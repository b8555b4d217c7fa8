"""`accel build`: what is compiled ahead of time lands in the cache, and one failure does not stop the rest."""

from __future__ import annotations

import argparse
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from accel import building, certificates
from accel.kernels.runtime import cache


def compiling(key: str) -> Callable[[], object]:
    return lambda: cache.store(key * 20, lambda path: path.write_bytes(b"code"))


def failing() -> object:
    raise RuntimeError("ptxas:\n  out of registers")


@pytest.fixture
def families(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Callable[[str], object]]]:
    """Family name -> its `builds`, for two families with device code; the cache is this test's own."""
    hooks: dict[str, Callable[[str], object]] = {
        "one": lambda target: [(f"small for {target}", compiling("a1")), ("broken", failing)],
        "two": lambda target: iter([("large", compiling("b2"))]),
    }
    for name in ("one", "two", "plain"):
        (tmp_path / "kernels" / name).mkdir(parents=True)
        (tmp_path / "kernels" / name / "launch.py").touch()
    for name in ("one", "two"):
        (tmp_path / "kernels" / name / "any_fwd.py").touch()
        launch = types.ModuleType("launch")
        launch.builds = lambda target, name=name: hooks[name](target)  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, f"accel.kernels.{name}", types.ModuleType(name))
        monkeypatch.setitem(sys.modules, f"accel.kernels.{name}.launch", launch)
    monkeypatch.setattr(building, "kernels_folder", lambda: tmp_path / "kernels")
    monkeypatch.setenv("ACCEL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("ACCEL_COMPILE_TARGET", raising=False)
    monkeypatch.setattr(building, "dsl_version", lambda: "4.8.1")
    monkeypatch.setattr(cache, "_private_store", None)
    monkeypatch.setattr(cache, "_logged", set())
    yield hooks


def test_all_families_are_built_and_failures_are_named(families: dict[str, object], tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    report = building.build("sm_90a", progress=lambda *step: seen.append(step))
    assert report.built == ["one: small for sm_90a", "two: large"]
    assert report.failed == {"one: broken": "RuntimeError: ptxas: out of registers"}
    assert (report.target, report.folder, report.added) == ("sm_90a", tmp_path / "cache" / "kernels", 2)
    assert seen == [("one: small for sm_90a", 0, 3), ("one: broken", 1, 3), ("two: large", 2, 3)]
    assert [entry.key[:2] for entry in cache.entries()] == ["a1", "b2"]
    again = building.build("sm_90a", ["two"])
    assert (again.built, again.failed, again.added) == (["two: large"], {}, 0)


def test_a_family_that_cannot_list_its_kernels_does_not_stop_the_rest(families: dict[str, object]) -> None:
    families["one"] = lambda target: failing()
    report = building.build("sm_80")
    assert report.built == ["two: large"] and report.failed == {"one": "RuntimeError: ptxas: out of registers"}


def test_requests_that_cannot_be_met_raise(families: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"no compile target 'sm_90'; known are sm_80, .*sm_90a"):
        building.build("sm_90")
    with pytest.raises(ValueError, match="no kernel family 'three' to build; there is one, two"):
        building.build("sm_90a", ["one", "three"])
    monkeypatch.setattr(building, "dsl_version", lambda: None)
    with pytest.raises(RuntimeError, match=r"nvidia-cutlass-dsl is not installed: pip install"):
        building.build("sm_90a")


def test_a_cache_that_cannot_be_used_is_an_error(families: dict[str, object], tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)
    with pytest.raises(RuntimeError, match="mode 0777"):
        building.build("sm_90a")

    (tmp_path / "cache").chmod(0o700)

    def breaking(target: str) -> Iterator[tuple[str, Callable[[], object]]]:
        """The folder becomes unusable while building."""
        yield "first", lambda: (tmp_path / "cache").chmod(0o777) or compiling("c3")()  # type: ignore[func-returns-value]
        yield "second", failing

    families["one"] = breaking
    with pytest.raises(RuntimeError, match="could not be written; 1 of 2 were built"):
        building.build("sm_90a", ["one"])


def command(*words: str) -> int:
    parser = argparse.ArgumentParser()
    building.add_arguments(parser)
    return building.command(parser.parse_args(words))


def test_the_command(
    families: dict[str, object], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert command("--arch", "sm_90a") == 1
    out = capsys.readouterr().out
    assert "failed one: broken: RuntimeError: ptxas: out of registers" in out
    assert f"2 kernels for sm_90a, 1 failed, 2 new files in {tmp_path / 'cache' / 'kernels'}" in out
    monkeypatch.setenv("ACCEL_COMPILE_TARGET", "sm_80")
    assert command("two") == 0
    assert "1 kernels for sm_80, 0 failed, 0 new files" in capsys.readouterr().out
    assert command("--arch", "gfx942") == 2
    assert "no compile target 'gfx942'" in capsys.readouterr().out


def test_without_a_gpu_the_command_asks_for_the_target(
    families: dict[str, object], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert command() == 2
    assert "say which to build for, --arch sm_80" in capsys.readouterr().out


def test_real_families_list_what_they_build_without_compiling() -> None:
    """Every family with device code has the hook, with unique names, for the target of today's certificates."""
    assert building.families() and certificates.DSL == building.DSL
    for family in building.families():
        names = [name for name, _ in building._builds(family)("sm_90a")]
        assert names and len(names) == len(set(names)), family
