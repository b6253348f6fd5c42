"""``sync=diloco``: replicas train on their own, and share what they have learned every few steps.

[Note: DiLoCo] All replicas keep the *outer* parameters, equal on all of them. Every `every` steps
each replica sends how far its own parameters are from the outer ones. The mean of that is taken for
a gradient by an outer optimizer, SGD with Nesterov momentum, which moves the outer parameters, and
all replicas go on from there (Douillard et al. 2023, arXiv 2311.08105).

With fragments, parts of the model take turns, so that less is sent at once. With a delay, training
goes on while a fragment is on its way: what arrives is mixed with the replica's own parameters
(Streaming DiLoCo, Douillard et al. 2025, arXiv 2501.18512).
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel2d.config import StrategyConfig, SyncConfig
from parallel2d.errors import ConfigError, first_five
from parallel2d.gradients import squared_norm_share
from parallel2d.sync.blocks import BlockNoise, Piece
from parallel2d.sync.noise import key_of
from parallel2d.sync.rounded_exchange import Exchange
from parallel2d.sync.sparse import SparseExchange
from parallel2d.sync.wire import BlockWire, CastWire
from parallel2d.weights.geometry import first_position, local_part

# What a replica did not send is added to its next message, times this (error feedback; SparseLoCo)
RESIDUAL_DECAY = 0.95
_BITS = {"int8": 8, "int4": 4}


class PendingMean(Protocol):
    """A mean over the replicas that has begun."""

    def send_means(self) -> None:
        """Does what can be done before `finish`. Collective."""

    def finish(self) -> None:
        """Waits, and writes the mean into the tensors that were given. Collective."""


class OuterParameter:
    """One parameter: the replica's own, the outer one, and what is on its way."""

    def __init__(self, name: str, own: nn.Parameter, keeps_residual: bool) -> None:
        self.name = name
        self.own = own
        wide = torch.promote_types(own.dtype, torch.float32)
        self.outer = own.detach().clone().to(wide).requires_grad_()
        # The mean that was received and is not applied yet; then the gradient of `outer`.
        self.mean: Tensor | None = None
        # The replica's own values while the model has the outer ones.
        self._own_values: Tensor | None = None
        # What was not sent yet.
        self.residual: Tensor | None = None
        if keeps_residual:
            self.residual = torch.zeros_like(self.outer, requires_grad=False)

    def change(self) -> Tensor:
        """How far the replica's parameter is from the outer one; with what was not sent before."""
        own = local_part(self.own.detach())
        outer = local_part(self.outer.detach())
        # Where parameters are stored in a narrower dtype, what rounding took is no change.
        change = outer.to(own.dtype).to(outer.dtype) - own
        if self.residual is None:
            return change
        kept = local_part(self.residual)
        return kept.mul_(RESIDUAL_DECAY).add_(change)

    def take(self, mix: float) -> None:
        """Moves the replica's parameter to the outer one, but keeps the share ``mix`` of it."""
        own = local_part(self.own.detach())
        outer = local_part(self.outer.detach()).to(own.dtype)
        if mix == 0:
            own.copy_(outer)
        else:
            own.lerp_(outer, 1 - mix)

    @property
    def own_values(self) -> Tensor:
        """What the replica goes on from, also while the model has the outer values."""
        return self.own if self._own_values is None else self._own_values

    def show_outer(self) -> None:
        """Gives the model the outer values."""
        self._own_values = self.own.detach().clone()
        self.take(0.0)

    def show_own(self) -> None:
        """Gives the model the replica's own values back."""
        assert self._own_values is not None
        local_part(self.own.detach()).copy_(local_part(self._own_values))
        self._own_values = None


class Fragment:
    """Parameters that are exchanged together. ``begins``: the steps, modulo the period, after which
    they are sent."""

    def __init__(self, parameters: Sequence[OuterParameter], begins: int) -> None:
        self.parameters = parameters
        self.begins = begins
        self.sent_after = 0  # the step after which it was last sent
        self.pending: PendingMean | None = None
        # Whether a mean is here or on its way that is not applied.
        self.in_flight = False


class OuterSync:
    """The outer parameters of one model.

    ``group``: the process group of the replicas. ``units``: names of parameters that belong
    together, in the order of the model. ``seed``: of what is rounded at random.
    """

    def __init__(
        self,
        config: SyncConfig,
        group: dist.ProcessGroup,
        units: Sequence[Sequence[str]],
        seed: int,
    ) -> None:
        self._config = config
        self._group = group
        self._units = units
        self._seed = seed
        self._mix = mix_of(config)
        self.replicas = group.size()
        self.replica = dist.get_group_rank(group, dist.get_rank())
        self.steps = 0  # updates of the replica's parameters
        # This rank's share of the squared norm of the mean change that the last update applied;
        # None where it was no outer step
        self.squared_change: Tensor | None = None
        # The step at which `finish` was called, if it was.
        self.finished_after = 0
        self.fragments: list[Fragment] = []
        self.parameters: dict[str, OuterParameter] = {}
        self._frozen: dict[str, nn.Parameter] = {}
        # How many `outer_parameters` are entered.
        self._shown = 0
        self._outer: torch.optim.SGD | None = None

    def make(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Copies the values that the trained ones of ``parameters`` have now. ``parameters``: all
        of the model's, by name."""
        keeps_residual = self._config.wire == "sparse"
        for name, parameter in parameters.items():
            if not parameter.requires_grad:
                self._frozen[name] = parameter
                continue
            self.parameters[name] = OuterParameter(name, parameter, keeps_residual)
        parts = split_in_fragments(self._units, self.parameters, self._config.fragments)
        for number, part in enumerate(parts):
            # The last fragment is sent at the end of each period, the others evenly before.
            begins = (number + 1) * self._config.every // len(parts) % self._config.every
            self.fragments.append(Fragment(part, begins))
        lr, momentum = outer_settings(self._config)
        self._outer = torch.optim.SGD(
            [parameter.outer for parameter in self.parameters.values()],
            lr=lr,
            momentum=momentum,
            nesterov=momentum > 0,
        )

    # After each update of the replica's parameters

    @torch.no_grad()
    def after_update(self) -> None:
        """Counts an update, sends the fragments that are due, and applies those that arrive.
        Collective over the replicas in some steps."""
        self._check_trained()
        self.steps += 1
        self.squared_change = None
        delay = self._config.delay
        for fragment in self.fragments:
            since = self.steps - fragment.sent_after
            if fragment.in_flight and since == delay:
                self._apply(fragment, self._mix)
            # Halfway: what was received is there by now, and its mean can go on its way.
            elif fragment.pending is not None and since == (delay + 1) // 2:
                fragment.pending.send_means()
        for fragment in self.fragments:
            if self.steps % self._config.every == fragment.begins:
                self._send(fragment)
                if delay == 0:
                    self._apply(fragment, self._mix)

    @torch.no_grad()
    def finish(self) -> None:
        """At the end of training: an outer step with what is left, after which all replicas have
        the outer parameters. Collective over the replicas."""
        for fragment in self.fragments:
            if fragment.in_flight:
                self._apply(fragment, self._mix)
        for fragment in self.fragments:
            if fragment.sent_after < self.steps:
                self._send(fragment)
                self._apply(fragment, 0.0)
            for parameter in fragment.parameters:
                parameter.take(0.0)
            fragment.sent_after = self.steps
        self.finished_after = self.steps

    def _check_trained(self) -> None:
        changed = [name for name, each in self.parameters.items() if not each.own.requires_grad]
        changed += [name for name, each in self._frozen.items() if each.requires_grad]
        if changed:
            raise ConfigError(
                f"sync=diloco: {first_five(changed, ', ')}: frozen or unfrozen after parallelize, "
                "which decides what replicas share; do it before"
            )

    def _send(self, fragment: Fragment) -> None:
        """Begins the exchange of ``fragment``."""
        changes: list[Tensor] = []
        for parameter in fragment.parameters:
            parameter.mean = torch.zeros_like(parameter.outer, requires_grad=False)
            changes.append(_real(parameter.change()))
        means = [_real(local_part(_given(parameter.mean))) for parameter in fragment.parameters]
        fragment.pending = self._begin(fragment, changes, means)
        fragment.sent_after = self.steps
        fragment.in_flight = True

    def _begin(
        self, fragment: Fragment, changes: Sequence[Tensor], means: Sequence[Tensor]
    ) -> PendingMean:
        wire = self._config.wire
        if wire == "sparse":
            return SparseExchange(self._group, changes, means)
        if wire == "bf16":
            return Exchange(self._group, CastWire(torch.bfloat16), changes, means)
        if wire in _BITS:
            pieces = []
            for parameter in fragment.parameters:
                key = key_of(self._seed, self.steps, parameter.name)
                pieces.append(Piece(key, first_position(parameter.outer)))
            numels = [change.numel() for change in changes]
            noise = BlockNoise(pieces, numels, changes[0].device)
            return Exchange(self._group, BlockWire(_BITS[wire], noise), changes, means)
        return ExactMean(self._group, changes, means)

    def receive(self) -> None:
        """Waits for what is on its way, so that it can be saved. Collective over the replicas."""
        for fragment in self.fragments:
            if fragment.pending is not None:
                fragment.pending.finish()
                fragment.pending = None

    def _apply(self, fragment: Fragment, mix: float) -> None:
        """An outer step with what has arrived of ``fragment``."""
        if fragment.pending is not None:
            fragment.pending.finish()
            fragment.pending = None
        assert self._outer is not None
        changed: list[Tensor] = []
        for parameter in fragment.parameters:
            parameter.outer.grad = _given(parameter.mean)
            parameter.mean = None
            changed.append(parameter.outer)
        share = squared_norm_share(changed, dist.get_world_size())
        if self.squared_change is not None:
            share += self.squared_change
        self.squared_change = share
        self._outer.step()
        self._outer.zero_grad()
        for parameter in fragment.parameters:
            parameter.take(mix)
        fragment.in_flight = False

    @contextmanager
    def outer_parameters(self) -> Iterator[None]:
        """The model has the outer parameters inside, for validation and export."""
        self._shown += 1
        if self._shown == 1:
            self._show(OuterParameter.show_outer)
        try:
            yield
        finally:
            self._shown -= 1
            if self._shown == 0:
                self._show(OuterParameter.show_own)

    @torch.no_grad()
    def _show(self, show: Callable[[OuterParameter], None]) -> None:
        for parameter in self.parameters.values():
            show(parameter)

    # As a `parallel2d.weights.kept.Keeper`

    replicas_differ = True

    def kept(self) -> dict[str, Tensor]:
        """The outer parameters, by name."""
        return {name: parameter.outer for name, parameter in self.parameters.items()}

    @torch.no_grad()
    def kept_was_loaded(self) -> None:
        """All replicas start from the outer parameters, without momentum."""
        for parameter in self.parameters.values():
            parameter.take(0.0)
        self._forget()

    @torch.no_grad()
    def parameters_were_loaded(self) -> None:
        """The parameters are the outer ones, without momentum."""
        for parameter in self.parameters.values():
            local_part(parameter.outer.detach()).copy_(local_part(parameter.own.detach()))
        self._forget()

    def parameters_were_changed(self) -> None:
        """Does nothing: a change of the replica's parameters is shared like an update."""

    def _forget(self) -> None:
        """Drops what belongs to the values before."""
        self.receive()
        assert self._outer is not None
        self._outer.state.clear()
        for fragment in self.fragments:
            fragment.in_flight = False
        for parameter in self.parameters.values():
            parameter.mean = None
            if parameter.residual is not None:
                parameter.residual.zero_()

    # Saving and loading

    def resume(self, steps: int, finished_after: int, arrived: Container[str]) -> list[str]:
        """Goes on after ``steps`` updates, ``finished_after`` as it was. ``arrived``: parameters of
        which a mean was received that is not applied. Returns those of them that are still to be
        applied."""
        self.steps = steps
        self.finished_after = finished_after
        expected: list[str] = []
        for fragment in self.fragments:
            # The last step at which it was sent, which depends on the number of steps alone.
            sent_after = steps - (steps - fragment.begins) % self._config.every
            fragment.sent_after = max(sent_after, finished_after, 0)
            since = steps - fragment.sent_after
            names = [parameter.name for parameter in fragment.parameters]
            if since < self._config.delay and all(name in arrived for name in names):
                fragment.in_flight = True
                expected.extend(names)
        return expected

    @property
    def momenta(self) -> dict[str, Tensor]:
        """By name, the momentum of the outer optimizer; made where it does not exist yet."""
        assert self._outer is not None
        found: dict[str, Tensor] = {}
        if self._outer.defaults["momentum"] == 0:
            return found
        for name, parameter in self.parameters.items():
            state = self._outer.state[parameter.outer]
            if state.get("momentum_buffer") is None:
                # Zeros are what torch's first step, which copies the gradient, amounts to.
                state["momentum_buffer"] = torch.zeros_like(parameter.outer, requires_grad=False)
            found[name] = state["momentum_buffer"]
        return found


class ExactMean:
    """A mean by one all-reduce in the dtype of the values."""

    def __init__(
        self, group: dist.ProcessGroup, tensors: Sequence[Tensor], results: Sequence[Tensor]
    ) -> None:
        self._results = results
        self._flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        self._work = dist.all_reduce(self._flat, dist.ReduceOp.AVG, group=group, async_op=True)

    def send_means(self) -> None:
        """Does nothing: there is one message alone."""

    def finish(self) -> None:
        """Waits, and writes the mean."""
        self._work.wait()
        begin = 0
        for result in self._results:
            end = begin + result.numel()
            result.copy_(self._flat[begin:end].view(result.shape))
            begin = end


def mix_of(config: SyncConfig) -> float:
    """``sync.mix``, or what ``auto`` stands for."""
    if config.mix == "auto":
        return 0.5 if config.delay else 0.0
    return float(config.mix)


def outer_settings(config: SyncConfig) -> tuple[float, float]:
    """The learning rate and the momentum of the outer step, or what ``auto`` stands for."""
    lr, momentum = (1.0, 0.0) if config.wire == "sparse" else (0.7, 0.6)
    if config.outer_lr != "auto":
        lr = float(config.outer_lr)
    if config.outer_momentum != "auto":
        momentum = float(config.outer_momentum)
    return lr, momentum


def describe_sync(strategy: StrategyConfig, sync: SyncConfig, replicas: int) -> str:
    """What crosses the replicate axis, for people, with numbers for ``auto``."""
    if replicas == 1 and sync.name != "diloco":
        return "one replica: nothing crosses the replicate axis"
    wire = "precision.reduce" if sync.wire == "auto" else sync.wire
    if sync.name != "diloco":
        what = "gradients and updated parameters" if strategy.splits_updates else "gradients"
        return f"every step, {what} in {wire}"
    lr, momentum = outer_settings(sync)
    wire = "fp32" if sync.wire == "auto" else sync.wire
    text = f"diloco every {sync.every} steps in {wire}, outer lr {lr:g}, momentum {momentum:g}"
    if sync.fragments > 1 or sync.delay:
        text += f", {sync.fragments} fragments, delay {sync.delay}, mix {mix_of(sync):g}"
    return text


def split_in_fragments(
    units: Sequence[Sequence[str]], parameters: Mapping[str, OuterParameter], count: int
) -> list[list[OuterParameter]]:
    """``count`` parts of about equal size: the largest units first, each to the part that has
    least, so that equal layers are dealt out in turn.

    A unit that is larger than a part is dealt out by parameter. Sizes are those of whole
    parameters, so that all ranks make the same parts. Raises `ConfigError` for more parts than
    there are parameters.
    """
    sizes = {name: parameter.outer.numel() for name, parameter in parameters.items()}
    share = sum(sizes.values()) / count
    pieces: list[list[str]] = []
    in_units: set[str] = set()
    for unit in units:
        names = [name for name in unit if name in sizes]
        in_units.update(names)
        if sum(sizes[name] for name in names) > share:
            pieces.extend([name] for name in names)
        elif names:
            pieces.append(names)
    # Parameters that no group has, such as those without dimensions.
    pieces.extend([name] for name in sizes if name not in in_units)
    if count > len(pieces):
        raise ConfigError(
            f"sync.fragments={count}: the model has {len(pieces)} parts that can be exchanged one "
            "by one"
        )
    parts: list[list[OuterParameter]] = [[] for _ in range(count)]
    loads = [0] * count
    # Sorting is stable: of equal units the first comes first.
    for piece in sorted(pieces, key=lambda piece: -sum(sizes[name] for name in piece)):
        smallest = loads.index(min(loads))
        parts[smallest].extend(parameters[name] for name in piece)
        # One more, so that parameters without elements are dealt out too.
        loads[smallest] += sum(sizes[name] for name in piece) + 1
    return parts


def _given(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor


def _real(tensor: Tensor) -> Tensor:
    """A complex tensor as a view of real numbers."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
