"""Copies of a run's state in the nodes' shared memory, so that ranks that lost it need not go back
to a checkpoint on disk: `in_memory_checkpoints`.

[Note: in-memory checkpoints] The shared memory of a node outlives its workers. Every few steps each
rank stages what it has of the state, and a thread writes that there as a checkpoint of this rank
alone, see [Note: atomic publication]; the one before stays. For a node that is lost, the ranks in
the same place of the other replicas have the same state; of what replicas split
(``strategy=hybrid_full``) the one of another replica keeps a second copy.

All ranks load the newest step of which a copy is left for every rank, on the same mesh, and nodes
are sent what they lack. Otherwise the checkpoints on disk remain.

[Note: lineage] Whenever a run starts or goes back, it gets a random name, which its copies are
under. ``memory.json`` in the run directory has the last name, and the copy that it went on from; no
others count. So the copies of another run, and those of steps that the run has left for an older
checkpoint, are never loaded, whichever node holds them.
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
from collections.abc import Callable, Mapping, Sequence
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
from parallel2d.base.memory import free_memory
from parallel2d.base.replicas import ReplicaLost, current, is_present
from parallel2d.base.store.address import in_thread
from parallel2d.base.topology import MEMORY_DIR, SHARED_MEMORY
from parallel2d.parallel.mesh import mesh_shape, ranks_of
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
from parallel2d.training.checkpoint.manifest import MANIFEST, Checkpoint, Manifest
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
# In the folder of a run. OF is a rank whose state it is, or whose place of a replica, where all
# ranks in that have the same.
_COPY = re.compile(
    r"(?P<start>[0-9a-f]{16})/rank-\d{5,9}/(?P<kind>rank|place)-(?P<of>\d{5,9})"
    r"/step-(?P<step>\d{8,18})"
)


def in_memory_checkpoints(
    config: CheckpointConfig, run_dir: str | os.PathLike[str], mesh: DeviceMesh | None
) -> InMemoryCheckpoints | None:
    """The copies that ``config.memory_every`` asks for, for a `Checkpointer` of the same arguments;
    None for none. Rank 0 decides, since environments may differ. Collective."""
    group = Group.new()
    every = config.memory_every if config.enabled else 0
    if every == "auto":
        starts_again = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
        # Else the others have the state.
        is_needed = (replicas := current()) is None or replicas.needs_all
        every = AUTO_EVERY if starts_again and is_needed else 0
    every = int(group.broadcast(every))
    return InMemoryCheckpoints(every, os.fspath(run_dir), mesh, group) if every else None


def forget_in_memory_checkpoints(run_dir: str | os.PathLike[str]) -> None:
    """The run goes on without copies, and leaves the steps of those that there may be."""
    with contextlib.suppress(OSError):
        os.unlink(os.path.join(run_dir, RECORD))


class InMemoryCheckpoints:
    """Copies of one run's state in shared memory. Every rank makes one and calls its methods at the
    same points, and gives a ``group`` of its own: the thread that finishes a copy communicates
    while the loop does. A fault that all ranks hear of turns the copies off (``on``), with one
    warning. When a rank no longer answers, all is left as it is: that is what copies are for.
    """

    def __init__(self, every: int, run_dir: str, mesh: DeviceMesh | None, group: Group) -> None:
        self.every, self.run_dir, self._group, self.on = every, run_dir, group, True
        self._shape = (MeshShape(1, 1) if mesh is None else mesh_shape(mesh)).shown
        self._rows = {group.rank: [group.rank]}  # of each rank those in its place of each replica
        if mesh is not None:
            for row in ranks_of(mesh).flatten(1).T.tolist():
                self._rows |= dict.fromkeys(row, row)
        # Step -> for each rank, which rank has its copy in reach, and where.
        self._sources: dict[int, dict[int, tuple[int, str]]] = {}
        self._opened: tuple[Any, ...] = ()  # start and step of what was loaded
        self._start = ""  # the name of this start, once it has begun
        self._staging, self._staged = Staging(), _NOTHING
        self._whole = 0  # the newest step of this start that all ranks have a copy of
        self._due_now = False
        self._copying: Future[None] | None = None
        self._root = self._folder = ""
        name = group.broadcast(hashlib.sha256(os.path.realpath(run_dir).encode()).hexdigest())

        def find_folder() -> None:
            self._root = open_place()
            self._folder = os.path.join(self._root, f"run-{name[:16]}")

        self._try(find_folder)

    # At the start of the run, and where it goes back

    def steps(self) -> list[int]:
        """Steps that `open` can be called with, ascending: those of this run of which a copy is
        left for every rank. Collective."""
        self.wait()
        self._group.stay()
        self._sources, self._opened = {}, ()
        answers = self._group.all_gather((self._group.rank, self.on, self._copies()))
        # A rank that has started later knows nothing of a fault.
        self.on = all(is_on for _, is_on, _ in answers)
        if self.on:
            found = {rank: copies for rank, _, copies in answers}
            self._sources = self._group.on_first(lambda: self._find_sources(found))
        return sorted(self._sources)

    def _copies(self) -> list[str]:
        """Paths of the copies that this node holds, finished or not."""
        found = Path(self._folder).glob("*/*/*/*")
        return [str(path.relative_to(self._folder)) for path in found]

    def _find_sources(
        self, reached: Mapping[int, Sequence[str]]
    ) -> dict[int, dict[int, tuple[int, str]]]:
        """See ``_sources``. ``reached``: the copies that each rank reaches."""
        try:
            start, loaded = _read_record(self.run_dir)
        except (OSError, ValueError) as fault:
            log.warning("copies in memory are passed over: %s", describe_error(fault))
            return {}
        # Step -> rank -> copies of its state, each with a rank that reaches it.
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
        """The copy of ``step``, verified. Raises `DamagedCheckpointError` with the reason, on all
        ranks, when it cannot be had. Collective."""
        rank, sources, group = self._group.rank, self._sources[step], self._group
        reached = {path for source, path in sources.values() if source == rank}
        held = group.agree(lambda: {path: self._read(path) for path in reached})
        moved = sorted(to for to, (source, _) in sources.items() if source != to)
        if moved:
            mine = {to: held[sources[to][1]] for to in moved if sources[to][0] == rank}
            manifest = self._exchange({to: blocks[0] for to, blocks in mine.items()})
            state = self._exchange({to: blocks[1] for to, blocks in mine.items()})
            held.setdefault(sources[rank][1], [manifest, state])
        _, own = sources[rank]
        manifest, data = held[own]
        opened: LocalState = group.agree(lambda: LocalState.from_bytes(manifest, data, self._shape))
        group.log(f"{step_name(step)} is in memory; {len(moved)} ranks were sent their parts")
        self._opened = own.split("/")[0], step
        return opened

    def _read(self, path: str) -> list[Tensor]:
        """The bytes of the manifest and of the state of a copy, mapped."""
        folder = LocalFolder(os.path.join(self._folder, path))
        found = [folder.source(name) for name in (MANIFEST, STATE)]
        return [torch.frombuffer(each.buffer(0, each.size), dtype=torch.uint8) for each in found]

    def _exchange(self, sent: Mapping[int, Tensor]) -> Tensor:
        """Sends each rank in ``sent``, which are in order, its bytes, and returns those that one
        sends here. Collective."""
        sizes = {to: data.numel() for to, data in sent.items()}
        incoming = [each.get(self._group.rank, 0) for each in self._group.all_gather(sizes)]
        outgoing = [sizes.get(rank, 0) for rank in filter(is_present, range(self._group.size))]
        received = torch.empty(sum(incoming), dtype=torch.uint8)
        data = [_NOTHING, *sent.values()]
        # One alone is not copied.
        whole = data[-1] if len(data) < 3 else torch.cat(data)
        c10d.all_to_all_single(received, whole, incoming, outgoing, self._group.group)
        return received

    def begin(self, base: int) -> None:
        """The run goes on from step ``base``: copies of any other state are dropped. What was
        loaded stays until there is a newer one. Collective."""
        if not self.on:
            return
        self._start, self._whole = self._group.broadcast(os.urandom(8).hex()), 0
        loaded = self._opened if base in self._opened else ()

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

        # Nobody writes before every node has been cleared.
        if self._try(clear):
            self._due_now = bool(loaded)  # nodes that are new hold nothing yet
            self._group.log(f"memory copies on: one every {self.every} steps in {self._root}")

    def follow(self) -> None:
        """This replica has got the state from another one, and makes copies as that does."""
        self._start, _ = _read_record(self.run_dir)
        self.on = bool(self._start)  # else it has turned them off
        os.makedirs(self._own_folder, exist_ok=True)

    @property
    def _own_folder(self) -> str:
        return os.path.join(self._folder, self._start, f"rank-{self._group.rank:05d}")

    # In the loop

    def is_due(self, step: int) -> bool:
        """Whether `save` is called after ``step``, once the copy before is complete."""
        if step % self.every and not self._due_now:
            return False
        self.wait()
        return self.on

    def save(self, state: SavedState) -> None:
        """Copies the state. Never raises for a fault of the memory. All ranks."""
        step = state.manifest.step
        if not self._start:
            self.begin(step - 1)
        # What replicas split, or each has for itself, is needed of all of them.
        several = len(self._rows[self._group.rank]) > 1
        splits = several and any("replicate" in split_dims(each) for each in state.shared.values())
        kind = "rank" if splits or state.of_replica else "place"
        manifest, fault = state.manifest, None
        try:
            tensors, blocks = pack(local_parts(state.shared | state.of_replica | state.own))
            manifest = dataclasses.replace(manifest, tensors=tensors)
            self._staged = self._staging.take(blocks)
            if not self._whole:
                self._check_room(splits)
        except Exception as error:  # the others hear of it, whatever it is, and training goes on
            fault = error
        self._group.stay()
        self._copying = in_thread(lambda: self._finish_copy(manifest, kind, splits, fault))
        self._due_now = False

    def _finish_copy(
        self, manifest: Manifest, kind: str, splits: bool, fault: Exception | None
    ) -> None:
        """Beside the loop: makes a copy of what is staged, and waits for all."""

        def write() -> None:
            if fault is not None:
                raise fault
            self._write(f"{kind}-{self._group.rank:05d}", manifest, self._staged)

        with contextlib.suppress(Exception):  # where a rank has ended: the loop hears of it too
            if not self._try(write) or (splits and not self._keep(manifest)):
                return
            self._whole = manifest.step
            # What was loaded, and is needed no longer.
            for start in Path(self._folder).glob("*"):
                if start.name != self._start:
                    shutil.rmtree(start, ignore_errors=True)

    def _write(self, of: str, manifest: Manifest, state: Tensor) -> None:
        """Makes a copy of ``state``, which is that ``of`` a rank or place."""
        store = LocalStore(os.path.join(self._own_folder, of), durable=False)
        # A loop may ask twice for one step.
        if manifest.step == self._whole and manifest.step in store.steps():
            return
        place = store.begin(manifest.step, "copy")
        # Room for this one. That of which all have a copy stays.
        for step in store.steps():
            if step != self._whole:
                store.delete(step)
        manifest.files = {STATE: store.write(place, STATE, [memoryview(state.numpy().data)])}
        store.publish(place, manifest.step, manifest.encode())

    def _keep(self, manifest: Manifest) -> bool:
        """Makes a copy of what a rank of another replica has, as that does of this rank's."""
        row = self._rows[self._group.rank]
        # Half of the replicas further: on another node, unless all are on one.
        here, away = row.index(self._group.rank), len(row) // 2
        to = row[(here + away) % len(row)]
        text = self._exchange({to: as_bytes(exchange.encode(manifest).encode())})
        state = self._exchange({to: self._staged})
        of, other = f"rank-{row[here - away]:05d}", exchange.decode(text.numpy().tobytes())
        return self._try(lambda: self._write(of, other, state))

    def _check_room(self, splits: bool) -> None:
        """Raises `CheckpointError` unless two copies fit on this node, before the first is made."""
        # Ranks of one node see each other's folders, and their parts are alike.
        ranks = len(os.listdir(os.path.dirname(self._own_folder)))
        share = ranks * self._staged.numel()
        mib = share * (4 if splits else 2) / 2**20
        system = os.statvfs(self._root)
        # What another replica has is received as a whole first.
        received = share if splits else 0
        # A tenth of the memory that this machine or container has left stays free.
        free = min(system.f_bavail * system.f_frsize, 0.9 * free_memory() - received)
        free = (free + used(self._folder)) / 2**20
        if mib > free:
            raise CheckpointError(
                f"{free:.1f} MiB of shared memory to give, and two copies need {mib:.1f} MiB; "
                "make it larger (in a container: --shm-size), or set checkpoint.memory_every=0"
            )
        self._group.log(f"memory copies: {mib:.1f} MiB of memory on this node")

    def wait(self) -> None:
        """Returns when the last copy is complete on all nodes, or has failed."""
        if self._copying is not None:
            self._copying.result()

    def finish(self) -> None:
        """Removes the copies of a run that has ended well. Collective."""
        self.wait()
        if self.on:
            self._group.stay()
            with contextlib.suppress(ReplicaLost):
                self._remove()

    def _try(self, work: Callable[[], object]) -> bool:
        """Runs ``work`` on every rank; the first fault of any turns the copies off. Collective."""
        try:
            self._group.agree(work)
        except ConfigError as fault:
            self.on = False
            self._group.log(
                f"memory copies off: {fault}. Training goes on; a lost worker costs the steps "
                "since the last checkpoint",
                logging.WARNING,
            )
            self._remove()
        return self.on

    def _remove(self) -> None:
        self._staging, self._staged = Staging(), _NOTHING
        self._group.all_gather(None)  # nobody is still writing
        if self._group.is_first:
            forget_in_memory_checkpoints(self.run_dir)
        shutil.rmtree(self._folder, ignore_errors=True)
        if MEMORY_DIR not in os.environ:
            private_folders.remove(self._root)


def _nearest(rank: int, sources: Sequence[tuple[int, str]]) -> tuple[int, str]:
    """Chooses one that ``rank`` has written, or reaches, itself, where there is one, since the
    first has its random generators; senders take turns."""
    here = [source for source in sources if source[0] == rank]
    own = [source for source in here if f"/rank-{rank:05d}/" in source[1]]
    return (own or here or [sources[rank % len(sources)]])[0]


def _read_record(run_dir: str) -> tuple[str, tuple[Any, ...]]:
    """The last start, and the start and step of the copy that it went on from. Raises OSError or
    ValueError."""
    try:
        content = files.read_json(os.path.join(run_dir, RECORD))
    except FileNotFoundError:
        return "", ()
    match content:
        case {"start": str(start), "loaded": [*loaded]}:
            return start, tuple(loaded)
    raise ValueError(f"{RECORD} names no start")


def open_place() -> str:
    """The folder in shared memory of this node, made if it does not exist. Raises OSError when it
    is not ours alone."""
    path = os.environ.get(MEMORY_DIR)
    if path:
        with contextlib.suppress(FileNotFoundError):
            mode = os.lstat(path).st_mode
            # /tmp, /dev/shm: making it private would close it for others
            if stat.S_ISDIR(mode) and mode & 0o022:
                raise PermissionError(
                    errno.EPERM, "others may write to it; name a folder inside it", path
                )
        private_folders.make_private(path)
        return os.path.abspath(path)
    if not os.path.isdir(SHARED_MEMORY):
        raise FileNotFoundError(
            errno.ENOENT, f"no shared memory folder; set {MEMORY_DIR} to one", SHARED_MEMORY
        )
    return private_folders.open_folder(os.getppid(), SHARED_MEMORY)


def used(path: str) -> int:
    """Bytes that the files below ``path`` occupy, which other ranks may rename meanwhile."""
    blocks = 0
    for folder, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                blocks += os.lstat(os.path.join(folder, name)).st_blocks
    return 512 * blocks
