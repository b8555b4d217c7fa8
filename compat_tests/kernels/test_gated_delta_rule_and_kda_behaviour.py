"""Gated delta rule and KDA, portable: between calls, and inside autograd, checkpoint, autocast, threads and compile."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from accel.kernels.gated_delta_rule import cases as gdn_cases
from accel.kernels.kda import cases as kda_cases
from accel.kernels.linear_attention import ops
from accel.kernels.linear_attention.case import DIFFERENTIATED, Case, Inputs, Outputs, laid_out, with_gradients

FAMILIES = {"gated_delta_rule": gdn_cases, "kda": kda_cases}
PUBLIC = {
    ("gated_delta_rule", "chunk"): gdn_cases.gated_delta_rule,
    ("gated_delta_rule", "recurrent"): gdn_cases.recurrent_gated_delta_rule,
    ("kda", "chunk"): kda_cases.kda,
    ("kda", "recurrent"): kda_cases.recurrent_kda,
}


@pytest.fixture
def seed() -> int:
    drawn = random.SystemRandom().randrange(1 << 31)
    print(f"seed {drawn}")
    return drawn


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=["chunk", "recurrent"])
def mode(request: pytest.FixtureRequest) -> str:
    return request.param


def make(case: Case, seed: int) -> Inputs:
    return case.make("cpu", torch.Generator().manual_seed(seed))


def public(case: Case) -> Callable[..., Any]:
    return PUBLIC[case.family, case.mode]


def call(case: Case, inputs: Inputs, **changed: Any) -> tuple[Tensor, Tensor | None]:
    tensors = {name: x for name, x in inputs.items() if not name.startswith("d_")}
    return public(case)(**{**tensors, **case.options(), **changed})


def assert_equal(ours: Outputs, theirs: Outputs) -> None:
    assert set(ours) == set(theirs)
    for name, x in ours.items():
        torch.testing.assert_close(x, theirs[name], rtol=0, atol=0, msg=lambda m, n=name: f"{n}: {m}")


# --- between calls ----------------------------------------------------------------------------------------------------


def test_packed_equals_separate(family: str, mode: str, seed: int) -> None:
    lengths = (70, 0, 1, 64, 5) if mode == "chunk" else (7, 0, 1, 12)
    inputs = make(FAMILIES[family].Case(lengths, (2, 4), (16, 24), "float64", mode, packed=True), seed)
    case = FAMILIES[family].Case(lengths, (2, 4), (16, 24), "float64", mode, packed=True)
    together = case.run(inputs)
    start = 0
    for n, length in enumerate(lengths):
        own = {name: x[:, start : start + length] for name, x in inputs.items() if x.dim() > 1 and "state" not in name}
        own |= {name: inputs[name][n : n + 1] for name in ("initial_state", "d_final_state")}
        own = {name: x.detach().requires_grad_(name in DIFFERENTIATED) for name, x in own.items()}
        for name, x in case.run(own).items():
            whole = together[name]
            part = whole[n : n + 1] if "state" in name else whole[:, start : start + length]
            torch.testing.assert_close(x, part, rtol=1e-12, atol=1e-13)
        start += length


def test_nothing_leaks_between_packed_sequences(family: str, mode: str, seed: int) -> None:
    """Changing one sequence, to NaN even, leaves results and gradients of the others as they are, bit for bit."""
    lengths = (30, 66, 1, 20) if mode == "chunk" else (5, 9, 1, 7)
    case = FAMILIES[family].Case(lengths, (2, 2), (16, 16), "float32", mode, packed=True)
    inputs = make(case, seed)
    before = case.run(inputs)
    first, last = lengths[0], lengths[0] + lengths[1]
    with torch.no_grad():
        for name in ("q", "k", "v"):
            inputs[name][:, first:last] = torch.nan
    after = case.run(inputs)
    for name, x in before.items():
        parts = [(0, 1), (2, 4)] if "state" in name else [(0, first), (last, sum(lengths))]
        for a, b in parts:
            one, other = (y[a:b] if "state" in name else y[:, a:b] for y in (x, after[name]))
            torch.testing.assert_close(one, other, rtol=0, atol=0, msg=lambda m, n=name: f"{n}: {m}")


def test_tokens_of_no_sequence_get_zeros(family: str, mode: str, seed: int) -> None:
    case = FAMILIES[family].Case((3, 10, 4), (1, 2), (8, 8), "float32", mode, packed=True, states=False)
    inputs = make(case, seed)
    inputs["cu_seqlens"] = torch.tensor([3, 13])
    found = case.run(inputs)
    for x in found.values():
        assert x[:, 3:13].abs().sum() > 0
        assert not x[:, :3].any() and not x[:, 13:].any()


@pytest.mark.parametrize("tokens", [2, 64, 65, 100])
def test_prefill_and_a_step_equal_one_prefill(family: str, tokens: int, seed: int) -> None:
    case = FAMILIES[family].Case((tokens,), (2, 4), (16, 24), "float64", gate="softplus", use_beta_sigmoid=True)
    inputs = {name: x.detach() for name, x in make(case, seed).items()}
    out, final = call(case, inputs)
    by_token = ("q", "k", "v", "g", "beta")
    head = {**inputs, **{name: inputs[name][:, :-1] for name in by_token}}
    last = {**inputs, **{name: inputs[name][:, -1:] for name in by_token}}
    out_head, state = call(case, head)
    step = FAMILIES[family].Case((1,), (2, 4), (16, 24), "float64", "recurrent", gate="softplus", use_beta_sigmoid=True)
    out_last, state = call(step, {**last, "initial_state": state})
    torch.testing.assert_close(torch.cat((out_head, out_last), 1), out, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(state, final, rtol=1e-12, atol=1e-13)


def test_gradients_flow_through_the_state_between_two_calls(family: str, mode: str, seed: int) -> None:
    """Backpropagation through a sequence in two pieces equals that through the whole."""
    case = FAMILIES[family].Case((23,), (1, 2), (8, 12), "float64", mode, states=False)
    inputs = make(case, seed)
    whole = case.run(inputs)

    def in_two(**given: Any) -> tuple[Tensor, None]:
        first, second = (
            {n: x[:, s] if isinstance(x, Tensor) else x for n, x in given.items()} for s in (slice(9), slice(9, None))
        )
        out, state = public(case)(**{**first, "output_final_state": True})
        out_2, _ = public(case)(**second, initial_state=state)
        return torch.cat((out, out_2), 1), None

    for name, x in case.call_with(in_two, inputs).items():
        torch.testing.assert_close(x, whole[name], rtol=1e-11, atol=1e-12)


def test_both_state_layouts_agree(family: str, mode: str, seed: int) -> None:
    options: dict[str, Any] = {"packed": True, "gate": "softplus"}
    kv = FAMILIES[family].Case((9, 0, 70 if mode == "chunk" else 4), (2, 4), (16, 24), "float32", mode, **options)
    vk = FAMILIES[family].Case(kv.lengths, kv.heads, kv.dims, kv.dtype, mode, state_v_first=True, **options)
    inputs = make(kv, seed)
    turned = dict(inputs)
    turned["initial_state"] = inputs["initial_state"].detach().mT.contiguous().requires_grad_()
    turned["d_final_state"] = inputs["d_final_state"].mT.contiguous()
    ours, theirs = kv.run(inputs), vk.run(turned)
    assert theirs["final_state"].is_contiguous()
    for name in ("final_state", "d_initial_state"):
        theirs[name] = theirs[name].mT
    assert_equal(ours, theirs)


def test_value_heads_that_share_a_key_head_equal_repeated_key_heads(family: str, mode: str, seed: int) -> None:
    case = FAMILIES[family].Case((40,), (2, 6), (16, 8), "float64", mode)
    inputs = make(case, seed)
    grouped = case.run(inputs)
    repeated = dict(inputs)
    for name in ("q", "k"):
        repeated[name] = inputs[name].detach().repeat_interleave(3, 2).requires_grad_()
    separate = FAMILIES[family].Case((40,), (6, 6), (16, 8), "float64", mode).run(repeated)
    for name in ("d_q", "d_k"):
        separate[name] = separate[name].unflatten(2, (2, 3)).sum(3)
    for name, x in grouped.items():
        torch.testing.assert_close(x, separate[name], rtol=1e-12, atol=1e-13)


# --- layouts and dtypes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["split", "time_last"])
def test_strides_do_not_matter(family: str, mode: str, layout: str, seed: int) -> None:
    case = FAMILIES[family].Case((20, 20), (2, 2), (16, 24), "float64", mode)
    inputs = make(case, seed)
    strided = dict(inputs)
    for name, x in zip("qkv", laid_out([inputs[n].detach() for n in "qkv"], layout, "cpu", torch.float64), strict=True):
        assert not x.is_contiguous()
        strided[name] = x.requires_grad_()
    for name in ("g", "beta", "initial_state"):
        strided[name] = torch.stack((inputs[name].detach(),) * 2, -1)[..., 0].requires_grad_()
    strided["d_o"] = torch.cat((inputs["d_o"], inputs["d_o"]), -1).chunk(2, -1)[0]
    strided["d_final_state"] = inputs["d_final_state"].mT.contiguous().mT
    ours = case.run(strided)
    assert ours["o"].is_contiguous() and ours["final_state"].is_contiguous()
    for name, x in case.run(inputs).items():
        torch.testing.assert_close(ours[name], x, rtol=1e-12, atol=1e-13)


def test_dtypes_of_results_and_gradients(family: str, mode: str, seed: int) -> None:
    case = FAMILIES[family].Case((10,), (1, 2), (8, 8), "float32", mode, gate="softplus", use_beta_sigmoid=True)
    inputs = make(case, seed)
    wanted = {"q": "float16", "k": "float16", "v": "bfloat16", "g": "bfloat16", "beta": "float32", "A_log": "bfloat16"}
    wanted |= {"initial_state": "bfloat16", "dt_bias": "float32"}
    for name, dtype in wanted.items():
        inputs[name] = inputs[name].detach().to(getattr(torch, dtype)).requires_grad_()
    found = case.run(inputs)
    assert found["o"].dtype == (torch.float16 if mode == "chunk" else torch.bfloat16)
    assert found["final_state"].dtype == torch.float32
    assert {name: str(found[f"d_{name}"].dtype) for name in wanted} == {n: f"torch.{d}" for n, d in wanted.items()}


def test_inputs_and_incoming_gradients_are_left_alone(family: str, mode: str, seed: int) -> None:
    for lengths in ((1,), (8,), (64,)):
        case = FAMILIES[family].Case(lengths, (1, 1), (8, 8), "float32", mode)
        inputs = make(case, seed)
        before = {name: x.detach().clone() for name, x in inputs.items()}
        case.run(inputs)
        assert_equal({name: x.detach() for name, x in inputs.items()}, before)


def test_the_final_state_is_a_new_tensor(family: str, mode: str, seed: int) -> None:
    for v_first in (False, True):
        for tokens in (0, 1):
            case = FAMILIES[family].Case((tokens,), (1, 1), (8, 4), "float32", mode, state_v_first=v_first)
            inputs = make(case, seed)
            with torch.no_grad():
                _, final = call(case, inputs)
            assert final is not None and final.data_ptr() != inputs["initial_state"].data_ptr()
            if tokens == 0:
                torch.testing.assert_close(final, inputs["initial_state"], rtol=0, atol=0)


# --- extreme gates and inputs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("strength", [-20.0, -1000.0, -1e30, -torch.inf])
def test_gates_of_any_strength_stay_finite(family: str, mode: str, strength: float, seed: int) -> None:
    case = FAMILIES[family].Case((130 if mode == "chunk" else 20,), (1, 2), (8, 8), "float32", mode)
    inputs = make(case, seed)
    everywhere = torch.full_like(inputs["g"], strength)
    somewhere = torch.where(
        torch.rand(everywhere.shape, generator=torch.Generator().manual_seed(seed)) < 0.2, strength, -0.1
    )
    for g in (everywhere, somewhere):
        inputs["g"] = g.requires_grad_()
        ours, oracle = case.run(inputs), case.oracle(inputs)
        for name, x in ours.items():
            assert x.isfinite().all(), name
            error = (x.double() - oracle[name]).norm()
            assert error <= 2e-6 * oracle[name].norm() + 1e-30, name


def test_a_gate_of_zero_is_the_delta_rule(family: str, mode: str, seed: int) -> None:
    case = FAMILIES[family].Case((70 if mode == "chunk" else 10,), (1, 1), (8, 8), "float64", mode, gate="zero")
    inputs = make(case, seed)
    out, final = call(case, inputs)
    q, k, v, beta = (inputs[n].detach()[0, :, 0] for n in ("q", "k", "v", "beta"))
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    state, rows = inputs["initial_state"].detach()[0, 0], []
    for t in range(q.shape[0]):
        state = state + torch.outer(k[t], beta[t] * (v[t] - state.T @ k[t]))
        rows.append(state.T @ q[t] * 8**-0.5)
    torch.testing.assert_close(out[0, :, 0], torch.stack(rows), rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(final[0, 0], state, rtol=1e-12, atol=1e-13)


def test_zero_rows_under_l2norm_have_finite_gradients(family: str, mode: str, seed: int) -> None:
    """Left padding: zero queries and keys."""
    case = FAMILIES[family].Case((20,), (1, 2), (8, 8), "float32", mode)
    inputs = make(case, seed)
    with torch.no_grad():
        inputs["q"][:, :7] = 0
        inputs["k"][:, :7] = 0
    ours, oracle = case.run(inputs), case.oracle(inputs)
    for name, x in ours.items():
        assert x.isfinite().all(), name
        assert (x.double() - oracle[name]).norm() <= 1e-6 * oracle[name].norm(), name
    assert ours["d_q"][:, :7].abs().sum() > 0


def test_keys_that_are_not_normalised_stay_finite_under_strong_decay(family: str, seed: int) -> None:
    """Here the inverse without the decay in it has entries beyond fp32's range; the gated one is used."""
    case = FAMILIES[family].Case((64,), (1, 1), (64, 16), "float32", use_qk_l2norm=False)
    inputs = make(case, seed)
    inputs["k"] = (inputs["k"].detach() * 64**0.5).requires_grad_()
    inputs["g"] = torch.full_like(inputs["g"], -10.0).requires_grad_()
    ours, oracle = case.run(inputs), case.oracle(inputs)
    for name, x in ours.items():
        assert (x.double() - oracle[name]).norm() <= 1e-5 * oracle[name].norm(), name


# --- inside autograd --------------------------------------------------------------------------------------------------


def test_without_gradients_the_result_is_the_same(family: str, mode: str, seed: int) -> None:
    case = FAMILIES[family].Case((70 if mode == "chunk" else 8,), (1, 2), (8, 8), "float32", mode)
    inputs = make(case, seed)
    out, final = call(case, inputs)
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            out_2, final_2 = call(case, inputs)
        assert not out_2.requires_grad
        assert torch.equal(out, out_2) and torch.equal(final, final_2)


def test_any_part_of_the_results_and_inputs_can_be_differentiated(family: str, mode: str, seed: int) -> None:
    case = FAMILIES[family].Case((9,), (1, 2), (8, 8), "float64", mode)
    inputs = make(case, seed)
    out, final = call(case, inputs)
    names = [name for name in DIFFERENTIATED if name in inputs]
    wanted = [inputs[n] for n in names]
    from_out = torch.autograd.grad(out, wanted, inputs["d_o"], retain_graph=True)
    from_final = torch.autograd.grad(final, wanted, inputs["d_final_state"], allow_unused=True)
    both = case.run(inputs)
    for name, a, b in zip(names, from_out, from_final, strict=True):
        torch.testing.assert_close(a + (0 if b is None else b), both[f"d_{name}"], rtol=1e-11, atol=1e-12)
    for name in names:
        alone = {n: x.detach().requires_grad_(n == name) for n, x in inputs.items() if x.is_floating_point()}
        out, final = call(case, alone)
        (grad,) = torch.autograd.grad((out, final), alone[name], (inputs["d_o"], inputs["d_final_state"]))
        torch.testing.assert_close(grad, both[f"d_{name}"], rtol=1e-12, atol=1e-13)


def test_a_second_derivative_is_refused(family: str, mode: str, seed: int) -> None:
    case = FAMILIES[family].Case((3,), (1, 1), (4, 4), "float32", mode)
    inputs = make(case, seed)
    out, _ = call(case, inputs)
    for name in ("q", "v"):
        (grad,) = torch.autograd.grad(out.sum(), inputs[name], create_graph=True)
        torch.testing.assert_close(grad, torch.autograd.grad(out.sum(), inputs[name], retain_graph=True)[0])
        with pytest.raises(RuntimeError, match="no second derivative"):
            torch.autograd.grad(grad.sum(), inputs["k"])


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint(family: str, mode: str, reentrant: bool, seed: int) -> None:
    case = FAMILIES[family].Case((20,), (1, 2), (8, 8), "float32", mode, gate="softplus", use_beta_sigmoid=True)
    inputs = make(case, seed)
    plain = case.run(inputs)
    names = [name for name in inputs if not name.startswith("d_")]

    def function(*tensors: Tensor) -> Any:
        return public(case)(**dict(zip(names, tensors, strict=True)), **case.options())

    out, final = checkpoint(function, *(inputs[name] for name in names), use_reentrant=reentrant)
    torch.autograd.backward((out, final), (inputs["d_o"], inputs["d_final_state"]))
    ours = {"o": out.detach(), "final_state": final.detach(), **{f"d_{n}": inputs[n].grad for n in names}}
    assert_equal(ours, plain)


def test_autocast_changes_nothing(family: str, mode: str, seed: int) -> None:
    case = FAMILIES[family].Case((20,), (1, 2), (8, 8), "float32", mode, gate="softplus", use_beta_sigmoid=True)
    inputs = make(case, seed)
    with torch.autocast("cpu", torch.bfloat16):
        ours = case.run(inputs)  # the backward too
    assert_equal(ours, case.run(inputs))


def test_threads(family: str, seed: int) -> None:
    case = FAMILIES[family].Case((30, 0, 70), (1, 2), (8, 8), "float32", packed=True)
    inputs = make(case, seed)
    alone = case.run(inputs)
    found: list[Outputs] = []
    threads = [threading.Thread(target=lambda: found.extend(case.run(inputs) for _ in range(4))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 16
    for one in found:
        assert_equal(one, alone)


# --- inside torch.compile ---------------------------------------------------------------------------------------------


@pytest.fixture
def _fresh_compiler() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_in_one_graph(family: str, mode: str, backend: str, seed: int, _fresh_compiler: None) -> None:
    for lengths, packed in (((20, 20), False), ((3, 0, 17, 1), True)):
        case = FAMILIES[family].Case(
            lengths, (1, 2), (8, 8), "bfloat16", mode, packed, "softplus", state_v_first=True, use_beta_sigmoid=True
        )
        inputs = make(case, seed)
        compiled = torch.compile(public(case), fullgraph=True, backend=backend)
        ours = case.call_with(compiled, inputs)
        for name, x in case.run(inputs).items():
            torch.testing.assert_close(ours[name], x, rtol=1e-2, atol=1e-5)
            assert ours[name].dtype == x.dtype and ours[name].stride() == x.stride(), name
        with torch.no_grad():
            out, final = compiled(**{n: x for n, x in inputs.items() if not n.startswith("d_")}, **case.options())
        torch.testing.assert_close(final, ours["final_state"])
        torch.testing.assert_close(out, ours["o"])


def test_a_compiled_graph_serves_every_length(family: str, mode: str, seed: int, _fresh_compiler: None) -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, example_inputs: list[Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    compiled = None
    for tokens in (20, 33, 70, 129):
        case = FAMILIES[family].Case((tokens,), (1, 2), (8, 8), "float32", mode, states=False)
        compiled = compiled or torch.compile(public(case), fullgraph=True, backend=backend)
        inputs = make(case, seed)
        with torch.no_grad():
            given = {n: x for n, x in inputs.items() if not n.startswith("d_")}
            torch.testing.assert_close(compiled(**given, **case.options())[0], call(case, inputs)[0])
    assert len(graphs) == 2  # the first length, then any


@pytest.mark.parametrize("packed", [False, True])
def test_library_ops_are_well_formed(family: str, mode: str, packed: bool, seed: int) -> None:
    case = FAMILIES[family].Case((3, 3), (1, 2), (4, 6), "float32", mode, packed)
    inputs = make(case, seed)
    cu_seqlens = inputs.get("cu_seqlens")
    q, k, v, g, beta, state = (inputs[n] for n in ("q", "k", "v", "g", "beta", "initial_state"))
    if mode == "chunk":
        args: tuple[Any, ...] = (q, k, v, g, beta, state, cu_seqlens, 0.5)
        op = ops._chunked_op
    else:
        gk = g if case.per_channel else g[..., None]
        args = (q, k, v, gk, v.detach() - 3 if packed else None, beta[..., None], state, cu_seqlens, 0.5)
        op = ops._recurrent_op
    torch.library.opcheck(op, args)


def test_the_op_of_compiled_code_equals_the_eager_path(family: str, mode: str, seed: int) -> None:
    """The same numbers, though its backward computes the forward once more."""
    case = FAMILIES[family].Case((3, 0, 70 if mode == "chunk" else 6), (1, 2), (8, 8), "float32", mode, packed=True)
    inputs = make(case, seed)
    q, k, v, g, beta, state = (inputs[n] for n in ("q", "k", "v", "g", "beta", "initial_state"))
    if mode == "chunk":
        results = [
            f(q, k, v, g, beta, state, inputs["cu_seqlens"], 0.5) for f in (ops.chunked_delta_rule, ops._chunked_op)
        ]
    else:
        gk = g if case.per_channel else g[..., None]
        results = [
            f(q, k, v, gk, None, beta[..., None], state, inputs["cu_seqlens"], 0.5)
            for f in (ops.recurrent_delta_rule, ops._recurrent_op)
        ]
    eager, compiled = (with_gradients(inputs, *result) for result in results)
    assert_equal(eager, compiled)


def test_exported_for_every_length(family: str, seed: int) -> None:
    case = FAMILIES[family].Case((40,), (1, 2), (8, 8), "float32", states=False)
    inputs = {name: x.detach() for name, x in make(case, seed).items() if not name.startswith("d_")}

    class Module(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
            return public(case)(q, k, v, g, beta, **case.options())[0]

    tokens = torch.export.Dim("tokens")
    exported = torch.export.export(Module(), tuple(inputs.values()), dynamic_shapes={n: {1: tokens} for n in inputs})
    shorter = tuple(x[:, :23] for x in inputs.values())
    torch.testing.assert_close(exported.module()(*shorter), Module()(*shorter))


def test_meta_tensors(family: str, mode: str, seed: int) -> None:
    """Shapes and dtypes without values, gradients included."""
    case = FAMILIES[family].Case((20, 20), (1, 2), (8, 12), "bfloat16", mode, state_v_first=True)
    real = make(case, seed)
    abstract = {name: x.detach().to("meta").requires_grad_(x.requires_grad) for name, x in real.items()}
    for name, x in case.run(abstract).items():
        expected = case.run(real)[name]
        assert x.device.type == "meta" and x.shape == expected.shape and x.dtype == expected.dtype, name
