"""The forward kernels on a GPU against the fp64 oracle, within the accuracy rule, into outputs filled with NaN.

On sm_90 the sm80 forward runs too, past the plan, in the configurations of the archs that it is for; elsewhere the plan
chooses it.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from accel.kernels.attention import attention, launch
from accel.kernels.attention.cases import FWD_CASES, LAYOUTS, SM80_CASES, Case, portable
from accel.kernels.attention.mask_cases import MASKS
from accel.kernels.attention.sm80_config import sm80_config
from accel.kernels.runtime import arch as archs
from accel.outcome import Decline
from accel.testing import assert_accurate

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned")]

ON_SM90 = torch.cuda.is_available() and archs.cuda_arch(0) == "sm_90"
CASES = (*FWD_CASES, *SM80_CASES) if ON_SM90 or not torch.cuda.is_available() else FWD_CASES
AS = "sm_80" if ON_SM90 else ""
#: `Case.as_arch` of each kernel that can run here: the plan's own, and the sm80 forward beside it on sm_90.
both_kernels = pytest.mark.parametrize("as_arch", ["", "sm_80"] if ON_SM90 else [""])


def make(case: Case, seed: int = 0) -> dict[str, Any]:
    return case.make("cuda", torch.Generator().manual_seed(seed))


def verify(case: Case, seed: int = 0) -> None:
    inputs = make(case, seed)
    got, upstream, oracle = case.run(inputs), portable(case, inputs), case.oracle(inputs)
    assert got["out"].dtype == inputs["q"].dtype
    for name, ref in oracle.items():
        assert_accurate(f"{case.name} {name}", got[name], upstream[name], ref)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
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


def test_random_sweep_of_the_sm80_kernel() -> None:
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    draw = random.Random(seed)
    for number in range(40):
        heads_kv = draw.choice((1, 2, 3))
        mask = draw.choice((*MASKS, *["none"] * len(MASKS)))
        case = Case(
            draw.choice((1, 2, 3)),
            (heads_kv * draw.choice((1, 2, 4)), heads_kv),
            (draw.randint(17, 400), draw.randint(1, 700)),
            draw.choice((64, 96, 128, 256)),
            causal=draw.choice(("none", "top_left", "bottom_right")),
            window=draw.choice((None, None, (draw.randint(-1, 300), draw.randint(-1, 300)))),
            layout=draw.choice(LAYOUTS),
            magnitude=draw.choice((1.0, 1.0, 30.0)),
            mask=mask,
            as_arch=AS,
        )
        print(number, case.name)
        verify(case, seed + number)


def test_expanded_keys() -> None:
    """k and v of one batch entry and one head, seen by all: strides of 0."""
    q, k, v = (torch.randn(n, h, 200, 128, device="cuda", dtype=torch.bfloat16) for n, h in ((3, 4), (1, 1), (1, 1)))
    wide = [t.expand(3, 4, -1, -1) for t in (k, v)]
    want = attention(q, *[t.contiguous() for t in wide], causal=True)
    assert torch.equal(attention(q, *wide, causal=True), want)


@both_kernels
def test_deterministic(as_arch: str) -> None:
    for mask in ("none", "left_causal"):
        case = Case(2, (8, 2), (1111, 1111), 128, causal="top_left", mask=mask, as_arch=as_arch)
        inputs = make(case)
        first = case.run(inputs)
        for _ in range(5):
            again = case.run(inputs)
            assert all(torch.equal(first[name], again[name]) for name in first)


@both_kernels
def test_a_key_that_nobody_sees_does_not_matter(as_arch: str) -> None:
    case = Case(1, (2, 2), (100, 300), 128, causal="top_left", as_arch=as_arch)
    inputs = make(case)
    want = case.run(inputs)["out"]
    inputs["k"][:, :, 128:] = torch.nan
    inputs["v"][:, :, 128:] = torch.nan
    assert torch.equal(case.run(inputs)["out"], want)


@both_kernels
def test_graph_capture_and_replay(as_arch: str) -> None:
    case = Case(2, (4, 2), (300, 300), 128, causal="top_left", as_arch=as_arch)
    inputs = make(case)
    case.run(inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = case.run(inputs)
    inputs["q"].copy_(torch.randn_like(inputs["q"]))
    graph.replay()
    fresh = case.run(inputs)
    assert all(torch.equal(captured[name], fresh[name]) for name in fresh)


@both_kernels
def test_side_stream_beside_another_kernel(as_arch: str) -> None:
    case = Case(2, (8, 2), (1024, 1024), 128, causal="top_left", as_arch=as_arch)
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


@pytest.mark.parametrize("slots", (2, 3, 4, 5, 6))
def test_rings_of_every_length(slots: int) -> None:
    config = sm80_config("bfloat16", 64, 64, "causal", True, archs.cuda_arch(0))
    assert config is not None
    case = Case(2, (4, 2), (700, 900), 64, causal="bottom_right")
    inputs = make(case)
    out, lse = launch.forward(
        replace(config, slots=slots), inputs["q"], inputs["k"], inputs["v"], causal="bottom_right"
    )
    for name, got in (("out", out), ("lse", lse)):
        assert_accurate(f"{slots} slots, {name}", got, portable(case, inputs)[name], case.oracle(inputs)[name])
