"""Calls that scripts for ``DistributedDataParallel`` and transformers make on a model."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from parallel2d.base.errors import ConfigError
from parallel2d.parallel.fsdp_internals import has_begun
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
    _refuse_sparse_updates()
    for _, module in sharded_modules(model):
        module._apply = _checked(model, module._apply)  # type: ignore[method-assign]
    for name, module in model.named_modules():
        save = getattr(module, "save_pretrained", None)
        if callable(save):
            vars(module)["save_pretrained"] = functools.wraps(save)(_saving_whole(save, name))


def _checked(model: nn.Module, apply: Callable[..., Any]) -> Callable[..., Any]:
    """``_apply`` of a module of ``model``, through which ``to``, ``half`` and others go, with a
    refusal of another dtype where the old one is in use."""

    def applied(function: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        engine = engine_of(model)
        is_used = has_begun(model) or type(engine.updates) is not UpdateFollower
        for dtype in {parameter.dtype for parameter in model.parameters()}:
            wanted = function(torch.empty(0, dtype=dtype)).dtype
            # The wire to other replicas is no wider than what the configuration says.
            is_wider = engine.batch.buckets is not None and wanted.itemsize > dtype.itemsize
            if wanted != dtype and (is_used or is_wider):
                raise ConfigError(
                    f"model.to(...) would make parameters in {dtype} {wanted}, but what gathers, "
                    f"reduces or updates them is made for {dtype}: choose the dtype by "
                    "parallelize(model, mesh, ParallelConfig(precision=...))"
                )
        return apply(function, recurse)

    return applied


@functools.cache
def _refuse_sparse_updates() -> None:
    """Gives the optimizer that takes sparse gradients alone an error that says what to do."""

    def check(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not isinstance(optimizer, torch.optim.SparseAdam):
            return
        for group in optimizer.param_groups:
            if any(isinstance(parameter, DTensor) for parameter in group["params"]):
                raise ConfigError(
                    "optimizer.step: SparseAdam takes sparse gradients alone, and those of sharded "
                    "parameters are dense, of Embedding(sparse=True) too: use AdamW or Adagrad"
                )

    register_optimizer_step_pre_hook(check)


def _explain_missing_wrapper(kind: type) -> None:
    """``kind``: the class that `fully_shard` has made, or had made for an earlier model."""
    if "__getattr__" in vars(kind):
        return

    # Not a property, whose AttributeError torch replaces, and which would hide a child.
    def find(self: Any, name: str) -> Any:
        try:
            return super(kind, self).__getattr__(name)  # type: ignore[arg-type]
        except AttributeError as error:
            if name != "module":
                raise
            raise AttributeError(
                "model.module: parallelize(model, ...) returns the model itself, without a wrapper "
                "around it: use model",
                name=name,
                obj=self,
            ) from error

    kind.__getattr__ = find  # type: ignore[attr-defined]


def _saving_whole(save: Callable[..., Any], name: str) -> Callable[..., Any]:
    def saving(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("state_dict") is None:
            raise ConfigError(
                f"{name or 'model'}.save_pretrained(...) would write this rank's parts of the "
                "parameters: gather them on all ranks by state = parallel2d.full_state(model), and "
                "give it state_dict=state['model'] on rank 0, or save a checkpoint and run python "
                "-m parallel2d.checkpoint convert"
            )
        return save(*args, **kwargs)

    return saving
