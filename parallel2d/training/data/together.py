"""`together` yields batches for the same number of steps on all ranks, for custom loops in which
ranks have different numbers of batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from parallel2d.base.errors import ConfigError
from parallel2d.base.exchange import all_gather, among, members
from parallel2d.base.metering import control_traffic
from parallel2d.parallel.loss import IGNORED
from parallel2d.parallel.mesh import part_group

_ENDS = ("longest", "shortest")
_TARGETS = ("labels", "targets", "target")  # keys of a batch that is a mapping
_NOTHING = object()


def mask_targets(batch: Any) -> Any:
    """Return ``batch`` with all targets ignored, so that it has no weight in a mean over tokens. In
    a mapping, the targets have the key ``labels``, ``targets`` or ``target``; in a tuple or list,
    they are the last item.

    Raises `ConfigError` for a batch without int64 targets in one of these places.
    """
    if isinstance(batch, Mapping):
        key = next((key for key in _TARGETS if key in batch), None)
        if key is not None and _are_targets(batch[key]):
            return {**batch, key: torch.full_like(batch[key], IGNORED)}
    if isinstance(batch, tuple | list) and batch and _are_targets(batch[-1]):
        return type(batch)([*batch[:-1], torch.full_like(batch[-1], IGNORED)])
    raise ConfigError(
        f"together: no int64 targets were found in a batch of type {type(batch).__name__}; give "
        "weightless=, a function of a batch that returns one without weight in the loss"
    )


def _are_targets(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype == torch.int64


def together(
    batches: Iterable[Any],
    mesh: DeviceMesh,
    *,
    end: str = "longest",
    weightless: Callable[[Any], Any] = mask_targets,
) -> Iterator[Any]:
    """Yield the batches of this rank, such that all data ranks take the same number of steps.

    With ``end="longest"`` all ranks continue until the last rank has no further batch; a rank whose
    batches have ended gets ``weightless(last batch)``. With ``end="shortest"`` all ranks end as
    soon as one rank has no further batch.

    For each step, an all-reduce of two numbers tells all ranks which ranks have a further batch.
    This all-reduce runs on the host, while the previous step computes. Collective: every rank of
    ``mesh`` must iterate.

    Args:
        batches: the batches of this rank. The context and tensor ranks of a data rank must pass the
            same batches.
        mesh: the mesh of the parallelized model.
        end: ``longest`` or ``shortest``.
        weightless: returns a copy of a batch that has no weight in the loss. The default suits a
            loss of `parallel2d.cross_entropy_sum` times `parallel2d.token_weight`, which is then
            exact.

    Raises:
        ConfigError: ``end`` is unknown; or, on all ranks: with ``end="longest"`` a rank has no
        batch at all, and another rank has one.
    """
    if end not in _ENDS:
        raise ConfigError(f"together: end={end!r} must be longest or shortest")
    remaining = iter(batches)
    batch, last = next(remaining, _NOTHING), _NOTHING
    agreed = _Agreement(mesh, has_batch=batch is not _NOTHING)
    while True:
        some, every = agreed.wait()
        if not some or (end == "shortest" and not every):
            return
        if last is _NOTHING and not every:
            raise ConfigError(
                f"together: {_ranks_without(batch is not _NOTHING, mesh)} no batch at all, and "
                'other ranks have: divide the data so that each rank has one, or use end="shortest"'
            )
        if batch is _NOTHING:
            current = weightless(last)
        else:
            current = last = batch
            batch = next(remaining, _NOTHING)
        agreed = _Agreement(mesh, has_batch=batch is not _NOTHING)
        yield current


def _ranks_without(has_batch: bool, mesh: DeviceMesh) -> str:
    """Return text about the ranks without a batch, such as ``rank 1 has``. Collective."""
    with among(part_group(mesh)):
        found = zip(members(), all_gather(has_batch), strict=True)
    ranks = []
    for rank, has in found:
        if not has:
            ranks.append(rank)
    return f"rank {ranks[0]} has" if len(ranks) == 1 else f"ranks {ranks} have"


class _Agreement:
    """The all-reduce of "this rank has a batch" and "this rank has no batch" over the data
    ranks."""

    def __init__(self, mesh: DeviceMesh, *, has_batch: bool) -> None:
        # The all-reduce runs on the host, because reading a result on a GPU would wait for the
        # running step.
        self._found = torch.tensor([has_batch, not has_batch], dtype=torch.float32)
        group = part_group(mesh)
        with control_traffic():
            self._work = dist.all_reduce(self._found, dist.ReduceOp.MAX, group, async_op=True)

    def wait(self) -> tuple[bool, bool]:
        """Return (some rank has a batch, every rank has a batch)."""
        self._work.wait()
        some, lacking = self._found.tolist()
        return bool(some), not lacking
