"""Masks on a GPU: what the classifying kernel finds, and that what is kept of a mask is never used where it is stale.

The masks' effect on the attention itself is tested with the other cases in test_attention_gpu.py.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from accel.kernels.attention import attention, launch, masks, plan
from accel.kernels.attention.cases import Case
from accel.kernels.attention.mask_cases import MASKS, mask_of
from accel.kernels.attention.reference import attention_ref, classified_ref, visible

pytestmark = pytest.mark.gpu


@pytest.fixture
def classified(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The classifications that run."""
    made: list[tuple[Any, ...]] = []
    original = masks._classified

    def counted(*arguments: Any) -> masks.Lists:
        made.append(arguments[1:])  # not the mask, whose memory is to be free again
        return original(*arguments)

    monkeypatch.setattr(masks, "_classified", counted)
    masks.forget()
    return made


def tensors(seqlen_q: int = 300, seqlen_k: int = 400) -> tuple[torch.Tensor, ...]:
    sizes = ((4, seqlen_q), (2, seqlen_k), (2, seqlen_k))
    return tuple(torch.randn(2, h, n, 128, device="cuda", dtype=torch.bfloat16) for h, n in sizes)


def right(out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> bool:
    want = attention_ref(q, k, v, mask=mask)[0]
    return bool((out.double() - want).norm() <= 5e-3 * want.norm() + 1e-6) and not out.isnan().any()


def compare(mask: torch.Tensor, heads: int, seqlen_q: int, causal: str, window: tuple[int, int] | None) -> None:
    batch, seqlen_k = mask.shape[0], mask.shape[3]
    left, right = launch.bounds(causal, window)
    where = (0 if causal == "top_left" else seqlen_k - seqlen_q, left, right)
    found = [t.cpu() for t in masks.tile_lists(mask, batch, heads, seqlen_q, *where)]
    seen, allowed = mask.expand(batch, heads, seqlen_q, seqlen_k).cpu(), visible(seqlen_q, seqlen_k, causal, window)
    counts, lists, bits = classified_ref(seen if allowed is None else seen & allowed)
    assert torch.equal(found[0], counts)
    assert torch.equal(found[1][lists >= 0], lists[lists >= 0])
    for b in range(batch):
        for h in range(heads):
            for block in range(counts.shape[2]):
                rows = min(128, seqlen_q - 128 * block)  # those behind the last query are undefined
                for tile in lists[b, h, block, lists.shape[3] - int(counts[b, h, block, 1]) :]:
                    assert torch.equal(found[2][b, h, block, tile, :rows], bits[b, h, block, tile, :rows])


@pytest.mark.parametrize("kind", MASKS)
def test_what_is_found(kind: str) -> None:
    for shape in ((2, 2, 300, 1100), (1, 3, 129, 513), (2, 1, 17, 127)):
        mask = mask_of(kind, *shape, "cuda")
        for causal, window in (("none", None), ("bottom_right", None), ("top_left", (100, 3))):
            compare(mask, shape[1], shape[2], causal, window)


def test_long_rows() -> None:
    mask = torch.rand(1, 1, 130, 70001, device="cuda") < 0.5
    mask[..., 1000:40000] = True
    mask[..., 50000:60000] = False
    compare(mask, 1, 130, "none", None)
    compare(mask[:, :, :1], 1, 130, "bottom_right", (30000, 0))


def test_layers_share_a_mask(classified: list[tuple[Any, ...]]) -> None:
    q, k, v = tensors()
    mask = mask_of("blocks", 2, 4, 300, 400, "cuda")
    outs = [attention(q, k, v, mask=mask) for _ in range(4)]
    assert len(classified) == 1 and all(torch.equal(out, outs[0]) for out in outs) and right(outs[0], q, k, v, mask)
    attention(q, k, v, mask=mask[:, :, :, :])
    assert len(classified) == 1


def test_a_mask_that_is_written_to(classified: list[tuple[Any, ...]]) -> None:
    q, k, v = tensors()
    mask = mask_of("blocks", 2, 4, 300, 400, "cuda")
    for _ in range(3):
        assert right(attention(q, k, v, mask=mask), q, k, v, mask)
        mask[:, :, :, ::3].logical_not_()
    assert len(classified) == 3


def test_masks_that_follow_each_other_in_the_same_memory(classified: list[tuple[Any, ...]]) -> None:
    q, k, v = tensors()
    addresses = set()
    for i in range(12):
        mask = torch.empty(2, 1, 300, 400, dtype=torch.bool, device="cuda")
        mask.copy_(torch.rand(mask.shape, generator=torch.Generator().manual_seed(i)) < 0.08 * i)
        addresses.add(mask.data_ptr())
        assert right(attention(q, k, v, mask=mask), q, k, v, mask)
        del mask
    assert len(classified) == 12 and len(addresses) < 12 and not masks._entries


def test_inference_mode(classified: list[tuple[Any, ...]]) -> None:
    q, k, v = tensors()
    with torch.inference_mode():
        mask = mask_of("blocks", 2, 4, 300, 400, "cuda")
        for _ in range(2):
            assert right(attention(q, k, v, mask=mask), q, k, v, mask)
            mask.logical_not_()
    assert len(classified) == 2


def test_a_graph_classifies_what_is_in_the_mask_when_it_is_replayed(classified: list[tuple[Any, ...]]) -> None:
    q, k, v = tensors()
    mask = mask_of("blocks", 2, 4, 300, 400, "cuda")
    attention(q, k, v, mask=mask)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [attention(q, k, v, mask=mask) for _ in range(3)]
    assert len(classified) == 2  # one outside, one for all three calls inside
    for seed in range(3):
        mask.copy_(torch.rand(mask.shape, generator=torch.Generator().manual_seed(seed)) < 0.1 + 0.4 * seed)
        graph.replay()
        assert all(right(out, q, k, v, mask) for out in outs)
        assert right(attention(q, k, v, mask=mask), q, k, v, mask)


def test_streams(classified: list[tuple[Any, ...]]) -> None:
    q, k, v = tensors(1024, 1024)
    mask = mask_of("left_causal", 2, 4, 1024, 1024, "cuda")
    want = attention(q, k, v, mask=mask)
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(3)]
    for _ in range(5):
        got = []
        for stream in streams:
            with torch.cuda.stream(stream):
                got.append(attention(q, k, v, mask=mask))
        torch.cuda.synchronize()
        assert all(torch.equal(out, want) for out in got)
    assert len(classified) == 4


def test_compiled_callers_classify_every_time(classified: list[tuple[Any, ...]]) -> None:
    q, k, v = tensors()
    call = torch.compile(lambda q, k, v, mask: attention(q, k, v, mask=mask), fullgraph=True)
    mask = mask_of("blocks", 2, 4, 300, 400, "cuda")
    assert all(right(call(q, k, v, mask), q, k, v, mask) for _ in range(2))
    assert len(classified) == 2


def test_keys_of_tiles_that_nobody_sees_do_not_matter() -> None:
    q, k, v = tensors(200, 700)
    mask = torch.ones(2, 1, 200, 700, dtype=torch.bool, device="cuda")
    mask[..., 128:512] = False
    want = attention(q, k, v, mask=mask)
    k[:, :, 128:512] = v[:, :, 128:512] = torch.nan
    assert torch.equal(attention(q, k, v, mask=mask), want)


@pytest.mark.parametrize("head_dim", (64, 128))
def test_tiles_that_overlap(head_dim: int) -> None:
    """Persistent CTAs that start the next tile with the last product of this one."""
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    case = Case(3, (8, 2), (700, 900), head_dim, mask="blocks")
    inputs = case.make("cuda", torch.Generator().manual_seed(seed))
    config = plan(case.facts, "sm_90").config  # type: ignore[union-attr]
    config = replace(config, persistent=True, own_out=True, ahead=True)
    out, lse = launch.forward(config, *(inputs[name] for name in ("q", "k", "v")), mask=inputs["mask"])
    want, want_lse = attention_ref(inputs["q"], inputs["k"], inputs["v"], mask=inputs["mask"])
    assert (out.double() - want).norm() <= 5e-3 * want.norm()
    assert torch.equal(torch.isinf(lse), torch.isinf(want_lse))
