"""Prefetch: all-gather the parameters of the next FSDP groups in advance (`prefetch_parameters`).

[Note: the order of groups] Prefetching needs the order in which groups run. This order may differ
from the order of registration: a model may run its modules in any order, or run a module twice.
Therefore the first forward runs without prefetch and records the order. At the end of this forward
each group gets a prefetch *chain*: the list of the next groups. A group that ran several times has
no unique successor. Therefore this group gets no chain, is in no chain, and is all-gathered when it
runs. If a later forward runs other groups, its results are still correct: unused prefetched
parameters are freed, and only the time of their all-gather is lost.

Without a chain, torch prefetches one group in backward, by its record of post-forward hooks. This
record also contains forwards of a validation and of earlier micro-batches. The first group of the
current forward is the last group of the backward, and torch would prefetch a group of an earlier
forward after the last group. Therefore the first group gets a chain that prefetches no group.
Forward chains are removed during backward, because activation checkpointing runs forwards of blocks
during backward.
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
from parallel2d.parallel.sync.engine.replica_reducer import engine_in, engine_of

log = logging.getLogger(__name__)

Group = Sequence[Any]  # modules of one FSDP group, each an `FSDPModule`
Chains = list[tuple[Any, list[Any]]]


def prefetch_parameters(model: nn.Module, mesh: DeviceMesh, config: PrefetchConfig) -> nn.Module:
    """Make the FSDP groups of ``model`` prefetch as many groups ahead as ``config`` says.

    Call this after `shard`. On CPU, forward prefetch also makes all-gathers asynchronous, because
    CPUs have no streams.
    """
    if mesh_shape(mesh).shard == 1:
        if config != PrefetchConfig():
            log.info("prefetch has no effect with mesh.shard=1: no parameters are gathered")
        return model
    if mesh.device_type == "cpu" and config.forward:
        set_asynchronous_gathers(model, True)
    ended: list[Group] = []  # groups of the running forward, in the order of their ends
    engine = engine_of(model)
    # Replicated conditional modules: they have no all-gather, and only some ranks may run them
    left_out = {each.modules for each in engine.groups if each.replicated_over is not None}
    # A chain of only the module itself prefetches no group. An empty chain would select torch's
    # default: one group ahead in backward, by torch's record of forwards. Only some ranks have the
    # groups of `left_out` in this record, so the ranks would issue all-gathers in different orders.
    if config.backward == 0 or left_out:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_modules_to_backward_prefetch([module])
    for group in module_groups(model):
        if tuple(group) not in left_out:
            _record(group, ended)

    def set_chains(_module: nn.Module, _inputs: Any, _output: Any) -> None:
        # All later forwards use the chains of the first forward.
        handle.remove()
        times = Counter(map(id, ended))
        once = []
        for group in ended:
            if times[id(group)] == 1:
                once.append(group)
        if config.forward:
            _follow_in_forward(model, list(_chains(_in_order_of_begin(once), config.forward)))
        # Backward runs the groups in the reverse order of the ends of their forwards.
        if config.backward > 1 or (config.backward and left_out):
            for module, later in _chains(once[::-1], config.backward):
                # An empty chain would select torch's default, so the last group gets a chain of
                # itself.
                module.set_modules_to_backward_prefetch(later or [module])

    model.register_forward_pre_hook(lambda *_: ended.clear(), prepend=True)
    handle = model.register_forward_hook(set_chains)
    if config.backward == 1 and not left_out:
        _end_at_first(model, ended)
    _drop_unused(model)
    return model


def _record(group: Group, ended: list[Group]) -> None:
    """Append ``group`` to ``ended`` whenever all its modules have run their forward."""
    running = set(group)

    def note(module: Any, _inputs: Any, _output: Any) -> None:
        running.discard(module)
        if not running:
            running.update(group)
            ended.append(group)

    for module in group:
        module.register_forward_hook(note)


def _end_at_first(model: nn.Module, ended: Sequence[Group]) -> None:
    """Make the first group of each forward prefetch nothing in backward."""
    first: list[Any] = []

    def end(*_: Any) -> None:
        if ended and first != [ended[0][0]]:
            for module in first:
                module.set_modules_to_backward_prefetch([])
            first[:] = [ended[0][0]]
            first[0].set_modules_to_backward_prefetch(first)

    model.register_forward_hook(end)


def _chains(order: Sequence[Group], ahead: int) -> Iterator[tuple[Any, list[Any]]]:
    """Yield each group's first module with the first modules of the next ``ahead`` groups."""
    first = []
    for group in order:
        first.append(group[0])
    for index, module in enumerate(first):
        yield module, first[index + 1 : index + 1 + ahead]


def _in_order_of_begin(ended: Sequence[Group]) -> list[Group]:
    """Return the groups in the order of their forward starts.

    ``ended`` is the order in which they end. A group begins before the groups inside of it, and
    ends after them.
    """
    begun: list[Group] = []
    for group in ended:
        inside = set(chain.from_iterable(map(nn.Module.modules, group)))
        inner = []
        for index, other in enumerate(begun):
            if other[0] in inside:
                inner.append(index)
        begun.insert(min(inner, default=len(begun)), group)
    return begun


def _follow_in_forward(model: nn.Module, chains: Chains) -> None:
    """Set the forward prefetch of ``chains`` only while a forward of ``model`` runs."""

    def begin(*_: Any) -> None:
        for module, later in chains:
            module.set_modules_to_forward_prefetch(later)

    def end(*_: Any) -> None:
        for module, _later in chains:
            module.set_modules_to_forward_prefetch([])

    # With `prepend` the chains are set before FSDP's pre-forward hook of the root, which already
    # prefetches.
    model.register_forward_pre_hook(begin, prepend=True)
    model.register_forward_hook(end, always_call=True)


def _drop_unused(model: nn.Module) -> None:
    """Free parameters that a forward without gradients has prefetched and not used.

    Otherwise the next forward would use these outdated values. After a forward with gradients torch
    frees them at the end of backward.
    """

    def end(_module: nn.Module, _inputs: Any, _output: Any) -> None:
        if torch.is_grad_enabled() or in_backward():
            return
        engine = engine_in(model)
        if isinstance(model, FSDPModule) and engine is not None and not engine.awaits_backward:
            model.reset_iter_state()

    model.register_forward_hook(end)
