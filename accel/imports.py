"""Call back right after a module has been imported, at once if it already is.

wrapt's post-import hooks do the finding: exact names, one shot. They let an exception fail the import and are fired at
once for a module that is only half imported; this module adds what is missing to that. Callbacks run in the importing
thread, before its import statement returns, so nobody can call what a callback was going to replace.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

log = logging.getLogger("accel")

Callback = Callable[[ModuleType], object]

_lock = threading.Lock()
_waiting: dict[int, list[tuple[str, Callback]]] = {}  #: id of a watched spec -> who waits for its import to finish


def when_imported(name: str, callback: Callback) -> None:
    """Call `callback(module)` once module `name` is fully imported. Never imports it, never raises into its import."""
    module = sys.modules.get(name)
    if module is not None:
        _now_or_finished(name, module, callback)
        return
    import wrapt  # 50 ms (it imports asyncio), and an idle `import accel` has no use for it

    at_once = True

    def hook(module: ModuleType) -> None:
        # wrapt hands over the module it found; a lazy module may have replaced itself in sys.modules since.
        current = sys.modules.get(name, module)
        if at_once:  # somebody began the import since we looked
            _now_or_finished(name, current, callback)
        else:  # called at the end of the body
            _call(callback, current)

    wrapt.register_post_import_hook(hook, name)
    at_once = False


def being_imported(module: ModuleType) -> bool:
    """True while the body of `module` is still running, here or in another thread."""
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))


class _WatchedSpec(ModuleSpec):
    """The spec of a module whose import is under way: importlib sets `_initializing` to False when it is over."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "_initializing" and not value:
            _finished(self)


def _now_or_finished(name: str, module: ModuleType, callback: Callback) -> None:
    if not being_imported(module):
        _call(callback, module)
        return
    spec = module.__spec__
    if type(spec) not in (ModuleSpec, _WatchedSpec):
        log.info("accel: the end of the import of %s cannot be seen; call accelerate() again after it", name)
        return
    assert spec is not None
    with _lock:
        _waiting.setdefault(id(spec), []).append((name, callback))
        spec.__class__ = _WatchedSpec
    if not being_imported(module):  # another thread finished it meanwhile
        _finished(spec)


def _finished(spec: ModuleSpec) -> None:
    with _lock:
        spec.__class__ = ModuleSpec
        waiting = _waiting.pop(id(spec), [])
    for name, callback in waiting:
        module = sys.modules.get(name)
        if module is None:  # the import failed; the next attempt gets a new spec
            when_imported(name, callback)
        else:
            _call(callback, module)


def _call(callback: Callback, module: ModuleType) -> None:
    try:
        callback(module)
    # Policy: whatever goes wrong in ours, the user's import goes on.
    except Exception:
        log.exception("accel: patching after the import of %s failed; upstream's own code runs", module.__name__)
