"""FLA's `chunk_gated_delta_rule` and `fused_recurrent_gated_delta_rule`: rebinding, matching, declining, undoing."""

from __future__ import annotations

import functools
import inspect
import re
import sys
import types
import warnings
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import version
from typing import Any

import fla.layers.gated_deltanet
import fla.layers.mom
import fla.ops.gated_delta_rule
import pytest
import torch
from torch._dynamo.testing import CompileCounter

import accel
from accel import certificates, serve
from accel.kernels.gated_delta_rule import recurrent_gated_delta_rule
from accel.kernels.gated_delta_rule.cases import RECURRENT_CASES, TRAINING_CASES
from accel.outcome import Choice, Declined
from accel.state import STATES
from accel.testing import accuracy, snapshot

SEED = 20261130
CHUNK, RECURRENT = "chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"
TARGETS = {CHUNK: "fla.gated_delta_rule", RECURRENT: "fla.fused_recurrent_gated_delta_rule"}
OLD = version("fla-core").startswith("0.5")


@pytest.fixture(autouse=True)
def _seed() -> None:
    print(f"seed {SEED}")
    torch.manual_seed(SEED)


def upstream(name: str) -> Callable[..., Any]:
    """What `fla.ops` holds under the name now."""
    return getattr(fla.ops.gated_delta_rule, name)


def arguments(name: str = CHUNK, batch: int = 2, tokens: int = 9, **changes: Any) -> dict[str, Any]:
    """Valid arguments: 2 heads, 4 value heads, K 16, V 24."""
    given: dict[str, Any] = {
        "q": torch.randn(batch, tokens, 2, 16),
        "k": torch.randn(batch, tokens, 2, 16),
        "v": torch.randn(batch, tokens, 4, 24),
        "g": -torch.rand(batch, tokens, 4),
        "beta": torch.rand(batch, tokens, 4),
        "use_qk_l2norm_in_kernel": True,
    }
    return {**given, **changes}


def outcome(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The result, or the exception as (type, message)."""
    try:
        return function(*args, **kwargs)
    except Exception as error:
        return type(error), str(error)


# ---- identity ----


def test_off_on_off_restores_identical_objects() -> None:
    import transformers.models.qwen3_next.modeling_qwen3_next  # noqa: F401 - holds FLA's functions in closures

    before = snapshot()
    originals = {name: upstream(name) for name in TARGETS}
    for _ in range(2):
        report = accel.accelerate(list(TARGETS.values()))
        assert report.active == tuple(TARGETS.values())
        for name, original in originals.items():
            assert upstream(name) is not original
            assert upstream(name).__wrapped__ is original
        accel.restore()
        assert before.changed(snapshot()) == []


def test_every_holder_is_rebound_under_any_name() -> None:
    import transformers.models.qwen3_next.modeling_qwen3_next as imported_before

    original = {name: upstream(name) for name in TARGETS}
    accel.accelerate("gdn")
    import transformers.models.olmo_hybrid.modeling_olmo_hybrid as imported_after

    chunk, recurrent = upstream(CHUNK), upstream(RECURRENT)
    for holder in (fla.ops, fla.ops.gated_delta_rule, sys.modules["fla.ops.gated_delta_rule.chunk"]):
        assert holder.chunk_gated_delta_rule is holder.chunk_gdn is chunk
    for holder in (fla.ops, fla.ops.gated_delta_rule, sys.modules["fla.ops.gated_delta_rule.fused_recurrent"]):
        assert holder.fused_recurrent_gated_delta_rule is holder.fused_recurrent_gdn is recurrent
    for layer in (fla.layers.gated_deltanet, fla.layers.mom):
        assert layer.chunk_gated_delta_rule is chunk
        assert layer.fused_recurrent_gated_delta_rule is recurrent
    models = (imported_before, imported_after)
    accel.restore("transformers")  # its own targets wrap the same functions from outside
    for model in models:
        assert captured(model.torch_chunk_gated_delta_rule) is chunk
        assert captured(model.torch_recurrent_gated_delta_rule) is recurrent
    accel.restore()
    for model in models:
        assert captured(model.torch_chunk_gated_delta_rule) is original[CHUNK]
        assert captured(model.torch_recurrent_gated_delta_rule) is original[RECURRENT]


def captured(function: Any) -> Any:
    """What transformers' decorator keeps of FLA in a closure; `kernels`, if installed, makes the function a module."""
    if isinstance(function, torch.nn.Module):
        function = inspect.getclosurevars(type(function).forward).nonlocals["func"]
    return inspect.getclosurevars(function).nonlocals["implementation"]


@pytest.mark.parametrize("name", TARGETS)
def test_signature_name_and_doc_are_upstreams(name: str) -> None:
    original = upstream(name)
    accel.accelerate("gdn")
    wrapper = upstream(name)
    assert inspect.signature(wrapper) == inspect.signature(original)
    assert isinstance(wrapper, types.FunctionType)
    for attribute in ("__name__", "__qualname__", "__module__", "__doc__"):
        assert getattr(wrapper, attribute) == getattr(original, attribute)


@pytest.mark.parametrize("name", TARGETS)
def test_adapter_knows_every_parameter_of_upstream(name: str) -> None:
    accel.accelerate("gdn")
    theirs = inspect.signature(upstream(name)).parameters
    adapter = serve.wrapped_call(upstream(name)).adapter
    for method in (adapter.facts, functools.partial(adapter.run, None)):
        ours = inspect.signature(method).parameters
        shared = [p for p in ours.values() if p.name in theirs and p.kind is not inspect.Parameter.VAR_KEYWORD]
        expected = [p for p in theirs.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
        assert [p.name for p in shared] == [p.name for p in expected]
        assert [p.default for p in shared] == [p.default for p in expected]
        assert all(p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD for p in shared)


# ---- matching ----


@pytest.mark.parametrize(
    "case", [case for case in TRAINING_CASES if case.lengths != (1024,)], ids=lambda case: case.name
)
def test_accepted_calls_match_the_oracle(case: Any) -> None:
    inputs = case.make(torch.device("cpu"), torch.Generator().manual_seed(SEED))
    accel.accelerate("gdn")
    function = accel.patches.fla.delta_rule.in_our_words(upstream(case.call))
    portable = accel.kernels.gated_delta_rule.cases.portable(case, inputs)
    oracle = case.oracle(inputs)
    if case.mode == "chunk":
        ours = case.call_with(function, inputs)
    else:
        tensors = {name: x for name, x in inputs.items() if not name.startswith("d_")}
        with torch.no_grad():
            o, final = function(**tensors, **case.options())
        ours = {"o": o} if final is None else {"o": o, "final_state": final}
    for name, value in ours.items():
        verdict = accuracy(value, portable[name], oracle[name])
        assert verdict.ok, f"{name}: {verdict.reason}"
    assert STATES[TARGETS[case.call]].served == {"portable": 1}


def test_chunked_and_recurrent_agree_with_decays_per_channel_left_out() -> None:
    accel.accelerate("gdn")
    given = arguments(initial_state=torch.randn(2, 4, 24, 16), state_v_first=True, output_final_state=True)
    o, state = upstream(CHUNK)(**given)
    o_step, state_step = upstream(RECURRENT)(**given)
    torch.testing.assert_close(o, o_step, rtol=2e-5, atol=2e-6)
    torch.testing.assert_close(state, state_step, rtol=2e-5, atol=2e-6)
    assert state.dtype == torch.float32 and state.shape == (2, 4, 24, 16)


def test_options_hidden_in_upstreams_keywords() -> None:
    accel.accelerate("gdn")
    A_log, dt_bias = torch.randn(4), torch.randn(4)
    raw = arguments(g=torch.randn(2, 9, 4), use_gate_in_kernel=True, A_log=A_log, dt_bias=dt_bias, chunk_size=32)
    decay = -A_log.exp() * torch.nn.functional.softplus(raw["g"] + dt_bias)
    expected = upstream(CHUNK)(**arguments(**{name: raw[name] for name in ("q", "k", "v", "beta")}, g=decay))
    for name in TARGETS:
        o, final = upstream(name)(**{key: value for key, value in raw.items() if name == CHUNK or key != "chunk_size"})
        torch.testing.assert_close(o, expected[0], rtol=2e-5, atol=2e-6)
        assert final is None
    # without the gate in the kernel upstream reads neither of its parameters
    o, _ = upstream(CHUNK)(**{**raw, "g": decay, "use_gate_in_kernel": False, "A_log": torch.randn(7)})
    assert torch.equal(o, expected[0])


@pytest.mark.parametrize("name", TARGETS)
def test_the_deprecated_state_layout_is_served_and_warned_of(name: str) -> None:
    accel.accelerate("gdn")
    given = arguments(initial_state=torch.randn(2, 4, 24, 16), output_final_state=True)
    expected = upstream(name)(**given, state_v_first=True)
    with pytest.warns(DeprecationWarning, match="`transpose_state_layout` is deprecated") as caught:
        o, state = upstream(name)(**given, transpose_state_layout=True)
    assert torch.equal(o, expected[0]) and torch.equal(state, expected[1])
    assert caught[0].filename == __file__


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_dtypes_of_the_results_are_upstreams(dtype: torch.dtype) -> None:
    accel.accelerate("gdn")
    given = arguments(output_final_state=True)
    given = {key: x.to(dtype) if isinstance(x, torch.Tensor) else x for key, x in given.items()}
    o, state = upstream(CHUNK)(**given)
    assert o.dtype == dtype and state.dtype == torch.float32
    o, state = upstream(RECURRENT)(**{**given, "v": given["v"].float()})
    assert o.dtype == torch.float32 and state.dtype == torch.float32  # v's dtype


def test_autocast_changes_nothing() -> None:
    accel.accelerate("gdn")
    given = arguments(output_final_state=True)
    for name in TARGETS:
        plain = upstream(name)(**given)
        with torch.autocast("cpu", torch.bfloat16):
            cast = upstream(name)(**given)
        assert all(torch.equal(a, b) for a, b in zip(plain, cast, strict=True))


def test_the_recurrent_rule_has_no_backward_pass() -> None:
    accel.accelerate("gdn")
    given = arguments(v=torch.randn(2, 9, 4, 24, requires_grad=True), output_final_state=True)
    o, state = upstream(RECURRENT)(**given)
    with torch.no_grad():
        expected = upstream(RECURRENT)(**given)
    assert torch.equal(o, expected[0]) and torch.equal(state, expected[1])
    assert o.requires_grad and not expected[0].requires_grad
    for result in (o, state):
        with pytest.raises(NotImplementedError):
            result.sum().backward()


@pytest.mark.parametrize("name", TARGETS)
def test_full_graph_compilation(name: str) -> None:
    accel.accelerate("gdn")
    function = upstream(name)
    given = arguments(output_final_state=True)
    with torch.no_grad():
        expected = function(**given)
        compiled = torch.compile(lambda kwargs: function(**kwargs), fullgraph=True, backend="aot_eager")
        result = compiled(given)
    for a, b in zip(result, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_gradients_of_compiled_code() -> None:
    accel.accelerate("gdn")
    function, leaf = upstream(CHUNK), torch.randn(2, 9, 4, 24, requires_grad=True)
    given = arguments()

    def loss(v: torch.Tensor) -> torch.Tensor:
        return function(**{**given, "v": v})[0].square().sum()

    (expected,) = torch.autograd.grad(loss(leaf), leaf)
    (result,) = torch.autograd.grad(torch.compile(loss, fullgraph=True, backend="aot_eager")(leaf), leaf)
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-6)


def test_compiled_code_serves_every_length_and_declines_as_eager_code_does() -> None:
    accel.accelerate("gdn")
    function, counter = upstream(CHUNK), CompileCounter()
    compiled = torch.compile(lambda given: function(**given)[0], backend=counter)
    for tokens in (9, 12, 33, 70):
        given = arguments(tokens=tokens)
        torch.testing.assert_close(compiled(given), function(**given)[0], rtol=1e-5, atol=1e-6)
    assert counter.frame_count == 2  # one for the first length, one for all others
    with pytest.raises(ValueError, match="`chunk_size` must be 16, 32, or 64"):
        compiled(arguments(chunk_size=7))


def test_verification_leaves_out_what_upstream_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCEL_VERIFY", "2")
    accel.accelerate("gdn", strict=True)
    for name in TARGETS:
        upstream(name)(**arguments())
        assert STATES[TARGETS[name]].served == {"portable": 1}


# ---- declining ----

cpu_state = functools.partial(torch.zeros, 2, 4, 16, 24)
HOOKED = type("Tagged", (torch.Tensor,), {})

#: name -> (changed arguments, the reason, what upstream raises by itself or None where it gets to its kernels)
CHUNK_DECLINES: dict[str, tuple[Callable[[], dict[str, Any]], str, type[Exception] | None]] = {
    "unknown keyword": (lambda: {"window": 3}, "unknown keyword window", None),
    "head_first": (lambda: {"head_first": False}, "head_first was removed upstream", DeprecationWarning),
    "two layouts": (
        lambda: {"state_v_first": True, "transpose_state_layout": True},
        "both state_v_first and transpose_state_layout",
        ValueError,
    ),
    "cp_context": (lambda: {"cp_context": types.SimpleNamespace(cu_seqlens=None)}, "cp_context", AssertionError),
    "scale": (lambda: {"scale": torch.tensor(0.5)}, "scale is a Tensor, not a number", None),
    "chunk_size": (lambda: {"chunk_size": 48}, "chunk_size=48 is not 16, 32 or 64", ValueError),
    "neg eigval": (
        lambda: {"allow_neg_eigval": True},
        "allow_neg_eigval without use_beta_sigmoid_in_kernel",
        ValueError,
    ),
    "no A_log": (lambda: {"use_gate_in_kernel": True}, "use_gate_in_kernel without A_log", AssertionError),
    "no gate": (lambda: {"g": None}, "g is a NoneType, not a tensor", None),
    "state of no tensor": (lambda: {"initial_state": [0.0]}, r"initial_state is a list, not a tensor", None),
    "subclass": (lambda: {"v": torch.randn(2, 9, 4, 24).as_subclass(HOOKED)}, "v is a Tagged, not a plain", None),
    "sparse": (lambda: {"beta": torch.rand(2, 9, 4).to_sparse()}, "beta has layout torch.sparse_coo", None),
    "meta": (lambda: {"q": torch.randn(2, 9, 2, 16, device="meta")}, "q is on device meta", None),
    "two devices": (lambda: {"v": torch.randn(2, 9, 4, 24, device="meta")}, "v is on meta, other tensors", None),
    "rank": (lambda: {"q": torch.randn(2, 9, 32), "k": torch.randn(2, 9, 32)}, r"q is \[2, 9, 32\] and v", None),
    "heads of k": (lambda: {"k": torch.randn(2, 9, 4, 16)}, r"k is \[2, 9, 4, 16\], q is", ValueError),
    "length of v": (lambda: {"v": torch.randn(2, 8, 4, 24)}, r"v is \[2, 8, 4, 24\], q is", None),
    "value heads": (lambda: {"v": torch.randn(2, 9, 3, 24)}, "3 value heads are no multiple of 2 heads", ValueError),
    "dtypes": (lambda: {"v": torch.randn(2, 9, 4, 24).half()}, "q, k, v are torch.float32, torch.flo", None),
    "integers": (
        lambda: {name: torch.ones(2, 9, heads, 16).int() for name, heads in (("q", 2), ("k", 2), ("v", 4))},
        "dtype=int32 is none of",
        None,
    ),
    "head_dim": (
        lambda: {"q": torch.randn(2, 9, 2, 264), "k": torch.randn(2, 9, 2, 264)},
        "head_dim=264 > 256, upstream's limit",
        None,
    ),
    "shape of g": (lambda: {"g": torch.rand(2, 9, 4, 16)}, r"g is \[2, 9, 4, 16\], not \[2, 9, 4\]", None),
    "dtype of g": (lambda: {"g": torch.ones(2, 9, 4).int()}, "g is torch.int32", None),
    "shape of beta": (lambda: {"beta": torch.rand(2, 9, 2)}, r"beta is \[2, 9, 2\], not \[2, 9, 4\]", None),
    "A_log": (
        lambda: {"use_gate_in_kernel": True, "A_log": torch.randn(2)},
        "A_log has 2 elements, not 4",
        None,
    ),
    "dt_bias": (
        lambda: {"use_gate_in_kernel": True, "A_log": torch.randn(4), "dt_bias": torch.randn(2)},
        "dt_bias has 2 elements, not 4",
        None,
    ),
    "dtype of cu_seqlens": (lambda: {"cu_seqlens": torch.tensor([0.0, 9.0])}, "cu_seqlens is torch.fl", ValueError),
    "rank of cu_seqlens": (lambda: {"cu_seqlens": torch.tensor([[0, 9]])}, r"cu_seqlens is \[1, 2\]", ValueError),
    "no sequence": (lambda: {"cu_seqlens": torch.tensor([0])}, r"cu_seqlens is \[1\], not \[N \+ 1\]", ValueError),
    "batch": (lambda: {"cu_seqlens": torch.tensor([0, 9])}, "cu_seqlens with a batch of 2", ValueError),
    "layout of the state": (
        lambda: {"initial_state": cpu_state(), "state_v_first": True},
        r"initial_state is \[2, 4, 16, 24\], not \[2, 4, 24, 16\]",
        None,
    ),
    "dtype of the state": (lambda: {"initial_state": cpu_state().int()}, "initial_state is torch.int32", None),
    "too few": (lambda: {"q": ...}, "the arguments do not fit the signature", TypeError),
}  # fmt: skip
RECURRENT_DECLINES: dict[str, tuple[Callable[[], dict[str, Any]], str, type[Exception] | None]] = {
    "unknown keyword": (lambda: {"chunk_size": 64}, "unknown keyword chunk_size", None),
    "two layouts": CHUNK_DECLINES["two layouts"],
    "scale": CHUNK_DECLINES["scale"],
    "neg eigval": CHUNK_DECLINES["neg eigval"],
    "no A_log": (lambda: {"use_gate_in_kernel": True}, "use_gate_in_kernel without A_log", ValueError),
    "no g": (
        lambda: {"use_gate_in_kernel": True, "A_log": torch.randn(4), "g": None},
        "use_gate_in_kernel without g",
        ValueError,
    ),
    "gk": (lambda: {"gk": torch.rand(2, 9, 4)}, r"gk is \[2, 9, 4\], not \[2, 9, 4, 16\]", None),
    "gv": (lambda: {"gv": torch.rand(2, 9, 4, 16)}, r"gv is \[2, 9, 4, 16\], not \[2, 9, 4, 24\]", None),
    "beta": (lambda: {"beta": torch.rand(2, 9)}, r"beta is \[2, 9\], not \[2, 9, 4\] or \[2, 9, 4, 24\]", None),
    "dtypes": (lambda: {"q": torch.randn(2, 9, 2, 16).half()}, "q is torch.float16, k is torch.float32", None),
    "v": (lambda: {"v": torch.ones(2, 9, 4, 24).int()}, "v dtype=int32 is none of", None),
    "batch": CHUNK_DECLINES["batch"],
    "states": (
        lambda: {"q": torch.randn(1, 9, 2, 16), "k": torch.randn(1, 9, 2, 16), "v": torch.randn(1, 9, 4, 24),
                 "g": None, "beta": None, "cu_seqlens": torch.tensor([0, 4, 9, 9]), "initial_state": cpu_state()},
        r"initial_state is \[2, 4, 16, 24\], not \[3, 4, 16, 24\]",
        ValueError,
    ),
}  # fmt: skip
DECLINES = [
    *((CHUNK, key, *row) for key, row in CHUNK_DECLINES.items()),
    *((RECURRENT, key, *row) for key, row in RECURRENT_DECLINES.items()),
]
NAMES = [f"{row[0][:5]}-{row[1]}" for row in DECLINES]


@pytest.mark.parametrize("name, changes, reason, error", [row[:1] + row[2:] for row in DECLINES], ids=NAMES)
def test_declines(name: str, changes: Callable[[], dict[str, Any]], reason: str, error: type[Exception] | None) -> None:
    given = {k: x for k, x in arguments(name, **changes()).items() if x is not ...}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        theirs = outcome(upstream(name), **given)
        accel.accelerate("gdn")
        assert isinstance(accel.explain(TARGETS[name], **given), Declined)
        ours = outcome(upstream(name), **given)
    assert ours == theirs
    if error is not None:
        assert theirs[0] is error
    state = STATES[TARGETS[name]]
    assert not state.served and sum(state.declined.values()) == 1
    (counted,) = state.declined
    assert re.search(reason, counted), counted


@pytest.mark.parametrize("name", TARGETS)
def test_on_a_gpu_both_functions_have_a_kernel(name: str, fake_cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCEL_UNCERTIFIED", "1")
    monkeypatch.setattr(certificates, "dsl_version", functools.cache(lambda: "4.8.1"))  # installed or not
    accel.accelerate("gdn")
    call = serve.wrapped_call(upstream(name))
    for head_dim in (64, None):
        given = {
            k: fake_cuda.empty(*x.shape, dtype=torch.bfloat16 if k in "qkv" else x.dtype)
            if isinstance(x, torch.Tensor)
            else x
            for k, x in arguments(name).items()
        }
        if head_dim is not None:
            wide = {"q": head_dim, "k": head_dim, "v": 2 * head_dim}
            given |= {k: fake_cuda.empty(*given[k].shape[:3], n, dtype=given[k].dtype) for k, n in wide.items()}
            given["initial_state"] = None
        for arch in ("sm_80", "sm_90", "sm_100"):
            decision, _ = call.decide((), given, arch=arch)
            if name == CHUNK and arch != "sm_90":
                assert decision == Declined(f"no chunked gated_delta_rule kernel for {arch} yet: upstream's own runs")
            elif head_dim is None:
                kind = "chunked" if name == CHUNK else "recurrent"
                assert isinstance(decision, Declined) and f"the {kind} kernel has 64, 128, 256" in decision.reason
            else:
                assert decision == Choice("gated_delta_rule", "sm90_fwd" if name == CHUNK else "any_recurrent")


def test_a_planned_launch_is_taken_where_upstream_knows_it() -> None:
    accel.accelerate("gdn")
    given = arguments(batch=1, cu_seqlens=torch.tensor([0, 4, 9]))
    indices = torch.tensor([[0, 0], [1, 0]])
    expected = upstream(CHUNK)(**given)
    assert torch.equal(upstream(CHUNK)(**given, cu_seqlens_cpu=torch.tensor([0, 4, 9]))[0], expected[0])
    if OLD:  # by position it would be the cp_context there
        decision = accel.explain(TARGETS[CHUNK], **given, chunk_indices=indices)
        assert decision == Declined("chunk_indices, which this FLA release does not have")
    else:
        assert torch.equal(upstream(CHUNK)(**given, chunk_indices=indices)[0], expected[0])


def test_a_declined_call_gets_the_callers_own_arguments() -> None:
    """The original stands in for upstream's kernels here: it returns what it is given."""

    def echo(*args: Any, **kwargs: Any) -> Any:
        return args, kwargs

    accel.accelerate("gdn")
    adapter = serve.wrapped_call(upstream(CHUNK)).adapter
    wrapper = serve.wrap(echo, adapter, STATES[TARGETS[CHUNK]])
    given = arguments(window=1)
    q = given.pop("q")
    args, kwargs = wrapper(q, **given)
    assert args[0] is q and kwargs.keys() == given.keys() and all(kwargs[k] is given[k] for k in given)


# ---- others on top ----


def test_another_patcher_on_top_survives(monkeypatch: pytest.MonkeyPatch) -> None:
    before = snapshot()
    original = upstream(CHUNK)
    accel.accelerate("fla.gated_delta_rule")
    ours, seen = upstream(CHUNK), []

    @functools.wraps(ours)
    def theirs(*args: Any, **kwargs: Any) -> Any:
        seen.append(len(args))
        return ours(*args, **kwargs)

    monkeypatch.setattr(fla.layers.gated_deltanet, CHUNK, theirs)
    given = arguments()
    theirs(**given)
    accel.restore()
    assert fla.layers.gated_deltanet.chunk_gated_delta_rule is theirs
    assert upstream(CHUNK) is original
    assert any("fla.layers.gated_deltanet" in line for line in STATES["fla.gated_delta_rule"].left)
    assert outcome(theirs, **given) == outcome(original, **given)  # ours, inside, has stepped aside
    accel.accelerate("fla.gated_delta_rule")
    theirs(**given)
    assert STATES["fla.gated_delta_rule"].served == {"portable": 2} and len(seen) == 3
    accel.restore()
    monkeypatch.undo()
    fla.layers.gated_deltanet.chunk_gated_delta_rule = original
    assert before.changed(snapshot()) == []


def test_explain_runs_and_counts_nothing() -> None:
    accel.accelerate("gdn")
    decision = accel.explain(upstream(CHUNK), **arguments())
    assert decision == Choice("gated_delta_rule", "portable")
    assert not STATES[TARGETS[CHUNK]].served


def test_fla_certifies_what_it_has_a_function_for() -> None:
    """It has no gradients token by token."""
    adapter = import_module("accel.patches.fla.gated_delta_rule")
    offered = {case.mode for case in TRAINING_CASES if adapter.upstream(case) is not None}
    assert offered == {"chunk"} and adapter.CERTIFIES == "gated_delta_rule"
    assert all(adapter.upstream(case) is not None for case in RECURRENT_CASES)


@pytest.mark.parametrize("state", ["new", "pool", "in_place", "initial", "final"])
def test_the_yardstick_of_decoding_is_upstreams_function(state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain torch stands in for FLA's kernel: pools and dtypes are the adapter's business."""
    from accel.kernels.gated_delta_rule.recurrent_cases import RecurrentCase, portable

    adapter = import_module("accel.patches.fla.gated_delta_rule")
    ops = import_module("fla.ops.gated_delta_rule")

    def plain(**given: Any) -> Any:
        flags = ("use_qk_l2norm", "use_gate", "use_beta_sigmoid")
        assert all(f"{flag}_in_kernel" in given for flag in flags)
        return recurrent_gated_delta_rule(**{name.removesuffix("_in_kernel"): x for name, x in given.items()})

    monkeypatch.setattr(ops, "fused_recurrent_gated_delta_rule", plain)
    case = RecurrentCase((3, 3, 3), (1, 2), (64, 16), "float32", state=state)
    inputs = case.make("cpu", torch.Generator().manual_seed(SEED))
    got, want = adapter.upstream(case)(inputs), portable(case, inputs)
    assert set(got) == set(want)
    for name, x in got.items():
        torch.testing.assert_close(x, want[name])
