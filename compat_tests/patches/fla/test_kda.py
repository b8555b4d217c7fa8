"""FLA's `chunk_kda` and `fused_recurrent_kda`: rebinding, matching, declining, undoing."""

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

import fla.layers.kda
import fla.ops.kda
import pytest
import torch

import accel
from accel import serve
from accel.kernels.kda.cases import CASES, portable
from accel.outcome import Choice, Declined
from accel.patches.fla.delta_rule import in_our_words
from accel.state import STATES
from accel.testing import accuracy, snapshot

SEED = 20261130
CHUNK, RECURRENT = "chunk_kda", "fused_recurrent_kda"
TARGETS = {CHUNK: "fla.kda", RECURRENT: "fla.fused_recurrent_kda"}
OLD = version("fla-core").startswith("0.5")


@pytest.fixture(autouse=True)
def _seed() -> None:
    print(f"seed {SEED}")
    torch.manual_seed(SEED)


def upstream(name: str) -> Callable[..., Any]:
    """What `fla.ops` holds under the name now."""
    return getattr(fla.ops.kda, name)


def arguments(batch: int = 2, tokens: int = 9, **changes: Any) -> dict[str, Any]:
    """Valid arguments: 2 heads, 4 value heads, K 16, V 24."""
    given: dict[str, Any] = {
        "q": torch.randn(batch, tokens, 2, 16),
        "k": torch.randn(batch, tokens, 2, 16),
        "v": torch.randn(batch, tokens, 4, 24),
        "g": -torch.rand(batch, tokens, 4, 16),
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
    import transformers.models.kimi_linear.modeling_kimi_linear  # noqa: F401 - holds FLA's functions in closures

    before = snapshot()
    originals = {name: upstream(name) for name in TARGETS}
    for _ in range(2):
        assert accel.accelerate(list(TARGETS.values())).active == tuple(TARGETS.values())
        for name, original in originals.items():
            wrapper = upstream(name)
            assert wrapper.__wrapped__ is original
            for holder in (fla.ops, fla.layers.kda, sys.modules[original.__module__]):
                assert getattr(holder, name) is wrapper
        accel.restore()
        assert before.changed(snapshot()) == []


@pytest.mark.parametrize("name", TARGETS)
def test_signature_and_parameters_are_upstreams(name: str) -> None:
    original = upstream(name)
    accel.accelerate("kda")
    wrapper = upstream(name)
    assert inspect.signature(wrapper) == inspect.signature(original)
    assert (wrapper.__name__, wrapper.__doc__) == (original.__name__, original.__doc__)
    adapter = serve.wrapped_call(wrapper).adapter
    theirs = [p for p in inspect.signature(original).parameters.values() if p.kind is not p.VAR_KEYWORD]
    for method in (adapter.facts, functools.partial(adapter.run, None)):
        ours = {p.name: p for p in inspect.signature(method).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD}
        # 0.5.2 has all of 0.6.0's but the last two
        assert list(ours)[: len(theirs)] == [p.name for p in theirs]
        assert set(list(ours)[len(theirs) :]) <= ({"use_graph", "max_num_seqs"} if OLD else set())
        assert [ours[p.name].default for p in theirs] == [p.default for p in theirs]


# ---- matching ----


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_accepted_calls_match_the_oracle(case: Any) -> None:
    if max(case.lengths, default=0) > 500:
        case = type(case)((130,), case.heads, case.dims, case.dtype, layout=case.layout, states=case.states)
    inputs = case.make(torch.device("cpu"), torch.Generator().manual_seed(SEED))
    accel.accelerate("kda")
    function = in_our_words(upstream(case.call))
    theirs, oracle = portable(case, inputs), case.oracle(inputs)
    if case.mode == "chunk":
        ours = case.call_with(function, inputs)
    else:
        o, final = function(**{n: x for n, x in inputs.items() if not n.startswith("d_")}, **case.options())
        assert not o.requires_grad
        ours = {"o": o} if final is None else {"o": o, "final_state": final}
    for name, value in ours.items():
        verdict = accuracy(value, theirs[name], oracle[name])
        assert verdict.ok, f"{name}: {verdict.reason}"
    assert STATES[TARGETS[case.call]].served == {"portable": 1}


@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_the_gate_in_the_kernel(lower_bound: float | None) -> None:
    accel.accelerate("kda")
    A_log, dt_bias, raw = torch.randn(4), torch.randn(64), torch.randn(2, 9, 4, 16)
    if lower_bound is None:
        decay = -A_log.exp()[:, None] * torch.nn.functional.softplus(raw + dt_bias.view(4, 16))
    else:
        decay = lower_bound * torch.sigmoid(A_log.exp()[:, None] * (raw + dt_bias.view(4, 16)))
    given = arguments(g=raw)
    expected, _ = upstream(CHUNK)(**{**given, "g": decay})
    gate = {"use_gate_in_kernel": True, "A_log": A_log.view(1, 1, 4, 1), "dt_bias": dt_bias, "lower_bound": lower_bound}
    for name in TARGETS:
        o, final = upstream(name)(**given, **gate)
        torch.testing.assert_close(o, expected, rtol=5e-5, atol=5e-6)
        assert final is None
    o, _ = upstream(CHUNK)(**given, **gate, safe_gate=lower_bound is not None, disable_recompute=True, chunk_size=32)
    torch.testing.assert_close(o, expected, rtol=5e-5, atol=5e-6)


def test_the_bounded_gate_without_A_log() -> None:
    accel.accelerate("kda")
    gate = {"use_gate_in_kernel": True, "lower_bound": -5.0}
    given = arguments(g=torch.randn(2, 9, 4, 16))
    expected, _ = upstream(RECURRENT)(**given, **gate)
    if OLD:  # which asserts it is given
        assert accel.explain("fla.kda", **given, **gate) == Declined("use_gate_in_kernel without A_log")
    else:
        torch.testing.assert_close(upstream(CHUNK)(**given, **gate)[0], expected, rtol=5e-5, atol=5e-6)


@pytest.mark.parametrize("name", TARGETS)
def test_the_deprecated_state_layout_is_served_and_warned_of(name: str) -> None:
    accel.accelerate("kda")
    given = arguments(initial_state=torch.randn(2, 4, 24, 16), output_final_state=True)
    expected = upstream(name)(**given, state_v_first=True)
    with pytest.warns(DeprecationWarning, match="`transpose_state_layout` is deprecated") as caught:
        result = upstream(name)(**given, transpose_state_layout=True)
    assert all(torch.equal(a, b) for a, b in zip(result, expected, strict=True))
    assert caught[0].filename == __file__


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_dtypes_of_the_results_are_upstreams(dtype: torch.dtype) -> None:
    accel.accelerate("kda")
    given = arguments(output_final_state=True)
    given = {key: x.to(dtype) if isinstance(x, torch.Tensor) else x for key, x in given.items()}
    for name in TARGETS:
        plain = upstream(name)(**given)
        assert (plain[0].dtype, plain[1].dtype) == (dtype, torch.float32)
        with torch.autocast("cpu", torch.bfloat16):
            cast = upstream(name)(**given)
        assert all(torch.equal(a, b) for a, b in zip(plain, cast, strict=True))
    assert upstream(RECURRENT)(**{**given, "v": given["v"].float()})[0].dtype == torch.float32  # v's


def test_the_recurrent_rule_carries_no_gradient() -> None:
    accel.accelerate("kda")
    o, state = upstream(RECURRENT)(**arguments(v=torch.randn(2, 9, 4, 24, requires_grad=True), output_final_state=True))
    assert not o.requires_grad and not state.requires_grad


@pytest.mark.parametrize("name", TARGETS)
def test_full_graph_compilation(name: str) -> None:
    accel.accelerate("kda")
    function = upstream(name)
    given = arguments(output_final_state=True)
    expected = function(**given)
    result = torch.compile(lambda kwargs: function(**kwargs), fullgraph=True, backend="aot_eager")(given)
    for a, b in zip(result, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


# ---- declining ----

Decline = tuple[Callable[[], dict[str, Any]], str, "type[Exception] | None"]
state = functools.partial(torch.zeros, 2, 4, 16, 24)
GATE = {"use_gate_in_kernel": True, "A_log": torch.zeros(4)}
#: name -> (changed arguments, the reason, what upstream raises by itself or None where it gets to its kernels)
CHUNK_DECLINES: dict[str, Decline] = {
    "unknown keyword": (lambda: {"window": 3}, "unknown keyword window", None),
    "two layouts": (
        lambda: {"state_v_first": True, "transpose_state_layout": True},
        "both state_v_first and transpose_state_layout",
        ValueError,
    ),
    "cp_context": (lambda: {"cp_context": types.SimpleNamespace(cu_seqlens=None)}, "cp_context", AssertionError),
    "scale": (lambda: {"scale": torch.tensor(0.5)}, "scale is a Tensor, not a number", None),
    "states inside": (lambda: {"return_intermediate_states": True}, "return_intermediate_states", None),
    "use_graph": (lambda: {"use_graph": True}, "use_graph: rows that", None),
    "chunk_size": (lambda: {"chunk_size": 16}, "chunk_size=16 is not 32 or 64", ValueError),
    "neg eigval": (
        lambda: {"allow_neg_eigval": True},
        "allow_neg_eigval without use_beta_sigmoid_in_kernel",
        ValueError,
    ),
    "kind of bound": (lambda: {"lower_bound": torch.tensor(-5.0)}, "lower_bound is a Tensor, not a number", None),
    "no A_log": (
        lambda: {"use_gate_in_kernel": True},
        "use_gate_in_kernel without A_log",
        AssertionError if OLD else ValueError,
    ),
    "no bound": (lambda: {**GATE, "safe_gate": True}, "safe_gate and use_gate_in_kernel without low", ValueError),
    "bound": (
        lambda: {**GATE, "safe_gate": True, "lower_bound": -6.0},
        r"lower_bound=-6.0 is outside \[-5, 0\), safe_gate's range",
        ValueError,
    ),
    "no gate": (lambda: {"g": None}, "g is a NoneType, not a tensor", AttributeError),
    "state of no tensor": (lambda: {"initial_state": [0.0]}, "initial_state is a list, not a tensor", AttributeError),
    "two devices": (lambda: {"v": torch.randn(2, 9, 4, 24, device="meta")}, "v is on meta, other tensors", None),
    "rank": (lambda: {"q": torch.randn(2, 9, 32), "k": torch.randn(2, 9, 32)}, r"q is \[2, 9, 32\] and v", ValueError),
    "heads of k": (lambda: {"k": torch.randn(2, 9, 4, 16)}, r"k is \[2, 9, 4, 16\], q is", AssertionError),
    "value heads": (lambda: {"v": torch.randn(2, 9, 3, 24)}, "3 value heads are no multiple of 2", AssertionError),
    "dtypes": (lambda: {"v": torch.randn(2, 9, 4, 24).half()}, "q, k, v are torch.float32, torch.flo", None),
    "head_dim": (
        lambda: {"q": torch.randn(2, 9, 2, 264), "k": torch.randn(2, 9, 2, 264)},
        "head_dim=264 > 256, upstream's limit",
        AssertionError,
    ),
    "shape of g": (lambda: {"g": torch.rand(2, 9, 4)}, r"g is \[2, 9, 4\], not \[2, 9, 4, 16\]", AssertionError),
    "shape of beta": (lambda: {"beta": torch.rand(2, 9, 2)}, r"beta is \[2, 9, 2\], not", AssertionError),
    "A_log": (lambda: {**GATE, "A_log": torch.randn(2)}, "A_log has 2 elements, not 4", None),
    "dt_bias": (lambda: {**GATE, "dt_bias": torch.randn(4)}, "dt_bias has 4 elements, not 64", None),
    "batch": (lambda: {"cu_seqlens": torch.tensor([0, 9])}, "cu_seqlens with a batch of 2", ValueError),
    "layout of the state": (
        lambda: {"initial_state": state(), "state_v_first": True},
        r"initial_state is \[2, 4, 16, 24\], not \[2, 4, 24, 16\]",
        None,
    ),
    "dtype of the state": (lambda: {"initial_state": state().half()}, "torch.float16, not float32", AssertionError),
    "too few": (lambda: {"q": ...}, "the arguments do not fit the signature", TypeError),
}
RECURRENT_DECLINES: dict[str, Decline] = {
    "unknown keyword": (lambda: {"safe_gate": True}, "unknown keyword safe_gate", None),
    "two layouts": CHUNK_DECLINES["two layouts"],
    "scale": CHUNK_DECLINES["scale"],
    "neg eigval": CHUNK_DECLINES["neg eigval"],
    "kind of bound": CHUNK_DECLINES["kind of bound"],
    "no A_log": (lambda: {"use_gate_in_kernel": True}, "use_gate_in_kernel without A_log", None),
    "beta": (lambda: {"beta": torch.rand(2, 9)}, r"beta is \[2, 9\], not \[2, 9, 4\] or \[2, 9, 4, 24\]", None),
    "dtypes": (lambda: {"q": torch.randn(2, 9, 2, 16).half()}, "q is torch.float16, k is torch.float32", None),
    "g": (lambda: {"g": torch.rand(2, 9, 4)}, r"g is \[2, 9, 4\], not", None),
    "batch": CHUNK_DECLINES["batch"],
    "state": (lambda: {"initial_state": state(), "state_v_first": True}, r"initial_state is \[2, 4, 16, 24\]", None),
}
ROWS = [
    pytest.param(name, *row, id=f"{name[:5]}-{key}")
    for name, table in ((CHUNK, CHUNK_DECLINES), (RECURRENT, RECURRENT_DECLINES))
    for key, row in table.items()
]


@pytest.mark.parametrize("name, changes, reason, error", ROWS)
def test_declines(name: str, changes: Callable[[], dict[str, Any]], reason: str, error: type[Exception] | None) -> None:
    given = {k: x for k, x in arguments(**changes()).items() if x is not ...}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        theirs = outcome(upstream(name), **given)
        accel.accelerate("kda")
        assert isinstance(accel.explain(TARGETS[name], **given), Declined)
        ours = outcome(upstream(name), **given)
    assert ours == theirs
    if error is not None:
        assert theirs[0] is error, theirs
    counters = STATES[TARGETS[name]]
    assert not counters.served and sum(counters.declined.values()) == 1
    (counted,) = counters.declined
    assert re.search(reason, counted), counted


@pytest.mark.parametrize("name", TARGETS)
def test_no_kernel_on_a_gpu_yet(name: str, fake_cuda: Any) -> None:
    accel.accelerate("kda")
    given = {
        k: fake_cuda.empty(*x.shape, dtype=x.dtype) if isinstance(x, torch.Tensor) else x
        for k, x in arguments().items()
    }
    call = serve.wrapped_call(upstream(name))
    for arch in ("sm_80", "sm_90", "sm_100"):
        assert call.decide((), given, arch=arch)[0] == Declined(f"no kda kernel for {arch} yet: upstream's own runs")


# ---- others ----


def test_another_patcher_on_top_survives(monkeypatch: pytest.MonkeyPatch) -> None:
    original = upstream(CHUNK)
    accel.accelerate("fla.kda")
    ours = upstream(CHUNK)
    theirs = functools.wraps(ours)(lambda *args, **kwargs: ours(*args, **kwargs))
    monkeypatch.setattr(fla.layers.kda, CHUNK, theirs)
    given = arguments()
    theirs(**given)
    assert STATES["fla.kda"].served == {"portable": 1}
    accel.restore()
    assert fla.layers.kda.chunk_kda is theirs and upstream(CHUNK) is original
    assert any("fla.layers.kda" in line for line in STATES["fla.kda"].left)
    assert outcome(theirs, **given) == outcome(original, **given)
    monkeypatch.undo()
    fla.layers.kda.chunk_kda = original


def test_explain_runs_and_counts_nothing() -> None:
    accel.accelerate("kda")
    for name, target in TARGETS.items():
        assert accel.explain(upstream(name), **arguments()) == Choice("kda", "portable")
        assert not STATES[target].served


def test_fla_certifies_the_chunked_cases_only() -> None:
    adapter = import_module("accel.patches.fla.kda")
    assert {case.mode for case in CASES if adapter.upstream(case) is not None} == {"chunk"}
    assert adapter.CERTIFIES == "kda"
