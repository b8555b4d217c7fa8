"""Fixtures for the GatedDeltaNet modules: upstream that runs on a CPU, and plain torch in the place of the kernels."""

from __future__ import annotations

import importlib
import inspect
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from transformers import DynamicCache

import accel
from accel import serve
from accel.state import STATES

TARGET, SEED, HIDDEN = "transformers.gated_delta_net", 20261201, 48
STATE = STATES[TARGET]
CLASSES = {
    "qwen3_next": ("Qwen3NextConfig", "Qwen3NextGatedDeltaNet"),
    "qwen3_5": ("Qwen3_5TextConfig", "Qwen3_5GatedDeltaNet"),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", "Qwen3_5MoeGatedDeltaNet"),
    "olmo_hybrid": ("OlmoHybridConfig", "OlmoHybridGatedDeltaNet"),
}


class Nets:
    """Single GatedDeltaNet layers, caches for them, and calls with the target on."""

    @staticmethod
    def module_of(folder: str) -> Any:
        return importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")

    @staticmethod
    def cls_of(folder: str) -> Any:
        return getattr(Nets.module_of(folder), CLASSES[folder][1])

    @staticmethod
    def config_of(folder: str, **options: Any) -> Any:
        given = {
            "hidden_size": HIDDEN,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 24,
            "layer_types": ["linear_attention", "full_attention"],
            "pad_token_id": 0,
        }
        return getattr(importlib.import_module("transformers"), CLASSES[folder][0])(**given | options)

    @staticmethod
    def layer_of(folder: str = "qwen3_5", **options: Any) -> Any:
        print("seed", SEED)
        torch.manual_seed(SEED)
        return Nets.cls_of(folder)(Nets.config_of(folder, **options), 0).eval().requires_grad_(False)

    @staticmethod
    def inputs(tokens: int = 7, batch: int = 2) -> torch.Tensor:
        return torch.randn(batch, tokens, HIDDEN, generator=torch.Generator().manual_seed(SEED))

    @staticmethod
    def cache_of(layer: Any, folder: str = "qwen3_5", tokens: int = 5) -> Any:
        """A cache that has seen some tokens, upstream's way."""
        cache = DynamicCache(config=Nets.config_of(folder))
        with torch.no_grad():
            layer(Nets.inputs(tokens) + 1, cache)
        return cache

    @staticmethod
    def held(cache: Any) -> list[torch.Tensor]:
        layer = cache.layers[0]
        return [x.clone() for x in (layer.conv_states[0], layer.recurrent_states[0]) if x is not None]

    @staticmethod
    def on(folder: str = "qwen3_5") -> serve.ServedCall:
        accel.accelerate(TARGET)
        STATE.reset_counters()
        call = serve.wrapped_call(Nets.cls_of(folder).forward, STATE)
        assert call is not None
        return call

    @staticmethod
    def same(layer: Any, *args: Any, expected: str, **kwargs: Any) -> None:
        """The call declines for the reason and is upstream's, result or error, bit for bit."""

        def run() -> Any:
            try:
                return layer(*args, **kwargs)
            except Exception as error:
                return type(error), str(error)

        theirs = run()
        Nets.on()
        ours = run()
        assert STATE.declined == {expected: 1} and not STATE.served
        assert torch.equal(ours, theirs) if isinstance(theirs, torch.Tensor) else ours == theirs


@pytest.fixture
def nets() -> type[Nets]:
    return Nets


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    """What a test made of plans, certificates and kernels stays in it."""
    yield
    for wrapper in STATE.wrappers.values():
        call = wrapper.__accel__  # type: ignore[attr-defined]
        for memory in (call.plans, call.quarantined, call.adapter._loaded):
            memory.clear()


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

    for folder in CLASSES:
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
