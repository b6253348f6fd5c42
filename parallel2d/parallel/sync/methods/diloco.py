"""``sync=diloco``: replicas train independently and average their changes every few steps.

[Note: DiLoCo] Each replica trains its parameters, and holds *outer* parameters, which are equal on
all replicas. Every ``sync.every`` steps each replica sends the difference between the outer
parameters and its parameters. An outer optimizer (SGD with Nesterov momentum) uses the mean
difference as gradient and updates the outer parameters. Then all replicas set their parameters to
the outer parameters (Douillard et al. 2023, arXiv 2311.08105).

With ``sync.fragments``, the model is divided into fragments, which are sent in different steps, so
that messages are smaller. With ``sync.delay``, training continues while a fragment is in flight,
and the new outer parameters are then mixed with the replica's parameters (Streaming DiLoCo,
Douillard et al. 2025, arXiv 2501.18512).
"""

from __future__ import annotations

import functools
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel2d.base.config import SyncConfig
from parallel2d.base.errors import ConfigError, first_five
from parallel2d.base.replicas import ReplicaLost, finished_everywhere
from parallel2d.parallel.gradients import squared_norm_share
from parallel2d.parallel.sync.formats import (
    ERROR_FEEDBACK_DECAY,
    FORMATS,
    CommunicationFormat,
    put_back,
)
from parallel2d.parallel.sync.formats.quantize import Piece, RoundingKeys
from parallel2d.parallel.sync.formats.quantized_mean import (
    ExactMean,
    QuantizedMean,
    QuantizedPart,
    expected_mean,
)
from parallel2d.parallel.sync.methods.method import (
    GroupTraffic,
    Message,
    ReplicatedModel,
    Started,
    SyncMethod,
    UpdateFollower,
)
from parallel2d.parallel.sync.methods.outer_parameter import (
    Fragment,
    OuterParameter,
    split_in_fragments,
)
from parallel2d.parallel.weights.geometry import Region, as_real, first_position, local_part
from parallel2d.parallel.weights.named_tensors import (
    equal,
    parameters_by_name,
    register_masters,
)


class DiLoCo(SyncMethod):
    """Averages parameter changes over the replicas every few steps. See [Note: DiLoCo]."""

    crosses = True
    replicas_equal = False
    gradients_are_exact = False

    def __init__(self, config: SyncConfig) -> None:
        super().__init__(config)
        # Communication format of parameter changes
        self.change_format = self.named_format or FORMATS["fp32"]
        self.mix = _number(config.mix, auto=0.5 if config.delay else 0.0)
        self.outer_lr = _number(config.outer_lr, auto=0.7)
        self.outer_momentum = _number(config.outer_momentum, auto=0.6)
        self.update_period = config.every
        self.shortest_period = max(config.delay + 1, config.fragments, 3)
        # Tensors per parameter that all replicas share: the outer parameter, its momentum, and its
        # error feedback
        self.shared_copies = 1 + (self.outer_momentum > 0) + self.change_format.has_error_feedback
        self.description = (
            f"diloco every {config.every} steps in {self.change_format.name}, outer lr "
            f"{self.outer_lr:g}, momentum {self.outer_momentum:g}"
        )
        if config.fragments > 1 or config.delay:
            self.description += (
                f", {config.fragments} fragments, delay {config.delay}, mix {self.mix:g}"
            )

    def format_for(self, dtype: torch.dtype) -> CommunicationFormat:
        return self.change_format

    def parameters(self, group: GroupTraffic) -> Message:
        comm_format = self.change_format
        if comm_format.rounds:
            return Message("all_reduce", comm_format.bytes_of(group.reduced_shapes))
        return Message("all_reduce", group.reduced_numel * group.sum_itemsize)

    def start(self, model: ReplicatedModel) -> Started:
        return Started(OuterSync(self, model), None)


def _number(setting: float | str, auto: float) -> float:
    return auto if setting == "auto" else float(setting)


class OuterSync(UpdateFollower):
    """The outer parameters of one model. For states and checkpoints, the outer parameters are the
    `MasterValues` of the model."""

    follows = True
    replicas_differ = True  # see `weights.named_tensors.MasterValues`
    residual_name = "residual"

    def __init__(self, method: DiLoCo, replicated: ReplicatedModel) -> None:
        self._method = method
        self._config = method.config
        self._replicated = replicated
        self._group = replicated.group
        self._seed = replicated.keys.seed
        self.replicas = self._group.size()
        self.replica = dist.get_group_rank(self._group, dist.get_rank())
        self.steps = 0  # number of updates of the replica's parameters
        # This rank's summand of the squared norm of the last mean change; the norm is the sum over
        # the ranks of a replica. None if the last step was no outer step.
        self.squared_change: Tensor | None = None
        # Value of `steps` at the last call of `finish`; 0: not called
        self.finished_after = 0
        self.fragments: list[Fragment] = []
        self.parameters: dict[str, OuterParameter] = {}
        self._all: dict[str, nn.Parameter] = {}
        # True inside of `outer_parameters`
        self._shown = False
        # Set by `make`, before all other calls
        self._outer: torch.optim.SGD

    def make(self, model: nn.Module) -> None:
        """Create the outer parameters from the trained parameters of ``model``."""
        method = self._method
        self._all = parameters_by_name(model)
        for name, parameter in self._all.items():
            if parameter.requires_grad:
                has_error_feedback = method.change_format.has_error_feedback
                self.parameters[name] = OuterParameter(name, parameter, has_error_feedback)
        units = []
        # The groups are in the order of backward, so this is the order of the model.
        for group in reversed(self._replicated.groups):
            units.append([parameter.name for parameter in group.parameters])
        parts = split_in_fragments(units, self.parameters, self._config.fragments)
        for number, part in enumerate(parts):
            # The last fragment is sent at the end of each period of ``every`` steps, and the other
            # fragments at equal intervals before it.
            begins = (number + 1) * self._config.every // len(parts) % self._config.every
            self.fragments.append(Fragment(part, begins))
        self._outer = torch.optim.SGD(
            [parameter.outer for parameter in self.parameters.values()],
            lr=method.outer_lr,
            momentum=method.outer_momentum,
            nesterov=method.outer_momentum > 0,
        )
        register_masters(model, self)

    @torch.no_grad()
    def after_update(self) -> None:
        """Count an update. Apply and send the fragments whose step has come.

        Collective over replicas in steps that send, apply or continue a fragment.
        """
        trained = {name for name, each in self._all.items() if each.requires_grad}
        changed = sorted(trained.symmetric_difference(self.parameters))
        if changed:
            raise ConfigError(
                f"sync=diloco: {first_five(changed, ', ')}: frozen or unfrozen after parallelize, "
                "which decides what replicas share; freeze and unfreeze before"
            )
        self.steps += 1
        self.squared_change = None
        delay = self._config.delay
        # All replicas have the same number of steps, so they apply and send the same fragments in
        # the same order. Fragments in flight are applied before new fragments are sent, because the
        # sent change is relative to the new outer parameters.
        for fragment in self.fragments:
            since = self.steps - fragment.sent_after
            if fragment.in_flight and since == delay:
                self._apply(fragment, self._method.mix)
            # After half of the delay, every replica starts the second collective of the fragment,
            # which sends the means. The means then have the other half of the delay to arrive. All
            # replicas start this collective in the same step, so that collectives of several
            # fragments have the same order.
            elif fragment.pending is not None and since == (delay + 1) // 2:
                with suppress(ReplicaLost):  # `_receive` restarts the exchange
                    fragment.pending.send_means()
        for fragment in self.fragments:
            if self.steps % self._config.every == fragment.begins:
                self._send(fragment)
                if delay == 0:
                    self._apply(fragment, self._method.mix)

    @torch.no_grad()
    def finish(self) -> None:
        """Send and apply all remaining changes at the end of training. Collective over replicas.

        Afterwards the parameters of all replicas equal the outer parameters.
        """
        for fragment in self.fragments:
            if fragment.in_flight:
                self._apply(fragment, self._method.mix)
        for fragment in self.fragments:
            if fragment.sent_after < self.steps:
                self._send(fragment)
                self._apply(fragment, 0.0)
            for parameter in fragment.parameters:
                parameter.take(0.0)
            fragment.sent_after = self.steps
        self.finished_after = self.steps

    def _send(self, fragment: Fragment) -> None:
        fragment.changes = []
        for parameter in fragment.parameters:
            parameter.mean = torch.zeros_like(parameter.outer, requires_grad=False)
            fragment.changes.append(as_real(parameter.change()))
        fragment.sent_after = self.steps
        self._begin(fragment)

    def _begin(self, fragment: Fragment) -> None:
        means: list[Tensor] = []
        pieces: list[Piece] = []
        keys = RoundingKeys(self._seed, fragment.sent_after)
        for parameter in fragment.parameters:
            assert parameter.mean is not None
            means.append(as_real(local_part(parameter.mean)))
            pieces.append(Piece(keys.of(parameter.name), first_position(parameter.outer)))
        comm_format, changes = self._method.change_format, fragment.changes
        if not comm_format.rounds:
            fragment.pending = ExactMean(self._group, changes, means)
            return
        quantizer = comm_format.quantizer(changes, pieces)
        keep = None
        if comm_format.has_error_feedback:
            named = self.residuals()
            rests = []
            for each in fragment.parameters:
                rests.append(as_real(local_part(named[each.name])))
            keep = functools.partial(put_back, quantizer, tensors=rests)
        part = QuantizedPart(quantizer, quantizer.rows(changes), means, keep)
        fragment.pending = QuantizedMean(self._group, [part])

    def receive(self) -> None:
        """Wait for messages in flight, so that a checkpoint can contain them. Collective over
        replicas."""
        for fragment in self.fragments:
            self._receive(fragment)

    def _receive(self, fragment: Fragment) -> None:
        """Wait for the mean of ``fragment`` over the live replicas, if it is in flight."""
        if fragment.pending is None:
            return
        while not finished_everywhere(fragment.pending.finish):
            self._begin(fragment)
        fragment.pending, fragment.changes = None, []

    def _apply(self, fragment: Fragment, mix: float) -> None:
        """Run an outer step with the received mean of ``fragment``."""
        self._receive(fragment)
        changed: list[Tensor] = []
        for parameter in fragment.parameters:
            parameter.outer.grad = parameter.mean
            parameter.mean = None
            changed.append(parameter.outer)
        share = squared_norm_share(changed, self._replicated.mesh.size() // self.replicas)
        if self.squared_change is not None:
            share += self.squared_change
        self.squared_change = share
        self._outer.step()
        self._outer.zero_grad()
        for parameter in fragment.parameters:
            parameter.take(mix)

    def expected(
        self, replicas: Sequence[Mapping[str, Tensor]], cuts: Mapping[str, Sequence[Region]]
    ) -> ExpectedOuter:
        """Return the reference computation of this object for parity checks."""
        begins: dict[str, int] = {}
        for fragment in self.fragments:
            begins |= {parameter.name: fragment.begins for parameter in fragment.parameters}
        return ExpectedOuter(self._method, self._seed, replicas, begins, cuts)

    @contextmanager
    def outer_parameters(self) -> Iterator[None]:
        """Replace the parameters of the model by the outer parameters inside of this context.

        Used for validation and export.
        """
        # In a nested call the model already has the outer parameters.
        if self._shown:
            yield
            return
        self._shown = True
        try:
            with ExitStack() as shown:
                for parameter in self.parameters.values():
                    shown.enter_context(parameter.outer_shown())
                yield
        finally:
            self._shown = False

    # Interface of `weights.named_tensors.MasterValues`

    def masters(self) -> dict[str, Tensor]:
        """Return the outer parameters by name."""
        return {name: parameter.outer for name, parameter in self.parameters.items()}

    shared_values = masters

    @property
    def unshared_steps(self) -> int:  # type: ignore[override]
        return max(self.steps - fragment.sent_after for fragment in self.fragments)

    @torch.no_grad()
    def masters_were_loaded(self) -> None:
        """Set the replica's parameters to the loaded outer parameters, and clear the momentum."""
        for parameter in self.parameters.values():
            parameter.take(0.0)
        self._forget()

    @torch.no_grad()
    def parameters_were_loaded(self) -> None:
        """Set the outer parameters to the loaded parameters, and clear the momentum."""
        for parameter in self.parameters.values():
            local_part(parameter.outer.detach()).copy_(local_part(parameter.own.detach()))
        self._forget()

    def parameters_were_changed(self) -> None:
        """Do nothing, because the change will be sent like an update of the optimizer."""

    def as_parameters(self) -> AbstractContextManager[None]:
        pairs = []
        for each in self.parameters.values():
            pairs.append((local_part(each.outer.detach()), local_part(each.own.detach())))
        return equal(pairs)

    def residuals(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for name, parameter in self.parameters.items():
            if parameter.residual is not None:
                found[name] = parameter.residual
        return found

    def set_residual(self, name: str, value: Tensor) -> None:
        self.residuals()[name].copy_(value)

    def _forget(self) -> None:
        """Clear the momentum, the received means and the error feedback after a load."""
        self.receive()
        self._outer.state.clear()
        for parameter in self.parameters.values():
            parameter.mean = None
            if parameter.residual is not None:
                parameter.residual.zero_()

    def resume(self, steps: int, finished_after: int, arrived: Container[str]) -> list[str]:
        """Restore the schedule of a checkpoint.

        Returns the names of the parameters whose received mean is still to be applied.

        Args:
            steps: number of updates at the checkpoint.
            finished_after: value of `finished_after` at the checkpoint.
            arrived: names of the parameters for which the checkpoint has a received mean.
        """
        self.steps = steps
        self.finished_after = finished_after
        expected: list[str] = []
        for fragment in self.fragments:
            # The step in which the fragment was last sent follows from the number of steps.
            sent_after = steps - (steps - fragment.begins) % self._config.every
            fragment.sent_after = max(sent_after, finished_after, 0)
            since = steps - fragment.sent_after
            names = []
            for parameter in fragment.parameters:
                names.append(parameter.name)
            if since < self._config.delay and all(name in arrived for name in names):
                expected.extend(names)
        return expected

    @property
    def momenta(self) -> dict[str, Tensor]:
        """Momentum buffers of the outer optimizer by name. Missing buffers are created."""
        found: dict[str, Tensor] = {}
        if self._outer.defaults["momentum"] == 0:
            return found
        for name, parameter in self.parameters.items():
            state = self._outer.state[parameter.outer]
            if state.get("momentum_buffer") is None:
                # A buffer of zeros gives the same result as no buffer: torch's first step then
                # copies the gradient.
                state["momentum_buffer"] = torch.zeros_like(parameter.outer, requires_grad=False)
            found[name] = state["momentum_buffer"]
        return found


@dataclass
class ExpectedOuter:
    """Computes the results of `OuterSync` in one process, for parity checks.

    All mappings are by FQN.
    """

    method: DiLoCo
    seed: int
    replicas: Sequence[Mapping[str, Tensor]]  # unsharded parameters, which `after_update` changes
    begins: Mapping[str, int]  # the step within a period in which the parameter is sent
    cuts: Mapping[str, Sequence[Region]]  # see `expected_mean`
    shared: dict[str, Tensor] = field(default_factory=dict)  # outer parameters, set before training
    velocity: dict[str, Tensor] = field(default_factory=dict)  # momentum of the outer optimizer
    # Error feedback by (replica, FQN)
    unsent: dict[tuple[int, str], Tensor] = field(default_factory=dict)
    arriving: dict[str, Tensor] = field(default_factory=dict)  # mean changes in flight

    @torch.no_grad()
    def after_update(self, step: int) -> None:
        """Send and apply the parameters that are due after ``step`` updates of every replica."""
        sync = self.method.config
        for name, begins in self.begins.items():
            if step % sync.every == begins:
                self.arriving[name] = self._mean_change(name, step)
            # A parameter that was never sent has no mean to apply.
            is_due = (step - sync.delay) % sync.every == begins
            if is_due and name in self.arriving:
                self._apply(name, self.arriving.pop(name))

    def _mean_change(self, name: str, step: int) -> Tensor:
        comm_format, messages = self.method.change_format, []
        for replica, own in enumerate(self.replicas):
            change = self.shared[name] - own[name]
            if comm_format.has_error_feedback:
                # `expected_mean` overwrites this tensor by the new error feedback.
                rest = self.unsent.setdefault((replica, name), torch.zeros_like(change))
                change = rest.mul_(ERROR_FEEDBACK_DECAY).add_(change)
            messages.append(change)
        return expected_mean(
            messages, comm_format, self.cuts[name], RoundingKeys(self.seed, step), name
        )

    def _apply(self, name: str, change: Tensor) -> None:
        lr, momentum = self.method.outer_lr, self.method.outer_momentum
        velocity = self.velocity.setdefault(name, torch.zeros_like(change))
        velocity.mul_(momentum).add_(change)
        # Nesterov momentum
        self.shared[name] -= lr * (change + momentum * velocity)
        for own in self.replicas:
            own[name].lerp_(self.shared[name], 1 - self.method.mix)
