"""Tables and plots from the result rows: `python benchmarks/report.py` rewrites README's table and docs/speed.png.

Rows are described in CONTRIBUTING.md. A case's speed is upstream's median over accel's, both timed interleaved in one
run; a row of another run is never divided by one of this.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from accel.certificates import read as read_certificates  # noqa: E402 - a checkout is not on the path before

CERTIFICATES = ROOT / "kernels" / "certificates"
RESULTS = ROOT / "benchmarks" / "results"
#: The kernels that a benchmark's rows are about, where those are not all of the family.
KERNELS = {
    "benchmarks/ops/attention.py": {"sm90_fwd"},
    "benchmarks/ops/attention_cold.py": {"sm90_fwd", "any_decode"},
    "benchmarks/ops/attention_decode.py": {"any_decode"},
    "benchmarks/ops/attention_masks.py": {"sm90_fwd", "any_classify"},
    "benchmarks/ops/gated_delta_rule.py": {"any_recurrent"},
    "benchmarks/ops/gated_delta_rule_chunk.py": {"sm90_fwd"},
    "benchmarks/ops/causal_conv1d.py": {"any_fwd", "any_update"},
}
#: Result files that are not named like their kernel family.
FAMILIES = {"conv1d": "causal_conv1d"}
BEGIN, END = "<!-- benchmark table: made by benchmarks/report.py -->", "<!-- end of benchmark table -->"


@dataclass(frozen=True)
class Comparison:
    """accel beside upstream for one case and pass, in the rows' unit."""

    family: str
    bench: str
    gpu: str
    case: str
    passes: str
    unit: str
    accel: float
    upstream: float
    floor: float | None
    peer: tuple[str, float] | None = None  #: the fastest of the others that were timed with them

    @property
    def speed(self) -> float:
        return self.upstream / self.accel


def read(path: Path) -> list[dict[str, Any]]:
    """The rows of one result file."""
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


def comparisons(path: Path) -> list[Comparison]:
    """Every (case, pass) of a file for which accel and upstream were timed in one run."""
    found: dict[tuple[str, str, str], dict[str, dict[str, Any]]] = defaultdict(dict)
    for row in read(path):
        found[row["case"], row["pass"], row["metric"]][row["provider"]] = row
    result = []
    for (case, passes, metric), rows in found.items():
        if metric != "time" or not {"accel", "upstream"} <= rows.keys():
            continue
        ours, theirs = rows["accel"], rows["upstream"]
        if ours["run"] != theirs["run"]:
            raise ValueError(f"{path}: {case} {passes}: accel and upstream come from different runs")
        others = [
            (row["p50"], provider)
            for provider, row in rows.items()
            if row["run"] == ours["run"] and provider not in ("upstream", "floor") and not provider.startswith("accel")
        ]
        peer = min(others)[::-1] if others else None
        floor = rows["floor"]["p50"] if "floor" in rows else None
        what = (path.stem, ours["bench"], ours["gpu"], case, passes, ours["unit"])
        result.append(Comparison(*what, ours["p50"], theirs["p50"], floor, peer))
    return result


def table(rows: Iterable[Comparison]) -> str:
    """A Markdown table."""
    rows = list(rows)
    peers = any(row.peer for row in rows)
    columns = ["case", "pass", "upstream", "accel", "speed", *(["best other"] if peers else []), "of the memory floor"]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for row in rows:
        cells = [f"`{row.case}`", row.passes, shown(row.upstream, row.unit), shown(row.accel, row.unit)]
        cells.append(f"{row.speed:.2f}x" if row.speed < 100 else f"{row.speed:.0f}x")
        if peers:
            cells.append(f"{row.peer[0]} {shown(row.peer[1], row.unit)}" if row.peer else "")
        cells.append(f"{row.floor / row.accel:.0%}" if row.floor else "")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def shown(value: float, unit: str) -> str:
    """Three digits, and seconds instead of thousands of milliseconds."""
    if unit == "ms" and value >= 1000:
        value, unit = value / 1000, "s"
    return f"{value:.3g} {unit}"


def plot(rows: list[Comparison], path: Path) -> None:
    """One bar per case and pass: how many times faster than upstream. First calls of a process are no speed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in rows if row.passes != "cold_start"]
    labels = [f"{row.case}  {row.passes}" for row in rows]
    figure, axes = pyplot.subplots(figsize=(9, 1.2 + 0.32 * len(rows)))
    bars = axes.barh(labels, [row.speed for row in rows], color="#3b6ea8")
    axes.bar_label(
        bars,
        labels=[f"{row.speed:.2f}x" if row.speed < 100 else f"{row.speed:.0f}x" for row in rows],
        padding=3,
        fontsize=8,
    )
    if max(row.speed for row in rows) > 30:  # a new length is; on a linear axis nothing else would be seen
        axes.set_xscale("log")
    axes.axvline(1, color="#888888", linewidth=1)
    axes.invert_yaxis()
    axes.set_xlabel("times faster than upstream (1 = the same)")
    axes.set_title(f"accel on {rows[0].gpu}", fontsize=10)
    axes.tick_params(axis="y", labelsize=8)
    axes.margins(x=0.1)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def served_comparisons(results: Path = RESULTS, certificates: Path = CERTIFICATES) -> list[Comparison]:
    """Those of whole models, and of the kernels that serve today: the ones with a certificate."""
    kernels: dict[str, set[str]] = defaultdict(set)
    for path in certificates.glob("*.json"):
        for certificate in read_certificates(path):
            if certificate.failure is None:
                kernels[certificate.family].add(certificate.kernel)
    names = {family: family for family in ("models", *sorted(kernels))}
    names |= {family: name for name, family in FAMILIES.items() if family in kernels}
    files = [results / "h200" / f"{name}.jsonl" for name in names.values()]
    rows = [row for path in files if path.exists() for row in comparisons(path)]
    return [row for row in rows if KERNELS.get(row.bench, set()) <= kernels.get(_family(row), set())]


def _family(row: Comparison) -> str:
    return FAMILIES.get(row.family, row.family)


def write_readme(rows: list[Comparison], readme: Path) -> None:
    """Replace what stands between the two markers in README.md."""
    text = readme.read_text()
    if BEGIN not in text or END not in text:
        raise ValueError(f"{readme} lacks the markers {BEGIN!r} and {END!r}")
    head, _, rest = text.partition(BEGIN)
    tail = rest.partition(END)[2]
    readme.write_text(f"{head}{BEGIN}\n{table(rows)}\n{END}{tail}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--print", action="store_true", help="print every result file's table and write nothing")
    options = parser.parse_args()
    rows = served_comparisons()
    if not rows and not options.print:
        raise SystemExit(f"no result rows under {RESULTS}")
    if options.print:
        for path in sorted(RESULTS.glob("h*/*.jsonl")):
            print(f"{path.parent.name}/{path.stem}\n{table(comparisons(path))}\n")
        return
    write_readme(rows, ROOT / "README.md")
    plot(rows, ROOT / "docs" / "speed.png")
    print(f"{len(rows)} rows written to README.md and docs/speed.png")


if __name__ == "__main__":
    main()
