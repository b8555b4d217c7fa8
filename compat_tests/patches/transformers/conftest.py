"""Fixtures for the GatedDeltaNet modules: upstream that runs on a CPU, and plain torch in the place of the kernels."""

from __future__ import annotations

import importlib
import inspect
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

FOLDERS = ("qwen3_next", "qwen3_5", "qwen3_5_moe", "olmo_hybrid")


def _own(held: Any) -> Any:
    """The torch function under transformers' decorator; Hugging Face's kernels make a module of what it returns."""
    if isinstance(held, nn.Module):
        forward = type(held).forward
        held = dict(zip(forward.__code__.co_freevars, forward.__closure__, strict=True))["func"].cell_contents
    return inspect.unwrap(held)


@pytest.fixture
def torch_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the modules hold where FLA and causal_conv1d are not installed, made by transformers' own decorator."""
    from transformers.integrations.hub_kernels import use_kernel_func_from_hub_with_fallback

    for folder in FOLDERS:
        module = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
        for name, spoken in (
            ("torch_chunk_gated_delta_rule", "chunk_gated_delta_rule"),
            ("torch_recurrent_gated_delta_rule", "fused_recurrent_gated_delta_rule"),
            ("causal_conv1d_fn", "causal_conv1d_fn"),
            ("causal_conv1d_update", "causal_conv1d_update"),
        ):
            decorate = use_kernel_func_from_hub_with_fallback(spoken, "no_such_package")
            monkeypatch.setattr(module, name, decorate(_own(vars(module)[name])))


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """CPU tensors pass for a GPU's and plain torch for the kernels, which count their calls and check the layouts."""
    from accel.kernels.causal_conv1d import portable as conv
    from accel.kernels.gated_delta_rule import portable as rule
    from accel.kernels.norm import portable as norm
    from accel.patches.transformers import gated_delta_net

    seen: Counter[str] = Counter()

    def forward(x: Any, weight: Any, bias: Any, activation: Any, initial_state: Any = None) -> Any:
        seen["conv.forward"] += 1
        assert x.is_contiguous()
        return conv.causal_conv1d(x, weight, bias, activation, initial_state, False, None)

    def update(x: Any, state: Any, weight: Any, bias: Any = None, activation: Any = None) -> Any:
        seen["conv.update"] += 1
        assert x.shape[2] == 1
        return conv.causal_conv1d_update(x.mT, state, weight, bias, activation)

    def views(*tensors: torch.Tensor) -> None:
        assert all(t.stride(3) == 1 and t.stride(2) == t.shape[3] for t in tensors)
        assert len({t.untyped_storage().data_ptr() for t in tensors}) == 1

    def chunked(q: Any, k: Any, v: Any, g: Any, **options: Any) -> Any:
        seen["chunk"] += 1
        views(q, k, v)
        out, final = rule.gated_delta_rule(q, k, v, g, **options)
        return out.contiguous(), final

    def recurrent(q: Any, k: Any, v: Any, g: Any, *, initial_state: Any, in_place: bool = False, **options: Any) -> Any:
        seen["recurrent in place" if in_place else "recurrent"] += 1
        views(q, k, v)
        if in_place:
            options["output_final_state"] = True
        out, final = rule.recurrent_gated_delta_rule(q, k, v, g, initial_state=initial_state, **options)
        return out.contiguous(), initial_state.copy_(final) if in_place else final

    def gated(x: Any, gate: Any, weight: Any, *, eps: float, activation: str, form: str) -> Any:
        seen["norm"] += 1
        assert x.is_contiguous() and gate.stride(-1) == 1
        return norm.rms_norm_gated(x, gate, weight, eps, activation, form).contiguous()

    monkeypatch.setattr(gated_delta_net, "_not_on_cpu", lambda device: None)
    monkeypatch.setattr(gated_delta_net.conv, "forward", forward)
    monkeypatch.setattr(gated_delta_net.conv, "update", update)
    monkeypatch.setattr(gated_delta_net.rule, "recurrent", recurrent)
    monkeypatch.setattr(gated_delta_net.chunk, "chunk", chunked)
    monkeypatch.setattr(gated_delta_net, "rms_norm_gated", gated)
    return seen
