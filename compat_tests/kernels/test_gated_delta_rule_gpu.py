"""The recurrent kernel on a GPU: its cases by the accuracy rule, a random sweep, states in place, graphs, streams."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest
import torch

from accel.kernels.gated_delta_rule import decode_gated_delta_rule, launch, recurrent_gated_delta_rule
from accel.kernels.gated_delta_rule.recurrent_cases import BF16, FP16, FP32, RECURRENT_CASES, RecurrentCase, portable
from accel.outcome import Decline
from accel.testing import accuracy

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned")]


def make(case: RecurrentCase, seed: int = 0) -> dict[str, Any]:
    return case.make("cuda", torch.Generator().manual_seed(seed))


def verify(case: RecurrentCase, seed: int = 0) -> None:
    want, theirs = case.oracle(make(case, seed)), portable(case, make(case, seed))
    got, again = case.run(make(case, seed)), case.run(make(case, seed))
    assert set(got) == set(want)
    for name, x in got.items():
        verdict = accuracy(x, theirs[name], want[name])
        assert verdict.ok, f"{case.name}: {name}: {verdict.reason}"
        assert torch.equal(x, again[name]), f"{case.name}: {name} differs between two runs"


@pytest.mark.parametrize("case", RECURRENT_CASES, ids=lambda case: case.name)
def test_case(case: RecurrentCase) -> None:
    verify(case)


def test_random_sweep() -> None:
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    draw = random.Random(seed)
    for number in range(40):
        packed = draw.random() < 0.4
        length = draw.choice((1, 1, 2, 7, 64))
        heads = draw.choice((1, 2, 3))
        sigmoid = draw.random() < 0.5
        lengths = tuple(draw.randrange(6) for _ in range(draw.randrange(1, 30)))
        case = RecurrentCase(
            lengths if packed else (length,) * draw.randrange(1, 9),
            (heads, heads * draw.choice((1, 2, 4))),
            (draw.choice((64, 128, 256)), draw.choice((16, 64, 80, 128, 512))),
            draw.choice((BF16, FP16, FP32)),
            packed=packed,
            gate=draw.choice(("mild", "zero", "strong", "resets", "softplus")),
            layout=draw.choice(("contiguous", "split", "time_last")),
            state_v_first=draw.random() < 0.5,
            use_qk_l2norm=draw.random() < 0.7,
            use_beta_sigmoid=sigmoid,
            allow_neg_eigval=sigmoid and draw.random() < 0.5,
            state=draw.choice(("new", "in_place", "pool", "final", "initial", "padded")),
            scalar_dtype=draw.choice((BF16, FP32)),
        )  # fmt: skip
        verify(case, seed + number)


def test_packed_sequences_equal_separate_ones() -> None:
    lengths = (1, 5, 0, 64, 2, 17)
    case = RecurrentCase(lengths, (2, 4), (128, 128), BF16, packed=True, gate="softplus", use_beta_sigmoid=True)
    inputs = make(case)
    together = case.run(inputs)
    start = 0
    for n, length in enumerate(lengths):
        one = {
            name: x[:, start : start + length] for name, x in inputs.items() if x.dim() > 2 and name != "initial_state"
        }
        one |= {name: inputs[name] for name in ("A_log", "dt_bias")}
        out, final = launch.recurrent(**one, initial_state=inputs["initial_state"][n : n + 1], **case.forward_options())
        assert torch.equal(out, together["o"][:, start : start + length])
        assert torch.equal(final[0], together["final_state"][n])
        start += length


def test_steps_one_by_one_equal_one_call() -> None:
    case = RecurrentCase((12,) * 3, (2, 4), (128, 128), BF16, state_v_first=True)
    inputs = make(case)
    want = case.run(inputs)
    state = inputs.pop("initial_state").clone()
    outs = []
    for t in range(12):
        token = {name: x[:, t : t + 1] for name, x in inputs.items()}
        outs.append(decode_gated_delta_rule(**token, state=state, use_qk_l2norm=True, state_v_first=True))
    torch.testing.assert_close(state, want["final_state"], rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(torch.cat(outs, 1), want["o"], rtol=1e-2, atol=1e-2)


def test_states_of_no_sequence_are_left_alone_and_skipped_ones_give_zeros() -> None:
    case = RecurrentCase((1,) * 9, (2, 4), (128, 128), BF16, state="pool")
    inputs = make(case)
    before = inputs["initial_state"].clone()
    found = case.run(inputs)
    used = inputs["indices"][inputs["indices"] >= 0].tolist()
    rest = [i for i in range(len(before)) if i not in used]
    assert torch.equal(found["final_state"][rest], before[rest])
    assert not torch.equal(found["final_state"][used], before[used])
    assert (found["o"][inputs["indices"] < 0] == 0).all()


def test_graph_replays_and_side_streams() -> None:
    case = RecurrentCase((1,) * 4, (16, 32), (128, 128), BF16, state="in_place")
    inputs = make(case)
    start = inputs["initial_state"].clone()
    want = case.run({**inputs, "initial_state": start.clone()})
    state = start.clone()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        out = case.run({**inputs, "initial_state": state})["o"]
    for _ in range(2):
        state.copy_(start)
        graph.replay()
        assert torch.equal(out, want["o"]) and torch.equal(state, want["final_state"])
    found: dict[str, torch.Tensor] = {}

    def other() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            found.update(case.run({**inputs, "initial_state": start.clone()}))
            torch.cuda.current_stream().synchronize()

    torch.cuda.synchronize()
    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert all(torch.equal(found[name], want[name]) for name in want)


def test_nothing_beside_the_outputs_is_written() -> None:
    case = RecurrentCase((1,) * 3, (2, 4), (128, 128), BF16, state="in_place", state_v_first=True)
    inputs = make(case)
    guarded = torch.full((5, 4, 128, 132), 7.0, device="cuda")
    guarded[1:4, :, :, :128] = inputs["initial_state"]
    state = guarded[1:4, :, :, :128]
    want = case.run(inputs)
    got = case.run({**inputs, "initial_state": state})
    assert torch.equal(got["o"], want["o"]) and torch.equal(state, want["final_state"])
    assert (guarded[0] == 7).all() and (guarded[4] == 7).all() and (guarded[1:4, :, :, 128:] == 7).all()


def test_no_tokens_and_no_sequences() -> None:
    x, g = torch.randn(2, 0, 2, 64, device="cuda"), torch.randn(2, 0, 2, device="cuda")
    state = torch.randn(2, 2, 64, 64, device="cuda")
    out, final = recurrent_gated_delta_rule(x, x, x, g, beta=g, initial_state=state, output_final_state=True)
    assert out.shape == x.shape and torch.equal(final, state) and final.data_ptr() != state.data_ptr()
    y, g = torch.randn(1, 3, 2, 64, device="cuda"), torch.randn(1, 3, 2, device="cuda")
    ends = torch.zeros(1, dtype=torch.int64, device="cuda")
    out, final = recurrent_gated_delta_rule(y, y, y, g, beta=g, cu_seqlens=ends, output_final_state=True)
    assert torch.equal(out, torch.zeros_like(y)) and final.shape == (0, 2, 64, 64)


def test_what_no_kernel_takes_runs_plain_torch_or_declines() -> None:
    x = torch.randn(1, 2, 2, 100, device="cuda")
    g = -torch.rand(1, 2, 2, device="cuda")
    assert recurrent_gated_delta_rule(x, x, x, g)[0].shape == x.shape
    with pytest.raises(Decline, match="head_dim=100"):
        launch.recurrent(x, x, x, g)
    y = torch.randn(1, 2, 2, 64, device="cuda", requires_grad=True)
    recurrent_gated_delta_rule(y, y, y, g)[0].sum().backward()
    assert y.grad is not None
    z = y.detach()
    with pytest.raises(Decline, match="float64"):
        launch.recurrent(z, z, z, g.double())


def test_the_kernel_is_one_launch() -> None:
    case = RecurrentCase((1,) * 4, (16, 32), (128, 128), BF16)
    inputs = make(case)
    case.run(inputs)
    torch.use_deterministic_algorithms(False)  # which fills what is allocated
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        case.run(inputs)
        torch.cuda.synchronize()
    kernels = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert len(kernels) == 1, [event.name for event in kernels]
