"""Splits each matrix over the ``tensor`` axis, as a plan says. The model and a plan flow in; layers become DTensors."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module

from parallel2d.config import ConfigError
from parallel2d.parallelize.structure import tied_parameters


def apply_tensor_parallel(model: nn.Module, mesh: DeviceMesh, plan: Mapping[str, object] | None) -> nn.Module:
    """Applies ``plan`` (module pattern -> `ParallelStyle`) over the mesh's ``tensor`` axis; without that axis, nothing.

    Raises `ConfigError` when there is an axis and no plan, or a pattern that matches no module.
    """
    if "tensor" not in (mesh.mesh_dim_names or ()):
        return model
    if not plan:
        raise ConfigError(
            f"mesh.tensor={mesh['tensor'].size()}: {type(model).__name__} has no tensor-parallel plan; give one "
            "(model.tensor_plan=package.module:function, or tensor_plan= in code) or set mesh.tensor=1"
        )
    names = [name for name, _ in model.named_modules()]
    for pattern in plan:
        if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
            raise ConfigError(f"tensor-parallel plan: {pattern!r} matches no module of {type(model).__name__}")
    ties = tied_parameters(model)
    parallelize_module(model, mesh["tensor"], dict(plan))  # type: ignore[arg-type]
    for (
        first,
        first_name,
    ), *others in ties:  # splitting makes a new parameter per module; tied ones must stay one
        for module, name in others:
            module._parameters[name] = first._parameters[first_name]
    return model
