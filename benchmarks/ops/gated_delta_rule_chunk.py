"""The gated delta rule in chunks (prefill), forward: accel and FLA's chunk_gated_delta_rule, in turns.

    python benchmarks/ops/gated_delta_rule_chunk.py --out benchmarks/results/h200/gated_delta_rule.jsonl

Cases are named B_T_H_HV_K[_V]. q and k are normalised, g is logsigmoid(randn), no states, bf16. `_slow_gate`: decays as
FLA's layers begin with. `_fla_layer`: the call that FLA's GatedDeltaNet makes, raw gates and logits, keys and queries
normalised in the kernel, q, k and v views of one tensor. Times are the wall time of a call in a row of calls, host or
device, whichever is slower; `_graph` is a call's share of the replay of a CUDA graph of many. `host_us` is Python
alone, `served` being FLA's own name with accel switched on. The floor is q, k, v and o once over the bandwidth of a
large copy. `--split` shows what each kernel takes, `--set name=value` changes the configuration, to compare.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import importlib.util
import math
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("FLA_DISABLE_BACKEND_DISPATCH", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.nn.functional as F

from accel.kernels.gated_delta_rule import chunk, gated_delta_rule
from accel.source_hash import source_hash
from benchmarks.ops.gated_delta_rule import eager_times, graph_times
from benchmarks.timing import Quantiles, Rows, clocks, copy_bandwidth, host_times, rotations

ROOT = Path(__file__).resolve().parents[2]
BENCH = "benchmarks/ops/gated_delta_rule_chunk.py"
CASES = (
    "1_8192_16_32_128",
    "1_8192_16_32_128_slow_gate",
    "1_8192_16_32_128_fla_layer",
    "1_8192_16_32_128_graph",
    "1_32768_16_32_128",
    "8_2048_16_32_128",
    "1_8192_2_4_128",
    "1_8192_6_6_256_512_fla_layer",
)
#: Ours under FLA's names.
IN_KERNEL = {name: f"{name}_in_kernel" for name in ("use_qk_l2norm", "use_gate", "use_beta_sigmoid")}


@dataclass
class Setup:
    """Inputs of one case, rotated, under our keywords."""

    inputs: list[dict[str, Any]]
    bytes_per_call: int

    def accel(self, i: int) -> Any:
        return gated_delta_rule(**self.inputs[i])

    def upstream(self, i: int) -> Any:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        return chunk_gated_delta_rule(**{IN_KERNEL.get(name, name): x for name, x in self.inputs[i].items()})

    def flash_qla(self, i: int) -> Any:
        from flash_qla import chunk_gated_delta_rule

        x = self.inputs[i]
        return chunk_gated_delta_rule(x["q"], x["k"], x["v"], x["g"], x["beta"])


def setup(case: str, turns: int = 0) -> Setup:
    sizes = [int(word) for word in case.split("_") if word.isdigit()]
    batch, tokens, heads, heads_v, dim = sizes[:5]
    dim_v = sizes[5] if len(sizes) > 5 else dim
    torch.manual_seed(0)
    moved = 4 * batch * tokens * (heads * dim + heads_v * dim_v)
    return Setup(
        [_inputs(case, batch, tokens, heads, heads_v, dim, dim_v) for _ in range(turns or rotations(moved))], moved
    )


def _inputs(
    case: str, batch: int, tokens: int, heads: int, heads_v: int, dim: int, dim_v: int
) -> dict[str, Any]:  # fmt: skip
    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(batch, tokens, *shape, device="cuda")

    if case.endswith("fla_layer"):
        widths = [heads * dim, heads * dim, heads_v * dim_v]
        parts = draw(sum(widths)).bfloat16().split(widths, -1)
        q, k, v = (x.unflatten(-1, (n, -1)) for x, n in zip(parts, (heads, heads, heads_v), strict=True))
        step = (torch.rand(heads_v, device="cuda") * (math.log(0.1) - math.log(1e-3)) + math.log(1e-3)).exp()
        return {
            "q": q,
            "k": k,
            "v": v,
            "g": draw(heads_v).bfloat16(),
            "beta": draw(heads_v).bfloat16(),
            "use_qk_l2norm": True,
            "use_gate": True,
            "use_beta_sigmoid": True,
            "A_log": (torch.rand(heads_v, device="cuda") * 16).log(),
            "dt_bias": step + (-torch.expm1(-step)).log(),
            "state_v_first": True,
        }
    q, k = (F.normalize(draw(heads, dim), dim=-1).bfloat16() for _ in range(2))
    g = F.logsigmoid(draw(heads_v))
    if "slow_gate" in case:
        rate = 16 * torch.rand(heads_v, device="cuda")
        step = torch.rand(batch, tokens, heads_v, device="cuda") * (math.log(0.1) - math.log(1e-3)) + math.log(1e-3)
        g = -rate * step.exp()
    beta = torch.rand(batch, tokens, heads_v, device="cuda").bfloat16()
    return {"q": q, "k": k, "v": draw(heads_v, dim_v).bfloat16(), "g": g, "beta": beta}


def agree(case: str, s: Setup) -> None:
    ours, theirs = s.accel(0)[0].float(), s.upstream(0)[0].float()
    difference = ((ours - theirs).norm() / theirs.norm()).item()
    if not difference < 0.015:
        raise SystemExit(f"{case}: accel and upstream differ by {difference:.2e}")


@torch.no_grad()
def measure(rows: Rows, case: str, bandwidth: float, rounds: int, peers: tuple[str, ...]) -> None:
    s = setup(case)
    turns = len(s.inputs)
    providers: dict[str, Callable[[int], Any]] = {"accel": s.accel}
    if "upstream" in peers:
        agree(case, s)
        providers["upstream"] = s.upstream
    if "flash_qla" in peers and not case.endswith("fla_layer"):
        providers["flash_qla"] = s.flash_qla
    times = (graph_times if case.endswith("_graph") else eager_times)(providers, turns, rounds)
    floor = s.bytes_per_call / bandwidth * 1e3
    times["floor"] = Quantiles(floor, floor, floor)
    run = rows.run_id()
    for provider, q in times.items():
        rows.add(case, provider, "fwd", q, run)
    shown = "  ".join(f"{provider} {q.p50 * 1e3:7.1f} us" for provider, q in times.items())
    others = "  ".join(
        f"{times[name].p50 / times['accel'].p50:5.2f}x {name}" for name in providers if name != "accel"
    )  # fmt: skip
    print(f"{case:32} {shown}  {others}", flush=True)


@torch.no_grad()
def measure_host(rows: Rows, peers: tuple[str, ...]) -> None:
    """Python's share: one short sequence, so that the device keeps up."""
    case = "1_64_2_4_128_fla_layer"
    s = setup(case, turns=1)
    providers: dict[str, Callable[[], Any]] = {"accel": lambda: s.accel(0)}
    if "upstream" in peers:
        import accel

        providers["upstream"] = lambda: s.upstream(0)
        times = host_times(providers)
        os.environ["ACCEL_UNCERTIFIED"] = "1"
        accel.accelerate("gdn")
        times |= host_times({"served": lambda: s.upstream(0)})
        accel.restore()
    else:
        times = host_times(providers)
    run = rows.run_id()
    for provider, q in times.items():
        rows.add("host_us", provider, "fwd", q, run, unit="us")
    print("host  " + "  ".join(f"{provider} {q.p50:.1f} us" for provider, q in times.items()), flush=True)


@torch.no_grad()
def split(case: str, calls: int = 20) -> None:
    """Device time of each kernel of a call; with overlapping launches a kernel's wait for the one before is in it."""
    s = setup(case)
    s.accel(0)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for i in range(calls):
            s.accel(i % len(s.inputs))
        torch.cuda.synchronize()
    times: dict[str, list[float]] = defaultdict(list)
    spans: list[tuple[float, float]] = []
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            name = next((part for part in ("chunk_table", "sm90_prep", "sm90_scan") if part in event.name), event.name)
            times[name].append(event.time_range.elapsed_us())
            spans.append((event.time_range.start, event.time_range.end))
    whole = (max(end for _, end in spans) - min(start for start, _ in spans)) / calls
    parts = "  ".join(f"{name[:40]} {sorted(found)[len(found) // 2]:.1f}" for name, found in times.items())
    print(f"{case:32} {parts}  us; a call {whole:.1f} us of the row", flush=True)


_CHILD = """
import sys, time
import torch
sys.path.insert(0, sys.argv[1])
q, k = (torch.nn.functional.normalize(torch.randn(1, 1024, 16, 128, device="cuda"), dim=-1).bfloat16() for _ in "qk")
v = torch.randn(1, 1024, 32, 128, device="cuda").bfloat16()
g = torch.nn.functional.logsigmoid(torch.randn(1, 1024, 32, device="cuda"))
beta = torch.rand(1, 1024, 32, device="cuda").bfloat16()
torch.cuda.synchronize()
start = time.perf_counter()
with torch.no_grad():
    if sys.argv[2] == "accel":
        import accel
        from accel.kernels.gated_delta_rule import gated_delta_rule as function
    else:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule as function
    function(q, k, v, g, beta)
torch.cuda.synchronize()
print("milliseconds", (time.perf_counter() - start) * 1e3)
"""


def first_call(provider: str, folder: Path) -> float:
    """Milliseconds from the import to the first result, in a process of its own."""
    environment = os.environ | {"ACCEL_CACHE_DIR": str(folder / "accel"), "TRITON_CACHE_DIR": str(folder / "triton")}
    command = [sys.executable, "-W", "ignore", "-c", _CHILD, str(ROOT), provider]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{provider}: {done.stderr[-2000:]}")
    return float(done.stdout.split("milliseconds")[1])


def measure_cold(rows: Rows, peers: tuple[str, ...]) -> None:
    """The first call of a process, with an empty kernel cache and with a warm one."""
    with tempfile.TemporaryDirectory(prefix="accel-cold-") as name:
        found: dict[str, dict[str, list[float]]] = {}
        for provider in ("accel", *(p for p in peers if p == "upstream")):
            folder = Path(name) / provider
            found[provider] = {"empty_cache": [first_call(provider, folder)]}
            found[provider]["warm_cache"] = [first_call(provider, folder) for _ in range(3)]
    for cache in ("empty_cache", "warm_cache"):
        run = rows.run_id()
        for provider, samples in found.items():
            q = Quantiles.of(samples[cache])
            rows.add(f"first_call_1_1024_16_32_128_{cache}", provider, "cold_start", q, run)
            print(f"first call, {cache}: {provider} {q.p50 / 1e3:.2f} s", flush=True)


def override(settings: list[str]) -> None:
    """Launch with a configuration that differs from the launcher's in some fields."""
    changed = dict(setting.split("=", 1) for setting in settings)
    original = chunk.config_of

    def config_of(*arguments: Any) -> Any:
        config = original(*arguments)
        made: dict[str, Any] = {}
        for name, text in changed.items():
            kind = type(getattr(config, name))
            made[name] = text == "True" if kind is bool else kind(text)
        return dataclasses.replace(config, **made)

    chunk.config_of = config_of  # type: ignore[assignment]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="result rows are replaced in this file")
    parser.add_argument("--case", action="append", help=f"default: {' '.join(CASES)}")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--alone", action="store_true", help="without upstream")
    parser.add_argument("--split", action="store_true", help="only what each kernel takes")
    parser.add_argument("--cold", action="store_true", help="first calls of processes, too")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a field of ChunkConfig")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("a CUDA device is needed")
    override(args.set)
    peers = () if args.alone else tuple(
        provider
        for provider, module in (("upstream", "fla"), ("flash_qla", "flash_qla"))
        if importlib.util.find_spec(module)
    )  # fmt: skip
    versions = []
    for name in ("flash-linear-attention", "triton", "flash-qla"):
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    rows = Rows(BENCH, source_hash("gated_delta_rule", "sm90_fwd"), ", ".join(versions))
    begin = time.monotonic()
    if args.split:
        for case in args.case or CASES:
            if not case.endswith("_graph"):
                split(case)
                torch.cuda.empty_cache()
        return
    bandwidth = copy_bandwidth()
    print(
        f"{rows.gpu}, torch {torch.__version__}, {rows.upstream}, {bandwidth / 1e12:.2f} TB/s, {clocks()}", flush=True
    )
    for case in args.case or CASES:
        measure(rows, case, bandwidth, args.rounds, peers)
        torch.cuda.empty_cache()
    if not args.case:
        measure_host(rows, peers)
    if args.cold:
        measure_cold(rows, peers)
    print(f"{clocks()}, {time.monotonic() - begin:.0f} s")
    if args.out:
        rows.write(args.out)


if __name__ == "__main__":
    main()
