"""Values that are kept beside the parameters that compute, and saved and loaded in their place.

Some methods of synchronization compute with other values than those that a run is about: with
``sync=diloco`` each replica has its own parameters, with split updates sent in bf16 all replicas
compute with rounded ones. The method registers itself as the model's `Keeper`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor, nn

# Attributes of modules: of all modules of a model, and of the model itself
_KEEPERS = "_parallel2d_keepers"
_KEPT_BY = "_parallel2d_kept_by"


class Keeper(Protocol):
    """What keeps such values."""

    replicas_differ: bool
    """Whether each replica has parameters of its own."""

    def kept(self) -> Mapping[str, Tensor]:
        """By FQN of the parameter, for those that have one."""

    def kept_was_loaded(self) -> None:
        """Makes the parameters what the kept values imply. Collective."""

    def parameters_were_loaded(self) -> None:
        """Makes the kept values equal to the parameters."""

    def parameters_were_changed(self) -> None:
        """Takes over parameters that something other than the optimizer has changed."""


def register_keeper(model: nn.Module, keeper: Keeper) -> None:
    """Lets ``keeper`` keep values for ``model``."""
    vars(model).setdefault(_KEPT_BY, []).append(keeper)
    # A change through any module of the model must reach it.
    for module in model.modules():
        vars(module).setdefault(_KEEPERS, []).append(keeper)
    model.register_load_state_dict_post_hook(lambda *_: keeper.parameters_were_loaded())


def keepers_in(model: nn.Module) -> list[Keeper]:
    """Those of ``model``, of the model that it is a part of, and of models inside it."""
    found: dict[int, Keeper] = {}
    for module in model.modules():
        for keeper in vars(module).get(_KEEPERS, []):
            found[id(keeper)] = keeper
    return list(found.values())


def kept_values(model: nn.Module) -> dict[str, Tensor]:
    """By FQN, the kept values of ``model``."""
    found: dict[str, Tensor] = {}
    # Their names are those of the whole model.
    for keeper in vars(model).get(_KEPT_BY, []):
        found.update(keeper.kept())
    return found
