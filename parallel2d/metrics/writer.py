"""Writes rows to ``metrics.jsonl`` and ``tensorboard/``, on rank 0 only: `MetricsWriter`.

TensorBoard gives each folder of event files a colour. So what is measured for each axis is also
written to a folder of that axis, under a tag that all axes share, and a chart of the tag shows them
in colours of their own.

Events are built by hand, one per row with all of its scalars: ``add_scalar`` builds and queues one
per value, which costs more than everything else that is measured.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from parallel2d.metrics import keys
from parallel2d.metrics.row_file import Row, set_aside_after

HISTOGRAM_EVERY = 10  # rows; a histogram costs twice as much as all scalars of a row

# In the folder of an axis: tag by quantity, and what a value is multiplied by
OF_AN_AXIS = {
    "bytes": ("axis/megabytes", 1e-6),
    "seconds": ("axis/seconds", 1.0),
    "exposed_seconds": ("axis/exposed_seconds", 1.0),
    "calls": ("axis/calls", 1.0),
}
_ANY_PHASE = f"({'|'.join(keys.PHASES)})"


def _lines(*patterns: str) -> list[Any]:
    """A chart with a line for every tag that one of the regular expressions matches."""
    return ["Multiline", list(patterns)]


# Charts by group. A pattern matches a tag that it begins, so one that begins others ends with $.
LAYOUT = {
    "Throughput": {
        "tokens per second": _lines(f"{keys.TOKENS_PER_S}$"),
        "tokens per second and rank": _lines(keys.TOKENS_PER_S_PER_RANK),
        "model TFLOP/s per rank": _lines(keys.MODEL_TFLOPS_PER_RANK),
        "goodput": _lines(keys.GOODPUT),
    },
    "Communication by axis": {
        "MB sent per rank and step": _lines(OF_AN_AXIS["bytes"][0]),
        "seconds per step": _lines(OF_AN_AXIS["seconds"][0]),
        "seconds per step that nothing hides": _lines(OF_AN_AXIS["exposed_seconds"][0]),
        "calls per step": _lines(OF_AN_AXIS["calls"][0]),
    },
    "Memory": {"GiB, largest rank": _lines("memory/.*_gib")},
    "Loss": {
        "training and validation": _lines(f"^{keys.LOSS}$", "validation/(.*/)?loss$"),
        "gradient norm": _lines(keys.GRAD_NORM),
    },
    "Where time goes": {
        "seconds of a step": _lines(keys.time_key(f"{_ANY_PHASE}_s")),
        "seconds lost so far": _lines("goodput/lost_.*"),
        "slowest rank over the mean": _lines(keys.SKEW),
    },
}
# Only where something crosses the replicate axis, and where replicas train on their own
BETWEEN_REPLICAS = {"bytes saved: exact over sent": _lines(keys.COMPRESSION)}
OF_DILOCO = {"norm of the shared change": _lines(keys.OUTER_NORM)}
# the columns that the table of runs shows first
COMPARED = ("strategy", "replicate", "shard", "tensor", "lr")
# and the results, of which it shows the last value
_RESULTS = (keys.VALIDATION_LOSS, keys.LOSS, keys.TOKENS_PER_S, keys.GOODPUT)


def _layout_of(hparams: Mapping[str, str | float | bool], axes: Sequence[str]) -> dict[str, Any]:
    """The charts that a run with these settings fills."""
    replicas: dict[str, Any] = {}
    if "replicate" in axes:
        replicas |= BETWEEN_REPLICAS
    if str(hparams.get("sync", "")).startswith("diloco"):
        replicas |= OF_DILOCO
    return {**LAYOUT, "Replicas": replicas} if replicas else dict(LAYOUT)


class Board:
    """``folder``: of the event files; goes on after ``from_step``. ``axes``: of the mesh, those
    with several ranks, each of which gets a folder in it."""

    def __init__(
        self,
        folder: str,
        from_step: int,
        texts: dict[str, str],
        hparams: dict[str, str | float | bool],
        axes: Sequence[str] = (),
    ) -> None:
        # Imported here, so that only runs with TensorBoard wait for it.
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams as hparams_summary

        self._rows = 0
        # Of a run that goes on, TensorBoard drops the steps that are done again.
        purged = from_step + 1 if from_step else None
        self._writer: Any = SummaryWriter(folder, purge_step=purged, flush_secs=5)
        self._files: Any = self._writer.file_writer
        self._axes: dict[str, Any] = {
            axis: SummaryWriter(os.path.join(folder, axis), purge_step=purged, flush_secs=5)
            for axis in axes
        }
        for name, text in texts.items():
            self._writer.add_text(name, text)
        self._writer.add_custom_scalars(_layout_of(hparams, axes))
        if hparams:
            metrics = dict.fromkeys(_RESULTS)
            # Into the run's own folder, where its scalars are: ``add_hparams`` makes one beside it.
            for summary in hparams_summary(hparams, metrics):
                _mark_compared(summary)
                self._files.add_summary(summary)  # type: ignore[attr-defined]

    def write(self, row: dict[str, Any], busy_s: Sequence[float]) -> None:
        """The numbers of ``row`` at its step, and how the ranks' busy seconds spread."""
        step = row[keys.STEP]
        scalars = {
            key: float(value)
            for key, value in row.items()
            if key not in (keys.STEP, keys.SEGMENT) and isinstance(value, int | float)
        }
        _add(self._files, step, scalars)
        for axis, writer in self._axes.items():
            moved: dict[str, float] = {}
            for quantity, (tag, scale) in OF_AN_AXIS.items():
                value = scalars.get(keys.communication_key(axis, quantity))
                if value is not None:
                    moved[tag] = scale * value
            # The first row of a process has no measurement.
            if moved:
                _add(writer.file_writer, step, moved)
        self._rows += 1
        if len(busy_s) > 1 and self._rows % HISTOGRAM_EVERY == 1:
            import numpy

            self._writer.add_histogram(keys.BUSY_S, numpy.asarray(busy_s), row[keys.STEP])

    def text(self, tag: str, text: str, step: int) -> None:
        """Shows ``text``, as it stands, under ``tag``."""
        self._writer.add_text(tag, f"```\n{text}\n```", step)

    def close(self) -> None:
        """Writes what is left."""
        for writer in (self._writer, *self._axes.values()):
            writer.close()


def _add(files: Any, step: int, scalars: Mapping[str, float]) -> None:
    """All of them as one event."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

    values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
    event = Event(wall_time=time.time(), step=step, summary=Summary(value=values))
    files.event_writer.add_event(event)


def _mark_compared(summary: Any) -> None:
    """TensorBoard shows the first few columns of its table: those that are marked as different
    between runs, then the others by name."""
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    for value in summary.value:
        content = HParamsPluginData.FromString(value.metadata.plugin_data.content)
        for info in content.experiment.hparam_infos:
            info.differs = info.name in COMPARED
        value.metadata.plugin_data.content = content.SerializeToString()


class MetricsWriter:
    """Appends one flat row per logged step to both places. Lines are flushed as they are written.

    ``texts``: shown in TensorBoard beside the curves (``config``, ``mesh``), as Markdown.
    ``hparams``: settings by which the runs of a sweep are told apart, so that TensorBoard shows
    them in one table. ``axes``: of the mesh, those with several ranks.
    """

    def __init__(
        self,
        run_dir: str,
        texts: dict[str, str],
        *,
        tensorboard: bool,
        hparams: dict[str, str | float | bool] | None = None,
        axes: Sequence[str] = (),
    ) -> None:
        self._run_dir = run_dir
        self._texts = texts
        self._tensorboard = tensorboard
        self._hparams = hparams or {}
        self._axes = tuple(axes)
        self._file: TextIO | None = None
        self._board: Board | None = None

    def begin(self, from_step: int) -> tuple[Row | None, Row | None]:
        """Opens both, to go on after ``from_step``; a restart undid the steps of later rows.

        Returns the last row that was written before, undone or not, and the last one that stands;
        None where there is none.
        """
        path = os.path.join(self._run_dir, "metrics.jsonl")
        rows = set_aside_after(path, from_step)
        self._file = open(path, "a")  # noqa: SIM115 (closed by close)
        if self._tensorboard:
            folder = os.path.join(self._run_dir, "tensorboard")
            self._board = Board(folder, from_step, self._texts, self._hparams, self._axes)
        return rows

    def write(self, row: Row, busy_s: Sequence[float] = ()) -> None:
        """``row`` must hold ``step``; numbers become scalars, non-finite ones are written as null.
        ``busy_s``: of each rank."""
        assert self._file is not None, "begin() comes first"
        clean = {key: _finite(value) for key, value in row.items()}
        self._file.write(json.dumps(clean) + "\n")
        self._file.flush()
        if self._board is not None:
            self._board.write(row, busy_s)

    def text(self, tag: str, text: str, step: int) -> None:
        """A text in TensorBoard, where that is written."""
        if self._board is not None:
            self._board.text(tag, text, step)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        if self._board is not None:
            self._board.close()


def _finite(value: Any) -> Any:
    # JSON has no NaN and no infinity.
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
