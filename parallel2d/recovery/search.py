"""Finds the copies that the nodes hold after a restart, and makes a whole one readable on every
rank: `Search`.

The first rank of each node reads its folder. Rank 0 puts a copy together from what all nodes have.
The ranks of each node compute the checksums of the files that were chosen, in parallel. A damaged
file is omitted when another node holds the same rectangles. A node is sent the files that its ranks
need and it lacks, in pieces, from rank to rank.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel2d.checkpoint.archive import Checkpoint
from parallel2d.checkpoint.manifest import Chunk, Manifest, StoredFile, StoredTensor
from parallel2d.checkpoint.replica_state import REPLICA, needed_names
from parallel2d.checkpoint.save import Group
from parallel2d.checkpoint.storage import describe_error, step_name
from parallel2d.exchange import sendable
from parallel2d.files.folder import LocalFolder
from parallel2d.files.tensor_file import DamagedCheckpointError, printable
from parallel2d.recovery.buffer import Found, check_file, digest, find_copies, map_new_file
from parallel2d.recovery.lineage import Lineage
from parallel2d.recovery.place import remove
from parallel2d.weights.geometry import Region, local_region
from parallel2d.weights.named_tensors import model_tensors

log = logging.getLogger(__name__)

PIECE = 16 * 2**20  # bytes that one message carries


@dataclass(frozen=True)
class Nodes:
    """Which ranks share a folder. ``of``: the node of each rank; a node is called by its number."""

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


@sendable
@dataclass(frozen=True)
class _Chosen:
    """A copy as rank 0 put it together. ``holders``: for each of its files the nodes that have it,
    each with the name it has there: replicas write the same bytes under the names of their own
    ranks."""

    manifest: bytes
    holders: dict[str, dict[int, str]]


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
        for rank, (_, lines) in enumerate(answers):
            for line in lines:
                self._say(
                    f"passing over a copy in memory (rank {rank}'s node): {line}", logging.WARNING
                )
        copies = {copy for held, _ in answers for copy in held}
        self._writers = {
            step: name for name, step in sorted(copies) if self.lineage.holds(name, step)
        }
        if left := {step for name, step in copies if not self.lineage.holds(name, step)}:
            listed = ", ".join(map(str, sorted(left)))
            self._say(
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
        held = [
            found
            for found in self._mine
            if found.record["incarnation"] == self._writers[step] and found.step == step
        ]
        chosen = self._choose(step, held)
        manifest = Manifest.decode(chosen.manifest, f"{step_name(step)} in memory")
        view = os.path.join(self.folder, f".view-{self.group.broadcast(os.urandom(8).hex())}")
        self._view = view
        own = {name: found.folder for found in held for name in found.record["files"]}

        def link() -> None:
            if self.nodes.is_first:
                os.makedirs(view, mode=0o700)
                for name, nodes in chosen.holders.items():
                    if there := nodes.get(self.nodes.own):
                        os.link(
                            os.path.join(own[there], there),
                            os.path.join(view, name),
                            follow_symlinks=False,
                        )

        try:
            self._agree(link)
            sent = self._fetch(manifest, chosen.holders, view, model, optimizer)
        except BaseException:
            self.close()
            raise
        self._say(
            f"{step_name(step)} is in memory: {len(manifest.files)} files, {sent / 2**20:.1f} MiB "
            "sent to nodes without them"
        )
        if lost := _lost_generators(manifest):
            self._say(
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
        return [
            f.folder
            for f in self._mine
            if f.step == step and f.record["incarnation"] == self._writers.get(step)
        ]

    def _choose(self, step: int, held: Sequence[Found]) -> _Chosen:
        """A whole copy of sound files. Rank 0 chooses, the holders check, until nothing is
        wrong."""
        what = f"{step_name(step)} in memory"
        # What all ranks' records have in common is large, so each node sends it once.
        message = [
            (f.rank, f.record["tensors"], f.record["common"]) if n == 0 else (f.rank, None, None)
            for n, f in enumerate(held)
        ]
        parts = [(found.record["parts"], found.record["files"]) for found in held]
        answers = self.group.gather((self.nodes.own, message, parts) if held else None)
        refused: set[str] = set()
        while True:
            chosen: _Chosen | DamagedCheckpointError | None = None
            if self.group.rank == 0:
                try:
                    chosen = _assemble(
                        [answer for answer in answers if answer is not None], refused, what
                    )
                except DamagedCheckpointError as fault:
                    chosen = DamagedCheckpointError(str(fault))
                except (TypeError, ValueError, KeyError, IndexError) as fault:
                    chosen = DamagedCheckpointError(
                        f"{what}: its records are damaged ({describe_error(fault)})"
                    )
            chosen = self.group.broadcast(chosen)
            if isinstance(chosen, DamagedCheckpointError):
                raise chosen
            assert chosen is not None
            damaged = self._check(chosen, held, what)
            if not damaged:
                return chosen
            for reason in damaged.values():
                self._say(f"passing over a file of {what}: {reason}", logging.WARNING)
            refused |= set(damaged)

    def _check(self, chosen: _Chosen, held: Sequence[Found], what: str) -> dict[str, str]:
        """File -> fault, over all nodes; each node's ranks share its files. Only the first rank of
        a node has their locations, so it sends them to the others."""
        where = {name: found.folder for found in held for name in found.record["files"]}
        told = self.group.all_gather(where if self.nodes.is_first and held else {})
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
            lacking |= {
                (name, self.nodes.of[rank])
                for name in names
                if self.nodes.of[rank] not in holders[name]
            }
        plan = []  # (file, sending rank, receiving rank): the nodes' ranks take turns
        for number, (name, node) in enumerate(sorted(lacking)):
            having = list(holders[name])
            senders, receivers = (
                self.nodes.ranks(having[number % len(having)]),
                self.nodes.ranks(node),
            )
            plan.append((name, senders[number % len(senders)], receivers[number % len(receivers)]))
        targets: dict[str, Tensor] = {}

        def allocate() -> None:
            for name, _, receiver in plan:
                if receiver == self.group.rank:
                    targets[name] = map_new_file(
                        os.path.join(view, name), manifest.files[name].bytes
                    )

        self._agree(allocate)
        # All walk through the plan in the same order, so the next transfer always has both of its
        # ends waiting.
        for name, sender, receiver in plan:
            size = manifest.files[name].bytes
            if self.group.rank == sender:
                source = LocalFolder(view).source(name)
                for begin in range(0, size, PIECE):
                    piece = torch.frombuffer(
                        source.buffer(begin, min(begin + PIECE, size)), dtype=torch.uint8
                    )
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

        self._agree(verify)
        return sum(manifest.files[name].bytes for name, _, _ in plan)

    def _agree(self, work: Callable[[], None]) -> None:
        error = None
        try:
            work()
        except (OSError, RuntimeError, ValueError) as fault:
            error = f"rank {self.group.rank}: {describe_error(fault)}"
        if errors := [answer for answer in self.group.all_gather(error) if answer]:
            raise DamagedCheckpointError("; ".join(errors[:4]))

    def _say(self, text: str, level: int = logging.INFO) -> None:
        if self.group.rank == 0:
            log.log(level, "%s", text)


# Tensors that not every rank has
_OWN = ("rng/", REPLICA)


def _assemble(answers: Sequence[Any], refused: set[str], what: str) -> _Chosen:
    """The manifest of the copy that the nodes' files make up together. Raises
    `DamagedCheckpointError`, naming a tensor that is not whole and the ranks whose copies are
    missing."""
    pieces: dict[str, dict[Region, dict[Region, str]]] = {}
    described: dict[str, tuple[str, tuple[int, ...]]] = {}
    files: dict[str, tuple[StoredFile, int]] = {}
    ranks: set[int] = set()
    common: Any = None
    for node, messages, contents in answers:
        for (rank, tensors, shared), (parts, stored) in zip(messages, contents, strict=True):
            ranks.add(rank)
            if shared is not None and common is None:
                common = shared
                described |= {name: (dtype, tuple(shape)) for name, dtype, shape in tensors}
            for name, file in stored.items():
                files[name] = StoredFile(file["bytes"], file["digest"]), node
            for name, dtype, shape, offsets, lengths, base_offsets, base_lengths, file in parts:
                base = Region(tuple(base_offsets), tuple(base_lengths))
                if name.startswith(_OWN):
                    if file in refused:
                        continue
                    described[name] = dtype, tuple(shape)
                if base.numel and file not in refused:
                    region = Region(tuple(offsets), tuple(lengths))
                    regions = pieces.setdefault(name, {}).setdefault(base, {})
                    # the owner's node has its own
                    if region not in regions or name.startswith(f"rng/{rank:05d}/"):
                        regions[region] = file
    if common is None:
        raise DamagedCheckpointError(f"{what}: no node holds a part of it")
    lost = sorted(set(range(common["world_size"])) - ranks)
    tensors = {}
    gone_replicas: set[str] = set()
    for name, (dtype, shape) in described.items():
        chunks = [
            chunk
            for base, regions in pieces.get(name, {}).items()
            for chunk in _cover(base, regions)
        ]
        if sum(chunk.region.numel for chunk in chunks) != Region.whole(shape).numel:
            # Training goes on without a replica that is gone.
            if name.startswith(REPLICA):
                gone_replicas.add(name.split("/")[1])
                continue
            gone = f"; no copy is left of ranks {lost}" if lost else ""
            raise DamagedCheckpointError(
                f"{what} is incomplete: parts of {printable(name)} are on no node that is "
                f"left{gone}"
            )
        tensors[name] = StoredTensor(dtype, shape, tuple(chunks))
    # Half of a replica is of no use: some of its tensors may be on several nodes.
    for name in [name for name in tensors if name.startswith(REPLICA)]:
        if name.split("/")[1] in gone_replicas:
            del tensors[name]
    taken = {chunk.file for tensor in tensors.values() for chunk in tensor.chunks}
    manifest = Manifest(
        **{
            key: common[key]
            for key in ("step", "state", "layout", "mesh", "world_size", "optimizer", "tied")
        },
        tensors=tensors,
        files={name: file for name, (file, _) in sorted(files.items()) if name in taken},
    )
    content = manifest.encode()
    Manifest.decode(content, what)
    same: dict[StoredFile, dict[int, str]] = {}
    for name, (file, node) in sorted(files.items()):
        if name not in refused:
            same.setdefault(file, {}).setdefault(node, name)
    return _Chosen(content, {name: same[file] for name, file in manifest.files.items()})


def _cover(base: Region, regions: Mapping[Region, str]) -> list[Chunk]:
    """Parts that make up ``base`` exactly, or nothing. Nodes may have cut it in different numbers
    of parts, always by rows."""
    if not base.lengths or base in regions:
        return [Chunk(regions[base], base)] if base in regions else []
    begin, end = base.offsets[0], base.offsets[0] + base.lengths[0]
    reached: dict[int, Region | None] = {begin: None}
    for region in sorted(regions, key=lambda region: region.offsets[0]):
        if region.offsets[0] in reached:
            reached.setdefault(region.offsets[0] + region.lengths[0], region)
    chunks: list[Chunk] = []
    while (last := reached.get(end)) is not None:
        chunks.append(Chunk(regions[last], last))
        end = last.offsets[0]
    return chunks if end == begin else []


def _lost_generators(manifest: Manifest) -> list[int]:
    found = {name.split("/")[1] for name in manifest.tensors if name.startswith("rng/")}
    return [rank for rank in range(manifest.world_size) if f"{rank:05d}" not in found]


def _needed(
    manifest: Manifest, model: nn.Module, optimizer: torch.optim.Optimizer | None, group: Group
) -> set[str]:
    """The files in which this rank's parts of model, optimizer and random generators are."""
    here = model_tensors(model)

    def files(name: str, region: Region) -> Iterable[str]:
        return {
            chunk.file
            for chunk in manifest.tensors[name].chunks
            if chunk.region.intersect(region) or not region.lengths
        }

    found: set[str] = set()
    for name, tensor in here.items():
        stored = (
            f"model/{name}"
            if f"model/{name}" in manifest.tensors
            else f"model/{manifest.tied.get(name)}"
        )
        if stored in manifest.tensors and manifest.tensors[stored].shape == tuple(tensor.shape):
            found |= set(files(stored, local_region(tensor)))
    for stored in needed_names(model, manifest.tensors):
        shape = manifest.tensors[stored].shape
        region = Region.whole(shape)
        # The name of the parameter follows the kind of state.
        owner = next((here[name] for name in _endings(stored) if name in here), None)
        if owner is not None and shape == tuple(owner.shape):
            region = local_region(owner)
        if optimizer is not None or "optimizer/" not in stored:
            found |= set(files(stored, region))
    for stored, description in manifest.tensors.items():
        kind, _, rest = stored.partition("/")
        if (
            kind == "rng"
            and manifest.world_size == group.size
            and rest.startswith(f"{group.rank:05d}/")
        ):
            found |= set(files(stored, Region.whole(description.shape)))
    return found


def _endings(name: str) -> list[str]:
    """What is left of ``name`` after each of its slashes, the longest first."""
    parts = name.split("/")
    return ["/".join(parts[number:]) for number in range(1, len(parts))]
