"""TensorBoard's files: scalars, a dashboard that opens by itself, texts, the hyperparameter table,
spread over ranks.

Rows flow in. Events are built by hand, one per row with all of its scalars: ``add_scalar`` builds
and queues one per value, which costs more than everything else that is measured.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

HISTOGRAM_EVERY = 10  # rows; a histogram costs twice as much as all scalars of a row

LAYOUT = {
    "Throughput": {
        "tokens per second": [
            "Multiline",
            ["throughput/tokens_per_s$", "throughput/tokens_per_s_per_rank"],
        ],
        "model TFLOP/s per rank": ["Multiline", ["throughput/model_tflops_per_rank"]],
        "goodput": ["Multiline", ["goodput/fraction"]],
    },
    "Communication by axis": {
        "bytes sent per rank and step": ["Multiline", ["comm/(replicate|shard|tensor)/bytes"]],
        "seconds per step": ["Multiline", ["comm/(replicate|shard|tensor)/seconds"]],
        "seconds per step that nothing hides": [
            "Multiline",
            ["comm/(replicate|shard|tensor)/exposed_seconds"],
        ],
        "calls per step": ["Multiline", ["comm/(replicate|shard|tensor)/calls"]],
    },
    "Memory": {"GiB, largest rank": ["Multiline", ["memory/.*_gib"]]},
    "Loss": {
        "training and validation": ["Multiline", ["^loss$", "validation/loss"]],
        "gradient norm": ["Multiline", ["grad_norm"]],
    },
    "Where time goes": {
        "seconds of a step": ["Multiline", ["time/(forward_backward|data|sync|optimizer)_s"]],
        "seconds lost so far": ["Multiline", ["goodput/lost_.*"]],
        "slowest rank over the mean": ["Multiline", ["rank/skew"]],
    },
}
# the columns that the table of runs shows first
COMPARED = ("strategy", "replicate", "shard", "tensor", "lr")


class Board:
    """``folder``: of the event files; goes on after ``from_step``."""

    def __init__(
        self,
        folder: str,
        from_step: int,
        texts: dict[str, str],
        hparams: dict[str, str | float | bool],
    ) -> None:
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams as hparams_summary

        self._rows = 0
        self._writer: Any = SummaryWriter(
            folder, purge_step=from_step + 1 if from_step else None, flush_secs=5
        )
        self._files: Any = self._writer.file_writer
        for name, text in texts.items():
            self._writer.add_text(name, text)
        self._writer.add_custom_scalars(LAYOUT)
        if hparams:
            metrics = {"loss": None, "throughput/tokens_per_s": None, "goodput/fraction": None}
            # into the run's own folder, where its scalars are
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
            if key != "step" and isinstance(value, int | float)
        ]
        event = Event(wall_time=time.time(), step=row["step"], summary=Summary(value=values))
        self._files.event_writer.add_event(event)
        self._rows += 1
        if len(busy_s) > 1 and self._rows % HISTOGRAM_EVERY == 1:
            import numpy

            self._writer.add_histogram("rank/busy_s", numpy.asarray(busy_s), row["step"])

    def close(self) -> None:
        """Writes what is left."""
        self._writer.close()


def _mark_compared(summary: Any) -> None:
    """TensorBoard shows the first few columns of its table: those that are said to differ, then the
    alphabet."""
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    for value in summary.value:
        content = HParamsPluginData.FromString(value.metadata.plugin_data.content)
        for info in content.experiment.hparam_infos:
            info.differs = info.name in COMPARED
        value.metadata.plugin_data.content = content.SerializeToString()
