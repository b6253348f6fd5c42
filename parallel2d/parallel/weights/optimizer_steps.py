"""What happens before a step of any optimizer that holds sharded parameters: whole state that it
has loaded is cut, and what it cannot do is explained. `watch_steps` sees to it."""

from __future__ import annotations

import functools
import re
import traceback
from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from parallel2d.base.errors import ConfigError
from parallel2d.parallel.weights.whole_tensors import copy_part

# An attribute of an optimizer: the state in which nothing is left to cut. Loading makes another.
_CUT = "_parallel2d_cut"
# Of torch's errors about operations that sharded tensors do not have
_SHARDED = re.compile(r"DTensor|[Ss]harding|placement")


@functools.cache
def watch_steps() -> None:
    """Lets steps of all optimizers in this process, built already or not, pass through `_watched`.

    A global hook before steps would see the state, and not the errors of the step.
    """
    hook = Optimizer.profile_hook_step
    # torch lets the step of a class pass through this when it is built for the first time.
    Optimizer.profile_hook_step = staticmethod(lambda step: hook(_watched(step)))  # type: ignore
    built = list(Optimizer.__subclasses__())
    for kind in built:
        built += kind.__subclasses__()
        if hasattr(vars(kind).get("step"), "hooked"):
            kind.step = _watched(kind.step)  # type: ignore[method-assign]


def _watched(step: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(step)
    def watched(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if vars(self).get(_CUT) is not self.state:
            _refuse_rounding(self)
            _cut_whole_state(self)
            vars(self)[_CUT] = self.state
        try:
            return step(self, *args, **kwargs)
        except RuntimeError as error:
            if isinstance(error, ConfigError) or not _SHARDED.search(str(error)):
                raise
            code = [getattr(each, "__code__", None) for each in (*args, *kwargs.values())]
            frames = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
            # An error of a closure is the model's.
            if not _has_sharded(self) or any(each in code for each in frames):
                raise
            raise _refusal(self, "fails on sharded parameters") from error

    return watched


def _has_sharded(optimizer: Optimizer) -> bool:
    groups = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    return any(isinstance(parameter, DTensor) for parameter in groups)


def _refuse_rounding(optimizer: Optimizer) -> None:
    """Raises `ConfigError` for torch's Muon on sharded parameters, which computes in bf16."""
    if isinstance(optimizer, torch.optim.Muon) and _has_sharded(optimizer):
        raise _refusal(optimizer, "rounds sharded matrices differently, because it sums in bf16")


def _refusal(optimizer: Optimizer, reason: str) -> ConfigError:
    name = type(optimizer).__name__
    return ConfigError(
        f"{name}.step {reason}: build parallel2d.whole_matrices({name}, parameters), which runs it "
        "on whole ones; state of one process is loaded with parallel2d.load_full_state"
    )


@torch.no_grad()
def _cut_whole_state(optimizer: Optimizer) -> None:
    """Keeps this rank's part of state that was whole, as a script on one process has saved it."""
    for parameter, entries in optimizer.state.items():
        if not isinstance(parameter, DTensor) or not isinstance(entries, dict):
            continue
        for key, value in entries.items():
            is_whole = isinstance(value, Tensor) and not isinstance(value, DTensor)
            # The count of steps of a parameter without dims has its shape too.
            if is_whole and key != "step" and value.shape == parameter.shape:
                entries[key] = torch.empty_like(parameter, dtype=value.dtype, requires_grad=False)
                copy_part(entries[key], value)
