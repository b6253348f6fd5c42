"""Context parallelism: divide the activations of a sequence over the ``context`` axis.

The repeated blocks of the model must mix positions only in ``F.scaled_dot_product_attention``.
`parallelize` calls `intercept_attention` before activation checkpointing and compilation,
`slice_blocks` after compilation, and `learn_at_first` after all other transforms.

Before the first forward, `ContextCheck` compares a split forward with an unsplit forward. If the
results differ, the check raises an error that names the module that cannot be split.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from parallel2d.base.errors import ConfigError
from parallel2d.base.replicas import current
from parallel2d.parallel.context_axis import ContextAxis, register_axis
from parallel2d.parallel.fsdp_internals.sharded_model import in_backward
from parallel2d.parallel.mesh import axis_names, group_of, mesh_shape
from parallel2d.parallel.model_structure import find_blocks
from parallel2d.parallel.parallelize.context_blocks import SplitBlock, Stack
from parallel2d.parallel.parallelize.context_check import ContextCheck
from parallel2d.parallel.weights.named_tensors import undisturbed

log = logging.getLogger(__name__)


def intercept_attention(model: nn.Module, mesh: DeviceMesh) -> list[Stack]:
    """Redirect the calls of attention of the model's blocks. Return the stacks of blocks.

    Returns an empty list if the mesh has no context axis. Raises `ConfigError` for a model without
    repeated blocks.
    """
    if mesh_shape(mesh).context == 1:
        return []
    axis = ContextAxis(mesh)
    blocks = find_blocks(model)
    if not blocks:
        raise ConfigError(
            f"mesh.context={axis.size}: {type(model).__name__} has no repeated blocks, which "
            "context parallelism needs; use mesh.context=1"
        )
    register_axis(model, axis)
    stacks: dict[str, Stack] = defaultdict(lambda: Stack(axis))
    for name, module in blocks:
        container = name.rpartition(".")[0]
        SplitBlock(stacks[container], name, module).intercept()
    return list(stacks.values())


def slice_blocks(stacks: Sequence[Stack]) -> None:
    """Prepare the blocks of ``stacks`` for slices. They compute on slices after the check of
    `learn_at_first`."""
    for stack in stacks:
        for block in stack.blocks:
            block.split()


def learn_at_first(
    model: nn.Module, mesh: DeviceMesh, stacks: Sequence[Stack], *, compares: bool = True
) -> None:
    """Make the first forward of ``model`` check and split ``stacks``.

    The check is a pre-forward hook. This hook runs before all other hooks, because the check calls
    the model.

    Args:
        model: the parallelized model.
        mesh: its mesh.
        stacks: from `intercept_attention`.
        compares: True to compare an unsplit forward with a split forward, and to give each rank
            different random numbers. False for tensors without values.
    """
    if not stacks:
        return
    multiple = mesh_shape(mesh).tensor
    # All ranks must raise the same error. With fault tolerance the replicas check separately,
    # because a joining replica runs its first forward without the other replicas.
    agreeing = ("shard", "tensor") if current() is not None else ("replicate", "shard", "tensor")
    groups = []
    for axis in agreeing:
        if axis in axis_names(mesh):
            groups.append(group_of(mesh, axis))

    def learn(_module: nn.Module, args: Any, kwargs: Any) -> None:
        if stacks[0].axis.is_learning:
            return
        with undisturbed(model):
            ContextCheck(model, stacks, groups, multiple, compares).run(args, kwargs)
        hook.remove()
        if not compares:
            return
        split = [stack for stack in stacks if stack.is_split]
        for stack in split:
            stack.draws_alike = False
        names = []
        for stack in split:
            names.append(stack.blocks[0].name)
        log.info("sequences are divided from %s on", ", ".join(names))

    def check_closed(*_: Any) -> None:
        if not in_backward():
            for stack in stacks:
                stack.check_closed()

    hook = model.register_forward_pre_hook(learn, prepend=True, with_kwargs=True)
    model.register_forward_hook(check_closed)
