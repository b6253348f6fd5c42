"""Weights that one rank has and the others get: handed over before sharding, spread afterwards.

A model whose weights one rank holds flows in; after the transforms every rank's part of them flows out of that rank, piece by piece.
Other ranks never hold more than one piece beside their own part, whatever the size of the model.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from parallel2d.config import ConfigError
from parallel2d.parallelize.initialization import local_slices
from parallel2d.parallelize.structure import canonical_name

PIECE_BYTES = 16 * 2**20  # of a tensor that travel at once, rounded up to a whole row of dim 0


def hand_over(model: nn.Module, source: int) -> dict[str, Tensor]:
    """Takes the weights out of ``model``, which is on meta afterwards; returns them on rank ``source``, canonical name -> tensor.

    Elsewhere what was there is dropped, on meta or not. Collective. Raises `ConfigError` on every rank when the source has none.
    """
    kept: dict[str, Tensor] = {}
    problem = None
    if not 0 <= source < dist.get_world_size():
        raise ConfigError(f"broadcast_from={source} is no rank: there are {dist.get_world_size()}, counted from 0")
    if dist.get_rank() == source:
        named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
        kept = {canonical_name(name): tensor.detach() for name, tensor in named}
        meta = [name for name, tensor in kept.items() if tensor.is_meta]
        if meta:
            problem = f"broadcast_from={source}: that rank has no values for {', '.join(meta[:5])}, which is on meta"
    box = [problem]
    dist.broadcast_object_list(box, src=source)
    if box[0] is not None:
        raise ConfigError(box[0])
    on_meta: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if id(parameter) not in on_meta:
                    on_meta[id(parameter)] = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
                module._parameters[name] = on_meta[id(parameter)]
    return kept


@torch.no_grad()
def scatter(model: nn.Module, full: Mapping[str, Tensor] | None, source: int = 0, *, buffers: bool = True) -> None:
    """Fills a sharded model, which has storage, from whole tensors that rank ``source`` alone needs to have. Collective.

    ``full``: canonical name -> whole tensor of any floating-point dtype, on any device. Raises `ConfigError` on every rank, before
    anything is written, when names or shapes differ.
    """
    here: dict[str, Tensor] = {canonical_name(name): parameter for name, parameter in model.named_parameters()}
    if buffers:
        here |= {canonical_name(name): buffer for name, buffer in model.named_buffers()}
    box: list[str | None] = [None]
    if dist.get_rank() == source:
        given = full or {}
        wrong = [f"{name} is missing" for name in here if name not in given]
        wrong += [
            f"{name} has shape {tuple(given[name].shape)}, not {tuple(tensor.shape)}"
            for name, tensor in here.items()
            if name in given and given[name].shape != tensor.shape
        ]
        box = [f"rank {source}'s weights do not fit: {'; '.join(wrong[:5])}" + (" ..." if wrong[5:] else "") if wrong else None]
    dist.broadcast_object_list(box, src=source)
    if box[0] is not None:
        raise ConfigError(box[0])
    for name, tensor in here.items():
        scatter_tensor(tensor, full[name] if full is not None and dist.get_rank() == source else None, source)


def scatter_tensor(tensor: Tensor, full: Tensor | None, source: int) -> None:
    """One tensor of `scatter`: ``full`` is needed on ``source`` alone. Collective."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    slices = local_slices(tensor)
    if not tensor.ndim:
        tensor, local, slices = tensor.reshape(1), local.view(1), (slice(0, 1),)
        full = full.reshape(1) if full is not None else None
    rows = tensor.shape[0]
    size = max(1, PIECE_BYTES // max(1, tensor.numel() // max(rows, 1) * tensor.element_size()))
    for begin in range(0, rows, size):
        end = min(begin + size, rows)
        shape = (end - begin, *tensor.shape[1:])
        if full is None:
            piece = torch.empty(shape, dtype=tensor.dtype, device=local.device)
        else:
            piece = full[begin:end].to(device=local.device, dtype=tensor.dtype).contiguous()
        dist.broadcast(piece, src=source)
        first, last = max(begin, slices[0].start), min(end, slices[0].stop)
        if first < last and local.numel():
            wanted = piece[(slice(first - begin, last - begin), *slices[1:])]
            local[first - slices[0].start : last - slices[0].start].copy_(wanted)
