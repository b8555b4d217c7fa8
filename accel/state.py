"""What is known of each target at run time: the live switch, the record of what was replaced, the counters."""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .rebind import Rebinding
from .targets import TARGETS, Target

log = logging.getLogger("accel")


@dataclass(slots=True)
class Policy:
    """What the last `accelerate()` asked for, read by every served call."""

    strict: bool = False  #: kernel failures and unmet requests raise
    verify: int = 0  #: calls of each configuration that are run on both sides and compared
    uncertified: bool = False  #: serve kernels without a certificate


policy = Policy()


class TargetState:
    """One target as it is now. `on` is the live switch that every wrapper of the target reads first."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.on = False
        self.insisted = False  #: named as itself, not by a group: on also where it is no default
        self.lock = threading.RLock()  #: re-entrant: a signal handler may ask for status() while a call is counted
        self.served: Counter[str] = Counter()
        self.declined: Counter[str] = Counter()
        self.rebindings: list[Rebinding] = []
        self.patched: dict[str, int] = {}  #: module name -> replacements made after its import
        self.refused: str | None = None  #: why it is off although it was asked for
        self.failures: dict[str, str] = {}  #: module name -> why its adapter could not patch it
        self.left: list[str] = []  #: holders that somebody else patched over, as found by the last restore
        #: id(original) -> the one wrapper made for it. A wrapper keeps its original alive, so ids stay true.
        self.wrappers: dict[int, Callable[..., Any]] = {}
        self._logged: set[str] = set()

    @property
    def name(self) -> str:
        return self.target.name

    @property
    def state(self) -> str:
        """ "active", "pending import", "refused: <reason>" or "off"."""
        if self.refused:
            return f"refused: {self.refused}"
        if not self.on:
            return "off"
        if self.rebindings:
            return "active"
        return f"refused: {next(iter(self.failures.values()))}" if self.failures else "pending import"

    def count_served(self, kernel: str) -> None:
        with self.lock:
            self.served[kernel] += 1

    def count_declined(self, reason: str) -> None:
        with self.lock:
            count = self.declined.get(reason)
            if count is not None:
                self.declined[reason] = count + 1
                return
            # A reason may carry sizes; a long-running server must not collect them without end.
            if len(self.declined) >= 256:
                reason = "other reasons"
            first = reason not in self.declined
            self.declined[reason] += 1
        if first:
            log.info("accel: %s declined: %s", self.name, reason)

    def log_once(self, level: int, message: str) -> None:
        with self.lock:
            if message in self._logged:
                return
            self._logged.add(message)
        log.log(level, "accel: %s: %s", self.name, message)

    def reset_counters(self) -> None:
        with self.lock:
            self.served.clear()
            self.declined.clear()


STATES = {target.name: TargetState(target) for target in TARGETS}


def _new_locks() -> None:
    """In a forked child: a thread that held a lock does not exist there."""
    for state in STATES.values():
        state.lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_new_locks)
