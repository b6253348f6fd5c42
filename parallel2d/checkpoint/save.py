"""One save on all ranks: `Staging.take` copies the state to CPU, `write_checkpoint` writes and
publishes it. `StoreCheckpointer` decides when.

The training loop waits for staging alone, a copy into CPU buffers that are kept from save to save.
The rest may run in a thread, because it communicates over a process group of its own. Rank 0 opens
the folder, all ranks write, rank 0 gathers their answers, writes the manifest and renames, and the
outcome is broadcast, so that an error is the same on every rank.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from parallel2d import exchange
from parallel2d.checkpoint.manifest import Chunk, Manifest, StoredFile, StoredTensor, chunk_key
from parallel2d.checkpoint.storage import CheckpointError, Store, describe_error
from parallel2d.checkpoint.write_plan import plan_all
from parallel2d.errors import ConfigError
from parallel2d.files.tensor_file import DTYPE_NAMES, DamagedCheckpointError, encode
from parallel2d.weights.geometry import Region

log = logging.getLogger(__name__)


class Group:
    """The ranks that save together, over a gloo group of their own; or this process alone."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.rank = dist.get_rank() if group is not None else 0
        self.size = dist.get_world_size() if group is not None else 1

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value on every rank."""
        if self.group is None:
            return value
        return exchange.broadcast(value, 0, self.group)

    def on_first(self, work: Callable[[], Any]) -> Any:
        """Runs ``work`` on rank 0 and returns its result, on every rank; its `ConfigError` is
        raised on all. It must raise no other error: the other ranks would wait. Collective."""
        answer: Any = None
        if self.rank == 0:
            try:
                answer = work()
            except ConfigError as fault:
                answer = fault
        answer = self.broadcast(answer)
        if isinstance(answer, ConfigError):
            raise answer
        return answer

    def agree(self, work: Callable[[], object]) -> None:
        """Runs ``work`` on every rank; an error on any rank is raised on all, once each has
        answered. Collective."""
        error: Exception | None = None
        try:
            work()
        except DamagedCheckpointError as fault:
            error = DamagedCheckpointError(str(fault))
        except ConfigError as fault:
            error = ConfigError(str(fault))
        except (OSError, RuntimeError, ValueError) as fault:
            error = DamagedCheckpointError(f"rank {self.rank}: {describe_error(fault)}")
        for answer in self.all_gather(error):
            if answer is not None:
                raise answer

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, by rank, on rank 0; an empty list elsewhere."""
        if self.group is None:
            return [value]
        return exchange.gather(value, self.group)

    def all_gather(self, value: Any) -> list[Any]:
        """Every rank's value, by rank, on every rank."""
        if self.group is None:
            return [value]
        return exchange.all_gather(value, self.group)


@dataclass
class Snapshot:
    """What one rank writes, copied to CPU: (tensor name, whole shape, region, values), and the
    manifest so far."""

    manifest: Manifest
    parts: list[tuple[str, tuple[int, ...], Region, Tensor]] = field(default_factory=list)


class Staging:
    """CPU buffers that hold a snapshot, allocated once (page-locked beside a GPU) and used again by
    every save."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    @torch.no_grad()
    def take(
        self,
        manifest: Manifest,
        tensors: Mapping[str, Tensor],
        of_replica: Mapping[str, Tensor],
        own: Mapping[str, Tensor],
        mesh: DeviceMesh | None,
    ) -> Snapshot:
        """Copies this rank's share of ``tensors`` and of those ``of_replica``, which other replicas
        do not have (see `plan_all`), and all of ``own``, which no other rank has."""
        snapshot = Snapshot(manifest)
        whole = {**tensors, **of_replica}
        planned = list(plan_all(tensors, of_replica, mesh))
        planned += [(name, Region.whole(tensor.shape), tensor) for name, tensor in own.items()]
        whole |= own
        for name, region, values in planned:
            buffer = self._buffer(name, values)
            buffer.copy_(values, non_blocking=values.is_cuda)
            snapshot.parts.append((name, tuple(whole[name].shape), region, buffer))
        # Copies into page-locked memory run beside this thread, and training would change what is
        # being copied.
        if any(values.is_cuda for _, _, values in planned):
            torch.cuda.synchronize()
        return snapshot

    def _buffer(self, name: str, values: Tensor) -> Tensor:
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != values.shape or buffer.dtype != values.dtype:
            buffer = torch.empty(values.shape, dtype=values.dtype, pin_memory=values.is_cuda)
            self._buffers[name] = buffer
        return buffer


def write_checkpoint(
    snapshot: Snapshot, store: Store, group: Group, exists: Callable[[int], str | None]
) -> tuple[str | None, int]:
    """Writes and publishes ``snapshot``. Collective over ``group``. Returns (error or None, bytes
    written), alike on all ranks.

    ``exists(step)`` runs on rank 0 and clears the way for this step's name: it returns a reason to
    skip, or None. Never raises for a fault of the storage: debris is removed and the fault is
    returned.
    """
    step = snapshot.manifest.step
    place = error = None
    if group.rank == 0:
        try:
            reason = exists(step)
            if reason is None:
                place = store.begin(step, os.urandom(4).hex())
            else:
                log.info("%s", reason)
                error = ""  # nothing is written, and nothing went wrong
        except Exception as fault:  # whatever the storage raises: training goes on
            error = describe_error(fault)
    place, error = group.broadcast((place, error))
    if place is None:
        return error or None, 0
    answers = group.gather(_write_part(snapshot, store, place, group.rank))
    outcome: tuple[str | None, int] = (None, 0)
    if group.rank == 0:
        outcome = _publish(snapshot.manifest, store, place, answers)
    return group.broadcast(outcome)


_Part = tuple[str, str, tuple[int, ...], Region]  # tensor name, dtype name, whole shape, region


@exchange.sendable
@dataclass(frozen=True)
class _Answer:
    """What a rank sends to rank 0: its file, what is in it, or what went wrong."""

    file: tuple[str, StoredFile] | None
    parts: Sequence[_Part]
    error: str | None


def _write_part(snapshot: Snapshot, store: Store, place: str, rank: int) -> _Answer:
    name = f"rank-{rank:05d}.safetensors"
    parts: list[_Part] = []
    stored: list[tuple[str, Tensor]] = []
    for tensor, shape, region, values in snapshot.parts:
        parts.append((tensor, DTYPE_NAMES[values.dtype], shape, region))
        if values.numel():
            stored.append((chunk_key(tensor, shape, region), values))
    if not stored:
        return _Answer(None, parts, None)
    try:
        file = store.write(place, name, encode(stored, {"format": "pt"}))
        return _Answer((name, file), parts, None)
    except Exception as fault:  # whatever the storage raises: training goes on
        return _Answer(None, (), f"rank {rank}: {describe_error(fault)}")


def _publish(
    manifest: Manifest, store: Store, place: str, answers: Sequence[_Answer]
) -> tuple[str | None, int]:
    try:
        if errors := [answer.error for answer in answers if answer.error]:
            more = f" and {len(errors) - 4} more ranks" if errors[4:] else ""
            raise CheckpointError("; ".join(errors[:4]) + more)
        manifest.files = dict(answer.file for answer in answers if answer.file)
        manifest.tensors = _stored_tensors(answers)
        content = manifest.encode()
        # a save that could not be loaded again is a failed save
        Manifest.decode(content, "the new manifest")
        store.publish(place, manifest.step, content)
        return None, manifest.state_bytes + len(content)
    except Exception as fault:  # whatever the storage raises: training goes on
        store.discard(place)
        return describe_error(fault), 0


def _stored_tensors(answers: Sequence[_Answer]) -> dict[str, StoredTensor]:
    found: dict[str, StoredTensor] = {}
    chunks: dict[str, list[Chunk]] = {}
    for answer in answers:
        for name, dtype, shape, region in answer.parts:
            found.setdefault(name, StoredTensor(dtype, shape, ()))
            # The manifest records that a tensor without elements was there.
            if answer.file is not None and region.numel:
                chunks.setdefault(name, []).append(Chunk(answer.file[0], region))
    return {name: replace(each, chunks=tuple(chunks.get(name, ()))) for name, each in found.items()}
