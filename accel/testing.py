"""What the project's tests, benchmarks and `accel certify` share: accuracy, oracles, and snapshots of the upstreams."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import BuiltinMethodType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

ERROR_RATIO = 1.25  #: our relative error may be this many times upstream's
LARGEST_RATIO = 2.0  #: our largest single difference may be this many times upstream's
FLOOR = 1e-6  #: errors below this, relative to the oracle, always pass


@dataclass(frozen=True, slots=True)
class Accuracy:
    """The verdict on one tensor. Ratios are at most ERROR_RATIO and LARGEST_RATIO exactly where it is ok."""

    ok: bool
    reason: str  #: why it is not ok; "" if it is
    error: float  #: ||ours - oracle|| / ||oracle||
    error_theirs: float
    error_ratio: float  #: of the two, where theirs counts as at least FLOOR / ERROR_RATIO
    largest: float  #: largest single difference of ours, relative to the oracle's largest magnitude
    largest_theirs: float
    largest_ratio: float


def accuracy(ours: Tensor, theirs: Tensor, oracle: Tensor) -> Accuracy:
    """The accuracy rule: `ours` is as close to the fp64 `oracle` as upstream's `theirs` on the same input.

    With error = ||x - oracle|| / ||oracle||, ours may be 1.25 times theirs and the largest single difference twice
    theirs, where errors below 1e-6 always pass. Ours must be finite wherever theirs is. Positions where neither is
    finite, or where the oracle is not, are left out of the errors. Integers and booleans must be equal to theirs.
    Shape and dtype must be theirs.
    """
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return _refused(f"shape {tuple(ours.shape)} {ours.dtype}, upstream's {tuple(theirs.shape)} {theirs.dtype}")
    if ours.shape != oracle.shape:
        return _refused(f"shape {tuple(ours.shape)}, the oracle's {tuple(oracle.shape)}")
    if not (ours.is_floating_point() or ours.is_complex()):
        different = int((ours != theirs.to(ours.device)).sum())
        return (
            _refused(f"{different} of {ours.numel()} integers differ") if different else Accuracy(True, "", *[0.0] * 6)
        )
    exact = torch.promote_types(oracle.dtype, torch.float64)
    x, y, o = ours.detach().to(exact), theirs.detach().to(ours.device, exact), oracle.detach().to(ours.device, exact)
    worse = x.isfinite().logical_not_() & y.isfinite()
    if bool(worse.any()):
        return _refused(f"{int(worse.sum())} of {ours.numel()} values are NaN or Inf where upstream's are finite")
    known = o.isfinite()
    mine, other = _differences(x, o, known), _differences(y, o, known)
    scale = torch.where(known, o.abs(), 0)
    norm, top = float(torch.linalg.vector_norm(scale)), float(scale.max()) if scale.numel() else 0.0
    error, error_theirs = mine[0], other[0]
    largest, largest_theirs = mine[1], other[1]
    error_ratio = _ratio(error, error_theirs, norm, ERROR_RATIO)
    largest_ratio = _ratio(largest, largest_theirs, top, LARGEST_RATIO)
    reasons = []
    if error_ratio > ERROR_RATIO:
        reasons.append(f"relative error {_over(error, norm):.3g} is {error_ratio:.3g} times upstream's")
    if largest_ratio > LARGEST_RATIO:
        reasons.append(f"largest difference {largest:.3g} is {largest_ratio:.3g} times upstream's")
    return Accuracy(
        not reasons,
        " and ".join(reasons),
        _over(error, norm),
        _over(error_theirs, norm),
        error_ratio,
        _over(largest, top),
        _over(largest_theirs, top),
        largest_ratio,
    )


def assert_accurate(what: str, ours: Tensor, theirs: Tensor, oracle: Tensor) -> None:
    """Raise AssertionError unless `accuracy` holds and `ours` is infinite exactly where the oracle is, and nowhere NaN.

    Theirs must be finite wherever the oracle is: it is the yardstick.
    """
    if bool(ours.isnan().any()) or not torch.equal(ours.isinf(), oracle.isinf().to(ours.device)):
        raise AssertionError(f"{what}: NaN, or infinite where the oracle is not or the other way round")
    if theirs.shape == oracle.shape and not bool(theirs[oracle.isfinite()].isfinite().all()):
        raise AssertionError(f"{what}: upstream's result is not finite where the oracle is, and no yardstick")
    verdict = accuracy(ours, theirs, oracle)
    if not verdict.ok:
        raise AssertionError(f"{what}: {verdict.reason}")


class InDouble(TorchFunctionMode):
    """Upstream's casts to fp32 are casts to fp64 instead: given fp64 inputs, its own code is the oracle."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.float:
            func = Tensor.double
        args = [torch.float64 if value is torch.float32 else value for value in args]
        kwargs = {key: torch.float64 if value is torch.float32 else value for key, value in (kwargs or {}).items()}
        return func(*args, **kwargs)


#: What is looked into for the objects of the upstream libraries.
UPSTREAMS = ("fla", "transformers", "diffusers", "transformers_modules")
_ATOMS = (str, bytes, int, float, bool, type(None), Tensor, ModuleType)


@dataclass(slots=True)
class Snapshot:
    """Every callable of the upstream libraries by the path that leads to it, and every entry of their registries."""

    objects: dict[str, Any] = field(default_factory=dict)

    def changed(self, later: Snapshot) -> list[str]:
        """Paths whose object is another one in `later`, or gone, and paths that lead to ours only there; sorted."""
        lines = [
            f"{path}: {_describe(known)} is now {_describe(later.objects.get(path, 'gone'))}"
            for path, known in self.objects.items()
            if not _same(later.objects.get(path), known)
        ]
        lines += [
            f"{path}: {_describe(new)} was added"
            for path, new in later.objects.items()
            if path not in self.objects and _is_ours(new)
        ]
        return sorted(lines)


def snapshot(prefixes: tuple[str, ...] = UPSTREAMS) -> Snapshot:
    """The objects that a patch of any kind would replace, as they are now, for a comparison by identity.

    Covers module attributes, class attributes (static and class methods as stored), the closure cells of both and of
    what they wrap, and entries of dictionaries, lists and instances held by modules and classes, three levels deep.
    Nothing is imported, and no attribute is looked up that is not in a `__dict__`.
    """
    taken = Snapshot()
    for name, module in list(sys.modules.items()):
        if isinstance(module, ModuleType) and name.partition(".")[0] in prefixes:
            for attribute, value in list(vars(module).items()):
                if not attribute.startswith("__"):  # Dynamo, too, leaves names like __builtins_dict___4
                    taken.objects.update(_walk(f"{name}.{attribute}", value, prefixes, 3, name))
    return taken


def _walk(path: str, value: Any, prefixes: tuple[str, ...], depth: int, module: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, _ATOMS):
        return
    if callable(value) or isinstance(value, (staticmethod, classmethod, property)):
        yield path, value
    if depth == 0:
        return
    if isinstance(value, type):
        # a class is looked into where it is defined, not where it was imported to
        if value.__module__ == module:
            for name, held in list(vars(value).items()):
                if name not in ("__dict__", "__weakref__", "__doc__", "__module__"):
                    yield from _walk(f"{path}.{name}", held, prefixes, depth - 1, module)
    elif isinstance(value, (FunctionType, staticmethod, classmethod, functools.partial)):
        yield from _cells(path, value)
    elif isinstance(value, dict):
        for key, held in list(dict.items(value)):  # a lazy mapping loads models in its own items()
            if isinstance(key, (str, int, type, FunctionType)):
                label = key if isinstance(key, (str, int)) else f"{key.__module__}.{key.__qualname__}"
                yield from _entry(f"{path}[{label!r}]", held, prefixes, depth, module)
    elif isinstance(value, (list, tuple)):
        for index, held in enumerate(value):
            yield from _entry(f"{path}[{index}]", held, prefixes, depth, module)
    elif "<locals>" in type(value).__qualname__ and "forward" in vars(type(value)):
        # where Hugging Face's `kernels` is installed, transformers' functions are instances of a class of their own
        yield from _cells(f"{path}.forward", vars(type(value))["forward"])
    elif type(value).__module__.partition(".")[0] in prefixes and hasattr(value, "__dict__"):
        for name, held in list(vars(value).items()):
            yield from _walk(f"{path}.{name}", held, prefixes, depth - 1, module)


def _entry(path: str, value: Any, prefixes: tuple[str, ...], depth: int, module: str) -> Iterator[tuple[str, Any]]:
    """An entry of a container: the object itself, whatever it is, and what is inside."""
    if not isinstance(value, _ATOMS):
        yield path, value
    yield from _walk(path, value, prefixes, depth - 1, module)


def _cells(path: str, value: Any, depth: int = 3) -> Iterator[tuple[str, Any]]:
    """The callables in the closure of a function, of what it wraps, and of the functions among them in turn."""
    level = 0
    while value is not None:
        function = getattr(value, "__func__", None) or getattr(value, "func", None) or value
        if isinstance(function, FunctionType):
            for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
                try:
                    held = cell.cell_contents
                except ValueError:  # an empty cell
                    continue
                inner = f"{path}<closure {level}>.{name}"
                if callable(held):
                    yield inner, held
                if depth and isinstance(held, FunctionType):
                    yield from _cells(inner, held, depth - 1)
        value, level = getattr(function, "__wrapped__", None), level + 1


def _same(now: Any, before: Any) -> bool:
    # A bound method is made anew by each look-up; what counts is what it binds.
    if isinstance(before, (MethodType, BuiltinMethodType)):
        return bool(now == before)
    return now is before


def _is_ours(value: Any) -> bool:
    if hasattr(value, "__dict__") and "__accel__" in vars(value):
        return True
    return any(str(getattr(owner, "__module__", "")).partition(".")[0] == "accel" for owner in (value, type(value)))


def _describe(value: Any) -> str:
    return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', repr(value)[:60])} at {id(value):#x}"


def _differences(x: Tensor, oracle: Tensor, known: Tensor) -> tuple[float, float]:
    """Norm and largest magnitude of x - oracle, over the positions where both are finite."""
    difference = torch.where(known & x.isfinite(), (x - oracle).abs(), 0)
    if not difference.numel():
        return 0.0, 0.0
    return float(torch.linalg.vector_norm(difference)), float(difference.max())


def _ratio(ours: float, theirs: float, scale: float, allowed: float) -> float:
    """Ours over theirs, so floored that it is at most `allowed` exactly where ours <= max(allowed * theirs, floor)."""
    if ours == 0:
        return 0.0
    base = max(theirs, FLOOR * scale / allowed)
    return ours / base if base else math.inf


def _over(value: float, scale: float) -> float:
    return value / scale if scale else (0.0 if value == 0 else math.inf)


def _refused(reason: str) -> Accuracy:
    return Accuracy(False, reason, math.inf, math.nan, math.inf, math.inf, math.nan, math.inf)
