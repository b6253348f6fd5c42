"""How long a GPU's compute stream waits for collectives that run in other streams: `StreamWaits`.

While it is installed, the streams' own methods are wrapped, so that the waits of the compute stream
for a collective lie between two events each. A wait costs two event records and never holds the
host up.

[Note: exposed seconds] Between an event before and one after a wait, both in the compute stream,
lies exactly the time for which that stream had nothing else to do: what communication costs beside
what compute hides. A wait is put down to the axis of the last collective in the stream that is
waited for; where a reduce-scatter and an all-reduce follow each other there, that is the latter.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


class StreamWaits:
    """``stream_class``: whose ``wait_event`` and ``record_event`` are wrapped (``wait_stream`` is
    made of both); ``current()``: the stream in which operators run now; ``timed_event()``: a new
    event with timing enabled."""

    def __init__(
        self, stream_class: Any, current: Callable[[], Any], timed_event: Callable[[], Any]
    ) -> None:
        self._class = stream_class
        self._current = current
        self._timed_event = timed_event
        self._originals: tuple[Any, Any] | None = None
        self._compute: int | None = None
        self._axis_of: dict[int, str] = {}  # stream -> axis of its last collective
        self.waits: list[tuple[str, Any, Any]] = []  # axis, event before, event after

    def install(self) -> None:
        """Wraps the two methods until `remove`."""
        wait_event = self._class.wait_event
        record_event = self._class.record_event
        self._originals = (wait_event, record_event)
        tracker = self

        @functools.wraps(wait_event)
        def wait(stream: Any, event: Any) -> None:
            tracker._wait(stream, event, wait_event)

        @functools.wraps(record_event)
        def record(stream: Any, event: Any = None) -> Any:
            recorded = record_event(stream, event)
            # Whoever waits for this event waits for the stream's last collective.
            recorded._parallel2d_axis = tracker._axis_of.get(stream.cuda_stream)
            return recorded

        self._class.wait_event = wait
        self._class.record_event = record

    def remove(self) -> None:
        """Puts torch's own methods back."""
        if self._originals:
            self._class.wait_event, self._class.record_event = self._originals
            self._originals = None

    def start(self) -> None:
        """Begins a step; the stream that is current now is the compute stream."""
        self._compute = self._current().cuda_stream
        self.waits.clear()

    def around(self, axis: str, call: Callable[[], Any]) -> tuple[Any, tuple[Any, Any]]:
        """Runs ``call``, which puts a collective of ``axis``, or the wait for one, into the current
        stream. Returns its result and the events before and after it; in the compute stream all of
        that time is exposed."""
        stream = self._current()
        before, after = self._timed_event(), self._timed_event()
        before.record(stream)
        result = call()
        after.record(stream)
        self._axis_of[stream.cuda_stream] = axis
        if stream.cuda_stream == self._compute:
            self.waits.append((axis, before, after))
        return result, (before, after)

    def _wait(self, stream: Any, event: Any, original: Callable[[Any, Any], None]) -> None:
        axis = getattr(event, "_parallel2d_axis", None)
        if axis is None:
            original(stream, event)
        elif stream.cuda_stream != self._compute:
            # One communication stream waits for another: who waits for this one then, as sharding
            # does between reduce-scatter and all-reduce, waits for that axis too.
            original(stream, event)
            self._axis_of[stream.cuda_stream] = axis
        else:
            before, after = self._timed_event(), self._timed_event()
            before.record(stream)
            original(stream, event)
            after.record(stream)
            self.waits.append((axis, before, after))


def seconds_between(before: Any, after: Any) -> float:
    """Seconds from one recorded event to the other; waits for the second on the host."""
    after.synchronize()
    return float(before.elapsed_time(after)) / 1e3


def cuda_stream_waits(device: torch.device) -> StreamWaits:
    """For the streams of ``device``."""
    return StreamWaits(
        torch.cuda.Stream,
        functools.partial(torch.cuda.current_stream, device),
        functools.partial(torch.cuda.Event, enable_timing=True),
    )
