"""Traces of chosen steps on chosen ranks, for chrome://tracing and Perfetto, our phases and axes
named in them.

Steps flow by; between the first and the last wanted one torch's profiler runs, then
``traces/rank-N-steps-A-B.json`` flows out. On GPU a memory snapshot for pytorch.org/memory_viz lies
beside it. While nothing is traced, `named` costs one comparison.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import Any

import torch

_active = False


def named(name: str) -> contextlib.AbstractContextManager[Any]:
    """A region of the trace called ``name``; nothing while no step is traced."""
    return torch.profiler.record_function(name) if _active else contextlib.nullcontext()


class StepProfiler:
    """``steps``: first and last step that is traced, or empty; ``ranks``: that are traced, empty
    for all."""

    def __init__(
        self,
        run_dir: str,
        rank: int,
        device: torch.device,
        steps: Sequence[int],
        ranks: Sequence[int],
    ) -> None:
        self._wanted = (steps[0], steps[-1]) if steps and (not ranks or rank in ranks) else None
        self._path = os.path.join(
            run_dir, "traces", f"rank-{rank}-steps-{steps[0]}-{steps[-1]}" if steps else "none"
        )
        self._gpu = device.type == "cuda"
        self._profiler: Any = None

    def start_step(self, step: int) -> None:
        """Called before every step."""
        global _active
        if self._wanted is None or not self._wanted[0] <= step <= self._wanted[1]:
            return
        if self._profiler is None:
            activities = [torch.profiler.ProfilerActivity.CPU]
            if self._gpu:
                activities.append(torch.profiler.ProfilerActivity.CUDA)
                torch.cuda.memory._record_memory_history(max_entries=200_000)
            self._profiler = torch.profiler.profile(activities=activities, record_shapes=True)
            self._profiler.start()
            _active = True

    def end_step(self, step: int) -> None:
        """Called after every step; writes the trace after the last wanted one."""
        if self._profiler is not None and self._wanted is not None and step >= self._wanted[1]:
            self.close()

    def close(self) -> None:
        """Ends a trace that is running, and writes it."""
        global _active
        if self._profiler is None:
            return
        profiler, self._profiler, _active = self._profiler, None, False
        profiler.stop()
        os.makedirs(os.path.dirname(self._path), exist_ok=True)
        profiler.export_chrome_trace(f"{self._path}.json")
        if self._gpu:
            torch.cuda.memory._dump_snapshot(f"{self._path}.pickle")
            torch.cuda.memory._record_memory_history(enabled=None)
