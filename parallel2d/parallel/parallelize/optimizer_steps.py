"""Before an optimizer of sharded parameters steps, misuse is refused and whole state that it has
loaded is cut; what updates each element on its own steps on plain tensors, this rank's parts; an
error of its step says what to do. `watch_steps` sees to all."""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from parallel2d.base.errors import ConfigError
from parallel2d.parallel.fsdp_internals.computations import without_explanations
from parallel2d.parallel.fsdp_internals.group_watch import part_of, quick_reads
from parallel2d.parallel.parallelize.audit import before_update, count_update
from parallel2d.parallel.weights.geometry import as_part
from parallel2d.parallel.weights.named_tensors import stepped_by
from parallel2d.parallel.weights.whole_tensors import copy_part

# An attribute of an optimizer: the state in which nothing is left to cut. Loading makes another.
_CUT = "_parallel2d_cut"
# Those of torch that update each element on its own, whatever their arguments
_ELEMENTWISE = (
    torch.optim.Adadelta, torch.optim.Adagrad, torch.optim.Adam, torch.optim.AdamW,
    torch.optim.Adamax, torch.optim.ASGD, torch.optim.NAdam, torch.optim.RAdam,
    torch.optim.RMSprop, torch.optim.Rprop, torch.optim.SGD,
)  # fmt: skip
# Of torch's errors about operations that sharded tensors do not have
_SHARDED = re.compile(r"DTensor|[Ss]harding|placement")


@functools.cache
def watch_steps() -> None:
    """Lets the steps of all optimizers of this process pass through `_watched`. A global hook
    before steps would not see their errors."""
    hook = Optimizer.profile_hook_step
    # torch passes the step of a class through this when one is built for the first time.
    Optimizer.profile_hook_step = staticmethod(lambda step: hook(_watched(step)))  # type: ignore
    kinds = list(Optimizer.__subclasses__())
    for kind in kinds:
        kinds += kind.__subclasses__()
        if hasattr(vars(kind).get("step"), "hooked"):
            kind.step = _watched(kind.step)  # type: ignore[method-assign]


def _watched(step: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(step)
    def watched(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        before_update(self)
        if vars(self).get(_CUT) is not self.state:
            # The iterations of torch's Muon are in bf16.
            if isinstance(self, torch.optim.Muon) and _has_sharded(self):
                raise _refusal(self, "would round differently on sharded parameters")
            _cut_whole_state(self)
            vars(self)[_CUT] = self.state
        # A closure computes gradients of the sharded parameters, and may raise the model's errors.
        has_closure = bool(args or kwargs)
        parts = None if has_closure else _parts_of(self)
        try:
            if parts is not None:
                result = _step_on(parts, self, step)
            else:
                with without_explanations(self):
                    result = step(self, *args, **kwargs)
        except RuntimeError as error:
            if has_closure or not _SHARDED.search(str(error)) or not _has_sharded(self):
                raise
            raise _refusal(self, "fails on sharded parameters") from error
        count_update(self)
        return result

    return watched


@torch.no_grad()
def _parts_of(optimizer: Optimizer) -> dict[Tensor, Tensor] | None:
    """By parameter what ``optimizer`` can update in its place: this rank's part, with that of the
    gradient. None where it needs more than these."""
    # A subclass may do anything.
    if type(optimizer) not in _ELEMENTWISE:
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
                        # Such as a part of a sum, or one of another dtype
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


@torch.no_grad()
def _step_on(parts: Mapping[Tensor, Tensor], optimizer: Optimizer, step: Callable[..., Any]) -> Any:
    """Runs ``step`` with ``parts`` in the places of the parameters, and of their state."""
    groups, state = optimizer.param_groups, optimizer.state
    given = [group["params"] for group in groups]
    own: defaultdict[Tensor, Any] = defaultdict(dict)
    for parameter, part in parts.items():
        if parameter in state:
            own[part] = {key: part_of(value) for key, value in state[parameter].items()}
    for group in groups:
        group["params"] = [parts[parameter] for parameter in group["params"]]
    optimizer.state = own
    try:
        return step(optimizer)
    finally:
        optimizer.state = state
        for group, parameters in zip(groups, given, strict=True):
            group["params"] = parameters
        for parameter, part in parts.items():
            if part in own:
                _take_over(state[parameter], own[part], parameter, part)


def _take_over(
    entries: dict[str, Any], found: Mapping[str, Any], parameter: Tensor, part: Tensor
) -> None:
    """Puts what a step has ``found`` into ``entries`` of the state of ``parameter``."""
    for key, value in found.items():
        if key in entries and part_of(entries[key]) is value:
            continue
        if isinstance(parameter, DTensor) and isinstance(value, Tensor) and value.ndim:
            entries[key] = as_part(value, parameter)
        else:
            entries[key] = value


def _has_sharded(optimizer: Optimizer) -> bool:
    return any(isinstance(parameter, DTensor) for parameter in stepped_by(optimizer))


def _refusal(optimizer: Optimizer, reason: str) -> ConfigError:
    name = type(optimizer).__name__
    return ConfigError(
        f"{name}.step {reason}: build parallel2d.whole_matrices({name}, parameters), which runs it "
        "on whole ones; state of one process is loaded with parallel2d.load_full_state"
    )


@torch.no_grad()
def _cut_whole_state(optimizer: Optimizer) -> None:
    for parameter, entries in optimizer.state.items():
        for key, value in entries.items() if isinstance(parameter, DTensor) else ():
            is_whole = isinstance(value, Tensor) and not isinstance(value, DTensor)
            # The count of steps of a parameter without dims has its shape too.
            if is_whole and key != "step" and value.shape == parameter.shape:
                entries[key] = torch.empty_like(parameter, dtype=value.dtype, requires_grad=False)
                copy_part(entries[key], value)
