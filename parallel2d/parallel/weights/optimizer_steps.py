"""Before an optimizer of sharded parameters steps, whole state that it has loaded is cut; an error
of its step says what to do. `watch_steps` sees to both."""

from __future__ import annotations

import functools
import re
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
        if vars(self).get(_CUT) is not self.state:
            # The iterations of torch's Muon are in bf16.
            if isinstance(self, torch.optim.Muon) and _has_sharded(self):
                raise _refusal(self, "would round differently on sharded parameters")
            _cut_whole_state(self)
            vars(self)[_CUT] = self.state
        try:
            return step(self, *args, **kwargs)
        except RuntimeError as error:
            # With a closure the error may be the model's.
            is_own = not args and not kwargs and _SHARDED.search(str(error))
            if not is_own or not _has_sharded(self):
                raise
            raise _refusal(self, "fails on sharded parameters") from error

    return watched


def _has_sharded(optimizer: Optimizer) -> bool:
    groups = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    return any(isinstance(parameter, DTensor) for parameter in groups)


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
