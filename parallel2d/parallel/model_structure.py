"""Functions that inspect the structure of a model.

They find the modules with direct parameters, the repeated blocks (`find_blocks`) and the tied
parameters.
"""

from __future__ import annotations

import copy
import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from types import CellType, FunctionType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from torch.utils._pytree import tree_leaves

from parallel2d.base.config.options import load_reference
from parallel2d.base.errors import ConfigError, nearest_matches

Policy = Callable[[nn.Module, str], bool]

# Modules that read the weights of their children without calling the children, so that hooks of the
# children would not run. These modules are never divided into several FSDP groups.
ATOMIC = (nn.MultiheadAttention,)

_WRAPPER_PREFIXES = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")

_Value = TypeVar("_Value")

# (parent, child) -> True if the child is a block
_IsBlock = Callable[[nn.Module, nn.Module], bool]


def fqn_of(name: str) -> str:
    """Return the fully qualified name (FQN) of a parameter or module, without wrapper prefixes."""
    for prefix in _WRAPPER_PREFIXES:
        name = name.replace(prefix, "")
    # A wrapped module's own name ends with the wrapper's attribute.
    name = name.removesuffix("._orig_mod")
    return name.removesuffix("._checkpoint_wrapped_module")


def by_fqn(named: Iterable[tuple[str, _Value]]) -> dict[str, _Value]:
    """Return a dict of the values by FQN, from (name, value) pairs of torch."""
    return {fqn_of(name): value for name, value in named}


def names_by_id(named: Iterable[tuple[str, object]]) -> dict[int, str]:
    """Return a dict from the id of each value to its name, from (name, value) pairs of torch."""
    return {id(value): name for name, value in named}


def class_name(module: Any) -> str:
    """Return the class name of a module, without the prefix of `fully_shard`."""
    return type(module).__name__.removeprefix("FSDP")


def plain_attributes(module: nn.Module) -> list[tuple[str, Any]]:
    """Return the attributes and buffers of ``module``, without parameters and submodules.

    Empty for modules with a custom ``__setattr__``, such as recurrent layers, which update
    references to their parameters.
    """
    if type(module).__setattr__ is not nn.Module.__setattr__:
        return []
    registered = ("_parameters", "_modules", "_buffers")
    plain = []
    for key, value in vars(module).items():
        if key not in registered:
            plain.append((key, value))
    return [*plain, *module._buffers.items()]


def is_dataclass_object(value: object) -> bool:
    """Return True for an object of a dataclass."""
    return is_dataclass(value) and not isinstance(value, type)


def values_in(container: Any) -> list[Any]:
    """Return the values of a dict or dataclass, or the items of another container."""
    if isinstance(container, dict):
        return list(container.values())
    if is_dataclass(container):
        values: list[Any] = []
        for each in fields(container):
            values.append(getattr(container, each.name, None))
        return values
    return list(container)


def trained_tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in ``value`` that require grad, in the containers that `fully_shard`
    searches: dicts, lists, tuples and dataclasses."""
    if isinstance(value, Tensor):
        return [value] if value.requires_grad else []
    found: list[Tensor] = []
    if isinstance(value, dict | list | tuple) or is_dataclass_object(value):
        for each in values_in(value):
            found += trained_tensors_in(each)
    return found


def tensor_leaves(value: Any) -> list[Tensor]:
    """Return the tensors among the pytree leaves of ``value``."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def tensors_in(value: Any, outer: frozenset[int] = frozenset()) -> Iterator[Tensor]:
    """Yield the tensors in ``value``: in containers, closures, and default and partial arguments.

    ``outer`` holds the ids of the containers around ``value``, to stop at a cycle.
    """
    if isinstance(value, Tensor):
        yield value
        return
    inner: Iterable[Any] = ()
    if isinstance(value, dict):
        inner = value.values()
    elif isinstance(value, list | tuple | set):
        inner = value
    elif isinstance(value, functools.partial):
        inner = (value.func, value.args, value.keywords)
    elif isinstance(value, FunctionType):
        closure = []
        for cell in value.__closure__ or ():
            # An empty cell belongs to a variable without a value.
            if cell != CellType():
                closure.append(cell.cell_contents)
        inner = (value.__defaults__, value.__kwdefaults__, closure)
    # Other objects are skipped, because reading their attributes may run code.
    if id(value) not in outer:
        for each in inner:
            yield from tensors_in(each, outer | {id(value)})


Updated = TypeVar("Updated", bound=Tensor)

# Attribute of a parameter: the tensor that the optimizer updates instead
UPDATED_AS = "_parallel2d_updated_as"


def updated_as(parameter: Updated) -> Updated:
    """Return the tensor that the optimizer updates for ``parameter``.

    For an unsharded parameter this is the sharded parameter. With ``strategy=hybrid_full`` it is
    the tensor of the rows that this replica updates. Otherwise it is ``parameter``.
    """
    return getattr(parameter, UPDATED_AS, parameter)


def update_as(parameter: nn.Parameter, owned: nn.Parameter) -> None:
    """Make the optimizer update ``owned`` instead of ``parameter``."""
    setattr(parameter, UPDATED_AS, owned)


def join_names(parent: str, name: str) -> str:
    """Return the dotted name of ``name`` inside ``parent``; the root's name is empty."""
    return f"{parent}.{name}".removeprefix(".")


def near_names(pattern: str, names: Sequence[str]) -> str:
    """Return the end of a message: names that are spelled like ``pattern``, or the first names."""
    # Up to three, because names of layers of one kind differ only in a number.
    near = nearest_matches(pattern.replace("*", "").strip("."), names, alike=0.4)
    if not near:
        return f"; the names begin with {', '.join(names[:3])}"
    return f"; near: {', '.join(near)}"


def is_called(module: nn.Module) -> bool:
    """Return True if ``module`` has a forward.

    The parameters of a container without a forward, such as ``ParameterList``, count as parameters
    of the module that contains it.
    """
    # A forward that was assigned to the instance is a plain function without __func__.
    forward = getattr(module.forward, "__func__", None)
    return forward is not nn.Module.forward


def direct_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield (attribute, parameter) for each direct parameter of ``module``."""
    # A parameter may be registered as None, such as a disabled bias.
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield name, parameter


def owns_itself(module: nn.Module) -> bool:
    """Return True if ``module`` has direct parameters."""
    return next(direct_parameters(module), None) is not None


def stays_replicated(parameter: Tensor) -> bool:
    """Return True if ``parameter`` has no dimensions or no elements, so it cannot be split."""
    return parameter.ndim == 0 or parameter.numel() == 0


def own_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the direct parameters of ``module`` and of the containers without forward in it."""
    for _, parameter in direct_parameters(module):
        yield parameter
    # A container has no forward: ``module`` uses its parameters.
    for child in module.children():
        if not is_called(child):
            yield from own_parameters(child)


def owning_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the modules with own parameters (see `own_parameters`), in definition order.

    An `ATOMIC` module is returned without the modules inside of it.
    """
    found: list[tuple[str, nn.Module]] = []
    visited: set[int] = set()

    def visit(name: str, module: nn.Module) -> None:
        # A module with two parents counts once, under its first name.
        if id(module) in visited:
            return
        visited.add(id(module))
        owns = next(own_parameters(module), None) is not None
        if isinstance(module, ATOMIC) or (owns and is_called(module)):
            found.append((name, module))
        # Modules inside an atomic module belong to it.
        if not isinstance(module, ATOMIC):
            for child_name, child in module.named_children():
                visit(join_names(name, child_name), child)

    visit("", model)
    return found


# Parameter -> its (module, attribute) pairs; several for a tied parameter.
Places = dict[nn.Parameter, list[tuple[nn.Module, str]]]


def places_in(modules: Iterable[nn.Module]) -> Places:
    """Map each direct parameter of ``modules`` to its (module, attribute) pairs."""
    places: Places = defaultdict(list)
    for module in modules:
        for name, parameter in direct_parameters(module):
            places[parameter].append((module, name))
    return places


Ties = list[list[tuple[nn.Module, str]]]


def tied_parameters(model: nn.Module) -> Ties:
    """Return a list of (module, attribute) pairs for each tied parameter."""
    parameters = []
    for group in places_in(model.modules()).values():
        if len(group) > 1:
            parameters.append(group)
    return parameters


def tie_again(ties: Ties) -> None:
    """Assign the first parameter of each group in ``ties`` to the other places of the group."""
    for (first, first_name), *others in ties:
        for module, name in others:
            module._parameters[name] = first._parameters[first_name]


def without_storage(model: nn.Module) -> nn.Module:
    """Return a meta copy of ``model``. Tied parameters stay tied, unlike with ``to("meta")``."""
    made: dict[int, Any] = {}
    for parameter in model.parameters():
        empty = torch.empty_like(parameter, device="meta")
        made[id(parameter)] = nn.Parameter(empty, parameter.requires_grad)
    for buffer in model.buffers():
        made[id(buffer)] = torch.empty_like(buffer, device="meta")
    # `deepcopy` uses the entries of this memo instead of copies.
    return copy.deepcopy(model, made)


def find_blocks(
    model: nn.Module,
    class_names: Sequence[str] = (),
    policy: Policy | str | None = None,
    section: str = "bucketing",
) -> list[tuple[str, nn.Module]]:
    """Return the model's repeated blocks as (name, module), in definition order.

    No block is inside another block. Without ``class_names`` and ``policy``, the first of these
    rules that finds modules is used:

    1. elements of a ``ModuleList`` or ``Sequential`` that have children with parameters;
    2. siblings of the same class that have children with parameters;
    3. siblings of the same class that have parameters.

    If a block would be a container without a forward, such as a ``ModuleList``, the outermost
    modules with a forward inside of it are used instead: those that have children with parameters,
    or else those that have parameters.

    Args:
        model: the model, which is not a block.
        class_names: every outermost module of these classes is a block.
        policy: a callable or ``package.module:function``. Every outermost module with parameters
            is a block if ``policy(module, FQN)`` is true.
        section: section of the configuration, for messages.

    Raises:
        ConfigError: a given class or policy matches nothing; the message lists candidates.
    """
    if policy is not None:
        return _blocks_of_policy(model, policy, section)
    if class_names:
        return _blocks_of_classes(model, class_names, section)
    # Layers without children come last: in a model of blocks, layers repeat inside the blocks.
    found = _outermost(model, _is_listed)
    found = found or _outermost(
        model, lambda around, each: _repeats(around, each) and has_structure(each)
    )
    return found or _outermost(model, _repeats)


def hidden_matrices(model: nn.Module) -> set[str]:
    """Return the FQNs of the parameters with two or more dims in the blocks, without embeddings.

    ``find_blocks(model)`` returns these blocks. Blocks without children are skipped, because the
    last of several equal layers may be the output head.
    """
    # Compare ids, because a tied embedding is also the weight of another module.
    embeddings: set[int] = set()
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            embeddings.update(map(id, module.parameters()))
    found: set[str] = set()
    for block_name, block in find_blocks(model):
        # A single layer is skipped. A block may own parameters directly, such as the scale of its
        # output. Wrappers of activation checkpointing and torch.compile share the block's FQN, so
        # the innermost module of this name decides.
        inner = block.named_modules(prefix=block_name)
        layer = [module for name, module in inner if fqn_of(name) == fqn_of(block_name)][-1]
        if has_structure(layer) and not is_parametrized(layer):
            for name, parameter in block.named_parameters(prefix=block_name):
                if parameter.ndim >= 2 and id(parameter) not in embeddings:
                    found.add(fqn_of(name))
    return found


def _blocks_of_policy(
    model: nn.Module, policy: Policy | str, section: str
) -> list[tuple[str, nn.Module]]:
    chosen = policy
    if isinstance(chosen, str):
        chosen = load_reference(f"{section}.policy", chosen)
    names = names_by_id(model.named_modules())

    def is_chosen(_parent: nn.Module, child: nn.Module) -> bool:
        # The policy gets only modules with parameters: dropout is never a block.
        return _has_parameters(child) and bool(chosen(child, fqn_of(names[id(child)])))

    found = _outermost(model, is_chosen)
    if not found:
        raise ConfigError(
            f"{section}.policy={getattr(policy, '__name__', policy)} chooses no module of "
            f"{type(model).__name__}; candidates: {candidate_classes(model)}"
        )
    return found


def _blocks_of_classes(
    model: nn.Module, class_names: Sequence[str], section: str
) -> list[tuple[str, nn.Module]]:
    if not all(isinstance(name, str) for name in class_names):
        raise ConfigError(f"{section}.blocks are names of classes, in quotes, got {class_names}")

    def is_block(_parent: nn.Module, child: nn.Module) -> bool:
        return type(child).__name__ in class_names

    found = _outermost(model, is_block)
    # A given class may occur only inside blocks of another given class.
    missing = set(class_names) - {type(module).__name__ for _, module in found}
    misspelled = missing - {type(module).__name__ for module in model.modules()}
    if misspelled or not found:
        raise ConfigError(
            f"{section}.blocks={list(class_names)}: no module of class "
            f"{', '.join(sorted(missing))} in {type(model).__name__}; candidates: "
            f"{candidate_classes(model)}"
        )
    return found


def _is_listed(parent: nn.Module, child: nn.Module) -> bool:
    return isinstance(parent, nn.ModuleList | nn.Sequential) and has_structure(child)


def _repeats(parent: nn.Module, child: nn.Module) -> bool:
    classes = list(map(type, parent.children()))
    if classes.count(type(child)) < 2:
        return False
    # Neither activations nor containers, which nothing calls, can be sharded separately.
    return _has_parameters(child) and is_called(child)


def has_structure(module: nn.Module) -> bool:
    """Return True if ``module`` has children with parameters that can be sharded separately."""
    # The children of an atomic module are not called, so their hooks would never run.
    if isinstance(module, ATOMIC):
        return False
    return any(map(_has_parameters, module.children()))


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _outermost(model: nn.Module, is_block: _IsBlock) -> list[tuple[str, nn.Module]]:
    """Return (name, module) of the blocks below ``model``, without blocks inside other blocks."""
    found: list[tuple[str, nn.Module]] = []
    visited: set[int] = set()

    def visit(name: str, module: nn.Module) -> None:
        for child_name, child in module.named_children():
            # A module with two parents counts once, under its first name.
            if id(child) in visited:
                continue
            visited.add(id(child))
            child_path = join_names(name, child_name)
            # Modules inside a block belong to it, so the search stops there.
            if not is_block(module, child):
                visit(child_path, child)
            elif is_called(child):
                found.append((child_path, child))
            else:
                inside = _outermost(child, lambda _, each: is_called(each) and has_structure(each))
                inside = inside or _outermost(
                    child, lambda _, each: is_called(each) and _has_parameters(each)
                )
                for inner_name, inner in inside:
                    if id(inner) not in visited:
                        visited.add(id(inner))
                        found.append((join_names(child_path, inner_name), inner))

    visit("", model)
    return found


def candidate_classes(model: nn.Module) -> str:
    """Return a text for messages: classes that could be blocks, with their count and size."""
    instances: dict[str, list[nn.Module]] = defaultdict(list)
    for name, module in model.named_modules():
        # The root, with an empty name, is not a block.
        if name and _has_parameters(module):
            instances[type(module).__name__].append(module)
    sizes: list[tuple[int, int, str]] = []
    for name, modules in instances.items():
        size = sum(parameter.nbytes for parameter in modules[0].parameters())
        sizes.append((len(modules), size, name))
    sizes.sort(key=lambda each: each[:2], reverse=True)
    return ", ".join(
        f"{name} ({count} x {size / 2**20:.2g} MiB)" for count, size, name in sizes[:8]
    )
