"""Puts a copy together from the records of all nodes: `assemble`, which needs no communication."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from parallel2d.base.exchange import sendable
from parallel2d.base.files.tensor_file import DamagedCheckpointError, printable
from parallel2d.parallel.weights.geometry import Region
from parallel2d.training.checkpoint.manifest import PLAIN, Chunk, Manifest, StoredFile, StoredTensor
from parallel2d.training.checkpoint.state import REPLICA

# Tensors that not every rank has
_OWN = ("rng/", REPLICA)


@sendable
@dataclass(frozen=True)
class AssembledCopy:
    """A manifest, and for each of its files the nodes that have it, each with the name it has
    there: replicas write the same bytes under the names of their own ranks."""

    manifest: bytes
    holders: dict[str, dict[int, str]]


def assemble(answers: Sequence[Any], refused: set[str], what: str) -> AssembledCopy:
    """The copy that the nodes' files make up together, without those in ``refused``.

    ``answers``: (node, messages, contents) of each node's first rank; a message is (rank, tensors,
    what all ranks' records have in common), the last two once per node; contents are (parts, files)
    of a record. Raises `DamagedCheckpointError`, naming a tensor that is not whole and the ranks
    whose copies are missing.
    """
    inventory = _Inventory(refused)
    for node, messages, contents in answers:
        for message, (parts, files) in zip(messages, contents, strict=True):
            inventory.add(node, message, parts, files)
    if inventory.common is None:
        raise DamagedCheckpointError(f"{what}: no node holds a part of it")
    tensors = _whole_tensors(inventory, what)
    taken: set[str] = set()
    for tensor in tensors.values():
        taken.update(chunk.file for chunk in tensor.chunks)
    every = sorted(inventory.files.items())
    manifest = Manifest(
        **{key: inventory.common[key] for key in PLAIN},
        tensors=tensors,
        files={name: file for name, (file, _) in every if name in taken},
    )
    content = manifest.encode()
    Manifest.decode(content, what)
    same: dict[StoredFile, dict[int, str]] = {}
    for name, (file, node) in every:
        if name not in refused:
            same.setdefault(file, {}).setdefault(node, name)
    return AssembledCopy(content, {name: same[file] for name, file in manifest.files.items()})


class _Inventory:
    def __init__(self, refused: set[str]) -> None:
        self.refused = refused
        self.common: Any = None
        self.ranks: set[int] = set()
        self.described: dict[str, tuple[str, tuple[int, ...]]] = {}  # dtype and whole shape
        self.files: dict[str, tuple[StoredFile, int]] = {}
        # Tensor -> rectangle that the ranks of a node share -> its parts and their files.
        self._pieces: dict[str, dict[Region, dict[Region, str]]] = {}

    def add(self, node: int, message: Any, parts: Sequence[Any], files: Mapping[str, Any]) -> None:
        rank, tensors, common = message
        self.ranks.add(rank)
        if common is not None and self.common is None:
            self.common = common
            self.described |= {name: (dtype, tuple(shape)) for name, dtype, shape in tensors}
        for name, file in files.items():
            self.files[name] = StoredFile(file["bytes"], file["digest"]), node
        for part in parts:
            self._add_part(rank, part)

    def _add_part(self, rank: int, part: Any) -> None:
        name, dtype, shape, offsets, lengths, base_offsets, base_lengths, file = part
        if file in self.refused:
            return
        if name.startswith(_OWN):
            self.described[name] = dtype, tuple(shape)
        base = Region(tuple(base_offsets), tuple(base_lengths))
        if not base.numel:
            return
        region = Region(tuple(offsets), tuple(lengths))
        regions = self._pieces.setdefault(name, {}).setdefault(base, {})
        # The node of a rank has that rank's own random generators.
        if region not in regions or name.startswith(f"rng/{rank:05d}/"):
            regions[region] = file

    def chunks(self, name: str) -> tuple[Chunk, ...]:
        """What there is of a tensor, without overlaps."""
        found: list[Chunk] = []
        for base, regions in self._pieces.get(name, {}).items():
            found += _cover(base, regions)
        return tuple(found)


def _whole_tensors(inventory: _Inventory, what: str) -> dict[str, StoredTensor]:
    tensors = {}
    gone: set[str] = set()
    for name, (dtype, shape) in inventory.described.items():
        chunks = inventory.chunks(name)
        if sum(chunk.region.numel for chunk in chunks) == Region.whole(shape).numel:
            tensors[name] = StoredTensor(dtype, shape, chunks)
        elif name.startswith(REPLICA):
            # Training goes on without a replica that is gone.
            gone.add(_replica_of(name))
        else:
            raise DamagedCheckpointError(
                f"{what} is incomplete: parts of {printable(name)} are on no node that is left"
                f"{_lost_ranks(inventory)}"
            )
    # Half of a replica is of no use: some of its tensors may be on several nodes.
    return {name: tensor for name, tensor in tensors.items() if _replica_of(name) not in gone}


def _replica_of(name: str) -> str:
    """The number of the replica that alone has the tensor, or "" where all have it."""
    return name.split("/")[1] if name.startswith(REPLICA) else ""


def _lost_ranks(inventory: _Inventory) -> str:
    lost = sorted(set(range(inventory.common["world_size"])) - inventory.ranks)
    return f"; no copy is left of ranks {lost}" if lost else ""


def _cover(base: Region, regions: Mapping[Region, str]) -> list[Chunk]:
    """Parts that make up ``base`` exactly, or nothing. Nodes may have cut it in different numbers
    of parts, always by rows."""
    if base in regions:
        return [Chunk(regions[base], base)]
    if not base.lengths:
        return []
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
