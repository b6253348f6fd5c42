"""Whole tensors, and the parts that ranks hold of them: `gather_tensor` makes one whole, `fill`
fills parts from whole ones, `summon_full_params` and `apply_full` show a model's parameters whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from parallel2d.base.errors import ConfigError
from parallel2d.base.exchange import broadcast
from parallel2d.parallel.model_structure import Places, fqn_of, places_in
from parallel2d.parallel.weights.geometry import Region, local_part, local_region
from parallel2d.parallel.weights.named_tensors import masters_in, meet, reshard

PIECE_BYTES = 16 * 2**20  # of a tensor that are sent, or read from a file, at once

# (a tensor of which this rank holds a part, the whole one; None on ranks that do not have it)
Pairs = Iterable[tuple[Tensor, Tensor | None]]

# The broadcasts that bring this rank what the first rank of all has: of which rank, in which group
Route = Sequence[tuple[int, dist.ProcessGroup | None]]


@torch.no_grad()
def gather_tensor(tensor: Tensor, *, keep: bool, cpu: bool) -> Tensor | None:
    """A whole copy of ``tensor`` where ``keep`` is true, in CPU memory with ``cpu``; None
    elsewhere. Collective for a `DTensor`."""
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    # Only now: every rank takes part in gathering.
    if not keep:
        return None
    whole = whole.detach().to("cpu" if cpu else whole.device)
    # With one rank, or unsharded, this may be the storage of the tensor itself: a change of one
    # would change the other.
    if whole.untyped_storage().data_ptr() == local_part(tensor).untyped_storage().data_ptr():
        return whole.clone()
    return whole


@torch.no_grad()
def copy_part(tensor: Tensor, other: Tensor) -> None:
    """Copies this rank's part of ``other``, of the same whole shape and on any device, into
    ``tensor``. Collective where ``other`` is a `DTensor` that is split otherwise: it is
    redistributed, or, on another mesh, made whole for a moment."""
    if isinstance(other, DTensor):
        # torch redistributes on one mesh only.
        if isinstance(tensor, DTensor) and other.device_mesh == tensor.device_mesh:
            other = other.redistribute(tensor.device_mesh, tensor.placements)
            tensor.to_local().copy_(other.to_local())
            return
        other = other.full_tensor()
    local = local_part(tensor)
    part = other[local_region(tensor).slices]
    local.copy_(part.reshape(local.shape))


@torch.no_grad()
def fill(pairs: Pairs, source: int | Route | None) -> None:
    """Fills this rank's part of each tensor from the whole one: that of rank ``source``, or of the
    rank at which a route begins, or, for None and an empty route, this rank's own, by `copy_part`.
    Collective in the other cases: all ranks go through the same tensors in the same order.

    Values are sent `PIECE_BYTES` at a time, in the dtype of the tensor they are for, whatever its
    shape: other ranks never hold more than one piece beside their part.
    """
    # Pieces arrive in one buffer: with one of its own each, a process group that lets go of them
    # late would hold many.
    buffer = torch.empty(0, dtype=torch.uint8)
    whole: Any  # not None where it is used
    route = [(source, None)] if isinstance(source, int) else source
    if not route:
        for tensor, whole in pairs:
            copy_part(tensor, whole)
        return
    is_source = route[0][0] == dist.get_rank()
    for tensor, whole in pairs:
        local = local_part(tensor)
        kept = local_region(tensor)
        size = tensor.dtype.itemsize
        for piece in Region.whole(tensor.shape).pieces(tensor.shape, PIECE_BYTES // size):
            if is_source:
                values = whole[piece.slices].to(device=local.device, dtype=local.dtype)
                values = values.contiguous()
            else:
                bytes_ = piece.numel * size
                # Tensors may be on several devices, such as those that are offloaded.
                if buffer.device != local.device or buffer.numel() < bytes_:
                    buffer = torch.empty(bytes_, dtype=torch.uint8, device=local.device)
                values = buffer[:bytes_].view(local.dtype).view(piece.lengths)
            # A broadcast, because replicas keep the same rows, and a rank part of a row.
            for root, group in route:
                dist.broadcast(values, src=root, group=group)
            common = kept.intersect(piece)
            if common is not None:
                local[common.slices_in(kept)].copy_(values[common.slices_in(piece)])


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

    Call neither forward nor backward inside: the hooks expect sharded parameters. Raises
    `ConfigError` inside another such context on the same parameters.
    """
    if rank0_only and writeback and any(masters.replicas_differ for masters in masters_in(model)):
        raise ConfigError(
            "summon_full_params(rank0_only=True) would write rank 0's parameters over those of "
            "other replicas, which differ with sync=diloco: use writeback=False to look at them"
        )
    meet(model, "gathers whole parameters for a moment")
    # After a forward without backward, some parameters may still be gathered.
    reshard(model)
    places = places_in(model.modules() if recurse else [model])
    _refuse_whole(places)
    keep = not rank0_only or dist.get_rank() == 0
    wholes = {}
    for parameter in places:
        wholes[parameter] = _gather(parameter, keep=keep, cpu=offload_to_cpu, grads=with_grads)
    # Only now: should gathering fail, the model is as it was.
    _show(places, wholes)
    try:
        yield
    finally:
        # After an error inside too: a step needs sharded parameters, in every module.
        _show(places, dict(zip(places, places, strict=True)))
        if writeback:
            _write_back(wholes, 0 if rank0_only else None, grads=with_grads)
            for masters in masters_in(model):
                masters.parameters_were_changed()


def _refuse_whole(places: Places) -> None:
    for parameter, ((module, name), *_) in places.items():
        if hasattr(parameter, _MARK):
            place = f"{name} of {type(module).__name__}"
            raise ConfigError(f"summon_full_params: {place} is whole already, in an outer context")


def apply_full(model: nn.Module, function: Callable[[nn.Module], object]) -> nn.Module:
    """``model.apply(function)`` with whole parameters: children first, one module's own parameters
    at a time. Collective. Returns ``model``.

    ``function(module)`` sees the parameters that ``module`` owns itself as plain whole tensors,
    those below it sharded. It must do the same on every rank, random numbers included; each rank
    keeps its part of its own result.
    """
    for child in model.children():
        apply_full(child, function)
    with summon_full_params(model, recurse=False):
        function(model)
    return model


def sharded_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """(FQN, module) of the modules with a hook that gathers parameters, in the order of
    ``named_modules``: ``model`` itself (FQN ``""``), and those of each bucket."""
    # `fully_shard` has replaced the module's class by a subclass of it and of `FSDPModule`.
    every = [(fqn_of(name), module) for name, module in model.named_modules()]
    return [(name, module) for name, module in every if issubclass(type(module), FSDPModule)]


# An attribute of whole parameters, by which a context inside another is noticed.
_MARK = "_summoned_whole"


def _show(places: Places, shown: Mapping[nn.Parameter, nn.Parameter]) -> None:
    for parameter, owners in places.items():
        for module, name in owners:
            # Not by `setattr`, which a module may override.
            module._parameters[name] = shown[parameter]


@torch.no_grad()
def _gather(sharded: nn.Parameter, *, keep: bool, cpu: bool, grads: bool) -> nn.Parameter:
    """The whole parameter, or ``sharded`` itself where it is not to be kept. Collective."""
    tensor = gather_tensor(sharded, keep=keep, cpu=cpu)
    gradient = None
    if grads and sharded.grad is not None:
        gradient = gather_tensor(sharded.grad, keep=keep, cpu=cpu)
    if tensor is None:
        return sharded
    whole = nn.Parameter(tensor, sharded.requires_grad)
    setattr(whole, _MARK, True)
    if gradient is not None:
        # torch accepts a gradient of another dtype only where this is declared.
        whole.grad_dtype = gradient.dtype
        whole.grad = gradient
    return whole


def _write_back(
    wholes: Mapping[nn.Parameter, nn.Parameter], source: int | None, *, grads: bool
) -> None:
    """Fills each sharded parameter from its whole one, and, with ``grads``, its gradient."""
    fill([(sharded, whole.detach()) for sharded, whole in wholes.items()], source)
    if not grads:
        return
    kept = [whole.grad is not None for whole in wholes.values()]
    # The other ranks have no whole parameters, so rank 0 decides for them.
    if source is not None:
        kept = broadcast(kept, source)
    pairs: list[tuple[Tensor, Tensor | None]] = []
    for (sharded, whole), keeps in zip(wholes.items(), kept, strict=True):
        if not keeps:
            sharded.grad = None
        elif sharded.grad is not None:
            pairs.append((sharded.grad, whole.grad))
    fill(pairs, source)
