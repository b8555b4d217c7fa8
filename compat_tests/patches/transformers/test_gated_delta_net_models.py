"""transformers.gated_delta_net in whole models: tiny ones on a CPU, plain torch in the place of the kernels.

Upstream is transformers' own torch path. What is compared: logits by the accuracy rule, greedy tokens, and the caches
that either side leaves behind.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn
from transformers import DynamicCache

import accel
from accel.state import STATES
from accel.testing import InDouble, assert_accurate

TARGET, SEED, VOCABULARY = "transformers.gated_delta_net", 20261201, 96
STATE = STATES[TARGET]


@dataclass(frozen=True)
class Model:
    folder: str
    config: str
    cls: str
    options: dict[str, Any] = field(default_factory=dict)

    def build(self, dtype: torch.dtype = torch.float32) -> nn.Module:
        print("seed", SEED)
        torch.manual_seed(SEED)
        options = {
            "vocab_size": VOCABULARY,
            "hidden_size": 48,
            "intermediate_size": 64,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 24,
            "initializer_range": 0.2,
            "pad_token_id": 0,
            "bos_token_id": None,
            "eos_token_id": None,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 24,
            "layer_types": ["linear_attention", "linear_attention", "full_attention"],
        }
        transformers = importlib.import_module("transformers")
        module = importlib.import_module(f"transformers.models.{self.folder}.modeling_{self.folder}")
        config = getattr(transformers, self.config)(**options | self.options)
        return getattr(module, self.cls)(config).eval().to(dtype)


#: Every expert is used: which experts a near tie picks would be luck.
_MOE = {
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_experts": 4,
    "num_experts_per_tok": 4,
}
MODELS = {
    "qwen3_next": Model("qwen3_next", "Qwen3NextConfig", "Qwen3NextForCausalLM", _MOE),
    "qwen3_5": Model("qwen3_5", "Qwen3_5TextConfig", "Qwen3_5ForCausalLM"),
    "qwen3_5_moe": Model("qwen3_5_moe", "Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM", _MOE),
    "olmo_hybrid": Model("olmo_hybrid", "OlmoHybridConfig", "OlmoHybridForCausalLM"),
    "olmo_hybrid_positive": Model(
        "olmo_hybrid", "OlmoHybridConfig", "OlmoHybridForCausalLM", {"linear_allow_neg_eigval": False}
    ),
}
EACH = pytest.mark.parametrize("name", MODELS)
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
pytestmark = pytest.mark.usefixtures("torch_functions")


def tokens(batch: int = 2, length: int = 70) -> torch.Tensor:
    return torch.randint(1, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(SEED))


def on() -> None:
    accel.accelerate(TARGET)
    STATE.reset_counters()


def served() -> int:
    assert not STATE.declined, STATE.declined
    return sum(STATE.served.values())


def both(run: Callable[[], Any]) -> tuple[Any, Any]:
    """The results upstream, and with the target on, which must have served."""
    with torch.no_grad():
        theirs = run()
        on()
        ours = run()
    assert served() > 0
    return theirs, ours


def states(cache: Any) -> dict[str, torch.Tensor]:
    """Everything that the cache's linear attention layers hold."""
    found = {}
    for index, layer in enumerate(cache.layers):
        for kind in ("conv_states", "recurrent_states"):
            held = getattr(layer, kind, {}).get(0)
            if held is not None:
                found[f"{index}.{kind}"] = held
    assert found
    return found


def flags(cache: Any) -> list[tuple[Any, ...]]:
    names = ("has_previous_state", "is_conv_states_initialized", "is_recurrent_states_initialized", "conv_kernel_size")
    return [tuple(dict(getattr(layer, name)) for name in names) for layer in cache.layers if hasattr(layer, names[0])]


def assert_same_cache(ours: Any, theirs: Any) -> None:
    a, b = states(ours), states(theirs)
    assert a.keys() == b.keys() and flags(ours) == flags(theirs)
    for name, x in a.items():
        assert x.dtype == b[name].dtype and x.shape == b[name].shape, name
        torch.testing.assert_close(x, b[name], rtol=1e-4, atol=1e-4)


def generate(model: nn.Module, inputs: torch.Tensor, **options: Any) -> torch.Tensor:
    mask = options.pop("attention_mask", torch.ones_like(inputs))
    return model.generate(inputs, attention_mask=mask, max_new_tokens=8, do_sample=False, **options)


@EACH
def test_logits_are_as_close_as_upstreams(launches: Counter[str], name: str) -> None:
    """In fp32: how the roundings of a half precision add up in a chain of layers is luck on both sides."""
    model, inputs = MODELS[name].build(), tokens()
    exact = copy.deepcopy(model).double()
    exact.config._experts_implementation = "eager"  # grouped matrix products have no fp64
    with torch.no_grad(), InDouble():
        truth = exact(inputs, use_cache=False).logits
    theirs, ours = both(lambda: model(inputs, use_cache=False).logits)
    assert_accurate("logits", ours, theirs, truth)
    assert launches == {"conv.forward": 2, "chunk": 2, "norm": 2}
    accel.restore()
    with torch.no_grad():
        assert torch.equal(model(inputs, use_cache=False).logits, theirs)


@DTYPES
@EACH
def test_a_module_is_as_close_as_upstreams(launches: Counter[str], name: str, dtype: torch.dtype) -> None:
    """A prompt and a new token of many sequences: outputs and states.

    The norm's eps is large: a first token whose query and key are nearly orthogonal has an output of nearly nothing,
    and what rounding leaves of it would be blown up.
    """
    one = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    model = dataclasses.replace(MODELS[name], options=MODELS[name].options | one).build(dtype)
    layer = next(module for module in model.modules() if type(module).__name__.endswith("GatedDeltaNet"))
    next(child for child in layer.children() if type(child).__name__.endswith("RMSNormGated")).variance_epsilon = 1e-3
    exact, generator = copy.deepcopy(layer).double(), torch.Generator().manual_seed(SEED)
    x = torch.randn(96, 9, 48, generator=generator).to(dtype)

    def run(layer: Any, x: torch.Tensor) -> dict[str, torch.Tensor]:
        cache = DynamicCache(config=model.config)
        outs = {"prompt": layer(x[:, :-1], cache), "token": layer(x[:, -1:], cache)}
        return outs | {name: x.clone() for name, x in states(cache).items()}

    with torch.no_grad(), InDouble():
        truth = run(exact, x.double())
    theirs, ours = both(lambda: run(layer, x))
    for output, want in theirs.items():
        assert_accurate(output, ours[output], want, truth[output])


@EACH
def test_greedy_tokens_of_a_padded_batch(launches: Counter[str], name: str) -> None:
    model, inputs = MODELS[name].build(), tokens(3, 19)
    mask = torch.ones_like(inputs)
    mask[0, :7] = mask[2, :1] = 0
    theirs, ours = both(lambda: generate(model, inputs, attention_mask=mask))
    assert torch.equal(ours, theirs)
    assert served() == 2 * 8
    assert launches["conv.update"] == launches["recurrent in place"] == 2 * 7


@EACH
@pytest.mark.parametrize("length", [1, 2, 3, 5])
def test_greedy_tokens_of_short_prompts(launches: Counter[str], name: str, length: int) -> None:
    """Shorter than the convolution is wide; a prompt of one token is a whole sequence of one."""
    model, inputs = MODELS[name].build(), tokens(2, length)
    theirs, ours = both(lambda: generate(model, inputs))
    assert torch.equal(ours, theirs)
    assert launches["recurrent"] == (2 if length == 1 else 0)


@EACH
@pytest.mark.parametrize("chunk", [1, 3, 16])
def test_greedy_tokens_of_a_prompt_in_pieces(launches: Counter[str], name: str, chunk: int) -> None:
    model, inputs = MODELS[name].build(), tokens(2, 20)
    theirs, ours = both(lambda: generate(model, inputs, prefill_chunk_size=chunk))
    assert torch.equal(ours, theirs)


@EACH
def test_beams(launches: Counter[str], name: str) -> None:
    """Beam search puts other sequences' states into the rows of the cache."""
    model, inputs = MODELS[name].build(), tokens(2, 9)
    theirs, ours = both(lambda: generate(model, inputs, num_beams=3))
    assert torch.equal(ours, theirs)


@EACH
def test_caches_are_as_upstream_leaves_them(launches: Counter[str], name: str) -> None:
    """After a prompt, more of it, single tokens, and a reset: values, flags, and where the states lie."""
    model, inputs = MODELS[name].build(), tokens(2, 24)
    pieces = [inputs[:, :2], inputs[:, 2:11], inputs[:, 11:12], inputs[:, 12:13], inputs[:, 13:]]
    theirs, ours = DynamicCache(config=model.config), DynamicCache(config=model.config)

    def step(cache: Any, piece: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return model(piece, past_key_values=cache, use_cache=True).logits

    def compare(piece: torch.Tensor) -> None:
        want = step(theirs, piece)
        on()
        torch.testing.assert_close(step(ours, piece), want, rtol=1e-4, atol=1e-4)
        assert served() == 2
        accel.restore()
        assert_same_cache(ours, theirs)

    compare(pieces[0])
    held = {name: x.data_ptr() for name, x in states(ours).items()}
    for piece in pieces[1:]:
        compare(piece)
    assert {name: x.data_ptr() for name, x in states(ours).items()} == held
    assert launches["conv.update"] == 2 * 2
    for cache in (theirs, ours):
        for layer in cache.layers:
            layer.reset()
    for layer in (*theirs.layers, *ours.layers):  # the attention layers keep their length otherwise
        if getattr(layer, "keys", None) is not None:
            layer.keys, layer.values = layer.keys[:, :, :0], layer.values[:, :, :0]
    compare(pieces[1])
    assert {name: x.data_ptr() for name, x in states(ours).items()} == held


@EACH
def test_prefill_is_prefill_of_less_and_one_token(launches: Counter[str], name: str) -> None:
    model, inputs = MODELS[name].build(), tokens(2, 24)
    on()
    whole, parts = DynamicCache(config=model.config), DynamicCache(config=model.config)
    with torch.no_grad():
        want = model(inputs, past_key_values=whole).logits[:, -1]
        model(inputs[:, :-1], past_key_values=parts)
        got = model(inputs[:, -1:], past_key_values=parts).logits[:, -1]
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert_same_cache(parts, whole)
    assert served() == 6


@EACH
def test_a_cache_that_records_its_past(launches: Counter[str], name: str) -> None:
    """Speculative decoding keeps all conv states until it is known which tokens stay."""
    model, inputs = MODELS[name].build(), tokens(2, 12)

    def run() -> Any:
        cache = DynamicCache(config=model.config)
        model(inputs[:, :5], past_key_values=cache)
        for layer in cache.layers:
            if hasattr(layer, "conv_states"):
                layer.activate_past_recording()
        logits = [model(inputs[:, 5:9], past_key_values=cache).logits]
        logits.append(model(inputs[:, 9:10], past_key_values=cache).logits)
        for layer in cache.layers:
            if hasattr(layer, "conv_states"):
                layer.crop(0)
        logits.append(model(inputs[:, 10:11], past_key_values=cache).logits)
        return cache, logits

    (theirs, want), (ours, got) = both(run)
    assert_same_cache(ours, theirs)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    assert launches["conv.update"] == 0  # still recording


@EACH
def test_in_inference_mode(launches: Counter[str], name: str) -> None:
    model, inputs = MODELS[name].build(), tokens(2, 9)
    theirs = generate(model, inputs)
    on()
    with torch.inference_mode():
        assert torch.equal(generate(model, inputs), theirs)
    assert served() == 16


def test_all_targets_together(launches: Counter[str]) -> None:
    """The module serves; none of what it replaces is asked again."""
    model, inputs = MODELS["qwen3_5"].build(), tokens(2, 9)
    with torch.no_grad():
        theirs = generate(model, inputs)
    accel.accelerate()
    STATE.reset_counters()
    with torch.no_grad():
        assert torch.equal(generate(model, inputs), theirs)
    assert served() == 16
    for name in ("gated_delta_rule", "causal_conv1d", "rms_norm_gated"):
        state = STATES[f"transformers.{name}"]
        assert not state.served and not state.declined, name


def test_on_a_cpu_the_functions_serve_and_the_module_declines() -> None:
    model, inputs = MODELS["qwen3_5"].build(), tokens(2, 9)
    accel.accelerate()
    STATE.reset_counters()
    with torch.no_grad():
        generate(model, inputs)
    assert STATE.declined == {"CPU tensors: the module's functions are served one by one": 16} and not STATE.served
    assert sum(STATES["transformers.gated_delta_rule"].served.values()) == 16
    assert sum(STATES["transformers.rms_norm_gated"].declined.values()) == 16
