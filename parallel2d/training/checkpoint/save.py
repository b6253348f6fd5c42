"""One save on all ranks: `plan_writes` says which rank writes what, `take` copies that to CPU,
`write_checkpoint` writes and publishes it. `Checkpointer` decides when.

The training loop waits for staging alone. The rest may run in a thread, because it communicates
over a process group of its own. Rank 0 opens the folder, all ranks write, rank 0 gathers their
answers, writes the manifest, renames and broadcasts the outcome: errors are the same everywhere.
"""

from __future__ import annotations

import itertools
import logging
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from parallel2d.base import exchange
from parallel2d.base.errors import ConfigError
from parallel2d.base.files.folder import is_remote
from parallel2d.base.files.tensor_file import DamagedCheckpointError
from parallel2d.base.replicas import first_rank, is_present, stay_in_quorum
from parallel2d.base.runtime import patient_group
from parallel2d.parallel.mesh import axis_positions, sharding_mesh, without_replicas
from parallel2d.parallel.weights.geometry import Region, local_part, local_region, split_dims
from parallel2d.training.checkpoint.local_state import Part, Staging, local_parts, pack
from parallel2d.training.checkpoint.manifest import Manifest, StoredTensor
from parallel2d.training.checkpoint.storage import (
    CheckpointError,
    Store,
    as_config_error,
    describe_error,
)

log = logging.getLogger(__name__)

# The least that a rank writes of a rectangle which others hold too.
PART_BYTES = 16 * 2**20
_TIMEOUT = timedelta(hours=4)  # ranks wait for the slowest disk


class Group:
    """The ranks that save together, over a gloo group of their own; or this process alone."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.rank = dist.get_rank() if group is not None else 0
        self.size = dist.get_world_size() if group is not None else 1

    @property
    def is_first(self) -> bool:
        """Whether this rank speaks for all."""
        return self.group is None or self.rank == first_rank()

    @classmethod
    def new(cls) -> Group:
        """All ranks of the job. Collective."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return cls(None)
        return cls(patient_group(_TIMEOUT))

    def stay(self) -> None:
        """From now on all calls raise `ReplicaLost` once a replica is lost that is there now."""
        stay_in_quorum(self.group)

    def log(self, text: str, level: int = logging.INFO) -> None:
        """Logs ``text`` once for all ranks."""
        if self.is_first:
            log.log(level, "%s", text)

    def broadcast(self, value: Any) -> Any:
        """The first rank's value on every rank."""
        return value if self.group is None else exchange.broadcast(value, group=self.group)

    def on_first(self, work: Callable[[], Any], what: str = "rank 0") -> Any:
        """Runs ``work`` on rank 0 and returns its result, on every rank; an error is raised on all,
        as a `ConfigError` about ``what`` unless it is one. Collective."""
        answer: Any = None
        try:
            with as_config_error(what):
                answer = work() if self.is_first else None
        except ConfigError as fault:
            answer = fault
        answer = self.broadcast(answer)
        if isinstance(answer, ConfigError):
            raise answer
        return answer

    def agree(self, work: Callable[[], Any]) -> Any:
        """Runs ``work`` on every rank and returns what it does here; an error on any is raised on
        all in the end. Collective."""
        result: Any = None
        error: Exception | None = None
        try:
            result = work()
        except DamagedCheckpointError as fault:
            error = DamagedCheckpointError(str(fault))
        except ConfigError as fault:
            error = ConfigError(str(fault))
        except Exception as fault:  # the others wait for an answer, whatever happened
            error = DamagedCheckpointError(f"rank {self.rank}: {describe_error(fault)}")
        for answer in self.all_gather(error):
            if answer is not None:
                raise answer
        return result

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, by rank, on rank 0; an empty list elsewhere."""
        return [value] if self.group is None else exchange.gather(value, self.group)

    def all_gather(self, value: Any) -> list[Any]:
        """Every rank's value, by rank, on every rank."""
        return [value] if self.group is None else exchange.all_gather(value, self.group)


def check_folder(store: Store, group: Group) -> None:
    """Raises `ConfigError` unless every rank sees what rank 0 writes. Otherwise each node would
    keep only its own part of a checkpoint. Collective."""
    root = store.root

    def prepare() -> None:
        store.prepare()
        if not is_remote(root):
            tempfile.TemporaryFile(dir=root).close()

    group.on_first(prepare, f"checkpoints cannot be written to {root}")
    # All ranks reach a remote one by the same address.
    if group.size > 1 and not is_remote(root):
        exchange.check_shared(root)


# Which rank writes what


@dataclass(frozen=True)
class SavedState:
    """The state of a run as this rank has it."""

    manifest: Manifest  # without tensors and files
    shared: dict[str, Tensor]  # what all replicas have
    of_replica: dict[str, Tensor]  # what only the ranks of this replica have
    own: dict[str, Tensor]  # what no other rank has


def plan_writes(tensors: Iterable[tuple[str, Tensor]], mesh: DeviceMesh | None) -> Iterator[Part]:
    """Yields what this rank writes: over all ranks every element once. No communication: every rank
    computes the same from the order of ``tensors``, placements and mesh coordinates.

    A rectangle goes to that of its holders which has least to write, or in parts of at least
    `PART_BYTES` to several: bytes are even over ranks, and a manifest stays small.
    """
    # Bytes dealt out so far to each of the ranks that hold the same rectangles.
    loads: dict[tuple[str, ...], list[int]] = {}
    rank, ranks = (0, 1) if mesh is None else (mesh.get_rank(), mesh.size())
    for name, tensor in tensors:
        axes, holders = _holders(tensor, mesh)
        # Sizes differ by a row between shards; the mean is the same, so all ranks deal out alike.
        size = tensor.numel() * tensor.element_size() * len(holders) // ranks
        holders = list(filter(is_present, holders))
        parts = max(1, min(len(holders), size // PART_BYTES))
        load = loads.setdefault(axes, [0] * len(holders))
        writers = sorted(range(len(holders)), key=load.__getitem__)[:parts]
        for index, writer in enumerate(writers):
            # One more, so that empty and tiny rectangles are spread over ranks too.
            load[writer] += size // parts + 1
            if holders[writer] == rank:
                held = written = local_region(tensor)
                if parts > 1:
                    # As ``torch.chunk`` cuts it along dim 0; the last part may be empty.
                    rows = held.lengths[0]
                    size_of_part = -(-rows // parts)  # rounded up
                    begin = min(index * size_of_part, rows)
                    offsets = (held.offsets[0] + begin, *held.offsets[1:])
                    lengths = (min(size_of_part, rows - begin), *held.lengths[1:])
                    written = Region(offsets, lengths)
                # Empty where there are more ranks than rows.
                if written.numel:
                    values = local_part(tensor).detach().reshape(held.lengths)
                    yield Part(name, tensor.shape, written, values[written.slices_in(held)])


def _holders(tensor: Tensor, mesh: DeviceMesh | None) -> tuple[tuple[str, ...], list[int]]:
    """The mesh axes along which ranks hold the same rectangle (also those that the tensor's own
    mesh does not have), and the ranks that hold this one, in the same order on each of them."""
    if mesh is None:
        return (), [0]
    positions = axis_positions(mesh)
    split = split_dims(tensor)
    axes = tuple(name for name in positions if name not in split)
    # Along a split axis the position of this rank, along the others all positions.
    index: dict[str, int | slice] = {**positions, **dict.fromkeys(axes, slice(None))}
    return axes, mesh.mesh[tuple(index.values())].flatten().tolist()


# What is written


def take(
    state: SavedState, mesh: DeviceMesh | None, rank: int, staging: Staging
) -> tuple[Manifest, Tensor]:
    """Copies this rank's share of ``state`` to CPU: returns a manifest of that alone, without
    files, and the content of its file."""
    mesh = None if mesh is None else sharding_mesh(mesh)
    parts = [*plan_writes(state.shared.items(), mesh), *local_parts(state.own)]
    if state.of_replica and mesh is not None:
        parts += plan_writes(state.of_replica.items(), without_replicas(mesh))
    tensors, blocks = pack(parts, _file_of(rank))
    return replace(state.manifest, tensors=tensors), staging.take(blocks)


def _file_of(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def write_checkpoint(
    manifest: Manifest,
    data: Tensor,
    store: Store,
    group: Group,
    exists: Callable[[int], str | None],
) -> tuple[str | None, int]:
    """Writes and publishes what `take` returned. Collective over ``group``. Returns (error or None,
    bytes written), alike on all ranks; never raises for a fault of the storage. ``exists(step)``
    runs on rank 0 and clears the way: it returns a reason to skip, or None."""
    place = error = None
    is_first = group.is_first  # throughout, though it may become another rank meanwhile
    if is_first:
        try:
            reason = exists(manifest.step)
            if reason is None:
                place = store.begin(manifest.step, os.urandom(4).hex())
            else:
                log.info("%s", reason)
        except Exception as fault:  # whatever the storage raises: training goes on
            error = describe_error(fault)
    place, error = group.broadcast((place, error))
    if place is None:
        return error, 0
    name, files = _file_of(group.rank), {}
    try:
        files[name] = store.write(place, name, [memoryview(data.numpy().data)])
    except Exception as fault:
        error = f"rank {group.rank}: {describe_error(fault)}"
    answers = group.gather((manifest.tensors, files, error))
    outcome: tuple[str | None, int] = (None, 0)
    if is_first:
        outcome = _publish(manifest, store, place, answers)
    return group.broadcast(outcome)


def _publish(
    manifest: Manifest, store: Store, place: str, answers: Sequence[Any]
) -> tuple[str | None, int]:
    """``answers``: of each rank its parts of tensors, its file, and an error."""
    try:
        errors = [error for _, _, error in answers if error]
        if errors:
            more = f" and {len(errors) - 4} more ranks" if errors[4:] else ""
            raise CheckpointError("; ".join(errors[:4]) + more)
        parts: dict[str, list[StoredTensor]] = {}
        for tensors, files, _ in answers:
            manifest.files |= files
            for name, part in tensors.items():
                parts.setdefault(name, []).append(part)
        for name, listed in parts.items():
            chunks = itertools.chain.from_iterable(part.chunks for part in listed)
            manifest.tensors[name] = replace(listed[0], chunks=tuple(chunks))
        content = manifest.encode()
        # A save that could not be loaded again is a failed save.
        Manifest.decode(content, "the new manifest")
        store.publish(place, manifest.step, content)
        return None, manifest.state_bytes + len(content)
    except Exception as fault:  # whatever the storage raises: training goes on
        store.discard(place)
        return describe_error(fault), 0
