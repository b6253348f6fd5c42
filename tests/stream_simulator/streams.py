"""Streams, events and works of NCCL, as the program sees them.

Streams and events behave as in torch (torch/csrc/Stream.cpp, torch/csrc/cuda/Event.cpp). A
`torch.cuda.Event` is a `torch.Event` that holds a second event. Its own methods use the second one
and accept streams of both classes. The methods of `torch.Stream` use the first one for every class
of argument, and `torch.cuda.Event` never records it: such a wait has no effect. The methods of
`torch.cuda.Stream` call methods of the event.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from stream_simulator.clocks import Actor, Clock
from stream_simulator.simulator import Simulator, local
from stream_simulator.sources import PROJECT, caller
from stream_simulator.stream_operations import stream_operation

simulator: Simulator


def attach(to: Simulator) -> None:
    """Connect streams and events to this simulator."""
    global simulator
    simulator = to


class Event:
    """`torch.Event`."""

    def __init__(self, device: Any = None, *, enable_timing: bool = True, **_: Any) -> None:
        # The clock of the stream at the record; None before
        self.clock: Clock | None = None

    @stream_operation("record")
    def _record(self, stream: Any = None) -> None:
        self.clock = dict(_actor_of(stream).seen)

    def record(self, stream: Any = None) -> None:
        self._record(stream)

    @stream_operation("event.wait")
    def wait(self, stream: Any = None) -> None:
        if self.clock is not None:
            _actor_of(stream).join(self.clock)
            return
        place = caller().place
        text = f"a wait for an event that was never recorded, at {place}"
        simulator.find("no-op wait", (place,), text)

    def synchronize(self) -> None:
        if self.clock is not None:
            simulator.wait("event.synchronize", self.clock)

    def query(self) -> bool:
        """True if the host has waited for all operations before the record."""
        done = simulator.known()
        return all(done.get(number, 0) >= count for number, count in (self.clock or {}).items())

    def elapsed_time(self, other: Event) -> float:
        if type(other) is not type(self):
            raise RuntimeError("expected other to be an event of the same class")
        return 1.0


class CudaEvent(Event):
    """`torch.cuda.Event`."""

    def __init__(self, enable_timing: bool = False, **_: Any) -> None:
        super().__init__()
        self._is_timed = enable_timing

    def record(self, stream: Any = None) -> None:
        if self._is_timed:  # measures, and orders nothing
            self.clock = dict(_actor_of(stream).seen)
        else:
            self._record(stream)


class Stream:
    """`torch.Stream`."""

    def __init__(
        self, device: Any = None, *, priority: int = 0, actor: Actor | None = None
    ) -> None:
        self.actor = actor or simulator.new_stream()
        self.device, self.stream_id = simulator.device, self.actor.number
        self.device_index, self.device_type = self.device.index, 1
        self._before: list[Actor | None] = []

    @stream_operation("wait_event")
    def wait_event(self, event: Any) -> None:
        if type(event) is Event:
            event.wait(self)
            return
        place = caller().place
        text = (
            f"torch.Stream.wait_event gets a torch.cuda.Event at {place}: it uses the event of "
            f"the base class, which "
            "was never recorded, and does not wait"
        )
        simulator.find("no-op wait", (place,), text)

    @stream_operation("wait_stream")
    def wait_stream(self, other: Any) -> None:
        self.actor.join(other.actor.seen)

    def record_event(self, event: Any = None) -> Any:
        if event is not None and type(event) is not Event:
            raise RuntimeError("expected event to be a torch.Event object")
        event = event or Event()
        event.record(self)
        return event

    @stream_operation("synchronize")
    def synchronize(self) -> None:
        simulator.wait("stream.synchronize", self.actor.seen)

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False

    def __enter__(self) -> Any:
        self._before.append(getattr(local, "stream", None))
        self._make_current()
        return self

    @stream_operation("stream context")
    def _make_current(self) -> None:
        local.stream = self.actor

    def __exit__(self, *_: object) -> None:
        local.stream = self._before.pop()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and self.actor is other.actor

    def __hash__(self) -> int:
        return hash(self.stream_id)


class CudaStream(Stream):
    """`torch.cuda.Stream`."""

    def __init__(
        self, device: Any = None, priority: int = 0, *, actor: Actor | None = None
    ) -> None:
        super().__init__(device, priority=priority, actor=actor)
        self.cuda_stream = self.stream_id

    @stream_operation("wait_event")
    def wait_event(self, event: Any) -> None:
        event.wait(self)

    @stream_operation("wait_stream")
    def wait_stream(self, stream: Any) -> None:
        self.wait_event(stream.record_event())

    def record_event(self, event: Any = None) -> Any:
        event = CudaEvent() if event is None else event
        event.record(self)
        return event


class Work(dist.Work):
    """The work of an asynchronous collective of NCCL.

    ``wait`` makes the current stream wait, not the host. The work keeps its tensors until then.
    """

    def __init__(self, end: Clock, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self._end = end
        self._tensors: list[torch.Tensor] | None = tensors

    @stream_operation("work.wait")
    def wait(self, timeout: Any = None) -> bool:
        stream, by = simulator.current(), caller()
        if by.source == PROJECT and stream.source != PROJECT:
            simulator.exposed[simulator.step, by.place] += 1
        stream.join(self._end)
        self._tensors = None
        return True

    def is_completed(self) -> bool:
        return True

    synchronize = wait


@stream_operation("record_stream")
def record_stream(tensor: torch.Tensor, stream: Any) -> None:
    """`Tensor.record_stream`."""
    if (block := simulator.block_of(tensor)) is not None:
        block.recorded.add(stream.actor.number)


@stream_operation("synchronize")
def synchronize(*_: object) -> None:
    """`torch.cuda.synchronize`."""
    simulator.wait("synchronize")


def _actor_of(stream: Any) -> Actor:
    found: Actor = simulator.current() if stream is None else stream.actor
    return found
