"""Draw the pictures of docs/sync.md from the measurements in docs/benchmarks.

    python -m tools.docs.sync_pictures

docs/benchmarks/sync_rates.json maps Mbit/s to the output of `tools/bench/sync.py --json`.
docs/benchmarks/sync_curves.json has the output of `tools/bench/sync_curves.py --json`.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import matplotlib as mpl

mpl.use("svg")

from matplotlib import pyplot

DOCS = Path(__file__).resolve().parents[2] / "docs"
RATES, CURVES = DOCS / "benchmarks" / "sync_rates.json", DOCS / "benchmarks" / "sync_curves.json"
SHOWN = {
    "flat": "flat sharding",
    "fp32": "the default",
    "bf16": "sync.wire=bf16",
    "int8": "sync.wire=int8",
    "int4": "sync.wire=int4",
    "split_int4": "hybrid_full, int4",
    "diloco": "diloco",
    "diloco_int4": "diloco, int4",
    "streaming_int4": "diloco, int4, 3 fragments, delay 5",
}
NAMES = {
    **SHOWN,
    "bf16": "bf16",
    "int8": "int8",
    "diloco_int8": "diloco, int8",
}


def draw_rates() -> None:
    """Draw the seconds of a step by bandwidth."""
    measured = json.loads(RATES.read_text())
    figure, axes = pyplot.subplots(figsize=(9.5, 4.2))
    for method, label in SHOWN.items():
        points = [
            (int(rate), rows[method]["step_s"]) for rate, rows in measured.items() if method in rows
        ]
        axes.plot(*zip(*sorted(points), strict=True), marker="o", markersize=4, label=label)
    rates = sorted(map(int, measured))
    axes.set(xscale="log", yscale="log", xlabel="Mbit/s between nodes", ylabel="seconds of a step")
    axes.set_xticks(rates, [str(rate) for rate in rates])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    _save(figure, "sync_rates.svg")


def draw_curves() -> None:
    """Draw the gap of each method's loss to synchronous training, as a function of the bytes
    sent."""
    measured = json.loads(CURVES.read_text())
    figure, axes = pyplot.subplots(figsize=(7.5, 4.2))
    for method, each in measured.items():
        if method not in NAMES:
            continue
        gaps = [100 * gap for gap in each["gaps"]]
        middle = statistics.fmean(gaps)
        spread = [[middle - min(gaps)], [max(gaps) - middle]]
        axes.errorbar(each["saved"], middle, yerr=spread, marker="o", capsize=3)
        # The labels of points near the right edge are to the left of the points.
        side = {"xytext": (-6, 5), "ha": "right"} if each["saved"] > 100 else {"xytext": (6, 5)}
        place = (each["saved"], middle)
        axes.annotate(NAMES[method], place, textcoords="offset points", fontsize=8, **side)
    axes.axhline(0, color="#888888", linewidth=0.8)
    axes.set(
        xscale="log",
        xlabel="times fewer bytes than exact fp32 gradients",
        ylabel="loss above synchronous (%)",
    )
    axes.margins(x=0.25, y=0.15)
    axes.grid(alpha=0.3)
    _save(figure, "sync_curves.svg")


def _save(figure: pyplot.Figure, name: str) -> None:
    mpl.rcParams["svg.hashsalt"] = name  # the same picture from the same numbers
    figure.tight_layout()
    figure.savefig(DOCS / "images" / name, metadata={"Date": None})
    print(f"wrote {DOCS / 'images' / name}")


if __name__ == "__main__":
    draw_rates()
    draw_curves()
