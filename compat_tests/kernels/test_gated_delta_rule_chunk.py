"""The chunked kernels' host side on a CPU: configurations, memory, what is copied, and the yardstick of their cases."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from accel.kernels.gated_delta_rule import chunk, chunk_config
from accel.kernels.gated_delta_rule.chunk_cases import BF16, CHUNK_CASES, FP16, ChunkCase, portable
from accel.kernels.gated_delta_rule.chunk_config import ChunkConfig
from accel.kernels.gated_delta_rule.plan import plan
from accel.outcome import Choice

BASE = ChunkConfig(128, 128, "bfloat16", "float32", "bfloat16", None, None, None, None, False, True, "plain", None)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"head_dim": 96}, "head_dim"),
        ({"head_dim_v": 96}, "head_dim_v must be a multiple of 64 up to 512, got 96"),
        ({"head_dim_v": 576}, "head_dim_v must be a multiple of 64 up to 512, got 576"),
        ({"dtype": "float32"}, "dtype"),
        ({"g_dtype": "float64"}, "g_dtype"),
        ({"final": "bfloat16"}, "final"),
        ({"packed": "int16"}, "packed"),
        ({"bias_dtype": "float32"}, "dt_bias needs A_log"),
        ({"warpgroups": 3}, "warpgroups"),
        ({"warpgroups": 2, "head_dim_v": 192, "stages": 2}, "2 warpgroups need a multiple of 128, got 192"),
        ({"stages": 4}, "bytes of shared memory"),
    ],
)
def test_configurations_refuse_what_no_kernel_is_made_for(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(BASE, **changed)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("head_dim_v", [64, 128, 192, 512])
@pytest.mark.parametrize("chains", [1, 40, 10_000])
def test_every_choice_is_a_configuration(head_dim: int, head_dim_v: int, chains: int) -> None:
    width = chunk_config.warpgroups(head_dim, head_dim_v, chains, 132)
    stages = chunk_config.stages(head_dim, width)
    config = dataclasses.replace(BASE, head_dim=head_dim, head_dim_v=head_dim_v, warpgroups=width, stages=stages)
    assert config.slices * config.columns == head_dim_v


def test_what_models_call_is_a_configuration() -> None:
    configs = list(chunk.common_configs())
    assert len(set(configs)) == len(configs) == len({chunk.described(c) for c in configs})


def test_slots_hold_every_chunk() -> None:
    assert chunk_config.slots(3 * 130, 3, packed=False) == 9
    assert chunk_config.slots(7, 7, packed=False) == 7
    for lengths in ((64,), (65, 63), (1, 1, 1), (0, 0), (64, 0, 1, 130)):
        chunks = sum(-(-n // 64) for n in lengths)
        assert chunks <= chunk_config.slots(sum(lengths), len(lengths), packed=True) <= chunks + len(lengths)


def test_only_what_the_copy_engine_cannot_reach_is_copied() -> None:
    x = torch.randn(2, 10, 3, 64).bfloat16()
    split = torch.randn(2, 10, 3 * 64 * 2).bfloat16()[..., : 3 * 64].unflatten(-1, (3, 64))
    assert chunk.packed_rows(x) is x and chunk.packed_rows(split) is split
    one = torch.randn(1, 12, 3, 64).bfloat16()[:, 2:9]
    assert chunk.packed_rows(one) is one
    time_last = x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
    unaligned = torch.randn(2 * 10 * 3 * 64 + 1).bfloat16()[1:].view(2, 10, 3, 64)
    for t in (
        time_last,
        x[:, :7],
        x[:, :, :, 8:],
        unaligned,
        x[:, :1].expand(-1, 10, -1, -1),
        x[:, :, :1].expand_as(x),
    ):
        copied = chunk.packed_rows(t)
        assert (copied is t) == (t.shape[3] == 56)  # channels from the eighth on are at 16 bytes
        assert torch.equal(copied, t) and chunk.packed_rows(copied) is copied
    g = torch.randn(2, 10, 6)
    assert chunk.per_head(g[..., ::2]).stride() == (60, 6, 2)
    assert chunk.per_head(g[:, :4]).is_contiguous() and chunk.per_head(g.transpose(1, 2)).is_contiguous()
    state = torch.randn(2, 3, 64, 68)[..., :64]
    assert chunk.state_rows(state) is state and chunk.state_rows(state.mT).is_contiguous()


def test_cases_are_named_apart_and_planned() -> None:
    assert len({case.name for case in CHUNK_CASES}) == len(CHUNK_CASES)
    for case in CHUNK_CASES:
        assert plan(case.facts, "sm_90") == Choice("gated_delta_rule", "sm90_fwd")


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("gate", ["mild", "strong", "resets", "slow"])
def test_the_yardstick_errs_by_roundings(gate: str, dtype: str) -> None:
    """By a few units of the dtype, and not less than one rounding."""
    case = ChunkCase((70, 0, 1, 130), (1, 2), (64, 64), dtype, packed=True, gate=gate, state_v_first=True)
    inputs = case.make("cpu", torch.Generator().manual_seed(0))
    want, found = case.oracle(inputs), portable(case, inputs)
    unit = torch.finfo(getattr(torch, dtype)).eps
    for name, exact in want.items():
        error = ((found[name].double() - exact).norm() / exact.norm()).item()
        assert (0.1 if name == "o" else 0.01) * unit < error < unit, name
