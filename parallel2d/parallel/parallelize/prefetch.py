"""Gathers parameters some groups ahead of the one that computes: `prefetch_parameters`.

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
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from parallel2d.base.config import PrefetchConfig
from parallel2d.parallel.fsdp_internals.sharded_model import (
    ForwardOrder,
    prefetch_in_forward,
    set_asynchronous_gathers,
)
from parallel2d.parallel.mesh import mesh_shape

log = logging.getLogger(__name__)

Group = tuple[Any, ...]  # modules whose parameters are gathered together, each an `FSDPModule`


def prefetch_parameters(model: nn.Module, mesh: DeviceMesh, config: PrefetchConfig) -> nn.Module:
    """Sets how early the groups of ``model``, which `shard` has made, gather their parameters. With
    forward chains all-gathers become asynchronous on CPU, which on GPU streams see to. Forward
    chains rest while activations are recomputed."""
    if mesh_shape(mesh).shard == 1:
        if config != PrefetchConfig():
            log.info("prefetch has no effect with mesh.shard=1: no parameters are gathered")
        return model
    if mesh.device_type == "cpu" and config.forward:
        set_asynchronous_gathers(model, True)
    # An empty chain would mean torch's own choice, which is one group ahead in backward.
    if config.backward == 0:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_modules_to_backward_prefetch([module])
    order = ForwardOrder(model)

    def set_chains(_module: nn.Module, _inputs: Any, _output: Any) -> None:
        # Later forwards use the chains of the first one, whichever groups they run.
        handle.remove()
        ended = order.modules()
        times = Counter(map(id, ended))
        once = [group for group in ended if times[id(group)] == 1]
        if config.forward:
            for module, later in _chains(_in_order_of_begin(once), config.forward):
                prefetch_in_forward(module, later)
        # Backward runs groups in the reverse of the order in which their forward ended.
        if config.backward > 1:
            for module, later in _chains(once[::-1], config.backward):
                # An empty chain, that of the last group, would mean torch's own choice.
                module.set_modules_to_backward_prefetch(later or [module])

    handle = model.register_forward_hook(set_chains)
    _keep_current(order, model)
    return model


def _chains(order: Sequence[Group], ahead: int) -> Iterator[tuple[Any, list[Any]]]:
    """Yields each group's first module, and the first modules of the ``ahead`` groups after it."""
    first = [group[0] for group in order]
    for index, module in enumerate(first):
        yield module, first[index + 1 : index + 1 + ahead]


def _in_order_of_begin(ended: Sequence[Group]) -> list[Group]:
    """The same groups in the order in which their forward began: a group begins before those inside
    it, which end before it."""
    begun: list[Group] = []
    for group in ended:
        inside = set(chain.from_iterable(module.modules() for module in group))
        inner = [index for index, other in enumerate(begun) if other[0] in inside]
        begun.insert(min(inner, default=len(begun)), group)
    return begun


def _keep_current(order: ForwardOrder, model: nn.Module) -> None:
    """Lets ``order``, from which torch prefetches in backward, hold the forwards of ``model`` that
    await their backward, and no others: those without gradients are removed after they ended, what
    earlier micro-batches of an accumulation left before the next."""
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
