"""The order of forwards that torch records, and chains of forwards that gather ahead."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

from parallel2d.parallel.fsdp_internals.sharded_model import groups, in_backward, state_of


def prefetch_in_forward(module: nn.Module, later: Sequence[nn.Module]) -> None:
    """Has ``module`` gather, in forward, the parameters of the modules ``later`` too, but not while
    activations are recomputed.

    `FSDPModule.set_modules_to_forward_prefetch` would do if torch did not follow such chains in
    recomputation.
    """
    chain = _EmptyInBackward(state_of(other) for other in later)
    # torch goes through the chain when the parameters of `module` have been gathered.
    state_of(module)._states_to_forward_prefetch = chain


class _EmptyInBackward(list[FSDPState]):
    """A forward chain that is empty during backward. Recomputation runs forwards in backward, whose
    successors have been through backward already: gathering them again would be a collective for
    nothing."""

    def __iter__(self) -> Iterator[FSDPState]:
        if in_backward():
            return iter(())
        return super().__iter__()


class ForwardOrder:
    """The order in which the groups of ``model``, which is no part of a larger one, ended their
    forward, as torch records it in order to prefetch in backward.

    torch empties it at the end of the last backward pass of a global batch, but does not remove
    forwards without gradients from it. It has no public accessor.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._groups = groups(model)

    @property
    def _record(self) -> list[FSDPParamGroup]:
        # Looked up each time: `torch.distributed.fsdp.share_comm_ctx` replaces the context.
        return state_of(self._model)._comm_ctx.post_forward_order

    def modules(self) -> list[tuple[nn.Module, ...]]:
        """Those of each group. A group that ran several times occurs several times, as the same
        tuple."""
        return [group.modules for group in self._record]

    def remove_finished(self) -> int:
        """Removes all forwards if torch expects no backward pass for any of them. Returns the
        number of those that are left."""
        record = self._record
        # torch keeps the positions of a group's forwards in the record until backward reaches them.
        if not any(group._post_forward_indices for group in self._groups):
            record.clear()
        return len(record)

    def shorten(self, length: int) -> None:
        """Removes all forwards but the first ``length``, and drops parameters that were gathered
        early and not used: the next forward would take them for current."""
        del self._record[length:]
        for group in self._groups:
            kept = [index for index in group._post_forward_indices if index < length]
            group._post_forward_indices = kept
            # An all-gather that was issued and that no forward has waited for.
            if group._all_gather_result is not None:
                group.wait_for_unshard()
                group._to_sharded()
