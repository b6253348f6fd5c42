"""States of model and optimizer in memory: whole or in each rank's parts, taken from a sharded
model and given back to one.

A parallelized model and its optimizer flow in and plain dicts flow out that ``load_state_dict`` of
the bare module and its optimizer take; and the other way round. One tensor travels at a time, so
the memory a device needs beside its shards is the largest tensor when a state is gathered, and one
piece of it when it is scattered. For states that should outlive the process use `Checkpointer`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from parallel2d.errors import ConfigError
from parallel2d.exchange import broadcast, sendable
from parallel2d.model_structure import canonical_name
from parallel2d.weights.geometry import copy_slice
from parallel2d.weights.loading import copy_part
from parallel2d.weights.named_tensors import describe_optimizer, model_tensors, reshard, tied_names
from parallel2d.weights.optimizer_settings import (
    Settings,
    match_settings,
    other_class,
    plain_settings,
    put_settings,
)
from parallel2d.weights.scatter import scatter_tensor

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
        key_by: how the optimizer's parameters are called: by canonical name, or by number, as
            ``torch.optim``'s own ``load_state_dict`` wants it; `rekey_optimizer_state` converts.

    ``state["model"]`` is what the bare module's ``load_state_dict`` takes: parameters and
    persistent buffers by canonical name. Gathered tensor by tensor: the peak beside what is kept is
    one whole tensor. Raises `ConfigError` for another ``key_by``.
    """
    if key_by not in ("name", "id"):
        raise ConfigError(f"key_by={key_by} is not one of name, id")
    keep = not rank0_only or _rank() == 0
    state: dict[str, Any] = {"model": _full_model(model, keep, cpu)}
    if optimizer is not None:
        whole = _optimizer_state(model, optimizer, lambda tensor: _gather(tensor, keep, cpu))
        state["optimizer"] = rekey_optimizer_state(whole, key="id") if key_by == "id" else whole
    return state if keep else {}


@torch.no_grad()
def sharded_state(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None, *, copy: bool = False
) -> dict[str, Any]:
    """``{"model": ..., "optimizer": ...}`` with this rank's parts, `DTensor`s where tensors are
    sharded. No communication.

    The tensors are the live ones, which the next step changes; ``copy=True`` copies them. The
    optimizer's parameters are called by canonical name.
    """
    reshard(model)

    def take(tensor: Tensor) -> Tensor:
        return tensor.detach().clone() if copy else tensor.detach()

    state: dict[str, Any] = {
        "model": {name: take(tensor) for name, tensor in model_tensors(model).items()}
    }
    if optimizer is not None:
        state["optimizer"] = _optimizer_state(model, optimizer, take)
    return state


@torch.no_grad()
def load_full_state(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    state: Mapping[str, Any] | None,
    *,
    from_rank0: bool = True,
    settings: bool = True,
) -> None:
    """Gives whole tensors to a model (and its optimizer), sharded or bare: what `full_state`
    returned, or plain state dicts. Collective.

    Args:
        optimizer: None: the model alone is loaded.
        state: ``{"model": state dict, "optimizer": state dict}``, the optimizer's called by name or
            by number. Rank 0 alone needs it (others may pass None or ``{}``) unless ``from_rank0``
            is false.
        from_rank0: rank 0's tensors are sent to the others piece by piece; False: every rank takes
            its part of its own, and nothing is sent.
        settings: parameter groups take those of the state (lr, betas, weight decay), as with
            torch's own ``load_state_dict``, which is what a scheduler of torch goes on from; False:
            they keep theirs.

    Optimizer state that does not exist yet is created. Raises `ConfigError` on every rank, before
    anything is written, when names, shapes or the class of the optimizer differ; with
    ``from_rank0=False`` on the ranks whose own state differs.
    """
    reshard(model)
    source = not from_rank0 or _rank() == 0
    given: Mapping[str, Any] = (state or {}) if source else {}
    problems: list[str] = []
    plan: list[tuple[str, str, Any]] = []
    optimizer_state: Mapping[str, Any] = {}
    groups: list[Settings] = []
    if source:
        problems = _model_problems(model, given)
        if optimizer is not None:
            optimizer_state, groups, found = _by_name(
                model, optimizer, given.get("optimizer"), settings
            )
            problems += found
            plan = [] if found else _plan(optimizer_state)
    if from_rank0 and dist.is_initialized():
        problems, plan, groups = broadcast((problems, plan, groups))
    if problems:
        raise ConfigError(
            "the whole state does not fit: "
            + "; ".join(problems[:5])
            + (" ..." if problems[5:] else "")
        )
    for name, tensor in model_tensors(model).items():
        _put(tensor, given["model"][name] if source else None, from_rank0)
    if optimizer is None:
        return
    if settings:
        put_settings(optimizer, groups)
    parameters = _named(model)
    for name, key, value in plan:
        entries = optimizer.state[parameters[name]]
        if not isinstance(value, _Whole):
            entries[key] = value
            continue
        if not isinstance(entries.get(key), Tensor):
            entries[key] = _new_entry(optimizer, parameters[name], key, value)
        if value.scalar is not None:
            entries[key].fill_(value.scalar)
        else:
            _put(entries[key], optimizer_state["state"][name][key] if source else None, from_rank0)


@torch.no_grad()
def load_sharded_state(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    state: Mapping[str, Any],
    *,
    settings: bool = True,
) -> None:
    """Gives back what `sharded_state` returned, on every rank, to a model on the same ranks;
    another layout of them is redistributed tensor by tensor. Collective where layouts differ.

    ``settings``: as for `load_full_state`. Raises `ConfigError` when names, shapes or the class of
    the optimizer differ.
    """
    reshard(model)
    problems = _model_problems(model, state)
    optimizer_state: Mapping[str, Any] = {}
    groups: list[Settings] = []
    if optimizer is not None:
        optimizer_state, groups, found = _by_name(
            model, optimizer, state.get("optimizer"), settings
        )
        problems += found
    if problems:
        raise ConfigError(
            "the sharded state does not fit: "
            + "; ".join(problems[:5])
            + (" ..." if problems[5:] else "")
        )
    for name, tensor in model_tensors(model).items():
        copy_part(tensor, state["model"][name])
    if optimizer is None:
        return
    if settings:
        put_settings(optimizer, groups)
    parameters = _named(model)
    for name, stored in optimizer_state["state"].items():
        entries = optimizer.state[parameters[name]]
        for key, value in stored.items():
            if not isinstance(value, Tensor):
                entries[key] = value
                continue
            if not isinstance(entries.get(key), Tensor):
                entries[key] = _new_entry(
                    optimizer, parameters[name], key, _Whole(value.shape, value.dtype, None)
                )
            copy_part(entries[key], value)


def rekey_optimizer_state(
    state: Mapping[str, Any], *, key: Key, names: list[str] | None = None
) -> dict[str, Any]:
    """An optimizer state called by names called by numbers instead (``key="id"``), or the other way
    round (``key="name"``).

    Numbers count parameters in the order of the groups. Going to names, ``names`` gives theirs in
    that order. Raises `ConfigError` when names and parameters do not match in number.
    """
    listed = _listed(state)
    if key == "name":
        if names is None or len(names) != len(listed):
            raise ConfigError(
                f"names must give the {len(listed)} parameters of the groups, got "
                f"{len(names or [])}"
            )
        new: dict[Any, Any] = dict(zip(listed, names, strict=True))
    else:
        new = {name: number for number, name in enumerate(listed)}
    groups = [
        {**group, "params": [new[p] for p in group["params"]]} for group in state["param_groups"]
    ]
    return {
        "state": {new[p]: entries for p, entries in state["state"].items()},
        "param_groups": groups,
    }


@sendable
@dataclass(frozen=True)
class _Whole:
    """Shape and dtype of an entry of optimizer state; a scalar comes with its value, so that no
    collective is needed for it."""

    shape: torch.Size
    dtype: torch.dtype
    scalar: float | None


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _named(model: nn.Module) -> dict[str, nn.Parameter]:
    return {canonical_name(name): parameter for name, parameter in model.named_parameters()}


def _listed(state: Mapping[str, Any]) -> list[Any]:
    return [parameter for group in state["param_groups"] for parameter in group["params"]]


def _gather(tensor: Tensor, keep: bool, cpu: bool) -> Tensor | None:
    """The whole tensor where it is kept, None elsewhere. Collective for a `DTensor`."""
    full = tensor.full_tensor().detach() if isinstance(tensor, DTensor) else tensor.detach()
    if not keep:
        return None
    moved = full.cpu() if cpu else full
    # With one rank, or unsharded, "whole" may be the live tensor itself.
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return (
        moved.clone()
        if moved.untyped_storage().data_ptr() == local.untyped_storage().data_ptr()
        else moved
    )


def _full_model(model: nn.Module, keep: bool, cpu: bool) -> dict[str, Tensor]:
    reshard(model)
    found: dict[str, Tensor] = {}
    for name, tensor in model_tensors(model).items():
        full = _gather(tensor, keep, cpu)
        if full is not None:
            found[name] = full
    if keep:
        found |= {name: found[first] for name, first in tied_names(model).items()}
    return found


def _optimizer_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, take: Any
) -> dict[str, Any]:
    described = describe_optimizer(model, optimizer)
    parameters = _named(model)
    state: dict[str, dict[str, Any]] = {}
    for group in described["groups"]:
        for name in group["parameters"]:
            entries = optimizer.state.get(parameters[name], {})
            taken = {k: take(v) if isinstance(v, Tensor) else v for k, v in entries.items()}
            if taken:
                state[name] = taken
    groups = [
        {**group["settings"], "params": list(group["parameters"])} for group in described["groups"]
    ]
    return {"state": state, "param_groups": groups}


def _model_problems(model: nn.Module, state: Mapping[str, Any]) -> list[str]:
    given: Mapping[str, Tensor] | None = state.get("model")
    if not isinstance(given, Mapping):
        bare = any(isinstance(value, Tensor) for value in state.values())
        return [
            "it has no model" + (': give a state dict as {"model": state_dict}' if bare else "")
        ]
    here = model_tensors(model)
    problems = [f"{name} is missing" for name in here if name not in given]
    problems += [
        f"{name} has shape {list(given[name].shape)}, not {list(tensor.shape)}"
        for name, tensor in here.items()
        if name in given and given[name].shape != tensor.shape
    ]
    known = {*here, *tied_names(model)}
    return problems + [f"{name} is not in the model" for name in given if name not in known]


def _by_name(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    given: Mapping[str, Any] | None,
    settings: bool,
) -> tuple[Mapping[str, Any], list[Settings], list[str]]:
    """The optimizer state called by names, its settings for each group here if they are wanted, and
    what is wrong with it."""
    if given is None:
        return {}, [], ["it has no optimizer"]
    groups = describe_optimizer(model, optimizer)["groups"]
    names = [name for group in groups for name in group["parameters"]]
    listed = _listed(given)
    if listed and all(isinstance(parameter, int) for parameter in listed):
        sizes, here = (
            [len(group["params"]) for group in given["param_groups"]],
            [len(group["parameters"]) for group in groups],
        )
        if sizes != here:
            problem = (
                f"its optimizer has groups of {sizes} parameters, this one of {here}; call "
                "them by name with rekey_optimizer_state"
            )
            return {}, [], [problem]
        given = rekey_optimizer_state(given, key="name", names=names)
    problems = [
        f"{name} is in its optimizer and not in this one"
        for name in given["state"]
        if name not in names
    ]
    parameters = _named(model)
    for name, entries in given["state"].items():
        for key, value in entries.items():
            present = (
                optimizer.state.get(parameters[name], {}).get(key) if name in parameters else None
            )
            if (
                isinstance(value, Tensor)
                and isinstance(present, Tensor)
                and present.shape != value.shape
            ):
                problems.append(
                    f"{key} of {name} has shape {list(value.shape)}, not {list(present.shape)}"
                )
    stored = [(plain_settings(group), group["params"]) for group in given["param_groups"]]
    listed_here = [group["parameters"] for group in groups]
    problems += other_class(optimizer, listed_here, stored)
    if not settings:
        return given, [], problems
    matched, found = match_settings(optimizer, listed_here, stored)
    return given, matched, problems + found


def _plan(state: Mapping[str, Any]) -> list[tuple[str, str, Any]]:
    """What rank 0 tells the others of its optimizer state: (name, key, `_Whole` or plain value)."""
    return [
        (
            name,
            key,
            _Whole(value.shape, value.dtype, value.item() if value.ndim == 0 else None)
            if isinstance(value, Tensor)
            else value,
        )
        for name, entries in state["state"].items()
        for key, value in entries.items()
    ]


def _new_entry(
    optimizer: torch.optim.Optimizer, parameter: Tensor, key: str, whole: _Whole
) -> Tensor:
    """An empty entry as the optimizer itself would make it: like the parameter, or a scalar beside
    it. Raises `ConfigError` for another shape: how it is split is known only to the optimizer."""
    if whole.shape == parameter.shape and key != "step":
        return torch.zeros_like(parameter, requires_grad=False)
    if len(whole.shape):
        raise ConfigError(
            f"{key} of shape {list(whole.shape)}: how it is split is unknown before the "
            "optimizer's first step"
        )
    on_device = any(
        bool(group.get("fused") or group.get("capturable"))
        for group in optimizer.param_groups
        if any(other is parameter for other in group["params"])
    )
    return torch.zeros(
        whole.shape, dtype=whole.dtype, device=parameter.device if on_device else "cpu"
    )


def _put(tensor: Tensor, full: Tensor | None, from_rank0: bool) -> None:
    """Fills ``tensor`` with this rank's part of ``full``, rank 0's or its own."""
    if from_rank0 and dist.is_initialized():
        scatter_tensor(tensor, full, 0)
    else:
        assert full is not None
        copy_slice(tensor, full)
