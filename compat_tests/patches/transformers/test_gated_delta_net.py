"""transformers.gated_delta_net: what is recognised and replaced, how calls are read, every reason to decline.

Upstream is transformers' own torch path, and plain torch is in the place of the kernels; what declines must be
upstream's result bit for bit, caches included.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import DynamicCache

import accel
from accel import certificates, serve, testing
from accel.outcome import Choice, CompileError, Decline, Declined
from accel.patches.transformers import gated_delta_net
from accel.patches.transformers.gated_delta_layouts import LAYOUTS, recognised
from accel.state import STATES

TARGET, SEED, HIDDEN = "transformers.gated_delta_net", 20261201, 48
STATE = STATES[TARGET]
CLASSES = {
    "qwen3_next": ("Qwen3NextConfig", "Qwen3NextGatedDeltaNet"),
    "qwen3_5": ("Qwen3_5TextConfig", "Qwen3_5GatedDeltaNet"),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", "Qwen3_5MoeGatedDeltaNet"),
    "olmo_hybrid": ("OlmoHybridConfig", "OlmoHybridGatedDeltaNet"),
}
EACH = pytest.mark.parametrize("folder", CLASSES)
UPSTREAM = pytest.mark.usefixtures("torch_functions", "launches")


def module_of(folder: str) -> Any:
    return importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")


def cls_of(folder: str) -> Any:
    return getattr(module_of(folder), CLASSES[folder][1])


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


def layer_of(folder: str = "qwen3_5", **options: Any) -> Any:
    print("seed", SEED)
    torch.manual_seed(SEED)
    return cls_of(folder)(config_of(folder, **options), 0).eval().requires_grad_(False)


def inputs(tokens: int = 7, batch: int = 2) -> torch.Tensor:
    return torch.randn(batch, tokens, HIDDEN, generator=torch.Generator().manual_seed(SEED))


def cache_of(layer: Any, folder: str = "qwen3_5", tokens: int = 5) -> Any:
    """A cache that has seen some tokens, upstream's way."""
    cache = DynamicCache(config=config_of(folder))
    with torch.no_grad():
        layer(inputs(tokens) + 1, cache)
    return cache


def held(cache: Any) -> list[torch.Tensor]:
    layer = cache.layers[0]
    return [x.clone() for x in (layer.conv_states[0], layer.recurrent_states[0]) if x is not None]


def on(folder: str = "qwen3_5") -> serve.ServedCall:
    accel.accelerate(TARGET)
    STATE.reset_counters()
    call = serve.wrapped_call(cls_of(folder).forward, STATE)
    assert call is not None
    return call


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    """What a test made of plans, certificates and kernels stays in it."""
    yield
    for wrapper in STATE.wrappers.values():
        call = wrapper.__accel__  # type: ignore[attr-defined]
        for memory in (call.plans, call.quarantined, call.adapter._loaded):
            memory.clear()


def reason(decision: Choice | Declined) -> str:
    assert isinstance(decision, Declined), decision
    return decision.reason


# --- Recognised, replaced and put back ------------------------------------------------------------------------------


def test_which_classes_are_recognised() -> None:
    found = set()
    for folder in ("qwen3_next", "qwen3_5", "qwen3_5_moe", "olmo_hybrid", "qwen4_exp", "kimi_linear", "llama"):
        module = module_of(folder)
        found |= {n for n, cls in vars(module).items() if isinstance(cls, type) and recognised(cls) is not None}
    assert found == {name for _, name in CLASSES.values()} | {"Qwen4ExpTextGatedDeltaNet"}
    assert len(LAYOUTS) == 12


def test_restore_gives_back_the_very_same_objects() -> None:
    for folder in CLASSES:
        module_of(folder)
    before = testing.snapshot(("transformers",))
    upstream = {folder: vars(cls_of(folder))["forward"] for folder in CLASSES}
    accel.accelerate(TARGET)
    for folder, forward in upstream.items():
        wrapper = vars(cls_of(folder))["forward"]
        assert wrapper is not forward and wrapper.__wrapped__ is forward
        assert inspect.signature(wrapper) == inspect.signature(forward)
        assert (wrapper.__name__, wrapper.__qualname__, wrapper.__doc__) == (
            forward.__name__,
            forward.__qualname__,
            forward.__doc__,
        )
    accel.accelerate(TARGET)
    accel.restore(TARGET)
    assert before.changed(testing.snapshot(("transformers",))) == []


def remade(folder: str, tmp_path: Path, change: Callable[[str], str]) -> Any:
    """The class anew, of changed source, in a file of its own."""
    module, name = module_of(folder), CLASSES[folder][1]
    source = change(inspect.getsource(cls_of(folder)))
    source = source[source.index(f"class {name}") :]  # without the decorator, which wraps __init__
    file = tmp_path / f"theirs_{abs(hash(source))}.py"
    file.write_text(source)
    space = dict(vars(module))
    exec(compile(source, str(file), "exec"), space)
    return space[name]


@EACH
def test_recognition_is_blind_to_what_is_not_computed(folder: str, tmp_path: Path) -> None:
    def change(source: str) -> str:
        return source.replace("        beta =", "        # a comment\n\n        beta  =  (\n           ", 1).replace(
            ".sigmoid()\n", ".sigmoid()\n        )\n", 1
        )

    assert recognised(remade(folder, tmp_path, lambda source: source)) is not None
    assert recognised(remade(folder, tmp_path, change)) is not None


@EACH
@pytest.mark.parametrize(
    ("old", "new"),
    [
        (".sigmoid()", ".tanh()"),
        ("use_qk_l2norm_in_kernel=True", "use_qk_l2norm_in_kernel=False"),
        ("self.A_log.float()", "self.A_log"),
        ('    @force_accelerate_hooks("conv1d")\n', ""),
        ("hidden_states = apply_mask_to_padding_states(hidden_states, attention_mask)\n", "\n"),
        ("F.softplus(", "F.relu("),
    ],
    ids=["beta", "l2norm", "half", "decorator", "mask", "gate"],
)
def test_look_alikes_are_left_alone(folder: str, old: str, new: str, tmp_path: Path) -> None:
    def change(source: str) -> str:
        assert old in source
        return source.replace(old, new)

    assert recognised(remade(folder, tmp_path, change)) is None


def test_another_order_of_the_projections_is_left_alone(tmp_path: Path) -> None:
    def change(source: str) -> str:
        return source.replace("b, a = torch.split(mixed_ba", "a, b = torch.split(mixed_ba")

    assert recognised(remade("qwen3_next", tmp_path, change)) is None


def test_edited_files_and_foreign_wrappers_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cls = remade("qwen3_5", tmp_path, lambda source: source.replace(".sigmoid()", ".tanh()"))
    file = Path(inspect.unwrap(cls.forward).__code__.co_filename)
    file.write_text(file.read_text().replace(".tanh()", ".sigmoid()"))
    assert recognised(cls) is None  # what runs is not what the file says
    upstream = cls_of("qwen3_5").forward

    @functools.wraps(upstream)
    def theirs(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return upstream(self, *args, **kwargs)

    monkeypatch.setattr(cls_of("qwen3_5"), "forward", theirs)
    assert recognised(cls_of("qwen3_5")) is None
    accel.accelerate(TARGET)
    assert vars(cls_of("qwen3_5"))["forward"] is theirs


@UPSTREAM
def test_another_patcher_on_top_survives(launches: Counter[str]) -> None:
    layer, x, cls = layer_of(), inputs(), cls_of("qwen3_5")
    upstream = vars(cls)["forward"]
    want = layer(x)
    on()
    ours = vars(cls)["forward"]

    @functools.wraps(ours)
    def theirs(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return ours(self, *args, **kwargs)

    cls.forward = theirs
    try:
        torch.testing.assert_close(layer(x), want)
        assert sum(STATE.served.values()) == 1
        accel.restore()
        assert vars(cls)["forward"] is theirs and "Qwen3_5GatedDeltaNet.forward" in STATE.left[0]
        assert torch.equal(layer(x), want) and sum(launches.values()) == 3
    finally:
        cls.forward = upstream


def test_explain_asks_the_modules_own_class() -> None:
    on()
    for folder in CLASSES:
        assert "CPU tensors" in reason(accel.explain(TARGET, layer_of(folder), inputs()))


# --- Facts and plans ------------------------------------------------------------------------------------------------


def moved(layer: Any, fake_cuda: Any, dtype: torch.dtype = torch.bfloat16) -> Any:
    """The layer with fake CUDA parameters of its own shapes."""
    for part in layer.modules():
        for name, parameter in list(part._parameters.items()):
            if parameter is not None:
                part._parameters[name] = nn.Parameter(fake_cuda.empty(*parameter.shape, dtype=dtype), False)
    return layer


@pytest.fixture
def certified(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kernel has a certificate."""
    monkeypatch.setattr(certificates, "check", lambda choice, arch, uncertified=None: None)


REAL = {"linear_key_head_dim": 128, "linear_value_head_dim": 128}


@EACH
def test_a_prompt_and_a_token_on_a_gpu(folder: str, fake_cuda: Any, certified: None) -> None:
    """With whatever functions transformers froze into the module: FLA's where that is installed."""
    layer, call = moved(layer_of(folder, **REAL), fake_cuda), on(folder)
    decision, key = call.decide(
        (layer,), {"hidden_states": fake_cuda.empty(2, 9, HIDDEN), "position_ids": None}, "sm_90"
    )
    assert isinstance(decision, Choice) and key is not None
    assert (decision.family, decision.kernel) == ("gated_delta_rule", "sm90_fwd")
    assert str(decision) == "gated_delta_rule.sm90_fwd (with causal_conv1d.any_fwd and norm.any_fwd)"
    cache = DynamicCache(config=config_of(folder, **REAL))
    own = cache.layers[0]
    with fake_cuda.mode:
        channels = 2 * 2 * 128 + 4 * 128
        own.lazy_initialization(conv_states=fake_cuda.empty(2, channels, 4), conv_kernel_size=4)
        own.lazy_initialization(recurrent_states=fake_cuda.empty(2, 4, 128, 128, dtype=torch.float32))
    own.has_previous_state[0] = True
    decision, key = call.decide((layer, fake_cuda.empty(2, 1, HIDDEN), cache), {}, "sm_90")
    assert str(decision) == "gated_delta_rule.any_recurrent (with causal_conv1d.any_update and norm.any_fwd)"
    facts = key[0]
    assert facts.conv.mode == "update" and facts.conv.n_channels == channels and facts.conv.state_len == 4
    assert facts.rule.mode == "recurrent" and facts.rule.use_gate and facts.rule.n_value_heads == 4
    assert facts.rule.allow_neg_eigval == (folder == "olmo_hybrid")
    assert facts.norm.hidden == 128 and facts.norm.activation == "silu"
    assert call.decide((layer, fake_cuda.empty(2, 1, HIDDEN), cache), {}, "sm_90")[0] is decision


def test_tokens_are_not_facts(fake_cuda: Any) -> None:
    layer, call = moved(layer_of(**REAL), fake_cuda), on()
    facts = {call.adapter.facts(layer, fake_cuda.empty(b, t, HIDDEN))[0] for b, t in ((1, 2), (2, 3), (5, 700))}
    assert len(facts) == 1


@pytest.mark.parametrize("family", ["causal_conv1d", "gated_delta_rule", "norm"])
def test_each_kernel_needs_its_certificate(family: str, fake_cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def check(choice: Choice, arch: str, uncertified: bool | None = None) -> Declined | None:
        return Declined(f"{choice.family}.{choice.kernel} has none") if choice.family == family else None

    monkeypatch.setattr(certificates, "check", check)
    decision, _ = on().decide((moved(layer_of(**REAL), fake_cuda), fake_cuda.empty(2, 9, HIDDEN)), {}, "sm_90")
    assert reason(decision).startswith(f"{family}.") and reason(decision).endswith("has none")


def test_what_the_families_decline(fake_cuda: Any, certified: None) -> None:
    call, x = on(), fake_cuda.empty(2, 9, HIDDEN)

    def declined(dtype: torch.dtype = torch.bfloat16, arch: str = "sm_90", **options: Any) -> str:
        layer = moved(layer_of(**REAL | options), fake_cuda, dtype)
        return reason(call.decide((layer, x.to(dtype)), {}, arch)[0])

    assert "dtype=float64" in declined(torch.float64)
    assert "for sm_75" in declined(arch="sm_75")
    assert "sm_100" in declined(arch="sm_100")
    assert "head_dim=32" in declined(linear_key_head_dim=32)
    assert "width=5" in declined(linear_conv_kernel_dim=5)
    assert "value heads=3 is not a multiple" in declined(linear_num_value_heads=3)
    layer = moved(layer_of(**REAL), fake_cuda)
    for wants in (layer.A_log, x):
        wants.requires_grad_()
        assert "a gradient is needed" in reason(call.decide((layer, x), {}, "sm_90")[0])
        with torch.no_grad():
            assert isinstance(call.decide((layer, x), {}, "sm_90")[0], Choice)
        wants.requires_grad_(False)


# --- Declined: the call ---------------------------------------------------------------------------------------------


def same(layer: Any, *args: Any, expected: str, **kwargs: Any) -> None:
    """The call declines for the reason and is upstream's, result or error, bit for bit."""

    def run() -> Any:
        try:
            return layer(*args, **kwargs)
        except Exception as error:
            return type(error), str(error)

    theirs = run()
    on()
    ours = run()
    assert STATE.declined == {expected: 1} and not STATE.served
    assert torch.equal(ours, theirs) if isinstance(theirs, torch.Tensor) else ours == theirs


@UPSTREAM
def test_calls_that_do_not_fit() -> None:
    layer, x = layer_of(), inputs()
    misfit = "the arguments do not fit the signature"
    name = on().adapter.names[0]
    accel.restore()
    assert name == "hidden_states"
    same(layer, x, None, None, 3, expected=misfit)
    same(layer, x, hidden_states=x, expected=misfit)
    same(layer, None, expected="hidden_states is None")
    same(layer, expected="hidden_states is None")
    same(layer, x[0], expected="hidden_states is [7, 48]")
    same(layer, x[:, :0], expected="hidden_states is [2, 0, 48]")
    same(layer, "text", expected="hidden_states is a str, not a plain tensor")
    same(layer, x.as_subclass(Sub), expected="hidden_states is a Sub, not a plain tensor")


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
def test_keywords_that_reach_a_function(keywords: dict[str, Any], expected: str) -> None:
    same(layer_of(), inputs(), expected=expected, **keywords)


@UPSTREAM
def test_keywords_that_reach_none_are_dropped() -> None:
    layer, x = layer_of(), inputs()
    want = layer(x)
    on()
    torch.testing.assert_close(layer(x, cu_seq_lens_q=None, seq_idx=None, position_ids=x, use_cache=True), want)
    assert not STATE.declined


@UPSTREAM
def test_the_deprecated_name_of_the_cache() -> None:
    layer, x = layer_of(), inputs()
    if on().adapter.names[1] == "cache_params":
        return  # the release's own name
    accel.restore()
    want = layer(x, DynamicCache(config=config_of("qwen3_5")))
    on()
    assert torch.equal(layer(x, cache_params=DynamicCache(config=config_of("qwen3_5"))), want)
    assert STATE.declined == {"cache_params: upstream hands it on": 1}


@UPSTREAM
def test_autocast() -> None:
    layer, x = layer_of(), inputs()
    with torch.autocast("cpu", torch.bfloat16):
        same(layer, x, expected="autocast casts float32 to bfloat16")
    layer.bfloat16()
    on()
    with torch.autocast("cpu", torch.bfloat16):
        layer(x.bfloat16())
    assert not STATE.declined


@UPSTREAM
def test_a_mask_that_makes_the_batch_larger() -> None:
    same(
        layer_of(), inputs(batch=1), None, torch.ones(2, 7), expected="the mask makes hidden_states a Tensor [2, 7, 48]"
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
def test_modules_that_are_more_than_their_class(prepare: Callable[[Any], Any], expected: str) -> None:
    layer = layer_of()
    prepare(layer)
    same(layer, inputs(), expected=expected)


@UPSTREAM
def test_a_convolution_of_other_shape() -> None:
    """As a model split over devices has it."""
    layer = layer_of()
    layer.conv1d.weight = nn.Parameter(layer.conv1d.weight[:80].clone(), False)
    same(layer, inputs(), expected="conv1d.weight is [80, 1, 4], not [160, 1, W]")


@UPSTREAM
def test_global_hooks() -> None:
    layer = layer_of()
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, out: out * 2)
    try:
        same(layer, inputs(), expected="global module hooks are registered")
    finally:
        handle.remove()


@UPSTREAM
def test_a_norm_class_that_somebody_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, cls = layer_of(), module_of("qwen3_5").Qwen3_5RMSNormGated
    ours = "norm is a Qwen3_5RMSNormGated, no gated norm of a canonical form"
    before = cls.forward
    with monkeypatch.context() as patched:
        patched.setattr(cls, "forward", lambda self, x, gate: before(self, x, gate) * 2)
        same(layer, inputs(), expected=ours)
        accel.restore()
    accel.accelerate("transformers.rms_norm_gated")  # with the norm's own target below, the foreign layer counts too
    wrapper = cls.forward
    on()
    layer(inputs())
    assert sum(STATE.served.values()) == 1

    @functools.wraps(wrapper)
    def theirs(self: Any, x: Any, gate: Any) -> Any:
        return wrapper(self, x, gate) * 2

    cls.forward = theirs
    try:
        layer(inputs())
        assert STATE.declined == {ours: 1}
    finally:
        cls.forward = before


@UPSTREAM
@pytest.mark.parametrize("name", gated_delta_net.FUNCTIONS)
def test_a_function_that_somebody_replaced(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, layer = module_of("qwen3_5"), layer_of()
    held = vars(module)[name]

    def theirs(*args: Any, **kwargs: Any) -> Any:
        return held(*args, **kwargs)

    monkeypatch.setattr(module, name, theirs)
    same(layer, inputs(), expected=f"{name} was replaced")
    monkeypatch.setattr(module, name, held)
    on()
    layer(inputs())
    assert not STATE.declined
    accel.accelerate("transformers.gated_delta_rule")
    accel.accelerate("transformers.causal_conv1d")
    STATE.reset_counters()
    layer(inputs())
    assert not STATE.declined
    theirs.__wrapped__ = vars(module)[name]  # type: ignore[attr-defined]  # around ours
    monkeypatch.setattr(module, name, theirs)
    layer(inputs())
    assert STATE.declined == {f"{name} was replaced": 1}
    monkeypatch.setattr(module, name, theirs.__wrapped__)  # type: ignore[attr-defined]


def test_an_unknown_package_computes(monkeypatch: pytest.MonkeyPatch, torch_functions: None, launches: Any) -> None:
    module, layer = module_of("qwen3_5"), layer_of()
    from transformers.integrations.hub_kernels import use_kernel_func_from_hub_with_fallback

    def reference(query: Any) -> Any:
        raise AssertionError

    made = use_kernel_func_from_hub_with_fallback("sqrt", "math")(reference)
    monkeypatch.setattr(module, "torch_chunk_gated_delta_rule", made)
    on()
    with pytest.raises(TypeError):
        layer(inputs())
    assert STATE.declined == {"torch_chunk_gated_delta_rule was replaced": 1}


@UPSTREAM
def test_hub_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hugging Face's kernels make modules of the functions, and put a kernel where the module's forward is."""
    module, layer, x = module_of("qwen3_5"), layer_of(), inputs()
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
    on()
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


# --- Served all the same --------------------------------------------------------------------------------------------


class Lora(nn.Linear):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__(base.in_features, base.out_features, bias=False)
        self.weight = base.weight
        self.added = nn.Parameter(torch.randn(base.out_features, base.in_features) / 8, False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + nn.functional.linear(x, self.added)


@UPSTREAM
@EACH
def test_layers_of_any_kind_for_projections(folder: str) -> None:
    layer, x = layer_of(folder), inputs()
    names = [name for name, part in layer.named_children() if isinstance(part, nn.Linear)]
    assert len(names) >= 3
    for name in names:
        setattr(layer, name, Lora(getattr(layer, name)))
    calls: Counter[str] = Counter()
    for name in names:
        getattr(layer, name).register_forward_hook(
            lambda module, args, out, name=name: calls.update([name]) or out * 1.5
        )
    want = layer(x)
    on(folder)
    torch.testing.assert_close(layer(x), want, rtol=1e-4, atol=1e-5)
    assert sum(STATE.served.values()) == 1 and calls == dict.fromkeys(names, 2)


@UPSTREAM
@EACH
@pytest.mark.parametrize("change", ["strided", "bias", "heads"])
def test_layouts(folder: str, change: str) -> None:
    """Projections whose results are not contiguous, a convolution with a bias, one value head per key head."""
    layer, x = layer_of(folder, **({"linear_num_value_heads": 2} if change == "heads" else {})), inputs()
    if change == "strided":
        for part in layer.children():
            if isinstance(part, nn.Linear):
                part.register_forward_hook(lambda module, args, out: torch.cat([out, out], 1)[:, ::2].flip(1))
    if change == "bias":
        layer.conv1d.bias = nn.Parameter(torch.randn(layer.conv_dim), False)
    want = layer(x)
    on(folder)
    torch.testing.assert_close(layer(x), want, rtol=1e-4, atol=1e-5)
    assert sum(STATE.served.values()) == 1 and not STATE.declined


@UPSTREAM
def test_projections_that_return_something_else() -> None:
    """Seen only when they have run: upstream then runs them again."""
    layer, x = layer_of(), inputs()
    handle = layer.in_proj_z.register_forward_hook(lambda module, args, out: out.as_subclass(Sub))
    same(layer, x, expected="in_proj_z returned a Sub [2, 7, 96], not a tensor [2, 7, 96]")
    handle.remove()
    accel.restore()
    layer.in_proj_z.register_forward_hook(lambda module, args, out: out.double())
    same(layer, x, expected="projections of torch.float32 return torch.float32 and torch.float64")


# --- Caches ---------------------------------------------------------------------------------------------------------


@UPSTREAM
@EACH
@pytest.mark.parametrize("broken", ["conv", "rule", "norm"])
def test_a_kernel_that_cannot_be_loaded_leaves_the_cache_as_it_is(
    folder: str, broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, x = layer_of(folder), inputs(1)
    caches = [cache_of(layer, folder) for _ in range(3)]
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
        on(folder)
        with torch.no_grad():
            assert torch.equal(layer(x, cache), want)
        assert len(STATE.declined) == 1 and not STATE.served
        accel.restore()
        assert all(torch.equal(a, b) for a, b in zip(held(cache), held(caches[0]), strict=True))


@UPSTREAM
def test_the_first_token_of_a_configuration_works_on_copies() -> None:
    layer, call = layer_of(), None
    caches = [cache_of(layer) for _ in range(2)]
    want = [layer(inputs(1), caches[0]) for _ in range(3)]
    call = on()
    call.adapter._loaded.clear()
    for expected in want:
        torch.testing.assert_close(layer(inputs(1), caches[1]), expected, rtol=1e-4, atol=1e-5)
    assert len(call.adapter._loaded) == 1 and sum(STATE.served.values()) == 3
    for a, b in zip(held(caches[1]), held(caches[0]), strict=True):
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
def test_caches_that_are_declined(change: Callable[[Any], None], expected: str) -> None:
    layer = layer_of()
    caches = [cache_of(layer) for _ in range(2)]
    results = []
    for cache in caches:
        change(cache)
        if cache is caches[1]:
            on()
        try:
            with torch.no_grad():
                results.append(layer(inputs(1), cache))
        except Exception as error:
            results.append(f"{type(error)} {error}")
    assert STATE.declined == {expected: 1} and not STATE.served
    theirs, ours = results
    assert torch.equal(ours, theirs) if isinstance(theirs, torch.Tensor) else ours == theirs
    if isinstance(theirs, torch.Tensor):
        assert all(torch.equal(a, b) for a, b in zip(held(caches[1]), held(caches[0]), strict=True))


@UPSTREAM
def test_a_cache_of_inference_mode_outside_of_it() -> None:
    layer = layer_of()
    with torch.inference_mode():
        cache = cache_of(layer)
    on()
    with pytest.raises(RuntimeError, match="InferenceMode"):
        layer(inputs(1), cache)
    assert len(STATE.declined) == 1 and "made in inference mode" in next(iter(STATE.declined))


@UPSTREAM
def test_a_release_that_asks_the_last_layer() -> None:
    """OLMo hybrid up to transformers 5.20 goes by whether the cache's last layer has seen tokens."""
    layer = layer_of("olmo_hybrid")
    call = on("olmo_hybrid")
    assert call.adapter.layout.whole_cache == ("has_previous_state()" in inspect.getsource(call.original))
    two = config_of("olmo_hybrid", num_hidden_layers=3, layer_types=["linear_attention"] * 2 + ["full_attention"])
    accel.restore()
    caches = [DynamicCache(config=two) for _ in range(2)]
    want = [layer(inputs(n), caches[0]) for n in (3, 1)]
    on("olmo_hybrid")
    for n, expected in zip((3, 1), want, strict=True):
        torch.testing.assert_close(layer(inputs(n), caches[1]), expected, rtol=1e-4, atol=1e-5)
    assert len(STATE.declined) == call.adapter.layout.whole_cache


# --- Compiled, traced, counted --------------------------------------------------------------------------------------


@UPSTREAM
def test_compiled_code_traces_upstreams_own(launches: Counter[str]) -> None:
    layer, x = layer_of(), inputs()
    want = layer(x)
    on()
    got = torch.compile(layer, backend="eager", fullgraph=True)(x)
    torch.testing.assert_close(got, want)
    assert not launches and not STATE.served and not STATE.declined


@UPSTREAM
def test_a_dispatch_mode_sees_upstreams_operators(launches: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    layer, x = layer_of(), inputs()
    call = on()
    monkeypatch.setattr(call.adapter, "plan", lambda facts, arch: Choice("gated_delta_rule", "sm90_fwd", facts))
    monkeypatch.setattr(certificates, "check", lambda choice, arch, uncertified=None: None)
    with Watching():
        layer(x)
    assert STATE.declined == {"a torch dispatch mode is active": 1} and not launches


@UPSTREAM
def test_checkpointing_takes_one_route(launches: Counter[str]) -> None:
    layer, x = layer_of().requires_grad_(), inputs().requires_grad_()
    (want,) = torch.autograd.grad(layer(x).sum(), x)
    on()
    for reentrant in (False, True):
        out = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=reentrant)
        (got,) = torch.autograd.grad(out.sum(), x) if not reentrant else (_backward(out, x),)
        torch.testing.assert_close(got, want)


def _backward(out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    out.sum().backward()
    assert x.grad is not None
    return x.grad


@UPSTREAM
@EACH
def test_the_host_does_little_for_a_token(folder: str) -> None:
    """Python functions of ours that a served token runs through, which is what its host time goes by."""
    layer = layer_of(folder)
    cache = cache_of(layer, folder)
    on(folder)
    ours = tuple(str(Path(found.__file__).parent) for found in (accel, gated_delta_net))
    seen: Counter[str] = Counter()

    def profile(frame: Any, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(ours):
            seen[f"{Path(frame.f_code.co_filename).name}: {frame.f_code.co_name}"] += 1

    with torch.no_grad():
        for _ in range(2):
            layer(inputs(1), cache)
        sys.setprofile(profile)
        layer(inputs(1), cache)
        sys.setprofile(None)
    assert 20 < sum(seen.values()) < 60, seen
