"""What the parallel run should compute, step by step: `ExpectedRun`, on rank 0.

[Note: one step at a time] Every step is checked on its own. The gradient is compared with the sum
of what the data ranks should have contributed, at the weights that the parallel model has; the
update is compared with what a plain optimizer does with the gradient that the parallel model has.
After a comparison the parallel model's values are taken over. So an error is found in the step, and
at the place, at which it happens, and rounding is not amplified from step to step.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from parallel2d.certification.output_norms import Norms
from parallel2d.certification.plain_model import (
    Contribution,
    PlainModel,
    RandomState,
    random_state,
    set_random_state,
)
from parallel2d.config import SyncConfig
from parallel2d.mesh import MeshShape
from parallel2d.sync import one_process
from parallel2d.sync.outer_settings import mix_of, outer_settings
from parallel2d.sync.updates import outer_sync

MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]


@dataclass
class StepInputs:
    """What all data ranks read in one step, and with which random numbers."""

    number: int  # of the step, from 1
    batches: Sequence[Sequence[Any]]  # by data rank: its micro-batches
    scale: float  # of each micro-batch's summed loss
    loss_scale: float  # part of it, that the gradients are divided by before the update
    divisor: float  # of the summed loss, for the mean that is reported
    samples: int | None = None  # sum of the samples' hashes, where they have any
    random: Sequence[Sequence[RandomState]] = ()  # by data rank, by micro-batch; empty: not drawn


@dataclass
class ExpectedGradient:
    """The gradient of one parameter."""

    value: Tensor  # fp32 at least
    size: float  # 2-norm of the sum of the contributions' magnitudes
    used_by: set[int] = field(default_factory=set)  # data ranks


@dataclass
class ExpectedForward:
    """What the forwards of one data rank give in a step."""

    loss: float = 0.0  # summed
    outputs: list[Norms] = field(default_factory=list)  # of each forward


class ExpectedRun:
    """The run of ``plain``.

    ``shape``: of the mesh whose ranks share the work; ``begins``: with ``sync=diloco``, by name,
    after which step of a period a parameter is sent; ``cuts``: by name, how the ranks of a replica
    cut a parameter.
    """

    def __init__(
        self,
        plain: PlainModel,
        make_optimizer: MakeOptimizer,
        shape: MeshShape,
        sync: SyncConfig,
        *,
        seed: int,
        splits_updates: bool,
        begins: Mapping[str, int],
        cuts: Mapping[str, one_process.Cut],
    ) -> None:
        self.plain = plain
        self._cuts = cuts
        self.shape = shape
        self._sync = sync
        self._seed = seed
        self._splits_updates = splits_updates
        self.replicas_differ = sync.name == "diloco"
        count = shape.replicate if self.replicas_differ else 1
        # By replica where they train on their own: the parameters that its optimizer updates.
        self.tracks = [Track(copy.deepcopy(plain.module), make_optimizer) for _ in range(count)]
        self.outer = ExpectedOuter(self.tracks, sync, seed, begins, cuts)
        # In every rank's memory; with split updates in bf16 the rounded ones.
        self.weights = [track.values() for track in self.tracks]
        # Those of the step before
        self.weights_before = list(self.weights)

    def contributions(
        self, inputs: StepInputs, weights: Sequence[Mapping[str, Tensor]]
    ) -> Iterator[Contribution]:
        """Of every micro-batch of every data rank."""
        per_replica = self.shape.shard
        for data_rank, batches in enumerate(inputs.batches):
            track = data_rank // per_replica if self.replicas_differ else 0
            for number, batch in enumerate(batches):
                state = inputs.random[data_rank][number] if inputs.random else None
                yield self.plain.contribution(
                    weights[track], data_rank, number, batch, inputs.scale, state
                )

    def gradients(
        self, inputs: StepInputs, weights: Sequence[Mapping[str, Tensor]] | None = None
    ) -> tuple[list[dict[str, ExpectedGradient]], list[ExpectedForward]]:
        """By track the gradients by name, and by data rank what its forwards give. ``weights``: by
        track, if not those of the parallel model."""
        forwards = [ExpectedForward() for _ in inputs.batches]
        sums = [_Sums(self.plain) for _ in range(self.shape.replicate)]
        # This process is a rank of the parallel run too, and goes on drawing where it was.
        before = random_state()
        for each in self.contributions(inputs, weights or self.weights):
            forwards[each.data_rank].loss += each.loss
            forwards[each.data_rank].outputs += each.outputs
            sums[each.data_rank // self.shape.shard].add(each)
        set_random_state(before)
        per_replica = [each.means(self.shape.shard) for each in sums]
        if self.replicas_differ:
            return per_replica, forwards
        return [self._over_replicas(inputs.number, per_replica)], forwards

    def _over_replicas(
        self, step: int, per_replica: Sequence[Mapping[str, ExpectedGradient]]
    ) -> dict[str, ExpectedGradient]:
        """What arrives of the mean over replicas."""
        # Nothing crosses where there is one replica.
        if len(per_replica) == 1:
            return dict(per_replica[0])
        found: dict[str, ExpectedGradient] = {}
        for name, first in per_replica[0].items():
            values = [each[name].value for each in per_replica]
            # A parameter without dimensions is averaged with what ranks agree on, unrounded.
            wire = self._sync.wire if first.value.ndim else "auto"
            value = one_process.mean(
                values, wire, self._cuts[name], (self._seed, step, name), self._splits_updates
            )
            size = sum(each[name].size for each in per_replica) / len(per_replica)
            used = set().union(*(each[name].used_by for each in per_replica))
            found[name] = ExpectedGradient(value, size, used)
        return found

    def take(
        self, track: int, weights: Mapping[str, Tensor], updated: Mapping[str, Tensor]
    ) -> None:
        """Goes on from the values that the parallel model has."""
        self.weights_before[track] = self.weights[track]
        self.weights[track] = dict(weights)
        self.tracks[track].take(updated)


class Track:
    """The parameters of one optimizer."""

    def __init__(self, module: nn.Module, make_optimizer: MakeOptimizer) -> None:
        self.parameters = dict(module.named_parameters())
        self.optimizer = make_optimizer(module)
        self.before = self.values()  # the update

    def values(self) -> dict[str, Tensor]:
        return {name: value.detach().clone() for name, value in self.parameters.items()}

    @torch.no_grad()
    def update(self, gradients: Mapping[str, Tensor], factor: float) -> None:
        """One step with ``gradients`` times ``factor``."""
        for name, parameter in self.parameters.items():
            gradient = gradients.get(name)
            parameter.grad = None
            if gradient is not None and parameter.requires_grad:
                scaled = gradient if factor == 1.0 else gradient * factor
                parameter.grad = scaled.to(parameter.dtype)
        self.optimizer.step()
        self.optimizer.zero_grad()

    @torch.no_grad()
    def take(self, values: Mapping[str, Tensor]) -> None:
        for name, parameter in self.parameters.items():
            parameter.copy_(values[name])
        self.before = dict(values)


class ExpectedOuter:
    """The parameters that replicas share with ``sync=diloco``; see docs/sync.md for the
    mathematics."""

    def __init__(
        self,
        tracks: Sequence[Track],
        sync: SyncConfig,
        seed: int,
        begins: Mapping[str, int],
        cuts: Mapping[str, one_process.Cut],
    ) -> None:
        self._tracks = tracks
        self._sync = sync
        self._cuts = cuts
        self._seed = seed
        self._begins = begins
        self._lr, self._momentum = outer_settings(sync)
        self._mix = mix_of(sync)
        self.shared = tracks[0].values()
        self.before = tracks[0].values()  # the step
        self._velocity = {name: torch.zeros_like(each) for name, each in self.shared.items()}
        self._unsent = [
            {name: torch.zeros_like(each) for name, each in self.shared.items()} for _ in tracks
        ]
        self._arriving: dict[str, Tensor] = {}

    @torch.no_grad()
    def after_update(self, step: int) -> None:
        """Exchanges what is due after ``step`` updates, and applies what arrives."""
        for name, begins in self._begins.items():
            if step % self._sync.every == begins:
                self._arriving[name] = self._mean_change(name, step)
            due = (step - self._sync.delay) % self._sync.every == begins
            if name not in self._arriving or not due:
                continue
            change = self._arriving.pop(name)
            velocity = self._velocity[name].mul_(self._momentum).add_(change)
            self.shared[name] -= self._lr * (change + self._momentum * velocity)
            for track in self._tracks:
                track.parameters[name].lerp_(self.shared[name], 1 - self._mix)

    def _mean_change(self, name: str, step: int) -> Tensor:
        messages = []
        key = (self._seed, step, name)
        for number, (track, unsent) in enumerate(zip(self._tracks, self._unsent, strict=True)):
            change = self.shared[name] - track.parameters[name]
            messages.append(
                one_process.message_with_rest(
                    change, unsent[name], self._sync.wire, self._cuts[name], key, number
                )
            )
        return one_process.mean(messages, self._sync.wire, self._cuts[name], key)

    @torch.no_grad()
    def take(self, shared: Mapping[str, Tensor]) -> None:
        """Goes on from what the parallel model's replicas share."""
        for name, value in shared.items():
            self.shared[name].copy_(value)
            self.before[name].copy_(value)


class _Sums:
    """Sums of the contributions to one replica's gradient."""

    def __init__(self, plain: PlainModel) -> None:
        self._values: dict[str, Tensor] = {}
        self._magnitudes: dict[str, Tensor] = {}
        self._used_by: dict[str, set[int]] = {}
        for name, parameter in plain.parameters.items():
            if parameter.requires_grad:
                wide = torch.promote_types(parameter.dtype, torch.float32)
                self._values[name] = torch.zeros_like(parameter, dtype=wide)
                self._magnitudes[name] = torch.zeros_like(self._values[name].abs())
                self._used_by[name] = set()

    def add(self, contribution: Contribution) -> None:
        for name, gradient in contribution.gradients.items():
            if gradient is not None:
                self._values[name] += gradient
                self._magnitudes[name] += gradient.abs()
                self._used_by[name].add(contribution.data_rank)

    def means(self, ranks: int) -> dict[str, ExpectedGradient]:
        """Over the ``ranks`` of a replica."""
        found: dict[str, ExpectedGradient] = {}
        for name, value in self._values.items():
            size = float(torch.linalg.vector_norm(self._magnitudes[name].double())) / ranks
            found[name] = ExpectedGradient(value / ranks, size, self._used_by[name])
        return found


def outer_begins(model: nn.Module) -> dict[str, int]:
    """By name, after which step of a period a parameter is sent; empty but with ``sync=diloco``."""
    outer = outer_sync(model)
    found: dict[str, int] = {}
    for fragment in outer.fragments if outer else ():
        for parameter in fragment.parameters:
            found[parameter.name] = fragment.begins
    return found
