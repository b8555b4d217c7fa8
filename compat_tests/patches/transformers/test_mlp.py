"""transformers.mlp: what is replaced, what the adapter reads off a module, and every reason to decline."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module as modules
from torch.nn.utils import parametrizations, prune
from transformers import LlamaConfig, LlamaForCausalLM, Phi3Config
from transformers.activations import ACT2FN, GELUTanh
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.models.llama4.modeling_llama4 import Llama4TextMLP
from transformers.models.phi3.modeling_phi3 import Phi3MLP
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLMLP

import accel
from accel import serve, testing
from accel.kernels.gated_mlp import GatedMlpFacts, gated_mlp, plan
from accel.outcome import Choice, Decline, Declined
from accel.patches.transformers.recognise import GatedMlp, classes_of
from accel.state import STATES

STATE = STATES["transformers.mlp"]
SEED = 20261130
HIDDEN, INTERMEDIATE = 64, 128
ON_CPU = "CPU tensors: upstream's own code is as fast on a CPU"
NO_KERNEL = "no gated_mlp kernel for sm_90 yet: upstream's own runs"
Prepare = Callable[[nn.Module], Any]


def llama(**options: Any) -> nn.Module:
    print("seed", SEED)
    torch.manual_seed(SEED)
    return LlamaMLP(LlamaConfig(hidden_size=HIDDEN, intermediate_size=INTERMEDIATE, **options))


def phi3() -> nn.Module:
    torch.manual_seed(SEED)
    return Phi3MLP(Phi3Config(hidden_size=HIDDEN, intermediate_size=INTERMEDIATE, pad_token_id=0))


def on(cls: type = LlamaMLP) -> serve.ServedCall:
    accel.accelerate("transformers.mlp")
    call = serve.wrapped_call(cls.forward, STATE)  # type: ignore[attr-defined]
    assert call is not None
    return call


def moved(module: nn.Module, fake_cuda: Any, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """The module with fake CUDA parameters of its own shapes."""
    for layer in module.modules():
        for name, parameter in list(layer._parameters.items()):
            if parameter is not None:
                setattr(layer, name, nn.Parameter(fake_cuda.empty(*parameter.shape, dtype=dtype)))
    return module


def reason(decision: Choice | Declined) -> str:
    assert isinstance(decision, Declined), decision
    return decision.reason


# --- Replaced and put back ----------------------------------------------------------------------------------------


def test_restore_gives_back_the_very_same_objects() -> None:
    before, upstream = testing.snapshot(("transformers",)), vars(LlamaMLP)["forward"]
    accel.accelerate("transformers.mlp")
    wrapper = vars(LlamaMLP)["forward"]
    assert wrapper is not upstream and wrapper.__wrapped__ is upstream
    accel.accelerate("transformers.mlp")
    assert vars(LlamaMLP)["forward"] is wrapper
    accel.restore("transformers.mlp")
    assert before.changed(testing.snapshot(("transformers",))) == []
    accel.accelerate("transformers.mlp")
    assert vars(LlamaMLP)["forward"] is wrapper


@pytest.mark.parametrize("cls", [LlamaMLP, Phi3MLP, Llama4TextMLP, Qwen2_5_VLMLP])
def test_the_wrapper_has_upstreams_signature(cls: type) -> None:
    upstream = vars(cls)["forward"]
    on(cls)
    wrapper = vars(cls)["forward"]
    assert inspect.signature(wrapper) == inspect.signature(upstream)
    assert (wrapper.__name__, wrapper.__qualname__, wrapper.__module__, wrapper.__doc__) == (
        upstream.__name__,
        upstream.__qualname__,
        upstream.__module__,
        upstream.__doc__,
    )


def test_a_model_keeps_its_names_types_and_keys() -> None:
    model = LlamaForCausalLM(LlamaConfig(hidden_size=HIDDEN, intermediate_size=INTERMEDIATE, num_hidden_layers=1))
    named, keys = [(name, type(module)) for name, module in model.named_modules()], list(model.state_dict())
    on()
    assert named == [(name, type(module)) for name, module in model.named_modules()]
    assert keys == list(model.state_dict())


def test_another_patcher_on_top_survives() -> None:
    module, x = llama(), torch.randn(3, HIDDEN)
    upstream = vars(LlamaMLP)["forward"]
    on()
    ours = LlamaMLP.forward

    @functools.wraps(ours)
    def theirs(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return ours(self, x)

    LlamaMLP.forward = theirs
    try:
        accel.restore()
        assert vars(LlamaMLP)["forward"] is theirs
        assert "LlamaMLP.forward" in STATE.left[0]
        assert torch.equal(module(x), upstream(module, x)) and not STATE.declined
        accel.accelerate("transformers.mlp")
        assert vars(LlamaMLP)["forward"] is theirs
        module(x)
        assert STATE.declined == {ON_CPU: 1}
    finally:
        LlamaMLP.forward = upstream


def test_a_model_imported_later_is_reached() -> None:
    accel.accelerate("transformers.mlp")
    names = [f"transformers.models.{name}.modeling_{name}" for name in ("smollm3", "ernie4_5", "dots1", "granite")]
    name = next(name for name in names if name not in sys.modules)
    found = [cls for cls, meaning in classes_of(importlib.import_module(name)) if isinstance(meaning, GatedMlp)]
    assert found and all(serve.wrapped_call(vars(cls)["forward"], STATE) for cls in found)


def test_remote_code_is_reached_by_another_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its module has no name that could be known beforehand."""
    accel.accelerate("transformers.mlp")
    file = tmp_path / "modeling_theirs.py"
    file.write_text(
        "from torch import nn\n"
        "class TheirMLP(nn.Module):\n"
        "    def forward(self, hidden):\n"
        "        return self.w2(self.act(self.w1(hidden)) * self.w3(hidden))\n"
    )
    name = "transformers_modules.theirs.modeling_theirs"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    upstream = module.TheirMLP.forward
    accel.accelerate("transformers.mlp")
    assert serve.wrapped_call(module.TheirMLP.forward, STATE)
    accel.restore()
    assert module.TheirMLP.forward is upstream


# --- What is read --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "activation"),
    [
        ({}, "silu"),
        ({"hidden_act": "swish"}, "silu"),
        ({"hidden_act": "gelu_pytorch_tanh"}, "gelu_tanh"),
        ({"hidden_act": "gelu_new"}, "gelu_tanh"),
        ({"hidden_act": "gelu"}, "gelu_erf"),
    ],
)
def test_what_is_read_computes_what_upstream_computes(options: dict[str, Any], activation: str) -> None:
    """Through `run` with the portable choice: values and gradients are upstream's."""
    module, call = llama(**options, mlp_bias=True).double(), on()
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    x = torch.randn(2, 5, HIDDEN, dtype=torch.float64, requires_grad=True)
    choice = Choice("gated_mlp", "portable")
    theirs, ours = call.original(module, x), call.adapter.run(choice, module, x)
    assert call.adapter.read(module)[1] == activation
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
    inputs = [x, *module.parameters()]
    for a, b in zip(torch.autograd.grad(ours.sum(), inputs), torch.autograd.grad(theirs.sum(), inputs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_a_fused_module_reads_the_gate_first() -> None:
    module, call, x = phi3(), on(Phi3MLP), torch.randn(7, HIDDEN)
    assert torch.equal(call.adapter.run(Choice("gated_mlp", "portable"), module, x), call.original(module, x))


def test_facts(fake_cuda: Any) -> None:
    module, call = moved(llama(), fake_cuda), on()
    x = fake_cuda.empty(2, 5, HIDDEN)
    facts, device = call.adapter.facts(module, x)
    assert device == torch.device("cuda:0")
    expected = GatedMlpFacts(10, HIDDEN, INTERMEDIATE, HIDDEN, "bfloat16", ("bfloat16",) * 3, "silu", needs_grad=True)
    assert facts == expected
    with torch.no_grad():
        assert not call.adapter.facts(module, x)[0].needs_grad
    assert call.adapter.facts(module, x=x)[0] == expected
    fused, _ = on(Phi3MLP).adapter.facts(moved(phi3(), fake_cuda), x)
    assert fused.fused and fused.weight_dtypes == ("bfloat16",) * 2 and fused.intermediate == INTERMEDIATE


def test_the_last_reason_is_the_missing_kernel(fake_cuda: Any) -> None:
    x = fake_cuda.empty(2, 5, HIDDEN)
    for module, cls in ((llama(), LlamaMLP), (llama(hidden_act="gelu"), LlamaMLP), (phi3(), Phi3MLP)):
        decision, key = on(cls).decide((moved(module, fake_cuda), x), {}, arch="sm_90")
        assert reason(decision) == NO_KERNEL and key is not None


def test_explain_by_the_targets_name_asks_the_modules_own_class() -> None:
    accel.accelerate("transformers.mlp")
    x = torch.randn(1, HIDDEN)
    for module in (llama(), phi3()):
        assert reason(accel.explain("transformers.mlp", module, x)) == ON_CPU
    sub = Sub(LlamaConfig(hidden_size=HIDDEN, intermediate_size=INTERMEDIATE))
    assert reason(accel.explain("transformers.mlp", sub, x)) == "Sub is a subclass of LlamaMLP"
    assert "is a subclass of" not in reason(accel.explain("transformers.mlp", llama()))


# --- Declined for what the module is -------------------------------------------------------------------------------


class Lora(nn.Linear):
    """A layer with an adapter: its `weight` is only the base."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__(base.in_features, base.out_features, bias=False)
        self.weight = base.weight
        self.added = nn.Parameter(torch.randn(base.out_features, base.in_features))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + nn.functional.linear(x, self.added)


def lora(module: nn.Module) -> None:
    module.down_proj = Lora(module.down_proj)


def own_forward(module: nn.Module) -> None:
    old = module.up_proj.forward
    module.up_proj.forward = lambda x: 2 * old(x)


def no_parameter(module: nn.Module) -> None:
    weight = module.gate_proj._parameters.pop("weight")
    module.gate_proj.__dict__["weight"] = weight.detach() * 2


def act(name: str) -> Prepare:
    return lambda module: setattr(module, "act_fn", ACT2FN[name])


def odd_tanh(**keywords: Any) -> Prepare:
    def prepare(module: nn.Module) -> None:
        module.act_fn = GELUTanh()
        module.act_fn.act = functools.partial(nn.functional.gelu, **keywords)

    return prepare


def odd_erf(module: nn.Module) -> None:
    module.act_fn = ACT2FN["gelu"]
    module.act_fn.act = torch.relu


PREPARED: list[tuple[Prepare, str]] = [
    (lora, "down_proj is a Lora, not nn.Linear"),
    (lambda m: parametrizations.weight_norm(m.gate_proj), "gate_proj is a ParametrizedLinear, not nn.Linear"),
    (lambda m: setattr(m, "down_proj", nn.Identity()), "down_proj is a Identity, not nn.Linear"),
    (own_forward, "up_proj has a forward of its own"),
    (lambda m: m.gate_proj.register_forward_hook(lambda layer, x, y: y + 1), "gate_proj has hooks"),
    (lambda m: m.up_proj.register_forward_pre_hook(lambda layer, x: (x[0] + 1,)), "up_proj has hooks"),
    (lambda m: m.down_proj.register_full_backward_hook(lambda layer, dx, dy: None), "down_proj has hooks"),
    (lambda m: m.down_proj.register_full_backward_pre_hook(lambda layer, dy: None), "down_proj has hooks"),
    (lambda m: prune.l1_unstructured(m.gate_proj, "weight", amount=0.5), "gate_proj has hooks"),
    (no_parameter, "gate_proj has no weight parameter of its own"),
    (
        lambda m: m.up_proj.register_parameter("scale", nn.Parameter(torch.ones(1))),
        "up_proj has further parameters, buffers or layers",
    ),
    (act("relu"), "act_fn is a ReLU, none of silu, gelu_tanh and gelu_erf"),
    (act("quick_gelu"), "act_fn is a QuickGELUActivation, none of silu, gelu_tanh and gelu_erf"),
    (lambda m: m.act_fn.register_forward_hook(lambda layer, x, y: y + 1), "act_fn has hooks"),
    (lambda m: setattr(m.act_fn, "forward", torch.relu), "act_fn has a forward of its own"),
    (act("gelu_python_tanh"), "act_fn computes gelu_tanh in its own way"),
    (odd_tanh(approximate="none"), "act_fn computes gelu with {'approximate': 'none'}"),
    (act("gelu_python"), "act_fn computes gelu_erf in its own way"),
    (odd_erf, "act_fn computes gelu_erf in its own way"),
]


@pytest.mark.parametrize(("prepare", "expected"), PREPARED, ids=[expected for _, expected in PREPARED])
def test_a_layer_that_does_more_is_declined_and_runs_as_upstream(prepare: Prepare, expected: str) -> None:
    module, x = llama(), torch.randn(3, HIDDEN)
    prepare(module)
    theirs = module(x)
    on()
    assert torch.equal(module(x), theirs)
    assert STATE.declined == {expected: 1}


class Sub(LlamaMLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def test_a_subclass_is_declined() -> None:
    module, x = Sub(LlamaConfig(hidden_size=HIDDEN, intermediate_size=INTERMEDIATE)), torch.randn(3, HIDDEN)
    theirs = module(x)
    on()
    assert torch.equal(module(x), theirs)
    assert STATE.declined == {"Sub is a subclass of LlamaMLP": 1}


def test_global_hooks_are_declined() -> None:
    module, x = llama(), torch.randn(3, HIDDEN)
    handle = modules.register_module_forward_hook(lambda layer, x, y: y + 1)
    try:
        theirs = module(x)
        on()
        assert torch.equal(module(x), theirs)
    finally:
        handle.remove()
    assert STATE.declined == {"global module hooks are registered": 1}


def test_a_replaced_linear_forward_is_declined(monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = llama(), torch.randn(3, HIDDEN)
    on()
    old = nn.Linear.forward
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: 2 * old(self, x))
    ours = module(x)
    assert STATE.declined == {"nn.Linear.forward was replaced": 1}
    accel.restore()
    assert torch.equal(ours, module(x))


def test_a_replaced_activation_forward_is_declined(monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = llama(), torch.randn(3, HIDDEN)
    on()
    module(x)
    STATE.reset_counters()
    monkeypatch.setattr(type(module.act_fn), "forward", lambda self, x: torch.relu(x))
    ours = module(x)
    assert STATE.declined == {"SiLUActivation.forward was replaced": 1}
    accel.restore()
    assert torch.equal(ours, module(x))


def test_an_instance_forward_does_not_reach_the_adapter() -> None:
    """accelerate, tensor parallelism and kernelize set one: the class attribute is then nobody's business."""
    module, x = llama(), torch.randn(3, HIDDEN)
    module.forward = lambda x: x + 1
    on()
    assert torch.equal(module(x), x + 1) and not STATE.declined


def test_what_changes_after_a_first_call_is_seen() -> None:
    """Nothing is remembered of a module: hooks come, and weights change their dtype in place."""
    module, x = llama(), torch.randn(3, HIDDEN)
    on()
    module(x)
    handle = module.gate_proj.register_forward_hook(lambda layer, x, y: y)
    module(x)
    handle.remove()
    module(x)
    assert STATE.declined == {ON_CPU: 2, "gate_proj has hooks": 1}


# --- Declined for what the tensors are -----------------------------------------------------------------------------


def test_arguments_that_do_not_fit_are_upstreams_to_reject() -> None:
    module, x = llama(), torch.randn(3, HIDDEN)
    call = on()
    for args, kwargs in (((), {}), ((x, x), {}), ((x,), {"x": x}), ((x,), {"scale": 2})):
        with pytest.raises(TypeError):
            module(*args, **kwargs)
        assert "signature" in reason(call.explain((module, *args), kwargs)) or not args
    assert reason(call.explain((module, None), {})) == "x is None"
    assert reason(call.explain((module, 3), {})) == "x is a int, not a plain tensor"


def test_tensors_a_kernel_cannot_read(fake_cuda: Any) -> None:
    call = on()

    class Marked(torch.Tensor):
        pass

    module, x = llama(), torch.randn(3, HIDDEN)
    assert reason(call.explain((module, x.as_subclass(Marked)), {})) == "x is a Marked, not a plain tensor"
    assert reason(call.explain((module.to("meta"), x.to("meta")), {})) == "x is on device meta"
    split = moved(llama(), fake_cuda)
    split.up_proj.weight = nn.Parameter(torch.empty(INTERMEDIATE, HIDDEN))
    decision, _ = call.decide((split, fake_cuda.empty(3, HIDDEN)), {}, arch="sm_90")
    assert reason(decision) == "up is on cpu, other tensors on cuda:0"


def test_shapes_that_do_not_fit(fake_cuda: Any) -> None:
    call, module = on(), moved(llama(), fake_cuda)
    decision, _ = call.decide((module, fake_cuda.empty(3, 32)), {}, arch="sm_90")
    assert reason(decision) == "gate is (128, 64), not (128, 32): x is (3, 32), down (64, 128)"
    module.up_proj.weight = nn.Parameter(fake_cuda.empty(1, HIDDEN))
    decision, _ = call.decide((module, fake_cuda.empty(3, HIDDEN)), {}, arch="sm_90")
    assert reason(decision) == "up is (1, 64), gate (128, 64)"
    module.up_proj.weight = nn.Parameter(fake_cuda.empty(HIDDEN))
    decision, _ = call.decide((module, fake_cuda.empty(3, HIDDEN)), {}, arch="sm_90")
    assert reason(decision) == "x must have a dimension and each weight two"


def test_autocast_that_changes_dtypes(fake_cuda: Any) -> None:
    call, half, single = on(), moved(llama(), fake_cuda), moved(llama(), fake_cuda, torch.float32)
    torch.set_autocast_enabled("cuda", True)  # torch.autocast refuses without a GPU
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    try:
        decision, _ = call.decide((single, fake_cuda.empty(3, HIDDEN, dtype=torch.float32)), {}, arch="sm_90")
        assert reason(decision) == "autocast casts float32 to bfloat16"
        decision, _ = call.decide((half, fake_cuda.empty(3, HIDDEN)), {}, arch="sm_90")
        assert reason(decision) == NO_KERNEL
    finally:
        torch.set_autocast_enabled("cuda", False)
        torch.set_autocast_dtype("cuda", torch.float16)


# --- The plan -------------------------------------------------------------------------------------------------------

GOOD = GatedMlpFacts(10, HIDDEN, INTERMEDIATE, HIDDEN, "bfloat16", ("bfloat16",) * 3, "silu")
CHANGES: list[tuple[dict[str, Any], str]] = [
    ({}, NO_KERNEL),
    ({"activation": "relu"}, "activation=relu is none of silu, gelu_tanh, gelu_erf"),
    ({"weight_dtypes": ("bfloat16", "float32", "bfloat16")}, "weight dtype=float32 is not x's bfloat16"),
    ({"dtype": "float32", "weight_dtypes": ("float32",) * 3}, "dtype=float32 is none of bfloat16, float16"),
    ({"hidden": 100}, "hidden=100 is not a positive multiple of 8"),
    ({"intermediate": 0}, "intermediate=0 is not a positive multiple of 8"),
    ({"out": 7}, "out=7 is not a positive multiple of 8"),
    ({"gate_bias": True}, "the projections have biases"),
    ({"up_bias": True}, "the projections have biases"),
    ({"down_bias": True}, "the projections have biases"),
    ({"weights_contiguous": False}, "a weight is not contiguous"),
    ({"x_contiguous": False}, "x's last dimension is not contiguous"),
]


@pytest.mark.parametrize(("change", "expected"), CHANGES, ids=[expected for _, expected in CHANGES])
def test_plan(change: dict[str, Any], expected: str) -> None:
    facts = GatedMlpFacts(**{name: getattr(GOOD, name) for name in GOOD.__dataclass_fields__} | change)
    assert reason(plan(facts, "sm_90")) == expected


def test_the_plan_on_a_cpu_is_plain_torch() -> None:
    assert plan(GOOD, "cpu") == Choice("gated_mlp", "portable")


def test_the_public_op_names_what_is_wrong(fake_cuda: Any) -> None:
    x, gate, down = torch.randn(3, 8), torch.randn(16, 8), torch.randn(8, 16)
    assert gated_mlp(x, gate, gate, down).shape == (3, 8)
    assert gated_mlp(x, torch.cat((gate, gate)), None, down, activation="gelu_erf").shape == (3, 8)
    with pytest.raises(ValueError, match="'relu'"):
        gated_mlp(x, gate, gate, down, activation="relu")
    with pytest.raises(ValueError, match="gate is"):
        gated_mlp(x, gate, None, down)
    empty = fake_cuda.empty
    with pytest.raises(Decline, match="no gated_mlp kernel"):
        gated_mlp(empty(3, 8), empty(16, 8), empty(16, 8), empty(8, 16))


# --- Compiled -------------------------------------------------------------------------------------------------------


def test_compiled_code_runs_upstreams_forward_whole() -> None:
    module, x = llama(), torch.randn(3, HIDDEN)
    theirs = module(x)
    on()
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), theirs) and not STATE.declined
    accel.restore()
    assert torch.equal(compiled(x), theirs)
