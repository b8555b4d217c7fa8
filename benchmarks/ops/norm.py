"""RMSNorm and gated RMSNorm: accel, upstream's own modules, and the memory floor.

    python benchmarks/ops/norm.py --out benchmarks/results/h200/norm.jsonl
    python benchmarks/ops/norm.py --sweep fwd|bwd      launch configurations side by side, nothing is written

Upstream is transformers' LlamaRMSNorm and Qwen3NextRMSNormGated, unpatched. `fwd` runs without gradients; `fwd_bwd` is
forward, then dx, dweight (and dgate). The floor is the bytes that must move over the bandwidth of a large copy in the
same run: forward x and y (and the gate); backward x, dy, dx (and the gate twice).
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from accel.kernels.norm import launch, rms_norm, rms_norm_gated
from accel.kernels.norm.config import BwdConfig, FwdConfig
from accel.kernels.norm.plan import NormConfigs, plan
from accel.kernels.runtime import arch as archs
from accel.kernels.runtime.compile import Kernel, function
from accel.source_hash import source_hash
from benchmarks.timing import Quantiles, Rows, clocks, copy_bandwidth, device_times, host_times, rotations

ROOT = Path(__file__).resolve().parents[2]
EPS = 1e-6
CASES = {
    "rms_norm_8192x2048": (8192, 2048, False),
    "rms_norm_8192x4096": (8192, 4096, False),
    "rms_norm_8192x8192": (8192, 8192, False),
    "rms_norm_262144x128": (262144, 128, False),
    "rms_norm_gated_262144x128": (262144, 128, True),
}


@dataclasses.dataclass
class Setup:
    """Inputs of one case, rotated, and what each provider does with input i."""

    x: list[torch.Tensor]
    gate: list[torch.Tensor] | None
    dy: list[torch.Tensor]
    module: torch.nn.Module  #: upstream's, holding the weight
    forward_bytes: int
    backward_bytes: int

    def upstream(self, i: int) -> torch.Tensor:
        return self.module(self.x[i]) if self.gate is None else self.module(self.x[i], self.gate[i])

    def accel(self, i: int) -> torch.Tensor:
        if self.gate is None:
            return rms_norm(self.x[i], self.module.weight, eps=EPS)
        return rms_norm_gated(self.x[i], self.gate[i], self.module.weight, eps=EPS)

    def without_grad(self, call: Callable[[int], torch.Tensor]) -> Callable[[int], torch.Tensor]:
        def run(i: int) -> torch.Tensor:
            with torch.no_grad():
                return call(i)

        return run

    def with_backward(self, call: Callable[[int], torch.Tensor]) -> Callable[[int], Any]:
        def run(i: int) -> Any:
            inputs = [self.x[i], self.module.weight] + ([] if self.gate is None else [self.gate[i]])
            return torch.autograd.grad(call(i), inputs, self.dy[i])

        return run


def setup(rows: int, hidden: int, gated: bool, turns: int = 0) -> Setup:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

    torch.manual_seed(0)
    size = rows * hidden * 2
    forward_bytes = size * (3 if gated else 2)
    turns = turns or rotations(forward_bytes)

    def tensors(grad: bool) -> list[torch.Tensor]:
        made = [torch.randn(rows, hidden, device="cuda", dtype=torch.bfloat16) for _ in range(turns)]
        return [t.requires_grad_(grad) for t in made]

    module = (Qwen3NextRMSNormGated if gated else LlamaRMSNorm)(hidden, eps=EPS).to("cuda", torch.bfloat16)
    torch.nn.init.normal_(module.weight, 1.0, 0.1)
    return Setup(
        tensors(True),
        tensors(True) if gated else None,
        tensors(False),
        module,
        forward_bytes,
        size * (5 if gated else 3),
    )


def measure(rows: Rows, case: str, bandwidth: float, rounds: int) -> None:
    s = setup(*CASES[case])
    turns = len(s.x)
    for passed in ("fwd", "fwd_bwd"):
        run = rows.run_id()
        wrap = s.without_grad if passed == "fwd" else s.with_backward
        times = device_times({"accel": wrap(s.accel), "upstream": wrap(s.upstream)}, turns, rounds=rounds)
        moved = s.forward_bytes + (s.backward_bytes if passed == "fwd_bwd" else 0)
        floor = moved / bandwidth * 1e3
        times["floor"] = Quantiles(floor, floor, floor)
        for provider, q in times.items():
            rows.add(case, provider, passed, q, run)
        a, u = times["accel"].p50, times["upstream"].p50
        print(
            f"{case:28} {passed:8} accel {a * 1e3:8.1f} us  upstream {u * 1e3:8.1f} us  floor {floor * 1e3:7.1f} us"
            f"  {floor / a:6.1%} of floor  {u / a:5.2f}x",
            flush=True,
        )
    del s
    tiny = setup(8, CASES[case][1], CASES[case][2], turns=1)
    run = rows.run_id()
    times = host_times({"accel": lambda: tiny.accel(0), "upstream": lambda: tiny.upstream(0)})
    for provider, q in times.items():
        rows.add(case, provider, "host_us", q, run, metric="forward_with_grad", unit="us")
    print(
        f"{case:28} host     accel {times['accel'].p50:6.1f} us  upstream {times['upstream'].p50:6.1f} us", flush=True
    )


# --- The first call of a process -----------------------------------------------------------------------------------

FIRST_CALL = """
import sys, time
import torch
torch.zeros(1, device="cuda").sum().item()
start = time.perf_counter()
from benchmarks.ops import norm
setup = norm.setup(*norm.CASES[sys.argv[1]], turns=1)
torch.cuda.synchronize()
middle = time.perf_counter()
setup.{provider}(0)
torch.cuda.synchronize()
print(time.perf_counter() - middle)
"""


def measure_cold_start(rows: Rows, case: str, repeats: int = 3) -> None:
    """Milliseconds of a process's first call with gradients, forward and backward loaded: accel with an empty kernel
    cache (it compiles) and with a filled one, and upstream. Importing torch and the modules, and the CUDA context, are
    not in it.
    """
    run = rows.run_id()
    with tempfile.TemporaryDirectory() as folder:
        samples: dict[tuple[str, str], list[float]] = {}
        for i in range(repeats):
            cache = str(Path(folder) / str(i))
            for provider, metric in (("accel", "empty_cache"), ("accel", "filled_cache"), ("upstream", "time")):
                command = [sys.executable, "-c", FIRST_CALL.format(provider=provider), case]
                environment = {**os.environ, "ACCEL_CACHE_DIR": cache}
                done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT, env=environment)
                samples.setdefault((provider, metric), []).append(float(done.stdout.split()[-1]) * 1e3)
    for (provider, metric), values in samples.items():
        q = Quantiles.of(values)
        rows.add(case, provider, "cold_start", q, run, metric=metric)
        print(f"{case:28} first call  {provider:8} {metric:12} {q.p50:8.1f} ms", flush=True)


# --- Launch configurations side by side ----------------------------------------------------------------------------


def sweep(direction: str, cases: Iterable[str], rounds: int) -> None:
    arch = archs.cuda_arch(torch.cuda.current_device())
    target = archs.compile_target(arch)
    for case in cases:
        n, hidden, gated = CASES[case]
        s = setup(n, hidden, gated)
        facts = launch.facts_of(
            s.x[0],
            s.module.weight,
            None if s.gate is None else s.gate[0],
            "cast_then_weight",
            "silu" if gated else None,
            True,
        )
        configs = plan(facts, arch).config
        candidates = {}
        for config in forward_candidates(configs) if direction == "fwd" else backward_candidates(configs, arch):
            pair = NormConfigs(config, None) if direction == "fwd" else NormConfigs(configs.forward, config)
            loaded = launch.Loaded(
                function(Kernel("norm", "any_fwd", pair.forward), target),
                function(Kernel("norm", "any_bwd", pair.backward), target) if pair.backward else None,
                torch.bfloat16,
                pair.backward,
            )
            candidates[label(config)] = _candidate(s, loaded, direction)
        times = device_times(candidates, len(s.x), rounds=rounds)
        chosen = label(configs.forward if direction == "fwd" else configs.backward)
        for name, q in sorted(times.items(), key=lambda item: item[1].p50):
            print(
                f"{case:28} {direction} {q.p50 * 1e3:8.1f} us  {name}{'  <- plan' if name == chosen else ''}",
                flush=True,
            )


def _candidate(s: Setup, loaded: launch.Loaded, direction: str) -> Callable[[int], Any]:
    weight = s.module.weight.detach()

    def forward(i: int) -> Any:
        return launch.forward(loaded, 1, s.x[i].detach(), weight, None if s.gate is None else s.gate[i].detach(), EPS)

    def backward(i: int) -> Any:
        gate = None if s.gate is None else s.gate[i].detach()
        return launch.backward(loaded, 1, s.x[i].detach(), weight, gate, s.dy[i], EPS)

    return forward if direction == "fwd" else backward


def label(config: FwdConfig | BwdConfig) -> str:
    text = f"{config.threads_per_row} x {config.rows_per_cta} threads, {config.vectors_per_thread} vectors"
    text += ", overlap" if config.overlap else ""
    return f"{text}, {config.stages} stages, {config.ctas_per_sm} CTAs" if isinstance(config, BwdConfig) else text


def forward_candidates(configs: NormConfigs) -> list[FwdConfig]:
    """One to four vectors a thread, small and large CTAs, with and without overlap."""
    base = configs.forward
    found = [base, dataclasses.replace(base, overlap=False)]
    for count in (1, 2, 4):
        for threads in (64, 128, 256, 512):
            tpr = base.vectors // count
            if tpr <= threads and not (tpr & (tpr - 1)):
                found.append(dataclasses.replace(base, threads_per_row=tpr, rows_per_cta=threads // tpr))
    return list(dict.fromkeys(found))


def backward_candidates(configs: NormConfigs, arch: str) -> list[BwdConfig]:
    """Around the plan: vectors a thread, rows, stages and CTAs, within shared memory and 64 KB or more in flight."""
    base, limits = configs.backward, archs.limits(arch)
    found = [base, dataclasses.replace(base, overlap=False)]
    for count, threads, ctas, stages in itertools.product((2, 4), (256, 512), (1, 2), (2, 3)):
        tpr = base.vectors // count
        if tpr > threads or ctas * threads > 512:
            continue
        config = dataclasses.replace(
            base, threads_per_row=tpr, rows_per_cta=threads // tpr, stages=stages, ctas_per_sm=ctas
        )
        budget = min(limits.smem_per_cta, limits.smem_per_sm // ctas - limits.smem_reserved)
        if config.smem_bytes <= budget and ctas * config.ring_bytes * (stages - 1) // stages >= 64 * 1024:
            found.append(config)
    return list(dict.fromkeys(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="result rows are replaced in this file")
    parser.add_argument("--case", action="append", choices=sorted(CASES), help="default: all")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--sweep", choices=("fwd", "bwd"))
    parser.add_argument("--cold", action="store_true", help="only the first call of new processes (pass cold_start)")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("a CUDA device is needed")
    if args.sweep:
        sweep(args.sweep, args.case or CASES, args.rounds)
        return
    import transformers

    rows = Rows("benchmarks/ops/norm.py", source_hash("norm"), f"transformers {transformers.__version__}")
    if args.cold:
        for case in args.case or CASES:
            measure_cold_start(rows, case)
        if args.out:
            rows.write(args.out)
        return
    bandwidth = copy_bandwidth()
    print(
        f"{rows.gpu}, torch {torch.__version__}, {rows.upstream}, copy {bandwidth / 1e12:.2f} TB/s, {clocks()}",
        flush=True,
    )
    for case in args.case or CASES:
        measure(rows, case, bandwidth, args.rounds)
    print(clocks())
    if args.out:
        rows.write(args.out)


if __name__ == "__main__":
    main()
