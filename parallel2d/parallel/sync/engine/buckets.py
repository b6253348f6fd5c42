"""Buckets: gradients that are reduced over the replicate axis in one collective (`Bucket`), and the
one order in which they are (`BucketQueue`)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel2d.base.device import current_stream, keep_until_done, new_stream, on_stream
from parallel2d.base.memory import keep_freed_memory
from parallel2d.parallel.fsdp_internals.fsdp_group import FSDPParameter
from parallel2d.parallel.sync.engine.group_state import GroupState
from parallel2d.parallel.sync.wires import Wire
from parallel2d.parallel.weights.geometry import as_real, pieces_of

Wait = Callable[[], None]
# Buckets that start between the first message of one and its second, which needs the answers
_BETWEEN = 2


class Bucket:
    """The sharded gradients of one or more neighbouring groups, as one flat tensor.

    Its methods are those of torch's ``GradBucket``, so that hooks written for
    `torch.nn.parallel.DistributedDataParallel` accept it: `index`, `buffer`, `gradients`,
    `parameters`, `is_last`, `set_buffer`. ``states``: of the groups, which have one wire.
    """

    def __init__(self, index: int, states: Sequence[GroupState], last: bool) -> None:
        self.states = states
        self.wire = states[0].wire
        # Its parameters that require gradients
        self.trained: list[FSDPParameter] = []
        for state in states:
            self.trained.extend(state.group.trained)
        self._index = index
        self._last = last
        # None until `flatten` or `fill_with_zeros`.
        self._flat: Tensor | None = None
        # The part of each parameter in it, in the order of `trained`.
        self._parts: list[Tensor] = []

    def index(self) -> int:
        """Its number in the order of reduction, from 0: what backward ends first comes first."""
        return self._index

    def is_last(self) -> bool:
        """Whether it is the last one in the order of reduction."""
        return self._last

    def buffer(self) -> Tensor:
        """All gradients, flat and real: this replica's, or after the reduction their mean."""
        assert self._flat is not None, "the bucket is not being reduced"
        # Collectives and hooks take real tensors: a complex number is sent as two.
        return as_real(self._flat).view(-1)

    def set_buffer(self, tensor: Tensor) -> None:
        """Copies ``tensor``, of the same number of elements, into `buffer`, cast to its dtype."""
        self.buffer().copy_(tensor.view(-1))

    def gradients(self) -> list[Tensor]:
        """This rank's part of each gradient, a view of `buffer`."""
        # `flatten` has given every parameter one.
        return [parameter.local_gradient for parameter in self.trained]  # type: ignore[misc]

    def parameters(self) -> list[nn.Parameter]:
        """The sharded parameters, in the order of `gradients`."""
        return [parameter.sharded for parameter in self.trained]

    def parts(self) -> list[Tensor]:
        """Views of `buffer`, in the order of `parameters`; complex ones as real numbers."""
        return [as_real(each) for each in self._parts]

    def release(self) -> None:
        """Lets go of the memory; the gradients are elsewhere by now."""
        self._flat = None
        self._parts = []

    @torch.no_grad()
    def flatten(self) -> None:
        """Makes the gradients views of one flat tensor, `buffer`.

        Nothing is copied when they are views of one tensor already, as torch leaves
        those of a group. A parameter without a gradient gets zeros: another replica may have one.
        """
        gradients = [parameter.local_gradient for parameter in self.trained]
        self._flat = _common_storage(gradients)
        # So it is at first with several groups: each has a storage of its own.
        if self._flat is None:
            self._allocate()
            for parameter, gradient, part in zip(self.trained, gradients, self._parts, strict=True):
                if gradient is None:
                    part.zero_()
                else:
                    part.copy_(gradient)
                    # Nothing refers to it once this returns.
                    keep_until_done(gradient)
                parameter.set_gradient(part)
        self._parts = self.gradients()

    def fill_with_zeros(self) -> None:
        """Makes `buffer` zeros of the bucket's size. The gradients stay as they are."""
        self._allocate()
        self.buffer().zero_()

    def _allocate(self) -> None:
        first, shapes = self.trained[0], [parameter.local_size for parameter in self.trained]
        self._flat = torch.empty(
            sum(shape.numel() for shape in shapes),
            dtype=first.gradient_dtype,
            device=first.sharded.device,
        )
        self._parts = list(pieces_of(self._flat, shapes))


def _common_storage(tensors: Sequence[Tensor | None]) -> Tensor | None:
    """One flat view of all ``tensors``; None unless they fill a piece of one storage without gaps.

    Gaps hold padding. A view with gaps would have a size that depends on how the gradients were
    made, and replicas could send different sizes.
    """
    # A parameter without a gradient needs zeros, for which there is no room between the others.
    found = [tensor for tensor in tensors if tensor is not None]
    if len(found) < len(tensors):
        return None
    first = found[0]
    begin = end = first.storage_offset()
    for tensor in found:
        is_elsewhere = tensor.untyped_storage().data_ptr() != first.untyped_storage().data_ptr()
        if is_elsewhere or not tensor.is_contiguous():
            return None
        # The order in storage may be another than that of the parameters.
        begin = min(begin, tensor.storage_offset())
        end = max(end, tensor.storage_offset() + tensor.numel())
    filled = sum(tensor.numel() for tensor in found)
    if end - begin != filled:
        return None
    return first.as_strided((filled,), (1,), begin)


class Reduction(Protocol):
    """A way to reduce a bucket over the replicate axis."""

    @property
    def most_in_flight(self) -> int | None:
        """How many reductions may have started and not ended; None: any number, because they hold
        no memory."""

    def start(self, bucket: Bucket) -> list[Wait]:
        """Begins to average ``bucket.buffer()`` over the replicas: in place, or for the owners of
        the parameters. Collective: every replica starts the same buckets in the same order.
        Returns what is left to do, in order: each waits for what was begun before. After the last
        the gradients are the mean."""


@dataclass(eq=False)
class BucketQueue:
    """Puts the groups of one model into buckets and reduces them over the replicate axis.

    A bucket starts as soon as its groups are final in the last backward pass. The order is the same
    on every replica, whatever order the groups end in: those that autograd ends first come first.
    Reductions run on a stream of their own where there are streams.

    ``group``: the process group of that axis. ``reduced``: the stream in which torch accumulates
    sharded gradients; see [Note: order of streams]. ``states``: in the order in which backward ends
    their groups. ``bucket_bytes``: a bucket of several groups is at most this large.
    ``reduction_for``: what reduces a bucket, from what is sent.
    """

    group: dist.ProcessGroup
    device_type: str
    reduced: torch.Stream
    states: Sequence[GroupState]
    bucket_bytes: int
    reduction_for: Callable[[Wire], Reduction]

    def __post_init__(self) -> None:
        self.stream = new_stream(self.device_type)
        if self.device_type == "cpu":
            keep_freed_memory()
        # Those of this global batch; empty until the first is needed.
        self._buckets: list[Bucket] = []
        # The index of the bucket that is started next.
        self._next = 0
        self._in_flight: list[tuple[Bucket, list[Wait]]] = []

    def start_final(self) -> None:
        """Starts buckets in their order, up to the first with a group that is not final yet."""
        for bucket in self._remaining():
            if not all(state.final for state in bucket.states):
                return
            self._start(bucket, bucket.flatten)

    def finish(self, *, with_zeros: bool = False) -> None:
        """Reduces all buckets that are left and waits for all. `forget_buckets` follows, when their
        gradients are complete. ``with_zeros``: instead of this rank's gradients, where other ranks
        may be waiting for these reductions."""
        for bucket in self._remaining():
            self._start(bucket, bucket.fill_with_zeros if with_zeros else bucket.flatten)
        self._await_all_but(0)

    def cancel(self) -> None:
        """Waits for the buckets that were started, and starts no others."""
        self._await_all_but(0)
        self.forget_buckets()

    def forget_buckets(self) -> None:
        """The next global batch makes new ones, because parameters may be frozen in between."""
        self._buckets = []
        self._next = 0

    def _remaining(self) -> list[Bucket]:
        if not self._buckets:
            states = [state for state in self.states if state.group.trained]
            sizes = [state.gradient_bytes for state in states]
            kinds = [(state.wire, state.gradient_dtype) for state in states]
            filled = fill_buckets(sizes, kinds, self.bucket_bytes)
            for index, members in enumerate(filled):
                inside = [states[each] for each in members]
                self._buckets.append(Bucket(index, inside, last=index == len(filled) - 1))
        return self._buckets[self._next :]

    def _start(self, bucket: Bucket, fill: Callable[[], None]) -> None:
        reduction = self.reduction_for(bucket.wire)
        # Some reductions hold memory, and hooks must not overlap.
        if reduction.most_in_flight is not None:
            self._await_all_but(reduction.most_in_flight - 1)
        with self._on_stream():
            for state in bucket.states:
                state.set_aside_means()
            fill()
            with torch.profiler.record_function(f"replicate: bucket {bucket.index()}"):
                self._in_flight.append((bucket, reduction.start(bucket)))
        self._next += 1
        self._go_on_with_all_but(_BETWEEN)

    def _go_on_with_all_but(self, left: int) -> None:
        """Has the oldest reductions send all that they send. The order is that of the starts, and
        so the same on every replica."""
        oldest = max(len(self._in_flight) - left, 0)
        for _, waits in self._in_flight[:oldest]:
            for wait in waits[:-1]:
                with self._on_stream():
                    wait()
            del waits[:-1]

    def _await_all_but(self, left: int) -> None:
        """Ends the oldest reductions until at most ``left`` are in flight."""
        self._go_on_with_all_but(left)
        while len(self._in_flight) > left:
            bucket, waits = self._in_flight.pop(0)
            name = f"replicate: wait {bucket.index()}"
            with self._on_stream(), torch.profiler.record_function(name):
                for wait in waits:
                    wait()
                # Means of earlier backward passes are complete. They are added after the reduction.
                for state in bucket.states:
                    state.add_means()

    @contextlib.contextmanager
    def _on_stream(self) -> Iterator[None]:
        """Runs its body on the stream of the reductions, after all kernels that write gradients."""
        self.stream.wait_stream(current_stream(self.device_type))
        self.stream.wait_stream(self.reduced)
        with on_stream(self.device_type, self.stream):
            yield


# Of the first bucket, which then starts early, as in DistributedDataParallel, and of the last one,
# for which everything waits.
_OUTER_BYTES = 2**20


def fill_buckets(sizes: Sequence[int], kinds: Sequence[object], most_bytes: int) -> list[list[int]]:
    """Puts neighbours of one kind together, until a bucket is large enough. ``sizes``: bytes of the
    gradients of each group. Returns the indexes of the groups of each bucket. A group that is
    larger than ``most_bytes`` has a bucket of its own. The first bucket and the last have 1 MiB at
    most, or one group."""
    buckets: list[list[int]] = []
    room = 0
    for index, (size, kind) in enumerate(zip(sizes, kinds, strict=True)):
        if not buckets or kind != kinds[index - 1] or size > room:
            room = most_bytes if buckets else min(most_bytes, _OUTER_BYTES)
            buckets.append([])
        buckets[-1].append(index)
        room -= size
    if buckets and len(buckets[-1]) > 1 and sum(sizes[each] for each in buckets[-1]) > _OUTER_BYTES:
        buckets.append([buckets[-1].pop()])
    return buckets
