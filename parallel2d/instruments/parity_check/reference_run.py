"""Reference run in one process, on rank 0, without `DTensor`: `ReferenceRun`.

[Note: one step at a time] Every step is checked separately. The reference computes the gradient at
the weights of the parallel model, as the sum of the contributions of the data ranks. The reference
computes the update by an optimizer without sharding, from the gradient of the parallel model. After
each comparison the reference copies the values of the parallel model. Therefore a difference shows
in which step and operation the error is, and rounding errors do not accumulate over steps.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_map

from parallel2d.base.config import OptimizerConfig, ParallelConfig
from parallel2d.base.runtime import seed_everything
from parallel2d.parallel.mesh_sizes import MeshShape
from parallel2d.parallel.model_structure import (
    direct_parameters,
    fqn_of,
    hidden_matrices,
    owning_modules,
)
from parallel2d.parallel.parallelize.precision import Precision, cast_storage
from parallel2d.parallel.sync.formats.quantize import RoundingKeys
from parallel2d.parallel.sync.methods import method_of
from parallel2d.parallel.sync.methods.diloco import ExpectedOuter
from parallel2d.parallel.sync.methods.method import ExpectedState, SyncMethod
from parallel2d.parallel.sync.updates import outer_sync
from parallel2d.parallel.weights.construction import (
    build_for_real,
    outline,
    own_constructor,
    recorded_constructor,
)
from parallel2d.parallel.weights.geometry import Region
from parallel2d.parallel.weights.initial_values import (
    Initializer,
    InitialWeights,
    NoInitializerError,
    allocate,
    has_meta_parameters,
)
from parallel2d.training.optimizer import build_optimizer

Tensors = Mapping[str, Tensor]  # by FQN


@dataclass
class CheckedRun:
    """The run under test, with all inputs of its reference run."""

    model: nn.Module  # parallelized
    mesh: DeviceMesh
    shape: MeshShape  # of ``mesh``
    config: ParallelConfig
    optimizer: torch.optim.Optimizer  # of ``model``
    optimizer_config: OptimizerConfig
    # (parallel or reference model, micro-batch) -> summed loss
    loss_of: Callable[[Any, Any], Tensor]
    # (step from 1, data rank) -> micro-batches. Odd steps have as many micro-batches as training.
    read: Callable[[int, int], list[Any]]
    count: Callable[[Any], int]  # samples or tokens of a micro-batch; the loss is a mean over them
    predicted: Mapping[str, float]  # axis -> bytes of a step, predicted from the configuration
    plain: nn.Module  # the user's model before `parallelize`, with weights or on meta
    seed: int
    init: Initializer | None
    weights: Callable[[nn.Module], Container[str]] | None  # the argument of `parallelize`
    notes: list[str]
    construct: Callable[[], nn.Module] | None = None  # the argument of `WeightSource`

    @property
    def method(self) -> SyncMethod:
        """Synchronization method of the replicate axis."""
        return method_of(self.config.strategy, self.config.sync, self.shape.replicate)


def seed_forward(step: int, data_rank: int, number: int) -> None:
    """Seed the generators before a forward, so that dropout draws the same numbers on the ranks and
    in the reference run."""
    seed_everything((step << 40) + (data_rank << 20) + number, deterministic=False)


def switch_dropout_off(model: nn.Module) -> bool:
    """Set the probability of every dropout to 0, because tensor ranks draw different numbers for
    their shards. Returns True if the model had dropout."""
    found = False
    for module in model.modules():
        for name, value in list(vars(module).items()):
            is_dropout = "dropout" in name or (name == "p" and "Dropout" in type(module).__name__)
            if is_dropout and isinstance(value, float) and value > 0:
                setattr(module, name, 0.0)
                found = True
    return found


def plain_copy(checked: CheckedRun) -> nn.Module:
    """Return a copy of the user's module with initial weights. The constructor has set the weights,
    or the weights are drawn as in `parallelize`."""
    module = copy.deepcopy(checked.plain)
    construct = checked.construct
    if construct is None and checked.init is None and checked.weights is None:
        construct = own_constructor(module)
    recorded, expected = recorded_constructor(module), outline(module)
    if construct is not None:
        module = build_for_real(construct, checked.seed, expected)
    cast_storage(module, Precision.of(checked.config.precision, module))
    if has_meta_parameters(module, checked.seed):
        initial = InitialWeights(module, [], checked.init)
        allocate(module, "cpu")
        given = checked.weights(module) if checked.weights else ()
        try:
            initial.write(module, checked.seed, "cpu", given=given)
        except NoInitializerError:  # as in `WeightSource.fill`
            if recorded is None or checked.init is not None or checked.weights is not None:
                raise
            module = build_for_real(recorded, checked.seed, expected)
            cast_storage(module, Precision.of(checked.config.precision, module))
    if checked.shape.tensor > 1:
        switch_dropout_off(module)
    return module.to(checked.mesh.device_type)


class PlainModel:
    """The model of ``checked`` without sharding, in the compute dtypes of the ranks."""

    def __init__(self, checked: CheckedRun) -> None:
        module = plain_copy(checked)
        self.module = module
        # Number of calls of each module that is an FSDP group
        self.calls: Counter[str] = Counter()
        self._loss_of = checked.loss_of
        self._precision = Precision.of(checked.config.precision, module)
        for owner in module.modules():
            is_wide = id(owner) in self._precision.fp32_modules
            dtype = torch.float32 if is_wide else self._precision.param
            for _, parameter in direct_parameters(owner):
                if parameter.is_complex():
                    parameter.data = parameter.data.to(dtype.to_complex())
                # FSDP does not unshard parameters without dimensions, so it does not cast them.
                elif parameter.is_floating_point() and parameter.ndim:
                    parameter.data = parameter.data.to(dtype)
        for name, inner in checked.model.named_modules():
            if isinstance(inner, FSDPModule):
                self._prepare(fqn_of(name))
        if self._precision.output is not None:
            _cast_outputs(module, self._precision.output)
        # Each data rank has separate running statistics.
        self.initial_buffers = self._copied_buffers()
        self._buffers_of: dict[int, dict[str, Tensor]] = {}

    def _prepare(self, name: str) -> None:
        """Install hooks that count the calls of a module, and cast its inputs and outputs as in the
        parallel model."""
        module, precision = self.module.get_submodule(name), self._precision
        module.register_forward_pre_hook(lambda *_: self.calls.update([name]))
        owners = dict(owning_modules(self.module))
        if name in owners and id(owners[name]) in precision.fp32_modules:
            _cast_inputs(module, torch.float32)
            _cast_outputs(module, precision.param)
        elif precision.cast_inputs and (not name or precision.param != precision.storage):
            _cast_inputs(module, precision.param)

    def run(
        self, weights: Tensors, data_rank: int, batch: Any, scale: float
    ) -> tuple[float, dict[str, Tensor]]:
        """Return the summed loss of a micro-batch, and the gradients of ``scale`` times this loss
        by FQN."""
        named = dict(self.module.named_parameters())
        with torch.no_grad():
            for name, parameter in named.items():
                parameter.copy_(weights[name])
            for name, buffer in self.module.named_buffers():
                buffer.copy_(self.buffers_of(data_rank)[name])
        loss = self._loss_of(self.module, batch)
        (loss * scale).backward()
        self._buffers_of[data_rank] = self._copied_buffers()
        found = {}
        for name, value in named.items():
            if value.grad is not None:
                found[name] = value.grad
        self.module.zero_grad()
        return loss.item(), found

    def buffers_of(self, data_rank: int) -> dict[str, Tensor]:
        """Return the expected buffers of a data rank."""
        return self._buffers_of.get(data_rank, self.initial_buffers)

    def _copied_buffers(self) -> dict[str, Tensor]:
        return {name: buffer.clone() for name, buffer in self.module.named_buffers()}


def _cast_inputs(module: nn.Module, dtype: torch.dtype) -> None:
    module.register_forward_pre_hook(lambda _, *given: _cast(given, dtype), with_kwargs=True)


def _cast_outputs(module: nn.Module, dtype: torch.dtype) -> None:
    module.register_forward_hook(lambda _module, _args, given: _cast(given, dtype))


def _cast(values: Any, dtype: torch.dtype) -> Any:
    def cast(value: Any) -> Any:
        is_cast = isinstance(value, Tensor) and value.is_floating_point()
        return value.to(dtype) if is_cast else value

    return tree_map(cast, values)


@dataclass
class ReferenceGradient:
    """Expected gradient of one parameter, a mean over ``ranks`` data ranks."""

    ranks: int
    value: Tensor  # in fp32 or a wider dtype
    # the part of ``value`` from all micro-batches except the first of each rank
    later: Tensor | None = None
    size: float = 0.0  # mean of the 2-norms of the contributions; errors are relative to this mean
    used: bool = False

    def add(self, gradient: Tensor, number: int) -> None:
        """Add the contribution of micro-batch ``number`` of a data rank."""
        self.used = True
        self.value.add_(gradient, alpha=1 / self.ranks)
        if number > 0:
            later = torch.zeros_like(self.value) if self.later is None else self.later
            self.later = later.add_(gradient, alpha=1 / self.ranks)
        self.size += size_of(gradient) / self.ranks


class ReferenceReplica:
    """The parameters of one optimizer. ``parameters`` are the expected values. ``weights`` are the
    weights with which the ranks compute. ``before`` are the weights of the optimizer before the
    update."""

    def __init__(self, module: nn.Module, config: OptimizerConfig, seed: int) -> None:
        self.parameters = dict(module.named_parameters())
        self.weights: Tensors = {}
        self.before: Tensors = {}
        self._optimizer = build_optimizer(module, config, seed=seed)

    def update(self, gradients: Tensors, factor: float) -> None:
        """Make one optimizer step with ``gradients`` times ``factor``."""
        for name, gradient in gradients.items():
            parameter = self.parameters[name]
            parameter.grad = (gradient * factor).to(parameter.dtype)
        self._optimizer.step()
        self._optimizer.zero_grad()

    @torch.no_grad()
    def take(self, weights: Tensors, updated: Tensors) -> None:
        """Copy the values of the ranks: ``updated`` after the optimizer step, and ``weights`` for
        the forward passes."""
        for name, parameter in self.parameters.items():
            parameter.copy_(updated[name])
        self.weights = weights
        self.before = updated


class ReferenceRun:
    """Reference run of ``checked`` in one process."""

    def __init__(self, checked: CheckedRun) -> None:
        self._checked = checked
        shape, method = checked.shape, checked.method
        # One entry per replica if the parameters of replicas differ, otherwise one entry.
        self.replicas: list[ReferenceReplica] = []
        for _ in range(1 if method.replicas_equal else shape.replicate):
            replica = ReferenceReplica(plain_copy(checked), checked.optimizer_config, checked.seed)
            self.replicas.append(replica)
        self.sync = ReferenceSync(checked, self.replicas)
        self.plain = PlainModel(checked)
        self.ranks_per_replica = shape.data_ranks // len(self.replicas)
        # If replicas sum gradients without rounding, one sum is stored; otherwise one per replica.
        parts = 1 if method.gradients_are_exact else shape.replicate
        self._ranks_per_part = shape.data_ranks // parts
        # Summed losses and number of micro-batches of the last step, by data rank
        self.losses: list[float] = []
        self.forwards: list[int] = []

    def gradients(self, step: int) -> list[dict[str, ReferenceGradient]]:
        """Return the expected gradients of ``step`` by replica and FQN. The gradients are computed
        at the weights of the parallel model."""
        data_ranks = self._checked.shape.data_ranks
        batches = []
        for data_rank in range(data_ranks):
            batches.append(self._checked.read(step, data_rank))
        self.forwards = list(map(len, batches))
        count = sum(sum(map(self._checked.count, each)) for each in batches)
        scale = data_ranks / max(count, 1)
        self.losses = [0.0] * data_ranks
        self.plain.calls.clear()
        parts = []
        for _ in range(data_ranks // self._ranks_per_part):
            parts.append(self._zeros())
        for data_rank, micro_batches in enumerate(batches):
            weights = self.replicas[data_rank // self.ranks_per_replica].weights
            part = parts[data_rank // self._ranks_per_part]
            for number, batch in enumerate(micro_batches):
                seed_forward(step, data_rank, number)
                loss, gradients = self.plain.run(weights, data_rank, batch, scale)
                self.losses[data_rank] += loss
                for name, gradient in gradients.items():
                    part[name].add(gradient, number)
        is_mean = len(parts) == len(self.replicas)
        return parts if is_mean else [self.sync.mean_gradients(step, parts)]

    def _zeros(self) -> dict[str, ReferenceGradient]:
        found: dict[str, ReferenceGradient] = {}
        for name, parameter in self.replicas[0].parameters.items():
            wide = torch.promote_types(parameter.dtype, torch.float32)
            if parameter.requires_grad:
                zeros = torch.zeros_like(parameter.detach(), dtype=wide)
                found[name] = ReferenceGradient(self._ranks_per_part, zeros)
        return found


class ReferenceSync:
    """Expected reduction over the replicate axis, and with ``sync=diloco`` the parameters that
    replicas share; see docs/sync-mathematics.md. ``cuts``: FQN -> region of each rank of a
    replica."""

    def __init__(self, checked: CheckedRun, replicas: Sequence[ReferenceReplica]) -> None:
        self.cuts: dict[str, list[Region]] = {}
        self.before: Tensors = {}  # shared parameters before the step
        self._method = checked.method
        hidden = hidden_matrices(checked.plain)
        self._state = ExpectedState(RoundingKeys(checked.seed), hidden)
        self._outer: ExpectedOuter | None = None
        outer = outer_sync(checked.model)
        if outer is not None:
            self._outer = outer.expected(list(map(attrgetter("parameters"), replicas)), self.cuts)

    @property
    def shared(self) -> Tensors:
        """Parameters that the replicas share with diloco."""
        return self._outer.shared if self._outer is not None else {}

    def mean_gradients(
        self, step: int, replicas: Sequence[Mapping[str, ReferenceGradient]]
    ) -> dict[str, ReferenceGradient]:
        """Return the expected mean over the replicas, in the communication format."""
        means: dict[str, ReferenceGradient] = {}
        self._state.keys.step = step
        for name in replicas[0]:
            found = []
            for each in replicas:
                found.append(each[name])
            values, cut = list(map(attrgetter("value"), found)), self.cuts[name]
            value = self._method.expected_gradient(values, cut, name, self._state)
            size = sum(map(attrgetter("size"), found)) / len(found)
            used = any(map(attrgetter("used"), found))
            means[name] = ReferenceGradient(len(found), value, None, size, used)
        return means

    def after_update(self, step: int) -> None:
        """With diloco, exchange the fragments that are due after ``step`` updates, and apply the
        fragments that arrive."""
        if self._outer is not None:
            self._outer.after_update(step)

    def take(self, shared: Tensors) -> None:
        """Copy the shared parameters of the ranks."""
        if self._outer is not None:
            self._outer.shared = {name: value.clone() for name, value in shared.items()}
        self.before = shared


def size_of(tensor: Tensor) -> float:
    """Return the 2-norm, in fp64."""
    wide = torch.promote_types(tensor.dtype, torch.float64)
    return float(torch.linalg.vector_norm(tensor.detach().to(wide)))
