"""The structure of any model, read from its modules: which of them own parameters, which are
repeated blocks (`find_blocks`), and which parameters are tied."""

from __future__ import annotations

import copy
import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import CellType, FunctionType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from parallel2d.base.config.options import load_reference
from parallel2d.base.errors import ConfigError, nearest_matches

Policy = Callable[[nn.Module, str], bool]

# Modules that read their children's weights without calling the children. They stay whole in every
# policy.
ATOMIC = (nn.MultiheadAttention,)

_WRAPPER_PREFIXES = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")

# (parent, child) -> whether the child is a block
_IsBlock = Callable[[nn.Module, nn.Module], bool]


def fqn_of(name: str) -> str:
    """The fully qualified name (FQN) of a parameter or module: without what wrappers add to it."""
    for prefix in _WRAPPER_PREFIXES:
        name = name.replace(prefix, "")
    # The name of a wrapped module itself ends with what its wrapper calls it.
    name = name.removesuffix("._orig_mod")
    return name.removesuffix("._checkpoint_wrapped_module")


def class_name(module: Any) -> str:
    """The name of a module's class, before `fully_shard` made it an `FSDPModule`."""
    return type(module).__name__.removeprefix("FSDP")


def plain_attributes(module: nn.Module) -> list[tuple[str, Any]]:
    """What ``module`` holds beside parameters and modules, buffers too. Empty for modules that keep
    such references up to date themselves, as recurrent layers do."""
    if type(module).__setattr__ is not nn.Module.__setattr__:
        return []
    registered = ("_parameters", "_modules", "_buffers")
    plain = [(key, value) for key, value in vars(module).items() if key not in registered]
    return [*plain, *module._buffers.items()]


def tensors_in(value: Any, outer: frozenset[int] = frozenset()) -> Iterator[Tensor]:
    """The tensors in ``value``, in plain containers, closures, default and partial arguments.
    ``outer``: ids of what it is in, which it may hold itself."""
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
        # An empty cell is that of a variable without a value.
        cells = [each for each in value.__closure__ or () if each != CellType()]
        closure = [each.cell_contents for each in cells]
        inner = (value.__defaults__, value.__kwdefaults__, closure)
    # Other objects are not opened: they may be anything, and have attributes that run code.
    if id(value) not in outer:
        for each in inner:
            yield from tensors_in(each, outer | {id(value)})


Updated = TypeVar("Updated", bound=Tensor)

# An attribute of a parameter: the tensor that the optimizer updates in its place
UPDATED_AS = "_parallel2d_updated_as"


def updated_as(parameter: Updated) -> Updated:
    """The tensor that the optimizer updates for ``parameter``: the part of it that this rank
    owns where replicas split the updates (``strategy=hybrid_full``), else the parameter itself."""
    return getattr(parameter, UPDATED_AS, parameter)


def update_as(parameter: nn.Parameter, owned: nn.Parameter) -> None:
    """Makes ``owned`` what the optimizer updates for ``parameter``."""
    setattr(parameter, UPDATED_AS, owned)


def join_names(parent: str, name: str) -> str:
    """The dotted name of what is called ``name`` inside ``parent``; the root's name is empty."""
    return f"{parent}.{name}".removeprefix(".")


def near_names(pattern: str, names: Sequence[str]) -> str:
    """The end of a message: names that are spelled like ``pattern``, otherwise the first ones."""
    # Up to three, because layers of one kind have names that differ in a number alone.
    near = nearest_matches(pattern.replace("*", "").strip("."), names, alike=0.4)
    if not near:
        return f"; the names begin with {', '.join(names[:3])}"
    return f"; near: {', '.join(near)}"


def is_called(module: nn.Module) -> bool:
    """Whether ``module`` has a forward. Containers, such as ``ParameterList``, have none: what is
    around them uses their parameters, and belongs together with them."""
    # A forward that was assigned to the instance is a plain function, without __func__.
    forward = getattr(module.forward, "__func__", None)
    return forward is not nn.Module.forward


def direct_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """(attribute, parameter) for each parameter that ``module`` holds itself."""
    # An attribute that was registered as None, such as a bias that is switched off, holds nothing.
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield name, parameter


def owns_itself(module: nn.Module) -> bool:
    """Whether ``module`` holds parameters itself, not only below it."""
    return next(direct_parameters(module), None) is not None


def stays_replicated(parameter: Tensor) -> bool:
    """Whether nothing can be split: it has no dimensions, or no elements."""
    return parameter.ndim == 0 or parameter.numel() == 0


def own_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    """Parameters of ``module`` itself and of containers in it."""
    for _, parameter in direct_parameters(module):
        yield parameter
    # A container has no forward of its own: its parameters are used by ``module``.
    for child in module.children():
        if not is_called(child):
            yield from own_parameters(child)


def owning_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Modules that own parameters themselves or in containers, in definition order; what is inside
    an `ATOMIC` module belongs to it."""
    found: list[tuple[str, nn.Module]] = []
    visited: set[int] = set()

    def visit(name: str, module: nn.Module) -> None:
        # A module that two parents share counts once, under its first name.
        if id(module) in visited:
            return
        visited.add(id(module))
        owns = next(own_parameters(module), None) is not None
        if isinstance(module, ATOMIC) or (owns and is_called(module)):
            found.append((name, module))
        # What is inside an atomic module belongs to it.
        if not isinstance(module, ATOMIC):
            for child_name, child in module.named_children():
                visit(join_names(name, child_name), child)

    visit("", model)
    return found


# Parameter -> the (module, attribute) that it is; a tied one is several.
Places = dict[nn.Parameter, list[tuple[nn.Module, str]]]


def places_in(modules: Iterable[nn.Module]) -> Places:
    """Where the parameters are that ``modules`` hold themselves."""
    places: Places = defaultdict(list)
    for module in modules:
        for name, parameter in direct_parameters(module):
            places[parameter].append((module, name))
    return places


Ties = list[list[tuple[nn.Module, str]]]


def tied_parameters(model: nn.Module) -> Ties:
    """Groups of (module, attribute) that are one and the same parameter."""
    return [group for group in places_in(model.modules()).values() if len(group) > 1]


def tie_again(ties: Ties) -> None:
    """Puts the parameter in the first place of each group into the others."""
    for (first, first_name), *others in ties:
        for module, name in others:
            module._parameters[name] = first._parameters[first_name]


def without_storage(model: nn.Module) -> nn.Module:
    """A copy of ``model`` on meta. Tied parameters stay tied, which ``to("meta")`` would undo, and
    no values are copied."""
    made: dict[int, Any] = {}
    for parameter in model.parameters():
        empty = torch.empty_like(parameter, device="meta")
        made[id(parameter)] = nn.Parameter(empty, parameter.requires_grad)
    for buffer in model.buffers():
        made[id(buffer)] = torch.empty_like(buffer, device="meta")
    # What is in this mapping is taken instead of copied.
    return copy.deepcopy(model, made)


def find_blocks(
    model: nn.Module,
    class_names: Sequence[str] = (),
    policy: Policy | str | None = None,
    section: str = "bucketing",
) -> list[tuple[str, nn.Module]]:
    """The model's repeated blocks as (name, module), in definition order; none is inside another.
    ``section``: of the configuration that asks, for messages.

    With ``class_names``: every outermost module of those classes. With ``policy``, a callable or
    ``package.module:function``: every outermost module with parameters for which
    ``policy(module, FQN)`` is true. Without: elements of a ``ModuleList`` or ``Sequential`` that
    have children of their own; failing that, siblings of one class; failing that, sibling layers
    of one class; none when nothing repeats.

    In the place of a container without a forward, such as a ``ModuleList``, stand the outermost
    modules in it that are called and have structure, or, where none has, those with parameters.
    Raises `ConfigError`, with candidates, when a given class or policy matches nothing.
    """
    if policy is not None:
        return _blocks_of_policy(model, policy, section)
    if class_names:
        return _blocks_of_classes(model, class_names, section)
    # Layers without children come last: in a model of blocks they repeat too, inside its blocks.
    found = _outermost(model, _is_listed)
    found = found or _outermost(
        model, lambda around, each: _repeats(around, each) and has_structure(each)
    )
    return found or _outermost(model, _repeats)


def hidden_matrices(model: nn.Module) -> set[str]:
    """FQNs of the parameters of two and more dims inside the repeated blocks, without embeddings.

    Blocks are found as for ``bucketing=block``; single layers that repeat are no blocks here,
    because the last of them may be the head.
    """
    # By id, because a tied embedding is also the weight of another module.
    embeddings: set[int] = set()
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            embeddings.update(id(parameter) for parameter in module.parameters())
    found: set[str] = set()
    for block_name, block in find_blocks(model):
        # A layer, such as each of a row of Linear layers. A block may own parameters too, such as
        # the scale of its output.
        # The wrappers of activation checkpointing and torch.compile have its name too.
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
    names = {id(module): fqn_of(name) for name, module in model.named_modules()}

    def is_chosen(_parent: nn.Module, child: nn.Module) -> bool:
        # A policy is asked about modules with parameters alone: dropout is no block.
        return _has_parameters(child) and bool(chosen(child, names[id(child)]))

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
    classes = [name for name in class_names if not isinstance(name, str)]
    if classes:
        raise ConfigError(f"{section}.blocks are names of classes, in quotes, got {classes}")

    def is_block(_parent: nn.Module, child: nn.Module) -> bool:
        return type(child).__name__ in class_names

    found = _outermost(model, is_block)
    found_classes = {type(module).__name__ for _, module in found}
    all_classes = {type(module).__name__ for module in model.modules()}
    # A class that occurs only inside blocks of another given class is no mistake.
    missing = set(class_names) - found_classes
    misspelled = missing - all_classes
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
    # Neither activations nor containers, which nothing calls, can be sharded on their own.
    return _has_parameters(child) and is_called(child)


def has_structure(module: nn.Module) -> bool:
    """Whether ``module`` has children with parameters that may be treated on their own."""
    # The children of an atomic module are not called, so nothing can happen when they are.
    if isinstance(module, ATOMIC):
        return False
    return any(map(_has_parameters, module.children()))


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _outermost(model: nn.Module, is_block: _IsBlock) -> list[tuple[str, nn.Module]]:
    """The modules below ``model`` that are blocks, by name, without those inside another block."""
    found: list[tuple[str, nn.Module]] = []
    visited: set[int] = set()

    def visit(name: str, module: nn.Module) -> None:
        for child_name, child in module.named_children():
            # A module that two parents share counts once, under its first name.
            if id(child) in visited:
                continue
            visited.add(id(child))
            child_path = join_names(name, child_name)
            # What is inside a block is part of it: no search goes on there.
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
    """For messages: classes that could be blocks, the most repeated first, with count and size of
    one instance."""
    instances: dict[str, list[nn.Module]] = defaultdict(list)
    for name, module in model.named_modules():
        # The root, whose name is empty, is no block of itself.
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
