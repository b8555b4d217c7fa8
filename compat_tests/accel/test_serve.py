"""What happens to one call: served, declined, quarantined, recomputed, compiled; what is counted and what is logged."""

from __future__ import annotations

import functools
import inspect
import logging
import threading
from collections.abc import Callable, Iterator

import pytest
import torch

import accel
from accel import certificates, serve
from accel.outcome import Choice, CompileError, Decline, Declined


@pytest.fixture
def on(upstream):
    """The made-up library, imported and accelerated."""
    upstream.module("ops"), upstream.module("layers")
    upstream.on()
    return upstream


def row(upstream, op: str = "scale") -> accel.TargetStatus:
    return next(status for status in accel.status() if status.name == f"{upstream.name}.{op}")


def test_the_wrapper_is_a_plain_function_like_upstreams(upstream) -> None:
    ops = upstream.module("ops")
    original = ops.scale
    original.__dict__["_torchdynamo_disable"] = True
    upstream.on()
    assert type(ops.scale) is type(original)
    assert ops.scale.__name__ == "scale"
    assert ops.scale.__doc__ == original.__doc__
    assert ops.scale.__module__ == original.__module__
    assert ops.scale.__qualname__ == original.__qualname__
    assert ops.scale.__wrapped__ is original
    assert inspect.signature(ops.scale) == inspect.signature(original)
    assert "_torchdynamo_disable" not in vars(ops.scale)
    assert list(inspect.signature(ops.scale).parameters) == ["x", "factor", "bias"]


def test_counts_are_exact(on) -> None:
    scale = on.module("ops").scale
    for _ in range(5):
        scale(torch.ones(3))
    for _ in range(3):
        scale(torch.ones(1001))
    for _ in range(2):
        scale(torch.ones(1002), 3.0)
    status = row(on)
    assert (status.served, status.kernels) == (5, {"portable": 5})
    assert status.declined == {"size=1001 > 1000 on cpu": 3, "size=1002 > 1000 on cpu": 2}
    text = accel.report.text()
    assert f"{on.name}.scale: served 5, declined 5" in text
    assert "       3  declined: size=1001 > 1000 on cpu" in text
    assert f"{on.name}.double" in text.splitlines()[-1], "on, but not called"


def test_counts_are_exact_under_threads(on) -> None:
    scale = on.module("ops").scale
    threads = [threading.Thread(target=lambda: [scale(torch.ones(2)) for _ in range(500)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert row(on).served == 2000


def test_plans_are_remembered_and_bounded(on, monkeypatch: pytest.MonkeyPatch) -> None:
    scale, adapter = on.module("ops").scale, on.adapters["scale"]
    for _ in range(3):
        scale(torch.ones(7))
    assert len(adapter.planned) == 1
    monkeypatch.setattr(serve, "REMEMBERED", 4)
    for size in range(1, 20):
        scale(torch.ones(size))
        assert len(on.call("scale").plans) <= 4
    assert row(on).served == 22


def test_a_declined_call_gets_untouched_arguments_and_upstreams_result(on) -> None:
    scale = on.module("ops").scale
    on.adapters["scale"].decline = "the weather"
    x, bias = torch.randn(5), torch.randn(5)
    assert torch.equal(scale(x, factor=3.0, bias=bias), x * 3.0 + bias)
    assert on.adapters["scale"].ran == []
    assert row(on).declined == {"the weather": 1}
    with pytest.raises(TypeError, match="unexpected keyword argument 'nonsense'"):
        scale(x, nonsense=1)


def test_run_may_still_decline(on) -> None:
    scale, adapter = on.module("ops").scale, on.adapters["scale"]

    def compute(*args: object, **kwargs: object) -> object:
        raise Decline("the kernel is not loaded, and a graph is being captured")

    adapter.compute = compute
    x = torch.randn(3)
    assert torch.equal(scale(x), x * 2)
    assert row(on).served == 0
    assert row(on).declined == {"the kernel is not loaded, and a graph is being captured": 1}


def test_errors_of_a_kernel_are_the_users_to_see(on) -> None:
    def compute(*args: object, **kwargs: object) -> object:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    on.adapters["scale"].compute = compute
    with pytest.raises(RuntimeError, match="illegal memory access"):
        on.module("ops").scale(torch.ones(1))
    assert row(on).served == 0


def test_declines_are_logged_once_per_target_and_reason(on, caplog: pytest.LogCaptureFixture) -> None:
    scale = on.module("ops").scale
    with caplog.at_level(logging.INFO, "accel"):
        for size in (1001, 1001, 1002, 1001):
            scale(torch.ones(size))
    assert [record.getMessage() for record in caplog.records] == [
        f"accel: {on.name}.scale declined: size={size} > 1000 on cpu" for size in (1001, 1002)
    ]


def test_the_memory_of_reasons_is_bounded(on) -> None:
    for size in range(1001, 1401):
        on.module("ops").scale(torch.ones(size))
    declined = row(on).declined
    assert len(declined) <= 257
    assert declined["other reasons"] == 400 - 256
    assert sum(declined.values()) == 400


def test_one_decision_per_call_through_nested_wrappers(on) -> None:
    """A class's forward that calls a function of the same family: declined outside is declined inside, once."""
    on.adapters["double"].decline = "the module has hooks"
    layers, ops = on.module("layers"), on.module("ops")
    inner = ops.scale
    accel.restore(f"{on.name}.double")
    layers.Double.forward = lambda self, x: inner(x)
    on.on("double")
    module = layers.Double()
    module(torch.ones(1))
    assert row(on, "double").declined == {"the module has hooks": 1}
    assert row(on, "scale").served == 0
    assert row(on, "scale").declined == {}
    inner(torch.ones(1))
    assert row(on, "scale").served == 1, "and the next call is on its own again"
    on.adapters["scale"].family = on.call("scale").family = "another"
    module(torch.ones(1))
    assert row(on, "scale").served == 2, "another family decides for itself"


def test_an_upstream_that_raises_leaves_nothing_decided(on) -> None:
    on.adapters["double"].decline = "the module has hooks"
    module = on.module("layers").Double()
    with pytest.raises(TypeError):
        module("no tensor at all")
    assert not serve.decided("made_up")
    on.module("ops").scale(torch.ones(1))
    assert row(on, "scale").served == 1


# --- explain ---------------------------------------------------------------------------------------------------------


def test_explain_runs_and_counts_nothing(on) -> None:
    ops, layers = on.module("ops"), on.module("layers")
    name = f"{on.name}.scale"
    assert accel.explain(name, torch.ones(3)) == Choice("made_up", "portable")
    assert accel.explain(ops.scale, torch.ones(3)) == Choice("made_up", "portable")
    assert str(accel.explain(name, torch.ones(1001))) == "declined: size=1001 > 1000 on cpu"
    module = layers.Double()
    assert accel.explain(f"{on.name}.double", module, torch.ones(3)) == Choice("made_up", "portable")
    assert accel.explain(type(module).forward, module, torch.ones(3)) == Choice("made_up", "portable")
    assert on.adapters["scale"].ran == on.adapters["double"].ran == []
    assert (row(on).served, row(on).declined) == (0, {})
    on.adapters["scale"].decline = "the weather"
    assert accel.explain(name, torch.ones(3)) == Declined("the weather")
    accel.restore()
    assert accel.explain(name, torch.ones(3)) == Declined(f"{name} is off")
    with pytest.raises(ValueError, match="is not served by accel here"):
        accel.explain(ops.shift, torch.ones(3))


# --- Certificates ----------------------------------------------------------------------------------------------------


@pytest.fixture
def kernel(on, monkeypatch: pytest.MonkeyPatch, tmp_path):
    """`scale` is served by a kernel that needs a certificate, and there is none."""
    on.adapters["scale"].kernel = "any_fwd"
    monkeypatch.setenv("ACCEL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(certificates, "dsl_version", functools.cache(lambda: "4.8.1"))
    monkeypatch.setattr(certificates, "source_hash", functools.cache(lambda family, kernel: "a" * 64))
    certificates.forget()
    yield on
    certificates.forget()


def test_a_kernel_without_a_certificate_does_not_serve(kernel) -> None:
    x = torch.randn(3)
    assert torch.equal(kernel.module("ops").scale(x), x * 2)
    assert kernel.adapters["scale"].ran == []
    (reason,) = row(kernel).declined
    assert reason == "made_up.any_fwd is not certified on cpu: run accel certify made_up"


def test_uncertified_kernels_serve_where_it_is_asked_for(kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    scale = kernel.module("ops").scale
    scale(torch.ones(3))
    monkeypatch.setenv("ACCEL_UNCERTIFIED", "1")
    kernel.on()
    scale(torch.ones(3))
    assert row(kernel).kernels == {"any_fwd": 1}, "also for a configuration that was declined before"
    monkeypatch.delenv("ACCEL_UNCERTIFIED")
    kernel.on()
    scale(torch.ones(3))
    assert row(kernel).kernels == {"any_fwd": 1}


# --- Compile failures ------------------------------------------------------------------------------------------------


def broken_compiler(*args: object, **kwargs: object) -> object:
    raise CompileError("any_fwd for sm_90a: ptxas failed")


def test_a_kernel_that_fails_to_compile_is_quarantined(on, caplog: pytest.LogCaptureFixture) -> None:
    scale, adapter = on.module("ops").scale, on.adapters["scale"]
    adapter.compute = broken_compiler
    x = torch.randn(3)
    with caplog.at_level(logging.ERROR, "accel"):
        for _ in range(3):
            assert torch.equal(scale(x), x * 2)
    assert len(adapter.ran) == 1, "tried once"
    assert caplog.text.count("ptxas failed") == 1
    assert row(on).served == 0
    assert row(on).declined == {
        "its kernel failed to compile; see the log": 1,
        "quarantined: an earlier call of this configuration failed; see the log": 2,
    }
    assert str(accel.explain(scale, x)).startswith("declined: quarantined")
    adapter.compute = None
    scale(torch.randn(4))
    assert row(on).served == 1, "other configurations serve on"
    accel.restore()
    on.on()
    scale(x)
    assert len(adapter.ran) == 2, "still quarantined: it would fail again, and slowly"


def test_strict_raises_what_fails_and_lets_declines_be(upstream) -> None:
    scale, adapter = upstream.module("ops").scale, upstream.adapters["scale"]
    del scale
    upstream.on(strict=True)
    scale = upstream.module("ops").scale
    adapter.compute = broken_compiler
    with pytest.raises(CompileError, match="ptxas failed"):
        scale(torch.ones(3))
    x = torch.ones(1001)
    assert torch.equal(scale(x), x * 2)
    assert upstream.call("scale").quarantined == {}


# --- What watches the operators --------------------------------------------------------------------------------------


@pytest.fixture
def uncertified(on, monkeypatch: pytest.MonkeyPatch):
    """`scale` is served by a kernel that is launched directly."""
    monkeypatch.setenv("ACCEL_UNCERTIFIED", "1")
    on.adapters["scale"].kernel = "any_fwd"
    on.on()
    return on


def test_a_direct_launch_declines_where_it_would_escape(uncertified) -> None:
    from torch.autograd import forward_ad
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode

    scale, x = uncertified.module("ops").scale, torch.ones(3)

    class Functions(TorchFunctionMode):
        def __torch_function__(self, function, kinds, args=(), kwargs=None):
            return function(*args, **(kwargs or {}))

    class Dispatch(TorchDispatchMode):
        def __torch_dispatch__(self, function, kinds, args=(), kwargs=None):
            return function(*args, **(kwargs or {}))

    torch.func.vmap(scale)(torch.ones(2, 3))
    with Functions():
        scale(x)
    with Dispatch():
        scale(x)
    with forward_ad.dual_level():
        scale(x)
    torch.jit.trace(lambda y: scale(y), (x,), check_trace=False)
    assert row(uncertified).served == 0
    assert row(uncertified).declined == {
        "inside a functorch transform (vmap, grad, ...)": 1,
        "a torch function mode is active: Functions": 1,
        "a torch dispatch mode is active": 1,
        "inside forward-mode differentiation": 1,
        "torch.jit is tracing": 1,
    }
    with torch.device("cpu"):
        scale(x)
    assert row(uncertified).served == 1, "a default device touches factories only"


def test_autocast_is_the_adapters_business(on) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        on.module("ops").scale(torch.ones(3))
    assert row(on).served == 1


# --- torch.compile ---------------------------------------------------------------------------------------------------


@pytest.fixture
def compiles() -> Iterator[list[torch.fx.GraphModule]]:
    """Graphs compiled since, by a backend that runs them as they are."""
    import torch._dynamo

    torch._dynamo.reset()
    yield []
    torch._dynamo.reset()


def backend(graphs: list[torch.fx.GraphModule]) -> Callable[..., object]:
    def compile_(graph: torch.fx.GraphModule, inputs: object) -> object:
        graphs.append(graph)
        return graph.forward

    return compile_


def test_a_compiled_function_sees_on_and_off(on, compiles: list) -> None:
    ops = on.module("ops")
    traced: list[str] = []

    def compiled(original: Callable[..., object], *args: object, **kwargs: object) -> object:
        return original(*args, **kwargs) * 1.0  # an operator that tells which graph it is

    on.adapters["scale"].compiled = compiled  # type: ignore[method-assign]
    accel.restore()
    on.state("scale").wrappers.clear()
    on.on("scale")

    @torch.compile(backend=backend(compiles), fullgraph=True)
    def function(x: torch.Tensor) -> torch.Tensor:
        return ops.scale(x) + 1

    x = torch.ones(3)
    for _ in range(3):
        assert torch.equal(function(x), x * 2 + 1)
    assert len(compiles) == 1
    traced.append(str(compiles[0].code))
    wrapper = ops.scale
    accel.restore()
    for _ in range(3):
        assert torch.equal(function(x), x * 2 + 1)
    assert len(compiles) == 2, "off: one graph more"
    assert str(compiles[1].code) != traced[0]
    on.on("scale")
    assert ops.scale is wrapper
    for _ in range(3):
        function(x)
    assert len(compiles) == 3, "restore and accelerate forget the graphs before; each state is compiled once"
    assert row(on).served == 0
    assert row(on).declined == {}, "compiled calls are not counted"


def test_a_compiled_module_sees_on_and_off(on, compiles: list) -> None:
    module = on.module("layers").Double()
    compiled = torch.compile(module, backend=backend(compiles), fullgraph=True)
    x = torch.ones(3)
    for _ in range(2):
        compiled(x)
    accel.restore()
    for _ in range(2):
        compiled(x)
    on.on("double")
    for _ in range(2):
        assert torch.equal(compiled(x), x * 2)
    assert len(compiles) == 3


def test_a_live_switch_recompiles_once_and_no_more(on, compiles: list) -> None:
    """What a captured wrapper costs: the switch is guarded, and counters, plans and calls in between are not."""
    scale = on.module("ops").scale

    @torch.compile(backend=backend(compiles), fullgraph=True)
    def function(x: torch.Tensor) -> torch.Tensor:
        return scale(x)

    x = torch.ones(3)
    for _ in range(3):
        function(x)
        scale(torch.ones(5))
        accel.explain(scale, torch.ones(1001))
        scale(torch.ones(1002))
        accel.status()
    assert len(compiles) == 1
    on.state("scale").on = False
    for _ in range(3):
        function(x)
    assert len(compiles) == 2
    on.state("scale").on = True
    function(x)
    assert len(compiles) == 2, "both graphs are kept"
