"""The chains of the chunked gated delta rule on the CPU: their PTX against the formulas in fp64, and their SASS.

What the kernel before this one would have written is made up: any W, U, P and vectors of a sensible size will do.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest
import torch

from accel.kernels.gated_delta_rule.chunk_config import CHUNK, VECTORS, ChunkConfig, stages
from accel.kernels.runtime import compile as runtime
from accel.kernels.runtime import sass
from accel.kernels.runtime.emulate import pack_tensor
from accel.kernels.runtime.emulate_sm90 import HopperMachine, Memory, segments_map, tiles_map

SMEM = 227 * 1024


@dataclass(frozen=True)
class Case:
    lengths: tuple[int, ...]
    heads: tuple[int, int] = (1, 1)  #: of queries and keys, of values
    dims: tuple[int, int] = (128, 128)
    dtype: str = "bfloat16"
    initial: str | None = "float32"
    final: str | None = "float32"
    v_first: bool = False
    warpgroups: int = 1
    stages: int = 0  #: 0: as many as the host plans
    late: bool = True

    @property
    def config(self) -> ChunkConfig:
        return ChunkConfig(
            *self.dims, self.dtype, "float32", "float32", None, None, self.initial, self.final, self.v_first, False,
            "plain", None, self.warpgroups, self.stages or stages(self.dims[0], self.warpgroups),
        )  # fmt: skip


CASES = (
    Case((150,), (1, 2)),
    Case((1, 0, 64, 65, 0), (1, 1), (64, 64), "float16", initial="bfloat16"),
    Case((300,), (1, 1), (64, 128), v_first=True, warpgroups=2),
    Case((63, 130), (2, 2), (128, 64), "float16", initial=None, v_first=True),
    Case((200,), (1, 1), (128, 128), initial="float16", final=None, warpgroups=2, stages=2),
    Case((200,), (1, 1), (256, 64)),
    Case((70, 20), (1, 1), (256, 128), "float16", initial="float32", v_first=True),
    Case((330,), (1, 1), (64, 64), late=False),
)


@cache
def compiled(config: ChunkConfig) -> runtime.Compiled:
    return runtime.compile_only(runtime.Kernel("gated_delta_rule", "sm90_scan", config), "sm_90a")


def bits(t: torch.Tensor) -> np.ndarray:
    return t.contiguous().view(torch.int16).numpy().view(np.uint16).reshape(-1).copy()


def ints(*values: int) -> bytes:
    return np.array(values, np.int32).tobytes()


def walked(
    case: Case,
    made: tuple[torch.Tensor, ...],
    o: torch.Tensor,
    initial: torch.Tensor,
    starts: list[int],
    first_slots: list[int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """(o with the rows of the sequences, the states [N, HV, K, V] after them) in fp64, of q, k, W, U, P and vectors."""
    q, k, *entries = (t.double() for t in made)
    (heads, heads_v), size = case.heads, case.dims[0]
    want, states = o.double(), initial.double() if case.initial else torch.zeros_like(initial).double()
    states = states.transpose(2, 3).contiguous() if case.v_first else states
    for n, length in enumerate(case.lengths):
        for j in range(heads_v):
            state = states[n, j]
            for i in range(-(-length // CHUNK)):
                w, u, p, vec = (t[(first_slots[n] + i) * heads_v + j] for t in entries)
                row, live = starts[n] + CHUNK * i, min(CHUNK, length - CHUNK * i)
                tq, tk = torch.zeros(CHUNK, size).double(), torch.zeros(CHUNK, size).double()
                tq[:live], tk[:live] = (t[row : row + live, j // (heads_v // heads)] for t in (q, k))
                new = u + w @ state
                want[row : row + live, j] = ((tq @ state) * vec[0, :, None] + p @ new)[:live]
                state = vec[2, 0] * state + tk.T @ (new * vec[1, :, None])
            states[n, j] = state
    return want, states


def run(case: Case, seed: int) -> None:
    c = case.config
    drawn = torch.Generator().manual_seed(seed)
    (heads, heads_v), (size, size_v), dtype = case.heads, case.dims, getattr(torch, case.dtype)
    group, sequences = heads_v // heads, len(case.lengths)
    starts = [5 + sum(case.lengths[:n]) for n in range(sequences)]
    total = starts[-1] + case.lengths[-1] + 7
    first_slots = [start // CHUNK + n for n, start in enumerate(starts)]
    slots = total // CHUNK + sequences
    entries = slots * heads_v

    def draw(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(*shape, generator=drawn) * scale

    q, k = (torch.full((total, heads, size), torch.nan) for _ in range(2))
    w, u, p = (torch.full((entries, CHUNK, n), torch.nan) for n in (size, size_v, CHUNK))
    vec = torch.full((entries, VECTORS, CHUNK), torch.nan)
    o = torch.full((total, heads_v, size_v), 7.0).to(dtype)
    table = torch.zeros(sequences, 4, dtype=torch.int32)
    inner = (size_v, size) if case.v_first else (size, size_v)
    name = case.initial or "float32"
    initial = draw(sequences, heads_v, *inner).to(getattr(torch, name))
    final = torch.full((sequences, heads_v, *inner), 7.0)
    for n, length in enumerate(case.lengths):
        rows = slice(starts[n], starts[n] + length)
        q[rows], k[rows] = draw(length, heads, size, scale=size**-0.5), draw(length, heads, size, scale=size**-0.5)
        chunks = -(-length // CHUNK)
        table[n] = torch.tensor([starts[n] + length, length, first_slots[n], chunks])
        for i in range(chunks):
            live = min(CHUNK, length - CHUNK * i)
            for j in range(heads_v):
                e = (first_slots[n] + i) * heads_v + j
                w[e], u[e] = draw(CHUNK, size, scale=size**-0.5), draw(CHUNK, size_v)
                w[e, live:], u[e, live:] = 0, 0
                p[e] = draw(CHUNK, CHUNK, scale=0.2).tril()
                vec[e] = torch.rand(VECTORS, CHUNK, generator=drawn)
                vec[e, 2, 0] = 0.5
    q, k, w, u, p = (t.to(dtype) for t in (q, k, w, u, p))

    want, states = walked(case, (q, k, w, u, p, vec), o, initial, starts, first_slots)
    memory = Memory()
    arrays = [bits(t) for t in (q, k, w, u, p)]
    vectors, out = vec.numpy().reshape(-1).view(np.uint16).copy(), bits(o)
    maps = {
        0: segments_map(arrays[0], q),
        2: segments_map(arrays[1], k),
        4: tiles_map(arrays[2], CHUNK, size, entries, CHUNK),
        6: tiles_map(arrays[3], CHUNK, size_v, entries, CHUNK),
        8: tiles_map(arrays[4], CHUNK, CHUNK, entries, CHUNK),
        10: tiles_map(vectors, 2 * VECTORS, 64, entries, 8),
        12: segments_map(out, o),
    }
    sizes = (heads, heads, entries, entries, entries, entries, heads_v)
    parameters = [x for n in sizes for x in (b"", ints(n))]

    def placed(t: torch.Tensor, there: bool) -> tuple[bytes, np.ndarray]:
        raw = np.frombuffer(bytearray(bytes(t.untyped_storage())), np.uint8)
        shape, stride = (t.shape[:2], t.stride()[:3]) if there else (o.shape[:2], o.stride()[:2])
        return pack_tensor(memory.place(raw), shape, stride), raw

    parameters += [placed(initial, case.initial is not None)[0]]
    packed, raw = placed(final, case.final is not None)
    parameters += [packed, pack_tensor(memory.place(table.numpy()), (sequences,), ())]
    parameters += [ints(heads_v), ints(group)]
    chains = sequences * heads_v * c.slices
    HopperMachine(compiled(c).ptx, SMEM, memory, parameters, maps, case.late).run(chains, seed)

    got = torch.from_numpy(out.view(np.int16)).view(dtype).reshape(o.shape).double()
    found = None
    if case.final is not None:
        found = torch.from_numpy(raw).view(torch.float32).reshape(final.shape).double()
        found = found.transpose(2, 3) if case.v_first else found
    check(case, starts, got, want, found, states)


def check(
    case: Case,
    starts: list[int],
    got: torch.Tensor,
    want: torch.Tensor,
    found: torch.Tensor | None,
    states: torch.Tensor,
) -> None:
    """Outputs and, where they were written, states are close; what is in no sequence was left alone."""
    beside = torch.ones(len(got), dtype=torch.bool)
    tolerance = 1.2e-2 if case.dtype == "bfloat16" else 2e-3
    for n, length in enumerate(case.lengths):
        rows = slice(starts[n], starts[n] + length)
        beside[rows] = False
        assert not torch.isnan(got[rows]).any()
        error = (got[rows] - want[rows]).norm() / want[rows].norm() if length else 0.0
        print(n, "o", float(error))
        assert error <= tolerance
    assert (got[beside] == 7.0).all()
    if found is not None:
        for n, length in enumerate(case.lengths):
            if length:
                error = (found[n] - states[n]).norm() / states[n].norm()
                print(n, "state", float(error))
                assert error <= tolerance
            else:
                assert torch.equal(found[n], states[n])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_emulated(case: Case) -> None:
    """Every head dim and dtype, states of every kind, tails, sequences of no tokens, rings that are short."""
    seed = random.SystemRandom().randrange(1 << 31)
    print(f"seed {seed}")
    run(case, seed)


@pytest.mark.parametrize(("head_dim", "warpgroups"), ((64, 1), (64, 2), (128, 1), (128, 2), (256, 1)))
def test_code(head_dim: int, warpgroups: int) -> None:
    """No spills, and products that are not serialised: three waits a chunk, and with 256 channels three for pieces."""
    (code,) = sass.disassemble(compiled(Case((64,), dims=(head_dim, 128), warpgroups=warpgroups).config).cubin)
    assert code.spills == 0
    assert code.count("HGMMA") == 2 * head_dim // 16 + 4 + 4
    assert code.count("WARPGROUP", "DEPBAR") == (6 if head_dim == 256 else 3)
