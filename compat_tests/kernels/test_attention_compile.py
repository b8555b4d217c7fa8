"""The attention forward and the building blocks compiled for sm_90a without a GPU, and what their code holds."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from accel.kernels.attention.config import FwdConfig
from accel.kernels.attention.plan import forward_config
from accel.kernels.blocks.gemm_config import GemmConfig
from accel.kernels.runtime import compile as runtime
from accel.kernels.runtime import sass

AHEAD = {"persistent": True, "own_out": True, "ahead": True, "early_rescale": False}
#: (dtype, head_dim, head_dim_v, kind, lse), what differs from the plan: every head dim and tile shape, every kind
CONFIGS = (
    (("bfloat16", 64, 64, "causal", False), {}),
    (("float16", 64, 64, "full", True), {}),
    (("bfloat16", 72, 72, "full", False), {}),
    (("bfloat16", 96, 96, "causal", True), {}),
    (("bfloat16", 128, 128, "causal", False), {}),
    (("bfloat16", 128, 128, "causal", False), AHEAD),
    (("float16", 128, 128, "window", True), {}),
    (("bfloat16", 192, 128, "causal", False), {}),
    (("bfloat16", 256, 256, "causal", False), {}),
    (("bfloat16", 128, 128, "mask", False), {}),
    (("bfloat16", 128, 128, "mask", False), AHEAD),
    (("float16", 64, 64, "mask", True), {}),
    (("bfloat16", 192, 128, "mask", False), {}),
    (("bfloat16", 256, 256, "mask", False), {}),
    (("bfloat16", 128, 128, "causal", True), {"varlen": True}),
    (("bfloat16", 64, 64, "full", False), {"varlen": True}),
    (("float16", 256, 256, "window", False), {"varlen": True}),
)


def machine_code(family: str, module: str, config: object) -> tuple[sass.Sass, str]:
    compiled = runtime.compile_only(runtime.Kernel(family, module, config), "sm_90a")
    codes = sass.disassemble(compiled.cubin)
    (code,) = (code for code in codes if "cutlass_kernel" in code.name)
    assert all(code.spills == 0 for code in codes)
    return code, compiled.ptx


@pytest.mark.parametrize(
    ("arguments", "changes"), CONFIGS, ids=lambda c: "-".join(map(str, c)) if isinstance(c, tuple) else None
)
def test_attention(arguments: tuple[str, int, int, str, bool], changes: dict[str, object]) -> None:
    c = replace(forward_config(*arguments), **changes)
    code, ptx = machine_code("attention", "sm90_fwd", c)
    assert code.spills == 0
    assert c.smem_bytes <= 227 * 1024
    # Whole registers of a CTA at launch; setmaxnreg moves them between the roles afterwards.
    assert code.registers * 128 * (c.warpgroups + 1) <= 65536
    assert code.count("USETMAXREG") == 2
    # q @ k.T over head_dim and P @ v over the keys, 16 at a time: in every loop, the first before them, the last behind
    # them, with the next tile's first one where it is issued ahead (with or without keys in this tile).
    loops = {"full": 1, "causal": 2, "window": 3, "mask": 2}[c.kind]
    ahead = 0 if not c.ahead else 1 if c.kind == "full" and not c.varlen else 2
    firsts, lasts = 1 + loops + ahead, loops + 1 + (1 if c.ahead else 0)
    assert code.count("HGMMA") == c.padded // 16 * firsts + c.tile_n // 16 * lasts
    shapes = {int(n): ptx.count(f"m64n{n}k16.f32") for n in re.findall(r"wgmma\.mma_async\S*m64n(\d+)k16\.f32", ptx)}
    wanted = {c.tile_n: c.padded // 16 * firsts}
    wanted[c.padded_v] = wanted.get(c.padded_v, 0) + c.tile_n // 16 * lasts
    assert shapes == wanted
    # Two waits a loop and one for each block of products around them: the products are not serialised.
    assert code.count("WARPGROUP", "DEPBAR") == 2 * loops + 2 + ahead
    exponentials = c.tile_n // 2 * (loops + 1) + 2 * loops
    assert code.count("MUFU", "EX2") == exponentials
    # One multiply-add an exponential.
    assert code.count("FFMA") >= c.tile_n // 2 * (loops + 1)
    assert code.count("UTMALDG") > 0 and code.count("UTMASTG") > 0
    assert code.count("STSM", "M88", "4") == c.padded_v // 16
    assert code.count("STG") == (2 if c.lse else 0)
    # Counts and lists; of a partial tile, the bits of two rows a thread, in the first step and in the loop.
    bits = code.count("LDG", "128" if c.tile_n == 128 else "64")
    if c.varlen:
        assert code.count("LDG") == 6  # a row of the table: by the producer, the consumers' first tile, the next ones
        assert "cp.async.bulk.tensor.5d" in ptx
    else:
        assert (code.count("LDG") > bits == 4) if c.kind == "mask" else code.count("LDG") == 0


@pytest.mark.parametrize("cluster", (1, 2))
def test_gemm(cluster: int) -> None:
    c = GemmConfig(cluster_m=cluster)
    code, _ = machine_code("blocks", "gemm_sm90", c)
    assert code.spills == 0 and c.smem_bytes <= 227 * 1024
    assert code.count("HGMMA") == 2 * c.tile_k // 16
    assert code.count("WARPGROUP", "DEPBAR") == 2
    assert code.count("UTMALDG", "MULTICAST") == (1 if cluster > 1 else 0)
    assert code.count("UTMALDG") == 2 and code.count("UTMASTG") == c.tile_n // 64
    assert code.count("STSM", "M88", "4") == c.tile_n // 16


def test_configurations_refuse_what_no_kernel_is_made_for() -> None:
    good = {"dtype": "bfloat16", "head_dim": 128, "head_dim_v": 128, "kind": "full", "lse": False}
    assert FwdConfig(**good).tile_m == 128
    for wrong, name in (
        ({"dtype": "float32"}, "dtype"),
        ({"kind": "diagonal"}, "kind"),
        ({"head_dim": 100}, "head_dim"),
        ({"head_dim_v": 264}, "head_dim_v"),
        ({"warpgroups": 4}, "warpgroups"),
        ({"tile_n": 120}, "tile_n"),
        ({"warpgroups": 1}, "turns"),
        ({"ahead": True, "own_out": False}, "own_out"),
        ({"tile_n": 192, "stages": 3}, "shared memory"),
        ({"kind": "mask", "tile_n": 80}, "got tiles of 128 x 80"),
        ({"kind": "mask", "warpgroups": 3, "stages": 1}, "got tiles of 192 x 128"),
    ):
        with pytest.raises(ValueError, match=name):
            FwdConfig(**{**good, **wrong})
    with pytest.raises(ValueError, match="cluster_m"):
        GemmConfig(cluster_m=3)
    with pytest.raises(ValueError, match="shared memory"):
        GemmConfig(stages=5)


def test_one_function_for_all_lengths() -> None:
    """Sizes and strides are symbols; those that must agree between tensors are the same symbol."""
    from accel.kernels.attention.sm90_fwd import build

    _, (q, k, v, out, lse, *numbers) = build(forward_config("bfloat16", 192, 128, "causal", True))
    assert len(numbers) == 6
    assert all(a is b for a, b in zip(k.shape[:3], v.shape[:3], strict=True))
    assert k.shape[0] is q.shape[0] is out.shape[0] is lse.shape[0]
    assert q.shape[1] is out.shape[1] is lse.shape[1] and q.shape[2] is out.shape[2] is lse.shape[2]
    assert [t.shape[3] for t in (q, k, v, out)] == [192, 192, 128, 128]
