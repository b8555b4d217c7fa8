"""The attention forward and the GEMM run on the CPU: their PTX, in a model of the machine, against fp64.

Small shapes that visit every path: several tiles of one CTA, tails of queries and keys, rows and whole tiles that see
no key, sections of heads, one step and several; copies and products as late as allowed, or at once.
"""

from __future__ import annotations

import math
import random
import re
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from accel.kernels.attention.config import FwdConfig
from accel.kernels.attention.launch import bounds
from accel.kernels.attention.plan import forward_config
from accel.kernels.attention.reference import attention_ref, classified_ref
from accel.kernels.blocks.gemm_config import GemmConfig
from accel.kernels.runtime import compile as runtime
from accel.kernels.runtime.emulate import pack_tensor
from accel.kernels.runtime.emulate_sm90 import HopperMachine, Memory, TensorMap, divisor

LOG2_E = math.log2(math.e)
SMEM = 227 * 1024

NEXT = {"persistent": True, "own_out": True, "ahead": True, "early_rescale": False}  #: the overlap across tiles
#: (dtype, head_dim, head_dim_v, kind), (batch, heads_q, heads_kv, seqlen_q, seqlen_k), causal, window, sections, and
#: what differs from the plan's configuration; of a mask, which one
CASES = (
    (("bfloat16", 128, 128, "full"), (1, 2, 1, 150, 300), "none", None, 1, {}),
    (("bfloat16", 128, 128, "causal"), (2, 4, 2, 200, 130), "bottom_right", None, 2, {}),
    (("bfloat16", 128, 128, "causal"), (2, 4, 2, 200, 130), "bottom_right", None, 2, NEXT),
    (("float16", 128, 128, "window"), (1, 2, 1, 300, 200), "top_left", (70, 20), 1, NEXT),
    (("bfloat16", 64, 64, "causal"), (1, 2, 1, 260, 260), "top_left", None, 1, {}),
    (("bfloat16", 64, 64, "full"), (1, 2, 1, 130, 300), "none", None, 1, NEXT),
    (("bfloat16", 72, 72, "full"), (1, 1, 1, 130, 200), "none", None, 1, {}),
    (("bfloat16", 192, 128, "causal"), (1, 1, 1, 300, 100), "bottom_right", None, 1, {}),
    (("bfloat16", 256, 256, "causal"), (1, 2, 1, 200, 200), "top_left", None, 1, {}),
    (("bfloat16", 128, 128, "mask"), (2, 2, 1, 260, 400), "random", None, 1, {}),
    (("bfloat16", 128, 128, "mask"), (2, 2, 2, 200, 520), "random", None, 2, NEXT),
    (("bfloat16", 64, 64, "mask"), (1, 2, 1, 150, 300), "keys", None, 1, {}),
    (("float16", 256, 256, "mask"), (1, 1, 1, 140, 300), "random", None, 1, {}),
)


@cache
def ptx(family: str, module: str, config: FwdConfig | GemmConfig) -> str:
    return runtime.compile_only(runtime.Kernel(family, module, config), "sm_90a").ptx


def elements(t: torch.Tensor) -> np.ndarray:
    return t.view(torch.int16).numpy().view(np.uint16).reshape(-1).copy()


def tensor_map(array: np.ndarray, t: torch.Tensor, rows: int, columns: int) -> TensorMap:
    """Tiles of (rows, columns) of the last two dimensions."""
    width = next(w for w in (128, 64, 32) if 2 * columns % w == 0)
    order = (t.dim() - 1, t.dim() - 2, *range(t.dim() - 3, -1, -1))
    box = (width // 2, rows, *(1 for _ in order[2:]))
    return TensorMap(array, [t.shape[d] for d in order], [t.stride(d) for d in order], box, width)


def ints(*values: int) -> bytes:
    return np.array(values, np.int32).tobytes()


def mask_of(kind: str, shape: tuple[int, int, int, int], generator: torch.Generator) -> torch.Tensor:
    """ "random": tiles of three kinds for each batch entry and a row without keys; "keys": the same for all queries."""
    batch, _, seqlen_q, seqlen_k = shape
    if kind == "keys":
        return (torch.rand(batch, 1, 1, seqlen_k, generator=generator) < 0.8).expand(shape)
    kinds = torch.randint(0, 3, (batch, -(-seqlen_q // 128), -(-seqlen_k // 128)), generator=generator)
    kinds = kinds.repeat_interleave(128, 1)[:, :seqlen_q].repeat_interleave(128, 2)[:, :, :seqlen_k]
    seen = (kinds == 1) | ((kinds == 2) & (torch.rand(kinds.shape, generator=generator) < 0.2))
    seen[:, 5] = False
    return seen[:, None].expand(shape)


def name(case: tuple) -> str:
    return "_".join(map(str, (*case[0], *case[1], case[2], "ahead" if case[5] else "plan")))


RUNS = [(c, True) for c in CASES] + [(CASES[2], False)]


@pytest.mark.parametrize(
    ("case", "late"), RUNS, ids=lambda x: name(x) if isinstance(x, tuple) else "late" if x else "at_once"
)
def test_attention(case: tuple, late: bool) -> None:
    what, (batch, heads_q, heads_kv, seqlen_q, seqlen_k), causal, window, sections, changes = case
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    c = replace(forward_config(*what, True), **changes)
    drawn = torch.Generator().manual_seed(seed)

    def draw(heads: int, seqlen: int, size: int) -> torch.Tensor:
        return torch.randn(batch, heads, seqlen, size, generator=drawn).to(getattr(torch, c.dtype))

    q, k = draw(heads_q, seqlen_q, c.head_dim), draw(heads_kv, seqlen_k, c.head_dim)
    v, out = draw(heads_kv, seqlen_k, c.head_dim_v), draw(heads_q, seqlen_q, c.head_dim_v).fill_(torch.nan)
    tiles = ((q, 64, c.padded), (k, c.tile_n, c.padded), (v, c.tile_n, c.padded_v), (out, 64, c.padded_v))
    arrays = [elements(t) for t, _, _ in tiles]
    maps = {2 * i: tensor_map(arrays[i], *tile) for i, tile in enumerate(tiles)}
    lse, memory = np.full((batch, heads_q, seqlen_q), np.nan, np.float32), Memory()
    blocks, group = -(-seqlen_q // c.tile_m), heads_q // heads_kv
    units = batch * heads_kv
    numbers = (blocks, heads_q, group, units, sections, group * blocks)
    sizes = [ints(t.shape[2], t.shape[1], t.shape[0]) for t, _, _ in tiles]
    parameters = [p for size in sizes for p in (b"", size)]
    parameters += [pack_tensor(memory.place(lse), lse.shape, (heads_q * seqlen_q, seqlen_q))]
    mask = None
    if c.kind == "mask":
        mask, causal = mask_of(causal, (batch, heads_q, seqlen_q, seqlen_k), drawn), "none"
        for t, symbolic in zip(classified_ref(mask), (3, 4, 4), strict=True):
            address = memory.place(t.numpy())
            parameters += [pack_tensor(address, t.shape[:symbolic], t.stride()[:-1])]
    parameters += [np.float32(c.head_dim**-0.5 * LOG2_E).tobytes()]
    parameters += [ints(0 if causal == "top_left" else seqlen_k - seqlen_q), *map(ints, bounds(causal, window))]
    parameters += [ints(blocks * batch * heads_q), *(p for n in numbers for p in (divisor(n), ints(n)))]
    machine = HopperMachine(ptx("attention", "sm90_fwd", c), SMEM, memory, parameters, maps, late)
    machine.run(min(2, blocks * batch * heads_q), seed)

    got = torch.from_numpy(arrays[3].view(np.int16)).view(q.dtype).reshape(out.shape).double()
    want, want_lse = attention_ref(q, k, v, mask=mask, causal=causal, window=window)
    assert not torch.isnan(got).any()
    assert (got - want).norm() <= (4e-3 if c.dtype == "bfloat16" else 5e-4) * want.norm()
    found = torch.from_numpy(lse).double()
    assert torch.equal(torch.isinf(found), torch.isinf(want_lse)) and not torch.isnan(found).any()
    seen = ~torch.isinf(want_lse)
    assert (found - want_lse)[seen].abs().max() <= 1e-5


#: (dtype, head_dim, head_dim_v, kind), heads of q and k, lengths of the sequences in q and k, lengths that are used or
#: None, causal, window, what differs from the plan
PACKED = (
    (
        ("bfloat16", 128, 128, "causal"),
        (2, 1),
        ((130, 0, 70, 1), (130, 40, 200, 0)),
        (None, None),
        "bottom_right",
        None,
        {},
    ),
    (("bfloat16", 64, 64, "full"), (2, 2), ((40, 200), (150, 90)), (None, (130, 90)), "none", None, {}),
    (("float16", 128, 128, "window"), (1, 1), ((150, 30), (200, 33)), ((140, 5), None), "top_left", (60, 20), NEXT),
    (("bfloat16", 256, 256, "causal"), (1, 1), ((66, 20), (66, 90)), (None, None), "top_left", None, {}),
)


def packed_map(array: np.ndarray, t: torch.Tensor, rows: int, columns: int) -> TensorMap:
    """Of a (total, heads, size) tensor, as tma.segmented describes it."""
    width = next(w for w in (128, 64, 32) if 2 * columns % w == 0)
    sizes = (t.shape[2], 2**30, t.shape[1], 0x7FFF0000, 0x7FFF0000)
    strides = (1, t.stride(0), t.stride(1), t.stride(0), 2**34 - t.stride(0))
    return TensorMap(array, sizes, strides, (width // 2, rows, 1, 1, 1), width)


@pytest.mark.parametrize("case", PACKED, ids=lambda case: "_".join(map(str, (*case[0], *case[1], case[4]))))
def test_packed_sequences(case: tuple) -> None:
    """Rows of no sequence hold NaN, and are still there afterwards."""
    what, (heads_q, heads_kv), (lengths_q, lengths_k), used, causal, window, changes = case
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    c = replace(forward_config(*what, True, True), **changes)
    drawn = torch.Generator().manual_seed(seed)
    starts = [np.concatenate(([3], 3 + np.cumsum(n))).astype(np.int32) for n in (lengths_q, lengths_k)]
    counts = [np.array(n if u is None else u, np.int32) for n, u in zip((lengths_q, lengths_k), used, strict=True)]
    pieces = [[slice(s, s + n) for s, n in zip(a, b, strict=False)] for a, b in zip(starts, counts, strict=True)]

    def draw(side: int, heads: int, size: int) -> torch.Tensor:
        t = torch.full((int(starts[side][-1]) + 9, heads, size), torch.nan)
        for piece in pieces[side]:
            t[piece] = torch.randn(t[piece].shape, generator=drawn)
        return t.to(getattr(torch, c.dtype))

    q, k, v = draw(0, heads_q, c.head_dim), draw(1, heads_kv, c.head_dim), draw(1, heads_kv, c.head_dim_v)
    out = torch.full((q.shape[0], heads_q, c.head_dim_v), 7.0).to(q.dtype)
    tiles = ((q, 64, c.padded), (k, c.tile_n, c.padded), (v, c.tile_n, c.padded_v), (out, 64, c.padded_v))
    arrays = [elements(t) for t, _, _ in tiles]
    maps = {2 * i: packed_map(arrays[i], *tile) for i, tile in enumerate(tiles)}
    lse, memory = np.full((heads_q, q.shape[0]), 7.0, np.float32), Memory()
    table = np.full((q.shape[0] // c.tile_m + len(lengths_q), 8), -1, np.int32)
    place = pack_tensor(memory.place(table), table.shape[:1], (8,))
    parameters = [pack_tensor(memory.place(n), n.shape, ()) for n in (*starts, *counts)]
    parameters += [ints(sum(1 << i for i in range(2) if used[i] is not None)), place]
    entries = re.split(r"(?=\.visible \.entry)", ptx("attention", "sm90_fwd", c))
    (fill,) = (p for p in entries if "entry kernel_cutlass_fill" in p)
    (attend,) = (p for p in entries if "entry kernel_cutlass_kernel" in p)
    HopperMachine(fill, SMEM, memory, parameters, {}).run(len(lengths_q), seed)

    parameters = [p for t, _, _ in tiles for p in (b"", ints(t.shape[1]))]
    parameters += [pack_tensor(memory.place(lse), lse.shape, (q.shape[0],)), place]
    parameters += [np.float32(c.head_dim**-0.5 * LOG2_E).tobytes(), ints(causal != "top_left")]
    parameters += [*map(ints, bounds(causal, window)), ints(len(table) * heads_q)]
    parameters += [p for n in (heads_q, heads_q // heads_kv) for p in (divisor(n), ints(n))]
    HopperMachine(attend, SMEM, memory, parameters, maps).run(min(3, len(table) * heads_q), seed)

    got = torch.from_numpy(arrays[3].view(np.int16)).view(q.dtype).reshape(out.shape).double()
    found = torch.from_numpy(lse).double()
    beside = torch.ones(q.shape[0], dtype=torch.bool)
    for one, other in zip(*pieces, strict=True):
        beside[one] = False
        parts = (t[p].transpose(0, 1)[None] for t, p in ((q, one), (k, other), (v, other)))
        want, want_lse = attention_ref(*parts, causal=causal, window=window)
        want = want[0].transpose(0, 1)
        assert not torch.isnan(got[one]).any()
        assert (got[one] - want).norm() <= (4e-3 if c.dtype == "bfloat16" else 5e-4) * want.norm()
        seen = ~torch.isinf(want_lse[0])
        assert torch.equal(torch.isinf(found[:, one]), ~seen)
        assert (found[:, one] - want_lse[0])[seen].abs().sum() <= 1e-5 * max(int(seen.sum()), 1)
    assert (got[beside] == 7.0).all() and (found[:, beside] == 7.0).all()


def test_gemm() -> None:
    m, n, k = 200, 304, 136
    c = GemmConfig(cluster_m=1)
    a, b = torch.randn(m, k).bfloat16(), torch.randn(n, k).bfloat16()
    out = torch.full((m, n), torch.nan).bfloat16()
    tiles = ((a, c.tile_m, c.tile_k), (b, c.tile_n, c.tile_k), (out, 64, 64))
    arrays = [elements(t) for t, _, _ in tiles]
    maps = {2 * i: tensor_map(arrays[i], *tile) for i, tile in enumerate(tiles)}
    parameters = [p for t, _, _ in tiles for p in (b"", ints(*t.shape))]
    parameters += [ints(-(-m // c.tile_m)), ints(-(-n // c.tile_n))]
    HopperMachine(ptx("blocks", "gemm_sm90", c), SMEM, Memory(), parameters, maps).run(2, seed=1)
    got = torch.from_numpy(arrays[2].view(np.int16)).view(torch.bfloat16).reshape(m, n).double()
    want = a.double() @ b.double().T
    assert (got - want).norm() <= 2.5e-3 * want.norm()
