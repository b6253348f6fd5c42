"""What a model looks like, without knowing it: which modules own parameters, which are repeated
blocks, what is tied."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

from torch import nn

from parallel2d.config.reference import load_reference
from parallel2d.errors import ConfigError

Policy = Callable[[nn.Module, str], bool]

# Modules that read their children's weights without calling the children. They stay whole in every
# policy.
ATOMIC = (nn.MultiheadAttention,)

_WRAPPER_PREFIXES = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")


def canonical_name(name: str) -> str:
    """A parameter's or module's name without what wrappers add to it."""
    for prefix in _WRAPPER_PREFIXES:
        name = name.replace(prefix, "")
    return name.removesuffix("._orig_mod").removesuffix("._checkpoint_wrapped_module")


def parameter_bytes(module: nn.Module) -> int:
    """Bytes of all parameters below ``module``, each counted once."""
    return sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())


def is_called(module: nn.Module) -> bool:
    """Whether ``module`` has a forward. Containers, such as ``ParameterList``, have none: what is
    around them uses their parameters, and belongs together with them."""
    return getattr(module.forward, "__func__", None) is not nn.Module.forward


def owning_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Modules that own parameters themselves or in containers, in definition order; what is inside
    an `ATOMIC` module belongs to it."""
    found: list[tuple[str, nn.Module]] = []

    def visit(name: str, module: nn.Module) -> None:
        if isinstance(module, ATOMIC):
            found.append((name, module))
            return
        if is_called(module) and next(own_parameters(module), None) is not None:
            found.append((name, module))
        for child_name, child in module.named_children():
            visit(f"{name}.{child_name}" if name else child_name, child)

    visit("", model)
    return found


def tied_parameters(model: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    """Groups of (module, attribute) that are one and the same parameter."""
    places: dict[int, list[tuple[nn.Module, str]]] = defaultdict(list)
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                places[id(parameter)].append((module, name))
    return [group for group in places.values() if len(group) > 1]


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
    ``policy(module, canonical name)`` is true. Without: repeated structure is detected, as it would
    be by a reader: elements of a ``ModuleList`` or ``Sequential`` that have children of their own;
    failing that, siblings of one class; failing that, sibling layers of one class. May be empty
    when nothing repeats.

    Raises `ConfigError` when a given class or policy matches nothing, with the candidates and their
    sizes.
    """
    if policy is not None:
        chosen: Policy = (
            load_reference(f"{section}.policy", policy) if isinstance(policy, str) else policy
        )
        names = {id(module): canonical_name(name) for name, module in model.named_modules()}
        found = _outermost(
            model, lambda _parent, child: _owns(child) and bool(chosen(child, names[id(child)]))
        )
        if not found:
            raise ConfigError(
                f"{section}.policy={getattr(policy, '__name__', policy)} chooses no module of "
                f"{type(model).__name__}; "
                f"candidates: {candidate_classes(model)}"
            )
        return found
    if class_names:
        if classes := [name for name in class_names if not isinstance(name, str)]:
            raise ConfigError(f"{section}.blocks are names of classes, in quotes, got {classes}")
        found = _outermost(model, lambda parent, child: type(child).__name__ in class_names)
        missing = set(class_names) - {type(module).__name__ for _, module in found}
        nested = {type(module).__name__ for _, module in model.named_modules()}
        if missing - nested or not found:
            raise ConfigError(
                f"{section}.blocks={list(class_names)}: no module of class "
                f"{', '.join(sorted(missing))} in "
                f"{type(model).__name__}; candidates: {candidate_classes(model)}"
            )
        return found

    def has_structure(module: nn.Module) -> bool:
        return not isinstance(module, ATOMIC) and any(_owns(child) for child in module.children())

    def listed(parent: nn.Module, child: nn.Module) -> bool:
        return (
            isinstance(parent, nn.ModuleList | nn.Sequential)
            and has_structure(child)
            and _owns(child)
        )

    def siblings(parent: nn.Module, child: nn.Module) -> bool:
        return (
            sum(type(other) is type(child) for other in parent.children()) > 1
            and _owns(child)
            and is_called(child)
        )

    return (
        _outermost(model, listed)
        or _outermost(model, lambda parent, child: siblings(parent, child) and has_structure(child))
        or _outermost(model, siblings)
    )


def candidate_classes(model: nn.Module) -> str:
    """For messages: classes that could be blocks, the most repeated first, with count and size of
    one instance."""
    instances: dict[str, list[nn.Module]] = defaultdict(list)
    for name, module in model.named_modules():
        if name and _owns(module):
            instances[type(module).__name__].append(module)
    ranked = sorted(
        instances.items(), key=lambda item: (-len(item[1]), -parameter_bytes(item[1][0]))
    )
    return ", ".join(
        f"{name} ({len(modules)} x {parameter_bytes(modules[0]) / 2**20:.2g} MiB)"
        for name, modules in ranked[:8]
    )


def owns_itself(module: nn.Module) -> bool:
    """Whether ``module`` holds parameters itself, not only below it."""
    return any(parameter is not None for parameter in module._parameters.values())


def own_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    """Those of ``module`` itself and of containers in it."""
    yield from (parameter for parameter in module._parameters.values() if parameter is not None)
    for child in module.children():
        if not is_called(child):
            yield from own_parameters(child)


def _owns(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _outermost(model: nn.Module, wanted: object) -> list[tuple[str, nn.Module]]:
    assert callable(wanted)
    found: list[tuple[str, nn.Module]] = []

    def visit(name: str, module: nn.Module) -> None:
        for child_name, child in module.named_children():
            child_path = f"{name}.{child_name}" if name else child_name
            if wanted(module, child):
                found.append((child_path, child))
            else:
                visit(child_path, child)

    visit("", model)
    return found
