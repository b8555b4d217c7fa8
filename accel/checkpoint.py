"""Activation checkpointing: a recomputation takes the routes that its forward took.

torch's non-reentrant checkpoint compares what forward and recomputation save for the backward pass, so a call that our
kernel served must be served again, and one that ran upstream must run upstream again, whatever was switched, restored,
quarantined or verified meanwhile. Routes are kept with the frame that torch keeps for each checkpointed region, and die
with it. The reentrant checkpoint differentiates the recomputation itself and compares nothing: any route is right.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch

_top_hooks = torch._C._autograd._top_saved_tensors_default_hooks
_ATTRIBUTE = "_accel_routes"  #: on torch's frame


@dataclass(eq=False)  # no slots: Python 3.10 cannot refer weakly to an object with them
class Routes:
    """What the calls of one checkpointed region did, in their order: served by us or not."""

    taken: dict[Hashable, list[bool]] = field(default_factory=dict)
    recomputation: Callable[..., Any] | None = None  #: the hook that marks the recomputation being followed
    position: dict[Hashable, int] = field(default_factory=dict)

    def record(self, call: Hashable, served: bool) -> None:
        self.taken.setdefault(call, []).append(served)
        if served:
            _served.add(self)

    def replay(self, call: Hashable) -> bool:
        """Whether the next call was served in the forward; False for one that we did not see there."""
        index = self.position.get(call, 0)
        self.position[call] = index + 1
        taken = self.taken.get(call, ())
        return index < len(taken) and taken[index]


_served: weakref.WeakSet[Routes] = weakref.WeakSet()


def pending() -> int:
    """How many regions in which we served a call can still be run again: those whose backward pass is to come."""
    return len(_served)


def region() -> tuple[Routes, bool] | None:
    """The routes of the region that is being run, and whether it is run again; None outside of one."""
    hooks = _top_hooks(True)
    if hooks is None:
        return None
    pack = inspect.unwrap(hooks[0])
    if getattr(pack, "__module__", None) != "torch.utils.checkpoint":
        return None
    frame, again = _variable(pack, "frame"), False
    if frame is None:
        reference, again = _variable(pack, "target_frame_ref"), True
        frame = reference() if reference is not None else None
    if frame is None:
        return None
    routes: Routes = frame.__dict__.setdefault(_ATTRIBUTE, Routes())
    if again and routes.recomputation is not pack:
        routes.recomputation, routes.position = pack, {}
    return routes, again


def watched() -> bool:
    """Whether somebody packs the tensors that autograd saves: a checkpoint counts them, offloading copies them."""
    return _top_hooks(True) is not None


def unwatched() -> torch.autograd.graph.saved_tensors_hooks:
    """A context in which nobody outside sees the tensors that are saved for backward."""
    return torch.autograd.graph.saved_tensors_hooks(_same, _same)


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _variable(function: Any, name: str) -> Any:
    """A variable that `function` closes over; None without one."""
    names = function.__code__.co_freevars
    return function.__closure__[names.index(name)].cell_contents if name in names else None
