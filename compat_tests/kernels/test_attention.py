"""Attention without a GPU: what the plan takes and declines, the oracle, the cases, the numbers of a launch, the op."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from accel.kernels.attention import AttentionFacts, attention, launch, plan
from accel.kernels.attention import decode as decoding
from accel.kernels.attention.cases import FWD_CASES, LAYOUTS, Case, laid_out
from accel.kernels.attention.config import KINDS, SMEM, FwdConfig
from accel.kernels.attention.plan import forward_config
from accel.kernels.attention.reference import attention_ref, visible
from accel.outcome import Choice, Decline, Declined

GOOD: dict[str, Any] = {
    "dtype": "bfloat16",
    "batch": 2,
    "heads_q": 8,
    "heads_kv": 2,
    "seqlen_q": 300,
    "seqlen_k": 400,
    "head_dim": 128,
    "head_dim_v": 128,
    "causal": "none",
    "mask": "none",
    "mask_layout": "none",
    "q_layout": "aligned",
    "k_layout": "aligned",
    "v_layout": "aligned",
    "needs_grad": False,
}
#: what is changed, and the reason of the decline
DECLINES = (
    ({"needs_grad": True}, "a gradient is needed, and attention has no backward yet"),
    ({"dtype": "float32"}, "dtype=float32: only bfloat16 and float16"),
    ({"mask": "float b11k", "mask_layout": "rows"}, "an additive mask: only boolean ones"),
    ({"head_dim": 264, "head_dim_v": 264}, "head_dim=264 > 256"),
    ({"head_dim": 100, "head_dim_v": 100}, "head_dim=100 is no multiple of 8"),
    ({"head_dim_v": 64}, "head_dim=128, head_dim_v=64: they may differ as 192 and 128 only"),
    ({"k_layout": "strided"}, "the last dimension of k is not contiguous"),
    ({"v_layout": "rows"}, "the rows of v do not all start at multiples of 16 bytes, as TMA needs"),
    ({"batch": 0}, "nothing to compute: batch=0, heads_q=8, seqlen_q=300"),
    ({"varlen": True, "mask": "bool 11qk"}, "a mask (bool 11qk) over packed sequences"),
    ({"seqlen_k": 2**30}, f"seqlen_q=300, seqlen_k={2**30}: lengths must stay below 2**30"),
)


@pytest.mark.parametrize(("changes", "reason"), DECLINES, ids=[reason for _, reason in DECLINES])
def test_declines(changes: dict[str, Any], reason: str) -> None:
    assert plan(AttentionFacts(**{**GOOD, **changes}), "sm_90") == Declined(reason)


@pytest.mark.parametrize(
    ("arch", "reason"),
    (
        ("cpu", "upstream's own code serves a CPU"),
        ("sm_70", "no attention kernel for sm_70 yet: upstream's own code runs"),
    ),
)
def test_declines_elsewhere(arch: str, reason: str) -> None:
    assert plan(AttentionFacts(**GOOD), arch) == Declined(reason)


def test_serves_and_no_length_makes_a_new_kernel() -> None:
    chosen = plan(AttentionFacts(**GOOD), "sm_90")
    assert isinstance(chosen, Choice) and (chosen.family, chosen.kernel) == ("attention", "sm90_fwd")
    for changes in ({"seqlen_q": 17}, {"seqlen_k": 0}, {"seqlen_k": 100_000}, {"batch": 7}, {"heads_q": 2}):
        other = plan(AttentionFacts(**{**GOOD, **changes}), "sm_90")
        assert isinstance(other, Choice) and other.config is chosen.config
    kinds = [({}, "full"), ({"causal": "top_left"}, "causal"), ({"causal": "bottom_right"}, "causal")]
    kinds += [({"window": (10, 0)}, "window"), ({"window": (10, -1), "causal": "top_left"}, "window")]
    packed = plan(AttentionFacts(**{**GOOD, "varlen": True, "seqlen_q": 1}), "sm_90")
    assert isinstance(packed, Choice) and packed.config == dataclasses.replace(chosen.config, varlen=True)  # type: ignore[type-var]
    masked = {"mask": "bool b1qk", "mask_layout": "strided"}
    kinds += [(masked, "mask"), ({**masked, "causal": "top_left", "window": (3, 0)}, "mask")]
    for changes, kind in kinds:
        assert plan(AttentionFacts(**{**GOOD, **changes}), "sm_90").config.kind == kind  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", KINDS)
def test_every_head_dim_has_a_configuration_that_fits(kind: str) -> None:
    for head_dim in range(8, 257, 8):
        for head_dim_v in {head_dim, 128 if head_dim == 192 else head_dim}:
            c = forward_config("bfloat16", head_dim, head_dim_v, kind, True)
            assert c.smem_bytes <= SMEM and c.padded % 16 == 0 <= c.padded - head_dim < 16
            # accumulators of both products and P, besides some 40 for addresses and row states
            registers = c.tile_n // 2 + c.padded_v // 2 + c.tile_n // 4 + 40
            assert registers <= {2: 240, 3: 160}[c.warpgroups] + 8


# --- The oracle ----------------------------------------------------------------------------------------------------


def test_the_oracle_is_torchs_attention() -> None:
    q, k, v = (torch.randn(2, h, n, 24, dtype=torch.float64) for h, n in ((4, 37), (2, 53), (2, 53)))
    wide = [t.repeat_interleave(2, 1) for t in (k, v)]
    for causal, window in (("none", None), ("top_left", None), ("bottom_right", None), ("none", (7, 3))):
        out, lse = attention_ref(q, k, v, causal=causal, window=window, scale=0.3)
        seen = visible(37, 53, causal, window)
        assert torch.allclose(out, F.scaled_dot_product_attention(q, *wide, attn_mask=seen, scale=0.3))
        scores = q @ wide[0].mT * 0.3
        scores = scores if seen is None else scores.masked_fill(~seen, -torch.inf)
        assert torch.allclose(lse, scores.logsumexp(-1))


def test_the_oracle_without_keys() -> None:
    q, k = torch.randn(1, 2, 9, 16), torch.randn(1, 2, 4, 16)
    out, lse = attention_ref(q, k, k, causal="bottom_right")
    assert (out[:, :, :5] == 0).all() and (lse[:, :, :5] == -torch.inf).all() and (out[:, :, 5:] != 0).any()
    out, lse = attention_ref(q, k[:, :, :0], k[:, :, :0])
    assert (out == 0).all() and (lse == -torch.inf).all()


@pytest.mark.parametrize(
    ("causal", "window", "first_row", "last_row"),
    (
        ("top_left", None, [1, 0, 0, 0, 0], [1, 1, 1, 0, 0]),
        ("bottom_right", None, [1, 1, 1, 0, 0], [1, 1, 1, 1, 1]),
        ("none", (1, 0), [0, 1, 1, 0, 0], [0, 0, 0, 1, 1]),
        ("none", (-1, 1), [1, 1, 1, 1, 0], [1, 1, 1, 1, 1]),
        ("top_left", (1, 4), [1, 0, 0, 0, 0], [0, 1, 1, 0, 0]),
    ),
)
def test_visible(causal: str, window: tuple[int, int] | None, first_row: list[int], last_row: list[int]) -> None:
    seen = visible(3, 5, causal, window)
    assert seen is not None and seen[0].int().tolist() == first_row and seen[-1].int().tolist() == last_row


# --- Cases, launches, the op ---------------------------------------------------------------------------------------


def test_cases_are_named_apart_and_served() -> None:
    assert len({case.name for case in FWD_CASES}) == len(FWD_CASES)
    configs = set()
    for case in FWD_CASES:
        choice = plan(case.facts, "sm_90")
        assert isinstance(choice, Choice) and choice.kernel == "sm90_fwd", case.name
        configs.add(dataclasses.replace(choice.config, lse=False, dtype="bfloat16"))  # type: ignore[type-var]
    assert {(c.head_dim, c.kind) for c in configs} >= {(d, k) for d in (64, 96, 128, 256) for k in ("full", "causal")}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_keep_the_values_and_the_facts(layout: str) -> None:
    case = Case(2, (4, 2), (33, 47), 72, layout=layout, causal="top_left")
    inputs = case.make("cpu", torch.Generator().manual_seed(3))
    plain = dataclasses.replace(case, layout="bhsd").make("cpu", torch.Generator().manual_seed(3))
    assert all(torch.equal(inputs[name], plain[name]) for name in inputs)
    read = launch.facts_of(*inputs.values(), case.causal, None, True, False)
    assert read == case.facts
    with pytest.raises(ValueError, match="layout"):
        laid_out(inputs["q"], "columns")


def test_bounds() -> None:
    far = launch.FAR
    assert launch.bounds("none", None) == (far, far)
    assert launch.bounds("top_left", None) == (far, 0)
    assert launch.bounds("none", (3, -1)) == (3, far)
    assert launch.bounds("bottom_right", (-1, 5)) == (far, 0)
    assert launch.bounds("none", (2**40, 2**40)) == (far, far)


def test_reachable() -> None:
    t = torch.randn(1, 5, 7, 24)
    odd = torch.randn(2 * 5 * 7 * 24).as_strided((1, 5, 7, 24), (3, 168, 24, 1))
    single = torch.randn(4, 1, 1, 24).as_strided((4, 1, 1, 24), (24, 1, 1, 1))
    assert launch.reachable(t, t)[1] is t
    for given in (odd, single):
        same, fixed = launch.reachable(t, given)
        assert torch.equal(fixed, given) and all(s % 8 == 0 for s in fixed.stride()[:3])
        assert torch.equal(same, t) and same.stride()[1:] == t.stride()[1:]


@pytest.fixture
def seen_launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Any, ...]]]:
    """The op on CPU tensors up to the launch, which is recorded."""
    made: list[tuple[Any, ...]] = []
    monkeypatch.setattr(launch, "_load", lambda config, device, index: (lambda *args: made.append(args), 132))
    monkeypatch.setattr(launch, "config_of", lambda facts, device: plan(facts, "sm_90").config)  # type: ignore[union-attr]
    yield made


def test_numbers_of_a_launch(seen_launches: list[tuple[Any, ...]]) -> None:
    q, k = (torch.randn(2, n, 4, 64, dtype=torch.bfloat16).transpose(1, 2) for n in (40, 100))
    out = attention(q, k, k)
    assert out.shape == (2, 4, 40, 64) and out.transpose(1, 2).is_contiguous() and out.dtype == q.dtype
    far = launch.FAR
    assert seen_launches[-1][4:] == (64**-0.5, 60, far, far, 132)
    attention(q, k, k, causal=True, scale=0.5)
    assert seen_launches[-1][4:] == (0.5, 0, far, 0, 132)
    _, lse = attention(q, k, k, causal="bottom_right", window=(7, 9), return_lse=True)
    assert seen_launches[-1][4] is lse and seen_launches[-1][5:] == (64**-0.5, 60, 7, 0, 132)
    assert lse.shape == (2, 4, 40) and lse.dtype == torch.float32


def test_without_keys_nothing_is_launched(seen_launches: list[tuple[Any, ...]]) -> None:
    q, k = torch.randn(1, 2, 20, 64, dtype=torch.float16), torch.randn(1, 2, 0, 64, dtype=torch.float16)
    out, lse = attention(q, k, k, return_lse=True)
    assert not seen_launches and (out == 0).all() and (lse == -torch.inf).all()


def test_what_is_declined_on_the_way_to_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the plan refuses, and what only an address or a direct call of a kernel shows."""
    monkeypatch.setattr(launch.archs, "dispatch_arch", lambda device: "sm_90")
    gpu = torch.device("cuda:0")
    with pytest.raises(Decline, match="dtype=float32: only bfloat16 and float16"):
        launch.config_of(AttentionFacts(**{**GOOD, "dtype": "float32"}), gpu)
    assert isinstance(launch.config_of(AttentionFacts(**GOOD), gpu), FwdConfig)
    with pytest.raises(Decline, match="no decode kernel on sm_90 for float32, head dims 128 and 128, 4 packed rows"):
        decoding.load("float32", 128, 128, 4, "none", False, gpu)
    monkeypatch.setattr(decoding, "load", lambda *what: (lambda *args: None, None, 132))
    monkeypatch.setattr(decoding, "_loaded", {})
    odd = torch.empty(1 * 2 * 8 * 64 + 1, dtype=torch.bfloat16)[1:].view(1, 2, 8, 64)
    with pytest.raises(Decline, match="q, k or v does not start at a multiple of 16 bytes"):
        decoding.decode(torch.empty(1, 4, 1, 64, dtype=torch.bfloat16), odd, odd)


def test_user_errors() -> None:
    q = torch.randn(1, 1, 20, 64, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"causal must be .* got 'left'"):
        attention(q, q, q, causal="left")
    with pytest.raises(ValueError, match=r"window must be .* got \(1, -2\)"):
        attention(q, q, q, window=(1, -2))
    with pytest.raises(ValueError, match="scale must be positive, got 0"):
        attention(q, q, q, scale=0.0)
    with pytest.raises(Decline, match="CUDA tensors"):
        attention(q, q, q)


def test_fake_tensors() -> None:
    with FakeTensorMode():
        q, k = (torch.empty(2, h, n, 192, dtype=torch.bfloat16, device="cuda") for h, n in ((8, 30), (2, 50)))
        v = torch.empty(2, 2, 50, 128, dtype=torch.bfloat16, device="cuda")
        out, lse = torch.ops.accel.attention(q, k, v, None, "top_left", -2, -2, None, True)
        assert out.shape == (2, 8, 30, 128) and out.stride() == (30 * 8 * 128, 128, 8 * 128, 1)
        assert lse.shape == (2, 8, 30) and lse.dtype == torch.float32
        assert torch.ops.accel.attention(q, k, v, None, "none", 3, 4, 0.1, False)[1].shape == (0,)
