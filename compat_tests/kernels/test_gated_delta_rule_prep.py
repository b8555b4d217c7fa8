"""What a chunk contributes without its state (`sm90_prep`): its PTX on the CPU against fp64, and its SASS."""

from __future__ import annotations

import math
import random
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor

from accel.kernels.gated_delta_rule.chunk_config import CHUNK, SMEM, ChunkConfig
from accel.kernels.runtime import compile as runtime
from accel.kernels.runtime import sass
from accel.kernels.runtime.emulate import pack_tensor
from accel.kernels.runtime.emulate_sm90 import HopperMachine, Memory, segments_map, tiles_map

EPS = 1e-6
NAMES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def config(head_dim: int = 128, head_dim_v: int = 128, dtype: str = "bfloat16", **options: object) -> ChunkConfig:
    plain = {"g_dtype": "float32", "beta_dtype": "float32", "a_dtype": None, "bias_dtype": None, "beta": "plain"}
    rest = {"initial": None, "final": None, "v_first": False, "l2norm": True, "packed": None, "stages": 2}
    return ChunkConfig(head_dim, head_dim_v, dtype, **{**plain, **rest, **options})  # type: ignore[arg-type]


GATE = {"a_dtype": "float32", "bias_dtype": "bfloat16", "beta": "sigmoid"}
#: (configuration, lengths of sequences, (heads, value heads), log decays); "alike": keys that are nearly the same, and
#: no decay, so that L is all ones or twos
CASES = {
    "one": (config(), (64,), (1, 1), "mild"),
    "tails": (config(), (130, 1, 63), (1, 2), "mild"),
    "k64": (config(64, 64, "float16"), (65,), (2, 4), "resets"),
    "k256": (config(256, 64), (70,), (1, 2), "strong"),
    "v512": (config(64, 512), (64,), (1, 2), "mild"),
    "v192": (config(64, 192, "float16"), (40,), (1, 3), "resets"),
    "gate": (config(**GATE), (64, 20), (1, 2), "mild"),
    "neg": (config(64, 64, a_dtype="float16", beta="twice_sigmoid", g_dtype="bfloat16"), (50,), (1, 1), "mild"),
    "raw": (config(64, 128, "float16", l2norm=False), (64,), (1, 2), "strong"),
    "zero": (config(64, 64), (64,), (1, 1), "zero"),
    "alike": (config(64, 64, "float16", beta="twice_sigmoid"), (64,), (1, 2), "alike"),
}


@cache
def compiled(c: ChunkConfig) -> runtime.Compiled:
    return runtime.compile_only(runtime.Kernel("gated_delta_rule", "sm90_prep", c), "sm_90a")


def elements(t: Tensor) -> np.ndarray:
    return t.view(torch.int16).numpy().view(np.uint16).reshape(-1).copy()


def log_decays(kind: str, shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    noise = torch.randn(shape, generator=generator)
    if kind in ("zero", "alike"):
        return torch.zeros(shape)
    g = torch.nn.functional.logsigmoid(noise)
    if kind == "strong":
        return 20 * g
    if kind == "resets":
        return torch.where(torch.rand(shape, generator=generator) < 0.1, -1000.0, g)
    return g


def chunk_ref(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float, l2norm: bool, dtype: torch.dtype
) -> tuple[list[Tensor], list[Tensor]]:
    """(W, U, P, vectors) of a chunk of one value head in fp64: q, k [n, K], v [n, V], log decays and beta [n]; and the
    first three with what is rounded, the scaled inverse and the results, rounded to `dtype`."""
    rows = q.shape[0]

    def rounded(x: Tensor) -> Tensor:
        return x.to(dtype).double()

    def norm(x: Tensor) -> Tensor:
        return (x.square().sum(-1) + EPS).rsqrt() if l2norm else torch.ones(rows).double()

    rk, rq = norm(k), norm(q)
    sums = torch.stack([g[i + 1 : t + 1].sum() for t in range(rows) for i in range(rows)]).view(rows, rows)
    decay = sums.exp().tril()
    lower = (beta * rk)[:, None] * (k @ k.T) * rk * decay
    inverse = torch.linalg.inv(torch.eye(rows).double() + lower.tril(-1))
    gamma = g.cumsum(0).exp()
    left = (-inverse * (beta * gamma * rk), inverse * beta)
    w, u = left[0] @ k, left[1] @ v
    p = scale * rq[:, None] * (q @ k.T) * rk * decay
    after = torch.stack([g[t + 1 :].sum() for t in range(rows)]).exp()
    pad = (0, 0, 0, CHUNK - rows)
    vectors = torch.zeros(3, CHUNK).double()
    vectors[0, :rows], vectors[1, :rows], vectors[2] = scale * rq * gamma, after * rk, gamma[-1]
    square = (0, CHUNK - rows, 0, CHUNK - rows)
    low = (rounded(rounded(left[0]) @ k), rounded(rounded(left[1]) @ v), rounded(p))
    padded = [
        [torch.nn.functional.pad(x, n) for x, n in zip(y, (pad, pad, square), strict=True)] for y in ((w, u, p), low)
    ]
    return [*padded[0], vectors], padded[1]


RUNS = [(name, True) for name in CASES] + [("tails", False), ("v512", False)]


@pytest.mark.parametrize(("name", "late"), RUNS, ids=lambda x: x if isinstance(x, str) else "late" if x else "at_once")
def test_prep(name: str, late: bool) -> None:
    c, lengths, (heads, heads_v), decays = CASES[name]
    seed = random.SystemRandom().randrange(1 << 31)
    print(f"seed {seed}")
    run(c, lengths, heads, heads_v, decays, late, seed)


def run(c: ChunkConfig, lengths: tuple[int, ...], heads: int, heads_v: int, decays: str, late: bool, seed: int) -> None:
    drawn = torch.Generator().manual_seed(seed)
    dtype, group = NAMES[c.dtype], heads_v // heads
    starts = np.concatenate(([3], 3 + np.cumsum(lengths))).tolist()
    total = starts[-1] + 5

    def draw(n: int, size: int) -> Tensor:
        t = torch.full((total, n, size), torch.nan)
        t[3 : starts[-1]] = torch.randn((starts[-1] - 3, n, size), generator=drawn)
        return (t if c.l2norm else t / math.sqrt(size) * 2).to(dtype)

    q, k, v = draw(heads, c.head_dim), draw(heads, c.head_dim), draw(heads_v, c.head_dim_v)
    if decays == "alike":
        k = (k[4] + k / 10).to(dtype)
    g = log_decays(decays, (total, heads_v), drawn).to(NAMES[c.g_dtype])
    beta = torch.randn(total, heads_v, generator=drawn)
    beta = (beta if c.beta != "plain" else beta.sigmoid()).to(NAMES[c.beta_dtype])
    a_log = torch.rand(heads_v, generator=drawn).to(NAMES[c.a_dtype or "float32"])
    bias = torch.randn(heads_v, generator=drawn).to(NAMES[c.bias_dtype or "float32"])
    chunks = [(n, i) for n, length in enumerate(lengths) for i in range(-(-length // CHUNK))]
    table = [(starts[n + 1], lengths[n], i, n) for n, i in chunks]
    table.insert(1, (starts[1], 0, 7, 0))
    places = [0, *range(2, len(table))]
    slots, scale = len(table), c.head_dim**-0.5

    out = [torch.full((slots * heads_v, CHUNK, n), torch.nan).to(dtype) for n in (c.head_dim, c.head_dim_v, CHUNK)]
    memory, vectors = Memory(), np.full((slots * heads_v, 3, CHUNK), np.nan, np.float32)
    arrays = [elements(t) for t in (q, k, v, *out)]
    maps = {2 * i: segments_map(arrays[i], t) for i, t in enumerate((q, k, v))}
    for i, t in enumerate(out):
        maps[2 * i + 6] = tiles_map(arrays[3 + i], CHUNK, t.shape[2], t.shape[0], CHUNK)

    def number(t: Tensor) -> bytes:
        return pack_tensor(memory.place(t.view(torch.uint8).numpy()), t.shape, t.stride() if t.dim() > 1 else ())

    def ints(*values: int) -> bytes:
        return np.array(values, np.int32).tobytes()

    parameters = [p for t in (q, k, v) for p in (b"", ints(t.shape[1]))]
    parameters += [p for t in out for p in (b"", ints(t.shape[0]))]
    parameters += [number(t) for t in (g, beta)]
    for t, present in ((a_log, c.a_dtype), (bias, c.bias_dtype)):
        parameters.append(number(t) if present else b"\0" * 64)
    place = memory.place(np.array(table, np.int32))
    parameters += [pack_tensor(place, (slots,), ()), pack_tensor(memory.place(vectors), (slots * heads_v,), ())]
    parameters += [np.float32(scale).tobytes(), ints(heads), ints(group)]
    order = list(range(slots * heads))
    random.Random(seed).shuffle(order)
    HopperMachine(compiled(c).ptx, SMEM, memory, parameters, maps, late).run(len(order), seed, order)

    found = [torch.from_numpy(a.view(np.int16)).view(dtype).view(t.shape) for a, t in zip(arrays[3:], out, strict=True)]
    found.append(torch.from_numpy(vectors))
    decay, rate = g.double(), beta.double()
    if c.a_dtype is not None:
        shifted = decay + (bias.double() if c.bias_dtype else 0)
        decay = -a_log.double().exp() * torch.nn.functional.softplus(shifted)
    if c.beta != "plain":
        rate = rate.sigmoid() * (2 if c.beta == "twice_sigmoid" else 1)
    least = 2.0**-23 if c.dtype == "float16" else 1e-30  # a few roundings of the smallest numbers
    for (n, i), slot in zip(chunks, places, strict=True):
        rows = slice(starts[n] + CHUNK * i, min(starts[n] + CHUNK * (i + 1), starts[n + 1]))
        for j in range(heads_v):
            of = [t[rows, j // group].double() for t in (q, k)]
            want, low = chunk_ref(*of, v[rows, j].double(), decay[rows, j], rate[rows, j], scale, c.l2norm, dtype)
            got = [t[slot * heads_v + j].double() for t in found]
            assert all(x.isfinite().all() for x in got)
            for what, x, y, z in zip("WUP", got, want, low, strict=False):
                error, limit = float((x - y).norm()), 1.25 * float((z - y).norm()) + least * x.numel() ** 0.5
                print(what, slot, j, error / limit)
                assert error <= limit, (what, slot, j, error, limit)
            x, y = (t[:, : rows.stop - rows.start] for t in (got[3], want[3]))
            assert (x - y).norm() <= 4e-5 * y.norm(), (slot, j)
    unused = slice(heads_v, 2 * heads_v)
    assert all(t[unused].isnan().all() for t in found)


@pytest.mark.parametrize("dims", ((64, 64), (128, 128), (128, 512), (256, 128)), ids=lambda x: f"{x[0]}x{x[1]}")
def test_code(dims: tuple[int, int]) -> None:
    """No spills, and the products are not serialised: a wait for K K^T and Q K^T, one for 64 columns of W or U."""
    (code,) = sass.disassemble(compiled(config(*dims)).cubin)
    assert code.spills == 0 and code.registers <= 65536 // 256
    assert code.count("HGMMA") == 2 * dims[0] // 16 + 4 * (dims[0] + dims[1]) // 64
    assert code.count("WARPGROUP", "DEPBAR") == 1 + (dims[0] + dims[1]) // 64
    assert code.count("UTMASTG") >= 3 and code.count("STG", "128") == 0
