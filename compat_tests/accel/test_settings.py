"""The settings table: defaults, every allowed value, every refusal, and what a typo gets to hear."""

from __future__ import annotations

import ast
import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

from accel import settings

ROOT = Path(__file__).resolve().parents[2]
HOME = {"HOME": "/home/somebody"}


def test_defaults() -> None:
    assert settings.read(HOME) == settings.Settings(cache_dir=Path("/home/somebody/.cache/accel"))


def test_an_empty_value_is_not_set() -> None:
    empty = {variable.name: " " for variable in settings.describe()}
    assert settings.read({**HOME, **empty}) == settings.read(HOME)


@pytest.mark.parametrize(
    ("name", "value", "field", "expected"),
    [
        ("ACCEL_TARGETS", "all", "targets", ("all",)),
        ("ACCEL_TARGETS", " fla, transformers.mlp ,fla,", "targets", ("fla", "transformers.mlp")),
        ("ACCEL_STRICT", "0", "strict", False),
        ("ACCEL_STRICT", "1", "strict", True),
        ("ACCEL_VERIFY", "0", "verify", 0),
        ("ACCEL_VERIFY", "12", "verify", 12),
        ("ACCEL_UNCERTIFIED", "1", "uncertified", True),
        ("ACCEL_CACHE_DIR", "/data//kernels/", "cache_dir", Path("/data/kernels")),
        ("ACCEL_CACHE_DIR", "~/kernels", "cache_dir", Path("/home/somebody/kernels")),
        ("ACCEL_CACHE_DIR", "~", "cache_dir", Path("/home/somebody")),
        ("ACCEL_LOG", "debug", "log", "debug"),
        ("ACCEL_LOG", "OFF", "log", "off"),
        ("ACCEL_COMPILE_TARGET", "sm_90a", "compile_target", "sm_90a"),
    ],
)
def test_allowed_values(name: str, value: str, field: str, expected: object) -> None:
    assert getattr(settings.read({**HOME, name: value}), field) == expected


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("ACCEL_TARGETS", " , ", "commas"),
        ("ACCEL_STRICT", "yes", "0 or 1"),
        ("ACCEL_STRICT", "2", "0 or 1"),
        ("ACCEL_VERIFY", "-1", "0 or more"),
        ("ACCEL_VERIFY", "1.5", "0 or more"),
        ("ACCEL_VERIFY", "²", "0 or more"),
        ("ACCEL_UNCERTIFIED", "true", "0 or 1"),
        ("ACCEL_CACHE_DIR", "kernels", "absolute path"),
        ("ACCEL_CACHE_DIR", "~somebody/kernels", "absolute path"),
        ("ACCEL_LOG", "loud", "debug, info, warning, error, off"),
        ("ACCEL_COMPILE_TARGET", "sm_90", "sm_90a"),
    ],
)
def test_a_bad_value_names_variable_value_and_what_is_allowed(name: str, value: str, allowed: str) -> None:
    with pytest.raises(ValueError) as caught:
        settings.read({**HOME, name: value})
    message = str(caught.value)
    assert f"{name}={value.strip()!r}" in message and allowed in message


def test_unknown_names_are_listed_with_the_known_ones() -> None:
    environ = {
        **HOME,
        "ACCEL_TARGET": "all",
        "ACCEL_verify": "1",
        "ACCELERATE_MIXED_PRECISION": "bf16",
        "ACCEL_LOG": "info",
    }
    warnings = settings.unknown_names(environ)
    assert [warning.split()[0] for warning in warnings] == ["ACCEL_TARGET", "ACCEL_verify"]
    assert all(variable.name in warning for warning in warnings for variable in settings.describe())
    settings.read(environ)  # a warning, not an error


def test_the_cache_folder_follows_the_platform() -> None:
    assert settings.default_cache_dir({**HOME, "XDG_CACHE_HOME": "/xdg"}) == Path("/xdg/accel")
    assert settings.default_cache_dir({**HOME, "XDG_CACHE_HOME": "not/absolute"}) == Path("/home/somebody/.cache/accel")
    without_home = settings.default_cache_dir({})
    assert without_home.is_absolute() and without_home.name == "accel"


def test_a_user_without_a_home_gets_a_folder_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    import pwd

    def nobody(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", nobody)
    assert settings.default_cache_dir({}).name == f"accel-{os.getuid()}"


def test_one_variable_per_field_and_all_documented() -> None:
    table = settings.describe()
    assert [variable.field for variable in table] == [field.name for field in dataclasses.fields(settings.Settings)]
    assert all(variable.name == settings.PREFIX + variable.field.upper() for variable in table)
    markdown = settings.markdown()
    for variable in table:
        assert f"| `{variable.name}` | {variable.values} | {variable.default} | {variable.meaning} |" in markdown


def test_every_architecture_of_the_runtime_can_be_named() -> None:
    from accel.kernels.runtime import arch

    assert sorted({arch.compile_target(known) for known in arch.known_archs()}) == sorted(settings.COMPILE_TARGETS)


def test_the_module_is_a_leaf_that_reads_nothing_at_import() -> None:
    tree = ast.parse(Path(settings.__file__).read_text(encoding="utf-8"))
    imported = {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    imported |= {"." * node.level + (node.module or "") for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.split(".")[0] for name in imported} <= set(sys.stdlib_module_names)

    environ = {**os.environ, "ACCEL_STRICT": "nonsense", "PYTHONPATH": str(ROOT)}
    script = "import sys; from accel import settings; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], env=environ, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
