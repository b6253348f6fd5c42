"""Parameters without dimensions, such as the temperature of a contrastive loss, and without
elements, such as adapters of rank 0. `fully_shard` takes neither. `replicate_scalars` keeps them
whole on every rank, as `DTensor`s that are replicated over all axes, so that optimizers, norms,
states and checkpoints find parameters of one kind. While the model computes, plain tensors on the
same memory take their places in the modules, and their gradients are averaged over the data ranks
with the others'.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from parallel2d.base.device import current_device
from parallel2d.base.errors import ConfigError
from parallel2d.parallel.fsdp_internals.tensors import part_of
from parallel2d.parallel.mesh import mesh_shape
from parallel2d.parallel.model_structure import Places, places_in, stays_replicated


class Scalar:
    """One such parameter. ``places``: the (module, attribute) of each of its occurrences.
    ``computes_in``: the dtype of one without elements while the model computes."""

    def __init__(
        self, places: list[tuple[nn.Module, str]], mesh: DeviceMesh, computes_in: torch.dtype
    ) -> None:
        self._places = places
        # The one that computes. After tensor parallelism it may be replicated over that axis.
        self._plain = self._in_modules
        self._tensor_mesh: DeviceMesh | None = None
        # The one that the optimizer has, also while `_plain` is in the modules.
        axes = ["replicate", "shard"] if mesh_shape(mesh).replicate > 1 else ["shard"]
        if isinstance(self._plain, DTensor):
            self._tensor_mesh = self._plain.device_mesh
            axes.append("tensor")
        local = part_of(self._plain.detach())
        # As `fully_shard` does with the other parameters.
        if not local.is_meta:
            local = local.to(current_device(mesh.device_type))
        all_axes = mesh[tuple(axes)]
        whole = [Replicate()] * all_axes.ndim
        value = DTensor.from_local(local, all_axes, whole, run_check=False)
        self._kept = nn.Parameter(value, self._plain.requires_grad)
        self._put(self._kept)
        is_empty = not local.numel() and local.is_floating_point()
        # One without dimensions takes the dtype of the tensors that it meets.
        self._computes_in = computes_in if is_empty else None

    @property
    def _in_modules(self) -> nn.Parameter:
        module, name = self._places[0]
        return module._parameters[name]  # type: ignore[return-value]

    def _put(self, parameter: nn.Parameter) -> None:
        for module, name in self._places:
            module._parameters[name] = parameter

    @property
    def parameter(self) -> nn.Parameter:
        """The one that the optimizer has. Allocation and loading may have replaced it."""
        found = self._in_modules
        return self._kept if found is self._plain else found

    def compute(self) -> None:
        """Puts the plain tensor into the modules."""
        parameter = self.parameter
        local = part_of(parameter).detach()
        plain = part_of(self._plain)
        dtype = self._computes_in or local.dtype
        is_same = plain.device == local.device and plain.data_ptr() == local.data_ptr()
        # Allocation or loading may have replaced the memory of the one that the optimizer has.
        if not is_same or plain.dtype != dtype:
            local = local.to(dtype)
            if self._tensor_mesh is not None:
                local = DTensor.from_local(local, self._tensor_mesh, [Replicate()], run_check=False)
            self._plain = nn.Parameter(local, parameter.requires_grad)
        # The user may have frozen the one that the optimizer has.
        self._plain.requires_grad_(parameter.requires_grad)
        self._kept = parameter
        self._put(self._plain)

    def rest(self) -> None:
        """Puts the replicated parameter back."""
        self._put(self.parameter)

    @property
    def gradient(self) -> Tensor | None:
        """The gradient that autograd has added up on this rank since the last `set_mean`, plain."""
        gradient = self._plain.grad
        # Over the tensor axis it may be a part of a sum.
        if isinstance(gradient, DTensor):
            return gradient.full_tensor()
        return gradient

    def set_mean(self, mean: Tensor | None) -> None:
        """Adds the mean over the data ranks to the gradient of `parameter`; None: no rank has
        one."""
        self._plain.grad = None
        parameter: Any = self.parameter
        if mean is None:
            return
        mean = mean.to(device=parameter.device, dtype=parameter.dtype)
        local = mean.expand(parameter.shape).clone()
        if parameter.grad is not None:
            part_of(parameter.grad).add_(local)
        else:
            mesh, placements = parameter.device_mesh, parameter.placements
            parameter.grad = DTensor.from_local(local, mesh, placements, run_check=False)
        # Autograd calls such hooks for the parameter that computes, which has none.
        hooks = parameter._post_accumulate_grad_hooks or {}
        for hook in list(hooks.values()):
            hook(parameter)

    def discard(self) -> None:
        """Drops what was added up on this rank alone."""
        self._plain.grad = None


def scalar_places(model: nn.Module, left_out: Container[nn.Parameter]) -> Places:
    """The (module, attribute) of each occurrence of each parameter without dimensions or elements
    that is not in ``left_out``. Raises `ConfigError` for complex ones without dimensions, and where
    the model has no others."""
    to_split = [parameter for parameter in model.parameters() if parameter not in left_out]
    scalars = {parameter for parameter in to_split if stays_replicated(parameter)}
    found = places_in(model.modules())
    places = {parameter: each for parameter, each in found.items() if parameter in scalars}
    for parameter, ((_, name), *_) in places.items():
        if parameter.is_complex() and parameter.ndim == 0:
            problem = "is complex and has no dimensions: give it one, torch.zeros(1)"
            raise ConfigError(f"{name} {problem}")
    if scalars and len(scalars) == len(to_split):
        raise ConfigError(
            "the model has parameters without dimensions or elements alone: nothing to shard"
        )
    return places


def replicate_scalars(
    model: nn.Module,
    mesh: DeviceMesh,
    places: Iterable[list[tuple[nn.Module, str]]],
    computes_in: torch.dtype,
) -> list[Scalar]:
    """Replicates the parameters at ``places``, from `scalar_places`. To be called after
    `fully_shard`, which must have ignored them."""
    scalars = [Scalar(each, mesh, computes_in) for each in places]
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
