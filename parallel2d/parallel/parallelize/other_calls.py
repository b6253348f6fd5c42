"""Calls that scripts for ``DistributedDataParallel`` and transformers make on a model."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from parallel2d.base.errors import ConfigError
from parallel2d.parallel.fsdp_internals.sharded_model import has_begun
from parallel2d.parallel.sync import no_sync
from parallel2d.parallel.sync.engine.replica_reducer import engine_of
from parallel2d.parallel.sync.methods.method import UpdateFollower
from parallel2d.parallel.weights.whole_tensors import sharded_modules


def accept_other_calls(model: nn.Module) -> None:
    """Makes ``model.no_sync()`` that of `parallel2d.no_sync`, and gives ``model.module``,
    ``save_pretrained`` and late casts an error that says what to do."""
    if not hasattr(model, "no_sync"):
        vars(model)["no_sync"] = functools.partial(no_sync, model)
    _explain_missing_wrapper(type(model))
    for _, module in sharded_modules(model):
        # `to`, `half` and others go through it.
        vars(module)["_apply"] = functools.partial(_apply, model, module._apply)
    for module in model.modules():
        save = getattr(module, "save_pretrained", None)
        if callable(save):
            vars(module)["save_pretrained"] = functools.partial(_save_whole, save)


def _apply(
    model: nn.Module,
    apply: Callable[..., Any],
    function: Callable[[Tensor], Tensor],
    recurse: bool = True,
) -> Any:
    engine = engine_of(model)
    is_used = has_begun(model) or type(engine.updates) is not UpdateFollower
    for dtype in {parameter.dtype for parameter in model.parameters()}:
        wanted = function(torch.empty(0, dtype=dtype)).dtype
        # The wire to other replicas is no wider than what the configuration says.
        is_wider = engine.batch.buckets is not None and wanted.itemsize > dtype.itemsize
        if wanted != dtype and (is_used or is_wider):
            raise ConfigError(
                f"model.to({wanted}): what gathers, reduces or updates parameters is made for "
                f"{dtype}; choose it by parallelize(..., ParallelConfig(precision=...))"
            )
    return apply(function, recurse)


def _save_whole(save: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if kwargs.get("state_dict") is None:
        raise ConfigError(
            "save_pretrained(...) would write this rank's parts of the parameters: gather them on "
            "all ranks by state = parallel2d.full_state(model) and give state_dict=state['model'] "
            "on rank 0, or save a checkpoint for python -m parallel2d.checkpoint convert"
        )
    return save(*args, **kwargs)


def _explain_missing_wrapper(kind: type) -> None:
    """``kind``: the class that `fully_shard` has made, or had made for an earlier model."""

    # Not a property, whose AttributeError torch replaces, and which would hide a child.
    def find(self: Any, name: str) -> Any:
        try:
            return super(kind, self).__getattr__(name)  # type: ignore[arg-type]
        except AttributeError as error:
            if name != "module":
                raise
            problem = "model.module: parallelize(...) returns the model itself, without a wrapper"
            raise AttributeError(f"{problem}; use model") from error

    kind.__getattr__ = find  # type: ignore[attr-defined]
