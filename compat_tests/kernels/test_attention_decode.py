"""Decode without a GPU: configurations, splits, layouts in shared memory, and the compiled kernels run on the CPU."""

from __future__ import annotations

import dataclasses
import math
import random
import re
from typing import Any

import numpy as np
import pytest
import torch

from accel.kernels.attention import AttentionFacts, plan
from accel.kernels.attention import decode as host
from accel.kernels.attention import decode_plan as planned
from accel.kernels.attention.decode_cases import DECODE_CASES, MASKS, DecodeCase, mask_of
from accel.kernels.attention.decode_config import COUNTERS, HEAD_DIMS, ROWS, DecodeConfig, swizzled
from accel.kernels.runtime import arch as archs
from accel.kernels.runtime import compile as runtime
from accel.kernels.runtime import emulate
from accel.outcome import Declined

LOG2_E = math.log2(math.e)


# --- Configurations and splits -------------------------------------------------------------------------------------


def test_configurations_refuse_what_no_kernel_is_made_for() -> None:
    good = ("bfloat16", 128, 128, 16, "none", False, 32, 3)
    assert DecodeConfig(*good).groups == 4
    for position, wrong, name in (
        (0, "float32", "dtype"),
        (1, 72, "head dims"),
        (3, 128, "rows"),
        (4, "float", "mask"),
        (6, 64, "block"),
        (7, 1, "slots"),
    ):
        values = list(good)
        values[position] = wrong
        with pytest.raises(ValueError, match=name):
            DecodeConfig(*values)
    with pytest.raises(ValueError, match="too small to exchange"):
        DecodeConfig("bfloat16", 256, 256, 64, "none", False, 16, 2)


@pytest.mark.parametrize("arch", archs.known_archs())
def test_plans_fit_the_arch(arch: str) -> None:
    limits = archs.limits(arch)
    missing = []
    for head_dim, head_dim_v in HEAD_DIMS:
        for rows in (1, *ROWS):
            for mask in ("none", "keys", "rows"):
                config = planned.decode_config("bfloat16", head_dim, head_dim_v, rows, mask, True, arch)
                if config is None:
                    missing.append((head_dim, rows))
                    continue
                assert config.rows >= rows and config.slots >= 3
                together = config.ctas_per_sm * (config.smem_bytes + limits.smem_reserved)
                assert config.smem_bytes <= limits.smem_per_cta and together <= limits.smem_per_sm
                assert config.ctas_per_sm * config.threads <= limits.threads_per_sm
    # 64 rows of q, 32 KB, and the exchange of their outputs do not fit into 99 KB.
    assert set(missing) <= {(256, 64)} and (not missing or limits.smem_per_cta < 100 * archs.KIB)


def test_no_kernel_for_other_calls() -> None:
    for arguments in (
        ("float32", 128, 128, 1, "none", False, "sm_90"),
        ("bfloat16", 72, 72, 1, "none", False, "sm_90"),
        ("bfloat16", 128, 128, 65, "none", False, "sm_90"),
        ("bfloat16", 128, 128, 0, "none", False, "sm_90"),
        ("bfloat16", 128, 128, 1, "none", False, "sm_75"),
    ):
        assert planned.decode_config(*arguments) is None


FACTS = AttentionFacts(
    "bfloat16", 8, 32, 8, 1, 4096, 128, 128, "none", "none", "none", "aligned", "aligned", "aligned", needs_grad=False
)  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "arch", "reason"),
    [
        ({"window": (3, 0)}, "sm_90", r"window=\(3, 0\): the decode kernel has causality and masks only"),
        ({"varlen": True}, "sm_80", "packed sequences: the decode kernel has none"),
        (
            {"head_dim": 72, "head_dim_v": 72},
            "sm_90",
            "head_dim=72: the decode kernel has 64, 80, 96, 128, 256, 192/128",
        ),
        ({"heads_q": 128, "heads_kv": 1}, "sm_90", "seqlen_q=1 of 128 q heads a kv head are 128 rows > 64"),
        ({"seqlen_q": 16, "heads_kv": 4}, "sm_90", "seqlen_q=16 of 8 q heads a kv head are 128 rows > 64"),
        ({"k_layout": "rows"}, "sm_90", "the rows of k do not all start at multiples of 16 bytes"),
        ({"seqlen_k": 2**30}, "sm_90", "seqlen_k=1073741824 >= 1073741824"),
        ({"head_dim": 256, "head_dim_v": 256, "seqlen_q": 16}, "sm_86", "head_dim=256 with 64 rows of q .* sm_86"),
        ({"mask": "float b11k"}, "sm_90", "an additive mask: only boolean ones"),
        ({"needs_grad": True}, "sm_90", "a gradient is needed"),
        ({}, "sm_75", "no attention kernel for sm_75 yet"),
        ({}, "cpu", "upstream's own code serves a CPU"),
    ],
)
def test_declined_with_the_fact_and_the_limit(changes: dict[str, Any], arch: str, reason: str) -> None:
    decision = plan(dataclasses.replace(FACTS, **changes), arch)
    assert isinstance(decision, Declined) and re.match(reason, decision.reason), decision


@pytest.mark.parametrize("arch", archs.known_archs())
@pytest.mark.parametrize(
    ("mask", "kind"), [("none", "none"), ("bool b11k", "keys"), ("bool 11qk", "rows"), ("bool bhqk", "rows")]
)
def test_up_to_16_positions_are_served_on_every_arch(arch: str, mask: str, kind: str) -> None:
    for seqlen_q in (1, 16):
        choice = plan(dataclasses.replace(FACTS, mask=mask, seqlen_q=seqlen_q), arch)
        assert (choice.family, choice.kernel, choice.config.mask) == ("attention", "any_decode", kind)
        assert choice.config.rows == 16 * (1 if seqlen_q == 1 else 4)


def splits_of(pairs: int, seqlen_k: int, rows: int = 4, head_dim: int = 128, sms: int = 132) -> tuple[int, int, int]:
    """(splits, bundle, keys of a stretch) of a call on a GPU of so many SMs."""
    c = planned.decode_config("bfloat16", head_dim, head_dim, rows, "none", False, "sm_90")
    assert c is not None
    partial = rows * head_dim * 4
    slots, stretches = sms * c.ctas_per_sm, -(-seqlen_k // c.stretch)
    splits = planned.splits_for(pairs, stretches, slots, c.ctas_per_sm, c.stretch_bytes, partial, c.threads)
    return splits, planned.bundle_for(pairs, splits, partial, c.threads), c.stretch


def test_splits_fill_the_gpu_and_depend_on_shapes_alone() -> None:
    assert splits_of(64, 4096)[0] == 4
    assert splits_of(COUNTERS + 1, 4096)[0] == 1
    assert splits_of(8, 128)[0] == splits_of(8, 0)[0] == 1
    for pairs in (1, 2, 3, 8, 24, 64, 100, 263, 264, 265, 300, 512, 1024):
        for seqlen_k in (1, 60, 500, 2000, 9000, 33000, 1_000_000):
            splits, bundle, stretch = splits_of(pairs, seqlen_k)
            stretches = -(-seqlen_k // stretch)
            assert 1 <= splits <= max(1, stretches // 2) and pairs * splits <= max(pairs, 4 * 264)
            assert 1 <= bundle <= splits
            # Where there is much to read, three quarters of the CTAs that fit have a full share, in all waves.
            if pairs * seqlen_k >= 1_000_000 and stretches > 8:
                room = -(-stretches // splits) * -(-pairs * splits // 264) * 264
                assert pairs * stretches >= 0.75 * room or pairs > 132, (pairs, seqlen_k, splits)


def test_few_pairs_get_no_more_splits_than_reading_needs() -> None:
    """Adding a split up takes longer than the time it saves reading, unless the rows are long."""
    assert splits_of(1, 500)[0] == 1
    assert [splits_of(1, n, rows=8)[0] for n in (2000, 9000, 33000)] == [8, 24, 129]
    assert [splits_of(2, n, rows=8, head_dim=256)[0] for n in (500, 2000, 9000, 33000)] == [4, 16, 29, 129]


def test_bundles_of_partial_results() -> None:
    """One where a CTA adds all splits up at once; two rounds of about a square root each where that takes longer."""
    eight_rows, threads = 8 * 128 * 4, 128
    for splits, bundle in ((1, 1), (2, 2), (16, 16), (32, 32), (129, 12), (264, 17)):
        assert planned.bundle_for(1, splits, eight_rows, threads) == bundle
    for pairs in (1, 3, 100, 512, 1024):
        for splits in (1, 2, 15, 16, 17, 33, 100, 1000):
            for partial_bytes in (256, eight_rows, 64 * 256 * 4):
                bundle = planned.bundle_for(pairs, splits, partial_bytes, threads)
                bundles = -(-splits // bundle)
                assert 1 <= bundle <= splits and pairs * (bundles + (bundles > 1)) <= COUNTERS
                assert host.partials_of(splits, bundle) == (0 if splits == 1 else splits + bundles * (bundles > 1))
    with pytest.raises(ValueError, match="splits=2 of 1025"):
        planned.bundle_for(COUNTERS + 1, 2, 256, threads)


def test_masks_lose_the_dimensions_that_only_repeat() -> None:
    for shape, expanded, kind, kept in (
        ((2, 1, 1, 9), (2, 1, 1, 9), "keys", (2, 1, 1, 9)),
        ((2, 1, 1, 9), (2, 4, 3, 9), "keys", (2, 1, 1, 9)),
        ((1, 1, 3, 9), (2, 4, 3, 9), "rows", (2, 1, 3, 9)),
        ((1, 4, 1, 9), (2, 4, 3, 9), "rows", (2, 4, 1, 9)),
        ((2, 4, 3, 9), (2, 4, 3, 9), "rows", (2, 4, 3, 9)),
    ):
        found, view = host.flattened(torch.ones(shape, dtype=torch.bool).expand(expanded))
        assert (found, tuple(view.shape), view.dtype) == (kind, kept, torch.uint8)


# --- Layouts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head_dim", sorted({d for pair in HEAD_DIMS for d in pair}))
def test_tiles_in_shared_memory(head_dim: int) -> None:
    """Every chunk has a place of its own; the 8 rows that an 8x8 matrix is read from lie in different banks."""
    chunks = head_dim // 8
    places = [[swizzled(row, chunk, chunks) for chunk in range(chunks)] for row in range(64)]
    assert sorted(place for row in places for place in row) == list(range(64 * chunks))
    for first in range(0, 64, 8):
        for chunk in range(chunks):
            assert len({places[row][chunk] % 8 for row in range(first, first + 8)}) == 8


# --- The compiled kernels, on the CPU ------------------------------------------------------------------------------


def run_on_cpu(
    config: DecodeConfig,
    ptx: str,
    case: DecodeCase,
    inputs: dict[str, Any],
    splits: int,
    bundle: int,
    late: bool,
    seed: int,
) -> tuple[dict[str, torch.Tensor], emulate.Machine]:
    """What the kernel writes, its outputs and scratch filled with NaN before."""
    memory = emulate.Memory()

    def place(t: torch.Tensor) -> int:
        raw = np.frombuffer(bytes(t.untyped_storage()), np.uint8)
        return memory.place(raw) + t.storage_offset() * t.element_size()

    def tensor(t: torch.Tensor, dims: int) -> bytes:
        return emulate.pack_tensor(place(t), t.shape[:dims], t.stride()[:dims])

    q, k, v = (inputs[name] for name in ("q", "k", "v"))
    batch, heads_q, seqlen_q, head_dim = q.shape
    heads_kv, seqlen_k, head_dim_v = k.shape[1], k.shape[2], v.shape[3]
    parameters = [tensor(q, 3), tensor(k, 3), tensor(v, 3)]
    if "mask" in inputs:
        parameters.append(tensor(host.flattened(inputs["mask"])[1], 4))
    out = np.full((batch, seqlen_q, heads_q, head_dim_v), 0xFFFF, np.uint16)
    parameters.append(emulate.pack_tensor(memory.place(out), out.shape[:3], [n // 2 for n in out.strides[:3]]))
    lse = np.full((batch, heads_q, seqlen_q), np.nan, np.float32)
    parameters.append(emulate.pack_tensor(memory.place(lse), lse.shape, [n // 4 for n in lse.strides[:2]]))
    partial = batch * heads_q * seqlen_q * host.partials_of(splits, bundle) * (head_dim_v + 4)
    scratch = np.full(COUNTERS + partial, np.nan, np.float32)
    scratch[:COUNTERS] = 0
    parameters.append(emulate.pack_tensor(memory.place(scratch), scratch.shape, ()))
    offset = {"none": seqlen_k, "top_left": 0, "bottom_right": seqlen_k - seqlen_q}[case.causal]
    parameters += [
        np.int32(splits).tobytes(),
        np.int32(bundle).tobytes(),
        np.float32(head_dim**-0.5 * LOG2_E).tobytes(),
        np.int32(offset).tobytes(),
    ]
    machine = emulate.Machine(ptx, config.smem_bytes, memory, parameters, late)
    order = list(range(batch * heads_kv * splits))
    random.Random(seed).shuffle(order)
    machine.run(len(order), seed, order)
    assert not scratch[:COUNTERS].any(), "a counter was not reset"
    values = torch.from_numpy(out.astype(np.int32).astype(np.int16)).view(q.dtype).transpose(1, 2)
    return {"out": values, "lse": torch.from_numpy(lse)}, machine


#: A kernel each, then the cases it runs: (case, splits).
EMULATED = (
    (
        ("sm_90", 128, 128, "none"),
        (DecodeCase(1, (4, 2), (1, 171), 128), 1),
        (DecodeCase(1, (4, 1), (4, 557), 128, causal="bottom_right", layout="static"), 3),
        (DecodeCase(1, (2, 1), (3, 1), 128, causal="bottom_right", layout="packed"), 2),
        (DecodeCase(1, (2, 2), (5, 5), 128, causal="top_left"), 1),
    ),
    (
        ("sm_90", 64, 64, "keys"),
        (DecodeCase(2, (4, 1), (1, 900), 64, mask="holes", layout="transposed"), 2),
        (DecodeCase(2, (2, 1), (1, 300), 64, mask="nothing"), 1),
        (DecodeCase(2, (2, 1), (1, 700), 64, mask="left"), 2),
    ),
    (
        ("sm_80", 128, 128, "rows"),
        (DecodeCase(1, (4, 1), (4, 350), 128, mask="window"), 2),
        (DecodeCase(1, (4, 2), (3, 130), 128, mask="full_rank", causal="bottom_right"), 1),
        (DecodeCase(1, (4, 1), (2, 100), 128, mask="per_head"), 1),
    ),
    (("sm_90", 80, 80, "none"), (DecodeCase(1, (20, 1), (2, 300), 80, causal="bottom_right"), 2)),
    (("sm_90", 96, 96, "rows"), (DecodeCase(2, (6, 2), (5, 400), 96, mask="full_rank", layout="packed"), 2)),
    (("sm_90", 192, 128, "keys"), (DecodeCase(1, (2, 2), (1, 150), 192, 128, mask="random"), 2)),
    (("sm_90", 256, 256, "rows"), (DecodeCase(1, (8, 1), (8, 180), 256, mask="per_q"), 1)),
)


@pytest.mark.parametrize("kernel", EMULATED, ids=lambda kernel: "-".join(map(str, kernel[0])))
def test_emulated(kernel: tuple[Any, ...]) -> None:
    """Index arithmetic, masks, barriers, races of copies, bounds of every access: the machine's PTX, on the CPU."""
    (arch, head_dim, head_dim_v, mask), *cases = kernel
    first = cases[0][0]
    rows = max(case.heads[0] // case.heads[1] * case.seqlens[0] for case, _ in cases)
    config = planned.decode_config(first.dtype, head_dim, head_dim_v, rows, mask, True, arch)
    ptx = runtime.compile_only(runtime.Kernel("attention", "any_decode", config), archs.compile_target(arch)).ptx
    for number, (case, splits) in enumerate(cases):
        inputs = case.make("cpu", torch.Generator().manual_seed(number))
        hide(case, inputs)
        want = case.oracle(readable(inputs))
        for late in (True, False):
            got, machine = run_on_cpu(config, ptx, case, inputs, splits, splits, late, number)
            assert machine.bank_conflicts == 0
            right(case, got, want)


def right(case: DecodeCase, got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    infinite = torch.isinf(want["lse"])
    assert torch.equal(torch.isinf(got["lse"]), infinite), case.name
    assert not torch.isnan(got["out"]).any() and (got["out"][infinite] == 0).all(), case.name
    error = (got["out"].double() - want["out"]).norm() / want["out"].norm().clamp(min=1e-30)
    assert error < 4e-3, f"{case.name}: {error:.1e}"
    assert ((got["lse"].double() - want["lse"])[~infinite].abs() < 1e-5).all(), case.name


#: (case, splits, bundle): bundles with a tail of one and of several, of one split each, more than are read at once.
BUNDLED = (
    (
        ("sm_90", 64, 64, "none"),
        (DecodeCase(1, (2, 1), (1, 1100), 64), 15, 4),
        (DecodeCase(1, (2, 1), (1, 2200), 64), 17, 17),
        (DecodeCase(1, (4, 1), (4, 1300), 64, causal="bottom_right"), 33, 6),
        (DecodeCase(1, (1, 1), (1, 600), 64), 20, 1),
        (DecodeCase(1, (1, 1), (1, 300), 64), 2, 1),
    ),
    (
        ("sm_80", 128, 128, "keys"),
        (DecodeCase(2, (2, 1), (1, 1300), 128, mask="nothing"), 9, 3),
        (DecodeCase(1, (2, 2), (1, 1400), 128, mask="holes"), 11, 4),
    ),
)


@pytest.mark.parametrize("kernel", BUNDLED, ids=lambda kernel: "-".join(map(str, kernel[0])))
def test_emulated_bundles(kernel: tuple[Any, ...]) -> None:
    """Right, and the same bits whatever order the CTAs run in."""
    (arch, head_dim, head_dim_v, mask), *cases = kernel
    config = planned.decode_config("bfloat16", head_dim, head_dim_v, 16, mask, True, arch)
    ptx = runtime.compile_only(runtime.Kernel("attention", "any_decode", config), archs.compile_target(arch)).ptx
    for number, (case, splits, bundle) in enumerate(cases):
        inputs = case.make("cpu", torch.Generator().manual_seed(number))
        hide(case, inputs)
        first, _ = run_on_cpu(config, ptx, case, inputs, splits, bundle, True, number)
        right(case, first, case.oracle(readable(inputs)))
        again, _ = run_on_cpu(config, ptx, case, inputs, splits, bundle, False, number + 100)
        assert all(torch.equal(first[name], again[name]) for name in first), case.name


def test_large_scores_leave_one_key_exactly() -> None:
    """Scores of a million, where rounding scale times a maximum loses a sixteenth: every row is a row of v."""
    config = planned.decode_config("bfloat16", 64, 64, 16, "none", True, "sm_90")
    ptx = runtime.compile_only(runtime.Kernel("attention", "any_decode", config), archs.compile_target("sm_90")).ptx
    case = DecodeCase(1, (8, 1), (2, 700), 64, magnitude=1000.0)
    inputs = case.make("cpu", torch.Generator().manual_seed(0))
    got, _ = run_on_cpu(config, ptx, case, inputs, 3, 2, True, 0)
    want = case.oracle(inputs)
    assert torch.equal(got["out"], want["out"].bfloat16())
    assert ((got["lse"].double() - want["lse"]) / want["lse"]).abs().max() < 1e-6


def hide(case: DecodeCase, inputs: dict[str, Any]) -> None:
    """NaN in every key and value that no row of its kv head sees."""
    seen = case.visible(inputs)
    if seen is None:
        return
    batch, heads_q, seqlen_q, seqlen_k = *inputs["q"].shape[:3], case.seqlens[1]
    heads_kv = case.heads[1]
    dead = ~seen.expand(batch, heads_q, seqlen_q, seqlen_k).reshape(batch, heads_kv, -1, seqlen_k).any(2)
    for name in ("k", "v"):
        inputs[name][dead] = torch.nan


def readable(inputs: dict[str, Any]) -> dict[str, Any]:
    """For the formula, whose zero weights do not hide a NaN."""
    return {name: t if t.dtype is torch.bool else torch.nan_to_num(t) for name, t in inputs.items()}


# --- Cases ---------------------------------------------------------------------------------------------------------


def test_cases_visit_every_kernel_feature() -> None:
    assert len({case.name for case in DECODE_CASES}) == len(DECODE_CASES)
    configs = set()
    for case in DECODE_CASES:
        facts = case.facts
        mask = case.make("meta", None).get("mask")
        kind = "none" if mask is None else host.flattened(mask)[0]
        config = planned.decode_config(case.dtype, *case.dims, facts.group * facts.seqlen_q, kind, case.lse, "sm_90")
        assert config is not None, case.name
        configs.add(config)
    assert {(c.head_dim, c.head_dim_v) for c in configs} == set(HEAD_DIMS)
    assert {c.rows for c in configs} == set(ROWS) and {c.mask for c in configs} == {"none", "keys", "rows"}
    assert {c.dtype for c in configs} == {"bfloat16", "float16"}
    assert {case.mask for case in DECODE_CASES} == set(MASKS)
    bundled = [case for case in DECODE_CASES if case.splits is not None and bundles_of(case) > 1]
    assert {c.mask for c in bundled} >= {"none", "holes", "nothing", "per_q"} and {c.seqlens[0] for c in bundled} >= {
        1,
        4,
    }
    assert {c.head_dim for c in bundled} == {64, 128, 256}


def bundles_of(case: DecodeCase) -> int:
    rows, pairs = case.heads[0] // case.heads[1] * case.seqlens[0], case.batch * case.heads[1]
    return -(-case.splits // planned.bundle_for(pairs, case.splits, rows * case.dims[1] * 4, 128))


@pytest.mark.parametrize("kind", MASKS[1:])
def test_masks_have_the_shapes_that_models_pass(kind: str) -> None:
    mask = mask_of(kind, 3, 4, 2, 500)
    assert mask.dtype is torch.bool and mask.dim() == 4 and mask.shape[3] == 500
    assert all(n in (1, full) for n, full in zip(mask.shape, (3, 4, 2), strict=False))
    assert mask.any() and not mask.all()
