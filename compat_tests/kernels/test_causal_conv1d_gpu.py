"""The convolution kernels on a GPU: their cases by the accuracy rule, a random sweep, graphs, guard bytes, a model."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from accel.kernels.causal_conv1d import causal_conv1d, launch
from accel.kernels.causal_conv1d.cases import BF16, CASES, FP16, FP32, Case, portable
from accel.outcome import Decline
from accel.testing import accuracy

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned")]


def make(case: Case, seed: int = 0) -> dict[str, Any]:
    return case.make("cuda", torch.Generator().manual_seed(seed))


def verify(case: Case, seed: int = 0) -> None:
    theirs, want = portable(case, make(case, seed)), oracle(case, make(case, seed))
    got, again = case.run(make(case, seed)), case.run(make(case, seed))
    assert set(got) == set(want)
    for name, x in got.items():
        if name in case.exact:
            assert torch.equal(x.double(), want[name]), f"{case.name}: {name}"
        verdict = accuracy(x, theirs[name], want[name])
        assert verdict.ok, f"{case.name}: {name}: {verdict.reason}"
        assert torch.equal(x, again[name]), f"{case.name}: {name} differs between two runs"


def oracle(case: Case, inputs: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The reference goes token by token: long calls use the portable path in fp64."""
    if sum(case.lengths) * case.channels < 1 << 22:
        return case.oracle(inputs)
    doubled = {name: t.double() if t.is_floating_point() else t for name, t in inputs.items()}
    return portable_in_double(case, doubled)


def portable_in_double(case: Case, inputs: dict[str, Any]) -> dict[str, torch.Tensor]:
    from accel.kernels.causal_conv1d import portable as plain

    y, final = plain.causal_conv1d(
        inputs["x"], inputs["weight"], inputs.get("bias"), case.activation, inputs.get("state"), case.final,
        inputs.get("cu_seqlens"),
    )  # fmt: skip
    return {"y": y} if final is None else {"y": y, "final_state": final}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_case(case: Case) -> None:
    verify(case)


def test_random_sweep() -> None:
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    draw = random.Random(seed)
    for number in range(60):
        packed, width = draw.random() < 0.4, draw.choice((2, 3, 4))
        mode = "forward" if packed else draw.choice(("forward", "forward", "update"))
        lengths = tuple(draw.choice((0, 1, 2, 5, 31, 32, 33, 100)) for _ in range(draw.randrange(1, 40)))
        length = draw.choice((1, 2, 9, 31, 32, 64, 257))
        state = draw.choice((width - 1, 4))
        case = Case(
            lengths if packed else (length,) * draw.randrange(1, 6),
            draw.choice((8, 64, 1000, 1024, 1032, 3072)),
            draw.choice((BF16, FP16, FP32)),
            width,
            draw.random() < 0.5,
            draw.choice((None, "silu")),
            mode,
            packed,
            draw.choice(("channels", "time", "split")),
            state if mode == "update" else draw.choice((0, state)),
            mode == "forward" and draw.random() < 0.5,
        )
        verify(case, seed + number)


def test_a_graph_replays() -> None:
    case = Case((1,) * 8, 1024, mode="update", initial=4)
    inputs = make(case)
    start = inputs["state"].clone()
    want = case.run({**inputs, "state": start.clone()})
    state = start.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = case.run({**inputs, "state": state})["y"]
    for _ in range(2):
        state.copy_(start)
        graph.replay()
        assert torch.equal(y, want["y"]) and torch.equal(state, want["state"])


def test_nothing_beside_the_state_is_written() -> None:
    case = Case((2,) * 3, 96, mode="update", initial=4)
    inputs = make(case)
    want = case.run({**inputs, "state": inputs["state"].clone()})
    guarded = torch.full((5, 96, 6), 7.0, device="cuda", dtype=torch.bfloat16)
    guarded[1:4, :, 1:5] = inputs["state"]
    got = case.run({**inputs, "state": guarded[1:4, :, 1:5]})
    assert torch.equal(got["y"], want["y"]) and torch.equal(guarded[1:4, :, 1:5], want["state"])
    rest = torch.ones(5, 96, 6, dtype=torch.bool, device="cuda")
    rest[1:4, :, 1:5] = False
    assert (guarded[rest] == 7).all()


def test_gradients_run_plain_torch_and_odd_channels_decline() -> None:
    x = torch.randn(1, 7, 12, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(12, 4, device="cuda", dtype=torch.bfloat16)
    causal_conv1d(x, weight, activation="silu")[0].sum().backward()
    assert x.grad is not None
    with pytest.raises(Decline, match="n_channels=12"):
        launch.forward(x.detach(), weight)


@pytest.mark.parametrize("model", ["qwen3_next", "mamba2"])
def test_served_to_transformers(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the module's globals return with the target on, and that the kernels served them."""
    import importlib

    import accel
    from accel.state import STATES

    monkeypatch.setenv("ACCEL_UNCERTIFIED", "1")
    module = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
    case = Case((50,) * 2, 64)
    inputs = make(case)
    x, weight = inputs["x"].mT, inputs["weight"]
    state = torch.randn(2, 64, 4, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        want = module.causal_conv1d_fn(x, weight, None, activation="silu")
        theirs = state.clone()
        step = module.causal_conv1d_update(x[:, :, :1], theirs, weight, None, "silu")
        accel.accelerate("transformers.causal_conv1d")
        try:
            got = module.causal_conv1d_fn(x, weight, None, activation="silu", use_cache=True)
            new = module.causal_conv1d_update(x[:, :, :1], state, weight, None, "silu")
            served = dict(STATES["transformers.causal_conv1d"].served)
        finally:
            accel.restore()
    assert set(served) == {"any_fwd", "any_update"}
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(new, step, rtol=2e-2, atol=2e-2)
    assert torch.equal(state, theirs) and got.mT.is_contiguous()
