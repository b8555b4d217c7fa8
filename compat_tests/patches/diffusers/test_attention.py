"""diffusers.sdpa: what the adapter reads, what it declines, and that the registry around it stays as it is."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from diffusers.models import attention_dispatch
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry, dispatch_attention_fn
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import accel
from accel import serve, testing
from accel.kernels.attention import AttentionFacts
from accel.outcome import Choice, Decline, Declined
from accel.patches.diffusers import attention
from accel.state import STATES

STATE = STATES["diffusers.sdpa"]
SEED = 20261130
#: An architecture that no kernel will ever serve: what is declined for it is declined everywhere.
ARCH = "sm_70"
NATIVE = AttentionBackendName.NATIVE
upstream = attention_dispatch._native_attention
NONE_YET = Declined("no attention kernel for sm_70 yet: upstream's own code runs")


def entry() -> Callable[..., Any]:
    return _AttentionBackendRegistry._backends[NATIVE]


@pytest.fixture
def on() -> serve.ServedCall:
    """The target switched on; the call behind the entry."""
    print("seed", SEED)
    torch.manual_seed(SEED)
    accel.accelerate("diffusers.sdpa")
    return serve.wrapped_call(entry(), STATE)


def tensors(
    *, heads: tuple[int, int] = (4, 4), lengths: tuple[int, int] = (8, 8), dim: int = 64
) -> dict[str, torch.Tensor]:
    """query, key and value as `dispatch_attention_fn` passes them: by keyword, (batch, seqlen, heads, head_dim)."""
    return {
        "query": torch.randn(2, lengths[0], heads[0], dim),
        "key": torch.randn(2, lengths[1], heads[1], dim),
        "value": torch.randn(2, lengths[1], heads[1], dim),
    }


# --- Replaced and put back ----------------------------------------------------------------------------------------


def test_restore_gives_back_the_very_same_objects() -> None:
    before = testing.snapshot(("diffusers",))
    registry = _AttentionBackendRegistry
    others = {
        name: dict(value) if isinstance(value, dict) else value
        for name, value in vars(registry).items()
        if name
        in ("_constraints", "_supported_arg_names", "_supports_context_parallel", "_active_backend", "_checks_enabled")
    }
    backends = dict(registry._backends)
    accel.accelerate("diffusers.sdpa")
    wrapper = entry()
    assert wrapper is not upstream
    accel.accelerate("diffusers.sdpa")
    assert entry() is wrapper
    assert {name: f for name, f in registry._backends.items() if name is not NATIVE} == {
        name: f for name, f in backends.items() if name is not NATIVE
    }
    assert list(registry._backends) == list(backends)
    assert {name: vars(registry)[name] for name in others} == others
    accel.restore("diffusers.sdpa")
    assert entry() is upstream
    assert before.changed(testing.snapshot(("diffusers",))) == []


def test_the_wrapper_has_upstreams_signature(on: serve.ServedCall) -> None:
    assert inspect.signature(entry()) == inspect.signature(upstream)
    assert (entry().__name__, entry().__module__, entry().__doc__) == (
        upstream.__name__,
        upstream.__module__,
        upstream.__doc__,
    )
    ours = list(inspect.signature(on.adapter.facts).parameters.values())
    theirs = list(inspect.signature(upstream).parameters.values())
    assert [(p.name, p.kind, p.default) for p in ours[:-1]] == [(p.name, p.kind, p.default) for p in theirs]
    assert ours[-1].kind is inspect.Parameter.VAR_KEYWORD


def test_another_patcher_on_top_survives() -> None:
    accel.accelerate("diffusers.sdpa")
    ours = entry()

    def theirs(**kwargs: Any) -> Any:
        return ours(**kwargs)

    theirs.__wrapped__ = ours
    _AttentionBackendRegistry._backends[NATIVE] = theirs
    try:
        accel.restore()
        assert entry() is theirs
        assert "_AttentionBackendRegistry._backends['native']" in STATE.left[0]
        call = tensors()
        assert torch.equal(dispatch_attention_fn(**call), upstream(**call))
        assert not STATE.declined, "a wrapper that is off still counts"
        accel.accelerate("diffusers.sdpa")
        assert entry() is theirs
        dispatch_attention_fn(**call)
        assert sum(STATE.declined.values()) == 1
    finally:
        _AttentionBackendRegistry._backends[NATIVE] = upstream


def test_a_function_chosen_by_somebody_else_is_left() -> None:
    def chosen(**kwargs: Any) -> Any:
        raise AssertionError

    _AttentionBackendRegistry._backends[NATIVE] = chosen
    try:
        report = accel.accelerate("diffusers.sdpa")
        assert entry() is chosen
        assert "chosen, not the library's own function, and stays so" in report.refused["diffusers.sdpa"]
    finally:
        _AttentionBackendRegistry._backends[NATIVE] = upstream


def test_a_release_without_the_entry_is_refused_with_a_reason() -> None:
    registry = type("_AttentionBackendRegistry", (), {"_backends": {}})
    for content in ({}, {"_AttentionBackendRegistry": registry, "AttentionBackendName": AttentionBackendName}):
        stub = ModuleType("diffusers.models.attention_dispatch")
        vars(stub).update(content)
        with pytest.raises(LookupError, match="has no attention backend registry with a native entry"):
            attention.patch(stub, STATE)


# --- What the facts say is what upstream computes -----------------------------------------------------------------


def described(facts: AttentionFacts, call: dict[str, Any]) -> torch.Tensor:
    """Attention in fp64, made from what the facts say of the call and from nothing else."""
    q, k, v = (call[name].transpose(1, 2).double() for name in ("query", "key", "value"))
    k, v = (x.repeat_interleave(facts.group, dim=1) for x in (k, v))
    scores = q @ k.mT * (call.get("scale") or q.shape[-1] ** -0.5)
    assert scores.shape == (facts.batch, facts.heads_q, facts.seqlen_q, facts.seqlen_k)
    seen = torch.ones(facts.seqlen_q, facts.seqlen_k, dtype=torch.bool)
    if facts.causal == "top_left":
        seen = seen.tril()
    if facts.mask != "none":
        kind, dims = facts.mask.split()
        assert kind == "bool"
        mask = call["attn_mask"]
        mask = mask[:, None, None] if mask.dim() == 2 else mask
        seen = seen & mask[tuple(slice(None) if letter != "1" else slice(1) for letter in dims)]
    return (scores.masked_fill(~seen, float("-inf")).softmax(-1).nan_to_num(0) @ v).transpose(1, 2)


SEEN = torch.rand(2, 4, 8, 6, generator=torch.Generator().manual_seed(SEED)) > 0.4

#: (keywords, sizes, causal, mask)
READ: dict[str, tuple[dict[str, Any], dict[str, Any], str, str]] = {
    "full": ({}, {}, "none", "none"),
    "cross": ({"scale": 0.3}, {"lengths": (8, 6)}, "none", "none"),
    "causal": ({"is_causal": True}, {"lengths": (8, 6)}, "top_left", "none"),
    "causal with more keys": ({"is_causal": True}, {"lengths": (6, 8)}, "top_left", "none"),
    "one query": ({"is_causal": True}, {"lengths": (1, 8)}, "top_left", "none"),
    "grouped heads": ({"enable_gqa": True}, {"heads": (4, 2)}, "none", "none"),
    "key mask": ({"attn_mask": SEEN[:, 0, 0]}, {"lengths": (8, 6)}, "none", "bool b11k"),
    "expanded key mask": ({"attn_mask": SEEN[:1, 0, 0].expand(2, 6)}, {"lengths": (8, 6)}, "none", "bool 111k"),
    "joint mask": ({"attn_mask": SEEN[:, :1, :1]}, {"lengths": (8, 6)}, "none", "bool b11k"),
    "full mask": ({"attn_mask": SEEN}, {"lengths": (8, 6)}, "none", "bool bhqk"),
}


@pytest.mark.parametrize("name", READ)
@torch.no_grad()
def test_facts_are_what_upstream_computes(name: str, on: serve.ServedCall) -> None:
    kwargs, sizes, causal, mask = READ[name]
    call = {**tensors(**sizes), **kwargs}
    facts, device = on.adapter.facts(**call)
    assert (facts.causal, facts.mask, facts.dtype, device.type) == (causal, mask, "float32", "cpu")
    assert (facts.head_dim, facts.head_dim_v) == (64, 64)
    result = dispatch_attention_fn(**call)
    assert torch.equal(result, upstream(**call))
    torch.testing.assert_close(result.double(), described(facts, call), rtol=1e-4, atol=1e-5)
    assert STATE.declined == {"upstream's own code serves a CPU": 1}


# --- Declines -----------------------------------------------------------------------------------------------------


class _Subclass(torch.Tensor):
    pass


def _masked(mask: torch.Tensor) -> dict[str, Any]:
    return {"attn_mask": mask}


#: (reason, keywords, sizes): upstream runs these on a CPU.
DECLINED: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("is_causal and a mask are given", {"is_causal": True, **_masked(torch.ones(8, 8, dtype=torch.bool))}, {}),
    ("dropout=1.0", {"dropout_p": 1.0}, {}),
    ("scale=-0.5 is not positive", {"scale": -0.5}, {}),
    ("the mask has 2 dimensions, not 4", _masked(torch.ones(8, 6, dtype=torch.bool)), {"lengths": (8, 6)}),
    ("the mask has 3 dimensions, not 4", _masked(torch.ones(1, 8, 8, dtype=torch.bool)), {}),
    ("the mask is (1, 1, 1, 1), the scores are (2, 4, 8, 8)", _masked(torch.ones(1, 1, 1, 1, dtype=torch.bool)), {}),
    (
        "attn_mask is a _Subclass, not a plain tensor",
        _masked(torch.ones(1, 1, 8, 8, dtype=torch.bool).as_subclass(_Subclass)),
        {},
    ),
]

#: Calls that upstream rejects: it does so itself.
REJECTED: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("unknown keyword window", {"window": 3}, {}),
    ("return_lse is given", {"return_lse": True}, {}),
    ("is_causal is a str, not a bool", {"is_causal": "yes"}, {}),
    ("the scale is a str, not a number", {"scale": "1"}, {}),
    ("q has 4 heads, k 2, and enable_gqa is off", {}, {"heads": (4, 2)}),
    ("heads_q=4 is no multiple of heads_kv=3", {"enable_gqa": True}, {"heads": (4, 3)}),
    ("the mask is int32, neither boolean nor additive", _masked(torch.ones(2, 8, dtype=torch.int32)), {}),
]


@pytest.mark.parametrize(("reason", "kwargs", "sizes"), DECLINED, ids=[row[0] for row in DECLINED])
@torch.no_grad()
def test_declined_calls_equal_upstreams(
    reason: str, kwargs: dict[str, Any], sizes: dict[str, Any], on: serve.ServedCall
) -> None:
    call = {**tensors(**sizes), **kwargs}
    assert on.decide((), call, ARCH)[0] == Declined(reason)
    ours, theirs = entry()(**call), upstream(**call)
    assert ours.numpy().tobytes() == theirs.numpy().tobytes() and ours.stride() == theirs.stride()
    assert STATE.declined == {reason: 1} and not STATE.served


@pytest.mark.parametrize(("reason", "kwargs", "sizes"), REJECTED, ids=[row[0] for row in REJECTED])
@torch.no_grad()
def test_what_upstream_rejects_it_rejects_itself(
    reason: str, kwargs: dict[str, Any], sizes: dict[str, Any], on: serve.ServedCall
) -> None:
    call = {**tensors(**sizes), **kwargs}
    with pytest.raises(Exception) as theirs:
        upstream(**call)
    with pytest.raises(type(theirs.value)) as ours:
        entry()(**call)
    assert str(ours.value) == str(theirs.value)
    assert STATE.declined == {reason: 1}


def test_context_parallel_attention_is_declined(on: serve.ServedCall, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(
        attention_dispatch, "_templated_context_parallel_attention", lambda *args, **kw: seen.append(kw)
    )
    config = object()
    dispatch_attention_fn(**tensors(), parallel_config=config)
    assert seen[0]["_parallel_config"] is config
    assert STATE.declined == {"the attention is spread over ranks by a parallel configuration": 1}


@pytest.mark.parametrize(
    ("reason", "change"),
    [
        ("query is a _Subclass, not a plain tensor", {"query": lambda x: x.as_subclass(_Subclass)}),
        ("key is a view that is negated when read", {"key": torch._neg_view}),
        ("query has layout torch.sparse_coo", {"query": torch.Tensor.to_sparse}),
        ("value is on device meta", {"value": lambda x: x.to("meta")}),
        ("q, k, v have 3, 4, 4 dimensions, not 4", {"query": lambda x: x[0]}),
        ("k is (2, 8, 4, 64), v (2, 7, 4, 64): they differ before the last dimension", {"value": lambda x: x[:, 1:]}),
        ("batch 1 of q is not batch 2 of k and v", {"query": lambda x: x[:1]}),
        ("q is float32, k float64, v float32", {"key": torch.Tensor.double}),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_tensors_that_no_kernel_takes(reason: str, change: dict[str, Any], on: serve.ServedCall) -> None:
    call = tensors()
    call.update({name: made(call[name]) for name, made in change.items()})
    if reason == "value is on device meta":
        reason = "value is on meta, other tensors on cpu"
    assert on.decide((), call, ARCH)[0] == Declined(reason)


def test_nested_tensors_are_declined(on: serve.ServedCall) -> None:
    for layout, reason in ((torch.strided, "query is a nested tensor"), (torch.jagged, "query is a NestedTensor")):
        nested = torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(4, 3)], layout=layout)
        decision = on.decide((), {"query": nested, "key": nested, "value": nested}, ARCH)[0]
        assert isinstance(decision, Declined) and decision.reason.startswith(reason)


#: (reason, keywords of `tensors`, what else): reached on fake CUDA tensors.
GPU: list[tuple[Declined, dict[str, Any], dict[str, Any]]] = [
    (NONE_YET, {}, {}),
    (NONE_YET, {"heads": (4, 2)}, {"enable_gqa": True}),
    (Declined("a gradient is needed, and attention has no backward yet"), {}, {"grad": True}),
    (Declined("dtype=float32: only bfloat16 and float16"), {}, {"dtype": torch.float32}),
    (Declined("an additive mask: only boolean ones"), {}, {"mask": True}),
    (Declined("head_dim=72 of q is not 64 of k"), {}, {"wide": True}),
]


@pytest.mark.parametrize(("decision", "sizes", "how"), GPU, ids=[str(i) for i in range(len(GPU))])
def test_gpu_reasons(
    decision: Declined, sizes: dict[str, Any], how: dict[str, Any], on: serve.ServedCall, fake_cuda: Any
) -> None:
    with fake_cuda.mode, torch.device("cuda:0"):
        call: dict[str, Any] = {name: x.to(how.get("dtype", torch.bfloat16)) for name, x in tensors(**sizes).items()}
        if "mask" in how:
            call["attn_mask"] = torch.zeros(2, 8)
        if "wide" in how:
            call["query"] = torch.randn(2, 8, 4, 72).bfloat16()
    call["query"].requires_grad_("grad" in how)
    call["enable_gqa"] = how.get("enable_gqa", False)
    assert on.decide((), call, ARCH)[0] == decision


def test_the_layout_is_read_in_diffusers_order(on: serve.ServedCall) -> None:
    call = tensors(lengths=(8, 6), heads=(4, 2))
    joint = torch.randn(2, 8, 3, 4, 65)  # rows of 260 bytes
    call["query"] = joint[:, :, 0, :, :64]
    facts = on.adapter.facts(**call, enable_gqa=True, attn_mask=torch.ones(2, 6, dtype=torch.bool))[0]
    assert (facts.seqlen_q, facts.seqlen_k, facts.heads_q, facts.heads_kv, facts.group) == (8, 6, 4, 2, 2)
    assert (facts.q_layout, facts.k_layout, facts.v_layout, facts.mask_layout) == ("rows", "aligned", "aligned", "rows")
    with pytest.raises(Decline, match=r"the mask has 2 dimensions, not 4"):
        from accel.kernels.attention import read

        read(
            **dict(zip("qkv", call.values(), strict=True)),
            mask=torch.ones(2, 5, dtype=torch.bool),
            seqlen_dim=1,
            key_mask=True,
        )


@pytest.fixture
def chosen(on: serve.ServedCall, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A plan that would serve every call."""
    monkeypatch.setattr(on.adapter, "plan", lambda facts, arch: Choice("attention", "any_fwd"))
    monkeypatch.setattr(serve.certificates, "check", lambda *args, **kwargs: None)
    on.plans.clear()
    yield
    on.plans.clear()


@torch.no_grad()
def test_a_kernel_that_declines_late_leaves_the_call_to_upstream(chosen: None) -> None:
    call = tensors()
    assert torch.equal(entry()(**call), upstream(**call))
    assert STATE.declined == {"the attention kernels take CUDA tensors, these are on cpu": 1}


def test_what_watches_the_operators_declines_a_launch(chosen: None) -> None:
    class Watcher(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return function(*args, **(kwargs or {}))

    class Counter(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return function(*args, **(kwargs or {}))

    call = tensors()
    q = call.pop("query")

    def weighted(q: torch.Tensor, function: Callable[..., Any] | None = None) -> torch.Tensor:
        return (function or entry())(query=q, **call).square().sum()

    with Watcher():
        weighted(q)
    with Counter():
        weighted(q)
    with forward_ad.dual_level():
        weighted(q)
    reasons = {
        "a torch function mode is active: Watcher": 1,
        "a torch dispatch mode is active": 1,
        "inside forward-mode differentiation": 1,
    }
    assert STATE.declined == reasons
    for transform in (torch.func.vmap, torch.func.grad, torch.func.jacrev):
        given = q[None] if transform is torch.func.vmap else q
        ours, theirs = transform(weighted)(given), transform(partial(weighted, function=upstream))(given)
        assert torch.equal(ours, theirs)
    assert STATE.declined == {**reasons, "inside a functorch transform (vmap, grad, ...)": 3}


def test_autocast_and_torch_s_own_choice(on: serve.ServedCall, fake_cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_cuda.mode, torch.device("cuda:0"):
        call = {name: x.bfloat16() for name, x in tensors().items()}
    with sdpa_kernel(SDPBackend.MATH):
        decision = on.decide((), call, ARCH)[0]
    assert decision == Declined("torch is told to use no attention backend but its math one")
    # what torch.autocast("cuda") does where there is a GPU; without one it warns and does nothing
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: kind == "cuda")
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda kind: torch.float16)
    assert on.decide((), call, ARCH)[0] == Declined("autocast to float16 is on, the tensors are bfloat16")
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda kind: torch.bfloat16)
    assert on.decide((), call, ARCH)[0] == NONE_YET


def test_a_replaced_torch_attention_is_declined(on: serve.ServedCall, monkeypatch: pytest.MonkeyPatch) -> None:
    original, calls = torch.nn.functional.scaled_dot_product_attention, []
    monkeypatch.setattr(
        torch.nn.functional, "scaled_dot_product_attention", lambda **kw: calls.append(kw) or original(**kw)
    )
    entry()(**tensors())
    assert len(calls) == 1
    reason = "torch.nn.functional.scaled_dot_product_attention was replaced by somebody else"
    assert STATE.declined == {reason: 1}


@torch.no_grad()
def test_exporting_and_tracing_take_upstreams_code(on: serve.ServedCall) -> None:
    class Module(torch.nn.Module):
        def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            return dispatch_attention_fn(query, key, value)

    call = tuple(tensors().values())
    program = torch.export.export(Module(), call)
    assert torch.equal(program.module()(*call), upstream(*call))
    assert not STATE.served and not STATE.declined
    traced = torch.jit.trace(lambda *call: entry()(*call), call, check_trace=False)
    assert torch.equal(traced(*call), upstream(*call))
    assert STATE.declined == {"torch.jit is tracing": 1}


# --- Backends -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("masked", "is_causal"), [(False, False), (False, True), (True, False)])
def test_run_hands_the_kernel_what_upstream_computes(
    masked: bool, is_causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kernel(
        config: str,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        mask: torch.Tensor | None,
        causal: str,
        scale: float | None,
        seqlen_dim: int,
    ) -> tuple[torch.Tensor, None]:
        assert config == "planned" and seqlen_dim == 1 and causal in ("none", "top_left")
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, mask, is_causal=causal == "top_left", scale=scale
        )
        return out.transpose(1, 2).contiguous(), None

    monkeypatch.setattr(attention.launch, "run", kernel)
    print("seed", SEED)
    torch.manual_seed(SEED)
    call = tensors()
    mask = torch.rand(2, call["key"].size(1)) > 0.3 if masked else None
    choice = Choice("attention", "sm90_fwd", "planned")
    ours = attention.Native().run(choice, **call, attn_mask=mask, is_causal=is_causal, scale=0.3)
    assert torch.equal(ours, upstream(**call, attn_mask=mask, is_causal=is_causal, scale=0.3))


@torch.no_grad()
def test_a_padding_mask_counts_and_positional_calls_work(on: serve.ServedCall) -> None:
    call = tensors()
    mask = torch.ones(2, 8, dtype=torch.bool)
    mask[0, 5:] = False
    masked = dispatch_attention_fn(**call, attn_mask=mask)
    assert torch.equal(masked, upstream(**call, attn_mask=mask))
    assert not torch.equal(masked, dispatch_attention_fn(**call))
    assert torch.equal(dispatch_attention_fn(*call.values()), upstream(*call.values()))


@torch.no_grad()
def test_other_backends_are_untouched(on: serve.ServedCall) -> None:
    call = tensors()
    active = _AttentionBackendRegistry._active_backend
    pinned = dispatch_attention_fn(**call, backend=AttentionBackendName._NATIVE_MATH)
    assert torch.equal(pinned, _AttentionBackendRegistry._backends[AttentionBackendName._NATIVE_MATH](**call))
    with attention_dispatch.attention_backend("_native_math"):
        dispatch_attention_fn(**call)
    assert not STATE.declined and not STATE.served
    assert _AttentionBackendRegistry._active_backend is active
    dispatch_attention_fn(**call, backend="native")
    assert sum(STATE.declined.values()) == 1


@torch.no_grad()
def test_compiled_calls_see_on_and_off() -> None:
    print("seed", SEED)
    torch.manual_seed(SEED)
    call = tensors()
    compiled = torch.compile(dispatch_attention_fn, backend="eager", fullgraph=True)
    before = compiled(**call)
    with accel.accelerated("diffusers.sdpa"):
        assert torch.equal(compiled(**call), before)
        assert not STATE.declined, "a compiled call is not counted"
    assert torch.equal(compiled(**call), before)
