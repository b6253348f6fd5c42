"""How the gradients of a bucket become their mean over the replicas, each a `Reduction`: exactly,
rounded, or by a user's hook. That of split updates is in `methods/split_updates.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from parallel2d.parallel.sync.engine.bucket import Bucket
from parallel2d.parallel.sync.wires.blocks import Piece, RoundingKeys
from parallel2d.parallel.sync.wires.exchange import Exchange

Wait = Callable[[], None]  # returns when the gradients of this replica are the mean
Hook = Callable[[Any, Any], Any]


class Reduction(Protocol):
    """A way to reduce a bucket over the replicate axis.

    ``most_in_flight``: how many reductions may have started and not ended; None: any number,
    because they hold no memory.
    """

    most_in_flight: int | None

    def start(self, bucket: Bucket) -> Wait:
        """Begins to average ``bucket.buffer()`` over the replicas: in place, or for the owners of
        the parameters. Collective: every replica starts the same buckets in the same order."""


class AllReduce:
    """An all-reduce in place, in the dtype of the gradients or in a narrower one of 32 bits."""

    most_in_flight: int | None = None

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def start(self, bucket: Bucket) -> Wait:
        flat = sent = bucket.buffer()
        # Nothing is sent in a dtype that is wider than the gradients.
        if bucket.wire.item_bytes < flat.dtype.itemsize:
            sent = flat.to(bucket.wire.dtype)
        work = dist.all_reduce(sent, dist.ReduceOp.AVG, group=self._group, async_op=True)

        def wait() -> None:
            work.wait()
            if sent is not flat:
                flat.copy_(sent)

        return wait


class RoundedReduction:
    """Sends what the wire rounds, and adds in fp32; see [Note: rounded exchange]."""

    most_in_flight: int | None = 2  # each holds two buffers in what is sent

    def __init__(self, group: dist.ProcessGroup, keys: RoundingKeys) -> None:
        self._group = group
        self._keys = keys

    def start(self, bucket: Bucket) -> Wait:
        if bucket.wire.dtype is not None:
            # A cast needs to know nothing about parameters.
            whole = [bucket.buffer()]
            return Exchange(self._group, bucket.wire.coder(whole, ()), whole).finish
        gradients = bucket.pieces()
        pieces = [Piece(self._keys.of(each.name), each.start) for each in bucket.trained]
        return Exchange(self._group, bucket.wire.coder(gradients, pieces), gradients).finish


class HookReduction:
    """A function of the user's; see `parallel2d.register_sync_hook`."""

    # Hooks may start other collectives when the first is done, and all replicas must start
    # collectives in one order.
    most_in_flight: int | None = 1

    def __init__(self, state: Any, hook: Hook) -> None:
        self._state = state
        self._hook = hook

    def start(self, bucket: Bucket) -> Wait:
        flat = bucket.buffer()
        answer = self._hook(self._state, bucket)

        def wait() -> None:
            result = answer.wait() if isinstance(answer, torch._C.Future) else answer
            # The futures of some collectives hold a list of one tensor.
            if isinstance(result, list | tuple):
                (result,) = result
            if result is None:
                return
            if not isinstance(result, Tensor):
                raise TypeError(
                    f"a sync hook returns a future of a tensor, a tensor or None, not {result!r}"
                )
            # A hook that works in place may return the buffer itself.
            if result.data_ptr() != flat.data_ptr():
                flat.copy_(result.view(-1))

        return wait
