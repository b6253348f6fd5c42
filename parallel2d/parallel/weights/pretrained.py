"""Pretrained weights for a sharded model: `load_pretrained`.

Only safetensors are read, from a folder of ``save_pretrained``; nothing in the folder is executed.
A parameter that the library stores in several tensors, such as the experts of a mixture, is built
from the parts of this rank.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import logging
import math
import os
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from parallel2d.base.errors import ConfigError, first_five
from parallel2d.base.files.folder import LocalFolder
from parallel2d.base.files.tensor_file import (
    DTYPES,
    ByteSource,
    Entry,
    parse_json,
    printable,
    read_header,
    read_rows,
)
from parallel2d.models import adapters, huggingface
from parallel2d.parallel.weights.geometry import Region, local_part, local_region
from parallel2d.parallel.weights.named_tensors import (
    masters_were_loaded,
    model_tensors,
    reshard,
    tied_names,
)
from parallel2d.parallel.weights.unsharded_tensors import PIECE_BYTES

log = logging.getLogger(__name__)

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_MAX_INDEX = 64 * 2**20  # bytes

# The tensors in the files of a folder, by their names in the folder.
_Headers = Mapping[str, tuple[ByteSource, Entry]]


def has_weights(path: str) -> bool:
    """Return True if the folder holds safetensors. Raise `ConfigError` if it holds only pickles."""
    if _has(path, INDEX) or _has(path, SINGLE):
        return True
    pickled = next((name for name in _PICKLED if _has(path, name)), None)
    if pickled is not None:
        raise ConfigError(
            f"{path} holds {pickled} and no safetensors: a pickle can run code, so it is not "
            "read; save the model again with safe serialization, or set model.load_weights=false"
        )
    return False


def _has(path: str, name: str) -> bool:
    # A broken link counts: reading it then fails with its name.
    return os.path.lexists(os.path.join(path, name))


class _Stored(NamedTuple):
    """An unsharded parameter in the folder. ``parts`` maps the name of each stored tensor to its
    entry and to the position of its first value in the parameter."""

    shape: tuple[int, ...]
    parts: dict[str, tuple[Entry, tuple[int, ...]]]


class _Target(NamedTuple):
    """A parameter or persistent buffer of the model. ``names`` are its FQNs, several if it is tied.
    ``spellings`` are possible names in a folder, by priority."""

    tensor: Tensor
    names: list[str]
    spellings: list[str]

    def stored_names(self, stored: Mapping[str, _Stored]) -> list[str]:
        return list(filter(stored.__contains__, self.spellings))


@torch.no_grad()
def load_pretrained(model: nn.Module, path: str, *, fresh: Sequence[str] = ()) -> set[str]:
    """Fill ``model``, sharded or not, from the folder ``path``. Return the FQNs that were filled.

    No communication: every rank reads the byte ranges of its rows, `PIECE_BYTES` at a time.
    Values are cast to the dtype of the parameter. Collective with ``sync=diloco``, because the
    outer parameters are filled too.

    A name may have or lack the prefix of the model's base (``transformer.``, ``model.``), as in
    published weights. Names and forms that the ``transformers`` library changes between file and
    model (experts stored one by one) are changed in the same way. Parameters outside of the base
    that the folder lacks, for example a new head, are left to the caller and logged. In a model of
    the ``peft`` library the base is filled, and the adapters are left to the caller.

    Args:
        model: the model to fill.
        path: a local folder.
        fresh: patterns of FQNs of further parameters that are left to the caller, such as adapters.

    Raises:
        ConfigError: a shape differs, the folder lacks a parameter of the base, or a pattern of
            ``fresh`` matches no parameter.
    """
    # Entries of tensors by name; values are read later.
    headers = read_headers(path)
    plain, adapted = adapters.base_of(model)
    # Prefix of the base's names in a ``transformers`` model with a head, and in this model. The
    # second prefix is "" for a model without a head, because the complete model is the base.
    name = getattr(plain, "base_model_prefix", None) or ""
    prefix = f"{name}."
    base = prefix if isinstance(getattr(plain, name, None), nn.Module) else ""
    targets = _targets(model, adapted, prefix, base)
    stored = _find_stored(plain, targets, headers)
    found: set[str] = set()
    read: set[str] = set()
    missing: list[str] = []
    problems: list[str] = []
    for target in targets:
        names = target.stored_names(stored)
        if not names:
            # A target without spellings is an adapter of peft, which no base folder contains.
            if target.spellings:
                missing.append(target.names[0])
            continue
        # A tied parameter may be stored under each of its names: one tensor is read, and all names
        # count as read.
        read.update(chain.from_iterable(stored[name].parts for name in names))
        found.update(target.names)
        value = stored[names[0]]
        shape = tuple(target.tensor.shape)
        # Mismatches are listed together.
        if value.shape == shape:
            _fill(target.tensor, value, headers)
        else:
            problem = f"has shape {value.shape}, the model's is {shape}"
            problems.append(f"{printable(names[0])} {problem}")
    # All parameters of the base are required, except adapters that the caller fills.
    required = [name for name in missing if name.startswith(adapted + base)]
    problems += _lacking(model, required, fresh, targets)
    if problems:
        raise ConfigError(f"{path} does not fit {type(model).__name__}: {first_five(problems)}")
    masters_were_loaded(model)
    _log_rest(path, missing, sorted(headers.keys() - read))
    return found


def _log_rest(path: str, missing: Sequence[str], unread: Sequence[str]) -> None:
    # Only a new head and adapters remain, which have initial values.
    if missing:
        log.warning("%s has no %s: drawn from the seed", path, ", ".join(missing))
    if unread:
        first = printable(unread[0])
        log.info("%s: %d tensors are not read, %s the first", path, len(unread), first)


def _targets(model: nn.Module, adapted: str, prefix: str, base: str) -> list[_Target]:
    """List the entries of the model's state dict, tied parameters once.

    ``adapted``: prefix of the base's names in a model with adapters.
    """
    reshard(model)
    targets = {}
    for name, value in model_tensors(model).items():
        targets[name] = _Target(value, [name], [])
    for name, first in tied_names(model).items():
        targets[first].names.append(name)
    for target in targets.values():
        for name in target.names:
            plain = adapters.base_name(name, adapted)
            if plain is not None:
                target.spellings.extend([plain, plain.removeprefix(base), f"{prefix}{plain}"])
    return list(targets.values())


def _lacking(
    model: nn.Module, missing: Sequence[str], fresh: Sequence[str], targets: Sequence[_Target]
) -> list[str]:
    """Return one line per name of ``missing`` that no pattern of ``fresh`` matches.

    Raises `ConfigError` for a pattern without a match.
    """
    names = list(chain.from_iterable(target.names for target in targets))
    left_to_caller: set[str] = set()
    for pattern in fresh:
        matching = fnmatch.filter(names, pattern)
        # Without this error, a misspelt pattern would be reported as a missing parameter, or not at
        # all.
        if not matching:
            raise ConfigError(
                f"fresh: pattern {pattern} matches no parameter of {type(model).__name__}"
            )
        left_to_caller.update(matching)
    found: list[str] = []
    for name in missing:
        if name not in left_to_caller:
            found.append(f"{name} is missing")
    return found


def _find_stored(
    model: nn.Module, targets: Sequence[_Target], headers: _Headers
) -> dict[str, _Stored]:
    """Return the contents of the folder by name, and if necessary by the library's new names.

    Raises `ConfigError` for a form that cannot be read in parts.
    """
    stored: dict[str, _Stored] = {}
    for name, (_, entry) in headers.items():
        stored[name] = _Stored(entry.shape, {name: (entry, (0,) * len(entry.shape))})
    # The library builds a second model to find its names, which takes time.
    if all(target.stored_names(stored) for target in targets if target.spellings):
        return stored
    try:
        forms = huggingface.stored_forms(model, headers)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    converted = {}
    for name, form in forms.items():
        converted[name] = _put_together(name, form, headers)
    # Names without conversion take precedence.
    return {**converted, **stored}


def _put_together(name: str, form: huggingface.StoredForm, headers: _Headers) -> _Stored:
    """Return the position of each part of parameter ``name``. Nothing is read."""
    try:
        # torch checks on meta tensors that the parts fit together.
        groups = []
        for names in form.names:
            groups.append(_group_on_meta(names, form, headers))
        whole = groups[0] if form.dim is None else torch.cat(groups, form.dim)
        # torch skips tensors of shape (0,).
        if any(group.ndim != whole.ndim for group in groups):
            raise ValueError("they differ in their number of dims")
    except (RuntimeError, IndexError, ValueError) as error:
        raise ConfigError(
            f"{printable(name)} is put together from tensors that do not fit together: {error}"
        ) from None
    parts = {}
    begin = [0] * whole.ndim
    for names, group in zip(form.names, groups, strict=True):
        # A stacked tensor has one dim more than in its file.
        shape = tuple(group[:1].shape) if form.stacked else tuple(group.shape)
        for index, stored in enumerate(names):
            if form.stacked:
                begin[0] = index
            entry = dataclasses.replace(headers[stored][1], shape=shape)
            parts[stored] = entry, tuple(begin)
        if form.dim is not None:
            begin[form.dim] += shape[form.dim]
    return _Stored(tuple(whole.shape), parts)


def _group_on_meta(names: Sequence[str], form: huggingface.StoredForm, headers: _Headers) -> Tensor:
    """Return the stacked tensors of a group, or its only tensor. Raises torch's shape errors."""
    tensors = []
    for name in names:
        tensors.append(torch.empty(headers[name][1].shape, device="meta"))
    (group,) = [torch.stack(tensors)] if form.stacked else tensors
    return group


def read_headers(path: str) -> dict[str, tuple[ByteSource, Entry]]:
    """Return the entry of each tensor of the folder by its name there; no values are read.

    Raises `ConfigError` for a name in two files.
    """
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
    """Return the name of each tensor -> its file from the folder's index; empty without an index.

    Raises `ConfigError` for an invalid index.
    """
    if not _has(path, INDEX):
        return {}
    what = f"{os.path.basename(os.path.abspath(path))}/{INDEX}"
    folder, name = behind_links(path, INDEX)
    # The file may contain anything.
    weights: Any = parse_json(folder.read(name, _MAX_INDEX), what).get("weight_map")
    values = weights.values() if isinstance(weights, dict) else [None]
    if not all(isinstance(file, str) for file in values):
        raise ConfigError(f"{what}: weight_map is not a mapping of names to files")
    return dict(weights)


def behind_links(path: str, name: str) -> tuple[LocalFolder, str]:
    """Return folder and name of the file behind ``path/name``.

    In the library's download cache models are folders of links.
    """
    # A path instead of a name can only come from a hostile index. `LocalFolder` refuses it.
    if os.path.basename(name) == name:
        path, name = os.path.split(os.path.realpath(os.path.join(path, name)))
    # Pages of a mapped file would count as memory of the rank.
    return LocalFolder(path, mapped=False), name


def _fill(tensor: Tensor, stored: _Stored, headers: _Headers) -> None:
    """Write this rank's part of ``tensor``, and read only rows that contain values of the part."""
    local = local_part(tensor)
    for name, (entry, begin) in stored.parts.items():
        kept = local_region(tensor).seen_from(begin)
        common = kept.intersect(Region.of_shape(entry.shape))
        if common is None:
            continue
        size = DTYPES[entry.dtype].itemsize
        for piece in common.pieces(entry.shape, PIECE_BYTES // size):
            first = entry.begin + piece.position_in(entry.shape) * size
            alone = Entry(entry.dtype, piece.lengths, first, first + piece.numel * size)
            values = read_rows(headers[name][0], alone, 0, math.prod(piece.lengths[:1]))
            # Never None: each piece has rows that overlap this rank's part.
            wanted: Any = kept.intersect(piece)
            local[wanted.slices_in(kept)].copy_(values[wanted.slices_in(piece)])
            # Freed before the next piece is read, so that only one piece is in memory.
            del values
