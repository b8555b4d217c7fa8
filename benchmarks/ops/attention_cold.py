"""The first attention call of a new process, with a warm kernel cache and with an empty one: accel and upstream.

    python benchmarks/ops/attention_cold.py --out benchmarks/results/h200/attention.jsonl

Every sample is a process of its own. `time` starts where torch is imported and the tensors are on the GPU, so neither
torch's import (2 to 4 s) nor the CUDA context is in it, and ends with the result on the GPU: `import accel`, the plan,
the kernel from the cache or the compiler, the launch. `process` is the interpreter from its start to its end, all
included. Upstream is torch's scaled_dot_product_attention with its default backend; it has no kernel cache, so its row
is the same for both. The processes take turns.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from accel.source_hash import source_hash
from benchmarks.timing import Quantiles, Rows, clocks

ROOT = Path(__file__).resolve().parents[2]
#: case: (kernel, shape of q as (batch, heads, seqlen, head_dim), of k and v, causal)
CASES = {
    "first_call_b1_l4096_h32_8_d128_causal": ("sm90_fwd", (1, 32, 4096, 128), (1, 8, 4096, 128), True),
    "first_call_decode_b1_lk4096_h32_8_d128": ("any_decode", (1, 32, 1, 128), (1, 8, 4096, 128), False),
}
CACHES = ("warm_cache", "empty_cache")

_CHILD = """
import sys, time
import torch
provider, q, k, causal = sys.argv[1], *map(eval, sys.argv[2:])
q, k, v = (torch.randn(*s, device="cuda", dtype=torch.bfloat16) for s in (q, k, k))
torch.cuda.synchronize()
start = time.perf_counter()
if provider == "accel":
    import accel
    from accel.kernels.attention import attention
    with torch.no_grad():
        attention(q, k, v, causal=causal)
else:
    with torch.no_grad():
        torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
torch.cuda.synchronize()
print("milliseconds", (time.perf_counter() - start) * 1e3)
"""


def sample(provider: str, case: str, cache: Path) -> tuple[float, float]:
    """(first call, whole process) in milliseconds."""
    _, q, k, causal = CASES[case]
    environment = os.environ | {
        "ACCEL_CACHE_DIR": str(cache),
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
    }
    command = [sys.executable, "-c", _CHILD, provider, repr(q), repr(k), repr(causal)]
    start = time.perf_counter()
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    whole = (time.perf_counter() - start) * 1e3
    if done.returncode:
        raise RuntimeError(f"{provider} {case}: {done.stderr[-2000:]}")
    return float(done.stdout.split("milliseconds")[1]), whole


def measure(rows: Rows, case: str, cache: str, count: int) -> None:
    with tempfile.TemporaryDirectory(prefix="accel-cold-") as name:
        warm = Path(name) / "warm"
        if cache == "warm_cache":
            sample("accel", case, warm)
        found: dict[str, list[tuple[float, float]]] = {"accel": [], "upstream": []}
        for i in range(count):
            for provider, samples in found.items():
                samples.append(sample(provider, case, warm if cache == "warm_cache" else Path(name) / f"empty{i}"))
    run = rows.run_id()
    for provider, samples in found.items():
        for metric, values in zip(("time", "process"), zip(*samples, strict=True), strict=True):
            rows.add(f"{case}_{cache}", provider, "cold_start", Quantiles.of(values), run, metric=metric)
        first, whole = (sorted(values)[len(values) // 2] for values in zip(*samples, strict=True))
        print(f"{case}_{cache}: {provider:8} {first / 1e3:6.2f} s, whole process {whole / 1e3:6.2f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="result rows are replaced in this file")
    parser.add_argument("--case", action="append", choices=sorted(CASES), help="default: all")
    parser.add_argument("--warm", type=int, default=5, help="processes of each provider with a warm cache")
    parser.add_argument("--empty", type=int, default=2, help="with an empty one")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("a CUDA device is needed")
    for case in args.case or CASES:
        rows = Rows(
            "benchmarks/ops/attention_cold.py", source_hash("attention", CASES[case][0]), f"torch {torch.__version__}"
        )
        for cache, count in zip(CACHES, (args.warm, args.empty), strict=True):
            measure(rows, case, cache, count)
        if args.out:
            rows.write(args.out)
    print(clocks())


if __name__ == "__main__":
    main()
