"""Values that are kept beside the parameters that compute, and saved and loaded in their place.

Some methods of synchronization compute with other values than those that a run is about: with
``sync=diloco`` each replica has its own parameters, with split updates sent in bf16 all replicas
compute with rounded ones. The method registers itself as the model's `Keeper`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor, nn

_KEEPERS = "_parallel2d_keepers"


class Keeper(Protocol):
    """What keeps such values."""

    def kept(self) -> Mapping[str, Tensor]:
        """By canonical name of the parameter, for those that have one."""

    def kept_was_loaded(self) -> None:
        """Makes the parameters what the kept values imply. Collective."""

    def parameters_were_loaded(self) -> None:
        """Makes the kept values equal to the parameters."""

    def parameters_were_changed(self) -> None:
        """Takes over parameters that something other than the optimizer has changed."""


def register_keeper(model: nn.Module, keeper: Keeper) -> None:
    """Lets ``keeper`` keep values for ``model``."""
    vars(model).setdefault(_KEEPERS, []).append(keeper)


def keepers_in(model: nn.Module) -> list[Keeper]:
    """Those of ``model`` and of models inside it."""
    found: list[Keeper] = []
    for module in model.modules():
        found.extend(vars(module).get(_KEEPERS, []))
    return found


def kept_values(model: nn.Module) -> dict[str, Tensor]:
    """By canonical name, the kept values of ``model``."""
    found: dict[str, Tensor] = {}
    # A keeper of a part of the model has names of that part; `parallelize` makes whole models.
    for keeper in vars(model).get(_KEEPERS, []):
        found.update(keeper.kept())
    return found
