"""transformers.gated_delta_net: what is recognised and replaced, how calls are read, every reason to decline.

Upstream is transformers' own torch path, and plain torch is in the place of the kernels; what declines must be
upstream's result bit for bit, caches included.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import DynamicCache

import accel
from accel import certificates, testing
from accel.outcome import Choice, Declined
from accel.patches.transformers import gated_delta_net
from accel.patches.transformers.gated_delta_layouts import LAYOUTS, recognised
from accel.state import STATES

TARGET, SEED, HIDDEN = "transformers.gated_delta_net", 20261201, 48
STATE = STATES[TARGET]
FOLDERS = ("qwen3_next", "qwen3_5", "qwen3_5_moe", "olmo_hybrid")
EACH = pytest.mark.parametrize("folder", FOLDERS)
UPSTREAM = pytest.mark.usefixtures("torch_functions", "launches")


def reason(decision: Choice | Declined) -> str:
    assert isinstance(decision, Declined), decision
    return decision.reason


# --- Recognised, replaced and put back ------------------------------------------------------------------------------


def test_which_classes_are_recognised(nets: Any) -> None:
    found = set()
    for folder in ("qwen3_next", "qwen3_5", "qwen3_5_moe", "olmo_hybrid", "qwen4_exp", "kimi_linear", "llama"):
        module = nets.module_of(folder)
        found |= {n for n, cls in vars(module).items() if isinstance(cls, type) and recognised(cls) is not None}
    assert found == {nets.cls_of(folder).__name__ for folder in FOLDERS} | {"Qwen4ExpTextGatedDeltaNet"}
    assert len(LAYOUTS) == 12


def test_restore_gives_back_the_very_same_objects(nets: Any) -> None:
    for folder in FOLDERS:
        nets.module_of(folder)
    before = testing.snapshot(("transformers",))
    upstream = {folder: vars(nets.cls_of(folder))["forward"] for folder in FOLDERS}
    accel.accelerate(TARGET)
    for folder, forward in upstream.items():
        wrapper = vars(nets.cls_of(folder))["forward"]
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


def remade(nets: Any, folder: str, tmp_path: Path, change: Callable[[str], str]) -> Any:
    """The class anew, of changed source, in a file of its own."""
    module, name = nets.module_of(folder), nets.cls_of(folder).__name__
    source = change(inspect.getsource(nets.cls_of(folder)))
    source = source[source.index(f"class {name}") :]  # without the decorator, which wraps __init__
    file = tmp_path / f"theirs_{abs(hash(source))}.py"
    file.write_text(source)
    space = dict(vars(module))
    exec(compile(source, str(file), "exec"), space)
    return space[name]


@EACH
def test_recognition_is_blind_to_what_is_not_computed(nets: Any, folder: str, tmp_path: Path) -> None:
    def change(source: str) -> str:
        return source.replace("        beta =", "        # a comment\n\n        beta  =  (\n           ", 1).replace(
            ".sigmoid()\n", ".sigmoid()\n        )\n", 1
        )

    assert recognised(remade(nets, folder, tmp_path, lambda source: source)) is not None
    assert recognised(remade(nets, folder, tmp_path, change)) is not None


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
def test_look_alikes_are_left_alone(nets: Any, folder: str, old: str, new: str, tmp_path: Path) -> None:
    def change(source: str) -> str:
        assert old in source
        return source.replace(old, new)

    assert recognised(remade(nets, folder, tmp_path, change)) is None


def test_another_order_of_the_projections_is_left_alone(nets: Any, tmp_path: Path) -> None:
    def change(source: str) -> str:
        return source.replace("b, a = torch.split(mixed_ba", "a, b = torch.split(mixed_ba")

    assert recognised(remade(nets, "qwen3_next", tmp_path, change)) is None


def test_edited_files_and_foreign_wrappers_are_left_alone(
    nets: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cls = remade(nets, "qwen3_5", tmp_path, lambda source: source.replace(".sigmoid()", ".tanh()"))
    file = Path(inspect.unwrap(cls.forward).__code__.co_filename)
    file.write_text(file.read_text().replace(".tanh()", ".sigmoid()"))
    assert recognised(cls) is None  # what runs is not what the file says
    upstream = nets.cls_of("qwen3_5").forward

    @functools.wraps(upstream)
    def theirs(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return upstream(self, *args, **kwargs)

    monkeypatch.setattr(nets.cls_of("qwen3_5"), "forward", theirs)
    assert recognised(nets.cls_of("qwen3_5")) is None
    accel.accelerate(TARGET)
    assert vars(nets.cls_of("qwen3_5"))["forward"] is theirs


@UPSTREAM
def test_another_patcher_on_top_survives(nets: Any, launches: Counter[str]) -> None:
    layer, x, cls = nets.layer_of(), nets.inputs(), nets.cls_of("qwen3_5")
    upstream = vars(cls)["forward"]
    want = layer(x)
    nets.on()
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


def test_explain_asks_the_modules_own_class(nets: Any) -> None:
    nets.on()
    for folder in FOLDERS:
        assert "CPU tensors" in reason(accel.explain(TARGET, nets.layer_of(folder), nets.inputs()))


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
def test_a_prompt_and_a_token_on_a_gpu(nets: Any, folder: str, fake_cuda: Any, certified: None) -> None:
    """With whatever functions transformers froze into the module: FLA's where that is installed."""
    layer, call = moved(nets.layer_of(folder, **REAL), fake_cuda), nets.on(folder)
    decision, key = call.decide(
        (layer,), {"hidden_states": fake_cuda.empty(2, 9, HIDDEN), "position_ids": None}, "sm_90"
    )
    assert isinstance(decision, Choice) and key is not None
    assert (decision.family, decision.kernel) == ("gated_delta_rule", "sm90_fwd")
    assert str(decision) == "gated_delta_rule.sm90_fwd (with causal_conv1d.any_fwd and norm.any_fwd)"
    cache = DynamicCache(config=nets.config_of(folder, **REAL))
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


def test_tokens_are_not_facts(nets: Any, fake_cuda: Any) -> None:
    layer, call = moved(nets.layer_of(**REAL), fake_cuda), nets.on()
    facts = {call.adapter.facts(layer, fake_cuda.empty(b, t, HIDDEN))[0] for b, t in ((1, 2), (2, 3), (5, 700))}
    assert len(facts) == 1


@pytest.mark.parametrize("family", ["causal_conv1d", "gated_delta_rule", "norm"])
def test_each_kernel_needs_its_certificate(
    nets: Any, family: str, fake_cuda: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(choice: Choice, arch: str, uncertified: bool | None = None) -> Declined | None:
        return Declined(f"{choice.family}.{choice.kernel} has none") if choice.family == family else None

    monkeypatch.setattr(certificates, "check", check)
    decision, _ = nets.on().decide(
        (moved(nets.layer_of(**REAL), fake_cuda), fake_cuda.empty(2, 9, HIDDEN)), {}, "sm_90"
    )
    assert reason(decision).startswith(f"{family}.") and reason(decision).endswith("has none")


def test_what_the_families_decline(nets: Any, fake_cuda: Any, certified: None) -> None:
    call, x = nets.on(), fake_cuda.empty(2, 9, HIDDEN)

    def declined(dtype: torch.dtype = torch.bfloat16, arch: str = "sm_90", **options: Any) -> str:
        layer = moved(nets.layer_of(**REAL | options), fake_cuda, dtype)
        return reason(call.decide((layer, x.to(dtype)), {}, arch)[0])

    assert "dtype=float64" in declined(torch.float64)
    assert "for sm_75" in declined(arch="sm_75")
    assert "head_dim=32" in declined(linear_key_head_dim=32)
    assert "width=5" in declined(linear_conv_kernel_dim=5)
    assert "value heads=3 is not a multiple" in declined(linear_num_value_heads=3)
    layer = moved(nets.layer_of(**REAL), fake_cuda)
    for wants in (layer.A_log, x):
        wants.requires_grad_()
        assert "a gradient is needed" in reason(call.decide((layer, x), {}, "sm_90")[0])
        with torch.no_grad():
            assert isinstance(call.decide((layer, x), {}, "sm_90")[0], Choice)
        wants.requires_grad_(False)


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
def test_layers_of_any_kind_for_projections(nets: Any, folder: str) -> None:
    layer, x = nets.layer_of(folder), nets.inputs()
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
    nets.on(folder)
    torch.testing.assert_close(layer(x), want, rtol=1e-4, atol=1e-5)
    assert sum(STATE.served.values()) == 1 and calls == dict.fromkeys(names, 2)


@UPSTREAM
@EACH
@pytest.mark.parametrize("change", ["strided", "bias", "heads"])
def test_layouts(nets: Any, folder: str, change: str) -> None:
    """Projections whose results are not contiguous, a convolution with a bias, one value head per key head."""
    layer, x = nets.layer_of(folder, **({"linear_num_value_heads": 2} if change == "heads" else {})), nets.inputs()
    if change == "strided":
        for part in layer.children():
            if isinstance(part, nn.Linear):
                part.register_forward_hook(lambda module, args, out: torch.cat([out, out], 1)[:, ::2].flip(1))
    if change == "bias":
        layer.conv1d.bias = nn.Parameter(torch.randn(layer.conv_dim), False)
    want = layer(x)
    nets.on(folder)
    torch.testing.assert_close(layer(x), want, rtol=1e-4, atol=1e-5)
    assert sum(STATE.served.values()) == 1 and not STATE.declined


# --- Compiled, traced, counted --------------------------------------------------------------------------------------


@UPSTREAM
def test_compiled_code_traces_upstreams_own(nets: Any, launches: Counter[str]) -> None:
    layer, x = nets.layer_of(), nets.inputs()
    want = layer(x)
    nets.on()
    got = torch.compile(layer, backend="eager", fullgraph=True)(x)
    torch.testing.assert_close(got, want)
    assert not launches and not STATE.served and not STATE.declined


@UPSTREAM
def test_a_dispatch_mode_sees_upstreams_operators(
    nets: Any, launches: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    layer, x = nets.layer_of(), nets.inputs()
    call = nets.on()
    monkeypatch.setattr(call.adapter, "plan", lambda facts, arch: Choice("gated_delta_rule", "sm90_fwd", facts))
    monkeypatch.setattr(certificates, "check", lambda choice, arch, uncertified=None: None)
    with Watching():
        layer(x)
    assert STATE.declined == {"a torch dispatch mode is active": 1} and not launches


@UPSTREAM
def test_checkpointing_takes_one_route(nets: Any, launches: Counter[str]) -> None:
    layer, x = nets.layer_of().requires_grad_(), nets.inputs().requires_grad_()
    (want,) = torch.autograd.grad(layer(x).sum(), x)
    nets.on()
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
def test_the_host_does_little_for_a_token(nets: Any, folder: str) -> None:
    """Python functions of ours that a served token runs through, which is what its host time goes by."""
    layer = nets.layer_of(folder)
    cache = nets.cache_of(layer, folder)
    nets.on(folder)
    ours = tuple(str(Path(found.__file__).parent) for found in (accel, gated_delta_net))
    seen: Counter[str] = Counter()

    def profile(frame: Any, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(ours):
            seen[f"{Path(frame.f_code.co_filename).name}: {frame.f_code.co_name}"] += 1

    with torch.no_grad():
        for _ in range(2):
            layer(nets.inputs(1), cache)
        sys.setprofile(profile)
        layer(nets.inputs(1), cache)
        sys.setprofile(None)
    assert 20 < sum(seen.values()) < 60, seen
