"""The recurrent kernel compiled for every class of targets without a GPU, and what its machine code must hold."""

from __future__ import annotations

import dataclasses

import pytest

from accel.kernels.gated_delta_rule import launch
from accel.kernels.gated_delta_rule.any_recurrent import build
from accel.kernels.gated_delta_rule.config import COLUMNS, WARP, RecurrentConfig
from accel.kernels.runtime import arch as archs
from accel.kernels.runtime import compile as runtime
from accel.kernels.runtime import sass

BASE = RecurrentConfig(
    128, "bfloat16", "bfloat16", "float32", "bfloat16", None, None, "float32", "float32", False, True, "plain", None,
    None, True, 1, True,
)  # fmt: skip
GATE = {"g_dtype": "bfloat16", "a_dtype": "float32", "bias_dtype": "float32", "beta": "sigmoid"}
CONFIGS = (
    ("sm_90", {}),
    ("sm_90", {"v_first": True, **GATE}),
    ("sm_90", {"head_dim": 64, "warps": 4, "index": "int32"}),
    ("sm_90", {"head_dim": 256, **GATE}),
    ("sm_90", {"head_dim": 256, "single": False, "dtype": "float32", "v_dtype": "float32", **GATE}),
    ("sm_90", {"head_dim": 256, "single": False, "packed": "int64", "v_first": True, **GATE}),
    ("sm_80", {"overlap": False, "head_dim": 256, "single": False, "v_first": True, **GATE}),
    ("sm_80", {"overlap": False, "dtype": "float16", "v_dtype": "float16"}),
    ("sm_100", {"single": False, "v_first": True, **GATE}),
    ("sm_100", {"head_dim": 256, "single": False, **GATE}),
    ("sm_120", {}),
)


@pytest.mark.parametrize(("arch", "changed"), CONFIGS, ids=str)
def test_machine_code(arch: str, changed: dict[str, object]) -> None:
    c = dataclasses.replace(BASE, **changed)
    compiled = runtime.compile_only(
        runtime.Kernel("gated_delta_rule", "any_recurrent", c), archs.compile_target(arch)
    )  # fmt: skip
    (code,) = sass.disassemble(compiled.cubin)
    assert code.spills == 0
    # The state moves 16 bytes a thread at a time, and each element of it is read once and written once.
    accesses = c.head_dim * COLUMNS * 4 // (WARP * 16)
    q_and_k = 2 * (c.rows * (4 if c.dtype == "float32" else 2) // 16) * (1 if c.single else 2)
    assert accesses <= code.count("LDG", "128") <= accesses + q_and_k + (0 if c.single or c.v_dtype != "float32" else 2)
    assert code.count("STG", "128") in (accesses, accesses + (c.v_dtype == "float32"))
    assert code.count("LDS") == code.count("STS") == code.count("BAR") == 0
    registers = -(-code.registers // 8) * 8
    in_flight = 65536 // (registers * WARP) * c.head_dim * COLUMNS * 4
    assert in_flight >= 48 * 1024, "bytes that an SM needs under way to saturate the memory"


def test_one_function_for_all_lengths() -> None:
    _, (q, k, v, g, beta, *_, o, _scale, _stream) = build(BASE)
    assert q.shape[:2] == k.shape[:2] == v.shape[:2] == o.shape[:2] == g.shape[:2] == beta.shape[:2]
    assert all(not isinstance(n, int) for n in (*q.shape[:3], *v.shape)) and q.shape[3] == k.shape[3] == 128


@pytest.mark.parametrize("target", ["sm_80", "sm_90a", "sm_100a"])
def test_builds_are_listed_without_compiling(target: str) -> None:
    names = [name for name, _ in launch.builds(target)]
    chunked = [name for name in names if "sm90_fwd" in name]
    assert len(names) == len(set(names)) and len(chunked) == (8 if target == "sm_90a" else 0)
    assert len([name for name in names if "any_recurrent" in name]) == 24 == len(names) - len(chunked)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"head_dim": 100}, "head_dim"),
        ({"dtype": "float64"}, "dtype"),
        ({"g_dtype": "int32"}, "g_dtype"),
        ({"beta": "tanh"}, "beta"),
        ({"warps": 3}, "warps"),
        ({"index": "int16"}, "index"),
        ({"index": "int32", "final": None}, "a pool is updated in place"),
        ({"packed": "int32"}, "packed sequences have any lengths"),
        ({"g_dtype": None, "a_dtype": "float32"}, "A_log needs g"),
    ],
)
def test_configurations_refuse_what_no_kernel_is_made_for(changed: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(BASE, **changed)
