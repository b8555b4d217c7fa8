"""Every environment variable of accel, in one table: name, allowed values, default, meaning.

A leaf module: it imports nothing of the project, and every other layer may import it. Nothing is read at import;
`read()` is called when accel is enabled or a cache or certificate is first looked up. An empty value means "not set".
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

PREFIX = "ACCEL_"
LOG_LEVELS = ("debug", "info", "warning", "error", "off")
COMPILE_TARGETS = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_103a", "sm_120a")


@dataclass(frozen=True, slots=True)
class Settings:
    """What the environment asks for; see `describe()` for the variable behind each field."""

    targets: tuple[str, ...] = ()  #: applied at start-up; names are checked by the target registry
    strict: bool = False
    verify: int = 0  #: shadow-verify the first n calls of each configuration
    uncertified: bool = False  #: serve with kernels that hold no valid certificate
    cache_dir: Path = Path()  #: absolute; holds compiled kernels and the user's own certificates
    log: str = "warning"  #: one of LOG_LEVELS
    compile_target: str | None = None  #: None: what the GPU at hand runs


@dataclass(frozen=True, slots=True)
class Variable:
    """One row of the table."""

    name: str  #: with the prefix
    field: str  #: the field of Settings it fills
    values: str  #: the allowed values, for people
    default: str  #: what holds without it, for people
    meaning: str
    parse: Callable[[str, Mapping[str, str]], object]  #: value, environment -> field; ValueError if not allowed


def _switch(value: str, environ: Mapping[str, str]) -> bool:
    if value not in ("0", "1"):
        raise ValueError
    return value == "1"


def _count(value: str, environ: Mapping[str, str]) -> int:
    if not (value.isascii() and value.isdigit()):
        raise ValueError
    return int(value)


def _names(value: str, environ: Mapping[str, str]) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name.strip() for name in value.split(",") if name.strip()))
    if not names:
        raise ValueError
    return names


def _level(value: str, environ: Mapping[str, str]) -> str:
    if value.lower() not in LOG_LEVELS:
        raise ValueError
    return value.lower()


def _folder(value: str, environ: Mapping[str, str]) -> Path:
    home = _home(environ)
    if home is not None and (value == "~" or value.startswith("~/")):
        value = os.path.join(home, value[2:])
    if not os.path.isabs(value):
        raise ValueError
    return Path(os.path.normpath(value))


def _compile_target(value: str, environ: Mapping[str, str]) -> str:
    if value not in COMPILE_TARGETS:
        raise ValueError
    return value


_TABLE: tuple[Variable, ...] = (
    Variable(
        "ACCEL_TARGETS",
        "targets",
        "target, alias or group names, separated by commas",
        "none",
        "targets switched on when Python starts, e.g. `all`, `fla` or `transformers.rms_norm,mlp`",
        _names,
    ),
    Variable(
        "ACCEL_STRICT",
        "strict",
        "0 or 1",
        "0",
        "1: a kernel that fails to build, or a named target that cannot be served here, raises instead of falling back",
        _switch,
    ),
    Variable(
        "ACCEL_VERIFY",
        "verify",
        "a whole number, 0 or more",
        "0",
        "compare the first n calls of each configuration with upstream's own result; stop serving it on a mismatch",
        _count,
    ),
    Variable(
        "ACCEL_UNCERTIFIED",
        "uncertified",
        "0 or 1",
        "0",
        "1: serve with kernels that hold no valid certificate for this GPU (their results were not checked here)",
        _switch,
    ),
    Variable(
        "ACCEL_CACHE_DIR",
        "cache_dir",
        "an absolute path, or one that starts with ~/",
        "$XDG_CACHE_HOME/accel, else ~/.cache/accel",
        "folder of compiled kernels and of your own certificates; only its owner may be able to write there",
        _folder,
    ),
    Variable(
        "ACCEL_LOG",
        "log",
        ", ".join(LOG_LEVELS),
        "warning",
        "lowest level that accel logs",
        _level,
    ),
    Variable(
        "ACCEL_COMPILE_TARGET",
        "compile_target",
        ", ".join(COMPILE_TARGETS),
        "what the GPU at hand runs",
        "architecture that kernels are compiled for; set it to compile on a machine without a GPU",
        _compile_target,
    ),
)


def read(environ: Mapping[str, str] | None = None) -> Settings:
    """Settings of `environ` (default: this process's environment).

    Raises ValueError naming the variable, the value and the allowed values. Unknown names are no error here: see
    `unknown_names`.
    """
    environ = os.environ if environ is None else environ
    fields: dict[str, object] = {}
    for variable in _TABLE:
        value = environ.get(variable.name, "").strip()
        if not value:
            continue
        try:
            fields[variable.field] = variable.parse(value, environ)
        except ValueError:
            raise ValueError(f"{variable.name}={value!r}: allowed is {variable.values}") from None
    fields.setdefault("cache_dir", default_cache_dir(environ))
    return Settings(**fields)  # type: ignore[arg-type]


def unknown_names(environ: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """One warning per variable that carries our prefix and that accel does not know, each listing the known ones."""
    environ = os.environ if environ is None else environ
    known = [variable.name for variable in _TABLE]
    unknown = sorted(name for name in environ if name.startswith(PREFIX) and name not in known)
    return tuple(f"{name} is no setting of accel and has no effect; known are {', '.join(known)}" for name in unknown)


def describe() -> tuple[Variable, ...]:
    """The table, row by row, for `accel doctor` and the documentation."""
    return _TABLE


def markdown() -> str:
    """The table as the documentation shows it."""
    rows = [f"| `{v.name}` | {v.values} | {v.default} | {v.meaning} |" for v in _TABLE]
    return "\n".join(["| variable | values | default | meaning |", "|---|---|---|---|", *rows])


def default_cache_dir(environ: Mapping[str, str] | None = None) -> Path:
    """The user's cache folder of this platform: XDG_CACHE_HOME where it is absolute, else ~/.cache.

    A user without a home (seen in containers that run under a bare numeric id) gets a folder named by that id in the
    temporary directory; the cache refuses it if somebody else made it.
    """
    environ = os.environ if environ is None else environ
    base = environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):
        return Path(os.path.normpath(base)) / "accel"
    home = _home(environ)
    if home is not None:
        return Path(home) / ".cache" / "accel"
    import tempfile  # 10 ms to import, and next to nobody comes here

    return Path(tempfile.gettempdir()) / f"accel-{os.getuid()}"


def _home(environ: Mapping[str, str]) -> str | None:
    home = environ.get("HOME", "")
    if os.path.isabs(home):
        return home
    try:
        import pwd  # absent on Windows

        home = pwd.getpwuid(os.getuid()).pw_dir
    except (ImportError, KeyError):
        return None
    return home if os.path.isabs(home) else None
