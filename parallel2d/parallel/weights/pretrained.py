"""Pretrained weights read into a sharded model by `load_pretrained`. Only safetensors are read,
from a folder that ``save_pretrained`` has written; nothing in it is executed. A parameter that the
library stores in several tensors, the experts of a mixture, is put together from the parts that
this rank keeps."""

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

# The tensors in the files of a folder, by the name they have there.
_Headers = Mapping[str, tuple[ByteSource, Entry]]


def has_weights(path: str) -> bool:
    """Whether the folder holds safetensors. Raises `ConfigError` when it holds only pickles."""
    if _has(path, INDEX) or _has(path, SINGLE):
        return True
    pickled = [name for name in _PICKLED if _has(path, name)]
    if pickled:
        raise ConfigError(
            f"{path} holds {pickled[0]} and no safetensors: a pickle can run code, so it is not "
            "read; save the model again with safe serialization, or set model.load_weights=false"
        )
    return False


def _has(path: str, name: str) -> bool:
    # A link that leads nowhere counts: reading it then fails with its name.
    return os.path.lexists(os.path.join(path, name))


class _Stored(NamedTuple):
    """A whole parameter in the folder: its shape, and by the name of each stored tensor, where that
    is and which value of the parameter is its first."""

    shape: tuple[int, ...]
    parts: dict[str, tuple[Entry, tuple[int, ...]]]


class _Target(NamedTuple):
    """A parameter or persistent buffer of the model: its FQNs, several where it is tied, and the
    names under which a folder may have it, the first of which counts."""

    tensor: Tensor
    names: list[str]
    spellings: list[str]

    def stored_names(self, stored: Mapping[str, _Stored]) -> list[str]:
        return [name for name in self.spellings if name in stored]


@torch.no_grad()
def load_pretrained(model: nn.Module, path: str, *, fresh: Sequence[str] = ()) -> set[str]:
    """Fills ``model``, sharded or not, with the tensors of the folder ``path``; returns the FQNs
    that it had.

    No communication: every rank reads the byte ranges of its own rows, `PIECE_BYTES` at once.
    Values are cast to the dtype of the parameter. A name may carry, or lack, the prefix of the
    model's base (``transformer.``, ``model.``), as published weights do; names and forms that the
    ``transformers`` library changes between file and model (experts stored one by one) are changed
    alike. Parameters outside of the base that the folder does not have, a new head, are left to the
    caller and logged; so are those whose FQNs match a pattern of ``fresh``: adapters. The base of a
    model of the ``peft`` library is filled, its adapters are left to the caller. Collective with
    ``sync=diloco``, whose outer parameters are filled.

    Raises `ConfigError` for shapes that differ, for other parameters of the base that the folder
    does not have, and for a pattern of ``fresh`` that matches no parameter.
    """
    # Where each tensor is, by its name; no values are read before they are wanted.
    headers = read_headers(path)
    plain, adapted = adapters.base_of(model)
    # What names of the base begin with in a ``transformers`` model of this kind that has a head,
    # and in this model: "" where it has no head, and all of it is the base.
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
            # Without spellings it is of an adapter of peft's, which is in no folder of a base.
            if target.spellings:
                missing.append(target.names[0])
            continue
        # A tied parameter may be stored once per name: one of them is read, none is left over.
        read.update(chain.from_iterable(stored[name].parts for name in names))
        found.update(target.names)
        value = stored[names[0]]
        shape = tuple(target.tensor.shape)
        # What does not fit is listed with the rest.
        if value.shape == shape:
            _fill(target.tensor, value, headers)
        else:
            problem = f"has shape {value.shape}, the model's is {shape}"
            problems.append(f"{printable(names[0])} {problem}")
    # Of the base everything must be there, but for the adapters that the caller fills.
    required = [name for name in missing if name.startswith(adapted + base)]
    problems += _lacking(model, required, fresh, targets)
    if problems:
        raise ConfigError(f"{path} does not fit {type(model).__name__}: {first_five(problems)}")
    masters_were_loaded(model)
    _log_rest(path, missing, sorted(headers.keys() - read))
    return found


def _log_rest(path: str, missing: Sequence[str], unread: Sequence[str]) -> None:
    # Left are a new head and adapters, which have initial values.
    if missing:
        log.warning("%s has no %s: drawn from the seed", path, ", ".join(missing))
    if unread:
        first = printable(unread[0])
        log.info("%s: %d tensors are not read, %s the first", path, len(unread), first)


def _targets(model: nn.Module, adapted: str, prefix: str, base: str) -> list[_Target]:
    """Lists everything in the model's state dict, tied parameters once. ``adapted``: what names
    begin with in a model with adapters."""
    reshard(model)
    targets = {name: _Target(value, [name], []) for name, value in model_tensors(model).items()}
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
    """One line for each of ``missing`` that no pattern of ``fresh`` matches. Raises `ConfigError`
    for a pattern that matches nothing."""
    names = list(chain.from_iterable(target.names for target in targets))
    left_to_caller: set[str] = set()
    for pattern in fresh:
        matching = fnmatch.filter(names, pattern)
        # A misspelt pattern would otherwise show as a parameter that is missing, or not at all.
        if not matching:
            raise ConfigError(
                f"fresh: pattern {pattern} matches no parameter of {type(model).__name__}"
            )
        left_to_caller.update(matching)
    return [f"{name} is missing" for name in missing if name not in left_to_caller]


def _find_stored(
    model: nn.Module, targets: Sequence[_Target], headers: _Headers
) -> dict[str, _Stored]:
    """Finds what the folder holds, by its own names and, where these are not enough, by those that
    the library gives it. Raises `ConfigError` for a form that cannot be read in parts."""
    stored: dict[str, _Stored] = {}
    for name, (_, entry) in headers.items():
        stored[name] = _Stored(entry.shape, {name: (entry, (0,) * len(entry.shape))})
    # The library builds a second model to find its names, which takes time.
    wanted = [target for target in targets if target.spellings]
    if all(target.stored_names(stored) for target in wanted):
        return stored
    try:
        forms = huggingface.stored_forms(model, headers)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    converted = {name: _put_together(name, form, headers) for name, form in forms.items()}
    # Names that need no conversion take precedence.
    return {**converted, **stored}


def _put_together(name: str, form: huggingface.StoredForm, headers: _Headers) -> _Stored:
    """The parts of parameter ``name``, each at its place. Nothing is read."""
    try:
        # Of tensors without storage, torch says whether they fit together.
        groups = [_group_on_meta(group, form, headers) for group in form.names]
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
        # A tensor that is stacked has a dim more than in its file.
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
    """The tensors of a group, stacked, or the only one. Raises what torch does if they differ."""
    tensors = [torch.empty(headers[name][1].shape, device="meta") for name in names]
    (group,) = [torch.stack(tensors)] if form.stacked else tensors
    return group


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
    if not _has(path, INDEX):
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


def _fill(tensor: Tensor, stored: _Stored, headers: _Headers) -> None:
    """Writes what this rank keeps of ``tensor``; of each part no more is read than the rows that
    hold some of it."""
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
            wanted: Any = kept.intersect(piece)  # of full rows, some is kept
            local[wanted.slices_in(kept)].copy_(values[wanted.slices_in(piece)])
            # Before the next piece is read, or two would be held.
            del values
