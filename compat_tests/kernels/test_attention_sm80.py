"""The sm80 forward without a GPU: what the plan chooses where, configurations, cases, the compiled code per arch."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from accel.kernels.attention import AttentionFacts, launch, plan
from accel.kernels.attention.cases import CASES, FWD_CASES, SM80_CASES
from accel.kernels.attention.sm80_config import KINDS, REGISTERS, Sm80Config, sm80_config
from accel.kernels.runtime import arch as archs
from accel.kernels.runtime import compile as runtime
from accel.kernels.runtime import sass
from accel.outcome import Choice, Declined

OTHERS = tuple(arch for arch in archs.known_archs() if arch != "sm_90")
FACTS = AttentionFacts(
    "bfloat16", 2, 8, 2, 300, 400, 128, 128, "none", "none", "none", "aligned", "aligned", "aligned", needs_grad=False
)  # fmt: skip


# --- The plan ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", OTHERS)
def test_every_other_arch_gets_it_for_long_queries(arch: str) -> None:
    chosen = plan(FACTS, arch)
    assert isinstance(chosen, Choice) and (chosen.family, chosen.kernel) == ("attention", "sm80_fwd")
    for changes in ({"seqlen_q": 17}, {"seqlen_k": 0}, {"seqlen_k": 100_000}, {"batch": 7}, {"heads_q": 2}):
        other = plan(dataclasses.replace(FACTS, **changes), arch)
        assert isinstance(other, Choice) and other.config is chosen.config
    for changes, kind in (
        ({"causal": "top_left"}, "causal"),
        ({"causal": "bottom_right"}, "causal"),
        ({"window": (10, -1), "causal": "top_left"}, "window"),
        ({"mask": "bool b1qk", "mask_layout": "rows", "causal": "top_left"}, "mask"),
    ):
        assert plan(dataclasses.replace(FACTS, **changes), arch).config.kind == kind  # type: ignore[union-attr]
    assert plan(dataclasses.replace(FACTS, seqlen_q=16), arch).kernel == "any_decode"  # type: ignore[union-attr]


def test_sm_90_keeps_its_own() -> None:
    assert plan(FACTS, "sm_90").kernel == "sm90_fwd"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("changes", "arch", "reason"),
    (
        ({"varlen": True}, "sm_80", "packed sequences: the sm80 kernel has none"),
        ({"k_layout": "rows"}, "sm_86", "the rows of k do not all start at multiples of 16 bytes"),
        ({"v_layout": "strided"}, "sm_80", "the last dimension of v is not contiguous"),
        ({"seqlen_k": 2**29}, "sm_100", f"seqlen_q=300, seqlen_k={2**29}: lengths must stay below 2**29"),
        ({"head_dim": 264, "head_dim_v": 264}, "sm_80", "head_dim=264 > 256"),
        ({"head_dim_v": 64}, "sm_80", "head_dim=128, head_dim_v=64: they may differ as 192 and 128 only"),
        ({"dtype": "float32"}, "sm_80", "dtype=float32: only bfloat16 and float16"),
        ({"needs_grad": True}, "sm_80", "a gradient is needed, and attention has no backward yet"),
        ({"mask": "float b11k", "mask_layout": "rows"}, "sm_80", "an additive mask: only boolean ones"),
        ({}, "sm_75", "no attention kernel for sm_75 yet: upstream's own code runs"),
    ),
)
def test_declines(changes: dict[str, Any], arch: str, reason: str) -> None:
    assert plan(dataclasses.replace(FACTS, **changes), arch) == Declined(reason)


# --- Configurations and cases --------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", archs.known_archs())
@pytest.mark.parametrize("kind", ("full", *KINDS))
def test_every_head_dim_has_a_configuration_that_fits(kind: str, arch: str) -> None:
    limits = archs.limits(arch)
    assert limits is not None
    for head_dim in range(8, 257, 8):
        for head_dim_v in {head_dim, 128 if head_dim == 192 else head_dim}:
            c = sm80_config("bfloat16", head_dim, head_dim_v, kind, True, arch)
            assert c is not None, (arch, head_dim)
            assert c.smem_bytes <= limits.smem_per_cta
            assert c.ctas_per_sm * (c.smem_bytes + limits.smem_reserved) <= limits.smem_per_sm
            assert c.ctas_per_sm * c.threads * 255 <= REGISTERS
            # Accumulators of both products and q where it is kept, besides some 40 for addresses and row states.
            held = c.row_tiles * (c.tile_n // 2 + c.padded_v // 2 + (c.padded // 4 if c.q_in_registers else 0))
            assert held + 40 <= 255


def test_an_arch_without_kernels_has_none() -> None:
    assert sm80_config("bfloat16", 128, 128, "causal", False, "sm_70") is None


def test_configurations_refuse_what_no_kernel_is_made_for() -> None:
    good: dict[str, Any] = {
        "dtype": "bfloat16", "head_dim": 128, "head_dim_v": 128, "kind": "causal", "lse": False,
    }  # fmt: skip
    assert Sm80Config(**good).tile_m == 128
    for wrong, name in (
        ({"dtype": "float32"}, "dtype"),
        ({"kind": "full"}, "kind"),
        ({"head_dim": 100}, "head_dim"),
        ({"head_dim_v": 264}, "head_dim_v"),
        ({"head_dim_v": 192}, "takes q's place"),
        ({"warps": 3}, "warps"),
        ({"row_tiles": 3}, "row_tiles"),
        ({"tile_n": 40}, "tile_n"),
        ({"slots": 1}, "slots"),
        ({"ctas_per_sm": 0}, "ctas_per_sm"),
        ({"kind": "mask", "tile_n": 48}, "128 x 128"),
        ({"kind": "mask", "warps": 8}, "128 x 128"),
    ):
        with pytest.raises(ValueError, match=name):
            Sm80Config(**{**good, **wrong})


def test_cases_run_it_on_sm_90_and_leave_other_archs_to_the_plan() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
    for case in SM80_CASES:
        chosen = case.choice("sm_90")
        assert isinstance(chosen, Choice) and chosen.kernel == "sm80_fwd" and "sm80_fwd" in case.kernels
        assert case.choice("sm_80") == Declined("the plan itself chooses sm80_fwd on sm_80")
    configs = {case.choice("sm_90").config for case in SM80_CASES}  # type: ignore[union-attr]
    assert {(c.head_dim, c.kind) for c in configs} >= {(d, k) for d in (64, 96, 128, 256) for k in KINDS}
    assert {(c.warps, c.tile_n) for c in configs} == {(4, 64), (4, 32), (8, 64), (8, 32)}
    for case in FWD_CASES:
        assert case.choice("sm_90").kernel == "sm90_fwd"  # type: ignore[union-attr]
        assert case.choice("sm_80").kernel == "sm80_fwd", case.name  # type: ignore[union-attr]


def test_cases_of_a_kernel_that_the_plan_does_not_have_are_errors() -> None:
    with pytest.raises(ValueError, match="no case for sm80_fwd"):
        dataclasses.replace(FWD_CASES[0], as_arch="sm_90").choice("sm_90")


@pytest.mark.parametrize(("target", "kernel"), (("sm_80", "sm80_fwd"), ("sm_100a", "sm80_fwd"), ("sm_90a", "sm90_fwd")))
def test_builds(target: str, kernel: str) -> None:
    names = [name for name, _ in launch.builds(target)]
    assert len(set(names)) == len(names)
    assert {name.split()[0] for name in names if "_fwd" in name} == {kernel}


# --- The compiled code ---------------------------------------------------------------------------------------------

#: (arch whose configuration, target, dtype, head_dim, head_dim_v, kind, lse)
CODE = (
    ("sm_80", "sm_80", "bfloat16", 64, 64, "causal", False),
    ("sm_80", "sm_80", "bfloat16", 128, 128, "causal", False),
    ("sm_80", "sm_80", "float16", 128, 128, "mask", True),
    ("sm_80", "sm_80", "bfloat16", 256, 256, "window", False),
    ("sm_86", "sm_86", "bfloat16", 128, 128, "causal", False),
    ("sm_80", "sm_90a", "bfloat16", 128, 128, "causal", True),
    ("sm_80", "sm_90a", "float16", 96, 96, "window", True),
    ("sm_90", "sm_90a", "bfloat16", 128, 128, "mask", False),
    ("sm_80", "sm_90a", "bfloat16", 256, 256, "causal", False),
    ("sm_100", "sm_100a", "bfloat16", 64, 64, "mask", False),
    ("sm_100", "sm_100a", "bfloat16", 128, 128, "window", True),
    ("sm_100", "sm_100a", "bfloat16", 192, 128, "causal", False),
    ("sm_100", "sm_100a", "float16", 256, 256, "causal", True),
)


@pytest.mark.parametrize("what", CODE, ids=lambda what: "-".join(map(str, what)))
def test_machine_code(what: tuple[Any, ...]) -> None:
    arch, target, *rest = what
    c = sm80_config(*rest, arch)
    assert c is not None
    (code,) = sass.disassemble(runtime.compile_only(runtime.Kernel("attention", "sm80_fwd", c), target).cubin)
    # At most the address of k or of v: for sm_80 the 255 registers do not hold it beside the accumulators.
    assert code.spills <= (2 if target == "sm_80" else 0)
    assert code.registers * c.threads * c.ctas_per_sm <= REGISTERS
    # One loop: q @ k.T over head_dim and P @ v over the keys, 16 at a time.
    products = c.row_tiles * (c.padded // 16 * (c.tile_n // 8) + c.tile_n // 16 * (c.padded_v // 8))
    assert code.count("HMMA", "16816", "F32") == code.count("HMMA") == products
    # A matrix of k or v is read once for all the queries of a warp; q for each of its 16 queries.
    reads = c.padded // 16 * (c.tile_n // 16 + c.row_tiles) + c.tile_n // 16 * (c.padded_v // 16)
    assert code.count("LDSM") == reads
    assert code.count("LDSM", "MT88") == c.tile_n // 16 * (c.padded_v // 16)
    # q, k and v go to shared memory 16 bytes at a time, past the registers and the L1.
    assert code.count("LDGSTS", "BYPASS", "128") == code.count("LDGSTS") > 0
    assert code.count("STG", "128") > 0 and code.count("STG") - code.count("STG", "128") == 2 * c.row_tiles * c.lse
    exponentials = c.row_tiles * (c.tile_n // 2 + 2)
    assert code.count("MUFU", "EX2") == exponentials


def test_one_function_for_all_lengths() -> None:
    """Sizes and strides are symbols; those that must agree between tensors are the same symbol."""
    from accel.kernels.attention.sm80_fwd import build

    c = sm80_config("bfloat16", 192, 128, "mask", True, "sm_80")
    assert c is not None
    _, (q, k, v, out, lse, counts, lists, bits, *numbers) = build(c)
    assert len(numbers) == 2
    assert all(a is b for a, b in zip(k.shape[:3], v.shape[:3], strict=True))
    assert k.shape[0] is q.shape[0] is out.shape[0] is lse.shape[0] is counts.shape[0] is lists.shape[0]
    assert q.shape[1] is out.shape[1] is lse.shape[1] is bits.shape[1]
    assert q.shape[2] is out.shape[2] is lse.shape[2] and lists.shape[3] is bits.shape[3]
    assert [t.shape[3] for t in (q, k, v, out)] == [192, 192, 128, 128]
