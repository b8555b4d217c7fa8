"""FLA's `GatedMLP.forward`: rebinding, matching, declining, undoing. `fla.cpu` lets upstream's own forward run here."""

from __future__ import annotations

import copy
import functools
import inspect
import re
from collections.abc import Callable
from typing import Any

import fla.modules
import fla.modules.mlp
import pytest
import torch
from fla.modules import GatedMLP
from torch import nn
from torch.nn.utils import parametrize, prune

import accel
from accel import serve
from accel.outcome import Choice, Declined
from accel.state import STATES
from accel.testing import accuracy, snapshot

SEED = 20261130
TARGET = "fla.gated_mlp"


@pytest.fixture(autouse=True)
def _seed() -> None:
    print(f"seed {SEED}")
    torch.manual_seed(SEED)


def made(**options: Any) -> GatedMLP:
    return GatedMLP(32, intermediate_size=48, **options)


def failure(function: Callable[[], Any]) -> tuple[type[BaseException], str]:
    with pytest.raises(Exception) as caught:
        function()
    return caught.type, str(caught.value)


# ---- identity ----


def test_off_on_off_restores_the_very_forward() -> None:
    original, before, mlp, x = GatedMLP.forward, snapshot(), made(), torch.randn(3, 32)
    theirs = failure(lambda: mlp(x))
    assert "0 active drivers" in theirs[1]
    for _ in range(2):
        assert accel.accelerate(TARGET).active == (TARGET,)
        assert GatedMLP.forward is not original and GatedMLP.forward.__wrapped__ is original
        assert fla.modules.mlp.GatedMLP is fla.modules.GatedMLP is GatedMLP
        assert mlp(x).shape == made()(x).shape == (3, 32)  # built before and after
        accel.restore()
        assert GatedMLP.forward is original
        assert before.changed(snapshot()) == []
    assert failure(lambda: mlp(x)) == theirs


def test_signature_is_upstreams() -> None:
    original = GatedMLP.forward
    accel.accelerate(TARGET)
    assert inspect.signature(GatedMLP.forward) == inspect.signature(original)
    assert (GatedMLP.forward.__qualname__, GatedMLP.forward.__doc__) == (original.__qualname__, original.__doc__)


# ---- matching ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("fuse_swiglu", [True, False])
@pytest.mark.parametrize("shape", [(2, 5, 32), (7, 32), (32,), (0, 32)])
def test_accepted_calls_match_upstream(dtype: torch.dtype, fuse_swiglu: bool, shape: tuple[int, ...]) -> None:
    mlp = made(fuse_swiglu=fuse_swiglu).to(dtype)
    x = torch.randn(shape, dtype=dtype)
    accel.accelerate("fla.cpu")
    if shape == (32,):  # upstream's swiglu_linear has its gradient in two dimensions
        mlp.requires_grad_(False)
    theirs = results(mlp, x)
    accel.accelerate(TARGET)
    ours = results(mlp, x)
    assert STATES[TARGET].served == {"portable": 1} and not STATES[TARGET].declined
    oracle = results(oracle_mlp(mlp), x.double())
    for name, value in ours.items():
        verdict = accuracy(value, theirs[name], oracle[name])
        assert verdict.ok, f"{name}: {verdict.reason}"


def results(mlp: Callable[..., Any], x: torch.Tensor) -> dict[str, torch.Tensor]:
    x = x.detach().clone().requires_grad_()
    y = mlp(x)
    wanted = {"x": x, **{name: weight for name, weight in mlp.named_parameters() if weight.requires_grad}}
    loss = (y.double() * torch.linspace(-1, 1, y.numel(), dtype=torch.float64).view(y.shape)).sum()
    gradients = torch.autograd.grad(loss, list(wanted.values()))
    return {"y": y.detach(), **dict(zip(wanted, gradients, strict=True))}


def oracle_mlp(mlp: GatedMLP) -> nn.Module:
    class Oracle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, layer in mlp.named_children():
                if isinstance(layer, nn.Linear):
                    setattr(self, name, copy.deepcopy(layer).double())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            gate = self.gate_proj(x)
            return self.down_proj(gate * gate.sigmoid() * self.up_proj(x))

    return Oracle()


def test_further_keywords_are_ignored_as_upstream_ignores_them() -> None:
    accel.accelerate(TARGET)
    mlp, x = made(), torch.randn(3, 32)
    assert torch.equal(mlp(x, cu_seqlens=torch.tensor([0, 3]), anything=1), mlp(x))
    assert STATES[TARGET].served == {"portable": 2}


def test_hooks_on_the_module_itself_run() -> None:
    accel.accelerate(TARGET)
    mlp, x, seen = made(), torch.randn(3, 32), []
    mlp.register_forward_hook(lambda module, args, result: seen.append(result))
    y = mlp(x)
    assert seen[0] is y and STATES[TARGET].served == {"portable": 1}


def test_full_graph_compilation() -> None:
    accel.accelerate(TARGET)
    mlp, x = made(), torch.randn(3, 32)
    compiled = torch.compile(mlp, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), mlp(x))


# ---- declining ----


class Lora(nn.Linear):
    pass


class Subclass(GatedMLP):
    pass


class Tagged(torch.Tensor):
    pass


def on(name: str, change: Callable[[nn.Module], Any]) -> Callable[[GatedMLP], None]:
    """A change of one layer of the module."""

    def apply(mlp: GatedMLP) -> None:
        change(mlp.get_submodule(name))

    return apply


def put(name: str, layer: Callable[[], nn.Module]) -> Callable[[GatedMLP], None]:
    """Another layer in place of one of the module's."""

    def apply(mlp: GatedMLP) -> None:
        new = layer()
        new.load_state_dict(mlp.get_submodule(name).state_dict(), strict=False)
        setattr(mlp, name, new)

    return apply


def own_forward(layer: nn.Module) -> None:
    layer.forward = lambda *args: type(layer).forward(layer, *args)


class Doubled(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


def hook(*args: Any) -> None:
    return None


PROJECTION = "up_proj"
DECLINES: dict[str, tuple[Callable[[GatedMLP], Any], str]] = {
    "own forward": (
        lambda mlp: setattr(mlp, "forward", lambda x: type(mlp).forward(mlp, x)),
        "the module has a forward of its own",
    ),
    "extra layer": (lambda mlp: mlp.add_module("dropout", nn.Identity()), "other layers, parameters or buffers"),
    "extra parameter": (lambda mlp: mlp.register_parameter("s", nn.Parameter(torch.ones(1))), "other layers, param"),
    "extra buffer": (lambda mlp: mlp.register_buffer("scale", torch.ones(1)), "other layers, parameters or buffers"),
    "fused layer": (
        lambda mlp: setattr(mlp, "swiglu_linear", type("Tp", (fla.modules.mlp.SwiGLULinear,), {})()),
        "swiglu_linear is a Tp, not SwiGLULinear",
    ),
    "hooked fused layer": (
        on("swiglu_linear", lambda layer: layer.register_forward_pre_hook(hook)),
        "swiglu_linear has hooks",
    ),
    "fused layer with a forward": (on("swiglu_linear", own_forward), "swiglu_linear has a forward of its own"),
    "lora": (put(PROJECTION, lambda: Lora(32, 48, bias=False)), "up_proj is a Lora, not nn.Linear"),
    "no layer": (lambda mlp: setattr(mlp, PROJECTION, None), "up_proj is a NoneType, not nn.Linear"),
    "parametrization": (
        on(PROJECTION, lambda layer: parametrize.register_parametrization(layer, "weight", Doubled())),
        "up_proj is a ParametrizedLinear, not nn.Linear",
    ),
    "pruning": (on(PROJECTION, lambda layer: prune.random_unstructured(layer, "weight", 0.5)), "up_proj has hooks"),
    "pre hook": (on("gate_proj", lambda layer: layer.register_forward_pre_hook(hook)), "gate_proj has hooks"),
    "forward hook": (on("down_proj", lambda layer: layer.register_forward_hook(hook)), "down_proj has hooks"),
    "backward hook": (on(PROJECTION, lambda layer: layer.register_full_backward_hook(hook)), "up_proj has hooks"),
    "layer with a forward": (on(PROJECTION, own_forward), "up_proj has a forward of its own"),
    "sharded weight": (
        on(PROJECTION, lambda layer: (flat := layer.weight.data, layer._parameters.pop("weight"),
                                      setattr(layer, "weight", flat))),
        "up_proj has no weight parameter of its own",
    ),
    "adapter inside": (on(PROJECTION, lambda layer: layer.add_module("a", nn.Identity())), "up_proj has further param"),
    "weight subclass": (
        on(PROJECTION, lambda layer: layer._parameters.__setitem__("weight", layer.weight.data.as_subclass(Tagged))),
        "up is a Tagged, not a plain tensor",
    ),
    "shapes": (
        lambda mlp: [setattr(mlp, p, nn.Linear(32, 40, bias=False)) for p in ("gate_proj", "up_proj")],
        r"gate is \(40, 32\), not \(48, 32\)",
    ),
    "dtypes": (lambda mlp: mlp.double(), "weight dtype=float64 is not x's float32"),
}  # fmt: skip


@pytest.mark.parametrize("changed, reason", DECLINES.values(), ids=DECLINES)
def test_declines_what_is_more_than_the_class(changed: Callable[[GatedMLP], Any], reason: str) -> None:
    mlp, x = made(), torch.randn(3, 32)
    changed(mlp)
    check_declined(mlp, x, reason)


def check_declined(mlp: GatedMLP, x: Any, reason: str) -> None:
    """The call is declined for `reason`, and does what upstream does, bit for bit."""
    accel.accelerate("fla.cpu")
    theirs = outcome(mlp, x)
    accel.accelerate(TARGET)
    assert isinstance(accel.explain(GatedMLP.forward, mlp, x), Declined)
    ours = outcome(mlp, x)
    (counted,) = STATES[TARGET].declined
    assert re.search(reason, counted), counted
    assert not STATES[TARGET].served
    assert torch.equal(ours, theirs) if isinstance(theirs, torch.Tensor) else ours == theirs


def outcome(mlp: GatedMLP, x: Any) -> Any:
    try:
        return mlp(x)
    except Exception as error:
        return type(error), str(error)


@pytest.mark.parametrize("options, reason", [({"hidden_act": "powlu"}, "hidden_act='powlu' is not 'swish'")])
def test_declines_another_activation(options: dict[str, Any], reason: str) -> None:
    check_declined(made(**options), torch.randn(3, 32), reason)


def test_declines_a_subclass() -> None:
    check_declined(Subclass(32, intermediate_size=48), torch.randn(3, 32), "Subclass is a subclass of GatedMLP")


def test_declines_other_inputs() -> None:
    for x, reason in (
        (None, "x is a NoneType, not a tensor"),
        (torch.randn(3, 32).as_subclass(Tagged), "x is a Tagged, not a plain tensor"),
        (torch.randn(3, 32, device="meta"), "x is on device meta"),
    ):
        check_declined(made(), x, reason)
        accel.restore()
        STATES[TARGET].reset_counters()


def test_declines_under_an_autocast_that_casts() -> None:
    mlp, x = made(), torch.randn(3, 32)
    with torch.autocast("cpu", torch.bfloat16):
        check_declined(mlp, x, "autocast casts float32 to bfloat16")


def test_declines_changes_to_every_module(monkeypatch: pytest.MonkeyPatch) -> None:
    handle = nn.modules.module.register_module_forward_hook(hook)
    check_declined(made(), torch.randn(3, 32), "global module hooks are registered")
    handle.remove()
    accel.restore()
    STATES[TARGET].reset_counters()

    forward = nn.Linear.forward
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: forward(self, x))
    check_declined(made(), torch.randn(3, 32), r"nn.Linear.forward was replaced")
    monkeypatch.undo()
    accel.restore()
    STATES[TARGET].reset_counters()

    accel.accelerate(TARGET)
    fused = fla.modules.mlp.SwiGLULinear.forward
    monkeypatch.setattr(fla.modules.mlp.SwiGLULinear, "forward", lambda self, *args: fused(self, *args))
    check_declined(made(), torch.randn(3, 32), r"SwiGLULinear.forward was replaced")


def test_no_kernel_on_a_gpu_yet(fake_cuda: Any) -> None:
    accel.accelerate(TARGET)
    mlp = made()
    for layer in (mlp.gate_proj, mlp.up_proj, mlp.down_proj):
        layer._parameters["weight"] = fake_cuda.empty(*layer.weight.shape)
    call = serve.wrapped_call(GatedMLP.forward)
    for arch in ("sm_80", "sm_90", "sm_100"):
        decision, _ = call.decide((mlp, fake_cuda.empty(3, 32)), {}, arch=arch)
        assert decision == Declined(f"no gated_mlp kernel for {arch} yet: upstream's own runs")


# ---- others ----


def test_another_patcher_on_top_survives(monkeypatch: pytest.MonkeyPatch) -> None:
    original = GatedMLP.forward
    accel.accelerate(TARGET)
    ours, mlp, x = GatedMLP.forward, made(), torch.randn(3, 32)

    @functools.wraps(ours)
    def theirs(self: Any, *args: Any, **kwargs: Any) -> Any:
        return 2 * ours(self, *args, **kwargs)

    monkeypatch.setattr(GatedMLP, "forward", theirs)
    y = mlp(x)
    accel.restore()
    assert GatedMLP.forward is theirs and STATES[TARGET].left
    assert "0 active drivers" in failure(lambda: mlp(x))[1]  # ours, inside, has stepped aside
    accel.accelerate(TARGET)
    assert torch.equal(mlp(x), y) and GatedMLP.forward is theirs
    accel.restore()
    monkeypatch.undo()
    GatedMLP.forward = original


def test_explain_runs_and_counts_nothing() -> None:
    accel.accelerate(TARGET)
    x = torch.randn(3, 32, requires_grad=True)
    assert accel.explain(TARGET, made(), x) == Choice("gated_mlp", "portable", backward="portable")
    with torch.no_grad():
        assert accel.explain(TARGET, made(), x) == Choice("gated_mlp", "portable")
    assert not STATES[TARGET].served
