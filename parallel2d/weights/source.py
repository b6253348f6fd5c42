"""Where the weights of a model come from: `WeightSource` keeps them while the model is sharded."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence

from torch import Tensor, nn

from parallel2d.errors import ConfigError
from parallel2d.weights.equality import check_equal_on_all_ranks, check_same_structure
from parallel2d.weights.initial_values import (
    Initializer,
    InitialWeights,
    allocate,
    has_meta_parameters,
    plan_weights,
)
from parallel2d.weights.scatter import hand_over, scatter


class WeightSource:
    """The weights that a model starts from: those it has, those of one rank, or, for a model on
    meta, values drawn from a seed."""

    def __init__(
        self,
        model: nn.Module,
        *,
        seed: int | None,
        init: Initializer | None,
        broadcast_from: int | None,
        given: Callable[[nn.Module], Container[str]] | None,
    ) -> None:
        """Takes the weights that one rank gives the others out of ``model``. Collective.

        The arguments are those of `parallel2d.parallelize`; ``given`` is its ``weights``. Raises
        `ConfigError` when ranks have different models, and for arguments that exclude each other.
        """
        self._seed = seed
        self._init = init
        self._given = given
        self._source = broadcast_from or 0
        # Of one rank; the others have an empty dictionary.
        self._received: dict[str, Tensor] | None = None
        if broadcast_from is not None:
            self._received = hand_over(model, broadcast_from)
            seed = 0  # nothing is drawn, so a model on meta needs no seed
        # After `hand_over`, which ties on all ranks what is tied on the source.
        check_same_structure(model)
        self._on_meta = has_meta_parameters(model, seed)
        drawn = self._on_meta and broadcast_from is None
        if given is not None and not drawn:
            raise ConfigError(
                "weights= is for a model on meta without broadcast_from: build it under "
                "parallel2d.build_on_meta"
            )
        self._initial: InitialWeights | None = None

    def remember(self, model: nn.Module, blocks: Sequence[tuple[str, nn.Module]]) -> None:
        """Keeps what `fill` needs of ``model`` as it is before the transforms. Collective.

        Raises `ConfigError` when ranks hold different weights.
        """
        if not self._on_meta:
            check_equal_on_all_ranks(model)
        elif self._received is None:
            self._initial = plan_weights(model, blocks, self._init)

    def fill(self, model: nn.Module, device_type: str, *, offload: bool) -> None:
        """Gives ``model``, sharded by now, storage where it has none, and its weights. Collective.

        ``offload``: sharded parameters live in CPU memory.
        """
        if self._on_meta:
            allocate(model, device_type, offload=offload)
        if self._received is not None:
            scatter(model, self._received, self._source)
        if self._initial is not None:
            assert self._seed is not None
            # Weights that are loaded into the allocated model are not drawn.
            given: Container[str] = ()
            if self._given is not None:
                given = self._given(model)
            self._initial.write(model, self._seed, device_type, given=given)
