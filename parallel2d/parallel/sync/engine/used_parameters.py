"""The agreement of all ranks on which parameters any of them has used.

[Note: unused parameters] Zeros stand in for missing gradients, also inside the shard axis, so that
all ranks reduce the same. An optimizer would take zeros for gradients, decay weights and move by
its momentum. So ranks agree on which parameters any of them has used, and the others have no
gradient afterwards, as in one process. In a loop of one's own that is one small all-reduce at the
end of the last backward pass; the trainer makes it part of its own agreement.

The same sum shows whether a rank cannot go on, and whether the ranks of a shard group have issued
different collectives.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from parallel2d.base.errors import ConfigError
from parallel2d.base.exchange import all_gather
from parallel2d.parallel.mesh import axis_names, mesh_shape
from parallel2d.parallel.sync.engine.group_state import GroupState
from parallel2d.parallel.sync.group import IssueOrder


class UsedParameterAgreement:
    """Agrees on used parameters in three steps: `vector` is summed over all ranks, `error_in` finds
    failures in the sum, `apply` removes the gradients of unused parameters.

    ``order``: None where nothing is gathered or reduced over the shard axis.
    """

    def __init__(
        self, mesh: DeviceMesh, states: Sequence[GroupState], order: IssueOrder | None
    ) -> None:
        self._mesh = mesh
        self._states = states
        self._order = order
        self._replica = 0
        if mesh_shape(mesh).replicate > 1:
            self._replica = mesh.get_local_rank("replicate")
        self._parameters = sum(len(state.used) for state in states)
        # Why this rank cannot go on; empty when it can.
        self.fault = ""

    def vector(self) -> Tensor:
        """fp64 [1 + parameters + 3 * replicas], on CPU: whether this rank cannot go on, for each
        parameter whether it used it, then what `_digests` returns."""
        failed = torch.tensor([float(bool(self.fault))], dtype=torch.float64)
        used: list[bool] = []
        for state in self._states:
            used.extend(state.used)
        return torch.cat([failed, torch.tensor(used, dtype=torch.float64), self._digests()])

    def error_in(self, summed: Tensor) -> ConfigError | None:
        """The error that all ranks must raise, with the same message on all of them; None: there is
        none. Collective over the data ranks when there is one."""
        if summed[0] > 0:
            return self._error_of_any_rank(self.fault)
        ranks, total, squares = summed[1 + self._parameters :].view(-1, 3).unbind(1)
        different = squares * ranks != total**2
        if not different.any():
            return None
        message = ""
        # The ranks of a replica without differences have no message of their own.
        if self._order is not None and different[self._replica]:
            message = self._order.differing_on_other_hosts()
        return self._error_of_any_rank(message)

    def apply(self, summed: Tensor) -> None:
        """Removes the gradients of parameters that no rank used, and calls the hooks of the
        others."""
        used = (summed[1 : 1 + self._parameters] > 0).tolist()
        begin = 0
        for state in self._states:
            end = begin + len(state.used)
            state.used = used[begin:end]
            state.drop_unused()
            state.call_hooks()
            begin = end

    def _digests(self) -> Tensor:
        """fp64 [3 * replicas]: one, the hash of what was issued and its square, in the row of this
        replica.

        The hashes of a shard group are equal if the sum of their squares is that of equal numbers.
        """
        digests = torch.zeros(mesh_shape(self._mesh).replicate, 3, dtype=torch.float64)
        if self._order is not None:
            # 20 bits, so that fp64 adds the squares of up to 8,192 ranks exactly.
            value = self._order.digest() % 2**20
            digests[self._replica] = torch.tensor([1, value, value**2], dtype=torch.float64)
        return digests.flatten()

    def _error_of_any_rank(self, message: str) -> ConfigError:
        """The error with the message of the first rank that has one. Collective over the data
        ranks."""
        for axis in ("shard", "replicate"):
            if axis not in axis_names(self._mesh):
                continue
            messages = all_gather(message, self._mesh.get_group(axis))
            message = next((text for text in messages if text), "")
        if self._order is not None:
            self._order.acknowledge()
        return ConfigError(message)
