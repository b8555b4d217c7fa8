"""transformers.sdpa: what the adapter declines, that a declined call is upstream's, and that it leaves no trace."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers.integrations.sdpa_attention import sdpa_attention_forward as upstream
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

import accel
from accel import serve, testing
from accel.outcome import Choice, Declined
from accel.patches.transformers import attention
from accel.state import STATES

STATE = STATES["transformers.sdpa"]
SEED = 20261130
#: An architecture that no kernel will ever serve: what is declined for it is declined everywhere.
ARCH = "sm_70"


def entry() -> Callable[..., Any]:
    return AttentionInterface._global_mapping["sdpa"]


@pytest.fixture
def on() -> serve.ServedCall:
    """The target switched on; the call behind the entry."""
    print("seed", SEED)
    torch.manual_seed(SEED)
    accel.accelerate("transformers.sdpa")
    return serve.wrapped_call(entry(), STATE)


class Layer(nn.Module):
    """Stands for an attention layer: what upstream reads off it."""

    def __init__(self, groups: int | None = 2, is_causal: bool | None = True) -> None:
        super().__init__()
        if groups is not None:
            self.num_key_value_groups = groups
        if is_causal is not None:
            self.is_causal = is_causal


def tensors(
    *,
    batch: int = 2,
    heads: tuple[int, int] = (4, 2),
    lengths: tuple[int, int] = (8, 8),
    dims: tuple[int, int] = (64, 64),
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v as models pass them: transposed views of (batch, seqlen, heads, head_dim)."""
    shapes = [
        (batch, lengths[0], heads[0], dims[0]),
        (batch, lengths[1], heads[1], dims[0]),
        (batch, lengths[1], heads[1], dims[1]),
    ]
    return tuple(torch.randn(shape).transpose(1, 2) for shape in shapes)


# --- Replaced and put back ----------------------------------------------------------------------------------------


def test_restore_gives_back_the_very_same_objects() -> None:
    before = testing.snapshot(("transformers",))
    accel.accelerate("transformers.sdpa")
    assert entry() is not upstream
    assert list(AttentionInterface._global_mapping) == list(ALL_ATTENTION_FUNCTIONS), "a key was renamed or added"
    wrapper = entry()
    accel.accelerate("transformers.sdpa")
    assert entry() is wrapper
    accel.restore("transformers.sdpa")
    assert entry() is upstream
    assert before.changed(testing.snapshot(("transformers",))) == []
    accel.accelerate("transformers.sdpa")
    assert entry() is wrapper


def test_the_wrapper_has_upstreams_signature(on: serve.ServedCall) -> None:
    assert inspect.signature(entry()) == inspect.signature(upstream)
    assert (entry().__name__, entry().__module__, entry().__doc__) == (
        upstream.__name__,
        upstream.__module__,
        upstream.__doc__,
    )
    assert entry().__wrapped__ is upstream
    ours = list(inspect.signature(on.adapter.facts).parameters.values())
    theirs = list(inspect.signature(upstream).parameters.values())
    assert [(p.name, p.kind, p.default) for p in ours] == [(p.name, p.kind, p.default) for p in theirs]


def test_another_patcher_on_top_survives() -> None:
    accel.accelerate("transformers.sdpa")
    ours = entry()

    def theirs(*args: Any, **kwargs: Any) -> Any:
        return ours(*args, **kwargs)

    theirs.__wrapped__ = ours
    AttentionInterface.register("sdpa", theirs)
    try:
        accel.restore()
        assert entry() is theirs
        assert "AttentionInterface['sdpa']" in STATE.left[0]
        q, k, v = tensors()
        assert torch.equal(theirs(Layer(), q, k, v, None)[0], upstream(Layer(), q, k, v, None)[0])
        assert not STATE.declined, "a wrapper that is off still counts"
        accel.accelerate("transformers.sdpa")
        assert entry() is theirs
        theirs(Layer(), q, k, v, None)
        assert sum(STATE.declined.values()) == 1
    finally:
        AttentionInterface.register("sdpa", upstream)


def test_a_function_chosen_by_somebody_else_is_left() -> None:
    def chosen(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError

    AttentionInterface.register("sdpa", chosen)
    try:
        report = accel.accelerate("transformers.sdpa")
        assert entry() is chosen
        assert "chosen, not the library's own function, and stays so" in report.refused["transformers.sdpa"]
    finally:
        AttentionInterface.register("sdpa", upstream)


def test_a_release_without_the_entry_is_refused_with_a_reason() -> None:
    for content in ({}, {"AttentionInterface": type("AttentionInterface", (), {"_global_mapping": {}})}):
        stub = ModuleType("transformers.modeling_utils")
        vars(stub).update(content)
        with pytest.raises(LookupError, match="has no AttentionInterface with an 'sdpa' entry"):
            attention.patch(stub, STATE)


# --- Declines -----------------------------------------------------------------------------------------------------


def _plain() -> tuple[Any, ...]:
    return (Layer(), *tensors(), None)


def _with(position: int, value: Any) -> tuple[Any, ...]:
    args = list(_plain())
    args[position] = value(args[position]) if callable(value) else value
    return tuple(args)


class _Subclass(torch.Tensor):
    pass


BOOL, FLOAT = torch.ones(1, 1, 8, 8, dtype=torch.bool), torch.zeros(1, 1, 8, 8)

#: (reason, arguments, keywords), in the order of the checks. Upstream runs all of these on a CPU.
DECLINED: list[tuple[str, Callable[[], tuple[Any, ...]], dict[str, Any]]] = [
    ("s_aux is given", _plain, {"s_aux": torch.zeros(4)}),
    ("sinks is given", _plain, {"sinks": torch.zeros(4)}),
    ("output_attentions is given", _plain, {"output_attentions": True}),
    ("position_bias is given: an additive mask", _plain, {"position_bias": torch.zeros(1, 4, 8, 8)}),
    ("dropout=1.0", _plain, {"dropout": 1.0}),
    ("scale=-0.5 is not positive", _plain, {"scaling": -0.5}),
    ("scale=0 is not positive", _plain, {"scaling": 0}),
    ("query is a _Subclass, not a plain tensor", lambda: _with(1, lambda q: q.as_subclass(_Subclass)), {}),
    ("attention_mask is a _Subclass, not a plain tensor", lambda: _with(4, BOOL.as_subclass(_Subclass)), {}),
    ("key is a view that is negated when read", lambda: _with(2, torch._neg_view), {}),
    ("the mask has 2 dimensions, not 4", lambda: _with(4, BOOL[0, 0]), {}),
    ("the mask is (1, 1, 8, 1), the scores are (2, 4, 8, 8)", lambda: _with(4, BOOL[..., :1]), {}),
    ("batch 1 of q is not batch 2 of k and v", lambda: _with(1, lambda q: q[:1]), {}),
    ("q has 4 heads, k 2, the module groups them by 3", lambda: (Layer(groups=3), *tensors(), None), {}),
]

#: Reasons for calls that upstream rejects: it does so itself.
REJECTED: list[tuple[str, Callable[[], tuple[Any, ...]], dict[str, Any]]] = [
    ("the scale is a Tensor, not a number", _plain, {"scaling": torch.tensor([0.1, 0.2])}),
    ("is_causal is a str, not a bool", _plain, {"is_causal": "yes"}),
    ("the mask is int32, neither boolean nor additive", lambda: _with(4, BOOL.int()), {}),
    ("the mask is (1, 3, 8, 8), the scores are (2, 4, 8, 8)", lambda: _with(4, BOOL.expand(1, 3, 8, 8)), {}),
    ("q is float32, k float64, v float32", lambda: _with(2, torch.Tensor.double), {}),
    ("head_dim=64 of q is not 32 of k", lambda: _with(2, lambda k: k[..., :32]), {}),
    ("heads_q=4 is no multiple of heads_kv=3", lambda: (Layer(), *tensors(heads=(4, 3)), None), {}),
    (
        "num_key_value_groups is a NoneType, not an int",
        lambda: (SimpleNamespace(num_key_value_groups=None), *tensors(), None),
        {},
    ),
    ("query is on device meta", lambda: _with(1, lambda q: q.to("meta")), {}),
    ("the arguments do not fit the signature", lambda: _plain()[:4], {}),
]


#: Reasons for calls that one release of upstream rejects and another takes (5.17 ignores softcap).
EITHER: list[tuple[str, Callable[[], tuple[Any, ...]], dict[str, Any]]] = [
    ("softcap is given", _plain, {"softcap": 30.0}),
    ("q, k, v have 3, 4, 4 dimensions, not 4", lambda: _with(1, lambda q: q[0]), {}),
]


@pytest.mark.parametrize(("reason", "args", "kwargs"), DECLINED, ids=[row[0] for row in DECLINED])
@torch.no_grad()
def test_declined_calls_equal_upstreams(
    reason: str, args: Callable[[], tuple[Any, ...]], kwargs: dict[str, Any], on: serve.ServedCall
) -> None:
    call = args()
    assert on.decide(call, kwargs, ARCH)[0] == Declined(reason)
    ours, theirs = entry()(*call, **kwargs)[0], upstream(*call, **kwargs)[0]
    assert ours.numpy().tobytes() == theirs.numpy().tobytes(), "bit for bit, NaN too: a negative scale gives them"
    assert STATE.declined == {reason: 1} and not STATE.served


@pytest.mark.parametrize(("reason", "args", "kwargs"), REJECTED, ids=[row[0] for row in REJECTED])
@torch.no_grad()
def test_what_upstream_rejects_it_rejects_itself(
    reason: str, args: Callable[[], tuple[Any, ...]], kwargs: dict[str, Any], on: serve.ServedCall
) -> None:
    call = args()
    with pytest.raises(Exception) as theirs:
        upstream(*call, **kwargs)
    with pytest.raises(type(theirs.value)) as ours:
        entry()(*call, **kwargs)
    assert str(ours.value) == str(theirs.value)
    assert STATE.declined == {reason: 1}
    assert on.decide(call, kwargs, ARCH)[0] == Declined(reason)


@pytest.mark.parametrize(("reason", "args", "kwargs"), EITHER, ids=[row[0] for row in EITHER])
@torch.no_grad()
def test_what_releases_differ_on_is_left_to_them(
    reason: str, args: Callable[[], tuple[Any, ...]], kwargs: dict[str, Any], on: serve.ServedCall
) -> None:
    def outcome(function: Callable[..., Any]) -> Any:
        try:
            return function(*call, **kwargs)[0].tolist()
        except (ValueError, RuntimeError, IndexError) as error:
            return type(error), str(error)

    call = args()
    assert outcome(entry()) == outcome(upstream)
    assert STATE.declined == {reason: 1}


def test_lengths_of_k_and_v_that_differ_are_declined(on: serve.ServedCall) -> None:
    args = _with(3, lambda v: v[:, :, 1:])  # never run: torch 2.13 reads past the end of v on a CPU
    reason = "k is (2, 2, 8, 64), v (2, 2, 7, 64): they differ before the last dimension"
    assert on.decide(args, {}, ARCH)[0] == Declined(reason)


def test_nested_tensors_are_declined(on: serve.ServedCall) -> None:
    for layout, reason in ((torch.strided, "query is a nested tensor"), (torch.jagged, "query is a NestedTensor")):
        nested = torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(4, 3)], layout=layout)
        decision = on.decide((Layer(), nested, nested, nested, None), {}, ARCH)[0]
        assert isinstance(decision, Declined) and decision.reason.startswith(reason)


def test_sharded_tensors_are_declined(on: serve.ServedCall, tmp_path: Any) -> None:
    from torch import distributed
    from torch.distributed.tensor import DTensor, Replicate, init_device_mesh

    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        q, k, v = (DTensor.from_local(x, mesh, [Replicate()]) for x in tensors())
        assert on.decide((Layer(), q, k, v, None), {}, ARCH)[0] == Declined("query is a DTensor, not a plain tensor")
    finally:
        distributed.destroy_process_group()


#: (reason, keywords of `tensors`, what else): reached on fake CUDA tensors.
GPU: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("no attention kernel for sm_70 yet: upstream's own code runs", {}, {}),
    ("a gradient is needed, and attention has no backward yet", {}, {"grad": True}),
    ("dtype=float32: only bfloat16 and float16", {}, {"dtype": torch.float32}),
    ("an additive mask: only boolean ones", {}, {"mask": torch.bfloat16}),
    ("head_dim=264 > 256", {"dims": (264, 264)}, {}),
    ("head_dim=60 is no multiple of 8", {"dims": (60, 64)}, {}),
    ("head_dim_v=0 is no multiple of 8", {"dims": (64, 0)}, {}),
    ("head_dim=128, head_dim_v=64: they may differ as 192 and 128 only", {"dims": (128, 64)}, {}),
    ("the last dimension of v is not contiguous", {}, {"strided": True}),
    ("nothing to compute: batch=2, heads_q=4, seqlen_q=0", {"lengths": (0, 8)}, {}),
    ("query is on cuda:0, other tensors on cpu", {}, {"mixed": True}),
]


@pytest.mark.parametrize(("reason", "sizes", "how"), GPU, ids=[row[0] for row in GPU])
def test_gpu_reasons(
    reason: str, sizes: dict[str, Any], how: dict[str, Any], on: serve.ServedCall, fake_cuda: Any
) -> None:
    with fake_cuda.mode, torch.device("cuda:0"):
        q, k, v = (x.to(how.get("dtype", torch.bfloat16)) for x in tensors(**sizes))
        mask = torch.ones(1, 1, 8, 8, dtype=how["mask"]) if "mask" in how else None
        if "strided" in how:
            v = torch.empty_strided(v.shape, (1024, 512, 1, 8), dtype=v.dtype)
    if "mixed" in how:
        k, reason = tensors()[1], "key is on cpu, other tensors on cuda:0"
    q.requires_grad_("grad" in how)
    assert on.decide((Layer(), q, k, v, mask), {}, ARCH)[0] == Declined(reason)


def test_latent_attention_is_within_the_limits(on: serve.ServedCall, fake_cuda: Any) -> None:
    with fake_cuda.mode, torch.device("cuda:0"):
        q, k, v = (x.bfloat16() for x in tensors(heads=(4, 4), dims=(192, 128)))
    decision = on.decide((Layer(groups=1), q, k, v, None), {}, ARCH)[0]
    assert decision == Declined("no attention kernel for sm_70 yet: upstream's own code runs")


def test_autocast_and_torch_s_own_choice(on: serve.ServedCall, fake_cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with fake_cuda.mode, torch.device("cuda:0"):
        q, k, v = (x.bfloat16() for x in tensors())
    call = (Layer(), q, k, v, None)
    none_yet = Declined("no attention kernel for sm_70 yet: upstream's own code runs")
    # what torch.autocast("cuda") does where there is a GPU; without one it warns and does nothing
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: kind == "cuda")
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda kind: torch.float16)
    assert on.decide(call, {}, ARCH)[0] == Declined("autocast to float16 is on, the tensors are bfloat16")
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda kind: torch.bfloat16)
    assert on.decide(call, {}, ARCH)[0] == none_yet
    with sdpa_kernel(SDPBackend.MATH):
        decision = on.decide(call, {}, ARCH)[0]
    assert decision == Declined("torch is told to use no attention backend but its math one")
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        assert on.decide(call, {}, ARCH)[0] == none_yet


@torch.no_grad()
def test_autocast_on_a_cpu(on: serve.ServedCall) -> None:
    call = _plain()
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = entry()(*call)[0], upstream(*call)[0]
    assert ours.dtype == torch.bfloat16 and torch.equal(ours, theirs)
    assert STATE.declined == {"autocast to bfloat16 is on, the tensors are float32": 1}


def test_a_replaced_torch_attention_is_declined(on: serve.ServedCall, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    original = functional.scaled_dot_product_attention

    def replaced(*args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(args)
        return original(*args, **kwargs)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", replaced)
    entry()(*_plain())
    assert len(calls) == 1
    reason = "torch.nn.functional.scaled_dot_product_attention was replaced by somebody else"
    assert STATE.declined == {reason: 1}


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
    call = _plain()
    assert torch.equal(entry()(*call)[0], upstream(*call)[0])
    assert STATE.declined == {"the attention kernels take CUDA tensors, these are on cpu": 1}


def test_what_watches_the_operators_declines_a_launch(chosen: None) -> None:
    from torch.autograd import forward_ad
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watcher(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return function(*args, **(kwargs or {}))

    class Counter(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return function(*args, **(kwargs or {}))

    layer, q, k, v, _ = _plain()

    def weighted(q: torch.Tensor) -> torch.Tensor:
        return entry()(layer, q, k, v, None)[0].sum()

    with Watcher():
        weighted(q)
    with Counter():
        weighted(q)
    with forward_ad.dual_level():
        weighted(q)
    with torch.device("cpu"):
        weighted(q)
    torch.func.vmap(weighted)(q[None])
    theirs = torch.func.grad(lambda q: upstream(layer, q, k, v, None)[0].sum())(q)
    assert torch.equal(torch.func.grad(weighted)(q), theirs)
    assert STATE.declined == {
        "a torch function mode is active: Watcher": 1,
        "a torch dispatch mode is active": 1,
        "inside forward-mode differentiation": 1,
        "the attention kernels take CUDA tensors, these are on cpu": 1,
        "inside a functorch transform (vmap, grad, ...)": 2,
    }


@torch.no_grad()
def test_forward_mode_differentiation_keeps_its_tangent(on: serve.ServedCall) -> None:
    from torch.autograd import forward_ad
    from torch.nn.attention import SDPBackend, sdpa_kernel

    layer, q, k, v, _ = _plain()
    with forward_ad.dual_level(), torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
        dual = forward_ad.make_dual(q, torch.ones_like(q))
        ours, theirs = (forward_ad.unpack_dual(f(layer, dual, k, v, None)[0]).tangent for f in (entry(), upstream))
    assert theirs is not None and torch.equal(ours, theirs)


@torch.no_grad()
def test_tracing_records_what_upstream_would(on: serve.ServedCall) -> None:
    layer, q, k, v, _ = _plain()

    def graph(function: Callable[..., Any]) -> str:
        traced = torch.jit.trace(lambda q, k, v: function(layer, q, k, v, None)[0], (q, k, v), check_trace=False)
        return str(traced.inlined_graph)

    nodes = [[line.split("#")[0] for line in graph(f).splitlines()] for f in (entry(), upstream)]
    assert nodes[0] == nodes[1]
    assert STATE.declined == {"torch.jit is tracing": 1}


def test_export_takes_upstreams_code(on: serve.ServedCall) -> None:
    class Module(Layer):
        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return ALL_ATTENTION_FUNCTIONS["sdpa"](self, q, k, v, None)[0]

    call = tensors()
    program = torch.export.export(Module(), call)
    assert torch.equal(program.module()(*call), upstream(Layer(), *call, None)[0])
    assert not STATE.served


# --- Keywords -----------------------------------------------------------------------------------------------------


def test_upstream_reads_no_keyword_that_is_not_declined() -> None:
    tree = ast.parse(textwrap.dedent(inspect.getsource(upstream)))
    read = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id == "kwargs" and isinstance(node.ctx, ast.Load):
            uses = [n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and n.value is node]
            assert uses and uses[0].attr == "get", "kwargs is used in a way that is not known here"
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "kwargs.get":
            read.add(node.args[0].value)
    assert "output_attentions" in read
    assert read <= attention.DECLINED_KEYWORDS
    assert not attention.DECLINED_KEYWORDS & set(attention.IGNORED_KEYWORDS)


@torch.no_grad()
def test_keywords_that_upstream_ignores_change_nothing(on: serve.ServedCall) -> None:
    call = _plain()
    plain = on.decide(call, {}, ARCH)
    for name in (*attention.IGNORED_KEYWORDS, "unheard_of"):
        assert on.decide(call, {name: 3}, ARCH) == plain
        assert torch.equal(upstream(*call, **{name: 3})[0], upstream(*call)[0])
    for name in attention.DECLINED_KEYWORDS:
        assert on.decide(call, {name: None}, ARCH) == plain
    assert on.decide(call, {"output_attentions": False}, ARCH) == plain


# --- Explained ----------------------------------------------------------------------------------------------------


def test_explain_names_the_reason() -> None:
    q, k, v = tensors()
    assert accel.explain("transformers.sdpa", Layer(), q, k, v, None) == Declined("transformers.sdpa is off")
    accel.accelerate("transformers.sdpa")
    assert accel.explain("transformers.sdpa", Layer(), q, k, v, None) == Declined("upstream's own code serves a CPU")
    assert not STATE.declined


@pytest.mark.parametrize(
    ("lengths", "mask", "is_causal"),
    [
        ((8, 8), False, None),
        ((8, 13), False, None),
        ((1, 13), False, None),
        ((8, 13), True, None),
        ((8, 8), False, False),
    ],
)
def test_run_hands_the_kernel_what_upstream_computes(
    lengths: tuple[int, int], mask: bool, is_causal: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kernel(
        config: str,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        mask: torch.Tensor | None,
        causal: str,
        scale: float,
        seqlen_dim: int,
    ) -> tuple[torch.Tensor, None]:
        assert config == "planned" and seqlen_dim == 1
        assert k.size(1) == 2, "k and v are handed over unrepeated"
        k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        assert causal in ("none", "top_left")
        out = functional.scaled_dot_product_attention(q, k, v, mask, is_causal=causal == "top_left", scale=scale)
        return out.transpose(1, 2).contiguous(), None

    monkeypatch.setattr(attention.launch, "run", kernel)
    q, k, v = tensors(lengths=lengths)
    seen = torch.rand(2, 1, *lengths) > 0.3 if mask else None
    layer, choice = Layer(), Choice("attention", "sm90_fwd", "planned")
    ours, weights = attention.Sdpa().run(choice, layer, q, k, v, seen, scaling=0.3, is_causal=is_causal)
    theirs, _ = upstream(layer, q, k, v, seen, scaling=0.3, is_causal=is_causal)
    assert weights is None and ours.shape == theirs.shape and ours.is_contiguous()
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
