"""Parameters of ``sync=diloco`` with their outer values (`OuterParameter`), and groups of
parameters that are exchanged together (`Fragment`). See [Note: DiLoCo].
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from parallel2d.base.errors import ConfigError
from parallel2d.parallel.sync.formats import ERROR_FEEDBACK_DECAY
from parallel2d.parallel.sync.formats.quantized_mean import PendingMean
from parallel2d.parallel.weights.geometry import local_part


class OuterParameter:
    """One parameter of the replica with its outer parameter and the mean change in flight."""

    def __init__(self, name: str, own: nn.Parameter, has_error_feedback: bool) -> None:
        self.name = name
        self.own = own
        wide = torch.promote_types(own.dtype, torch.float32)
        self.outer = own.detach().clone().to(wide).requires_grad_()
        # The mean change that is in flight, or was received and is not applied yet
        self.mean: Tensor | None = None
        # The replica's values while `outer_shown` replaces them by the outer values
        self._own_values: Tensor | None = None
        # The error feedback
        self.residual: Tensor | None = None
        if has_error_feedback:
            self.residual = torch.zeros_like(self.outer, requires_grad=False)

    def change(self) -> Tensor:
        """Return the tensor to send: the outer parameter minus the replica's parameter, plus the
        decayed error feedback."""
        own = local_part(self.own.detach())
        outer = local_part(self.outer.detach())
        # `take` wrote the outer parameter in the storage dtype. Round the outer parameter here too,
        # so that the difference contains only training and no rounding error.
        change = outer.to(own.dtype).to(outer.dtype) - own
        if self.residual is None:
            return change
        # The new error feedback is computed when the sent tensor is quantized.
        return local_part(self.residual) * ERROR_FEEDBACK_DECAY + change

    def take(self, mix: float) -> None:
        """Set the replica's parameter to ``mix * parameter + (1 - mix) * outer``."""
        own = local_part(self.own.detach())
        outer = local_part(self.outer.detach()).to(own.dtype)
        if mix == 0:
            own.copy_(outer)
        else:
            own.lerp_(outer, 1 - mix)

    @property
    def own_values(self) -> Tensor:
        """The replica's parameter, also inside of `outer_shown`."""
        return self.own if self._own_values is None else self._own_values

    @contextmanager
    def outer_shown(self) -> Iterator[None]:
        """Replace the replica's parameter by the outer parameter inside of this context."""
        own = self._own_values = self.own.detach().clone()
        self.take(0.0)
        try:
            yield
        finally:
            local_part(self.own.detach()).copy_(local_part(own))
            self._own_values = None


@dataclass(eq=False)
class Fragment:
    """Parameters that are exchanged together."""

    parameters: Sequence[OuterParameter]
    begins: int  # step within a period of ``sync.every`` steps in which the fragment is sent
    sent_after: int = 0  # number of steps at the last send
    pending: PendingMean | None = None  # the running communication
    changes: list[Tensor] = field(default_factory=list)  # this replica's messages, while in flight

    @property
    def in_flight(self) -> bool:
        """True if a mean change is in flight, or was received and is not applied yet."""
        return any(parameter.mean is not None for parameter in self.parameters)


def split_in_fragments(
    units: Sequence[Sequence[str]], parameters: Mapping[str, OuterParameter], count: int
) -> list[list[OuterParameter]]:
    """Split a model into ``count`` fragments of similar size.

    ``units`` are the names of the parameters of each FSDP group. Units are assigned in order of
    decreasing size, each to the fragment that is smallest so far, so that equal layers alternate. A
    unit that is larger than 1 / ``count`` of the model is split into its parameters. Sizes of
    unsharded parameters are used, so that all ranks make the same fragments. Raises `ConfigError`
    if ``count`` is larger than the number of possible fragments.
    """
    sizes = {}
    for name, parameter in parameters.items():
        sizes[name] = parameter.outer.numel()
    pieces = _pieces_of_units(units, sizes, sum(sizes.values()) / count)
    if count > len(pieces):
        raise ConfigError(
            f"sync.fragments={count}: the model has {len(pieces)} parts that can be exchanged one "
            "by one"
        )
    parts: list[list[OuterParameter]] = []
    for _ in range(count):
        parts.append([])
    loads = [0] * count
    # The sort is stable: equal units keep their order.
    for size, names in sorted(pieces, key=lambda piece: -piece[0]):
        smallest = loads.index(min(loads))
        parts[smallest].extend(parameters[name] for name in names)
        # Add 1 to each size, so that parameters without elements are also distributed.
        loads[smallest] += size + 1
    return parts


def _pieces_of_units(
    units: Sequence[Sequence[str]], sizes: Mapping[str, int], share: float
) -> list[tuple[int, list[str]]]:
    """Return (size, names) of each unit, or of its parameters if it exceeds ``share``."""
    pieces: list[tuple[int, list[str]]] = []
    in_units: set[str] = set()
    for unit in units:
        trained = {}
        for name in unit:
            if name in sizes:
                trained[name] = sizes[name]
        in_units.update(trained)
        size = sum(trained.values())
        if size > share:
            pieces.extend((each, [name]) for name, each in trained.items())
        elif trained:
            pieces.append((size, list(trained)))
    # Parameters that belong to no FSDP group, such as parameters without dims
    pieces.extend((each, [name]) for name, each in sizes.items() if name not in in_units)
    return pieces
