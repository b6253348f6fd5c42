"""Comparison of tensors that must be equal on all replicas: `ReplicaComparison`.

Replicas that differ in one bit would stay different until the end of the run. Therefore an
all-reduce that exists for another purpose also carries a hash of each group of parameters. Only if
hashes differ, the ranks exchange further data to find the parameter and the ranks.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from parallel2d.base.errors import ConfigError, first_five
from parallel2d.base.exchange import all_gather, members
from parallel2d.base.replicas import is_joining
from parallel2d.parallel.mesh import axis_positions, mesh_shape
from parallel2d.parallel.sync.formats.quantize import key_of
from parallel2d.parallel.weights.hashes import hashes_of

_HASH_BITS = 20  # fp64 adds the squares of up to 8,192 hashes of 20 bits exactly


class ReplicaComparison:
    """Compares the tensors of ``groups`` (group -> FQN -> tensor) between the replicas."""

    def __init__(self, mesh: DeviceMesh, groups: Mapping[str, Mapping[str, Tensor]]) -> None:
        self._groups = groups
        shape = mesh_shape(mesh)
        self._places = shape.shard * shape.tensor
        at = axis_positions(mesh)
        # This rank's position in its replica. Ranks of different replicas with the same position
        # must hold equal tensors.
        self._place = at.get("shard", 0) * shape.tensor + at.get("tensor", 0)

    def vector(self) -> Tensor:
        """Return this rank's vector for a sum over all ranks: fp64 [2 * groups * positions], CPU.

        The vector contains a hash and its square for each group at this rank's position, and zeros
        at all other positions. A joining replica returns only zeros, because it has no state yet.
        """
        vector = torch.zeros(len(self._groups), self._places, 2, dtype=torch.float64)
        if is_joining():
            return vector.flatten()
        for number, tensors in enumerate(self._groups.values()):
            value = key_of(*hashes_of(list(tensors.values()))) % 2**_HASH_BITS
            vector[number, self._place] = torch.tensor([value, value**2], dtype=torch.float64)
        return vector.flatten()

    def check(self, summed: Tensor, ranks: int) -> None:
        """Raise `ConfigError` on every rank if replicas differ.

        The call is collective over the world only if replicas differ.

        Args:
            summed: the sum of `vector` over all ranks.
            ranks: number of ranks without the ranks of joining replicas.
        """
        total, squares = summed.view(len(self._groups), self._places, 2).unbind(2)
        # n numbers are equal if and only if n * sum of squares == (sum) ** 2.
        replicas = ranks // self._places
        differs = (squares * replicas != total**2).any(1)
        if differs.any():
            names = []
            for name, each in zip(self._groups, differs, strict=True):
                if each:
                    names.append(name)
            raise ConfigError(self._explain(names))

    def _explain(self, groups: Sequence[str]) -> str:
        """Return the error message for ``groups`` that differ. Collective over the mesh."""
        own: dict[str, int] = {}
        for group in groups:
            tensors = self._groups[group]
            own.update(zip(tensors, hashes_of(list(tensors.values())), strict=True))
        ranks = all_gather((self._place, own))
        found: list[str] = []
        for name, place in itertools.product(own, range(self._places)):
            ranks_by_hash: dict[int, list[int]] = defaultdict(list)
            for rank, (at, hashes) in zip(members(), ranks, strict=True):
                if at == place:
                    ranks_by_hash[hashes[name]].append(rank)
            # With two replicas there is no majority; the first is reported as the majority.
            majority, *others = sorted(ranks_by_hash.values(), key=len, reverse=True)
            if others:
                minority = sorted(itertools.chain.from_iterable(others))
                found.append(f"{name} differs between ranks {majority} and {minority}")
        return (
            f"replicas differ in {first_five(groups, ', ')}: {first_five(found)}. "
            "Memory was damaged, or something other than the optimizer has changed a parameter on "
            "some ranks. Checkpoints since the last comparison may contain it: resume from an "
            "earlier one (checkpoint.resume=PATH)"
        )
