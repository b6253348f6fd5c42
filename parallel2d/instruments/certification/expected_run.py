"""What the parallel run should compute, on rank 0: `ExpectedRun`, on plain tensors.

[Note: one step at a time] Every step is checked on its own. The gradient is compared with the sum
of what the data ranks should have contributed, at the weights that the parallel model has; the
update is compared with what a plain optimizer does with the gradient that the parallel model has.
After a comparison the parallel model's values are taken over. So an error is found in the step, and
at the place, at which it happens, and rounding is not amplified from step to step.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
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
    fqn_of,
    held_parameters,
    hidden_matrices,
    owning_modules,
)
from parallel2d.parallel.parallelize.precision import Precision, cast_storage
from parallel2d.parallel.sync.methods import method_of
from parallel2d.parallel.sync.methods.diloco import ExpectedOuter
from parallel2d.parallel.sync.methods.method import ExpectedState, SyncMethod
from parallel2d.parallel.sync.updates import outer_sync
from parallel2d.parallel.sync.wires.blocks import RoundingKeys
from parallel2d.parallel.weights.construction import build_for_real, outline, own_constructor
from parallel2d.parallel.weights.geometry import Region
from parallel2d.parallel.weights.initial_values import (
    Initializer,
    InitialWeights,
    allocate,
    has_meta_parameters,
)
from parallel2d.training.optimizer import build_optimizer

Tensors = Mapping[str, Tensor]  # by FQN


@dataclass
class Subject:
    """What is certified, and what one process needs to compute the same."""

    model: nn.Module  # parallel
    mesh: DeviceMesh
    shape: MeshShape  # of ``mesh``
    config: ParallelConfig
    optimizer: torch.optim.Optimizer  # of ``model``
    optimizer_config: OptimizerConfig
    loss_of: Callable[[Any, Any], Tensor]  # of either model and a micro-batch, summed
    # (step from 1, data rank) -> its micro-batches; in odd steps as many as in training
    read: Callable[[int, int], list[Any]]
    count: Callable[[Any], int]  # samples or tokens of a micro-batch, over which the loss is a mean
    predicted: Mapping[str, float]  # bytes by axis of a step as configured
    plain: nn.Module  # as the user made it, with weights or on meta
    seed: int
    init: Initializer | None
    weights: Callable[[nn.Module], Container[str]] | None  # as of `parallelize`
    notes: list[str]
    construct: Callable[[], nn.Module] | None = None  # as of `WeightSource`

    @property
    def method(self) -> SyncMethod:
        """What crosses the replicate axis."""
        return method_of(self.config.strategy, self.config.sync, self.shape.replicate)


def seed_forward(step: int, data_rank: int, number: int) -> None:
    """Seeds what a forward draws from, so that ranks and the one process drop the same."""
    seed_everything((step << 40) + (data_rank << 20) + number, deterministic=False)


def switch_dropout_off(model: nn.Module) -> bool:
    """Sets every dropout to 0, since tensor ranks draw for their parts; whether there was any."""
    found = False
    for module in model.modules():
        for name, value in list(vars(module).items()):
            is_dropout = "dropout" in name or (name == "p" and "Dropout" in type(module).__name__)
            if is_dropout and isinstance(value, float) and value > 0:
                setattr(module, name, 0.0)
                found = True
    return found


def plain_copy(subject: Subject) -> nn.Module:
    """The user's module with its own first weights, or those that `parallelize` draws."""
    module = copy.deepcopy(subject.plain)
    construct = subject.construct
    if construct is None and subject.init is None and subject.weights is None:
        construct = own_constructor(module)
    if construct is not None:
        module = build_for_real(construct, subject.seed, outline(module))
    cast_storage(module, Precision.of(subject.config.precision, module))
    if has_meta_parameters(module, subject.seed):
        initial = InitialWeights(module, [], subject.init)
        allocate(module, "cpu")
        given = subject.weights(module) if subject.weights else ()
        initial.write(module, subject.seed, "cpu", given=given)
    if subject.shape.tensor > 1:
        switch_dropout_off(module)
    return module.to(subject.mesh.device_type)


class PlainModel:
    """The model of ``subject`` on plain tensors, in the dtypes in which the ranks compute."""

    def __init__(self, subject: Subject) -> None:
        module = plain_copy(subject)
        self.module = module
        # How often each module ran whose parameters the ranks gather together
        self.calls: Counter[str] = Counter()
        self._loss_of = subject.loss_of
        self._precision = Precision.of(subject.config.precision, module)
        for owner in module.modules():
            is_wide = id(owner) in self._precision.fp32_modules
            dtype = torch.float32 if is_wide else self._precision.param
            for _, parameter in held_parameters(owner):
                if parameter.is_complex():
                    parameter.data = parameter.data.to(dtype.to_complex())
                # One without dimensions is not gathered.
                elif parameter.is_floating_point() and parameter.ndim:
                    parameter.data = parameter.data.to(dtype)
        for name, inner in subject.model.named_modules():
            if isinstance(inner, FSDPModule):
                self._prepare(fqn_of(name))
        if self._precision.output is not None:
            _cast_outputs(module, self._precision.output)
        # Statistics that a forward changes are each data rank's own.
        self.initial_buffers = self._copied_buffers()
        self._buffers_of: dict[int, dict[str, Tensor]] = {}

    def _prepare(self, name: str) -> None:
        """Counts the calls of a module; casts its inputs and outputs as the parallel model does."""
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
        """The summed loss of a micro-batch, and by FQN the gradients of ``scale`` times it."""
        named = dict(self.module.named_parameters())
        with torch.no_grad():
            for name, parameter in named.items():
                parameter.copy_(weights[name])
            for name, buffer in self.module.named_buffers():
                buffer.copy_(self.buffers_of(data_rank)[name])
        loss = self._loss_of(self.module, batch)
        (loss * scale).backward()
        self._buffers_of[data_rank] = self._copied_buffers()
        found = {name: value.grad for name, value in named.items() if value.grad is not None}
        self.module.zero_grad()
        return loss.item(), found

    def buffers_of(self, data_rank: int) -> dict[str, Tensor]:
        """What the buffers of a data rank should hold by now."""
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
class ExpectedGradient:
    """The gradient of one parameter, a mean over ``ranks`` data ranks."""

    ranks: int
    value: Tensor  # fp32 at least
    later: Tensor | None = None  # its part from all micro-batches but the first of each rank
    size: float = 0.0  # mean of the contributions' 2-norms, by which errors are measured
    used: bool = False

    def add(self, gradient: Tensor, number: int) -> None:
        """What micro-batch ``number`` of a data rank contributes."""
        self.used = True
        self.value.add_(gradient, alpha=1 / self.ranks)
        if number > 0:
            later = torch.zeros_like(self.value) if self.later is None else self.later
            self.later = later.add_(gradient, alpha=1 / self.ranks)
        self.size += size_of(gradient) / self.ranks


class Track:
    """The parameters of one optimizer: ``parameters`` are expected, ``weights`` those with which
    the ranks compute, ``before`` those that their optimizers had before the update."""

    def __init__(self, module: nn.Module, config: OptimizerConfig) -> None:
        self.parameters = dict(module.named_parameters())
        self.weights: Tensors = {}
        self.before: Tensors = {}
        self._optimizer = build_optimizer(module, config)

    def update(self, gradients: Tensors, factor: float) -> None:
        """One step with ``gradients`` times ``factor``."""
        for name, gradient in gradients.items():
            parameter = self.parameters[name]
            parameter.grad = (gradient * factor).to(parameter.dtype)
        self._optimizer.step()
        self._optimizer.zero_grad()

    @torch.no_grad()
    def take(self, weights: Tensors, updated: Tensors) -> None:
        """Goes on from the values that the ranks and their optimizers have."""
        for name, parameter in self.parameters.items():
            parameter.copy_(updated[name])
        self.weights = weights
        self.before = updated


class ExpectedRun:
    """The run of ``subject`` in one process."""

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        shape, method = subject.shape, subject.method
        # One for each optimizer: of replicas that differ, every one has its own.
        self.tracks: list[Track] = []
        for _ in range(1 if method.replicas_equal else shape.replicate):
            self.tracks.append(Track(plain_copy(subject), subject.optimizer_config))
        self.sync = ExpectedSync(subject, self.tracks)
        self.plain = PlainModel(subject)
        self.ranks_per_track = shape.data_ranks // len(self.tracks)
        # Sums that cross the replicate axis unrounded need not be kept apart.
        parts = 1 if method.gradients_are_exact else shape.replicate
        self._ranks_per_part = shape.data_ranks // parts
        # Of the last step, by data rank: the summed losses, and how many micro-batches there are
        self.losses: list[float] = []
        self.forwards: list[int] = []

    def gradients(self, step: int) -> list[dict[str, ExpectedGradient]]:
        """By track and FQN, of ``step``, from 1, at the weights that the parallel model has."""
        data_ranks = self._subject.shape.data_ranks
        batches = [self._subject.read(step, data_rank) for data_rank in range(data_ranks)]
        self.forwards = [len(each) for each in batches]
        count = sum(sum(map(self._subject.count, each)) for each in batches)
        scale = data_ranks / max(count, 1)
        self.losses = [0.0] * data_ranks
        self.plain.calls.clear()
        parts = [self._zeros() for _ in range(data_ranks // self._ranks_per_part)]
        for data_rank, micro_batches in enumerate(batches):
            weights = self.tracks[data_rank // self.ranks_per_track].weights
            part = parts[data_rank // self._ranks_per_part]
            for number, batch in enumerate(micro_batches):
                seed_forward(step, data_rank, number)
                loss, gradients = self.plain.run(weights, data_rank, batch, scale)
                self.losses[data_rank] += loss
                for name, gradient in gradients.items():
                    part[name].add(gradient, number)
        is_mean = len(parts) == len(self.tracks)
        return parts if is_mean else [self.sync.mean_gradients(step, parts)]

    def _zeros(self) -> dict[str, ExpectedGradient]:
        found: dict[str, ExpectedGradient] = {}
        for name, parameter in self.tracks[0].parameters.items():
            wide = torch.promote_types(parameter.dtype, torch.float32)
            if parameter.requires_grad:
                zeros = torch.zeros_like(parameter.detach(), dtype=wide)
                found[name] = ExpectedGradient(self._ranks_per_part, zeros)
        return found


class ExpectedSync:
    """What crosses the replicate axis, and with ``sync=diloco`` the parameters that replicas share;
    see docs/sync-mathematics.md. ``cuts``: by FQN, what each rank of a replica holds."""

    def __init__(self, subject: Subject, tracks: Sequence[Track]) -> None:
        self.cuts: dict[str, list[Region]] = {}
        self.before: Tensors = {}  # the step, what the replicas shared
        self._method = subject.method
        hidden = hidden_matrices(subject.plain)
        self._state = ExpectedState(RoundingKeys(subject.seed), hidden)
        self._outer: ExpectedOuter | None = None
        outer = outer_sync(subject.model)
        if outer is not None:
            self._outer = outer.expected([track.parameters for track in tracks], self.cuts)

    @property
    def shared(self) -> Tensors:
        """With diloco what the replicas share."""
        return self._outer.shared if self._outer is not None else {}

    def mean_gradients(
        self, step: int, replicas: Sequence[Mapping[str, ExpectedGradient]]
    ) -> dict[str, ExpectedGradient]:
        """What arrives of the mean over the replicas."""
        means: dict[str, ExpectedGradient] = {}
        self._state.keys.step = step
        for name in replicas[0]:
            found = [each[name] for each in replicas]
            values, cut = [each.value for each in found], self.cuts[name]
            value = self._method.expected_gradient(values, cut, name, self._state)
            size = sum(each.size for each in found) / len(found)
            used = any(each.used for each in found)
            means[name] = ExpectedGradient(len(found), value, None, size, used)
        return means

    def after_update(self, step: int) -> None:
        """With diloco: exchanges what is due after ``step`` updates, and applies what arrives."""
        if self._outer is not None:
            self._outer.after_update(step)

    def take(self, shared: Tensors) -> None:
        """Goes on from what the ranks share."""
        if self._outer is not None:
            self._outer.shared = {name: value.clone() for name, value in shared.items()}
        self.before = shared


def size_of(tensor: Tensor) -> float:
    """The 2-norm, in fp64."""
    wide = torch.promote_types(tensor.dtype, torch.float64)
    return float(torch.linalg.vector_norm(tensor.detach().to(wide)))
