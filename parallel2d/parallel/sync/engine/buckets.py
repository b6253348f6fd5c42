"""The reduction of gradients over the replicate axis: `GroupGradients` of one group of parameters,
`Bucket` for one collective, and `BucketQueue`, which starts and ends the collectives."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel2d.base.device import current_stream, keep_until_done, new_stream, on_stream
from parallel2d.base.memory import keep_freed_memory
from parallel2d.parallel.fsdp_internals.fsdp_group import FSDPGroup, FSDPParameter
from parallel2d.parallel.sync.wires import Wire

Wait = Callable[[], None]
# Buckets that start between the first message of one and its second, which needs the answers
_BETWEEN = 2


class ReduceState(enum.Enum):
    """How far the sharded gradients of one group are."""

    # Further gradients may be added in this backward pass.
    WAITING = enum.auto()
    # They are those of this replica, complete in this backward pass: their bucket may start.
    FINAL = enum.auto()
    # They are the means over all data ranks.
    AVERAGED = enum.auto()


class GroupGradients:
    """The gradients of one group of parameters in the current global batch.

    Args:
        group: the parameters.
        wire: the format in which gradients are sent to other replicas.
    """

    def __init__(self, group: FSDPGroup, wire: Wire) -> None:
        self.group = group
        self.wire = wire
        self.state = ReduceState.WAITING
        # By parameter, frozen ones included: whether this rank has a gradient; once agreed, any.
        self.used = [False] * len(group.parameters)
        # Forwards that autograd recorded and no backward pass has ended since; 2 means several.
        self.forwards = 0
        # It has run more than once before a backward pass, and may again.
        self._repeats = False
        # Autograd has ended it in the current backward pass.
        self._has_ended = False
        self._means: list[tuple[FSDPParameter, Tensor]] = []

    @property
    def gradient_dtype(self) -> torch.dtype:
        """In which its gradients are added."""
        return self.group.trained[0].gradient_dtype

    @property
    def gradient_bytes(self) -> int:
        """Bytes of this rank's reduced gradients."""
        numel = sum(parameter.local_size.numel() for parameter in self.group.trained)
        return numel * self.gradient_dtype.itemsize

    def count_forward(self) -> None:
        """Called at each forward of the group that autograd records."""
        self.forwards = min(self.forwards + 1, 2)
        self._repeats |= self.forwards > 1

    def begin_reduction(self, crosses: bool) -> None:
        """Called when autograd has the group's gradients of a backward pass, which ``crosses`` the
        replicate axis or does not. Raises RuntimeError in a pass that autograd records, and where
        gradients were final."""
        # Gradients are enabled in a backward pass only with create_graph=True.
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"backward(create_graph=True) reached {self.group.called}: second derivatives are "
                "not possible here, because its parameters are released after the first; the "
                "difference of two forward passes, (model(x + e) - model(x)) / |e|, gives such "
                "penalties"
            )
        has_gradient = self.group.has_whole_gradients
        if has_gradient and self.state is ReduceState.FINAL:
            raise RuntimeError(
                f"{self.group.called} got gradients twice in one backward pass, and the first were "
                "on their way to other replicas: call the module, not parts of it"
            )
        self._repeats |= self._has_ended
        self._has_ended = True
        self.note_used()
        if not self.group.reduces_gradients:
            return
        for parameter in self.group.trained:
            # Gradients of earlier backward passes have the final dtype; they are added to.
            parameter.cast_gradient(parameter.gradient_dtype)
        if crosses:
            self.set_aside_means()
        # Sums that stay on this replica are no means any more.
        elif self.state is ReduceState.AVERAGED:
            self.state = ReduceState.WAITING
        # All ranks of a shard group run the same groups, so one that did not run here ran nowhere.
        self.group.prepare_gradients(fill=has_gradient or self.forwards > 0)
        # They are called after the agreement, when gradients are complete.
        for parameter in self.group.trained:
            parameter.take_hooks()

    def end_reduction(self, crosses: bool) -> None:
        """Called when all kernels that accumulate the sharded gradients of a pass are issued."""
        for parameter in self.group.trained:
            parameter.give_hooks_back()
        # A group that ran twice is reduced twice. It is final at the end of the backward pass.
        if crosses and self.forwards == 1 and not self._repeats:
            self.state = ReduceState.FINAL

    def end_backward(self) -> None:
        """Called at the end of every backward pass."""
        # torch has not come to it after an earlier `reduce_rest`.
        if not self._has_ended:
            self.note_used()
        # A forward whose backward pass is still to come goes on counting.
        self.forwards = max(self.forwards - self._has_ended, 0)
        self._has_ended = False

    def reduce_rest(self) -> None:
        """Reduces over the shard axis what backward passes of the global batch have left."""
        # Nothing is left after a backward pass that was set up as the last one.
        if self.group.has_whole_gradients:
            # This calls `begin_reduction` and `end_reduction`, as a backward pass does.
            self.group.reduce_late()
            self._has_ended = False

    def complete(self) -> None:
        """Cast gradients, which are means over all data ranks, to the dtype of the optimizer."""
        for parameter in self.group.trained:
            parameter.finish_dtype()
        self.state = ReduceState.AVERAGED

    def reset(self) -> None:
        """Drops what an interrupted global batch left behind."""
        self.state = ReduceState.WAITING
        self._has_ended = False
        self._means = []
        for parameter in self.group.parameters:
            parameter.forget_hooks()
        self.group.discard()

    def note_used(self) -> None:
        """Brings `used` up to date with this pass."""
        for number, parameter in enumerate(self.group.parameters):
            if parameter.has_whole_gradient:
                self.used[number] = True
            # One of an earlier pass is in the part that this replica updates once it is reduced.
            elif parameter.sharded.grad is None and parameter.updated.grad is None:
                self.used[number] = False

    def apply_used(self, used: Sequence[bool]) -> None:
        """Removes the gradients of parameters that no rank has ``used``, and calls the hooks of
        `register_post_accumulate_grad_hook` of the others."""
        self.used = list(used)
        for parameter, is_used in zip(self.group.parameters, used, strict=True):
            if not is_used:
                parameter.updated.grad = None
        for parameter in self.group.trained:
            parameter.call_hooks()

    def set_aside_means(self) -> None:
        """Takes out means that a narrow dtype would round again."""
        if self.state is not ReduceState.AVERAGED:
            return
        self.state = ReduceState.WAITING
        # In 32 bits or more they stay: averaging equal gradients again rounds once, in fp32.
        if not self.wire.rounds:
            return
        for parameter in self.group.trained:
            local = parameter.local_gradient
            if local is not None:
                self._means.append((parameter, local))
                parameter.set_gradient(None)

    @property
    def adds_to_means(self) -> bool:
        """True if its reduction is added to means of earlier backward passes."""
        return bool(self._means)

    def add_means(self) -> None:
        """Adds what `set_aside_means` has taken out to the new gradients."""
        for parameter, earlier in self._means:
            local = parameter.local_gradient
            # There is none where the global batch was abandoned.
            if local is not None:
                local.add_(earlier)
                keep_until_done(earlier)
        self._means = []


class Bucket:
    """The sharded gradients of one or more neighbouring groups, as one flat tensor.

    Its methods are those of torch's ``GradBucket``, so that hooks written for
    `torch.nn.parallel.DistributedDataParallel` accept it: `index`, `buffer`, `gradients`,
    `parameters`, `is_last`, `set_buffer`.

    Args:
        index: its number in the order of reduction.
        groups: neighbours with one wire.
        last: no bucket comes after it.
    """

    def __init__(self, index: int, groups: Sequence[GroupGradients], last: bool) -> None:
        self.groups = groups
        self.wire = groups[0].wire
        # Its parameters that require gradients
        self.trained: list[FSDPParameter] = []
        for each in groups:
            self.trained.extend(each.group.trained)
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
        return _as_real(self._flat).view(-1)

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
        return [_as_real(each) for each in self._parts]

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
            self._copy_in(gradients)
            for parameter, part in zip(self.trained, self._parts, strict=True):
                parameter.set_gradient(part)
        self._parts = self.gradients()

    def _copy_in(self, gradients: Sequence[Tensor | None]) -> None:
        """Copy ``gradients`` to their parts; zeros where there is none."""
        pairs = list(zip(self._parts, gradients, strict=True))
        found = [(part, gradient) for part, gradient in pairs if gradient is not None]
        if missing := [part for part, gradient in pairs if gradient is None]:
            torch._foreach_zero_(missing)
        if found:
            parts, copied = zip(*found, strict=True)
            torch._foreach_copy_(parts, copied)
            for gradient in copied:
                # Nothing refers to it once this returns.
                keep_until_done(gradient)

    def fill_with_zeros(self) -> None:
        """Makes `buffer` zeros of the bucket's size. The gradients stay as they are."""
        self._allocate()
        self.buffer().zero_()

    def _allocate(self) -> None:
        first, shapes = self.trained[0], [parameter.local_size for parameter in self.trained]
        sizes = [shape.numel() for shape in shapes]
        dtype, device = first.gradient_dtype, first.sharded.device
        self._flat = torch.empty(sum(sizes), dtype=dtype, device=device)
        pieces = self._flat.split(sizes)
        self._parts = [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]


def _as_real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


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

    Reductions run on a stream of their own; see [Note: order of streams].
    """

    # The process group of the replicate axis
    group: dist.ProcessGroup
    device_type: str
    # The stream in which torch accumulates sharded gradients
    accumulating: torch.Stream
    # In the order in which backward ends the groups
    groups: Sequence[GroupGradients]
    # A bucket of several groups is at most this large.
    bucket_bytes: int
    # What reduces a bucket, from what is sent
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
        """Starts buckets in their order, up to the first with a group that is not final yet.

        Every replica must start the same collectives in the same order, or they would wait for each
        other forever, but replicas may route data differently, and so end groups in another order.
        So the order is that of `groups`, whichever group ends first: a bucket whose groups are
        final waits for those before it, and `finish` starts all that are left, also those whose
        groups did not run here. Parameters are frozen and unfrozen between global batches, which is
        why buckets are made anew for each.
        """
        for bucket in self._remaining():
            if any(each.state is not ReduceState.FINAL for each in bucket.groups):
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
        """Lets go of the buckets of this global batch.

        Until here gradients may be views of the memory of their bucket. That memory belongs to the
        stream of the buckets, on which the next bucket could get it as soon as it is free. The
        gradients keep it alive, and the optimizer reads them on the current stream, which has
        waited for the stream of the buckets; `_on_stream` orders the next bucket after the
        optimizer.
        """
        self._buckets = []
        self._next = 0

    def _remaining(self) -> list[Bucket]:
        if not self._buckets:
            groups = [each for each in self.groups if each.group.trained]
            sizes = [each.gradient_bytes for each in groups]
            kinds = [(each.wire, each.gradient_dtype) for each in groups]
            filled = fill_buckets(sizes, kinds, self.bucket_bytes)
            for index, members in enumerate(filled):
                inside = [groups[each] for each in members]
                self._buckets.append(Bucket(index, inside, last=index == len(filled) - 1))
        return self._buckets[self._next :]

    def _start(self, bucket: Bucket, fill: Callable[[], None]) -> None:
        reduction = self.reduction_for(bucket.wire)
        # Some reductions hold memory, and hooks must not overlap.
        if reduction.most_in_flight is not None:
            self._await_all_but(reduction.most_in_flight - 1)
        with self._on_stream():
            for each in bucket.groups:
                each.set_aside_means()
            fill()
            with torch.profiler.record_function(f"replicate: bucket {bucket.index()}"):
                self._in_flight.append((bucket, reduction.start(bucket)))
        self._next += 1
        self._continue_all_but(_BETWEEN)

    def _continue_all_but(self, left: int) -> None:
        """Lets the oldest reductions send all that they send. The order is that of the starts, and
        so the same on every replica."""
        oldest = max(len(self._in_flight) - left, 0)
        for _, waits in self._in_flight[:oldest]:
            for wait in waits[:-1]:
                with self._on_stream():
                    wait()
            del waits[:-1]

    def _await_all_but(self, left: int) -> None:
        """Ends the oldest reductions until at most ``left`` are in flight."""
        self._continue_all_but(left)
        while len(self._in_flight) > left:
            bucket, waits = self._in_flight.pop(0)
            name = f"replicate: wait {bucket.index()}"
            with self._on_stream(), torch.profiler.record_function(name):
                for wait in waits:
                    wait()
                # Means of earlier backward passes are complete. They are added after the reduction.
                for each in bucket.groups:
                    each.add_means()

    @contextlib.contextmanager
    def _on_stream(self) -> Iterator[None]:
        """Runs its body on the stream of the reductions, after all kernels that write gradients."""
        self.stream.wait_stream(current_stream(self.device_type))
        self.stream.wait_stream(self.accumulating)
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
