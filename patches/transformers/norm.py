"""transformers.rms_norm and transformers.rms_norm_gated: the norm classes of a modeling module, in canonical forms.

`cls.forward` is replaced, so models built before and after are reached, and classes keep their identity. Autocast does
not matter: every form casts for itself, and each operator that autocast would cast already works in fp32.

Not reached: look-alikes (grouped norms, norms without a weight, layer norms; recognise.py), and modules whose instance
`forward` somebody set (accelerate, kernelize). In compiled code upstream's own forward is traced, which Inductor fuses
with its neighbours.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import torch
from torch import nn

from accel import serve
from accel.kernels.norm import rms_norm, rms_norm_gated
from accel.kernels.norm.facts import NormFacts
from accel.kernels.norm.launch import facts_of
from accel.kernels.norm.plan import plan
from accel.outcome import Choice, Decline, Declined
from accel.rebind import Rebinding
from accel.state import TargetState

from .. import checks
from . import recognise

CERTIFIES = "norm"

#: The class that is the yardstick of each form, plain and gated.
YARDSTICKS = {
    ("cast_then_weight", False): ("llama", "LlamaRMSNorm"),
    ("weight_in_fp32", False): ("olmo2", "Olmo2RMSNorm"),
    ("zero_centred", False): ("gemma3", "Gemma3RMSNorm"),
    ("cast_then_weight", True): ("qwen3_next", "Qwen3NextRMSNormGated"),
    ("weight_in_fp32", True): ("kimi_linear", "KimiLinearRMSNormGated"),
}

#: What `ACT2FN` makes of a gate's activation, in the kernels' words.
ACTIVATIONS = {"silu": "silu", "swish": "silu", "sigmoid": "sigmoid"}


class RmsNorm:
    """The forward of one recognised class, plain or gated."""

    family = "norm"
    in_place = False

    def __init__(self, cls: type, norm: recognise.RmsNorm) -> None:
        self.cls, self.norm, self.names = cls, norm, recognise.names_of(cls)

    def concerns(self, *args: Any) -> bool:
        """Whether a call's module is of this class or a subclass of it; the target has an adapter for each class."""
        return bool(args) and isinstance(args[0], self.cls)

    def facts(self, *args: Any, **kwargs: Any) -> tuple[NormFacts, torch.device]:
        """The facts of a call of `forward(self, hidden_states)` or `forward(self, hidden_states, gate)`."""
        module, x, gate = self._arguments(args, kwargs)
        weight, _, activation = self.read(module)
        if self.norm.gated and gate is None:
            raise Decline("gate is None")
        device = checks.plain(x=x, gate=gate, weight=weight)
        if gate is not None and gate.shape != x.shape:
            raise Decline(f"gate is {list(gate.shape)}, x is {list(x.shape)}")
        if self.norm.same_dtype and x.dtype != weight.dtype:
            raise Decline(f"x is {x.dtype}, the weight {weight.dtype}: this class casts to the weight's dtype")
        checks.not_on_cpu(device)
        needs_grad = checks.needs_grad(x, gate, weight)
        return facts_of(x, weight, gate, self.norm.form, activation, needs_grad), device

    def read(self, module: nn.Module) -> tuple[torch.Tensor, float, str | None]:
        """(weight, eps, activation). Raises Decline where the module is more or less than its class says."""
        norm = self.norm
        if type(module) is not self.cls:
            raise Decline(f"{type(module).__name__} is a subclass of {self.cls.__name__}")
        if norm.with_scale is not None and not getattr(module, norm.with_scale):
            raise Decline(f"{norm.with_scale} is off: there is no weight")
        weight = module._parameters.get(norm.weight)
        if weight is None or norm.weight in module.__dict__:
            raise Decline(f"{norm.weight} is no parameter of the module's own")
        eps = getattr(module, norm.eps)
        if not isinstance(eps, (float, int)):
            raise Decline(f"{norm.eps} is a {type(eps).__name__}, not a number")
        if norm.activation is None:
            return weight, eps, None
        name = getattr(module, norm.activation)
        activation = ACTIVATIONS.get(name) if isinstance(name, str) else None
        if activation is None:
            raise Decline(f"{norm.activation}={name!r} is none of {', '.join(ACTIVATIONS)}")
        return weight, eps, activation

    def plan(self, facts: NormFacts, arch: str) -> Choice | Declined:
        """The norm family's plan."""
        return plan(facts, arch)

    def run(self, choice: Choice, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The normed tensor, in the dtype upstream returns."""
        module, x, gate = self._arguments(args, kwargs)
        weight, eps, activation = self.read(module)
        if gate is None or activation is None:
            return rms_norm(x, weight, eps=eps, form=self.norm.form)
        return rms_norm_gated(x, gate, weight, eps=eps, activation=activation, form=self.norm.form)

    def compiled(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Upstream's own forward, which Inductor fuses with its neighbours."""
        return original(*args, **kwargs)

    def _arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any, Any]:
        module, x, *gate = recognise.arguments(self.names, args, kwargs)
        return module, x, gate[0] if gate else None


def patch(module: ModuleType, state: TargetState) -> Iterable[Rebinding]:
    """The rebindings of `forward` for the plain or the gated norm classes that `module` defines."""
    gated = state.name == "transformers.rms_norm_gated"
    for cls, meaning in recognise.classes_of(module):
        if isinstance(meaning, recognise.RmsNorm) and meaning.gated == gated:
            yield from serve.attribute(cls, "forward", RmsNorm(cls, meaning), state)


def upstream(case: Any) -> Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]] | None:
    """transformers' own class for a case of kernels/norm/cases.py: y and the gradients of x, weight and gate."""
    model, name = YARDSTICKS[case.form, case.activation is not None]
    cls = getattr(importlib.import_module(f"transformers.models.{model}.modeling_{model}"), name)
    call = serve.wrapped_call(cls.forward)
    forward = cls.forward if call is None else call.original

    def run(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        norm = cls(case.hidden, eps=case.eps)
        del norm._parameters["weight"]
        norm.weight = inputs["weight"]  # the leaf itself, so that its gradient is asked for directly
        norm.activation = case.activation
        leaves = {key: inputs[key] for key in ("x", "weight", "gate") if key in inputs}
        y = forward(norm, *(leaves[key] for key in ("x", "gate") if key in leaves))
        grads = torch.autograd.grad(y, list(leaves.values()), inputs["d_y"])
        return {"y": y.detach(), **{f"d_{key}": grad for key, grad in zip(leaves, grads, strict=True)}}

    return run
