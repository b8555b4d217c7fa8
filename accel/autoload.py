"""Opt-in without a code change: `ACCEL_TARGETS=all python anything.py`.

Two doors lead here, each in every process of its kind of installation, spawned and forkserver children included (forked
ones inherit what their parent did): `accel_autoload.pth`, which a wheel puts into site-packages, and the entry point
`torch.backends`, which torch calls at the end of its own import, also in an editable install. A bare checkout has
neither: `python -m accel run` stands in for both.

Without ACCEL_TARGETS nothing happens. A bad value is logged as one error and nothing is applied: the process was
started to do something else, and goes on.
"""

from __future__ import annotations

import logging
import os
import sys

VARIABLE = "ACCEL_TARGETS"

_done = False  #: in this process; a forked child inherits what was done along with this


def boot() -> None:
    """Switch on what ACCEL_TARGETS names, once per process. Never raises; imports neither torch nor an upstream."""
    global _done
    if _done or not os.environ.get(VARIABLE, "").strip():
        return
    _done = True
    log = logging.getLogger("accel")
    try:
        from . import settings
        from .activation import accelerate
        from .state import policy

        # accelerate() may have been called before torch brought us here: its `strict` stays.
        report = accelerate(settings.read().targets, strict=policy.strict)
    # Policy: whatever is wrong with a setting or an installation, the user's process goes on.
    except Exception as error:
        log.error("accel: %s=%r has no effect: %s", VARIABLE, os.environ.get(VARIABLE), error)
        return
    log.info("accel: pid %d, %s=%s. %s", os.getpid(), VARIABLE, os.environ[VARIABLE], str(report).replace("\n", "; "))


def boot_from_site() -> None:
    """Called by the .pth file: `boot()` as soon as sys.path is complete.

    site reads .pth files in the middle of building sys.path, where a library in a folder that comes later would look
    uninstalled. sitecustomize is run right after.
    """
    try:
        import site

        frame = sys._getframe()
        while frame is not None and frame.f_code is not site.main.__code__:
            frame = frame.f_back  # type: ignore[assignment]
        if frame is None:  # read by a later site.addsitedir()
            boot()
        elif not getattr(site.execsitecustomize, "boots_accel", False):  # a venv reads its .pth files twice
            customize = site.execsitecustomize

            def execsitecustomize() -> None:
                site.execsitecustomize = customize
                try:
                    customize()
                finally:
                    boot()

            execsitecustomize.boots_accel = True  # type: ignore[attr-defined]
            site.execsitecustomize = execsitecustomize
    except Exception as error:
        logging.getLogger("accel").error("accel: %s has no effect: %s", VARIABLE, error)


def boot_from_torch() -> None:
    """Called by torch's entry point: `boot()`. Whatever were raised here would fail `import torch`."""
    boot()


def skip() -> None:
    """Do not apply ACCEL_TARGETS in this process any more: somebody has already decided what is on."""
    global _done
    _done = True
