"""Weights that one rank has and the others get: handed over before sharding, spread afterwards.

A model whose weights one rank holds flows in; after the transforms every rank's part of them flows
out of that rank, piece by piece. Other ranks never hold more than one piece beside their own part,
whatever the size of the model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from parallel2d.errors import ConfigError
from parallel2d.exchange import broadcast
from parallel2d.model_structure import canonical_name
from parallel2d.weights.equality import parameters_in
from parallel2d.weights.geometry import local_region

PIECE_BYTES = 16 * 2**20  # of a tensor that travel at once, or are read at once from a file


def hand_over(model: nn.Module, source: int) -> dict[str, Tensor]:
    """Takes the weights out of ``model``, which is on meta afterwards; returns them on rank
    ``source``, canonical name -> tensor.

    Elsewhere what was there is dropped, on meta or not; parameters that are tied on the source are
    tied, because ``model.to("meta")`` takes ties apart. Collective. Raises `ConfigError` on every
    rank when the source has none.
    """
    kept: dict[str, Tensor] = {}
    problem = None
    if not 0 <= source < dist.get_world_size():
        raise ConfigError(
            f"broadcast_from={source} is no rank: there are {dist.get_world_size()}, counted from 0"
        )
    if dist.get_rank() == source:
        named = [
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        ]
        kept = {canonical_name(name): tensor.detach() for name, tensor in named}
        meta = [name for name, tensor in kept.items() if tensor.is_meta]
        if meta:
            problem = (
                f"broadcast_from={source}: that rank has no values for "
                f"{', '.join(meta[:5])}, which is on meta"
            )
    ties = {
        name: place.tied_to for name, place in parameters_in(model).items() if place.tied_to != name
    }
    problem, ties = broadcast((problem, ties), source)
    if problem is not None:
        raise ConfigError(problem)
    _tie(model, ties)
    on_meta: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if id(parameter) not in on_meta:
                    on_meta[id(parameter)] = nn.Parameter(
                        parameter.detach().to("meta"), parameter.requires_grad
                    )
                module._parameters[name] = on_meta[id(parameter)]
    return kept


def _tie(model: nn.Module, ties: Mapping[str, str]) -> None:
    """Makes parameters on meta the one they are tied to on another rank, where this model has both
    and they are alike."""
    named = dict(model.named_parameters(remove_duplicate=False))
    for name, first in ties.items():
        ours, theirs = named.get(name), named.get(first)
        if ours is not None and theirs is not None and ours.is_meta and ours.shape == theirs.shape:
            path, _, attribute = name.rpartition(".")
            model.get_submodule(path)._parameters[attribute] = theirs


@torch.no_grad()
def scatter(
    model: nn.Module, full: Mapping[str, Tensor] | None, source: int = 0, *, buffers: bool = True
) -> None:
    """Fills a sharded model, which has storage, from whole tensors that rank ``source`` alone needs
    to have. Collective.

    ``full``: canonical name -> whole tensor of any floating-point dtype, on any device. Raises
    `ConfigError` on every rank, before anything is written, when names or shapes differ.
    """
    here: dict[str, Tensor] = {
        canonical_name(name): parameter for name, parameter in model.named_parameters()
    }
    if buffers:
        here |= {canonical_name(name): buffer for name, buffer in model.named_buffers()}
    problem = None
    if dist.get_rank() == source:
        given = full or {}
        wrong = [f"{name} is missing" for name in here if name not in given]
        wrong += [
            f"{name} has shape {tuple(given[name].shape)}, not {tuple(tensor.shape)}"
            for name, tensor in here.items()
            if name in given and given[name].shape != tensor.shape
        ]
        if wrong:
            problem = f"rank {source}'s weights do not fit: {'; '.join(wrong[:5])}" + (
                " ..." if wrong[5:] else ""
            )
    problem = broadcast(problem, source)
    if problem is not None:
        raise ConfigError(problem)
    scattering = _Scattering(source)
    for name, tensor in here.items():
        scattering.send(
            tensor, full[name] if full is not None and dist.get_rank() == source else None
        )


def scatter_tensor(tensor: Tensor, full: Tensor | None, source: int) -> None:
    """One tensor of `scatter`: ``full`` is needed on ``source`` alone. Collective."""
    _Scattering(source).send(tensor, full)


class _Scattering:
    """Tensors that leave rank ``source`` in pieces of at most `PIECE_BYTES`. All pieces arrive in
    one buffer: with one of its own each, a process group that lets go of them late would hold
    many."""

    def __init__(self, source: int) -> None:
        self.source = source
        self._buffer: Tensor | None = None

    def send(self, tensor: Tensor, full: Tensor | None) -> None:
        """Fills this rank's part of ``tensor``; ``full`` is the whole one on ``source``, None
        elsewhere. Collective."""
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        shape, slices = tuple(tensor.shape), local_region(tensor).slices
        if not shape:
            local, shape, slices = local.view(1), (1,), (slice(0, 1),)
            full = full.reshape(1) if full is not None else None
        if tensor.numel():
            self._send_rows(
                local if local.numel() else None, full, shape, slices, tensor.dtype, local.device
            )

    def _send_rows(
        self,
        local: Tensor | None,
        full: Tensor | None,
        shape: tuple[int, ...],
        slices: tuple[slice, ...],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Rows of dim 0 of a tensor of ``shape``, as many at once as a piece holds; a row that is
        larger goes row by row itself.

        ``local``: the rectangle ``slices`` of it, None where this rank keeps nothing of it.
        """
        rows, row_bytes = shape[0], math.prod(shape[1:]) * dtype.itemsize
        if row_bytes > PIECE_BYTES and len(shape) > 1:
            for row in range(rows):
                inside = local is not None and slices[0].start <= row < slices[0].stop
                part = local[row - slices[0].start] if inside and local is not None else None
                self._send_rows(
                    part,
                    full[row] if full is not None else None,
                    shape[1:],
                    slices[1:],
                    dtype,
                    device,
                )
            return
        size = PIECE_BYTES // row_bytes
        for begin in range(0, rows, size):
            end = min(begin + size, rows)
            if full is None:
                piece = (
                    self._room((end - begin) * row_bytes, device)
                    .view(dtype)
                    .view(end - begin, *shape[1:])
                )
            else:
                piece = full[begin:end].to(device=device, dtype=dtype).contiguous()
            dist.broadcast(piece, src=self.source)
            first, last = max(begin, slices[0].start), min(end, slices[0].stop)
            if local is not None and first < last:
                wanted = piece[(slice(first - begin, last - begin), *slices[1:])]
                local[first - slices[0].start : last - slices[0].start].copy_(wanted)

    def _room(self, size: int, device: torch.device) -> Tensor:
        if self._buffer is None or self._buffer.numel() < size or self._buffer.device != device:
            self._buffer = torch.empty(size, dtype=torch.uint8, device=device)
        return self._buffer[:size]
