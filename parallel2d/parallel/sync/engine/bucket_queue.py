"""Puts groups into buckets and reduces the buckets over the replicas, in one order.

`BucketQueue` starts a bucket as soon as its groups are final in the last backward pass. The order
is the same on every replica, whatever order the groups end in: those that autograd ends first come
first. Reductions run on a stream of their own where there are streams.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist

from parallel2d.parallel.sync.engine.bucket import Bucket, fill_buckets
from parallel2d.parallel.sync.engine.group_state import GroupState
from parallel2d.parallel.sync.engine.reductions import Reduction, Wait
from parallel2d.parallel.sync.wires import Wire


class BucketQueue:
    """Reduces the gradients of one model over the replicate axis.

    ``group``: the process group of that axis. ``states``: in the order in which backward ends
    their groups. ``bucket_bytes``: a bucket of several groups is at most this large.
    ``reduction_for``: what reduces a bucket, from what is sent.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device_type: str,
        states: Sequence[GroupState],
        bucket_bytes: int,
        reduction_for: Callable[[Wire], Reduction],
    ) -> None:
        self.group = group
        self.reduction_for = reduction_for
        self._states = states
        self._bucket_bytes = bucket_bytes
        self._stream: torch.Stream | None = None
        if device_type != "cpu":
            self._stream = torch.Stream(device_type)
        # Those of this global batch; empty until the first is needed.
        self._buckets: list[Bucket] = []
        # The index of the bucket that is started next.
        self._next = 0
        self._in_flight: list[tuple[Bucket, Wait]] = []

    # Starting and ending

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

    def join_stream(self) -> None:
        """Lets the current stream wait for the stream of the reductions."""
        if self._stream is not None:
            current = torch.accelerator.current_stream(self._stream.device)
            current.wait_stream(self._stream)

    def _start(self, bucket: Bucket, fill: Callable[[], None]) -> None:
        """Starts the reduction of ``bucket`` after ``fill`` has made its buffer."""
        reduction = self.reduction_for(bucket.wire)
        # Some reductions hold memory, and hooks must not overlap.
        if reduction.most_in_flight is not None:
            self._await_all_but(reduction.most_in_flight - 1)
        with self._on_stream():
            for state in bucket.states:
                # Gradients come from streams of the sharding engine.
                if self._stream is not None:
                    state.group.wait_for_gradients(self._stream)
                state.set_aside_means()
            fill()
            with torch.profiler.record_function(f"replicate: bucket {bucket.index()}"):
                self._in_flight.append((bucket, reduction.start(bucket)))
        self._next += 1

    def _await_all_but(self, left: int) -> None:
        """Ends the oldest reductions until at most ``left`` are in flight."""
        while len(self._in_flight) > left:
            bucket, wait = self._in_flight.pop(0)
            name = f"replicate: wait {bucket.index()}"
            with self._on_stream(), torch.profiler.record_function(name):
                wait()
                # Means of earlier backward passes are complete. They are added after the reduction.
                for state in bucket.states:
                    state.add_means()

    @contextlib.contextmanager
    def _on_stream(self) -> Iterator[None]:
        """Runs its body on the stream of the reductions, after what the current stream has done."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.accelerator.current_stream(self._stream.device))
        with self._stream:
            yield

    # Buckets

    def _remaining(self) -> list[Bucket]:
        """The buckets that are not started yet, in their order."""
        if not self._buckets:
            self._buckets = self._make_buckets()
        return self._buckets[self._next :]

    def _make_buckets(self) -> list[Bucket]:
        """Puts neighbouring groups of equal dtypes together, until a bucket is large enough."""
        states = [state for state in self._states if state.group.trained]
        filled = fill_buckets(
            [state.gradient_bytes for state in states],
            [(state.wire, state.group.trained[0].gradient_dtype) for state in states],
            self._bucket_bytes,
        )
        buckets = []
        for index, members in enumerate(filled):
            inside = [states[each] for each in members]
            buckets.append(Bucket(index, inside, last=index == len(filled) - 1))
        return buckets

    def forget_buckets(self) -> None:
        """The next global batch makes new ones, because parameters may be frozen in between."""
        self._buckets = []
        self._next = 0
