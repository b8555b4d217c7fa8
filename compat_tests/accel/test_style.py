"""The house rules that a machine can check: layout, sizes, the direction of imports, words that do not belong."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import accel

ROOT = Path(accel.__file__).resolve().parent.parent
FOLDERS = ("accel", "benchmarks", "compat_tests", "kernels", "patches")
FILES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py") if "__pycache__" not in path.parts)
UPSTREAM = {"fla", "transformers", "diffusers"}
LINES = 600
DEVICE_LINES = 1000  #: of a file with one device kernel
FUNCTION_LINES = 80  #: below the signature: an adapter writes out upstream's, a line for each parameter


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def is_device_code(path: Path) -> bool:
    return path.is_relative_to(ROOT / "kernels") and re.match(r"(any|sm\d+)_", path.name) is not None


def imports_of(tree: ast.AST, *, at_import: bool = False) -> Iterator[str]:
    """Names of the modules imported anywhere, or only of those imported while the module is."""
    nodes = at_import_time(tree) if at_import else ast.walk(tree)
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def at_import_time(tree: ast.AST) -> Iterator[ast.AST]:
    """Every node that runs while the module is imported: not bodies of functions, nor `if TYPE_CHECKING:`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        yield node
        yield from at_import_time(node)


def test_no_folder_of_ours_shadows_another_package() -> None:
    assert not (ROOT / "kernels" / "__init__.py").exists(), "it would be taken for Hugging Face's kernels"
    assert not (ROOT / "patches" / "__init__.py").exists()
    assert not list((ROOT / "compat_tests").rglob("__init__.py")), "pytest would put the root in front of sys.path"
    for name in ("kernels", "patches"):
        assert not (ROOT / "accel" / name).exists()
    code = (
        "import importlib.util as u; print(*(getattr(u.find_spec(n), 'origin', None) for n in ('kernels', 'patches')))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert str(ROOT) not in done.stdout, "nothing of ours is found under these names, from the root either"


def test_a_file_is_one_sitting_and_says_what_it_is() -> None:
    lines = {path: path.read_text().count("\n") for path in FILES}
    limits = {path: DEVICE_LINES if is_device_code(path) else LINES for path in FILES}
    assert {name_of(path): lines[path] for path in FILES if lines[path] > limits[path]} == {}
    assert [name_of(path) for path in FILES if not ast.get_docstring(tree_of(path))] == []
    assert [name_of(path) for path in FILES if "\t" in path.read_text() or "\r" in path.read_text()] == []


def test_ours_is_imported_under_accel_only() -> None:
    bare = {
        f"{name_of(path)}: {name}"
        for path in FILES
        for name in imports_of(tree_of(path))
        if name.partition(".")[0] in ("kernels", "patches")
    }
    assert bare == set()


def test_host_functions_are_short() -> None:
    long = {
        f"{name_of(path)}: {node.name}": lines
        for path in FILES
        if not is_device_code(path)
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.FunctionDef)
        and (lines := (node.end_lineno or 0) - node.body[0].lineno + 1) > FUNCTION_LINES
    }
    assert long == {}


def offending(folder: str, wrong: Callable[[Path, str], bool], *, at_import: bool) -> set[str]:
    """Imports of the files of a folder that are wrong."""
    return {
        f"{name_of(path)}: {name}"
        for path in FILES
        if path.is_relative_to(ROOT / folder)
        for name in imports_of(tree_of(path), at_import=at_import)
        if wrong(path, name)
    }


def test_kernels_know_no_library_and_of_accel_only_the_leaves() -> None:
    leaves = ("accel.kernels", "accel.outcome", "accel.settings")

    def wrong(path: Path, name: str) -> bool:
        return name.partition(".")[0] in UPSTREAM or (name.startswith("accel.") and not name.startswith(leaves))

    assert offending("kernels", wrong, at_import=False) == set()


def test_adapters_hold_no_kernel_code_and_import_nothing_to_patch_it() -> None:
    def upstream(path: Path, name: str) -> bool:
        return name.partition(".")[0] in UPSTREAM

    def device(path: Path, name: str) -> bool:
        return name.startswith(("cutlass", "triton"))

    assert offending("patches", upstream, at_import=True) == set()
    assert offending("patches", device, at_import=False) == set()


def test_importing_accel_imports_nothing_heavy() -> None:
    heavy = UPSTREAM | {"torch", "wrapt", "rich", "cutlass", "triton", "tvm_ffi", "numpy"}
    light = "__init__ __main__ activation autoload building doctor imports outcome rebind report running settings state"

    def wrong(path: Path, name: str) -> bool:
        if path.stem in (*light.split(), "targets"):
            return name.partition(".")[0] in heavy or name.startswith(("accel.kernels", "accel.patches"))
        return name.partition(".")[0] in UPSTREAM

    assert offending("accel", wrong, at_import=True) == set()


#: Spelled so that this file does not contain them.
WORDS = ("TO" + "DO", "FIX" + "ME", "XX" + "X ", "HA" + "CK")
PLACES = tuple("/" + place for place in ("work/main", "work/shared", "root/", "tmp/team", "Users/"))


def test_no_leftovers() -> None:
    texts = {path: path.read_text() for path in [*FILES, *ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]}
    found = {f"{name_of(path)}: {word}" for path, text in texts.items() for word in (*WORDS, *PLACES) if word in text}
    assert found == set()


def test_every_variable_is_in_the_table() -> None:
    """An ACCEL_ name that somebody reads or documents is a setting."""
    known = {variable.name for variable in accel.settings.describe()}
    named: dict[str, set[str]] = {}
    for path in [*FILES, *ROOT.glob("*.md")]:
        if path.is_relative_to(ROOT / "compat_tests"):
            continue
        for name in re.findall(r"\bACCEL_[A-Z_]*[A-Z]\b", path.read_text()):
            named.setdefault(name, set()).add(path.relative_to(ROOT).as_posix())
    assert {name: places for name, places in named.items() if name not in known} == {}
    for folder in ("accel", "kernels", "patches"):
        for path in (ROOT / folder).rglob("*.py"):
            if path.name not in ("settings.py", "doctor.py"):
                read = re.findall(
                    r"environ\.get\(['\"]ACCEL_\w+|environ\[['\"]ACCEL_\w+['\"]\](?! = )", path.read_text()
                )
                assert read == [], f"{path}: settings are read in accel/settings.py"
