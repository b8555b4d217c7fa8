"""The sm80 forward runs on the CPU: its PTX, in a model of the machine, against fp64.

Small shapes that visit every path: tails of queries and keys, rows and whole blocks that see no key, one step and more
than there are slots, heads in sections, strided rows with NaN around them; copies as late as allowed, or at once.
"""

from __future__ import annotations

import math
import random
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from accel.kernels.attention.cases import laid_out
from accel.kernels.attention.launch import bounds
from accel.kernels.attention.mask_config import BLOCK, TILE
from accel.kernels.attention.reference import attention_ref, classified_ref
from accel.kernels.attention.sm80_config import Sm80Config, sm80_config
from accel.kernels.runtime import arch as archs
from accel.kernels.runtime import compile as runtime
from accel.kernels.runtime.emulate import Machine, Memory, pack_tensor
from accel.kernels.runtime.emulate_sm90 import divisor

LOG2_E = math.log2(math.e)

#: (arch, dtype, head_dim, head_dim_v, kind), (batch, heads_q, heads_kv, seqlen_q, seqlen_k), causal or of a mask which
#: one, window, sections, and what differs from the configuration of the arch
CASES: tuple[tuple[Any, ...], ...] = (
    (("sm_80", "bfloat16", 128, 128, "causal"), (1, 2, 1, 140, 200), "none", None, 1, {}),
    (("sm_80", "bfloat16", 128, 128, "causal"), (2, 4, 2, 150, 100), "bottom_right", None, 2, {}),
    (("sm_90", "float16", 128, 128, "window"), (1, 2, 1, 200, 300), "top_left", (70, 20), 1, {}),
    (("sm_86", "bfloat16", 128, 128, "window"), (1, 1, 1, 150, 190), "none", (33, 40), 1, {}),
    (("sm_90", "bfloat16", 64, 64, "causal"), (1, 2, 1, 130, 330), "bottom_right", None, 1, {}),
    (("sm_80", "float16", 64, 64, "causal"), (1, 1, 1, 100, 1), "none", None, 1, {"slots": 2}),
    (("sm_80", "bfloat16", 96, 96, "causal"), (1, 1, 1, 130, 130), "top_left", None, 1, {}),
    (("sm_80", "bfloat16", 72, 72, "causal"), (1, 1, 1, 40, 100), "none", None, 1, {}),
    (("sm_80", "bfloat16", 192, 128, "causal"), (1, 1, 1, 100, 140), "bottom_right", None, 1, {}),
    (("sm_80", "bfloat16", 256, 256, "causal"), (1, 1, 1, 130, 130), "top_left", None, 1, {}),
    (("sm_86", "float16", 256, 256, "causal"), (1, 1, 1, 70, 90), "none", None, 1, {}),
    (("sm_80", "bfloat16", 128, 128, "mask"), (1, 2, 1, 160, 400), "tiles", None, 1, {}),
    (("sm_90", "bfloat16", 64, 64, "mask"), (2, 1, 1, 150, 300), "tiles", None, 2, {}),
    (("sm_90", "float16", 64, 64, "mask"), (1, 2, 1, 140, 300), "keys", None, 1, {"slots": 3}),
    (("sm_80", "bfloat16", 256, 256, "mask"), (1, 1, 1, 130, 300), "tiles", None, 1, {}),
)


@cache
def ptx(config: Sm80Config, target: str) -> str:
    return runtime.compile_only(runtime.Kernel("attention", "sm80_fwd", config), target).ptx


def place(memory: Memory, t: torch.Tensor) -> bytes:
    """A strided tensor of 16-bit elements as a parameter, its whole storage mapped."""
    raw = np.frombuffer(bytes(t.untyped_storage()), np.uint8)
    return pack_tensor(memory.place(raw) + 2 * t.storage_offset(), t.shape[:3], t.stride()[:3])


def ints(*values: int) -> bytes:
    return np.array(values, np.int32).tobytes()


def name(case: tuple[Any, ...]) -> str:
    return "_".join(map(str, (*case[0], *case[1], case[2])))


def mask_of(kind: str, shape: tuple[int, int, int, int], generator: torch.Generator) -> torch.Tensor:
    """Keys that all queries see, none in the first tile; or empty, full and random tiles and a row of nothing."""
    batch, heads, seqlen_q, seqlen_k = shape
    drawn = torch.rand(batch, heads, seqlen_q, seqlen_k, generator=generator) < 0.3
    if kind == "keys":
        return (drawn[:, :1, :1] & (torch.arange(seqlen_k) >= TILE)).expand(shape)
    tiles = torch.randint(0, 3, (batch, heads, -(-seqlen_q // BLOCK), -(-seqlen_k // TILE)), generator=generator)
    tiles[..., 0], tiles[..., 1] = 1, 2  # a full tile and a partial one at least
    tiles = tiles.repeat_interleave(BLOCK, 2)[:, :, :seqlen_q].repeat_interleave(TILE, 3)[..., :seqlen_k]
    seen = (tiles == 1) | ((tiles == 2) & drawn)
    seen[:, :, seqlen_q // 2] = False
    return seen


RUNS = [(c, True) for c in CASES] + [(CASES[4], False)]


def run(case: tuple[Any, ...], late: bool, seed: int, magnitude: float = 1.0) -> tuple[torch.Tensor, ...]:
    """(out, what it should be, log-sum-exp, what it should be), in fp64; `magnitude`: of q and k."""
    (arch, *what), (batch, heads_q, heads_kv, seqlen_q, seqlen_k), causal, window, sections, changes = case
    found = sm80_config(*what, True, arch)
    assert found is not None
    c = replace(found, **changes)
    drawn = torch.Generator().manual_seed(seed)

    def draw(heads: int, seqlen: int, size: int, times: float = 1.0) -> torch.Tensor:
        values = torch.randn(batch, heads, seqlen, size, generator=drawn) * times
        return laid_out(values.to(getattr(torch, c.dtype)), "rows")

    q, k = draw(heads_q, seqlen_q, c.head_dim, magnitude), draw(heads_kv, seqlen_k, c.head_dim, magnitude)
    v = draw(heads_kv, seqlen_k, c.head_dim_v)
    out = np.full((batch, seqlen_q, heads_q, c.head_dim_v), 0xFFFF, np.uint16)
    lse, memory = np.full((batch, heads_q, seqlen_q), np.nan, np.float32), Memory()
    blocks, group = -(-seqlen_q // c.tile_m), heads_q // heads_kv
    strides = (seqlen_q * heads_q * c.head_dim_v, c.head_dim_v, heads_q * c.head_dim_v)
    parameters = [place(memory, t) for t in (q, k, v)]
    parameters += [pack_tensor(memory.place(out), (batch, heads_q, seqlen_q), strides)]
    parameters += [pack_tensor(memory.place(lse), lse.shape, (heads_q * seqlen_q, seqlen_q))]
    mask = None
    if c.kind == "mask":
        mask, causal = mask_of(causal, (batch, heads_q, seqlen_q, seqlen_k), drawn), "none"
        for t, symbolic in zip(classified_ref(mask), (3, 4, 4), strict=True):
            parameters += [
                pack_tensor(memory.place(t.numpy().copy()), t.shape[:symbolic], t.contiguous().stride()[:-1])
            ]
    parameters += [np.float32(c.head_dim**-0.5 * LOG2_E).tobytes()]
    parameters += [ints(0 if causal == "top_left" else seqlen_k - seqlen_q), *map(ints, bounds(causal, window))]
    numbers = (blocks, heads_q, group, batch * heads_kv, sections, group * blocks)
    parameters += [p for n in numbers for p in (divisor(n), ints(n))]
    machine = Machine(ptx(c, archs.compile_target(arch)), c.smem_bytes, memory, parameters, late)
    machine.run(blocks * batch * heads_q, seed)
    assert machine.bank_conflicts == 0

    got = torch.from_numpy(out.view(np.int16)).view(q.dtype).transpose(1, 2).double()
    want, want_lse = attention_ref(q, k, v, mask=mask, causal=causal, window=window)
    return got, want, torch.from_numpy(lse).double(), want_lse


@pytest.mark.parametrize(
    ("case", "late"), RUNS, ids=lambda x: name(x) if isinstance(x, tuple) else "late" if x else "at_once"
)
def test_attention(case: tuple[Any, ...], late: bool) -> None:
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    got, want, sums, want_lse = run(case, late, seed)
    assert not torch.isnan(got).any()
    assert (got - want).norm() <= (4e-3 if case[0][1] == "bfloat16" else 5e-4) * want.norm()
    assert torch.equal(torch.isinf(sums), torch.isinf(want_lse)) and not torch.isnan(sums).any()
    seen = ~torch.isinf(want_lse)
    assert (sums - want_lse)[seen].abs().max() <= 1e-5


def test_large_scores_leave_one_key_exactly() -> None:
    """Scores of a million, where rounding scale times a maximum loses a sixteenth: every row is a row of v."""
    case = (("sm_90", "bfloat16", 64, 64, "causal"), (1, 2, 1, 70, 200), "bottom_right", None, 1, {})
    got, want, sums, want_lse = run(case, True, 0, magnitude=1000.0)
    assert torch.equal(got, want.bfloat16().double())
    assert ((sums - want_lse) / want_lse).abs().max() < 1e-6
