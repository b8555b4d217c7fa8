"""What is on, what was served and what declined: status and explain, as data and as text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .activation import target_states
from .outcome import Choice, Declined
from .state import STATES, TargetState


@dataclass(frozen=True, slots=True)
class TargetStatus:
    """One target at one moment."""

    name: str
    state: str  #: "active", "pending import", "off" or "refused: <reason>"
    served: int = 0
    declined: dict[str, int] = field(default_factory=dict)  #: reason -> calls; compiled calls are not among them
    kernels: dict[str, int] = field(default_factory=dict)  #: kernel -> calls it served
    left: tuple[str, ...] = ()  #: holders that somebody else patched over, left to them by the last restore
    failures: tuple[str, ...] = ()  #: modules that could not be patched, and why; upstream's own code runs there


def status() -> list[TargetStatus]:
    """Every target with its counters, in the order of the targets table."""
    result = []
    for target, state in target_states():
        with state.lock:
            kernels, declined = dict(state.served), dict(state.declined)
        failures = tuple(state.failures.copy().values())
        served = sum(kernels.values())
        result.append(TargetStatus(target.name, state.state, served, declined, kernels, tuple(state.left), failures))
    return result


def text(rows: list[TargetStatus] | None = None) -> str:
    """`status()` for people: what was served and declined, by target, and what is on but was not called."""
    rows = status() if rows is None else rows
    lines = []
    for row in rows:
        declined = sum(row.declined.values())
        if row.served or declined:
            lines.append(f"{row.name}: served {row.served}, declined {declined}")
            lines += [f"  {count:>8}  by {kernel}" for kernel, count in _most_first(row.kernels)]
            lines += [f"  {count:>8}  declined: {reason}" for reason, count in _most_first(row.declined)]
        lines += [f"{row.name}: {line}" for line in row.failures]
        lines += [f"{row.name}: left to its new owner: {line}" for line in row.left]
    silent = [
        row.name for row in rows if row.state in ("active", "pending import") and not row.served and not row.declined
    ]
    if silent:
        lines.append(f"on, but no call was counted (compiled calls are not): {', '.join(silent)}")
    return "\n".join(lines or ["nothing is on, and no call was counted"])


def _most_first(counts: dict[str, int]) -> list[tuple[str, int]]:
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))


def explain(target: str | Callable[..., Any], *args: Any, **kwargs: Any) -> Choice | Declined:
    """What would become of a call, without running, launching or counting anything.

    Args:
        target: a target's name, or the accelerated callable itself where a target has several.
        args, kwargs: what upstream's callable would get; for a class's forward the module comes first.

    Raises ValueError for an unknown target, and for one with several callables named by the target alone when the
    arguments fit none of them.
    """
    from . import serve  # imports torch

    if callable(target):
        call = serve.wrapped_call(target)
        if call is None:
            raise ValueError(f"{target!r} is not served by accel here; name a target instead")
        return call.explain(args, kwargs)
    state = _state(target)
    calls = serve.calls_of(state)
    if not calls:
        return Declined(f"{target} is {state.state}")
    # An adapter of a class's forward says by `concerns(*args)` whether the module is of that class.
    meant = [call for call in calls if getattr(call.adapter, "concerns", _anything)(*args)]
    outcomes = [call.explain(args, kwargs) for call in meant or calls]
    for outcome in outcomes:
        if isinstance(outcome, Choice):
            return outcome
    return outcomes[0]


def _anything(*args: Any) -> bool:
    return True


def _state(name: str) -> TargetState:
    state = STATES.get(name)
    if state is None:
        raise ValueError(f"unknown target {name!r}; known are {', '.join(STATES)}")
    return state
