"""Gradient accumulation: which micro-batch moves gradients over which axis.

[Note: once per global batch] The sum of gradients over micro-batches commutes with the reduction over replicas, so one reduction of
the sum is enough. ``reduce_scatter_only`` keeps the sharded sum of each group and all-reduces it with the last micro-batch: the
slow axis moves once. ``none`` keeps full gradients and moves nothing before the last (least bytes, most memory). ``full``
reduces every micro-batch: least memory when a gradient buffer per group is too much.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from torch import nn
from torch.distributed.fsdp import FSDPModule

Batch = TypeVar("Batch")

MODES = ("full", "reduce_scatter_only", "none")


def accumulate(model: nn.Module, micro_batches: Sequence[Batch], mode: str = "reduce_scatter_only") -> Iterator[Batch]:
    """Yields the micro-batches of one global batch; ``model`` is set up for each before it is yielded.

    Run forward and backward inside the loop. Whatever ends the loop early, an exception or ``break`` included, what was
    accumulated apart from ``.grad`` is dropped and the model synchronizes fully afterwards. Raises ValueError for an unknown
    mode.
    """
    if mode not in MODES:
        raise ValueError(f"during_accumulation={mode!r} is not one of {', '.join(MODES)}")
    try:
        for index, micro_batch in enumerate(micro_batches):
            _synchronize(model, mode, last=index == len(micro_batches) - 1)
            yield micro_batch
    except BaseException:
        discard_accumulated(model)
        raise
    finally:
        _synchronize(model, "full", last=True)


@contextmanager
def no_sync(model: nn.Module, mode: str = "reduce_scatter_only") -> Iterator[None]:
    """Backward passes inside accumulate; the first one after the context reduces the sum over the replicate axis.

    ``mode="none"`` keeps even the reduce-scatter back. Safe against exceptions.
    """
    if mode not in MODES:
        raise ValueError(f"during_accumulation={mode!r} is not one of {', '.join(MODES)}")
    _synchronize(model, mode, last=False)
    try:
        yield
    except BaseException:
        discard_accumulated(model)
        raise
    finally:
        _synchronize(model, "full", last=True)


def discard_accumulated(model: nn.Module) -> None:
    """Drops what an interrupted forward or backward left behind: the sharding engine is ready for the next one, and partial
    gradient sums that it holds outside of ``.grad``, where ``zero_grad`` does not reach them, are not added to the next global batch."""
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        state = module._get_fsdp_state()
        if state._is_root:  # known from the first forward on; before it there is nothing to drop
            module.reset_iter_state()
        for group in state._fsdp_param_groups:
            group._partial_reduce_output = None
            for parameter in group.fsdp_params:
                parameter.unsharded_accumulated_grad = None
                if hasattr(parameter, "_unsharded_param"):
                    parameter.unsharded_param.grad = None


def _synchronize(model: nn.Module, mode: str, last: bool) -> None:
    assert isinstance(model, FSDPModule), "the model did not come from parallel2d.parallelize"
    model.set_requires_gradient_sync(last or mode != "none")
    model.set_requires_all_reduce(last or mode == "full")
    model.set_is_last_backward(last)
