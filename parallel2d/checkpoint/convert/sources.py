"""Reads weights in any supported format, under our names, one tensor at a time: `open_source`.

There are five formats: our checkpoint, one safetensors file, a Hugging Face folder, a
``torch.save`` file, and a run directory, which stands for its newest checkpoint. Files are read by
range and never mapped, so that memory holds one tensor and not, page by page, the file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from parallel2d.checkpoint.archive import Checkpoint
from parallel2d.checkpoint.convert import huggingface_format as huggingface
from parallel2d.checkpoint.convert.torch_file import TorchReader, offset_in_file, tensors_of
from parallel2d.checkpoint.manifest import NAME as MANIFEST
from parallel2d.checkpoint.manifest import check_depth
from parallel2d.checkpoint.storage import find_checkpoint
from parallel2d.errors import ConfigError
from parallel2d.files import is_count
from parallel2d.files.folder import LocalFolder, is_remote
from parallel2d.files.tensor_file import (
    DTYPE_NAMES,
    ByteSource,
    DamagedCheckpointError,
    Entry,
    check_description,
    parse_json,
    printable,
    read_header,
    read_rows,
)
from parallel2d.weights.pretrained import INDEX, SINGLE, read_headers, weight_map

TORCH_SUFFIXES = (".pt", ".pth", ".bin")
MAX_JSON = 64 * 2**20


@dataclass
class Source:
    """Weights to convert. ``tensors``: name in our format (``model/...``, ``optimizer/...``) ->
    (dtype name, shape).

    ``arguments``: the Llama's, as far as the source has them; the other facts are those of a
    `Manifest`.
    """

    kind: str
    tensors: dict[str, tuple[str, tuple[int, ...]]]
    read: Callable[[str], Tensor]
    step: int = 0
    state: dict[str, Any] = field(default_factory=dict)
    layout: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)


def open_source(path: str) -> Source:
    """Recognizes the format. Raises `ConfigError` when it is none that we read."""
    if is_remote(path):
        return _ours(find_checkpoint(path))
    if os.path.isfile(path):
        if path.endswith(".safetensors"):
            return _safetensors(path)
        if path.endswith(TORCH_SUFFIXES):
            return _torch(path)
        raise ConfigError(f"{path}: a file must end in .safetensors or {', '.join(TORCH_SUFFIXES)}")
    if os.path.isdir(path):
        found = find_checkpoint(path)
        if os.path.lexists(os.path.join(found, MANIFEST)):
            return _ours(found)
        if os.path.lexists(os.path.join(path, "config.json")):
            return _hugging_face(path)
        raise ConfigError(
            f"{path} holds neither {MANIFEST} (a checkpoint) nor config.json (a Hugging Face model)"
        )
    raise ConfigError(f"{path}: there is no such file or folder")


def _ours(path: str) -> Source:
    checkpoint = Checkpoint.open(path, mapped=False)
    checkpoint.verify()
    manifest = checkpoint.manifest
    kept = {
        name: t for name, t in manifest.tensors.items() if name.startswith(("model/", "optimizer/"))
    }
    return Source(
        "parallel2d",
        {name: (tensor.dtype, tensor.shape) for name, tensor in kept.items()},
        checkpoint.read,
        manifest.step,
        manifest.state,
        manifest.layout,
        manifest.optimizer,
        manifest.tied,
        huggingface.find_arguments(manifest.layout),
    )


def _safetensors(path: str) -> Source:
    folder = LocalFolder(os.path.dirname(path) or ".", mapped=False)
    name = os.path.basename(path)
    source = folder.source(name)
    header = read_header(source, name)
    facts = _metadata(source, name)
    # Optimizer state is marked in a flat file, and weights are not.
    names = {flat if flat.startswith("optimizer/") else f"model/{flat}": flat for flat in header}
    return Source(
        "safetensors",
        {ours: (header[flat].dtype, header[flat].shape) for ours, flat in names.items()},
        lambda wanted: _whole(source, header[names[wanted]]),
        **facts,
    )


def _metadata(source: ByteSource, what: str) -> dict[str, Any]:
    """The facts that our own writer puts beside the tensors; none in another's file."""
    length = int.from_bytes(bytes(source.buffer(0, 8)), "little")
    metadata = parse_json(bytes(source.buffer(8, 8 + length)), what).get("__metadata__")
    if not isinstance(metadata, dict):
        return {}
    return _facts_in(metadata.get("parallel2d"), what)


def _facts_in(text: Any, what: str) -> dict[str, Any]:
    """What `facts_text` wrote; nothing where another program has written the file."""
    if not isinstance(text, str):
        return {}
    return checked_facts(parse_json(text.encode(), f"{what}: metadata"), what)


def checked_facts(content: dict[str, Any], what: str) -> dict[str, Any]:
    """Step, state, layout, optimizer and ties beside the tensors of a flat file, checked for their
    kinds."""
    kinds: dict[str, type] = {
        "step": int,
        "state": dict,
        "layout": dict,
        "optimizer": dict,
        "tied": dict,
    }
    facts: dict[str, Any] = {key: content[key] for key in kinds if key in content}
    for key, value in facts.items():
        if type(value) is not kinds[key] or (key == "step" and not is_count(value)):
            raise DamagedCheckpointError(f"{what}: {key} is no {kinds[key].__name__}")
    check_depth(facts, what)
    if not all(isinstance(a, str) and isinstance(b, str) for a, b in facts.get("tied", {}).items()):
        raise DamagedCheckpointError(f"{what}: tied is no mapping of names")
    return {**facts, "arguments": huggingface.find_arguments(facts.get("layout"))}


def _whole(source: ByteSource, entry: Entry) -> Tensor:
    return read_rows(source, entry, 0, entry.shape[0] if entry.shape else 1)


def _hugging_face(path: str) -> Source:
    folder = LocalFolder(path, mapped=False)
    what = f"{folder.label}/config.json"
    arguments = huggingface.from_config(
        parse_json(folder.read("config.json", MAX_JSON), what), what
    )
    if not any(os.path.lexists(os.path.join(path, name)) for name in (INDEX, SINGLE)):
        raise ConfigError(
            f"{folder.label} holds no safetensors weights; pickled ones (.bin) are not read"
        )
    headers = read_headers(path)
    places = {}
    for name in [*headers, *weight_map(path)]:
        our = huggingface.ours(name)
        # A table that is computed, not trained.
        if our is None:
            continue
        if name not in headers:
            raise DamagedCheckpointError(
                f"{folder.label}: {printable(name)} is in the index and in no file"
            )
        places[f"model/{our}"] = headers[name]
    tied = {}
    if arguments["tie_embeddings"]:
        places.pop("model/output.weight", None)
        tied = {"output.weight": "embedding.weight"}
    return Source(
        "hf",
        {name: (entry.dtype, entry.shape) for name, (_, entry) in places.items()},
        lambda name: _whole(*places[name]),
        layout={"model": arguments},
        tied=tied,
        arguments=arguments,
    )


def _torch(path: str) -> Source:
    reader = TorchReader(path)
    content: Any = reader.content
    facts: dict[str, Any] = {}
    model, moments = content, {}
    if isinstance(content, dict) and isinstance(content.get("model"), dict):
        model = content["model"]
        facts = _facts_in(content.get("parallel2d"), reader.label)
        moments = _optimizer_by_name(content.get("optimizer"), content.get("optimizer_names"))
    found = {f"model/{name}": tensor for name, tensor in tensors_of(model)} | moments
    reader.check_tensors(found)
    for name, other in _shared(found).items():
        facts.setdefault("tied", {})[name.removeprefix("model/")] = other.removeprefix("model/")
        del found[name]
    described = {}
    for name, tensor in found.items():
        described[name] = DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype)), tuple(tensor.shape)
        check_description(name, described[name][0], list(tensor.shape), reader.label)
    return Source("torch", described, lambda name: reader.read(found[name]), **facts)


def _shared(found: dict[str, Tensor]) -> dict[str, str]:
    """Weights that are one storage: further name -> first name."""
    first: dict[Any, str] = {}
    result = {}
    for name, tensor in found.items():
        if not name.startswith("model/") or not tensor.numel():
            continue
        # A tensor that was not read yet has a place in the file and no address.
        place = offset_in_file(tensor)
        if place is None:
            place = tensor.data_ptr()
        key = (place, tensor.storage_offset(), tensor.shape, tensor.stride())
        if key in first:
            result[name] = first[key]
        first.setdefault(key, name)
    return result


def _optimizer_by_name(optimizer: Any, names: Any) -> dict[str, Tensor]:
    """The tensors of an optimizer's ``state_dict``, whose parameters are numbers, under the
    parameters' names."""
    if optimizer is None:
        return {}
    state = optimizer.get("state") if isinstance(optimizer, dict) else None
    if not isinstance(state, dict) or not _are_names(names):
        raise ConfigError(
            "the optimizer's state needs optimizer_names, the parameters' names in order"
        )
    found = {}
    for number, entries in state.items():
        known = is_count(number, len(names) - 1)
        if not known or not isinstance(entries, dict):
            raise ConfigError(f"the optimizer's state has no parameter {printable(number)}")
        for key, value in entries.items():
            if isinstance(key, str) and isinstance(value, Tensor):
                found[f"optimizer/{key}/{names[number]}"] = value
    return found


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def facts_text(source: Source) -> str:
    """What `checked_facts` reads back."""
    content = {
        key: getattr(source, key) for key in ("step", "state", "layout", "optimizer", "tied")
    }
    return json.dumps(content, separators=(",", ":"))
