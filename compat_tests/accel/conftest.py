"""A small upstream library made for one test with the targets that patch it, and environments with accel installed."""

from __future__ import annotations

import importlib
import itertools
import os
import shutil
import subprocess
import sys
import sysconfig
import textwrap
import types
import venv
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

import accel
from accel import serve, targets
from accel.activation import Report
from accel.outcome import Choice, Decline, Declined
from accel.state import STATES, TargetState
from accel.targets import Target

_numbers = itertools.count()

OPS = """
    def scale(x, factor=2.0, *, bias=None):
        \"\"\"x times factor, plus bias.\"\"\"
        return x * factor if bias is None else x * factor + bias

    also_scale = scale

    def shift(x):
        \"\"\"Another function.\"\"\"
        return x + 1
"""
LAYERS = """
    import torch
    from {name}.ops import scale as renamed

    class Double(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.full((1,), 2.0))

        def forward(self, x):
            return x * self.weight

    class Held:
        def call(self, x):
            return renamed(x)
"""


@dataclass(frozen=True)
class Facts:
    """What the made-up family decides on."""

    size: int
    dtype: str
    needs_grad: bool = False


@dataclass
class Adapter:
    """Serves `scale(x, factor)` and `Double.forward(self, x)`; every part can be exchanged by a test."""

    family: str = "made_up"
    in_place: bool = False
    kernel: str = "portable"
    decline: str | None = None  #: reason for `facts` to decline with
    ran: list[Choice] = field(default_factory=list)
    planned: list[Facts] = field(default_factory=list)
    compute: Callable[..., Any] | None = None  #: stands in for the kernel

    def facts(self, *args: Any, **kwargs: Any) -> tuple[Facts, torch.device]:
        if self.decline is not None:
            raise Decline(self.decline)
        x = next(value for value in args if isinstance(value, torch.Tensor))
        needs_grad = torch.is_grad_enabled() and x.requires_grad
        return Facts(x.shape[-1], str(x.dtype), needs_grad), x.device

    def plan(self, facts: Facts, arch: str) -> Choice | Declined:
        self.planned.append(facts)
        if facts.size > 1000:
            return Declined(f"size={facts.size} > 1000 on {arch}")
        return Choice(self.family, self.kernel)

    def run(self, choice: Choice, *args: Any, **kwargs: Any) -> Any:
        self.ran.append(choice)
        if self.compute is not None:
            return self.compute(*args, **kwargs)
        if isinstance(args[0], torch.nn.Module):
            return args[1] * args[0].weight
        factor = args[1] if len(args) > 1 else kwargs.get("factor", 2.0)
        bias = kwargs.get("bias")
        return args[0] * factor if bias is None else args[0] * factor + bias

    def compiled(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs)


class Upstream:
    """The library on disk, its targets `<name>.scale` and `<name>.double`, and their adapters."""

    def __init__(self, folder: Path) -> None:
        self.name = f"made_up_{next(_numbers)}"
        self.folder = folder / self.name
        self.folder.mkdir()
        self.adapters: dict[str, Adapter] = {"scale": Adapter(), "double": Adapter()}
        self.looked_at: list[str] = []
        self.write("__init__", "")
        self.write("ops", OPS)
        self.write("layers", LAYERS.format(name=self.name))

    def write(self, module: str, text: str) -> None:
        (self.folder / f"{module}.py").write_text(textwrap.dedent(text))
        importlib.invalidate_caches()

    def module(self, name: str) -> Any:
        return importlib.import_module(f"{self.name}.{name}")

    def loaded(self, name: str) -> bool:
        return f"{self.name}.{name}" in sys.modules

    def state(self, op: str) -> TargetState:
        return STATES[f"{self.name}.{op}"]

    def on(self, *ops: str, strict: bool = False) -> Report:
        return accel.accelerate([f"{self.name}.{op}" for op in ops or ("scale", "double")], strict=strict)

    def call(self, op: str) -> serve.ServedCall:
        (call,) = serve.calls_of(self.state(op))
        return call

    def patch(self, module: Any, state: TargetState) -> list[Any]:
        """The adapter module's `patch`."""
        self.looked_at.append(module.__name__)
        if state.name.endswith(".scale"):
            return serve.everywhere(module, "scale", self.adapters["scale"], state)
        return serve.attribute(module.Double, "forward", self.adapters["double"], state)


@pytest.fixture
def upstream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Upstream]:
    """A library that is installed, not imported yet, with two targets of the group of its name."""
    library = Upstream(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    dist = tmp_path / f"{library.name}-1.2.dist-info"
    dist.mkdir()
    (dist / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {library.name}\nVersion: 1.2\n")
    adapter = types.ModuleType(f"accel.patches.{library.name}.adapter")
    adapter.patch = library.patch  # type: ignore[attr-defined]
    package = types.ModuleType(f"accel.patches.{library.name}.package")
    package.IMPORT_NAME, package.DISTRIBUTIONS, package.SUPPORTED = library.name, (library.name,), ">=1,<2"
    parent = types.ModuleType(f"accel.patches.{library.name}")
    parent.__path__ = []
    for module in (parent, adapter, package):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    made = (
        Target(f"{library.name}.scale", "scaling", "`scale`", f"{library.name}.adapter", (f"{library.name}.ops",)),
        Target(f"{library.name}.double", None, "`Double`", f"{library.name}.adapter", (f"{library.name}.layers",)),
    )
    register(monkeypatch, made)
    yield library
    accel.restore([target.name for target in made])
    for name in [name for name in sys.modules if name.partition(".")[0] == library.name]:
        del sys.modules[name]


def register(monkeypatch: pytest.MonkeyPatch, made: tuple[Target, ...]) -> None:
    """Add targets to the table for one test."""
    from accel import activation

    table = (*targets.TARGETS, *made)
    for module in (targets, activation):
        monkeypatch.setattr(module, "TARGETS", table)
    monkeypatch.setattr(targets, "GROUPS", tuple(dict.fromkeys(target.group for target in table)))
    monkeypatch.setattr(targets, "ALIASES", tuple(dict.fromkeys(t.alias for t in table if t.alias)))
    for target in made:
        monkeypatch.setitem(targets.BY_NAME, target.name, target)
        monkeypatch.setitem(STATES, target.name, TargetState(target))


# --- Installations ---------------------------------------------------------------------------------------------------

ROOT = Path(accel.__file__).resolve().parent.parent
PACKAGED = ("accel", "kernels", "patches")


@dataclass(frozen=True)
class Installation:
    """A Python environment with accel in it; torch and the libraries are those of the one that runs the tests."""

    python: Path
    site: Path  #: its site-packages

    def run(
        self, *arguments: str, cwd: Path, environ: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run this Python; ACCEL_ and PYTHON variables of the tests are not passed on."""
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("ACCEL_", "PYTHON"))}
        environ = {**inherited, "PYTHONDONTWRITEBYTECODE": "1", **(environ or {})}
        return subprocess.run(
            [str(self.python), *arguments],
            cwd=cwd,
            env=environ,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )


@pytest.fixture(scope="session")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what a checkout holds, so that building leaves nothing in the real one."""
    copy = tmp_path_factory.mktemp("checkout")
    for name in PACKAGED:
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", ".*"))
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE", "accel_autoload.pth"):
        shutil.copy(ROOT / name, copy)
    return copy


def pip(*arguments: str | Path) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def bare(folder: Path) -> Installation:
    """An environment that sees this one's packages, by a .pth that is read after accel's own."""
    venv.create(folder, with_pip=False, symlinks=True)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    made = Installation(folder / "bin" / "python", folder / "lib" / version / "site-packages")
    (made.site / "zz_libraries.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    return made


@pytest.fixture(scope="session")
def installations() -> types.SimpleNamespace:
    """The helpers above, for tests that make their own."""
    return types.SimpleNamespace(bare=bare, pip=pip)


@pytest.fixture(scope="session")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built once."""
    into = tmp_path_factory.mktemp("wheel")
    source = tmp_path_factory.mktemp("source") / "tree"
    shutil.copytree(checkout, source)
    pip("wheel", "--no-deps", "--no-build-isolation", "-w", into, source)
    (built,) = into.glob("*.whl")
    return built


@pytest.fixture(scope="session")
def from_wheel(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installation:
    made = bare(tmp_path_factory.mktemp("from_wheel"))
    pip("--python", made.python, "install", "--no-deps", "--no-index", "--no-compile", wheel)
    return made
