"""Functions that inform a meter about collectives. `control_traffic` marks collectives as control
traffic, and `wait` measures the wait for an asynchronous collective. Without a meter, both
functions cost almost no time.

torch's hooks of a process group see the start of each collective of the group. The hooks do not see
the purpose of a collective, or the wait for an asynchronous collective.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch.distributed as dist

# Group -> function that runs and measures the wait for a collective of the group
timers: dict[dist.ProcessGroup, Callable[[Callable[[], object]], None]] = {}


class _Thread(threading.local):
    control_depth = 0


_thread = _Thread()


@contextmanager
def control_traffic() -> Iterator[None]:
    """Mark the collectives of this thread inside the context as control traffic, such as the status
    of a step or Python values.

    A mesh axis that spans the world uses the default process group, as control traffic does. The
    meter does not attribute marked collectives to an axis.
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
    """Wait for ``work``, an asynchronous collective of ``group``. The timer of the group measures
    the wait, because `dist.Work.wait` has no hook."""
    assert work is not None, "this rank is not in the group"
    timer = timers.get(group)
    if timer is None:
        work.wait()
    else:
        timer(work.wait)
