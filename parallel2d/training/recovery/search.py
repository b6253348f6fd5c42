"""Finds the copies that the nodes hold after a restart, and makes a whole one readable on every
rank: `Search`.

The first rank of each node reads its folder. Rank 0 puts a copy together from what all nodes have.
The ranks of each node compute the checksums of the files that were chosen, in parallel. A damaged
file is omitted when another node holds the same rectangles. A node is sent the files that its ranks
need and it lacks, in pieces, from rank to rank.

[Note: lineage] Every start of a run gets a random name, its incarnation, and writes it, with the
step it starts from, into ``memory.json`` in the run directory. A copy counts only when its writer
is named there and no later start went back behind its step (`Lineage`). So the copies of another
run, and those of steps that the run has left for an older checkpoint, are never loaded, whichever
node holds them.
"""

from __future__ import annotations

import functools
import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel2d.base import files
from parallel2d.base.exchange import sendable
from parallel2d.base.files import is_count
from parallel2d.base.files.folder import LocalFolder
from parallel2d.base.files.tensor_file import DamagedCheckpointError, parse_json
from parallel2d.parallel.weights.geometry import Region, local_region
from parallel2d.parallel.weights.named_tensors import model_tensors
from parallel2d.training.checkpoint.manifest import MAX_BYTES, Checkpoint, Manifest
from parallel2d.training.checkpoint.save import Group
from parallel2d.training.checkpoint.state import (
    average_tensors,
    fitting_name,
    names_under,
    needed_names,
)
from parallel2d.training.checkpoint.storage import describe_error, step_name
from parallel2d.training.recovery.assembly import AssembledCopy, assemble
from parallel2d.training.recovery.buffer import Found, check_file, digest, find_copies, map_new_file
from parallel2d.training.recovery.place import remove

NAME = "memory.json"
_KEPT = 64  # starts that are remembered; copies of earlier ones were overwritten long ago


@sendable
@dataclass(frozen=True)
class Lineage:
    """(incarnation, step it started from), in the order of time."""

    starts: tuple[tuple[str, int], ...] = ()

    def holds(self, incarnation: str, step: int) -> bool:
        """Whether the copy of ``step`` that ``incarnation`` wrote is a state that this run passed
        through and did not leave."""
        names = [name for name, _ in self.starts]
        if incarnation not in names:
            return False
        later = self.starts[names.index(incarnation) + 1 :]
        return all(step <= base for _, base in later)

    def followed_by(self, incarnation: str, base: int) -> Lineage:
        """Returns the lineage with one more start."""
        return Lineage((*self.starts, (incarnation, base))[-_KEPT:])

    @classmethod
    def read(cls, run_dir: str) -> Lineage:
        """Empty when there is none. Raises `DamagedCheckpointError` when it is damaged, OSError
        when it cannot be read."""
        try:
            with files.open_regular(os.path.join(run_dir, NAME)) as file:
                listed = parse_json(file.read(MAX_BYTES), NAME).get("starts")
        except FileNotFoundError:
            return cls()
        if not isinstance(listed, list):
            raise DamagedCheckpointError(f"{NAME}: starts is missing or not a list")
        starts = []
        for start in listed:
            match start:
                case [str(name), base] if is_count(base):
                    starts.append((name, base))
                case _:
                    raise DamagedCheckpointError(f"{NAME}: a start is not a name and a step")
        return cls(tuple(starts))

    def write(self, run_dir: str) -> None:
        """Replaces the file in one rename."""
        os.makedirs(run_dir, exist_ok=True)
        files.replace(
            os.path.join(run_dir, NAME), json.dumps({"starts": self.starts}), durable=True
        )


PIECE = 16 * 2**20  # bytes that one message carries


@dataclass(frozen=True)
class Nodes:
    """Tells which ranks share a folder. ``of``: the node of each rank; a node is called by its
    number."""

    of: tuple[int, ...]
    rank: int

    @property
    def own(self) -> int:
        return self.of[self.rank]

    def ranks(self, node: int) -> list[int]:
        return [rank for rank, other in enumerate(self.of) if other == node]

    @property
    def is_first(self) -> bool:
        """Whether this rank acts for its node, as the first of its ranks."""
        return self.rank == self.of.index(self.own)


@dataclass
class Search:
    """One look at what the nodes hold. Collective; made once, after a restart. ``folder``: this
    run's in shared memory."""

    folder: str
    group: Group
    nodes: Nodes
    lineage: Lineage
    _mine: list[Found] = field(default_factory=list)
    _writers: dict[int, str] = field(default_factory=dict)
    _view: str | None = None

    def steps(self) -> list[int]:
        """Steps of which some node holds a part that belongs to this run, ascending."""
        faults: list[str] = []
        if self.nodes.is_first:
            try:
                self._mine, faults = find_copies(self.folder)
            except OSError as fault:
                faults = [describe_error(fault)]
        answers = self.group.all_gather(
            ([(found.record["incarnation"], found.step) for found in self._mine], faults)
        )
        copies: set[tuple[str, int]] = set()
        for rank, (held, lines) in enumerate(answers):
            copies.update(held)
            for line in lines:
                what = f"passing over a copy in memory (rank {rank}'s node): {line}"
                self.group.say(what, logging.WARNING)
        own = {copy for copy in copies if self.lineage.holds(*copy)}
        self._writers = {step: name for name, step in sorted(own)}
        left = {step for _, step in copies - own}
        if left:
            listed = ", ".join(map(str, sorted(left)))
            self.group.say(
                f"copies in memory of step {listed} are not of this run as it stands, and are not "
                "used",
                logging.WARNING,
            )
        return sorted(self._writers)

    def open(
        self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer | None
    ) -> Checkpoint:
        """The copy of ``step``, verified, with all that this rank's part of ``model`` and
        ``optimizer`` needs in reach. `close` it when it was loaded. Raises `DamagedCheckpointError`
        with the reason, on all ranks, when it cannot be had."""
        held = self._held(step)
        chosen = self._choose(step, held)
        manifest = Manifest.decode(chosen.manifest, f"{step_name(step)} in memory")
        view = os.path.join(self.folder, f".view-{self.group.broadcast(os.urandom(8).hex())}")
        self._view = view
        try:
            self.group.agree(lambda: self._link(chosen, _folders_of_files(held), view))
            sent = self._fetch(manifest, chosen.holders, view, model, optimizer)
        except BaseException:
            self.close()
            raise
        self.group.say(
            f"{step_name(step)} is in memory: {len(manifest.files)} files, {sent / 2**20:.1f} MiB "
            "sent to nodes without them"
        )
        held_generators = {name.split("/")[1] for name in names_under(["rng"], manifest.tensors)}
        ranks = range(manifest.world_size)
        lost = [rank for rank in ranks if f"{rank:05d}" not in held_generators]
        if lost:
            self.group.say(
                f"random generators of ranks {lost} were lost with their nodes: they start afresh",
                logging.WARNING,
            )
        folder = LocalFolder(view)
        folder.label = f"{step_name(step)} from memory"
        return Checkpoint(folder, manifest, exact=False)

    def close(self) -> None:
        """Removes what `open` made. The copies themselves stay."""
        if self._view is not None and self.nodes.is_first:
            remove(self._view)
        self._view = None

    def kept(self, step: int) -> list[str]:
        """This node's folders that hold ``step``; on the first rank of the node."""
        return [found.folder for found in self._held(step)]

    def _held(self, step: int) -> list[Found]:
        copy = (self._writers.get(step), step)
        return [found for found in self._mine if (found.record["incarnation"], found.step) == copy]

    def _link(self, chosen: AssembledCopy, folders: Mapping[str, str], view: str) -> None:
        """Makes ``view``, with this node's files under the names that the manifest has."""
        if not self.nodes.is_first:
            return
        os.makedirs(view, mode=0o700)
        for name, nodes in chosen.holders.items():
            there = nodes.get(self.nodes.own)
            if there:
                source = os.path.join(folders[there], there)
                # A link takes no memory: there may be no room for the state once more.
                os.link(source, os.path.join(view, name), follow_symlinks=False)

    def _choose(self, step: int, held: Sequence[Found]) -> AssembledCopy:
        """A whole copy of sound files. Rank 0 chooses, the holders check, until nothing is
        wrong."""
        what = f"{step_name(step)} in memory"
        # What all ranks' records have in common is large, so each node sends it once.
        messages: list[Any] = [(found.rank, None, None) for found in held]
        if held:
            record = held[0].record
            messages[0] = held[0].rank, record["tensors"], record["common"]
        parts = [(found.record["parts"], found.record["files"]) for found in held]
        answers = self.group.gather((self.nodes.own, messages, parts) if held else None)
        refused: set[str] = set()
        while True:
            assembled = functools.partial(_assemble, answers, refused, what)
            chosen: AssembledCopy = self.group.on_first(assembled)
            damaged = self._check(chosen, held, what)
            if not damaged:
                return chosen
            for reason in damaged.values():
                self.group.say(f"passing over a file of {what}: {reason}", logging.WARNING)
            refused |= set(damaged)

    def _check(self, chosen: AssembledCopy, held: Sequence[Found], what: str) -> dict[str, str]:
        """File -> fault, over all nodes; each node's ranks share its files. Only the first rank of
        a node has their locations, so it sends them to the others."""
        # `held` is empty on the others.
        told = self.group.all_gather(_folders_of_files(held))
        where = told[self.nodes.of.index(self.nodes.own)]
        files = Manifest.decode(chosen.manifest, what).files
        own = [
            (nodes[self.nodes.own], files[name])
            for name, nodes in chosen.holders.items()
            if self.nodes.own in nodes
        ]
        local = self.nodes.ranks(self.nodes.own)
        faults = {}
        for name, expected in own[local.index(self.group.rank) :: len(local)]:
            try:
                check_file(where[name], name, expected)
            except (OSError, DamagedCheckpointError) as fault:
                faults[name] = f"node {self.nodes.own}: {describe_error(fault)}"
        found: dict[str, str] = {}
        for answer in self.group.all_gather(faults):
            found |= answer
        return found

    def _fetch(
        self,
        manifest: Manifest,
        holders: Mapping[str, Mapping[int, str]],
        view: str,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
    ) -> int:
        """Sends files to the nodes that need and lack them. Returns the bytes sent over all
        nodes."""
        wanted = self.group.all_gather(sorted(_needed(manifest, model, optimizer, self.group)))
        lacking: set[tuple[str, int]] = set()
        for rank, names in enumerate(wanted):
            node = self.nodes.of[rank]
            lacking |= {(name, node) for name in names if node not in holders[name]}
        plan = []  # (file, sending rank, receiving rank): the nodes' ranks take turns
        for number, (name, node) in enumerate(sorted(lacking)):
            having = list(holders[name])
            senders = self.nodes.ranks(having[number % len(having)])
            receivers = self.nodes.ranks(node)
            plan.append((name, senders[number % len(senders)], receivers[number % len(receivers)]))
        targets: dict[str, Tensor] = {}

        def allocate() -> None:
            for name, _, receiver in plan:
                if receiver == self.group.rank:
                    path = os.path.join(view, name)
                    targets[name] = map_new_file(path, manifest.files[name].bytes)

        self.group.agree(allocate)
        # All walk through the plan in the same order, so the next transfer always has both of its
        # ends waiting.
        for name, sender, receiver in plan:
            size = manifest.files[name].bytes
            if self.group.rank == sender:
                source = LocalFolder(view).source(name)
                for begin in range(0, size, PIECE):
                    data = source.buffer(begin, min(begin + PIECE, size))
                    piece = torch.frombuffer(data, dtype=torch.uint8)
                    dist.send(piece, receiver, group=self.group.group)
            elif self.group.rank == receiver:
                for piece in targets[name].split(PIECE):
                    dist.recv(piece, sender, group=self.group.group)

        def verify() -> None:
            for name, values in targets.items():
                if digest(memoryview(values.numpy().data)) != manifest.files[name].sha256:
                    raise DamagedCheckpointError(
                        f"{name} was damaged on its way to node {self.nodes.own}"
                    )

        self.group.agree(verify)
        return sum(manifest.files[name].bytes for name, _, _ in plan)


def _folders_of_files(held: Sequence[Found]) -> dict[str, str]:
    folders: dict[str, str] = {}
    for found in held:
        folders |= dict.fromkeys(found.record["files"], found.folder)
    return folders


def _assemble(answers: Sequence[Any], refused: set[str], what: str) -> AssembledCopy:
    """Calls `assemble`, with a `DamagedCheckpointError` for all that may be wrong with
    ``answers``."""
    try:
        return assemble([answer for answer in answers if answer is not None], refused, what)
    except DamagedCheckpointError:
        raise
    # The content of a record may be anything.
    except (TypeError, ValueError, KeyError, IndexError) as fault:
        raise DamagedCheckpointError(
            f"{what}: its records are damaged ({describe_error(fault)})"
        ) from None


def _needed(
    manifest: Manifest, model: nn.Module, optimizer: torch.optim.Optimizer | None, group: Group
) -> set[str]:
    """The files in which this rank's parts of model, optimizer and random generators are."""
    here = model_tensors(model)
    wanted = []
    for name, tensor in here.items():
        source = fitting_name(name, tensor, manifest)
        if source is not None:
            wanted.append((source, local_region(tensor)))
    for name, tensor in average_tensors(model).items():
        if name in manifest.tensors:
            wanted.append((name, local_region(tensor)))
    for stored in needed_names(model, manifest):
        if optimizer is not None or "optimizer/" not in stored:
            wanted.append((stored, _needed_region(stored, manifest, here)))
    if manifest.world_size == group.size:
        for name in names_under([f"rng/{group.rank:05d}"], manifest.tensors):
            wanted.append((name, Region.whole(manifest.tensors[name].shape)))
    return _files_with(wanted, manifest)


def _files_with(wanted: list[tuple[str, Region]], manifest: Manifest) -> set[str]:
    found: set[str] = set()
    for name, region in wanted:
        for chunk in manifest.tensors[name].chunks:
            # A tensor without dims is one chunk.
            if not region.lengths or chunk.region.intersect(region):
                found.add(chunk.file)
    return found


def _needed_region(stored: str, manifest: Manifest, here: Mapping[str, Tensor]) -> Region:
    """This rank's part, for state of the shape of its parameter; otherwise the whole."""
    shape = manifest.tensors[stored].shape
    # The name of the parameter follows the kind of state, and both may have slashes.
    name = stored
    while name and name not in here:
        name = name.partition("/")[2]
    if name and shape == tuple(here[name].shape):
        return local_region(here[name])
    return Region.whole(shape)
