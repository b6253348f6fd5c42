"""Parameters that are whole for a moment, to look at them or to change them: `summon_full_params`
and `apply_full`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from parallel2d.errors import ConfigError
from parallel2d.exchange import broadcast
from parallel2d.model_structure import fqn_of
from parallel2d.weights.kept import keepers_in
from parallel2d.weights.named_tensors import reshard
from parallel2d.weights.whole_tensors import fill_tensor, gather_tensor


@contextmanager
def summon_full_params(
    model: nn.Module,
    *,
    recurse: bool = True,
    writeback: bool = True,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
    with_grads: bool = False,
) -> Iterator[None]:
    """Inside, the parameters of ``model``, a parallelized model or a module of one, are whole plain
    tensors. Collective.

    Args:
        recurse: also those of submodules; False: only those that ``model`` owns itself.
        writeback: changes made inside are kept, each rank's part of its own copy (they must be
            equal on all ranks); with ``rank0_only`` those of rank 0, sent to the others. False:
            they are dropped.
        rank0_only: other ranks keep their sharded parameters and pay the memory of one whole
            parameter, while it is gathered.
        offload_to_cpu: whole tensors are moved to CPU memory one by one.
        with_grads: ``.grad`` is whole as well, and written back like the parameters.

    Call neither forward nor backward inside: the hooks expect sharded parameters. Memory: the whole
    parameters (and gradients) of what is summoned. Raises `ConfigError` inside another such context
    on the same parameters.
    """
    if rank0_only and writeback and any(keeper.replicas_differ for keeper in keepers_in(model)):
        raise ConfigError(
            "summon_full_params(rank0_only=True) would write rank 0's parameters over those of "
            "other replicas, which differ with sync=diloco: use writeback=False to look at them"
        )
    # After a forward without backward, some parameters may still be gathered.
    reshard(model)
    summoned = _parameters_of(model, recurse)
    keep = not rank0_only or dist.get_rank() == 0
    for parameter in summoned:
        parameter.gather(keep=keep, cpu=offload_to_cpu, with_gradient=with_grads)
    # Only now: should gathering fail, the model is as it was.
    for parameter in summoned:
        parameter.show(parameter.whole)
    try:
        yield
    finally:
        # After an error inside too: a step needs sharded parameters, in every module.
        for parameter in summoned:
            parameter.show(parameter.sharded)
        if writeback:
            _write_back(summoned, from_rank0=rank0_only, with_gradients=with_grads)
            for keeper in keepers_in(model):
                keeper.parameters_were_changed()


def apply_full(model: nn.Module, function: Callable[[nn.Module], object]) -> nn.Module:
    """``model.apply(function)`` with whole parameters: children first, one module's own parameters
    at a time. Collective.

    ``function(module)`` sees the parameters that ``module`` owns itself as plain whole tensors,
    those below it sharded. It must do the same on every rank, random numbers included; each rank
    keeps its part of its own result. Memory: the parameters of the module that owns most. Returns
    ``model``.
    """
    for child in model.children():
        apply_full(child, function)
    with summon_full_params(model, recurse=False):
        function(model)
    return model


def sharded_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """(FQN, module) of the modules with a hook that gathers parameters, ``model`` itself
    (name ``""``) included.

    One per bucket, and one per module of a bucket of several. The order is that of
    ``named_modules``.
    """
    found: list[tuple[str, nn.Module]] = []
    for name, module in model.named_modules():
        # `fully_shard` has replaced the module's class by a subclass of it and of `FSDPModule`.
        is_sharded = isinstance(module, FSDPModule)
        if is_sharded:
            found.append((fqn_of(name), module))
    return found


# An attribute of whole parameters, by which a context inside another is noticed.
_MARK = "_summoned_whole"


@dataclass
class _Summoned:
    """A parameter that is whole inside the context, and the attributes of modules that it is: a
    tied parameter has several.

    ``whole`` is None on ranks that keep the sharded one.
    """

    sharded: nn.Parameter
    owners: list[tuple[nn.Module, str]] = field(default_factory=list)
    whole: nn.Parameter | None = None

    @torch.no_grad()
    def gather(self, *, keep: bool, cpu: bool, with_gradient: bool) -> None:
        """Makes ``whole`` where ``keep`` is true. Collective."""
        # Every rank gathers, also one that keeps nothing.
        tensor = gather_tensor(self.sharded, keep=keep, cpu=cpu)
        gradient = None
        if with_gradient and self.sharded.grad is not None:
            gradient = gather_tensor(self.sharded.grad, keep=keep, cpu=cpu)
        if tensor is None:
            return
        self.whole = nn.Parameter(tensor, self.sharded.requires_grad)
        setattr(self.whole, _MARK, True)
        if gradient is not None:
            # torch accepts a gradient of another dtype only where this is declared.
            if gradient.dtype != tensor.dtype:
                self.whole.grad_dtype = gradient.dtype
            self.whole.grad = gradient

    def show(self, parameter: nn.Parameter | None) -> None:
        """Lets the modules have ``parameter``; None: what they have."""
        if parameter is None:
            return
        for module, name in self.owners:
            # Not by `setattr`, which a module may override.
            module._parameters[name] = parameter

    @property
    def has_gradient(self) -> bool:
        """Whether the whole parameter still has the gradient that was gathered with it."""
        return self.whole is not None and self.whole.grad is not None

    def write_back(self, *, from_rank0: bool, with_gradient: bool) -> None:
        """Fills the sharded parameter from the whole one, and its gradient; without
        ``with_gradient`` the gradient stays as it is. Collective if ``from_rank0``."""
        values = None
        gradient = None
        if self.whole is not None:
            values = self.whole.detach()
            gradient = self.whole.grad
        fill_tensor(self.sharded, values, from_rank0=from_rank0)
        if with_gradient and self.sharded.grad is not None:
            fill_tensor(self.sharded.grad, gradient, from_rank0=from_rank0)


def _write_back(summoned: Sequence[_Summoned], *, from_rank0: bool, with_gradients: bool) -> None:
    """Fills all sharded parameters. A gradient that was set to None inside is dropped."""
    kept = [parameter.has_gradient for parameter in summoned]
    # The other ranks have no whole parameters, so rank 0 decides for them.
    if with_gradients and from_rank0:
        kept = broadcast(kept)
    for parameter, keeps in zip(summoned, kept, strict=True):
        if with_gradients and not keeps:
            parameter.sharded.grad = None
        parameter.write_back(from_rank0=from_rank0, with_gradient=with_gradients)


def _parameters_of(model: nn.Module, recurse: bool) -> list[_Summoned]:
    """Each parameter once. Raises `ConfigError` for one that is whole already."""
    found: dict[int, _Summoned] = {}
    modules = list(model.modules()) if recurse else [model]
    for module in modules:
        for name, parameter in module._parameters.items():
            # A name without a parameter, such as the bias of a layer that has none.
            if parameter is None:
                continue
            if hasattr(parameter, _MARK):
                raise ConfigError(
                    f"summon_full_params: {name} of {type(module).__name__} is whole already, in "
                    "an outer context"
                )
            # Found before under another name, it is tied.
            summoned = found.setdefault(id(parameter), _Summoned(parameter))
            summoned.owners.append((module, name))
    return list(found.values())
