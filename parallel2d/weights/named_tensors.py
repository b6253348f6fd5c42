"""Tensors of a model and of its optimizer by canonical name, the same on every rank and layout."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from parallel2d.model_structure import canonical_name
from parallel2d.weights.optimizer_settings import plain_settings

SCALARS = (bool, int, float, str)


def reshard(model: nn.Module) -> None:
    """Frees gathered parameters (after a forward without backward), so that every parameter is the
    sharded one again."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Canonical name -> parameter or persistent buffer; a shared one once, under its first name."""
    found: dict[str, Tensor] = {canonical_name(name): p for name, p in model.named_parameters()}
    transient = {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        for name in module._non_persistent_buffers_set
    }
    for name, buffer in model.named_buffers():
        if name not in transient:
            found[canonical_name(name)] = buffer
    return found


def tied_names(model: nn.Module) -> dict[str, str]:
    """Further canonical names of shared parameters -> the name they are stored under."""
    first = {id(p): canonical_name(name) for name, p in model.named_parameters()}
    every = model.named_parameters(remove_duplicate=False)
    return {
        canonical_name(name): first[id(p)]
        for name, p in every
        if canonical_name(name) != first[id(p)]
    }


def trained_parameters(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Canonical name -> parameter, for those the optimizer steps, in the model's order."""
    known = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return {canonical_name(name): p for name, p in model.named_parameters() if id(p) in known}


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """``<key>/<parameter>`` -> optimizer state that is a tensor. Empty before the first step."""
    return {
        f"{key}/{name}": value
        for name, parameter in trained_parameters(model, optimizer).items()
        for key, value in sorted(optimizer.state.get(parameter, {}).items())
        if isinstance(value, Tensor)
    }


def describe_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The manifest's part: class, parameter groups by name with their settings, and state that is
    not tensors."""
    names = {id(p): name for name, p in trained_parameters(model, optimizer).items()}
    groups = [
        {
            "settings": {
                key: value for key, value in plain_settings(group).items() if _is_plain(value)
            },
            "parameters": [names[id(p)] for p in group["params"] if id(p) in names],
        }
        for group in optimizer.param_groups
    ]
    scalars: dict[str, dict[str, Any]] = {}
    for name, parameter in trained_parameters(model, optimizer).items():
        plain = {
            k: v for k, v in optimizer.state.get(parameter, {}).items() if isinstance(v, SCALARS)
        }
        if plain:
            scalars[name] = plain
    return {"class": type(optimizer).__name__, "groups": groups, "scalars": scalars}


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, SCALARS)
