"""Parameters without dimensions, such as the temperature of a contrastive loss.

`fully_shard` refuses them: there is nothing to split. They are kept whole on every rank, as
`DTensor`s that are replicated over all axes, so that optimizers, norms, states and checkpoints find
parameters of one kind. While the model computes they stand in their modules as plain tensors on the
same memory, and their gradients are averaged over the data ranks with the others'.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from parallel2d.errors import ConfigError
from parallel2d.mesh import mesh_shape


class Scalar:
    """One such parameter, in all the places where it stands."""

    def __init__(self, places: list[tuple[nn.Module, str]], mesh: DeviceMesh) -> None:
        self._places, self._mesh = places, mesh
        module, name = places[0]
        parameter = module._parameters[name]
        assert parameter is not None
        self._plain: nn.Parameter = parameter  # the one that computes
        # After tensor parallelism it may be replicated over that axis already.
        self._on_tensor_axis = parameter.device_mesh if isinstance(parameter, DTensor) else None
        # the other one, while `_plain` stands in its place
        self._kept = self._replicated(parameter)
        self._put(self._kept)

    def _replicated(self, parameter: nn.Parameter) -> nn.Parameter:
        names = [
            axis
            for axis in ("replicate", "shard")
            if axis == "shard" or mesh_shape(self._mesh).replicate > 1
        ]
        local = parameter.detach()
        if isinstance(local, DTensor):
            local, names = local.to_local(), [*names, "tensor"]
        if self._mesh.device_type != "cpu" and not local.is_meta:
            local = local.to(
                torch.device(self._mesh.device_type, torch.accelerator.current_device_index())
            )
        mesh = self._mesh[tuple(names)]
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
        return self._kept if found is self._plain else found  # type: ignore[return-value]

    def compute(self) -> None:
        """Puts the plain tensor in its place."""
        parameter = self.parameter
        local = _local(parameter)
        if self._plain.device != local.device or _local(self._plain).data_ptr() != local.data_ptr():
            value: Tensor = local.detach()
            if self._on_tensor_axis is not None:
                value = DTensor.from_local(
                    value, self._on_tensor_axis, [Replicate()], run_check=False
                )
            self._plain = nn.Parameter(value, parameter.requires_grad)
        self._plain.requires_grad_(parameter.requires_grad)
        self._kept = parameter
        self._put(self._plain)

    def rest(self) -> None:
        """Puts the replicated parameter back."""
        self._put(self.parameter)

    @property
    def gradient(self) -> Tensor | None:
        """What autograd has added up on this rank since the last `set_mean`, plain."""
        gradient = self._plain.grad
        return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient

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
        # as autograd would call them
        for hook in list((parameter._post_accumulate_grad_hooks or {}).values()):
            hook(parameter)

    def discard(self) -> None:
        """Drops what was added up on this rank alone."""
        self._plain.grad = None


def scalar_places(
    model: nn.Module, left_out: Container[nn.Parameter]
) -> dict[nn.Parameter, list[tuple[nn.Module, str]]]:
    """Each parameter without dimensions that is not in ``left_out`` -> the (module, attribute)
    where it stands. Raises `ConfigError` for complex ones, and where the model has no others."""
    places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.ndim == 0 and parameter not in left_out:
                places.setdefault(parameter, []).append((module, name))
                if parameter.is_complex():
                    raise ConfigError(
                        f"{name} is complex and has no dimensions: give it one, torch.zeros(1)"
                    )
    if places and all(
        parameter in places or parameter in left_out for parameter in model.parameters()
    ):
        raise ConfigError(
            "the model has parameters without dimensions alone: there is nothing to shard"
        )
    return places


def keep_whole(
    model: nn.Module, mesh: DeviceMesh, places: Iterable[list[tuple[nn.Module, str]]]
) -> list[Scalar]:
    """Replicates the parameters at ``places``. After `fully_shard`, which must have ignored
    them."""
    scalars = [Scalar(each, mesh) for each in places]
    if not scalars:
        return []

    def compute(*_: Any) -> None:
        for scalar in scalars:
            scalar.compute()

    def rest(*_: Any) -> None:
        if not torch.is_grad_enabled():
            rest_all(scalars)

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
