"""Pretrained weights read into a sharded model: each rank reads its own rows of each tensor, a
piece at a time.

A folder as ``save_pretrained`` leaves it (safetensors, one file or several with an index) flows in;
nothing in it is executed, and pickled weights are not read. A parameter that the library stores in
several tensors, the experts of a mixture, is put together from the parts that this rank keeps.
"""

from __future__ import annotations

import fnmatch
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from parallel2d.errors import ConfigError
from parallel2d.files.folder import LocalFolder
from parallel2d.files.tensor_file import (
    ByteSource,
    Entry,
    parse_json,
    printable,
    read_header,
    read_rows,
)
from parallel2d.model_structure import canonical_name
from parallel2d.models import huggingface
from parallel2d.weights.geometry import local_region
from parallel2d.weights.scatter import PIECE_BYTES

log = logging.getLogger(__name__)

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_MAX_INDEX = 64 * 2**20  # bytes


def has_weights(path: str) -> bool:
    """Whether the folder holds safetensors weights. Raises `ConfigError` when it holds only pickled
    ones."""
    if any(os.path.lexists(os.path.join(path, name)) for name in (INDEX, SINGLE)):
        return True
    pickled = [
        name
        for name in ("pytorch_model.bin", "pytorch_model.bin.index.json")
        if os.path.lexists(os.path.join(path, name))
    ]
    if pickled:
        raise ConfigError(
            f"{path} holds {pickled[0]} and no safetensors: a pickle can run code, so it is not "
            "read; save the model again with "
            "safe serialization, or set model.load_weights=false"
        )
    return False


@dataclass(frozen=True)
class _StoredPart:
    """A stored tensor that is the rectangle of a parameter from ``begin`` on; ``entry`` has the
    parameter's number of dims."""

    source: ByteSource
    entry: Entry
    begin: tuple[int, ...]


@dataclass(frozen=True)
class _Stored:
    """All of one parameter: its whole shape in the folder, the parts, and the names of the stored
    tensors."""

    shape: tuple[int, ...]
    parts: list[_StoredPart]
    names: list[str]


@torch.no_grad()
def load_pretrained(model: nn.Module, path: str, *, fresh: Sequence[str] = ()) -> set[str]:
    """Fills ``model``, sharded or not, with the tensors of the folder ``path``; returns the
    canonical names that it had.

    No communication: every rank reads the byte ranges of its own rows, `PIECE_BYTES` at once.
    Values are cast to the dtype of the parameter. A name may carry, or lack, the prefix of the
    model's base (``transformer.``, ``model.``), as published weights do; names and forms that the
    ``transformers`` library changes between file and model (experts stored one by one) are changed
    alike. Parameters outside of the base that the folder does not have, a new head, are left to the
    caller and logged; so are those whose canonical names match a pattern of ``fresh``: adapters.

    Raises `ConfigError` for shapes that differ, for other parameters of the base that the folder
    does not have, and for a pattern of ``fresh`` that matches no parameter.
    """
    places = _places(path)
    prefix = f"{getattr(model, 'base_model_prefix', '') or ''}."
    base = (
        prefix if prefix != "." and isinstance(getattr(model, prefix[:-1], None), nn.Module) else ""
    )
    here: dict[int, tuple[list[str], Tensor]] = {}
    persistent = {canonical_name(name) for name in model.state_dict()}
    for name, tensor in (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ):
        if canonical_name(name) in persistent:
            here.setdefault(id(tensor), ([], tensor))[0].append(canonical_name(name))

    def spellings(names: list[str]) -> list[str]:
        return [
            spelling
            for name in names
            for spelling in (name, name.removeprefix(base), f"{prefix}{name}")
        ]

    stored = {
        name: _Stored(entry.shape, [_StoredPart(source, entry, (0,) * len(entry.shape))], [name])
        for name, (source, entry) in places.items()
    }
    if not all(
        any(spelling in stored for spelling in spellings(names)) for names, _ in here.values()
    ):
        stored = {**_converted(model, places), **stored}
    found: set[str] = set()
    read: set[str] = set()
    missing, wrong = [], []
    for names, tensor in here.values():
        candidates = [spelling for spelling in spellings(names) if spelling in stored]
        if not candidates:
            missing += names[:1]
            continue
        value = stored[candidates[0]]
        read.update(name for candidate in candidates for name in stored[candidate].names)
        found.update(names)
        if value.shape != tuple(tensor.shape):
            wrong.append(
                f"{printable(candidates[0])} has shape {value.shape}, the model's is "
                f"{tuple(tensor.shape)}"
            )
        else:
            _fill(tensor, value.parts)
    everything = [name for names, _ in here.values() for name in names]
    if unmatched := [pattern for pattern in fresh if not fnmatch.filter(everything, pattern)]:
        raise ConfigError(
            f"fresh: pattern {unmatched[0]} matches no parameter of {type(model).__name__}"
        )
    of_base = [
        name
        for name in missing
        if name.startswith(base) and not any(fnmatch.fnmatchcase(name, p) for p in fresh)
    ]
    if wrong or of_base:
        lines = wrong + [f"{name} is missing" for name in of_base]
        raise ConfigError(
            f"{path} does not fit {type(model).__name__}: "
            f"{'; '.join(lines[:5])}{' ...' if lines[5:] else ''}"
        )
    if missing:
        log.warning("%s has no %s: drawn from the seed", path, ", ".join(missing))
    if unread := sorted(set(places) - read):
        log.info(
            "%s: %d tensors are not read, %s the first", path, len(unread), printable(unread[0])
        )
    return found


def _converted(
    model: nn.Module, places: Mapping[str, tuple[ByteSource, Entry]]
) -> dict[str, _Stored]:
    """What the folder holds under the names, and in the form, of a library's model; see
    `huggingface.stored_forms`.

    Raises `ConfigError` when tensors that are stacked differ in shape, and for a form that cannot
    be read in parts.
    """
    try:
        forms = huggingface.stored_forms(model, places)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    found: dict[str, _Stored] = {}
    for name, form in forms.items():
        entries = [[places[stored] for stored in group] for group in form.names]
        parts, at = [], 0
        for group in entries:
            shapes = {entry.shape for _, entry in group}
            if len(shapes) > 1:
                raise ConfigError(
                    f"{printable(form.names[0][0])} and its like, {len(group)} tensors, differ in "
                    f"shape: {shapes}"
                )
            shape = (1,) * form.stacked + group[0][1].shape
            for index, (source, entry) in enumerate(group):
                begin = [0] * len(shape)
                if form.stacked:
                    begin[0] = index
                if form.dim is not None:
                    begin[form.dim] = at
                parts.append(
                    _StoredPart(
                        source, Entry(entry.dtype, shape, entry.begin, entry.end), tuple(begin)
                    )
                )
            at += shape[form.dim] if form.dim is not None else 0
        sizes = {len(group) for group in entries}
        if len(sizes) > 1:
            raise ConfigError(
                f"{printable(name)} is put together from groups of {sorted(sizes)} tensors, which "
                "must be equally many"
            )
        whole = list(parts[0].entry.shape)
        if form.stacked:
            whole[0] = sizes.pop()
        if form.dim is not None:
            whole[form.dim] = at
        found[name] = _Stored(
            tuple(whole), parts, [stored for group in form.names for stored in group]
        )
    return found


def _places(path: str) -> dict[str, tuple[ByteSource, Entry]]:
    label = os.path.basename(os.path.abspath(path))
    files = [SINGLE]
    if os.path.lexists(os.path.join(path, INDEX)):
        folder, name = _behind_links(path, INDEX)
        weights = parse_json(folder.read(name, _MAX_INDEX), f"{label}/{INDEX}").get("weight_map")
        if not isinstance(weights, dict) or not all(
            isinstance(file, str) for file in weights.values()
        ):
            raise ConfigError(f"{label}/{INDEX}: weight_map is no mapping of names to files")
        files = sorted(set(weights.values()))
    found: dict[str, tuple[ByteSource, Entry]] = {}
    for file in files:
        folder, name = _behind_links(path, file)
        source = folder.source(name)
        for tensor, entry in read_header(source, f"{label}/{printable(file)}").items():
            found[tensor] = source, entry
    return found


def _behind_links(path: str, name: str) -> tuple[LocalFolder, str]:
    """The folder and name of the file that ``path/name`` is: in the library's download cache,
    models are folders of links."""
    if os.path.basename(name) == name:
        path, name = os.path.split(os.path.realpath(os.path.join(path, name)))
    # a mapped file would count, page by page, as memory of the rank
    return LocalFolder(path, mapped=False), name


def _fill(tensor: Tensor, parts: list[_StoredPart]) -> None:
    """Writes what this rank keeps of ``tensor``; of each part no more is read than the rows that
    hold some of it."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    kept = local_region(tensor).slices
    if not kept:
        local.copy_(read_rows(parts[0].source, parts[0].entry, 0, 1))
        return
    for part in parts:
        inside, target = [], []
        for keep, begin, length in zip(kept, part.begin, part.entry.shape, strict=True):
            first, last = max(keep.start, begin), min(keep.stop, begin + length)
            inside.append(slice(first - begin, last - begin))
            target.append(slice(first - keep.start, last - keep.start))
        if all(one.start < one.stop for one in inside):
            _read_rectangle(local[tuple(target)], part.source, part.entry, tuple(inside))


def _read_rectangle(
    destination: Tensor, source: ByteSource, entry: Entry, slices: tuple[slice, ...]
) -> None:
    """Reads whole rows of dim 0, `PIECE_BYTES` of them at once, and cuts the other dims; a row that
    is larger is read row by row."""
    row = (entry.end - entry.begin) // entry.shape[0]
    begin, end = slices[0].start, slices[0].stop
    if row > PIECE_BYTES and len(entry.shape) > 1:
        for index in range(begin, end):
            at = entry.begin + index * row
            _read_rectangle(
                destination[index - begin],
                source,
                Entry(entry.dtype, entry.shape[1:], at, at + row),
                slices[1:],
            )
        return
    size = max(1, PIECE_BYTES // max(1, row))
    for first in range(begin, end, size):
        last = min(first + size, end)
        rows = read_rows(source, entry, first, last)
        destination[first - begin : last - begin].copy_(rows[(slice(None), *slices[1:])])
        del rows  # before the next piece is read, or two would be held
