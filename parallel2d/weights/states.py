"""The state of a sharded model and its optimizer in memory: whole by `full_state`, in each rank's
parts by `sharded_state`.

Whole tensors are gathered one at a time, so a device needs memory for the largest tensor beside its
shards. `parallel2d.weights.loading` loads such states again; for states that should outlive the
process use `Checkpointer`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel2d.errors import ConfigError
from parallel2d.weights.named_tensors import (
    describe_optimizer,
    model_tensors,
    reshard,
    tied_names,
    updated_by_name,
)
from parallel2d.weights.whole_tensors import gather_tensor

Key = Literal["name", "id"]


@torch.no_grad()
def full_state(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    rank0_only: bool = True,
    cpu: bool = True,
    key_by: Key = "name",
) -> dict[str, Any]:
    """``{"model": ..., "optimizer": ...}`` with whole tensors; the latter only where ``optimizer``
    is given. Collective.

    Args:
        rank0_only: the other ranks get an empty dict and keep nothing.
        cpu: each tensor is moved to CPU memory as soon as it is whole.
        key_by: how the optimizer's parameters are called: by FQN, or by number, as
            ``torch.optim``'s own ``load_state_dict`` wants it; `rekey_optimizer_state` converts.

    ``state["model"]`` is what the bare module's ``load_state_dict`` takes: parameters and
    persistent buffers by FQN. Gathered tensor by tensor: the peak beside what is kept is
    one whole tensor. Raises `ConfigError` for another ``key_by``.
    """
    if key_by not in ("name", "id"):
        raise ConfigError(f"key_by={key_by} is not one of name, id")
    keep = not (rank0_only and dist.is_initialized()) or dist.get_rank() == 0

    def gather(tensor: Tensor) -> Tensor | None:
        return gather_tensor(tensor, keep=keep, cpu=cpu)

    # Gathering is collective: ranks that keep nothing go through all of it too.
    state = _state(model, optimizer, gather)
    if not keep:
        return {}
    # A bare module's `load_state_dict` expects a tied parameter under each of its names.
    for name, first in tied_names(model).items():
        state["model"][name] = state["model"][first]
    if optimizer is not None and key_by == "id":
        state["optimizer"] = rekey_optimizer_state(state["optimizer"], key="id")
    return state


@torch.no_grad()
def sharded_state(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None, *, copy: bool = False
) -> dict[str, Any]:
    """``{"model": ..., "optimizer": ...}`` with this rank's parts, `DTensor`s where tensors are
    sharded. No communication.

    The tensors are the live ones, which the next step changes; ``copy=True`` copies them. The
    optimizer's parameters are called by FQN.
    """

    def take(tensor: Tensor) -> Tensor:
        return tensor.detach().clone() if copy else tensor.detach()

    return _state(model, optimizer, take)


def rekey_optimizer_state(
    state: Mapping[str, Any], *, key: Key, names: list[str] | None = None
) -> dict[str, Any]:
    """An optimizer state whose parameters are called by name, called by number instead
    (``key="id"``), or the other way round (``key="name"``).

    Numbers count parameters in the order of the groups. Going to names, ``names`` gives theirs in
    that order. Raises `ConfigError` when names and parameters do not match in number.
    """
    old = parameters_of_groups(state)
    # In torch, the number of a parameter is its position.
    new: Sequence[Any] = range(len(old))
    if key == "name":
        if names is None or len(names) != len(old):
            raise ConfigError(
                f"names must give the {len(old)} parameters of the groups, got {len(names or [])}"
            )
        new = names
    rekeyed = dict(zip(old, new, strict=True))
    groups = []
    for group in state["param_groups"]:
        parameters = [rekeyed[parameter] for parameter in group["params"]]
        groups.append({**group, "params": parameters})
    # Parameters without state are in groups alone.
    state_of = {rekeyed[parameter]: entries for parameter, entries in state["state"].items()}
    return {"state": state_of, "param_groups": groups}


def parameters_of_groups(state: Mapping[str, Any]) -> list[Any]:
    """Names or numbers of the parameters of an optimizer state, in the order of its groups."""
    return list(chain.from_iterable(group["params"] for group in state["param_groups"]))


def _state(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    take: Callable[[Tensor], Tensor | None],
) -> dict[str, Any]:
    """``{"model": ..., "optimizer": ...}`` by FQN, with ``take`` of each tensor."""
    # After a forward without backward, some parameters may still be gathered.
    reshard(model)
    tensors = {name: take(tensor) for name, tensor in model_tensors(model).items()}
    state: dict[str, Any] = {"model": tensors}
    if optimizer is not None:
        state["optimizer"] = _optimizer_state(model, optimizer, take)
    return state


def _optimizer_state(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    take: Callable[[Tensor], Tensor | None],
) -> dict[str, Any]:
    parameters = updated_by_name(model)
    state: dict[str, dict[str, Any]] = {}
    groups: list[dict[str, Any]] = []
    for group in describe_optimizer(model, optimizer)["groups"]:
        groups.append({**group["settings"], "params": list(group["parameters"])})
        for name in group["parameters"]:
            entries = optimizer.state.get(parameters[name])
            # Before the first step, and where a parameter got no gradient, there is no state, and
            # torch's own `state_dict` does not list the parameter either.
            if entries:
                state[name] = _taken(entries, take)
    return {"state": state, "param_groups": groups}


def _taken(
    entries: Mapping[str, Any],
    take: Callable[[Tensor], Tensor | None],
) -> dict[str, Any]:
    """``entries`` with ``take`` of each tensor; plain values, as some optimizers keep, as they
    are."""
    taken = dict(entries)
    for key, value in entries.items():
        if isinstance(value, Tensor):
            taken[key] = take(value)
    return taken
