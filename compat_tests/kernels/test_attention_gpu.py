"""The attention kernel on a GPU against the fp64 oracle, within the accuracy rule, into outputs filled with NaN."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from accel.kernels.attention import attention
from accel.kernels.attention.cases import FWD_CASES, LAYOUTS, Case, portable
from accel.outcome import Decline

pytestmark = pytest.mark.gpu

NORM_RATIO, MAX_RATIO, FLOOR = 1.25, 2.0, 1e-6


@pytest.fixture(autouse=True)
def _poison():
    """Uninitialised memory is NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


def make(case: Case, seed: int = 0) -> dict[str, Any]:
    return case.make("cuda", torch.Generator().manual_seed(seed))


def check(what: str, got: torch.Tensor, upstream: torch.Tensor, oracle: torch.Tensor) -> None:
    assert got.shape == upstream.shape, what
    same_infinite = torch.isinf(oracle)
    assert torch.equal(torch.isinf(got), same_infinite) and not torch.isnan(got).any(), f"{what}: not finite"
    g, u, o = (torch.where(same_infinite, 0.0, t.double()) for t in (got, upstream, oracle))
    scale = o.norm().item() or 1.0
    error, limit = (g - o).norm().item() / scale, NORM_RATIO * (u - o).norm().item() / scale
    assert error <= max(limit, FLOOR), f"{what}: error {error:.3e} > {limit:.3e}"
    peak, worst = o.abs().max().item(), (g - o).abs().max().item()
    allowed = MAX_RATIO * (u - o).abs().max().item()
    assert worst <= max(allowed, FLOOR * peak), f"{what}: worst {worst:.3e} > {allowed:.3e} (peak {peak:.3e})"


def verify(case: Case, seed: int = 0) -> None:
    inputs = make(case, seed)
    got, upstream, oracle = case.run(inputs), portable(case, inputs), case.oracle(inputs)
    assert got["out"].dtype == inputs["q"].dtype
    for name, ref in oracle.items():
        check(f"{case.name} {name}", got[name], upstream[name], ref)


@pytest.mark.parametrize("case", FWD_CASES, ids=lambda case: case.name)
def test_case(case: Case) -> None:
    verify(case)


def test_random_sweep() -> None:
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    draw = random.Random(seed)
    for i in range(40):
        head_dim, head_dim_v = draw.choice(((64, 0), (80, 0), (96, 0), (128, 0), (192, 128), (256, 0)))
        heads = draw.choice(((1, 1), (2, 2), (4, 1), (6, 3)))
        seqlens = (draw.choice((17, 64, 101, 128, 193, 384, 509)), draw.choice((1, 79, 80, 128, 129, 160, 383, 509)))
        causal = draw.choice(("none", "top_left", "bottom_right"))
        window = draw.choice((None, None, (draw.randrange(300), draw.randrange(300)), (draw.randrange(100), -1)))
        layout, dtype = draw.choice(LAYOUTS), draw.choice(("bfloat16", "float16"))
        verify(Case(draw.choice((1, 3)), heads, seqlens, head_dim, head_dim_v, dtype, causal, window, layout), seed + i)


def test_expanded_keys() -> None:
    """k and v of one batch entry and one head, seen by all: strides of 0."""
    q, k, v = (torch.randn(n, h, 200, 128, device="cuda", dtype=torch.bfloat16) for n, h in ((3, 4), (1, 1), (1, 1)))
    wide = [t.expand(3, 4, -1, -1) for t in (k, v)]
    want = attention(q, *[t.contiguous() for t in wide], causal=True)
    assert torch.equal(attention(q, *wide, causal=True), want)


def test_deterministic() -> None:
    case = Case(2, (8, 2), (1111, 1111), 128, causal="top_left")
    inputs = make(case)
    first = case.run(inputs)
    for _ in range(5):
        again = case.run(inputs)
        assert all(torch.equal(first[name], again[name]) for name in first)


def test_a_key_that_nobody_sees_does_not_matter() -> None:
    case = Case(1, (2, 2), (100, 300), 128, causal="top_left")
    inputs = make(case)
    want = case.run(inputs)["out"]
    inputs["k"][:, :, 128:] = torch.nan
    inputs["v"][:, :, 128:] = torch.nan
    assert torch.equal(case.run(inputs)["out"], want)


def test_graph_capture_and_replay() -> None:
    case = Case(2, (4, 2), (300, 300), 128, causal="top_left")
    inputs = make(case)
    case.run(inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = case.run(inputs)
    inputs["q"].copy_(torch.randn_like(inputs["q"]))
    graph.replay()
    fresh = case.run(inputs)
    assert all(torch.equal(captured[name], fresh[name]) for name in fresh)


def test_side_stream_beside_another_kernel() -> None:
    case = Case(2, (8, 2), (1024, 1024), 128, causal="top_left")
    inputs = make(case)
    want = case.run(inputs)["out"]
    a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    for _ in range(10):
        with torch.cuda.stream(stream):
            got = case.run(inputs)["out"]
        a = torch.tanh(a @ a)
        torch.cuda.synchronize()
        assert torch.equal(got, want)


def test_compiled_callers() -> None:
    case = Case(2, (4, 2), (300, 300), 128)
    inputs = make(case)

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attention(q, k, v, causal="bottom_right", window=(100, 0))

    got = torch.compile(call, fullgraph=True)(inputs["q"], inputs["k"], inputs["v"])
    assert torch.equal(got, call(inputs["q"], inputs["k"], inputs["v"]))


def test_declines_during_capture_when_not_loaded() -> None:
    q = torch.randn(1, 1, 64, 216, device="cuda", dtype=torch.bfloat16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = q * 2
        with pytest.raises(Decline, match="not loaded during graph capture"):
            attention(q, q, q)
    assert held.shape == q.shape
