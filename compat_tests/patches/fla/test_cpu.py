"""The `fla.cpu` target: every listed op is rebound wherever it is held, serves CPU tensors only, and is put back."""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable
from typing import Any

import fla.layers
import fla.models
import fla.modules
import pytest
import torch
from torch import nn

import accel
from accel import activation, serve
from accel.outcome import Choice, Declined
from accel.patches.fla.cpu_ops import CPU_OPS, CpuOp
from accel.state import STATES
from accel.testing import snapshot

SEED = 20261130
TARGET = "fla.cpu"


@pytest.fixture(autouse=True)
def _seed() -> None:
    print(f"seed {SEED}")
    torch.manual_seed(SEED)


def held(op: CpuOp) -> Any:
    """What upstream holds under the op's name now."""
    owner: Any = importlib.import_module(op.module)
    for part in op.name.split("."):
        owner = vars(owner)[part]
    return owner


def call_of(op: CpuOp) -> tuple[Any, ...]:
    """Arguments that are served."""
    x, g, d, w = torch.randn(2, 3, 8), torch.randn(2, 3, 8), torch.randn(8), torch.randn(5, 8)
    target = torch.tensor([1, 2, 3])
    calls: dict[str, Callable[[], tuple[Any, ...]]] = {
        "layer_norm": lambda: (x, d, d),
        "rms_norm": lambda: (x, d, d),
        "group_norm": lambda: (x, d, d),
        "layer_norm_linear": lambda: (x, d, d, w, None),
        "layer_norm_gated": lambda: (x, g, d, d),
        "rms_norm_gated": lambda: (x, g, d, d),
        "layer_norm_swish_gate_linear": lambda: (x, g, d, d, w, None),
        "rms_norm_swish_gate_linear": lambda: (x, g, d, d, w, None),
        "l2norm": lambda: (x,),
        "causal_conv1d": lambda: (x, torch.randn(8, 4)),
        "causal_conv1d_update": lambda: (x[:, :1], torch.zeros(2, 8, 4), None, torch.randn(8, 4)),
        "swiglu": lambda: (x, g),
        "powglu": lambda: (x, g),
        "swiglu_linear": lambda: (x, g, w, None),
        "powglu_linear": lambda: (x, g, w, None),
        "cross_entropy_loss": lambda: (x[0], target),
        "FusedCrossEntropyLoss.forward": lambda: (fla.modules.FusedCrossEntropyLoss(), x[0], target),
        "fused_linear_cross_entropy_loss": lambda: (x[0], target, w),
        "fused_attnres": lambda: (d, [x, g], d),
    }
    return calls[op.name]()


def outcome(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    try:
        return function(*args, **kwargs)
    except Exception as error:
        return type(error), str(error)


def test_off_on_off_restores_identical_objects() -> None:
    before, originals = snapshot(), {op.name: held(op) for op in CPU_OPS}
    for _ in range(2):
        assert accel.accelerate(TARGET).active == (TARGET,)
        for op in CPU_OPS:
            assert held(op) is not originals[op.name] and held(op).__wrapped__ == originals[op.name]
        accel.restore()
        assert before.changed(snapshot()) == []


def test_every_holder_under_any_name_has_the_one_wrapper() -> None:
    holders = {op.name: holders_of(held(op)) for op in CPU_OPS if op.kind != "class_attribute"}
    assert ("fla.layers.gated_deltanet", "causal_conv1d") in holders["causal_conv1d"]
    assert len(holders["l2norm"]) > len({module for module, _ in holders["l2norm"]})  # l2norm, and as l2_norm
    accel.accelerate(TARGET)
    for op in CPU_OPS:
        if op.kind != "class_attribute":
            assert holders_of(held(op)) == holders[op.name]


def holders_of(value: Any) -> set[tuple[str, str]]:
    found = set()
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in ("fla", "transformers"):
            found |= {(name, attribute) for attribute, one in list(vars(module).items()) if one is value}
    return found


def test_signatures_are_upstreams() -> None:
    originals = {op.name: held(op) for op in CPU_OPS}
    accel.accelerate(TARGET)
    for op in CPU_OPS:
        wrapper, original = held(op), originals[op.name]
        assert inspect.signature(wrapper) == inspect.signature(original), op.name
        assert wrapper.__name__ == original.__name__ and inspect.isfunction(wrapper)


def test_served_as_the_replacements_give_it() -> None:
    accel.accelerate(TARGET)
    state = STATES[TARGET]
    for count, op in enumerate(CPU_OPS, 1):
        args = call_of(op)
        kept = [x.clone() if isinstance(x, torch.Tensor) else x for x in args]
        assert accel.explain(held(op), *args) == Choice("fla_cpu", "portable")
        result = held(op)(*args)
        expected = op.replacement(*kept)
        for ours, theirs in zip(tuple_of(result), tuple_of(expected), strict=True):
            assert ours is theirs is None or torch.equal(ours, theirs), op.name
        assert state.served == {"portable": count} and not state.declined, op.name


def tuple_of(result: Any) -> tuple[Any, ...]:
    return result if isinstance(result, tuple) else (result,)


class Tagged(torch.Tensor):
    pass


DECLINES: list[tuple[str, Callable[[], tuple[tuple[Any, ...], dict[str, Any]]], str]] = [
    ("rms_norm", lambda: ((torch.randn(2, 8), None), {}), "2 positional arguments and () do not fit rms_norm"),
    (
        "l2norm",
        lambda: ((torch.randn(2, 8),), {"axis": 0}),
        "1 positional arguments and (axis) do not fit l2norm",
    ),
    ("l2norm", lambda: ((torch.randn(2, 8).as_subclass(Tagged),), {}), "x is a Tagged, not a plain tensor"),
    ("l2norm", lambda: ((torch.randn(2, 8, device="meta"),), {}), "x is on device meta"),
    ("l2norm", lambda: ((None,), {}), "no tensor among the arguments"),
    (
        "fused_attnres",
        lambda: ((torch.randn(8), [torch.randn(2, 8), torch.randn(2, 8).as_subclass(Tagged)], torch.randn(8)), {}),
        "residuals[1] is a Tagged, not a plain tensor",
    ),
    ("swiglu", lambda: ((torch.randn(2, 8), torch.randn(8)), {}), "x has shape (2, 8), y has (8,)"),
    ("rms_norm_gated", lambda: ((torch.randn(2, 8),) * 3 + (None, "gelu"), {}), "weight has shape (2, 8)"),
    (
        "cross_entropy_loss",
        lambda: ((torch.randn(2, 8), torch.tensor([1, 2])), {"process_group": object()}),
        "the vocabulary is sharded over a process group",
    ),
]  # fmt: skip


@pytest.mark.parametrize("name, arguments, reason", DECLINES, ids=[f"{row[0]}: {row[2]}" for row in DECLINES])
def test_declines(name: str, arguments: Callable[[], Any], reason: str) -> None:
    (op,) = (op for op in CPU_OPS if op.name == name)
    args, kwargs = arguments()
    theirs = outcome(held(op), *args, **kwargs)
    accel.accelerate(TARGET)
    ours = outcome(held(op), *args, **kwargs)
    assert ours == theirs and isinstance(theirs, tuple)
    state = STATES[TARGET]
    assert not state.served and sum(state.declined.values()) == 1
    (counted,) = state.declined
    assert counted.startswith(reason), counted


def test_gpu_tensors_go_upstream(fake_cuda: Any) -> None:
    accel.accelerate(TARGET)

    def moved(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return fake_cuda.empty(*value.shape, dtype=value.dtype)
        return [moved(item) for item in value] if isinstance(value, list) else value

    for op in CPU_OPS:
        call = serve.wrapped_call(held(op))
        decision, _ = call.decide(tuple(moved(value) for value in call_of(op)), {}, arch="sm_90")
        assert decision == Declined("cuda tensors: upstream's own kernels run"), op.name


def test_an_op_that_writes_to_its_cache_is_told_apart() -> None:
    accel.accelerate(TARGET)
    in_place = {op.name for op in CPU_OPS if serve.wrapped_call(held(op)).adapter.in_place}
    assert in_place == {"causal_conv1d_update"}


def test_modules_train_through_the_replacements() -> None:
    accel.accelerate(TARGET)
    norm = fla.modules.RMSNorm(8)
    expected = nn.RMSNorm(8, eps=norm.eps)
    x = torch.randn(3, 8)
    with torch.no_grad():
        norm.weight.copy_(torch.randn(8))
        expected.weight.copy_(norm.weight)
    for module in (norm, expected):
        module(x).square().sum().backward()
    torch.testing.assert_close(norm.weight.grad, expected.weight.grad)
    assert STATES[TARGET].served == {"portable": 1}


def test_full_graph_compilation() -> None:
    accel.accelerate(TARGET)
    block = nn.Sequential(fla.modules.RMSNorm(8), fla.modules.GatedMLP(8, intermediate_size=16))
    x = torch.randn(3, 8)
    torch.testing.assert_close(torch.compile(block, fullgraph=True, backend="aot_eager")(x), block(x))


def test_on_by_default_only_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activation, "_gpu_present", lambda: True)
    report = accel.accelerate()
    assert TARGET not in report.active and "a GPU is present" in report.refused[TARGET]
    assert accel.accelerate(TARGET).active == (TARGET,)  # named
    accel.restore()
    monkeypatch.undo()
    assert TARGET in accel.accelerate().active


def test_another_patcher_on_top_survives(monkeypatch: pytest.MonkeyPatch) -> None:
    before, layer = snapshot(), sys.modules["fla.layers.gated_deltanet"]
    original = layer.causal_conv1d
    accel.accelerate(TARGET)
    ours = layer.causal_conv1d
    theirs = functools.wraps(ours)(lambda *args, **kwargs: ours(*args, **kwargs))
    monkeypatch.setattr(layer, "causal_conv1d", theirs)
    args = (torch.randn(2, 3, 8), torch.randn(8, 4))
    theirs(*args)
    assert STATES[TARGET].served == {"portable": 1}
    accel.restore()
    assert layer.causal_conv1d is theirs
    assert any("fla.layers.gated_deltanet.causal_conv1d" in line for line in STATES[TARGET].left)
    assert outcome(theirs, *args) == outcome(original, *args)
    monkeypatch.undo()
    layer.causal_conv1d = original
    assert before.changed(snapshot()) == []
