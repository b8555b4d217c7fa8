"""Packed sequences without a GPU: what a call hands to the kernel, its errors, the op.

The kernel itself runs on the CPU in test_attention_emulated.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from accel.kernels.attention import attention_varlen, launch, plan
from accel.kernels.attention.sequence_table import PITCH
from accel.kernels.attention.varlen import facts_of
from accel.kernels.attention.varlen_cases import VARLEN_CASES, VarlenCase
from accel.outcome import Choice, Decline


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Any, ...]]]:
    """The op on CPU tensors up to the launch, which is recorded."""
    made: list[tuple[Any, ...]] = []
    monkeypatch.setattr(launch, "_load", lambda config, device, index: (lambda *args: made.append(args), 132))
    monkeypatch.setattr(launch, "config_of", lambda facts, device: plan(facts, "sm_90").config)  # type: ignore[union-attr]
    yield made


def packed(total_q: int = 300, total_k: int = 400) -> tuple[torch.Tensor, ...]:
    sizes = ((total_q, 4, 64), (total_k, 2, 64), (total_k, 2, 64))
    return tuple(torch.randn(size, dtype=torch.bfloat16) for size in sizes)


def starts(*lengths: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor((0, *lengths)).cumsum(0).to(dtype)


def test_cases_are_named_apart_and_served() -> None:
    assert len({case.name for case in VARLEN_CASES}) == len(VARLEN_CASES)
    for case in VARLEN_CASES:
        choice = plan(case.facts, "sm_90")
        assert isinstance(choice, Choice) and choice.kernel == "sm90_fwd" and choice.config.varlen, case.name
    kinds = {(case.head_dim, plan(case.facts, "sm_90").config.kind) for case in VARLEN_CASES}  # type: ignore[union-attr]
    assert kinds >= {(d, kind) for d in (64, 72, 96, 128, 192, 256) for kind in ("full", "causal", "window")}


@pytest.mark.parametrize("case", VARLEN_CASES[:3] + VARLEN_CASES[18:21], ids=lambda case: case.name)
def test_the_yardstick_agrees_with_the_oracle(case: VarlenCase) -> None:
    inputs = case.make("cpu", torch.Generator().manual_seed(1))
    want, found = case.oracle(inputs), case.portable(inputs)
    assert (found["out"] - want["out"]).norm() <= 1e-2 * want["out"].norm()
    finite = torch.isfinite(want["lse"])
    assert torch.equal(finite, torch.isfinite(found["lse"]))
    assert torch.allclose(found["lse"][finite].double(), want["lse"][finite], atol=1e-4)
    rows = torch.cat([torch.arange(piece.start, piece.stop) for piece in case.pieces(0)])
    assert (
        torch.isfinite(inputs["q"][rows]).all() and int(torch.isfinite(inputs["q"]).sum()) == inputs["q"][rows].numel()
    )


def test_arguments_of_a_launch(launches: list[tuple[Any, ...]]) -> None:
    q, k, v = packed()
    cu_q, cu_k = starts(100, 0, 150), starts(200, 50, 100)
    most = {"max_seqlen_q": 150, "max_seqlen_k": 200}
    out = attention_varlen(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, **most)
    assert out.shape == (300, 4, 64) and out.dtype == q.dtype and out.is_contiguous()
    *tensors, used, scale, bottom_right, left, right, ctas = launches[-1]
    assert all(a is b for a, b in zip(tensors, (q, k, v, out, cu_q, cu_k, cu_q, cu_k), strict=False))
    assert tensors[8].shape == (300 // 128 + 3, PITCH) and tensors[8].dtype == torch.int32
    assert (used, scale, bottom_right, left, right, ctas) == (0, 64**-0.5, 1, launch.FAR, launch.FAR, 132)

    seqused = torch.tensor([1, 2, 3])
    out, lse = attention_varlen(
        q, k, v, cu_seqlens_q=cu_q.long(), cu_seqlens_k=cu_k, seqused_k=seqused, **most,
        causal=True, window=(9, -1), scale=2.0, return_lse=True,
    )  # fmt: skip
    *tensors, used, scale, bottom_right, left, right, _ = launches[-1]
    assert tensors[4] is lse and lse.shape == (4, 300) and lse.dtype == torch.float32
    assert all(t.dtype == torch.int32 for t in tensors[5:]) and torch.equal(tensors[5], cu_q)
    assert tensors[8].tolist() == [1, 2, 3] and (used, scale, bottom_right, left, right) == (2, 2.0, 0, 9, 0)


def test_without_keys_nothing_is_launched(launches: list[tuple[Any, ...]]) -> None:
    q, k, v = packed(10, 0)
    lengths = {"cu_seqlens_q": starts(10), "cu_seqlens_k": starts(0), "max_seqlen_q": 10, "max_seqlen_k": 0}
    out, lse = attention_varlen(q, k, v, **lengths, return_lse=True)
    assert not launches and (out == 0).all() and (lse == -torch.inf).all()


def test_user_errors() -> None:
    q, k, v = packed()
    good = {"cu_seqlens_q": starts(300), "cu_seqlens_k": starts(400), "max_seqlen_q": 300, "max_seqlen_k": 400}
    for changes, error, message in (
        ({"cu_seqlens_q": starts(300).float()}, TypeError, "cu_seqlens_q must be int32 or int64, got torch.float32"),
        ({"cu_seqlens_k": starts(200, 200)}, ValueError, "cu_seqlens_k has 3 numbers, cu_seqlens_q 2"),
        ({"seqused_k": starts(200)}, ValueError, "seqused_k has 2 numbers, cu_seqlens_q 2"),
        ({"cu_seqlens_q": starts(300)[None]}, ValueError, "cu_seqlens_q must have one dimension"),
        ({"cu_seqlens_k": starts(400).to("meta")}, ValueError, "lie on cpu, got .* on meta"),
        ({"causal": "left"}, ValueError, "causal must be"),
        ({"window": (1, -2)}, ValueError, "window must be"),
        ({"scale": -1.0}, ValueError, "scale must be positive"),
        ({}, Decline, "CUDA tensors"),
    ):
        with pytest.raises(error, match=message):
            attention_varlen(q, k, v, **{**good, **changes})


def test_facts() -> None:
    q, k, v = packed()
    facts = facts_of(q, k, v, 3, 150, 200, "top_left", (5, 0), True)
    assert (facts.batch, facts.seqlen_q, facts.seqlen_k, facts.heads_q, facts.heads_kv) == (3, 150, 200, 4, 2)
    assert facts.varlen and facts.lse and facts.window == (5, 0) and facts.q_layout == "aligned"
    assert facts_of(q[:, :, 1:57], k[:, :, :56], v[:, :, :56], 3, 150, 200).q_layout == "rows"
    with pytest.raises(Decline, match="q, k, v have 2, 3, 3 dimensions, not 3"):
        facts_of(q[0], k, v, 3, 150, 200)
    assert plan(facts_of(q[:0], k, v, 3, 150, 200), "sm_90").reason.startswith("nothing to compute")  # type: ignore[union-attr]


def test_fake_tensors() -> None:
    with FakeTensorMode():
        q, k, v = (torch.empty(t.shape, dtype=t.dtype, device="cuda") for t in packed())
        cu = torch.empty(4, dtype=torch.int32, device="cuda")
        rest = (cu, cu, 150, 200, None, None, "none", -2, -2, None)
        out, lse = torch.ops.accel.attention_varlen(q, k, v, *rest, True)
        assert out.shape == (300, 4, 64) and lse.shape == (4, 300) and lse.dtype == torch.float32
        assert torch.ops.accel.attention_varlen(q, k, v, *rest, False)[1].shape == (0,)
