"""Tensors of a model and of its optimizer by fully qualified name (FQN), the same on every layout.

[Note: master values] Some methods of synchronization compute with other values than those that a
run is about: with ``sync=diloco`` each replica has its own parameters, with split updates sent in
bf16 all replicas compute with rounded ones. What the run is about are master values, kept by the
method beside the parameters (`MasterValues`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from parallel2d.base.errors import ConfigError
from parallel2d.parallel.model_structure import fqn_of, join_names, updated_as
from parallel2d.parallel.weights.optimizer_settings import plain_settings

SCALARS = bool | int | float | str

# Attributes of modules: of all modules of a model, and of the model itself
_MASTERS = "_parallel2d_masters"
_MASTERS_OF = "_parallel2d_masters_of"


class MasterValues(Protocol):
    """The master values of one model. See [Note: master values]."""

    replicas_differ: bool
    """Whether each replica has parameters of its own."""

    def masters(self) -> Mapping[str, Tensor]:
        """By FQN of the parameter, for those that have one; with what was written to parameters."""

    def masters_were_loaded(self) -> None:
        """Makes the parameters what the master values imply. Collective."""

    def parameters_were_loaded(self) -> None:
        """Makes the master values equal to the parameters."""

    def parameters_were_changed(self) -> None:
        """Takes over parameters that something other than the optimizer has changed."""

    def as_parameters(self) -> AbstractContextManager[None]:
        """Inside, they are equal to the parameters, so that these are saved."""


def register_masters(model: nn.Module, masters: MasterValues) -> None:
    """Makes ``masters`` the master values of ``model``."""
    vars(model).setdefault(_MASTERS_OF, []).append(masters)
    # A change through any module of the model must reach them.
    for module in model.modules():
        vars(module).setdefault(_MASTERS, []).append(masters)
    model.register_load_state_dict_post_hook(lambda *_: masters.parameters_were_loaded())


def masters_in(model: nn.Module) -> list[MasterValues]:
    """Master values of ``model``, of the model that it is a part of, and of models inside it."""
    found = chain.from_iterable(vars(module).get(_MASTERS, []) for module in model.modules())
    return list({id(masters): masters for masters in found}.values())


def masters_were_loaded(model: nn.Module) -> None:
    """After `model_tensors` were written to: parameters follow their master values. Collective."""
    for masters in masters_in(model):
        masters.masters_were_loaded()


_meetings: weakref.WeakKeyDictionary[nn.Module, weakref.WeakMethod[Callable[[str], None]]] = (
    weakref.WeakKeyDictionary()
)


def register_meeting(model: nn.Module, meeting: Callable[[str], None]) -> None:
    """Have `meet` call ``meeting``, a method, for ``model`` and each of its modules."""
    for module in model.modules():
        _meetings[module] = weakref.WeakMethod(meeting)


def meet(model: nn.Module, point: str) -> None:
    """Wait until all ranks that share parameters of ``model`` have come to ``point``; see
    [Note: one order of collectives]. Collective. Raises `ConfigError` if one does something else.
    """
    found = [_meetings[module] for module in model.modules() if module in _meetings]
    for meeting in dict.fromkeys(reference() for reference in found):
        if meeting is not None:
            meeting(point)


def reshard(model: nn.Module) -> None:
    """Frees gathered parameters (after a forward without backward), so that every parameter is the
    sharded one again."""
    for module in model.modules():
        # `reshard` is not recursive: each module frees the parameters of its own group.
        if isinstance(module, FSDPModule):
            module.reshard()


@contextmanager
def undisturbed(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Inside, ``model`` evaluates, without gradients. Its modes and the random generators are as
    before afterwards, and nothing that a forward has gathered stays."""
    modes = {module: module.training for module in model.modules()}
    devices = [device] if device.type == "cuda" else []
    model.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices):
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode
        reshard(model)


@contextmanager
@torch.no_grad()  # but not inside
def equal(pairs: Iterable[tuple[Tensor, Tensor]]) -> Iterator[None]:
    """Inside, the first tensor of each pair has the values of the second, then its own again.
    Memory: a copy of the first ones."""
    kept = [(tensor, tensor.clone(), shown) for tensor, shown in pairs]
    try:
        for tensor, _, shown in kept:
            tensor.copy_(shown)
        yield
    finally:
        for tensor, before, _ in kept:
            tensor.copy_(before)


def refuse_extra_state(model: nn.Module, what: str) -> None:
    """Raise `ConfigError` if a module of ``model`` has extra state, which ``what`` would lose."""
    for name, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            raise ConfigError(
                f"{what}: {fqn_of(name) or 'the model'} has extra state (get_extra_state), which "
                "would be lost: keep it in buffers, or save it beside the state and omit the method"
            )


def custom_hooks(model: nn.Module, attribute: str) -> list[str]:
    """Return the FQNs of the modules with hooks in ``attribute``, such as ``_state_dict_hooks``,
    that neither torch nor this package has registered. torch has no public name for them."""
    found = []
    for name, module in model.named_modules():
        for hook in getattr(module, attribute).values():
            # A hook of `register_load_state_dict_pre_hook` is wrapped.
            function = getattr(hook, "hook", hook)
            owner = getattr(function, "__module__", None) or ""
            if owner.partition(".")[0] not in ("torch", "parallel2d", "functools"):
                found.append(fqn_of(name) or "the model")
    return list(dict.fromkeys(found))


def parameters_by_name(model: nn.Module) -> dict[str, nn.Parameter]:
    """FQN -> parameter; a shared one once, under its first name."""
    return {fqn_of(name): parameter for name, parameter in model.named_parameters()}


def all_tensors(model: nn.Module) -> dict[str, Tensor]:
    """FQN -> parameter or buffer; a shared one under each of its names."""
    named = chain(
        model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)
    )
    return {fqn_of(name): tensor for name, tensor in named}


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """FQN -> what is saved and loaded: a parameter, or its master value, or a persistent buffer. A
    shared one is listed once, under its first name."""
    found: dict[str, Tensor] = {**parameters_by_name(model)}
    transient: set[str] = set()
    for prefix, module in model.named_modules():
        # Several models may be parts of one.
        for masters in vars(module).get(_MASTERS_OF, []):
            for name, master in masters.masters().items():
                found[join_names(fqn_of(prefix), name)] = master
        # torch has no public name for the buffers that no state dict has.
        transient.update(join_names(prefix, name) for name in module._non_persistent_buffers_set)
    for name, buffer in model.named_buffers():
        if name not in transient:
            found[fqn_of(name)] = buffer
    return found


def tied_names(model: nn.Module) -> dict[str, str]:
    """Further FQNs of shared parameters -> the one they are stored under, the first."""
    return {fqn_of(name): fqn_of(first) for name, first in ties_of(model).items()}


def ties_of(model: nn.Module) -> dict[str, str]:
    """As `tied_names`, by names as they are in ``model``."""
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    every = model.named_parameters(remove_duplicate=False)
    return {name: first[id(each)] for name, each in every if name != first[id(each)]}


def stepped_by(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """The parameters of all groups."""
    return chain.from_iterable(group["params"] for group in optimizer.param_groups)


def updated_by_name(model: nn.Module) -> dict[str, nn.Parameter]:
    """FQN -> what an optimizer updates: the parameter, or the part of it that this replica owns."""
    return {name: updated_as(value) for name, value in parameters_by_name(model).items()}


def trained_parameters(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """FQN -> parameter, or the part of it that the optimizer has, for those that it steps; in the
    model's order."""
    stepped = set(map(id, stepped_by(optimizer)))
    # The order of the groups may differ between runs; that of the model does not.
    return {name: each for name, each in updated_by_name(model).items() if id(each) in stepped}


def join_optimizers(optimizers: Mapping[str, torch.optim.Optimizer]) -> torch.optim.Optimizer:
    """Groups and state of several optimizers, as they are now, in what states and checkpoints take
    for one."""
    groups = list(chain.from_iterable(each.param_groups for each in optimizers.values()))
    state: dict[Tensor, Any] = {}
    for optimizer in optimizers.values():
        spread_state(optimizer)
        # An entry that does not exist is made, so that loading fills that of the optimizer itself.
        state |= {parameter: optimizer.state[parameter] for parameter in stepped_by(optimizer)}
    # States are compared by the name of the class too.
    name = "+".join(type(each).__name__ for each in optimizers.values())
    attributes: dict[str, Any] = {"param_groups": groups, "state": state}
    if any(hasattr(each, "spread_state") for each in optimizers.values()):
        # Their state is shared by now; it tells `new_state_tensor` what shapes there may be.
        attributes["spread_state"] = staticmethod(lambda: None)
    joined: Any = type(name, (), attributes)
    return joined()


def spread_state(optimizer: torch.optim.Optimizer) -> None:
    """Before all of a state is read: lets an optimizer that has it on some ranks alone
    (`parallel2d.whole_matrices`) share it. Collective for such a one."""
    spread = getattr(optimizer, "spread_state", None)
    if spread is not None:
        spread()


def drop_state(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, Tensor],
    loaded: Mapping[str, Iterable[str]],
) -> None:
    """Drops optimizer state that is not replaced by a state that is loaded next.

    Args:
        parameters: by name, those whose state is loaded.
        loaded: by name, the keys of the state that is loaded.
    """
    forget = getattr(optimizer, "forget_state", None)
    if forget is not None:
        forget(parameters.values())
    for name, parameter in parameters.items():
        # In place: `join_optimizers` has the entries of other optimizers.
        entries = optimizer.state.get(parameter, {})
        for key in entries.keys() - set(loaded.get(name, ())):
            del entries[key]
        if not entries and isinstance(optimizer, torch.optim.Optimizer):
            optimizer.state.pop(parameter, None)


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """``<key>/<FQN>`` -> optimizer state that is a tensor. Empty before the first step."""
    found: dict[str, Tensor] = {}
    for name, parameter in trained_parameters(model, optimizer).items():
        # `get`, because looking up in the state of an optimizer creates an entry.
        entries = optimizer.state.get(parameter, {})
        # Sorted, so that every rank lists them in one order, restored or not.
        for key, value in sorted(entries.items()):
            # Anything else, such as a count of steps, is in `describe_optimizer`.
            if isinstance(value, Tensor):
                found[f"{key}/{name}"] = value
    return found


def describe_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The manifest's part: class, parameter groups by FQN with their settings, and state that is
    not tensors."""
    names: dict[int, str] = {}
    scalars: dict[str, dict[str, Any]] = {}
    for name, parameter in trained_parameters(model, optimizer).items():
        names[id(parameter)] = name
        entries = optimizer.state.get(parameter, {})
        # Tensors are in `optimizer_tensors`; nothing else is saved.
        plain = {key: value for key, value in entries.items() if isinstance(value, SCALARS)}
        if plain:
            scalars[name] = plain
    groups = []
    for group in optimizer.param_groups:
        settings = plain_settings(group)
        # What a manifest cannot hold, such as a tensor of several values, is omitted.
        kept = {key: value for key, value in settings.items() if _is_plain(value)}
        # An optimizer may hold parameters that are not in this model.
        listed = filter(None, [names.get(id(each)) for each in group["params"]])
        groups.append({"settings": kept, "parameters": list(listed)})
    return {"class": type(optimizer).__name__, "groups": groups, "scalars": scalars}


def _is_plain(value: Any) -> bool:
    """Whether ``value`` is made of None, scalars, and lists and tuples of them."""
    # Such as the betas of Adam.
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return isinstance(value, SCALARS | None)
