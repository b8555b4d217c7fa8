"""Checks that an adapter of a whole module makes of the layers its kernel would bypass. Each raises Decline."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.modules import module as modules

from accel.outcome import Decline

_LINEAR_FORWARD = nn.Linear.forward


def no_global_hooks() -> None:
    """Decline while hooks on every module are registered."""
    if modules._has_any_global_hook():  # type: ignore[no-untyped-call]
        raise Decline("global module hooks are registered")


def no_global_changes() -> None:
    """Decline while hooks on every module are registered, or somebody replaced nn.Linear's forward."""
    no_global_hooks()
    if nn.Linear.forward is not _LINEAR_FORWARD:
        raise Decline("nn.Linear.forward was replaced")


def untouched(name: str, layer: nn.Module) -> None:
    """Decline a layer with hooks or a forward of its own: accelerate, tensor parallelism, FSDP, kernelize, pruning."""
    if "forward" in layer.__dict__:
        raise Decline(f"{name} has a forward of its own")
    if layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks:
        raise Decline(f"{name} has hooks")


def linear(name: str, layer: nn.Module | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Weight and bias of a layer that is nn.Linear and nothing more."""
    # The exact class: LoRA, quantised and parametrized layers are subclasses or have a `weight` that is not all.
    if type(layer) is not nn.Linear:
        raise Decline(f"{name} is a {type(layer).__name__}, not nn.Linear")
    own, parameters = layer.__dict__, layer._parameters
    if (
        "forward" in own
        or layer._forward_hooks
        or layer._forward_pre_hooks
        or layer._backward_hooks
        or layer._backward_pre_hooks
    ):
        untouched(name, layer)
    weight = parameters.get("weight")
    if weight is None or "weight" in own or "bias" in own:
        raise Decline(f"{name} has no weight parameter of its own")
    if len(parameters) > 2 or layer._buffers or layer._modules:
        raise Decline(f"{name} has further parameters, buffers or layers")
    return weight, parameters.get("bias")
