"""Memory of activations over a step without FSDP: `profile_activations`.

A copy of the model with tensor and context parallelism but without FSDP runs forward and backward
of one micro-batch on fake tensors. A `MemoryEvent` records the memory without parameters at each
point where FSDP would all-gather, free or reduce a group. `cost.predicted_peak` adds the
allocations of FSDP at these points, for any sizes of the data axes.

The gradients of a group are freed once all gradients of the group exist, because FSDP reduces the
group at this point.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from parallel2d.base.errors import ConfigError
from parallel2d.parallel.cost.meta_copy import meta_copy, on_fake_tensors
from parallel2d.parallel.loss import chunk_elements, loss_chunks
from parallel2d.parallel.model_structure import tensor_leaves, trained_tensors_in
from parallel2d.parallel.parallelize.layout import Layout


class MemoryEvent(NamedTuple):
    """A point of a step. Bytes count activations and unsharded gradients."""

    # "gather" and "free": before and after the forward of a group. "gather_again": the gradient of
    # its output exists. "reduce": the gradients of its parameters exist. "end": end of the step.
    kind: str
    group: int  # index in `Layout.groups`
    most: int  # peak bytes since the previous event
    now: int  # bytes at this event


StepLoss = Callable[[Any, Any], Tensor]  # takes inputs and targets
# (copy of the model, inputs, targets) -> the loss of the copy
LossOf = Callable[[nn.Module, Any, Any], StepLoss]


def profile_activations(
    model: nn.Module, loss_of: LossOf, mesh: DeviceMesh | None, layout: Layout
) -> list[MemoryEvent] | str:
    """Return the memory events of a step, or the reason as text if the model cannot run.

    Args:
        model: the model on meta, without FSDP; it does not change.
        loss_of: returns the loss function for a copy of the model. ``loss_of`` may run the copy on
            the given micro-batch.
        mesh: a mesh with the tensor axis, which may be on a fake process group.
        layout: the layout of the step.
    """
    copied = meta_copy(model, mesh, layout)
    # Use the device "cpu" and not meta: there attention has a kernel that does not store scores.
    try:
        with on_fake_tensors(copied, "cpu"):
            inputs, targets = layout.workload.example("cpu")
            loss = loss_of(copied, inputs, targets)
            log = _EventLog(copied, [modules for _, modules in layout.groups_of(copied)])
            elements = chunk_elements(layout.workload.device_type)
            with log, loss_chunks(elements, first_alone=True):
                value = loss(inputs, targets)
                log.is_backward = True
                value.backward()
                log.end()
    except ConfigError:
        raise
    # A model may read values, which fake tensors do not have.
    except Exception as error:
        reason = str(error).split("\n")[0]
        return (
            f"{type(model).__name__} does not run on tensors without storage "
            f"({type(error).__name__}: {reason})"
        )
    return log.events


class _EventLog(TorchDispatchMode):
    """Counts the bytes of storages, and records them before and after each group."""

    def __init__(self, copied: nn.Module, groups: Sequence[Sequence[nn.Module]]) -> None:
        super().__init__()
        self.events: list[MemoryEvent] = []
        self.is_backward = False
        self._now = self._most = 0
        self._sizes: dict[int, tuple[Any, int]] = {}
        for tensor in [*copied.parameters(), *copied.buffers()]:
            self._see(tensor, counts=False)
        self._trained: list[list[nn.Parameter]] = []
        self._missing: list[int] = []
        self._without_input_gradient: set[int] = set()
        taken: set[int] = set()
        for number, modules in enumerate(groups):
            trained = []
            for module in modules:
                for parameter in module.parameters():
                    if id(parameter) not in taken and parameter.requires_grad:
                        trained.append(parameter)
                    taken.add(id(parameter))
                self._around(module, number)
            self._trained.append(trained)
            self._missing.append(len(trained))
            for parameter in trained:
                count_down = functools.partial(self._count_down, number)
                parameter.register_post_accumulate_grad_hook(count_down)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        output = function(*args, **(kwargs or {}))
        for tensor in tensor_leaves(output):
            self._see(tensor)
        return output

    def end(self) -> None:
        """Record the reductions at the end of backward: the root, then groups not reduced yet."""
        root = len(self._trained) - 1
        self._reduce(root)
        for group, missing in enumerate(self._missing[:root]):
            if missing or group in self._without_input_gradient:
                self._reduce(group)
        self._note("end", root)

    def _around(self, module: nn.Module, group: int) -> None:
        def enter(_module: nn.Module, *given: Any) -> None:
            # Recomputation needs the parameters of the group.
            if self.is_backward:
                self._note("gather_again", group)
                return
            self._note("gather", group)
            if not trained_tensors_in(given):
                self._without_input_gradient.add(group)

        def leave(_module: nn.Module, _given: Any, output: Any) -> None:
            if self.is_backward:
                return
            self._note("free", group)
            trained = trained_tensors_in(output)
            if trained:
                trained[0].register_hook(lambda _: self._note("gather_again", group))

        module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True)
        module.register_forward_hook(leave)

    def _count_down(self, group: int, _parameter: Tensor) -> None:
        self._missing[group] -= 1
        waits = group + 1 == len(self._trained) or group in self._without_input_gradient
        if self._missing[group] == 0 and not waits:
            self._reduce(group)

    def _reduce(self, group: int) -> None:
        self._missing[group] = 0
        self._note("reduce", group)
        for parameter in self._trained[group]:
            parameter.grad = None

    def _note(self, kind: str, group: int) -> None:
        self.events.append(MemoryEvent(kind, group, self._most, self._now))
        self._most = self._now

    def _see(self, tensor: Tensor, *, counts: bool = True) -> None:
        local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        # `AsyncCollectiveTensor` is a wrapper without memory.
        if isinstance(local, AsyncCollectiveTensor):
            local = local.elem
        storage = local.untyped_storage()
        key = id(storage)
        if key in self._sizes and self._sizes[key][0]() is storage:
            return
        size = storage.nbytes() if counts else 0
        reference = weakref.ref(storage, lambda _: self._forget(key))
        self._sizes[key] = (reference, size)
        self._now += size
        self._most = max(self._most, self._now)

    def _forget(self, key: int) -> None:
        _, size = self._sizes.pop(key)
        self._now -= size
