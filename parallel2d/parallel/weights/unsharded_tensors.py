"""Convert between unsharded tensors and local shards.

`gather_tensor` unshards a tensor, `fill` fills local shards from unsharded tensors, and
`summon_full_params` and `apply_full` unshard the parameters of a model.
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
from parallel2d.base.exchange import among, broadcast, group_of_members, leader
from parallel2d.parallel.model_structure import Places, fqn_of, places_in
from parallel2d.parallel.weights.geometry import Region, local_part, local_region
from parallel2d.parallel.weights.named_tensors import masters_in, meet, part_of, reshard

PIECE_BYTES = 16 * 2**20  # maximum bytes of a tensor in one broadcast or one read of a file

# (local shard, unsharded tensor); None on ranks without the unsharded tensor
Pairs = Iterable[tuple[Tensor, Tensor | None]]

# Broadcasts that bring a value from the source to this rank: (source rank, group) of each
Route = Sequence[tuple[int, dist.ProcessGroup | None]]


@torch.no_grad()
def gather_tensor(tensor: Tensor, *, keep: bool, cpu: bool) -> Tensor | None:
    """Return an unsharded copy of ``tensor``. Collective for a `DTensor`.

    Returns None if ``keep`` is False. The copy is in CPU memory if ``cpu`` is True.
    """
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    # Return after the collective, because every rank must take part in it.
    if not keep:
        return None
    whole = whole.detach().to("cpu" if cpu else whole.device)
    # Without communication the result may share the storage of ``tensor``, so copy it.
    if whole.untyped_storage().data_ptr() == local_part(tensor).untyped_storage().data_ptr():
        return whole.clone()
    return whole


@torch.no_grad()
def copy_part(tensor: Tensor, other: Tensor) -> None:
    """Copy the values of ``other`` for this rank's local shard of ``tensor``.

    ``other`` has the same unsharded shape as ``tensor``, on any device. If ``other`` is a `DTensor`
    with other placements it is redistributed, and on another mesh it is unsharded temporarily; both
    are collective.
    """
    if isinstance(other, DTensor):
        # `redistribute` cannot change the mesh.
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
    """Fill this rank's local shard of each tensor from an unsharded tensor.

    The unsharded tensor is on rank ``source``, or on the first rank of a route. If ``source`` is
    None or an empty route, every rank has the unsharded tensor and uses `copy_part`. The other
    cases are collective: all ranks must pass the same tensors in the same order.

    Values are sent in pieces of at most `PIECE_BYTES`, in the dtype of the target. The receiving
    ranks never store more than one piece in addition to their local shards.
    """
    # Receive all pieces in one buffer: a process group may free its tensors late, and would keep
    # many separate buffers alive.
    buffer = torch.empty(0, dtype=torch.uint8)
    whole: Any  # not None where it is used
    route = [(source, group_of_members())] if isinstance(source, int) else source
    if not route:
        for tensor, whole in pairs:
            copy_part(tensor, whole)
        return
    is_source = route[0][0] == dist.get_rank()
    for tensor, whole in pairs:
        local = local_part(tensor)
        kept = local_region(tensor)
        size = tensor.dtype.itemsize
        for piece in Region.of_shape(tensor.shape).pieces(tensor.shape, PIECE_BYTES // size):
            if is_source:
                values = whole[piece.slices].to(device=local.device, dtype=local.dtype)
                values = values.contiguous()
            else:
                bytes_ = piece.numel * size
                # Tensors may be on several devices, for example if some are offloaded.
                if buffer.device != local.device or buffer.numel() < bytes_:
                    buffer = torch.empty(bytes_, dtype=torch.uint8, device=local.device)
                values = buffer[:bytes_].view(local.dtype).view(piece.lengths)
            # A broadcast is used instead of a scatter, because replicas need the same rows and a
            # rank may need only a part of a row. The broadcasts of a route start at the source: a
            # rank receives a piece in its first group, and then sends it in its second group. All
            # ranks process the pieces in the same order.
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
    """Unshard the parameters of a parallelized model or of one of its modules. Collective.

    In this context each parameter is a ``torch.Tensor`` with all values. Do not run forward or
    backward in the context, because FSDP hooks expect sharded parameters.

    Args:
        model: the model or module.
        recurse: True to include submodules; False: only the direct parameters of ``model``.
        writeback: True to keep changes. Each rank then copies its local shard from its unsharded
            parameter, which must be equal on all ranks, or with ``rank0_only`` from rank 0's.
            False: changes are discarded.
        rank0_only: True to unshard only on rank 0; the other ranks have sharded parameters in the
            context. The all-gather of each parameter also needs memory on these ranks.
        offload_to_cpu: True to move unsharded tensors to CPU memory one by one.
        with_grads: True to unshard ``.grad`` too, and to write it back like the parameters.

    Raises:
        ConfigError: an outer context has unsharded the same parameters, or ``rank0_only`` with
            ``writeback`` for replicas with different parameters (``sync=diloco``).
    """
    if rank0_only and writeback and any(masters.replicas_differ for masters in masters_in(model)):
        raise ConfigError(
            "summon_full_params(rank0_only=True) would overwrite the parameters of other "
            "replicas, which differ with sync=diloco: use writeback=False to read them"
        )
    meet(model, "temporarily gathers full parameters")
    # After a forward without backward, FSDP may have left parameters unsharded.
    reshard(model)
    places = places_in(model.modules() if recurse else [model])
    _refuse_nested(places)
    part = part_of(model)
    keep = not rank0_only or dist.get_rank() == leader(part)
    wholes = {}
    for parameter in places:
        wholes[parameter] = _gather(parameter, keep=keep, cpu=offload_to_cpu, grads=with_grads)
    # Change the model after all parameters are unsharded, so that an error leaves it unchanged.
    _show(places, wholes)
    try:
        yield
    finally:
        # Restore also after an error inside, because a step needs sharded parameters in every
        # module.
        _show(places, dict(zip(places, places, strict=True)))
        if writeback:
            with among(part):
                _write_back(wholes, leader() if rank0_only else None, grads=with_grads)
            for masters in masters_in(model):
                masters.parameters_were_changed()


def _refuse_nested(places: Places) -> None:
    for parameter, ((module, name), *_) in places.items():
        if hasattr(parameter, _MARK):
            place = f"{name} of {type(module).__name__}"
            raise ConfigError(
                f"summon_full_params: {place} is already unsharded in an outer context"
            )


def apply_full(model: nn.Module, function: Callable[[nn.Module], object]) -> nn.Module:
    """Run ``model.apply(function)`` with unsharded parameters. Collective. Return ``model``.

    The function is called for children before their parent. In ``function(module)`` only the direct
    parameters of ``module`` are unsharded; parameters of its children are sharded. The function
    must set the same values on every rank, also with random numbers, because each rank copies its
    local shard from its result.
    """
    for child in model.children():
        apply_full(child, function)
    with summon_full_params(model, recurse=False):
        function(model)
    return model


def sharded_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return (FQN, module) of the modules to which `fully_shard` was applied, in model order.

    The modules are ``model`` (FQN ``""``) and the modules of each FSDP group.
    """
    # `fully_shard` replaces the module's class by a subclass of the class and `FSDPModule`.
    modules: list[tuple[str, nn.Module]] = []
    for name, module in model.named_modules():
        if issubclass(type(module), FSDPModule):
            modules.append((fqn_of(name), module))
    return modules


# Attribute of the unsharded parameters, to detect a nested context
_MARK = "_summoned_whole"


def _show(places: Places, shown: Mapping[nn.Parameter, nn.Parameter]) -> None:
    for parameter, owners in places.items():
        for module, name in owners:
            # A module may override `setattr`, so write to the dict.
            module._parameters[name] = shown[parameter]


@torch.no_grad()
def _gather(sharded: nn.Parameter, *, keep: bool, cpu: bool, grads: bool) -> nn.Parameter:
    """Return the unsharded parameter; ``sharded`` itself if ``keep`` is False. Collective."""
    tensor = gather_tensor(sharded, keep=keep, cpu=cpu)
    gradient = None
    if grads and sharded.grad is not None:
        gradient = gather_tensor(sharded.grad, keep=keep, cpu=cpu)
    if tensor is None:
        return sharded
    whole = nn.Parameter(tensor, sharded.requires_grad)
    setattr(whole, _MARK, True)
    if gradient is not None:
        # `grad_dtype` allows a gradient of another dtype than the parameter's.
        whole.grad_dtype = gradient.dtype
        whole.grad = gradient
    return whole


def _write_back(
    wholes: Mapping[nn.Parameter, nn.Parameter], source: int | None, *, grads: bool
) -> None:
    """Fill each sharded parameter from its unsharded parameter; with ``grads`` also ``.grad``."""
    fill([(sharded, whole.detach()) for sharded, whole in wholes.items()], source)
    if not grads:
        return
    kept = []
    for whole in wholes.values():
        kept.append(whole.grad is not None)
    # With ``source``, only that rank knows which unsharded parameters have a gradient.
    if source is not None:
        kept = broadcast(kept, source)
    pairs: list[tuple[Tensor, Tensor | None]] = []
    for (sharded, whole), keeps in zip(wholes.items(), kept, strict=True):
        if not keeps:
            sharded.grad = None
        elif sharded.grad is not None:
            pairs.append((sharded.grad, whole.grad))
    fill(pairs, source)
