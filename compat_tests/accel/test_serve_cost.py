"""What a declined call and an idle import cost: the recorded rows keep their limits, and the benchmark still runs."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

import accel

ROOT = Path(accel.__file__).resolve().parents[1]
SCRIPT, ROWS = ROOT / "benchmarks/ops/serve.py", ROOT / "benchmarks/results/cpu/serve.jsonl"


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location("accel_benchmark_serve", SCRIPT)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_recorded_rows_keep_the_limits(benchmark: ModuleType) -> None:
    rows = [json.loads(line) for line in ROWS.read_text().splitlines()]
    overheads = {row["case"]: row for row in rows if row["metric"] == "overhead"}
    # one at least for every kind of target
    for kind in ("transformers_sdpa", "transformers_rms_norm", "transformers_rms_norm_gated", "transformers_mlp"):
        assert any(case.startswith(f"declined_{kind}") for case in overheads), kind
    for kind in ("transformers_gated_delta_rule", "fla_gated_delta_rule", "fla_kda", "fla_gated_mlp", "diffusers_sdpa"):
        assert any(case.startswith(f"declined_{kind}") for case in overheads), kind
    for case, row in overheads.items():
        assert (row["unit"], row["pass"], row["provider"], row["gpu"]) == ("us", "host_us", "accel", "cpu")
        assert row["p50"] <= benchmark.OVERHEAD_LIMIT, case
    imports = {(row["provider"], row["metric"]): row for row in rows if row["case"] == "import_accel"}
    assert imports["accel", "import"]["p50"] <= benchmark.IMPORT_LIMIT
    assert imports["accel", "time"]["run"] == imports["floor", "time"]["run"]


def test_importing_accel_brings_no_torch_and_no_upstream(benchmark: ModuleType) -> None:
    found = benchmark.import_times(2)  # raises if it does
    assert found["accel"].p50 > found["import"].p50 > 0


def test_a_case_is_measured_and_leaves_upstream_in_place(benchmark: ModuleType) -> None:
    accel.accelerate(["transformers.sdpa", "diffusers.sdpa"])
    case = benchmark._attention()[0]
    call = benchmark.serve.wrapped_call(case.function)
    original = call.original
    found = benchmark.overheads(case, 3)
    assert call.original is original
    assert 0 < found["accel"].p50 < 1000 and 0 < found["upstream"].p50 < 10_000
    assert not call.state.declined, "the stand-in's calls were counted as the target's"
    accel.restore()
    with pytest.raises(RuntimeError, match="not served by accel here"):
        benchmark.Case("plain", len).providers()
