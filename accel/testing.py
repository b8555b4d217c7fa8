"""What the project's tests, benchmarks and `accel certify` share: the accuracy rule."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

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
