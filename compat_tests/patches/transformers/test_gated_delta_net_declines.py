"""transformers.gated_delta_net: every reason to decline, of the call, the module and the cache.

Upstream is transformers' own torch path, and plain torch is in the place of the kernels; what declines must be
upstream's result bit for bit, caches included.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import DynamicCache

import accel
from accel.outcome import CompileError, Decline
from accel.patches.transformers import gated_delta_net
from accel.state import STATES

TARGET, SEED, HIDDEN = "transformers.gated_delta_net", 20261201, 48
STATE = STATES[TARGET]
FOLDERS = ("qwen3_next", "qwen3_5", "qwen3_5_moe", "olmo_hybrid")
EACH = pytest.mark.parametrize("folder", FOLDERS)
UPSTREAM = pytest.mark.usefixtures("torch_functions", "launches")


# --- Declined: the call ---------------------------------------------------------------------------------------------


@UPSTREAM
def test_calls_that_do_not_fit(nets: Any) -> None:
    layer, x = nets.layer_of(), nets.inputs()
    misfit = "the arguments do not fit the signature"
    name = nets.on().adapter.names[0]
    accel.restore()
    assert name == "hidden_states"
    nets.same(layer, x, None, None, 3, expected=misfit)
    nets.same(layer, x, hidden_states=x, expected=misfit)
    nets.same(layer, None, expected="hidden_states is None")
    nets.same(layer, expected="hidden_states is None")
    nets.same(layer, x[0], expected="hidden_states is [7, 48]")
    nets.same(layer, x[:, :0], expected="hidden_states is [2, 0, 48]")
    nets.same(layer, "text", expected="hidden_states is a str, not a plain tensor")
    nets.same(layer, x.as_subclass(Sub), expected="hidden_states is a Sub, not a plain tensor")


class Sub(torch.Tensor):
    pass


@UPSTREAM
@pytest.mark.parametrize(
    ("keywords", "expected"),
    [
        ({"cu_seq_lens_q": torch.tensor([0, 7])}, "cu_seq_lens_q: packed sequences"),
        ({"seq_idx": torch.zeros(2, 7)}, "seq_idx: packed sequences"),
        ({"cu_seqlens": None}, "cu_seqlens: upstream hands it on"),
        ({"chunk_size": 4}, "chunk_size: upstream hands it on"),
        ({"bias": None, "activation": None}, "activation, bias: upstream hands it on"),
    ],
)
def test_keywords_that_reach_a_function(nets: Any, keywords: dict[str, Any], expected: str) -> None:
    nets.same(nets.layer_of(), nets.inputs(), expected=expected, **keywords)


@UPSTREAM
def test_keywords_that_reach_none_are_dropped(nets: Any) -> None:
    layer, x = nets.layer_of(), nets.inputs()
    want = layer(x)
    nets.on()
    torch.testing.assert_close(layer(x, cu_seq_lens_q=None, seq_idx=None, position_ids=x, use_cache=True), want)
    assert not STATE.declined


@UPSTREAM
def test_the_deprecated_name_of_the_cache(nets: Any) -> None:
    layer, x = nets.layer_of(), nets.inputs()
    if nets.on().adapter.names[1] == "cache_params":
        return  # the release's own name
    accel.restore()
    want = layer(x, DynamicCache(config=nets.config_of("qwen3_5")))
    nets.on()
    assert torch.equal(layer(x, cache_params=DynamicCache(config=nets.config_of("qwen3_5"))), want)
    assert STATE.declined == {"cache_params: upstream hands it on": 1}


@UPSTREAM
def test_autocast(nets: Any) -> None:
    layer, x = nets.layer_of(), nets.inputs()
    with torch.autocast("cpu", torch.bfloat16):
        nets.same(layer, x, expected="autocast casts float32 to bfloat16")
    layer.bfloat16()
    nets.on()
    with torch.autocast("cpu", torch.bfloat16):
        layer(x.bfloat16())
    assert not STATE.declined


@UPSTREAM
def test_a_mask_that_makes_the_batch_larger(nets: Any) -> None:
    nets.same(
        nets.layer_of(),
        nets.inputs(batch=1),
        None,
        torch.ones(2, 7),
        expected="the mask makes hidden_states a Tensor [2, 7, 48]",
    )


# --- Declined: the module -------------------------------------------------------------------------------------------


def hook_on(name: str) -> Callable[[Any], None]:
    return lambda layer: layer.get_submodule(name).register_forward_hook(lambda module, args, out: out * 2)


def own_forward(layer: Any) -> None:
    before = layer.norm.forward
    layer.norm.forward = lambda *args: before(*args) * 2


def other_norm(layer: Any) -> None:
    layer.norm = nn.RMSNorm(24)
    layer.norm.forward = lambda x, gate: x


class SubNorm(nn.Module):
    """A norm of other maths."""

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return x * gate


def buffer(name: str) -> Callable[[Any], None]:
    def change(layer: Any) -> None:
        value = layer._parameters.pop(name)
        layer.register_buffer(name, value.detach())

    return change


def offloaded(layer: Any) -> None:
    class Hook:
        def pre_forward(self, module: Any, *args: Any) -> None: ...

        def post_forward(self, module: Any, *args: Any) -> None: ...

    layer.conv1d._hf_hook = Hook()


def subclass(layer: Any) -> None:
    layer.__class__ = type("Theirs", (type(layer),), {})


def set_to(name: str, value: Any) -> Callable[[Any], None]:
    return lambda layer: setattr(layer, name, value)


def bias(layer: Any) -> None:
    layer.conv1d.bias = nn.Parameter(torch.zeros(layer.conv_dim, dtype=torch.float64), False)


PREPARED: list[tuple[Callable[[Any], Any], str]] = [
    (subclass, "Theirs is a subclass of Qwen3_5GatedDeltaNet"),
    (hook_on("norm"), "norm has hooks"),
    (own_forward, "norm has a forward of its own"),
    (lambda layer: setattr(layer, "norm", SubNorm()), "norm is a SubNorm, no gated norm of a canonical form"),
    (lambda layer: setattr(layer.norm, "activation", "gelu"), "activation='gelu' is none of silu, swish, sigmoid"),
    (offloaded, "conv1d is moved about by accelerate"),
    (buffer("A_log"), "A_log is no parameter of the module's own"),
    (buffer("dt_bias"), "dt_bias is no parameter of the module's own"),
    (set_to("activation", "gelu"), "activation='gelu'"),
    (set_to("dt_bias", nn.Parameter(torch.ones(1), False)), "A_log is [4], dt_bias [1], of 4 value heads"),
    (bias, "conv1d.bias is [160] torch.float64, the weight torch.float32"),
]


@UPSTREAM
@pytest.mark.parametrize(("prepare", "expected"), PREPARED, ids=[expected for _, expected in PREPARED])
def test_modules_that_are_more_than_their_class(nets: Any, prepare: Callable[[Any], Any], expected: str) -> None:
    layer = nets.layer_of()
    prepare(layer)
    nets.same(layer, nets.inputs(), expected=expected)


@UPSTREAM
def test_a_convolution_of_other_shape(nets: Any) -> None:
    """As a model split over devices has it."""
    layer = nets.layer_of()
    layer.conv1d.weight = nn.Parameter(layer.conv1d.weight[:80].clone(), False)
    nets.same(layer, nets.inputs(), expected="conv1d.weight is [80, 1, 4], not [160, 1, W]")


@UPSTREAM
def test_global_hooks(nets: Any) -> None:
    layer = nets.layer_of()
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, out: out * 2)
    try:
        nets.same(layer, nets.inputs(), expected="global module hooks are registered")
    finally:
        handle.remove()


@UPSTREAM
def test_a_norm_class_that_somebody_patched(nets: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, cls = nets.layer_of(), nets.module_of("qwen3_5").Qwen3_5RMSNormGated
    ours = "norm is a Qwen3_5RMSNormGated, no gated norm of a canonical form"
    before = cls.forward
    with monkeypatch.context() as patched:
        patched.setattr(cls, "forward", lambda self, x, gate: before(self, x, gate) * 2)
        nets.same(layer, nets.inputs(), expected=ours)
        accel.restore()
    accel.accelerate("transformers.rms_norm_gated")  # with the norm's own target below, the foreign layer counts too
    wrapper = cls.forward
    nets.on()
    layer(nets.inputs())
    assert sum(STATE.served.values()) == 1

    @functools.wraps(wrapper)
    def theirs(self: Any, x: Any, gate: Any) -> Any:
        return wrapper(self, x, gate) * 2

    cls.forward = theirs
    try:
        layer(nets.inputs())
        assert STATE.declined == {ours: 1}
    finally:
        cls.forward = before


@UPSTREAM
@pytest.mark.parametrize("name", gated_delta_net.FUNCTIONS)
def test_a_function_that_somebody_replaced(nets: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, layer = nets.module_of("qwen3_5"), nets.layer_of()
    held = vars(module)[name]

    def theirs(*args: Any, **kwargs: Any) -> Any:
        return held(*args, **kwargs)

    monkeypatch.setattr(module, name, theirs)
    nets.same(layer, nets.inputs(), expected=f"{name} was replaced")
    monkeypatch.setattr(module, name, held)
    nets.on()
    layer(nets.inputs())
    assert not STATE.declined
    accel.accelerate("transformers.gated_delta_rule")
    accel.accelerate("transformers.causal_conv1d")
    STATE.reset_counters()
    layer(nets.inputs())
    assert not STATE.declined
    theirs.__wrapped__ = vars(module)[name]  # type: ignore[attr-defined]  # around ours
    monkeypatch.setattr(module, name, theirs)
    layer(nets.inputs())
    assert STATE.declined == {f"{name} was replaced": 1}
    monkeypatch.setattr(module, name, theirs.__wrapped__)  # type: ignore[attr-defined]


def test_an_unknown_package_computes(
    nets: Any, monkeypatch: pytest.MonkeyPatch, torch_functions: None, launches: Any
) -> None:
    module, layer = nets.module_of("qwen3_5"), nets.layer_of()
    from transformers.integrations.hub_kernels import use_kernel_func_from_hub_with_fallback

    def reference(query: Any) -> Any:
        raise AssertionError

    made = use_kernel_func_from_hub_with_fallback("sqrt", "math")(reference)
    monkeypatch.setattr(module, "torch_chunk_gated_delta_rule", made)
    nets.on()
    with pytest.raises(TypeError):
        layer(nets.inputs())
    assert STATE.declined == {"torch_chunk_gated_delta_rule was replaced": 1}


@UPSTREAM
def test_hub_kernels(nets: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hugging Face's kernels make modules of the functions, and put a kernel where the module's forward is."""
    module, layer, x = nets.module_of("qwen3_5"), nets.layer_of(), nets.inputs()
    want, name = layer(x), "torch_chunk_gated_delta_rule"
    held = vars(module)[name]
    if not isinstance(held, nn.Module):

        def kernelizable(func: Any) -> nn.Module:
            class Func(nn.Module):
                def forward(self, *args: Any, **kwargs: Any) -> Any:
                    return func(*args, **kwargs)

            return Func()

        held = kernelizable(held)
        monkeypatch.setattr(module, name, held)
    nets.on()
    torch.testing.assert_close(layer(x), want)
    assert sum(STATE.served.values()) == 1
    before = held.forward
    held.forward = lambda *args, **kwargs: before(*args, **kwargs)
    try:
        assert torch.equal(layer(x), want)
    finally:
        del held.forward
    assert STATE.declined == {"a hub kernel was chosen for one of the module's functions": 1}
    layer.forward = lambda *args: "a hub kernel for the whole module"
    assert layer(x) == "a hub kernel for the whole module"


@UPSTREAM
def test_projections_that_return_something_else(nets: Any) -> None:
    """Seen only when they have run: upstream then runs them again."""
    layer, x = nets.layer_of(), nets.inputs()
    handle = layer.in_proj_z.register_forward_hook(lambda module, args, out: out.as_subclass(Sub))
    nets.same(layer, x, expected="in_proj_z returned a Sub [2, 7, 96], not a tensor [2, 7, 96]")
    handle.remove()
    accel.restore()
    layer.in_proj_z.register_forward_hook(lambda module, args, out: out.double())
    nets.same(layer, x, expected="projections of torch.float32 return torch.float32 and torch.float64")


@UPSTREAM
def test_gradients_of_what_is_no_parameter_of_the_module(nets: Any) -> None:
    layer, x = nets.layer_of(), nets.inputs()
    added = torch.ones(96, requires_grad=True)
    layer.in_proj_z.register_forward_hook(lambda module, args, out: out + added)
    want = torch.autograd.grad(layer(x).sum(), added)
    nets.on()
    got = torch.autograd.grad(layer(x).sum(), added)
    assert STATE.declined == {"a gradient is needed of what a projection returned": 1}
    assert torch.equal(got[0], want[0])
    with torch.no_grad():
        layer(x)
    assert sum(STATE.served.values()) == 1


# --- Caches ---------------------------------------------------------------------------------------------------------


@UPSTREAM
@EACH
@pytest.mark.parametrize("broken", ["conv", "rule", "norm"])
def test_a_kernel_that_cannot_be_loaded_leaves_the_cache_as_it_is(
    nets: Any, folder: str, broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, x = nets.layer_of(folder), nets.inputs(1)
    caches = [nets.cache_of(layer, folder) for _ in range(3)]
    with torch.no_grad():
        want = layer(x, caches[0])
    owner, name = {
        "conv": (gated_delta_net.conv, "update"),
        "rule": (gated_delta_net.rule, "recurrent"),
        "norm": (gated_delta_net, "rms_norm_gated"),
    }[broken]
    works = getattr(owner, name)
    for error, cache in ((Decline("not loaded yet"), caches[1]), (CompileError("does not compile"), caches[2])):

        def fails(*args: Any, error: Exception = error, **kwargs: Any) -> Any:
            works(*args, **kwargs)
            raise error

        monkeypatch.setattr(owner, name, fails)
        nets.on(folder)
        with torch.no_grad():
            assert torch.equal(layer(x, cache), want)
        assert len(STATE.declined) == 1 and not STATE.served
        accel.restore()
        assert all(torch.equal(a, b) for a, b in zip(nets.held(cache), nets.held(caches[0]), strict=True))


@UPSTREAM
def test_the_first_token_of_a_configuration_works_on_copies(nets: Any) -> None:
    layer, call = nets.layer_of(), None
    caches = [nets.cache_of(layer) for _ in range(2)]
    want = [layer(nets.inputs(1), caches[0]) for _ in range(3)]
    call = nets.on()
    call.adapter._loaded.clear()
    for expected in want:
        torch.testing.assert_close(layer(nets.inputs(1), caches[1]), expected, rtol=1e-4, atol=1e-5)
    assert len(call.adapter._loaded) == 1 and sum(STATE.served.values()) == 3
    for a, b in zip(nets.held(caches[1]), nets.held(caches[0]), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


class OwnCache(DynamicCache):
    def update_conv_state(self, *args: Any, **kwargs: Any) -> Any:
        return super().update_conv_state(*args, **kwargs)


def no_state(cache: Any) -> None:
    cache.layers[0].recurrent_states[0] = None


def half_state(cache: Any) -> None:
    cache.layers[0].recurrent_states[0] = cache.layers[0].recurrent_states[0].bfloat16()


def strided_state(cache: Any) -> None:
    state = cache.layers[0].recurrent_states[0]
    cache.layers[0].recurrent_states[0] = state.mT.contiguous().mT


def other_conv_state(cache: Any) -> None:
    cache.layers[0].conv_states[0] = cache.layers[0].conv_states[0][:1]


def other_class(cache: Any) -> None:
    cache.__class__ = OwnCache


def other_layer(cache: Any) -> None:
    own = cache.layers[0]

    class Layer(type(own)):  # type: ignore[misc]
        def update_recurrent_state(self, *args: Any, **kwargs: Any) -> Any:
            return super().update_recurrent_state(*args, **kwargs)

    own.__class__ = Layer


CACHES: list[tuple[Callable[[Any], None], str]] = [
    (other_class, "OwnCache keeps states in a way of its own"),
    (other_layer, "layer 0 of the cache has no states of linear attention"),
    (lambda cache: cache.layers.reverse(), "layer 0 of the cache has no states of linear attention"),
    (lambda cache: cache.layers.clear(), "layer 0 of the cache has no states of linear attention"),
    (no_state, "the cache has one of the two states"),
    (half_state, "the recurrent state is torch.bfloat16, not torch.float32"),
    (strided_state, "the recurrent state is [2, 4, 16, 24] with strides (1536, 384, 1, 16)"),
    (other_conv_state, "the conv state is [1, 160, 4], hidden_states [2, 1, 48]"),
]


@UPSTREAM
@pytest.mark.parametrize(("change", "expected"), CACHES, ids=[expected for _, expected in CACHES])
def test_caches_that_are_declined(nets: Any, change: Callable[[Any], None], expected: str) -> None:
    layer = nets.layer_of()
    caches = [nets.cache_of(layer) for _ in range(2)]
    results = []
    for cache in caches:
        change(cache)
        if cache is caches[1]:
            nets.on()
        try:
            with torch.no_grad():
                results.append(layer(nets.inputs(1), cache))
        except Exception as error:
            results.append(f"{type(error)} {error}")
    assert STATE.declined == {expected: 1} and not STATE.served
    theirs, ours = results
    assert torch.equal(ours, theirs) if isinstance(theirs, torch.Tensor) else ours == theirs
    if isinstance(theirs, torch.Tensor):
        assert all(torch.equal(a, b) for a, b in zip(nets.held(caches[1]), nets.held(caches[0]), strict=True))


@UPSTREAM
def test_a_layer_without_a_number(nets: Any) -> None:
    layer = nets.layer_of()
    layer.layer_idx = None
    expected = "layer None of the cache has no states of linear attention"
    nets.same(layer, nets.inputs(), DynamicCache(config=nets.config_of("qwen3_5")), expected=expected)


@UPSTREAM
def test_a_cache_of_inference_mode_outside_of_it(nets: Any) -> None:
    layer = nets.layer_of()
    with torch.inference_mode():
        cache = nets.cache_of(layer)
    nets.on()
    with pytest.raises(RuntimeError, match="InferenceMode"):
        layer(nets.inputs(1), cache)
    assert len(STATE.declined) == 1 and "made in inference mode" in next(iter(STATE.declined))


@UPSTREAM
def test_a_release_that_asks_the_last_layer(nets: Any) -> None:
    """OLMo hybrid up to transformers 5.20 goes by whether the cache's last layer has seen tokens."""
    layer = nets.layer_of("olmo_hybrid")
    call = nets.on("olmo_hybrid")
    assert call.adapter.layout.whole_cache == ("has_previous_state()" in inspect.getsource(call.original))
    two = nets.config_of("olmo_hybrid", num_hidden_layers=3, layer_types=["linear_attention"] * 2 + ["full_attention"])
    accel.restore()
    caches = [DynamicCache(config=two) for _ in range(2)]
    want = [layer(nets.inputs(n), caches[0]) for n in (3, 1)]
    nets.on("olmo_hybrid")
    for n, expected in zip((3, 1), want, strict=True):
        torch.testing.assert_close(layer(nets.inputs(n), caches[1]), expected, rtol=1e-4, atol=1e-5)
    assert len(STATE.declined) == call.adapter.layout.whole_cache
