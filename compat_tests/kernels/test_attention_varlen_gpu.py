"""Packed sequences on a GPU against the fp64 oracle, within the accuracy rule; rows of no sequence hold NaN."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from accel.kernels.attention import attention, attention_varlen
from accel.kernels.attention.varlen_cases import VARLEN_CASES, VarlenCase
from accel.testing import assert_accurate

pytestmark = pytest.mark.gpu


def verify(case: VarlenCase, seed: int = 0) -> None:
    inputs = case.make("cuda", torch.Generator().manual_seed(seed))
    got, upstream, oracle = case.run(inputs), case.portable(inputs), case.oracle(inputs)
    for name, exact in oracle.items():
        assert_accurate(f"{case.name} {name}", got[name], upstream[name].to(got[name].dtype), exact)


@pytest.mark.parametrize("case", VARLEN_CASES, ids=lambda case: case.name)
def test_case(case: VarlenCase) -> None:
    verify(case)


def test_random_sweep() -> None:
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    draw = random.Random(seed)
    lengths = (0, 1, 17, 63, 64, 65, 127, 128, 129, 191, 193, 300, 517)
    for i in range(40):
        batch, heads_kv = draw.choice((1, 2, 5, 40)), draw.choice((1, 2, 3))
        sizes = [tuple(draw.choice(lengths) for _ in range(batch)) for _ in range(2)]
        if max(sizes[0]) == 0:
            continue
        verify(
            VarlenCase(
                sizes[0],
                (heads_kv * draw.choice((1, 2, 4)), heads_kv),
                *draw.choice(((64, 0), (72, 0), (96, 0), (128, 0), (192, 128), (256, 0))),
                lengths_k=draw.choice(((), sizes[1])),
                used=(draw.random() < 0.3, draw.random() < 0.3),
                causal=draw.choice(("none", "top_left", "bottom_right")),
                window=draw.choice((None, (draw.randrange(200), draw.randrange(200)))),
            ),
            seed + i,
        )


def packed(*lengths: int, head_dim: int = 128, rows: int = 0) -> tuple[torch.Tensor, ...]:
    total = max(sum(lengths), rows)
    q, k, v = (torch.randn(total, h, head_dim, device="cuda", dtype=torch.bfloat16) for h in (4, 2, 2))
    return q, k, v, torch.tensor((0, *lengths), device="cuda").cumsum(0).int()


def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu: torch.Tensor, most: int, **rest: Any) -> torch.Tensor:
    given = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": most, "max_seqlen_k": most}
    return attention_varlen(q, k, v, **given, **rest)  # type: ignore[return-value]


def test_as_every_sequence_alone() -> None:
    """Bit by bit what `attention` gives, wherever the sequence lies."""
    lengths = (300, 1, 129, 500)
    q, k, v, cu = packed(*lengths)
    out, start = call(q, k, v, cu, 500, causal=True), 0
    for length in lengths:
        rows = slice(start, start + length)
        start += length
        if length > 16:
            alone = attention(*(t[rows].transpose(0, 1)[None] for t in (q, k, v)), causal=True)
            assert torch.equal(out[rows], alone[0].transpose(0, 1))  # type: ignore[index]


def test_a_graph_takes_the_lengths_of_its_replay() -> None:
    q, k, v, cu = packed(300, 200, rows=900)
    call(q, k, v, cu, 900, causal=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call(q, k, v, cu, 900, causal=True)
    for lengths in ((300, 200), (17, 800), (0, 1), (450, 450)):
        cu.copy_(torch.tensor((0, *lengths)).cumsum(0))
        graph.replay()
        end = sum(lengths)
        assert torch.equal(captured[:end], call(q, k, v, cu, 900, causal=True)[:end])


def test_rows_behind_the_end_are_not_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v, cu = packed(130, 70, rows=450)
    outside = slice(int(cu[-1]), None)
    for t in (q, k, v):
        t[outside] = torch.nan
    original, made = torch.Tensor.new_empty, []

    def marked(like: torch.Tensor, *size: Any, **options: Any) -> torch.Tensor:
        made.append(original(like, *size, **options).fill_(7.0))
        return made[-1]

    monkeypatch.setattr(torch.Tensor, "new_empty", marked)
    out, lse = call(q, k, v, cu, 130, return_lse=True)
    assert (out[outside] == 7.0).all() and (lse[:, outside] == 7.0).all() and len(made) == 2
    assert not out.isnan().any() and not lse.isnan().any()


def test_compiled_callers() -> None:
    q, k, v, cu = packed(300, 200)
    compiled = torch.compile(lambda *t: call(*t, 300, causal=True, window=(100, -1)), fullgraph=True)
    assert torch.equal(compiled(q, k, v, cu), call(q, k, v, cu, 300, causal=True, window=(100, -1)))


def test_deterministic_beside_another_stream() -> None:
    q, k, v, cu = packed(*(i * 61 % 700 for i in range(40)))
    want = call(q, k, v, cu, 700)
    a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    for _ in range(10):
        with torch.cuda.stream(stream):
            got = call(q, k, v, cu, 700)
        a = torch.tanh(a @ a)
        torch.cuda.synchronize()
        assert torch.equal(got, want)
