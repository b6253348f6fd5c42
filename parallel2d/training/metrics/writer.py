"""Writes rows to ``metrics.jsonl`` and ``tensorboard/``, on rank 0 only: `MetricsWriter`.

TensorBoard gives each folder of event files a colour. So what is measured for each axis is also
written to a folder of that axis, under one tag for all, whose chart has a colour for each.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from io import FileIO
from typing import Any

from parallel2d.base.files import regular
from parallel2d.training.metrics import keys
from parallel2d.training.metrics.metrics_row import Row, set_aside_after

log = logging.getLogger(__name__)

HISTOGRAM_EVERY = 10  # rows; a histogram costs twice as much as all scalars of a row

# In the folder of an axis: tag by quantity, and what a value is multiplied by
OF_AN_AXIS = {
    "bytes": ("axis/megabytes", 1e-6),
    "seconds": ("axis/seconds", 1.0),
    "exposed_seconds": ("axis/exposed_seconds", 1.0),
    "calls": ("axis/calls", 1.0),
}

# Charts by group: regular expressions for the tags that a chart has lines for. An expression
# matches a tag that it begins, so one that begins others ends with $.
LAYOUT = {
    "Throughput": {
        "tokens per second": [f"{keys.TOKENS_PER_S}$"],
        "tokens per second and rank": [keys.TOKENS_PER_S_PER_RANK],
        "model TFLOP/s per rank": [keys.MODEL_TFLOPS_PER_RANK],
        "goodput": [keys.GOODPUT],
    },
    "Communication by axis": {
        "MB sent per rank and step": [OF_AN_AXIS["bytes"][0]],
        "seconds per step": [OF_AN_AXIS["seconds"][0]],
        "seconds per step that nothing hides": [OF_AN_AXIS["exposed_seconds"][0]],
        "calls per step": [OF_AN_AXIS["calls"][0]],
    },
    "Memory": {"GiB, largest rank": ["memory/.*_gib"]},
    "Loss": {
        "training and validation": [f"^{keys.LOSS}$", "validation/(.*/)?loss$"],
        "gradient norm": [keys.GRAD_NORM],
    },
    "Where time goes": {
        "seconds of a step": [keys.time_key(f"({'|'.join(keys.PHASES)})_s")],
        "seconds lost so far": ["goodput/lost_.*"],
        "slowest rank over the mean": [keys.SKEW],
    },
}
# Only where something crosses the replicate axis, and where replicas train on their own
BETWEEN_REPLICAS = {"bytes saved: exact over sent": [keys.COMPRESSION]}
SHARED_CHANGES = {"norm of the shared change": [keys.OUTER_NORM]}
# Of the table of runs: the columns that it shows first, and the results, by their last values
COMPARED = ("strategy", "replicate", "shard", "tensor", "lr")
_HPARAMS = "events.out.tfevents.0.hparams"
_RESULTS = (keys.VALIDATION_LOSS, keys.LOSS, keys.TOKENS_PER_S, keys.GOODPUT)


@dataclass
class MetricsWriter:
    """Appends one flat row per logged step to both places. Lines are flushed as they are written.

    What cannot be written (the disk is full, the run directory was deleted) ends no run: it is
    reported once, and rows that are lost are counted.
    """

    run_dir: str
    texts: Mapping[str, str]  # config and mesh, which TensorBoard shows as Markdown
    _: KW_ONLY
    tensorboard: bool
    # By which the runs of a sweep are told apart: TensorBoard shows them in one table
    hparams: Mapping[str, str | float | bool] = field(default_factory=dict)
    axes: Sequence[str] = ()  # of the mesh, those with several ranks
    replicas_equal: bool = True  # after every update; others share their changes now and then

    def __post_init__(self) -> None:
        self._path = os.path.join(self.run_dir, "metrics.jsonl")
        self._board = os.path.join(self.run_dir, "tensorboard")
        self._file: FileIO | None = None
        # By the folder in that of TensorBoard: an axis, or nothing for its own; empty without
        self._events: dict[str, _EventFile] = {}
        self._rows = 0
        self._lost_rows = 0

    def begin(self, from_step: int) -> tuple[Row | None, Row | None]:
        """Opens both, to go on after ``from_step``; a restart undid the steps of later rows.
        Raises OSError.

        Returns the last row that was there, undone or not, and the last one that stands; or None.
        """
        found = set_aside_after(self._path, from_step)
        # Without a buffer, which would keep what a full disk has refused for the next row.
        self._file = FileIO(self._path, "ab", opener=regular)
        if self.tensorboard:
            for name in ("", *self.axes):
                self._events[name] = _EventFile(os.path.join(self._board, name), from_step)
            for summary in _introduction(self):
                self._events[""].add(summary)
            self._write_hparams()
        return found

    def _write_hparams(self) -> None:
        """TensorBoard shows the first that a folder holds: they replace those of earlier starts."""
        if not self.hparams:
            return
        from torch.utils.tensorboard import summary

        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(self._board, _HPARAMS))
        events = _EventFile(self._board, 0, _HPARAMS)
        # Into the run's own folder, where its scalars are: ``add_hparams`` makes one beside it.
        for part in summary.hparams(self.hparams, dict.fromkeys(_RESULTS)):
            _mark_compared(part)
            events.add(part)
        events.close()

    def write(self, row: Row, busy_s: Sequence[float] = ()) -> None:
        """``row`` holds ``step``; numbers that are not finite become null. ``busy_s``: by rank."""
        assert self._file is not None, "begin() comes first"
        clean = dict(row)
        for key, value in row.items():
            # JSON has no NaN and no infinity.
            if isinstance(value, float) and not math.isfinite(value):
                clean[key] = None
        try:
            os.stat(self._path)  # a deleted file can still be written to, and nobody would see it
            end, line = self._file.seek(0, os.SEEK_END), json.dumps(clean).encode() + b"\n"
            if self._file.write(line) < len(line):
                # The rest did not fit, and no row may follow half of another.
                self._file.truncate(end)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self._path)
        except OSError as error:
            if not self._lost_rows:
                first = f"{self._path} cannot be written, from step {row[keys.STEP]} on"
                log.error("%s (%s): training goes on", first, error.strerror)
            self._lost_rows += 1
        self._rows += 1
        with self._reported_once():
            self._write_events(row, busy_s)

    def _write_events(self, row: Row, busy_s: Sequence[float]) -> None:
        if not self._events:
            return
        scalars = {key: value for key, value in row.items() if isinstance(value, int | float)}
        step = int(scalars.pop(keys.STEP))
        scalars.pop(keys.SEGMENT, None)
        (_, own), *of_axes = self._events.items()
        own.add_scalars(scalars, step)
        for axis, events in of_axes:
            events.add_scalars(_of_axis(axis, scalars), step)
        if len(busy_s) > 1 and self._rows % HISTOGRAM_EVERY == 1:
            import numpy
            from torch.utils.tensorboard import summary

            spread = summary.histogram(keys.BUSY_S, numpy.asarray(busy_s), "auto")
            own.add(spread, step)

    def text(self, tag: str, text: str, step: int) -> None:
        """Shows ``text``, as it stands, under ``tag`` in TensorBoard, where that is written."""
        if self._events:
            from torch.utils.tensorboard import summary

            with self._reported_once():
                self._events[""].add(summary.text(tag, f"```\n{text}\n```"), step)

    @contextlib.contextmanager
    def _reported_once(self) -> Iterator[None]:
        """Around what is written for TensorBoard. It reads no further than a record that was cut,
        so nothing follows one that could not be written."""
        try:
            yield
        except OSError as error:
            log.error("%s cannot be written (%s): training goes on", self._board, error.strerror)
            self._close_events()

    def _close_events(self) -> None:
        while self._events:
            self._events.popitem()[1].close()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._close_events()
        if self._lost_rows:
            log.error("%d rows are missing in %s", self._lost_rows, self._path)


class _EventFile:
    """A file of TensorBoard's in ``folder``, which drops the steps after ``from_step`` that earlier
    files hold. Written in this thread: ``SummaryWriter``'s prints a traceback on a full disk."""

    def __init__(self, folder: str, from_step: int, name: str = "") -> None:
        # Imported here and below, so that only runs with TensorBoard wait for it.
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        os.makedirs(folder, exist_ok=True)
        # TensorBoard reads the files of a folder in the order of their names.
        name = name or f"events.out.tfevents.{time.time():.6f}.{os.getpid()}"
        self._records = RecordWriter(open(os.path.join(folder, name), "xb"))  # noqa: SIM115
        self._event = Event
        self._write(Event(file_version="brain.Event:2"))
        if from_step:
            started = SessionLog(status=SessionLog.START)
            self._write(Event(step=from_step + 1, session_log=started))

    def add(self, summary: Any, step: int = 0) -> None:
        self._write(self._event(step=step, summary=summary))

    def add_scalars(self, scalars: Mapping[str, float], step: int) -> None:
        """All of them as one event: one for each would cost more than all else that is measured."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
        self.add(Summary(value=values), step)

    def _write(self, event: Any) -> None:
        event.wall_time = time.time()
        self._records.write(event.SerializeToString())
        self._records.flush()

    def close(self) -> None:
        with contextlib.suppress(OSError):  # of what could not be written before
            self._records.close()


def _introduction(writer: MetricsWriter) -> Iterator[Any]:
    from torch.utils.tensorboard import summary

    for name, text in writer.texts.items():
        yield summary.text(name, text)
    replicas = dict(BETWEEN_REPLICAS) if "replicate" in writer.axes else {}
    if not writer.replicas_equal:
        replicas |= SHARED_CHANGES
    charts: dict[str, Any] = {}
    for group, by_title in {**LAYOUT, "Replicas": replicas}.items():
        if by_title:
            charts[group] = {title: ["Multiline", tags] for title, tags in by_title.items()}
    yield summary.custom_scalars(charts)


def _mark_compared(summary: Any) -> None:
    """TensorBoard's table shows a few columns: first those marked as different between runs."""
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    for value in summary.value:
        content = HParamsPluginData.FromString(value.metadata.plugin_data.content)
        for info in content.experiment.hparam_infos:
            info.differs = info.name in COMPARED
        value.metadata.plugin_data.content = content.SerializeToString()


def _of_axis(axis: str, scalars: Mapping[str, float]) -> dict[str, float]:
    """What was measured for ``axis``, by the tags that all axes share; nothing in a first row."""
    moved: dict[str, float] = {}
    for quantity, (tag, scale) in OF_AN_AXIS.items():
        key = keys.communication_key(axis, quantity)
        if key in scalars:
            moved[tag] = scale * scalars[key]
    return moved
