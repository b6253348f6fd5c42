"""Phases of a step. `PhaseClock` measures their durations. `StepProfiler` writes traces of chosen
steps and ranks for chrome://tracing and Perfetto, in which the phases are named regions."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch

from parallel2d.base.device import timed_event

log = logging.getLogger(__name__)

# Names of the phases in a trace, in the order of the loop. The names in rows are in `metrics.keys`
_TRACE_NAMES = ("forward_backward", "data", "agree", "update")
_HISTORY = 200_000  # allocations and frees in a memory snapshot
_active = False  # True while a step of this process is traced


def named(name: str) -> contextlib.AbstractContextManager[Any]:
    """Return a context for a region of the trace with this name. While no step is traced, the
    context does nothing."""
    return torch.profiler.record_function(name) if _active else contextlib.nullcontext()


class Intervals:
    """Durations by name. The begin and end of an interval are host times, or device events with
    timing. Reading never waits for the device: an interval that has not ended yet is counted by a
    later `read`."""

    def __init__(self) -> None:
        self._new: list[tuple[str, Any, Any]] = []
        # Intervals that had not ended at the last read
        self._outstanding: list[tuple[str, Any, Any]] = []

    def add(self, name: str, begin: Any, end: Any) -> None:
        self._new.append((name, begin, end))

    def forget(self) -> None:
        """Drop the intervals since the last `read`."""
        self._new.clear()

    def read(self) -> dict[str, float]:
        """Return the seconds by name of all intervals that have ended since the last call."""
        seconds: dict[str, float] = defaultdict(float)
        intervals, self._new, self._outstanding = [*self._outstanding, *self._new], [], []
        for name, begin, end in intervals:
            if isinstance(end, float):
                seconds[name] += end - begin
            elif end.query():
                seconds[name] += begin.elapsed_time(end) / 1e3
            else:
                self._outstanding.append((name, begin, end))
        return dict(seconds)


class PhaseClock:
    """Marks the ends of consecutive phases of a step, and returns their durations. On GPU each mark
    is an event in the current stream, so that measuring never waits for the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._phases = Intervals()
        self._last: Any = None  # the previous mark
        self._marks = 0
        self._region = contextlib.ExitStack()  # the current phase in a trace

    def start(self) -> None:
        """Begin a step."""
        self._phases.forget()
        self._last, self._marks = None, 0
        self.mark("")

    def mark(self, phase: str) -> None:
        """End ``phase``, which began at the previous mark. Durations of phases with the same name
        are added."""
        now = self._now()
        if self._last is not None:
            self._phases.add(phase, self._last, now)
        self._region.close()
        # The last mark of a step only ends a phase.
        if self._marks < len(_TRACE_NAMES):
            self._region.enter_context(named(_TRACE_NAMES[self._marks]))
        self._last = now
        self._marks += 1

    def read(self) -> dict[str, float]:
        """Return the seconds per phase. On GPU, a phase that has not ended at this call is counted
        in the next step."""
        return self._phases.read()

    def _now(self) -> float | torch.Event:
        if self._device.type == "cpu":
            return time.perf_counter()
        event = timed_event(self._device.type)
        event.record()
        return event


class StepProfiler:
    """Writes ``traces/rank-N-steps-A-B.json`` in the run directory; on GPU also a memory snapshot
    for pytorch.org/memory_viz.

    Args:
        run_dir: the run directory.
        rank, device: this rank and its device.
        steps: first and last step of the trace; empty for no trace.
        ranks: ranks to trace; empty for all ranks.
    """

    def __init__(
        self,
        run_dir: str,
        rank: int,
        device: torch.device,
        steps: Sequence[int],
        ranks: Sequence[int],
    ) -> None:
        self._steps = range(0)
        if steps and (not ranks or rank in ranks):
            self._steps = range(steps[0], steps[-1] + 1)
            self._path = f"{run_dir}/traces/rank-{rank}-steps-{steps[0]}-{steps[-1]}"
        self._device_type = device.type
        self._profiler: torch.profiler.profile | None = None

    def start_step(self, step: int) -> None:
        """Begin the trace if ``step`` is a traced step. Call this method before every step."""
        global _active
        # A resumed run may begin in the middle of the traced steps.
        if step not in self._steps or self._profiler is not None:
            return
        activities = {torch.profiler.ProfilerActivity.CPU}
        if self._device_type != "cpu":
            activities = torch.profiler.supported_activities()
        if self._device_type == "cuda":  # other accelerators have no allocator snapshots
            torch.cuda.memory._record_memory_history(max_entries=_HISTORY)
        self._profiler = torch.profiler.profile(activities=activities, record_shapes=True)
        self._profiler.start()
        _active = True

    def end_step(self, step: int) -> None:
        """Write the trace after its last step. Call it after every step."""
        if step + 1 not in self._steps:
            self.close()

    def close(self) -> None:
        """End a running trace, and write its file."""
        global _active
        if self._profiler is None:
            return
        profiler, self._profiler = self._profiler, None
        _active = False
        profiler.stop()
        try:
            os.makedirs(os.path.dirname(self._path), exist_ok=True)
            profiler.export_chrome_trace(f"{self._path}.json")
            if self._device_type == "cuda":
                torch.cuda.memory._dump_snapshot(f"{self._path}.pickle")
        except (OSError, RuntimeError) as error:  # a full disk must not end the run
            log.error("no trace could be written to %s: %s", self._path, error)
        if self._device_type == "cuda":
            torch.cuda.memory._record_memory_history(enabled=None)
