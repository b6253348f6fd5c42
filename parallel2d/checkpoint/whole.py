"""Whole states in memory: gathered from a sharded model and optimizer, given back to one, re-keyed between
names and numbers.

A parallelized model and its optimizer flow in and plain dicts flow out that ``load_state_dict`` of the bare
module and its optimizer take; and the other way round, from rank 0 alone. One tensor travels at a time, so
the memory a device needs beside its shards is the largest tensor. For states that should outlive the process
use `Checkpointer`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from parallel2d.checkpoint.geometry import local_region
from parallel2d.checkpoint.state import describe_optimizer, model_tensors, reshard, tied_names
from parallel2d.config import ConfigError
from parallel2d.parallelize.structure import canonical_name

Key = Literal["name", "id"]


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _gather(tensor: Tensor, keep: bool, cpu: bool) -> Tensor | None:
    """The whole tensor where it is kept, None elsewhere. Collective for a `DTensor`."""
    full = tensor.full_tensor().detach() if isinstance(tensor, DTensor) else tensor.detach().clone()
    if not keep:
        return None
    return full.cpu() if cpu else full


@torch.no_grad()
def full_model_state(model: nn.Module, *, rank0_only: bool = True, cpu: bool = True) -> dict[str, Tensor]:
    """Canonical name -> whole parameter or persistent buffer, as the bare module's ``load_state_dict`` takes
    it. Collective.

    Gathered tensor by tensor, each moved to CPU as soon as it is whole (``cpu``). With ``rank0_only`` the
    other ranks get an empty dict and keep nothing.
    """
    reshard(model)
    keep = not rank0_only or _rank() == 0
    found: dict[str, Tensor] = {}
    for name, tensor in model_tensors(model).items():
        full = _gather(tensor, keep, cpu)
        if full is not None:
            found[name] = full
    if keep:
        found |= {name: found[first] for name, first in tied_names(model).items()}
    return found


@torch.no_grad()
def full_optimizer_state(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    key: Key = "name",
    rank0_only: bool = True,
    cpu: bool = True,
) -> dict[str, Any]:
    """``{"state": ..., "param_groups": ...}`` with whole tensors, parameters called by canonical name or,
    with ``key="id"``, by number as PyTorch does. Collective. An empty dict where ``rank0_only`` keeps
    nothing."""
    keep = not rank0_only or _rank() == 0
    described = describe_optimizer(model, optimizer)
    parameters = {canonical_name(name): p for name, p in model.named_parameters()}
    state: dict[str, dict[str, Any]] = {}
    for group in described["groups"]:
        for name in group["parameters"]:
            entries = optimizer.state.get(parameters[name], {})
            whole = {k: _gather(v, keep, cpu) if isinstance(v, Tensor) else v for k, v in entries.items()}
            if whole:
                state[name] = whole
    if not keep:
        return {}
    groups = [{**group["settings"], "params": list(group["parameters"])} for group in described["groups"]]
    result = {"state": state, "param_groups": groups}
    return rekey_optimizer_state(result, key="id") if key == "id" else result


def rekey_optimizer_state(state: Mapping[str, Any], *, key: Key, names: list[str] | None = None) -> dict[str, Any]:
    """An optimizer state called by names called by numbers instead (``key="id"``), or the other way round
    (``key="name"``).

    Numbers count parameters in the order of the groups. Going to names, ``names`` gives theirs in that order.
    Raises `ConfigError` when names and parameters do not match in number.
    """
    listed = [parameter for group in state["param_groups"] for parameter in group["params"]]
    if key == "name":
        if names is None or len(names) != len(listed):
            raise ConfigError(f"names must give the {len(listed)} parameters of the groups, got {len(names or [])}")
        new: dict[Any, Any] = dict(zip(listed, names, strict=True))
    else:
        new = {name: number for number, name in enumerate(listed)}
    groups = [{**group, "params": [new[p] for p in group["params"]]} for group in state["param_groups"]]
    return {"state": {new[p]: entries for p, entries in state["state"].items()}, "param_groups": groups}


@torch.no_grad()
def load_full_model_state(model: nn.Module, state: Mapping[str, Tensor] | None) -> None:
    """Gives rank 0's whole tensors to a sharded model, each rank its part. Collective.

    ``state`` is needed on rank 0 only; others may pass None. Raises `ConfigError` on every rank when names or
    shapes differ.
    """
    reshard(model)
    here = model_tensors(model)
    problem = None
    if _rank() == 0:
        wrong = [name for name, tensor in here.items() if state is None or name not in state or state[name].shape != tensor.shape]
        if wrong:
            problem = f"the whole state does not fit: {', '.join(wrong[:5])}{' ...' if wrong[5:] else ''}"
    _agree(problem)
    for name, tensor in here.items():
        _scatter(tensor, state[name] if state is not None and _rank() == 0 else None)


@torch.no_grad()
def load_full_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Any] | None) -> None:
    """Gives rank 0's whole optimizer state, called by name, to the optimizer of a sharded model. Collective.

    Creates state that does not exist yet; groups keep their settings. ``state`` is needed on rank 0 only.
    Raises `ConfigError` on every rank when it names parameters that are not here.
    """
    parameters = {canonical_name(name): p for name, p in model.named_parameters()}
    plan: list[tuple[str, str, Any]] = []
    problem = None
    if _rank() == 0 and state is not None:
        unknown = [name for name in state["state"] if name not in parameters]
        if unknown:
            problem = f"the whole optimizer state names parameters that are not here: {unknown[:5]}"
        for name, entries in state["state"].items():
            for key, value in entries.items():
                plan.append((name, key, ("tensor", value.shape, value.dtype) if isinstance(value, Tensor) else value))
    _agree(problem)
    if dist.is_initialized():
        box = [plan]
        dist.broadcast_object_list(box, src=0)
        plan = box[0]
    on_device = {
        id(p): bool(group.get("fused") or group.get("capturable")) for group in optimizer.param_groups for p in group["params"]
    }
    for name, key, value in plan:
        parameter = parameters[name]
        entries = optimizer.state[parameter]
        if not (isinstance(value, tuple) and value and value[0] == "tensor"):
            entries[key] = value
            continue
        _, shape, dtype = value
        if not isinstance(entries.get(key), Tensor):
            like = shape == parameter.shape and key != "step"
            device = parameter.device if on_device.get(id(parameter)) else torch.device("cpu")
            entries[key] = torch.zeros_like(parameter) if like else torch.zeros(shape, dtype=dtype, device=device)
        _scatter(entries[key], state["state"][name][key] if state is not None and _rank() == 0 else None)


def _agree(problem: str | None) -> None:
    if dist.is_initialized():
        box = [problem]
        dist.broadcast_object_list(box, src=0)
        problem = box[0]
    if problem is not None:
        raise ConfigError(problem)


def _scatter(tensor: Tensor, full: Tensor | None) -> None:
    """Fills ``tensor`` with this rank's rectangle of rank 0's ``full``; one whole tensor is held
    meanwhile."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    device = local.device
    if dist.is_initialized() and dist.get_backend() == "nccl":
        device = torch.device("cuda", torch.cuda.current_device())
    if full is None:
        whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    else:
        whole = full.to(device=device, dtype=tensor.dtype).contiguous()
    if dist.is_initialized():
        dist.broadcast(whole, src=0)
    region = local_region(tensor)
    if region.numel:
        index = tuple(slice(o, o + n) for o, n in zip(region.offsets, region.lengths, strict=True))
        local.detach().copy_(whole[index].reshape(local.shape))
