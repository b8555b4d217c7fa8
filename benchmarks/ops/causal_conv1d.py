"""The depthwise causal convolution: accel, transformers' torch fall-back, FLA's Triton kernels, and the memory floor.

    python benchmarks/ops/causal_conv1d.py --out benchmarks/results/h200/conv1d.jsonl

bf16, four taps, silu, no bias. `conv_b1_c8192_t8192` (pass fwd, device time) is (1, 8192, 8192) as models pass it, its
channels next to each other. `conv_update_b32_c8192` (pass decode) is one token of 32 sequences, the states moved on in
place: eager wall time of a call in a row of calls, and as `_graph` the replay of a CUDA graph, in device time. The
floor is x read and y written (and the states, twice) over the bandwidth of a large copy in the same run.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("FLA_DISABLE_BACKEND_DISPATCH", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from accel.kernels.causal_conv1d import causal_conv1d, causal_conv1d_update
from accel.source_hash import source_hash
from benchmarks.ops.gated_delta_rule import captured, eager_times
from benchmarks.timing import Quantiles, Rows, clocks, copy_bandwidth, device_times, rotations

WIDTH = 4
FORWARD = {"conv_b1_c8192_t8192": (1, 8192, 8192)}  #: batch, tokens, channels
UPDATE = {"conv_update_b32_c8192": (32, 8192)}  #: batch, channels

Providers = dict[str, Callable[[int], Any]]


def transformers_functions() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The torch functions, whether or not the causal_conv1d package is installed."""
    from transformers.models.qwen3_next import modeling_qwen3_next as module

    return module.causal_conv1d_fn.__wrapped__, module.causal_conv1d_update.__wrapped__


def forward_providers(batch: int, tokens: int, channels: int) -> tuple[Providers, int, int]:
    """(providers, inputs, bytes that must move)."""
    from fla.modules.causal_conv1d.ops import causal_conv1d as fla

    moved = 2 * 2 * batch * tokens * channels
    turns = rotations(moved)
    x = [torch.randn(batch, tokens, channels, device="cuda", dtype=torch.bfloat16) for _ in range(turns)]
    weight = torch.randn(channels, WIDTH, device="cuda", dtype=torch.bfloat16) * 0.5
    upstream = transformers_functions()[0]
    providers: Providers = {
        "accel": lambda i: causal_conv1d(x[i], weight, activation="silu")[0],
        "upstream": lambda i: upstream(x[i].mT, weight, None, "silu").mT,
        "fla": lambda i: fla(x[i], weight, activation="silu", backend="triton")[0],
    }
    return providers, turns, moved


def update_providers(batch: int, channels: int) -> tuple[Providers, int, int]:
    from fla.modules.causal_conv1d.ops import causal_conv1d_update as fla

    moved = batch * channels * 2 * (2 + 2 * WIDTH) + channels * WIDTH * 2
    turns = rotations(moved)
    x = [torch.randn(batch, 1, channels, device="cuda", dtype=torch.bfloat16) for _ in range(turns)]
    first = [torch.randn(batch, channels, WIDTH, device="cuda", dtype=torch.bfloat16) for _ in range(turns)]
    states = {name: [t.clone() for t in first] for name in ("accel", "upstream", "fla")}
    weight = torch.randn(channels, WIDTH, device="cuda", dtype=torch.bfloat16) * 0.5
    upstream = transformers_functions()[1]
    providers: Providers = {
        "accel": lambda i: causal_conv1d_update(x[i], states["accel"][i], weight, activation="silu"),
        "upstream": lambda i: upstream(x[i].mT, states["upstream"][i], weight, None, "silu").mT,
        "fla": lambda i: fla(x=x[i], cache=states["fla"][i], weight=weight, activation="silu")[0],
    }
    return providers, turns, moved


def agree(case: str, providers: Providers) -> None:
    """Every provider gives the same for input 0; an update has not moved its state, of which each has its own, yet."""
    found = {name: call(0).float() for name, call in providers.items()}
    for name, y in found.items():
        difference = ((y - found["accel"]).norm() / found["accel"].norm()).item()
        if not difference < 0.02:
            print(f"{case}: accel and {name} DIFFER by {difference:.2e}", flush=True)


@torch.no_grad()
def measure(rows: Rows, case: str, bandwidth: float, rounds: int) -> None:
    if case in FORWARD:
        providers, turns, moved = forward_providers(*FORWARD[case])
        agree(case, providers)
        timed = [(case, "fwd", device_times(providers, turns, rounds=rounds))]
    else:
        providers, turns, moved = update_providers(*UPDATE[case])
        agree(case, providers)
        timed = [(case, "decode", eager_times(providers, turns, rounds))]
        graphs = {name: captured(call, turns) for name, call in providers.items()}
        timed.append((f"{case}_graph", "decode", device_times(graphs, turns, rounds=rounds)))
    floor = moved / bandwidth * 1e3
    for name, passed, times in timed:
        run = rows.run_id()
        times["floor"] = Quantiles(floor, floor, floor)
        for provider, q in times.items():
            rows.add(name, provider, passed, q, run)
        a = times["accel"].p50
        parts = "  ".join(f"{provider} {q.p50 * 1e3:7.1f} us" for provider, q in times.items())
        versus = f"{times['upstream'].p50 / a:5.2f}x upstream, {times['fla'].p50 / a:5.2f}x fla"
        print(f"{name:28} {parts}  {floor / a:6.1%} of floor  {versus}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="result rows are replaced in this file")
    parser.add_argument("--case", action="append", choices=sorted(FORWARD | UPDATE), help="default: all")
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("a CUDA device is needed")
    packages = ("transformers", "flash-linear-attention", "triton")
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in packages)
    rows = Rows("benchmarks/ops/causal_conv1d.py", source_hash("causal_conv1d"), versions)
    bandwidth = copy_bandwidth()
    print(
        f"{rows.gpu}, torch {torch.__version__}, {rows.upstream}, copy {bandwidth / 1e12:.2f} TB/s, {clocks()}",
        flush=True,
    )
    for case in args.case or (*FORWARD, *UPDATE):
        measure(rows, case, bandwidth, args.rounds)
        torch.cuda.empty_cache()
    print(clocks())
    if args.out:
        rows.write(args.out)


if __name__ == "__main__":
    main()
