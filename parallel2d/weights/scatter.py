"""Weights that one rank has and the others get: `hand_over` takes them out of the model before it
is sharded, `scatter` fills the sharded model with them.

They are sent piece by piece: other ranks never hold more than one piece beside their own part,
whatever the size of the model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel2d.errors import ConfigError, first_five
from parallel2d.exchange import broadcast, raise_together
from parallel2d.model_structure import fqn_of, held_parameters
from parallel2d.weights.equality import parameters_in
from parallel2d.weights.geometry import local_part, local_region
from parallel2d.weights.named_tensors import parameters_by_name

PIECE_BYTES = 16 * 2**20  # of a tensor that travel at once, or are read at once from a file


def hand_over(model: nn.Module, source: int) -> dict[str, Tensor]:
    """Takes the weights out of ``model``, which is on meta afterwards; returns them on rank
    ``source``, FQN -> tensor.

    Elsewhere what was there is dropped, on meta or not; parameters that are tied on the source are
    tied, because ``model.to("meta")`` takes ties apart. Collective. Raises `ConfigError` on every
    rank when the source has none.
    """
    world = dist.get_world_size()
    if not 0 <= source < world:
        raise ConfigError(f"broadcast_from={source} is no rank: there are {world}, counted from 0")
    # The source alone has weights to give, and finds out whether it lacks any.
    is_source = dist.get_rank() == source
    kept: dict[str, Tensor] = {}
    problem = None
    if is_source:
        kept = _tensors_by_name(model)
        problem = _meta_problem(kept, source)
    raise_together(problem, source)
    # Before the models go to meta, because what is tied then stays tied.
    ties = broadcast(_ties(model), source)
    _tie(model, ties)
    _move_to_meta(model)
    return kept


def _tensors_by_name(model: nn.Module) -> dict[str, Tensor]:
    """FQN -> parameter or buffer, tied ones under every name."""
    found: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found[fqn_of(name)] = parameter.detach()
    for name, buffer in model.named_buffers(remove_duplicate=False):
        found[fqn_of(name)] = buffer.detach()
    return found


def _meta_problem(tensors: Mapping[str, Tensor], source: int) -> str | None:
    meta = []
    for name, tensor in tensors.items():
        if tensor.is_meta:
            meta.append(name)
    if not meta:
        return None
    listed = ", ".join(meta[:5])
    return f"broadcast_from={source}: that rank has no values for {listed}, which is on meta"


def _ties(model: nn.Module) -> dict[str, str]:
    """Name of each tied parameter -> the first name of the same parameter."""
    ties: dict[str, str] = {}
    # Names as they are here, with what wrappers add: `_tie` looks modules up by them.
    for name, info in parameters_in(model).items():
        if info.tied_to != name:
            ties[name] = info.tied_to
    return ties


def _tie(model: nn.Module, ties: Mapping[str, str]) -> None:
    """Makes parameters on meta the one they are tied to on another rank, where this model has both
    and they are alike."""
    named = dict(model.named_parameters(remove_duplicate=False))
    for name, first in ties.items():
        # What is missing here is reported later, by the check that all ranks have one structure.
        if name not in named or first not in named:
            continue
        ours = named[name]
        theirs = named[first]
        # A parameter with values is left alone: it was built here, and has the ties it was given.
        if ours.is_meta and ours.shape == theirs.shape:
            path, _, attribute = name.rpartition(".")
            model.get_submodule(path)._parameters[attribute] = theirs


def _move_to_meta(model: nn.Module) -> None:
    """Frees the values of all parameters; unlike after ``model.to("meta")``, tied parameters stay
    tied."""
    on_meta: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in held_parameters(module):
            # What is shared is replaced once, and put in all its places.
            if id(parameter) not in on_meta:
                empty = parameter.detach().to("meta")
                on_meta[id(parameter)] = nn.Parameter(empty, parameter.requires_grad)
            module._parameters[name] = on_meta[id(parameter)]


@torch.no_grad()
def scatter(
    model: nn.Module, full: Mapping[str, Tensor] | None, source: int = 0, *, buffers: bool = True
) -> None:
    """Fills a sharded model, which has storage, from whole tensors that rank ``source`` alone needs
    to have. Collective.

    ``full``: FQN -> whole tensor of any floating-point dtype, on any device. Raises
    `ConfigError` on every rank, before anything is written, when names or shapes differ.
    """
    here: dict[str, Tensor] = {**parameters_by_name(model)}
    if buffers:
        for name, buffer in model.named_buffers():
            here[fqn_of(name)] = buffer
    # Whatever the other ranks pass is ignored.
    is_source = dist.get_rank() == source
    given: Mapping[str, Tensor] = {}
    problem = None
    if is_source:
        given = full or {}
        problem = _misfit_problem(here, given, source)
    raise_together(problem, source)
    scattering = _Scattering(source)
    # Every rank goes through the same names in the same order: each is a collective.
    for name, tensor in here.items():
        scattering.send(tensor, given.get(name))


def _misfit_problem(
    here: Mapping[str, Tensor], given: Mapping[str, Tensor], source: int
) -> str | None:
    """What is missing of the weights or has another shape, None if nothing."""
    wrong = [f"{name} is missing" for name in here if name not in given]
    for name, tensor in here.items():
        if name not in given:
            continue
        # Dtypes may differ: values are cast when they are sent.
        expected = tuple(tensor.shape)
        shape = tuple(given[name].shape)
        if shape != expected:
            wrong.append(f"{name} has shape {shape}, not {expected}")
    if not wrong:
        return None
    return f"rank {source}'s weights do not fit: {first_five(wrong)}"


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
        local = local_part(tensor)
        shape = tuple(tensor.shape)
        slices = local_region(tensor).slices
        # A scalar has no rows: it is sent as a vector of one.
        if not shape:
            local = local.view(1)
            shape = (1,)
            slices = (slice(0, 1),)
            if full is not None:
                full = full.reshape(1)
        if tensor.numel() == 0:
            return
        # Ranks that keep nothing of a small tensor take part in the broadcasts all the same.
        kept = local if local.numel() else None
        self._send_rows(kept, full, shape, slices, tensor.dtype, local.device)

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
        rows = shape[0]
        row_bytes = math.prod(shape[1:]) * dtype.itemsize
        # Rows that are too large for a piece are sent as tensors with one dim less.
        if row_bytes > PIECE_BYTES and len(shape) > 1:
            for row in range(rows):
                whole_row = None
                if full is not None:
                    whole_row = full[row]
                local_row = _row_of(local, slices[0], row)
                self._send_rows(local_row, whole_row, shape[1:], slices[1:], dtype, device)
            return
        size = PIECE_BYTES // row_bytes
        for begin in range(0, rows, size):
            end = min(begin + size, rows)
            if full is None:
                room = self._room((end - begin) * row_bytes, device)
                piece = room.view(dtype).view(end - begin, *shape[1:])
            else:
                piece = full[begin:end].to(device=device, dtype=dtype).contiguous()
            # A broadcast, because replicas keep the same rows, and a rank part of a row.
            dist.broadcast(piece, src=self.source)
            if local is not None:
                _keep(local, piece, begin, end, slices)

    def _room(self, size: int, device: torch.device) -> Tensor:
        """``size`` bytes of the buffer, which is replaced when it is too small."""
        buffer = self._buffer
        # Tensors of a model may be on several devices, such as those that are offloaded.
        if buffer is None or buffer.device != device or buffer.numel() < size:
            buffer = torch.empty(size, dtype=torch.uint8, device=device)
            self._buffer = buffer
        return buffer[:size]


def _row_of(local: Tensor | None, rows: slice, row: int) -> Tensor | None:
    """Row ``row`` of the whole tensor, of which ``local`` holds ``rows``; None where it is not
    here."""
    if local is None:
        return None
    if not rows.start <= row < rows.stop:
        return None
    return local[row - rows.start]


def _keep(local: Tensor, piece: Tensor, begin: int, end: int, slices: tuple[slice, ...]) -> None:
    """Copies into ``local``, the rectangle ``slices`` of a tensor, what lies in it of ``piece``,
    the rows from ``begin`` to ``end`` of that tensor."""
    rows, *columns = slices
    first = max(begin, rows.start)
    last = min(end, rows.stop)
    if first < last:
        wanted = piece[(slice(first - begin, last - begin), *columns)]
        local[first - rows.start : last - rows.start].copy_(wanted)
