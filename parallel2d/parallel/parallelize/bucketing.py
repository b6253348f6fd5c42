"""Groups the modules of a model whose parameters are gathered by one all-gather and reduced by one
reduce-scatter: `bucket_modules`. Parameters that are in no group belong to the root's.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import nn

from parallel2d.base.config import BucketingConfig
from parallel2d.base.errors import ConfigError
from parallel2d.parallel.model_structure import direct_parameters, own_parameters, owning_modules

log = logging.getLogger(__name__)

# The number of the root's group; smaller than the index of any other group.
_ROOT = -1


def bucket_modules(
    model: nn.Module,
    blocks: Sequence[tuple[str, nn.Module]],
    config: BucketingConfig,
    stored: Mapping[nn.Parameter, torch.dtype],
    apart: Collection[int] = (),
) -> list[list[nn.Module]]:
    """Groups of modules below the root, children before parents; modules with tied parameters
    always share a group. ``stored``: in which dtype a parameter will be stored, where that is not
    its own. ``apart``: ids of modules that are a group each whatever the policy; so are those with
    complex parameters in a model that has real ones. Raises `ConfigError` when one of them is tied
    to another.
    """
    separate = {*apart, *_complex_modules(model)}
    groups: list[list[nn.Module]] = []
    for group in _groups_by_policy(model, blocks, config, stored):
        rest = [module for module in group if id(module) not in separate]
        # A group may have held nothing else.
        if rest:
            groups.append(rest)
    groups += [[module] for module in model.modules() if id(module) in separate]
    groups = _merge_tied(model, groups)
    # Only now it is certain which modules are alone: merging may have joined one to another.
    _check_separate(model, groups, separate, fp32=apart)
    depth = {id(module): name.count(".") for name, module in model.named_modules()}
    # The sort is stable, in reverse too: groups of equal depth stay in the model's order.
    deepest = [max(depth[id(module)] for module in group) for group in groups]
    order = sorted(range(len(groups)), key=deepest.__getitem__, reverse=True)
    return [groups[number] for number in order]


def _complex_modules(model: nn.Module) -> set[int]:
    """Ids of modules whose trained parameters are all complex; empty when nothing in the model is
    real. What is gathered together has one dtype."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if all(parameter.is_complex() for parameter in trained):
        return set()
    found = set()
    for _, module in owning_modules(model):
        kinds = {own.is_complex() for own in own_parameters(module) if own.requires_grad}
        # The root has a group of its own anyway.
        if module is not model and kinds == {True}:
            found.add(id(module))
    return found


def _groups_by_policy(
    model: nn.Module,
    blocks: Sequence[tuple[str, nn.Module]],
    config: BucketingConfig,
    stored: Mapping[nn.Parameter, torch.dtype],
) -> list[list[nn.Module]]:
    """The groups that ``config`` names; parameters shared between them are not considered yet."""
    if config.name == "block" and blocks:
        return [[block] for _, block in blocks]
    # The root, whose name is empty, is in none of these groups: `fully_shard` gets it last.
    owners = [(name, module) for name, module in owning_modules(model) if name]
    if config.name == "size":
        return _by_size(owners, config.size_mib, stored)
    if config.name == "none":
        # `fully_shard` takes modules: it cannot separate two parameters of one module.
        log.info(
            "bucketing=none: a group per single parameter is not possible; the finest, a group per "
            "layer, is used"
        )
    if config.name == "block":
        log.warning(
            "bucketing=block: %s has no repeated blocks; a group per layer is used",
            type(model).__name__,
        )
    return [[module] for _, module in owners]


def _by_size(
    owners: Sequence[tuple[str, nn.Module]],
    size_mib: float,
    stored: Mapping[nn.Parameter, torch.dtype],
) -> list[list[nn.Module]]:
    """Consecutive modules up to the limit. A group's members must not contain each other, so only
    owners without an owner inside are members; what a module around them owns itself goes to the
    root's group."""
    limit = size_mib * 2**20
    containers = set()
    for name, _ in owners:
        # a.b.c is inside of a.b and a.
        while name := name.rpartition(".")[0]:
            containers.add(name)
    groups: list[list[nn.Module]] = []
    filled = 0
    for name, module in owners:
        if name in containers:
            continue
        size = 0
        for parameter in module.parameters():
            size += parameter.numel() * stored.get(parameter, parameter.dtype).itemsize
        # A module that is larger than the limit by itself has a group of its own.
        if not groups or filled + size > limit:
            groups.append([])
            filled = 0
        groups[-1].append(module)
        filled += size
    # A single group would hold the whole model, which is what the root's group is for.
    if len(groups) == 1:
        return []
    return groups


def _merge_tied(model: nn.Module, groups: list[list[nn.Module]]) -> list[list[nn.Module]]:
    """Joins groups that hold one and the same parameter; a group that shares one with the root's is
    dissolved into it."""
    # For each index of a group the index of the group that it is joined to.
    target = {index: index for index in range(_ROOT, len(groups))}
    group_of: dict[int, int] = {}
    for index, group in enumerate(groups):
        group_of |= {id(module): index for module in group}
    # By name, the group that a module belongs to: its own, or that of what is around it.
    around: dict[str, int] = {}
    holders: dict[nn.Parameter, set[int]] = defaultdict(set)
    for name, module in model.named_modules(remove_duplicate=False):
        outer = around.get(name.rpartition(".")[0], _ROOT)
        around[name] = group_of.get(id(module), outer)
        for _, parameter in direct_parameters(module):
            holders[parameter].add(around[name])
    for sharing in holders.values():
        # Groups that were joined before stay together: all with the same target move at once.
        joining = {target[index] for index in sharing}
        first = min(joining)
        for index, current in target.items():
            if current in joining:
                target[index] = first
    joined: dict[int, list[nn.Module]] = defaultdict(list)
    for index, group in enumerate(groups):
        joined[target[index]] += group
    # The root's group needs no entry: it is what no other group holds.
    joined.pop(_ROOT, None)
    return list(joined.values())


def _check_separate(
    model: nn.Module,
    groups: list[list[nn.Module]],
    separate: Collection[int],
    fp32: Collection[int],
) -> None:
    """``fp32``: ids of those of ``separate`` that the user chose, by ``precision.fp32_modules``."""
    alone = {id(group[0]) for group in groups if len(group) == 1}
    joined = set(separate) - alone
    for name, module in model.named_modules():
        if id(module) not in joined:
            continue
        why = "complex parameters are gathered apart"
        if id(module) in fp32:
            why = "precision.fp32_modules"
        raise ConfigError(
            f"{why}: {name} is tied to, or is, a module outside of them; choose both or none"
        )
