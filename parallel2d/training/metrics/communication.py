"""`CommunicationMeter` measures the bytes, calls and seconds of the collectives over each mesh
axis. While the meter is installed, it has hooks on the process groups of the axes.

[Note: counted collectives] Each all-reduce, all-gather, reduce-scatter and all-to-all in the
process group of an axis is counted, except control traffic (`base.metering`). The bytes are the
bytes that a rank sends: the size of the tensors multiplied by the factor of `sent_bytes`.

[Note: seconds of collectives] On CPU, the seconds of a collective are the time for which the
calling thread was blocked, and all of this time is exposed. On a device, the seconds are measured
by two events: around the collective, or around the wait for the collective, in the stream that
waits. Torch's hooks run when a collective is issued. The hook after a collective waits for the
collective if the caller would also wait next. Callers wait next after synchronous collectives, and
after all collectives of the tensor and context axes, because the next operation needs the result.
Asynchronous collectives of the other axes are measured where `base.metering.wait` awaits them. If
these collectives are awaited elsewhere, only bytes and calls are measured.

[Note: exposed seconds] On a device, one event before and one event after a wait in the compute
stream enclose exactly the time for which this stream was idle. Torch has no hooks for streams and
events. Therefore `StreamWaits` replaces methods of individual objects: of the streams in which this
model communicates, and of the events that these streams record. Each wait then records two more
events, and never blocks the host. The wait is attributed to the axis of the last collective in the
awaited stream.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from parallel2d.base import metering
from parallel2d.base.config import AXES
from parallel2d.base.device import communication_streams, current_stream, timed_event
from parallel2d.base.runtime import on_teardown
from parallel2d.parallel.cost.collectives import CollectiveTally
from parallel2d.parallel.mesh import axes_of_groups
from parallel2d.training.metrics.phases import Intervals, named

# Names of torch's hooks
_COLLECTIVES = {
    "ALLREDUCE": "all_reduce",
    "ALLGATHER": "all_gather",
    "REDUCE_SCATTER": "reduce_scatter",
    "ALLTOALL": "all_to_all",
}


@functools.cache
def _collective_of(operation: Any) -> str | None:
    """Return the name of the collective ``operation`` of torch's hooks; None if it is not counted.
    The result is cached, because reading the name of an operation is slow."""
    return _COLLECTIVES.get(operation.name)


_AWAITED_AT_ONCE = ("tensor", "context")

Events = tuple[Any, Any]  # events with timing, before and after an operation


class StreamWaits:
    """Measures how long the compute stream of a device waits for collectives; see [Note: exposed
    seconds].

    Args:
        current: returns the current stream.
        timed_event: creates an event with timing.
    """

    def __init__(self, current: Callable[[], Any], timed_event: Callable[[], Any]) -> None:
        self._current, self._timed_event = current, timed_event
        self._compute: Any = None
        self._axis_of: dict[Any, str] = {}  # stream -> axis of its last collective
        self._watched: dict[int, Any] = {}  # objects of streams, by `id`
        self.exposed = Intervals()  # by axis

    def start(self, streams: Iterable[Any] = ()) -> None:
        """Begin a step. The current stream is the compute stream of this step. From now on, also
        watch ``streams``."""
        self._compute = self._current()
        self.exposed.forget()
        for stream in streams:
            if id(stream) not in self._watched:
                self._watched[id(stream)] = stream
                stream.record_event = functools.partial(self._record, stream)

    def remove(self) -> None:
        """Stop watching all of the streams."""
        while self._watched:
            _, stream = self._watched.popitem()
            del stream.record_event

    def around(self, axis: str, call: Callable[[], Any]) -> Events:
        """Run ``call``, which enqueues a collective of ``axis``, or a wait for one, in the current
        stream. Return the events before and after it. In the compute stream, all of this time is
        exposed."""
        before = self.begin()
        call()
        return self.end(axis, before)

    def begin(self) -> Any:
        """Record and return an event in the current stream."""
        event = self._timed_event()
        event.record(self._current())
        return event

    def end(self, axis: str, before: Any) -> Events:
        """Record the event after a collective of ``axis``, and return it together with ``before``,
        the event before the collective."""
        stream, after = self._current(), self.begin()
        self._axis_of[stream] = axis
        if stream == self._compute:
            self.exposed.add(axis, before, after)
        return before, after

    def _record(self, stream: Any, event: Any = None) -> Any:
        recorded = type(stream).record_event(stream, event)
        axis = self._axis_of.get(stream)
        # A wait for this event is a wait for the last collective of the stream.
        if axis is not None:
            recorded.wait = functools.partial(self._wait, recorded, axis)
        return recorded

    def _wait(self, event: Any, axis: str, stream: Any = None) -> None:
        stream = self._current() if stream is None else stream
        if stream != self._compute:
            type(event).wait(event, stream)
            # One communication stream waits for another: for example, FSDP2's all-reduce stream
            # waits for the reduce-scatter. A later wait for this stream is therefore attributed to
            # ``axis``.
            self._axis_of[stream] = axis
            return
        before = self.begin()
        type(event).wait(event, stream)
        self.exposed.add(axis, before, self.begin())


class LoggedCollective(NamedTuple):
    """A collective that has run."""

    axis: str
    collective: str
    dtype: torch.dtype
    sent: float  # bytes sent by this rank


@dataclass(slots=True)
class _Measured(CollectiveTally):
    seconds: float = 0.0
    # Torch's id of a running collective -> (region of the trace, start of the collective as a host
    # time or an event)
    running: dict[int, tuple[Any, Any]] = field(default_factory=dict)

    def reset(self) -> None:
        CollectiveTally.reset(self)
        self.seconds = 0.0
        self.running.clear()


class CommunicationMeter:
    """Measures the collectives of this rank over each axis of ``mesh``; see [Note: counted
    collectives].

    Args:
        streams: returns the streams in which FSDP2 runs the model's collectives. On a device, the
            exposed seconds are measured in these streams and in the communication streams of this
            package.
    """

    def __init__(
        self, mesh: DeviceMesh, *, streams: Callable[[], Iterable[Any]] = lambda: ()
    ) -> None:
        self._streams_of_model = streams
        self._waits: StreamWaits | None = None
        # Intervals around each collective of a device, by axis.
        self._collectives = Intervals()
        if mesh.device_type != "cpu":
            current = functools.partial(current_stream, mesh.device_type)
            self._waits = StreamWaits(current, functools.partial(timed_event, mesh.device_type))
        self._groups: dict[dist.ProcessGroup, _Measured] = {}
        self._axes: dict[str, _Measured] = {}
        for group, name in axes_of_groups(mesh).items():
            axis = self._axes.setdefault(name, _Measured(name, group.size()))
            # Nothing is sent over an axis of one rank.
            if axis.size > 1:
                self._groups[group] = axis
        self._is_installed = False
        self._last: tuple[str, str] | None = None  # collective and axis
        # List of all collectives in order; None unless a caller has set it
        self.log: list[LoggedCollective] | None = None

    def install(self) -> CommunicationMeter:
        """Register the hooks on the process groups, until `remove`."""
        assert not self._is_installed, "already installed"
        self._is_installed = True
        on_teardown(self.remove)
        for group, axis in self._groups.items():
            group.register_pre_hook(id(self), functools.partial(self._begin, axis))
            group.register_post_hook(id(self), functools.partial(self._end, axis))
            metering.timers[group] = functools.partial(self._time_wait, axis)
        return self

    def remove(self) -> None:
        """Remove the hooks from the process groups."""
        if not self._is_installed:
            return
        self._is_installed = False
        for group in self._groups:
            group.unregister_pre_hook(id(self))
            group.unregister_post_hook(id(self))
            metering.timers.pop(group, None)
        if self._waits:
            self._waits.remove()

    def start(self) -> None:
        """Begin a step, and discard the measurements of earlier collectives, for example in a
        validation or a checkpoint."""
        for axis in self._axes.values():
            axis.reset()
        self._collectives.forget()
        if self._waits:
            self._waits.start([*communication_streams(), *self._streams_of_model()])

    def read(self) -> list[float]:
        """Return the sums since `start`, in the order of `metrics.keys.COMMUNICATION_KEYS`. The
        values of an axis that the mesh lacks are zero. On a device, the sums contain the seconds of
        the collectives that have ended since the last call."""
        running_s = self._collectives.read()
        # Seconds for which the compute stream of a device waited
        stalled_s = self._waits.exposed.read() if self._waits else {}
        values: list[float] = []
        for name in AXES:
            axis = self._axes.get(name, _Measured(name, 1))
            # On CPU all seconds are exposed, because the thread was blocked.
            seconds = axis.seconds + running_s.get(name, 0.0)
            exposed = axis.seconds + stalled_s.get(name, 0.0)
            values += [axis.bytes, float(axis.calls), seconds, exposed]
        return values

    def sent_over(self, axis: str) -> float:
        """Return the bytes sent over ``axis`` since `start`; 0 if the mesh lacks the axis."""
        return self._axes[axis].bytes if axis in self._axes else 0.0

    def ring_passes_over(self, axis: str) -> int:
        """Return the ring passes over ``axis`` since `start`: two per all-reduce, one per other
        collective."""
        return self._axes[axis].ring_passes if axis in self._axes else 0

    def position(self) -> tuple[int, str]:
        """Return the number of collectives that have started in this step, and the last collective
        and its axis as text. Thread-safe."""
        begun = sum(axis.calls for axis in self._axes.values())
        last = self._last
        if not begun or last is None:
            return begun, "the first collective"
        return begun, "{} over the {} axis, or the status all-reduce after it,".format(*last)

    def _begin(self, axis: _Measured, started: Any) -> None:
        """Count a collective. Torch calls this hook before the collective."""
        collective = _collective_of(started.name)
        if collective is None or metering.is_control_traffic():
            return
        inputs, outputs = started.input_tensors, started.output_tensors
        whole = sum([tensor.nbytes for tensor in inputs])
        # In an all-to-all, input and output sizes may differ, and only the inputs of this rank are
        # sent.
        if collective != "all_to_all":
            whole = max(whole, sum([tensor.nbytes for tensor in outputs]))
        sent = axis.add(collective, whole, inputs[0].device.type)
        self._last = (collective, axis.axis)
        if self.log is not None:
            self.log.append(LoggedCollective(axis.axis, collective, inputs[0].dtype, sent))
        region = named(f"{axis.axis}: {collective}")
        region.__enter__()
        axis.running[started.op_id] = region, self._now()

    def _end(self, axis: _Measured, issued: Any) -> None:
        """Measure a collective. Torch calls this hook after the collective was issued."""
        if issued.op_id not in axis.running:
            return
        region, begin = axis.running.pop(issued.op_id)
        is_awaited = not issued.async_op or axis.axis in _AWAITED_AT_ONCE
        if is_awaited and issued.work is not None:
            issued.work.wait()
        if self._waits is None:
            axis.seconds += self._now() - begin
        elif is_awaited:
            self._collectives.add(axis.axis, *self._waits.end(axis.axis, begin))
        region.__exit__(None, None, None)

    def _time_wait(self, axis: _Measured, wait: Callable[[], object]) -> None:
        """Run ``wait``, the wait for an asynchronous collective of ``axis``, and measure it. On a
        device only the stream waits."""
        if self._waits:
            self._collectives.add(axis.axis, *self._waits.around(axis.axis, wait))
            return
        begin = time.perf_counter()
        wait()
        axis.seconds += time.perf_counter() - begin

    def _now(self) -> Any:
        return self._waits.begin() if self._waits else time.perf_counter()
