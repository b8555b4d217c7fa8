"""Switching targets on and off: accelerate, restore, accelerated, is_accelerated.

Neither torch nor an upstream is imported: a target is patched right after the modules it lives in are, at once where
they already are.

Lock order: `_lock` guards the switches and the records, and is held for nothing else. Whoever imports a hooked module
holds its import lock when we are called, so nothing is imported, logged or waited for while `_lock` is held; adapters
are imported, and look at the module, before it is taken.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import logging
import os
import sys
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from types import ModuleType

from . import settings
from .imports import being_imported, when_imported
from .rebind import Rebinding, one_pass
from .state import STATES, Policy, TargetState, policy
from .targets import (
    BY_NAME,
    TARGETS,
    Installed,
    Target,
    installed,
    members,
    modules_of,
    names_of,
    resolve,
)

log = logging.getLogger("accel")
_lock = threading.RLock()
_hooked: set[str] = set()  #: modules whose import we wait for


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
        strict: kernel failures, and targets that cannot be patched, raise instead of falling back. Declined calls
            still run upstream's code.

    Returns:
        what is active, what waits for its library's import, and what was refused and why.

    Raises:
        ValueError: an unknown target, or a bad value in an ACCEL_ variable. ImportError: a named target or group whose
        library is missing or outside the supported range, or an alias none of whose libraries can be patched.
        RuntimeError: with `strict`, a target that could not be patched. Nothing is applied in any of these cases.
    """
    read = settings.read()
    for line in settings.unknown_names():
        log.warning("accel: %s", line)
    names = None if targets is None else names_of(targets)
    chosen = [t for t in TARGETS if t.default] if names is None else resolve(names)
    found = {group: installed(group) for group in {target.group for target in chosen}}
    if names is not None:
        _keep_contract(names, found, strict=strict or read.strict)
    problems = {t.name: problem for t in chosen if (problem := found[t.group].problem) is not None}
    insisted = {t.name for t in chosen if t.name in (names or ()) or (STATES[t.name].on and STATES[t.name].insisted)}
    for target in chosen:
        plain = target.name not in problems and target.name not in insisted
        if target.without_gpu and plain and "torch" in sys.modules and _gpu_present():
            problems[target.name] = GPU_REASON
    with _lock:
        _set_policy(Policy(strict or read.strict, read.verify, read.uncertified))
        switched = []
        for target in chosen:
            state = STATES[target.name]
            state.refused = problems.get(target.name)
            if state.refused is None:
                if not state.on:
                    switched.append(target.name)
                    state.left.clear()
                state.on, state.insisted = True, target.name in insisted
    _set_level(read.log)
    with one_pass():
        made = sum(_reach(STATES[t.name]) for t in chosen if STATES[t.name].on)
    if made:
        _reset_dynamo()
    report = _report(chosen, hide=set() if names else {n for n in problems if found[BY_NAME[n].group].version is None})
    failed = [f"{t.name}: {reason}" for t in chosen for reason in STATES[t.name].failures.values()]
    if policy.strict and failed:
        if switched:
            restore(switched)
        raise RuntimeError("; ".join(failed))
    return report


def restore(targets: str | Iterable[str] | None = None) -> None:
    """Put back the very objects that were replaced, for the given targets or for all of them.

    A holder that somebody else patched over stays theirs; our wrapper inside it is off, and `status()` and the log
    say so. Call it between training steps: a checkpointed forward is recomputed with what is there by then.

    Raises ValueError for an unknown target.
    """
    chosen = TARGETS if targets is None else resolve(targets)
    left: list[tuple[str, str]] = []
    changed = False
    with _lock, one_pass():
        for target in reversed(chosen):
            state = STATES[target.name]
            state.on, state.insisted, state.refused = False, False, None
            state.failures.clear()
            changed = changed or bool(state.rebindings)
            for rebinding in reversed(state.rebindings):
                lines = [line for line in _undo(rebinding) if line not in state.left]
                state.left += lines
                left += [(state.name, line) for line in lines]
            state.rebindings.clear()
            state.patched.clear()
    for name, line in left:
        log.warning("accel: %s: left to its new owner: %s", name, line)
    if changed:
        _warn_of_pending()
        _reset_dynamo()


def _warn_of_pending() -> None:
    checkpoint = sys.modules.get("accel.checkpoint")
    if checkpoint is not None and (regions := checkpoint.pending()):
        log.warning(
            "accel: restored while %d checkpointed regions wait for their backward pass. Upstream recomputes what was "
            "served there, and torch may raise a CheckpointError: restore between training steps",
            regions,
        )


def _undo(rebinding: Rebinding) -> list[str]:
    try:
        return rebinding.undo()
    # Policy: one holder that cannot be put back (a registry that changed, say) does not keep the rest from it.
    except Exception as error:
        return [f"{rebinding!r} could not be put back: {type(error).__name__}: {error}"]


def is_accelerated(name: str | None = None) -> bool:
    """Whether a target is on (active or waiting for its library); a group or alias: all its members; None: any.

    A member that is only for machines without a GPU does not count against its group on one with a GPU.
    """
    if name is None:
        return any(state.on for state in STATES.values())
    counted = [s for s in (STATES[t.name] for t in members(name)) if s.refused != GPU_REASON or s.name == name]
    return bool(counted) and all(state.on for state in counted)


@contextlib.contextmanager
def accelerated(targets: str | Iterable[str] | None = None, *, strict: bool = False) -> Iterator[Report]:
    """`accelerate()` for the length of a `with` block, then the set of targets that was on before.

    Process-wide: what one thread switches off at the end of its block is off for every thread.
    """
    with _lock:
        before = {name: state.insisted for name, state in STATES.items() if state.on}
        was = dataclasses.replace(policy)
    try:
        yield accelerate(targets, strict=strict)
    finally:
        if gone := [name for name, state in STATES.items() if state.on and name not in before]:
            restore(gone)
        with _lock:
            _set_policy(was)
            back = [STATES[name] for name in before if not STATES[name].on]
            for state in back:
                state.on, state.insisted = True, before[state.name]
        if sum(_reach(state) for state in back):
            _reset_dynamo()


#: Why a target that is for machines without a GPU is off.
GPU_REASON = "a GPU is present; name the target to have it for CPU tensors all the same"


def _keep_contract(names: list[str], found: dict[str, Installed], *, strict: bool) -> None:
    """Raise ImportError unless what was named can be had.

    "all" asks for what is installed, and an alias for the libraries that are; `strict` wants those in range as well.
    """
    unmet: dict[str, str] = {}
    for name in names:
        of = [] if name == "all" else members(name)
        broken = [target for target in of if found[target.group].problem]
        if len(broken) < len(of):
            broken = [target for target in broken if strict and found[target.group].version]
        unmet.update((target.name, found[target.group].problem or "") for target in broken)
    if unmet:
        problems = "; ".join(f"{name}: {reason}" for name, reason in unmet.items())
        raise ImportError(f"accel cannot apply what was asked for, and applied nothing. {problems}")


def _report(chosen: Iterable[Target], hide: set[str]) -> Report:
    states = [STATES[target.name] for target in chosen]
    return Report(
        tuple(state.name for state in states if state.state == "active"),
        tuple(state.name for state in states if state.state == "pending import"),
        {
            state.name: state.refused or "; ".join(state.failures.values())
            for state in states
            if (state.refused or state.failures) and state.name not in hide
        },
    )


def _reach(state: TargetState) -> int:
    """Patch what is loaded of the target's modules, wait for the rest; how many replacements were made."""
    made = 0
    names = list(modules_of(state.target))
    if state.target.every_model:  # remote code has no name that could be known beforehand
        names += [name for name in list(sys.modules) if name.startswith("transformers_modules.")]
    for name in names:
        module = sys.modules.get(name)
        if isinstance(module, ModuleType) and not being_imported(module):
            made += _patch(state, module)
            continue
        with _lock:
            wait = name not in _hooked
            _hooked.add(name)
        if wait:
            when_imported(name, functools.partial(_imported, name))
    return made


def _imported(name: str, module: ModuleType) -> None:
    """A module that was waited for has been imported: patch it for every target that is on and lives there."""
    with _lock:
        _hooked.discard(name)
    for target in TARGETS:
        state = STATES[target.name]
        remote = target.every_model and name.startswith("transformers_modules.")
        if state.on and (remote or name in modules_of(target)):
            if target.without_gpu and not state.insisted and _gpu_present():
                with _lock:
                    state.on, state.refused = False, GPU_REASON
            else:
                # Nothing that was compiled before can hold what has just been defined: no reset of Dynamo, which
                # would wait for a compilation that may be waiting for this import.
                _patch(state, module)


def _patch(state: TargetState, module: ModuleType) -> int:
    """Let the adapter replace what it finds in `module`; how many replacements were made.

    An adapter that fails is refused and logged; the rest goes on.
    """
    try:
        adapter = importlib.import_module(f"accel.patches.{state.target.adapter}")
        if being_imported(adapter):  # further out, or by a thread that waits for the import we are called from
            when_imported(adapter.__name__, lambda _: _patch(state, module))
            return 0
        found = list(adapter.patch(module, state))
        with _lock, one_pass():
            state.failures.pop(module.__name__, None)
            return _apply(state, module, found) if state.on else 0
    # Policy: an adapter that does not understand this upstream never breaks the user's import or the other targets.
    except Exception as error:
        reason = f"patching {module.__name__} failed: {type(error).__name__}: {error}"
        with _lock:
            first = not state.failures
            state.failures[module.__name__] = reason
        # One trace is enough: what an adapter fails on in one modeling file, it fails on in hundreds.
        level = logging.ERROR if first else logging.INFO
        log.log(level, "accel: %s: %s; upstream's own code runs", state.name, reason, exc_info=error if first else None)
        return 0


def _apply(state: TargetState, module: ModuleType, found: list[Rebinding]) -> int:
    made = 0
    for rebinding in found:
        if rebinding not in state.rebindings and rebinding.apply():
            state.rebindings.append(rebinding)
            made += 1
    if made:
        state.patched[module.__name__] = state.patched.get(module.__name__, 0) + made
    return made + sum(rebinding.apply() for rebinding in state.rebindings)  # holders loaded since the last look


def _set_policy(wanted: Policy) -> None:
    if wanted.uncertified != policy.uncertified:  # remembered plans say who holds a certificate
        for state in STATES.values():
            for wrapper in list(state.wrappers.values()):
                wrapper.__accel__.plans.clear()  # type: ignore[attr-defined]
    policy.strict, policy.verify, policy.uncertified = wanted.strict, wanted.verify, wanted.uncertified


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


class _Stderr(logging.StreamHandler):  # type: ignore[type-arg]
    """Shows what was asked for where the application has not set up logging; Python then shows warnings only."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not logging.getLogger().handlers


def _set_level(level: str) -> None:
    """What ACCEL_LOG asks for; a level that the application chose stays."""
    logger = logging.getLogger("accel")
    if level != "warning" or logger.level == logging.NOTSET:
        logger.setLevel(logging.CRITICAL + 1 if level == "off" else level.upper())
    if level in ("debug", "info") and not logger.handlers:
        logger.addHandler(_Stderr())


def target_states() -> list[tuple[Target, TargetState]]:
    """Every target with its state, in table order."""
    return [(target, STATES[target.name]) for target in TARGETS]


def _new_lock() -> None:
    """In a forked child: the thread that held the lock does not exist there."""
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_new_lock)
