"""transformers.causal_conv1d: what is replaced, how calls are read, every reason to decline, what is returned."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import pytest
import torch

import accel
from accel import serve
from accel.kernels.causal_conv1d import launch, portable
from accel.kernels.causal_conv1d.cases import CASES
from accel.kernels.causal_conv1d.facts import ConvFacts
from accel.outcome import Choice, Decline
from accel.patches.transformers import conv
from accel.patches.transformers.linear_attention import Upstream
from accel.state import STATES

MODELS = ("qwen3_next", "qwen3_5", "olmo_hybrid", "kimi_linear", "mamba2", "lfm2")
TARGET = "transformers.causal_conv1d"


def module_of(name: str) -> ModuleType:
    return importlib.import_module(f"transformers.models.{name}.modeling_{name}")


@pytest.fixture(autouse=True)
def _restored() -> Any:
    yield
    accel.restore()


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU tensors pass for a GPU's, and plain torch for the kernels."""
    monkeypatch.setattr(conv.checks, "not_on_cpu", lambda device: None)

    def forward(x: Any, weight: Any, bias: Any = None, activation: Any = None) -> Any:
        return portable.causal_conv1d(x, weight, bias, activation, None, False, None)

    def update(x: Any, state: Any, weight: Any, bias: Any = None, activation: Any = None) -> Any:
        return portable.causal_conv1d_update(x.mT, state, weight, bias, activation)

    monkeypatch.setattr(launch, "forward", forward)
    monkeypatch.setattr(launch, "update", update)


def adapter(kind: type[Any], model: str = "qwen3_next") -> Any:
    name = "causal_conv1d_fn" if kind is conv.CausalConv1d else "causal_conv1d_update"
    found = Upstream.of(vars(module_of(model))[name])
    assert found is not None and found.is_reference
    return kind(found)


def inputs(tokens: int = 9, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    print("seed 0")
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(2, tokens, 16, generator=draw).to(dtype).mT
    return {"hidden_states": x, "weight": torch.randn(16, 4, generator=draw).to(dtype)}


@pytest.mark.parametrize("model", MODELS)
def test_both_globals_are_replaced_and_restored(model: str) -> None:
    module = module_of(model)
    names = ("causal_conv1d_fn", "causal_conv1d_update")
    before = [vars(module)[name] for name in names]
    accel.accelerate(TARGET)
    for name in names:
        assert serve.wrapped_call(vars(module)[name], STATES[TARGET]) is not None
    accel.restore()
    assert all(vars(module)[name] is held for name, held in zip(names, before, strict=True))


def test_cpu_calls_go_upstream_and_are_counted() -> None:
    module = module_of("qwen3_next")
    call = inputs()
    want = module.causal_conv1d_fn(**call, activation="silu")
    accel.accelerate(TARGET)
    assert torch.equal(module.causal_conv1d_fn(**call, activation="silu", position_ids=None), want)
    assert STATES[TARGET].declined


@pytest.mark.parametrize("activation", [None, "silu", "swish"])
@pytest.mark.parametrize("bias", [False, True])
def test_served_calls_give_what_upstream_gives(on_gpu: None, activation: str | None, bias: bool) -> None:
    module, call = module_of("qwen3_next"), inputs()
    call["bias"] = torch.randn(16, generator=torch.Generator().manual_seed(1)) if bias else None
    served = adapter(conv.CausalConv1d)
    facts, device = served.facts(**call, activation=activation, use_cache=True)
    assert facts.activation == (activation and "silu") and device.type == "cpu"
    choice = served.plan(facts, "sm_90")
    assert choice == Choice("causal_conv1d", "any_fwd")
    out = served.run(choice, **call, activation=activation, use_cache=True)
    want = module.causal_conv1d_fn(**call, activation=activation)
    torch.testing.assert_close(out, want)
    assert out.shape == want.shape and out.mT.is_contiguous()


def test_a_served_update_moves_the_state_as_upstream_does(on_gpu: None) -> None:
    module, call = module_of("mamba2"), inputs(1)
    state = torch.randn(2, 16, 4, generator=torch.Generator().manual_seed(2))
    theirs = state.clone()
    served = adapter(conv.CausalConv1dUpdate, "mamba2")
    facts, _ = served.facts(call["hidden_states"], state, call["weight"], None, "silu")
    choice = served.plan(facts, "sm_90")
    assert choice == Choice("causal_conv1d", "any_update") and served.in_place
    out = served.run(choice, call["hidden_states"], state, call["weight"], None, "silu")
    torch.testing.assert_close(
        out, module.causal_conv1d_update(call["hidden_states"], theirs, call["weight"], None, "silu")
    )
    assert torch.equal(state, theirs)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"activation": "gelu"}, "activation='gelu'"),
        ({"cu_seqlens": torch.tensor([0, 9])}, "cu_seqlens: without causal_conv1d"),
        ({"seq_idx": torch.zeros(2, 9)}, "seq_idx: without causal_conv1d"),
        ({"hidden_states": torch.randn(16, 9)}, "hidden_states is .16, 9., the weight .16, 4."),
        ({"hidden_states": torch.randn(2, 16, 0)}, "hidden_states is .2, 16, 0."),
        ({"weight": torch.randn(8, 4)}, "hidden_states is .2, 16, 9., the weight .8, 4."),
        ({"bias": torch.randn(8)}, "the bias is .8."),
        ({"bias": torch.randn(16).double()}, "the bias is .16. torch.float64"),
    ],
)
def test_reasons_to_decline(on_gpu: None, changed: dict[str, Any], reason: str) -> None:
    with pytest.raises(Decline, match=reason):
        adapter(conv.CausalConv1d).facts(**(inputs() | changed))


def test_states_that_are_declined(on_gpu: None) -> None:
    served, call = adapter(conv.CausalConv1dUpdate), inputs(1)
    x, weight = call["hidden_states"], call["weight"]
    with pytest.raises(Decline, match="conv_state is no"):
        served.facts(x, None, weight)
    with pytest.raises(Decline, match=r"conv_state is .1, 16, 4."):
        served.facts(x, torch.zeros(1, 16, 4), weight)
    with pytest.raises(Decline, match="seq_idx"):
        served.facts(x, torch.zeros(2, 16, 4), weight, seq_idx=x)


def test_autocast_and_gradients(on_gpu: None) -> None:
    served, call = adapter(conv.CausalConv1d), inputs()
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(Decline, match=r"autocast to torch.bfloat16"):
        served.facts(**call)
    call["weight"].requires_grad_()
    assert served.facts(**call)[0].needs_grad
    with torch.no_grad():
        assert not served.facts(**call)[0].needs_grad


def test_a_hub_kernel_and_the_package_are_left_alone(on_gpu: None) -> None:
    class Kernelized(torch.nn.Module):
        pass

    chosen = Kernelized()
    chosen.forward = lambda: None  # type: ignore[method-assign]
    upstream = adapter(conv.CausalConv1d).upstream
    served = conv.CausalConv1d(Upstream(upstream.implementation, upstream.keywords, True, chosen))
    with pytest.raises(Decline, match="a hub kernel"):
        served.facts(**inputs())


def test_upstream_computes_the_cases_that_it_can() -> None:
    known = [case for case in CASES if conv.upstream(case) is not None and case.channels < 2000]
    assert {case.mode for case in known} == {"forward", "update"}
    for case in known:
        made = case.make("cpu", torch.Generator().manual_seed(3))
        want = case.oracle(made)
        got = conv.upstream(case)(made)
        assert set(got) == set(want)
        for name, x in got.items():
            torch.testing.assert_close(x.double(), want[name], rtol=3e-2, atol=6e-2)
    assert conv.upstream(next(case for case in CASES if case.packed)) is None


def test_facts_are_those_of_the_call(on_gpu: None) -> None:
    call = inputs(dtype=torch.bfloat16)
    facts = adapter(conv.CausalConv1d).facts(**call)[0]
    assert facts == ConvFacts("forward", "bfloat16", "bfloat16", 16, 4)
    call["hidden_states"] = call["hidden_states"].contiguous()
    assert not adapter(conv.CausalConv1d).facts(**call)[0].channels_last


MODEL = {"vocab_size": 99, "hidden_size": 64, "num_hidden_layers": 2}
ATTENTION = MODEL | {"intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
MAMBA2 = {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 2, "chunk_size": 16}


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("Mamba", MODEL | {"state_size": 8}),
        ("Mamba2", MODEL | MAMBA2),
        ("Lfm2", ATTENTION | {"layer_types": ["conv", "full_attention"]}),
    ],
)
def test_models_take_channels_that_lie_next_to_each_other(on_gpu: None, name: str, config: dict[str, Any]) -> None:
    """Logits and greedy tokens, every convolution served."""
    import transformers

    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**config)).eval()
    ids = torch.randint(1, 99, (2, 19))

    def results() -> tuple[torch.Tensor, torch.Tensor]:
        with torch.no_grad():
            tokens = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False, pad_token_id=0
            )  # fmt: skip
            return model(ids).logits, tokens

    want = results()
    accel.accelerate(TARGET)
    state = STATES[TARGET]
    state.served.clear()
    state.declined.clear()
    got = results()
    assert sum(state.served.values()) > 0 and not state.declined
    torch.testing.assert_close(got[0], want[0], rtol=1e-4, atol=1e-5)
    assert torch.equal(got[1], want[1])
