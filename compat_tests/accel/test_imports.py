"""Callbacks after imports: at once, after, during; failures, threads, and no lock held while anything is imported."""

from __future__ import annotations

import importlib
import logging
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

import accel
from accel.imports import being_imported, when_imported

WAIT = 30.0  #: seconds that a deadlock takes to fail a test


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], str]]:
    """Writes a module, importable under the name given back, and forgets it after the test."""
    monkeypatch.syspath_prepend(str(tmp_path))
    made = []

    def write(name: str, text: str) -> str:
        name = f"imports_{tmp_path.name.replace('-', '_')}_{name}"
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(text))
        importlib.invalidate_caches()
        made.append(name)
        return name

    yield write
    for name in made:
        sys.modules.pop(name, None)


def test_at_once_when_it_is_imported() -> None:
    seen: list[ModuleType] = []
    when_imported("logging", seen.append)
    assert seen == [logging]


def test_nothing_is_imported_for_it(module: Callable[[str, str], str]) -> None:
    name = module("never", "raise AssertionError('imported')")
    when_imported(name, lambda found: None)
    assert name not in sys.modules


def test_the_callback_runs_before_the_import_returns(module: Callable[[str, str], str]) -> None:
    name = module("plain", "value = 'upstream'\nlast = True")
    seen = []

    def callback(found: ModuleType) -> None:
        seen.append((found.__name__, threading.get_ident(), vars(found).get("last")))
        found.value = "ours"  # type: ignore[attr-defined]

    when_imported(name, callback)
    assert importlib.import_module(name).value == "ours"
    assert seen == [(name, threading.get_ident(), True)], "in the importing thread, after the body"


def test_every_callback_of_a_module_runs_once(module: Callable[[str, str], str]) -> None:
    name = module("many", "")
    seen: list[int] = []
    for number in range(3):
        when_imported(name, lambda found, number=number: seen.append(number))
    importlib.import_module(name)
    importlib.reload(sys.modules[name])
    assert seen == [0, 1, 2]


def test_a_callback_that_raises_does_not_fail_the_import(
    module: Callable[[str, str], str], caplog: pytest.LogCaptureFixture
) -> None:
    name = module("raising", "value = 1")
    seen = []

    def broken(found: ModuleType) -> None:
        raise RuntimeError("the adapter is broken")

    when_imported(name, broken)
    when_imported(name, seen.append)
    with caplog.at_level(logging.ERROR, "accel"):
        assert importlib.import_module(name).value == 1
    assert len(seen) == 1, "the next callback runs all the same"
    assert f"patching after the import of {name} failed" in caplog.text
    assert "the adapter is broken" in caplog.text


def test_a_half_imported_module_is_left_until_its_body_is_done(module: Callable[[str, str], str]) -> None:
    """torch's entry point calls us at the end of `import torch`, in the middle of the module that imported torch."""
    name = module(
        "half",
        """
        import sys
        from accel.imports import being_imported, when_imported
        first = 1
        assert being_imported(sys.modules[__name__])
        for _ in range(2):
            when_imported(__name__, lambda found: seen.append(sorted({"first", "second"} & set(vars(found)))))
        seen = []
        second = 2
        """,
    )
    found = importlib.import_module(name)
    assert found.seen == [["first", "second"]] * 2
    assert not being_imported(found)
    assert type(found.__spec__).__name__ == "ModuleSpec", "its spec is an ordinary one again"


def test_a_half_imported_package_and_its_submodule(module: Callable[[str, str], str], tmp_path: Path) -> None:
    package = tmp_path / "half_package"
    package.mkdir()
    (package / "__init__.py").write_text("import half_package.sub\ndone = True\n")
    (package / "sub.py").write_text(
        "from accel.imports import when_imported\nseen = []\n"
        "when_imported('half_package', lambda found: seen.append(found.done))\n"
    )
    try:
        import half_package  # type: ignore[import-not-found]

        assert half_package.sub.seen == [True]
    finally:
        for name in ("half_package", "half_package.sub"):
            sys.modules.pop(name, None)


def test_a_failed_import_is_waited_for_again(module: Callable[[str, str], str], tmp_path: Path) -> None:
    seen: list[object] = []
    text = "from accel.imports import when_imported\nimport sys\nwhen_imported(__name__, sys.modules['{}'].append)\n"
    holder = ModuleType("failed_import_seen")
    holder.append = lambda found: seen.append(found.value)  # type: ignore[attr-defined]
    sys.modules["failed_import_seen"] = holder
    name = module("failing", text.format("failed_import_seen") + "raise ValueError('first attempt')\n")
    try:
        with pytest.raises(ValueError, match="first attempt"):
            importlib.import_module(name)
        assert seen == []
        (tmp_path / f"{name}.py").write_text("value = 'second attempt'\n")
        importlib.invalidate_caches()
        importlib.import_module(name)
        assert seen == ["second attempt"]
    finally:
        del sys.modules["failed_import_seen"]


def test_a_module_that_another_thread_is_importing(module: Callable[[str, str], str]) -> None:
    gate = ModuleType("import_gate")
    gate.begun, gate.go_on = threading.Event(), threading.Event()  # type: ignore[attr-defined]
    sys.modules["import_gate"] = gate
    name = module(
        "slow", f"import import_gate\nimport_gate.begun.set()\nassert import_gate.go_on.wait({WAIT})\nlate = 1"
    )
    seen: list[tuple[bool, int]] = []
    thread = threading.Thread(target=importlib.import_module, args=(name,))
    try:
        thread.start()
        assert gate.begun.wait(WAIT)  # type: ignore[attr-defined]
        when_imported(name, lambda found: seen.append((hasattr(found, "late"), threading.get_ident())))
        assert seen == []
        gate.go_on.set()  # type: ignore[attr-defined]
        thread.join(WAIT)
        assert seen == [(True, thread.ident)]
    finally:
        gate.go_on.set()  # type: ignore[attr-defined]
        thread.join(WAIT)
        del sys.modules["import_gate"]


def test_a_module_that_replaces_itself_is_handed_over_as_it_is_found(module: Callable[[str, str], str]) -> None:
    name = module(
        "lazy",
        """
        import sys, types
        class Lazy(types.ModuleType):
            pass
        lazy = Lazy(__name__)
        lazy.__spec__ = __spec__
        sys.modules[__name__] = lazy
        """,
    )
    seen: list[ModuleType] = []
    when_imported(name, seen.append)
    found = importlib.import_module(name)
    assert seen == [found]
    assert type(found).__name__ == "Lazy"


def test_names_that_are_never_imported_cost_nothing_and_break_nothing() -> None:
    when_imported("imports_no_such_module", lambda found: None)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("imports_no_such_module")


def test_import_in_one_thread_and_accelerate_in_another_do_not_deadlock(upstream) -> None:
    """The importing thread holds the module's import lock when it calls us; the other one imports that very module."""
    gate = ModuleType("deadlock_gate")
    gate.importing, gate.adapting = threading.Event(), threading.Event()  # type: ignore[attr-defined]
    sys.modules["deadlock_gate"] = gate
    upstream.write("layers", (upstream.folder / "layers.py").read_text())
    upstream.write(
        "ops",
        f"""
        import deadlock_gate
        deadlock_gate.importing.set()
        deadlock_gate.adapting.wait({WAIT})
        def scale(x, factor=2.0, *, bias=None):
            return x * factor
        """,
    )
    whole = upstream.patch

    def patch(module: ModuleType, state: object) -> list[object]:
        if module.__name__.endswith(".other"):
            gate.adapting.set()  # type: ignore[attr-defined]
            importlib.import_module(f"{upstream.name}.ops")  # waits for the importing thread
            return []
        return whole(module, state)

    sys.modules[f"accel.patches.{upstream.name}.adapter"].patch = patch  # type: ignore[attr-defined]
    upstream.write("other", "")
    importlib.import_module(f"{upstream.name}.other")
    state = upstream.state("double")
    object.__setattr__(state.target, "modules", (f"{upstream.name}.other",))
    upstream.on("scale")
    importing = threading.Thread(target=importlib.import_module, args=(f"{upstream.name}.ops",), daemon=True)
    importing.start()
    assert gate.importing.wait(WAIT)  # type: ignore[attr-defined]
    enabling = threading.Thread(target=upstream.on, args=("double",), daemon=True)
    enabling.start()
    importing.join(WAIT)
    enabling.join(WAIT)
    del sys.modules["deadlock_gate"]
    assert not importing.is_alive(), "the import waits for accelerate(), which waits for the import"
    assert not enabling.is_alive()
    assert upstream.state("scale").state == "active"


def test_two_threads_that_import_and_one_that_switches(upstream) -> None:
    errors: list[BaseException] = []

    def switch() -> None:
        try:
            for _ in range(10):
                upstream.on()
                accel.restore()
        except BaseException as error:
            errors.append(error)

    def import_again(name: str) -> None:
        try:
            for _ in range(30):
                importlib.import_module(f"{upstream.name}.{name}")
                sys.modules.pop(f"{upstream.name}.{name}", None)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=switch, daemon=True)]
    threads += [threading.Thread(target=import_again, args=(name,), daemon=True) for name in ("ops", "layers")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT)
    assert not any(thread.is_alive() for thread in threads)
    assert errors == []


def test_import_accel_is_light() -> None:
    heavy = {"torch", "wrapt", "numpy", "rich", "packaging", "transformers", "fla", "diffusers", "asyncio"}
    code = (
        "import sys; before = set(sys.modules); import accel, accel.autoload; accel.autoload.boot()\n"
        "new = {name.partition('.')[0] for name in set(sys.modules) - before}\n"
        f"print(sorted(new & {heavy!r}))"
    )
    environ = {"PATH": "", "PYTHONPATH": str(Path(accel.__file__).parent.parent)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environ, check=True)
    assert done.stdout.strip() == "[]"
