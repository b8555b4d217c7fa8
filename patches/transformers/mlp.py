"""transformers.mlp: every class of a modeling module whose own forward is the plain gated MLP.

`cls.forward` is replaced, so models built before and after are reached, and classes keep their identity. A call is
declined where a layer that the kernel would bypass does more than its class says: hooks, adapters (LoRA), quantised or
sharded weights, parametrizations, an instance forward, an activation of other maths.

Not reached: look-alikes that clamp, scale, norm or drop out (recognise.py), modules whose instance `forward` somebody
set (accelerate, tensor parallelism, kernelize), experts. In compiled code upstream's own forward is traced.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import torch
from torch import nn

from accel import serve
from accel.kernels.gated_mlp import GatedMlpFacts, facts_of, gated_mlp, plan, shapes_problem
from accel.outcome import Choice, Decline, Declined
from accel.rebind import Rebinding
from accel.state import TargetState

from .. import checks, modules
from . import recognise


class Mlp:
    """The forward of one recognised class."""

    family = "gated_mlp"
    in_place = False

    def __init__(self, cls: type, layers: recognise.GatedMlp) -> None:
        self.cls, self.layers, self.names = cls, layers, recognise.names_of(cls)

    def concerns(self, *args: Any) -> bool:
        """Whether a call's module is of this class or a subclass of it; the target has an adapter for each class."""
        return bool(args) and isinstance(args[0], self.cls)

    def facts(self, *args: Any, **kwargs: Any) -> tuple[GatedMlpFacts, torch.device]:
        """The facts of a call whose layers are nothing but what their classes say."""
        module, x = recognise.arguments(self.names, args, kwargs)
        tensors, activation = self.read(module)
        gate, up, down, gate_bias, up_bias, down_bias = tensors
        device = checks.plain(
            x=x, gate=gate, up=up, down=down, gate_bias=gate_bias, up_bias=up_bias, down_bias=down_bias
        )
        checks.not_on_cpu(device)
        problem = shapes_problem(x, gate, up, down)
        if problem is not None:
            raise Decline(problem)
        cast = checks.autocast_dtype(device)
        if cast is not None and cast != x.dtype:
            raise Decline(f"autocast casts {checks.dtype_name(x.dtype)} to {checks.dtype_name(cast)}")
        needs_grad = checks.needs_grad(x, *tensors)
        return facts_of(x, gate, up, down, gate_bias, up_bias, down_bias, activation, needs_grad), device

    def read(self, module: nn.Module) -> tuple[tuple[Any, ...], str]:
        """(gate, up, down and their biases), activation. Raises Decline where a layer is more than its class says.

        Read anew in every call: weights change dtype and device in place, hooks come and go.
        """
        if type(module) is not self.cls:
            raise Decline(f"{type(module).__name__} is a subclass of {self.cls.__name__}")
        modules.no_global_changes()
        names, children = self.layers, module._modules
        gate, gate_bias = modules.linear(names.gate, children.get(names.gate))
        up, up_bias = (None, None) if names.up is None else modules.linear(names.up, children.get(names.up))
        down, down_bias = modules.linear(names.down, children.get(names.down))
        return (gate, up, down, gate_bias, up_bias, down_bias), _activation(names.act, children.get(names.act))

    def plan(self, facts: GatedMlpFacts, arch: str) -> Choice | Declined:
        """The gated_mlp family's plan."""
        return plan(facts, arch)

    def run(self, choice: Choice, *args: Any, **kwargs: Any) -> torch.Tensor:
        """down(act(gate(x)) * up(x))."""
        module, x = recognise.arguments(self.names, args, kwargs)
        (gate, up, down, gate_bias, up_bias, down_bias), activation = self.read(module)
        return gated_mlp(
            x, gate, up, down, gate_bias=gate_bias, up_bias=up_bias, down_bias=down_bias, activation=activation
        )

    def compiled(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Upstream's own forward, which Inductor compiles."""
        return original(*args, **kwargs)


def patch(module: ModuleType, state: TargetState) -> Iterable[Rebinding]:
    """The rebindings of `forward` for the gated MLP classes that `module` defines."""
    for cls, meaning in recognise.classes_of(module):
        if isinstance(meaning, recognise.GatedMlp):
            yield from serve.attribute(cls, "forward", Mlp(cls, meaning), state)


def _activation(name: str, layer: nn.Module | None) -> str:
    known = _activations().get(type(layer))
    if known is None or layer is None:
        raise Decline(f"{name} is a {type(layer).__name__}, none of silu, gelu_tanh and gelu_erf")
    modules.untouched(name, layer)
    activation, forward = known
    if type(layer).forward is not forward:
        raise Decline(f"{type(layer).__name__}.forward was replaced")
    act = layer.__dict__.get("act")  # nn.Module's getattr costs 1 us where there is none
    if activation == "gelu_tanh" and act is not None:
        if not (isinstance(act, functools.partial) and act.func is nn.functional.gelu and not act.args):
            raise Decline(f"{name} computes gelu_tanh in its own way")
        if act.keywords != {"approximate": "tanh"}:
            raise Decline(f"{name} computes gelu with {act.keywords}")
    if activation == "gelu_erf" and act is not nn.functional.gelu:
        raise Decline(f"{name} computes gelu_erf in its own way")
    return activation


@functools.cache
def _activations() -> dict[type | None, tuple[str, Callable[..., Any]]]:
    """transformers' activation classes of known maths, each with its forward as first met."""
    upstream = sys.modules["transformers.activations"]
    known: dict[type | None, tuple[str, Callable[..., Any]]] = {nn.SiLU: ("silu", nn.SiLU.forward)}
    for name, activation in (
        ("SiLUActivation", "silu"),
        ("GELUTanh", "gelu_tanh"),
        ("NewGELUActivation", "gelu_tanh"),
        ("GELUActivation", "gelu_erf"),
    ):
        cls = getattr(upstream, name, None)
        if cls is not None:
            known[cls] = activation, cls.forward
    return known
