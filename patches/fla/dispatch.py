"""FLA's own backend registry: how calls through references that rebinding cannot reach are served.

Rebinding finds module attributes and transformers' closures. A function kept in an instance, a `functools.partial`, a
container or a variable of the user's is still FLA's object; its dispatcher asks the registered backends at every call,
and one of them is ours while a target is on. A call that came through our wrapper was decided there, so the backend
steps aside and nothing is counted twice.

FLA 0.6.0 keeps a registry per dispatched function and one per operation (`fla.backends`); 0.5.2 has one per operation,
filled at the first dispatched call (`fla.ops.backends`). With FLA_DISABLE_BACKEND_DISPATCH=1 the functions are not
dispatched and there is nothing to register with.

Not reached: kept references to functions that FLA does not dispatch (`fused_recurrent_*`).
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

from accel import serve
from accel.outcome import Declined
from accel.rebind import Rebinding
from accel.serve import ServedCall

#: Our key in FLA's registries; nothing of FLA's uses it.
BACKEND_TYPE = "accel"
#: Lower is asked first: after FLA's Ascend backend (0), before FlashQLA and FlashKDA (3).
PRIORITY = 1


def entry(function: Callable[..., Any], operation: str, call: ServedCall) -> list[Rebinding]:
    """The rebinding that serves `function`, dispatched by FLA under `operation`, through `call`; [] without a registry.

    `function` is FLA's own, not our wrapper of it.
    """
    registry = _registry(function, operation)
    if registry is None:
        return []
    return [RegistryEntry(registry, function.__name__, call)]


class RegistryEntry:
    """Our backend in one of FLA's registries."""

    def __init__(self, registry: Any, function_name: str, call: ServedCall) -> None:
        self.registry, self.function_name, self.call = registry, function_name, call
        self.backend: Any = None
        self.was_active: Any = None

    def apply(self) -> bool:
        if BACKEND_TYPE in self.registry._backends:
            return False
        self.backend = _backend(self.function_name, self.call)
        self.was_active = getattr(self.registry, "_active", None)
        self.registry.register(self.backend)
        return True

    def undo(self) -> list[str]:
        current = self.registry._backends.get(BACKEND_TYPE)
        if self.backend is None or current is None:
            return []
        if current is not self.backend:
            return [f"the {BACKEND_TYPE!r} entry of FLA's registry {self.registry.operation_name} is now {current!r}"]
        self.registry._backends.pop(BACKEND_TYPE)
        if getattr(self.registry, "_active", None) is self.backend:  # 0.5.2 remembers its favourite
            self.registry._active = self.was_active
        self.backend = None
        return []


def _registry(function: Callable[..., Any], operation: str) -> Any:
    """FLA's registry that `function` asks at each call; None if it asks none, or none yet (0.5.2 before a call).

    The names are private to FLA. A release without them is rebound all the same, and only this route is missing.
    """
    newer, older = sys.modules.get("fla.backends"), sys.modules.get("fla.ops.backends")
    if getattr(newer or older, "_DISPATCH_DISABLED", True):
        return None
    if newer is not None:
        functions, operations = (vars(newer).get(f"_{kind}_registries", {}) for kind in ("function", "operation"))
        registry = functions.get(inspect.unwrap(function)) or operations.get(operation)
    else:
        registry = getattr(getattr(older, "BackendRegistry", None), "_registries", {}).get(operation)
    return registry if isinstance(getattr(registry, "_backends", None), dict) else None


def _backend(function_name: str, call: ServedCall) -> Any:
    """An FLA backend that verifies by deciding, counting what it declines, and then serves."""

    def verifier(*args: Any, **kwargs: Any) -> tuple[bool, str | None]:
        if not call.state.on:
            return False, "the target is off"
        if serve.decided(call.adapter.family):
            return False, "the call was declined before"
        decision, _ = call.decide(args, kwargs)
        if isinstance(decision, Declined):
            call.state.count_declined(decision.reason)
            return False, decision.reason
        return True, None

    def implementation(*args: Any, **kwargs: Any) -> Any:
        return call(args, kwargs)

    base = (sys.modules.get("fla.backends") or sys.modules["fla.ops.backends"]).BaseBackend
    namespace = {
        "__doc__": "accel, for references to the function that rebinding cannot reach.",
        "backend_type": BACKEND_TYPE,
        "priority": PRIORITY,
        function_name: staticmethod(implementation),
        f"{function_name}_verifier": staticmethod(verifier),
    }
    return type("AccelBackend", (base,), namespace)()
