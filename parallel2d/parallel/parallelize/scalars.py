"""Parameters without dimensions, such as the temperature of a contrastive loss.

`fully_shard` refuses them: there is nothing to split. `keep_whole` keeps them whole on every rank,
as `DTensor`s that are replicated over all axes, so that optimizers, norms, states and checkpoints
find parameters of one kind. While the model computes, plain tensors on the same memory take their
places in the modules, and their gradients are averaged over the data ranks with the others'.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from parallel2d.base.errors import ConfigError
from parallel2d.parallel.mesh import mesh_shape


class Scalar:
    """One such parameter. ``places``: the (module, attribute) of each of its occurrences."""

    def __init__(self, places: list[tuple[nn.Module, str]], mesh: DeviceMesh) -> None:
        self._places = places
        self._mesh = mesh
        module, name = places[0]
        parameter = module._parameters[name]
        assert parameter is not None
        # The one that computes. After tensor parallelism it may be replicated over that axis.
        self._plain: nn.Parameter = parameter
        self._tensor_mesh: DeviceMesh | None = None
        if isinstance(parameter, DTensor):
            self._tensor_mesh = parameter.device_mesh
        # The one that the optimizer has, also while `_plain` is in the modules.
        self._kept = self._replicated(parameter)
        self._put(self._kept)

    def _replicated(self, parameter: nn.Parameter) -> nn.Parameter:
        """``parameter`` as a `DTensor` on all axes of the mesh that have parameters."""
        axes = ["shard"]
        if mesh_shape(self._mesh).replicate > 1:
            axes = ["replicate", "shard"]
        local = parameter.detach()
        if isinstance(local, DTensor):
            local = local.to_local()
            axes.append("tensor")
        # As `fully_shard` does with the other parameters.
        if self._mesh.device_type != "cpu" and not local.is_meta:
            index = torch.accelerator.current_device_index()
            local = local.to(torch.device(self._mesh.device_type, index))
        mesh = self._mesh[tuple(axes)]
        value = DTensor.from_local(local, mesh, [Replicate()] * mesh.ndim, run_check=False)
        return nn.Parameter(value, parameter.requires_grad)

    def _put(self, parameter: nn.Parameter) -> None:
        for module, name in self._places:
            module._parameters[name] = parameter

    @property
    def parameter(self) -> nn.Parameter:
        """The one that the optimizer has. Allocation and loading may have replaced it."""
        module, name = self._places[0]
        found = module._parameters[name]
        if found is self._plain:
            return self._kept
        assert found is not None
        return found

    def compute(self) -> None:
        """Puts the plain tensor into the modules."""
        parameter = self.parameter
        if not self._shares_memory_with(_local(parameter)):
            self._plain = self._plain_copy_of(parameter)
        # The user may have frozen the one that the optimizer has.
        self._plain.requires_grad_(parameter.requires_grad)
        self._kept = parameter
        self._put(self._plain)

    def _shares_memory_with(self, local: Tensor) -> bool:
        """Whether the plain tensor does: not after allocation or loading has replaced the other."""
        if self._plain.device != local.device:
            return False
        return _local(self._plain).data_ptr() == local.data_ptr()

    def _plain_copy_of(self, parameter: nn.Parameter) -> nn.Parameter:
        """A parameter on the same memory that computes."""
        value: Tensor = _local(parameter).detach()
        if self._tensor_mesh is not None:
            value = DTensor.from_local(value, self._tensor_mesh, [Replicate()], run_check=False)
        return nn.Parameter(value, parameter.requires_grad)

    def rest(self) -> None:
        """Puts the replicated parameter back."""
        self._put(self.parameter)

    @property
    def gradient(self) -> Tensor | None:
        """What autograd has added up on this rank since the last `set_mean`, plain."""
        gradient = self._plain.grad
        # Over the tensor axis it may be a part of a sum.
        if isinstance(gradient, DTensor):
            return gradient.full_tensor()
        return gradient

    def set_mean(self, mean: Tensor | None) -> None:
        """Adds the mean over the data ranks to the gradient of `parameter`; None: no rank has
        one."""
        self._plain.grad = None
        parameter = self.parameter
        if mean is None:
            return
        local = mean.to(device=parameter.device, dtype=parameter.dtype).reshape(())
        if parameter.grad is not None:
            _local(parameter.grad).add_(local)
        else:
            assert isinstance(parameter, DTensor)
            parameter.grad = DTensor.from_local(
                local, parameter.device_mesh, parameter.placements, run_check=False
            )
        # Autograd calls such hooks for the parameter that computes, which has none.
        hooks = parameter._post_accumulate_grad_hooks or {}
        for hook in list(hooks.values()):
            hook(parameter)

    def discard(self) -> None:
        """Drops what was added up on this rank alone."""
        self._plain.grad = None


def scalar_places(
    model: nn.Module, left_out: Container[nn.Parameter]
) -> dict[nn.Parameter, list[tuple[nn.Module, str]]]:
    """The (module, attribute) of each occurrence of each parameter without dimensions that is not
    in ``left_out``. Raises `ConfigError` for complex ones, and where the model has no others."""
    places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None or parameter.ndim > 0 or parameter in left_out:
                continue
            if parameter.is_complex():
                raise ConfigError(
                    f"{name} is complex and has no dimensions: give it one, torch.zeros(1)"
                )
            places.setdefault(parameter, []).append((module, name))
    if not places:
        return places
    to_shard = [parameter for parameter in model.parameters() if parameter not in places]
    if all(parameter in left_out for parameter in to_shard):
        raise ConfigError(
            "the model has parameters without dimensions alone: there is nothing to shard"
        )
    return places


def keep_whole(
    model: nn.Module, mesh: DeviceMesh, places: Iterable[list[tuple[nn.Module, str]]]
) -> list[Scalar]:
    """Replicates the parameters at ``places``, from `scalar_places`. To be called after
    `fully_shard`, which must have ignored them."""
    scalars = [Scalar(each, mesh) for each in places]
    if not scalars:
        return []

    def compute(*_: Any) -> None:
        for scalar in scalars:
            scalar.compute()

    def rest(*_: Any) -> None:
        # With gradients the plain tensors stay, for recomputation and until their gradients have
        # been averaged.
        if not torch.is_grad_enabled():
            rest_all(scalars)

    # Before other hooks of the model, so that these find the plain tensors too.
    model.register_forward_pre_hook(compute, prepend=True)
    model.register_forward_hook(rest, always_call=True)
    for module in model.modules():
        module.register_state_dict_pre_hook(lambda *_: rest_all(scalars))
    return scalars


def rest_all(scalars: list[Scalar]) -> None:
    for scalar in scalars:
        scalar.rest()


def _local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor
