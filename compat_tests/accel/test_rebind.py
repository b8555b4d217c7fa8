"""The ways of replacing: each made, unmade, made again, found in place, and patched over by somebody else."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Iterator

import pytest

from accel.rebind import Attribute, Entry, Everywhere, Inside, name_of


class Functions:
    """Kept in no module, so that a search through all of them finds what a test put there and nothing else."""

    @staticmethod
    def original() -> str:
        return "original"

    @staticmethod
    def replacement() -> str:
        return "replacement"


class Owner:
    def method(self) -> str:
        return "upstream"


def test_an_attribute_goes_back_to_the_same_object() -> None:
    held = vars(Owner)["method"]
    existing = Owner()
    rebinding = Attribute(Owner, "method", lambda self: "ours", held)
    assert rebinding.apply()
    assert existing.method() == "ours"
    assert not rebinding.apply(), "applied twice, changed once"
    assert rebinding.undo() == []
    assert vars(Owner)["method"] is held
    assert rebinding.undo() == [], "undone twice"
    assert rebinding.apply(), "and made again"
    assert rebinding.undo() == []


def test_an_attribute_patched_over_is_left_and_named() -> None:
    held = vars(Owner)["method"]
    rebinding = Attribute(Owner, "method", lambda self: "ours", held)
    rebinding.apply()
    try:
        Owner.method = theirs = lambda self: "theirs"  # type: ignore[method-assign]
        assert not rebinding.apply(), "their patch is not replaced"
        (line,) = rebinding.undo()
        assert line.startswith(f"{__name__}.Owner.method is now ")
        assert vars(Owner)["method"] is theirs
    finally:
        Owner.method = held  # type: ignore[method-assign]


def test_an_attribute_that_is_gone_is_left_and_named() -> None:
    module = types.ModuleType("gone_attribute")
    module.f = Functions.original  # type: ignore[attr-defined]
    rebinding = Attribute(module, "f", Functions.replacement, Functions.original)
    rebinding.apply()
    del module.f
    assert not rebinding.apply()
    assert rebinding.undo() == ["gone_attribute.f is now gone"]


def test_what_is_found_in_place_is_put_on_record_once() -> None:
    module = types.ModuleType("in_place")
    module.f = Functions.replacement  # type: ignore[attr-defined]
    rebinding = Attribute(module, "f", Functions.replacement, Functions.original)
    assert rebinding.apply(), "it has to be recorded, or nobody takes it out again"
    assert not rebinding.apply()
    rebinding.undo()
    assert module.f is Functions.original


def test_equal_rebindings_are_one() -> None:
    module = types.ModuleType("equal")
    module.f = module.g = Functions.original  # type: ignore[attr-defined]
    both = (Functions.replacement, Functions.original)
    assert Attribute(module, "f", *both) == Attribute(module, "f", *both)
    assert Attribute(module, "f", *both) != Attribute(module, "g", *both)
    assert Everywhere(*reversed(both)) == Everywhere(*reversed(both))
    assert Everywhere(*reversed(both)) != Attribute(module, "f", *both)
    assert Inside("a", lambda: None) == Inside("a", lambda: None)
    assert Inside("a", lambda: None) != Inside("b", lambda: None)


def test_an_entry_of_a_registry() -> None:
    registry = {"sdpa": Functions.original, "other": Functions.original}
    write = functools.partial(registry.__setitem__, "sdpa")
    rebinding = Entry("registry['sdpa']", lambda: registry["sdpa"], write, Functions.replacement, Functions.original)
    assert rebinding.apply()
    assert registry == {"sdpa": Functions.replacement, "other": Functions.original}
    assert not rebinding.apply()
    assert rebinding.undo() == []
    assert registry["sdpa"] is Functions.original
    rebinding.apply()
    registry["sdpa"] = len
    assert not rebinding.apply()
    assert rebinding.undo() == ["registry['sdpa'] is now builtins.len"]
    assert registry["sdpa"] is len
    same = Entry("registry['sdpa']", lambda: registry["sdpa"], write, Functions.replacement, Functions.original)
    assert same == rebinding


def test_inside_changes_nothing_and_says_where() -> None:
    rebinding = Inside("library.f", lambda: len)
    assert rebinding.apply()
    assert not rebinding.apply()
    assert rebinding.undo() == ["library.f is now builtins.len"]


@pytest.fixture
def modules() -> Iterator[dict[str, types.ModuleType]]:
    """Modules in sys.modules that hold `Functions.original` under several names, and one that must not be touched."""
    made = {name: types.ModuleType(name) for name in ("holder_a", "holder_b", "transformers_like.x", "accel.held")}
    made["holder_a"].f = made["holder_a"].alias = Functions.original  # type: ignore[attr-defined]
    made["holder_b"].renamed = Functions.original  # type: ignore[attr-defined]
    made["accel.held"].original = Functions.original  # type: ignore[attr-defined]
    sys.modules.update(made)
    yield made
    for name in made:
        del sys.modules[name]


def test_everywhere_finds_aliases_by_identity(modules: dict[str, types.ModuleType]) -> None:
    rebinding = Everywhere(Functions.original, Functions.replacement)
    assert rebinding.apply()
    assert modules["holder_a"].f is modules["holder_a"].alias is modules["holder_b"].renamed is Functions.replacement
    assert modules["accel.held"].original is Functions.original, "our own modules keep originals on purpose"
    assert not rebinding.apply()
    modules["holder_b"].later = Functions.original  # type: ignore[attr-defined]
    assert rebinding.apply(), "a holder that came later is found by the next look"
    modules["holder_b"].copied = Functions.replacement  # type: ignore[attr-defined]
    assert rebinding.undo() == []
    assert modules["holder_a"].f is modules["holder_a"].alias is modules["holder_b"].later is Functions.original
    assert modules["holder_b"].copied is Functions.original, "whoever copied ours meanwhile gets the original"


def test_everywhere_leaves_what_others_patched(modules: dict[str, types.ModuleType]) -> None:
    rebinding = Everywhere(Functions.original, Functions.replacement)
    rebinding.apply()
    modules["holder_a"].alias = len  # type: ignore[attr-defined]
    assert rebinding.undo() == ["holder_a.alias is now builtins.len"]
    assert modules["holder_a"].alias is len
    assert modules["holder_a"].f is Functions.original


def test_everywhere_does_not_touch_lazy_modules(modules: dict[str, types.ModuleType]) -> None:
    class Lazy(types.ModuleType):
        def __getattr__(self, name: str) -> object:
            raise AssertionError(f"{name} was looked up; a lazy module would have imported it")

    sys.modules["lazy_holder"] = Lazy("lazy_holder")
    sys.modules["no_module"] = object()  # type: ignore[assignment]
    try:
        rebinding = Everywhere(Functions.original, Functions.replacement)
        assert rebinding.apply()
        assert rebinding.undo() == []
    finally:
        del sys.modules["lazy_holder"], sys.modules["no_module"]


def test_everywhere_reaches_closures_of_the_named_packages() -> None:
    implementation = also_held = Functions.original

    def frozen() -> str:
        return implementation()

    @functools.wraps(frozen)
    def outer() -> str:
        return frozen()

    def elsewhere() -> str:
        return also_held()

    inside, outside = types.ModuleType("transformers.made_up"), types.ModuleType("other_library")
    inside.outer, outside.elsewhere = outer, elsewhere  # type: ignore[attr-defined]
    sys.modules["transformers.made_up"], sys.modules["other_library"] = inside, outside
    try:
        rebinding = Everywhere(Functions.original, Functions.replacement)
        assert rebinding.apply()
        assert outer() == "replacement"
        assert elsewhere() == "original"
        assert rebinding.undo() == []
        assert outer() == elsewhere() == "original"
        assert frozen.__closure__ is not None
        assert frozen.__closure__[0].cell_contents is Functions.original
    finally:
        del sys.modules["transformers.made_up"], sys.modules["other_library"]


def test_everywhere_survives_empty_cells() -> None:
    def make() -> types.FunctionType:
        def f() -> object:
            return never_set

        if False:
            never_set = None
        return f  # type: ignore[return-value]

    module = types.ModuleType("transformers.empty_cell")
    module.f = make()  # type: ignore[attr-defined]
    sys.modules["transformers.empty_cell"] = module
    try:
        rebinding = Everywhere(Functions.original, Functions.replacement)
        rebinding.apply()
        rebinding.undo()
    finally:
        del sys.modules["transformers.empty_cell"]


def test_names_in_messages() -> None:
    assert name_of(sys) == "sys"
    assert name_of(Owner) == f"{__name__}.Owner"
    assert name_of(None) == "gone"
    assert name_of(functools.partial(len)).endswith("functools.partial(<built-in function len>)")
