"""The wrapper around one upstream callable: facts -> plan -> kernel, or the original with untouched arguments."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import threading
from collections.abc import Callable, Hashable
from typing import Any, Protocol

import torch
from torch.autograd import forward_ad
from torch.utils._device import DeviceContext

from . import certificates, checkpoint, verify
from .outcome import Choice, CompileError, Decline, Declined
from .rebind import Attribute, Entry, Everywhere, Inside, Rebinding, name_of
from .state import TargetState, policy

#: Plans remembered per adapter. Facts may carry lengths, so the memory is bounded and simply starts over when full.
REMEMBERED = 4096


class Adapter(Protocol):
    """What one upstream callable passes, in upstream's words. All methods take upstream's own arguments."""

    family: str  #: the kernel family, a folder under kernels/
    in_place: bool  #: arguments are written to (never run twice for verification)
    # and optionally `upstream_cannot_run_on: Container[str]`, archs without an upstream to verify against, and
    # `concerns(*args) -> bool`, whether a call is this adapter's, where a target has one adapter a class

    def facts(self, *args: Any, **kwargs: Any) -> tuple[Hashable, torch.device]:
        """The family's facts and the device, from metadata alone. Raises Decline: call, then module, then tensors."""

    def plan(self, facts: Any, arch: str) -> Choice | Declined:
        """The family's plan."""

    def run(self, choice: Choice, *args: Any, **kwargs: Any) -> Any:
        """Launch; what upstream would return."""

    def compiled(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Stands in for the call while torch.compile traces; must be traceable itself."""


_TRACING = Declined("torch.jit is tracing")
_QUARANTINED = Declined("quarantined: an earlier call of this configuration failed; see the log")
_RECOMPUTED = Declined("recomputed as its forward ran: upstream")
_OFF = Declined("the target is off")


class _Deciding(threading.local):
    """Families for which a wrapper further out has already declined the call that is being made."""

    families: frozenset[str] = frozenset()


_deciding = _Deciding()


def wrap(original: Callable[..., Any], adapter: Adapter, state: TargetState) -> Callable[..., Any]:
    """A plain function that stands for `original`: same name, doc and signature, `__wrapped__` set.

    One wrapper per original and target: asking again returns the same object. Upstream's `__dict__` is not taken over:
    FLA's functions carry Dynamo's "disable" marks there, which would break full-graph compilation.
    """
    known = state.wrappers.get(id(original))
    if known is not None:
        return known
    call = ServedCall(original, adapter, state)
    compiled = adapter.compiled

    @functools.wraps(original, updated=())
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # no lock, counter or log here: each would break or recompile the graph
            if state.on:
                return compiled(original, *args, **kwargs)
            return original(*args, **kwargs)
        if state.on or recomputing():
            return call(args, kwargs)
        return original(*args, **kwargs)

    wrapper.__accel__ = call  # type: ignore[attr-defined]
    call.wrapper = wrapper
    with state.lock:  # another thread may have been faster
        return state.wrappers.setdefault(id(original), wrapper)


def attribute(owner: Any, name: str, adapter: Adapter, state: TargetState) -> list[Rebinding]:
    """The rebinding that serves `owner.name` (a module's or class's own attribute) through `adapter`.

    Nothing if the owner lacks it; a mere note if ours is inside somebody else's wrapper.
    """
    current = vars(owner).get(name)
    if current is None:
        return []
    label = f"{name_of(owner)}.{name}"
    call = _behind(current, label, state)
    if call is None:
        return [Attribute(owner, name, _placed(label, current, adapter, state), current)]
    if current is call.wrapper:
        return [Attribute(owner, name, current, call.original)]
    return [Inside(label, lambda: vars(owner).get(name))]


def everywhere(owner: Any, name: str, adapter: Adapter, state: TargetState) -> list[Rebinding]:
    """The rebinding that serves the function defined as `owner.name` wherever it is held, under any name.

    Nothing if the owner lacks it; a mere note if ours is inside somebody else's wrapper.
    """
    current = vars(owner).get(name)
    if current is None:
        return []
    label = f"{name_of(owner)}.{name}"
    call = _behind(current, label, state)
    if call is None:
        return [Everywhere(current, _placed(label, current, adapter, state))]
    made: list[Rebinding] = [Everywhere(call.original, call.wrapper)]
    if current is not call.wrapper:  # the other holders are ours all the same
        made.append(Inside(label, lambda: vars(owner).get(name)))
    return made


def entry(
    label: str,
    read: Callable[[], Any],
    write: Callable[[Any], None],
    adapter: Adapter,
    state: TargetState,
    *,
    own: Any,
) -> list[Rebinding]:
    """The rebinding that serves an entry of a registry, named by `label` in messages.

    Raises LookupError where it is neither ours nor `own`, the library's function for it: somebody chose another one.
    """
    current = read()
    call = _behind(current, label, state)
    if call is None:
        if current is not own:
            raise LookupError(f"{label} is {name_of(current)}, not the library's own function, and stays so")
        return [Entry(label, read, write, _placed(label, current, adapter, state), current)]
    if current is call.wrapper:
        return [Entry(label, read, write, current, call.original)]
    return [Inside(label, read)]


def wrapped_call(function: Any, state: TargetState | None = None) -> ServedCall | None:
    """Our call (of `state`, or of any target) behind `function`, under any layers of others; None without one."""
    while function is not None:
        call = getattr(function, "__dict__", {}).get("__accel__")
        if isinstance(call, ServedCall) and (state is None or call.state is state):
            return call
        function = getattr(function, "__wrapped__", None)
    return None


def behind(owner: Any, name: str, state: TargetState) -> ServedCall | None:
    """Our call behind what `owner` holds as `name` now, under any layers of others; None without one."""
    return _behind(vars(owner).get(name), f"{name_of(owner)}.{name}", state)


def _placed(label: str, original: Any, adapter: Adapter, state: TargetState) -> Callable[..., Any]:
    """The wrapper of `original`, which remembers where it was put."""
    wrapper = wrap(original, adapter, state)
    wrapper.__accel__.places.add(label)  # type: ignore[attr-defined]
    return wrapper


def _behind(function: Any, label: str, state: TargetState) -> ServedCall | None:
    """Our call behind what is found at `label` now, also under a wrapper that does not tell what it wraps."""
    call = wrapped_call(function, state)
    if call is not None:
        return call
    for cell in getattr(function, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # an empty cell
            call = wrapped_call(cell.cell_contents, state)
            if call is not None and label in call.places:
                return call
    return None


def calls_of(state: TargetState) -> list[ServedCall]:
    """The served calls of a target that is on, one per upstream callable met so far."""
    return [wrapper.__accel__ for wrapper in state.wrappers.values()] if state.on else []  # type: ignore[attr-defined]


def decided(family: str) -> bool:
    """Whether a wrapper further out has already sent the call that is being made upstream, for this kernel family."""
    return family in _deciding.families


def recomputing() -> bool:
    """True inside a backward pass, where only a checkpoint's recomputation runs forward code."""
    return bool(torch._C._current_graph_task_id() != -1)


class ServedCall:
    """Decides, launches, counts and falls back for one upstream callable."""

    def __init__(self, original: Callable[..., Any], adapter: Adapter, state: TargetState) -> None:
        self.original, self.adapter, self.state = original, adapter, state
        self.family = adapter.family
        self._alone = frozenset((adapter.family,))
        self.wrapper: Callable[..., Any] | None = None  #: what stands for `original`
        self.places: set[str] = set()  #: where the wrapper was put, each a label
        self.plans: dict[tuple[Hashable, str], Choice | Declined] = {}
        self.quarantined: dict[tuple[Hashable, str], str] = {}
        self.verified: dict[tuple[Hashable, str], int] = {}  #: calls that were compared with upstream

    def decide(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], arch: str | None = None
    ) -> tuple[Choice | Declined, tuple[Hashable, str] | None]:
        """The plan's decision, from metadata alone, and the configuration it is for (None: declined before a plan)."""
        if torch._C._get_tracing_state() is not None:  # sizes are tensors there, and reading them is recorded
            return _TRACING, None
        try:
            facts, device = self.adapter.facts(*args, **kwargs)
        except Decline as decline:
            return Declined(decline.reason), None
        except TypeError:
            if _fits(self.adapter.facts, args, kwargs):
                raise
            return Declined("the arguments do not fit the signature"), None
        key = (facts, arch or arch_of(device))
        decision = self.plans.get(key)
        if decision is None:
            decision = self.adapter.plan(*key)
            if isinstance(decision, Choice):
                decision = certificates.check(decision, key[1], uncertified=policy.uncertified) or decision
            _remember(self.plans, key, decision)
        return decision, key

    def explain(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Choice | Declined:
        """What would become of a call made now. Runs, launches and counts nothing."""
        decision, key = self.decide(args, kwargs)
        return _QUARANTINED if key in self.quarantined else decision

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.family in _deciding.families:
            return self.original(*args, **kwargs)
        decision, key = self.decide(args, kwargs)
        if type(decision) is not Choice or key is None:
            return self._declined(decision, args, kwargs)
        here = checkpoint.region()
        if here is not None and here[1]:  # run again: as it ran before
            return self._again(decision, here[0].replay((id(self), key)), args, kwargs)
        if self.quarantined and key in self.quarantined:  # the hash of facts is not free
            decision, result = _QUARANTINED, None
        else:
            decision, result = self._serve(decision, key, args, kwargs)
        served = type(decision) is Choice
        if here is not None:
            here[0].record((id(self), key), served)
        if served:
            return result
        return self._declined(decision, args, kwargs)

    def upstream(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The original, with our other wrappers of the same family on its way told that this call is decided."""
        families = _deciding.families
        _deciding.families = families | self._alone if families else self._alone
        try:
            return self.original(*args, **kwargs)
        finally:
            _deciding.families = families

    def quarantine(self, key: tuple[Hashable, str], why: str) -> None:
        """Send this configuration upstream from now on."""
        self.quarantined[key] = why
        self.state.log_once(logging.ERROR, f"quarantined {key[0]} on {key[1]}: {why}")

    def _declined(self, decision: Choice | Declined, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.state.on:  # off: a recomputation of what ran before it was switched off
            assert isinstance(decision, Declined)
            self.state.count_declined(decision.reason)
        return self.upstream(args, kwargs)

    def _serve(
        self, choice: Choice, key: tuple[Hashable, str], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Choice | Declined, Any]:
        """Serve the call: the choice and the result, or why upstream has to run it after all."""
        if not self.state.on:
            return _OFF, None
        try:
            if choice.kernel != "portable":
                decline_ambient()
            if policy.verify and verify.due(self, key):
                result, problem = verify.run_both(self, choice, key, args, kwargs)
                if problem is not None:
                    return Declined(problem), None
            else:
                result = self.adapter.run(choice, *args, **kwargs)
        except Decline as decline:
            return Declined(decline.reason), None
        except CompileError as error:
            if policy.strict:
                raise
            self.quarantine(key, str(error))
            return Declined("its kernel failed to compile; see the log"), None
        self.state.count_served(choice.kernel)
        return choice, result

    def _again(self, choice: Choice, served: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call of a checkpointed region again, on the route it took before."""
        if not served:
            return self._declined(_RECOMPUTED, args, kwargs)
        result = self.adapter.run(choice, *args, **kwargs)
        if self.state.on:
            self.state.count_served(choice.kernel)
        return result


def decline_ambient() -> None:
    """Raise Decline where a direct kernel launch would escape what is watching the operators."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise Decline("inside a functorch transform (vmap, grad, ...)")
    if torch._C._len_torch_dispatch_stack() > 0:
        raise Decline("a torch dispatch mode is active")
    if forward_ad._current_level >= 0:
        raise Decline("inside forward-mode differentiation")
    for index in range(torch._C._len_torch_function_stack()):
        mode = torch._C._get_function_stack_at(index)
        if not isinstance(mode, DeviceContext):  # torch.device(...) as a context: it touches factories only
            raise Decline(f"a torch function mode is active: {type(mode).__name__}")


@functools.lru_cache(maxsize=64)
def arch_of(device: torch.device) -> str:
    """The dispatch arch of a device, e.g. "sm_90"; "cpu" without one."""
    from accel.kernels.runtime.arch import dispatch_arch

    return dispatch_arch(device)


def _fits(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def _remember(memory: dict[Any, Any], key: Any, value: Any) -> None:
    if len(memory) >= REMEMBERED:
        memory.clear()
    memory[key] = value
