"""Checks that all ranks hold the same model before it is sharded: its structure, and its
weights."""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import torch
from torch import Tensor, nn

from parallel2d.errors import ConfigError, first_five
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
            tied_to=first.setdefault(id(parameter), name),
            shape=tuple(parameter.shape),
            dtype=None,
            trained=parameter.requires_grad,
        )
    for name, buffer in model.named_buffers(remove_duplicate=False):
        found[name] = ParameterInfo(
            tied_to=name,
            shape=tuple(buffer.shape),
            dtype=buffer.dtype,
            trained=False,
        )
    return found


def check_same_structure(model: nn.Module) -> None:
    """Raises `ConfigError` when a rank's model has other parameters, shapes, ties or frozen
    parameters than rank 0's: sooner or later its collectives would wait for, or be filled with,
    something else. Collective."""
    own = parameters_in(model)
    # Names and shapes may be long, and are nearly always equal: digests are sent at first.
    digest = hashlib.sha256(repr(own).encode()).hexdigest()
    different = _ranks_unlike_rank0(digest)
    if not different:
        return
    # Every rank compares its model with rank 0's; all show what the first that differs has found.
    first = broadcast(own)
    found = all_gather(_differences(own, first))
    lines = found[different[0]]
    if not lines:
        lines = ["the same parameters in another order"]
    raise ConfigError(
        f"ranks {different} have another model than rank 0. On rank {different[0]}: "
        f"{first_five(lines)}"
    )


def _ranks_unlike_rank0(digest: str) -> list[int]:
    """The ranks with another ``digest`` than rank 0. Collective."""
    digests = all_gather(digest)
    different = []
    for rank, other in enumerate(digests):
        if other != digests[0]:
            different.append(rank)
    return different


def _differences(own: dict[str, ParameterInfo], first: dict[str, ParameterInfo]) -> list[str]:
    """One line per parameter or buffer that differs from that of ``first``, rank 0's model."""
    lines = []
    # In the order of rank 0, and then what it does not have.
    for name in {**first, **own}:
        line = _difference(name, own.get(name), first.get(name))
        if line:
            lines.append(line)
    return lines


def _difference(name: str, own: ParameterInfo | None, first: ParameterInfo | None) -> str:
    """How ``name`` differs from what rank 0 has; empty if it does not."""
    if own is None:
        return f"{name} is missing"
    if first is None:
        return f"{name} is not on rank 0"
    if own.shape != first.shape:
        return f"{name} has shape {own.shape}, not {first.shape}"
    if own.tied_to != first.tied_to:
        return f"{name} is {_tie(name, own)}, on rank 0 {_tie(name, first)}"
    if own.trained != first.trained:
        return f"{name} is {_training(own)}, on rank 0 {_training(first)}"
    if own.dtype != first.dtype:
        return f"{name} is {own.dtype}, on rank 0 {first.dtype}"
    return ""


def _tie(name: str, info: ParameterInfo) -> str:
    if info.tied_to == name:
        return "not tied"
    return f"tied to {info.tied_to}"


def _training(info: ParameterInfo) -> str:
    if info.trained:
        return "trained"
    return "frozen"


def check_equal_on_all_ranks(model: nn.Module) -> None:
    """Raises `ConfigError` when ranks hold different weights, which sharding would mix silently.
    Collective."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        text = f"{name} {tuple(parameter.shape)} {_sums(parameter.detach())}"
        digest.update(text.encode())
    different = _ranks_unlike_rank0(digest.hexdigest())
    if different:
        raise ConfigError(
            f"ranks {different} hold other weights than rank 0: build the model under the same "
            "torch.manual_seed on every rank, or under parallel2d.build_on_meta with seed="
        )


def _sums(data: Tensor) -> tuple[float, float]:
    """Of the values and of their squares, in 64 bits."""
    if data.is_complex():
        data = torch.view_as_real(data.resolve_conj())
    # Sums of narrower dtypes would overflow, or be too coarse to show a difference.
    wide = data.double() if data.is_floating_point() else data.long()
    return wide.sum().item(), wide.square().sum().item()
