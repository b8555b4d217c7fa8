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
BEGIN, END = "<!-- benchmark table: made by benchmarks/report.py -->", "<!-- end of benchmark table -->"


@dataclass(frozen=True)
class Comparison:
    """accel beside upstream for one case and pass, in the rows' unit."""

    family: str
    gpu: str
    case: str
    passes: str
    unit: str
    accel: float
    upstream: float
    floor: float | None

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
        floor = rows.get("floor")
        result.append(
            Comparison(
                path.stem, ours["gpu"], case, passes, ours["unit"], ours["p50"], theirs["p50"], floor and floor["p50"]
            )
        )
    return result


def table(rows: Iterable[Comparison]) -> str:
    """A Markdown table."""
    lines = ["| case | pass | upstream | accel | speed | of the memory floor |", "|---|---|---|---|---|---|"]
    for row in rows:
        floor = f"{row.floor / row.accel:.0%}" if row.floor else ""
        lines.append(
            f"| `{row.case}` | {row.passes} | {row.upstream:.3g} {row.unit} | {row.accel:.3g} {row.unit} "
            f"| {row.speed:.2f}x | {floor} |"
        )
    return "\n".join(lines)


def plot(rows: list[Comparison], path: Path) -> None:
    """One bar per case and pass: how many times faster than upstream."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    labels = [f"{row.case}  {row.passes}" for row in rows]
    figure, axes = pyplot.subplots(figsize=(9, 1.2 + 0.32 * len(rows)))
    bars = axes.barh(labels, [row.speed for row in rows], color="#3b6ea8")
    axes.bar_label(bars, labels=[f"{row.speed:.2f}x" for row in rows], padding=3, fontsize=8)
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


def served_comparisons(results: Path = RESULTS) -> list[Comparison]:
    """Those of whole models, and of the families whose kernels serve today: the ones with a certificate."""
    certified = {c.family for path in CERTIFICATES.glob("*.json") for c in read_certificates(path)}
    files = [results / "h200" / f"{name}.jsonl" for name in ("models", *sorted(certified))]
    return [row for path in files if path.exists() for row in comparisons(path)]


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
    if not rows:
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
