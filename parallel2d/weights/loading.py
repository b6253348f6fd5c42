"""A state dict given to a sharded model: whole on one rank, or already in parts on every rank."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from parallel2d.errors import ConfigError
from parallel2d.model_structure import canonical_name
from parallel2d.weights.geometry import copy_slice
from parallel2d.weights.scatter import scatter


@torch.no_grad()
def load_state(model: nn.Module, state: Mapping[str, Tensor] | None, *, source: int = 0) -> None:
    """Loads ``state``, canonical name -> tensor, into a parallelized ``model``. Collective.

    Whole tensors are needed on rank ``source`` alone; the others pass None and get their parts
    piece by piece (`parallel2d.weights.scatter.PIECE_BYTES`), so none of them ever holds a
    whole one. `DTensor`s, as ``model.state_dict()`` gives them on every rank, are copied, or
    redistributed one at a time where they are split differently.

    Raises `ConfigError` when names or shapes differ.
    """
    sharded = state is not None and any(isinstance(tensor, DTensor) for tensor in state.values())
    if not sharded:
        persistent = {canonical_name(name) for name in model.state_dict()}
        buffers = [(canonical_name(name), buffer) for name, buffer in model.named_buffers()]
        tables = {name: buffer for name, buffer in buffers if name not in persistent}
        # Not part of a state dict: every rank has its own already.
        full = (
            {canonical_name(name): tensor for name, tensor in state.items()} | tables
            if state is not None
            else None
        )
        scatter(model, full, source)
        return
    assert state is not None
    given = {canonical_name(name): tensor for name, tensor in state.items()}
    here: dict[str, Tensor] = {
        canonical_name(name): parameter for name, parameter in model.named_parameters()
    }
    wrong = [
        name
        for name, tensor in here.items()
        if name not in given or given[name].shape != tensor.shape
    ]
    if wrong:
        raise ConfigError(
            f"the sharded state does not fit: {', '.join(wrong[:5])}{' ...' if wrong[5:] else ''}"
        )
    for name, tensor in here.items():
        copy_part(tensor, given[name])
    for name, buffer in model.named_buffers():
        if canonical_name(name) in given:
            buffer.copy_(given[canonical_name(name)])


@torch.no_grad()
def copy_part(tensor: Tensor, other: Tensor) -> None:
    """Copies ``other``, of the same whole shape, into ``tensor``; a `DTensor` that is split
    differently is redistributed first, or, on another mesh, made whole for a moment."""
    if isinstance(tensor, DTensor) and isinstance(other, DTensor):
        if other.device_mesh != tensor.device_mesh:
            copy_slice(tensor, other.full_tensor())
            return
        if other.placements != tensor.placements:
            other = other.redistribute(tensor.device_mesh, tensor.placements)
        tensor.to_local().copy_(other.to_local())
    else:
        tensor.copy_(other)
