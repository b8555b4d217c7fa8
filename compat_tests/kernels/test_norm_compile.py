"""The norm kernels compiled for every target without a GPU, and what their machine code must and must not hold."""

from __future__ import annotations

import importlib

import pytest

from accel.kernels.norm.facts import NormFacts
from accel.kernels.norm.plan import plan
from accel.kernels.runtime import arch as archs
from accel.kernels.runtime import compile as runtime
from accel.kernels.runtime import sass

#: (arch, hidden, dtype, weight dtype, form, activation, row levels): every form, gate, dtype pair and kind of row split
CONFIGS = (
    ("sm_80", 4096, "bfloat16", "bfloat16", "cast_then_weight", None, 1),
    ("sm_80", 128, "float16", "float16", "weight_in_fp32", "sigmoid", 2),
    ("sm_90", 8192, "bfloat16", "bfloat16", "cast_then_weight", None, 1),
    ("sm_90", 2048, "bfloat16", "float32", "cast_then_weight", None, 1),
    ("sm_90", 16384, "float32", "float32", "zero_centred", None, 1),
    ("sm_90", 14336, "bfloat16", "bfloat16", "zero_centred", None, 1),
    ("sm_90", 1000, "float16", "float32", "weight_in_fp32", None, 2),
    ("sm_90", 128, "bfloat16", "bfloat16", "cast_then_weight", "silu", 1),
    ("sm_90", 16384, "float32", "float32", "cast_then_weight", "silu", 1),
    ("sm_100", 256, "bfloat16", "bfloat16", "zero_centred", None, 2),
    ("sm_100", 5120, "bfloat16", "bfloat16", "weight_in_fp32", "silu", 1),
)


def machine_code(module: str, config: object, arch: str) -> dict[str, sass.Sass]:
    """The kernels of one compiled function by a word of their name."""
    compiled = runtime.compile_only(runtime.Kernel("norm", module, config), archs.compile_target(arch))
    found = sass.disassemble(compiled.cubin)
    return {("reduce" if "reduce_partials" in kernel.name else "main"): kernel for kernel in found}


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: "-".join(map(str, c)))
def test_machine_code(config: tuple[object, ...]) -> None:
    arch, hidden, dtype, weight_dtype, form, activation, levels = config
    facts = NormFacts(1, hidden, dtype, weight_dtype, form, activation, needs_grad=True, row_levels=levels)
    configs = plan(facts, arch).config
    forward, backward = configs.forward, configs.backward

    code = machine_code("any_fwd", forward, arch)["main"]
    wide = {"bfloat16": 1, "float16": 1, "float32": 1 if dtype == "float32" else 2}
    rows_read = 1 + (activation is not None)
    loads = forward.vectors_per_thread * (rows_read + wide[weight_dtype])
    assert code.spills == 0
    assert code.count("LDG") == code.count("LDG", "128") == loads
    assert code.count("STG") == code.count("STG", "128") == forward.vectors_per_thread * wide[forward.out_dtype]
    assert code.registers * forward.threads <= 65536

    kernels = machine_code("any_bwd", backward, arch)
    code = kernels["main"]
    assert code.spills == 0
    assert code.count("LDGSTS") == code.count("LDGSTS", "128") > 0
    loads = backward.vectors_per_thread * wide[weight_dtype] * (2 if backward.reload_weight else 1)
    assert code.count("LDG") == code.count("LDG", "128") == loads
    assert code.count("STG") == code.count("STG", "128") > 0
    assert code.count("ATOM") + code.count("ATOMG") + code.count("RED") == 0
    registers = -(-code.registers // 8) * 8
    assert registers * backward.threads * backward.ctas_per_sm <= 65536
    assert kernels["reduce"].spills == 0
    # The instruction that waits for the kernel before: exactly where the arch has it.
    assert all((kernel.count("ACQBULK") > 0) == (arch not in ("sm_80",)) for kernel in kernels.values())


def test_each_tensor_promises_its_own_alignment() -> None:
    """Rows are 16-byte aligned, whatever the widths: a float32 dy of a bfloat16 x has strides of 4 elements, not 8."""
    facts = NormFacts(1, 128, "bfloat16", "float32", "cast_then_weight", needs_grad=True)
    configs = plan(facts, "sm_90").config
    for module, config, expected in (
        ("any_fwd", configs.forward, [8, None, 4]),
        ("any_bwd", configs.backward, [8, None, 4, 8, None, None]),
    ):
        device = importlib.import_module(f"accel.kernels.norm.{module}")
        _, arguments = device.build(config)
        strides = [getattr(a, "stride", None) for a in arguments]
        found = [getattr(s[0], "divisibility", None) for s in strides if isinstance(s, tuple)]
        assert found == expected, module
