"""A copy of the model on meta, split over the tensor axis as the model itself will be, but not
sharded: what it computes costs nothing, and what it would send over the tensor axis can be counted.

`tensor_twin` makes it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from parallel2d.config import ParallelConfig
from parallel2d.cost.model_shapes import without_storage
from parallel2d.model_structure import find_blocks
from parallel2d.parallelize.activation_checkpointing import checkpoint_activations
from parallel2d.parallelize.bucketing import bucket_modules
from parallel2d.parallelize.precision import Precision, cast_storage
from parallel2d.parallelize.tensor_parallel import split_layers


def tensor_twin(
    model: nn.Module,
    mesh: DeviceMesh | None,
    config: ParallelConfig,
    plan: Mapping[str, object] | None,
) -> nn.Module:
    """``model``: before `parallelize`, on meta. The copy stays whole without ``plan``. It computes
    in the dtypes that sharding would cast to: those of ``precision.param`` but for
    ``precision.fp32_modules``; its blocks are recomputed as ``activation_checkpointing`` says.

    Raises `ConfigError` for what `parallelize` would refuse.
    """
    twin = without_storage(model)
    precision = Precision.of(config.precision, twin)
    cast_storage(twin, dataclasses.replace(precision, storage=precision.param))
    blocks = find_blocks(twin, config.bucketing.blocks, config.bucketing.policy)
    groups = bucket_modules(twin, blocks, config.bucketing, precision.fp32_modules)
    if mesh is not None and plan is not None:
        split_layers(twin, mesh, plan)
    checkpoint_activations(twin, blocks, config.activation_checkpointing)
    if precision.param == precision.storage:
        return twin
    # Sharding makes one group of what is left, at the root.
    for group in [*groups, [twin]]:
        for module in group:
            _cast_at_its_border(module, precision)
    return twin


@contextmanager
def on_fake_tensors(twin: nn.Module, device_type: str) -> Iterator[None]:
    """Inside, parameters, buffers and whatever is made have no storage, and their ``device`` is
    ``device_type``: some models refuse to run on plain meta tensors, which are twice as fast.
    ``twin``, all of it on meta, cannot be used outside any more."""
    with FakeTensorMode():
        _replace_by_fake_tensors(twin, device_type)
        yield


def _replace_by_fake_tensors(twin: nn.Module, device_type: str) -> None:
    made: dict[int, Any] = {}
    for module in twin.modules():
        owned: dict[str, Any]
        for owned in (module._parameters, module._buffers):
            for name, value in owned.items():
                if value is None:
                    continue
                # Once for each tensor: tied parameters stay tied.
                if id(value) not in made:
                    made[id(value)] = _fake(value, device_type)
                owned[name] = made[id(value)]


def _fake(value: Tensor, device_type: str) -> Tensor:
    """A parameter for a parameter, a `DTensor` for a `DTensor`."""
    if isinstance(value, DTensor):
        fake: Tensor = DTensor.from_local(
            _empty_like(value._local_tensor, device_type),
            value.device_mesh,
            value.placements,
            run_check=False,
            # Given, since torch would take the parts of all ranks to be equal in size.
            shape=value.shape,
            stride=value.stride(),
        )
    else:
        fake = _empty_like(value, device_type)
    if isinstance(value, nn.Parameter):
        return nn.Parameter(fake, value.requires_grad)
    return fake


def _empty_like(value: Tensor, device_type: str) -> Tensor:
    return torch.empty(value.shape, dtype=value.dtype, device=device_type)


def _cast_at_its_border(module: nn.Module, precision: Precision) -> None:
    """Casts what goes in and out as sharding does for a group. A module of
    ``precision.fp32_modules`` computes in fp32 and returns values in ``precision.param``."""
    in_fp32 = id(module) in precision.fp32_modules
    inside = precision.param
    if in_fp32:
        inside = torch.float32

    def enter(_module: nn.Module, given: Any, named: Any) -> tuple[Any, Any]:
        return _cast(given, inside), _cast(named, inside)

    def leave(_module: nn.Module, _given: Any, output: Any) -> Any:
        return _cast(output, precision.param)

    if in_fp32 or precision.cast_inputs:
        module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True)
    if in_fp32:
        module.register_forward_hook(leave)


def _cast(values: Any, dtype: torch.dtype) -> Any:
    def cast(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point():
            return tensor.to(dtype)
        return tensor

    return tree_map_only(Tensor, cast, values)
