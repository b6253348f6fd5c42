"""Gradient accumulation: the axes that each micro-batch reduces over.

[Note: once per global batch] The sum of gradients over micro-batches commutes with the reduction
over replicas, so one reduction of the sum is enough. ``reduce_scatter_only`` accumulates sharded
gradients and averages them over the replicas after the last micro-batch: the slow axis is used
once. ``none`` keeps unsharded gradients and communicates nothing before the last micro-batch (least
bytes, most memory). ``full`` reduces every micro-batch over both axes.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from torch import nn
from torch.distributed.fsdp import FSDPModule

from parallel2d.parallel.sync.engine.replica_reducer import (
    ReplicaReducer,
    engine_in,
    engines_in,
)

log = logging.getLogger(__name__)

Batch = TypeVar("Batch")

MODES = ("full", "reduce_scatter_only", "none")

# Sentinel after the last micro-batch. None could be a micro-batch.
_NOTHING = object()


def accumulate(
    model: nn.Module, micro_batches: Iterable[Batch], mode: str = "reduce_scatter_only"
) -> Iterator[Batch]:
    """Yield the micro-batches of one global batch, and set up ``model`` before each.

    Run forward and backward inside the loop. If the loop ends early, by an exception or ``break``,
    the gradient sums outside of ``.grad`` are dropped, and the next backward pass of the model
    reduces over both axes. Raises ValueError for an unknown mode.
    """
    engines = engines_in(model)
    with _ready_afterwards(model, mode):
        remaining = iter(micro_batches)
        batch = next(remaining, _NOTHING)
        while batch is not _NOTHING:
            # Read one ahead: the model must be set up before the last micro-batch runs.
            following = next(remaining, _NOTHING)
            _set_up(model, engines, mode, last=following is _NOTHING)
            yield batch  # type: ignore[misc]
            batch = following
        # Without a backward pass of the last micro-batch on this rank, sums are not reduced yet.
        for engine in engines:
            if engine.pending:
                engine.finish()


@contextmanager
def no_sync(model: nn.Module, mode: str = "reduce_scatter_only") -> Iterator[None]:
    """Accumulate the gradients of backward passes inside; a later pass reduces the sum.

    ``mode="none"`` also omits the reduce-scatter. After an exception the sums are dropped.
    """
    with _ready_afterwards(model, mode):
        _set_up(model, engines_in(model), mode, last=False)
        yield


@contextmanager
def _ready_afterwards(model: nn.Module, mode: str) -> Iterator[None]:
    if mode not in MODES:
        raise ValueError(f"during_accumulation={mode!r} is not one of {', '.join(MODES)}")
    try:
        yield
    # `break`, and an exception in the body of the loop, end a generator by GeneratorExit. The
    # generator must not raise another exception here, because Python would only print its
    # traceback.
    except GeneratorExit:
        try:
            discard_accumulated(model)
        except RuntimeError as error:  # another rank has ended
            log.info("an interrupted global batch was not discarded: %s", error)
        raise
    except BaseException:
        discard_accumulated(model)
        raise
    finally:
        _set_up(model, engines_in(model), "full", last=True)


def reduce_zeros(model: nn.Module, reductions: int) -> None:
    """Receive the mean gradients of a global batch of which this replica computes nothing.
    ``reductions``: number of reductions over the replicas."""
    for _ in range(reductions):
        for engine in engines_in(model):
            engine.finish_without_backward()


def discard_accumulated(model: nn.Module) -> None:
    """Drop the state of an interrupted forward or backward.

    FSDP is reset for the next forward. Gradient sums outside of ``.grad``, which ``zero_grad`` does
    not reach, are not added to the next global batch.
    """
    for module in model.modules():
        engine = engine_in(module)
        # Before the first forward torch has nothing to reset, and would fail.
        if engine is not None and engine.has_run:
            assert isinstance(module, FSDPModule)
            module.reset_iter_state()
    for engine in engines_in(model):
        engine.reset()


def clear_with_gradients(model: nn.Module) -> None:
    """Make ``model.zero_grad()`` drop all gradients. This includes gradients of sharded parameters
    while unsharded parameters are in the modules, and sums outside of ``.grad``."""
    zero_grad = model.zero_grad

    @functools.wraps(zero_grad)
    def clear(set_to_none: bool = True) -> None:
        zero_grad(set_to_none)
        for engine in engines_in(model):
            engine.clear_gradients(set_to_none)

    model.zero_grad = clear  # type: ignore[method-assign]


def _set_up(model: nn.Module, engines: Sequence[ReplicaReducer], mode: str, last: bool) -> None:
    """Set the axes of the next backward pass.

    Args:
        model: from `parallel2d.parallelize`.
        engines: of ``model`` and the modules below it.
        mode: one of `MODES`.
        last: True for the last backward pass of the global batch.
    """
    assert isinstance(model, FSDPModule), "the model did not come from parallel2d.parallelize"
    reduces_over_shards = last or mode != "none"
    reduces_over_replicas = last or mode == "full"
    # With ``recurse`` each of these calls would walk over all modules.
    for engine in engines:
        for group in engine.groups:
            group.module.set_requires_gradient_sync(reduces_over_shards, recurse=False)
            group.module.set_requires_all_reduce(reduces_over_replicas, recurse=False)
    model.set_is_last_backward(reduces_over_replicas)
