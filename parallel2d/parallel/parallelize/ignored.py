"""Parameters that are excluded from sharding: they stay whole, plain tensors on every rank.

[Note: ignored parameters are frozen] Nothing reduces the gradient of a parameter that is not
sharded: replicas would drift apart without an error. So only frozen parameters may be ignored. They
need no master copy, and are stored in the dtype that computes.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Mapping, Sequence

from torch import nn
from torch.distributed.tensor import DTensor

from parallel2d.base.device import current_device
from parallel2d.base.errors import ConfigError, first_five
from parallel2d.parallel.model_structure import fqn_of, near_names


def ignored_names(model: nn.Module, ignored: Sequence[str | nn.Module | nn.Parameter]) -> list[str]:
    """FQNs of the parameters that ``ignored`` chooses, all names of a tied one, in the
    model's order.

    A pattern (``*`` matches dots too) chooses the parameters or modules of that name, a module all
    that is below it. Raises `ConfigError` for an entry that chooses nothing, with near names, and
    when a chosen parameter is trainable.
    """
    every = model.named_parameters(remove_duplicate=False)
    named = {fqn_of(name): parameter for name, parameter in every}
    in_model = set(named.values())
    chosen: set[nn.Parameter] = set()
    for entry in ignored:
        if isinstance(entry, nn.Module):
            given = list(entry.parameters())
        elif isinstance(entry, nn.Parameter):
            given = [entry]
        else:
            given = _matching(model, named, entry)
        # A module or parameter may be given that is not part of this model.
        found = in_model.intersection(given)
        if not found:
            nothing = f"chooses no parameter of {type(model).__name__}"
            raise ConfigError(f"ignored: a {type(entry).__name__} {nothing}")
        chosen |= found
    names = [name for name, parameter in named.items() if parameter in chosen]
    trained = [name for name in names if named[name].requires_grad]
    if trained:
        verb = "are" if len(trained) > 1 else "is"
        raise ConfigError(
            f"ignored: {first_five(trained, ', ')} {verb} trainable, and nothing averages the "
            "gradient of a parameter that is not sharded: freeze it (requires_grad_(False)), or "
            "let it be sharded"
        )
    return names


def _matching(
    model: nn.Module, named: Mapping[str, nn.Parameter], pattern: str
) -> list[nn.Parameter]:
    """The parameters whose names match, and all those below the modules whose names match."""
    found = [named[name] for name in fnmatch.filter(named, pattern)]
    for name, module in model.named_modules():
        # The root's name is empty, and no pattern is meant for it.
        if name and fnmatch.fnmatchcase(fqn_of(name), pattern):
            found += module.parameters()
    if not found:
        near = near_names(pattern, list(named))
        nothing = f"chooses no parameter of {type(model).__name__}"
        raise ConfigError(f"ignored: pattern {pattern} {nothing}{near}")
    return found


def ignored_parameters(
    model: nn.Module, names: Collection[str], device_type: str
) -> set[nn.Parameter]:
    """The parameters of these names, moved to this rank's device, for `fully_shard` to leave alone.
    Raises `ConfigError` for one that the tensor plan has split."""
    found: set[nn.Parameter] = set()
    for name, parameter in model.named_parameters():
        if fqn_of(name) not in names:
            continue
        if isinstance(parameter, DTensor):
            raise ConfigError(
                f"ignored: {fqn_of(name)} is in the tensor plan, which splits or "
                "replicates it: choose one of both"
            )
        # On meta there is nothing to move; values come after sharding, on the right device.
        if not parameter.is_meta and parameter.device.type != device_type:
            # The object stays the same, because `fully_shard` looks for it by identity.
            parameter.data = parameter.data.to(current_device(device_type))
        found.add(parameter)
    return found
