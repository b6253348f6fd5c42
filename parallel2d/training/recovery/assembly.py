"""Puts a copy together from the records of all nodes: `assemble`, which needs no communication."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from parallel2d.base.exchange import sendable
from parallel2d.base.files.tensor_file import DamagedCheckpointError, printable
from parallel2d.parallel.weights.geometry import Region
from parallel2d.training.checkpoint.manifest import PLAIN, Chunk, Manifest, StoredFile, StoredTensor
from parallel2d.training.checkpoint.state import REPLICA, names_under

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
        self.pieces: dict[str, dict[Region, dict[Region, str]]] = {}

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
        regions = self.pieces.setdefault(name, {}).setdefault(base, {})
        # The node of a rank has that rank's own random generators.
        if region not in regions or name.startswith(f"rng/{rank:05d}/"):
            regions[region] = file


def _whole_tensors(inventory: _Inventory, what: str) -> dict[str, StoredTensor]:
    tensors = {}
    gone: set[str] = set()
    for name, (dtype, shape) in inventory.described.items():
        chunks: list[Chunk] = []
        for base, regions in inventory.pieces.get(name, {}).items():
            chunks += _cover(base, regions)
        if sum(chunk.region.numel for chunk in chunks) == Region.whole(shape).numel:
            tensors[name] = StoredTensor(dtype, shape, tuple(chunks))
        elif name.startswith(REPLICA):
            # Training goes on without a replica that is gone.
            gone.add("/".join(name.split("/")[:2]))
        else:
            lost = sorted(set(range(inventory.common["world_size"])) - inventory.ranks)
            whose = f"; no copy is left of ranks {lost}" if lost else ""
            raise DamagedCheckpointError(
                f"{what} is incomplete: parts of {printable(name)} are on no node that is left"
                f"{whose}"
            )
    # Half of a replica is of no use: some of its tensors may be on several nodes.
    for name in names_under(gone, list(tensors)):
        del tensors[name]
    return tensors


def _cover(base: Region, regions: Mapping[Region, str]) -> list[Chunk]:
    """Parts that make up ``base`` exactly, or nothing. Nodes may have cut it in different numbers
    of parts, always by rows."""
    if base in regions:
        return [Chunk(regions[base], base)]
    if not base.lengths:
        return []
    begin, end = base.offsets[0], base.offsets[0] + base.lengths[0]
    # Row -> the part that ends there, for rows up to which parts follow each other from the first.
    reached: dict[int, Region | None] = {begin: None}
    for region in sorted(regions, key=lambda region: region.offsets[0]):
        if region.offsets[0] in reached:
            reached.setdefault(region.offsets[0] + region.lengths[0], region)
    chunks: list[Chunk] = []
    while (last := reached.get(end)) is not None:
        chunks.append(Chunk(regions[last], last))
        end = last.offsets[0]
    return chunks if end == begin else []
