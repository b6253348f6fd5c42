"""Inventory of the private names of torch that this package uses, with reasons.

`REACHED` and `KEPT` list names of `fully_shard`, and `OTHERS` lists names of tensors and autograd.
The tables are for torch 2.14. `tests/test_sync.py` compares the tables with the names that the
files of this package use, and reports names that the installed version of torch does not have.
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPCommContext, FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState, FSDPStateContext
from torch.distributed.tensor import DTensor

Table = tuple[tuple[Any, dict[str, str]], ...]

# Private names of `fully_shard` on classes and modules, each with its reason
REACHED: Table = (
    (FSDPModule, {
        "_get_fsdp_state": "no public accessor of the groups of parameters",
        "_set_unshard_async_op": "overlap on CPU, without streams (pytorch pull request 135523)",
    }),
    (FSDPState, {
        "_root_post_backward_final_callback": "the end of a backward pass; torch has no hook there",
    }),
    (FSDPParamGroup, {
        "post_backward": "the moment before gradients are reduced, for gradients of another dtype "
        "and partial sums (pytorch issues 190626, 194628, 196996); `set_all_reduce_hook` runs "
        "after the reduce-scatter",
        "_register_post_backward_hook": "the begin of a forward in any method of a module; hooks "
        "of modules see only `forward`",
        "wait_for_unshard": "no copies with one rank on the shard axis",
        "_to_unsharded": "called by the function that replaces `wait_for_unshard`",
    }),
    (FSDPParam, {
        "to_sharded_dtensor": "`DTensor.from_local` takes ten times as long",
    }),
    (TrainingState, {"FORWARD": "a value of `_training_state`"}),
)  # fmt: skip

# Private attributes of `fully_shard`'s objects, which are set only on instances
KEPT: dict[type, dict[str, str]] = {
    FSDPState: {
        "_fsdp_param_groups": "no public accessor of the groups of parameters",
        "_state_ctx": "holds `post_backward_final_callback_queued`",
        "_training_state": "whether a forward runs, in any method of a module",
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
        "_orig_dtype": "gradients are added in it; no setting (pytorch issue 194628)",
    },
    FSDPParam: {
        "sharded_param": "the parameter that the optimizer has, while the gathered one is in the "
        "modules",
        "_unsharded_param": "the parameter to which autograd adds gradients",
    },
}  # fmt: skip

# Private names of tensors and autograd
OTHERS: Table = (
    (Tensor, {
        "_post_accumulate_grad_hooks": "hooks of users wait for the reduction over replicas; "
        "no public way to take them off and on",
        "_base": "whether a tensor that a script writes to is a copy of rows",
        "_version": "whether parameters were changed; only the increment is public",
    }),
    (DTensor, {
        "_local_tensor": "`to_local` is known to autograd, and makes a view of a parameter",
    }),
    (torch, {"_C": "holds the names below"}),
    (torch._C, {
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
)  # fmt: skip
