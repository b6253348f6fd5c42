"""Compares what must be equal on all replicas: `ReplicaComparison`.

One bit that differs would stay for the rest of the run, and be saved. A hash of each group of
parameters travels on a sum over all ranks that exists anyway; only where hashes differ do ranks
exchange more, to name the parameter and the rank.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from parallel2d.base.errors import ConfigError, first_five
from parallel2d.base.exchange import all_gather
from parallel2d.base.replicas import is_joining
from parallel2d.parallel.mesh import axis_positions, mesh_shape
from parallel2d.parallel.sync.wires.blocks import key_of
from parallel2d.parallel.weights.hashes import hashes_of

_HASH_BITS = 20  # so that fp64 adds the squares of up to 8,192 ranks exactly


class ReplicaComparison:
    """Compares the tensors of ``groups``: by group, by name. All replicas have the same ones."""

    def __init__(self, mesh: DeviceMesh, groups: Mapping[str, Mapping[str, Tensor]]) -> None:
        self._groups = groups
        shape = mesh_shape(mesh)
        self._places = shape.shard * shape.tensor
        at = axis_positions(mesh)
        # This rank's place in its replica: ranks of one place hold equal tensors.
        self._place = at.get("shard", 0) * shape.tensor + at.get("tensor", 0)

    def vector(self) -> Tensor:
        """fp64 [2 * groups * places], on CPU, to be summed over all ranks: by group and place the
        hash of this rank's tensors, and its square; of one that has no state yet zeros."""
        vector = torch.zeros(len(self._groups), self._places, 2, dtype=torch.float64)
        if is_joining():
            return vector.flatten()
        for number, tensors in enumerate(self._groups.values()):
            value = key_of(*hashes_of(list(tensors.values()))) % 2**_HASH_BITS
            vector[number, self._place] = torch.tensor([value, value**2], dtype=torch.float64)
        return vector.flatten()

    def check(self, summed: Tensor, ranks: int) -> None:
        """Raises `ConfigError` on every rank when replicas differ. Collective over the world when
        they do. ``summed``: the sum of `vector` over all ranks; ``ranks``: how many had the state.
        """
        total, squares = summed.view(len(self._groups), self._places, 2).unbind(2)
        # Equal numbers are those whose squares add up to the square of their sum over their count.
        replicas = ranks // self._places
        differs = (squares * replicas != total**2).any(1)
        if differs.any():
            names = [name for name, each in zip(self._groups, differs, strict=True) if each]
            raise ConfigError(self._explain(names))

    def _explain(self, groups: Sequence[str]) -> str:
        """The message for ``groups`` that differ. Collective over the world."""
        own: dict[str, int] = {}
        for group in groups:
            tensors = self._groups[group]
            own.update(zip(tensors, hashes_of(list(tensors.values())), strict=True))
        ranks = all_gather((self._place, own))
        found: list[str] = []
        for name, place in itertools.product(own, range(self._places)):
            ranks_by_hash: dict[int, list[int]] = defaultdict(list)
            for rank, (at, hashes) in enumerate(ranks):
                if at == place:
                    ranks_by_hash[hashes[name]].append(rank)
            # With two replicas nobody is in the majority.
            majority, *others = sorted(ranks_by_hash.values(), key=len, reverse=True)
            if others:
                minority = sorted(itertools.chain.from_iterable(others))
                found.append(f"{name} differs between ranks {majority} and {minority}")
        return (
            f"replicas are not equal any more, in {first_five(groups, ', ')}: {first_five(found)}. "
            "Memory was damaged, or something other than the optimizer has changed a parameter on "
            "some ranks. Checkpoints since the last comparison may hold it: go on from an earlier "
            "one (checkpoint.resume=PATH)"
        )
