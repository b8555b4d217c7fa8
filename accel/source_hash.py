"""The source hash that a certificate is bound to: what a kernel computes, blind to comments and formatting.

Hashed are the kernel's device file (`any_*.py`, `sm<digits>_*.py`; for a whole family all of them) and every module
below accel.kernels that it imports, directly or not, except kernels/runtime/. Each is parsed and its syntax tree
written out by `serialise`, which gives the same text on every Python from 3.10 on: node types and fields, leaving out
what is None, empty lists, docstrings, `kind` and `type_comment`.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

_DEVICE_FILE = re.compile(r"(any|sm\d+)_\w+\.py")
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@cache
def kernels_folder() -> Path:
    """The folder that is accel.kernels: kernels/ of a checkout, accel/kernels/ of an installed package."""
    return Path(next(iter(importlib.import_module("accel.kernels").__path__)))


@cache
def source_hash(family: str, kernel: str | None = None) -> str:
    """Hex sha256 of the device code of a kernel (the name of its device file), or of the whole family.

    Raises OSError if a file cannot be read, ValueError if there is none.
    """
    return hash_files(kernels_folder(), family, kernel)


def hash_files(root: Path, family: str, kernel: str | None = None) -> str:
    """`source_hash` for the kernels folder `root`."""
    digest = hashlib.sha256()
    for name, tree in sorted(_device_modules(root, family, kernel).items()):
        digest.update(f"{name}\n{serialise(tree)}\n".encode())
    return digest.hexdigest()


def device_files(root: Path, family: str) -> list[Path]:
    """The family's own device files, in order; empty for a family in plain torch."""
    return sorted(path for path in (root / family).glob("*.py") if _DEVICE_FILE.fullmatch(path.name))


def _device_modules(root: Path, family: str, kernel: str | None) -> dict[str, ast.Module]:
    """Path below `root` -> syntax tree of each device file and of all it imports."""
    waiting = [path for path in device_files(root, family) if kernel in (None, path.stem)]
    if not waiting:
        what = (
            f"kernel family {family!r} has no device files"
            if kernel is None
            else f"there is no device file {kernel}.py"
        )
        raise ValueError(f"{what} in {root / family}")
    trees: dict[str, ast.Module] = {}
    while waiting:
        path = waiting.pop()
        name = path.relative_to(root).as_posix()
        if name not in trees:
            trees[name] = ast.parse(path.read_bytes(), filename=str(path))
            package = path.relative_to(root).parent.parts
            waiting += [found for parts in _imports(trees[name], package) for found in _files(root, parts)]
    return trees


def _imports(tree: ast.Module, package: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Module paths below accel.kernels that the module, which lies in `package`, may import."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("accel.kernels."):
                    yield tuple(alias.name.split(".")[2:])
        elif isinstance(node, ast.ImportFrom):
            named = tuple((node.module or "").split(".")) if node.module else ()
            if node.level:
                full = ("accel", "kernels", *package)
                full = (*full[: len(full) - node.level + 1], *named)
            else:
                full = named
            for alias in node.names:
                if (*full, alias.name)[:2] == ("accel", "kernels"):
                    yield (*full, alias.name)[2:]


def _files(root: Path, parts: tuple[str, ...]) -> list[Path]:
    """The file behind a module path, whose last part may be a name inside the module instead of a module.

    A package's own __init__ counts where a name is imported from it that is no module of it.
    """
    if not parts or parts[0] == "runtime":
        return []
    for length in (len(parts), len(parts) - 1):
        place = root.joinpath(*parts[:length])
        found = [path for path in (place.with_suffix(".py"), place / "__init__.py") if length and path.is_file()]
        if found:
            return found[:1]
    return []


def serialise(node: object) -> str:
    """A syntax tree as text that is the same on every Python version; see the module's docstring."""
    if isinstance(node, ast.AST):
        parts = []
        for field, value in ast.iter_fields(node):
            if field == "body" and isinstance(node, _DOCUMENTED) and _opens_with_docstring(value):
                value = value[1:]
            elif field == "values" and isinstance(node, ast.JoinedStr):
                value = _joined(value)
            elif field == "format_spec" and isinstance(value, ast.JoinedStr) and not _joined(value.values):
                continue
            if value is None or value == [] or field in ("kind", "type_comment"):
                continue
            parts.append(f"{field}={serialise(value)}")
        return f"{type(node).__name__}({','.join(sorted(parts))})"
    if isinstance(node, list):
        return f"[{','.join(map(serialise, node))}]"
    # ascii, not repr: which characters repr escapes depends on the Unicode tables of the Python version.
    return f"{type(node).__name__}:{node!a}"


def _opens_with_docstring(body: list[ast.stmt]) -> bool:
    first = body[0] if body else None
    return isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)


def _joined(values: list[ast.expr]) -> list[ast.expr]:
    """The parts of an f-string with neighbouring text in one piece: how text is split differs between versions."""
    joined: list[ast.expr] = []
    for value in values:
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            if joined and isinstance(joined[-1], ast.Constant):
                joined[-1] = ast.Constant(str(joined[-1].value) + value.value)
            elif value.value:
                joined.append(ast.Constant(value.value))
        else:
            joined.append(value)
    return joined
