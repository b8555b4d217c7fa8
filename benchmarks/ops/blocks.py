"""The GEMM of the building blocks beside torch.matmul, 8192 x 8192 x 8192 in bf16.

python benchmarks/ops/blocks.py --out benchmarks/results/h200/blocks.jsonl
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from accel.kernels.blocks.gemm_config import GemmConfig
from accel.kernels.runtime.compile import Kernel, function, source_digest
from accel.kernels.runtime.launch import sm_count
from benchmarks.timing import Rows, clocks, device_times

SIZES = {"gemm_8192": (8192, 8192, 8192), "gemm_4096": (4096, 4096, 4096)}
CONFIGS = {
    "accel": GemmConfig(),
    "accel_no_cluster": GemmConfig(cluster_m=1),
    "accel_group_16": GemmConfig(group=16),
    "accel_group_4": GemmConfig(group=4),
}


def measure(rows: Rows, case: str, rounds: int) -> None:
    m, n, k = SIZES[case]
    a, b = (torch.randn(size, k, device="cuda", dtype=torch.bfloat16) for size in (m, n))
    c = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
    sms = sm_count(torch.cuda.current_device())
    providers: dict[str, Callable[[int], Any]] = {"upstream": lambda i: torch.matmul(a, b.T, out=c)}
    for name, config in CONFIGS.items():
        providers[name] = partial(_gemm, function(Kernel("blocks", "gemm_sm90", config), "sm_90a"), a, b, c, sms)
    times = device_times(providers, 1, batch=5, rounds=rounds)
    run = rows.run_id()
    for name, q in times.items():
        rows.add(case, name, "fwd", q, run)
        print(
            f"{case:10} {name:18} {q.p50:8.4f} ms  {2 * m * n * k / q.p50 / 1e9:7.1f} TFLOP/s"
            f"  {times['upstream'].p50 / q.p50:5.2f}x",
            flush=True,
        )


def _gemm(launch: Callable[..., Any], a: Any, b: Any, c: Any, sms: int, i: int) -> None:
    launch(a, b, c, sms)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="result rows are replaced in this file")
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("a CUDA device is needed")
    rows = Rows("benchmarks/ops/blocks.py", source_digest("blocks", "gemm_sm90")[:16], f"torch {torch.__version__}")
    print(f"{rows.gpu}, torch {torch.__version__}, {clocks()}", flush=True)
    for case in SIZES:
        measure(rows, case, args.rounds)
    print(clocks())
    if args.out:
        rows.write(args.out)


if __name__ == "__main__":
    main()
