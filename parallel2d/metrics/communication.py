"""Bytes, calls and seconds per mesh axis, from the collectives that really ran:
`CommunicationMeter` wraps torch's collective functions while it is installed, and costs nothing
otherwise.

[Note: what is counted] A collective belongs to an axis when it was given that axis's process group
by name. The loop's own small agreements name no group and belong to no axis, also where an axis
spans the world and shares its process group. Bytes are those a rank sends: the payload times the
wire factor of `sent_bytes`. Seconds on CPU are those in which the calling thread was held up,
issuing and waiting; all of them are exposed. On GPU they are the time between two events around the
collective in the stream that issued it, hidden behind compute or not, and the exposed ones are
measured apart from them: [Note: exposed seconds] in `metrics/streams.py`.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import GroupName, _resolve_process_group

from parallel2d.config import AXES
from parallel2d.cost.collectives import sent_bytes
from parallel2d.mesh import axis_names
from parallel2d.metrics.keys import QUANTITIES
from parallel2d.metrics.profile import named
from parallel2d.metrics.streams import StreamWaits, cuda_stream_waits, seconds_between
from parallel2d.runtime import on_teardown


class _Tally:
    """Running sums of one axis."""

    __slots__ = ("axis", "bytes", "calls", "events", "ring_passes", "seconds", "size")

    def __init__(self, axis: str, size: int) -> None:
        self.axis = axis
        self.size = size
        # On GPU, around each collective, in the stream that issued it
        self.events: list[tuple[torch.Event, torch.Event]] = []
        self.reset()

    def reset(self) -> None:
        self.bytes = 0.0
        self.calls = 0
        self.ring_passes = 0
        self.seconds = 0.0
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


_installed: list[CommunicationMeter] = []


def remove_installed() -> None:
    """Removes the meter that is installed, if any."""
    while _installed:
        _installed[-1].remove()


class CommunicationMeter:
    """Counts what this rank sends over each axis of ``mesh``; see [Note: what is counted].

    ``dry``: collectives are counted and not run; only for tensors without storage. ``device_type``:
    whose bytes a dry meter counts; default: that of the mesh. One meter can be installed at a time
    in a process.
    """

    def __init__(
        self, mesh: DeviceMesh, *, dry: bool = False, device_type: str | None = None
    ) -> None:
        self._dry = dry
        self._device_type = device_type or mesh.device_type
        self._streams: StreamWaits | None = None
        if mesh.device_type == "cuda" and not dry:
            self._streams = cuda_stream_waits(torch.device("cuda", torch.cuda.current_device()))
        self._axes: dict[str, _Tally] = {}
        self._by_group: dict[str, _Tally | None] = {}
        self._by_ranks: dict[tuple[int, ...], _Tally] = {}
        for index, axis in enumerate(axis_names(mesh)):
            tally = _Tally(axis, mesh.size(index))
            self._axes[axis] = tally
            # Over an axis of one rank nothing is sent.
            if tally.size > 1:
                group = mesh.get_group(index)
                self._by_group[group.group_name] = tally
                self._by_ranks[tuple(dist.get_process_group_ranks(group))] = tally
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
        _installed.append(self)
        on_teardown(remove_installed)
        for name, collective, whole in _PLAIN:
            self._wrap(dist, name, functools.partial(self._plain, collective, whole))
        for name, collective, place in _FUNCTIONAL:
            self._wrap(functional, name, functools.partial(self._functional, collective, place))
        self._wrap(functional, "wait_tensor", self._wait)
        self._wrap(dist.Work, "wait", self._wait_work)
        if self._streams:
            self._streams.install()
        return self

    def remove(self) -> None:
        """Puts torch's own functions back."""
        while self._originals:
            module, name, original = self._originals.pop()
            setattr(module, name, original)
        if self in _installed:
            _installed.remove(self)
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
        """What ran since `start`, in the order of `COMMUNICATION_KEYS` of
        `parallel2d.metrics.keys`; zeros for an axis that the mesh lacks. On GPU the step must be
        done."""
        values: list[float] = []
        for axis in AXES:
            tally = self._axes.get(axis)
            if tally is None:
                values += [0.0] * len(QUANTITIES)
                continue
            # On CPU there are no events, and the thread was held up for all of the seconds.
            seconds = tally.seconds + sum(seconds_between(*pair) for pair in tally.events)
            exposed = tally.seconds + self._stalled_s(axis)
            values += [tally.bytes, float(tally.calls), seconds, exposed]
        return values

    def _stalled_s(self, axis: str) -> float:
        """Seconds for which the compute stream of a GPU waited for collectives of ``axis``."""
        if self._streams is None:
            return 0.0
        seconds = 0.0
        for waited, before, after in self._streams.waits:
            if waited == axis:
                seconds += seconds_between(before, after)
        return seconds

    def sent_over(self, axis: str) -> float:
        """Bytes sent over ``axis`` since `start`."""
        return self._axes[axis].bytes

    def ring_passes_over(self, axis: str) -> int:
        """How often a ring through the ranks of ``axis`` was gone round since `start`: twice by an
        all-reduce, once by any other collective."""
        return self._axes[axis].ring_passes

    def position(self) -> tuple[int, str]:
        """Collectives begun in this step, and the last of them with its axis, for people. Callable
        from any thread."""
        begun = sum(tally.calls for tally in self._axes.values())
        last = self._last
        if not begun or last is None:
            return begun, "the first collective"
        collective, axis = last
        return begun, f"{collective} over the {axis} axis, or the agreement after it,"

    def _wrap(self, module: Any, name: str, count: Callable[..., Any]) -> None:
        original = getattr(module, name, None)
        if original is None:  # torch has it under another name in this version
            return

        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():  # being traced: nothing runs
                return original(*args, **kwargs)
            return count(original, args, kwargs)

        self._originals.append((module, name, original))
        setattr(module, name, wrapper)

    def _plain(
        self,
        collective: str,
        whole: tuple[int, tuple[str, ...]],
        original: Any,
        args: Any,
        kwargs: Any,
    ) -> Any:
        """A function of torch.distributed. ``whole``: place and names of the argument that holds
        the whole payload."""
        group = kwargs.get("group")
        if group is None:
            group = next((value for value in args if isinstance(value, dist.ProcessGroup)), None)
        tally = None if group is None else self._tally_of(group.group_name)
        if tally is None:
            return original(*args, **kwargs)
        index, names = whole
        tensor = _argument(args, kwargs, index, *names)
        return self._timed(tally, collective, tensor, tensor.nbytes, original, args, kwargs)

    def _functional(
        self, collective: str, place: int, original: Any, args: Any, kwargs: Any
    ) -> Any:
        """A functional collective, which returns its output. ``place``: of the argument
        ``group``."""
        tensor = _argument(args, kwargs, 0, "self")
        group = _argument(args, kwargs, place, "group")
        tally = self._tally_of(_group_name(group))
        if tally is None:
            return original(*args, **kwargs)
        # Tensors without storage look like tracing, and a dry meter counts just those.
        if functional._are_we_tracing() and not self._dry:
            return original(*args, **kwargs)
        whole = tensor.nbytes
        if collective == "all_gather":
            whole *= tally.size
        output = self._timed(tally, collective, tensor, whole, original, args, kwargs)
        if isinstance(output, functional.AsyncCollectiveTensor) and not output.completed:
            self._awaited[output.elem.data_ptr()] = tally
        return output

    def _wait(self, original: Any, args: Any, kwargs: Any) -> Any:
        """For the output of a functional collective."""
        if not self._awaited:
            return original(*args, **kwargs)
        tensor = _argument(args, kwargs, 0, "tensor")
        # Tensors on the meta device have no address.
        if not isinstance(tensor, Tensor) or tensor.device.type not in ("cpu", "cuda"):
            return original(*args, **kwargs)
        tally = self._awaited.pop(tensor.data_ptr(), None)
        return self._waiting(tally, tensor.device.type, lambda: original(*args, **kwargs))

    def _wait_work(self, original: Any, args: Any, kwargs: Any) -> Any:
        """For the handle of another asynchronous collective."""
        _, tally, device_type = self._works.pop(id(args[0]), (None, None, ""))
        return self._waiting(tally, device_type, lambda: original(*args, **kwargs))

    def _waiting(self, tally: _Tally | None, device_type: str, call: Callable[[], Any]) -> Any:
        """Runs ``call``, which waits for a collective of ``tally``; on GPU that holds the current
        stream up, not the thread."""
        if tally is None:
            return call()
        if self._streams and device_type == "cuda":
            return self._streams.around(tally.axis, call)[0]
        begin = time.perf_counter()
        try:
            return call()
        finally:
            tally.seconds += time.perf_counter() - begin

    def _tally_of(self, group_name: str) -> _Tally | None:
        if group_name not in self._by_group:
            # DTensor remembers meshes that are equal to one it saw before, whose groups are others
            # over the same ranks.
            self._by_group[group_name] = self._by_ranks.get(_ranks_of(group_name))
        return self._by_group[group_name]

    def _timed(
        self,
        tally: _Tally,
        collective: str,
        tensor: Tensor,
        whole: int,
        original: Any,
        args: Any,
        kwargs: Any,
    ) -> Any:
        """Counts a collective, and runs it unless the meter is dry. ``whole``: bytes of the whole
        payload."""
        device_type = self._device_type if self._dry else tensor.device.type
        if device_type not in ("cpu", "cuda"):
            return original(*args, **kwargs)
        tally.calls += 1
        self._last = (collective, tally.axis)
        sent = sent_bytes(collective, whole, tally.size, device_type)
        tally.bytes += sent
        tally.ring_passes += 2 if collective == "all_reduce" else 1
        if self.log is not None:
            self.log.append(LoggedCollective(tally.axis, collective, tensor.dtype, sent))
        if self._dry:
            if original.__module__ == functional.__name__:
                return original(*args, **kwargs)  # sends nothing for tensors without storage
            return _Done() if kwargs.get("async_op") else None
        with named(f"{tally.axis}: {collective}"):
            if self._streams and device_type == "cuda":
                result, events = self._streams.around(tally.axis, lambda: original(*args, **kwargs))
                tally.events.append(events)
            else:
                begin = time.perf_counter()
                result = original(*args, **kwargs)
                tally.seconds += time.perf_counter() - begin
        # The handle is kept with its id, which another object could get otherwise.
        if isinstance(result, dist.Work):
            self._works[id(result)] = (result, tally, device_type)
        return result


# Function of torch.distributed, collective, place and names of the argument that holds the whole
# payload
_PLAIN: tuple[tuple[str, str, tuple[int, tuple[str, ...]]], ...] = (
    ("all_reduce", "all_reduce", (0, ("tensor",))),
    ("all_gather_single", "all_gather", (0, ("output", "output_tensor"))),
    ("all_gather_into_tensor", "all_gather", (0, ("output_tensor",))),
    ("reduce_scatter_single", "reduce_scatter", (1, ("input",))),
    ("reduce_scatter_tensor", "reduce_scatter", (1, ("input",))),
    ("all_to_all_single", "all_to_all", (1, ("input",))),
)
# Function of torch's functional collectives, collective, place of the argument ``group``
_FUNCTIONAL = (
    ("all_reduce", "all_reduce", 2),
    ("all_gather_single", "all_gather", 2),
    ("reduce_scatter_single", "reduce_scatter", 3),
    ("all_to_all_single", "all_to_all", 3),
)


def _argument(args: Any, kwargs: Any, index: int, *names: str) -> Any:
    """An argument that was given by place or by one of ``names``."""
    if len(args) > index:
        return args[index]
    return next(kwargs[name] for name in names if name in kwargs)


def _group_name(group: Any) -> str:
    """Of what functional collectives take for a group: a process group, its name, a mesh, or a mesh
    and an axis number."""
    match group:
        case dist.ProcessGroup():
            return group.group_name
        case str():
            return group
        case DeviceMesh():
            return group.get_group().group_name
        case (DeviceMesh() as mesh, axis):
            return mesh.get_group(axis).group_name
    return ""


def _ranks_of(group_name: str) -> tuple[int, ...]:
    """Empty for a name that torch has no group for."""
    try:
        group = _resolve_process_group(GroupName(group_name))
        return tuple(dist.get_process_group_ranks(group))
    except (RuntimeError, ValueError, KeyError):
        return ()
