"""A copy of the model on meta, split over the context and tensor axes as the model itself will be,
but not sharded: `tensor_twin`. What it computes costs nothing, and what it would send over these
axes can be counted: `count_tensor_axis`.
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
from torch.utils._pytree import tree_leaves, tree_map_only

from parallel2d.base.device import random_states_kept
from parallel2d.parallel.cost.collectives import CollectiveTally
from parallel2d.parallel.loss import loss_chunks
from parallel2d.parallel.mesh import axes_of_groups
from parallel2d.parallel.model_structure import without_storage
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

ALL_AT_ONCE = 2**62  # logits
LossOfBatch = Callable[[nn.Module, Any, Any], Tensor]  # of a model, inputs and targets

log = logging.getLogger(__name__)


def tensor_twin(model: nn.Module, mesh: DeviceMesh | None, layout: Layout) -> nn.Module:
    """A copy of ``model``, which is plain and on meta. It stays whole without a mesh. It computes
    in the dtypes that sharding would cast to, and its blocks are recomputed as
    ``activation_checkpointing`` says."""
    twin = without_storage(model)
    precision = Precision.of(layout.config.precision, twin)
    cast_storage(twin, dataclasses.replace(precision, storage=precision.param))
    if mesh is not None and layout.tensor_plan is not None:
        split_layers(twin, mesh, layout.tensor_plan)
    stacks = [] if mesh is None else intercept_attention(twin, mesh)
    checkpoint_activations(twin, layout.blocks_of(twin), layout.config.activation_checkpointing)
    slice_blocks(stacks)
    for modules, policy in layout.groups_of(twin):
        for module in modules:
            _cast_at_its_border(module, policy)
    if mesh is not None:
        learn_at_first(twin, mesh, stacks, compares=False)
    return twin


@contextmanager
def on_fake_tensors(twin: nn.Module, device_type: str) -> Iterator[None]:
    """Inside, parameters, buffers and whatever is made have no storage, and their ``device`` is
    ``device_type``: some models refuse to run on plain meta tensors, which are twice as fast.
    ``twin``, all of it on meta, cannot be used outside any more."""
    made: dict[int, Any] = {}
    with FakeTensorMode():
        for module in twin.modules():
            for owned in (module._parameters, module._buffers):
                for name, value in owned.items():
                    # Once for each tensor: tied parameters stay tied.
                    if value is not None and id(value) not in made:
                        made[id(value)] = _fake(value, device_type)
                    owned[name] = made.get(id(value))
        yield


def _fake(value: Tensor, device_type: str) -> Tensor:
    """A parameter for a parameter, a `DTensor` for a `DTensor`."""
    local = value._local_tensor if isinstance(value, DTensor) else value
    fake: Tensor = torch.empty(local.shape, dtype=local.dtype, device=device_type)
    if isinstance(value, DTensor):
        fake = as_part(fake, value)
    if isinstance(value, nn.Parameter):
        return nn.Parameter(fake, value.requires_grad)
    return fake


def _cast_at_its_border(module: nn.Module, policy: MixedPrecisionPolicy) -> None:
    """Casts what goes in and out as sharding does for a group."""

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
    """Over the tensor axis: bytes that a rank sends in forward and backward of one micro-batch, and
    how often its collectives go round a ring. Then the same of what sharding adds before it
    reduces: gradients of weights that stayed whole while their inputs were split are summed. And
    what a micro-batch sends over the context axis."""

    passes_bytes: float
    ring_passes: float
    sums_bytes: float
    sums_ring_passes: float
    context_bytes: float = 0.0
    context_ring_passes: float = 0.0

    def of_step(self, layout: Layout) -> dict[str, tuple[float, float]]:
        """Bytes and ring passes of a step over each axis. Sums come in every backward, or once with
        ``sync.during_accumulation=none``."""
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
# Operators, their collective, and the position of the group in their arguments
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
    """Counts the collectives of tensors without storage, over the axes of ``mesh``. Such a
    collective sends nothing, and therefore reaches no hook of its process group.

    Args:
        device_type: the device whose bytes are counted.
    """

    def __init__(self, mesh: DeviceMesh, device_type: str) -> None:
        super().__init__()
        self._device_type = device_type
        self._groups = axes_of_groups(mesh)
        sizes = {axis: group.size() for group, axis in self._groups.items()}
        self._axes = {axis: CollectiveTally(axis, size) for axis, size in sizes.items()}

    def start(self) -> None:
        """Set all counts to zero."""
        for traffic in self._axes.values():
            traffic.reset()

    def over(self, axis: str) -> tuple[float, int]:
        """Bytes and ring passes over ``axis`` since `start`; zeros where the mesh lacks it."""
        traffic = self._axes.get(axis)
        return (traffic.bytes, traffic.ring_passes) if traffic else (0.0, 0)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # The collectives of a `DTensor` are those of its local tensors, which come later.
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        result = function(*args, **(kwargs or {}))
        if function in _COUNTED:
            collective, place = _COUNTED[function]
            axis = self._axes.get(self._axis_of(args[place]))
            if axis is not None and axis.size > 1:
                tensors = [leaf for leaf in tree_leaves((args, result)) if isinstance(leaf, Tensor)]
                axis.add(collective, max(each.nbytes for each in tensors), self._device_type)
        return result

    def _axis_of(self, group: Any) -> str:
        """The axis of ``group``, as operators take it; empty for another or a destroyed one."""
        if isinstance(group, torch.ScriptObject):
            group = dist.ProcessGroup.unbox(group)
        with contextlib.suppress(RuntimeError, ValueError, KeyError):
            group = _resolve_process_group(GroupName(group)) if isinstance(group, str) else group
        return self._groups.get(group, "")


def count_tensor_axis(
    twin: nn.Module, mesh: DeviceMesh, layout: Layout, loss: LossOfBatch
) -> TensorTraffic | None:
    """``twin``: from `tensor_twin`. It runs forward and backward of one micro-batch of ``layout``
    on tensors without storage, on every rank alike. None, and the reason logged, where it cannot
    run.
    """
    problem: Exception | None = None
    # Meta tensors are twice as fast, and some models only run on tensors with a real device. So
    # does the kernel of attention that tells what a context axis gathers again in backward.
    for device_type in ("meta", mesh.device_type)[layout.shape.context > 1 :]:
        pretend = nullcontext() if device_type == "meta" else on_fake_tensors(twin, device_type)
        counter = CollectiveCounter(mesh, layout.workload.device_type)
        try:
            with pretend, loss_chunks(ALL_AT_ONCE), random_states_kept(), counter:
                inputs, targets = layout.workload.example(device_type)
                if layout.shape.context > 1:
                    # The first forward is preceded by others, which learn what can be cut.
                    with torch.no_grad():
                        loss(twin, inputs, targets)
                counter.start()
                loss(twin, inputs, targets).backward()
                passes, context = counter.over("tensor"), counter.over("context")
                counter.start()
                _make_gradients_whole(twin, layout)
                sums = counter.over("tensor")
            return TensorTraffic(*passes, *sums, *context)
        # A model may look at values, which neither kind of tensor has.
        except Exception as error:
            problem = error
    reason = str(problem).split("\n")[0]
    kind = type(problem).__name__
    log.info("bytes over the tensor and context axes are not predicted: %s: %s", kind, reason)
    return None


def _make_gradients_whole(model: nn.Module, layout: Layout) -> None:
    for parameter in model.parameters():
        gradient = parameter.grad
        if not isinstance(parameter, DTensor) or not isinstance(gradient, DTensor):
            continue
        if gradient.placements == parameter.placements:
            continue
        # The engine adds the parts of a gradient in fp32 at least.
        sent: Any = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
        # The counter sees the collective that this takes; its result is not needed.
        sent.redistribute(placements=parameter.placements)
