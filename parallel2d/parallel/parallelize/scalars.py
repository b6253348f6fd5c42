"""Parameters without dimensions or without elements: `replicate_scalars`.

Examples are the temperature of a contrastive loss and adapters of rank 0. `fully_shard` supports
neither kind of parameter. Here each of these parameters becomes a `DTensor` that is replicated over
all axes, so that optimizers, gradient norms, states and checkpoints handle it like all other
parameters. During forward and backward, the modules hold a *compute parameter* instead: an
`nn.Parameter` that shares the memory of the `DTensor`. Its gradient is averaged over the data ranks
together with the other gradients.
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
    """One parameter without dimensions or elements.

    Args:
        places: (module, attribute) of each occurrence of the parameter.
        mesh: the mesh of the model.
        computes_in: compute dtype, used only for a parameter without elements.
    """

    def __init__(
        self, places: list[tuple[nn.Module, str]], mesh: DeviceMesh, computes_in: torch.dtype
    ) -> None:
        self._places = places
        # The compute parameter. With tensor parallelism it may be a `DTensor` on the tensor axis.
        self._plain = self._in_modules
        self._tensor_mesh: DeviceMesh | None = None
        # The mesh of the optimizer's parameter `_kept`
        axes = ["replicate", "shard"] if mesh_shape(mesh).replicate > 1 else ["shard"]
        if isinstance(self._plain, DTensor):
            self._tensor_mesh = self._plain.device_mesh
            axes.append("tensor")
        local = part_of(self._plain.detach())
        # `fully_shard` moves the other parameters to the device in the same way.
        if not local.is_meta:
            local = local.to(current_device(mesh.device_type))
        all_axes = mesh[tuple(axes)]
        whole = [Replicate()] * all_axes.ndim
        value = DTensor.from_local(local, all_axes, whole, run_check=False)
        self._kept = nn.Parameter(value, self._plain.requires_grad)
        # From here on `model.parameters()` yields `_kept`, except during a forward and its
        # backward: `compute` then puts `_plain` into the modules.
        self._put(self._kept)
        is_empty = not local.numel() and local.is_floating_point()
        # A parameter without dims needs no cast: in type promotion the other operand decides.
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
        """The parameter of the optimizer.

        The parameter is read from the modules, because allocation or loading may have replaced the
        parameter.
        """
        found = self._in_modules
        return self._kept if found is self._plain else found

    def compute(self) -> None:
        """Put the compute parameter into the modules."""
        parameter = self.parameter
        local = part_of(parameter).detach()
        plain = part_of(self._plain)
        dtype = self._computes_in or local.dtype
        is_same = plain.device == local.device and plain.data_ptr() == local.data_ptr()
        # Allocation or loading may have replaced the memory of the optimizer's parameter.
        if not is_same or plain.dtype != dtype:
            local = local.to(dtype)
            if self._tensor_mesh is not None:
                local = DTensor.from_local(local, self._tensor_mesh, [Replicate()], run_check=False)
            self._plain = nn.Parameter(local, parameter.requires_grad)
        # The user may have frozen the optimizer's parameter.
        self._plain.requires_grad_(parameter.requires_grad)
        self._kept = parameter
        self._put(self._plain)

    def rest(self) -> None:
        """Put the optimizer's parameter back into the modules."""
        self._put(self.parameter)

    @property
    def gradient(self) -> Tensor | None:
        """The gradient that this rank has accumulated since the last `set_mean`."""
        gradient = self._plain.grad
        # The gradient may be partial over the tensor axis.
        if isinstance(gradient, DTensor):
            return gradient.full_tensor()
        return gradient

    def set_mean(self, mean: Tensor | None) -> None:
        """Add the mean over the data ranks to the gradient of `parameter`.

        None: no rank has a gradient.
        """
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
        # Users register these hooks on the optimizer's parameter. Autograd accumulates into the
        # compute parameter and does not run them.
        hooks = parameter._post_accumulate_grad_hooks or {}
        for hook in list(hooks.values()):
            hook(parameter)

    def discard(self) -> None:
        """Discard the gradient that this rank has accumulated."""
        self._plain.grad = None


def scalar_places(model: nn.Module, left_out: Container[nn.Parameter]) -> Places:
    """Map each parameter without dims or elements to the (module, attribute) of its occurrences.

    Parameters in ``left_out`` are skipped. Raises `ConfigError` for a complex parameter without
    dims, and if the model has no other parameters.
    """
    places, has_others = {}, False
    for parameter, each in places_in(model.modules()).items():
        if parameter not in left_out:
            if stays_replicated(parameter):
                places[parameter] = each
            else:
                has_others = True
    for parameter, ((_, name), *_) in places.items():
        if parameter.is_complex() and parameter.ndim == 0:
            problem = "is complex and has no dimensions: give it one, torch.zeros(1)"
            raise ConfigError(f"{name} {problem}")
    if places and not has_others:
        raise ConfigError(
            "the model only has parameters without dimensions or elements: nothing to shard"
        )
    return places


def replicate_scalars(
    model: nn.Module,
    mesh: DeviceMesh,
    places: Iterable[list[tuple[nn.Module, str]]],
    computes_in: torch.dtype,
) -> list[Scalar]:
    """Replicate the parameters at ``places``, from `scalar_places`.

    Call this after `fully_shard`, which must have ignored these parameters.
    """
    scalars = []
    for each in places:
        scalars.append(Scalar(each, mesh, computes_in))
    if not scalars:
        return []

    def compute(*_: Any) -> None:
        for scalar in scalars:
            scalar.compute()

    def rest(*_: Any) -> None:
        # In training the compute parameters stay in the modules until their gradients are
        # averaged, because recomputation during backward must find the tensors of the forward. A
        # call of `state_dict` puts the optimizer's parameters back earlier.
        if not torch.is_grad_enabled():
            rest_all(scalars)

    # With `prepend` this hook runs first, so the other hooks also find the compute parameters.
    model.register_forward_pre_hook(compute, prepend=True)
    model.register_forward_hook(rest, always_call=True)
    for module in model.modules():
        module.register_state_dict_pre_hook(lambda *_: rest_all(scalars))
    return scalars


def rest_all(scalars: list[Scalar]) -> None:
    for scalar in scalars:
        scalar.rest()
