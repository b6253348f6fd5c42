"""The format of a checkpoint: `Manifest` lists its files and tensors, and is stored as JSON. The
module `reader` reads the files.

The manifest lists every file with its size and checksum, and every tensor with its stored
rectangles. The checksums detect only accidental damage, because an attacker can recompute them.
Therefore the JSON is treated as untrusted: every name, number and dtype is checked, invalid content
raises an error, and no code from the file is imported or executed.
"""

from __future__ import annotations

import hashlib
import json
import math
import operator
import re
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from parallel2d.base.errors import ConfigError
from parallel2d.base.exchange import sendable
from parallel2d.base.files import is_count, printable, tensor_file
from parallel2d.base.files.tensor_file import DamagedCheckpointError
from parallel2d.parallel.weights.geometry import Region
from parallel2d.training.progress import LARGEST_COUNT, problems_of_state

FORMAT = 1
MANIFEST = "manifest.json"
MAX_BYTES = 96 * 2**20  # about two million chunks, for which a reader needs 2 GiB of memory
_MOST_AXES = 8
TRAINED = "global_batch_size"  # the ``layout`` of a run of the train command always has this key
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}\.safetensors")
_SHA256 = re.compile(r"[0-9a-f]{64}")
# Fields that are stored without conversion
PLAIN = ("step", "state", "layout", "mesh", "world_size", "optimizer", "tied", "buffers")
# The dict types that a manifest can store, and the keys that mark these types in JSON. Other dict
# types, such as defaultdict, and namedtuples have state in addition to their items, and are
# refused.
_DICTS: dict[type, str] = {dict: "$dict", Counter: "$counter", OrderedDict: "$ordered"}
_MARKED = {mark: kind for kind, mark in _DICTS.items()}
# Fields with a value that must be a JSON object
_OBJECTS = ("state", "layout", "mesh", "optimizer", "tied", "tensors", "files")


@sendable
@dataclass(frozen=True, slots=True)
class Chunk:
    """A rectangle of a tensor, and the file that stores it. The key in the file is `chunk_key`."""

    file: str
    region: Region


@sendable
@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor: its dtype by safetensors name, its unsharded shape, and the chunks that tile it."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


@sendable
@dataclass(frozen=True)
class StoredFile:
    """The size of a file in bytes, and its SHA-256 in hex."""

    bytes: int
    sha256: str


@sendable
@dataclass
class Manifest:
    """The checked manifest of a checkpoint."""

    step: int
    # State of the trainer: step, samples, counters
    state: dict[str, Any] = field(default_factory=dict)
    # Facts about the run that saved the checkpoint
    layout: dict[str, Any] = field(default_factory=dict)
    mesh: dict[str, int] = field(default_factory=dict)
    world_size: int = 1
    # Class, parameter groups, and the state that is not stored as tensors
    optimizer: dict[str, Any] = field(default_factory=dict)
    # Other name of a shared parameter -> name under which its values are stored
    tied: dict[str, str] = field(default_factory=dict)
    # Names of the model's tensors that are buffers
    buffers: list[str] = field(default_factory=list)
    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    files: dict[str, StoredFile] = field(default_factory=dict)

    @property
    def state_bytes(self) -> int:
        """The total size of all files in bytes."""
        return sum(file.bytes for file in self.files.values())

    def encode(self) -> bytes:
        """Return the JSON text. Infinity and NaN become strings, because JSON has no such
        numbers."""
        # The position is written for other readers of the file. `decode` reads it from the state.
        content = {"format": FORMAT, "position": self.state.get("samples")}
        content |= {key: getattr(self, key) for key in PLAIN}
        content["files"] = {name: vars(file) for name, file in self.files.items()}
        tensors = {}
        for name, tensor in self.tensors.items():
            chunks = [[c.file, c.region.offsets, c.region.lengths] for c in tensor.chunks]
            tensors[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "chunks": chunks}
        content["tensors"] = tensors
        content = _finite(content)
        content["sha256"] = content_digest(content)
        return json.dumps(content, allow_nan=False, separators=(",", ":")).encode()

    @classmethod
    @tensor_file.without_collector()
    def decode(cls, data: bytes, what: str = MANIFEST, *, local: bool = False) -> Manifest:
        """Decode and check the JSON text. Raises `DamagedCheckpointError`, with ``what`` in its
        message, for any text that `encode` cannot have produced.

        Args:
            local: True if the manifest lists the local shards of one rank, so that the chunks need
                not cover the tensors.
        """
        if len(data) > MAX_BYTES:
            raise DamagedCheckpointError(f"{what}: {len(data)} bytes, more than {MAX_BYTES}")
        content = tensor_file.parse_json(data, what)
        try:
            require(_check_facts(content))
            files = {}
            for name, item in content["files"].items():
                require(_check_file(name, item))
                files[name] = StoredFile(item["bytes"], item["sha256"])
            tensors, stored = {}, content["tensors"]
            tensor_file.check_number(len(stored), what)
            # Entries are converted and removed one at a time, so that the JSON objects and the
            # converted entries are not all in memory together.
            for name in list(stored):
                tensors[name] = _decode_tensor(name, stored.pop(name), files, what, local)
            for name, other in content["tied"].items():
                is_stored = isinstance(other, str) and f"model/{other}" in tensors
                problem = f"{printable(name)} is tied to {printable(other)}, which is not stored"
                require([(is_stored, problem)])
        except DamagedCheckpointError:
            raise
        except ValueError as error:
            raise DamagedCheckpointError(f"{what}: {error}") from None
        return cls(**{key: content[key] for key in PLAIN}, tensors=tensors, files=files)


def require(checks: Iterable[tuple[object, str]]) -> None:
    """Raise ValueError with the text of the first failed check. ``checks`` may be a generator: it
    is not advanced after a failed check, so each check may rely on the earlier checks."""
    for holds, problem in checks:
        if not holds:
            raise ValueError(problem)


def _check_facts(content: dict[str, Any]) -> Iterator[tuple[object, str]]:
    version = content.get("format")
    shown = printable(version)
    yield version == FORMAT, f"format {shown} is not the format {FORMAT} that this version reads"
    digest = content.pop("sha256", None)
    is_same = digest == content_digest(content)
    yield is_same, "its own checksum does not match: it was altered or damaged"
    for key in _OBJECTS:
        yield isinstance(content.get(key), dict), f"{key} is missing or not an object"
    counts: list[Any] = [content.get("step"), content.get("world_size")]
    yield all(map(is_count, counts)), "step and world_size must be whole numbers"
    yield max(counts) <= LARGEST_COUNT, "step or world_size is too large"
    mesh, ranks = content["mesh"], content["world_size"]
    longest = max(map(len, mesh), default=0)
    yield len(mesh) <= _MOST_AXES and longest <= 100, "mesh has too many axes"
    yield all(map(is_count, mesh.values())), "mesh must give whole numbers"
    is_mesh = not mesh or math.prod(mesh.values()) == ranks
    yield is_mesh, f"a mesh of {printable(mesh)} is not one of {ranks} ranks"
    buffers = content.setdefault("buffers", [])  # older checkpoints lack it
    yield is_list_of_names(buffers), "buffers is not a list of names"
    yield from check_optimizer_facts(content["optimizer"])
    # A custom loop may put any values into the state.
    if TRAINED in content["layout"]:
        problems = problems_of_state(content["state"], content["step"])
        yield not problems, f"no run can continue from its state: {'; '.join(problems[:4])}"


def is_list_of_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def check_optimizer_facts(optimizer: dict[str, Any]) -> Iterator[tuple[object, str]]:
    """Yield checks for `require` on the result of `describe_optimizer`, or on an empty dict."""
    groups, scalars = optimizer.get("groups", []), optimizer.get("scalars", {})
    yield isinstance(groups, list), "the optimizer's groups are not a list"
    problem = "the optimizer's groups do not list parameter names"
    for group in groups:
        yield isinstance(group, dict), problem
        yield is_list_of_names(group.get("parameters")), problem
        is_mapping = isinstance(group.get("settings", {}), dict)
        yield is_mapping, "the settings of the optimizer's groups are not a mapping"
    problem = "the optimizer's scalars are not a mapping of names"
    yield isinstance(scalars, dict), problem
    yield all(isinstance(each, dict) for each in scalars.values()), problem


def _check_file(name: str, item: Any) -> Iterator[tuple[object, str]]:
    is_name = _FILE_NAME.fullmatch(name)
    yield is_name, f"{printable(name)!r} cannot be the name of a file of a checkpoint"
    problem = f"the size of {name} is missing or impossible"
    yield isinstance(item, dict), problem
    yield is_count(item.get("bytes")), problem
    problem = f"the checksum of {name} is missing or impossible"
    yield isinstance(item.get("sha256"), str), problem
    yield _SHA256.fullmatch(item["sha256"]), problem


def _decode_tensor(
    name: str, item: Any, files: Mapping[str, StoredFile], what: str, local: bool
) -> StoredTensor:
    match item:
        case {"dtype": dtype, "shape": shape, "chunks": list(listed), **others} if not others:
            tensor_file.check_description(name, dtype, shape, what)
        case _:
            raise ValueError(f"{printable(name)} is not described by dtype, shape and chunks")
    shape = tuple(shape)
    try:
        chunks = tuple([_decode_chunk(chunk, shape, files) for chunk in listed])
        if not local:
            check_tiling(shape, [chunk.region for chunk in chunks])
    except ValueError as error:
        raise ValueError(f"{printable(name)}: {error}") from None
    return StoredTensor(dtype, shape, chunks)


def _decode_chunk(item: Any, shape: tuple[int, ...], files: Mapping[str, StoredFile]) -> Chunk:
    match item:
        case [str(file), list(offsets), list(lengths)] if file in files:
            described = len(offsets) == len(lengths) == len(shape)
        case _:
            raise ValueError("a chunk is not a file of this checkpoint, offsets and lengths")
    if not described or not all(map(is_count, offsets + lengths)):
        raise ValueError("a chunk has impossible offsets or lengths")
    region = Region(tuple(offsets), tuple(lengths))
    ends = map(operator.add, offsets, lengths)
    if any(end > size for end, size in zip(ends, shape, strict=True)):
        raise ValueError(f"a chunk reaches outside of its shape {list(shape)}")
    return Chunk(file, region)


def check_tiling(shape: Sequence[int], regions: Sequence[Region]) -> None:
    """Raise ValueError unless ``regions`` form a grid that covers ``shape`` exactly once. All
    regions must be inside ``shape``. A grid is sufficient, because every layout cuts a tensor along
    complete planes. Takes linear time."""
    require(_tiling(shape, regions))


def _tiling(shape: Sequence[int], regions: Sequence[Region]) -> Iterator[tuple[object, str]]:
    yield all(region.numel for region in regions), "it has an empty chunk"
    cells = min(math.prod(shape), 1)  # number of cells of the grid; 0 for an empty tensor
    for dim, size in enumerate(shape):
        spans = sorted({(region.offsets[dim], region.ends[dim]) for region in regions})
        ends = [0, *(end for _, end in spans)]
        follow = [begin for begin, _ in spans] == ends[:-1] and ends[-1] == size
        yield follow or not cells, f"its chunks do not cover its shape {list(shape)} exactly once"
        cells *= len(spans)
    is_grid = len(regions) == len(set(regions)) == cells
    yield is_grid, f"its chunks are not a grid over its shape {list(shape)}, or overlap"


def content_digest(content: Mapping[str, Any]) -> str:
    """Return the SHA-256 of the sorted JSON of a manifest without its ``sha256``."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def chunk_key(name: str, shape: Sequence[int], region: Region) -> str:
    """Return a chunk's key in its file: the tensor's name, with ``@`` and the offsets if the chunk
    is not the complete tensor."""
    if region.lengths == tuple(shape):
        return name
    return f"{name}@{','.join(map(str, region.offsets))}"


def to_json(value: Any, place: str) -> Any:
    """Return a copy of ``value`` that JSON can store and `from_json` can restore.

    Accepts None, booleans, numbers, strings, lists, tuples, dicts, `Counter` and `OrderedDict`.
    NumPy's floats become Python floats. Raises `ConfigError` for any other value. ``place``: path
    of keys to the value, for this error.
    """
    kind = type(value)
    match value:
        # Refused below. Without this case, an IntEnum or a StrEnum would match int() or str().
        case Enum():
            pass
        case float() if not math.isfinite(value):
            return {"$float": str(float(value))}
        case None | bool() | int() | float() | str():
            return value
        case list() if kind is list:
            found = []
            for index, item in enumerate(value):
                found.append(to_json(item, f"{place}[{index}]"))
            return found
        case tuple() if kind is tuple:
            return {"$tuple": to_json(list(value), place)}
        case dict() if kind in _DICTS:
            pairs = []
            for key, item in value.items():
                pairs.append([key, to_json(item, f"{place}.{key}")])
            # A caller's key such as $tuple must not be mistaken for a marker of this format.
            is_plain = all(isinstance(key, str) and not key.startswith("$") for key, _ in pairs)
            if kind is dict and is_plain:
                return dict(pairs)
            return {_DICTS[kind]: [[to_json(key, place), item] for key, item in pairs]}
    raise ConfigError(
        f"{place} is a {kind.__name__}: a checkpoint keeps numbers, strings, lists, tuples and "
        "dicts"
    )


def from_json(value: Any) -> Any:
    """Restore the value from which `to_json` produced ``value``. Raises `DamagedCheckpointError`
    for invalid JSON objects."""
    try:
        match value:
            case list():
                return list(map(from_json, value))
            case {"$float": str(text)}:
                return float(text)
            case {"$tuple": list(items)}:
                return tuple(map(from_json, items))
            case dict() if marks := _MARKED.keys() & value:
                (mark,) = marks
                items = []
                for key, item in value[mark]:
                    items.append((from_json(key), from_json(item)))
                return _MARKED[mark](dict(items))
            case dict():
                found = {}
                for key, item in value.items():
                    found[key] = from_json(item)
                return found
    except (TypeError, ValueError) as error:
        raise DamagedCheckpointError(f"{MANIFEST}: a value is not readable: {error}") from None
    return value


def _finite(value: Any) -> Any:
    match value:
        case float() if not math.isfinite(value):
            return str(value)
        case dict():
            found = {}
            for key, item in value.items():
                found[str(key)] = _finite(item)
            return found
        case list() | tuple():
            return list(map(_finite, value))
        case None | bool() | int() | float() | str():
            return value
    raise TypeError(
        "a checkpoint's manifest keeps numbers, strings, lists and dicts, not "
        f"{type(value).__name__}"
    )
