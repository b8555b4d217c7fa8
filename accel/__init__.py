"""accel: one line turns the model you already have into a fast one.

    import accel
    accel.accelerate()

What is exported is imported on first use: `import accel` alone costs a millisecond or two, and no torch.
"""

from __future__ import annotations

import importlib.machinery as _machinery
import os as _os
import sys as _sys
from types import ModuleType as _ModuleType
from typing import TYPE_CHECKING as _TYPE_CHECKING

if _TYPE_CHECKING:
    from .activation import Report as Report
    from .activation import accelerate as accelerate
    from .activation import accelerated as accelerated
    from .activation import is_accelerated as is_accelerated
    from .activation import restore as restore
    from .outcome import Choice as Choice
    from .outcome import Declined as Declined
    from .report import TargetStatus as TargetStatus
    from .report import explain as explain
    from .report import status as status

__version__ = "0.1.0"

_EXPORTS = {
    "Choice": "outcome",
    "Declined": "outcome",
    "Report": "activation",
    "TargetStatus": "report",
    "accelerate": "activation",
    "accelerated": "activation",
    "explain": "report",
    "is_accelerated": "activation",
    "restore": "activation",
    "status": "report",
}
__all__ = [*_EXPORTS]


def __getattr__(name: str) -> object:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    value: object = getattr(importlib.import_module(f".{_EXPORTS[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS})


def _bind_source_layout() -> None:
    """In a source checkout kernels/ and patches/ sit beside accel/, not inside it."""
    here = _os.path.dirname(_os.path.abspath(__file__))
    root = _os.path.dirname(here)
    for name in ("kernels", "patches"):
        full, beside = f"{__name__}.{name}", _os.path.join(root, name)
        if full in _sys.modules or _os.path.isdir(_os.path.join(here, name)) or not _os.path.isdir(beside):
            continue
        spec = _machinery.ModuleSpec(full, None, is_package=True)
        spec.submodule_search_locations = [beside]
        module = _ModuleType(full)
        module.__spec__, module.__path__, module.__package__ = spec, [beside], full
        _sys.modules[full] = module
        globals()[name] = module


_bind_source_layout()
