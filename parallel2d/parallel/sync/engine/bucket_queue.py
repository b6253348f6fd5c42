"""Puts groups into buckets and reduces the buckets over the replicas, in one order.

`BucketQueue` starts a bucket as soon as its groups are final in the last backward pass. The order
is the same on every replica, whatever order the groups end in: those that autograd ends first come
first. Reductions run on a stream of their own where there are streams.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from parallel2d.parallel.sync.engine.bucket import Bucket, fill_buckets
from parallel2d.parallel.sync.engine.group_state import GroupState
from parallel2d.parallel.sync.engine.reductions import Hook, HookReduction, Reduction, Wait


class BucketQueue:
    """Reduces the gradients of one model over the replicate axis.

    ``group``: the process group of that axis. ``states``: in the order in which backward ends
    their groups. ``bucket_bytes``: a bucket of several groups is at most this large.
    ``make_reduction``: from the dtype that is sent and that of the gradients.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device_type: str,
        states: Sequence[GroupState],
        bucket_bytes: int,
        make_reduction: Callable[[torch.dtype, torch.dtype], Reduction],
    ) -> None:
        self.group = group
        self._states = states
        self._state_of = {id(state.group): state for state in states}
        self._bucket_bytes = bucket_bytes
        self._make_reduction = make_reduction
        self._stream: torch.Stream | None = None
        if device_type != "cpu":
            self._stream = torch.Stream(device_type)
        self._hook: tuple[Any, Hook] | None = None
        self._reductions: dict[tuple[torch.dtype, torch.dtype], Reduction] = {}
        self._buckets: list[Bucket] = []
        # The index of the bucket that is started next.
        self._next = 0
        self._in_flight: list[tuple[Bucket, Wait]] = []

    def register_hook(self, state: Any, hook: Hook) -> None:
        """Lets ``hook`` reduce the buckets; see `parallel2d.register_sync_hook`."""
        self._hook = state, hook
        self._reductions.clear()

    # Starting and ending

    def start_final(self) -> None:
        """Starts buckets in their order, up to the first with a group that is not final yet."""
        for bucket in self._remaining():
            if not self._is_final(bucket):
                return
            self._start(bucket, bucket.flatten)
            self._next += 1

    def finish(self, *, with_zeros: bool = False) -> None:
        """Reduces all buckets that are left and waits for all. `forget_buckets` follows, when their
        gradients are complete. ``with_zeros``: instead of this rank's gradients, where other ranks
        may be waiting for these reductions."""
        for bucket in self._remaining():
            self._start(bucket, bucket.fill_with_zeros if with_zeros else bucket.flatten)
            self._next += 1
        self._await_all()

    def cancel(self) -> None:
        """Waits for the buckets that were started, and starts no others."""
        self._await_all()
        self.forget_buckets()

    def join_stream(self) -> None:
        """Lets the current stream wait for the stream of the reductions."""
        if self._stream is not None:
            current = torch.accelerator.current_stream(self._stream.device)
            current.wait_stream(self._stream)

    def _remaining(self) -> list[Bucket]:
        """The buckets that are not started yet, in their order."""
        if not self._buckets:
            self._buckets = self._make_buckets()
        return self._buckets[self._next :]

    def _is_final(self, bucket: Bucket) -> bool:
        return all(self._state_of[id(group)].final for group in bucket.groups)

    def _start(self, bucket: Bucket, fill: Callable[[], None]) -> None:
        """Starts the reduction of ``bucket`` after ``fill`` has made its buffer."""
        reduction = self._reduction_of(bucket)
        # Some reductions hold memory, and hooks must not overlap.
        if reduction.most_in_flight is not None:
            while len(self._in_flight) >= reduction.most_in_flight:
                self._await_oldest()
        with self._on_stream():
            for group in bucket.groups:
                # Gradients come from streams of the sharding engine.
                if self._stream is not None:
                    group.wait_for_gradients(self._stream)
                self._state_of[id(group)].set_aside_means()
            fill()
            with torch.profiler.record_function(f"replicate: bucket {bucket.index()}"):
                self._in_flight.append((bucket, reduction.start(bucket)))

    def _await_all(self) -> None:
        while self._in_flight:
            self._await_oldest()

    def _await_oldest(self) -> None:
        bucket, wait = self._in_flight.pop(0)
        with self._on_stream(), torch.profiler.record_function(f"replicate: wait {bucket.index()}"):
            wait()
            # Means of earlier backward passes are complete. They are added after the reduction.
            for group in bucket.groups:
                self._state_of[id(group)].add_means()

    @contextlib.contextmanager
    def _on_stream(self) -> Iterator[None]:
        """Runs its body on the stream of the reductions, after what the current stream has done."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.accelerator.current_stream(self._stream.device))
        with self._stream:
            yield

    # Buckets and their reductions

    def _make_buckets(self) -> list[Bucket]:
        """Puts neighbouring groups of equal dtypes together, until a bucket is large enough."""
        groups = [state.group for state in self._states if state.group.trained]
        sizes: list[int] = []
        for group in groups:
            sizes.append(
                sum(
                    each.local_size.numel() * each.gradient_dtype.itemsize for each in group.trained
                )
            )
        kinds = [(group.wire, group.trained[0].gradient_dtype) for group in groups]
        filled = fill_buckets(sizes, kinds, self._bucket_bytes)
        last = len(filled) - 1
        buckets = []
        for index, members in enumerate(filled):
            buckets.append(Bucket(index, [groups[each] for each in members], last=index == last))
        return buckets

    def forget_buckets(self) -> None:
        """The next global batch makes new ones, because parameters may be frozen in between."""
        self._buckets = []
        self._next = 0

    def _reduction_of(self, bucket: Bucket) -> Reduction:
        dtypes = (bucket.wire, bucket.trained[0].gradient_dtype)
        if dtypes not in self._reductions:
            self._reductions[dtypes] = self._new_reduction(*dtypes)
        return self._reductions[dtypes]

    def _new_reduction(self, wire: torch.dtype, gradients: torch.dtype) -> Reduction:
        if self._hook is None:
            return self._make_reduction(wire, gradients)
        state, hook = self._hook
        return HookReduction(self.group if state is None else state, hook)
