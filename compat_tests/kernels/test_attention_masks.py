"""Masks without a GPU: the classifying kernel run on the CPU, how its result is kept, and what is passed on."""

from __future__ import annotations

import random
import re
from functools import cache

import numpy as np
import pytest
import torch

from accel.kernels.attention.launch import bounds
from accel.kernels.attention.mask_config import BLOCK, CHUNK, TILE, ClassifyConfig
from accel.kernels.attention.reference import visible
from accel.kernels.runtime import compile as runtime
from accel.kernels.runtime.emulate import pack_tensor
from accel.kernels.runtime.emulate_sm90 import HopperMachine, Memory


@cache
def entries() -> tuple[str, str]:
    """The PTX of the two kernels, each with the head of the module."""
    ptx = runtime.compile_only(runtime.Kernel("attention", "any_classify", ClassifyConfig()), "sm_90a").ptx
    parts = re.split(r"(?=\.visible \.entry)", ptx)
    (states,) = (p for p in parts if "entry kernel_cutlass_states" in p)
    (compact,) = (p for p in parts if "entry kernel_cutlass_compact" in p)
    return states, compact


def ints(*values: int) -> list[bytes]:
    return [np.array([v], np.int32).tobytes() for v in values]


def classified(
    mask: torch.Tensor, seqlen_q: int, causal: str, window: tuple[int, int] | None, access: int, seed: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(counts, lists, bits) of a (batch, heads, rows, seqlen_k) mask of any strides, by the kernels' PTX."""
    batch, heads, rows, seqlen_k = mask.shape
    blocks, tiles, chunks = -(-seqlen_q // BLOCK), -(-seqlen_k // TILE), -(-seqlen_k // CHUNK)
    counts = np.full((batch, heads, blocks, 2), -7, np.int32)
    lists = np.full((batch, heads, blocks, tiles), -7, np.int32)
    states = np.full((batch, heads, blocks, chunks), 0x77777777, np.uint32)
    bit_rows = BLOCK if seqlen_q > 1 else 1
    bits = np.full((batch, heads, blocks, tiles, bit_rows, 4), 0x5A5A5A5A, np.uint32)
    memory = Memory()
    # From the first byte of the storage that is used to the last, so that every read beside the mask is found.
    storage = np.array(mask.untyped_storage().tolist(), np.uint8)
    place = memory.place(storage) + mask.storage_offset()

    def tensor(array: np.ndarray, symbolic: int) -> bytes:
        strides = [s // array.itemsize for s in array.strides[:-1]]
        return pack_tensor(memory.place(array), array.shape[:symbolic], strides)

    packed = {
        "mask": pack_tensor(place, mask.shape, mask.stride()),
        "states": tensor(states, 4),
        "counts": tensor(counts, 3),
        "lists": tensor(lists, 4),
        "bits": tensor(bits, 5),
    }
    left, right = bounds(causal, window)
    offset = 0 if causal == "top_left" else seqlen_k - seqlen_q
    first, second = entries()
    numbers = ints(access, seqlen_q, offset, left, right)
    parameters = [packed["mask"], packed["states"], packed["bits"], *numbers]
    HopperMachine(first, 1024, memory, parameters, {}).run(batch * heads * blocks * chunks, seed)
    HopperMachine(second, 1024, memory, [packed[n] for n in ("states", "counts", "lists")], {}).run(
        batch * heads * blocks, seed
    )
    return counts, lists, bits


def check(mask: torch.Tensor, seqlen_q: int, causal: str, window: tuple[int, int] | None, access: int) -> None:
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    batch, heads, _, seqlen_k = mask.shape
    counts, lists, bits = classified(mask, seqlen_q, causal, window, access, seed)
    seen = mask.expand(batch, heads, seqlen_q, seqlen_k)
    allowed = visible(seqlen_q, seqlen_k, causal, window)
    seen = (seen if allowed is None else seen & allowed).numpy()
    tiles = lists.shape[3]
    for b, h, block in np.ndindex(counts.shape[:3]):
        rows = seen[b, h, block * BLOCK : (block + 1) * BLOCK]
        full, partial = [], []
        for t in range(tiles):
            part = rows[:, t * TILE : (t + 1) * TILE]
            if part.all() and part.shape[1] == TILE:
                full.append(t)
            elif part.any():
                partial.append(t)
                words = bits[b, h, block, t]
                unpacked = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little").astype(bool)
                wanted = np.zeros_like(unpacked)
                wanted[: len(part), : part.shape[1]] = part
                assert np.array_equal(unpacked, wanted)
        found = lists[b, h, block]
        assert counts[b, h, block].tolist() == [len(full), len(partial)]
        assert found[: len(full)].tolist() == full
        assert found[tiles - len(partial) :].tolist() == partial[::-1]


def blockwise(rows: int, columns: int, generator: torch.Generator) -> torch.Tensor:
    """True, False or random, tile by tile."""
    kinds = torch.randint(0, 3, (-(-rows // BLOCK), -(-columns // TILE)), generator=generator)
    kinds = kinds.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(TILE, 1)[:, :columns]
    return (kinds == 1) | ((kinds == 2) & (torch.rand(rows, columns, generator=generator) < 0.3))


def view_of(mask: torch.Tensor, how: str) -> tuple[torch.Tensor, int]:
    """The mask in another layout, and the access that the layout allows."""
    batch, heads, rows, columns = mask.shape
    if how == "vectors":
        view = torch.zeros(batch, heads, rows, -(-columns // 16) * 16, dtype=torch.bool)[..., :columns]
    elif how == "odd":
        view = torch.zeros(batch, heads, rows, columns + 3, dtype=torch.bool)[..., 1 : columns + 1]
    elif how == "tight":
        view = torch.zeros(batch, heads, rows, columns, dtype=torch.bool)
    else:
        view = torch.zeros(batch, heads, columns, rows, dtype=torch.bool).mT
    view.copy_(mask)
    return view, {"vectors": 2, "odd": 1, "tight": 1, "transposed": 0}[how]


@pytest.mark.parametrize(
    ("shape", "how", "causal", "window"),
    (
        ((1, 1, 200, 1100), "vectors", "none", None),
        ((1, 1, 131, 700), "odd", "top_left", None),
        ((2, 1, 129, 515), "tight", "bottom_right", None),
        ((1, 2, 140, 300), "transposed", "none", (150, 40)),
        ((1, 1, 300, 640), "vectors", "top_left", (200, -1)),
    ),
)
def test_classify(shape: tuple[int, int, int, int], how: str, causal: str, window: tuple[int, int] | None) -> None:
    generator = torch.Generator().manual_seed(random.randrange(2**31))
    print(f"mask seed {generator.initial_seed()}")
    mask = torch.stack([blockwise(*shape[2:], generator) for _ in range(shape[0] * shape[1])]).view(shape)
    view, access = view_of(mask, how)
    check(view, shape[2], causal, window, access)


def test_classify_masks_over_keys() -> None:
    """One row for all queries: a block of one row, or with causality a row for each block."""
    keys = torch.ones(2, 1, 1, 1030, dtype=torch.bool)
    keys[0, 0, 0, :200] = False
    keys[1, 0, 0, 300:310] = False
    check(keys, 1, "none", None, 1)
    check(keys[..., :640].contiguous(), 260, "bottom_right", None, 2)


def test_classify_nothing() -> None:
    check(torch.zeros(1, 1, 130, 400, dtype=torch.bool), 130, "none", None, 2)
