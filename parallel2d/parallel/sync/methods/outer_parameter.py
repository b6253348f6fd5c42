"""Parameters of ``sync=diloco`` with their outer values (`OuterParameter`), and the parts of a
model that are exchanged together (`Fragment`).
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
    """One parameter: the replica's values, the outer values, and the message in flight."""

    def __init__(self, name: str, own: nn.Parameter, has_error_feedback: bool) -> None:
        self.name = name
        self.own = own
        wide = torch.promote_types(own.dtype, torch.float32)
        self.outer = own.detach().clone().to(wide).requires_grad_()
        # The mean change: in flight, or received and not applied.
        self.mean: Tensor | None = None
        # The replica's values while the model has the outer values.
        self._own_values: Tensor | None = None
        # Error feedback.
        self.residual: Tensor | None = None
        if has_error_feedback:
            self.residual = torch.zeros_like(self.outer, requires_grad=False)

    def change(self) -> Tensor:
        """Return the outer parameter minus the replica's parameter, plus the error feedback."""
        own = local_part(self.own.detach())
        outer = local_part(self.outer.detach())
        # With a narrower storage dtype, the rounding of the outer parameter is not a change.
        change = outer.to(own.dtype).to(outer.dtype) - own
        if self.residual is None:
            return change
        # The new error feedback is known once the message is quantized.
        return local_part(self.residual) * ERROR_FEEDBACK_DECAY + change

    def take(self, mix: float) -> None:
        """Set the replica's parameter to the outer parameter, mixed with the fraction ``mix`` of
        its own values."""
        own = local_part(self.own.detach())
        outer = local_part(self.outer.detach()).to(own.dtype)
        if mix == 0:
            own.copy_(outer)
        else:
            own.lerp_(outer, 1 - mix)

    @property
    def own_values(self) -> Tensor:
        """Values that the replica continues from, also while the model has the outer values."""
        return self.own if self._own_values is None else self._own_values

    @contextmanager
    def outer_shown(self) -> Iterator[None]:
        """Put the outer values into the model inside."""
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
    begins: int  # step of a period after which they are sent
    sent_after: int = 0  # step after which they were last sent
    pending: PendingMean | None = None
    changes: list[Tensor] = field(default_factory=list)  # of this replica, while in flight

    @property
    def in_flight(self) -> bool:
        """True if a mean is in flight, or received and not applied."""
        return any(parameter.mean is not None for parameter in self.parameters)


def split_in_fragments(
    units: Sequence[Sequence[str]], parameters: Mapping[str, OuterParameter], count: int
) -> list[list[OuterParameter]]:
    """Split units into ``count`` fragments of similar size.

    The largest units come first, each to the smallest fragment, so that equal layers alternate. A
    unit that is larger than a fragment is split by parameter. Sizes count unsharded
    parameters, so that all ranks make the same fragments. Raises `ConfigError` if ``count`` is
    larger than the number of possible fragments.
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
        # Each size counts one more, so that parameters without elements are distributed too.
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
    # Parameters outside of all groups, such as those without dimensions.
    pieces.extend((each, [name]) for name, each in sizes.items() if name not in in_units)
    return pieces
