"""Writes TensorBoard's files: scalars, the layout of the dashboard, texts, the table of
hyperparameters and how busy seconds spread over the ranks (`Board`).

Events are built by hand, one per row with all of its scalars: ``add_scalar`` builds and queues one
per value, which costs more than everything else that is measured.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from parallel2d.metrics import keys

HISTOGRAM_EVERY = 10  # rows; a histogram costs twice as much as all scalars of a row

_ANY_AXIS = f"({'|'.join(keys.AXES)})"
_ANY_PHASE = f"({'|'.join(keys.PHASES)})"


def _lines(*patterns: str) -> list[Any]:
    """A chart with a line for every tag that one of the regular expressions matches."""
    return ["Multiline", list(patterns)]


# Charts by group. A pattern matches a tag that it begins, so one that begins others ends with $.
LAYOUT = {
    "Throughput": {
        "tokens per second": _lines(f"{keys.TOKENS_PER_S}$", keys.TOKENS_PER_S_PER_RANK),
        "model TFLOP/s per rank": _lines(keys.MODEL_TFLOPS_PER_RANK),
        "goodput": _lines(keys.GOODPUT),
    },
    "Communication by axis": {
        "bytes sent per rank and step": _lines(keys.communication_key(_ANY_AXIS, "bytes")),
        "seconds per step": _lines(keys.communication_key(_ANY_AXIS, "seconds")),
        "seconds per step that nothing hides": _lines(
            keys.communication_key(_ANY_AXIS, "exposed_seconds")
        ),
        "calls per step": _lines(keys.communication_key(_ANY_AXIS, "calls")),
    },
    "Memory": {"GiB, largest rank": _lines("memory/.*_gib")},
    "Loss": {
        "training and validation": _lines(f"^{keys.LOSS}$", keys.VALIDATION_LOSS),
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


def _layout_of(hparams: Mapping[str, str | float | bool]) -> dict[str, Any]:
    """The charts that a run with these settings fills."""
    replicas: dict[str, Any] = {}
    if hparams.get("replicate", 1) != 1:
        replicas |= BETWEEN_REPLICAS
    if str(hparams.get("sync", "")).startswith("diloco"):
        replicas |= OF_DILOCO
    return {**LAYOUT, "Replicas": replicas} if replicas else dict(LAYOUT)


class Board:
    """``folder``: of the event files; goes on after ``from_step``."""

    def __init__(
        self,
        folder: str,
        from_step: int,
        texts: dict[str, str],
        hparams: dict[str, str | float | bool],
    ) -> None:
        # Imported here, so that only runs with TensorBoard wait for it.
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams as hparams_summary

        self._rows = 0
        # Of a run that goes on, TensorBoard drops the steps that are done again.
        purged = from_step + 1 if from_step else None
        self._writer: Any = SummaryWriter(folder, purge_step=purged, flush_secs=5)
        self._files: Any = self._writer.file_writer
        for name, text in texts.items():
            self._writer.add_text(name, text)
        self._writer.add_custom_scalars(_layout_of(hparams))
        if hparams:
            metrics = dict.fromkeys((keys.LOSS, keys.TOKENS_PER_S, keys.GOODPUT))
            # Into the run's own folder, where its scalars are: ``add_hparams`` makes one beside it.
            for summary in hparams_summary(hparams, metrics):
                _mark_compared(summary)
                self._files.add_summary(summary)  # type: ignore[attr-defined]

    def write(self, row: dict[str, Any], busy_s: Sequence[float]) -> None:
        """The numbers of ``row`` at its step, and how the ranks' busy seconds spread."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [
            Summary.Value(tag=key, simple_value=float(value))
            for key, value in row.items()
            if key != keys.STEP and isinstance(value, int | float)
        ]
        event = Event(wall_time=time.time(), step=row[keys.STEP], summary=Summary(value=values))
        self._files.event_writer.add_event(event)
        self._rows += 1
        if len(busy_s) > 1 and self._rows % HISTOGRAM_EVERY == 1:
            import numpy

            self._writer.add_histogram(keys.BUSY_S, numpy.asarray(busy_s), row[keys.STEP])

    def close(self) -> None:
        """Writes what is left."""
        self._writer.close()


def _mark_compared(summary: Any) -> None:
    """TensorBoard shows the first few columns of its table: those that are marked as different
    between runs, then the others by name."""
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    for value in summary.value:
        content = HParamsPluginData.FromString(value.metadata.plugin_data.content)
        for info in content.experiment.hparam_infos:
            info.differs = info.name in COMPARED
        value.metadata.plugin_data.content = content.SerializeToString()
