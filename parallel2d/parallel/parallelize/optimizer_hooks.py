"""Step hooks for optimizers that update parameters of parallelized models: `follow_steps`.

Before a step the hooks raise errors for misuse, shard an unsharded optimizer state that a script
has loaded, and notify the models of the update. If the optimizer is elementwise, the step runs on
this rank's local shards, without the overhead of `DTensor`. In this case the pre-hook replaces the
``self`` argument of the step by a stand-in optimizer, whose parameters are the local shards.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from parallel2d.parallel.fsdp_internals.tensors import part_of, quick_reads
from parallel2d.parallel.parallelize import script_checks
from parallel2d.parallel.parallelize.unsharded_parameters import (
    UnshardedParameters,
    refuse_stale_unsharded,
)
from parallel2d.parallel.sync.engine.replica_reducer import is_ours
from parallel2d.parallel.weights.geometry import as_part
from parallel2d.parallel.weights.named_tensors import stepped_by
from parallel2d.parallel.weights.unsharded_tensors import copy_part

# Attribute of an optimizer: its state object after `_shard_loaded_state`. Loading a state makes a
# new object, which must be sharded again.
_CUT = "_parallel2d_cut"
# torch's optimizers that update each element independently, under all arguments
ELEMENTWISE = (
    torch.optim.Adadelta, torch.optim.Adagrad, torch.optim.Adam, torch.optim.AdamW,
    torch.optim.Adamax, torch.optim.ASGD, torch.optim.NAdam, torch.optim.RAdam,
    torch.optim.RMSprop, torch.optim.Rprop, torch.optim.SGD,
)  # fmt: skip
# The live models, in the order of `parallelize` calls
_followed: list[weakref.ref[UnshardedParameters]] = []
_handles: list[RemovableHandle] = []


def follow_steps(gathered: UnshardedParameters) -> None:
    """Register the hooks for a model. The hooks are removed with the last parallelized model."""
    _followed.append(weakref.ref(gathered, _leave))
    if not _handles:
        _handles.append(register_optimizer_step_pre_hook(_before_step))
        _handles.append(register_optimizer_step_post_hook(_after_step))


def _leave(reference: weakref.ref[UnshardedParameters]) -> None:
    _followed.remove(reference)
    if not _followed:
        for handle in _handles:
            handle.remove()
        _handles.clear()


def _alive() -> list[UnshardedParameters]:
    alive = []
    for reference in _followed:
        gathered = reference()
        if gathered is not None:
            alive.append(gathered)
    return alive


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
    parameters = list(stepped_by(optimizer))
    if not is_ours(parameters):
        return None
    is_first = vars(optimizer).get(_CUT) is not optimizer.state
    if is_first:
        refuse_stale_unsharded(optimizer, parameters)
    script_checks.before_step(optimizer, parameters)
    stepped = set(map(id, parameters))
    for gathered in _alive():
        gathered.before_update(optimizer, stepped)
    if is_first:
        # torch's Muon computes its iterations in bf16.
        if isinstance(optimizer, torch.optim.Muon) and any(map(_is_sharded, parameters)):
            raise script_checks.refusal(optimizer, "would round differently on sharded parameters")
        _shard_loaded_state(optimizer)
        vars(optimizer)[_CUT] = optimizer.state
    # A closure sets the gradients of the sharded parameters, so the step must run on the sharded
    # parameters themselves.
    if len(args) > 1 or kwargs:
        script_checks.runs_closure()
        return None
    parts = _parts_of(optimizer)
    return None if parts is None else ((_StandIn.of(optimizer, parts).optimizer,), {})


def _after_step(optimizer: Optimizer, args: Any, _kwargs: Any) -> None:
    parameters = list(stepped_by(optimizer))
    if not is_ours(parameters):
        return
    stand_in = vars(args[0]).pop(_STAND_IN, None)
    if stand_in is not None:
        stand_in.hand_over(optimizer)
    # A foreach update of `DTensor`s does not increment their version counters, so increment them.
    with quick_reads():
        updated = [each for each in parameters if each.grad is not None]
    torch.autograd.graph.increment_version(filter(_is_sharded, updated))
    for gathered in _alive():
        list(gathered.changed())
    script_checks.after_step(parameters)


def _is_sharded(parameter: Tensor) -> bool:
    return isinstance(parameter, DTensor)


@torch.no_grad()
def _shard_loaded_state(optimizer: Optimizer) -> None:
    for parameter, entries in optimizer.state.items():
        for key, value in entries.items() if isinstance(parameter, DTensor) else ():
            is_whole = isinstance(value, Tensor) and not isinstance(value, DTensor)
            # Skip the step count, which has the shape of a parameter without dims.
            if is_whole and key != "step" and value.shape == parameter.shape:
                entries[key] = torch.empty_like(parameter, dtype=value.dtype, requires_grad=False)
                copy_part(entries[key], value)


@torch.no_grad()
def _parts_of(optimizer: Optimizer) -> dict[Tensor, Tensor] | None:
    """Map each parameter to its local shard, with the local shard of its gradient.

    None if the optimizer needs more than local shards.
    """
    # Compare types exactly, because a subclass may override any method.
    if type(optimizer) not in ELEMENTWISE:
        return None
    parts: dict[Tensor, Tensor] = {}
    with quick_reads():
        for group in optimizer.param_groups:
            if group.get("differentiable"):
                return None
            for parameter in group["params"]:
                part = parameter
                if isinstance(parameter, DTensor):
                    part = part_of(parameter).detach()
                    gradient = parameter.grad
                    if gradient is not None:
                        # For example a gradient with a partial placement, or of another dtype
                        if not _is_split_alike(gradient, parameter):
                            return None
                        part.grad = part_of(gradient)
                parts[parameter] = part
    return parts


def _is_split_alike(tensor: Tensor, parameter: DTensor) -> bool:
    return (
        isinstance(tensor, DTensor)
        and tensor.dtype == parameter.dtype
        and tensor.placements == parameter.placements
        and tensor.device_mesh == parameter.device_mesh
    )


# Attribute of a stand-in optimizer: its `_StandIn`
_STAND_IN = "_parallel2d_stand_in"


class _StandIn:
    """A copy of an optimizer with ``parts`` in place of its parameters, for one step."""

    def __init__(self, optimizer: Optimizer, parts: Mapping[Tensor, Tensor]) -> None:
        self.optimizer = optimizer
        self._parts = parts

    @classmethod
    def of(cls, optimizer: Optimizer, parts: Mapping[Tensor, Tensor]) -> _StandIn:
        state: defaultdict[Tensor, Any] = defaultdict(dict)
        for parameter, part in parts.items():
            if parameter in optimizer.state:
                entries = optimizer.state[parameter]
                state[part] = {key: part_of(value) for key, value in entries.items()}
        groups: list[dict[str, Any]] = []
        for group in optimizer.param_groups:
            groups.append({**group, "params": [parts[each] for each in group["params"]]})
        made = object.__new__(type(optimizer))
        stand_in = cls(made, parts)
        # Copy all attributes, also those that other code sets, such as a scale of `GradScaler`.
        vars(made).update(vars(optimizer), param_groups=groups, state=state)
        vars(made)[_STAND_IN] = stand_in
        return stand_in

    @torch.no_grad()
    def hand_over(self, optimizer: Optimizer) -> None:
        """Move the state after the step to the state of ``optimizer``."""
        found = self.optimizer.state
        for parameter, part in self._parts.items():
            if part in found:
                _take_over(optimizer.state[parameter], found[part], parameter)


def _take_over(entries: dict[str, Any], found: Mapping[str, Any], parameter: Tensor) -> None:
    for key, value in found.items():
        if key in entries and part_of(entries[key]) is value:
            continue
        if isinstance(parameter, DTensor) and isinstance(value, Tensor) and value.ndim:
            entries[key] = as_part(value, parameter)
        else:
            entries[key] = value
