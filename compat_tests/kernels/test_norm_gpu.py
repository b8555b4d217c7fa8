"""The norm kernels on a GPU against the fp64 oracle, within the accuracy rule, into outputs filled with NaN."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest
import torch

from accel.kernels.norm import portable as plain
from accel.kernels.norm import rms_norm
from accel.kernels.norm.cases import CASES, Case, portable
from accel.kernels.runtime import compile as runtime
from accel.outcome import Decline
from accel.testing import accuracy

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned")]


def make(case: Case, seed: int = 0) -> dict[str, Any]:
    return case.make("cuda", torch.Generator().manual_seed(seed))


def grads(y: torch.Tensor, t: dict[str, Any]) -> list[torch.Tensor]:
    return list(torch.autograd.grad(y, [t[name] for name in ("x", "weight", "gate") if name in t], t["d_y"]))


def portable_forward(case: Case, t: dict[str, Any]) -> torch.Tensor:
    if case.activation is None:
        return plain.rms_norm(t["x"], t["weight"], case.eps, case.form)
    return plain.rms_norm_gated(t["x"], t["gate"], t["weight"], case.eps, case.activation, case.form)


def verify(case: Case, seed: int = 0) -> None:
    """Upstream's part is played by the same formula in plain torch: its operations in its order."""
    inputs = make(case, seed)
    got, upstream, oracle = case.run(inputs), portable(case, inputs), case.oracle(inputs)
    for name, ref in oracle.items():
        verdict = accuracy(got[name], upstream[name], ref)
        assert verdict.ok, f"{case.name} {name}: {verdict.reason}"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_case(case: Case) -> None:
    verify(case)


def test_random_sweep() -> None:
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    draw = random.Random(seed)
    for i in range(16):
        dtype = draw.choice(("bfloat16", "float16", "float32"))
        form = draw.choice(("cast_then_weight", "weight_in_fp32", "zero_centred"))
        activation = None if form == "zero_centred" else draw.choice((None, "silu", "sigmoid"))
        hidden = 8 * draw.choice((8, 9, 16, 31, 32, 100, 128, 256, 333, 512, 1024, 1280))
        rows = draw.choice(((1,), (5,), (133,), (700,), (3, 17), (2, 9, 4), (1, 50, 1, 3)))
        layouts = ("contiguous", "rows", "misaligned") + (("heads",) if len(rows) > 1 else ())
        weight_dtype = draw.choice((dtype, "float32"))
        layout = draw.choice(layouts)
        verify(Case(rows, hidden, dtype, weight_dtype, form, activation, layout), seed + i)


def test_only_some_gradients() -> None:
    case = Case((65,), 1024, "bfloat16", "bfloat16", "cast_then_weight")
    t = make(case)
    frozen = {**t, "weight": t["weight"].detach()}
    got = torch.autograd.grad(case.forward(frozen), [t["x"]], t["d_y"])[0]
    assert torch.equal(got, torch.autograd.grad(case.forward(t), [t["x"]], t["d_y"])[0])


def test_expanded_gradient_is_copied() -> None:
    case = Case((65,), 1024, "bfloat16", "bfloat16", "cast_then_weight")
    t = make(case)
    got = torch.autograd.grad(case.forward(t).sum(), [t["x"], t["weight"]])
    want = torch.autograd.grad(case.forward(t), [t["x"], t["weight"]], torch.ones_like(t["d_y"]))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_deterministic() -> None:
    case = Case((4099,), 512, "bfloat16", "bfloat16", "zero_centred")
    t = make(case)
    first = grads(case.forward(t), t)
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(first, grads(case.forward(t), t), strict=True))


def test_gradient_of_the_gradient() -> None:
    case = Case((9,), 64, "float32", "float32", "weight_in_fp32", "silu")
    t = make(case)
    results = []
    for y in (case.forward(t), portable_forward(case, t)):
        dx = torch.autograd.grad(y, [t["x"]], t["d_y"], create_graph=True)[0]
        results.append(torch.autograd.grad(dx.square().sum(), [t["x"], t["weight"], t["gate"]]))
    for a, b in zip(*results, strict=True):
        assert (a - b).norm() <= 1e-5 * b.norm()


def test_threads_and_side_streams() -> None:
    case = Case((513,), 2048, "bfloat16", "bfloat16", "cast_then_weight")
    t = make(case)
    want = [case.forward(t).detach(), *grads(case.forward(t), t)]
    torch.cuda.synchronize()
    failures: list[str] = []

    def work(i: int) -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(20):
                y = case.forward(t)
                got = [y.detach(), *grads(y, t)]
                stream.synchronize()
                if not all(torch.equal(a, b) for a, b in zip(got, want, strict=True)):
                    failures.append(f"thread {i}")

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@pytest.mark.parametrize("gated", (False, True))
def test_graph_capture_and_replay(gated: bool) -> None:
    form = "cast_then_weight"
    case = Case((129,), 1024, "bfloat16", "bfloat16", form, "silu" if gated else None)
    t = make(case)
    case.forward(t)  # loads the forward and the backward; only the forward is launched before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = case.forward(t)
        captured = grads(y, t)
    with torch.no_grad():
        t["x"].copy_(torch.randn_like(t["x"]))
    graph.replay()
    fresh = case.forward(t)
    assert torch.equal(y, fresh)
    assert all(torch.equal(a, b) for a, b in zip(captured, grads(fresh, t), strict=True))


def test_declines_during_capture_when_not_loaded() -> None:
    x = torch.randn(5, 1384, device="cuda", dtype=torch.bfloat16)
    weight = torch.ones(1384, device="cuda", dtype=torch.bfloat16)
    graph = torch.cuda.CUDAGraph()
    kernels = len(runtime._functions)
    with torch.cuda.graph(graph):
        held = x * 2
        with pytest.raises(Decline, match="not loaded during graph capture"):
            rms_norm(x, weight, eps=1e-6)
    assert held.shape == x.shape and len(runtime._functions) == kernels


def test_more_than_2_31_elements() -> None:
    rows, hidden = 2**31 // 128 + 77, 128
    x = torch.randn(rows, hidden, device="cuda", dtype=torch.bfloat16)
    weight = torch.ones(hidden, device="cuda", dtype=torch.bfloat16)
    got = rms_norm(x, weight, eps=1e-6)[-1000:]
    assert torch.equal(got, rms_norm(x[-1000:], weight, eps=1e-6))


@pytest.mark.parametrize("gated", (False, True))
def test_compiled_callers(gated: bool) -> None:
    form = "cast_then_weight"
    case = Case((4, 33), 512, "bfloat16", "bfloat16", form, "silu" if gated else None)
    t = make(case)
    y = torch.compile(lambda t: case.forward(t), fullgraph=True)(t)
    want = case.forward(t)
    assert torch.equal(y, want)
    assert all(torch.equal(a, b) for a, b in zip(grads(y, t), grads(want, t), strict=True))


def test_last_bits_agree_with_upstream() -> None:
    """The rounding points are upstream's: at most a few elements in a million differ, through the order of the sum."""
    for form in ("cast_then_weight", "weight_in_fp32", "zero_centred"):
        case = Case((1024,), 4096, "bfloat16", "bfloat16", form)
        t = make(case)
        different = (case.forward(t) != portable_forward(case, t)).float().mean().item()
        assert different < 1e-3, f"{form}: {different:.2%} of the elements differ"
