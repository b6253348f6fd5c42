"""Meta copy of a model with context and tensor parallelism but without FSDP: `meta_copy`.

`count_tensor_axis` runs the copy, without memory and computation, to count the communication over
the context and tensor axes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import GroupName, _resolve_process_group
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from parallel2d.base.device import preserve_rng_states
from parallel2d.parallel.cost.collectives import CollectiveTally
from parallel2d.parallel.loss import loss_chunks
from parallel2d.parallel.mesh import axes_of_groups
from parallel2d.parallel.model_structure import tensor_leaves, without_storage
from parallel2d.parallel.parallelize.activation_checkpointing import checkpoint_activations
from parallel2d.parallel.parallelize.context_parallel import (
    intercept_attention,
    learn_at_first,
    slice_blocks,
)
from parallel2d.parallel.parallelize.layout import Layout
from parallel2d.parallel.parallelize.precision import Precision, cast_storage
from parallel2d.parallel.parallelize.tensor_parallel import split_layers
from parallel2d.parallel.weights.geometry import as_part

ALL_AT_ONCE = 2**62  # logits per chunk: a single chunk
LossOfBatch = Callable[[nn.Module, Any, Any], Tensor]  # takes a model, inputs and targets

log = logging.getLogger(__name__)


def meta_copy(model: nn.Module, mesh: DeviceMesh | None, layout: Layout) -> nn.Module:
    """Return a meta copy of ``model`` for predictions. Without a mesh it has no tensor parallelism.

    The copy computes in the dtypes that FSDP would use, and has the configured activation
    checkpointing.
    """
    copied = without_storage(model)
    precision = Precision.of(layout.config.precision, copied)
    cast_storage(copied, dataclasses.replace(precision, storage=precision.param))
    if mesh is not None and layout.tensor_plan is not None:
        split_layers(copied, mesh, layout.tensor_plan)
    stacks = [] if mesh is None else intercept_attention(copied, mesh)
    checkpoint_activations(copied, layout.blocks_of(copied), layout.config.activation_checkpointing)
    slice_blocks(stacks)
    for group, modules in layout.groups_of(copied):
        for module in modules:
            _cast_at_its_border(module, group.policy)
    if mesh is not None:
        learn_at_first(copied, mesh, stacks, compares=False)
    return copied


@contextmanager
def on_fake_tensors(copied: nn.Module, device_type: str) -> Iterator[None]:
    """Run the body with fake tensors on ``device_type`` as parameters, buffers and new tensors.

    Some models do not run on meta tensors, which are twice as fast. ``copied`` must be on meta, and
    cannot be used after the context.
    """
    made: dict[int, Any] = {}
    with FakeTensorMode():
        for module in copied.modules():
            for owned in (module._parameters, module._buffers):
                for name, value in owned.items():
                    # Each tensor is replaced once, so that tied parameters stay tied.
                    if value is not None and id(value) not in made:
                        made[id(value)] = _fake(value, device_type)
                    owned[name] = made.get(id(value))
        yield


def _fake(value: Tensor, device_type: str) -> Tensor:
    """Return a fake parameter for a parameter, and a fake `DTensor` for a `DTensor`."""
    local = value._local_tensor if isinstance(value, DTensor) else value
    fake: Tensor = torch.empty(local.shape, dtype=local.dtype, device=device_type)
    if isinstance(value, DTensor):
        fake = as_part(fake, value)
    if isinstance(value, nn.Parameter):
        return nn.Parameter(fake, value.requires_grad)
    return fake


def _cast_at_its_border(module: nn.Module, policy: MixedPrecisionPolicy) -> None:
    """Cast inputs and outputs of ``module`` as FSDP does for a group with this ``policy``."""

    def enter(_module: nn.Module, given: Any, named: Any) -> tuple[Any, Any]:
        return cast(given, policy.param_dtype), cast(named, policy.param_dtype)

    def leave(_module: nn.Module, _given: Any, output: Any) -> Any:
        return cast(output, policy.output_dtype)

    if policy.param_dtype is not None and policy.cast_forward_inputs:
        module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True)
    if policy.output_dtype is not None:
        module.register_forward_hook(leave)


def cast(values: Any, dtype: torch.dtype | None) -> Any:
    """Return ``values`` with floating-point tensors in ``dtype``."""

    def cast_one(tensor: Tensor) -> Tensor:
        return tensor if dtype is None or not tensor.is_floating_point() else tensor.to(dtype)

    return tree_map_only(Tensor, cast_one, values)


class TensorTraffic(NamedTuple):
    """Communication of one rank over the tensor and context axes, for one micro-batch.

    ``sums`` are all-reduces of partial gradients over the tensor axis, before the reduce-scatter.
    """

    passes_bytes: float  # bytes over the tensor axis in forward and backward
    ring_passes: float  # passes of these collectives around a ring
    sums_bytes: float  # bytes of sums over the tensor axis
    sums_ring_passes: float  # passes of sums around a ring
    context_bytes: float = 0.0  # bytes over the context axis in forward and backward
    context_ring_passes: float = 0.0  # passes of these collectives around a ring

    def of_step(self, layout: Layout) -> dict[str, tuple[float, float]]:
        """Return bytes and ring passes of a step over each axis.

        Sums run in every backward, or once with ``sync.during_accumulation=none``.
        """
        passes = layout.workload.accumulation
        sums = 1 if layout.config.sync.during_accumulation == "none" else passes
        return {
            "tensor": (
                passes * self.passes_bytes + sums * self.sums_bytes,
                passes * self.ring_passes + sums * self.sums_ring_passes,
            ),
            "context": (passes * self.context_bytes, passes * self.context_ring_passes),
        }


_FUNCTIONAL, _C10D = torch.ops._c10d_functional, torch.ops.c10d
# Operator -> collective, and the position of the group among its arguments
_COUNTED = {
    _FUNCTIONAL.all_reduce.default: ("all_reduce", 2),
    _FUNCTIONAL.all_gather_into_tensor.default: ("all_gather", 2),
    _FUNCTIONAL.reduce_scatter_tensor.default: ("reduce_scatter", 3),
    _FUNCTIONAL.all_to_all_single.default: ("all_to_all", 3),
    _C10D.allreduce_.default: ("all_reduce", 1),
    _C10D._allgather_base_.default: ("all_gather", 2),
    _C10D._reduce_scatter_base_.default: ("reduce_scatter", 2),
    _C10D.alltoall_base_.default: ("all_to_all", 2),
}


class CollectiveCounter(TorchDispatchMode):
    """Counts the collectives of meta or fake tensors over the axes of ``mesh``.

    Such collectives do not reach their process group, so they are counted as operators.

    Args:
        mesh: the mesh with the axes.
        device_type: the device type for the bytes.
    """

    def __init__(self, mesh: DeviceMesh, device_type: str) -> None:
        super().__init__()
        self._device_type = device_type
        self._groups = axes_of_groups(mesh)
        self._axes: dict[str, CollectiveTally] = {}
        for group, axis in self._groups.items():
            self._axes[axis] = CollectiveTally(axis, group.size())

    def start(self) -> None:
        """Set all counts to zero."""
        for traffic in self._axes.values():
            traffic.reset()

    def over(self, axis: str) -> tuple[float, int]:
        """Return bytes and ring passes over ``axis`` since `start`; zeros for an absent axis."""
        traffic = self._axes.get(axis)
        return (traffic.bytes, traffic.ring_passes) if traffic else (0.0, 0)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # The collectives of a `DTensor` run on its local tensors, and are counted there.
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        result = function(*args, **(kwargs or {}))
        if function in _COUNTED:
            collective, place = _COUNTED[function]
            axis = self._axes.get(self._axis_of(args[place]))
            if axis is not None and axis.size > 1:
                sizes = [each.nbytes for each in tensor_leaves((args, result))]
                axis.add(collective, max(sizes), self._device_type)
        return result

    def _axis_of(self, group: Any) -> str:
        """Return the axis of ``group``, an argument of operators; empty for an unknown group."""
        if isinstance(group, torch.ScriptObject):
            group = dist.ProcessGroup.unbox(group)
        with contextlib.suppress(RuntimeError, ValueError, KeyError):
            group = _resolve_process_group(GroupName(group)) if isinstance(group, str) else group
        return self._groups.get(group, "")


def count_tensor_axis(
    copied: nn.Module, mesh: DeviceMesh, layout: Layout, loss: LossOfBatch
) -> TensorTraffic | None:
    """Run one micro-batch of ``layout`` on ``copied``, from `meta_copy`, and count the traffic.

    No communication. Returns None, and logs the reason, if the copy cannot run.
    """
    problem: Exception | None = None
    # Try meta tensors first, which are twice as fast. Some models run only on fake tensors, which
    # have a device. With a context axis only fake tensors are used, because the device determines
    # the attention kernel, and the kernel determines the collectives of backward.
    for device_type in ("meta", mesh.device_type)[layout.shape.context > 1 :]:
        pretend = nullcontext() if device_type == "meta" else on_fake_tensors(copied, device_type)
        counter = CollectiveCounter(mesh, layout.workload.device_type)
        try:
            with pretend, loss_chunks(ALL_AT_ONCE), preserve_rng_states(), counter:
                inputs, targets = layout.workload.example(device_type)
                if layout.shape.context > 1:
                    # The first forward also runs the forwards of `ContextCheck`, which must not be
                    # counted.
                    with torch.no_grad():
                        loss(copied, inputs, targets)
                counter.start()
                loss(copied, inputs, targets).backward()
                passes, context = counter.over("tensor"), counter.over("context")
                counter.start()
                _sum_partial_gradients(copied, layout)
                sums = counter.over("tensor")
            return TensorTraffic(*passes, *sums, *context)
        # A model may read values, which meta and fake tensors do not have.
        except Exception as error:
            problem = error
    reason = str(problem).split("\n")[0]
    kind = type(problem).__name__
    log.info("bytes over the tensor and context axes are not predicted: %s: %s", kind, reason)
    return None


def _sum_partial_gradients(model: nn.Module, layout: Layout) -> None:
    for parameter in model.parameters():
        gradient = parameter.grad
        if not isinstance(parameter, DTensor) or not isinstance(gradient, DTensor):
            continue
        if gradient.placements == parameter.placements:
            continue
        # The engine sums partial gradients in fp32 or a wider dtype.
        sent: Any = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
        # The counter counts the collective; the result is not needed.
        sent.redistribute(placements=parameter.placements)
