"""Call back right after a module has been imported, at once if it already is.

wrapt's post-import hooks do the finding. They are fired for exact names, once, let an exception fail the import, and
are fired even for a module that is only half imported; this module adds what is missing to that.
"""

from __future__ import annotations

import importlib
import logging
import sys
import threading
from collections.abc import Callable
from types import ModuleType

import wrapt

log = logging.getLogger("accel")


def when_imported(name: str, callback: Callable[[ModuleType], None]) -> None:
    """Call `callback(module)` once module `name` is fully imported. Never imports it, never raises into its import."""

    def hook(module: ModuleType) -> None:
        # wrapt hands over the module it found; a lazy module may have replaced itself in sys.modules since.
        current = sys.modules.get(name, module)
        if being_imported(current):
            _when_finished(name, callback)
        else:
            _call(callback, current)

    if name in sys.modules:
        hook(sys.modules[name])
    else:
        wrapt.register_post_import_hook(hook, name)


def being_imported(module: ModuleType) -> bool:
    """True while the body of `module` is still running, here or in another thread."""
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))


def _call(callback: Callable[[ModuleType], None], module: ModuleType) -> None:
    try:
        callback(module)
    # Policy: whatever goes wrong in ours, the user's import goes on.
    except Exception:
        log.exception("accel: patching after the import of %s failed; upstream's own code runs", module.__name__)


def _when_finished(name: str, callback: Callable[[ModuleType], None]) -> None:
    """Wait, in a thread, for an import that is under way: importing the name again blocks until it is done."""

    def wait() -> None:
        try:
            module = importlib.import_module(name)
        except Exception as error:
            log.info("accel: the import of %s failed (%s); there is nothing to patch", name, error)
        else:
            _call(callback, module)

    threading.Thread(target=wait, name=f"accel: {name}", daemon=True).start()
