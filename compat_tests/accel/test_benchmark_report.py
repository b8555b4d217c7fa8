"""The benchmark table: which rows it takes, and how it writes them."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import accel
from accel import certificates

ROOT = Path(accel.__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def report() -> ModuleType:
    spec = importlib.util.spec_from_file_location("benchmark_report", ROOT / "benchmarks" / "report.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


def rows(bench: str, case: str, passed: str, run: str = "r", **p50: float) -> list[dict[str, Any]]:
    common = {"bench": bench, "case": case, "pass": passed, "metric": "time", "unit": "ms", "gpu": "NVIDIA H200"}
    return [{**common, "provider": provider, "p50": value, "run": run} for provider, value in p50.items()]


@pytest.fixture
def results(tmp_path: Path) -> Path:
    (tmp_path / "h200").mkdir()
    found = rows("benchmarks/ops/attention.py", "dense", "fwd", accel=2.0, upstream=3.0, torch_flash=2.5, cudnn=1.8)
    found += rows("benchmarks/ops/attention_decode.py", "decode", "decode", accel=0.5, upstream=1.0, floor=0.25)
    found += rows("benchmarks/ops/attention_decode.py", "new_length", "first_call", accel=0.1, upstream=30.0)
    found += rows("benchmarks/ops/attention_cold.py", "first", "cold_start", accel=1500.0, upstream=300.0)
    found += rows("benchmarks/ops/attention_decode.py", "alone", "decode", accel=0.5)
    (tmp_path / "h200" / "attention.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))
    whole = rows("models/x.py", "whole", "fwd", accel=2.0, upstream=5.0)
    (tmp_path / "h200" / "models.jsonl").write_text("".join(json.dumps(row) + "\n" for row in whole))
    return tmp_path


def certificate(kernel: str, failure: str | None = None) -> certificates.Certificate:
    values = {
        field.name: {"family": "attention", "kernel": kernel, "arch": "sm_90", "failure": failure}.get(field.name)
        for field in dataclasses.fields(certificates.Certificate)
    }
    numbers = {f.name: 1 for f in dataclasses.fields(certificates.Certificate) if values[f.name] is None}
    words = {"source", "dsl", "device", "torch", "date", "worst_error_at", "worst_largest_at"}
    numbers |= {name: "x" for name in numbers if name in words}  # type: ignore[misc]
    return certificates.Certificate(**{**values, **numbers, "failure": failure})


def shown(report: ModuleType, results: Path, *held: certificates.Certificate) -> list[str]:
    folder = results / "certificates"
    folder.mkdir(exist_ok=True)
    for path in folder.glob("*.json"):
        path.unlink()
    if held:
        certificates.write(held, folder=folder)
    return [row.case for row in report.served_comparisons(results, folder)]


def test_rows_are_of_whole_models_and_of_certified_kernels(report: ModuleType, results: Path) -> None:
    assert shown(report, results) == ["whole"]
    assert shown(report, results, certificate("any_decode")) == ["whole", "decode", "new_length"]
    assert shown(report, results, certificate("sm90_fwd")) == ["whole", "dense"]
    assert shown(report, results, certificate("sm90_fwd", "too far off")) == ["whole"]
    both = shown(report, results, certificate("any_decode"), certificate("sm90_fwd"))
    assert both == ["whole", "dense", "decode", "new_length", "first"]


def test_every_benchmark_of_some_kernels_and_every_kernel_exists(report: ModuleType) -> None:
    for bench, kernels in report.KERNELS.items():
        assert (ROOT / bench).exists()
        family = next(name for name in ("attention", "gated_delta_rule", "causal_conv1d") if name in bench)
        assert all((ROOT / "kernels" / family / f"{kernel}.py").exists() for kernel in kernels)


def test_a_result_file_of_another_name_than_its_family(report: ModuleType, results: Path, tmp_path: Path) -> None:
    assert all((ROOT / "kernels" / family).is_dir() for family in report.FAMILIES.values())
    rows = (results / "h200" / "attention.jsonl").read_text().replace("benchmarks/ops/attention.py", "elsewhere.py")
    (results / "h200" / "conv1d.jsonl").write_text(rows)
    held = json.loads((ROOT / "kernels" / "certificates" / "sm90.json").read_text())
    held["certificates"] = [
        {**held["certificates"][0], "family": "causal_conv1d", "kernel": "any_fwd", "failure": None}
    ]
    (tmp_path / "sm90.json").write_text(json.dumps(held))
    assert "conv1d" in {row.family for row in report.served_comparisons(results, tmp_path)}


def test_the_table(report: ModuleType, results: Path) -> None:
    lines = report.table(report.comparisons(results / "h200" / "attention.jsonl")).splitlines()
    assert lines[0] == "| case | pass | upstream | accel | speed | best other | of the memory floor |"
    assert lines[2:] == [
        "| `dense` | fwd | 3 ms | 2 ms | 1.50x | cudnn 1.8 ms |  |",
        "| `decode` | decode | 1 ms | 0.5 ms | 2.00x |  | 50% |",
        "| `new_length` | first_call | 30 ms | 0.1 ms | 300x |  |  |",
        "| `first` | cold_start | 300 ms | 1.5 s | 0.20x |  |  |",
    ]
    assert "best other" not in report.table(report.comparisons(results / "h200" / "models.jsonl"))


def test_rows_of_different_runs_are_not_compared(report: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    found = rows("b", "case", "fwd", accel=1.0) + rows("b", "case", "fwd", run="another", upstream=2.0)
    path.write_text("".join(json.dumps(row) + "\n" for row in found))
    with pytest.raises(ValueError, match="case fwd: accel and upstream come from different runs"):
        report.comparisons(path)
