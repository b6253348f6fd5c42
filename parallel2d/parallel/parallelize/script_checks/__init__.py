"""Checks that find errors of a training script in its first steps: `check_script`.

The checks are active during the first ``checks.steps`` optimizer steps of a model. After these
steps all hooks and modes are removed. Some errors, such as a write to a part of a parameter, are
found only on some ranks. If a backward pass follows, its status all-reduce notifies the other
ranks.
"""

from __future__ import annotations

import os
import sys
import weakref
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from parallel2d.base.config.parallel import ParallelConfig
from parallel2d.parallel.fsdp_internals.fsdp_group import FSDPGroup
from parallel2d.parallel.fsdp_internals.tensors import SHARDED_AS
from parallel2d.parallel.mesh import mesh_shape
from parallel2d.parallel.model_structure import updated_as
from parallel2d.parallel.parallelize.script_checks import function_mode
from parallel2d.parallel.parallelize.script_checks.forward_audit import audit_forwards
from parallel2d.parallel.parallelize.script_checks.function_mode import refusal as refusal
from parallel2d.parallel.parallelize.unsharded_parameters import UnshardedParameters

_TORCH = os.path.dirname(torch.__file__) + os.sep

# The active checks
_checks: list[weakref.ref[_ScriptChecks]] = []


def check_script(
    model: nn.Module, mesh: DeviceMesh, config: ParallelConfig, gathered: UnshardedParameters
) -> None:
    """Install the checks on ``model``, after its weights are set."""
    steps = config.checks.steps
    if steps == "off" or steps == 0:
        return
    averages = mesh_shape(mesh).data_ranks > 1
    frees = bool(config.strategy.placement.reshard_after_forward)
    handles = audit_forwards(model, gathered, averages, frees)
    if config.compile.name != "none":
        handles += function_mode.hide_in_forwards(model)
    remaining = None if steps == "always" else int(steps)
    checks = _ScriptChecks(gathered, averages, remaining, handles)
    # The hook keeps the checks alive, so they end with the model.
    handles.append(model.register_forward_hook(checks.forget_step))
    _checks.append(weakref.ref(checks, _end))
    # With a context axis, another torch function mode intercepts attention. Under the script mode
    # that mode would miss calls, so the script mode is not used.
    if mesh_shape(mesh).context == 1:
        function_mode.activate(_changed_groups, _unsharded_name)


class _ScriptChecks:
    """The checks of one model."""

    def __init__(
        self,
        gathered: UnshardedParameters,
        averages: bool,
        remaining: int | None,
        handles: list[Any],
    ) -> None:
        self.gathered = gathered
        self.averages = averages
        self._remaining = remaining
        self._handles = handles

    def forget_step(self, *_: Any) -> None:
        """Clear the mode's running optimizer, whose step may have raised. Forward hook."""
        mode = function_mode.current_mode()
        if mode is not None:
            mode.stepping = None

    def count_step(self, stepped: set[int]) -> bool:
        """Count a step of the parameters with the ids ``stepped``. Return True at the last step."""
        ours = []
        for gathered in self.gathered.groups:
            for each in gathered.group.parameters:
                ours.append(id(updated_as(each.sharded)))
        if self._remaining is None or stepped.isdisjoint(ours):
            return False
        self._remaining -= 1
        if self._remaining > 0:
            return False
        for handle in self._handles:
            handle.remove()
        return True


def _active() -> list[_ScriptChecks]:
    active = []
    for reference in _checks:
        checks = reference()
        if checks is not None:
            active.append(checks)
    return active


def _changed_groups() -> list[FSDPGroup]:
    groups: list[FSDPGroup] = []
    for checks in _active():
        groups += checks.gathered.changed()
    return groups


def _unsharded_name(storage: int) -> str | None:
    for checks in _active():
        if storage in checks.gathered.storages:
            return checks.gathered.storages[storage]
    return None


def _end(reference: weakref.ref[_ScriptChecks]) -> None:
    """End the checks of a model after their last step, or when the model is gone."""
    if reference in _checks:
        _checks.remove(reference)
    _deactivate_unused()


class _Cycle:
    """An object in a reference cycle, which only the garbage collector frees."""

    def __init__(self) -> None:
        self.itself = self


# References whose callback is `_deactivate_unused`
_retries: list[weakref.ref[_Cycle]] = []
# Number of frames to search: torch has fewer between its check for a mode and the call of the mode.
_DEPTH = 6


def _deactivate_unused(freed: weakref.ref[_Cycle] | None = None) -> None:
    """Deactivate the function mode if no model has checks.

    The garbage collector may call this function while torch runs, after torch has seen that a mode
    is active and before it takes the mode off the stack. torch would raise an error if the mode
    were missing then. In this case the next run of the garbage collector tries again.
    """
    if freed is not None:
        _retries.remove(freed)
    if _checks:
        return
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_DEPTH):
        if frame is None or frame.f_code is after_step.__code__:
            break
        if frame.f_code.co_filename.startswith(_TORCH):
            _retries.append(weakref.ref(_Cycle(), _deactivate_unused))
            return
        frame = frame.f_back
    function_mode.deactivate()


def before_step(stepping: Optimizer, parameters: list[Tensor]) -> None:
    """Raise RuntimeError if an optimizer of sharded parameters also has a trained parameter that
    belongs to no parallelized model."""
    if not _checks:
        return
    others: list[Tensor] = []
    any_sharded = False
    for parameter in parameters:
        if isinstance(parameter, DTensor):
            any_sharded |= hasattr(parameter, SHARDED_AS)
        elif parameter.requires_grad and not hasattr(parameter, SHARDED_AS):
            others.append(parameter)
    if any_sharded and others and any(checks.averages for checks in _active()):
        raise RuntimeError(
            f"{type(stepping).__name__} has a parameter of shape {tuple(others[0].shape)} that "
            "belongs to no parallelized model, and its gradient is not averaged over the ranks: "
            "put its module and the model into one nn.Module and call parallelize() on that"
        )
    mode = function_mode.current_mode()
    if mode is not None:
        mode.stepping = stepping


def runs_closure() -> None:
    """Stop attributing errors to the optimizer: a closure runs the model inside of the step."""
    mode = function_mode.current_mode()
    if mode is not None:
        mode.stepping = None


def after_step(parameters: list[Tensor]) -> None:
    """Count a step of an optimizer of ``parameters``."""
    if not _checks:
        return
    runs_closure()
    stepped = set(map(id, parameters))
    for reference in list(_checks):
        checks = reference()
        if checks is None or checks.count_step(stepped):
            _end(reference)
