"""Shows an `Examiner` on rank 0 what the ranks have, step by step: `Session`. Each rank has one."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from parallel2d import exchange
from parallel2d.certification.batches import is_as_configured
from parallel2d.certification.bounds import Bounds
from parallel2d.certification.certificate import Certificate, versions
from parallel2d.certification.collective_log import CollectiveLog
from parallel2d.certification.examiner import Examiner, new_rows
from parallel2d.certification.expected_run import (
    ExpectedGradient,
    ExpectedRun,
    MakeOptimizer,
    StepInputs,
    outer_begins,
)
from parallel2d.certification.gathered import cuts_of, gather_whole
from parallel2d.certification.output_norms import OutputNorms
from parallel2d.certification.plain_model import (
    LossOf,
    PlainModel,
    RandomState,
    gathered_modules,
    random_state,
    switch_dropout_off,
)
from parallel2d.certification.steps import layout_of
from parallel2d.config import ParallelConfig, TrainConfig
from parallel2d.gradients import without_partial
from parallel2d.mesh import data_coordinate, mesh_shape
from parallel2d.model_structure import fqn_of
from parallel2d.sync.comparison import hashes_of
from parallel2d.sync.outer import OuterSync
from parallel2d.sync.updates import outer_sync
from parallel2d.weights.geometry import local_region
from parallel2d.weights.named_tensors import parameters_by_name, reshard, updated_by_name
from parallel2d.weights.optimizer_settings import plain_settings


class Session:
    """All methods are collective over the world. ``examiner``: on rank 0; ``compares_outputs``:
    whether modules of the parallel model return what they return in one process."""

    def __init__(
        self,
        model: nn.Module,
        mesh: DeviceMesh,
        optimizer: torch.optim.Optimizer,
        collectives: CollectiveLog,
        examiner: Examiner | None,
        compares_outputs: bool,
    ) -> None:
        self._model = model
        self._mesh = mesh
        self._optimizer = optimizer
        self._collectives = collectives
        self.examiner = examiner
        self._shape = mesh_shape(mesh)
        self._outer = outer_sync(model)
        self._parameters = parameters_by_name(model)
        self._updated = updated_by_name(model)
        # Whether replicas update parts of the parameters
        self._splits = any(
            self._updated[name] is not value for name, value in self._parameters.items()
        )
        # Those whose values are gathered, by track
        self._replicas: list[int] = [0]
        if self._outer:
            self._replicas = list(range(self._shape.replicate))
        self._random: list[RandomState] = []
        self._outputs = None
        if compares_outputs:
            self._outputs = OutputNorms(model, gathered_modules(model))
        self._buffer_hashes = self._hash_buffers()
        self._is_updated = False
        self._step = 0
        # On rank 0, of the last step; otherwise bytes are not as predicted
        self._runs_each_group_once = True

    def begin(self) -> None:
        """Before the first step. Forwards until then, such as those that compare a loss in chunks
        with the plain one, are not compared."""
        if self._outputs is not None:
            self._outputs.take()
        self._compare_copies("initial weights", self._parameters)
        for replica in self._replicas:
            found = gather_whole(self._parameters, self._mesh, replica)
            if self.examiner is not None:
                self.examiner.initial_weights(found)

    def compare_generators(self) -> None:
        """Tensor ranks of one data rank must draw the same numbers for what they all hold."""
        of_torch, _, _, *of_device = random_state()
        own = _as_data([of_torch, *of_device])
        drawn = exchange.gather((data_coordinate(self._mesh), own))
        if self.examiner is not None:
            self.examiner.random_numbers(drawn)

    def start_step(self, number: int) -> None:
        """``number``: from 1."""
        self._step = number
        self._random.clear()
        self._collectives.start()
        if self.examiner is not None:
            self.examiner.step = number

    def gradients_ready(
        self, inputs: StepInputs | None, own_loss: float, norm: float, finite: bool
    ) -> None:
        """When gradients are complete, and not clipped yet.

        ``inputs``: on rank 0; ``own_loss``: this rank's, summed; ``norm``: that the run has found;
        ``finite``: whether the step will be made.
        """
        self._is_updated = finite
        expected = self._examine_forwards(inputs, own_loss, finite)
        gradients = self._gradients()
        self._compare_settings()
        unequal: list[str] = []
        if finite:
            unequal = self._compare_copies("gradients", gradients)
        used = exchange.gather(self._used_names())
        norms: list[float] = []
        for track, replica in enumerate(self._replicas):
            found = self._gather_of_replica(gradients, replica)
            if self.examiner is not None and inputs is not None and finite:
                self.examiner.gradients(track, found, expected[track], inputs, replica)
                first = int(self._mesh.mesh.view(self._shape.replicate, -1)[replica, 0])
                scale = inputs.loss_scale
                norms.append(self.examiner.update(track, found, set(used[first]), scale))
        # Where copies differ, those of the other replicas are examined too.
        if unequal and not self._splits and not self._outer:
            differing = {name: gradients[name] for name in unequal}
            self._examine_other_replicas(differing, expected, inputs)
        if self.examiner is not None and norms:
            self.examiner.remember(expected)
            self.examiner.norm(norm, norms)

    def _used_names(self) -> list[str]:
        """Parameters that have a gradient on this rank."""
        return [name for name, value in self._updated.items() if value.grad is not None]

    def _gather_of_replica(self, tensors: Mapping[str, Tensor], replica: int) -> dict[str, Tensor]:
        """Updated parameters or their gradients, whole on rank 0. With split updates they are parts
        of all replicas."""
        return gather_whole(tensors, self._mesh, None if self._splits else replica)

    def _examine_other_replicas(
        self,
        gradients: Mapping[str, Tensor],
        expected: Sequence[Mapping[str, ExpectedGradient]],
        inputs: StepInputs | None,
    ) -> None:
        """Compares ``gradients``, which replicas have differently. Collective."""
        for replica in range(1, self._shape.replicate):
            found = gather_whole(gradients, self._mesh, replica)
            if self.examiner is not None and inputs is not None:
                self.examiner.gradients(0, found, expected[0], inputs, replica)

    def _examine_forwards(
        self, inputs: StepInputs | None, own_loss: float, finite: bool
    ) -> list[dict[str, ExpectedGradient]]:
        """Compares losses and outputs; returns by track the gradients to expect, on rank 0."""
        states = self._drawn_with()
        losses = exchange.gather(own_loss)
        outputs = exchange.gather(self._outputs.take() if self._outputs else [])
        if self.examiner is None or inputs is None:
            return []
        inputs.random = states
        expected, forwards = self.examiner.run.gradients(inputs)
        groups = sorted(gathered_modules(self._model))
        self._runs_each_group_once = all(
            sorted(name for name, _ in each) == groups
            for forward in forwards
            for each in forward.outputs
        )
        if finite and self._outputs is not None:
            self.examiner.outputs(outputs, forwards)
        self.examiner.losses(losses, forwards, inputs.divisor, finite)
        return expected

    def end_step(self) -> None:
        """After the update."""
        predictable = is_as_configured(self._step) and self._runs_each_group_once
        found = self._collectives.check(self._step, predictable=predictable)
        if self.examiner is not None:
            for each in found:
                self.examiner.certificate.add(each)
        # Parameters that a forward has gathered would hide the updated ones.
        reshard(self._model)
        self._compare_copies("weights", self._parameters)
        if self._outer is not None:
            self._outer_step(self._outer)
        for track, replica in enumerate(self._replicas):
            updated = self._gather_of_replica(self._updated, replica)
            weights = updated
            if self._splits:
                weights = gather_whole(self._parameters, self._mesh)
            if self.examiner is not None:
                self._examine_weights(self.examiner, track, weights, updated)
        self._compare_buffers()

    def certificate(
        self, steps: int, configuration: TrainConfig | ParallelConfig, seconds: float
    ) -> Certificate:
        """At the end, on every rank. ``steps``: that were compared."""
        found = None
        if self.examiner is not None:
            found = self.examiner.certificate
            found.steps = steps
            found.seconds = seconds
            found.collectives = self._collectives.lines
            # What is no plain value, such as a function, by its name.
            content = json.dumps(dataclasses.asdict(configuration), default=str)
            found.configuration = json.loads(content)
        on_all_ranks: Certificate = exchange.broadcast(found)
        return on_all_ranks

    def _outer_step(self, sync: OuterSync) -> None:
        """Compares the parameters that replicas share."""
        shared: dict[str, Tensor] = {name: each.outer for name, each in sync.parameters.items()}
        self._compare_copies("shared weights", shared, over_replicas=True)
        found = gather_whole(shared, self._mesh)
        if self.examiner is not None:
            outer = self.examiner.run.outer
            if self._is_updated:
                outer.after_update(sync.steps)
            self.examiner.weights("shared weight", found, outer.shared, outer.before)
            outer.take(found)

    def _examine_weights(
        self,
        examiner: Examiner,
        track: int,
        weights: Mapping[str, Tensor],
        updated: Mapping[str, Tensor],
    ) -> None:
        expected = examiner.run.tracks[track]
        examiner.weights("update", updated, expected.parameters, expected.before)
        examiner.frozen(weights, examiner.run.weights[track])
        if self._splits:
            examiner.owned(weights, updated)
        examiner.run.take(track, weights, updated)

    # What the ranks have

    def note_random_state(self, *_: Any) -> None:
        """Before each micro-batch."""
        if self._model.training:
            self._random.append(random_state())

    def _drawn_with(self) -> list[list[RandomState]]:
        """By data rank and micro-batch the states in which forwards began, on rank 0; empty where
        no random numbers were drawn."""
        # Most models draw nothing, and then nothing need be sent.
        now = random_state()
        begin = self._random[0] if self._random else now
        drew = any(not torch.equal(a, b) for a, b in zip(begin, now, strict=True))
        if not any(exchange.all_gather(drew)):
            return []
        own = [_as_data(states) for states in self._random]
        drawn = exchange.gather((data_coordinate(self._mesh), own))
        if self.examiner is None:
            return []
        self.examiner.random_numbers(drawn)
        by_data_rank = dict(reversed(drawn))
        return [
            [[_as_state(each) for each in states] for states in by_data_rank[data_rank]]
            for data_rank in sorted(by_data_rank)
        ]

    def _gradients(self) -> dict[str, Tensor]:
        """Of this rank, by name; zeros where there is none, so that all ranks list the same."""
        found: dict[str, Tensor] = {}
        for name, parameter in self._updated.items():
            if not parameter.requires_grad:
                continue
            gradient = parameter.grad
            if gradient is None:
                gradient = torch.zeros_like(parameter.detach())
            found[name] = without_partial(gradient) if isinstance(gradient, DTensor) else gradient
        return found

    def _compare_settings(self) -> None:
        groups = [plain_settings(group) for group in self._optimizer.param_groups]
        for group in groups:
            group.pop("params", None)
        settings = [
            (f"{name} of group {number}", str(group[name]))
            for number, group in enumerate(groups)
            for name in sorted(group)
        ]
        found = exchange.gather(settings)
        if self.examiner is not None:
            self.examiner.settings(found)

    def _compare_copies(
        self, what: str, tensors: Mapping[str, Tensor], over_replicas: bool | None = None
    ) -> list[str]:
        """Names of tensors whose copies differ, on every rank. ``over_replicas``: whether replicas
        hold copies; default: unless they train on their own."""
        if over_replicas is None:
            over_replicas = self._outer is None
        place = "" if over_replicas or self._shape.replicate == 1 else self._replica()
        hashes = hashes_of(list(tensors.values()))
        own: dict[str, tuple[str, int]] = {}
        for (name, tensor), value in zip(tensors.items(), hashes, strict=True):
            own[name] = (f"{place} {local_region(tensor)}", value)
        held = exchange.gather(own)
        unequal: list[str] = []
        if self.examiner is not None:
            unequal = self.examiner.copies(what, held)
        found: list[str] = exchange.broadcast(unequal)
        return found

    def _replica(self) -> str:
        return f"replica {self._mesh.get_local_rank('replicate')}"

    def _hash_buffers(self) -> dict[str, int]:
        buffers = self._buffers()
        return dict(zip(buffers, hashes_of(list(buffers.values())), strict=True))

    def _buffers(self) -> dict[str, Tensor]:
        return {fqn_of(name): value for name, value in self._model.named_buffers()}

    def _compare_buffers(self) -> None:
        """Those that a forward has changed."""
        hashes = self._hash_buffers()
        changed = [name for name, value in hashes.items() if value != self._buffer_hashes[name]]
        self._buffer_hashes = hashes
        # Also those that should have changed.
        if self.examiner is not None:
            changed += self.examiner.run.plain.changed_buffers()
        names = sorted(set().union(*exchange.all_gather(changed)))
        buffers = self._buffers()
        for data_rank in range(self._shape.data_ranks if names else 0):
            source = int(self._mesh.mesh.view(self._shape.data_ranks, -1)[data_rank, 0])
            found = {name: buffers[name].detach().clone() for name in names}
            for value in found.values():
                c10d.broadcast(value, source)
            if self.examiner is not None:
                self.examiner.buffers(data_rank, found)


def open_session(
    model: nn.Module,
    mesh: DeviceMesh,
    config: ParallelConfig,
    optimizer: torch.optim.Optimizer,
    collectives: CollectiveLog,
    plain: Callable[[], nn.Module],
    loss_of: LossOf,
    make_optimizer: MakeOptimizer,
    *,
    seed: int,
    clip: float,
    notes: list[str],
) -> Session:
    """The session of ``model``, which ``optimizer`` trains. Collective.

    ``plain``: makes the model in one process, with its initial weights; called on rank 0, as
    ``make_optimizer`` is.
    """
    shape = mesh_shape(mesh)
    # Tensor ranks drop what they hold alone in masks of their own.
    drops = shape.tensor > 1 and switch_dropout_off(model)
    if drops:
        notes.append("dropout is off, since tensor ranks draw for their own parts")
    bounds = Bounds.of(config, shape, optimizer, mesh.device_type)
    cuts = cuts_of(parameters_by_name(model), mesh)
    examiner = None
    if dist.get_rank() == 0:
        module = plain().to(mesh.device_type)
        if drops:
            switch_dropout_off(module)
        run = ExpectedRun(
            PlainModel(module, loss_of, config.precision, gathered_modules(model)),
            make_optimizer,
            shape,
            config.sync,
            seed=seed,
            splits_updates=config.strategy.splits_updates,
            begins=outer_begins(model),
            cuts=cuts,
        )
        certificate = Certificate(
            layout_of(config, shape),
            type(module).__name__,
            new_rows(module),
            bounds.words,
            notes=notes,
            versions=versions(),
        )
        examiner = Examiner(run, certificate, bounds, mesh, clip)
    session = Session(model, mesh, optimizer, collectives, examiner, bounds.same_kernels)
    if drops:
        session.compare_generators()
    return session


def _as_data(states: RandomState) -> list[bytes]:
    return [each.numpy().tobytes() for each in states]


def _as_state(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
