"""Comparison of tensors that must be equal on all replicas: `ReplicaComparison`.

A single differing bit would stay until the end of the run, and would be saved. A hash of each group
of parameters is part of an existing all-reduce over all ranks. Only if hashes differ, the ranks
exchange further data to name the parameter and the rank.
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

_HASH_BITS = 20  # fp64 adds the squares of up to 8,192 such hashes exactly


class ReplicaComparison:
    """Comparison of the tensors of ``groups``, by group and name, equal on all replicas."""

    def __init__(self, mesh: DeviceMesh, groups: Mapping[str, Mapping[str, Tensor]]) -> None:
        self._groups = groups
        shape = mesh_shape(mesh)
        self._places = shape.shard * shape.tensor
        at = axis_positions(mesh)
        # This rank's position in its replica: ranks of one position hold equal tensors.
        self._place = at.get("shard", 0) * shape.tensor + at.get("tensor", 0)

    def vector(self) -> Tensor:
        """Return this rank's addend of the sum over all ranks: fp64 [2 * groups * positions], CPU.

        It has a hash and its square for each group, at this rank's position. A joining replica adds
        zeros, because it has no state yet.
        """
        vector = torch.zeros(len(self._groups), self._places, 2, dtype=torch.float64)
        if is_joining():
            return vector.flatten()
        for number, tensors in enumerate(self._groups.values()):
            value = key_of(*hashes_of(list(tensors.values()))) % 2**_HASH_BITS
            vector[number, self._place] = torch.tensor([value, value**2], dtype=torch.float64)
        return vector.flatten()

    def check(self, summed: Tensor, ranks: int) -> None:
        """Raise `ConfigError` on every rank if replicas differ. Only in this case collective over
        the world.

        Args:
            summed: the sum of `vector` over all ranks.
            ranks: number of ranks that had the state.
        """
        total, squares = summed.view(len(self._groups), self._places, 2).unbind(2)
        # n numbers are equal if n times the sum of their squares is the square of their sum.
        replicas = ranks // self._places
        differs = (squares * replicas != total**2).any(1)
        if differs.any():
            names = []
            for name, each in zip(self._groups, differs, strict=True):
                if each:
                    names.append(name)
            raise ConfigError(self._explain(names))

    def _explain(self, groups: Sequence[str]) -> str:
        """Return the message for ``groups`` that differ. Collective over the mesh."""
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
            # Two replicas have no majority, and the first counts as one.
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
