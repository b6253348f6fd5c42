"""Inventory of the private names of torch's `fully_shard` that this package uses, with reasons.

Written for torch 2.14. `tests/test_sync.py` compares `REACHED` and `KEPT` with the names that the
files of this package use, and lists the names that another version of torch lacks.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.distributed.fsdp import FSDPModule, _common_utils
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPCommContext, FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState, FSDPStateContext
from torch.distributed.tensor import DTensor

# Private names on classes and modules, each with its reason. Names of the FSDP engine first:
REACHED: tuple[tuple[Any, dict[str, str]], ...] = (
    (FSDPModule, {
        "_get_fsdp_state": "no public accessor of the groups of parameters",
        "_set_unshard_async_op": "overlap on CPU, without streams (pytorch pull request 135523)",
    }),
    (FSDPState, {
        "_root_post_backward_final_callback": "the end of a backward pass; torch has no hook there",
    }),
    (FSDPParamGroup, {
        "post_backward": "the moment before gradients are reduced; a hook there would replace it",
        "_register_post_backward_hook": "the begin of a forward in any method of a module; hooks "
        "of modules see only `forward`",
        "wait_for_unshard": "no copies with one rank on the shard axis",
        "_record_post_forward": "the order of prefetches in backward, which must not name a group "
        "that only some ranks run",
        "_to_unsharded": "called by what replaces `wait_for_unshard`",
    }),
    (FSDPParam, {
        "to_sharded_dtensor": "`DTensor.from_local` takes seven times as long",
    }),
    (Tensor, {
        "_post_accumulate_grad_hooks": "hooks of users wait for the reduction over replicas; "
        "no public way to take them off and on",
        "_base": "whether a tensor that a script writes to is a copy of rows",
        "_version": "whether parameters were changed; only the increment is public",
    }),
    (DTensor, {
        "_local_tensor": "`to_local` is known to autograd",
    }),
    (torch, {"_C": "holds the names below"}),
    (torch._C, {
        "_current_graph_task_id": "whether autograd runs; no public name",
        "_autograd": "holds `_top_saved_tensors_default_hooks`",
        "_functorch": "whether torch.func.jvp runs",
        "_len_torch_function_stack": "a mode below those of the script; `torch.set_default_device` "
        "does the same, and no public call",
        "_pop_torch_function_stack": "see `_len_torch_function_stack`",
        "_push_on_torch_function_stack": "see `_len_torch_function_stack`",
    }),
    (torch._C._autograd, {
        "_top_saved_tensors_default_hooks": "whether a checkpoint surrounds the code that runs",
    }),
    (_common_utils, {"collect_grad_tensors": "the tensors of an output on which torch has hooks"}),
    (TrainingState, {
        "FORWARD": "a value of `_training_state`",
        "POST_BACKWARD": "a value of `_training_state`",
    }),
    (torch.UntypedStorage, {"_cdata": "the identity of a storage, also of a freed one"}),
    (forward_ad, {"_current_level": "whether a forward-mode derivative is computed"}),
)  # fmt: skip

# Private names on objects, which exist once the objects have run. Names of the FSDP engine first:
KEPT: dict[type, dict[str, str]] = {
    FSDPState: {
        "_fsdp_param_groups": "no public accessor of the groups of parameters",
        "_is_root": "whether the model has begun its first forward",
        "_state_ctx": "holds `post_backward_final_callback_queued`",
        "_training_state": "whether a forward runs",
        "_comm_ctx": "holds the streams that metrics measure",
    },
    FSDPCommContext: {
        "all_gather_stream": "metrics measure its waits; streams have no hooks",
        "reduce_scatter_stream": "see `all_gather_stream`",
    },
    FSDPStateContext: {
        "post_backward_final_callback_queued": "whether an exception has ended a backward pass",
    },
    FSDPParamGroup: {
        "fsdp_params": "no public accessor of sharded and gathered parameters",
        "reduce_grads": "set by `set_requires_gradient_sync`, which has no getter",
        "all_reduce_grads": "set by `set_requires_all_reduce`, which has no getter",
        "_orig_dtype": "gradients are added in it; no setting (pytorch issue 194628)",
        "_reduce_dtype": "gradients are sent in it, also where sums have another dtype",
        "_training_state": "set where `post_backward` of torch is not called, for one rank",
        "modules": "whether a group has several modules, any of which may run",
        "post_forward_mesh_info": "whether parameters are freed after forward; the argument of "
        "`fully_shard` has no getter",
        "_all_gather_result": "none is kept where gathered parameters are the sharded ones",
    },
    FSDPParam: {
        "sharded_param": "the parameter that the optimizer has, while the gathered one is in the "
        "modules",
        "_unsharded_param": "the parameter to which autograd adds gradients",
    },
}  # fmt: skip
