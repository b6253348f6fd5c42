"""Exposed seconds on GPU, on simulated streams: each stream has a separate clock, and an event is
a moment on the clock.
"""

import pytest

from parallel2d.training.metrics.communication import StreamWaits
from parallel2d.training.metrics.phases import Intervals


class Event:
    time = 0.0

    def record(self, stream):
        self.time = stream.time

    def wait(self, stream):
        stream.time = max(stream.time, self.time)

    def query(self):
        return True

    def elapsed_time(self, end):
        return (end.time - self.time) * 1e3


@pytest.fixture
def device():
    class Stream:
        def __init__(self, number):
            self.number, self.time = number, 0.0

        def wait_event(self, event):
            event.wait(self)

        def record_event(self, event=None):
            event = event or Event()
            event.record(self)
            return event

        def wait_stream(self, other):
            self.wait_event(other.record_event())

        def run(self, seconds):
            self.time += seconds

    class Device:
        compute, gather, scatter, reduce = (Stream(number) for number in range(4))
        current = compute

    device = Device()
    device.before = dict(vars(Stream))
    device.waits = StreamWaits(lambda: device.current, Event)
    device.waits.start([device.gather, device.scatter, device.reduce])
    yield device
    device.waits.remove()


def issue(device, stream, axis, seconds):
    """Issue a collective in a separate stream, as FSDP does; return its end."""
    device.current = stream
    device.waits.around(axis, lambda: stream.run(seconds))
    device.current = device.compute
    return stream.record_event()


def exposed(device):
    return {"shard": 0.0, "replicate": 0.0} | device.waits.exposed.read()


def test_only_communication_not_overlapped_by_compute_is_exposed(device):
    gathered = issue(device, device.gather, "shard", 5.0)
    device.compute.run(3.0)
    device.compute.wait_event(gathered)
    assert exposed(device) == {"shard": 2.0, "replicate": 0.0}
    gathered = issue(device, device.gather, "shard", 1.0)
    device.compute.run(4.0)
    device.compute.wait_event(gathered)  # long done
    assert exposed(device) == {"shard": 0.0, "replicate": 0.0}


def test_wait_is_attributed_to_the_last_collective_of_the_stream(device):
    issue(device, device.scatter, "shard", 2.0)
    device.reduce.wait_stream(device.scatter)
    reduced = issue(device, device.reduce, "replicate", 3.0)
    device.compute.run(1.0)
    device.compute.wait_event(reduced)
    assert exposed(device) == {"shard": 0.0, "replicate": 4.0}


def test_wait_through_another_stream_keeps_the_axis(device):
    issue(device, device.scatter, "shard", 2.0)
    device.reduce.wait_stream(device.scatter)
    device.compute.wait_stream(device.reduce)
    assert exposed(device) == {"shard": 2.0, "replicate": 0.0}


def test_collective_on_the_compute_stream_is_fully_exposed(device):
    device.waits.around("shard", lambda: device.compute.run(2.5))
    assert exposed(device) == {"shard": 2.5, "replicate": 0.0}


def test_waits_for_other_work_or_by_other_streams_are_not_exposed(device):
    device.gather.run(7.0)
    device.compute.wait_event(device.gather.record_event())
    device.gather.wait_event(issue(device, device.scatter, "shard", 20.0))
    assert exposed(device) == {"shard": 0.0, "replicate": 0.0}


def test_intervals_that_a_device_has_not_ended_are_read_once_it_has():
    begin, end = Event(), Event()
    end.time, end.query = 3.0, lambda: False
    intervals = Intervals()
    intervals.add("shard", begin, end)
    assert intervals.read() == {}
    intervals.forget()
    intervals.add("shard", 1.0, 2.0)
    intervals.forget()
    end.query = lambda: True
    assert intervals.read() == {"shard": 3.0}
    assert intervals.read() == {}


def test_class_of_streams_is_unchanged_and_removal_restores_the_streams(device):
    gathered = issue(device, device.gather, "shard", 1.0)
    assert "wait" in vars(gathered)
    assert dict(vars(type(device.gather))) == device.before
    device.waits.remove()
    assert "record_event" not in vars(device.gather)
    assert "wait" not in vars(issue(device, device.gather, "shard", 1.0))
