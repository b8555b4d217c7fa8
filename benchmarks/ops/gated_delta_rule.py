"""The gated delta rule token by token (decoding): accel, FLA's fused_recurrent_gated_delta_rule, and the memory floor.

    python benchmarks/ops/gated_delta_rule.py --out benchmarks/results/h200/gated_delta_rule.jsonl

16 query and key heads, 32 value heads, K = V = 128, bf16 inputs, fp32 states, read and written to another tensor, as
both sides do by default. `decode_b<n>` is eager: the wall time of a call in a row of calls, host or device, whichever
is slower. `_graph` is a call's share of the replay of a CUDA graph of many, device time. `host_us` is Python alone. The
floor is the states, read and written once, over the bandwidth of a large copy in the same run.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("FLA_DISABLE_BACKEND_DISPATCH", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.nn.functional as F

from accel.kernels.gated_delta_rule import decode_gated_delta_rule, recurrent_gated_delta_rule
from accel.source_hash import source_hash
from benchmarks.timing import Quantiles, Rows, clocks, copy_bandwidth, device_times, host_times, rotations

H, HV, K, V = 16, 32, 128, 128
CALLS_IN_A_GRAPH = 16  #: at least
CASES = {
    "decode_b1": 1,
    "decode_b16": 16,
    "decode_b64": 64,
    "decode_b1_graph": 1,
    "decode_b64_graph": 64,
    "decode_b256_graph": 256,
}


@dataclass
class Setup:
    """Inputs of one batch size, rotated; every provider reads state i and returns (o, new state)."""

    inputs: list[dict[str, torch.Tensor]]
    states: list[torch.Tensor]

    def accel(self, i: int) -> Any:
        x = self.inputs[i]
        return recurrent_gated_delta_rule(
            **x, initial_state=self.states[i], output_final_state=True, use_qk_l2norm=True
        )  # fmt: skip

    def in_place(self, i: int) -> Any:
        return decode_gated_delta_rule(**self.inputs[i], state=self.states[i], use_qk_l2norm=True)

    def upstream(self, i: int) -> Any:
        from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule

        x = self.inputs[i]
        return fused_recurrent_gated_delta_rule(
            x["q"], x["k"], x["v"], g=x["g"], beta=x["beta"], initial_state=self.states[i], output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )  # fmt: skip


def state_bytes(batch: int) -> int:
    return 2 * 4 * batch * HV * K * V


def setup(batch: int, turns: int = 0) -> Setup:
    torch.manual_seed(0)
    inputs, states = [], []
    for _ in range(turns or rotations(state_bytes(batch))):
        q, k = (torch.randn(batch, 1, H, K, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        v = torch.randn(batch, 1, HV, V, device="cuda", dtype=torch.bfloat16)
        g = F.logsigmoid(torch.randn(batch, 1, HV, device="cuda"))
        beta = torch.rand(batch, 1, HV, device="cuda").to(torch.bfloat16)
        inputs.append({"q": q, "k": k, "v": v, "g": g, "beta": beta})
        states.append(torch.randn(batch, HV, K, V, device="cuda"))
    return Setup(inputs, states)


def graph_times(providers: dict[str, Callable[[int], Any]], turns: int, rounds: int) -> dict[str, Quantiles]:
    """Milliseconds per call in the replay of a CUDA graph of a row of calls, as a model's layers are one."""
    calls = -(-CALLS_IN_A_GRAPH // turns) * turns
    graphs, kept = {}, {name: [None] * turns for name in providers}
    for name, call in providers.items():
        call(0)
        torch.cuda.synchronize()
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name]):
            for i in range(calls):
                kept[name][i % turns] = call(i % turns)
    replays = {name: lambda i, graph=graph: graph.replay() for name, graph in graphs.items()}
    times = device_times(replays, 1, batch=2, rounds=rounds)
    return {name: Quantiles(q.p20 / calls, q.p50 / calls, q.p80 / calls) for name, q in times.items()}


def eager_times(providers: dict[str, Callable[[int], Any]], turns: int, rounds: int) -> dict[str, Quantiles]:
    """Milliseconds per call in a row of calls that ends with a synchronisation, providers in turns."""
    samples: dict[str, list[float]] = {name: [] for name in providers}
    calls = max(turns, 60)
    for number in range(rounds + 1):
        for name, call in providers.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            for i in range(calls):
                call(i % turns)
            torch.cuda.synchronize()
            if number:
                samples[name].append((time.perf_counter() - start) / calls * 1e3)
    return {name: Quantiles.of(values) for name, values in samples.items()}


def agree(case: str, s: Setup) -> None:
    for ours, theirs in zip(s.accel(0), s.upstream(0), strict=True):
        difference = ((ours.float() - theirs.float()).norm() / theirs.float().norm()).item()
        if not difference < 0.01:
            raise SystemExit(f"{case}: accel and upstream differ by {difference:.2e}")


@torch.no_grad()
def measure(rows: Rows, case: str, bandwidth: float, rounds: int) -> None:
    batch = CASES[case]
    s = setup(batch)
    turns = len(s.states)
    agree(case, s)
    providers = {"accel": s.accel, "accel_in_place": s.in_place, "upstream": s.upstream}
    if case.endswith("_graph"):
        times = graph_times(providers, turns, rounds)
    else:
        times = eager_times(providers, turns, rounds)
    floor = state_bytes(batch) / bandwidth * 1e3
    times["floor"] = Quantiles(floor, floor, floor)
    run = rows.run_id()
    for provider, q in times.items():
        rows.add(case, provider, "decode", q, run)
    a = times["accel"].p50
    parts = "  ".join(f"{provider} {q.p50 * 1e3:7.1f} us" for provider, q in times.items())
    print(f"{case:18} {parts}  {floor / a:6.1%} of floor  {times['upstream'].p50 / a:5.2f}x", flush=True)
    if case == "decode_b1":
        tiny = setup(1, turns=1)
        run = rows.run_id()
        host = host_times({name: lambda n=name: getattr(tiny, n)(0) for name in ("accel", "in_place", "upstream")})
        for provider, q in host.items():
            name = "accel_in_place" if provider == "in_place" else provider
            rows.add(case, name, "host_us", q, run, metric="forward", unit="us")
        print("  host " + "  ".join(f"{name} {q.p50:.1f} us" for name, q in host.items()), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="result rows are replaced in this file")
    parser.add_argument("--case", action="append", choices=sorted(CASES), help="default: all")
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("a CUDA device is needed")
    packages = ("flash-linear-attention", "triton")
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in packages)
    rows = Rows("benchmarks/ops/gated_delta_rule.py", source_hash("gated_delta_rule", "any_recurrent"), versions)
    bandwidth = copy_bandwidth()
    print(
        f"{rows.gpu}, torch {torch.__version__}, {rows.upstream}, copy {bandwidth / 1e12:.2f} TB/s, {clocks()}",
        flush=True,
    )
    for case in args.case or CASES:
        measure(rows, case, bandwidth, args.rounds)
        torch.cuda.empty_cache()
    print(clocks())
    if args.out:
        rows.write(args.out)


if __name__ == "__main__":
    main()
