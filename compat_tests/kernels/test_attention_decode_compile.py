"""The decode kernel compiled for every class of targets without a GPU, and what its machine code must hold."""

from __future__ import annotations

import pytest

from accel.kernels.attention import decode as host
from accel.kernels.attention.any_decode import build
from accel.kernels.attention.decode_config import AT_ONCE
from accel.kernels.runtime import arch as archs
from accel.kernels.runtime import compile as runtime
from accel.kernels.runtime import sass

#: (arch, dtype, head_dim, head_dim_v, packed rows, mask, lse): all head dims, row tiles, masks, dtypes, arch classes
CONFIGS = (
    ("sm_80", "bfloat16", 128, 128, 16, "none", False),
    ("sm_80", "float16", 64, 64, 16, "keys", False),
    ("sm_80", "bfloat16", 256, 256, 16, "rows", True),
    ("sm_90", "bfloat16", 128, 128, 16, "none", False),
    ("sm_90", "bfloat16", 128, 128, 16, "keys", False),
    ("sm_90", "bfloat16", 128, 128, 16, "rows", True),
    ("sm_90", "bfloat16", 128, 128, 32, "none", False),
    ("sm_90", "float16", 128, 128, 64, "rows", False),
    ("sm_90", "bfloat16", 80, 80, 16, "keys", False),
    ("sm_90", "bfloat16", 96, 96, 16, "none", True),
    ("sm_90", "bfloat16", 192, 128, 16, "none", False),
    ("sm_90", "bfloat16", 256, 256, 16, "none", False),
    ("sm_90", "bfloat16", 256, 256, 64, "keys", True),
    ("sm_100", "bfloat16", 128, 128, 16, "keys", False),
    ("sm_100", "bfloat16", 256, 256, 32, "none", False),
    ("sm_86", "bfloat16", 128, 128, 16, "none", False),
)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: "-".join(map(str, c)))
def test_machine_code(config: tuple[object, ...]) -> None:
    arch, *what = config
    c = host.decode_config(*what, arch)
    compiled = runtime.compile_only(runtime.Kernel("attention", "any_decode", c), archs.compile_target(arch))
    (code,) = sass.disassemble(compiled.cubin)
    assert code.spills == 0
    # Two products of a block: k.T, then v; each key tile of 8 and step of 16 is one instruction.
    products = (c.head_dim // 16) * (c.block // 8) + (c.block // 16) * (c.head_dim_v // 8)
    assert code.count("HMMA", "16816", "F32") == code.count("HMMA") == products
    # k and v go to shared memory 16 bytes at a time, past the registers and the L1.
    assert code.count("LDGSTS", "BYPASS", "128") == code.count("LDGSTS") > 0
    assert code.count("LDSM") > 0
    # Both rounds of adding up are one loop; two fences around its counter, by one thread.
    assert code.count("ATOMG") + code.count("ATOM") == 1
    assert code.count("MEMBAR") == 2
    # A batch of partial results, each with its maximum and sum, is one instruction each: nothing is read twice.
    assert code.count("LDG", "128") == code.count("LDG", "64") == AT_ONCE
    limits = archs.limits(arch)
    assert c.smem_bytes <= limits.smem_per_cta
    registers = -(-code.registers // 8) * 8
    assert registers * c.threads * c.ctas_per_sm <= 65536


def test_one_function_for_all_lengths() -> None:
    """Sizes and strides are symbols; those that must agree between tensors are the same symbol."""
    c = host.decode_config("bfloat16", 128, 128, 1, "keys", True, "sm_90")
    _, (q, k, v, mask, out, lse, scratch, *numbers) = build(c)
    assert len(numbers) == 5 and len(scratch.shape) == 1
    assert all(a is b for a, b in zip(k.shape[:3], v.shape[:3], strict=True))
    assert mask.shape[3] is k.shape[2] and lse.shape[2] is q.shape[2] is out.shape[1]
    assert k.shape[0] is q.shape[0] is out.shape[0] and out.shape[2] is q.shape[1]
    assert [t.shape[3] for t in (q, k, v, out)] == [128] * 4
