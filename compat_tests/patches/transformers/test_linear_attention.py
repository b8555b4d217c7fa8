"""transformers.gated_delta_rule and transformers.kda: what is replaced, how calls are read, every reason to decline.

Upstream's function is made twice of transformers' own decorator: as it is where FLA is not installed (its torch code
computes), and with FLA's function in its closure.
"""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import inspect
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import accel
from accel import certificates, serve, testing
from accel.kernels.gated_delta_rule.reference import gated_delta_rule_reference
from accel.kernels.kda.reference import kda_reference
from accel.outcome import Choice, Declined
from accel.patches.transformers import linear_attention
from accel.patches.transformers.linear_attention import OPERATIONS, Upstream
from accel.state import STATES

SEED = 20261130
BATCH, LENGTH, HEADS, DIM, VALUE_DIM = 2, 70, 2, 16, 24


@dataclass(frozen=True)
class Function:
    """One of the four functions, in a module of transformers that holds it."""

    name: str
    folder: str
    target: str
    package_name: str  #: FLA's function, as the decorator is told
    reference: Callable[..., Any]

    @property
    def module(self) -> ModuleType:
        return importlib.import_module(f"transformers.models.{self.folder}.modeling_{self.folder}")

    @property
    def kda(self) -> bool:
        return self.target == "transformers.kda"

    @property
    def recurrent(self) -> bool:
        return "recurrent" in self.name

    @property
    def own(self) -> Callable[..., Any]:
        """transformers' own torch code, undecorated."""
        held = vars(self.module)[self.name]
        return unwrapped(held).__wrapped__

    def state(self) -> Any:
        return STATES[self.target]

    def inputs(self, dtype: torch.dtype = torch.float32, heads: int = HEADS, **more: Any) -> dict[str, Any]:
        """Arguments as models pass them: q, k, v bf16 or fp32, the decay in fp32, beta a sigmoid."""
        print("seed", SEED)
        generator = torch.Generator().manual_seed(SEED)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator)

        q, k = normal(BATCH, LENGTH, heads, DIM), normal(BATCH, LENGTH, heads, DIM)
        v = normal(BATCH, LENGTH, HEADS, VALUE_DIM)
        g = -torch.nn.functional.softplus(normal(BATCH, LENGTH, HEADS, *([DIM] if self.kda else [])))
        call = {
            "query": q.to(dtype),
            "key": k.to(dtype),
            "value": v.to(dtype),
            "g": g,
            "beta": normal(BATCH, LENGTH, HEADS).sigmoid().to(dtype),
            "initial_state": normal(BATCH, HEADS, DIM, VALUE_DIM),
            "output_final_state": True,
            "use_qk_l2norm_in_kernel": True,
        }
        return call | more


GDN, KDA = "transformers.gated_delta_rule", "transformers.kda"
FUNCTIONS = [
    Function("torch_chunk_gated_delta_rule", "qwen3_next", GDN, "chunk_gated_delta_rule", gated_delta_rule_reference),
    Function(
        "torch_recurrent_gated_delta_rule",
        "olmo_hybrid",
        GDN,
        "fused_recurrent_gated_delta_rule",
        gated_delta_rule_reference,
    ),
    Function("chunk_kimi_delta_attention", "kimi_linear", KDA, "chunk_kda", kda_reference),
    Function("recurrent_kimi_delta_attention", "kimi_linear", KDA, "fused_recurrent_kda", kda_reference),
]
CHUNK = FUNCTIONS[0]
EACH = pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.name)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


def unwrapped(held: Any) -> Any:
    """The decorator's function; Hugging Face's kernels make a module of it."""
    if isinstance(held, nn.Module):
        forward = type(held).forward
        return dict(zip(forward.__code__.co_freevars, forward.__closure__, strict=True))["func"].cell_contents
    return held


def decorated(function: Function, monkeypatch: pytest.MonkeyPatch, fla: Any) -> Callable[..., Any]:
    """transformers' decorator on its own torch code, where `fla` is FLA: None is FLA not installed."""
    from transformers.integrations import hub_kernels

    def import_module(name: str, *rest: Any) -> Any:
        if name.partition(".")[0] != "fla":
            return importlib.import_module(name, *rest)
        if fla is None:
            raise ImportError(name)
        return fla

    class Importlib:
        pass

    Importlib.import_module = staticmethod(import_module)  # type: ignore[attr-defined]
    monkeypatch.setattr(hub_kernels, "importlib", Importlib)
    monkeypatch.setattr(
        hub_kernels, "resolve_internal_import", lambda module, path: getattr(module, path.split(".")[-1])
    )
    make = hub_kernels.use_kernel_func_from_hub_with_fallback(function.package_name, "fla")
    return unwrapped(make(function.own))


@pytest.fixture
def holding(monkeypatch: pytest.MonkeyPatch) -> Callable[[Function, Any], serve.ServedCall]:
    """Puts a function where its module holds it, switches the target on, and returns the call behind it."""

    def hold(function: Function, held: Any) -> serve.ServedCall:
        monkeypatch.setattr(function.module, function.name, held)
        accel.accelerate(function.target)
        call = serve.wrapped_call(vars(function.module)[function.name], function.state())
        assert call is not None and call.original is held
        return call

    return hold


@pytest.fixture(autouse=True)
def _switched_off_first() -> Iterator[None]:
    """Restore before `holding` puts the module's function back. One thread: on tiny tensors they only wait."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    accel.restore()


def reason(decision: Choice | Declined) -> str:
    assert isinstance(decision, Declined), decision
    return decision.reason


def fla_function(function: Function) -> Callable[..., Any]:
    package = importlib.import_module("fla.ops.kda" if function.kda else "fla.ops.gated_delta_rule")
    return getattr(package, function.package_name)


class Fla:
    """A module `fla` with FLA's four functions."""

    def __init__(self) -> None:
        for function in FUNCTIONS:
            setattr(self, function.package_name, fla_function(function))


# --- Replaced and put back ----------------------------------------------------------------------------------------


@EACH
def test_restore_gives_back_the_very_same_objects(function: Function) -> None:
    module = function.module
    before, upstream = testing.snapshot(("transformers",)), vars(module)[function.name]
    accel.accelerate(function.target)
    wrapper = vars(module)[function.name]
    assert wrapper is not upstream and wrapper.__wrapped__ is upstream
    accel.accelerate(function.target)
    assert vars(module)[function.name] is wrapper
    accel.restore(function.target)
    assert before.changed(testing.snapshot(("transformers",))) == []
    accel.accelerate(function.target)
    assert vars(module)[function.name] is wrapper


@EACH
def test_the_wrapper_has_upstreams_signature(function: Function) -> None:
    upstream = vars(function.module)[function.name]
    accel.accelerate(function.target)
    wrapper = vars(function.module)[function.name]
    assert inspect.signature(wrapper) == inspect.signature(upstream)
    assert wrapper.__doc__ == upstream.__doc__
    assert getattr(upstream, "__name__", wrapper.__name__) == wrapper.__name__


def test_every_model_of_the_installed_transformers_is_understood() -> None:
    """Each modeling file that has one of the functions decorates the same reference, and decorates no other for FLA."""
    spec = importlib.util.find_spec("transformers")
    assert spec is not None and spec.submodule_search_locations
    names = {name for operations in OPERATIONS.values() for name in operations}
    bodies: dict[str, set[str]] = {name: set() for name in names}
    for path in sorted(Path(spec.submodule_search_locations[0], "models").glob("*/modeling_*.py")):
        text = path.read_text()
        if '"fla"' not in text:
            continue
        decorated_here = {
            node.name: node
            for node in ast.parse(text).body
            if isinstance(node, ast.FunctionDef) and any('"fla"' in text_of(text, d) for d in node.decorator_list)
        }
        assert decorated_here.keys() <= names, path
        for name, node in decorated_here.items():
            assert len(node.decorator_list) == 1
            statements = node.body[1:] if ast.get_docstring(node) is not None else node.body
            bodies[name].add("".join(ast.dump(statement) for statement in statements))
    assert {name: len(found) for name, found in bodies.items()} == dict.fromkeys(names, 1)


def text_of(source: str, node: ast.AST) -> str:
    return ast.get_source_segment(source, node) or ""


def test_another_patcher_on_top_survives(monkeypatch: pytest.MonkeyPatch, holding: Any) -> None:
    upstream = decorated(CHUNK, monkeypatch, None)
    holding(CHUNK, upstream)
    ours = vars(CHUNK.module)[CHUNK.name]

    @functools.wraps(ours)
    def theirs(*args: Any, **kwargs: Any) -> Any:
        return ours(*args, **kwargs)

    monkeypatch.setattr(CHUNK.module, CHUNK.name, theirs)
    state, inputs = CHUNK.state(), CHUNK.inputs()
    accel.restore()
    assert vars(CHUNK.module)[CHUNK.name] is theirs and CHUNK.name in state.left[0]
    assert torch.equal(theirs(**inputs)[0], upstream(**inputs)[0]) and not state.served
    accel.accelerate(CHUNK.target)
    assert vars(CHUNK.module)[CHUNK.name] is theirs
    theirs(**inputs)
    assert state.served == {"portable": 1}


def test_a_function_that_hugging_faces_kernels_made_a_module_of(monkeypatch: pytest.MonkeyPatch, holding: Any) -> None:
    func = decorated(CHUNK, monkeypatch, None)

    class Func(nn.Module):  # as kernels 0.16 and 0.17 make it
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return func(*args, **kwargs)

    held, inputs, state = Func(), CHUNK.inputs(), CHUNK.state()
    call = holding(CHUNK, held)
    assert call.adapter.upstream.kernelized is held
    vars(CHUNK.module)[CHUNK.name](**inputs)
    assert state.served == {"portable": 1}
    held.forward = lambda *args, **kwargs: "a kernel of the hub"
    assert vars(CHUNK.module)[CHUNK.name](**inputs) == "a kernel of the hub"
    assert state.declined == {"a hub kernel was chosen for this function": 1}
    accel.restore()
    assert vars(CHUNK.module)[CHUNK.name] is held


# --- Remote code, and what is not understood -----------------------------------------------------------------------


def remote(held: Any) -> ModuleType:
    module = ModuleType("transformers_modules.somebody.modeling_theirs")
    setattr(module, CHUNK.name, held)
    return module


def rebindings(held: Any) -> list[Any]:
    return list(linear_attention.patch(remote(held), CHUNK.state()))


def test_remote_code_is_served_where_flas_function_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(rebindings(decorated(CHUNK, monkeypatch, Fla()))) == 1
    assert rebindings(decorated(CHUNK, monkeypatch, None)) == []
    assert rebindings(CHUNK.own) == []
    assert rebindings(None) == []


def test_another_implementation_in_the_closure_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Other:
        @staticmethod
        def chunk_gated_delta_rule(query: Any, key: Any) -> Any:
            return None

    held = decorated(CHUNK, monkeypatch, Other)
    upstream = Upstream.of(held)
    assert upstream is not None and not upstream.is_fla and not upstream.is_reference
    monkeypatch.setattr(CHUNK.module, CHUNK.name, held)
    accel.accelerate(CHUNK.target)
    assert vars(CHUNK.module)[CHUNK.name] is held


# --- Served: transformers' own torch code is upstream ----------------------------------------------------------------


def leaves(inputs: dict[str, Any], dtype: torch.dtype | None = None) -> dict[str, Any]:
    """The same arguments with tensors that ask for gradients."""
    return {
        name: value.detach().to(dtype or value.dtype).requires_grad_() if isinstance(value, torch.Tensor) else value
        for name, value in inputs.items()
    }


def values(function: Callable[..., Any], inputs: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Output, final state, and the gradients of every tensor."""
    tensors = [value for value in inputs.values() if isinstance(value, torch.Tensor)]
    names = [name for name, value in inputs.items() if isinstance(value, torch.Tensor)]
    out, state = function(**inputs)
    generator = torch.Generator().manual_seed(SEED + 1)
    found, total = {"o": out}, 0.0
    if state is not None:
        found["state"] = state
    for tensor in list(found.values()):
        total = total + (tensor * torch.randn(tensor.shape, generator=generator).bfloat16().to(tensor.dtype)).sum()
    found.update({f"d_{name}": d for name, d in zip(names, torch.autograd.grad(total, tensors), strict=True)})
    return {name: tensor.detach() for name, tensor in found.items()}


def truth(function: Function, inputs: dict[str, Any]) -> dict[str, torch.Tensor]:
    def reference(query: Any, key: Any, value: Any, use_qk_l2norm_in_kernel: bool, **more: Any) -> Any:
        more.pop("chunk_size", None)
        return function.reference(query, key, value, use_qk_l2norm=use_qk_l2norm_in_kernel, **more)

    return values(reference, leaves(inputs, torch.float64))


@DTYPES
@EACH
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"initial_state": None, "output_final_state": False},
        {"use_qk_l2norm_in_kernel": False, "beta_scale": 2.0},
        {"strided": True},
    ],
    ids=["state", "bare", "no_l2norm_beta_to_2", "strided"],
)
def test_served_within_the_accuracy_rule(
    function: Function, dtype: torch.dtype, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch, holding: Any
) -> None:
    options = {name: value for name, value in more.items() if name not in ("beta_scale", "strided")}
    inputs = function.inputs(dtype, **options)
    if "beta_scale" in more:  # OLMo hybrid's negative eigenvalues; keys stay short, or the state explodes
        inputs["beta"] = inputs["beta"] * more["beta_scale"]
        inputs["key"] = torch.nn.functional.normalize(inputs["key"].float(), dim=-1).to(dtype)
    if "strided" in more:
        for name in ("query", "key", "value", "g", "beta"):
            inputs[name] = inputs[name].transpose(1, 2).contiguous().transpose(1, 2)
    call = holding(function, decorated(function, monkeypatch, None))
    theirs = values(call.original, leaves(inputs))
    ours = values(vars(function.module)[function.name], leaves(inputs))
    assert function.state().served == {"portable": 1}
    exact = truth(function, inputs)
    assert ours.keys() == theirs.keys() == exact.keys()
    for name, tensor in ours.items():
        verdict = testing.accuracy(tensor, theirs[name], exact[name])
        assert verdict.ok, f"{name}: {verdict.reason}"


@EACH
def test_unknown_keywords_are_dropped_as_upstream_drops_them(
    function: Function, monkeypatch: pytest.MonkeyPatch, holding: Any
) -> None:
    holding(function, decorated(function, monkeypatch, None))
    served, inputs = vars(function.module)[function.name], function.inputs()
    plain = served(**inputs)
    query, key, value = (inputs.pop(name) for name in ("query", "key", "value"))
    extra = {"position_ids": torch.arange(3), "use_cache": True, "scale": 7.0, "cu_seqlens": None}
    chatty = served(query, key, value, **inputs, **extra)
    assert all(torch.equal(a, b) for a, b in zip(plain, chatty, strict=True))
    assert function.state().served == {"portable": 2}


def test_fewer_heads_than_value_heads(monkeypatch: pytest.MonkeyPatch, holding: Any) -> None:
    call, inputs = holding(CHUNK, decorated(CHUNK, monkeypatch, None)), CHUNK.inputs(heads=1)
    ours, theirs = vars(CHUNK.module)[CHUNK.name](**inputs), call.original(**inputs)
    torch.testing.assert_close(ours, theirs)
    assert CHUNK.state().served == {"portable": 1}


@EACH
def test_results_have_upstreams_dtypes_and_none(
    function: Function, monkeypatch: pytest.MonkeyPatch, holding: Any
) -> None:
    call = holding(function, decorated(function, monkeypatch, None))
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        inputs = function.inputs(dtype, output_final_state=dtype != torch.float16)
        inputs["value"] = inputs["value"].float()
        ours, theirs = vars(function.module)[function.name](**inputs), call.original(**inputs)
        assert [getattr(x, "dtype", x) for x in ours] == [getattr(x, "dtype", x) for x in theirs]


# --- Declined where transformers' own torch code is upstream -------------------------------------------------------


def changed(**changes: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda inputs: inputs | changes


REFERENCE: list[tuple[Callable[[dict[str, Any]], dict[str, Any]], str, bool]] = [
    (changed(query=None), "query is a NoneType, not a tensor", False),
    (changed(chunk_size=0), "chunk_size=0 is not a positive number", False),
    (changed(chunk_size=16.0), "chunk_size=16.0 is not a positive number", False),
    (changed(cu_seqlens=torch.tensor([0, 3])), "cu_seqlens: without flash-linear-attention", False),
    (changed(seq_idx=torch.tensor([0, 3])), "seq_idx: without flash-linear-attention", False),
    (changed(kwargs=3), "the arguments do not fit the signature", True),
    (lambda i: {k: v for k, v in i.items() if k != "beta"}, "the arguments do not fit the signature", False),
    (lambda i: i | {"query": i["query"].bfloat16()}, "q is torch.bfloat16, k is torch.float32", True),
    (lambda i: i | {"key": i["key"][:, :, :1]}, "k is [2, 70, 1, 16], q is [2, 70, 2, 16]", False),
    (lambda i: i | {"g": i["g"][:, :1]}, "g is [2, 1, 2], not [2, 70, 2]", False),
    (lambda i: i | {"beta": i["beta"][:, :1]}, "beta is [2, 1, 2], not [2, 70, 2]", False),
    (lambda i: i | {"initial_state": i["initial_state"].long()}, "initial_state is torch.int64", True),
    (lambda i: i | {"initial_state": i["initial_state"][:1]}, "initial_state is [1, 2, 16, 24], not", True),
    (
        lambda i: {k: v[:, :0] if k in ("query", "key", "value", "g", "beta") else v for k, v in i.items()},
        "an empty sequence",
        False,
    ),
    (lambda i: {k: v.to("meta") if hasattr(v, "to") else v for k, v in i.items()}, "query is on device meta", False),
]


@pytest.mark.parametrize(("change", "expected", "runs"), REFERENCE, ids=[row[1] for row in REFERENCE])
def test_declined_calls_are_upstreams(
    change: Any, expected: str, runs: bool, monkeypatch: pytest.MonkeyPatch, holding: Any
) -> None:
    """Where upstream computes a result it is the same, bit for bit; where it raises, so does the declined call."""
    call = holding(CHUNK, decorated(CHUNK, monkeypatch, None))
    inputs = change(CHUNK.inputs())
    assert reason(call.explain((), inputs)).startswith(expected)
    if runs:
        ours, theirs = vars(CHUNK.module)[CHUNK.name](**inputs), call.original(**inputs)
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
        assert next(iter(CHUNK.state().declined)).startswith(expected)


def test_too_many_positional_arguments(monkeypatch: pytest.MonkeyPatch, holding: Any) -> None:
    call = holding(CHUNK, decorated(CHUNK, monkeypatch, None))
    inputs = CHUNK.inputs()
    assert reason(call.explain((1,) * 10, {})) == "the arguments do not fit the signature"
    assert reason(call.explain((inputs["query"],), inputs)) == "the arguments do not fit the signature"


def test_kda_with_fewer_heads_is_upstreams_to_reject(monkeypatch: pytest.MonkeyPatch, holding: Any) -> None:
    function = FUNCTIONS[2]
    call, inputs = holding(function, decorated(function, monkeypatch, None)), function.inputs(heads=1)
    assert reason(call.explain((), inputs)).startswith("2 value heads, 1 heads: transformers' own code")
    wrong = function.inputs()
    wrong["g"] = wrong["g"][..., 0]
    assert reason(call.explain((), wrong)) == "g is [2, 70, 2], not [2, 70, 2, 16]"


@EACH
@pytest.mark.parametrize("fla", [False, True], ids=["torch", "fla"])
def test_what_has_no_kernel_on_a_gpu(
    function: Function, fla: bool, monkeypatch: pytest.MonkeyPatch, holding: Any, fake_cuda: Any
) -> None:
    call = holding(function, decorated(function, monkeypatch, Fla() if fla else None))
    inputs = function.inputs(torch.bfloat16)
    inputs = {
        name: fake_cuda.empty(*value.shape, dtype=value.dtype) if isinstance(value, torch.Tensor) else value
        for name, value in inputs.items()
    }
    query, key, value = (inputs.pop(name) for name in ("query", "key", "value"))
    decision, _ = call.decide((query, key, value), inputs, arch="sm_90")
    if function.kda:
        assert reason(decision) == "no kda kernel for sm_90 yet: upstream's own runs"
    elif function.recurrent:
        assert reason(decision) == f"head_dim={DIM}: the recurrent kernel has 64, 128, 256"
    else:
        assert reason(decision) == f"head_dim={DIM}: the chunked kernel has 64, 128, 256"


@pytest.mark.parametrize("fla", [False, True], ids=["torch", "fla"])
def test_decoding_with_the_gated_delta_rule_has_a_kernel(
    fla: bool, monkeypatch: pytest.MonkeyPatch, holding: Any, fake_cuda: Any
) -> None:
    monkeypatch.setenv("ACCEL_UNCERTIFIED", "1")
    monkeypatch.setattr(certificates, "dsl_version", functools.cache(lambda: "4.8.1"))  # installed or not
    function = FUNCTIONS[1]
    call = holding(function, decorated(function, monkeypatch, Fla() if fla else None))
    q, v = (fake_cuda.empty(2, 1, heads, 128, dtype=torch.bfloat16) for heads in (2, 4))
    gates = fake_cuda.empty(2, 1, 4, dtype=torch.float32)
    keywords = {
        "g": gates,
        "beta": gates,
        "initial_state": fake_cuda.empty(2, 4, 128, 128, dtype=torch.float32),
        "output_final_state": True,
        "use_qk_l2norm_in_kernel": True,
    }
    decision, _ = call.decide((q, q, v), keywords, arch="sm_90")
    assert decision == Choice("gated_delta_rule", "any_recurrent")


# --- FLA's function is upstream ----------------------------------------------------------------------------------


@EACH
def test_flas_function_is_served_on_a_cpu(function: Function, monkeypatch: pytest.MonkeyPatch, holding: Any) -> None:
    """FLA itself has no driver there; transformers' own torch code gives the values."""
    inputs = function.inputs()
    expected = function.own(**inputs)
    call = holding(function, decorated(function, monkeypatch, Fla()))
    assert call.adapter.fla is not None and call.adapter.upstream_cannot_run_on == ("cpu",)
    query, key, value = (inputs.pop(name) for name in ("query", "key", "value"))
    served = vars(function.module)[function.name]
    out, state = served(query, key, value, **inputs, position_ids=torch.arange(3), cu_seqlens=None)
    torch.testing.assert_close((out, state), expected)
    assert function.state().served == {"portable": 1}
    accel.restore()
    with pytest.raises(RuntimeError, match="active driver"):
        vars(function.module)[function.name](query, key, value, **inputs)


def test_packed_sequences_do_not_leak_into_each_other(monkeypatch: pytest.MonkeyPatch, holding: Any) -> None:
    holding(CHUNK, decorated(CHUNK, monkeypatch, Fla()))
    served, inputs = vars(CHUNK.module)[CHUNK.name], CHUNK.inputs(initial_state=None)
    tensors = [inputs[name][:1] for name in ("query", "key", "value")]
    more = {"g": inputs["g"][:1], "beta": inputs["beta"][:1], "output_final_state": True}
    bounds = [0, 30, 31, LENGTH]
    packed, states = served(*tensors, **more, cu_seqlens=torch.tensor(bounds))
    for index, (start, end) in enumerate(itertools.pairwise(bounds)):
        cut = {name: value[:, start:end] if isinstance(value, torch.Tensor) else value for name, value in more.items()}
        alone, state = served(*[x[:, start:end] for x in tensors], **cut)
        torch.testing.assert_close(packed[:, start:end], alone)
        torch.testing.assert_close(states[index : index + 1], state)


def test_arguments_beyond_the_third_are_in_flas_order(monkeypatch: pytest.MonkeyPatch, holding: Any) -> None:
    """transformers hands positional arguments on as they are: FLA's sixth is the scale, not the chunk size."""
    holding(CHUNK, decorated(CHUNK, monkeypatch, Fla()))
    inputs = CHUNK.inputs(initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False)
    five = [inputs[name] for name in ("query", "key", "value", "g", "beta")]
    served = vars(CHUNK.module)[CHUNK.name]
    torch.testing.assert_close(served(*five, 1.0)[0], served(*five)[0] * DIM**0.5)


def test_what_flas_function_would_reject_is_declined(monkeypatch: pytest.MonkeyPatch, holding: Any) -> None:
    call = holding(CHUNK, decorated(CHUNK, monkeypatch, Fla()))
    inputs = CHUNK.inputs()
    assert reason(call.explain((), inputs)) == "the arguments do not fit the signature"  # query is not FLA's name
    query, key, value = (inputs.pop(name) for name in ("query", "key", "value"))
    half = {"allow_neg_eigval": True}
    decision = call.explain((query, key, value), inputs | half)
    assert reason(decision) == "allow_neg_eigval without use_beta_sigmoid_in_kernel"
    # hidden in FLA's **kwargs, so transformers never hands it on
    assert isinstance(call.explain((query, key, value), inputs | {"use_gate_in_kernel": True}), Choice)


def test_a_call_declined_here_is_not_counted_again_inside_fla(monkeypatch: pytest.MonkeyPatch, holding: Any) -> None:
    accel.accelerate("fla.gated_delta_rule")
    holding(CHUNK, decorated(CHUNK, monkeypatch, Fla()))
    inputs = CHUNK.inputs(allow_neg_eigval=True)
    query, key, value = (inputs.pop(name) for name in ("query", "key", "value"))
    with pytest.raises(Exception):  # noqa: B017 - whatever FLA says to it without a GPU
        vars(CHUNK.module)[CHUNK.name](query, key, value, **inputs)
    assert sum(CHUNK.state().declined.values()) == 1
    assert not STATES["fla.gated_delta_rule"].declined and not STATES["fla.gated_delta_rule"].served


# --- Compiled -------------------------------------------------------------------------------------------------------


@EACH
@pytest.mark.parametrize("fla", [False, True], ids=["torch", "fla"])
def test_compiled_code_is_served_whole(
    function: Function, fla: bool, monkeypatch: pytest.MonkeyPatch, holding: Any
) -> None:
    inputs = function.inputs()
    expected = function.own(**inputs)
    holding(function, decorated(function, monkeypatch, Fla() if fla else None))
    query, key, value = (inputs.pop(name) for name in ("query", "key", "value"))
    module, name = function.module, function.name

    def layer(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **more: Any) -> Any:
        return vars(module)[name](query, key, value, **more)

    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(query, key, value, **inputs), expected)
    assert not function.state().declined
