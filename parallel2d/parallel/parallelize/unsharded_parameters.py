"""Keep unsharded parameters consistent with updates of the sharded parameters: `follow_updates`.

`fully_shard` frees the storage of unsharded parameters and fills it again. If a sharded parameter
changes, the next forward must all-gather this parameter again, and autograd must raise an error if
a pending backward needs the old values. Outputs of a forward must not share the storage of
unsharded parameters, because this storage is freed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_leaves, tree_map

from parallel2d.base.errors import ConfigError
from parallel2d.parallel.fsdp_internals.fsdp_group import FSDPGroup
from parallel2d.parallel.fsdp_internals.sharded_model import in_backward, was_interrupted
from parallel2d.parallel.fsdp_internals.tensors import (
    GATHERED_AS,
    quick_reads,
    storage_object,
    storage_of,
    version_of,
)
from parallel2d.parallel.mesh import mesh_shape
from parallel2d.parallel.model_structure import update_as, updated_as
from parallel2d.parallel.sync.engine.accumulation import discard_accumulated
from parallel2d.parallel.sync.engine.buckets import GroupGradients
from parallel2d.parallel.sync.engine.replica_reducer import ReplicaReducer, engine_of

INSTEAD = (
    "change parameters in place under torch.no_grad() after optimizer.step(), or with "
    "parallel2d.apply_full(model, function)"
)


def follow_updates(model: nn.Module, mesh: DeviceMesh) -> UnshardedParameters:
    """Install the hooks on ``model``, after its weights are set."""
    gathered = UnshardedParameters(model, mesh)
    model.register_forward_pre_hook(gathered.begin, prepend=True)
    model.register_forward_hook(gathered.end)
    return gathered


class UnshardedParameters:
    """The unsharded parameters of one model."""

    def __init__(self, model: nn.Module, mesh: DeviceMesh) -> None:
        self._model = model
        self._replicates = mesh_shape(mesh).replicate > 1
        self.engine: ReplicaReducer = engine_of(model)
        # `storage_of` -> name of the unsharded parameter with this storage, set by its all-gather
        self.storages: dict[int, str] = {}
        self.groups = [_UnshardedGroup(each, self.storages) for each in self.engine.gradients]
        hooked = chain.from_iterable(each.group.modules for each in self.groups)
        for module in dict.fromkeys([*hooked, model]):
            # With `prepend` this hook runs before the post-forward hook of `fully_shard`, which
            # frees the storage. After it, a clone of an output would read freed memory.
            module.register_forward_hook(self._leave, prepend=True)
        # Record the versions at the end of the group's forward, and not of the model's forward: an
        # update between the two changes parameters that backward needs.
        for each in self.groups:
            for module in each.group.modules:
                module.register_forward_hook(each.record, prepend=True)

    def begin(self, *_: Any) -> None:
        """Run before a forward of the model."""
        if in_backward():
            return
        if was_interrupted(self._model):
            discard_accumulated(self._model)
        # Within one autocast context, a later forward would reuse the casts of parameters of an
        # earlier forward, with their autograd nodes. Autograd would run these nodes after the
        # group's gradients are reduced. Therefore each forward must make new casts.
        torch.clear_autocast_cache()
        if not torch.is_grad_enabled():
            for each in self.groups:
                each.refuse_set_data()
        for each in self.groups:
            # If an earlier forward has a pending backward, its unsharded parameters may still exist
            # and have the values before the update. FSDP would then skip the all-gather. Reshard
            # here, so that this forward all-gathers the updated local shards.
            if each.take_updates() and each.awaits_backward:
                each.group.release()

    def end(self, *_: Any) -> None:
        """Run after a forward of the model."""
        if torch.is_grad_enabled() or in_backward():
            return
        # No backward follows, so reshard: code after the forward must find the sharded parameters.
        for each in self.groups:
            if not each.awaits_backward:
                each.group.release()

    def changed(self) -> Iterator[FSDPGroup]:
        """Yield the groups with parameters that have changed since a forward with a pending
        backward.

        The generator also reshards these groups, because their unsharded parameters are outdated.
        """
        for each in self.groups:
            if each.awaits_backward and each.take_updates():
                each.group.release()
            if each.awaits_backward and each.is_changed:
                yield each.group

    def before_update(self, stepping: torch.optim.Optimizer, stepped: set[int]) -> None:
        """Prepare for a step of ``stepping``. ``stepped``: ids of the parameters that it updates.

        Raises RuntimeError if `no_sync` has left their gradients unreduced.
        """
        if self.engine.pending and self._is_unreduced():
            parameters = [each for group in self.groups for each in group.group.parameters]
            if any(id(updated_as(each.sharded)) in stepped for each in parameters):
                raise RuntimeError(
                    f"{type(stepping).__name__}.step() with gradients from no_sync() only, which "
                    "are not reduced over all ranks: run the last backward pass of a global batch "
                    "outside of no_sync(), or use parallel2d.accumulate(model, micro_batches)"
                )
        self.engine.updates.before_update(stepping)
        self.engine.count_update(stepping)

    def _is_unreduced(self) -> bool:
        return self._replicates or any(each.group.has_unsharded_gradients for each in self.groups)

    # Memory of outputs

    def _leave(self, _module: nn.Module, _inputs: Any, output: Any) -> Any:
        return self._own(output)

    def _own(self, output: Any) -> Any:
        """Return ``output`` with clones of tensors that are views of unsharded parameters."""
        if isinstance(output, Tensor):
            return output.clone() if self._is_shared(output) else output
        leaves = tree_leaves(output)
        for leaf in leaves:
            # pytree sees a dataclass as a leaf, although FSDP hooks the tensors inside.
            if is_dataclass(type(leaf)):
                for each in fields(leaf):
                    # `object.__setattr__` also sets fields of a frozen or slotted dataclass.
                    object.__setattr__(leaf, each.name, self._own(getattr(leaf, each.name)))
        if not any(map(self._is_shared, leaves)):
            return output
        return tree_map(lambda leaf: leaf.clone() if self._is_shared(leaf) else leaf, output)

    def _is_shared(self, leaf: Any) -> bool:
        return isinstance(leaf, Tensor) and storage_of(leaf) in self.storages


class _UnshardedGroup:
    """The unsharded parameters of one FSDP group. ``storages``: see `UnshardedParameters`."""

    def __init__(self, gradients: GroupGradients, storages: dict[int, str]) -> None:
        self._gradients = gradients
        self.group = gradients.group
        self._storages = storages
        self._numbers: list[int] = []
        # Versions of the sharded parameters: now, and at the last forward with gradients
        self._versions: list[int] = []
        self._recorded: list[int] = []
        # The sharded parameters, each with its storage object
        self._sharded: list[tuple[Tensor, torch.UntypedStorage]] = []
        self.group.on_gather(self._note)

    @property
    def awaits_backward(self) -> bool:
        """True if a forward has run and its backward is pending."""
        return bool(self._gradients.forwards)

    def _note(self) -> None:
        """Record the storages of the unsharded parameters after an all-gather."""
        for earlier in self._numbers:
            del self._storages[earlier]
        self._numbers = []
        for each in self.group.parameters:
            assert each.gathered is not None
            setattr(each.gathered, GATHERED_AS, each.name)
            # While the modules hold unsharded parameters, `model.parameters()` still leads to the
            # gradients and to the tensors that the optimizer updates.
            update_as(each.gathered, each.updated)
            number = storage_of(each.gathered)
            if number is not None:
                self._numbers.append(number)
                self._storages[number] = each.name
        # In the first forward, FSDP has just read the sharded parameters from the modules.
        if not self._versions:
            self._versions = self._recorded = self._read()
            parameters = [each.sharded for each in self.group.parameters]
            self._sharded = [(each, storage_object(each)) for each in parameters]

    def _read(self) -> list[int]:
        with quick_reads():
            return [version_of(each.sharded) for each in self.group.parameters]

    def take_updates(self) -> bool:
        """Return True if sharded parameters have changed since the last call.

        Also increments the versions of the unsharded parameters, so that autograd raises its error
        if a backward needs the values before the change.
        """
        if not self._versions:  # before the first forward
            return False
        versions = self._read()
        if versions == self._versions:
            return False
        changed = []
        pairs = zip(versions, self._versions, strict=True)
        for each, (now, before) in zip(self.group.parameters, pairs, strict=True):
            if now == before or each.gathered is None:
                continue
            if not each.gathered.is_inference():  # an inference tensor has no version
                changed.append(each.gathered)
        torch.autograd.graph.increment_version(changed)
        self._versions = versions
        return True

    def refuse_set_data(self) -> None:
        """Raise RuntimeError if a script has assigned ``parameter.data`` of a sharded parameter.

        Some scripts assign ``parameter.data`` to evaluate EMA weights.
        """
        for parameter, (noted, storage) in zip(self.group.parameters, self._sharded, strict=False):
            if parameter.sharded is noted and storage_object(noted) is not storage:
                raise RuntimeError(data_was_set(parameter.name))

    def record(self, *_: Any) -> None:
        """Run after a forward of the group."""
        if torch.is_grad_enabled():
            self._recorded = self._versions

    @property
    def is_changed(self) -> bool:
        """True if parameters were changed after the last forward with gradients."""
        return self._recorded is not self._versions


def data_was_set(name: str) -> str:
    """Return the error message for ``parameter.data = tensor``.

    The assignment changes neither this rank's local shard nor FSDP's references to it.
    """
    return (
        f"{name}.data was set to another tensor, which has no effect on a sharded parameter: "
        f"use {name}.data.copy_(value) with a value of the same sharding, or {INSTEAD}"
    )


def refuse_stale_unsharded(optimizer: torch.optim.Optimizer, parameters: list[Tensor]) -> None:
    """Raise `ConfigError` if ``optimizer`` was built from unsharded ``parameters``."""
    for parameter in parameters:
        name = getattr(parameter, GATHERED_AS, None)
        if name is not None:
            raise ConfigError(
                f"{type(optimizer).__name__} was built while {name} was unsharded, between a "
                "forward and its backward, and would train nothing: build it after parallelize(), "
                "before the first forward"
            )
