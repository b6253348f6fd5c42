"""`MetricsWriter` writes rows to ``metrics.jsonl`` and ``tensorboard/`` on rank 0.

TensorBoard gives each folder of event files a colour. Therefore the measurements of each axis are
also written to a separate folder, under tags that are the same for all axes. A chart of such a tag
then has one colour per axis.
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

from parallel2d.base.errors import ConfigError
from parallel2d.base.files import printable, regular
from parallel2d.training.metrics import keys
from parallel2d.training.metrics.metrics_row import Row, set_aside_after
from parallel2d.training.metrics.tags import (
    BYTES_BETWEEN_HOSTS_PER_S,
    OF_AN_AXIS,
    PERCENT_OF_DEVICE,
    derived,
    description,
    of_axis,
    of_one_rank,
    percent_key,
)

log = logging.getLogger(__name__)

HISTOGRAM_EVERY = 10  # rows; a histogram costs twice as much as all scalars of a row

# Charts by group, with regular expressions for the tags that a chart shows. TensorBoard matches the
# beginning of a tag, so an expression that must not match longer tags ends with $.
LAYOUT = {
    "Throughput": {
        "tokens per second": [f"{keys.TOKENS_PER_S}$"],
        "seconds per step": [f"{keys.STEP_S}$"],
        "tokens per second and rank": [keys.TOKENS_PER_S_PER_RANK],
        "model TFLOP/s per rank": [keys.MODEL_TFLOPS_PER_RANK],
        "goodput": [keys.GOODPUT],
    },
    "Communication by axis": {
        "MB sent per rank and step": [OF_AN_AXIS["bytes"][0]],
        "seconds per step": [OF_AN_AXIS["seconds"][0]],
        "exposed seconds per step": [OF_AN_AXIS["exposed_seconds"][0]],
        "calls per step": [OF_AN_AXIS["calls"][0]],
    },
    "Memory": {"GiB, largest rank": ["memory/.*_gib"]},
    "Loss": {
        "training and validation": [f"^{keys.LOSS}$", "validation/(.*/)?loss$"],
        "gradient norm": [keys.GRAD_NORM],
        "learning rate": [keys.LEARNING_RATE],
    },
    "Where time goes": {
        "seconds of a step": [keys.time_key(f"({'|'.join(keys.PHASES)})_s")],
        "parts of a step, %": [percent_key(".*")],
        "seconds lost so far": ["goodput/lost_.*"],
        "busy time: slowest rank / mean": [keys.SKEW],
    },
}
# Chart for runs with traffic over the replicate axis, and chart for replicas that train
# independently
BETWEEN_REPLICAS = {"compression: exact bytes / sent bytes": [keys.COMPRESSION]}
SHARED_CHANGES = {"norm of the outer step": [keys.OUTER_NORM]}
# Charts for which only some jobs have data, by their key in `MetricsWriter.charts`
OPTIONAL = {
    "mfu": ("Throughput", {"MFU": [keys.MFU]}),
    "hosts": (
        "Between nodes",
        {
            "bytes per rank and step": [f"{keys.BYTES_BETWEEN_HOSTS}$"],
            "bytes per rank and second": [BYTES_BETWEEN_HOSTS_PER_S],
        },
    ),
    "device": ("Memory", {"% of the device, largest rank": [PERCENT_OF_DEVICE]}),
    "replicas": ("Replicas", {"live replicas": [keys.REPLICAS]}),
}
# Columns of TensorBoard's table of runs: settings that are shown first (`COMPARED`), and the last
# values of metrics (`_RESULTS`)
COMPARED = ("strategy", "replicate", "shard", "tensor", "lr")
_HPARAMS = "events.out.tfevents.0.hparams"
_RESULTS = (keys.VALIDATION_LOSS, keys.LOSS, keys.TOKENS_PER_S, keys.GOODPUT)


@dataclass
class MetricsWriter:
    """Appends one row per logged step to ``metrics.jsonl`` and TensorBoard, and flushes it.

    A failed write, for example on a full disk, does not end the run. The first failure is logged,
    and the number of lost rows is logged at the end.
    """

    run_dir: str
    texts: Mapping[str, str]  # config and mesh, shown as Markdown in TensorBoard
    _: KW_ONLY
    tensorboard: bool
    # Settings that distinguish the runs of a sweep, for TensorBoard's table of runs
    hparams: Mapping[str, str | float | bool] = field(default_factory=dict)
    axes: Sequence[str] = ()  # mesh axes with more than one rank
    charts: Sequence[str] = ()  # keys of `OPTIONAL`
    device_gib: float | None = None  # memory of a rank's device; None on CPU
    replicas_equal: bool = True  # False if replicas train independently (``sync=diloco``)

    def __post_init__(self) -> None:
        self._path = os.path.join(self.run_dir, "metrics.jsonl")
        self._board = os.path.join(self.run_dir, "tensorboard")
        self._file: FileIO | None = None
        # Subfolder of ``tensorboard/`` -> event file: "" for the run, and one subfolder per axis.
        # Empty without TensorBoard
        self._events: dict[str, _EventFile] = {}
        self._rows = 0
        self._lost_rows = 0

    def begin(self, from_step: int) -> tuple[Row | None, Row | None]:
        """Open both files to continue after ``from_step``, and remove the rows of later steps,
        which are repeated now. Raises OSError, and `ConfigError` if the existing rows cannot be
        read.

        Returns the last row before the removal, and the last row that stays. Each may be None.
        """
        try:
            found = set_aside_after(self._path, from_step)
        except OSError as error:
            raise ConfigError(
                f"{printable(self._path, 300)}: {error.strerror}; use another hydra.run.dir"
            ) from None
        # Unbuffered: a buffer would retry the bytes that a full disk has rejected.
        self._file = FileIO(self._path, "ab", opener=regular)
        if self.tensorboard:
            for name in ("", *self.axes):
                self._events[name] = _EventFile(os.path.join(self._board, name), from_step)
            for summary in _introduction(self):
                self._events[""].add(summary)
            self._write_hparams()
        return found

    def _write_hparams(self) -> None:
        """Write the settings for TensorBoard's table of runs. TensorBoard shows the first entry in
        a folder, so the file of an earlier start is deleted first."""
        if not self.hparams:
            return
        from torch.utils.tensorboard import summary

        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(self._board, _HPARAMS))
        events = _EventFile(self._board, 0, _HPARAMS)
        # The settings are written to the folder of the run's scalars. ``add_hparams`` would create
        # another folder.
        for part in summary.hparams(self.hparams, dict.fromkeys(_RESULTS)):
            _mark_compared(part)
            events.add(part)
        events.close()

    def write(self, row: Row, busy_s: Sequence[float] = ()) -> None:
        """Write a row, which has the key ``step``. Numbers that are not finite become null.
        ``busy_s``: busy seconds by rank."""
        assert self._file is not None, "begin() comes first"
        clean = dict(row)
        for key, value in row.items():
            # JSON has no NaN and no infinity.
            if isinstance(value, float) and not math.isfinite(value):
                clean[key] = None
        try:
            os.stat(self._path)  # writing to a deleted file would succeed without any effect
            end, line = self._file.seek(0, os.SEEK_END), json.dumps(clean).encode() + b"\n"
            if self._file.write(line) < len(line):
                # The disk is full. Remove the partial row: a later row would be appended to it.
                self._file.truncate(end)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self._path)
        except OSError as error:
            if not self._lost_rows:
                first = f"{self._path} cannot be written, from step {row[keys.STEP]} on"
                log.error("%s (%s): training continues", first, error.strerror)
            self._lost_rows += 1
        self._rows += 1
        with self._reported_once():
            self._write_events(row, busy_s)

    def _write_events(self, row: Row, busy_s: Sequence[float]) -> None:
        if not self._events:
            return
        scalars = {}
        for key, value in row.items():
            if isinstance(value, int | float):
                scalars[key] = value
        step = int(scalars.pop(keys.STEP))
        scalars.pop(keys.SEGMENT, None)
        for tag in of_one_rank(tuple(self.axes)):
            scalars.pop(tag, None)
        scalars |= derived(scalars, self.device_gib)
        (_, own), *of_axes = self._events.items()
        own.add_scalars(scalars, step)
        for axis, events in of_axes:
            events.add_scalars(of_axis(axis, scalars), step)
        if len(busy_s) > 1 and self._rows % HISTOGRAM_EVERY == 1:
            import numpy
            from torch.utils.tensorboard import summary

            spread = summary.histogram(keys.BUSY_S, numpy.asarray(busy_s), "auto")
            own.add(spread, step)

    def text(self, tag: str, text: str, step: int) -> None:
        """Show ``text`` verbatim under ``tag`` in TensorBoard, if this run uses TensorBoard."""
        if self._events:
            from torch.utils.tensorboard import summary

            with self._reported_once():
                self._events[""].add(summary.text(tag, f"```\n{text}\n```"), step)

    @contextlib.contextmanager
    def _reported_once(self) -> Iterator[None]:
        """Report the first failed write to TensorBoard and stop writing. TensorBoard stops reading
        at an incomplete record, so records after it would be lost."""
        try:
            yield
        except OSError as error:
            log.error("%s cannot be written (%s): training continues", self._board, error.strerror)
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
    """An event file in ``folder``. The file makes TensorBoard ignore the steps after ``from_step``
    in earlier files. The calling thread writes the file, because the thread of ``SummaryWriter``
    prints a traceback if the disk is full."""

    def __init__(self, folder: str, from_step: int, name: str = "") -> None:
        # Imported here and below, so that runs without TensorBoard do not load it.
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        os.makedirs(folder, exist_ok=True)
        # TensorBoard reads the files of a folder in alphabetical order.
        name = name or f"events.out.tfevents.{time.time():.6f}.{os.getpid()}"
        self._records = RecordWriter(open(os.path.join(folder, name), "xb"))  # noqa: SIM115
        self._event = Event
        self._described: set[str] = set()
        self._write(Event(file_version="brain.Event:2"))
        if from_step:
            started = SessionLog(status=SessionLog.START)
            self._write(Event(step=from_step + 1, session_log=started))

    def add(self, summary: Any, step: int = 0) -> None:
        self._write(self._event(step=step, summary=summary))

    def add_scalars(self, scalars: Mapping[str, float], step: int) -> None:
        """Write all scalars as one event: an event per scalar would cost more than all other
        measurements together."""
        from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata

        values = []
        for tag, value in scalars.items():
            values.append(Summary.Value(tag=tag, simple_value=value))
        for value in values:
            if value.tag not in self._described:  # TensorBoard reads the first description
                text = description(value.tag)
                value.metadata.CopyFrom(SummaryMetadata(summary_description=text))
                self._described.add(value.tag)
        self.add(Summary(value=values), step)

    def _write(self, event: Any) -> None:
        event.wall_time = time.time()
        self._records.write(event.SerializeToString())
        self._records.flush()

    def close(self) -> None:
        with contextlib.suppress(OSError):  # buffered data may again fail to be written
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
    for group, by_title in map(OPTIONAL.__getitem__, writer.charts):
        charts.setdefault(group, {})
        for title, tags in by_title.items():
            charts[group][title] = ["Multiline", tags]
    yield summary.custom_scalars(charts)


def _mark_compared(summary: Any) -> None:
    """Mark the columns `COMPARED` as different between runs, because TensorBoard shows such columns
    first."""
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    for value in summary.value:
        content = HParamsPluginData.FromString(value.metadata.plugin_data.content)
        for info in content.experiment.hparam_infos:
            info.differs = info.name in COMPARED
        value.metadata.plugin_data.content = content.SerializeToString()
