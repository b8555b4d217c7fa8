"""Activation checkpointing: whatever changes between a forward and its recomputation, the route of each call stays."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable

import pytest
import torch
from torch.utils.checkpoint import CheckpointError, checkpoint

import accel
from accel.state import policy


@pytest.fixture
def on(upstream):
    """The made-up library, imported and accelerated."""
    upstream.module("ops"), upstream.module("layers")
    upstream.on()
    return upstream


class Served(torch.autograd.Function):
    """Ours: saves one tensor more than upstream, so that a changed route shows as an error of the checkpoint."""

    @staticmethod
    def forward(ctx, x, factor):  # type: ignore[no-untyped-def]
        y = x * factor
        ctx.save_for_backward(x, y, y + 1)
        ctx.factor = factor
        return y

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        ctx.saved_tensors  # noqa: B018 - unpacks, which recomputes
        return grad * ctx.factor, None


@pytest.fixture
def saving(on):
    """`scale` and its upstream save different numbers of tensors for backward; calls of upstream are counted."""
    on.adapters["scale"].compute = lambda x, factor=2.0: Served.apply(x, factor)
    on.upstream_calls = 0
    original = on.call("scale").original

    def counted(x: torch.Tensor, factor: float = 2.0) -> torch.Tensor:
        on.upstream_calls += 1
        return original(x * torch.ones_like(x).requires_grad_(), factor)

    on.call("scale").original = counted
    return on


def step(upstream, between: Callable[[], None], reentrant: bool, layers: int = 2) -> torch.Tensor:
    """Forward through checkpointed layers, `between`, backward; the gradient."""
    scale = upstream.module("ops").scale
    x = torch.ones(4, requires_grad=True)
    y = x * 1.0
    for _ in range(layers):
        y = checkpoint(lambda z: scale(torch.sin(z)) + 1, y, use_reentrant=reentrant)
    between()
    y.sum().backward()
    assert x.grad is not None
    return x.grad


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("change", ["nothing", "quarantine", "off", "decline", "verify"])
def test_served_forwards_are_recomputed_by_us(
    saving, monkeypatch: pytest.MonkeyPatch, reentrant: bool, change: str
) -> None:
    call = saving.call("scale")

    def between() -> None:
        if change == "quarantine":
            for key in list(call.plans):
                call.quarantine(key, "made up")
        elif change == "off":
            saving.state("scale").on = False
        elif change == "verify":
            monkeypatch.setattr(policy, "verify", 100)
        saving.upstream_calls = 0

    expected = step(saving, lambda: None, reentrant)
    assert torch.equal(step(saving, between, reentrant), expected)
    if not reentrant:
        assert saving.upstream_calls == 0, "every recomputation took the route of its forward"


@pytest.mark.parametrize("change", ["quarantine lifted", "on"])
def test_upstream_forwards_are_recomputed_upstream(saving, change: str) -> None:
    call, state = saving.call("scale"), saving.state("scale")
    expected = step(saving, lambda: None, False)
    if change == "on":
        state.on = False
    else:
        for key in list(call.plans):
            call.quarantine(key, "made up")
    ran = len(saving.adapters["scale"].ran)

    def between() -> None:
        call.quarantined.clear()
        state.on = True

    assert torch.equal(step(saving, between, False), expected)
    assert len(saving.adapters["scale"].ran) == ran


def test_calls_of_one_configuration_keep_their_own_routes(saving) -> None:
    """The third call of a region is quarantined; two were served. Each is recomputed as it ran."""
    scale, call = saving.module("ops").scale, saving.call("scale")
    x = torch.ones(4, requires_grad=True)
    count = 0

    def region(z: torch.Tensor) -> torch.Tensor:
        nonlocal count
        for index in range(4):
            if index == 2 and count == 0:
                for key in list(call.plans):
                    call.quarantine(key, "made up")
            z = scale(z)
        count += 1
        return z

    y = checkpoint(region, x, use_reentrant=False)
    assert saving.upstream_calls == 2
    y.sum().backward(retain_graph=True)
    assert torch.equal(x.grad, torch.full((4,), 16.0))
    y.sum().backward()
    assert torch.equal(x.grad, torch.full((4,), 32.0)), "and again for a second backward pass"


def test_nested_checkpoints(saving) -> None:
    scale, call = saving.module("ops").scale, saving.call("scale")

    def inner(z: torch.Tensor) -> torch.Tensor:
        return scale(torch.sin(z))

    def outer(z: torch.Tensor) -> torch.Tensor:
        return scale(checkpoint(inner, scale(z), use_reentrant=False))

    x = torch.ones(4, requires_grad=True)
    checkpoint(outer, x, use_reentrant=False).sum().backward()
    expected, x.grad = x.grad, None
    y = checkpoint(outer, x, use_reentrant=False)
    for key in list(call.plans):
        call.quarantine(key, "made up")
    y.sum().backward()
    assert torch.equal(x.grad, expected)


def test_restore_between_forward_and_backward_is_warned_of(saving, caplog: pytest.LogCaptureFixture) -> None:
    """A class's forward is looked up again when it is recomputed, and restore has put upstream's back."""
    scale = saving.module("ops").scale
    y = checkpoint(lambda z: torch.sin(scale(z)), torch.ones(4, requires_grad=True), use_reentrant=False)
    with caplog.at_level(logging.WARNING, "accel"):
        accel.restore()
        assert "restored while 1 checkpointed regions wait" in caplog.text
        caplog.clear()
        saving.on()
        y.sum().backward()
        del y
        gc.collect()
        accel.restore()
    assert "checkpointed regions" not in caplog.text


def test_the_check_that_these_tests_rest_on(saving) -> None:
    """A route that does change makes torch's checkpoint raise."""
    scale = saving.call("scale").original
    flip = [True, False]

    def region(z: torch.Tensor) -> torch.Tensor:
        return Served.apply(z, 2.0) if flip.pop(0) else scale(z)

    y = checkpoint(region, torch.ones(4, requires_grad=True), use_reentrant=False)
    with pytest.raises(CheckpointError):
        y.sum().backward()


def test_checkpoints_are_found_through_torchs_own_hooks() -> None:
    """The closure variables that accel.checkpoint reads exist in this torch."""
    from accel.checkpoint import region

    seen = []

    def function(x: torch.Tensor) -> torch.Tensor:
        seen.append(region())
        return torch.sin(x)

    assert region() is None
    checkpoint(function, torch.ones(2, requires_grad=True), use_reentrant=False).sum().backward()
    (forward, again), (same, recomputed) = seen
    assert forward is same
    assert (again, recomputed) == (False, True)
    with torch.autograd.graph.save_on_cpu():
        assert region() is None
