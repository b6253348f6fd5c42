"""Reduction of gradients over the replicate axis.

`GroupGradients` are the gradients of one FSDP group, a `Bucket` is the payload of one collective,
and `BucketQueue` starts and ends the collectives.
"""

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
from parallel2d.parallel.sync.formats import CommunicationFormat

Wait = Callable[[], None]
# Some formats send two messages per bucket, and the second depends on the answers to the first.
# This many later buckets start before the second message of a bucket.
_BETWEEN = 2


class ReduceState(enum.Enum):
    """Progress of the sharded gradients of one group."""

    # This backward pass may add further gradients.
    WAITING = enum.auto()
    # This replica's gradients are complete, so their bucket may start.
    FINAL = enum.auto()
    # The gradients are means over all data ranks.
    AVERAGED = enum.auto()


class GroupGradients:
    """The gradients of one FSDP group in the current global batch.

    Args:
        group: the FSDP group.
        comm_format: communication format of gradients between replicas.
    """

    def __init__(self, group: FSDPGroup, comm_format: CommunicationFormat) -> None:
        self.group = group
        self.comm_format = comm_format
        self.state = ReduceState.WAITING
        # For each parameter, including frozen parameters: True if this rank has a gradient. After
        # the status all-reduce, True if any rank has a gradient.
        self.used = [False] * len(group.parameters)
        # Number of forwards whose backward pass is pending; 2 means two or more.
        self.forwards = 0
        # True once the group has run several times before a backward pass; it may do so again.
        self._repeats = False
        # True if FSDP's post-backward of the group has run in the current backward pass.
        self._has_ended = False
        # For an ``always`` module: True if the module, or its dummy, has run in this global batch
        self.ran_module = self.ran_dummy = False
        # Means of earlier backward passes, which must not be rounded again; see `set_aside_means`
        self._means: list[tuple[FSDPParameter, Tensor]] = []

    @property
    def gradient_dtype(self) -> torch.dtype:
        """Accumulation dtype of the gradients."""
        return self.group.trained[0].gradient_dtype

    @property
    def gradient_bytes(self) -> int:
        """Bytes of this rank's sharded gradients."""
        numel = sum(parameter.local_size.numel() for parameter in self.group.trained)
        return numel * self.gradient_dtype.itemsize

    def count_forward(self) -> None:
        """Count a forward of the group that autograd records."""
        self.forwards = min(self.forwards + 1, 2)
        self._repeats |= self.forwards > 1

    def begin_reduction(self, crosses: bool) -> None:
        """Prepare the group's gradients of a backward pass for the reduce-scatter.

        ``crosses`` is True if the pass also reduces over the replicate axis. Raises RuntimeError
        with create_graph=True, and if the group gets gradients after its state was FINAL.
        """
        # Gradient mode is enabled in a backward pass only with create_graph=True.
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"backward(create_graph=True) reached {self.group.called}: second derivatives are "
                "not possible here, because its parameters are released after the first; the "
                "difference of two forward passes, (model(x + e) - model(x)) / |e|, gives "
                "gradient penalties"
            )
        has_gradient = self.group.has_unsharded_gradients
        if has_gradient and self.state is ReduceState.FINAL:
            raise RuntimeError(
                f"{self.group.called} got gradients twice in one backward pass, and the first were "
                "already sent to other replicas: call the module, not parts of it"
            )
        self._repeats |= self._has_ended
        self._has_ended = True
        self.note_used()
        if not self.group.reduces_gradients:
            return
        for parameter in self.group.trained:
            # FSDP adds to the gradients of earlier backward passes. The earlier gradients have the
            # final dtype, so cast them to the accumulation dtype.
            parameter.cast_gradient(parameter.gradient_dtype)
        if crosses:
            self.set_aside_means()
        # This pass adds gradients that are not averaged over the replicas.
        elif self.state is ReduceState.AVERAGED:
            self.state = ReduceState.WAITING
        # Ranks of a shard group run the same groups. If a group had no forward on this rank, it had
        # no forward on the other ranks either, and needs no zero gradients.
        self.group.prepare_gradients(fill=has_gradient or self.forwards > 0)
        # User hooks must run after the status all-reduce, so remove them during FSDP's
        # accumulation.
        for parameter in self.group.trained:
            parameter.take_hooks()

    def end_reduction(self, crosses: bool) -> None:
        """Called when all kernels that accumulate the group's gradients have been issued."""
        for parameter in self.group.trained:
            parameter.give_hooks_back()
        # If a group ran twice, its gradients are reduce-scattered twice in this pass, and its
        # bucket must wait for the second time. The second time is not known in advance, so the
        # bucket of this group starts only at the end of the backward pass.
        is_shared = self.group.replicated_over is None  # see `average_over_shards`
        if crosses and self.forwards == 1 and not self._repeats and is_shared:
            self.state = ReduceState.FINAL

    def end_backward(self) -> None:
        """Called at the end of every backward pass."""
        # If the group has no gradients in this pass, FSDP's post-backward did not run.
        if not self._has_ended:
            self.note_used()
        # A forward with a pending backward pass remains counted.
        self.forwards = max(self.forwards - self._has_ended, 0)
        self._has_ended = False

    def reduce_rest(self) -> None:
        """Reduce-scatter gradients that earlier backward passes of the global batch have left."""
        # These are gradients of a group that did not run in the last backward pass.
        if self.group.has_unsharded_gradients:
            # The call runs `begin_reduction` and `end_reduction`, as a backward pass does.
            self.group.reduce_late()
            self._has_ended = False

    @torch.no_grad()
    def average_over_shards(self) -> None:
        """Average the gradients of a replicated conditional module over the shard axis. Collective.

        A missing gradient counts as zero, because only some ranks may have run the module.
        """
        ranks = self.group.replicated_over
        if ranks is None or not self.group.trained:
            return
        bucket = Bucket(0, [self], last=True)
        bucket.flatten()
        dist.all_reduce(bucket.buffer(), group=ranks)
        bucket.buffer().div_(ranks.size())

    def complete(self) -> None:
        """Mark the gradients as means over all data ranks, and cast them for the optimizer."""
        for parameter in self.group.trained:
            parameter.finish_dtype()
        self.state = ReduceState.AVERAGED
        self.ran_module = self.ran_dummy = False

    def reset(self) -> None:
        """Discard the state of an interrupted global batch."""
        self.state = ReduceState.WAITING
        self.ran_module = self.ran_dummy = False
        self._has_ended = False
        self._means = []
        for parameter in self.group.parameters:
            parameter.forget_hooks()
        self.group.discard()

    def note_used(self) -> None:
        """Update `used` with the gradients of this pass."""
        # If only the dummy has run, the gradients are zeros and do not count.
        is_dummy = self.ran_dummy and not self.ran_module
        for number, parameter in enumerate(self.group.parameters):
            if parameter.has_unsharded_gradient and not is_dummy:
                self.used[number] = True
            # Otherwise the parameter stays used if an earlier pass has left a gradient: on the
            # sharded parameter, or on the part of the parameter that this replica updates.
            elif parameter.sharded.grad is None and parameter.updated.grad is None:
                self.used[number] = False

    def apply_used(self, used: Sequence[bool]) -> None:
        """Remove gradients of parameters that no rank has used. Call the post-accumulate hooks of
        all other parameters.

        Scripts register these hooks by `register_post_accumulate_grad_hook`. ``used`` has one value
        for each parameter of the group.
        """
        self.used = list(used)
        for parameter, is_used in zip(self.group.parameters, used, strict=True):
            if not is_used:
                parameter.updated.grad = None
        for parameter in self.group.trained:
            parameter.call_hooks()

    def set_aside_means(self) -> None:
        """Take means of earlier passes out of ``.grad`` if a second reduction would round them."""
        if self.state is not ReduceState.AVERAGED:
            return
        self.state = ReduceState.WAITING
        # A format without rounding averages equal values in fp32 and does not change these values,
        # so the means can stay in ``.grad``.
        if not self.comm_format.rounds:
            return
        for parameter in self.group.trained:
            local = parameter.local_gradient
            if local is not None:
                self._means.append((parameter, local))
                parameter.set_gradient(None)

    @property
    def adds_to_means(self) -> bool:
        """True if the reduction is added to means of earlier backward passes."""
        return bool(self._means)

    def add_means(self) -> None:
        """Add the means of `set_aside_means` to the new gradients."""
        for parameter, earlier in self._means:
            local = parameter.local_gradient
            # The gradient is None if the global batch was abandoned.
            if local is not None:
                local.add_(earlier)
                keep_until_done(earlier)
        self._means = []


class Bucket:
    """The sharded gradients of one or more consecutive groups, as one flat tensor.

    A bucket can be passed to a communication hook for
    `torch.nn.parallel.DistributedDataParallel`, because it has the methods of torch's
    ``GradBucket``: `index`, `buffer`, `gradients`, `parameters`, `is_last`, `set_buffer`.

    Args:
        index: the bucket's number in the order of reduction.
        groups: consecutive groups with the same communication format.
        last: True for the last bucket.
    """

    def __init__(self, index: int, groups: Sequence[GroupGradients], last: bool) -> None:
        self.groups = groups
        self.comm_format = groups[0].comm_format
        # The trained parameters of the groups
        self.trained: list[FSDPParameter] = []
        for each in groups:
            self.trained.extend(each.group.trained)
        self._index = index
        self._last = last
        # None until `flatten` or `fill_with_zeros`.
        self._flat: Tensor | None = None
        # View of each parameter's gradient, in the order of `trained`.
        self._parts: list[Tensor] = []

    def index(self) -> int:
        """Return the bucket's number in the order of reduction, from 0."""
        return self._index

    def is_last(self) -> bool:
        """Return True for the last bucket in the order of reduction."""
        return self._last

    def buffer(self) -> Tensor:
        """Return all gradients of this replica as one flat real tensor; after the reduction, their
        means."""
        assert self._flat is not None, "the bucket is not being reduced"
        # Collectives and hooks need real tensors, so a complex number becomes two real numbers.
        return _as_real(self._flat).view(-1)

    def set_buffer(self, tensor: Tensor) -> None:
        """Copy ``tensor``, which has as many elements as `buffer`, into `buffer`."""
        self.buffer().copy_(tensor.view(-1))

    def gradients(self) -> list[Tensor]:
        """Return this rank's local shard of each gradient, as a view of `buffer`."""
        # After `flatten` every parameter has a gradient.
        return [each.local_gradient for each in self.trained]  # type: ignore[misc]

    def parameters(self) -> list[nn.Parameter]:
        """Return the sharded parameters, in the order of `gradients`."""
        return [each.sharded for each in self.trained]

    def parts(self) -> list[Tensor]:
        """Return the view of `buffer` for each of `parameters`; complex gradients as real views."""
        return list(map(_as_real, self._parts))

    def release(self) -> None:
        """Free the buffer, after the gradients were copied to other memory."""
        self._flat = None
        self._parts = []

    @torch.no_grad()
    def flatten(self) -> None:
        """Make the gradients views of one flat tensor, `buffer`.

        If the gradients already fill one tensor, as FSDP's gradients of one group do, they are not
        copied. A parameter without a gradient gets zeros, because another replica may have a
        gradient.
        """
        gradients = []
        for parameter in self.trained:
            gradients.append(parameter.local_gradient)
        self._flat = _common_storage(gradients)
        # The gradients of several groups, or with missing gradients, are copied.
        if self._flat is None:
            self._allocate()
            self._copy_in(gradients)
            for parameter, part in zip(self.trained, self._parts, strict=True):
                parameter.set_gradient(part)
        self._parts = self.gradients()

    def _copy_in(self, gradients: Sequence[Tensor | None]) -> None:
        """Copy ``gradients`` to their views; zeros for missing gradients."""
        pairs = list(zip(self._parts, gradients, strict=True))
        found = []
        for part, gradient in pairs:
            if gradient is not None:
                found.append((part, gradient))
        if missing := [part for part, gradient in pairs if gradient is None]:
            torch._foreach_zero_(missing)
        if found:
            parts, copied = zip(*found, strict=True)
            torch._foreach_copy_(parts, copied)
            for gradient in copied:
                # The gradient was allocated on another stream and is freed after this function. Its
                # memory must stay valid until the copy on the current stream has ended.
                keep_until_done(gradient)

    def fill_with_zeros(self) -> None:
        """Allocate `buffer` and fill it with zeros. The gradients do not change."""
        self._allocate()
        self.buffer().zero_()

    def _allocate(self) -> None:
        first, shapes = self.trained[0], [each.local_size for each in self.trained]
        sizes = list(map(torch.Size.numel, shapes))
        dtype, device = first.gradient_dtype, first.sharded.device
        self._flat = torch.empty(sum(sizes), dtype=dtype, device=device)
        pieces = self._flat.split(sizes)
        self._parts = [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]


def _as_real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _common_storage(tensors: Sequence[Tensor | None]) -> Tensor | None:
    """Return a flat view of all ``tensors`` if they fill a range of one storage without gaps.

    Returns None otherwise. A range with gaps (padding) is not used, because its size depends on how
    the gradients were computed, and replicas could send different sizes.
    """
    # A parameter without a gradient needs zeros, for which the storage has no space.
    found = []
    for tensor in tensors:
        if tensor is not None:
            found.append(tensor)
    if len(found) < len(tensors):
        return None
    first = found[0]
    begin = end = first.storage_offset()
    for tensor in found:
        is_elsewhere = tensor.untyped_storage().data_ptr() != first.untyped_storage().data_ptr()
        if is_elsewhere or not tensor.is_contiguous():
            return None
        # The order of the gradients in storage may differ from the order of the parameters.
        begin = min(begin, tensor.storage_offset())
        end = max(end, tensor.storage_offset() + tensor.numel())
    filled = sum(map(Tensor.numel, found))
    if end - begin != filled:
        return None
    return first.as_strided((filled,), (1,), begin)


class Reduction(Protocol):
    """A way to reduce a bucket over the replicate axis."""

    @property
    def most_in_flight(self) -> int | None:
        """Maximum number of reductions in flight; None: unlimited, because they need no buffers."""

    def start(self, bucket: Bucket) -> list[Wait]:
        """Start to average ``bucket.buffer()`` over the replicas.

        Collective: every replica starts the same buckets in the same order. Returns the remaining
        steps in order; each step waits for the previous collective. After the last step the
        gradients are the means: on every replica, or only on the replica that updates the
        parameter if the updates are split.
        """


@dataclass(eq=False)
class BucketQueue:
    """The buckets of one model, and their reductions over the replicate axis.

    Reductions run on a separate stream; see [Note: order of streams].
    """

    # Process group of the replicate axis
    group: dist.ProcessGroup
    device_type: str
    # Stream on which FSDP accumulates sharded gradients
    accumulating: torch.Stream
    # All groups of the model, in the order of their backward passes
    groups: Sequence[GroupGradients]
    # Maximum size of a bucket of several groups
    bucket_bytes: int
    # Returns the reduction for a communication format
    reduction_for: Callable[[CommunicationFormat], Reduction]

    def __post_init__(self) -> None:
        self.stream = new_stream(self.device_type)
        if self.device_type == "cpu":
            keep_freed_memory()
        # Buckets of this global batch; empty until the first use of `_remaining`
        self._buckets: list[Bucket] = []
        # Index of the next bucket to start
        self._next = 0
        self._in_flight: list[tuple[Bucket, list[Wait]]] = []

    def start_final(self) -> None:
        """Start the next buckets in order, until a bucket has a group that is not FINAL.

        Every replica must start the same collectives in the same order, or replicas would wait for
        each other forever. Replicas may complete groups in different orders, because they may route
        data differently through the model. Therefore the order of buckets is fixed: it is the order
        of `groups`. A bucket waits until all earlier buckets have started. `finish` starts all
        remaining buckets, including buckets of groups that did not run on this replica. Buckets are
        built again for each global batch, because parameters may be frozen or unfrozen between
        global batches.
        """
        for bucket in self._remaining():
            if any(each.state is not ReduceState.FINAL for each in bucket.groups):
                return
            self._start(bucket, bucket.flatten)

    def finish(self, *, with_zeros: bool = False) -> None:
        """Reduce the remaining buckets and wait for all buckets.

        Call `forget_buckets` afterwards, when the gradients are complete. If ``with_zeros``, this
        rank sends zeros instead of its gradients, so that other ranks do not wait forever.
        """
        for bucket in self._remaining():
            self._start(bucket, bucket.fill_with_zeros if with_zeros else bucket.flatten)
        self._await_all_but(0)

    def cancel(self) -> None:
        """Wait for the buckets that have started, and discard the others."""
        self._await_all_but(0)
        self.forget_buckets()

    def forget_buckets(self) -> None:
        """Free the references to the buckets of this global batch.

        Gradients may be views of the memory of their bucket, which was allocated on the stream of
        the buckets. Once this memory is free, the allocator may give it to a later bucket on that
        stream without waiting for other streams. This reuse is safe for three reasons. The
        gradients keep the memory alive until ``zero_grad``. The optimizer reads the gradients on
        the current stream, after that stream has waited for the stream of the buckets. `_on_stream`
        makes each later bucket wait for the current stream, and therefore for the optimizer.
        """
        self._buckets = []
        self._next = 0

    def _remaining(self) -> list[Bucket]:
        if not self._buckets:
            groups = [each for each in self.groups if each.group.trained]
            sizes, kinds = [], []
            for each in groups:
                sizes.append(each.gradient_bytes)
                kinds.append((each.comm_format, each.gradient_dtype))
            filled = fill_buckets(sizes, kinds, self.bucket_bytes)
            for index, members in enumerate(filled):
                inside = [groups[member] for member in members]
                self._buckets.append(Bucket(index, inside, last=index == len(filled) - 1))
        return self._buckets[self._next :]

    def _start(self, bucket: Bucket, fill: Callable[[], None]) -> None:
        reduction = self.reduction_for(bucket.comm_format)
        # The number in flight is limited if reductions need buffers, and for user hooks, which must
        # not overlap.
        if reduction.most_in_flight is not None:
            self._await_all_but(reduction.most_in_flight - 1)
        # All kernels of the bucket run on the stream of the buckets: the copies of `fill`, and the
        # casts of the reduction. `set_aside_means` comes first, because `fill` copies only the
        # gradients that remain. The collective starts last: its stream waits for the stream of the
        # buckets, so the collective runs after these kernels.
        with self._on_stream():
            for each in bucket.groups:
                each.set_aside_means()
            fill()
            with torch.profiler.record_function(f"replicate: bucket {bucket.index()}"):
                self._in_flight.append((bucket, reduction.start(bucket)))
        self._next += 1
        self._continue_all_but(_BETWEEN)

    def _continue_all_but(self, left: int) -> None:
        """Run the steps that send messages (all but the last) for the oldest reductions.

        The newest ``left`` reductions are left out. The order is that of `_start`, so it is the
        same on every replica.
        """
        oldest = max(len(self._in_flight) - left, 0)
        for _, waits in self._in_flight[:oldest]:
            for wait in waits[:-1]:
                with self._on_stream():
                    wait()
            del waits[:-1]

    def _await_all_but(self, left: int) -> None:
        """End the oldest reductions until at most ``left`` are in flight."""
        self._continue_all_but(left)
        while len(self._in_flight) > left:
            bucket, waits = self._in_flight.pop(0)
            name = f"replicate: wait {bucket.index()}"
            # On a GPU `Work.wait` does not block the host: it makes the current stream, here the
            # stream of the buckets, wait for the stream of the collective. Later kernels on the
            # stream of the buckets, which copy results and add means, therefore run after the
            # collective, and backward continues on the current stream. On CPU the host waits.
            with self._on_stream(), torch.profiler.record_function(name):
                for wait in waits:
                    wait()
                # Add the means of earlier backward passes, which were set aside.
                for each in bucket.groups:
                    each.add_means()

    @contextlib.contextmanager
    def _on_stream(self) -> Iterator[None]:
        """Run the body on the stream of the buckets, after all kernels that write gradients."""
        # FSDP writes gradients on the stream `accumulating`, or on the current stream for groups on
        # a single shard rank. The host has issued all kernels of a FINAL group before this point,
        # so the two waits below cover them. Each bucket needs both waits, because it may contain
        # groups of both kinds. The optimizer of the previous step, which reads the memory of
        # earlier buckets, also runs on the current stream.
        self.stream.wait_stream(current_stream(self.device_type))
        self.stream.wait_stream(self.accumulating)
        with on_stream(self.device_type, self.stream):
            yield


# Maximum size of the first and of the last bucket. A small first bucket starts early, as in
# DistributedDataParallel. A small last bucket ends early, and the optimizer waits for its end.
_OUTER_BYTES = 2**20


def fill_buckets(sizes: Sequence[int], kinds: Sequence[object], most_bytes: int) -> list[list[int]]:
    """Put consecutive groups of the same kind into buckets. Return the group indexes per bucket.

    A group that is larger than ``most_bytes`` has a separate bucket. The first and the last bucket
    have at most 1 MiB or contain one group.

    Args:
        sizes: bytes of the gradients of each group.
        kinds: kind of each group: its communication format and gradient dtype.
        most_bytes: maximum size of a bucket of several groups.
    """
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
