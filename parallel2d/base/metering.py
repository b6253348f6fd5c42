"""Marks by which a meter of collectives tells them apart: `control_traffic` and `wait`. Both are
nearly free while no meter is installed.

torch's hooks of a process group see the start of each collective of the group. They see neither the
purpose of a collective nor the place where an asynchronous one is awaited.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch.distributed as dist

# Runs a wait for a collective of one group, and measures it
Timer = Callable[[Callable[[], object]], None]


class _Thread(threading.local):
    control_depth = 0


_thread = _Thread()
_timers: dict[dist.ProcessGroup, Timer] = {}


@contextmanager
def control_traffic() -> Iterator[None]:
    """Mark the collectives of this thread as control traffic: votes, sums over a step, objects.

    torch gives a mesh axis that spans the world the default process group, through which control
    traffic runs as well. Marked collectives belong to no axis.
    """
    _thread.control_depth += 1
    try:
        yield
    finally:
        _thread.control_depth -= 1


def is_control_traffic() -> bool:
    """True inside `control_traffic`."""
    return _thread.control_depth > 0


def wait(work: dist.Work | None, group: dist.ProcessGroup) -> None:
    """Wait for ``work``, an asynchronous collective of ``group``. A meter of this group measures
    the wait: `dist.Work.wait` has no hook."""
    assert work is not None, "this rank is not in the group"
    timer = _timers.get(group)
    if timer is None:
        work.wait()
    else:
        timer(work.wait)


def set_timer(group: dist.ProcessGroup, timer: Timer | None) -> None:
    """Measure the waits for collectives of ``group`` with ``timer`` from now on; None: no more."""
    if timer is None:
        _timers.pop(group, None)
    else:
        _timers[group] = timer
