"""Times the consecutive phases of a step on the device's own clock: `PhaseClock`."""

from __future__ import annotations

import time
from typing import Any

import torch

from parallel2d.metrics.profile import named

# Names in a trace, in the order of the loop; rows have others for the same phases, see
# `parallel2d.metrics.keys`
_TRACE_NAMES = ("forward_backward", "data", "agree", "update")


class PhaseClock:
    """Marks the ends of consecutive phases of a step; their lengths are read once, after the step.

    On CPU the wall clock; on GPU events in the stream, so that measuring never waits for the
    device.
    """

    def __init__(self, device: torch.device) -> None:
        self._events = device.type == "cuda"
        self._device = device
        self._marks: list[tuple[str, float | torch.Event]] = []
        self._region: Any = None

    def start(self) -> None:
        """Begins a step."""
        self._marks = [("", self._now())]
        self._enter(0)

    def mark(self, phase: str) -> None:
        """Ends ``phase``, which began at the mark before. A phase may end several times in a step:
        its parts add up."""
        self._marks.append((phase, self._now()))
        self._enter(len(self._marks) - 1)

    def _enter(self, index: int) -> None:
        """Shows the phase that begins now in a trace, if one is made."""
        if self._region is not None:
            self._region.__exit__(None, None, None)
        self._region = None
        # The last mark ends the last phase, and none begins.
        if index < len(_TRACE_NAMES):
            self._region = named(_TRACE_NAMES[index])
            self._region.__enter__()

    def read(self) -> dict[str, float]:
        """Seconds per phase of the step. On GPU the last event must have been waited for."""
        seconds: dict[str, float] = {}
        for (_, begin), (phase, end) in zip(self._marks, self._marks[1:], strict=False):
            if isinstance(end, torch.Event):
                end.synchronize()
                length = begin.elapsed_time(end) / 1e3  # type: ignore[union-attr]
            else:
                length = end - begin  # type: ignore[operator]
            seconds[phase] = seconds.get(phase, 0.0) + length
        return seconds

    def _now(self) -> float | torch.Event:
        if not self._events:
            return time.perf_counter()
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event
