"""`GatedMLP.forward`, the MLP of FLA's models: down(silu(gate(x)) * up(x)), fused upstream or not.

The class attribute is replaced, so models built before and after are reached. A call is declined where a layer that the
kernel would bypass does more than its class says: hooks, adapters (LoRA), quantised or sharded weights,
parametrizations, a forward of its own, further layers, another activation.

Not reached: subclasses; modules whose instance `forward` somebody set (accelerate, kernelize); `swiglu` and
`swiglu_linear` called elsewhere.
"""

from __future__ import annotations

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
from ..portable import PortableAdapter

PROJECTIONS = frozenset(("gate_proj", "up_proj", "down_proj"))
FUSED = "swiglu_linear"
WITH_FUSED = PROJECTIONS | {FUSED}


def patch(module: ModuleType, state: TargetState) -> Iterable[Rebinding]:
    cls = vars(module).get("GatedMLP")
    swiglu_linear = vars(module).get("SwiGLULinear")
    if not isinstance(cls, type) or not isinstance(swiglu_linear, type):
        return []
    return serve.attribute(cls, "forward", GatedMLP(cls, swiglu_linear), state)


class GatedMLP(PortableAdapter):
    """The forward of one GatedMLP class; `swiglu_linear` is the class of the layer that fuses the last two steps."""

    family = "gated_mlp"

    def __init__(self, cls: type, swiglu_linear: type) -> None:
        self.cls, self.swiglu_linear = cls, swiglu_linear
        self.swiglu_linear_forward: Callable[..., Any] = vars(swiglu_linear)["forward"]

    def facts(self, module: Any, x: torch.Tensor, **ignored: Any) -> tuple[GatedMlpFacts, torch.device]:
        """Upstream's forward takes any further keyword and reads none, in every release."""
        gate, up, down, gate_bias, up_bias, down_bias = self.read(module)
        if not isinstance(x, torch.Tensor):
            raise Decline(f"x is a {type(x).__name__}, not a tensor")
        device = checks.plain(
            x=x, gate=gate, up=up, down=down, gate_bias=gate_bias, up_bias=up_bias, down_bias=down_bias
        )
        problem = shapes_problem(x, gate, up, down)
        if problem is not None:
            raise Decline(problem)
        cast = checks.autocast_dtype(device)
        if cast is not None and cast != x.dtype:
            raise Decline(f"autocast casts {checks.dtype_name(x.dtype)} to {checks.dtype_name(cast)}")
        needs_grad = checks.needs_grad(x, gate, up, down, gate_bias, up_bias, down_bias)
        return facts_of(x, gate, up, down, gate_bias, up_bias, down_bias, "silu", needs_grad), device

    def read(self, module: Any) -> tuple[Any, ...]:
        """Gate, up, down and their biases. Raises Decline where a layer is more than its class says.

        Read anew in every call: weights change dtype and device in place, hooks come and go.
        """
        kind: Any = type(module)
        if kind is not self.cls:
            raise Decline(f"{kind.__name__} is a subclass of GatedMLP")
        if "forward" in module.__dict__:
            raise Decline("the module has a forward of its own")
        if module.hidden_act != "swish":
            raise Decline(f"hidden_act={module.hidden_act!r} is not 'swish'")
        modules.no_global_changes()
        children: dict[str, nn.Module | None] = module._modules
        expected = WITH_FUSED if module.fuse_swiglu else PROJECTIONS
        if children.keys() != expected or module._parameters or module._buffers:
            raise Decline("the module has other layers, parameters or buffers than GatedMLP's")
        if module.fuse_swiglu:
            self._check_fused(children[FUSED])
        gate, gate_bias = modules.linear("gate_proj", children["gate_proj"])
        up, up_bias = modules.linear("up_proj", children["up_proj"])
        down, down_bias = modules.linear("down_proj", children["down_proj"])
        return gate, up, down, gate_bias, up_bias, down_bias

    def _check_fused(self, layer: nn.Module | None) -> None:
        """The layer that fuses activation and down projection: tensor parallelism hooks it."""
        if layer is None or type(layer) is not self.swiglu_linear:
            raise Decline(f"{FUSED} is a {type(layer).__name__}, not SwiGLULinear")
        modules.untouched(FUSED, layer)
        if vars(self.swiglu_linear)["forward"] is not self.swiglu_linear_forward:
            raise Decline("SwiGLULinear.forward was replaced")

    def plan(self, facts: GatedMlpFacts, arch: str) -> Choice | Declined:
        return plan(facts, arch)

    def run(self, choice: Choice, module: Any, x: torch.Tensor, **ignored: Any) -> torch.Tensor:
        gate, up, down, gate_bias, up_bias, down_bias = self.read(module)
        return gated_mlp(x, gate, up, down, gate_bias=gate_bias, up_bias=up_bias, down_bias=down_bias)
