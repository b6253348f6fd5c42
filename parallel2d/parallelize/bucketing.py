"""Which modules share one collective. A model and its blocks flow in, groups of modules flow out,
innermost first.

A group's parameters are gathered by one all-gather and their gradients leave in one reduce-scatter.
What no group names belongs to the root's.
"""

from __future__ import annotations

import logging
import re
from collections import defaultdict
from collections.abc import Collection, Sequence

from torch import nn

from parallel2d.config import BucketingConfig
from parallel2d.errors import ConfigError
from parallel2d.model_structure import own_parameters, owning_modules, parameter_bytes

log = logging.getLogger(__name__)


def bucket_modules(
    model: nn.Module,
    blocks: Sequence[tuple[str, nn.Module]],
    config: BucketingConfig,
    apart: Collection[int] = (),
) -> list[list[nn.Module]]:
    """Groups of modules below the root, children before parents; modules with tied parameters
    always share a group.

    ``apart``: ids of modules that are a group each whatever the policy; so are those with complex
    parameters in a model that has real ones. Raises `ConfigError` when one of them is tied to
    another.
    """
    fp32, apart = set(apart), {*apart, *_complex_modules(model)}
    name = config.name
    if name == "none":
        log.info(
            "bucketing=none: a group per single parameter is not possible; the finest, a group "
            "per layer, is used"
        )
        name = "layer"
    if name == "block" and not blocks:
        log.warning(
            "bucketing=block: %s has no repeated blocks; a group per layer is used",
            type(model).__name__,
        )
        name = "layer"
    if name == "block":
        groups = [[block] for _, block in blocks]
    else:
        owners = [(path, module) for path, module in owning_modules(model) if path]
        groups = (
            [[module] for _, module in owners]
            if name == "layer"
            else _by_size(owners, config.size_mib)
        )
    if apart:
        groups = [
            kept
            for group in groups
            if (kept := [module for module in group if id(module) not in apart])
        ]
        groups += [[module] for module in model.modules() if id(module) in apart]
    merged = _merge_tied(model, groups)
    alone = [module for group in merged if len(group) == 1 for module in group]
    if missing := set(apart) - {id(module) for module in alone}:
        name, why = next(
            (
                name,
                "precision.fp32_modules"
                if id(module) in fp32
                else "complex parameters are gathered apart",
            )
            for name, module in model.named_modules()
            if id(module) in missing
        )
        raise ConfigError(
            f"{why}: {name} is tied to, or is, a module outside of them; choose both or none"
        )
    return _innermost_first(model, merged)


def _complex_modules(model: nn.Module) -> set[int]:
    """Ids of modules whose trained parameters are all complex; empty when nothing in the model is
    real. What is gathered together has one dtype."""
    if all(parameter.is_complex() for parameter in model.parameters() if parameter.requires_grad):
        return set()
    found = set()
    for _, module in owning_modules(model):
        own = [parameter for parameter in own_parameters(module) if parameter.requires_grad]
        if module is not model and own and all(parameter.is_complex() for parameter in own):
            found.add(id(module))
    return found


def _by_size(owners: list[tuple[str, nn.Module]], size_mib: float) -> list[list[nn.Module]]:
    """Consecutive modules up to the limit. A group's members must not contain each other, so only
    owners without an owner inside are members; what a module around them owns itself goes to the
    root's group."""
    limit = size_mib * 2**20
    containers = {name[: dot.start()] for name, _ in owners for dot in re.finditer(r"\.", name)}
    groups: list[list[nn.Module]] = []
    filled = 0
    for name, module in owners:
        if name in containers:
            continue
        size = parameter_bytes(module)
        if not groups or filled + size > limit:
            groups.append([])
            filled = 0
        groups[-1].append(module)
        filled += size
    return groups if len(groups) > 1 else []  # everything in one group: the root's


def _merge_tied(model: nn.Module, groups: list[list[nn.Module]]) -> list[list[nn.Module]]:
    """Joins groups that hold one and the same parameter; a group that shares one with the root's is
    dissolved into it."""
    root = -1
    group_of_top = {id(module): index for index, group in enumerate(groups) for module in group}
    holders: dict[int, set[int]] = defaultdict(set)

    def visit(module: nn.Module, group: int) -> None:
        group = group_of_top.get(id(module), group)
        for parameter in module._parameters.values():
            if parameter is not None:
                holders[id(parameter)].add(group)
        for child in module.children():
            visit(child, group)

    visit(model, root)
    home = list(range(len(groups)))
    for sharing in holders.values():
        homes = {index if index == root else home[index] for index in sharing}
        home = [min(homes) if index in homes else index for index in home]
    joined: dict[int, list[nn.Module]] = defaultdict(list)
    for index, group in enumerate(groups):
        joined[home[index]] += group
    joined.pop(root, None)
    return list(joined.values())


def _innermost_first(model: nn.Module, groups: list[list[nn.Module]]) -> list[list[nn.Module]]:
    depth = {id(module): name.count(".") for name, module in model.named_modules()}
    return sorted(groups, key=lambda group: -max(depth[id(module)] for module in group))
