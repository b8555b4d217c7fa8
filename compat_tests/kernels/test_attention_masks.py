"""Masks without a GPU: the classifying kernel run on the CPU, how its result is kept, and what is passed on."""

from __future__ import annotations

import gc
import random
import re
import threading
from collections.abc import Iterator
from functools import cache

import numpy as np
import pytest
import torch

from accel.kernels.attention import launch, masks, plan
from accel.kernels.attention.launch import bounds
from accel.kernels.attention.mask_cases import MASKS, mask_of
from accel.kernels.attention.mask_config import BLOCK, CHUNK, TILE, ClassifyConfig
from accel.kernels.attention.reference import classified_ref, visible
from accel.kernels.runtime import compile as runtime
from accel.kernels.runtime import sass
from accel.kernels.runtime.emulate import pack_tensor
from accel.kernels.runtime.emulate_sm90 import HopperMachine, Memory

# --- The kernel ----------------------------------------------------------------------------------------------------


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
    batch, heads, _, seqlen_k = mask.shape
    blocks, tiles, chunks = -(-seqlen_q // BLOCK), -(-seqlen_k // TILE), -(-seqlen_k // CHUNK)
    counts = np.full((batch, heads, blocks, 2), -7, np.int32)
    lists = np.full((batch, heads, blocks, tiles), -7, np.int32)
    states = np.full((batch, heads, blocks, chunks), 0x77777777, np.int32)
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
    seen = seen if allowed is None else seen & allowed
    want_counts, want_lists, want_bits = (t.numpy() for t in classified_ref(seen))
    assert np.array_equal(counts, want_counts)
    for b, h, block in np.ndindex(counts.shape[:3]):
        found, wanted = lists[b, h, block], want_lists[b, h, block]
        assert np.array_equal(found[wanted >= 0], wanted[wanted >= 0])
        for tile in found[len(found) - counts[b, h, block, 1] :]:
            rows = bits.shape[4]
            assert np.array_equal(bits[b, h, block, tile].view(np.int32), want_bits[b, h, block, tile, :rows])


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


def test_classify_the_cases() -> None:
    """Every kind of mask of the attention cases, as the host hands it to the kernel."""
    for kind in MASKS:
        mask = mask_of(kind, 1, 2, 140, 260)
        mask = mask[:, :1] if kind == "expanded" else mask
        check(mask, 140 if mask.shape[2] > 1 else 1, "none", None, masks.access(mask))


@pytest.mark.parametrize("target", ("sm_80", "sm_90a", "sm_100a"))
def test_machine_code(target: str) -> None:
    cubin = runtime.compile_only(runtime.Kernel("attention", "any_classify", ClassifyConfig()), target).cubin
    codes = {code.name.split("_")[2]: code for code in sass.disassemble(cubin)}
    assert all(code.spills == 0 for code in codes.values())
    states = codes["states"]
    assert states.registers * 256 * 2 <= 65536  # two CTAs an SM keep 128 KB of the mask under way
    assert states.count("LDG", "128") == ClassifyConfig().rows
    assert states.count("LDG") == ClassifyConfig().rows * 6 + 16
    assert states.count("SHFL") == ClassifyConfig().rows // 2


def test_configurations() -> None:
    with pytest.raises(ValueError, match="warps must be 4, 8 or 16, got 3"):
        ClassifyConfig(3)


# --- What is kept --------------------------------------------------------------------------------------------------


class Device:
    """Stands in for a GPU: counts classifications and says which stream and capture are current."""

    def __init__(self) -> None:
        self.made: list[tuple[int, ...]] = []
        self.capture: int | None = 0
        self.stream = 11

    def classify(self, mask: torch.Tensor, batch: int, heads_q: int, seqlen_q: int, *numbers: int) -> masks.Lists:
        self.made.append((seqlen_q, *numbers))
        return tuple(torch.full((1,), len(self.made)) for _ in range(3))  # type: ignore[return-value]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    fake = Device()
    monkeypatch.setattr(masks, "_classified", fake.classify)
    monkeypatch.setattr(masks, "_place", lambda index: (fake.capture, fake.stream))
    monkeypatch.setattr(masks, "load", lambda device: None)
    masks.forget()
    yield fake
    masks.forget()


def lists_of(mask: torch.Tensor, *numbers: int, reuse: bool = True) -> int:
    """Which classification a call gets, counted from 1."""
    return int(masks.tile_lists(mask, 2, 4, 40, *numbers, reuse=reuse)[0])


def fresh() -> torch.Tensor:
    return torch.ones(2, 1, 40, 60, dtype=torch.bool)


def test_the_same_mask_is_classified_once(device: Device) -> None:
    mask = fresh()
    assert [lists_of(mask) for _ in range(3)] == [1, 1, 1]
    assert lists_of(mask[:, :, :, :60]) == 1  # another view of the same
    assert lists_of(mask[:, :, :, :59]) == 2
    assert lists_of(mask.expand(2, 4, 40, 60)) == 3
    assert lists_of(mask) == 1


def test_writing_to_the_mask_or_any_view_of_it_is_seen(device: Device) -> None:
    mask = fresh()
    assert lists_of(mask) == 1
    mask[0, 0, 3, 5] = False
    assert lists_of(mask) == 2
    mask.view(-1)[7:9].logical_not_()
    assert lists_of(mask) == 3 and lists_of(mask) == 3
    mask.data = fresh()
    assert lists_of(mask) == 4


def test_another_mask_in_the_same_memory_is_another(device: Device) -> None:
    memory = np.ones(2 * 40 * 60, np.bool_)
    first = torch.from_numpy(memory).view(2, 1, 40, 60)
    address = first.data_ptr()
    assert lists_of(first) == 1
    second = torch.from_numpy(memory).view(2, 1, 40, 60)
    assert second.data_ptr() == address and second._version == first._version
    assert lists_of(second) == 2
    del first, second
    gc.collect()
    third = torch.from_numpy(memory).view(2, 1, 40, 60)
    assert third.data_ptr() == address and lists_of(third) == 3


def test_causality_shape_and_stream_are_told_apart(device: Device) -> None:
    mask = fresh()
    assert lists_of(mask) == 1 and lists_of(mask, 20, masks.FAR, 0) == 2 and lists_of(mask, 0, masks.FAR, 0) == 3
    assert int(masks.tile_lists(mask, 2, 8, 40)[0]) == 4
    device.stream = 12
    assert lists_of(mask) == 5
    device.stream = 11
    assert lists_of(mask) == 1 and lists_of(mask, 20, masks.FAR, 0) == 2


def test_nothing_crosses_a_capture(device: Device) -> None:
    mask = fresh()
    assert lists_of(mask) == 1
    device.capture = 77
    assert [lists_of(mask) for _ in range(2)] == [2, 2]
    device.capture = 78
    assert [lists_of(mask) for _ in range(2)] == [3, 3]
    assert {entry.capture for entry in masks._entries.values()} == {0, 78}
    device.capture = None  # a capture that cannot be named
    assert [lists_of(mask) for _ in range(2)] == [4, 5]
    device.capture = 0
    assert lists_of(mask) == 1


def test_masks_without_a_version_and_compiled_calls_are_classified_every_time(device: Device) -> None:
    with torch.inference_mode():
        mask = fresh()
        assert [lists_of(mask) for _ in range(2)] == [1, 2]
    mask = fresh()
    assert [lists_of(mask, reuse=False) for _ in range(2)] == [3, 4]
    assert not masks._entries


def test_what_is_kept_dies_with_the_mask_and_is_bounded(device: Device) -> None:
    held = [fresh() for _ in range(masks.KEPT + 3)]
    for mask in held:
        lists_of(mask)
    assert len(masks._entries) == masks.KEPT
    made = len(device.made)
    assert lists_of(held[-1]) == made and lists_of(held[0]) == made + 1
    del mask
    held.clear()
    gc.collect()
    assert not masks._entries
    view = fresh()[:, :, 1:]
    lists_of(view[:, :, :-1])  # the storage lives on in `view`
    gc.collect()
    assert len(masks._entries) == 1


def test_threads_share_one_classification(device: Device) -> None:
    mask, found = fresh(), []
    threads = [threading.Thread(target=lambda: found.append(lists_of(mask))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [1] * 8


# --- What is handed to the kernels ---------------------------------------------------------------------------------


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[object, ...]]]:
    """The classifying kernel replaced by one that notes its arguments."""
    made: list[tuple[object, ...]] = []
    monkeypatch.setattr(masks, "load", lambda device: lambda *arguments: made.append(arguments))
    yield made


def test_masks_lose_what_only_repeats(launched: list[tuple[object, ...]]) -> None:
    far = masks.FAR
    for shape, expanded, numbers, kept, blocks, bit_rows in (
        ((2, 1, 300, 700), (2, 4, 300, 700), (0, far, far), (2, 1, 300, 700), 3, 128),
        ((1, 1, 300, 700), (2, 4, 300, 700), (0, far, far), (1, 1, 300, 700), 3, 128),
        ((2, 1, 1, 700), (2, 4, 300, 700), (0, far, far), (2, 1, 1, 700), 1, 1),
        ((2, 1, 1, 700), (2, 1, 1, 700), (400, far, 0), (2, 1, 1, 700), 3, 128),
        ((1, 4, 1, 700), (1, 4, 1, 700), (0, far, far), (1, 4, 1, 700), 1, 1),
    ):
        mask = torch.ones(shape, dtype=torch.bool).expand(expanded)
        counts, lists, bits = masks.tile_lists(mask, 2, 4, 300, *numbers, reuse=False)
        assert counts.shape == (2, 4, 3, 2) and lists.shape == (2, 4, 3, 6) and bits.shape == (2, 4, 3, 6, 128, 4)
        given, states, _, _, written, access, queries, *found = launched.pop()
        assert given.shape == kept and given.dtype == torch.uint8 and tuple(found) == numbers
        assert states.shape == (*kept[:2], blocks, 2) and written.shape == (*kept[:2], blocks, 6, bit_rows, 4)
        assert queries == (1 if blocks == 1 else 300) and access == (1 if kept[2] > 1 or max(kept[:2]) > 1 else 2)


def test_access() -> None:
    aligned = torch.ones(2, 1, 8, 64, dtype=torch.bool)
    assert masks.access(aligned) == 2 and masks.access(aligned[..., 16:]) == 2 and masks.access(aligned[:, :, 1:]) == 2
    assert masks.access(aligned[..., 1:]) == 1 and masks.access(torch.ones(1, 1, 8, 63, dtype=torch.bool)) == 1
    assert masks.access(aligned.mT) == 0 and masks.access(aligned[..., ::2]) == 0
    assert masks.access(torch.ones(1, 1, 8, 1, dtype=torch.bool).expand(1, 1, 8, 64)) == 0


def test_the_mask_of_a_call_reaches_the_kernel(
    launched: list[tuple[object, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[object, ...]] = []
    monkeypatch.setattr(launch, "_load", lambda config, device, index: (lambda *arguments: made.append(arguments), 132))
    monkeypatch.setattr(masks, "_place", lambda index: (0, 0))
    q, k = (torch.randn(2, n, 4, 64, dtype=torch.bfloat16).transpose(1, 2) for n in (40, 100))
    mask = torch.ones(2, 1, 40, 100, dtype=torch.bool)
    facts = launch.facts_of(q, k, k, "none", None, True, False, mask)
    config = plan(facts, "sm_90").config  # type: ignore[union-attr]
    assert config.kind == "mask"
    for _ in range(2):
        out, lse = launch.run(config, q, k, k, mask=mask)
    assert len(launched) == 1 and launched[0][7:] == (0, masks.FAR, masks.FAR)
    *tensors, scale, ctas = made[-1]
    assert tensors[3] is out and tensors[4] is lse and scale == 64**-0.5 and ctas == 132
    assert [t.shape for t in tensors[5:]] == [(2, 4, 1, 2), (2, 4, 1, 1), (2, 4, 1, 1, 128, 4)]
    launch.run(config, q, k, k, mask=mask, causal="bottom_right", window=(7, -1), seqlen_dim=1)
    assert len(launched) == 2 and launched[1][7:] == (60, 7, 0)
    with pytest.raises(ValueError, match="the mask is on meta, q on cpu"):
        launch.run(config, q, k, k, mask=mask.to("meta"))
