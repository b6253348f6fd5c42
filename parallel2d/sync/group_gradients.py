"""Prepares the gradients of a group for a reduction: one dtype, and additions in fp32."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from parallel2d.sync.group import GroupParameter, ParameterGroup
from parallel2d.weights.geometry import pieces_of


def refuse_second_derivatives(group: ParameterGroup) -> None:
    """Raises RuntimeError in a backward pass that autograd records."""
    # Gradients are enabled in a backward pass only with create_graph=True.
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"backward(create_graph=True) reached {group.called}: second derivatives are not "
            "possible here, because its parameters are released after the first; the difference of "
            "two forward passes, (model(x + e) - model(x)) / |e|, gives such penalties"
        )


def clear_gradients(groups: Iterable[ParameterGroup], set_to_none: bool) -> None:
    """Drops the gradients of sharded parameters, or sets them to zero.

    ``model.zero_grad()`` does not reach them while the gathered parameters are in the modules.
    """
    for group in groups:
        for parameter in group.trained:
            if set_to_none:
                parameter.set_gradient(None)
                continue
            # As `zero_grad(set_to_none=False)` does: the memory is kept.
            local = parameter.local_gradient
            if local is not None:
                local.zero_()


def cast_gradient(parameter: GroupParameter, dtype: torch.dtype) -> None:
    """Casts the reduced gradient, if there is one, to ``dtype``."""
    local = parameter.local_gradient
    if local is not None and local.dtype != dtype:
        parameter.set_gradient(local.to(dtype))


def make_uniform(parameters: Sequence[GroupParameter]) -> None:
    """Gives the whole gradients of a group one dtype, in which the sharding engine reduces them.

    They differ where some are sums of micro-batches, which are in `gradient_dtype`, and where a
    module casts its own weights.
    """
    dtypes = {parameter.whole_gradient_dtype for parameter in parameters}
    # None: there is no gradient before the first forward.
    dtypes.discard(None)
    any_accumulated = any(parameter.is_accumulated for parameter in parameters)
    # Sums over micro-batches hold the parts of the tensor axis too, in fp32 at least.
    if len(dtypes) > 1 or any_accumulated:
        _accumulate_all(parameters)
    else:
        _sum_parts(parameters)


def _accumulate_all(parameters: Sequence[GroupParameter]) -> None:
    """Turns the whole gradients of a group into sums in `gradient_dtype`."""
    for parameter in parameters:
        parameter.accumulate()


@torch.no_grad()
def _sum_parts(parameters: Sequence[GroupParameter]) -> None:
    """Adds the parts of gradients over the tensor axis in fp32, in one all-reduce.

    The sharding engine would add them in the dtype that computes (pytorch issue 190626). Where
    there are such parts, all gradients of the group become sums in `gradient_dtype`.
    """
    narrow = _narrow_parts(parameters)
    if not narrow:
        return
    flat = torch.cat([part.flatten().float() for _, part in narrow])
    first, _ = narrow[0]
    dist.all_reduce(flat, group=first.tensor_group)
    totals = pieces_of(flat, [part.shape for _, part in narrow])
    for (parameter, _), total in zip(narrow, totals, strict=True):
        parameter.set_sum_of_parts(total)
    # The sums are in `gradient_dtype` now, and the group must have one dtype.
    _accumulate_all(parameters)


def _narrow_parts(parameters: Sequence[GroupParameter]) -> list[tuple[GroupParameter, Tensor]]:
    """The parts of sums over the tensor axis that have fewer than 32 bits."""
    narrow = []
    for parameter in parameters:
        part = parameter.part
        # None: nothing has to be added over the tensor axis.
        if part is None or part.dtype.itemsize >= 4:
            continue
        narrow.append((parameter, part))
    return narrow
