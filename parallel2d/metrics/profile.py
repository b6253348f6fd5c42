"""Traces of chosen steps on chosen ranks, for chrome://tracing and Perfetto: `StepProfiler`; and
the names of phases and axes in them: `named`.

The trace is ``traces/rank-N-steps-A-B.json`` in the run directory. On GPU a memory snapshot for
pytorch.org/memory_viz is written beside it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import Any

import torch

_HISTORY = 200_000  # allocations and frees that a memory snapshot holds
_active = False  # whether a step of this process is traced now


def named(name: str) -> contextlib.AbstractContextManager[Any]:
    """A region of the trace called ``name``; costs one comparison while no step is traced."""
    return torch.profiler.record_function(name) if _active else contextlib.nullcontext()


class StepProfiler:
    """``steps``: the first and the last step of the trace, or empty for none; ``ranks``: those that
    are traced, empty for all."""

    def __init__(
        self,
        run_dir: str,
        rank: int,
        device: torch.device,
        steps: Sequence[int],
        ranks: Sequence[int],
    ) -> None:
        self._wanted: tuple[int, int] | None = None
        self._path = ""
        if steps and (not ranks or rank in ranks):
            first, last = steps[0], steps[-1]
            self._wanted = (first, last)
            self._path = os.path.join(run_dir, "traces", f"rank-{rank}-steps-{first}-{last}")
        self._gpu = device.type == "cuda"
        self._profiler: Any = None

    def start_step(self, step: int) -> None:
        """Called before every step."""
        if self._wanted is None or self._profiler is not None:
            return
        first, last = self._wanted
        # A run that goes on from a checkpoint may begin in the middle.
        if first <= step <= last:
            self._start()

    def _start(self) -> None:
        global _active
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self._gpu:
            activities.append(torch.profiler.ProfilerActivity.CUDA)
            torch.cuda.memory._record_memory_history(max_entries=_HISTORY)
        self._profiler = torch.profiler.profile(activities=activities, record_shapes=True)
        self._profiler.start()
        _active = True

    def end_step(self, step: int) -> None:
        """Called after every step; writes the trace after the last wanted one."""
        if self._wanted is not None and step >= self._wanted[1]:
            self.close()

    def close(self) -> None:
        """Ends a trace that is running, and writes it."""
        global _active
        if self._profiler is None:
            return
        profiler = self._profiler
        self._profiler = None
        _active = False
        profiler.stop()
        os.makedirs(os.path.dirname(self._path), exist_ok=True)
        profiler.export_chrome_trace(f"{self._path}.json")
        if self._gpu:
            torch.cuda.memory._dump_snapshot(f"{self._path}.pickle")
            torch.cuda.memory._record_memory_history(enabled=None)
