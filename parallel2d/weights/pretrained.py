"""Pretrained weights read into a sharded model by `load_pretrained`: each rank reads its own rows
of each tensor, a piece at a time.

Only safetensors are read, from a folder that ``save_pretrained`` has written; nothing in it is
executed. A parameter that the library stores in several tensors, the experts of a mixture, is put
together from the parts that this rank keeps.
"""

from __future__ import annotations

import fnmatch
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from parallel2d.errors import ConfigError, first_five
from parallel2d.files.folder import LocalFolder
from parallel2d.files.tensor_file import (
    ByteSource,
    Entry,
    parse_json,
    printable,
    read_header,
    read_rows,
)
from parallel2d.model_structure import fqn_of
from parallel2d.models import adapters, huggingface
from parallel2d.weights.geometry import Region, local_part, local_region
from parallel2d.weights.scatter import PIECE_BYTES

log = logging.getLogger(__name__)

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_MAX_INDEX = 64 * 2**20  # bytes

# The tensors in the files of a folder, by the name they have there.
_Headers = Mapping[str, tuple[ByteSource, Entry]]


def has_weights(path: str) -> bool:
    """Whether the folder holds safetensors. Raises `ConfigError` when it holds only pickles."""
    if _existing(path, (INDEX, SINGLE)):
        return True
    pickled = _existing(path, _PICKLED)
    if pickled:
        raise ConfigError(
            f"{path} holds {pickled[0]} and no safetensors: a pickle can run code, so it is not "
            "read; save the model again with safe serialization, or set model.load_weights=false"
        )
    return False


def _existing(path: str, names: Sequence[str]) -> list[str]:
    # A link that leads nowhere counts: reading it then fails with its name.
    return [name for name in names if os.path.lexists(os.path.join(path, name))]


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


@dataclass(frozen=True)
class _Target:
    """A parameter or persistent buffer of the model: its FQNs (several where it is
    tied), and the names under which a folder may have it."""

    tensor: Tensor
    names: list[str]
    spellings: list[str]

    def stored_names(self, stored: Mapping[str, _Stored]) -> list[str]:
        return [name for name in self.spellings if name in stored]


@torch.no_grad()
def load_pretrained(model: nn.Module, path: str, *, fresh: Sequence[str] = ()) -> set[str]:
    """Fills ``model``, sharded or not, with the tensors of the folder ``path``; returns the
    FQNs that it had.

    No communication: every rank reads the byte ranges of its own rows, `PIECE_BYTES` at once.
    Values are cast to the dtype of the parameter. A name may carry, or lack, the prefix of the
    model's base (``transformer.``, ``model.``), as published weights do; names and forms that the
    ``transformers`` library changes between file and model (experts stored one by one) are changed
    alike. Parameters outside of the base that the folder does not have, a new head, are left to the
    caller and logged; so are those whose FQNs match a pattern of ``fresh``: adapters.
    The base of a model of the ``peft`` library is filled, its adapters are left to the caller.

    Raises `ConfigError` for shapes that differ, for other parameters of the base that the folder
    does not have, and for a pattern of ``fresh`` that matches no parameter.
    """
    # Where each tensor is, by its name; no values are read before they are wanted.
    headers = read_headers(path)
    plain, adapted = adapters.base_of(model)
    prefix, base = _base_prefixes(plain)
    targets = _targets(model, adapted, prefix, base)
    stored = _find_stored(plain, targets, headers)
    found: set[str] = set()
    read: set[str] = set()
    missing: list[str] = []
    problems: list[str] = []
    for target in targets:
        names = target.stored_names(stored)
        if not names:
            # Without spellings it is of an adapter of peft's, which is in no folder of a base.
            if target.spellings:
                missing.append(target.names[0])
            continue
        # A tied parameter may be stored once per name: one of them is read, none is left over.
        read.update(chain.from_iterable(stored[name].names for name in names))
        found.update(target.names)
        value = stored[names[0]]
        shape = tuple(target.tensor.shape)
        # What does not fit is listed with the rest.
        if value.shape == shape:
            _fill(target.tensor, value.parts)
        else:
            problems.append(
                f"{printable(names[0])} has shape {value.shape}, the model's is {shape}"
            )
    _check_patterns(fresh, targets, model)
    required = [name for name in missing if _is_required(name, adapted + base, fresh)]
    problems += [f"{name} is missing" for name in required]
    if problems:
        raise ConfigError(f"{path} does not fit {type(model).__name__}: {first_five(problems)}")
    # Left are a new head and adapters, which have initial values.
    if missing:
        log.warning("%s has no %s: drawn from the seed", path, ", ".join(missing))
    unread = sorted(headers.keys() - read)
    if unread:
        log.info(
            "%s: %d tensors are not read, %s the first", path, len(unread), printable(unread[0])
        )
    return found


def _base_prefixes(model: nn.Module) -> tuple[str, str]:
    """What names of the base begin with in a ``transformers`` model of this kind that has a head,
    and in ``model``: "" where it has no head, and all of it is the base."""
    name = getattr(model, "base_model_prefix", None) or ""
    prefix = f"{name}."
    if name and isinstance(getattr(model, name, None), nn.Module):
        return prefix, prefix
    return prefix, ""


def _targets(model: nn.Module, adapted: str, prefix: str, base: str) -> list[_Target]:
    """Everything in the model's state dict, tied parameters once. ``adapted``: what names begin
    with in a model with adapters."""
    persistent = {fqn_of(name) for name in model.state_dict()}
    # After `state_dict`, which frees gathered parameters: the sharded ones are to be filled.
    named = chain(
        model.named_parameters(remove_duplicate=False),
        model.named_buffers(remove_duplicate=False),
    )
    found: dict[int, _Target] = {}
    for wrapped_name, tensor in named:
        name = fqn_of(wrapped_name)
        if name not in persistent:
            continue
        # Tied parameters are one tensor with several names.
        target = found.setdefault(id(tensor), _Target(tensor, [], []))
        target.names.append(name)
        plain = adapters.base_name(name, adapted)
        if plain is not None:
            # The first of them that the folder has is read.
            target.spellings.extend([plain, plain.removeprefix(base), f"{prefix}{plain}"])
    return list(found.values())


def _is_required(name: str, base: str, fresh: Sequence[str]) -> bool:
    """Whether the folder must have ``name``: it is of the base and no adapter."""
    is_fresh = any(fnmatch.fnmatchcase(name, pattern) for pattern in fresh)
    return name.startswith(base) and not is_fresh


def _check_patterns(fresh: Sequence[str], targets: Sequence[_Target], model: nn.Module) -> None:
    names = list(chain.from_iterable(target.names for target in targets))
    # A misspelt pattern would otherwise show as a parameter that is missing, or not at all.
    for pattern in fresh:
        if not fnmatch.filter(names, pattern):
            raise ConfigError(
                f"fresh: pattern {pattern} matches no parameter of {type(model).__name__}"
            )


def _find_stored(
    model: nn.Module, targets: Sequence[_Target], headers: _Headers
) -> dict[str, _Stored]:
    """What the folder holds, by its own names and, where these are not enough, by those that the
    library gives it."""
    stored: dict[str, _Stored] = {}
    for name, (source, entry) in headers.items():
        whole = _StoredPart(source, entry, (0,) * len(entry.shape))
        stored[name] = _Stored(entry.shape, [whole], [name])
    # The library builds a second model to find its names, which takes time.
    wanted = [target for target in targets if target.spellings]
    if all(target.stored_names(stored) for target in wanted):
        return stored
    # Names that need no conversion take precedence.
    return {**_converted(model, headers), **stored}


def _converted(model: nn.Module, headers: _Headers) -> dict[str, _Stored]:
    """What the folder holds by the forms and names that `huggingface.stored_forms` finds. Raises
    `ConfigError` for a form that cannot be read in parts, and for tensors that are stacked and
    differ in shape."""
    try:
        forms = huggingface.stored_forms(model, headers)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return {name: _put_together(name, form, headers) for name, form in forms.items()}


def _put_together(name: str, form: huggingface.StoredForm, headers: _Headers) -> _Stored:
    """The parts of parameter ``name``, each at its place. Nothing is read."""
    parts: list[_StoredPart] = []
    # Groups are concatenated along `form.dim`: where the next one begins.
    offset = 0
    for stored_names in form.names:
        group = [headers[stored] for stored in stored_names]
        shape = _common_shape(group, form)
        for index, (source, entry) in enumerate(group):
            begin = [0] * len(shape)
            if form.stacked:
                begin[0] = index
            if form.dim is not None:
                begin[form.dim] = offset
            # The same bytes; a tensor that is stacked has a dim more than in its file.
            part = Entry(entry.dtype, shape, entry.begin, entry.end)
            parts.append(_StoredPart(source, part, tuple(begin)))
        if form.dim is not None:
            offset += shape[form.dim]
    _check_other_dims(name, [part.entry.shape for part in parts], form)
    sizes = {len(stored_names) for stored_names in form.names}
    if len(sizes) > 1:
        raise ConfigError(
            f"{printable(name)} is put together from groups of {sorted(sizes)} tensors, which must "
            "be equally many"
        )
    whole = list(parts[0].entry.shape)
    if form.stacked:
        whole[0] = sizes.pop()
    if form.dim is not None:
        whole[form.dim] = offset
    return _Stored(tuple(whole), parts, list(chain.from_iterable(form.names)))


def _check_other_dims(
    name: str, shapes: Sequence[tuple[int, ...]], form: huggingface.StoredForm
) -> None:
    """Raises `ConfigError` when tensors that are concatenated differ in another dim."""
    others = set()
    for shape in shapes:
        rest = list(shape)
        if form.dim is not None:
            rest[form.dim] = 0
        others.add(tuple(rest))
    if len(others) > 1:
        raise ConfigError(
            f"{printable(name)} is put together along dim {form.dim} from tensors that differ in "
            f"another dim: {sorted(set(shapes))}"
        )


def _common_shape(
    group: Sequence[tuple[ByteSource, Entry]], form: huggingface.StoredForm
) -> tuple[int, ...]:
    """The shape of each tensor of a group; with a new dim 0 of size 1 if they are stacked."""
    shapes = {entry.shape for _, entry in group}
    if len(shapes) > 1:
        raise ConfigError(
            f"{printable(form.names[0][0])} and its like, {len(group)} tensors, differ in shape: "
            f"{shapes}"
        )
    shape = shapes.pop()
    if form.stacked:
        return (1, *shape)
    return shape


def read_headers(path: str) -> dict[str, tuple[ByteSource, Entry]]:
    """Where each tensor of the folder is, by the name it has there; no values are read. Raises
    `ConfigError` for a name that two files have."""
    label = os.path.basename(os.path.abspath(path))
    found: dict[str, tuple[ByteSource, Entry]] = {}
    for file in sorted(set(weight_map(path).values())) or [SINGLE]:
        folder, name = behind_links(path, file)
        source = folder.source(name)
        header = read_header(source, f"{label}/{printable(file)}")
        for tensor, entry in header.items():
            if tensor in found:
                raise ConfigError(f"{label}: {printable(tensor)} is in two files")
            found[tensor] = source, entry
    return found


def weight_map(path: str) -> dict[str, str]:
    """Name of each tensor -> its file, as the folder's index says; empty where it has no index.
    Raises `ConfigError` for an index that is none."""
    if not _existing(path, [INDEX]):
        return {}
    what = f"{os.path.basename(os.path.abspath(path))}/{INDEX}"
    folder, name = behind_links(path, INDEX)
    # The content of the file may be anything.
    weights: Any = parse_json(folder.read(name, _MAX_INDEX), what).get("weight_map")
    values = weights.values() if isinstance(weights, dict) else [None]
    if not all(isinstance(file, str) for file in values):
        raise ConfigError(f"{what}: weight_map is no mapping of names to files")
    return dict(weights)


def behind_links(path: str, name: str) -> tuple[LocalFolder, str]:
    """The folder and name of the file that ``path/name`` is: in the library's download cache,
    models are folders of links."""
    # A name that is a path can only come from a hostile index. `LocalFolder` refuses it.
    if os.path.basename(name) == name:
        path, name = os.path.split(os.path.realpath(os.path.join(path, name)))
    # A mapped file would count, page by page, as memory of the rank.
    return LocalFolder(path, mapped=False), name


def _fill(tensor: Tensor, parts: list[_StoredPart]) -> None:
    """Writes what this rank keeps of ``tensor``; of each part no more is read than the rows that
    hold some of it."""
    local = local_part(tensor)
    kept = local_region(tensor)
    # A tensor without dims is stored as one row.
    if not kept.lengths:
        local.copy_(read_rows(parts[0].source, parts[0].entry, 0, 1))
        return
    for part in parts:
        stored = Region(part.begin, part.entry.shape)
        common = kept.intersect(stored)
        if common is not None:
            destination = local[common.slices_in(kept)]
            _read_rectangle(destination, part.source, part.entry, common.slices_in(stored))


def _read_rectangle(
    destination: Tensor, source: ByteSource, entry: Entry, slices: tuple[slice, ...]
) -> None:
    """Reads whole rows of dim 0, `PIECE_BYTES` of them at once, and cuts the other dims; a row that
    is larger is read row by row."""
    row = (entry.end - entry.begin) // entry.shape[0]
    begin = slices[0].start
    end = slices[0].stop
    if row > PIECE_BYTES and len(entry.shape) > 1:
        for index in range(begin, end):
            # The row as a tensor of its own, which has one dim less.
            at = entry.begin + index * row
            inner = Entry(entry.dtype, entry.shape[1:], at, at + row)
            _read_rectangle(destination[index - begin], source, inner, slices[1:])
        return
    # At least one row, also where a row is larger, or holds no bytes.
    size = max(1, PIECE_BYTES // max(1, row))
    for first in range(begin, end, size):
        last = min(first + size, end)
        rows = read_rows(source, entry, first, last)
        destination[first - begin : last - begin].copy_(rows[(slice(None), *slices[1:])])
        # Before the next piece is read, or two would be held.
        del rows
