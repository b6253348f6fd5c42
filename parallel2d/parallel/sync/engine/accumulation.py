"""Gradient accumulation: the axes over which each micro-batch is reduced.

[Note: once per global batch] The gradients of several micro-batches may be summed first and then
reduced once over the replicas, with the same result. The mode chooses the reductions:

- ``reduce_scatter_only``: each micro-batch reduces over the shard axis. The sum of the sharded
  gradients is averaged over the replicas after the last micro-batch, so that the slow axis is used
  once per global batch.
- ``none``: unsharded gradients are accumulated, and nothing is communicated before the last
  micro-batch. This mode communicates the fewest bytes and needs the most memory.
- ``full``: each micro-batch reduces over both axes.
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

# Marks the end of the micro-batches. None could be a micro-batch.
_NOTHING = object()


def accumulate(
    model: nn.Module, micro_batches: Iterable[Batch], mode: str = "reduce_scatter_only"
) -> Iterator[Batch]:
    """Yield the micro-batches of one global batch, and set up ``model`` before each.

    Run forward and backward inside the loop. If the loop ends early, by an exception or ``break``,
    the accumulated gradients that are not reduced yet are discarded, and the next backward pass
    reduces over both axes. ``mode`` is one of `MODES`; see [Note: once per global batch]. Raises
    ValueError for an unknown mode.
    """
    engines = engines_in(model)
    with _ready_afterwards(model, mode):
        remaining = iter(micro_batches)
        batch = next(remaining, _NOTHING)
        while batch is not _NOTHING:
            # Read one micro-batch ahead, because the model must know before the last micro-batch
            # that it is the last.
            following = next(remaining, _NOTHING)
            _set_up(model, engines, mode, last=following is _NOTHING)
            yield batch  # type: ignore[misc]
            batch = following
        # If the script has skipped the backward pass of the last micro-batch, the accumulated
        # gradients are not reduced yet.
        for engine in engines:
            if engine.pending:
                engine.finish()


@contextmanager
def no_sync(model: nn.Module, mode: str = "reduce_scatter_only") -> Iterator[None]:
    """Accumulate the gradients of all backward passes inside of this context.

    The next backward pass outside of the context reduces the sum. ``mode="none"`` also omits the
    reduce-scatter. If the body raises, the accumulated gradients are discarded.
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
    # A `break` or an exception in the body of the loop raises GeneratorExit in the generator. No
    # other exception may leave the generator here, because Python would only print its traceback.
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
    """Take part in the reductions of a global batch in which this replica has no micro-batch.

    ``reductions`` is the number of reductions over the replicas.
    """
    for _ in range(reductions):
        for engine in engines_in(model):
            engine.finish_without_backward()


def discard_accumulated(model: nn.Module) -> None:
    """Discard the state of an interrupted forward or backward.

    Resets FSDP for the next forward. Also discards accumulated gradients outside of ``.grad``,
    which the optimizer's ``zero_grad`` does not clear.
    """
    for module in model.modules():
        engine = engine_in(module)
        # Before the first forward `reset_iter_state` would fail.
        if engine is not None and engine.has_run:
            assert isinstance(module, FSDPModule)
            module.reset_iter_state()
    for engine in engines_in(model):
        engine.reset()


def clear_with_gradients(model: nn.Module) -> None:
    """Make ``model.zero_grad()`` clear all gradients.

    The call also clears the gradients of sharded parameters while the modules hold unsharded
    parameters, and accumulated gradients outside of ``.grad``.
    """
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
        engines: the engines of ``model`` and of the modules below it.
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
