"""accel: one line turns the model you already have into a fast one."""

from __future__ import annotations

import importlib.machinery as _machinery
import importlib.util as _util
import os as _os
import sys as _sys


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
        module = _util.module_from_spec(spec)
        _sys.modules[full] = module
        globals()[name] = module


_bind_source_layout()

from .activation import Report, accelerate, accelerated, is_accelerated, restore  # noqa: E402 - after the binding
from .outcome import Choice, Declined  # noqa: E402
from .report import TargetStatus, explain, status  # noqa: E402

__version__ = "0.1.0"
__all__ = [
    "Choice",
    "Declined",
    "Report",
    "TargetStatus",
    "accelerate",
    "accelerated",
    "explain",
    "is_accelerated",
    "restore",
    "status",
]
