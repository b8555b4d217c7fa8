"""Switching targets on and off: accelerate, restore, accelerated, is_accelerated.

Everything here runs under one lock. Neither torch nor an upstream is imported: a target is patched right after the
modules it lives in are, at once where they already are.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import sys
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from types import ModuleType

from . import settings
from .imports import being_imported, when_imported
from .state import STATES, TargetState, policy
from .targets import ALIASES, GROUPS, TARGETS, Target, installed, modules_of, resolve

log = logging.getLogger("accel")
_lock = threading.RLock()
_hooked: set[str] = set()


@dataclass(frozen=True, slots=True)
class Report:
    """What `accelerate()` did with each target asked for."""

    active: tuple[str, ...] = ()
    pending: tuple[str, ...] = ()  #: patched as soon as the library is imported
    refused: dict[str, str] = field(default_factory=dict)  #: target -> reason

    def __str__(self) -> str:
        lines = [f"active: {', '.join(self.active) or 'none'}"]
        if self.pending:
            lines.append(f"pending import: {', '.join(self.pending)}")
        lines += [f"refused {name}: {reason}" for name, reason in self.refused.items()]
        return "\n".join(lines)


def accelerate(targets: str | Iterable[str] | None = None, *, strict: bool = False) -> Report:
    """Switch targets on; the defaults whose library is installed when `targets` is None.

    Works before or after the upstream import and before or after a model is built. Calling it again is harmless and
    picks up what was loaded since, such as a model's remote code.

    Args:
        targets: names of targets, groups ("fla") or aliases ("gdn"), one string with commas or an iterable of them.
        strict: kernel failures raise instead of falling back. Declined calls still run upstream's code.

    Returns:
        what is active, what waits for its library's import, and what was refused and why.

    Raises:
        ValueError: an unknown target. ImportError: a named target whose library is missing or outside the supported
        range. Nothing is applied in either case.
    """
    read = settings.read()
    _warn_unknown_variables()
    with _lock:
        chosen = [t for t in TARGETS if t.default] if targets is None else resolve(targets)
        named = set() if targets is None else {t.name for t in chosen}
        refused: dict[str, str] = {}
        missing: set[str] = set()
        for target in chosen:
            found = installed(target.group)
            if found.problem:
                refused[target.name] = found.problem
                if found.version is None:
                    missing.add(target.name)
        if named and refused:
            problems = "; ".join(f"{name}: {reason}" for name, reason in refused.items())
            raise ImportError(f"accel cannot apply what was asked for, and applied nothing. {problems}")
        policy.strict = strict or read.strict
        policy.verify, policy.uncertified = read.verify, read.uncertified
        _set_level(read.log)
        for target in chosen:
            state = STATES[target.name]
            if target.name in refused:
                state.refused = refused[target.name]
                continue
            _switch_on(state, insisted=target.name in named)
            if state.refused:
                refused[target.name] = state.refused
        active = tuple(t.name for t in chosen if STATES[t.name].state == "active")
        pending = tuple(t.name for t in chosen if STATES[t.name].state == "pending import")
        shown = {name: reason for name, reason in refused.items() if name not in missing}
        return Report(active, pending, refused if named else shown)


def restore(targets: str | Iterable[str] | None = None) -> None:
    """Put back the very objects that were replaced, for the given targets or for all of them.

    A holder that somebody else patched over stays theirs; our wrapper inside it is off, and `status()` and the log
    say so. Raises ValueError for an unknown target.
    """
    with _lock:
        chosen = TARGETS if targets is None else resolve(targets)
        changed = False
        for target in reversed(chosen):
            state = STATES[target.name]
            state.on = False
            state.refused = None
            for rebinding in reversed(state.rebindings):
                changed = True
                state.left += rebinding.undo()
            for line in state.left:
                log.warning("accel: %s: left to its new owner: %s", state.name, line)
            state.rebindings.clear()
            state.patched.clear()
        if changed:
            _reset_dynamo()


def is_accelerated(name: str | None = None) -> bool:
    """Whether a target is on (active or waiting for its library); a group or alias: all its members; None: any."""
    if name is None:
        return any(state.on for state in STATES.values())
    if name not in STATES and name not in GROUPS and name not in ALIASES and name != "all":
        resolve(name)  # raises, and lists what is known
    return all(STATES[target.name].on for target in resolve(name))


@contextlib.contextmanager
def accelerated(targets: str | Iterable[str] | None = None, *, strict: bool = False) -> Iterator[Report]:
    """`accelerate()` for the length of a `with` block, then the set of targets that was on before. Process-wide."""
    with _lock:
        before = [name for name, state in STATES.items() if state.on]
        was_strict = policy.strict
        report = accelerate(targets, strict=strict)
    try:
        yield report
    finally:
        with _lock:
            now = [name for name, state in STATES.items() if state.on]
            if gone := [name for name in now if name not in before]:
                restore(gone)
            for name in before:
                if not STATES[name].on:
                    _switch_on(STATES[name], insisted=True)
            policy.strict = was_strict


def _switch_on(state: TargetState, *, insisted: bool) -> None:
    state.on, state.refused = True, None
    state.left.clear()
    if state.target.without_gpu and not insisted and "torch" in sys.modules and _gpu_present():
        _refuse_for_gpu(state)
        return
    for name in modules_of(state.target):
        module = sys.modules.get(name)
        if module is not None and not being_imported(module):
            _patch(state, module)
        elif name not in _hooked:
            _hooked.add(name)
            when_imported(name, _imported)
    if state.target.every_model:
        for name, module in list(sys.modules.items()):  # remote code has no name that could be known beforehand
            if name.startswith("transformers_modules.") and isinstance(module, ModuleType):
                _patch(state, module)


def _imported(module: ModuleType) -> None:
    """A hooked module has been imported: patch it for every target that is on and lives there."""
    with _lock:
        for target in TARGETS:
            state = STATES[target.name]
            if state.on and module.__name__ in modules_of(target):
                if target.without_gpu and _gpu_present():
                    _refuse_for_gpu(state)
                else:
                    _patch(state, module)


def _patch(state: TargetState, module: ModuleType) -> None:
    """Let the adapter replace what it finds in `module`. One that fails is refused and logged; the rest goes on."""
    try:
        adapter = importlib.import_module(f"accel.patches.{state.target.adapter}")
        made = 0
        for rebinding in adapter.patch(module, state):
            if rebinding.apply():
                made += 1
                if rebinding not in state.rebindings:
                    state.rebindings.append(rebinding)
        for rebinding in state.rebindings:  # holders loaded since the last look
            rebinding.apply()
        if made:
            state.patched[module.__name__] = state.patched.get(module.__name__, 0) + made
            _reset_dynamo()
    # Policy: an adapter that does not understand this upstream never breaks the user's import or the other targets.
    except Exception as error:
        if policy.strict:
            raise
        state.refused = f"patching {module.__name__} failed: {type(error).__name__}: {error}"
        log.exception("accel: %s: %s; upstream's own code runs", state.name, state.refused)


def _refuse_for_gpu(state: TargetState) -> None:
    state.on = False
    state.refused = "a GPU is present; name the target to have it for CPU tensors all the same"


def _gpu_present() -> bool:
    import torch

    # device_count asks NVML: unlike is_available() it leaves forked children able to use CUDA.
    return torch.cuda.device_count() > 0


def _reset_dynamo() -> None:
    """Forget compiled graphs: a model compiled before a class attribute changed keeps running the old code."""
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None and hasattr(dynamo, "reset"):
        dynamo.reset()
        log.info("accel: torch._dynamo.reset(), so that models compiled before see the change")


def _warn_unknown_variables() -> None:
    for line in settings.unknown_names():
        log.warning("accel: %s", line)


def _set_level(level: str) -> None:
    logger = logging.getLogger("accel")
    logger.setLevel(logging.CRITICAL + 1 if level == "off" else level.upper())


def target_states() -> list[tuple[Target, TargetState]]:
    """Every target with its state, in table order."""
    return [(target, STATES[target.name]) for target in TARGETS]
