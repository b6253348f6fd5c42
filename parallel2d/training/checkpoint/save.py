"""One save on all ranks. `plan_writes` assigns every element to one rank, `take` copies this rank's
elements to CPU, and `write_checkpoint` writes and publishes the checkpoint. `Checkpointer` decides
when to save.

The training loop waits only for the copy to CPU (staging). The write may run in a thread, because
it communicates over a separate process group. Rank 0 creates the folder. All ranks write their
files and report to rank 0, which writes the manifest and renames the folder. Rank 0 then broadcasts
the result, so that every rank raises the same error.
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
from parallel2d.base.replicas import ranks_with_state, stay_in_quorum
from parallel2d.base.runtime import patient_group
from parallel2d.parallel.mesh import axis_positions, part_group, sharding_mesh, without_replicas
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

# Smallest size of the parts into which a replicated rectangle is divided among its holders
PART_BYTES = 16 * 2**20
_TIMEOUT = timedelta(hours=4)  # ranks wait for the slowest disk


class Group:
    """The ranks that save together, with a separate gloo group for their communication. Without a
    process group it is a single process."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.rank = dist.get_rank(group) if group is not None else 0
        self.size = dist.get_world_size(group) if group is not None else 1

    @property
    def is_first(self) -> bool:
        """True on the leader: rank 0, or the first live rank."""
        return self.group is None or dist.get_rank() == exchange.leader(self.group)

    @classmethod
    def new(cls, mesh: DeviceMesh | None = None) -> Group:
        """Create a group of all ranks of the job, or of ``mesh``. Collective."""
        if not dist.is_initialized() or 1 in (dist.get_world_size(), mesh and mesh.size()):
            return cls(None)
        part = None if mesh is None else part_group(mesh)
        return cls(patient_group(_TIMEOUT, part))

    def stay(self) -> None:
        """Fix the members to the replicas that are alive now. If one of them fails, all later calls
        raise `ReplicaLost`."""
        stay_in_quorum(self.group)

    def log(self, text: str, level: int = logging.INFO) -> None:
        """Log ``text`` on the leader only."""
        if self.is_first:
            log.log(level, "%s", text)

    def broadcast(self, value: Any) -> Any:
        """Return the leader's value on every rank."""
        return value if self.group is None else exchange.broadcast(value, group=self.group)

    def on_first(self, work: Callable[[], Any], what: str = "rank 0") -> Any:
        """Run ``work`` on the leader and return its result on every rank.

        If ``work`` raises an error, all ranks raise a `ConfigError`. An error of another type is
        converted to a `ConfigError` about ``what``. Collective.
        """
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
        """Run ``work`` on every rank and return this rank's result. If ``work`` fails on any rank,
        all ranks raise the error of that rank. Collective."""
        result: Any = None
        error: Exception | None = None
        try:
            result = work()
        except DamagedCheckpointError as fault:
            error = DamagedCheckpointError(str(fault))
        except ConfigError as fault:
            error = ConfigError(str(fault))
        except Exception as fault:  # any error: the other ranks wait for an answer
            error = DamagedCheckpointError(f"rank {self.rank}: {describe_error(fault)}")
        for answer in self.all_gather(error):
            if answer is not None:
                raise answer
        return result

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value, ordered by rank, on the leader; an empty list elsewhere."""
        return [value] if self.group is None else exchange.gather(value, self.group)

    def all_gather(self, value: Any) -> list[Any]:
        """Return every rank's value, ordered by rank, on every rank."""
        return [value] if self.group is None else exchange.all_gather(value, self.group)


def check_folder(store: Store, group: Group) -> None:
    """Raise `ConfigError` unless every rank sees the files that rank 0 writes. If the nodes did not
    share the folder, each node would have only the files of its own ranks. Collective."""
    root = store.root

    def prepare() -> None:
        store.prepare()
        if not is_remote(root):
            tempfile.TemporaryFile(dir=root).close()

    group.on_first(prepare, f"checkpoints cannot be written to {root}")
    # All ranks use the same address of a remote store.
    if group.size > 1 and not is_remote(root):
        with exchange.among(group.group):
            exchange.check_shared(root)


# Assignment of elements to ranks


@dataclass(frozen=True)
class SavedState:
    """The state of a run to save: its manifest, and the tensors of this rank."""

    manifest: Manifest  # without tensors and files
    shared: dict[str, Tensor]  # equal on all replicas
    of_replica: dict[str, Tensor]  # state of this replica, sharded over its ranks
    own: dict[str, Tensor]  # on this rank only


def plan_writes(tensors: Iterable[tuple[str, Tensor]], mesh: DeviceMesh | None) -> Iterator[Part]:
    """Yield the parts that this rank writes. Each element is written by exactly one rank.

    The assignment needs no communication: every rank computes the same assignment from the order of
    ``tensors``, their placements and the mesh coordinates. A local shard is a rectangle of its
    tensor, and its holders are the ranks that replicate it. A rectangle is written by the holder
    with the fewest bytes so far, or by several holders in parts of at least `PART_BYTES`. Thus all
    ranks write about the same number of bytes, and the manifest stays small.
    """
    # Mesh axes -> bytes assigned so far to each of the ranks that hold the same rectangles.
    loads: dict[tuple[str, ...], list[int]] = {}
    rank, ranks = (0, 1) if mesh is None else (mesh.get_rank(), mesh.size())
    for name, tensor in tensors:
        axes, holders = _holders(tensor, mesh)
        # Every rank must compute the same loads, or an element would be written twice or never.
        # The sizes of shards differ by up to one row, so the loads use the mean size instead.
        size = tensor.numel() * tensor.element_size() * len(holders) // ranks
        if (complete := ranks_with_state()) is not None:
            holders = [each for each in holders if each in complete]
        parts = max(1, min(len(holders), size // PART_BYTES))
        load = loads.setdefault(axes, [0] * len(holders))
        writers = sorted(range(len(holders)), key=load.__getitem__)[:parts]
        for index, writer in enumerate(writers):
            # Count one more byte, so that empty and tiny rectangles are spread over ranks too.
            load[writer] += size // parts + 1
            if holders[writer] == rank:
                held = written = local_region(tensor)
                if parts > 1:
                    # Cut along dim 0 as ``torch.chunk`` does; the last part may be empty.
                    rows = held.lengths[0]
                    size_of_part = -(-rows // parts)  # rounded up
                    begin = min(index * size_of_part, rows)
                    offsets = (held.offsets[0] + begin, *held.offsets[1:])
                    lengths = (min(size_of_part, rows - begin), *held.lengths[1:])
                    written = Region(offsets, lengths)
                # `written` is empty if there are more ranks than rows.
                if written.numel:
                    values = local_part(tensor).detach().reshape(held.lengths)
                    yield Part(name, tensor.shape, written, values[written.slices_in(held)])


def _holders(tensor: Tensor, mesh: DeviceMesh | None) -> tuple[tuple[str, ...], list[int]]:
    """Return the mesh axes along which all ranks hold the same rectangle, and the ranks that hold
    this rank's rectangle. The axes include mesh axes that are not in the tensor's device mesh. The
    ranks have the same order on each holder."""
    if mesh is None:
        return (), [0]
    positions = axis_positions(mesh)
    split = split_dims(tensor)
    axes = tuple(name for name in positions if name not in split)
    # This rank's position along a split axis, all positions along the other axes.
    index: dict[str, int | slice] = {**positions, **dict.fromkeys(axes, slice(None))}
    return axes, mesh.mesh[tuple(index.values())].flatten().tolist()


# Staging and writing


def take(
    state: SavedState, mesh: DeviceMesh | None, rank: int, staging: Staging
) -> tuple[Manifest, Tensor]:
    """Copy the elements of ``state`` that this rank writes to CPU. Returns a manifest that lists
    only these elements and no files, and the content of this rank's file."""
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
    """Write and publish the result of `take`. Collective over ``group``.

    Returns an error or None, and the number of written bytes, equal on all ranks. Errors of the
    storage are returned, not raised.

    Args:
        exists: called with the step on the leader of ``group``, before the folder is created. If a
            checkpoint of this step exists, it moves this checkpoint aside, or returns a reason to
            skip the save.
    """
    place = error = None
    is_first = group.is_first  # read once: the leader may change during the save
    if is_first:
        try:
            reason = exists(manifest.step)
            if reason is None:
                place = store.begin(manifest.step, os.urandom(4).hex())
            else:
                log.info("%s", reason)
        except Exception as fault:  # any error of the storage: training continues
            error = describe_error(fault)
    place, error = group.broadcast((place, error))
    if place is None:
        return error, 0
    name, files = _file_of(group.rank), {}
    try:
        files[name] = store.write(place, name, [memoryview(data.numpy().data)])
    except Exception as fault:
        error = f"rank {group.rank}: {describe_error(fault)}"
    # The manifest may be written only after every file is on disk, and this gather is the barrier
    # that ensures this order. Without the barrier a reader could find a published checkpoint while
    # another node is still writing. The final broadcast gives all ranks the same result, so that
    # all ranks count the same failures and take the same decision about the next save.
    answers = group.gather((manifest.tensors, files, error))
    outcome: tuple[str | None, int] = (None, 0)
    if is_first:
        outcome = _publish(manifest, store, place, answers)
    return group.broadcast(outcome)


def _publish(
    manifest: Manifest, store: Store, place: str, answers: Sequence[Any]
) -> tuple[str | None, int]:
    """Combine the ranks' answers (tensor entries, file, error) into the manifest, and publish the
    checkpoint."""
    try:
        errors = []
        for _, _, error in answers:
            if error:
                errors.append(error)
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
        # A checkpoint that cannot be loaded again is a failed save.
        Manifest.decode(content, "the new manifest")
        store.publish(place, manifest.step, content)
        return None, manifest.state_bytes + len(content)
    except Exception as fault:  # any error of the storage: training continues
        store.discard(place)
        return describe_error(fault), 0
