"""One tensor of a sharded model made whole by `gather_tensor`, or filled from a whole one by
`fill_tensor`."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from parallel2d.weights.geometry import copy_slice
from parallel2d.weights.scatter import scatter_tensor


@torch.no_grad()
def gather_tensor(tensor: Tensor, *, keep: bool, cpu: bool) -> Tensor | None:
    """A whole copy of ``tensor`` where ``keep`` is true, None elsewhere. Collective for a
    `DTensor`.

    ``cpu``: the copy is in CPU memory.
    """
    whole = tensor
    local = tensor
    if isinstance(tensor, DTensor):
        whole = tensor.full_tensor()
        local = tensor.to_local()
    # Only now: every rank takes part in gathering.
    if not keep:
        return None
    whole = whole.detach()
    if cpu:
        whole = whole.cpu()
    # With one rank, or unsharded, this may be the storage of the tensor itself: a change of one
    # would change the other.
    if whole.untyped_storage().data_ptr() == local.untyped_storage().data_ptr():
        return whole.clone()
    return whole


@torch.no_grad()
def fill_tensor(tensor: Tensor, whole: Tensor | None, *, from_rank0: bool) -> None:
    """Fills ``tensor`` with this rank's part of ``whole``.

    ``from_rank0``: rank 0's ``whole`` is sent in pieces, the other ranks give None; collective.
    Otherwise every rank has its own.
    """
    if from_rank0:
        scatter_tensor(tensor, whole, 0)
    else:
        assert whole is not None
        copy_slice(tensor, whole)
