"""The decode kernel on a GPU against the fp64 formula, within the accuracy rule, into outputs filled with NaN."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest
import torch

from accel.kernels.attention import decode as host
from accel.kernels.attention.decode import decode
from accel.kernels.attention.decode_cases import DECODE_CASES, LAYOUTS, MASKS, DecodeCase
from accel.kernels.attention.decode_config import DecodeConfig
from accel.kernels.runtime.capture import capture_id
from accel.outcome import Decline
from accel.testing import assert_accurate

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned")]


def make(case: DecodeCase, seed: int = 0) -> dict[str, Any]:
    return case.make("cuda", torch.Generator().manual_seed(seed))


def config_of(case: DecodeCase) -> DecodeConfig | None:
    mask = case.make("meta", None).get("mask")
    kind = "none" if mask is None else host.flattened(mask)[0]
    rows = case.heads[0] // case.heads[1] * case.seqlens[0]
    return host.decode_config(case.dtype, *case.dims, rows, kind, case.lse, "sm_90")


def verify(case: DecodeCase, seed: int = 0) -> None:
    inputs = make(case, seed)
    got, upstream, oracle = case.run(inputs), case.portable(inputs), case.oracle(inputs)
    assert got["out"].dtype == inputs["q"].dtype
    for name, ref in oracle.items():
        assert_accurate(f"{case.name} {name}", got[name], upstream[name], ref)


@pytest.mark.parametrize("case", DECODE_CASES, ids=lambda case: case.name)
def test_case(case: DecodeCase) -> None:
    verify(case)


def test_random_sweep() -> None:
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    draw = random.Random(seed)
    # Shapes are drawn, not kernels: the cases have them all, and each takes seconds to compile.
    known = {config_of(case) for case in DECODE_CASES}
    done = 0
    while done < 80:
        head_dim, head_dim_v = draw.choice(((64, 0), (80, 0), (96, 0), (128, 0), (192, 128), (256, 0)))
        seqlen_q = draw.choice((1, 1, 2, 3, 4, 5, 8, 16))
        heads_kv = draw.choice((1, 2, 3, 8))
        group = draw.choice([g for g in (1, 2, 4, 5, 7, 8) if g * seqlen_q <= 64])
        seqlen_k = draw.choice((1, 2, 3, 16, 31, 32, 33, 63, 64, 65, 127, 511, 513, 997, 1024, 2047, 4096, 10007))
        case = DecodeCase(
            draw.choice((1, 2, 3, 7)),
            (heads_kv * group, heads_kv),
            (seqlen_q, seqlen_k),
            head_dim,
            head_dim_v,
            dtype=draw.choice(("bfloat16", "float16")),
            causal=draw.choice(("none", "bottom_right")) if seqlen_q > 1 else "none",
            mask=draw.choice(MASKS),
            layout=draw.choice(LAYOUTS),
            magnitude=draw.choice((1.0, 1.0, 6.0)),
            splits=draw.choice((None, None, 1, 2, 5, 40, 150)),
        )
        if config_of(case) in known:
            done += 1
            verify(case, seed + done)


@pytest.mark.parametrize("mask", ("left", "holes", "static"))
def test_nothing_leaks_out_of_masked_keys(mask: str) -> None:
    case = DecodeCase(2, (8, 2), (1, 1333), 128, mask=mask)
    inputs = make(case)
    want = case.run(inputs)
    hidden = ~inputs["mask"].expand(2, 1, 1, 1333)[:, 0, 0]
    for name in ("k", "v"):
        for b in range(2):
            inputs[name][b, :, hidden[b]] = torch.nan
    got = case.run(inputs)
    assert all(torch.equal(a, b) for a, b in zip(got.values(), want.values(), strict=True))


def test_the_same_bits_every_time() -> None:
    for case in (
        DecodeCase(1, (8, 2), (4, 40000), 128, causal="bottom_right"),
        DecodeCase(2, (8, 2), (1, 9000), 128, mask="holes"),
    ):
        inputs = make(case)
        want = case.run(inputs)
        for _ in range(30):
            assert all(torch.equal(a, b) for a, b in zip(case.run(inputs).values(), want.values(), strict=True))


def test_strides_of_dimensions_that_only_repeat() -> None:
    """Expanded k and v, masks expanded over everything they can be, a mask of every other byte."""
    q = torch.randn(4, 8, 2, 128, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(1, 2, 700, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    want, _ = decode(q, k.repeat(4, 1, 1, 1), v.repeat(4, 1, 1, 1))
    assert torch.equal(decode(q, k.expand(4, -1, -1, -1), v.expand(4, -1, -1, -1))[0], want)
    k, v = k.repeat(4, 1, 1, 1), v.repeat(4, 1, 1, 1)
    seen = torch.rand(4, 8, 2, 1400, device="cuda")[..., ::2] < 0.5
    for view in (seen, seen[:1], seen[:, :1], seen[:, :, :1], seen[:1, :1, :1]):
        want, _ = decode(q, k, v, mask=view.expand(4, 8, 2, 700).contiguous())
        for mask in (view, view.expand(4, 8, 2, 700), view.contiguous()):
            assert torch.equal(decode(q, k, v, mask=mask)[0], want)


def test_threads_and_side_streams() -> None:
    cases = [DecodeCase(1, (8, 2), (1, 4000 + 900 * i), 128, lse=False) for i in range(6)]
    inputs = [make(case) for case in cases]
    want = [case.run(t)["out"] for case, t in zip(cases, inputs, strict=True)]
    torch.cuda.synchronize()
    failures: list[str] = []

    def work(i: int) -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(40):
                got = [case.run(t)["out"] for case, t in zip(cases, inputs, strict=True)]
                stream.synchronize()
                failures.extend(f"thread {i}" for a, b in zip(got, want, strict=True) if not torch.equal(a, b))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_two_streams_never_share_counters() -> None:
    case = DecodeCase(1, (8, 2), (4, 60000), 128, causal="bottom_right", lse=False)
    inputs = make(case)
    want = case.run(inputs)["out"]
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    got = []
    for _ in range(40):
        for stream in streams:
            with torch.cuda.stream(stream):
                got.append(case.run(inputs)["out"])
    torch.cuda.synchronize()
    assert all(torch.equal(out, want) for out in got)


@pytest.mark.parametrize("mask", ("none", "random", "per_q"))
def test_graph_capture_and_replay(mask: str) -> None:
    case = DecodeCase(2, (8, 2), (3, 5000), 128, mask=mask)
    inputs = make(case)
    case.run(inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first = case.run(inputs)
        second = case.run({**inputs, "q": inputs["k"][:, :, :3].repeat_interleave(4, 1)})
    for seed in (1, 2, 3):
        for name, fresh in make(case, seed).items():
            inputs[name].copy_(fresh if name != "mask" else torch.rand(fresh.shape, device="cuda") < 0.1 * seed)
        graph.replay()
        want = case.run(inputs), case.run({**inputs, "q": inputs["k"][:, :, :3].repeat_interleave(4, 1)})
        for got, expected in zip((first, second), want, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(got.values(), expected.values(), strict=True))


def test_graphs_replayed_at_once_have_counters_of_their_own() -> None:
    case = DecodeCase(1, (8, 2), (4, 60000), 128, causal="bottom_right", lse=False)
    inputs = make(case)
    want = case.run(inputs)["out"]
    graphs, outputs = [], []
    for _ in range(3):
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            outputs.append([case.run(inputs)["out"] for _ in range(20)])
    streams = [torch.cuda.Stream() for _ in graphs]
    torch.cuda.synchronize()
    for _ in range(5):
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        case.run(inputs)
    torch.cuda.synchronize()
    assert all(torch.equal(out, want) for outs in outputs for out in outs)


def test_a_capture_has_one_scratch_buffer() -> None:
    case = DecodeCase(1, (8, 2), (1, 60000), 128, lse=False)
    inputs = make(case)
    case.run(inputs)
    eager = dict(host._eager)
    graph = torch.cuda.CUDAGraph()
    seen = set()
    with torch.cuda.graph(graph):
        stream = torch.cuda.current_stream().cuda_stream
        for _ in range(3):
            case.run(inputs)
            seen.add(host._captured[0, stream][1].data_ptr())
        assert capture_id(stream) is not None
    assert len(seen) == 1 and host._eager == eager


def test_declines_during_capture_when_not_loaded() -> None:
    case = DecodeCase(1, (40, 1), (1, 100), 96, dtype="float16", lse=True)
    inputs = make(case)
    assert not any(key[:4] == (torch.float16, 96, 96, 3) for key in host._loaded)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = inputs["q"] * 2
        with pytest.raises(Decline, match="not loaded during graph capture"):
            case.run(inputs)
    assert held.shape == inputs["q"].shape


def test_nothing_waits_for_the_gpu() -> None:
    case = DecodeCase(2, (8, 2), (2, 5000), 128, mask="per_q")
    inputs = make(case)
    case.run(inputs)
    torch.cuda.set_sync_debug_mode("error")
    try:
        case.run(inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_million_keys_and_more_than_2_31_elements() -> None:
    length = 2**20 + 77
    q = torch.randn(3, 8, 1, 128, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.empty(3, 8, length, 128, device="cuda", dtype=torch.bfloat16).normal_() for _ in range(2))
    assert k.numel() > 2**31
    got, _ = decode(q, k, v, splits=7)
    want, _ = decode(q[2:].clone(), k[2:].clone(), v[2:].clone(), splits=7)
    assert torch.equal(got[2:], want)
    scores = torch.einsum("hd,hkd->hk", q[2, :, 0].float(), k[2].float()) * 128**-0.5
    exact = torch.einsum("hk,hkd->hd", torch.softmax(scores, 1), v[2].float())
    assert (got[2, :, 0] - exact).norm() <= 4e-3 * exact.norm()


def test_misaligned_rows_decline() -> None:
    q = torch.randn(1, 4, 1, 128, device="cuda", dtype=torch.bfloat16)
    k = torch.randn(1 * 4 * 100 * 128 + 1, device="cuda", dtype=torch.bfloat16)[1:].view(1, 4, 100, 128)
    with pytest.raises(Decline, match="16 bytes"):
        decode(q, k, k)
