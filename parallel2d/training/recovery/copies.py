"""`MemoryCopies`: decides when copies are made, how ranks agree on them and which one is found
again. See [Note: memory copies].

All ranks make the same calls. A fault that is reported to all ranks turns the copies off, with one
warning, and frees the memory. When a rank no longer answers, everything is left as it is, since
that is the case the copies are for.
"""

from __future__ import annotations

import hashlib
import logging
import operator
import os
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from parallel2d.base import exchange
from parallel2d.base.files.tensor_file import DTYPE_NAMES
from parallel2d.parallel.mesh import axis_positions, mesh_shape
from parallel2d.parallel.weights.geometry import local_region
from parallel2d.training.checkpoint.manifest import Checkpoint, Manifest
from parallel2d.training.checkpoint.save import Group, SavedState, plan_all, plan_of_replica
from parallel2d.training.checkpoint.storage import describe_error
from parallel2d.training.recovery.buffer import Buffer, Part, folders_in, slots
from parallel2d.training.recovery.place import Place, open_place, remove, remove_place, room, used
from parallel2d.training.recovery.search import Lineage, Nodes, Search

log = logging.getLogger(__name__)

_RNG_BYTES = 64 * 2**10  # that one rank's random generators may have, to be kept by another too


@dataclass
class _Outcome:
    """The outcome of one copy. ``error``: what all ranks agreed went wrong. ``heard``: whether all
    ranks answered."""

    step: int
    error: str | None = None
    heard: bool = True


class MemoryCopies:
    """Copies of one run's state in shared memory. Collective: every rank makes one and calls its
    methods at the same points.

    Args:
        every: steps between copies, see `memory_copies`.
        run_dir: the run's folder, the same on all ranks.
        answers: a group that only the training loop's thread uses, and not while a method of this
            object runs in another.

    Attributes:
        on: whether copies are made.
        newest: the step of the newest copy known to be complete on all nodes.
        skipped: copies that were not made because the one before was not finished.
        blocked_s: seconds the last `save` kept the loop waiting.
        node_bytes: of one buffer of this node, once the first copy was made.
    """

    def __init__(self, every: int, run_dir: str, mesh: DeviceMesh | None, answers: Group) -> None:
        self.every, self.run_dir, self.mesh, self.answers = every, run_dir, mesh, answers
        self._replicas = 1 if mesh is None else mesh_shape(mesh).replicate
        # The thread that finishes a copy communicates while the loop and a save to disk do.
        self._group = Group(dist.new_group(backend="gloo") if answers.group is not None else None)
        self.on = True
        self.newest: int | None = None
        self.skipped = 0
        self.blocked_s = 0.0
        self.node_bytes = 0
        self._lineage = Lineage()
        self._search: Search | None = None
        self._loaded: int | None = None
        self._old: list[str] = []
        self._incarnation = ""  # of this start, once it has begun
        self._buffers: Sequence[Buffer] = ()  # two, used in turn
        self._next = 0
        self._due_now = False
        self._thread: threading.Thread | None = None
        self._outcome: _Outcome | None = None
        self.place: Place | None = None
        error = None
        try:
            self.place = open_place()
        except OSError as fault:
            error = _on_this_host(fault)
        found = answers.all_gather((self.place.token if self.place else "", error))
        tokens = list(dict.fromkeys(token for token, _ in found))
        self.nodes = Nodes(tuple(tokens.index(token) for token, _ in found), answers.rank)
        name = hashlib.sha256(os.path.realpath(run_dir).encode()).hexdigest()[:16]
        self.folder = os.path.join(
            self.place.root if self.place else "", f"run-{answers.broadcast(name)}"
        )
        errors = [error for _, error in found if error]
        if errors:
            self._turn_off(errors[0])

    # At the start of the run

    def steps(self) -> list[int]:
        """Steps that `open` can be called with, ascending: those of this run that some node still
        holds a part of."""
        if not self.on:
            return []
        lineage = Lineage()
        if self.answers.rank == 0:
            try:
                lineage = Lineage.read(self.run_dir)
            except (OSError, ValueError) as fault:
                log.warning("copies in memory are passed over: %s", describe_error(fault))
        self._lineage = self.answers.broadcast(lineage)
        self._search = Search(self.folder, self.answers, self.nodes, self._lineage)
        return self._search.steps()

    def open(
        self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer | None
    ) -> Checkpoint:
        """See `Search.open`."""
        assert self._search is not None, "steps() comes first"
        return self._search.open(step, model, optimizer)

    def close(self, *, loaded: int | None = None) -> None:
        """After `open`. ``loaded``: its step, when the run goes on from there."""
        assert self._search is not None
        self._search.close()
        self._loaded = loaded

    def begin(self, base: int) -> None:
        """The run goes on from step ``base``: copies of any other state are dropped. What was
        loaded stays until there is a newer one. Collective."""
        if not self.on:
            return
        self._incarnation = self.answers.broadcast(os.urandom(8).hex())
        own = os.path.join(self.folder, self._incarnation)
        error = None
        if self.answers.rank == 0:
            try:
                self._lineage.followed_by(self._incarnation, base).write(self.run_dir)
            except OSError as fault:
                reason = describe_error(fault)
                error = f"its record in the run directory cannot be written: {reason}"
        error = self.answers.broadcast(error)
        if error is None:
            try:
                self._clear(own)
            except OSError as fault:
                error = _on_this_host(fault)
        # Nobody writes before every node has been cleared.
        if errors := [answer for answer in self.answers.all_gather(error) if answer]:
            self._turn_off(errors[0])
            return
        rank = self.answers.rank
        of_rank = os.path.join(own, f"rank-{rank:05d}")
        first, second = os.path.join(of_rank, "slot-0"), os.path.join(of_rank, "slot-1")
        self._buffers = Buffer(first, rank), Buffer(second, rank)
        self._due_now = self._loaded is not None  # nodes that are new hold nothing yet
        self._search = None
        assert self.place is not None
        self.answers.say(
            f"memory copies on: one every {self.every} steps in {self.place.root}, "
            f"{max(self.nodes.of) + 1} nodes"
        )

    def _clear(self, own: str) -> None:
        """Removes what other starts left on this node, and makes the folder ``own``. Raises
        OSError."""
        assert self.place is not None
        self._old = []
        if self._search is not None and self._loaded is not None:
            self._old = self._search.kept(self._loaded)
        if not self.nodes.is_first:
            return
        os.makedirs(self.folder, mode=0o700, exist_ok=True)
        doomed = set(slots(self.folder)) - set(self._old)
        # Of this run, those folders of earlier starts in which nothing is kept.
        kept_starts = {os.path.dirname(os.path.dirname(slot)) for slot in self._old}
        doomed |= set(folders_in(self.folder)) - kept_starts
        if self.place.own:  # no other run can be using it
            doomed |= set(folders_in(self.place.root)) - {self.folder}
        for path in doomed:
            remove(path)
        os.makedirs(own, mode=0o700)

    # In the loop

    def is_due(self, step: int) -> bool:
        """Whether `save` is called after ``step``."""
        return self.on and (step % self.every == 0 or self._due_now)

    def save(self, state: SavedState) -> None:
        """Copies the state; the loop waits for the copy alone. Never raises for a fault of the
        memory. Collective."""
        begin = time.perf_counter()
        self.blocked_s = 0.0
        if not self._incarnation:
            self.begin(state.manifest.step - 1)
        # Rank 0's copy is finished only when all ranks are about to be.
        if self.answers.broadcast(self._thread is not None and self._thread.is_alive()):
            self.skipped += 1
            self.answers.say(
                f"no copy of step {state.manifest.step} in memory: the one before is not finished "
                f"yet. A higher checkpoint.memory_every than {self.every} would fit",
                logging.WARNING if self.skipped == 1 else logging.DEBUG,
            )
            return
        self.wait()
        if self.on and self._start(state):
            self._due_now = False
        self.blocked_s = time.perf_counter() - begin

    def _start(self, state: SavedState) -> bool:
        nodes = self.nodes.of if self.mesh is not None else None
        whole = {**state.shared, **state.of_replica}
        parts = [
            Part(name, tuple(whole[name].shape), region, local_region(whole[name]), values)
            for name, region, values in plan_all(state, self.mesh, nodes)
        ]
        sent, received = self._partitions(state.shared, parts, nodes)
        parts += received
        if not self.node_bytes and not self._has_room(parts):
            return False
        buffer, error = self._buffers[self._next], None
        try:
            buffer.fill(parts)
        except Exception as fault:  # the others get the error, whatever it is, and training goes on
            error = _on_this_host(fault)
        # What describes the tensors now: training changes the state while the thread runs.
        described = [
            [name, DTYPE_NAMES[tensor.dtype], list(tensor.shape)]
            for name, tensor in state.shared.items()
        ]
        self._thread = threading.Thread(
            target=self._complete,
            args=(state.manifest, state.own, described, buffer, sent, received, error),
            name=f"memory copy {state.manifest.step}",
            daemon=True,
        )
        self._thread.start()
        return True

    def _complete(
        self,
        manifest: Manifest,
        rng: Mapping[str, Tensor],
        described: Sequence[list[Any]],
        buffer: Buffer,
        sent: Sequence[Part],
        received: Sequence[Part],
        error: str | None,
    ) -> None:
        """Beside the loop: finishes this rank's part of a copy, and notes what came of it on all
        ranks. ``sent`` goes to the same rank of the next replica, ``received`` comes from that of
        the one before; ``error``: of this rank so far."""
        outcome = _Outcome(manifest.step)
        try:
            others = self._rng_of_another(rng)
            if sent or received:
                # A rank whose buffer could not be filled takes part with nothing of use.
                tensor_of = buffer.view if error is None else operator.attrgetter("values")
                self._pass_on(list(map(tensor_of, sent)), list(map(tensor_of, received)))
            if error is None:
                try:
                    buffer.seal(self._incarnation, manifest, described, {**rng, **others})
                except Exception as fault:  # the others wait for an answer, whatever happened
                    error = _on_this_host(fault)
            # A copy is of use only where every rank has its part of it.
            outcome.error = next(filter(None, self._group.all_gather(error)), None)
            if outcome.error is None and self.nodes.is_first:
                while self._old:
                    remove(self._old.pop())
        except Exception:  # a rank has ended: the loop will get an error, the copies must stay
            outcome.heard = False
        self._outcome = outcome

    def _partitions(
        self, tensors: Mapping[str, Tensor], own: Sequence[Part], nodes: Sequence[int] | None
    ) -> tuple[list[Part], list[Part]]:
        """Lists what this rank gives to the next replica and keeps for the one before, of tensors
        that are split over the replicas: a node that is lost takes its part of them with it."""
        if self.mesh is None or self._replicas == 1:
            return [], []
        replica = self.mesh.get_local_rank("replicate")
        before = (replica - 1) % self._replicas
        received: list[Part] = []
        for name, held, region, tensor in plan_of_replica(
            tensors.items(), self.mesh, nodes, before
        ):
            values = torch.empty(region.lengths, dtype=tensor.dtype)
            received.append(Part(name, tuple(tensor.shape), region, held, values, True))
        mine = plan_of_replica(tensors.items(), self.mesh, nodes, replica)
        split = {name for name, *_ in mine}
        sent = [part for part in own if part.name in split]
        return sent, received

    def _rng_of_another(self, rng: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The random generators of the same rank of the replica before this one, which gives its
        own to the next; none where they take more than `_RNG_BYTES`. Collective as `_pass_on`."""
        if self._replicas == 1:
            return {}
        sent = torch.zeros(_RNG_BYTES, dtype=torch.uint8)
        received = torch.zeros_like(sent)
        data = bytearray(exchange.encode(dict(rng)).encode())
        if len(data) <= _RNG_BYTES:
            sent[: len(data)] = torch.frombuffer(data, dtype=torch.uint8)
        self._pass_on([sent], [received])
        text = received.numpy().tobytes().rstrip(b"\0")
        found: dict[str, Tensor] = exchange.decode(text or b"{}")
        return found

    def _pass_on(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> None:
        """Sends to the next replica what that one receives as its ``incoming``. Collective over a
        ring of ranks."""
        assert self.mesh is not None
        positions = axis_positions(self.mesh)
        index: dict[str, int | slice] = {**positions, "replicate": slice(None)}
        # The ranks in this rank's place of each replica
        line = self.mesh.mesh[tuple(index.values())].tolist()
        own = positions["replicate"]
        following, before = line[(own + 1) % len(line)], line[own - 1]
        group = self._group.group
        # Nobody waits for its send before it receives: in a ring of ranks all would wait.
        works = [dist.isend(tensor.contiguous(), following, group=group) for tensor in outgoing]
        for tensor in incoming:
            dist.recv(tensor, before, group=group)
        for work in works:
            assert work is not None
            work.wait()

    def _has_room(self, parts: list[Part]) -> bool:
        """Whether two buffers fit on every node, before the first one is taken. Collective."""
        assert self.place is not None
        size = sum(part.values.numel() * part.values.element_size() for part in parts)
        free = room(self.place.root) + used(self.folder) if self.nodes.is_first else 0
        answers = self.answers.all_gather((size, free, socket.gethostname()))
        for node in range(max(self.nodes.of) + 1):
            ranks = self.nodes.ranks(node)
            need, (_, free, host) = 2 * sum(answers[rank][0] for rank in ranks), answers[ranks[0]]
            if node == self.nodes.own:
                self.node_bytes = max(need // 2, 1)
            if need > free:
                self._turn_off(
                    f"{host} has {free / 2**20:.1f} MiB of shared memory to give and two copies "
                    f"need {need / 2**20:.1f} MiB; make it larger (in a container: --shm-size), or "
                    "set checkpoint.memory_every=0"
                )
                return False
        mib = self.node_bytes / 2**20
        self.answers.say(f"memory copies: 2 x {mib:.1f} MiB of shared memory on this node")
        return True

    def wait(self) -> None:
        """Returns when the last copy is complete on all nodes, or has failed, and applies its
        outcome, on all ranks alike. Collective."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        outcome, self._outcome = self._outcome, None
        if outcome is None:
            return
        if not outcome.heard:
            self.on = False
        elif outcome.error is not None:
            self._turn_off(outcome.error)
        else:
            self.newest = outcome.step
            # This copy stays until the one in the other buffer is complete.
            self._next = 1 - self._next

    def finish(self) -> None:
        """The run has ended well: its copies are removed. Never for a run that ends with an error.
        Collective."""
        self.wait()
        if self.on:
            self._remove()

    def _turn_off(self, why: str) -> None:
        self.on = False
        self.answers.say(
            f"memory copies off: {why}. Training goes on; a lost worker costs the steps since the "
            "last checkpoint",
            logging.WARNING,
        )
        self._remove()

    def _remove(self) -> None:
        for buffer in self._buffers:
            buffer.release()
        self.answers.all_gather(None)  # nobody is still writing
        if self.place is not None and self.nodes.is_first:
            remove(self.folder)
            remove_place(self.place)


def _on_this_host(fault: BaseException) -> str:
    return f"{socket.gethostname()}: {describe_error(fault)}"
