"""The chunked kernels on a GPU: their cases by the accuracy rule, a random sweep, packing, prefill and decode, NaN
beside what counts, streams, threads and graphs, barriers that are late."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest
import torch

from accel.kernels.gated_delta_rule import chunk, gated_delta_rule, recurrent_gated_delta_rule
from accel.kernels.gated_delta_rule.chunk_cases import BF16, CHUNK_CASES, FP16, FP32, ChunkCase, portable
from accel.kernels.runtime import delays
from accel.outcome import Decline
from accel.testing import accuracy

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned")]
SOFTPLUS: dict[str, Any] = {"gate": "softplus", "use_beta_sigmoid": True}
#: Small, for they run often and under the sanitizer.
SMALL = (
    ChunkCase((130, 130), (1, 2), (128, 128), BF16),
    ChunkCase((1, 0, 64, 70, 3), (1, 2), (64, 64), FP16, packed=True, state_v_first=True, **SOFTPLUS),
    ChunkCase((200,), (1, 1), (256, 128), BF16, gate="slow"),
)


def make(case: ChunkCase, seed: int = 0) -> dict[str, Any]:
    return case.make("cuda", torch.Generator().manual_seed(seed))


def verify(case: ChunkCase, seed: int = 0) -> None:
    inputs = make(case, seed)
    want, theirs = case.oracle(inputs), portable(case, inputs)
    got, again = case.run(inputs), case.run(inputs)
    assert set(got) == set(want)
    for name, x in got.items():
        verdict = accuracy(x, theirs[name], want[name])
        assert verdict.ok, f"{case.name}: {name}: {verdict.reason}"
        assert torch.equal(x, again[name]), f"{case.name}: {name} differs between two runs"


def same(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], what: str = "") -> None:
    for name, x in want.items():
        assert torch.equal(got[name], x), f"{what} {name}: {int((got[name] != x).sum())} values differ"


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_quick(case: ChunkCase) -> None:
    verify(case)


@pytest.mark.parametrize("case", CHUNK_CASES, ids=lambda case: case.name)
def test_case(case: ChunkCase) -> None:
    verify(case)


@pytest.mark.parametrize("part", range(6))
def test_random_sweep(part: int) -> None:
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    draw = random.Random(seed)
    for number in range(5):
        packed = draw.random() < 0.5
        heads = draw.choice((1, 2, 3))
        sigmoid = draw.random() < 0.5
        lengths = tuple(draw.choice((0, 1, 63, 64, 65, draw.randrange(300))) for _ in range(draw.randrange(1, 7)))
        case = ChunkCase(
            lengths if packed else (draw.randrange(1, 300),) * draw.randrange(1, 4),
            (heads, heads * draw.choice((1, 2, 3))),
            (draw.choice((64, 128, 256)), draw.choice((64, 128, 192, 256, 512))),
            draw.choice((BF16, FP16)),
            packed=packed,
            gate=draw.choice(("mild", "zero", "strong", "resets", "softplus", "slow")),
            layout=draw.choice(("contiguous", "split", "time_last")),
            state_v_first=draw.random() < 0.5,
            use_qk_l2norm=draw.random() < 0.7,
            use_beta_sigmoid=sigmoid,
            allow_neg_eigval=sigmoid and draw.random() < 0.5,
            state=draw.choice(("new", "final", "initial", "none", "padded")),
            state_dtype=draw.choice((BF16, FP16, FP32)),
            scalar_dtype=draw.choice((BF16, FP32)),
        )
        if sum(case.lengths):
            print(case.name)
            verify(case, seed + number)


def test_packed_sequences_equal_separate_ones() -> None:
    lengths = (1, 5, 0, 64, 200, 65)
    case = ChunkCase(lengths, (2, 4), (128, 128), BF16, packed=True, **SOFTPLUS)
    inputs = make(case)
    together = case.run(inputs)
    start = 0
    for n, length in enumerate(lengths):
        one = {
            name: x[:, start : start + length] for name, x in inputs.items() if x.dim() > 2 and name != "initial_state"
        }
        one |= {name: inputs[name] for name in ("A_log", "dt_bias")}
        out, final = chunk.chunk(**one, initial_state=inputs["initial_state"][n : n + 1], **case.forward_options())
        assert torch.equal(out, together["o"][:, start : start + length])
        assert torch.equal(final[0], together["final_state"][n])
        start += length


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("tokens", [2, 64, 65, 129, 400])
def test_prefill_is_a_shorter_prefill_and_a_step(tokens: int, v_first: bool) -> None:
    case = ChunkCase((tokens,), (2, 4), (128, 128), BF16, state_v_first=v_first, **SOFTPLUS)
    inputs = make(case)
    want = case.run(inputs)
    options = case.forward_options()
    most, last = (
        {name: x[:, part] if x.dim() > 2 and name != "initial_state" else x for name, x in inputs.items()}
        for part in (slice(0, tokens - 1), slice(tokens - 1, tokens))
    )
    _, state = chunk.chunk(**most, **options)
    out, final = recurrent_gated_delta_rule(**{**last, "initial_state": state}, **options)
    for got, expected in ((out, want["o"][:, -1:]), (final, want["final_state"])):
        difference = (got.float() - expected.float()).norm() / expected.float().norm()
        assert difference < 6e-3


@pytest.mark.parametrize("v_first", [False, True])
def test_both_layouts_of_the_state_are_one_result(v_first: bool) -> None:
    case = ChunkCase((150, 150), (2, 4), (128, 128), BF16)
    inputs = make(case)
    want = case.run(inputs)
    inputs["initial_state"] = inputs["initial_state"].mT.contiguous()
    out, final = chunk.chunk(**inputs, **{**case.forward_options(), "state_v_first": True})
    assert torch.equal(out, want["o"]) and torch.equal(final.mT, want["final_state"])


def test_nan_beside_the_sequences_does_no_harm() -> None:
    case = ChunkCase((70, 1, 129), (2, 4), (128, 128), BF16, packed=True)
    inputs = make(case)
    want = case.run(inputs)
    padded = dict(inputs)
    for name in ("q", "k", "v", "g", "beta"):
        nan = torch.full_like(inputs[name][:, :100], torch.nan)
        padded[name] = torch.cat([nan, inputs[name], nan], 1)
    padded["cu_seqlens"] = inputs["cu_seqlens"] + 100
    got = case.run(padded)
    assert torch.equal(got["o"][:, 100:-100], want["o"]) and torch.equal(got["final_state"], want["final_state"])
    assert (got["o"][:, :100] == 0).all() and (got["o"][:, -100:] == 0).all()
    apart = ChunkCase((200,), (2, 4), (128, 128), BF16)  # the memory behind the tensors
    inputs = make(apart)
    want = apart.run(inputs)
    for name in ("q", "k", "v", "g", "beta"):
        wide = torch.cat([inputs[name], torch.full_like(inputs[name], torch.nan)], 1)
        inputs[name] = wide[:, :200]
    same(apart.run(inputs), want)


def test_batches_of_any_stride() -> None:
    case = ChunkCase((130, 130), (2, 4), (64, 64), BF16)
    inputs = make(case)
    want = case.run(inputs)
    for name in ("q", "k", "v", "g", "beta"):
        wide = torch.cat([inputs[name], torch.full_like(inputs[name][:, :7], torch.nan)], 1)
        inputs[name] = wide[:, :130]
    inputs["initial_state"] = torch.cat([inputs["initial_state"]] * 2, -1)[..., :64]
    same(case.run(inputs), want)
    shifted = {name: torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape) for name, x in inputs.items()}
    same(case.run(shifted), want)


def test_graphs_streams_and_threads() -> None:
    case = ChunkCase((300,), (2, 4), (128, 128), BF16, **SOFTPLUS)
    inputs = make(case)
    want = case.run(inputs)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        held = case.run(inputs)
    for _ in range(3):
        for x in held.values():
            x.fill_(torch.nan)
        graph.replay()
        same(held, want, "graph")
    found: dict[str, torch.Tensor] = {}

    def other() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            found.update(case.run(inputs))
            torch.cuda.current_stream().synchronize()

    torch.cuda.synchronize()
    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    same(found, want, "thread")


def test_calls_in_a_row_do_not_disturb_each_other() -> None:
    """The memory between the kernels is handed to the next call at once, whose kernels may start early."""
    cases = [ChunkCase((n,), (2, 4), (128, 128), BF16) for n in (400, 100, 300)]
    inputs = [make(case, n) for n, case in enumerate(cases)]
    wanted = []
    for case, given in zip(cases, inputs, strict=True):
        wanted.append(case.run(given))
        torch.cuda.synchronize()
    for _ in range(5):
        for case, given, want in zip(cases, inputs, wanted, strict=True):
            same(case.run(given), want)


@pytest.mark.parametrize("most", [1 << 9, 1 << 13])
@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_barriers_delayed_at_random(case: ChunkCase, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = make(case)
    want = case.run(inputs)
    monkeypatch.setattr(chunk, "_loaded", {})
    monkeypatch.setattr(chunk, "function", lambda kernel, target: delays.function(kernel, target, most))
    for repetition in range(10):
        same(case.run(inputs), want, f"repetition {repetition}")


def test_thousands_of_sequences() -> None:
    generator = torch.Generator().manual_seed(5)
    lengths = tuple(torch.randint(0, 5, (5000,), generator=generator).tolist())
    case = ChunkCase(lengths, (1, 2), (64, 64), BF16, packed=True, state="final")
    inputs = make(case)
    got = case.run(inputs)
    options = case.forward_options()
    out, final = recurrent_gated_delta_rule(**inputs, **options)
    for ours, exact in ((got["o"], out), (got["final_state"], final)):
        assert ((ours.float() - exact.float()).norm() / exact.float().norm()) < 6e-3


def test_no_tokens_and_no_sequences() -> None:
    def empty(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(*shape, 2, 64, device="cuda").bfloat16(), torch.randn(*shape, 2, device="cuda")

    x, g = empty(2, 0)
    state = torch.randn(2, 2, 64, 64, device="cuda")
    out, final = gated_delta_rule(x, x, x, g, g, initial_state=state, output_final_state=True)
    assert out.shape == x.shape and torch.equal(final, state) and final.data_ptr() != state.data_ptr()
    x, g = empty(1, 3)
    ends = torch.zeros(1, dtype=torch.int64, device="cuda")
    out, final = gated_delta_rule(x, x, x, g, g, cu_seqlens=ends, output_final_state=True)
    assert torch.equal(out, torch.zeros_like(x)) and final.shape == (0, 2, 64, 64)
    ends = torch.zeros(3, dtype=torch.int32, device="cuda")
    out, final = gated_delta_rule(
        x, x, x, g, g, cu_seqlens=ends, initial_state=state, output_final_state=True, state_v_first=True
    )
    assert torch.equal(out, torch.zeros_like(x)) and torch.equal(final, state)


def test_what_no_kernel_takes_runs_plain_torch_or_declines() -> None:
    x = torch.randn(1, 70, 2, 100, device="cuda")
    g, beta = -torch.rand(1, 70, 2, device="cuda"), torch.rand(1, 70, 2, device="cuda")
    assert gated_delta_rule(x, x, x, g, beta)[0].shape == x.shape
    with pytest.raises(Decline, match="dtype=float32"):
        chunk.chunk(x, x, x, g, beta)
    y = torch.randn(1, 70, 2, 64, device="cuda").bfloat16().requires_grad_()
    gated_delta_rule(y, y, y, g, beta, use_qk_l2norm=True)[0].sum().backward()
    assert y.grad is not None
    z = y.detach()
    with pytest.raises(Decline, match="float64"):
        chunk.chunk(z, z, z, g.double(), beta)
    with pytest.raises(Decline, match=r"k is torch\.float16"):
        chunk.chunk(z, z.half(), z, g, beta)


def test_a_call_is_three_launches_and_reads_nothing_on_the_host() -> None:
    case = ChunkCase((100, 0, 200), (2, 4), (128, 128), BF16, packed=True, state="none")
    inputs = make(case)
    case.run(inputs)
    torch.use_deterministic_algorithms(False)  # which fills what is allocated
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            case.run(inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
    kernels = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert len(kernels) == 3, kernels
