"""Checkpoints in memory: `in_memory_checkpoints` copies the state of a run to shared memory, so
that restarted ranks recover without a checkpoint on disk.

[Note: in-memory checkpoints] The shared memory of a node outlives the worker processes. Every few
steps each rank copies its local shards to CPU, and a thread writes the copied shards to shared
memory as a checkpoint of one rank. This checkpoint is called a *copy* here. A copy is published as
in [Note: atomic publication]. The previous copy stays until the new copy is complete on all ranks.
If a node fails, the ranks at the same position of other replicas have copies of the same state.
With ``strategy=hybrid_full`` the state is split over the replicas, so a rank of another replica
stores a second copy.

After a restart on the same mesh, all ranks load the newest step with a copy for every rank. A node
without the copy of a rank receives this copy from another node. If no node has the copy of a rank,
the run loads the newest checkpoint on disk.

[Note: lineage] At each start and each rollback the run gets a new random name, and later copies are
stored under this name. ``memory.json`` in the run directory records the last name, and the copy
that was loaded when this name was chosen. All other copies are ignored. Therefore no rank loads a
copy of another run, or of steps that were rolled back.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import json
import logging
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh

from parallel2d.base import exchange, files
from parallel2d.base.config import CheckpointConfig
from parallel2d.base.errors import ConfigError
from parallel2d.base.files import private_folders
from parallel2d.base.files.folder import LocalFolder
from parallel2d.base.launcher_environment import MEMORY_DIR, SHARED_MEMORY
from parallel2d.base.memory import free_memory
from parallel2d.base.replicas import ReplicaLost, current, is_joining, is_present
from parallel2d.base.store.address import in_thread
from parallel2d.parallel.mesh import mesh_shape, part_group, ranks_of
from parallel2d.parallel.mesh_sizes import MeshShape
from parallel2d.parallel.weights.geometry import split_dims
from parallel2d.training.checkpoint.local_state import (
    STATE,
    LocalState,
    Staging,
    as_bytes,
    local_parts,
    pack,
)
from parallel2d.training.checkpoint.manifest import MANIFEST, Manifest
from parallel2d.training.checkpoint.reader import Checkpoint
from parallel2d.training.checkpoint.save import Group, SavedState
from parallel2d.training.checkpoint.storage import (
    CheckpointError,
    LocalStore,
    describe_error,
    step_name,
)

log = logging.getLogger(__name__)

AUTO_EVERY = 10  # steps, with checkpoint.memory_every=auto
RECORD = "memory.json"
_NOTHING = torch.empty(0, dtype=torch.uint8)
# The path of a copy below the folder of a run: name of the start, the writing rank, the owner of
# the state ("of"), and the step. With the kind "rank", only rank "of" has this state. With the kind
# "place", all ranks at the same position as rank "of" in other replicas have the same state.
_COPY = re.compile(
    r"(?P<start>[0-9a-f]{16})/rank-\d{5,9}/(?P<kind>rank|place)-(?P<of>\d{5,9})"
    r"/step-(?P<step>\d{8,18})"
)


def in_memory_checkpoints(
    config: CheckpointConfig, run_dir: str | os.PathLike[str], mesh: DeviceMesh | None
) -> InMemoryCheckpoints | None:
    """Return the in-memory checkpoints that ``config.memory_every`` requests, or None.

    Pass the result to a `Checkpointer` with the same arguments. Rank 0 decides for all ranks,
    because environment variables may differ between ranks. Collective.
    """
    group = Group.new(mesh)
    every = config.memory_every if config.enabled else 0
    if every == "auto":
        starts_again = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
        # If replicas may fail and each replica has the complete state, the surviving replicas
        # provide it.
        is_needed = (replicas := current()) is None or replicas.needs_all
        every = AUTO_EVERY if starts_again and is_needed else 0
    every = int(group.broadcast(every))
    if every and mesh is not None and part_group(mesh) is not None:
        raise ConfigError(
            f"checkpoint.memory_every={every} needs a mesh of all ranks; use "
            "checkpoint.memory_every=0"
        )
    return InMemoryCheckpoints(every, os.fspath(run_dir), mesh, group) if every else None


def forget_in_memory_checkpoints(run_dir: str | os.PathLike[str]) -> None:
    """Delete the record of in-memory checkpoints. The run continues without in-memory checkpoints,
    and ignores the copies that still exist."""
    with contextlib.suppress(OSError):
        os.unlink(os.path.join(run_dir, RECORD))


class InMemoryCheckpoints:
    """The in-memory checkpoints of one run.

    Every rank constructs this object and calls its methods in the same order. ``group`` must not be
    used elsewhere, because a background thread uses it during the training loop. An error on any
    rank sets ``on`` to False on all ranks and logs one warning. If a rank has failed, the copies
    are not deleted, because the restarted ranks load them.
    """

    def __init__(self, every: int, run_dir: str, mesh: DeviceMesh | None, group: Group) -> None:
        self.every, self.run_dir, self._group, self.on = every, run_dir, group, True
        self._follows_updates = False
        self._shape = (MeshShape(1, 1) if mesh is None else mesh_shape(mesh)).shown
        # Rank -> the ranks at the same position in all replicas
        self._rows = {group.rank: [group.rank]}
        if mesh is not None:
            for row in ranks_of(mesh).flatten(1).T.tolist():
                self._rows |= dict.fromkeys(row, row)
        # Step -> rank -> (a rank that can read the copy of this rank, path of the copy)
        self._sources: dict[int, dict[int, tuple[int, str]]] = {}
        self._opened: tuple[Any, ...] = ()  # start and step of the loaded copy
        self._start = ""  # the name of this start, set by `begin`
        self._staging, self._staged = Staging(), _NOTHING
        self._whole = 0  # newest step of this start with a copy on every rank
        self._due_now = False
        self._copying: Future[None] | None = None
        self._root = self._folder = ""
        name = group.broadcast(hashlib.sha256(os.path.realpath(run_dir).encode()).hexdigest())

        def find_folder() -> None:
            self._root = open_place()
            self._folder = os.path.join(self._root, f"run-{name[:16]}")

        self._try(find_folder)

    # At the start of the run and at a rollback

    def steps(self) -> list[int]:
        """Return the steps of this run with a copy for every rank, ascending. `open` accepts these
        steps. Collective."""
        self.wait()
        self._group.stay()
        self._sources, self._opened = {}, ()
        answers = self._group.all_gather((self._group.rank, self.on, self._copies()))
        # A rank that has restarted does not know of earlier errors.
        self.on = all(is_on for _, is_on, _ in answers)
        if self.on:
            found = {}
            for rank, _, copies in answers:
                found[rank] = copies
            self._sources = self._group.on_first(lambda: self._find_sources(found))
        return sorted(self._sources)

    def _copies(self) -> list[str]:
        """Return the paths of the copies on this node, complete or not."""
        found = Path(self._folder).glob("*/*/*/*")
        copies: list[str] = []
        for path in found:
            copies.append(str(path.relative_to(self._folder)))
        return copies

    def _find_sources(
        self, reached: Mapping[int, Sequence[str]]
    ) -> dict[int, dict[int, tuple[int, str]]]:
        """Compute `_sources` from the paths of the copies that each rank can read."""
        try:
            start, loaded = _read_record(self.run_dir)
        except (OSError, ValueError) as fault:
            log.warning("in-memory checkpoints are ignored: %s", describe_error(fault))
            return {}
        # Step -> rank -> pairs of a rank that can read a copy of the state, and the path of this
        # copy
        found: dict[int, dict[int, list[tuple[int, str]]]] = {}
        for rank, paths in reached.items():
            for copy in filter(None, map(_COPY.fullmatch, paths)):
                step, of = int(copy["step"]), int(copy["of"])
                if copy["start"] == start or (copy["start"], step) == loaded:
                    by_rank = found.setdefault(step, {})
                    for served in [of] if copy["kind"] == "rank" else self._rows.get(of, []):
                        by_rank.setdefault(served, []).append((rank, copy.string))
        sources = {}
        for step, by_rank in found.items():
            lost = sorted(reached.keys() - by_rank.keys())
            if lost:
                what = f"{step_name(step)} in memory is incomplete"
                log.warning("%s: no copy is left of ranks %s", what, lost)
            else:
                sources[step] = {rank: _nearest(rank, by_rank[rank]) for rank in reached}
        return sources

    def open(self, step: int) -> Checkpoint:
        """Read and verify the copy of ``step``. If a rank cannot read its copy, all ranks raise
        `DamagedCheckpointError` with the reason. Collective."""
        rank, sources, group = self._group.rank, self._sources[step], self._group
        reached = set()
        for source, path in sources.values():
            if source == rank:
                reached.add(path)
        held = group.agree(lambda: {path: self._read(path) for path in reached})
        moved = sorted(to for to, (source, _) in sources.items() if source != to)
        if moved:
            mine = {}
            for to in moved:
                if sources[to][0] == rank:
                    mine[to] = held[sources[to][1]]
            manifest = self._exchange({to: blocks[0] for to, blocks in mine.items()})
            state = self._exchange({to: blocks[1] for to, blocks in mine.items()})
            held.setdefault(sources[rank][1], [manifest, state])
        _, own = sources[rank]
        manifest, data = held[own]
        opened: LocalState = group.agree(lambda: LocalState.from_bytes(manifest, data, self._shape))
        group.log(f"{step_name(step)} is in memory; {len(moved)} ranks received their parts")
        self._opened = own.split("/")[0], step
        return opened

    def _read(self, path: str) -> list[Tensor]:
        """Map the manifest and the state file of a copy into memory."""
        folder = LocalFolder(os.path.join(self._folder, path))
        found = list(map(folder.source, (MANIFEST, STATE)))
        return [torch.frombuffer(each.buffer(0, each.size), dtype=torch.uint8) for each in found]

    def _exchange(self, sent: Mapping[int, Tensor]) -> Tensor:
        """Send ``sent`` to other ranks, and return the bytes that this rank receives. Collective.
        ``sent``: the bytes for each target rank, in the order of the ranks. At most one rank sends
        to each target."""
        sizes = {to: data.numel() for to, data in sent.items()}
        incoming = []
        for each in self._group.all_gather(sizes):
            incoming.append(each.get(self._group.rank, 0))
        outgoing = []
        for rank in filter(is_present, range(self._group.size)):
            outgoing.append(sizes.get(rank, 0))
        received = torch.empty(sum(incoming), dtype=torch.uint8)
        data = [_NOTHING, *sent.values()]
        # A single tensor is sent without a copy.
        whole = data[-1] if len(data) < 3 else torch.cat(data)
        c10d.all_to_all_single(received, whole, incoming, outgoing, self._group.group)
        return received

    def begin(self, base: int) -> None:
        """Continue the run from step ``base``, and delete all copies except the loaded copy. The
        loaded copy stays until a newer copy is complete. Collective."""
        if not self.on:
            return
        self._start, self._whole = self._group.broadcast(os.urandom(8).hex()), 0
        loaded = self._opened if base in self._opened else ()

        # The new name is recorded before old copies are deleted, because a crash must not leave old
        # copies under the recorded name. `_try` returns after every rank has finished. Therefore no
        # rank writes a copy while another rank of its node still deletes copies.
        def clear() -> None:
            if self._group.is_first:
                record = {"start": self._start, "loaded": loaded}
                os.makedirs(self.run_dir, exist_ok=True)
                path = os.path.join(self.run_dir, RECORD)
                files.replace(path, json.dumps(record), durable=True)
            for path in self._copies():
                copy = _COPY.fullmatch(path)
                if copy is None or (copy["start"], int(copy["step"])) != loaded:
                    shutil.rmtree(os.path.join(self._folder, path), ignore_errors=True)
            os.makedirs(self._own_folder)

        if self._try(clear):
            self._due_now = bool(loaded)  # nodes that have replaced others have no copy yet
            self._group.log(
                f"in-memory checkpoints on: one every {self.every} steps in {self._root}"
            )

    def follow(self) -> None:
        """Continue with the name of the current start. Called in a replica that has received its
        state from a donor."""
        self._start, _ = _read_record(self.run_dir)
        self.on = bool(self._start)  # without a record, in-memory checkpoints were turned off
        os.makedirs(self._own_folder, exist_ok=True)

    @property
    def _own_folder(self) -> str:
        return os.path.join(self._folder, self._start, f"rank-{self._group.rank:05d}")

    # In the loop

    def is_due(self, step: int) -> bool:
        """True if `save` must be called after ``step``. In this case the method also waits for the
        previous copy."""
        if step % self.every and not self._due_now:
            return False
        self.wait()
        return self.on

    def save(self, state: SavedState) -> None:
        """Copy the state in the background. An error turns in-memory checkpoints off and is not
        raised. Collective."""
        step = state.manifest.step
        if not self._start:
            self.begin(step - 1)
        # If the state is split over the replicas, or differs between them, each rank needs a copy
        # of its own state.
        several = len(self._rows[self._group.rank]) > 1
        splits = several and any("replicate" in split_dims(each) for each in state.shared.values())
        kind = "rank" if splits or state.of_replica else "place"
        manifest, fault = state.manifest, None
        try:
            parts = list(local_parts(state.shared | state.of_replica | state.own))
            tensors, blocks = pack(parts)
            manifest = dataclasses.replace(manifest, tensors=tensors)
            lasting = _changed_by_updates(state) if self._follows_updates else set()
            ids = set()
            for part in parts:
                if part.name in lasting:
                    ids.add(id(part.values))
            self._staged = self._staging.start(blocks, ids)
            if not self._whole:
                self._check_room(splits)
        # `_finish_copy` reports the error to all ranks, and training continues
        except Exception as error:
            fault = error
        self._group.stay()
        has_state = not is_joining()
        self._copying = in_thread(
            lambda: self._finish_copy(manifest, kind, splits, has_state, fault)
        )
        self._due_now = False

    def _finish_copy(
        self,
        manifest: Manifest,
        kind: str,
        splits: bool,
        has_state: bool,
        fault: Exception | None,
    ) -> None:
        """Write the staged state in a thread, and wait until all ranks have written their state.
        ``has_state``: False in a joining replica, which writes nothing."""

        def write() -> None:
            if fault is not None:
                raise fault
            self._staging.wait()
            if has_state:
                self._write(f"{kind}-{self._group.rank:05d}", manifest, self._staged)

        # An exception means that a rank has failed, and the training loop detects this failure
        # itself. The copies of earlier starts are deleted last: until all ranks have a copy of this
        # start, only the loaded copy is complete.
        with contextlib.suppress(Exception):
            if not self._try(write) or (splits and not self._keep(manifest)):
                return
            self._whole = manifest.step
            for start in Path(self._folder).glob("*"):
                if start.name != self._start:
                    shutil.rmtree(start, ignore_errors=True)

    def follow_updates(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Make each step of ``optimizers`` wait until the last state is copied to CPU. Without this
        call the next forward pass waits for the copies."""
        for optimizer in optimizers:
            optimizer.register_step_pre_hook(lambda *_: self._staging.before_update())
            self._follows_updates = True

    def _write(self, of: str, manifest: Manifest, state: Tensor) -> None:
        """Write ``state`` as a copy for ``of``, the folder name of a rank or a position."""
        store = LocalStore(os.path.join(self._own_folder, of), durable=False)
        # The loop may request the same step twice.
        if manifest.step == self._whole and manifest.step in store.steps():
            return
        place = store.begin(manifest.step, "copy")
        # Delete all older copies except the copy of the newest complete step.
        for step in store.steps():
            if step != self._whole:
                store.delete(step)
        manifest.files = {STATE: store.write(place, STATE, [memoryview(state.numpy().data)])}
        store.publish(place, manifest.step, manifest.encode())

    def _keep(self, manifest: Manifest) -> bool:
        """Send this rank's state to a rank of another replica, and store the state of a third rank
        as a copy. The second copy is needed if the state is split over the replicas, because each
        state must survive the failure of its node."""
        row = self._rows[self._group.rank]
        # The other rank is half of the replicas away, and therefore on another node, unless all
        # replicas are on one node.
        here, away = row.index(self._group.rank), len(row) // 2
        to = row[(here + away) % len(row)]
        text = self._exchange({to: as_bytes(exchange.encode(manifest).encode())})
        state = self._exchange({to: self._staged})
        of, other = f"rank-{row[here - away]:05d}", exchange.decode(text.numpy().tobytes())
        return self._try(lambda: self._write(of, other, state))

    def _check_room(self, splits: bool) -> None:
        """Raise `CheckpointError` if two copies do not fit into the memory of this node. Called
        before the first copy."""
        # The ranks of a node have their folders in the same parent folder, and states of about the
        # same size.
        ranks = len(os.listdir(os.path.dirname(self._own_folder)))
        share = ranks * self._staged.numel()
        mib = share * (4 if splits else 2) / 2**20
        system = os.statvfs(self._root)
        # The state from another replica is received as one tensor before it is written.
        received = share if splits else 0
        # Leave a tenth of the free memory of this machine or container unused.
        free = min(system.f_bavail * system.f_frsize, 0.9 * free_memory() - received)
        free = (free + used(self._folder)) / 2**20
        if mib > free:
            raise CheckpointError(
                f"{free:.1f} MiB of shared memory are free, and two copies need {mib:.1f} MiB; "
                "enlarge it (in a container: --shm-size), or set checkpoint.memory_every=0"
            )
        self._group.log(f"in-memory checkpoints: {mib:.1f} MiB of memory on this node")

    def wait(self) -> None:
        """Wait until the last copy is complete on all ranks, or has failed."""
        if self._copying is not None:
            self._copying.result()

    def finish(self) -> None:
        """Delete the copies at the end of a successful run. Collective."""
        self.wait()
        if self.on:
            self._group.stay()
            with contextlib.suppress(ReplicaLost):
                self._remove()

    def _try(self, work: Callable[[], object]) -> bool:
        """Run ``work`` on every rank. An error on any rank turns in-memory checkpoints off. Return
        True if they are on. Collective."""
        try:
            self._group.agree(work)
        except ConfigError as fault:
            self.on = False
            self._group.log(
                f"in-memory checkpoints off: {fault}. Training continues; a failed worker "
                "costs the steps since the last checkpoint",
                logging.WARNING,
            )
            self._remove()
        return self.on

    def _remove(self) -> None:
        self._staging.close()
        self._staged = _NOTHING
        self._group.all_gather(None)  # wait until no rank writes any more
        if self._group.is_first:
            forget_in_memory_checkpoints(self.run_dir)
        shutil.rmtree(self._folder, ignore_errors=True)
        if MEMORY_DIR not in os.environ:
            private_folders.remove(self._root)


def _changed_by_updates(state: SavedState) -> set[str]:
    """Return the names of the tensors that only the optimizer changes."""
    # With sync=diloco an outer exchange that has started earlier may change the outer parameters.
    if any(name.startswith("sync/") for name in state.shared):
        return set()
    buffers = {f"model/{name}" for name in state.manifest.buffers}
    kinds = ("model/", "optimizer/", "ema/")
    return {name for name in state.shared if name.startswith(kinds)} - buffers


def _nearest(rank: int, sources: Sequence[tuple[int, str]]) -> tuple[int, str]:
    """Choose a copy for ``rank``. The first choice is the copy that this rank has written, because
    it contains the rank's random state. The second choice is any copy that this rank can read.
    Otherwise another rank sends its copy, and the senders take turns."""
    here = [source for source in sources if source[0] == rank]
    own = [source for source in here if f"/rank-{rank:05d}/" in source[1]]
    return (own or here or [sources[rank % len(sources)]])[0]


def _read_record(run_dir: str) -> tuple[str, tuple[Any, ...]]:
    """Return the name of the last start, and the name and step of the copy that this start has
    loaded. Raises OSError or ValueError."""
    try:
        content = files.read_json(os.path.join(run_dir, RECORD))
    except FileNotFoundError:
        return "", ()
    match content:
        case {"start": str(start), "loaded": [*loaded]}:
            return start, tuple(loaded)
    raise ValueError(f"{RECORD} has no name of a start")


def open_place() -> str:
    """Return the folder for copies in this node's shared memory, and create it if it is missing.
    Raises OSError if the folder does not belong to this user only."""
    path = os.environ.get(MEMORY_DIR)
    if path:
        with contextlib.suppress(FileNotFoundError):
            mode = os.lstat(path).st_mode
            # The folder may be shared with other users, like /tmp. Making it private would lock
            # them out.
            if stat.S_ISDIR(mode) and mode & 0o022:
                raise PermissionError(
                    errno.EPERM, "other users may write to it; use a folder inside it", path
                )
        private_folders.make_private(path)
        return os.path.abspath(path)
    if not os.path.isdir(SHARED_MEMORY):
        raise FileNotFoundError(
            errno.ENOENT, f"no shared memory folder; set {MEMORY_DIR} to one", SHARED_MEMORY
        )
    return private_folders.open_folder(os.getppid(), SHARED_MEMORY)


def used(path: str) -> int:
    """Return the bytes that the files below ``path`` occupy. Other ranks may rename files during
    the call."""
    blocks = 0
    for folder, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                blocks += os.lstat(os.path.join(folder, name)).st_blocks
    return 512 * blocks
