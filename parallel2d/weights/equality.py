"""Checks that all ranks hold the same model before it is sharded: its structure, and its
weights."""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import torch
from torch import Tensor, nn

from parallel2d.errors import ConfigError
from parallel2d.exchange import all_gather, broadcast, sendable


@sendable
class ParameterInfo(NamedTuple):
    """What ranks must agree on about a parameter or buffer."""

    tied_to: str  # the first name of the same parameter: its own where it is not tied
    shape: tuple[int, ...]
    dtype: torch.dtype | None  # of buffers; parameters are cast alike
    trained: bool


def parameters_in(model: nn.Module) -> dict[str, ParameterInfo]:
    """Name of each parameter and buffer, tied ones under every name -> what ranks must agree on."""
    first: dict[int, str] = {}
    found: dict[str, ParameterInfo] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found[name] = ParameterInfo(
            first.setdefault(id(parameter), name),
            tuple(parameter.shape),
            None,
            parameter.requires_grad,
        )
    for name, buffer in model.named_buffers(remove_duplicate=False):
        found[name] = ParameterInfo(name, tuple(buffer.shape), buffer.dtype, False)
    return found


def check_same_structure(model: nn.Module) -> None:
    """Raises `ConfigError` when a rank's model has other parameters, shapes, ties or frozen
    parameters than rank 0's: sooner or later its collectives would wait for, or be filled with,
    something else. Collective."""
    own = parameters_in(model)
    digests = all_gather(hashlib.sha256(repr(own).encode()).hexdigest())
    different = [rank for rank, other in enumerate(digests) if other != digests[0]]
    if not different:
        return
    first = broadcast(own)
    told = all_gather(
        [_difference(name, own.get(name), first.get(name)) for name in {**first, **own}]
    )
    lines = [line for line in told[different[0]] if line] or [
        "the same parameters in another order"
    ]
    raise ConfigError(
        f"ranks {different} have another model than rank 0. On rank {different[0]}: "
        f"{'; '.join(lines[:5])}{' ...' if lines[5:] else ''}"
    )


def _difference(name: str, own: ParameterInfo | None, first: ParameterInfo | None) -> str:
    """What rank 0 has otherwise about ``name``; empty if nothing."""
    if own is None or first is None:
        return f"{name} is {'missing' if own is None else 'not on rank 0'}"
    if own.shape != first.shape:
        return f"{name} has shape {own.shape}, not {first.shape}"
    if own.tied_to != first.tied_to:
        ours, theirs = (
            f"tied to {tied}" if tied != name else "not tied"
            for tied in (own.tied_to, first.tied_to)
        )
        return f"{name} is {ours}, on rank 0 {theirs}"
    if own.trained != first.trained:
        ours, theirs = (
            "trained" if trained else "frozen" for trained in (own.trained, first.trained)
        )
        return f"{name} is {ours}, on rank 0 {theirs}"
    return f"{name} is {own.dtype}, on rank 0 {first.dtype}" if own.dtype != first.dtype else ""


def check_equal_on_all_ranks(model: nn.Module) -> None:
    """Raises `ConfigError` when ranks hold different weights, which sharding would mix silently.
    Collective."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        digest.update(f"{name} {tuple(parameter.shape)} {_sums(parameter.detach())}".encode())
    digests = all_gather(digest.hexdigest())
    different = [rank for rank, other in enumerate(digests) if other != digests[0]]
    if different:
        raise ConfigError(
            f"ranks {different} hold other weights than rank 0: build the model under the same "
            "torch.manual_seed on every "
            "rank, or under parallel2d.build_on_meta with seed="
        )


def _sums(data: Tensor) -> tuple[float, float]:
    """Of the values and of their squares, in 64 bits."""
    data = torch.view_as_real(data.resolve_conj()) if data.is_complex() else data
    data = data.double() if data.is_floating_point() else data.long()
    return data.sum().item(), data.square().sum().item()
