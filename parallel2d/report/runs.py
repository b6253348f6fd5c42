"""Reads run directories: rows, layout, and the figures that a comparison shows."""

from __future__ import annotations

import json
import os
import statistics
from dataclasses import dataclass
from typing import Any

from parallel2d.config import ConfigError

AXES = ("replicate", "shard", "tensor")


@dataclass(frozen=True)
class Run:
    """One run directory as it was found. ``rows``: those of ``metrics.jsonl``, by step."""

    name: str
    path: str
    rows: list[dict[str, Any]]
    layout: dict[str, Any]

    def series(self, key: str) -> list[tuple[float, float]]:
        """(step, value) of the rows that have a finite ``key``."""
        return [(row["step"], row[key]) for row in self.rows if isinstance(row.get(key), int | float)]

    def median(self, key: str) -> float | None:
        """Median over the rows that have ``key``; None without any."""
        values = [value for _, value in self.series(key)]
        return statistics.median(values) if values else None

    def last(self, key: str) -> float | None:
        """The newest value of ``key``; None without any."""
        values = self.series(key)
        return values[-1][1] if values else None


def read_run(path: str) -> Run:
    """Raises `ConfigError` with one sentence for a folder that is no run, or holds no finished step."""
    file = os.path.join(path, "metrics.jsonl")
    if not os.path.isdir(path):
        raise ConfigError(f"{path}: no such run directory")
    if not os.path.exists(file):
        raise ConfigError(f"{path}: no metrics.jsonl here, so this is not a run directory")
    rows: list[dict[str, Any]] = []
    with open(file, errors="replace") as lines:
        for line in lines:
            try:
                row = json.loads(line)
            except ValueError:
                continue  # torn by a kill
            if isinstance(row, dict) and isinstance(row.get("step"), int):
                rows.append(row)
    if not rows:
        raise ConfigError(f"{file}: no finished step in it")
    layout: Any = {}
    try:
        with open(os.path.join(path, "layout.json")) as text:
            layout = json.load(text)
    except FileNotFoundError:
        pass
    except ValueError:
        raise ConfigError(f"{path}/layout.json is not JSON") from None
    return Run(os.path.basename(os.path.abspath(path)), path, rows, layout if isinstance(layout, dict) else {})


def figures(run: Run) -> dict[str, str]:
    """The comparison's columns, as text; ``-`` for what was not measured."""
    mesh = run.layout.get("mesh", {})
    shown = {
        "run": run.name,
        "strategy": str(run.layout.get("strategy", "-")),
        "mesh": " x ".join(str(mesh.get(axis, "?")) for axis in AXES),
        "steps": str(run.rows[-1]["step"]),
        "loss": _number(run.last("loss"), "{:.4f}"),
        "tokens/s": _number(run.median("throughput/tokens_per_s"), "{:,.0f}"),
        "step s": _number(run.median("time/step_s"), "{:.4g}"),
        "TFLOP/s per rank": _number(run.median("throughput/model_tflops_per_rank"), "{:.4g}"),
        "MFU": _number(run.median("throughput/mfu"), "{:.1%}"),
        "goodput": _number(run.last("goodput/fraction"), "{:.1%}"),
    }
    for axis in AXES:
        shown[f"{axis} MB/step"] = _number(run.median(f"comm/{axis}/bytes"), "{:.4g}", 1e-6)
    memory = run.last("memory/peak_gib") or run.last("memory/peak_rss_gib")
    shown["peak GiB"] = _number(memory, "{:.3g}")
    return shown


def measured_and_predicted(run: Run) -> list[tuple[str, float, float | None]]:
    """(axis, median bytes sent per rank and step, predicted bytes or None) of the axes that were measured."""
    predicted = run.layout.get("predicted", {})
    found = []
    for axis in AXES:
        measured = run.median(f"comm/{axis}/bytes")
        if measured is not None:
            found.append((axis, measured, predicted.get(f"comm/{axis}/bytes")))
    return found


def _number(value: float | None, form: str, scale: float = 1.0) -> str:
    return "-" if value is None else form.format(value * scale)
