"""Weights to convert: `Source`; those of our checkpoints and of single safetensors files."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from parallel2d.base.files import is_count
from parallel2d.base.files.folder import LocalFolder
from parallel2d.base.files.tensor_file import (
    DTYPES,
    ByteSource,
    DamagedCheckpointError,
    Entry,
    encode_header,
    parse_json,
    read_file,
    read_rows,
    tensor_bytes,
)
from parallel2d.parallel.weights.geometry import Region
from parallel2d.training.checkpoint.manifest import (
    MANIFEST,
    Checkpoint,
    Chunk,
    Manifest,
    StoredFile,
    StoredTensor,
    check_optimizer_facts,
    require,
)
from parallel2d.training.checkpoint.state import names_under
from parallel2d.training.checkpoint.storage import LocalStore

# What files of other formats keep beside the tensors, as JSON.
_FACTS = {"step": int, "state": dict, "layout": dict, "optimizer": dict, "tied": dict}


@dataclass
class Source:
    """Weights to convert: ``tensors``, name in our format (``model/...``, ``optimizer/...``) ->
    (dtype name, shape), their values by ``read``, and facts as in a `Manifest`."""

    kind: str
    tensors: dict[str, tuple[str, tuple[int, ...]]]
    read: Callable[[str], Tensor]
    step: int = 0
    state: dict[str, Any] = field(default_factory=dict)
    layout: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)

    def facts_text(self) -> str:
        return json.dumps({key: getattr(self, key) for key in _FACTS}, separators=(",", ":"))

    def write_file(self, path: str, names: Mapping[str, str], **metadata: str) -> StoredFile:
        """Writes one safetensors file. ``names``: name -> name in the file, the widest dtypes
        first, so that packed values are aligned."""
        described = [(stored, *self.tensors[name]) for name, stored in names.items()]

        def blocks() -> Iterator[bytes | memoryview]:
            yield encode_header(described, {"format": "pt", **metadata})
            for name in names:
                yield tensor_bytes(self.read(name))

        folder, file = os.path.split(path)
        return LocalStore(folder).write(folder, file, blocks())


def facts_in(text: Any, what: str) -> dict[str, Any]:
    """What `Source.facts_text` wrote, checked for its kinds; nothing where another program has
    written the file."""
    if not isinstance(text, str):
        return {}
    content = parse_json(text.encode(), f"{what}: metadata")
    facts = {key: content[key] for key in _FACTS if key in content}
    try:
        require(_check_kinds(facts))
    except ValueError as error:
        raise DamagedCheckpointError(f"{what}: {error}") from None
    return facts


def _check_kinds(facts: Mapping[str, Any]) -> Iterator[tuple[object, str]]:
    for key, value in facts.items():
        yield type(value) is _FACTS[key], f"{key} is no {_FACTS[key].__name__}"
    yield is_count(facts.get("step", 0)), "step is no whole number"
    has_names = all(isinstance(name, str) for name in facts.get("tied", {}).values())
    yield has_names, "tied is no mapping of names"
    yield from check_optimizer_facts(facts.get("optimizer", {}))


def read_ours(path: str) -> Source:
    """The checkpoint at a path or address, verified."""
    # Not mapped: memory is to hold one tensor and not, page by page, the file.
    checkpoint = Checkpoint.open(path, mapped=False)
    checkpoint.verify()
    described = {}
    for name in names_under(["model", "optimizer"], checkpoint.tensors):
        described[name] = checkpoint.tensors[name].dtype, checkpoint.tensors[name].shape
    facts = {key: getattr(checkpoint.manifest, key) for key in _FACTS}
    return Source("parallel2d", described, checkpoint.read, **facts)


def write_ours(source: Source, folder: str, shard_bytes: int) -> None:
    """A checkpoint with files of ``shard_bytes``."""
    facts = {key: getattr(source, key) for key in _FACTS}
    manifest = Manifest(**facts, mesh={"replicate": 1, "shard": 1, "tensor": 1})
    os.mkdir(folder)
    files: dict[str, list[str]] = {}
    room = 0
    for name, (dtype, shape) in source.tensors.items():
        region = Region.whole(shape)
        size = region.numel * DTYPES[dtype].itemsize
        # A tensor that is larger than a file may be has one of its own.
        if size > room:
            file = f"part-{len(files):05d}.safetensors"
            files[file] = []
            room = shard_bytes
        chunks: tuple[Chunk, ...] = ()
        # The manifest alone records that a tensor without elements was there.
        if size:
            files[file].append(name)
            room -= size
            chunks = (Chunk(file, region),)
        manifest.tensors[name] = StoredTensor(dtype, shape, chunks)
    for file, names in files.items():
        path = os.path.join(folder, file)
        manifest.files[file] = source.write_file(path, dict(zip(names, names, strict=True)))
    content = manifest.encode()
    # What could not be read again must not be written.
    Manifest.decode(content)
    LocalStore(folder).write(folder, MANIFEST, [content])


def read_safetensors(path: str) -> Source:
    """One file of any writer; the facts are in the header of one of ours."""
    folder, name = os.path.split(path)
    source = LocalFolder(folder or ".", mapped=False).source(name)
    header, metadata = read_file(source, name)
    # Optimizer state is marked in a flat file, and weights are not.
    places = {}
    for flat, entry in header.items():
        places[flat if flat.startswith("optimizer/") else f"model/{flat}"] = source, entry
    return source_of("safetensors", places, facts_in(metadata.get("parallel2d"), name))


def write_safetensors(source: Source, path: str) -> None:
    """One file, with the facts in its header."""
    names = {name: name.removeprefix("model/") for name in source.tensors}
    source.write_file(path, names, parallel2d=source.facts_text())


def source_of(
    kind: str, places: Mapping[str, tuple[ByteSource, Entry]], facts: Mapping[str, Any]
) -> Source:
    """Tensors at these places in safetensors files."""
    described = {name: (entry.dtype, entry.shape) for name, (_, entry) in places.items()}

    def read(name: str) -> Tensor:
        source, entry = places[name]
        # A tensor without dims is one row.
        return read_rows(source, entry, 0, (*entry.shape, 1)[0])

    return Source(kind, described, read, **facts)
