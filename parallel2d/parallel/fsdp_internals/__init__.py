"""All private attributes of torch's `fully_shard` that this package reaches.

Each use says why it is needed and, where one is known, which public interface or issue would make
it unnecessary. Written for torch 2.13; `tests/test_sync.py` compares `REACHED` and `KEPT` with what
these files reach, and lists what another torch version lacks.
"""

# The tensors of an output on which torch puts its hooks. A public traversal such as `tree_leaves`
# does not enter the same containers.
from torch.distributed.fsdp._common_utils import collect_grad_tensors

# `FSDPModule.set_custom_all_gather` and `set_custom_reduce_scatter` are public and take these
# classes, which `torch.distributed.fsdp` does not export.
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from parallel2d.parallel.fsdp_internals.forward_order import ForwardOrder, prefetch_in_forward
from parallel2d.parallel.fsdp_internals.private_names import KEPT, REACHED
from parallel2d.parallel.fsdp_internals.sharded_group import (
    ShardedGroup,
    ShardedParameter,
    sharded_groups,
)
from parallel2d.parallel.fsdp_internals.sharded_model import (
    RunningForward,
    after_backward,
    groups,
    has_begun,
    in_backward,
    reduce_over_shard_alone,
    reset_iteration,
    set_asynchronous_gathers,
    states,
)

__all__ = [
    "KEPT",
    "REACHED",
    "AllGather",
    "ForwardOrder",
    "ReduceScatter",
    "RunningForward",
    "ShardedGroup",
    "ShardedParameter",
    "after_backward",
    "collect_grad_tensors",
    "groups",
    "has_begun",
    "in_backward",
    "prefetch_in_forward",
    "reduce_over_shard_alone",
    "reset_iteration",
    "set_asynchronous_gathers",
    "sharded_groups",
    "states",
]
