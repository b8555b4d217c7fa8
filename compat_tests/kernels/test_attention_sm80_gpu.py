"""The sm80 forward on a GPU against the fp64 oracle, within the accuracy rule, into outputs filled with NaN.

On sm_90 it runs past the plan, in the configurations of the archs that it is for; elsewhere the plan chooses it.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from accel.kernels.attention import launch
from accel.kernels.attention.cases import FWD_CASES, LAYOUTS, SM80_CASES, Case, portable
from accel.kernels.attention.mask_cases import MASKS
from accel.kernels.attention.sm80_config import sm80_config
from accel.kernels.runtime import arch as archs

pytestmark = pytest.mark.gpu

NORM_RATIO, MAX_RATIO, FLOOR = 1.25, 2.0, 1e-6
ON_SM90 = torch.cuda.is_available() and archs.cuda_arch(0) == "sm_90"
CASES = SM80_CASES if ON_SM90 or not torch.cuda.is_available() else FWD_CASES
AS = "sm_80" if ON_SM90 else ""


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


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_case(case: Case) -> None:
    verify(case)


def test_random_sweep() -> None:
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


def test_deterministic() -> None:
    for mask in ("none", "left_causal"):
        case = Case(2, (8, 2), (1111, 1111), 128, causal="top_left", mask=mask, as_arch=AS)
        inputs = make(case)
        first = case.run(inputs)
        for _ in range(5):
            again = case.run(inputs)
            assert all(torch.equal(first[name], again[name]) for name in first)


def test_a_key_that_nobody_sees_does_not_matter() -> None:
    case = Case(1, (2, 2), (100, 300), 128, causal="top_left", as_arch=AS)
    inputs = make(case)
    want = case.run(inputs)["out"]
    inputs["k"][:, :, 128:] = torch.nan
    inputs["v"][:, :, 128:] = torch.nan
    assert torch.equal(case.run(inputs)["out"], want)


def test_graph_capture_and_replay() -> None:
    case = Case(2, (4, 2), (300, 300), 128, causal="top_left", as_arch=AS)
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
    case = Case(2, (8, 2), (1024, 1024), 128, causal="top_left", as_arch=AS)
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
        check(f"{slots} slots, {name}", got, portable(case, inputs)[name], case.oracle(inputs)[name])
