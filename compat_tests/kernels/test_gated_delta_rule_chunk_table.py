"""The tables of chunks and sequences, as their kernel's PTX writes them on the CPU, and its SASS."""

from __future__ import annotations

import random
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
import torch

from accel.kernels.gated_delta_rule.chunk_config import ChunkConfig
from accel.kernels.runtime import compile as runtime
from accel.kernels.runtime import emulate, sass

DIMS = (64, 64)
HEADS_V = 2


def config(packed: str | None) -> ChunkConfig:
    return ChunkConfig(
        *DIMS, "bfloat16", "float32", "float32", None, None, None, None, False, True, "plain", packed
    )  # fmt: skip


@cache
def compiled(packed: str | None) -> runtime.Compiled:
    return runtime.compile_only(runtime.Kernel("gated_delta_rule", "chunk_table", config(packed)), "sm_90a")


def tables(
    bounds: list[int] | None, sequences: int, total: int, dtype: torch.dtype, seed: int
) -> tuple[np.ndarray, np.ndarray, torch.Tensor]:
    """(chunks, sequences, o) that were nothing but -1 and NaN before."""
    memory = emulate.Memory()
    slots = sequences * -(-(total // sequences) // 64) if bounds is None else total // 64 + sequences
    of_chunks, of_sequences = np.full((slots, 4), -1, np.int32), np.full((sequences, 4), -1, np.int32)
    out = np.full((total, HEADS_V, DIMS[1]), 0x7FC0, np.uint16)
    o = emulate.pack_tensor(memory.place(out), out.shape[:2], (HEADS_V * DIMS[1],))
    if bounds is None:
        packed, cu = None, o
    else:
        packed = "int32" if dtype == torch.int32 else "int64"
        cu = emulate.pack_tensor(memory.place(torch.tensor(bounds, dtype=dtype).numpy()), [sequences + 1], ())
    parameters = [cu, *(emulate.pack_tensor(memory.place(t), t.shape[:1], ()) for t in (of_chunks, of_sequences)), o]
    machine = emulate.Machine(compiled(packed).ptx, 0, memory, parameters)
    order = list(range(-(-max(slots, sequences) // 128)))
    random.Random(seed).shuffle(order)
    machine.run(len(order), seed, order)
    return of_chunks, of_sequences, torch.from_numpy(out.view(np.int16)).view(torch.bfloat16)


def check(bounds: list[int], of_chunks: np.ndarray, of_sequences: np.ndarray) -> None:
    """Every chunk of every sequence is in one slot, neighbours are in a row, and all other slots are unused."""
    used = np.zeros(len(of_chunks), bool)
    for n, (start, stop) in enumerate(pairwise(bounds)):
        end, length, first, chunks = of_sequences[n].tolist()
        assert (length, chunks) == (stop - start, -(-(stop - start) // 64)) and (end == stop or length == 0)
        for chunk in range(chunks):
            assert of_chunks[first + chunk].tolist() == [stop, length, chunk, n]
            assert not used[first + chunk]
            used[first + chunk] = True
    assert (of_chunks[~used, 1] == 0).all()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("kind", ["one", "few", "many_short", "outside"])
def test_packed(kind: str, dtype: torch.dtype) -> None:
    seed = random.SystemRandom().randrange(1 << 31)
    print(f"seed {seed}")
    chosen = random.Random(seed)
    lengths = {
        "one": [chosen.randrange(1, 300)],
        "few": [chosen.choice((0, 1, 63, 64, 65, chosen.randrange(300))) for _ in range(9)],
        "many_short": [chosen.randrange(4) for _ in range(700)],
        "outside": [chosen.randrange(200) for _ in range(3)],
    }[kind]
    start = 150 if kind == "outside" else 0
    bounds = [start]
    for length in lengths:
        bounds.append(bounds[-1] + length)
    total = max(bounds[-1] + (70 if kind == "outside" else 0), 1)
    of_chunks, of_sequences, out = tables(bounds, len(lengths), total, dtype, seed)
    check(bounds, of_chunks, of_sequences)
    inside = torch.zeros(total, dtype=torch.bool)
    inside[start : bounds[-1]] = True
    assert torch.isnan(out[inside]).all() and (out[~inside] == 0).all()


@pytest.mark.parametrize(("sequences", "tokens"), [(1, 1), (3, 64), (2, 130), (200, 3)])
def test_dense(sequences: int, tokens: int) -> None:
    of_chunks, of_sequences, out = tables(None, sequences, sequences * tokens, torch.int32, 0)
    check([n * tokens for n in range(sequences + 1)], of_chunks, of_sequences)
    assert (of_chunks[:, 1] == tokens).all() and torch.isnan(out).all()


@pytest.mark.parametrize("bounds", [[0, 200, 100, 300], [-50, 20, 900], [300, 300, 0]])
def test_wrong_bounds_stay_inside(bounds: list[int]) -> None:
    """What they lead to is undefined, but no row outside of the tensors is in a table."""
    of_chunks, of_sequences, _ = tables(bounds, len(bounds) - 1, 320, torch.int64, 0)
    for table in (of_chunks[of_chunks[:, 1] > 0], of_sequences):
        end, length = table[:, 0], table[:, 1]
        assert (end <= 320).all() and (length >= 0).all() and (end - length >= 0).all()
    end, _, first, chunks = of_sequences.T
    assert (first >= 0).all() and (first + chunks <= len(of_chunks)).all()
    assert (of_chunks[:, 3] < len(bounds) - 1).all()


@pytest.mark.parametrize("packed", [None, "int32", "int64"])
def test_machine_code(packed: str | None) -> None:
    (code,) = sass.disassemble(compiled(packed).cubin)
    assert code.spills == 0 and code.count("STG", "128") >= 2
