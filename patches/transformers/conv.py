"""transformers.causal_conv1d: the depthwise convolution of hybrid and Mamba models, as globals of their module.

transformers decorates a plain torch function when a modeling module is imported, and takes the causal_conv1d package's
instead where that is installed. Only the torch functions are replaced, by name, which works before and after a model is
built. Forward only: calls that need a gradient go upstream.

What is returned has upstream's shape [B, C, T], with its channels next to each other in memory, as the package returns
it for such inputs: what models split off it are rows.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import torch

from accel import serve
from accel.kernels.causal_conv1d import launch
from accel.kernels.causal_conv1d.facts import ConvFacts
from accel.kernels.causal_conv1d.plan import plan
from accel.kernels.runtime.interned import interned
from accel.outcome import Choice, Decline, Declined
from accel.rebind import Rebinding
from accel.state import TargetState

from .. import checks
from .linear_attention import Upstream

CERTIFIES = "causal_conv1d"
_facts = interned(ConvFacts)
#: ACT2FN's names of the one activation that models ask for.
ACTIVATIONS: dict[str | None, str | None] = {None: None, "silu": "silu", "swish": "silu"}


def patch(module: ModuleType, state: TargetState) -> Iterable[Rebinding]:
    """The rebindings of the two functions in `module`, where they are transformers' own torch code."""
    for name, adapter in (("causal_conv1d_fn", CausalConv1d), ("causal_conv1d_update", CausalConv1dUpdate)):
        held = vars(module).get(name)
        call = serve.wrapped_call(held, state)
        upstream = Upstream.of(held if call is None else call.original)
        if upstream is None or not upstream.is_reference or not module.__name__.startswith("transformers.models."):
            continue
        yield from serve.attribute(module, name, adapter(upstream), state)


def upstream(case: Any) -> Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]] | None:
    """transformers' torch functions for a case of the family; None for states and packed sequences, which it lacks."""
    if case.call is None:
        return None
    module = importlib.import_module("transformers.models.qwen3_next.modeling_qwen3_next")
    held = vars(module)[case.call]
    call = serve.wrapped_call(held)
    found = Upstream.of(held if call is None else call.original)
    if found is None or not found.is_reference:
        return None
    function = found.implementation

    def run(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        x, weight, bias = inputs["x"].mT, inputs["weight"], inputs.get("bias")
        if case.mode == "forward":
            return {"y": function(x, weight, bias, case.activation).mT}
        y = function(x, inputs["state"], weight, bias, case.activation)
        return {"y": y.mT, "state": inputs["state"]}

    return run


def _no_packing(keywords: dict[str, Any]) -> None:
    for name in ("cu_seqlens", "seq_idx"):
        if keywords.get(name) is not None:
            raise Decline(f"{name}: without causal_conv1d, transformers refuses packed sequences")


class _Adapter:
    """What the two functions share."""

    family = "causal_conv1d"
    in_place = False

    def __init__(self, upstream: Upstream) -> None:
        self.upstream = upstream

    def plan(self, facts: ConvFacts, arch: str) -> Choice | Declined:
        return plan(facts, arch)

    def compiled(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Upstream's own code, which Dynamo traces."""
        return original(*args, **kwargs)

    def check(
        self,
        hidden_states: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        activation: Any,
        conv_state: torch.Tensor | None,
    ) -> tuple[ConvFacts, torch.device]:
        chosen = self.upstream.kernelized
        if chosen is not None and ("forward" in chosen.__dict__ or chosen._forward_hooks or chosen._forward_pre_hooks):
            raise Decline("a hub kernel was chosen for this function")
        if activation is not None and activation not in ACTIVATIONS:
            raise Decline(f"activation={activation!r}")
        device = checks.plain(hidden_states=hidden_states, weight=weight, bias=bias, conv_state=conv_state)
        checks.not_on_cpu(device)
        if hidden_states.dim() != 3 or weight.dim() != 2:
            raise Decline(f"hidden_states is {list(hidden_states.shape)}, the weight {list(weight.shape)}")
        _, channels, tokens = hidden_states.shape
        if weight.shape[0] != channels or tokens == 0 or weight.shape[1] == 0:
            raise Decline(f"hidden_states is {list(hidden_states.shape)}, the weight {list(weight.shape)}")
        if bias is not None and (bias.shape != (channels,) or bias.dtype != weight.dtype):
            raise Decline(f"the bias is {list(bias.shape)} {bias.dtype}, the weight {weight.dtype}")
        cast = checks.autocast_dtype(device)
        if cast is not None and cast != hidden_states.dtype:
            raise Decline(f"autocast to {cast} of {hidden_states.dtype}")
        if conv_state is not None and conv_state.shape[:2] != hidden_states.shape[:2]:
            raise Decline(f"conv_state is {list(conv_state.shape)}, hidden_states {list(hidden_states.shape)}")
        facts = _facts()(
            "forward" if conv_state is None else "update",
            checks.dtype_name(hidden_states.dtype),
            checks.dtype_name(weight.dtype),
            channels,
            weight.shape[1],
            ACTIVATIONS[activation],
            bias is not None,
            hidden_states.stride(1) == 1,
            None if conv_state is None else checks.dtype_name(conv_state.dtype),
            0 if conv_state is None else conv_state.shape[2],
            False,
            False,
            checks.needs_grad(hidden_states, weight, bias, conv_state),
        )
        return facts, device


class CausalConv1d(_Adapter):
    """`causal_conv1d_fn`: whole sequences, zeros in front."""

    def facts(
        self,
        hidden_states: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: str | None = None,
        **kwargs: Any,
    ) -> tuple[ConvFacts, torch.device]:
        """Further keywords are dropped, as upstream's decorator does; packed sequences it refuses."""
        _no_packing(kwargs)
        return self.check(hidden_states, weight, bias, activation, None)

    def run(
        self,
        choice: Choice,
        hidden_states: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: str | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """[B, C, T], its channels next to each other."""
        return launch.forward(hidden_states.mT, weight, bias, ACTIVATIONS[activation])[0].mT


class CausalConv1dUpdate(_Adapter):
    """`causal_conv1d_update`: new tokens, the state moved on in place."""

    in_place = True

    def facts(
        self,
        hidden_states: torch.Tensor,
        conv_state: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: str | None = None,
        **kwargs: Any,
    ) -> tuple[ConvFacts, torch.device]:
        _no_packing(kwargs)
        if not isinstance(conv_state, torch.Tensor) or conv_state.dim() != 3:
            raise Decline("conv_state is no [B, C, S] tensor")
        return self.check(hidden_states, weight, bias, activation, conv_state)

    def run(
        self,
        choice: Choice,
        hidden_states: torch.Tensor,
        conv_state: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: str | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        return launch.update(hidden_states, conv_state, weight, bias, ACTIVATIONS[activation]).mT
