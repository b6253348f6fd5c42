"""Parameters left out of sharding: chosen by pattern or module, they stay whole, plain tensors on
every rank.

A model and what `parallel2d.parallelize` was told to ignore flow in; canonical names flow out
before the transforms, and after them the set that `fully_shard` takes.

[Note: ignored parameters are frozen] Nothing reduces the gradient of a parameter that is not
sharded: replicas would drift apart without a word. So only frozen parameters may be ignored. They
need no master copy, and are stored in the dtype that computes.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Collection, Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from parallel2d.errors import ConfigError
from parallel2d.model_structure import canonical_name


def ignored_names(model: nn.Module, ignored: Sequence[str | nn.Module | nn.Parameter]) -> list[str]:
    """Canonical names of the parameters that ``ignored`` chooses, all names of a tied one, in the
    model's order.

    A pattern (``*`` matches dots too) chooses the parameters or modules of that name, a module all
    that is below it. Raises `ConfigError` for an entry that chooses nothing, with near names, and
    when a chosen parameter is trainable.
    """
    named = {canonical_name(name): p for name, p in model.named_parameters(remove_duplicate=False)}
    chosen: set[int] = set()
    for entry in ignored:
        found = {id(parameter) for parameter in _chosen_by(model, named, entry)} & {
            id(p) for p in named.values()
        }
        if not found:
            near = difflib.get_close_matches(
                str(entry).replace("*", "").strip("."), named, n=3, cutoff=0.4
            )
            what = f"pattern {entry}" if isinstance(entry, str) else f"a {type(entry).__name__}"
            raise ConfigError(
                f"ignored: {what} chooses no parameter of {type(model).__name__}"
                + (f"; near: {', '.join(near)}" if isinstance(entry, str) and near else "")
            )
        chosen |= found
    names = [name for name, parameter in named.items() if id(parameter) in chosen]
    trained = [name for name in names if named[name].requires_grad]
    if trained:
        raise ConfigError(
            f"ignored: {', '.join(trained[:3])}{' ...' if trained[3:] else ''} "
            f"{'are' if trained[1:] else 'is'} trainable, and nothing "
            "averages the gradient of a parameter that is not sharded: freeze it "
            "(requires_grad_(False)), or let it be sharded"
        )
    return names


def _chosen_by(
    model: nn.Module, named: dict[str, nn.Parameter], entry: str | nn.Module | nn.Parameter
) -> list[nn.Parameter]:
    if isinstance(entry, nn.Module):
        return list(entry.parameters())
    if isinstance(entry, nn.Parameter):
        return [entry]
    found = [parameter for name, parameter in named.items() if fnmatch.fnmatchcase(name, entry)]
    for name, module in model.named_modules():
        if name and fnmatch.fnmatchcase(canonical_name(name), entry):
            found += module.parameters()
    return found


def cast_ignored(
    model: nn.Module, names: Collection[str], dtype: torch.dtype, fp32: Collection[int]
) -> None:
    """Stores the named parameters in ``dtype``, those of the modules with ids ``fp32`` in fp32."""
    tied: dict[int, nn.Parameter] = {}
    for prefix, module in model.named_modules():
        for attribute, parameter in module._parameters.items():
            name = canonical_name(f"{prefix}.{attribute}" if prefix else attribute)
            if parameter is None or name not in names or not parameter.is_floating_point():
                continue
            if id(parameter) not in tied:
                wanted = torch.promote_types(dtype, torch.float32) if id(module) in fp32 else dtype
                tied[id(parameter)] = nn.Parameter(
                    parameter.detach().to(wanted), requires_grad=False
                )
            module._parameters[attribute] = tied[id(parameter)]


def ignored_parameters(
    model: nn.Module, names: Collection[str], device_type: str
) -> set[nn.Parameter]:
    """What `fully_shard` is to leave alone, moved to this rank's device. Raises `ConfigError` for
    one that the tensor plan has split."""
    found: set[nn.Parameter] = set()
    for name, parameter in model.named_parameters():
        if canonical_name(name) not in names:
            continue
        if isinstance(parameter, DTensor):
            raise ConfigError(
                f"ignored: {canonical_name(name)} is in the tensor plan, which splits or "
                "replicates it: choose one of both"
            )
        if not parameter.is_meta and parameter.device.type != device_type:
            parameter.data = parameter.data.to(
                torch.device(device_type, torch.accelerator.current_device_index())
            )
        found.add(parameter)
    return found
