"""Bytes, calls and seconds per mesh axis, from the collectives that really ran:
`CommunicationMeter`, which wraps torch's collective functions while it is installed.

[Note: what is counted] A collective belongs to an axis when it was given that axis's process group
by name. The loop's own small agreements name no group and belong to no axis, also where an axis
spans the world and shares its process group. Bytes are those a rank sends: the payload times the
wire factor of `sent_bytes`. Seconds on CPU are those in which the calling thread was held up,
issuing and waiting; all of them are exposed. On GPU they are the time between two events around the
collective in the stream that issued it, hidden behind compute or not, and the exposed ones are
measured apart from them.

[Note: exposed seconds] Between an event before and one after a wait, both in the compute stream,
lies exactly the time for which that stream had nothing else to do: what communication costs beside
what compute hides. So the streams' own methods are wrapped while steps are measured; a wait costs
two event records and never holds the host up. A wait is put down to the axis of the last collective
in the stream that is waited for; where a reduce-scatter and an all-reduce follow each other there,
that is the latter.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _resolve_process_group

from parallel2d.base.config import AXES
from parallel2d.base.replicas.lasting_groups import PolledWork
from parallel2d.base.runtime import on_teardown
from parallel2d.parallel.cost.collectives import sent_bytes
from parallel2d.parallel.mesh import axis_names, group_of
from parallel2d.training.metrics.phases import named, seconds_between

# One of torch's functions with the arguments it was called with
_Call = functools.partial[Any]


class StreamWaits:
    """``stream_class``: whose ``wait_event`` and ``record_event`` are wrapped (``wait_stream`` is
    made of both); ``current()``: the current stream; ``timed_event()``: a new event that times."""

    def __init__(
        self, stream_class: Any, current: Callable[[], Any], timed_event: Callable[[], Any]
    ) -> None:
        self._class, self._current, self._timed_event = stream_class, current, timed_event
        self._originals: tuple[Any, Any] | None = None
        self._compute: int | None = None
        self._axis_of: dict[int, str] = {}  # stream -> axis of its last collective
        self.waits: list[tuple[str, Any, Any]] = []  # axis, event before, event after

    def install(self) -> None:
        """Wraps the two methods until `remove`."""
        wait_event, record_event = self._class.wait_event, self._class.record_event
        self._originals = (wait_event, record_event)

        @functools.wraps(wait_event)
        def wait(stream: Any, event: Any) -> None:
            self._wait(stream, event, wait_event)

        @functools.wraps(record_event)
        def record(stream: Any, event: Any = None) -> Any:
            recorded = record_event(stream, event)
            # Whoever waits for this event waits for the stream's last collective.
            recorded._parallel2d_axis = self._axis_of.get(stream.cuda_stream)
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
        stream. Returns its result and both events; in the compute stream all of it is exposed."""
        stream = self._current()
        result, events = self._between_events(stream, call)
        self._axis_of[stream.cuda_stream] = axis
        if stream.cuda_stream == self._compute:
            self.waits.append((axis, *events))
        return result, events

    def _between_events(self, stream: Any, call: Callable[[], Any]) -> tuple[Any, tuple[Any, Any]]:
        before, after = self._timed_event(), self._timed_event()
        before.record(stream)
        result = call()
        after.record(stream)
        return result, (before, after)

    def _wait(self, stream: Any, event: Any, original: Callable[[Any, Any], None]) -> None:
        axis = getattr(event, "_parallel2d_axis", None)
        if axis is not None and stream.cuda_stream == self._compute:
            _, events = self._between_events(stream, lambda: original(stream, event))
            self.waits.append((axis, *events))
            return
        original(stream, event)
        # One communication stream waits for another: who waits for this one then, as sharding does
        # between reduce-scatter and all-reduce, waits for that axis too.
        if axis is not None:
            self._axis_of[stream.cuda_stream] = axis


@dataclass(slots=True)
class _Tally:
    axis: str
    size: int
    bytes: float = 0.0
    calls: int = 0
    ring_passes: int = 0
    seconds: float = 0.0
    # On GPU, around each collective, in the stream that issued it
    events: list[tuple[torch.Event, torch.Event]] = field(default_factory=list)

    def add(self, collective: str, whole: int, device_type: str) -> float:
        """Counts a collective. Returns the bytes that this rank sends."""
        sent = sent_bytes(collective, whole, self.size, device_type)
        self.bytes += sent
        self.calls += 1
        self.ring_passes += 2 if collective == "all_reduce" else 1
        return sent

    def reset(self) -> None:
        self.bytes = self.seconds = 0.0
        self.calls = self.ring_passes = 0
        self.events.clear()


class LoggedCollective(NamedTuple):
    """A collective that ran. ``sent``: bytes that this rank sent."""

    axis: str
    collective: str
    dtype: torch.dtype
    sent: float


class _Done:
    """What an asynchronous collective returns that was counted but not run."""

    def wait(self, *_: Any) -> bool:
        return True


class CommunicationMeter:
    """Counts what this rank sends over each axis of ``mesh``; see [Note: what is counted].

    ``dry``: collectives are counted and not run; only for tensors without storage. ``device_type``:
    whose bytes a dry meter counts; default: the mesh's. A process installs one meter at a time.
    """

    def __init__(
        self, mesh: DeviceMesh, *, dry: bool = False, device_type: str | None = None
    ) -> None:
        self._dry = dry
        self._device_type = device_type or mesh.device_type
        self._streams: StreamWaits | None = None
        if mesh.device_type == "cuda" and not dry:
            device = torch.device("cuda", torch.cuda.current_device())
            current = functools.partial(torch.cuda.current_stream, device)
            timed_event = functools.partial(torch.cuda.Event, enable_timing=True)
            self._streams = StreamWaits(torch.cuda.Stream, current, timed_event)
        self._axes: dict[str, _Tally] = {}
        self._by_group: dict[str, _Tally | None] = {}
        self._by_ranks: dict[tuple[int, ...], _Tally] = {}
        for axis in axis_names(mesh):
            group = group_of(mesh, axis)
            tally = _Tally(axis, group.size())
            self._axes[axis] = tally
            # Over an axis of one rank nothing is sent.
            if tally.size > 1:
                self._by_group[group.group_name] = tally
                # Of equal ranks those that share parameters come first.
                self._by_ranks.setdefault(tuple(dist.get_process_group_ranks(group)), tally)
        # Functional collectives in flight, by the address of their output
        self._awaited: dict[int, _Tally] = {}
        # Other asynchronous ones, by the id of their handle: handle, axis, device type
        self._works: dict[int, tuple[Any, _Tally, str]] = {}
        self._last: tuple[str, str] | None = None  # collective and axis
        # Every collective in order, where somebody wants to look at them
        self.log: list[LoggedCollective] | None = None
        self._originals: list[tuple[Any, str, Any]] = []

    def install(self) -> CommunicationMeter:
        """Wraps torch's collective functions until `remove`."""
        assert not self._originals, "already installed"
        on_teardown(self.remove)
        for module, name, collective, place, names, group_place in _WRAPPED:
            how = functools.partial(self._collective, collective, place, names, group_place)
            self._wrap(module, name, how)
        self._wrap(functional, "wait_tensor", self._wait)
        for kind in (dist.Work, PolledWork):
            self._wrap(kind, "wait", self._wait_work)
        if self._streams:
            self._streams.install()
        return self

    def remove(self) -> None:
        """Puts torch's own functions back."""
        while self._originals:
            module, name, original = self._originals.pop()
            setattr(module, name, original)
        if self._streams:
            self._streams.remove()

    def start(self) -> None:
        """Begins a step: what ran before (a validation, a checkpoint) is forgotten."""
        for tally in self._axes.values():
            tally.reset()
        self._awaited.clear()
        self._works.clear()
        if self._streams:
            self._streams.start()

    def read(self) -> list[float]:
        """What ran since `start`, in the order of `metrics.keys.COMMUNICATION_KEYS`;
        zeros for an axis that the mesh lacks. On GPU the step must be done."""
        # Seconds for which the compute stream of a GPU waited
        stalled_s: dict[str, float] = defaultdict(float)
        for axis, before, after in self._streams.waits if self._streams else ():
            stalled_s[axis] += seconds_between(before, after)
        values: list[float] = []
        for axis in AXES:
            tally = self._axes.get(axis, _Tally(axis, 1))
            # On CPU there are no events, and the thread was held up for all of the seconds.
            seconds = tally.seconds + sum(seconds_between(*pair) for pair in tally.events)
            exposed = tally.seconds + stalled_s[axis]
            values += [tally.bytes, float(tally.calls), seconds, exposed]
        return values

    def sent_over(self, axis: str) -> float:
        """Bytes sent over ``axis`` since `start`; 0 for one that the mesh lacks."""
        return self._axes[axis].bytes if axis in self._axes else 0.0

    def ring_passes_over(self, axis: str) -> int:
        """How often a ring of ``axis`` was gone round since `start`: twice by an all-reduce."""
        return self._axes[axis].ring_passes if axis in self._axes else 0

    def position(self) -> tuple[int, str]:
        """Collectives begun in this step, and the last with its axis, in words; from any thread."""
        begun = sum(tally.calls for tally in self._axes.values())
        last = self._last
        if not begun or last is None:
            return begun, "the first collective"
        return begun, "{} over the {} axis, or the agreement after it,".format(*last)

    def _wrap(self, module: Any, name: str, count: Callable[[_Call], Any]) -> None:
        original = getattr(module, name, None)
        if original is None:  # torch has it under another name in this version
            return

        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():  # being traced: nothing runs
                return original(*args, **kwargs)
            return count(functools.partial(original, *args, **kwargs))

        self._originals.append((module, name, original))
        setattr(module, name, wrapper)

    def _collective(
        self, collective: str, place: int, names: tuple[str, ...], group_place: int, call: _Call
    ) -> Any:
        """``place``, ``names``: of the argument that is counted; ``group_place``: of ``group``."""
        tally = self._tally_of(_argument(call, group_place, "group"))
        is_functional = call.func.__module__ == functional.__name__
        # Tensors without storage look like tracing, and a dry meter counts just those.
        if tally is None or (is_functional and functional._are_we_tracing() and not self._dry):
            return call()
        tensor = _argument(call, place, *names)
        device_type = self._device_type if self._dry else tensor.device.type
        if device_type not in ("cpu", "cuda"):
            return call()
        whole = tensor.nbytes
        if is_functional and collective == "all_gather":  # which returns its output
            whole *= tally.size
        sent = tally.add(collective, whole, device_type)
        self._last = (collective, tally.axis)
        if self.log is not None:
            self.log.append(LoggedCollective(tally.axis, collective, tensor.dtype, sent))
        if not self._dry:
            return self._run(tally, collective, device_type, call)
        # A functional one sends nothing for tensors without storage.
        return call() if is_functional else _Done()

    def _run(self, tally: _Tally, collective: str, device_type: str, call: _Call) -> Any:
        with named(f"{tally.axis}: {collective}"):
            result = self._timed(tally, device_type, call)
        # The handle is kept with its id, which another object could get otherwise.
        if isinstance(result, dist.Work):
            self._works[id(result)] = (result, tally, device_type)
        if isinstance(result, functional.AsyncCollectiveTensor) and not result.completed:
            self._awaited[result.elem.data_ptr()] = tally
        return result

    def _timed(self, tally: _Tally, device_type: str, call: _Call) -> Any:
        if self._streams and device_type == "cuda":
            result, events = self._streams.around(tally.axis, call)
            tally.events.append(events)
            return result
        begin = time.perf_counter()
        try:
            return call()
        finally:
            tally.seconds += time.perf_counter() - begin

    def _wait(self, call: _Call) -> Any:
        """For the output of a functional collective."""
        tensor = _argument(call, 0, "tensor") if self._awaited else None
        # Tensors on the meta device have no address.
        if not isinstance(tensor, Tensor) or tensor.device.type not in ("cpu", "cuda"):
            return call()
        tally = self._awaited.pop(tensor.data_ptr(), None)
        return self._held_up(tally, tensor.device.type, call)

    def _wait_work(self, call: _Call) -> Any:
        """For the handle of another asynchronous collective."""
        _, tally, device_type = self._works.pop(id(call.args[0]), (None, None, ""))
        return self._held_up(tally, device_type, call)

    def _held_up(self, tally: _Tally | None, device_type: str, call: _Call) -> Any:
        """Runs ``call``, a wait for a collective of ``tally``; on GPU only the stream waits."""
        if tally is None:
            return call()
        if self._streams and device_type == "cuda":
            return self._streams.around(tally.axis, call)[0]
        return self._timed(tally, device_type, call)

    def _tally_of(self, group: Any) -> _Tally | None:
        """``group``: as functional collectives take it; None: the loop's own."""
        if group is None:
            return None
        name = functional._resolve_group_name(group)
        if name not in self._by_group:
            # DTensor remembers meshes that are equal to one it saw before, whose groups are others
            # over the same ranks. torch may have no group of that name any more.
            ranks: list[int] = []
            with contextlib.suppress(RuntimeError, ValueError, KeyError):
                ranks = dist.get_process_group_ranks(_resolve_process_group(name))
            self._by_group[name] = self._by_ranks.get(tuple(ranks))
        return self._by_group[name]


# Module, function, collective, place and names of the argument that holds the whole payload (or, of
# a functional all-gather, its part), place of the argument ``group``
_WRAPPED: tuple[tuple[Any, str, str, int, tuple[str, ...], int], ...] = (
    (dist, "all_reduce", "all_reduce", 0, ("tensor",), 2),
    (dist, "all_gather_single", "all_gather", 0, ("output", "output_tensor"), 2),
    (dist, "all_gather_into_tensor", "all_gather", 0, ("output_tensor",), 2),
    (dist, "reduce_scatter_single", "reduce_scatter", 1, ("input",), 3),
    (dist, "reduce_scatter_tensor", "reduce_scatter", 1, ("input",), 3),
    (dist, "all_to_all_single", "all_to_all", 1, ("input",), 4),
    (functional, "all_reduce", "all_reduce", 0, ("self",), 2),
    (functional, "all_gather_single", "all_gather", 0, ("self",), 2),
    (functional, "reduce_scatter_single", "reduce_scatter", 0, ("self",), 3),
    (functional, "all_to_all_single", "all_to_all", 0, ("self",), 3),
)


def _argument(call: _Call, place: int, *names: str) -> Any:
    """An argument that was given by place or by one of ``names``; None for one that was not."""
    by_name = filter(call.keywords.__contains__, names)
    given = [*call.args[place : place + 1], *map(call.keywords.get, by_name), None]
    return given[0]
