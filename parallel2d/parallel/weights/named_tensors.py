"""Tensors of a model and its optimizer by fully qualified name (FQN).

[Note: master values] With some synchronization methods the parameters are not the values to save.
With ``sync=diloco`` each replica has different parameters, and with split updates in bf16 all
replicas compute with rounded parameters. These methods store the values to save in addition to the
parameters, as master values (`MasterValues`): the outer parameters, or unrounded parameters.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from itertools import chain
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from parallel2d.base.device import preserve_rng_states
from parallel2d.base.errors import ConfigError
from parallel2d.parallel.model_structure import (
    by_fqn,
    fqn_of,
    join_names,
    names_by_id,
    updated_as,
)
from parallel2d.parallel.weights.optimizer_settings import plain_settings

SCALARS = bool | int | float | str

# Attributes of all modules of a model, and of the model only
_MASTERS = "_parallel2d_masters"
_MASTERS_OF = "_parallel2d_masters_of"


class MasterValues(Protocol):
    """The master values of one model. See [Note: master values]."""

    replicas_differ: bool
    """True if each replica has different parameters."""

    def masters(self) -> Mapping[str, Tensor]:
        """Return the master values by FQN, after taking over writes to parameters."""

    def masters_were_loaded(self) -> None:
        """Set the parameters from loaded master values. Collective."""

    def parameters_were_loaded(self) -> None:
        """Set the master values from loaded parameters."""

    def parameters_were_changed(self) -> None:
        """Update the master values after code other than the optimizer has changed parameters."""

    def as_parameters(self) -> AbstractContextManager[None]:
        """Make the master values equal to the parameters inside of this context.

        A state that is saved inside then contains the parameters.
        """


def register_masters(model: nn.Module, masters: MasterValues) -> None:
    """Register ``masters`` as the master values of ``model``."""
    vars(model).setdefault(_MASTERS_OF, []).append(masters)
    # Register on all modules, because a function may get a submodule and change its parameters.
    for module in model.modules():
        vars(module).setdefault(_MASTERS, []).append(masters)
    model.register_load_state_dict_post_hook(lambda *_: masters.parameters_were_loaded())


def masters_in(model: nn.Module) -> list[MasterValues]:
    """Return the `MasterValues` that concern ``model``, also the `MasterValues` of the parallelized
    model that contains ``model``, and of parallelized models inside of ``model``."""
    found = chain.from_iterable(vars(module).get(_MASTERS, []) for module in model.modules())
    return list({id(masters): masters for masters in found}.values())


def masters_were_loaded(model: nn.Module) -> None:
    """Set the parameters from master values that a load has written. Collective."""
    for masters in masters_in(model):
        masters.masters_were_loaded()


_meetings: weakref.WeakKeyDictionary[nn.Module, weakref.WeakMethod[Callable[[str], None]]] = (
    weakref.WeakKeyDictionary()
)


def register_meeting(model: nn.Module, meeting: Callable[[str], None]) -> None:
    """Make `meet` call the method ``meeting`` for ``model`` and each of its modules."""
    for module in model.modules():
        _meetings[module] = weakref.WeakMethod(meeting)


def meet(model: nn.Module, point: str) -> None:
    """Wait until all ranks that share parameters of ``model`` have reached ``point``.

    See [Note: one order of collectives]. Collective. Raises `ConfigError` if a rank is at another
    point.
    """
    found = dict.fromkeys(_meetings[each]() for each in model.modules() if each in _meetings)
    for meeting in found:
        if meeting is not None:
            meeting(point)


_parts: weakref.WeakKeyDictionary[nn.Module, dist.ProcessGroup] = weakref.WeakKeyDictionary()


def register_part(model: nn.Module, part: dist.ProcessGroup | None) -> None:
    """Make `part_of` return ``part`` for ``model`` and each of its modules."""
    if part is not None:
        _parts.update(dict.fromkeys(model.modules(), part))


def part_of(model: nn.Module) -> dist.ProcessGroup | None:
    """Return the process group of the ranks in the mesh of ``model``; None if these are all
    ranks."""
    return next((_parts[module] for module in model.modules() if module in _parts), None)


def reshard(model: nn.Module) -> None:
    """Free unsharded parameters after a forward without backward, and restore the sharded
    parameters."""
    for module in model.modules():
        # `reshard` is not recursive: each module frees the parameters of its own group.
        if isinstance(module, FSDPModule):
            module.reshard()


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Context for forwards of ``model`` in evaluation mode and without gradients.

    At the end, the modes of the modules and the random generators are restored, and unsharded
    parameters are freed.
    """
    modes = {}
    for module in model.modules():
        modes[module] = module.training
    model.eval()
    try:
        with torch.no_grad(), preserve_rng_states():
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode
        reshard(model)


@contextmanager
@torch.no_grad()  # applies to the code of this function, not to the body of the context
def equal(pairs: Iterable[tuple[Tensor, Tensor]]) -> Iterator[None]:
    """Give the first tensor of each pair the values of the second, inside of this context.

    Needs the memory of a copy of the first tensors.
    """
    kept = []
    for tensor, shown in pairs:
        kept.append((tensor, tensor.clone(), shown))
    try:
        for tensor, _, shown in kept:
            tensor.copy_(shown)
        yield
    finally:
        for tensor, before, _ in kept:
            tensor.copy_(before)


def refuse_extra_state(model: nn.Module, what: str) -> None:
    """Raise `ConfigError` if a module of ``model`` defines ``get_extra_state``.

    The operation ``what`` would lose this state.
    """
    for name, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            raise ConfigError(
                f"{what}: {fqn_of(name) or 'the model'} has extra state (get_extra_state), which "
                "would be lost: keep it in buffers, or save it beside the state and omit the method"
            )


def custom_hooks(model: nn.Module, attribute: str) -> list[str]:
    """Return the FQNs of the modules with hooks that neither torch nor this package has registered.

    ``attribute`` is the attribute with the hooks, such as ``_state_dict_hooks``; torch has no
    public name for it.
    """
    found = []
    for name, module in model.named_modules():
        for hook in getattr(module, attribute).values():
            # torch wraps hooks of `register_load_state_dict_pre_hook` in an object.
            function = getattr(hook, "hook", hook)
            owner = getattr(function, "__module__", None) or ""
            if owner.partition(".")[0] not in ("torch", "parallel2d", "functools"):
                found.append(fqn_of(name) or "the model")
    return list(dict.fromkeys(found))


def parameters_by_name(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return a dict of parameters by FQN. A tied parameter is listed once, under its first name."""
    return by_fqn(model.named_parameters())


def all_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return a dict of parameters and buffers by FQN. A tied parameter is under all its names."""
    parameters = model.named_parameters(remove_duplicate=False)
    return by_fqn(chain(parameters, model.named_buffers(remove_duplicate=False)))


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors to save and load, by FQN.

    The tensors are the parameters (or their master values) and the persistent buffers. A tied
    parameter is listed once, under its first name.
    """
    found: dict[str, Tensor] = {**parameters_by_name(model)}
    transient: set[str] = set()
    for prefix, module in model.named_modules():
        # ``model`` may contain several parallelized models.
        for masters in vars(module).get(_MASTERS_OF, []):
            for name, master in masters.masters().items():
                found[join_names(fqn_of(prefix), name)] = master
        # torch has no public name for this set of names.
        transient.update(join_names(prefix, name) for name in module._non_persistent_buffers_set)
    for name, buffer in model.named_buffers():
        if name not in transient:
            found[fqn_of(name)] = buffer
    return found


def tied_names(model: nn.Module) -> dict[str, str]:
    """Map each further FQN of a tied parameter to its first FQN, under which it is stored."""
    return {name: fqn_of(first) for name, first in by_fqn(ties_of(model).items()).items()}


def ties_of(model: nn.Module) -> dict[str, str]:
    """Return `tied_names` with the names of torch instead of FQNs: with prefixes of wrappers."""
    first = names_by_id(model.named_parameters())
    found: dict[str, str] = {}
    for name, each in model.named_parameters(remove_duplicate=False):
        if name != first[id(each)]:
            found[name] = first[id(each)]
    return found


def stepped_by(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Return the parameters of all groups of ``optimizer``."""
    return chain.from_iterable(group["params"] for group in optimizer.param_groups)


def updated_by_name(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the tensors that an optimizer updates, by FQN; see `model_structure.updated_as`."""
    found = parameters_by_name(model)
    return dict(zip(found, map(updated_as, found.values()), strict=True))


def trained_parameters(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the tensors that ``optimizer`` updates, by FQN, in the order of the model.

    The tensors are parameters, or with ``strategy=hybrid_full`` the rows that this replica owns.
    """
    stepped = set(map(id, stepped_by(optimizer)))
    # The order of the groups may differ between runs; the model's order does not.
    parameters: dict[str, Tensor] = {}
    for name, each in updated_by_name(model).items():
        if id(each) in stepped:
            parameters[name] = each
    return parameters


def join_optimizers(optimizers: Mapping[str, torch.optim.Optimizer]) -> torch.optim.Optimizer:
    """Combine several optimizers into one object for states and checkpoints.

    The object shares the parameter groups and the state of the optimizers.
    """
    groups = list(chain.from_iterable(each.param_groups for each in optimizers.values()))
    state: dict[Tensor, Any] = {}
    for optimizer in optimizers.values():
        spread_state(optimizer)
        # Indexing creates missing entries, so that a load fills the state of the optimizer itself.
        state |= {parameter: optimizer.state[parameter] for parameter in stepped_by(optimizer)}
    # The name appears in states, which are compared by class name.
    name = "+".join(type(each).__name__ for each in optimizers.values())
    attributes: dict[str, Any] = {"param_groups": groups, "state": state}
    if any(hasattr(each, "spread_state") for each in optimizers.values()):
        # `new_state_tensor` looks for this attribute. The calls above have already sent the state.
        attributes["spread_state"] = staticmethod(lambda: None)
    joined: Any = type(name, (), attributes)
    return joined()


def spread_state(optimizer: torch.optim.Optimizer) -> None:
    """Send the state of ``optimizer`` to ranks that do not have it, before the state is read.

    The call has an effect only for optimizers of `parallel2d.whole_matrices`, whose state is on
    some ranks only. For these optimizers the call is collective.
    """
    spread = getattr(optimizer, "spread_state", None)
    if spread is not None:
        spread()


def drop_state(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, Tensor],
    loaded: Mapping[str, Iterable[str]],
) -> None:
    """Delete optimizer state that the following load does not replace.

    Args:
        optimizer: the optimizer.
        parameters: parameters with loaded state, by name.
        loaded: keys of the loaded state, by name.
    """
    forget = getattr(optimizer, "forget_state", None)
    if forget is not None:
        forget(parameters.values())
    for name, parameter in parameters.items():
        # Change the entries in place, because `join_optimizers` shares the entries of its
        # optimizers.
        entries = optimizer.state.get(parameter, {})
        for key in entries.keys() - set(loaded.get(name, ())):
            del entries[key]
        if not entries and isinstance(optimizer, torch.optim.Optimizer):
            optimizer.state.pop(parameter, None)


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the tensors of the optimizer state by ``<key>/<FQN>``; empty before the first step."""
    found: dict[str, Tensor] = {}
    for name, parameter in trained_parameters(model, optimizer).items():
        # `get`, because indexing the state of an optimizer creates an entry.
        entries = optimizer.state.get(parameter, {})
        # Sort, so that every rank has the same order, also after a restore.
        for key, value in sorted(entries.items()):
            # `describe_optimizer` returns other values, such as a step count.
            if isinstance(value, Tensor):
                found[f"{key}/{name}"] = value
    return found


def describe_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the entry of the optimizer for the manifest of a checkpoint.

    The entry has the class, the settings and FQNs of each parameter group, and the state other than
    tensors.
    """
    names: dict[int, str] = {}
    scalars: dict[str, dict[str, Any]] = {}
    for name, parameter in trained_parameters(model, optimizer).items():
        names[id(parameter)] = name
        entries = optimizer.state.get(parameter, {})
        # `optimizer_tensors` returns the tensors; other types are not saved.
        plain = {}
        for key, value in entries.items():
            if isinstance(value, SCALARS):
                plain[key] = value
        if plain:
            scalars[name] = plain
    groups = []
    for group in optimizer.param_groups:
        settings = plain_settings(group)
        # Omit settings that a manifest cannot contain, such as a tensor of several values.
        kept = {}
        for key, value in settings.items():
            if _is_plain(value):
                kept[key] = value
        # An optimizer may hold parameters of other models.
        listed = filter(None, [names.get(id(each)) for each in group["params"]])
        groups.append({"settings": kept, "parameters": list(listed)})
    return {"class": type(optimizer).__name__, "groups": groups, "scalars": scalars}


def _is_plain(value: Any) -> bool:
    """Return True if ``value`` consists of None, scalars, and lists and tuples of them."""
    # Lists and tuples, such as the betas of Adam.
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return isinstance(value, SCALARS | None)
