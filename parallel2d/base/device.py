"""Streams of the accelerator, from its device module (`torch.get_device_module`).

[Note: one kind of stream] FSDP2 and `torch.distributed` work with the device module's classes, such
as `torch.cuda.Stream`. The generic `torch.Stream` does not mix with these: its ``wait_event`` takes
a `torch.cuda.Event` without an error and waits for nothing. So every stream of the package comes
from here, and streams are ordered by ``wait_stream``. The device module of CPUs, `torch.cpu`, has
the same names, and they do nothing: no caller needs a branch for CPUs.
"""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager
from typing import cast

import torch
from torch import Tensor

_streams: weakref.WeakSet[torch.Stream] = weakref.WeakSet()


def new_stream(device_type: str) -> torch.Stream:
    """A stream for communication. Its priority is high, as that of FSDP2's streams, because kernels
    that pack and unpack messages would otherwise wait for kernels of the model."""
    stream = cast(torch.Stream, torch.get_device_module(device_type).Stream(priority=-1))
    if device_type != "cpu":
        _streams.add(stream)
    return stream


def communication_streams() -> list[torch.Stream]:
    """The streams from `new_stream` that are in use; none on CPU."""
    return list(_streams)


def timed_event(device_type: str) -> torch.Event:
    """A new event that records a time."""
    return cast(torch.Event, torch.get_device_module(device_type).Event(enable_timing=True))


def current_stream(device_type: str) -> torch.Stream:
    """The stream in which this thread issues kernels."""
    return cast(torch.Stream, torch.get_device_module(device_type).current_stream())


def on_stream(device_type: str, stream: torch.Stream) -> AbstractContextManager[object]:
    """Makes ``stream`` the current one of this thread."""
    return cast(AbstractContextManager[object], torch.get_device_module(device_type).stream(stream))


def keep_until_done(tensor: Tensor) -> None:
    """Keeps the memory of ``tensor``, from another stream, until the current stream has read it.

    Without this the allocator may reuse the memory as soon as the tensor is freed on the host.
    """
    if tensor.device.type != "cpu":
        tensor.record_stream(current_stream(tensor.device.type))
