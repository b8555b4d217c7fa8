"""The ways a callable is replaced and put back. Each is an object with `apply()` and `undo()`, both idempotent.

Undo comes from the record of what was replaced. A holder that somebody else patched over meanwhile is left alone and
named in what `undo()` returns: our wrapper, still inside theirs, is switched off by its target and steps aside.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, ModuleType
from typing import Any, Protocol

_MISSING = object()


class Rebinding(Protocol):
    """One replacement that can be made and unmade."""

    def apply(self) -> bool:
        """Replace; True if anything changed."""

    def undo(self) -> list[str]:
        """Put the original back; the holders that were left to somebody else, each a line."""


class Attribute:
    """An attribute of one module or class, e.g. `GatedMLP.forward`."""

    def __init__(self, owner: Any, name: str, replacement: Any, original: Any) -> None:
        self.owner, self.name, self.replacement, self.original = owner, name, replacement, original
        self.applied = False

    def apply(self) -> bool:
        current = vars(self.owner).get(self.name, _MISSING)
        if current is self.original:
            setattr(self.owner, self.name, self.replacement)
        elif current is not self.replacement or self.applied:
            return False
        self.applied = True  # also where ours was left in place: it is on record from now on
        return True

    def undo(self) -> list[str]:
        self.applied = False
        current = vars(self.owner).get(self.name, _MISSING)
        if current is self.replacement:
            setattr(self.owner, self.name, self.original)
        elif current is not self.original:
            return [f"{name_of(self.owner)}.{self.name} is now {name_of(current)}"]
        return []

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Attribute):
            return False
        return self.owner is other.owner and self.name == other.name and self.replacement is other.replacement

    __hash__ = None  # type: ignore[assignment]


class Inside:
    """Our wrapper already sits inside a wrapper that somebody else put on top: nothing to replace or put back."""

    def __init__(self, label: str, read: Callable[[], Any]) -> None:
        self.label, self.read = label, read
        self.applied = False

    def apply(self) -> bool:
        changed, self.applied = not self.applied, True
        return changed

    def undo(self) -> list[str]:
        self.applied = False
        return [f"{self.label} is now {name_of(self.read())}"]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Inside) and self.label == other.label

    __hash__ = None  # type: ignore[assignment]


class Entry:
    """An entry of a registry that is read and written by functions of its own."""

    def __init__(
        self, label: str, read: Callable[[], Any], write: Callable[[Any], None], replacement: Any, original: Any
    ) -> None:
        self.label, self.read, self.write, self.replacement, self.original = label, read, write, replacement, original
        self.applied = False

    def apply(self) -> bool:
        current = self.read()
        if current is self.original:
            self.write(self.replacement)
        elif current is not self.replacement or self.applied:
            return False
        self.applied = True
        return True

    def undo(self) -> list[str]:
        self.applied = False
        current = self.read()
        if current is self.replacement:
            self.write(self.original)
        elif current is not self.original:
            return [f"{self.label} is now {name_of(current)}"]
        return []

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Entry) and self.label == other.label and self.replacement is other.replacement

    __hash__ = None  # type: ignore[assignment]


class Everywhere:
    """Every holder of a function, found by identity: module attributes under any name, and closures.

    Closures matter because transformers freezes FLA's functions in one when a modeling module is imported; `prefixes`
    names the packages whose functions' closures are searched. Undo searches anew, for the replacement: whoever copied
    it meanwhile gets the original back.
    """

    def __init__(self, original: Any, replacement: Any, prefixes: tuple[str, ...] = ("transformers",)) -> None:
        self.original, self.replacement, self.prefixes = original, replacement, prefixes
        self.holders: set[tuple[str, str]] = set()
        self.applied = False

    def apply(self) -> bool:
        changed, self.applied = not self.applied, True
        for module, name in _attributes_holding(self.original):
            setattr(module, name, self.replacement)
            self.holders.add((module.__name__, name))
            changed = True
        for cell in _cells_holding(self.original, self.prefixes):
            cell.cell_contents = self.replacement
            changed = True
        _note_moved(self.original, self.replacement)
        return changed

    def undo(self) -> list[str]:
        self.applied = False
        for module, name in _attributes_holding(self.replacement):
            setattr(module, name, self.original)
        for cell in _cells_holding(self.replacement, self.prefixes):
            cell.cell_contents = self.original
        _note_moved(self.replacement, self.original)
        left = []
        for module_name, name in sorted(self.holders):
            current = vars(sys.modules.get(module_name, ModuleType("gone"))).get(name, self.original)
            if current is not self.original:
                left.append(f"{module_name}.{name} is now {name_of(current)}")
        self.holders.clear()
        return left

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Everywhere) and self.replacement is other.replacement

    __hash__ = None  # type: ignore[assignment]


class _Found:
    """Every holder of every function, from one pass over the modules: id of what is held -> holders."""

    def __init__(self) -> None:
        self.attributes: dict[int, list[tuple[ModuleType, str]]] = {}
        self.cells: dict[tuple[str, ...], dict[int, list[CellType]]] = {}
        for module, name, held in _module_attributes():
            if type(held) in _FUNCTIONS:  # isinstance would ask objects for their __class__
                self.attributes.setdefault(id(held), []).append((module, name))

    def cells_in(self, prefixes: tuple[str, ...]) -> dict[int, list[CellType]]:
        found = self.cells.get(prefixes)
        if found is None:
            found = self.cells[prefixes] = {}
            for cell in _cells(prefixes):
                found.setdefault(id(cell.cell_contents), []).append(cell)
        return found


class _Pass(threading.local):
    found: _Found | None = None
    active = False


_pass = _Pass()
_FUNCTIONS = (FunctionType, MethodType, BuiltinFunctionType)


@contextlib.contextmanager
def one_pass() -> Iterator[None]:
    """Inside, the modules are gone through once, at the first need, and not once for each function.

    With transformers and FLA loaded that takes 60 ms, and `fla.cpu` alone replaces 20 functions. What another thread
    imports meanwhile is found by the next `apply`.
    """
    if _pass.active:
        yield
        return
    _pass.active = True
    try:
        yield
    finally:
        _pass.active, _pass.found = False, None


def _index() -> _Found | None:
    if _pass.active and _pass.found is None:
        _pass.found = _Found()
    return _pass.found


def _note_moved(was: Any, now: Any) -> None:
    """Whoever held `was` holds `now`."""
    found = _pass.found
    if found is not None:
        for holders in (found.attributes, *found.cells.values()):
            moved: list[Any] = holders.pop(id(was), [])  # type: ignore[attr-defined]
            holders.setdefault(id(now), []).extend(moved)  # type: ignore[attr-defined]


def _attributes_holding(value: Any) -> Iterator[tuple[ModuleType, str]]:
    found = _index()
    if found is not None and type(value) in _FUNCTIONS:
        for module, name in found.attributes.get(id(value), ()):
            if vars(module).get(name) is value:
                yield module, name
        return
    for module, name, held in _module_attributes():
        if held is value:
            yield module, name


def _module_attributes() -> Iterator[tuple[ModuleType, str, Any]]:
    # vars(), never getattr: lazy modules import things when an attribute is asked for.
    for module in list(sys.modules.values()):
        # our own modules keep originals on purpose
        if isinstance(module, ModuleType) and not module.__name__.startswith("accel."):
            for name, held in list(vars(module).items()):
                yield module, name, held


def _cells_holding(value: Any, prefixes: tuple[str, ...]) -> Iterator[CellType]:
    found = _index()
    for cell in _cells(prefixes) if found is None else found.cells_in(prefixes).get(id(value), ()):
        if cell.cell_contents is value:
            yield cell


def _cells(prefixes: tuple[str, ...]) -> Iterator[CellType]:
    """Every filled cell of the functions that the modules of these packages hold."""
    for module_name, module in list(sys.modules.items()):
        if isinstance(module, ModuleType) and module_name.partition(".")[0] in prefixes:
            for held in list(vars(module).values()):
                yield from _cells_of(held)


def _cells_of(holder: Any, depth: int = 3) -> Iterator[CellType]:
    """The filled cells of a function, of what it wraps, and of the functions in them in turn.

    Where Hugging Face's `kernels` is installed, transformers' functions are called by the forward of a class made for
    each of them, of which the module holds an instance.
    """
    if type(holder) is not FunctionType:
        made_for_it = "<locals>" in type(holder).__qualname__
        holder = vars(type(holder)).get("forward") if made_for_it else None
    while isinstance(holder, FunctionType):
        # The cells of our own wrappers hold the original on purpose.
        if not hasattr(holder, "__accel__"):
            for cell in holder.__closure__ or ():
                try:
                    held = cell.cell_contents
                except ValueError:  # an empty cell
                    continue
                yield cell
                if depth and isinstance(held, FunctionType):
                    yield from _cells_of(held, depth - 1)
        holder = getattr(holder, "__wrapped__", None)


def name_of(value: Any) -> str:
    """What to call a function or class in a message."""
    if value is _MISSING or value is None:
        return "gone"
    if isinstance(value, ModuleType):
        return value.__name__
    name = f"{getattr(value, '__module__', '?')}.{getattr(value, '__qualname__', repr(value))}"
    if isinstance(value, FunctionType) and hasattr(value, "__wrapped__"):  # the name is what it wraps
        name += f", wrapped by {value.__code__.co_filename}:{value.__code__.co_firstlineno}"
    return name
