"""Whole transformers models, tiny and with random weights: logits, gradients and generated tokens under accel.

On a CPU nothing of a plain model is served, so it must not change by a bit. What hybrid models call for linear
attention is served by plain torch, and the value to compare with is transformers' own torch path: the functions that
it runs where FLA is not installed (with FLA installed a hybrid model raises "0 active drivers" on a CPU, before and
after).

On a GPU (`pytest -m gpu compat_tests/models`) everything certified is served, and upstream is upstream as it is.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import accel
from accel.testing import ERROR_RATIO, InDouble, accuracy, snapshot
from accel.verify import TOLERANCE

VOCABULARY, LENGTH, SEED = 128, 70, 20261130
DELTA_RULES = (
    "torch_chunk_gated_delta_rule",
    "torch_recurrent_gated_delta_rule",
    "chunk_kimi_delta_attention",
    "recurrent_kimi_delta_attention",
)


@dataclass(frozen=True)
class Model:
    """A model class with a tiny configuration; head sizes are such that the GPU kernels take them."""

    folder: str
    config: str
    cls: str
    hybrid: str | None  #: the target that serves its linear attention
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def module(self) -> ModuleType:
        return importlib.import_module(f"transformers.models.{self.folder}.modeling_{self.folder}")

    def build(self) -> nn.Module:
        torch.manual_seed(SEED)
        options = {
            "vocab_size": VOCABULARY,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 64,
            "initializer_range": 0.2,
            "pad_token_id": 0,
            "bos_token_id": None,
            "eos_token_id": None,
        }
        transformers = importlib.import_module("transformers")
        config = getattr(transformers, self.config)(**options | self.options)
        return getattr(self.module, self.cls)(config).eval()


_GDN = {
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "layer_types": ["linear_attention", "full_attention"],
}
#: Every expert is used: which experts a near tie picks would be luck.
_MOE = {
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_experts": 4,
    "num_experts_per_tok": 4,
}
MODELS = {
    "llama": Model("llama", "LlamaConfig", "LlamaForCausalLM", None),
    "qwen3": Model("qwen3", "Qwen3Config", "Qwen3ForCausalLM", None),
    "gemma3": Model("gemma3", "Gemma3TextConfig", "Gemma3ForCausalLM", None, {"sliding_window": 16}),
    "phi3": Model("phi3", "Phi3Config", "Phi3ForCausalLM", None),
    "qwen3_next": Model(
        "qwen3_next", "Qwen3NextConfig", "Qwen3NextForCausalLM", "transformers.gated_delta_rule", _GDN | _MOE
    ),
    "qwen3_5": Model("qwen3_5", "Qwen3_5TextConfig", "Qwen3_5ForCausalLM", "transformers.gated_delta_rule", _GDN),
    "olmo_hybrid": Model(
        "olmo_hybrid",
        "OlmoHybridConfig",
        "OlmoHybridForCausalLM",
        "transformers.gated_delta_rule",
        _GDN | {"linear_num_key_heads": 2},
    ),
    "kimi_linear": Model(
        "kimi_linear",
        "KimiLinearConfig",
        "KimiLinearForCausalLM",
        "transformers.kda",
        {
            "num_key_value_heads": 2,
            "moe_intermediate_size": 32,
            "num_local_experts": 4,
            "num_experts_per_tok": 4,
            "kv_lora_rank": 64,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 64,
            "v_head_dim": 64,
            "head_dim": 64,
            "linear_head_dim": 64,
            "linear_num_heads": 2,
            "layer_types": ["linear_attention", "full_attention"],
            "mlp_layer_types": ["dense", "sparse"],
        },
    ),
}


@dataclass
class Results:
    logits: torch.Tensor
    gradients: dict[str, torch.Tensor]


def tokens(device: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(SEED)
    return torch.randint(1, VOCABULARY, (2, LENGTH), generator=generator).to(device)


def results(model: nn.Module, inputs: torch.Tensor) -> Results:
    """Logits, and the gradient of a loss in every parameter."""
    model.zero_grad()
    logits = model(inputs, use_cache=False).logits
    loss = nn.functional.cross_entropy(logits[:, :-1].reshape(-1, VOCABULARY).double(), inputs[:, 1:].reshape(-1))
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return Results(logits.detach().clone(), gradients)


def equal(a: Results, b: Results) -> bool:
    """Bit for bit."""
    return torch.equal(a.logits, b.logits) and all(
        torch.equal(gradient, b.gradients[name]) for name, gradient in a.gradients.items()
    )


def generated(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model.generate(inputs[:, :20], max_new_tokens=12, do_sample=False)


def oracle(model: nn.Module, inputs: torch.Tensor) -> Results:
    """The same weights computed in fp64 throughout."""
    exact = copy.deepcopy(model).double()
    exact.config._experts_implementation = "eager"  # grouped matrix products have no fp64
    with InDouble():
        return results(exact, inputs)


@contextlib.contextmanager
def torch_path(model: Model) -> Iterator[None]:
    """transformers' own torch functions as the module's globals, as if FLA and causal_conv1d were not installed."""
    module, before = model.module, {}
    for name in (*DELTA_RULES, "causal_conv1d_fn", "causal_conv1d_update"):
        if name in vars(module):
            before[name] = held = vars(module)[name]
            if isinstance(held, nn.Module):  # Hugging Face's kernels make a module of the function
                forward = type(held).forward
                held = dict(zip(forward.__code__.co_freevars, forward.__closure__, strict=True))["func"].cell_contents
            setattr(module, name, held.__wrapped__)
    try:
        yield
    finally:
        for name, held in before.items():
            setattr(module, name, held)


def assert_within_the_rule(ours: Results, theirs: Results, truth: Results) -> None:
    """The accuracy rule for the logits, and for all gradients together, each parameter's at the same scale.

    By itself the gradient of a parameter is judged less strictly: in a chain of layers it is luck on both sides how
    rounding errors add up, most of all in the few numbers of a dt_bias, each a sum over all tokens.
    """
    assert ours.gradients.keys() == theirs.gradients.keys()
    verdict = accuracy(ours.logits, theirs.logits, truth.logits)
    assert verdict.ok, f"logits: {verdict.reason}"
    scales = {name: gradient.double().norm() for name, gradient in truth.gradients.items() if gradient.any()}
    together = [
        torch.cat([(found.gradients[name] / scale).double().flatten() for name, scale in scales.items()])
        for found in (ours, theirs, truth)
    ]
    verdict = accuracy(*together)
    assert verdict.error_ratio <= ERROR_RATIO, f"all gradients: {verdict.reason}"
    for name, gradient in ours.gradients.items():
        verdict = accuracy(gradient, theirs.gradients[name], truth.gradients[name])
        allowed = max((4 if gradient.numel() < 64 else 2) * verdict.error_theirs, TOLERANCE[gradient.dtype])
        assert verdict.error <= allowed, f"gradient of {name}: {verdict.reason}"


def served(target: str) -> int:
    return next(status.served for status in accel.status() if status.name == target)


def declined(target: str) -> dict[str, int]:
    return next(status.declined for status in accel.status() if status.name == target)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny tensors: threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


PLAIN = [name for name, model in MODELS.items() if model.hybrid is None]
HYBRID = [name for name, model in MODELS.items() if model.hybrid is not None]
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


@DTYPES
@pytest.mark.parametrize("name", PLAIN)
def test_a_plain_model_on_a_cpu_does_not_change_by_a_bit(name: str, dtype: torch.dtype) -> None:
    print(f"seed {SEED}")
    inputs, model = tokens("cpu"), MODELS[name].build().to(dtype)
    before, text = results(model, inputs), generated(model, inputs)
    accel.accelerate()
    under, text_under = results(model, inputs), generated(model, inputs)
    reason = {"CPU tensors: upstream's own code is as fast on a CPU"}
    assert declined("transformers.rms_norm").keys() == declined("transformers.mlp").keys() == reason
    assert served("transformers.rms_norm") == served("transformers.mlp") == 0
    accel.restore()
    assert equal(before, under) and equal(before, results(model, inputs))
    assert torch.equal(text, text_under)


@DTYPES
@pytest.mark.parametrize("name", HYBRID)
def test_a_hybrid_model_on_a_cpu_is_as_close_as_transformers_torch_path(name: str, dtype: torch.dtype) -> None:
    print(f"seed {SEED}")
    described = MODELS[name]
    inputs, model = tokens("cpu"), described.build().to(dtype)
    with torch_path(described):
        theirs = results(model, inputs)
        truth = oracle(model, inputs)
    accel.accelerate()
    ours = results(model, inputs)
    assert described.hybrid is not None and served(described.hybrid) > 0 and not declined(described.hybrid)
    assert_within_the_rule(ours, theirs, truth)


@pytest.mark.parametrize("name", HYBRID)
def test_a_hybrid_model_on_a_cpu_generates_the_same_tokens(name: str) -> None:
    """In fp32, where no near tie between two tokens is decided by rounding."""
    print(f"seed {SEED}")
    described = MODELS[name]
    inputs, model = tokens("cpu"), described.build()
    with torch_path(described):
        text = generated(model, inputs)
    accel.accelerate()
    assert torch.equal(text, generated(model, inputs))
    assert described.hybrid is not None and served(described.hybrid) >= 12  # a token each, by the recurrent function
    assert not declined(described.hybrid)


def frozen_fla(model: Model) -> bool:
    """Whether transformers froze FLA's functions into the module: not so where FLA is missing or fails to import."""
    from accel.patches.transformers.linear_attention import Upstream

    held = [Upstream.of(vars(model.module)[name]) for name in DELTA_RULES if name in vars(model.module)]
    assert held and all(held)
    return any(upstream is not None and upstream.is_fla for upstream in held)


@pytest.mark.parametrize("name", HYBRID)
def test_a_hybrid_model_on_a_cpu_without_accel(name: str) -> None:
    """Before and after, upstream is itself: with FLA installed it has no driver to run on."""
    described, inputs = MODELS[name], tokens("cpu")
    model = described.build()
    for _ in range(2):
        if frozen_fla(described):
            with pytest.raises(RuntimeError, match="active driver"):
                model(inputs)
        else:
            assert model(inputs).logits.isfinite().all()
        with accel.accelerated():
            assert model(inputs).logits.isfinite().all()


@pytest.mark.parametrize("reentrant", [False, True], ids=["non_reentrant", "reentrant"])
@pytest.mark.parametrize("name", ["llama", "qwen3_5", "kimi_linear"])
def test_gradient_checkpointing_changes_nothing(name: str, reentrant: bool) -> None:
    inputs, model = tokens("cpu"), MODELS[name].build().train()
    accel.accelerate()
    whole = results(model, inputs)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    assert equal(whole, results(model, inputs))


def test_restore_leaves_no_trace() -> None:
    """Every object is the very same, the models and what they made of themselves included."""
    models = [described.build() for described in MODELS.values()]
    for described, model in zip(MODELS.values(), models, strict=True):
        with torch_path(described):
            model(tokens("cpu"))
    before = snapshot()
    keys = [sorted(vars(module)) for model in models for module in model.modules()]
    accel.accelerate()
    assert len(before.changed(snapshot())) > 30
    for model in models:
        model(tokens("cpu"))
    accel.restore()
    assert before.changed(snapshot()) == []
    assert keys == [sorted(vars(module)) for model in models for module in model.modules()]


@pytest.mark.gpu
@pytest.mark.parametrize("name", MODELS)
def test_on_a_gpu(name: str) -> None:
    print(f"seed {SEED}")
    described, inputs = MODELS[name], tokens("cuda")
    model = described.build().to("cuda", torch.bfloat16)
    theirs = results(model, inputs)
    with torch_path(described):
        truth = oracle(model, inputs)
    accel.accelerate()
    ours = results(model, inputs)
    norms = ["transformers.rms_norm", *(["transformers.rms_norm_gated"] if described.hybrid else [])]
    for target in norms:
        assert served(target) > 0, declined(target)
    assert_within_the_rule(ours, theirs, truth)
    accel.restore()
    assert torch.equal(model(inputs, use_cache=False).logits, theirs.logits)


@pytest.mark.gpu
@pytest.mark.parametrize("name", MODELS)
def test_generate_on_a_gpu(name: str) -> None:
    """In fp32, where no near tie between two tokens is decided by rounding."""
    print(f"seed {SEED}")
    inputs, model = tokens("cuda"), MODELS[name].build().to("cuda")
    text = generated(model, inputs)
    accel.accelerate()
    assert torch.equal(generated(model, inputs), text)
    assert served("transformers.rms_norm") > 0, declined("transformers.rms_norm")
    accel.restore()
    assert torch.equal(generated(model, inputs), text)
