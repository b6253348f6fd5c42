"""Gathers parameters some groups ahead of the one that computes: `prefetch_parameters`.

[Note: the order in which groups run] Groups that gather others ahead need the order of execution,
which need not be the order of registration: a model may run its modules in any order, or one of
them twice. So chains of groups are set when the first forward has ended, in the order in which it
ran them; that first forward runs without them. A group that ran several times has no one successor:
it gathers nothing ahead and is gathered when it is reached. A later forward that runs other groups
is still correct: gathers that were not used are dropped, at the cost of that gather.

Without a chain, torch gathers one group ahead in backward, from its own record of forwards. Those
of a validation, and of earlier micro-batches, stay in that record, and the last group in backward
would gather what was before it there in vain. So the group whose forward ends first gathers nothing
ahead. Forward chains rest in backward, in which checkpointed blocks run forward again.
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
    in_backward,
    module_groups,
    set_asynchronous_gathers,
)
from parallel2d.parallel.mesh import mesh_shape
from parallel2d.parallel.sync.engine.replica_reducer import engine_in

log = logging.getLogger(__name__)

Group = Sequence[Any]  # modules whose parameters are gathered together, each an `FSDPModule`
Chains = list[tuple[Any, list[Any]]]


def prefetch_parameters(model: nn.Module, mesh: DeviceMesh, config: PrefetchConfig) -> nn.Module:
    """Set how early the groups of ``model``, which `shard` has made, gather their parameters. With
    forward chains all-gathers become asynchronous on CPU, which on GPU streams see to."""
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
    ended: list[Group] = []  # in the forward that runs
    for group in module_groups(model):
        _record(group, ended)

    def set_chains(_module: nn.Module, _inputs: Any, _output: Any) -> None:
        # Later forwards use the chains of the first one, whichever groups they run.
        handle.remove()
        times = Counter(map(id, ended))
        once = [group for group in ended if times[id(group)] == 1]
        if config.forward:
            _follow_in_forward(model, list(_chains(_in_order_of_begin(once), config.forward)))
        # Backward runs groups in the reverse of the order in which their forward ended.
        if config.backward > 1:
            for module, later in _chains(once[::-1], config.backward):
                # An empty chain, that of the last group, would mean torch's own choice.
                module.set_modules_to_backward_prefetch(later or [module])

    model.register_forward_pre_hook(lambda *_: ended.clear(), prepend=True)
    handle = model.register_forward_hook(set_chains)
    if config.backward == 1:
        _end_at_first(model, ended)
    _drop_unused(model)
    return model


def _record(group: Group, ended: list[Group]) -> None:
    """Append ``group`` to ``ended`` whenever its forward ends, which is when all of its modules
    have run."""
    running = set(group)

    def note(module: Any, _inputs: Any, _output: Any) -> None:
        running.discard(module)
        if not running:
            running.update(group)
            ended.append(group)

    for module in group:
        module.register_forward_hook(note)


def _end_at_first(model: nn.Module, ended: Sequence[Group]) -> None:
    """Let the group whose forward ended first gather nothing ahead in backward."""
    first: list[Any] = []

    def end(*_: Any) -> None:
        if ended and first != [ended[0][0]]:
            for module in first:
                module.set_modules_to_backward_prefetch([])
            first[:] = [ended[0][0]]
            first[0].set_modules_to_backward_prefetch(first)

    model.register_forward_hook(end)


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


def _follow_in_forward(model: nn.Module, chains: Chains) -> None:
    """Let modules gather those that follow them in ``chains`` ahead, in forward."""

    def begin(*_: Any) -> None:
        for module, later in chains:
            module.set_modules_to_forward_prefetch(later)

    def end(*_: Any) -> None:
        for module, _later in chains:
            module.set_modules_to_forward_prefetch([])

    # Before the hook of `fully_shard`, which gathers what follows the root
    model.register_forward_pre_hook(begin, prepend=True)
    model.register_forward_hook(end, always_call=True)


def _drop_unused(model: nn.Module) -> None:
    """Drop parameters that a forward without gradients has gathered ahead and not used: the next
    forward would take them for current. After others torch drops them when backward ends."""

    def end(_module: nn.Module, _inputs: Any, _output: Any) -> None:
        if torch.is_grad_enabled() or in_backward():
            return
        engine = engine_in(model)
        if isinstance(model, FSDPModule) and engine is not None and not engine.awaits_backward:
            model.reset_iter_state()

    model.register_forward_hook(end)
