"""The sm80 forward on the GPU at hand, its configurations side by side, beside torch's flash backend.

    python benchmarks/ops/attention_sm80.py [--rounds 10] [--case NAME]...

Torch's flash backend is FlashAttention-2, written for the same class of instructions, and what an Ampere card runs. On
an H200 this is for choosing a configuration, not for a result: nothing is written. "as sm_80" and so on are what the
plan takes on that arch, compiled for this GPU.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from accel.kernels.attention import launch
from accel.kernels.attention.sm80_config import Sm80Config, sm80_config
from benchmarks.ops.attention import CASES, inputs, providers
from benchmarks.timing import device_times, rotations

DEFAULT = (
    "b4_l4096_h32_8_d128_causal", "b1_l4352_h24_24_d128_full", "b8_l2048_h16_16_d64_causal",
    "b2_l4096_h16_2_d256_causal", "b2_l4096_h32_32_d96_causal",
)  # fmt: skip


def candidates(head_dim: int, head_dim_v: int) -> dict[str, Sm80Config]:
    """What the plan takes on each class of archs, and neighbours of what it would take on an H200."""
    what = ("bfloat16", head_dim, head_dim_v, "causal", False)
    found = {f"as {arch}": sm80_config(*what, arch) for arch in ("sm_80", "sm_86", "sm_90", "sm_100")}
    made = {name: config for name, config in found.items() if config is not None}
    base = made["as sm_90"]
    for changes in (
        {"slots": 2}, {"slots": 3}, {"slots": 4}, {"tile_n": 32}, {"tile_n": 128}, {"warps": 8, "ctas_per_sm": 1},
        {"q_in_registers": not base.q_in_registers},
    ):  # fmt: skip
        config = replace(base, **changes)
        if config not in made.values() and config.smem_bytes * config.ctas_per_sm <= 220 * 1024:
            made[" ".join(f"{name}={value}" for name, value in changes.items())] = config
    return made


def measure(case: str, rounds: int) -> None:
    shape = CASES[case]
    turns = min(rotations(shape.bytes), 8)
    made = inputs(shape, turns)
    causal = "top_left" if shape.causal else "none"

    def run(config: Sm80Config, i: int) -> Any:
        return launch.forward(config, *made[i], causal=causal)

    calls: dict[str, Callable[[int], Any]] = {
        name: functools.partial(run, config) for name, config in candidates(shape.head_dim, shape.head_dim_v).items()
    }
    flash = providers(shape, made).get("torch_flash")
    if flash is not None:
        calls["torch_flash"] = flash
    for call in calls.values():
        call(0)
    with torch.no_grad():
        times = device_times(calls, turns, batch=max(2, min(turns, 4)), rounds=rounds)
    print(case)
    for name, q in times.items():
        print(f"  {name:24} {q.p50:7.4f} ms {shape.flops / q.p50 / 1e9:5.0f} TF", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--case", action="append", choices=sorted(CASES))
    arguments = parser.parse_args()
    for case in arguments.case or DEFAULT:
        measure(case, arguments.rounds)


if __name__ == "__main__":
    main()
