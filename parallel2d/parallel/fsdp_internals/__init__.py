"""All private attributes of torch's `fully_shard` that this package reaches.

Each use says why it is needed and, where one is known, which public interface or issue would make
it unnecessary. Written for torch 2.14; `tests/test_sync.py` compares `REACHED` and `KEPT` with what
these files reach, and lists what another torch version lacks.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.distributed.fsdp import FSDPModule, _common_utils
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPCommContext, FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState, FSDPStateContext
from torch.distributed.tensor import DTensor

# What the package reaches on classes and modules.
REACHED: tuple[tuple[Any, tuple[str, ...]], ...] = (
    (FSDPModule, ("_get_fsdp_state", "_set_unshard_async_op", "reset_iter_state")),
    (FSDPState, ("_root_post_backward_final_callback",)),
    (FSDPParamGroup, (
        "pre_forward", "post_backward", "finalize_backward", "wait_for_unshard", "_init_mp_dtypes",
        "_reduce_scatter_process_group", "_to_sharded",
    )),
    (FSDPParam, (
        # torch calls these two, and they add in `reduce_dtype`, which `set_dtypes` replaces.
        "accumulate_unsharded_grad_if_needed", "to_accumulated_grad_if_needed",
        "to_sharded_dtensor", "unsharded_param", "init_unsharded_param",
    )),
    (_common_utils, ("collect_grad_tensors",)),
    (AllGather, ("allocate", "__call__")),
    (ReduceScatter, ("allocate", "__call__")),
    (TrainingState, ("IDLE", "FORWARD")),
    (DTensor, ("_local_tensor", "_op_dispatcher")),
    (DTensor._op_dispatcher, ("_custom_op_handlers",)),
    (torch.UntypedStorage, ("_cdata",)),
    (torch.ops.aten, ("_local_scalar_dense",)),
    (Tensor, ("_base", "_post_accumulate_grad_hooks", "_version")),
    (torch, ("_C", "_dynamo")),
    (torch._C, ("_autograd", "_current_graph_task_id", "_functorch")),
    (torch._C._autograd, ("_top_saved_tensors_default_hooks",)),
    (forward_ad, ("_current_level",)),
)  # fmt: skip

# What it reaches on objects, once they have run.
KEPT: dict[type, tuple[str, ...]] = {
    FSDPState: (
        "_comm_ctx", "_fsdp_param_groups", "_is_root", "_state_ctx", "_states_to_forward_prefetch",
        "_training_state",
    ),
    FSDPCommContext: ("all_gather_stream", "post_forward_order", "reduce_scatter_stream"),
    FSDPStateContext: ("post_backward_final_callback_queued",),
    FSDPParamGroup: (
        "modules", "fsdp_params", "mesh_info", "mp_policy", "post_forward_mesh_info",
        "unshard", "post_forward", "is_unsharded", "_to_unsharded", "reduce_grads",
        "all_reduce_grads", "reduce_scatter_unused_params", "_all_gather_result", "_orig_dtype",
        "_partial_reduce_output", "_post_forward_indices",
        "_reduce_dtype", "_training_state",
    ),
    FSDPParam: (
        "sharded_param", "sharded_size", "mesh_info", "post_forward_mesh_info", "reduce_dtype",
        "unsharded_accumulated_grad", "padded_sharded_param_size", "_module_info",
        "_sharded_local_tensor", "_sharded_param_data", "_unsharded_param", "all_gather_outputs",
        "param_dtype",
    ),
}  # fmt: skip
