"""What benchmarks of whole models share: both sides in turns, and the command line.

Each round switches accel on, measures, switches it off and measures again, so both sides see the same drift of a shared
card.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

import accel
from benchmarks.timing import Quantiles, Rows, every_source

ROUNDS = 7
Times = dict[str, list[float]]


def interleaved(step: Callable[[], object], steps: int, warmup: int = 3) -> Times:
    """Wall milliseconds per step of either side, `ROUNDS` medians-to-be each."""
    times: Times = {"upstream": [], "accel": []}
    for round_ in range(ROUNDS):
        for provider in ("upstream", "accel") if round_ % 2 == 0 else ("accel", "upstream"):
            if provider == "accel":
                accel.accelerate()
            for _ in range(warmup if round_ == 0 else 1):
                step()
            torch.cuda.synchronize()
            for _ in range(steps):
                start = time.perf_counter()
                step()
                torch.cuda.synchronize()
                times[provider].append((time.perf_counter() - start) * 1e3)
            accel.restore()
    return times


def main(
    doc: str | None,
    bench: str,
    library: str,
    build: Callable[[], torch.nn.Module],
    cases: Mapping[str, tuple[str, Callable[[torch.nn.Module], Times]]],
) -> None:
    """Measure `cases`, each a pass and what times it on the model, print them and what was served, write the rows."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cases", nargs="*", default=list(cases), choices=list(cases))
    options = parser.parse_args()
    model = build()
    rows = Rows(bench, every_source(), f"{library} {importlib.metadata.version(library)}")
    for case in options.cases:
        passed, measure = cases[case]
        run = rows.run_id()
        times = {provider: Quantiles.of(values) for provider, values in measure(model).items()}
        for provider, quantiles in times.items():
            rows.add(case, provider, passed, quantiles, run)
        ours, theirs = times["accel"].p50, times["upstream"].p50
        print(f"{case:24s} upstream {theirs:8.2f} ms  accel {ours:8.2f} ms  {theirs / ours:.2f}x", flush=True)
    for status in accel.status():
        if status.served or status.declined:
            print(f"    {status.name}: served {status.kernels}, declined {status.declined}", flush=True)
    rows.write(options.out)
