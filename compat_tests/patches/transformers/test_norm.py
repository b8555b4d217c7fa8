"""transformers.rms_norm and rms_norm_gated: what is replaced, what the adapter reads, and every reason to decline."""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import accel
from accel import serve, testing
from accel.kernels.norm.facts import NormFacts
from accel.outcome import Choice, Declined
from accel.state import STATES

SEED = 20261130
HIDDEN = 64
ON_CPU = "CPU tensors: upstream's own code is as fast on a CPU"


@dataclass(frozen=True)
class Norm:
    """One upstream class of each form."""

    folder: str
    name: str
    form: str
    activation: str | None = None

    @property
    def cls(self) -> type:
        module = importlib.import_module(f"transformers.models.{self.folder}.modeling_{self.folder}")
        return getattr(module, self.name)

    @property
    def target(self) -> str:
        return "transformers.rms_norm_gated" if self.activation else "transformers.rms_norm"

    def make(self, dtype: torch.dtype = torch.float32, hidden: int = HIDDEN) -> nn.Module:
        print("seed", SEED)
        torch.manual_seed(SEED)
        module = self.cls(hidden)
        nn.init.normal_(module.weight)
        return module.to(dtype)

    def inputs(self, *shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(SEED)
        count = 2 if self.activation else 1
        return [torch.randn(*shape, generator=generator).to(device, dtype).requires_grad_() for _ in range(count)]

    def on(self) -> serve.ServedCall:
        cls = self.cls
        accel.accelerate(self.target)
        call = serve.wrapped_call(vars(cls)["forward"], STATES[self.target])
        assert call is not None
        return call


LLAMA = Norm("llama", "LlamaRMSNorm", "cast_then_weight")
T5 = Norm("t5", "T5LayerNorm", "cast_then_weight")
GEMMA3N = Norm("gemma3n", "Gemma3nRMSNorm", "weight_in_fp32")
QWEN = Norm("qwen3_next", "Qwen3NextRMSNormGated", "cast_then_weight", "silu")
KIMI = Norm("kimi_linear", "KimiLinearRMSNormGated", "weight_in_fp32", "sigmoid")
NORMS = [
    LLAMA,
    T5,
    Norm("llama4", "Llama4TextRMSNorm", "cast_then_weight"),
    Norm("olmo2", "Olmo2RMSNorm", "weight_in_fp32"),
    Norm("helium", "HeliumRMSNorm", "weight_in_fp32"),
    Norm("moshi", "MoshiRMSNorm", "weight_in_fp32"),
    GEMMA3N,
    Norm("gemma3", "Gemma3RMSNorm", "zero_centred"),
    QWEN,
    KIMI,
]
EACH = pytest.mark.parametrize("norm", NORMS, ids=lambda norm: norm.name)


def reason(decision: Choice | Declined) -> str:
    assert isinstance(decision, Declined), decision
    return decision.reason


def moved(module: nn.Module, fake_cuda: Any, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    module.weight = nn.Parameter(fake_cuda.empty(*module.weight.shape, dtype=dtype))
    return module


# --- Replaced and put back ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", [LLAMA, QWEN], ids=lambda norm: norm.target)
def test_restore_gives_back_the_very_same_objects(norm: Norm) -> None:
    cls = norm.cls
    before, upstream = testing.snapshot(("transformers",)), vars(cls)["forward"]
    accel.accelerate(norm.target)
    wrapper = vars(cls)["forward"]
    assert wrapper is not upstream and wrapper.__wrapped__ is upstream
    accel.accelerate(norm.target)
    assert vars(cls)["forward"] is wrapper
    accel.restore(norm.target)
    assert before.changed(testing.snapshot(("transformers",))) == []
    accel.accelerate(norm.target)
    assert vars(cls)["forward"] is wrapper


def test_each_target_takes_its_own_classes() -> None:
    plain, gated = vars(LLAMA.cls)["forward"], vars(QWEN.cls)["forward"]
    accel.accelerate("transformers.rms_norm_gated")
    assert vars(LLAMA.cls)["forward"] is plain and vars(QWEN.cls)["forward"] is not gated
    accel.restore()
    accel.accelerate("transformers.rms_norm")
    assert vars(LLAMA.cls)["forward"] is not plain and vars(QWEN.cls)["forward"] is gated


@EACH
def test_the_wrapper_has_upstreams_signature(norm: Norm) -> None:
    upstream = vars(norm.cls)["forward"]
    norm.on()
    wrapper = vars(norm.cls)["forward"]
    assert inspect.signature(wrapper) == inspect.signature(upstream)
    assert (wrapper.__name__, wrapper.__qualname__, wrapper.__module__, wrapper.__doc__) == (
        upstream.__name__,
        upstream.__qualname__,
        upstream.__module__,
        upstream.__doc__,
    )


def test_another_patcher_on_top_survives() -> None:
    cls, module, (x,) = LLAMA.cls, LLAMA.make(), LLAMA.inputs(3, HIDDEN)
    upstream, state = vars(cls)["forward"], STATES[LLAMA.target]
    LLAMA.on()
    ours = cls.forward

    @functools.wraps(ours)
    def theirs(self: nn.Module, hidden_states: torch.Tensor) -> torch.Tensor:
        return ours(self, hidden_states)

    cls.forward = theirs
    try:
        accel.restore()
        assert vars(cls)["forward"] is theirs and "LlamaRMSNorm.forward" in state.left[0]
        assert torch.equal(module(x), upstream(module, x)) and not state.declined
        accel.accelerate("transformers.rms_norm")
        assert vars(cls)["forward"] is theirs
        module(x)
        assert state.declined == {ON_CPU: 1}
    finally:
        cls.forward = upstream


# --- What is read --------------------------------------------------------------------------------------------------

DTYPES = [
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
    (torch.bfloat16, torch.float32),
]


def values(forward: Any, module: nn.Module, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """The result, and the gradients of the inputs and of the weight."""
    y = forward(module, *inputs)
    generator = torch.Generator().manual_seed(SEED + 1)
    grad = torch.randn(y.shape, generator=generator).to(y.device, torch.bfloat16).to(y.dtype)
    return [y.detach(), *torch.autograd.grad(y, [*inputs, module.weight], grad)]


def assert_within_the_rule(ours: Any, upstream: Any, module: nn.Module, inputs: list[torch.Tensor]) -> None:
    """Values, gradients and dtypes; the oracle is upstream's own code in fp64."""
    with testing.InDouble():
        exact_inputs = [x.detach().double().requires_grad_() for x in inputs]
        truth = values(upstream, copy.deepcopy(module).double(), exact_inputs)
    names = ["y", "d_x", *(["d_gate"] if len(inputs) == 2 else []), "d_weight"]
    found = zip(names, values(ours, module, inputs), values(upstream, module, inputs), truth, strict=True)
    for name, mine, theirs, exact in found:
        verdict = testing.accuracy(mine, theirs, exact)
        assert verdict.ok, f"{name}: {verdict.reason}"


@EACH
@pytest.mark.parametrize(("dtype", "weight_dtype"), DTYPES, ids=lambda dtype: str(dtype)[6:])
def test_what_is_read_computes_what_upstream_computes(
    norm: Norm, dtype: torch.dtype, weight_dtype: torch.dtype
) -> None:
    """Through `run` with the portable choice, on a CPU."""
    call, module, inputs = norm.on(), norm.make(weight_dtype), norm.inputs(2, 5, HIDDEN, dtype=dtype)
    if norm is T5 and dtype != weight_dtype:
        assert "casts to the weight's dtype" in reason(call.explain((module, *inputs), {}))
        return
    run = functools.partial(call.adapter.run, Choice("norm", "portable"))
    assert_within_the_rule(run, call.original, module, inputs)


@EACH
def test_facts_and_plan(norm: Norm, fake_cuda: Any) -> None:
    call, module = norm.on(), moved(norm.make(), fake_cuda)
    inputs = [fake_cuda.empty(2, 5, HIDDEN) for _ in norm.inputs(1)]
    facts, device = call.adapter.facts(module, *inputs)
    assert device == torch.device("cuda:0")
    gate = "bfloat16" if norm.activation else None
    expected = NormFacts(10, HIDDEN, "bfloat16", "bfloat16", norm.form, norm.activation, gate, needs_grad=True)
    assert facts == expected
    named = dict(zip(call.adapter.names, inputs, strict=True))
    assert call.adapter.facts(module, **named)[0] == expected
    choice = call.adapter.plan(facts, "sm_90")
    assert isinstance(choice, Choice) and (choice.kernel, choice.backward) == ("any_fwd", "any_bwd")
    with torch.no_grad():
        assert call.adapter.plan(call.adapter.facts(module, *inputs)[0], "sm_90").backward is None


def test_autocast_changes_nothing(fake_cuda: Any) -> None:
    call, module, x = LLAMA.on(), moved(LLAMA.make(), fake_cuda), fake_cuda.empty(3, HIDDEN, dtype=torch.float32)
    module.weight = nn.Parameter(fake_cuda.empty(HIDDEN, dtype=torch.float32))
    torch.set_autocast_enabled("cuda", True)  # torch.autocast refuses without a GPU
    try:
        facts, _ = call.adapter.facts(module, x)
    finally:
        torch.set_autocast_enabled("cuda", False)
    assert isinstance(call.adapter.plan(facts, "sm_90"), Choice)
    for norm in NORMS:  # upstream's own result under autocast is its result without
        module, inputs = norm.make(torch.bfloat16), norm.inputs(3, HIDDEN, dtype=torch.bfloat16)
        with torch.autocast("cpu", torch.bfloat16):
            under = module(*inputs)
        assert torch.equal(under, module(*inputs)) and under.dtype == module(*inputs).dtype


# --- Declined for what the module is -------------------------------------------------------------------------------


@EACH
def test_cpu_tensors_are_declined_and_run_as_upstream(norm: Norm) -> None:
    module, inputs = norm.make(torch.bfloat16), norm.inputs(2, 5, HIDDEN, dtype=torch.bfloat16)
    theirs = module(*inputs)
    norm.on()
    assert torch.equal(module(*inputs), theirs)
    assert STATES[norm.target].declined == {ON_CPU: 1}


def declined(norm: Norm, module: nn.Module, *inputs: Any) -> dict[str, int]:
    """The reasons counted for a call that equals upstream's bit for bit."""
    theirs = module(*inputs)
    norm.on()
    assert torch.equal(module(*inputs), theirs)
    return dict(STATES[norm.target].declined)


def test_a_subclass_is_declined() -> None:
    class Sub(LLAMA.cls):
        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            return super().forward(hidden_states) + 1

    assert declined(LLAMA, Sub(HIDDEN), *LLAMA.inputs(3, HIDDEN)) == {"Sub is a subclass of LlamaRMSNorm": 1}


def test_a_parametrized_weight_is_declined() -> None:
    module = LLAMA.make()
    parametrize.register_parametrization(module, "weight", nn.Tanh())
    expected = "ParametrizedLlamaRMSNorm is a subclass of LlamaRMSNorm"
    assert declined(LLAMA, module, *LLAMA.inputs(3, HIDDEN)) == {expected: 1}


def test_a_norm_without_a_weight_is_declined() -> None:
    module = GEMMA3N.cls(HIDDEN, with_scale=False)
    expected = "with_scale is off: there is no weight"
    assert declined(GEMMA3N, module, *GEMMA3N.inputs(3, HIDDEN)) == {expected: 1}


def test_a_weight_that_is_no_parameter_is_declined() -> None:
    module = LLAMA.make()
    del module.weight
    module.weight = torch.randn(HIDDEN)
    expected = "weight is no parameter of the module's own"
    assert declined(LLAMA, module, *LLAMA.inputs(3, HIDDEN)) == {expected: 1}


def test_an_eps_that_is_no_number_is_declined() -> None:
    module = LLAMA.make()
    module.variance_epsilon = torch.tensor(1e-6)
    expected = "variance_epsilon is a Tensor, not a number"
    assert declined(LLAMA, module, *LLAMA.inputs(3, HIDDEN)) == {expected: 1}


def test_another_activation_is_declined() -> None:
    module = QWEN.make()
    module.activation = "relu"
    expected = "activation='relu' is none of silu, swish, sigmoid"
    assert declined(QWEN, module, *QWEN.inputs(3, HIDDEN)) == {expected: 1}


def test_swish_is_silu(fake_cuda: Any) -> None:
    call, module = QWEN.on(), moved(QWEN.make(), fake_cuda)
    module.activation = "swish"
    x = fake_cuda.empty(3, HIDDEN)
    assert call.adapter.facts(module, x, x)[0].activation == "silu"


# --- Declined for what the tensors are -----------------------------------------------------------------------------


def test_a_missing_gate_is_upstreams_to_reject() -> None:
    module, (x, _) = KIMI.make(), KIMI.inputs(3, HIDDEN)
    call = KIMI.on()
    assert reason(call.explain((module, x), {})) == "gate is None"
    with pytest.raises(AttributeError):
        module(x)


def test_arguments_that_do_not_fit_are_upstreams_to_reject() -> None:
    module, (x,) = LLAMA.make(), LLAMA.inputs(3, HIDDEN)
    call = LLAMA.on()
    for args, kwargs in (((x, x), {}), ((x,), {"hidden_states": x}), ((x,), {"eps": 1})):
        assert reason(call.explain((module, *args), kwargs)) == "the arguments do not fit the signature"
        with pytest.raises(TypeError):
            module(*args, **kwargs)
    for args in ((), (None,)):
        assert reason(call.explain((module, *args), {})) == "hidden_states is None"
        with pytest.raises((TypeError, AttributeError)):
            module(*args)


def test_a_gate_that_is_broadcast_is_declined() -> None:
    module, (x, gate) = QWEN.make(), QWEN.inputs(3, HIDDEN)
    assert declined(QWEN, module, x, gate[:1]) == {"gate is [1, 64], x is [3, 64]": 1}


def test_mixed_dtypes_of_t5() -> None:
    module, (x,) = T5.make(torch.bfloat16), T5.inputs(3, HIDDEN)
    expected = "x is torch.float32, the weight torch.bfloat16: this class casts to the weight's dtype"
    assert declined(T5, module, x) == {expected: 1}


def test_tensors_a_kernel_cannot_read(fake_cuda: Any) -> None:
    class Marked(torch.Tensor):
        pass

    call, module, (x,) = LLAMA.on(), LLAMA.make(), LLAMA.inputs(3, HIDDEN)
    assert "Marked, not a plain tensor" in reason(call.explain((module, x.as_subclass(Marked)), {}))
    assert reason(call.explain((module.to("meta"), x.to("meta")), {})) == "x is on device meta"
    decision, _ = call.decide((LLAMA.make(), fake_cuda.empty(3, HIDDEN)), {}, arch="sm_90")
    assert reason(decision) == "weight is on cpu, other tensors on cuda:0"


FAKE: list[tuple[Norm, tuple[int, ...], torch.dtype, torch.dtype, str]] = [
    (LLAMA, (3, 32), torch.bfloat16, torch.bfloat16, "weight shape=(64,) is not (32,)"),
    (LLAMA, (3, HIDDEN), torch.float64, torch.float64, "dtype=float64 is none of bfloat16, float16, float32"),
    (LLAMA, (3, HIDDEN), torch.float32, torch.bfloat16, "weight dtype=bfloat16 is neither x's float32 nor float32"),
    (LLAMA, (2**26, 32, HIDDEN), torch.bfloat16, torch.bfloat16, "n_rows=2147483648 >= 2**31"),
]


@pytest.mark.parametrize(("norm", "shape", "dtype", "weight_dtype", "expected"), FAKE, ids=[row[4] for row in FAKE])
def test_what_no_kernel_takes(
    norm: Norm, shape: tuple[int, ...], dtype: torch.dtype, weight_dtype: torch.dtype, expected: str, fake_cuda: Any
) -> None:
    call, module = norm.on(), moved(norm.make(), fake_cuda, weight_dtype)
    decision, _ = call.decide((module, fake_cuda.empty(*shape, dtype=dtype)), {}, arch="sm_90")
    assert reason(decision) == expected


@pytest.mark.parametrize("hidden", [32, 100, 16400])
def test_hidden_sizes_no_kernel_takes(hidden: int, fake_cuda: Any) -> None:
    call, module = LLAMA.on(), moved(LLAMA.make(hidden=hidden), fake_cuda)
    decision, _ = call.decide((module, fake_cuda.empty(3, hidden)), {}, arch="sm_90")
    assert reason(decision).startswith(f"hidden={hidden} is ")


def test_a_gate_of_another_dtype_is_declined(fake_cuda: Any) -> None:
    call, module = QWEN.on(), moved(QWEN.make(), fake_cuda)
    x, gate = fake_cuda.empty(3, HIDDEN), fake_cuda.empty(3, HIDDEN, dtype=torch.float32)
    assert reason(call.decide((module, x, gate), {}, arch="sm_90")[0]) == "gate dtype=float32 is not x's bfloat16"


# --- Compiled, and on a GPU ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", [LLAMA, QWEN], ids=lambda norm: norm.name)
def test_compiled_code_runs_upstreams_forward_whole(norm: Norm) -> None:
    module, inputs = norm.make(), norm.inputs(3, HIDDEN)
    theirs = module(*inputs)
    norm.on()
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    assert torch.equal(compiled(*inputs), theirs) and not STATES[norm.target].declined
    accel.restore()
    assert torch.equal(compiled(*inputs), theirs)


@pytest.mark.gpu
@EACH
@pytest.mark.parametrize(("dtype", "weight_dtype"), DTYPES, ids=lambda dtype: str(dtype)[6:])
def test_served_on_a_gpu_within_the_accuracy_rule(norm: Norm, dtype: torch.dtype, weight_dtype: torch.dtype) -> None:
    module = norm.make(dtype if norm is T5 else weight_dtype, 256).cuda()
    inputs = [x.detach().transpose(0, 1) for x in norm.inputs(3, 70, 256, dtype=dtype, device="cuda")]
    call = norm.on()
    served = STATES[norm.target].served
    assert_within_the_rule(norm.cls.forward, call.original, module, [x.requires_grad_() for x in inputs])
    assert served["any_fwd"] == 1, STATES[norm.target].declined
