"""When parameters are gathered: how many groups ahead of the one that computes.

A sharded model and a `PrefetchConfig` flow in; the same model flows out, its groups told which
others to gather early.

[Note: the order in which groups run] Chains need the order of execution, which registration does
not tell: a model may run its modules in any order, or one of them twice. The engine notes the order
in which groups end their forward anyway, so the chains are set from that note when the first
forward has ended; that first forward runs without them. A group that ran several times has no one
successor: it prefetches nothing ahead and is gathered when it is reached. A later forward that runs
other groups is still right: what was gathered for nothing is dropped, at the price of that gather.
What is done with is taken out of the note: the engine would otherwise go on prefetching from the
end of a validation or of the micro-batch before, one all-gather too many each time.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from parallel2d.config import PrefetchConfig
from parallel2d.mesh import mesh_shape

log = logging.getLogger(__name__)


def prefetch_parameters(model: nn.Module, mesh: DeviceMesh, config: PrefetchConfig) -> nn.Module:
    """Sets how early the groups of ``model``, which `shard` has made, gather their parameters.
    Losses do not depend on it.

    With forward chains all-gathers become asynchronous on CPU: one that was issued early then runs
    while the group before computes, which on GPU streams see to. Forward chains rest while
    activations are recomputed.
    """
    assert isinstance(model, FSDPModule)
    if mesh_shape(mesh).shard == 1:
        if config != PrefetchConfig():
            log.info("prefetch has no effect with mesh.shard=1: no parameters are gathered")
        return model
    if mesh.device_type == "cpu" and config.forward:
        model._set_unshard_async_op(True)
    if config.backward == 0:  # an empty chain would mean the engine's own choice, one group ahead
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_modules_to_backward_prefetch([module])
    if config.forward or config.backward > 1:

        def set_chains(root: nn.Module, _inputs: Any, _output: Any) -> None:
            handle.remove()
            _set_chains(_note(root), config)

        handle = model.register_forward_hook(set_chains)
    _keep_note_current(model)
    return model


def _set_chains(ended: Sequence[Any], config: PrefetchConfig) -> None:
    """``ended``: the engine's groups in the order in which their forward ended; see [Note: the
    order in which groups run]."""
    once = [group for group in ended if sum(other is group for other in ended) == 1]
    ahead = _in_order_of_begin(once)
    for index, group in enumerate(ahead if config.forward else ()):
        state = group.modules[0]._get_fsdp_state()
        state._states_to_forward_prefetch = _UnlessRecomputing(
            later.modules[0]._get_fsdp_state()
            for later in ahead[index + 1 : index + 1 + config.forward]
        )
    if config.backward > 1:
        behind = once[::-1]
        for index, group in enumerate(behind):
            module = group.modules[0]
            chain = [later.modules[0] for later in behind[index + 1 : index + 1 + config.backward]]
            module.set_modules_to_backward_prefetch(chain or [module])


def _in_order_of_begin(ended: Sequence[Any]) -> list[Any]:
    """The same groups in the order in which their forward began: a group begins before those inside
    it, which end before it."""
    inside = {
        id(group): {id(module) for top in group.modules for module in top.modules()}
        for group in ended
    }
    begun: list[Any] = []
    for group in ended:
        around = [
            other
            for other in ended
            if other is not group and id(group.modules[0]) in inside[id(other)]
        ]
        for other in (*sorted(around, key=lambda outer: -len(inside[id(outer)])), group):
            if not any(other is known for known in begun):
                begun.append(other)
    return begun


class _UnlessRecomputing(list[Any]):
    """A forward chain that is empty during backward. Recomputation runs forwards in backward, whose
    successors have been through backward already: gathering them again would be a collective for
    nothing."""

    def __iter__(self) -> Iterator[Any]:
        return iter(()) if torch._C._current_graph_task_id() != -1 else super().__iter__()


def _keep_note_current(model: nn.Module) -> None:
    """Sees to it that the engine's note of forwards, from which it prefetches in backward, holds
    those that await their backward.

    Forwards without gradients are taken out of it, and gathers that nothing used are dropped, which
    a later forward would take for current; what earlier micro-batches of an accumulation left is
    taken out before the next.
    """
    groups = list({id(group): group for group in _groups(model)}.values())
    noted = 0

    def begin(root: nn.Module, _inputs: Any) -> None:
        nonlocal noted
        note = _note(root)
        if not any(group._post_forward_indices for group in groups):
            note.clear()
        noted = len(note)

    def end(root: nn.Module, _inputs: Any, _output: Any) -> None:
        if torch.is_grad_enabled():
            return
        del _note(root)[noted:]
        for group in groups:
            group._post_forward_indices = [
                index for index in group._post_forward_indices if index < noted
            ]
            if group._all_gather_result is not None:
                group.wait_for_unshard()
                group._to_sharded()

    model.register_forward_pre_hook(begin)
    model.register_forward_hook(end)


def _note(root: nn.Module) -> list[Any]:
    """The engine's groups in the order in which their forward ended."""
    assert isinstance(root, FSDPModule)
    return root._get_fsdp_state()._comm_ctx.post_forward_order


def _groups(model: nn.Module) -> Iterator[Any]:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            yield from module._get_fsdp_state()._fsdp_param_groups
