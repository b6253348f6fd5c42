"""How the gradients of a bucket become their mean over the replicas.

`Reduction` is the interface, `reduction_for` chooses one by dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from parallel2d.parallel.sync.engine.bucket import Bucket
from parallel2d.parallel.sync.wires.blocks import Piece, RoundingKeys
from parallel2d.parallel.sync.wires.exchange import CastWire, Exchange, expected_mean, wire_of
from parallel2d.parallel.weights.geometry import Region

Wait = Callable[[], None]  # returns when the gradients of this replica are the mean
Hook = Callable[[Any, Any], Any]


class Reduction(Protocol):
    """A way to reduce a bucket over the replicate axis."""

    @property
    def most_in_flight(self) -> int | None:
        """How many reductions may have started and not ended; None: any number, because they hold
        no memory."""

    def start(self, bucket: Bucket) -> Wait:
        """Begins to average ``bucket.buffer()`` over the replicas: in place, or for the owners of
        the parameters. Collective: every replica starts the same buckets in the same order."""


class AllReduce:
    """An all-reduce in place, in the dtype of the gradients or in a narrower one of 32 bits."""

    most_in_flight = None

    def __init__(self, group: dist.ProcessGroup, wire: torch.dtype | None) -> None:
        self._group = group
        self._wire = wire

    def start(self, bucket: Bucket) -> Wait:
        flat = bucket.buffer()
        sent = flat if self._wire is None else flat.to(self._wire)
        work = dist.all_reduce(sent, dist.ReduceOp.AVG, group=self._group, async_op=True)

        def wait() -> None:
            work.wait()
            if sent is not flat:
                flat.copy_(sent)

        return wait


class RoundedReduction:
    """Sends a narrow dtype, or blocks of 8 bits a value, and adds in fp32; see
    [Note: rounded exchange]."""

    most_in_flight = 2  # each holds two buffers in what is sent

    def __init__(self, group: dist.ProcessGroup, keys: RoundingKeys, wire: torch.dtype) -> None:
        self._group = group
        self._keys = keys
        self._wire = wire

    def start(self, bucket: Bucket) -> Wait:
        if self._wire != torch.int8:
            # A cast needs to know nothing about parameters.
            return Exchange(self._group, CastWire(self._wire), [bucket.buffer()]).finish
        gradients = bucket.pieces()
        pieces = [Piece(self._keys.of(each.name), each.start) for each in bucket.trained]
        wire = wire_of("int8", gradients, pieces)
        assert wire is not None
        return Exchange(self._group, wire, gradients).finish


class HookReduction:
    """A function of the user's; see `parallel2d.register_sync_hook`."""

    # Hooks may start other collectives when the first is done, and all replicas must start
    # collectives in one order.
    most_in_flight = 1

    def __init__(self, state: Any, hook: Hook) -> None:
        self._state = state
        self._hook = hook

    def start(self, bucket: Bucket) -> Wait:
        flat = bucket.buffer()
        answer = self._hook(self._state, bucket)

        def wait() -> None:
            result = _result_of(answer)
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


def _result_of(answer: Any) -> Any:
    """What a hook has returned, or the value of the future that it has returned."""
    result = answer.wait() if isinstance(answer, torch._C.Future) else answer
    # The futures of some collectives hold a list of one tensor.
    if isinstance(result, list | tuple):
        (result,) = result
    return result


def reduction_for(
    group: dist.ProcessGroup, keys: RoundingKeys, wire: torch.dtype, gradients: torch.dtype
) -> Reduction:
    """The reduction that sends ``wire`` and adds in fp32 at least. ``gradients``: their dtype."""
    if wire.itemsize < 4:
        return RoundedReduction(group, keys, wire)
    is_narrower = wire.itemsize < gradients.to_real().itemsize
    return AllReduce(group, wire if is_narrower else None)


def expected_gradient(
    values: Sequence[Tensor],
    wire: str,
    cut: Sequence[Region],
    keys: RoundingKeys,
    name: str,
    splits_updates: bool,
) -> Tensor:
    """Computes in one process what reductions make of ``values``, the gradients of the replicas
    for the whole parameter ``name``. For proofs; see `expected_mean`."""
    # One without dimensions is averaged with what ranks agree on, unrounded. With split updates the
    # owner alone gets the mean.
    wire = wire if values[0].ndim else "auto"
    return expected_mean(values, wire, cut, keys, name, sent_back=not splits_updates)
