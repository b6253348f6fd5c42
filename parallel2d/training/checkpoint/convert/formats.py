"""Weights to convert (`Source`) in three formats: our checkpoints, single safetensors files, and
``torch.save`` files. Only one tensor is in memory at a time."""

from __future__ import annotations

import json
import os
import re
import struct
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from parallel2d.base.errors import ConfigError
from parallel2d.base.files import is_count, printable, tensor_file
from parallel2d.base.files.folder import LocalFolder
from parallel2d.base.files.limited_child import try_in_child
from parallel2d.base.files.tensor_file import DTYPES, ByteSource, DamagedCheckpointError, Entry
from parallel2d.parallel.weights.geometry import Region
from parallel2d.training.checkpoint.manifest import (
    MANIFEST,
    Chunk,
    Manifest,
    StoredFile,
    StoredTensor,
    check_optimizer_facts,
    from_json,
    is_list_of_names,
    require,
)
from parallel2d.training.checkpoint.reader import Checkpoint
from parallel2d.training.checkpoint.state import names_under
from parallel2d.training.checkpoint.storage import LocalStore

# Fields of a `Manifest` that files of other formats store as JSON next to the tensors, with their
# types
_FACTS = {
    "step": int,
    "state": dict,
    "layout": dict,
    "optimizer": dict,
    "tied": dict,
    "buffers": list,
}


@dataclass
class Source:
    """Weights to convert, with fields of their `Manifest` (see `_FACTS`)."""

    kind: str
    # (dtype name, shape) by name in our format: ``model/...``, ``optimizer/...``, ``ema/...``
    tensors: dict[str, tuple[str, tuple[int, ...]]]
    read: Callable[[str], Tensor]
    step: int = 0
    state: dict[str, Any] = field(default_factory=dict)
    layout: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)
    buffers: list[str] = field(default_factory=list)

    def facts_text(self) -> str:
        return json.dumps({key: getattr(self, key) for key in _FACTS}, separators=(",", ":"))

    def write_file(self, path: str, names: Mapping[str, str], **metadata: str) -> StoredFile:
        """Write one safetensors file.

        Args:
            names: name -> name in the file. The widest dtypes must come first, so that all values
                are aligned.
        """
        described = []
        for name, stored in names.items():
            described.append((stored, *self.tensors[name]))

        def blocks() -> Iterator[bytes | memoryview]:
            yield tensor_file.encode_header(described, {"format": "pt", **metadata})
            for name in names:
                yield _values_of(self.read(name))

        folder, file = os.path.split(path)
        return LocalStore(folder).write(folder, file, blocks())


def _values_of(tensor: Tensor) -> memoryview:
    return memoryview(tensor_file.bytes_of(tensor.detach()).numpy().data)


def facts_in(text: Any, what: str) -> dict[str, Any]:
    """Parse the result of `Source.facts_text`. Returns an empty dict if ``text`` is not a string,
    as in files of other writers."""
    if not isinstance(text, str):
        return {}
    content = tensor_file.parse_json(text.encode(), f"{what}: metadata")
    facts = {}
    for key in _FACTS:
        if key in content:
            facts[key] = content[key]
    try:
        require(_check_kinds(facts))
    except ValueError as error:
        raise DamagedCheckpointError(f"{what}: {error}") from None
    return facts


def _check_kinds(facts: Mapping[str, Any]) -> Iterator[tuple[object, str]]:
    for key, value in facts.items():
        yield type(value) is _FACTS[key], f"{key} is not of type {_FACTS[key].__name__}"
    yield is_count(facts.get("step", 0)), "step is not a whole number"
    has_names = all(isinstance(name, str) for name in facts.get("tied", {}).values())
    yield has_names, "tied is not a mapping of names"
    yield is_list_of_names(facts.get("buffers", [])), "buffers is not a list of names"
    yield from check_optimizer_facts(facts.get("optimizer", {}))


def read_ours(path: str) -> Source:
    """Open and verify the checkpoint at a path or address."""
    # The files are not mapped, because the memory of a mapping would grow to the size of all files.
    checkpoint = Checkpoint.open(path, mapped=False)
    checkpoint.verify()
    described = {}
    for name in names_under(["model", "optimizer", "ema"], checkpoint.tensors):
        described[name] = checkpoint.tensors[name].dtype, checkpoint.tensors[name].shape
    facts = {}
    for key in _FACTS:
        facts[key] = getattr(checkpoint.manifest, key)
    return Source("parallel2d", described, checkpoint.read, **facts)


def write_ours(source: Source, folder: str, shard_bytes: int) -> None:
    """Write a checkpoint with files of ``shard_bytes``."""
    facts = {}
    for key in _FACTS:
        facts[key] = getattr(source, key)
    manifest = Manifest(**facts, mesh={"replicate": 1, "shard": 1, "tensor": 1})
    os.mkdir(folder)
    files: dict[str, list[str]] = {}
    room = 0
    for name, (dtype, shape) in source.tensors.items():
        region = Region.of_shape(shape)
        size = region.numel * DTYPES[dtype].itemsize
        # A tensor that does not fit into the current file starts a new file.
        if size > room:
            file = f"part-{len(files):05d}.safetensors"
            files[file] = []
            room = shard_bytes
        chunks: tuple[Chunk, ...] = ()
        # Tensors without elements are recorded only in the manifest.
        if size:
            files[file].append(name)
            room -= size
            chunks = (Chunk(file, region),)
        manifest.tensors[name] = StoredTensor(dtype, shape, chunks)
    for file, names in files.items():
        path = os.path.join(folder, file)
        manifest.files[file] = source.write_file(path, dict(zip(names, names, strict=True)))
    content = manifest.encode()
    # A manifest that cannot be read again must not be written.
    Manifest.decode(content)
    LocalStore(folder).write(folder, MANIFEST, [content])


def read_safetensors(path: str) -> Source:
    """Open a safetensors file of any writer. Files that this package has written have the fields of
    `_FACTS` in their header."""
    folder, name = os.path.split(path)
    source = LocalFolder(folder or ".", mapped=False).source(name)
    header, metadata = tensor_file.read_file(source, name)
    # In a safetensors file, only the names of optimizer state have a prefix.
    places = {}
    for flat, entry in header.items():
        places[flat if flat.startswith("optimizer/") else f"model/{flat}"] = source, entry
    return source_of("safetensors", places, facts_in(metadata.get("parallel2d"), name))


def write_safetensors(source: Source, path: str) -> None:
    """Write one safetensors file with the fields of `_FACTS` in its header."""
    names = {}
    for name in source.tensors:
        names[name] = name.removeprefix("model/")
    source.write_file(path, names, parallel2d=source.facts_text())


def source_of(
    kind: str, places: Mapping[str, tuple[ByteSource, Entry]], facts: Mapping[str, Any]
) -> Source:
    """Return a source with tensors of safetensors files. ``places``: the file and the header entry
    of each tensor, by name."""
    described = {name: (entry.dtype, entry.shape) for name, (_, entry) in places.items()}

    def read(name: str) -> Tensor:
        source, entry = places[name]
        # A tensor without dims counts as one row.
        return tensor_file.read_rows(source, entry, 0, (*entry.shape, 1)[0])

    return Source(kind, described, read, **facts)


# Tensors may share bytes of the file. Their total size may be at most this multiple of the file
# size; a total of `_SMALL` bytes is always allowed.
_REPEATED, _SMALL = 4, 2**20


def read_torch(path: str) -> Source:
    """Open a ``torch.save`` file of any writer, mapped from disk. Raises `ConfigError` unless it
    contains only weights.

    ``torch.load(weights_only=True)`` accepts only tensors and built-in containers. A file can still
    demand unlimited memory or time: a few bytes can describe an array of terabytes, or a key that
    takes years to hash. Therefore a child process with limits on memory and time opens the file
    first.
    """

    def open_alone() -> None:
        # A forked process lacks the threads of torch's pool, and an operation that uses them would
        # wait forever.
        torch.set_num_threads(1)
        _open(path)

    try_in_child(path, os.path.getsize(path), open_alone)
    tensors, facts = _open(path)
    described = {}
    first: dict[Any, str] = {}
    for name, tensor in tensors.items():
        # Weights with the same address and layout are tied. Empty tensors have no address to
        # compare.
        place = tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
        shared = tensor.numel() and name.startswith("model/")
        if shared and first.setdefault(place, name) != name:
            tied = facts.setdefault("tied", {})
            tied[name.removeprefix("model/")] = first[place].removeprefix("model/")
        else:
            described[name] = tensor_file.DTYPE_NAMES[tensor.dtype], tuple(tensor.shape)
    return Source(
        "torch", described, lambda name: tensors[name].resolve_conj().resolve_neg(), **facts
    )


def _open(path: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors of a ``torch.save`` file by name, and its fields of `_FACTS`."""
    label, size = os.path.basename(path), os.path.getsize(path)
    tensors, facts = _interpret(load_torch(path), label)
    total = sum(tensor.nbytes for tensor in tensors.values())
    if total > _REPEATED * size + _SMALL:
        raise ConfigError(
            f"{label} has {size} bytes, and its tensors would take {total}: they "
            "repeat their values (expand); save them with .contiguous() if that is meant"
        )
    return tensors, facts


def load_torch(path: str) -> Any:
    """Load a ``torch.save`` file with tensors mapped from disk. Raises `ConfigError` for a file
    that cannot be read without executing code."""
    try:
        with open(path, "rb") as file:
            # torch before 1.6 did not write zip archives. torch's reader distinguishes the two
            # formats in the same way.
            is_archive = file.read(4) == b"PK\x03\x04"
        if is_archive:
            with zipfile.ZipFile(path) as archive:
                # With mmap, torch would interpret compressed bytes as values.
                if any(each.compress_type != zipfile.ZIP_STORED for each in archive.infolist()):
                    raise ValueError("it is a compressed archive, which torch.save does not write")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a rejected file gets a single error
            return torch.load(path, map_location="cpu", weights_only=True, mmap=is_archive)
    except Exception as error:  # torch's reader may raise anything
        # torch's message also advises to load the file without these checks. This advice is
        # removed.
        reason = str(error).rpartition("WeightsUnpickler error: ")[2].strip() or str(error)
        line = (reason or type(error).__name__).splitlines()[0]
        text = re.split(r"\. (?:In PyTorch|This file|Please)", line)[0]
        raise ConfigError(
            f"{os.path.basename(path)} does not contain only weights, and is not loaded: "
            f"{printable(text, 200)}"
        ) from None


def _interpret(content: Any, label: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors and the fields of `_FACTS` in ``content``: a model's ``state_dict``, or a
    dict with this ``state_dict`` as ``model``."""
    facts: dict[str, Any] = {}
    model, moments = content, {}
    if isinstance(content, dict) and isinstance(content.get("model"), dict):
        model = content["model"]
        facts = facts_in(content.get("parallel2d"), label)
        moments = _optimizer_by_name(content.get("optimizer"), content.get("optimizer_names"))
    if not isinstance(model, dict):
        raise ConfigError(f"{label} holds a {type(model).__name__}, not a dict of tensors")
    found = {f"model/{name}": tensor for name, tensor in model.items()} | moments
    for name, tensor in found.items():
        if not isinstance(tensor, Tensor) or tensor.layout != torch.strided or tensor.is_meta:
            raise ConfigError(
                f"{label} does not contain only weights: {printable(name)} is not a plain tensor"
            )
        dtype = tensor_file.DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype))
        tensor_file.check_description(name, dtype, list(tensor.shape), label)
    return found, facts


def _optimizer_by_name(optimizer: Any, names: Any) -> dict[str, Tensor]:
    """Return the tensors of an optimizer's ``state_dict``, named by key and parameter."""
    if optimizer is None:
        return {}
    found = {}
    try:
        name_of = dict(enumerate(names))
        for number, entries in optimizer["state"].items():
            for key, value in entries.items():
                if isinstance(value, Tensor):
                    found[f"optimizer/{key}/{name_of[number]}"] = value
    except (AttributeError, KeyError, TypeError):
        raise ConfigError(
            "the optimizer's state needs optimizer_names, the parameters' names in order"
        ) from None
    return found


def write_torch(source: Source, path: str) -> None:
    """Write the model's ``state_dict``. With optimizer state, write a dict with both states in the
    form of ``load_state_dict``, and with the names of the optimizer's numbered parameters."""
    model, names = {}, {}
    state: dict[str, dict[str, Any]] = {}
    # The model is saved with fake tensors, which have no values: torch only reserves space in the
    # file.
    with FakeTensorMode():
        for full, (dtype, shape) in source.tensors.items():
            fake = torch.empty(shape, dtype=DTYPES[dtype])
            names[id(fake)] = full
            kind, _, name = full.partition("/")
            if kind == "model":
                model[name] = fake
            else:
                key, _, name = name.partition("/")
                state.setdefault(name, {})[key] = fake
    model |= {name: model[first] for name, first in source.tied.items() if first in model}
    content: dict[str, Any] = model
    if source.optimizer:
        content = {"model": model, "parallel2d": source.facts_text()}
        content |= _numbered(source.optimizer, state)
    with torch.serialization.skip_data(materialize_fake_tensors=True):
        # torch derives a name in the archive from the file name, which fails for `.name`.
        with open(path, "wb") as file:
            torch.save(content, file)
    # torch numbers the tensors in the order of their first occurrence. Tied tensors occur more than
    # once.
    fakes = dict.fromkeys(map(id, filter(torch.is_tensor, tree_leaves(content))))
    with zipfile.ZipFile(path, "a") as archive, open(path, "r+b") as file:
        entries = {entry.filename.partition("/")[2]: entry for entry in archive.infolist()}
        for number, fake_id in enumerate(fakes):
            data = _values_of(source.read(names[fake_id]))
            entry = entries[f"data/{number}"]
            # The values follow a header of 30 bytes, a name and an extra field. The last four bytes
            # of this header are the lengths of the name and the extra field.
            file.seek(entry.header_offset + 26)
            file.seek(sum(struct.unpack("<HH", file.read(4))), os.SEEK_CUR)
            file.write(data)
            entry.CRC = zlib.crc32(data)
        # Setting the comment makes zipfile rewrite its directory with these checksums.
        archive.comment = b""
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def _numbered(optimizer: Mapping[str, Any], state: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return an optimizer's ``state_dict``, which refers to parameters by number, and the parameter
    names in this order."""
    names: list[str] = []
    groups: list[dict[str, Any]] = []
    for group in optimizer.get("groups", []):
        first = len(names)
        names += group["parameters"]
        settings = from_json(group.get("settings", {}))
        groups.append({**settings, "params": list(range(first, len(names)))})
    for name, plain in from_json(optimizer.get("scalars", {})).items():
        state.setdefault(name, {}).update(plain)
    by_number = {}
    for number, name in enumerate(names):
        if name in state:
            by_number[number] = state[name]
    return {"optimizer": {"state": by_number, "param_groups": groups}, "optimizer_names": names}
