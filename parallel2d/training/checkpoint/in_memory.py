"""Copies of a run's state in the nodes' shared memory, so that restarted workers need not go back
to a checkpoint on disk: `memory_copies`.

[Note: memory copies] Workers that are restarted lose their own memory, but the shared memory of
their node remains. Every few steps each rank copies what it has of the state (`pack`) into one of
two folders there, in turn. A folder gets a name with the step once all in it is written, and loses
it before the first byte changes: what has a name is whole, whatever was killed and when. For a node
that is lost the rank in the same place of another replica has a copy: with equal state its own one,
which has both ranks' random generators; of what replicas split (``strategy=hybrid_full``) one more.

After a restart on the same mesh, on whatever nodes, the newest step is chosen of which a copy is
left for every rank, and nodes are sent what they lack. Otherwise the checkpoints on disk remain.

[Note: lineage] Every start of a run has a random name, which its copies are under. ``memory.json``
in the run directory has the name of the last start, its mesh, and the copy that it went on from; no
others count. So the copies of another run, and those of steps that the run has left for an older
checkpoint, are never loaded, whichever node holds them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import re
import shutil
import socket
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from parallel2d.base import exchange, files
from parallel2d.base.config import CheckpointConfig
from parallel2d.base.files import private_folders
from parallel2d.base.topology import MEMORY_DIR
from parallel2d.parallel.mesh import axis_positions, mesh_shape
from parallel2d.parallel.weights.geometry import split_dims
from parallel2d.training.checkpoint.local_state import LocalState, as_bytes, pack
from parallel2d.training.checkpoint.manifest import Checkpoint, Manifest
from parallel2d.training.checkpoint.save import Group, SavedState
from parallel2d.training.checkpoint.shared_memory import (
    Slot,
    free_bytes,
    open_place,
    read_copy,
    used,
)
from parallel2d.training.checkpoint.storage import CheckpointError, describe_error, step_name

log = logging.getLogger(__name__)

AUTO_EVERY = 10  # steps, with checkpoint.memory_every=auto
RECORD = "memory.json"
# START/rank-WRITER/step-STEP.RANKS.SLOT in the folder of a run, for the ranks R or R-R
_COPY = re.compile(r"([0-9a-f]{16})/rank-\d{5,9}/step-(\d{8,18})\.(\d{1,9}(?:-\d{1,9})?)\.[01]")


def memory_copies(
    config: CheckpointConfig, run_dir: str | os.PathLike[str], mesh: DeviceMesh | None
) -> MemoryCopies | None:
    """The copies that ``config.memory_every`` asks for, for a `Checkpointer` of the same arguments;
    None for none. Rank 0 decides, since environments may differ. Collective."""
    group = Group.new()
    every, why = config.memory_every, "checkpoint.memory_every=0"
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    if not config.enabled:
        every, why = 0, "checkpoint.enabled=false"
    elif every == "auto" and restarts.isdecimal() and int(restarts):
        every = AUTO_EVERY
    elif every == "auto":
        nothing = "nothing restarts this job's workers (TORCHELASTIC_MAX_RESTARTS is 0)"
        every, why = 0, f"{nothing}; checkpoint.memory_every=N turns it on"
    every = int(group.broadcast(every))
    if every:
        return MemoryCopies(every, os.fspath(run_dir), mesh, group)
    group.say(f"memory copies off: {why}")
    return None


def forget_copies(run_dir: str | os.PathLike[str]) -> None:
    """The run goes on without copies, and leaves the steps of those that there may be."""
    with contextlib.suppress(OSError):
        os.unlink(os.path.join(run_dir, RECORD))


class MemoryCopies:
    """Copies of one run's state in shared memory. Collective: every rank makes one and calls its
    methods at the same points. A fault that all ranks hear of turns the copies off, with one
    warning. When a rank no longer answers, all is left as it is: that is what copies are for.

    Args:
        every: steps between copies, see `memory_copies`.
        run_dir: the run's folder, the same on all ranks.
        group: one that only the training loop's thread uses.

    Attributes:
        on: whether copies are made.
        newest: the step of the newest copy known to be complete on all nodes.
        skipped: copies that were not made because the one before was not finished.
    """

    def __init__(self, every: int, run_dir: str, mesh: DeviceMesh | None, group: Group) -> None:
        self.every, self.run_dir, self._group = every, run_dir, group
        # The thread that finishes a copy communicates while the loop and a save to disk do.
        self._beside = Group(dist.new_group(backend="gloo") if group.group is not None else None)
        self.on, self.skipped = True, 0
        self.newest: int | None = None
        self._mesh: dict[str, Any] = {}
        self._to = self._from = group.rank  # the ranks in this place of two other replicas
        if mesh is not None:
            self._mesh = mesh_shape(mesh).shown | {"ranks": mesh.mesh.flatten().tolist()}
            self._to, self._from = _partners(mesh)
        # Step -> for each rank, which rank has its copy in reach, and where.
        self._sources: dict[int, list[tuple[int, str]]] = {}
        self._opened: tuple[Any, ...] = ()  # start and step of what was loaded
        self._start = ""  # the name of this start, once it has begun
        self._slots: list[Slot] = []  # two, used in turn
        self._kept: list[Slot] = []  # beside them, for the copies of another rank
        self._next = 0
        self._due_now = self._is_measured = False
        self._thread: threading.Thread | None = None
        self._fault: Exception | None = None  # of the thread
        self._copied = 0  # the step that it copies
        self._root = self._folder = ""
        name = group.broadcast(hashlib.sha256(os.path.realpath(run_dir).encode()).hexdigest())

        def find_folder() -> None:
            self._root = open_place()
            self._folder = os.path.join(self._root, f"run-{name[:16]}")

        self._try(find_folder)

    # At the start of the run

    def steps(self) -> list[int]:
        """Steps that `open` can be called with, ascending: those of this run of which a copy is
        left for every rank."""
        if self.on:
            answers = self._group.gather(self._copies())
            self._sources = self._group.on_first(lambda: self._find_sources(answers))
        return sorted(self._sources)

    def _copies(self) -> list[str]:
        """The copies that this node holds, finished or not, by their paths in the run's folder."""
        found = Path(self._folder).glob("*/*/*")
        return [str(path.relative_to(self._folder)) for path in found]

    def _find_sources(self, answers: Sequence[list[str]]) -> dict[int, list[tuple[int, str]]]:
        """See ``_sources``. ``answers``: the copies that each rank reaches."""
        try:
            start, mesh, loaded = _read_record(self.run_dir)
        except (OSError, ValueError) as fault:
            log.warning("copies in memory are passed over: %s", describe_error(fault))
            return {}
        # Step -> rank -> copies of its state, each with a rank that reaches it.
        found: dict[int, dict[int, list[tuple[int, str]]]] = {}
        for rank, paths in enumerate(answers):
            for copy in filter(None, map(_COPY.fullmatch, paths)):
                if copy[1] == start or (copy[1], int(copy[2])) == loaded:
                    by_rank = found.setdefault(int(copy[2]), {})
                    for served in map(int, copy[3].split("-")):
                        by_rank.setdefault(served, []).append((rank, copy.string))
        if found and mesh != self._mesh:
            log.warning("copies in memory are those of another mesh, and are not used on this one")
            return {}
        sources = {}
        for step, by_rank in found.items():
            lost = sorted(set(range(len(answers))) - by_rank.keys())
            if lost:
                what = f"{step_name(step)} in memory is incomplete"
                log.warning("%s: no copy is left of ranks %s", what, lost)
            else:
                sources[step] = [_nearest(rank, by_rank[rank]) for rank in range(len(answers))]
        return sources

    def open(self, step: int) -> Checkpoint:
        """The copy of ``step``, verified. Raises `DamagedCheckpointError` with the reason, on all
        ranks, when it cannot be had."""
        rank, sources, group = self._group.rank, self._sources[step], self._group.group
        held: dict[str, list[Tensor]] = {}
        opened: list[LocalState] = []

        def read() -> None:
            for path in {path for source, path in sources if source == rank}:
                held[path] = read_copy(os.path.join(self._folder, path))
                LocalState.from_bytes(*held[path])

        self._group.agree(read)
        own = sources[rank][1]
        # All walk through them in one order, so the next transfer has both of its ends waiting.
        for to, (source, path) in enumerate(sources):
            if rank == source != to:
                dist.send(torch.tensor([block.numel() for block in held[path]]), to, group)
                for block in held[path]:
                    dist.send(block, to, group)
            elif rank == to != source:
                dist.recv(sizes := torch.zeros(2, dtype=torch.int64), source, group)
                held[path] = [torch.empty(size, dtype=torch.uint8) for size in sizes.tolist()]
                for block in held[path]:
                    dist.recv(block, source, group)
        self._group.agree(lambda: opened.append(LocalState.from_bytes(*held[own])))
        moved = sum(source != to for to, (source, _) in enumerate(sources))
        self._group.say(f"{step_name(step)} is in memory; {moved} ranks were sent their parts")
        self._opened = own.split("/")[0], step
        return opened[0]

    def begin(self, base: int) -> None:
        """The run goes on from step ``base``: copies of any other state are dropped. What was
        loaded stays until there is a newer one. Collective."""
        if not self.on:
            return
        self._start = self._group.broadcast(os.urandom(8).hex())
        loaded = self._opened if base in self._opened else ()
        folder = os.path.join(self._folder, self._start, f"rank-{self._group.rank:05d}")

        def clear() -> None:
            if self._group.is_first:
                record = {"start": self._start, "mesh": self._mesh, "loaded": loaded}
                os.makedirs(self.run_dir, exist_ok=True)
                path = os.path.join(self.run_dir, RECORD)
                files.replace(path, json.dumps(record), durable=True)
            for path in self._copies():
                copy = _COPY.fullmatch(path)
                if copy is None or (copy[1], int(copy[2])) != loaded:
                    shutil.rmtree(os.path.join(self._folder, path), ignore_errors=True)
            os.makedirs(folder, mode=0o700)

        # Nobody writes before every node has been cleared.
        if self._try(clear):
            self._slots = [Slot(folder, f"own-{number}") for number in (0, 1)]
            self._kept = [Slot(folder, f"kept-{number}") for number in (0, 1)]
            self._due_now = bool(loaded)  # nodes that are new hold nothing yet
            self._group.say(f"memory copies on: one every {self.every} steps in {self._root}")

    # In the loop

    def is_due(self, step: int) -> bool:
        """Whether `save` is called after ``step``."""
        return self.on and (step % self.every == 0 or self._due_now)

    def save(self, state: SavedState) -> None:
        """Copies the state; the loop waits for the copy alone. Never raises for a fault of the
        memory. Collective."""
        step = state.manifest.step
        if not self._start:
            self.begin(step - 1)
        # Rank 0's copy is finished only when all ranks are about to be.
        if self._group.broadcast(self._thread is not None and self._thread.is_alive()):
            self.skipped += 1
            self._group.say(
                f"no copy of step {step} in memory: the one before is not finished yet. A higher "
                f"checkpoint.memory_every than {self.every} would fit",
                logging.WARNING if self.skipped == 1 else logging.DEBUG,
            )
            return
        self.wait()
        if not self.on:
            return
        several = self._to != self._group.rank
        splits = several and any("replicate" in split_dims(each) for each in state.shared.values())
        own, ranks = dict(state.own), [self._group.rank]
        if several and not splits and not state.of_replica:
            text = self._pass_on(self._group, as_bytes(exchange.encode(own).encode()))
            own |= exchange.decode(text.numpy().tobytes())
            ranks.append(self._from)
        packed: list[Any] = []

        def prepare() -> None:
            packed.extend(pack({**state.shared, **state.of_replica, **own}))
            self._check_room(packed[1], splits)

        if not self._try(prepare):
            return
        tensors, blocks = packed
        fault = None
        try:
            self._slots[self._next].fill(blocks)
        except Exception as error:  # the others hear of it, whatever it is, and training goes on
            fault = error
        manifest, self._copied = dataclasses.replace(state.manifest, tensors=tensors), step
        self._thread = threading.Thread(
            target=self._complete,
            args=(manifest, "-".join(map(str, ranks)), splits, fault),
            name=f"memory copy {step}",
            daemon=True,
        )
        self._thread.start()
        self._due_now = False

    def _complete(self, *of_copy: Any) -> None:
        try:
            self._finish_copy(*of_copy)
        except Exception as fault:
            self._fault = fault

    def _finish_copy(
        self, manifest: Manifest, ranks: str, splits: bool, fault: Exception | None
    ) -> None:
        """Beside the loop: makes a copy of the state of ``ranks`` of what is in its slot, and waits
        for all. ``splits``: replicas have different parts; ``fault``: of this rank so far."""
        own, kept = self._slots[self._next], self._kept[self._next]
        name = f"{step_name(manifest.step)}.{{}}.{self._next}"

        def publish() -> None:
            if fault is not None:
                raise fault
            own.publish(name.format(ranks), manifest)

        _agree(self._beside, publish)
        if splits:
            text = as_bytes(exchange.encode([manifest, own.data.numel()]).encode())
            received = self._pass_on(self._beside, text)
            other, size = exchange.decode(received.numpy().tobytes())
            _agree(self._beside, lambda: kept.reserve(size))
            self._swap(self._beside, own.data, kept.data)
            _agree(self._beside, lambda: kept.publish(name.format(self._from), other))
        # What was loaded, and is needed no longer.
        for start in Path(self._folder).glob("*"):
            if start.name != self._start:
                shutil.rmtree(start, ignore_errors=True)

    def _pass_on(self, group: Group, data: Tensor) -> Tensor:
        """Sends bytes to the partner, and returns those of another's. Collective."""
        length = torch.tensor([len(data)])
        self._swap(group, length, theirs := torch.zeros_like(length))
        self._swap(group, data, received := torch.empty(int(theirs), dtype=torch.uint8))
        return received

    def _swap(self, group: Group, outgoing: Tensor, incoming: Tensor) -> None:
        # Nobody waits for its send before it receives: in a ring of ranks all would wait.
        work = dist.isend(outgoing, self._to, group=group.group)
        dist.recv(incoming, self._from, group=group.group)
        assert work is not None
        work.wait()

    def _check_room(self, blocks: Sequence[Tensor], splits: bool) -> None:
        """Raises `CheckpointError` unless two copies fit on this node, before the first is made."""
        if self._is_measured:
            return
        # Ranks of one node see each other's folders, and their parts are alike.
        ranks = len(os.listdir(os.path.join(self._folder, self._start)))
        mib = ranks * sum(block.numel() for block in blocks) * (4 if splits else 2) / 2**20
        free = (free_bytes(self._root) + used(self._folder)) / 2**20
        if mib > free:
            raise CheckpointError(
                f"{free:.1f} MiB of shared memory to give, and two copies need {mib:.1f} MiB; "
                "make it larger (in a container: --shm-size), or set checkpoint.memory_every=0"
            )
        self._is_measured = True
        self._group.say(f"memory copies: {mib:.1f} MiB of memory on this node")

    def wait(self) -> None:
        """Returns when the last copy is complete on all nodes, or has failed. Collective."""
        if self._thread is None:
            return
        self._thread.join()
        self._thread = None
        fault, self._fault = self._fault, None
        if isinstance(fault, CheckpointError):
            self._turn_off(str(fault))
        elif fault is not None:  # a rank has ended: the loop will get an error too
            self.on = False
        else:
            self.newest = self._copied
            # This copy stays until the one in the other slot is complete.
            self._next = 1 - self._next

    def finish(self) -> None:
        """Removes the copies of a run that has ended well. Collective."""
        self.wait()
        if self.on:
            self._remove()

    def _try(self, work: Callable[[], object]) -> bool:
        """Runs ``work`` on every rank; a fault on any turns the copies off. Collective."""
        try:
            _agree(self._group, work)
        except CheckpointError as fault:
            self._turn_off(str(fault))
        return self.on

    def _turn_off(self, why: str) -> None:
        self.on = False
        self._group.say(
            f"memory copies off: {why}. Training goes on; a lost worker costs the steps since the "
            "last checkpoint",
            logging.WARNING,
        )
        self._remove()

    def _remove(self) -> None:
        for slot in [*self._slots, *self._kept]:
            slot.release()
        self._group.all_gather(None)  # nobody is still writing
        shutil.rmtree(self._folder, ignore_errors=True)
        if MEMORY_DIR not in os.environ:
            private_folders.remove(self._root)


def _agree(group: Group, work: Callable[[], object]) -> None:
    """Runs ``work`` on every rank. Raises `CheckpointError` on all with the first fault of any."""
    error = None
    try:
        work()
    except Exception as fault:  # the others wait for an answer, whatever happened
        error = f"{socket.gethostname()}: {describe_error(fault)}"
    errors = list(filter(None, group.all_gather(error)))
    if errors:
        raise CheckpointError(errors[0])


def _partners(mesh: DeviceMesh) -> tuple[int, int]:
    """The ranks in this rank's place of the replicas half of them all further and before: on other
    nodes, unless all replicas are on one."""
    positions = axis_positions(mesh)
    index: dict[str, int | slice] = {**positions, "replicate": slice(None)}
    line = (
        mesh.mesh[tuple(index.values())].tolist() if "replicate" in positions else [mesh.get_rank()]
    )
    own, away = positions.get("replicate", 0), len(line) // 2
    return line[(own + away) % len(line)], line[own - away]


def _nearest(rank: int, sources: Sequence[tuple[int, str]]) -> tuple[int, str]:
    """Chooses one that ``rank`` reaches itself, where there is one; senders take turns."""
    own = [source for source in sources if source[0] == rank]
    return own[0] if own else sources[rank % len(sources)]


def _read_record(run_dir: str) -> tuple[str, Any, tuple[Any, ...]]:
    """The last start, its mesh, and the start and step of the copy that it went on from. Raises
    OSError or ValueError."""
    try:
        content = files.read_json(os.path.join(run_dir, RECORD))
    except FileNotFoundError:
        return "", {}, ()
    match content:
        case {"start": str(start), "mesh": mesh, "loaded": [*loaded]}:
            return start, mesh, tuple(loaded)
    raise ValueError(f"{RECORD} names no start")
