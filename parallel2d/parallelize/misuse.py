"""Mistakes around `parallelize` that would train wrongly or hang without a word, each turned into one error.

A model and a mesh flow in before and after sharding; nothing flows out but errors. The checks cost one small collective at the start
and, under a tensor axis, one more in the first forward.
"""

from __future__ import annotations

import functools
import gc
import hashlib
import socket
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.utils._pytree import tree_leaves

from parallel2d.config import ConfigError, ParallelConfig


def check_arguments(model: nn.Module, mesh: object, config: object) -> None:
    """Raises `ConfigError` for a mesh or configuration of another kind, and for a model that is sharded already."""
    if not isinstance(mesh, DeviceMesh):
        raise ConfigError(f"the second argument of parallelize is the mesh, from parallel2d.build_mesh; got {mesh!r}")
    if config is not None and not isinstance(config, ParallelConfig):
        raise ConfigError(
            f"the third argument of parallelize is a ParallelConfig, such as ParallelConfig('zero3'); got {config!r}"
        )
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        raise ConfigError("the model is sharded already, by parallelize or fully_shard: give the plain one, once")


def check_same_torch() -> None:
    """Raises `ConfigError` on every rank, naming hosts and versions, when ranks run different torch versions. Collective."""
    versions: list[tuple[str, str]] = [("", "")] * dist.get_world_size()
    dist.all_gather_object(versions, (str(torch.__version__), socket.gethostname()))
    if len({version for version, _ in versions}) > 1:
        found = sorted({f"{host}: torch {version}" for version, host in versions})
        raise ConfigError(
            f"ranks run different torch versions ({', '.join(found)}): collectives would hang or mix; install the same one"
        )


def check_no_optimizer(model: nn.Module) -> None:
    """Raises `ConfigError` when a live optimizer holds parameters of ``model``: sharding replaces them, so it would train nothing."""
    parameters = {id(parameter) for parameter in model.parameters()}
    for found in gc.get_objects():
        if not issubclass(type(found), torch.optim.Optimizer):
            continue
        if any(id(parameter) in parameters for group in found.param_groups for parameter in group["params"]):
            raise ConfigError(
                f"{type(found).__name__} was built before parallelize: it holds parameters that sharding replaces, and would "
                "train nothing; build it after, on the parameters of the model that parallelize returns"
            )


def refuse_direct_forward(model: nn.Module) -> None:
    """Makes ``model.forward(x)`` raise RuntimeError outside of ``model(x)``: the hooks that gather parameters run in the call."""
    assert isinstance(model, FSDPModule)
    forward, state = model.forward, model._get_fsdp_state()

    @functools.wraps(forward)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        if state._training_state != TrainingState.FORWARD:
            raise RuntimeError(
                "model.forward(...) was called directly: the parameters are sharded and only model(...) gathers them; call the model"
            )
        return forward(*args, **kwargs)

    model.forward = guarded


def check_tensor_ranks_share_data(model: nn.Module, mesh: DeviceMesh) -> None:
    """Makes the first forward under a tensor axis compare its inputs over that axis; raises `ConfigError` when they differ.

    A sampler keyed on the global rank feeds each tensor rank other data, which their matrices, parts of one, silently mix.
    """
    if "tensor" not in (mesh.mesh_dim_names or ()):
        return
    group = mesh.get_group("tensor")

    def compare(_module: nn.Module, args: Any, kwargs: Any) -> None:
        handle.remove()
        digests: list[str] = [""] * dist.get_world_size(group)
        dist.all_gather_object(digests, _digest((args, kwargs)), group=group)
        if len(set(digests)) > 1:
            ranks = dist.get_process_group_ranks(group)
            raise ConfigError(
                f"ranks {ranks} share one tensor axis and were fed different data: a sampler must be keyed on "
                "parallel2d.data_coordinate(mesh) and its number of ranks, mesh_shape(mesh).data_ranks, not on the global rank"
            )

    handle = model.register_forward_pre_hook(compare, prepend=True, with_kwargs=True)


def _digest(inputs: Any) -> str:
    digest = hashlib.sha256()
    for leaf in tree_leaves(inputs):
        if isinstance(leaf, Tensor):
            digest.update(f"{tuple(leaf.shape)} {leaf.dtype}".encode())
            digest.update(leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
