"""How many groups ahead of the one that computes parameters are gathered: `prefetch_parameters`.

[Note: the order in which groups run] Groups that gather others ahead need the order of execution,
which need not be the order of registration: a model may run its modules in any order, or one of
them twice. torch records the order in which groups end their forward anyway, so chains of groups
are set from that record when the first forward has ended; that first forward runs without them. A
group that ran several times has no one successor: it gathers nothing ahead and is gathered when it
is reached. A later forward that runs other groups is still correct: what was gathered and not used
is dropped, at the cost of that gather. Forwards that no backward pass will follow are removed from
the record: torch would otherwise go on prefetching from the end of a validation or of the
micro-batch before, one all-gather too many each time.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from parallel2d.base.config import PrefetchConfig
from parallel2d.parallel import fsdp_internals
from parallel2d.parallel.fsdp_internals import ForwardOrder
from parallel2d.parallel.mesh import mesh_shape

log = logging.getLogger(__name__)

Group = tuple[Any, ...]  # modules whose parameters are gathered together, each an `FSDPModule`


def prefetch_parameters(model: nn.Module, mesh: DeviceMesh, config: PrefetchConfig) -> nn.Module:
    """Sets how early the groups of ``model``, which `shard` has made, gather their parameters.
    Losses do not depend on it.

    With forward chains all-gathers become asynchronous on CPU: one that was issued early then runs
    while the group before computes, which on GPU streams see to. Forward chains rest while
    activations are recomputed.
    """
    if mesh_shape(mesh).shard == 1:
        if config != PrefetchConfig():
            log.info("prefetch has no effect with mesh.shard=1: no parameters are gathered")
        return model
    if mesh.device_type == "cpu" and config.forward:
        fsdp_internals.set_asynchronous_gathers(model, True)
    # One group ahead in backward is what torch does by itself.
    if config.backward == 0:
        _gather_nothing_ahead_in_backward(model)
    order = ForwardOrder(model)
    if config.forward > 0 or config.backward > 1:
        _set_chains_after_first_forward(model, order, config)
    _keep_current(order, model)
    return model


def _gather_nothing_ahead_in_backward(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # An empty chain would mean torch's own choice, one group ahead.
            module.set_modules_to_backward_prefetch([module])


def _set_chains_after_first_forward(
    model: nn.Module, order: ForwardOrder, config: PrefetchConfig
) -> None:
    def set_chains(_module: nn.Module, _inputs: Any, _output: Any) -> None:
        # Later forwards use the chains of the first one, whichever groups they run.
        handle.remove()
        _set_chains(order.modules(), config)

    handle = model.register_forward_hook(set_chains)


def _set_chains(ended: Sequence[Group], config: PrefetchConfig) -> None:
    """``ended``: the groups in the order in which their forward ended; see [Note: the order in
    which groups run]."""
    times = Counter(id(group) for group in ended)
    once = [group for group in ended if times[id(group)] == 1]
    if config.forward:
        for module, later in _chains(_in_order_of_begin(once), config.forward):
            fsdp_internals.prefetch_in_forward(module, later)
    # Backward runs groups in the reverse of the order in which their forward ended.
    if config.backward > 1:
        for module, later in _chains(once[::-1], config.backward):
            # An empty chain, that of the last group, would mean torch's own choice.
            module.set_modules_to_backward_prefetch(later or [module])


def _chains(order: Sequence[Group], ahead: int) -> Iterator[tuple[Any, list[Any]]]:
    """For each group its first module, and the first modules of the ``ahead`` groups after it."""
    for index, group in enumerate(order):
        following = order[index + 1 : index + 1 + ahead]
        yield group[0], [later[0] for later in following]


def _in_order_of_begin(ended: Sequence[Group]) -> list[Group]:
    """The same groups in the order in which their forward began: a group begins before those inside
    it, which end before it."""
    inside = {id(group): _modules_inside(group) for group in ended}
    begun: dict[int, Group] = {}
    for group in ended:
        around = [other for other in ended if id(group[0]) in inside[id(other)]]
        # The outermost has the most modules inside.
        around.sort(key=lambda outer: -len(inside[id(outer)]))
        for other in around:
            # A group is among those around it, and begins after all others of them.
            if other is not group:
                begun.setdefault(id(other), other)
        begun.setdefault(id(group), group)
    return list(begun.values())


def _modules_inside(group: Group) -> set[int]:
    """Ids of the modules of ``group`` and of all below them."""
    found: set[int] = set()
    for module in group:
        found.update(map(id, module.modules()))
    return found


def _keep_current(order: ForwardOrder, model: nn.Module) -> None:
    """Lets ``order``, from which torch prefetches in backward, hold the forwards of ``model`` that
    await their backward, and no others.

    Forwards without gradients are removed after they ended, together with parameters that they
    gathered and did not use. What earlier micro-batches of an accumulation left is removed before
    the next.
    """
    length_before = 0

    def begin(_module: nn.Module, _inputs: Any) -> None:
        nonlocal length_before
        length_before = order.remove_finished()

    def end(_module: nn.Module, _inputs: Any, _output: Any) -> None:
        if torch.is_grad_enabled():
            return  # its backward pass will follow
        order.shorten(length_before)

    model.register_forward_pre_hook(begin)
    model.register_forward_hook(end)
