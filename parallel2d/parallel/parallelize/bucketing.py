"""Assign modules to FSDP groups (buckets): `bucket_modules`, `outer_groups`.

The parameters of one group share one all-gather and one reduce-scatter. Parameters that belong to
no group belong to the root's group.

[Note: groups outside of the blocks] The root's gradients are reduced at the end of backward, where
no computation overlaps with the reduction. A large embedding and a large head therefore form two
groups: the gradients of the head are reduced while backward computes the blocks. Backward begins
with the head, so both groups stay unsharded between forward and backward, as the root's group does.
Both groups are all-gathered at the beginning of each forward of the model, because a model may read
a weight without a call of its module (``F.linear(h, self.embedding.weight)``).
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch import nn

from parallel2d.base.config import BucketingConfig
from parallel2d.base.errors import ConfigError
from parallel2d.parallel.model_structure import direct_parameters, own_parameters, owning_modules
from parallel2d.parallel.parallelize.conditional import (
    Conditional,
    cut_groups,
    separate_modules,
)

log = logging.getLogger(__name__)

# Number of the root's group; smaller than the index of any other group.
_ROOT = -1

# Bytes from which modules outside of the blocks form their own group. At 64 MiB the transfer time
# on any network is well above the latency of the additional collectives.
LARGE_BYTES = 64 * 2**20


def bucket_modules(
    model: nn.Module,
    blocks: Sequence[tuple[str, nn.Module]],
    config: BucketingConfig,
    stored: Mapping[nn.Parameter, torch.dtype],
    apart: Collection[int] = (),
    conditional: Conditional | None = None,
    outer: Sequence[Sequence[nn.Module]] = (),
) -> list[list[nn.Module]]:
    """Return groups of modules below the root, children before parents.

    Modules with tied parameters always share a group.

    Args:
        model: the model to group.
        blocks: (name, module) of its repeated blocks.
        config: the bucketing policy.
        stored: storage dtype of each parameter that will not keep its current dtype.
        apart: ids of modules that each form a separate group under every policy. If the model has
            real-valued parameters, each module with only complex parameters also forms a separate
            group.
        conditional: settings of modules that only some ranks run.
        outer: further groups, from `outer_groups`.

    Raises:
        ConfigError: a module that must form its own group is tied to another module.
    """
    separate = {*apart, *_complex_modules(model)}
    separate |= separate_modules(model, conditional or {}, separate)
    groups: list[list[nn.Module]] = []
    by_policy = _groups_by_policy(model, blocks, config, stored)
    for group in cut_groups(model, by_policy, conditional or {}):
        rest = [module for module in group if id(module) not in separate]
        # All modules of the group may be separate.
        if rest:
            groups.append(rest)
    groups += [[module] for module in model.modules() if id(module) in separate]
    groups += map(list, outer)
    groups = _merge_tied(model, groups)
    # Merging may have joined a separate module to another group, so the check comes after it.
    _check_separate(model, groups, separate, fp32=apart)
    depth = {id(module): name.count(".") for name, module in model.named_modules()}
    # The sort is stable, in reverse too: groups of equal depth stay in the model's order.
    return sorted(groups, key=lambda group: max(depth[id(each)] for each in group), reverse=True)


def outer_groups(
    model: nn.Module,
    blocks: Sequence[tuple[str, nn.Module]],
    stored: Mapping[nn.Parameter, torch.dtype],
    separate: Collection[int] = (),
) -> list[list[nn.Module]]:
    """Return the group of the modules after the blocks and the group of the modules before them.

    Each must have at least `LARGE_BYTES`, and share no parameter with the other (a tied head).
    Modules of other groups stay in the root's group. Returns no group for a model without blocks or
    with complex parameters. See [Note: groups outside of the blocks].

    Args:
        model: see `bucket_modules`.
        blocks: see `bucket_modules`.
        stored: see `bucket_modules`.
        separate: ids of modules that form a group each.
    """
    if not blocks or any(map(torch.is_complex, model.parameters())):
        return []
    before, after = _around_blocks(model, [block for _, block in blocks], separate)
    if _parameters_of(before) & _parameters_of(after):
        return []
    groups = []
    for group in (after, before):
        if _stored_bytes(_parameters_of(group), stored) >= LARGE_BYTES:
            groups.append(group)
    return groups


def _around_blocks(
    model: nn.Module, blocks: Sequence[nn.Module], separate: Collection[int]
) -> tuple[list[nn.Module], list[nn.Module]]:
    """Return the modules outside of ``blocks``: embeddings and modules that are defined before the
    first block; modules that are defined after the last block.
    """
    position: dict[nn.Module, int] = {}
    for number, module in enumerate(model.modules()):
        position[module] = number
    inside = _parameters_of(blocks)
    before: list[nn.Module] = []
    after: list[nn.Module] = []
    for _, module in owning_modules(model):
        parameters = set(module.parameters())
        # Modules of a group must not contain each other. A module around blocks, or around other
        # modules with parameters, therefore stays in the root's group.
        is_leaf = parameters == set(own_parameters(module))
        if module is model or not is_leaf or parameters & inside or id(module) in separate:
            continue
        if isinstance(module, nn.Embedding) or position[module] < position[blocks[0]]:
            before.append(module)
        elif position[module] > position[blocks[-1]]:
            after.append(module)
    return before, after


def _parameters_of(modules: Sequence[nn.Module]) -> set[nn.Parameter]:
    found: set[nn.Parameter] = set()
    for module in modules:
        found.update(module.parameters())
    return found


def _stored_bytes(
    parameters: Iterable[nn.Parameter], stored: Mapping[nn.Parameter, torch.dtype]
) -> int:
    """Return the bytes of ``parameters`` in their storage dtypes."""
    size = 0
    for parameter in parameters:
        size += parameter.numel() * stored.get(parameter, parameter.dtype).itemsize
    return size


def _complex_modules(model: nn.Module) -> set[int]:
    """Return the ids of modules with trained parameters that are all complex.

    These modules need separate groups because a group has one dtype. Empty if all trained
    parameters of the model are complex.
    """
    trained = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            trained.append(parameter)
    if all(map(torch.is_complex, trained)):
        return set()
    found = set()
    for _, module in owning_modules(model):
        kinds = set()
        for own in own_parameters(module):
            if own.requires_grad:
                kinds.add(own.is_complex())
        # The root always has its own group.
        if module is not model and kinds == {True}:
            found.add(id(module))
    return found


def _groups_by_policy(
    model: nn.Module,
    blocks: Sequence[tuple[str, nn.Module]],
    config: BucketingConfig,
    stored: Mapping[nn.Parameter, torch.dtype],
) -> list[list[nn.Module]]:
    """Return the groups of the policy ``config.name``, before groups with tied parameters merge."""
    if config.name == "block" and blocks:
        found: list[list[nn.Module]] = []
        for _, block in blocks:
            found.append([block])
        return found
    # The root (with an empty name) is left out, because `fully_shard` is applied to it last.
    owners = []
    for name, module in owning_modules(model):
        if name:
            owners.append((name, module))
    if config.name == "size":
        return _by_size(owners, config.size_mib, stored)
    if config.name == "none":
        # `fully_shard` takes modules, so it cannot separate two parameters of one module.
        log.info(
            "bucketing=none: a group per single parameter is not possible; the finest, a group per "
            "layer, is used"
        )
    if config.name == "block":
        log.warning(
            "bucketing=block: %s has no repeated blocks; a group per layer is used",
            type(model).__name__,
        )
    layers = []
    for _, module in owners:
        layers.append([module])
    return layers


def _by_size(
    owners: Sequence[tuple[str, nn.Module]],
    size_mib: float,
    stored: Mapping[nn.Parameter, torch.dtype],
) -> list[list[nn.Module]]:
    """Group consecutive modules up to ``size_mib``.

    Modules of one group must not contain each other. Therefore only modules without another owner
    of parameters below them are grouped. Direct parameters of the modules around them go to the
    root's group.
    """
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
        size = _stored_bytes(module.parameters(), stored)
        # A module that exceeds the limit forms its own group.
        if not groups or filled + size > limit:
            groups.append([])
            filled = 0
        groups[-1].append(module)
        filled += size
    # A single group would equal the root's group, so no group is needed.
    if len(groups) == 1:
        return []
    return groups


def _merge_tied(model: nn.Module, groups: list[list[nn.Module]]) -> list[list[nn.Module]]:
    """Merge groups that share a parameter.

    A group that shares a parameter with the root's group is merged into the root's group.
    """
    # Index of a group -> index of the group into which it is merged.
    target = {_ROOT: _ROOT}
    group_of: dict[int, int] = {}
    for index, group in enumerate(groups):
        target[index] = index
        group_of |= {id(module): index for module in group}
    # Name of a module -> index of its group. A module without a group has its parent's group.
    around: dict[str, int] = {}
    holders: dict[nn.Parameter, set[int]] = defaultdict(set)
    for name, module in model.named_modules(remove_duplicate=False):
        outer = around.get(name.rpartition(".")[0], _ROOT)
        around[name] = group_of.get(id(module), outer)
        for _, parameter in direct_parameters(module):
            holders[parameter].add(around[name])
    for sharing in holders.values():
        # Groups that were merged before have one target and move together.
        joining = {target[each] for each in sharing}
        first = min(joining)
        for index, current in target.items():
            if current in joining:
                target[index] = first
    joined: dict[int, list[nn.Module]] = defaultdict(list)
    for index, group in enumerate(groups):
        joined[target[index]] += group
    # The root's group needs no entry: it holds all parameters that no other group holds.
    joined.pop(_ROOT, None)
    return list(joined.values())


def _check_separate(
    model: nn.Module,
    groups: list[list[nn.Module]],
    separate: Collection[int],
    fp32: Collection[int],
) -> None:
    """Raise `ConfigError` if a module of ``separate`` is in a group with another module.

    ``fp32`` holds the ids of the modules in ``precision.fp32_modules``.
    """
    alone = set()
    for group in groups:
        if len(group) == 1:
            alone.add(id(group[0]))
    joined = set(separate) - alone
    for name, module in model.named_modules():
        if id(module) not in joined:
            continue
        why = "complex parameters need a separate group"
        if id(module) in fp32:
            why = "precision.fp32_modules"
        raise ConfigError(
            f"{why}: {name} is tied to, or is, a module outside of them; choose both or none"
        )
