"""Shadow verification: agreement, mismatches, what is never run twice, and what a checkpoint sees of it."""

from __future__ import annotations

import logging
import re
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import accel
from accel import verify
from accel.verify import difference


@pytest.fixture
def on(upstream, monkeypatch: pytest.MonkeyPatch):
    """The made-up library with ACCEL_VERIFY=2; calls of upstream's `scale` are counted in `upstream_calls`."""
    monkeypatch.setenv("ACCEL_VERIFY", "2")
    upstream.module("ops"), upstream.module("layers")
    upstream.on()
    call = upstream.call("scale")
    original = call.original
    upstream.upstream_calls = 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        upstream.upstream_calls += 1
        return original(*args, **kwargs)

    call.original = counted
    return upstream


def row(upstream) -> accel.TargetStatus:
    return next(status for status in accel.status() if status.name == f"{upstream.name}.scale")


def test_the_first_calls_of_every_configuration_are_compared(on, caplog: pytest.LogCaptureFixture) -> None:
    scale = on.module("ops").scale
    with caplog.at_level(logging.INFO, "accel"):
        for size in (3, 4):
            for _ in range(5):
                x = torch.randn(size)
                assert torch.equal(scale(x), x * 2)
    assert on.upstream_calls == 4
    assert row(on).kernels == {"portable": 10}
    assert row(on).declined == {}
    assert caplog.text.count("verified made_up.portable for Facts(size=3") == 1


def test_a_mismatch_returns_upstreams_result_and_stops_serving(on, caplog: pytest.LogCaptureFixture) -> None:
    scale, adapter = on.module("ops").scale, on.adapters["scale"]
    adapter.compute = lambda x, factor=2.0: x * factor * 1.01
    x = torch.randn(3)
    with caplog.at_level(logging.ERROR, "accel"):
        for _ in range(3):
            assert torch.equal(scale(x), x * 2)
    assert len(adapter.ran) == 1
    assert row(on).served == 0, "what upstream answered is not counted as served"
    assert sum(row(on).declined.values()) == 3
    (first, second) = sorted(row(on).declined)
    assert first.startswith("made_up.portable disagrees with upstream: the output differs by 1.00e-02 relative")
    assert second.startswith("quarantined")
    assert caplog.text.count("disagrees with upstream") == 1
    adapter.compute = None
    assert torch.equal(scale(torch.ones(4)), torch.full((4,), 2.0)), "other configurations serve on"
    assert row(on).served == 1


def test_a_mismatch_under_strict_raises(on, monkeypatch: pytest.MonkeyPatch) -> None:
    on.on(strict=True)
    on.adapters["scale"].compute = lambda x: x * 3
    with pytest.raises(RuntimeError, match=r"made_up.*scale: made_up.portable disagrees with upstream"):
        on.module("ops").scale(torch.ones(3))


def test_calls_that_write_to_their_arguments_are_never_run_twice(on) -> None:
    on.adapters["scale"].in_place = True
    on.module("ops").scale(torch.ones(3))
    assert on.upstream_calls == 0
    assert row(on).served == 1


def test_where_upstream_cannot_run_it_is_not_asked(on) -> None:
    on.adapters["scale"].upstream_cannot_run_on = ("cpu",)
    on.module("ops").scale(torch.ones(3))
    assert on.upstream_calls == 0
    assert row(on).served == 1


def test_an_upstream_that_raises_does_not_fail_the_call(on, caplog: pytest.LogCaptureFixture) -> None:
    def raising(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("0 active drivers")

    on.call("scale").original = raising
    with caplog.at_level(logging.WARNING, "accel"):
        for _ in range(2):
            assert torch.equal(on.module("ops").scale(torch.ones(3)), torch.full((3,), 2.0))
    assert row(on).served == 2
    assert caplog.text.count("not verified, upstream raised RuntimeError: 0 active drivers") == 1


def test_a_recomputation_is_not_verified_where_its_route_is_fixed(on) -> None:
    scale = on.module("ops").scale
    y = checkpoint(lambda z: torch.sin(scale(z)), torch.ones(3, requires_grad=True), use_reentrant=False)
    assert on.upstream_calls == 1
    y.sum().backward()
    assert on.upstream_calls == 1
    assert row(on).served == 2


@pytest.mark.parametrize("verdict", ["match", "mismatch"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_sees_the_call_and_not_its_verification(on, verdict: str, reentrant: bool) -> None:
    """torch counts the tensors saved in a region: upstream's must not be among them, nor ours after a mismatch."""
    adapter = on.adapters["scale"]
    if verdict == "mismatch":
        adapter.compute = lambda x: x * 3 * torch.ones_like(x)
    scale = on.module("ops").scale
    gradients = []
    for _ in range(3):
        x = torch.linspace(0, 1, 4).requires_grad_()
        y = x * 1.0
        for _ in range(3):
            y = checkpoint(lambda z: scale(torch.sin(z)) + 1, y, use_reentrant=reentrant)
        y.sum().backward()
        gradients.append(x.grad)
    expected = torch.linspace(0, 1, 4).requires_grad_()
    z = expected * 1.0
    for _ in range(3):
        z = torch.sin(z) * 2 + 1
    z.sum().backward()
    assert all(torch.allclose(gradient, expected.grad) for gradient in gradients)
    assert on.call("scale").quarantined or verdict == "match"


def test_saved_tensor_hooks_of_the_user_see_one_call(on) -> None:
    scale, packed = on.module("ops").scale, []
    on.adapters["scale"].compute = lambda x: x * torch.full_like(x, 2.0)
    x = torch.ones(3, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(1) or t, lambda t: t):
        y = scale(x)
    with_verification = len(packed)
    on.call("scale").verified = dict.fromkeys(on.call("scale").verified, 99)
    packed.clear()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(1) or t, lambda t: t):
        scale(x)
    assert len(packed) == with_verification
    y.sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 2.0))


def test_gradients_flow_through_a_verified_call(on) -> None:
    x = torch.ones(3, requires_grad=True)
    on.module("ops").scale(x).sum().backward()
    assert on.upstream_calls == 1
    assert torch.equal(x.grad, torch.full((3,), 2.0))


def test_threads_share_the_count(on) -> None:
    scale = on.module("ops").scale
    threads = [threading.Thread(target=lambda: [scale(torch.ones(6)) for _ in range(50)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert on.upstream_calls == 2
    assert row(on).served == 200


def test_the_configurations_compared_are_bounded(on, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "COMPARED", 3)
    for size in (1, 2, 3, 4, 5, 1):
        on.module("ops").scale(torch.ones(size))
    assert on.upstream_calls == 4, "sizes 1, 2, 3, and 1 once more"


# --- What counts as a difference -------------------------------------------------------------------------------------


def tensor(*values: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


nan, inf = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("ours", "theirs", "said"),
    [
        (tensor(1, 2), tensor(1, 2), None),
        (tensor(1, 2), tensor(1, 2.00001), None),
        (tensor(1, 2), tensor(1, 2.01), "the output differs by"),
        (tensor(1, 2), tensor(1, 2, 3), r"the output is \(2,\) torch.float32, upstream's \(3,\)"),
        (tensor(1), tensor(1, dtype=torch.float64), "torch.float32, upstream's"),
        (tensor(nan, 1), tensor(nan, 1), None),
        (tensor(nan, 1), tensor(1, 1), "not finite where upstream's is"),
        (tensor(1, 1), tensor(inf, 1), "not finite where upstream's is"),
        (tensor(-inf, 1), tensor(inf, 1), "not finite where upstream's is"),
        (tensor(0, 0), tensor(0, 0), None),
        (tensor(), tensor(), None),
        ((tensor(1), None), (tensor(1), None), None),
        ((tensor(1), tensor(2)), (tensor(1), tensor(3)), "output 1 differs by"),
        ((tensor(1),), (tensor(1), tensor(3)), "1 tensors, upstream returns 2"),
        ([tensor(1)], [tensor(1)], None),
        (torch.tensor([1, 2]), torch.tensor([1, 2]), None),
        (torch.tensor([1, 2]), torch.tensor([1, 3]), "the output differs by"),
        (torch.tensor([True]), torch.tensor([False]), "the output differs by"),
        (tensor(1, 1, dtype=torch.bfloat16), tensor(1, 1.0078125, dtype=torch.bfloat16), None),
        (tensor(1, 1, dtype=torch.bfloat16), tensor(1, 1.0625, dtype=torch.bfloat16), "limit 2e-02 for torch.bfloat16"),
    ],
)
def test_difference(ours: Any, theirs: Any, said: str | None) -> None:
    found = difference(ours, theirs)
    if said is None:
        assert found is None
    else:
        assert found is not None
        assert re.search(said, found)


def test_due_asks_nothing_of_cuda_on_a_cpu(on, monkeypatch: pytest.MonkeyPatch) -> None:
    def asked() -> bool:
        raise AssertionError("CUDA was asked")

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", asked)
    call = SimpleNamespace(adapter=on.adapters["scale"], state=on.state("scale"), verified={})
    assert verify.due(call, (None, "cpu"))  # type: ignore[arg-type]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert not verify.due(call, (None, "sm_90"))  # type: ignore[arg-type]
