"""Timing shared by the benchmarks: interleaved providers, cold caches, a queue that hides the host, result rows.

Device time: the stream is first kept busy by a sleep kernel while the host queues a batch of calls between two events,
so a slow host does not appear in it. Inputs rotate and outputs are kept until all of them have been used once, so that
neither is found in the L2.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import statistics
import subprocess
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from accel.certifying import families
from accel.source_hash import source_hash

L2_BYTES = 60 * 2**20  #: the largest L2 that matters here (H200: 50 MB)
_SLEEP_CLOCK = 1.9e9  #: cycles of torch.cuda._sleep a second, rounded up


@dataclass(frozen=True, slots=True)
class Quantiles:
    p20: float
    p50: float
    p80: float

    @staticmethod
    def of(samples: Sequence[float]) -> Quantiles:
        if len(samples) == 1:
            return Quantiles(samples[0], samples[0], samples[0])
        cuts = statistics.quantiles(samples, n=10, method="inclusive")
        return Quantiles(cuts[1], cuts[4], cuts[7])


def rotations(bytes_per_call: int) -> int:
    """Copies of the inputs so that one full turn moves at least three times the L2."""
    return max(2, -(-3 * L2_BYTES // max(bytes_per_call, 1)))


def device_times(
    providers: dict[str, Callable[[int], Any]], turns: int, *, batch: int = 0, rounds: int = 30
) -> dict[str, Quantiles]:
    """Milliseconds per call of each provider, measured in turns within each round.

    A provider is called with the number of the input to use, 0..turns-1. `batch` calls are timed together, by default
    one turn.
    """
    batch = batch or turns
    samples: dict[str, list[float]] = {name: [] for name in providers}
    host: dict[str, float] = {}
    for name, call in providers.items():
        for i in range(turns):
            call(i)
        torch.cuda.synchronize()
        start = time.perf_counter()
        for i in range(batch):
            call(i % turns)
        host[name] = time.perf_counter() - start
        torch.cuda.synchronize()
    for _ in range(rounds):
        for name, call in providers.items():
            samples[name].append(_one_batch(call, turns, batch, host[name]))
    return {name: Quantiles.of(values) for name, values in samples.items()}


def _one_batch(call: Callable[[int], Any], turns: int, batch: int, host_seconds: float) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    kept: list[Any] = [None] * turns
    torch.cuda._sleep(int((1.5 * host_seconds + 1e-3) * _SLEEP_CLOCK))
    start.record()
    for i in range(batch):
        kept[i % turns] = call(i % turns)
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / batch


def host_times(providers: dict[str, Callable[[], Any]], *, calls: int = 300, rounds: int = 15) -> dict[str, Quantiles]:
    """Microseconds of Python per call, the device never waited for; use inputs so small that it keeps up."""
    samples: dict[str, list[float]] = {name: [] for name in providers}
    for _ in range(rounds):
        for name, call in providers.items():
            for _ in range(20):
                call()
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(calls):
                call()
            samples[name].append((time.perf_counter() - start) / calls * 1e6)
            torch.cuda.synchronize()
    return {name: Quantiles.of(values) for name, values in samples.items()}


def copy_bandwidth(size: int = 2**30, rounds: int = 20) -> float:
    """Bytes per second, read and written together, of a large device copy: what every floor row divides by."""
    source = torch.empty(size, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    times = device_times({"copy": lambda i: target.copy_(source)}, 1, batch=4, rounds=rounds)
    return 2 * size / (times["copy"].p50 * 1e-3)


def every_source() -> str:
    """One hash of all kernel families, for rows of whole models."""
    return hashlib.sha256("".join(source_hash(family) for family in families()).encode()).hexdigest()


@dataclass(slots=True)
class Rows:
    """Result rows of one script run, in the schema that benchmarks/report.py reads."""

    bench: str
    source: str  #: hash of the kernel sources
    upstream: str  #: e.g. "transformers 5.17.0"
    gpu: str = field(default_factory=lambda: torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu")
    rows: list[dict[str, Any]] = field(default_factory=list)

    def run_id(self) -> str:
        """A new id for rows that are timed interleaved."""
        return uuid.uuid4().hex[:12]

    def add(
        self, case: str, provider: str, passed: str, q: Quantiles, run: str, *, metric: str = "time", unit: str = "ms"
    ) -> None:
        self.rows.append(
            {
                "bench": self.bench,
                "case": case,
                "provider": provider,
                "pass": passed,
                "metric": metric,
                "unit": unit,
                "p20": round(q.p20, 6),
                "p50": round(q.p50, 6),
                "p80": round(q.p80, 6),
                "gpu": self.gpu,
                "torch": torch.__version__,
                "upstream": self.upstream,
                "source": self.source,
                "run": run,
                "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
            }
        )

    def write(self, path: Path) -> None:
        """Replace the rows with the same (bench, case, provider, pass, metric), keep the others."""
        identity = ("bench", "case", "provider", "pass", "metric")
        fresh = {tuple(row[k] for k in identity) for row in self.rows}
        kept = []
        if path.exists():
            kept = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
        kept = [row for row in kept if tuple(row[k] for k in identity) not in fresh]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in kept + self.rows))


def clocks() -> str:
    """The GPU's clocks and power as nvidia-smi prints them, or why it does not."""
    fields = "clocks.sm,clocks.mem,power.draw,temperature.gpu"
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError) as error:
        return f"nvidia-smi: {error}"
