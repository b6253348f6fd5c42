"""Parameters that are excluded from sharding: each rank holds the full parameter.

[Note: ignored parameters are frozen] The gradients of ignored parameters are not reduced, so the
ranks would diverge without an error if such a parameter were trained. Therefore only frozen
parameters may be ignored. Frozen parameters need no fp32 copy for an optimizer, and are stored in
the compute dtype.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Mapping, Sequence

from torch import nn
from torch.distributed.tensor import DTensor

from parallel2d.base.device import current_device
from parallel2d.base.errors import ConfigError, first_five
from parallel2d.parallel.model_structure import by_fqn, fqn_of, near_names


def ignored_names(model: nn.Module, ignored: Sequence[str | nn.Module | nn.Parameter]) -> list[str]:
    """Return the FQNs of the parameters that ``ignored`` selects, in the model's order.

    A tied parameter appears under all its names. A pattern (``*`` also matches dots) selects
    parameters and modules by name; a module selects all parameters in it. Raises `ConfigError` for
    an entry that selects no parameter (the message suggests similar names), and for a trainable
    parameter.
    """
    named = by_fqn(model.named_parameters(remove_duplicate=False))
    in_model = set(named.values())
    chosen: set[nn.Parameter] = set()
    for entry in ignored:
        if isinstance(entry, nn.Module):
            given = list(entry.parameters())
        elif isinstance(entry, nn.Parameter):
            given = [entry]
        else:
            given = _matching(model, named, entry)
        # A module or parameter in ``ignored`` may belong to another model.
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
            "do not ignore it"
        )
    return names


def _matching(
    model: nn.Module, named: Mapping[str, nn.Parameter], pattern: str
) -> list[nn.Parameter]:
    """Return the parameters that match ``pattern`` or are in a module that matches it."""
    found = []
    for name in fnmatch.filter(named, pattern):
        found.append(named[name])
    for name, module in model.named_modules():
        # Skip the root: its name is empty, and the pattern * must not select it.
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
    """Return the parameters with the FQNs ``names``, moved to this rank's device.

    `fully_shard` must ignore them. Raises `ConfigError` for a parameter in the tensor plan.
    """
    found: set[nn.Parameter] = set()
    for name, parameter in model.named_parameters():
        if fqn_of(name) not in names:
            continue
        if isinstance(parameter, DTensor):
            raise ConfigError(
                f"ignored: {fqn_of(name)} is in the tensor plan, which splits or "
                "replicates it: choose one of both"
            )
        # Parameters on meta get their storage on the right device after sharding.
        if not parameter.is_meta and parameter.device.type != device_type:
            # Assign `.data` to keep the parameter object, because `fully_shard` compares ignored
            # parameters by identity.
            parameter.data = parameter.data.to(current_device(device_type))
        found.add(parameter)
    return found
