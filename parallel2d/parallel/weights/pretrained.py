"""Pretrained weights for a sharded model: `load_pretrained`.

Only safetensors files are read, from a folder that ``save_pretrained`` has written. No code in the
folder is executed. If the transformers library stores a parameter in several tensors, such as the
experts of a mixture, each rank reads only the tensors that overlap its local shard.
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

# Name of a tensor in the folder -> its file and its entry in the file's header
_Headers = Mapping[str, tuple[ByteSource, Entry]]


def has_weights(path: str) -> bool:
    """Return True if the folder has safetensors files. Raise `ConfigError` if it has only
    pickles."""
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
    # `lexists` is also True for a broken link, so that reading it raises an error with its name.
    return os.path.lexists(os.path.join(path, name))


class _Stored(NamedTuple):
    """An unsharded parameter in the folder, made of one or more stored tensors.

    ``parts`` maps the name of each stored tensor to its entry, and to its offsets in the parameter.
    """

    shape: tuple[int, ...]
    parts: dict[str, tuple[Entry, tuple[int, ...]]]


class _Target(NamedTuple):
    """A parameter or persistent buffer of the model.

    ``names`` are the FQNs of the tensor, several if it is tied. ``spellings`` are its possible
    names in a folder, by priority.
    """

    tensor: Tensor
    names: list[str]
    spellings: list[str]

    def stored_names(self, stored: Mapping[str, _Stored]) -> list[str]:
        return list(filter(stored.__contains__, self.spellings))


@torch.no_grad()
def load_pretrained(model: nn.Module, path: str, *, fresh: Sequence[str] = ()) -> set[str]:
    """Fill ``model``, sharded or not, from the folder ``path``. Return the FQNs that were filled.

    No communication: every rank reads the byte ranges of its rows, `PIECE_BYTES` at a time.
    Values are cast to the dtype of the parameter. If the model has master values (see
    [Note: master values]), the call is collective.

    A name in the folder may have or lack the prefix of the base model (``transformer.``,
    ``model.``), as in published weights. Names and shapes that the ``transformers`` library
    converts when it loads a file (experts stored one by one) are converted in the same way.

    Some parameters may be missing in the folder: parameters outside of the base model, for example
    a new head, and the adapters of a model of the ``peft`` library. The caller must initialize
    these parameters.

    Args:
        model: the model to fill.
        path: a local folder.
        fresh: patterns of FQNs of further parameters that may be missing, such as adapters.

    Raises:
        ConfigError: a shape differs, a parameter of the base model is missing, or a pattern of
            ``fresh`` matches no parameter.
    """
    # Only the headers of the files; `_fill` reads the values.
    headers = read_headers(path)
    plain, adapted = adapters.base_of(model)
    # ``prefix`` is the prefix of the base model's names in a transformers model with a head.
    # ``base`` is the same prefix if this model has a head, or "" if this model is the base model.
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
            # A target without spellings is an adapter of peft, and folders have no adapters.
            if target.spellings:
                missing.append(target.names[0])
            continue
        # A tied parameter may be stored several times. One tensor is read, and all count as read.
        read.update(chain.from_iterable(stored[name].parts for name in names))
        found.update(target.names)
        value = stored[names[0]]
        shape = tuple(target.tensor.shape)
        # Collect problems, so that one error lists them all.
        if value.shape == shape:
            _fill(target.tensor, value, headers)
        else:
            problem = f"has shape {value.shape}, the model's is {shape}"
            problems.append(f"{printable(names[0])} {problem}")
    # All parameters of the base model are required, except those in ``fresh``.
    required = [name for name in missing if name.startswith(adapted + base)]
    problems += _lacking(model, required, fresh, targets)
    if problems:
        raise ConfigError(f"{path} does not fit {type(model).__name__}: {first_five(problems)}")
    masters_were_loaded(model)
    _log_rest(path, missing, sorted(headers.keys() - read))
    return found


def _log_rest(path: str, missing: Sequence[str], unread: Sequence[str]) -> None:
    # At this point only parameters that the caller initializes are missing.
    if missing:
        log.warning("%s has no %s: drawn from the seed", path, ", ".join(missing))
    if unread:
        first = printable(unread[0])
        log.info("%s: %d tensors are not read, %s the first", path, len(unread), first)


def _targets(model: nn.Module, adapted: str, prefix: str, base: str) -> list[_Target]:
    """Return the parameters and persistent buffers of the model; a tied parameter is listed once.

    ``adapted`` is the prefix of the base model's names in a model with adapters.
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
    """Return a message for each name in ``missing`` that no pattern of ``fresh`` matches.

    Raises `ConfigError` for a pattern without a match.
    """
    names = list(chain.from_iterable(target.names for target in targets))
    left_to_caller: set[str] = set()
    for pattern in fresh:
        matching = fnmatch.filter(names, pattern)
        # The pattern is probably misspelled.
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
    """Return the parameters in the folder by name, also under converted names if necessary.

    The transformers library defines the conversions. Raises `ConfigError` for a conversion that
    cannot be done for parts of a parameter.
    """
    stored: dict[str, _Stored] = {}
    for name, (_, entry) in headers.items():
        stored[name] = _Stored(entry.shape, {name: (entry, (0,) * len(entry.shape))})
    # Return early if no conversion is necessary, because `stored_forms` builds a second model.
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
    """Return the stored tensors of the parameter ``name`` with their offsets. Reads no values."""
    try:
        # Run the operations on meta tensors, so that torch checks the shapes.
        groups = []
        for names in form.names:
            groups.append(_group_on_meta(names, form, headers))
        whole = groups[0] if form.dim is None else torch.cat(groups, form.dim)
        # `torch.cat` ignores tensors of shape (0,), so check the number of dims here.
        if any(group.ndim != whole.ndim for group in groups):
            raise ValueError("they differ in their number of dims")
    except (RuntimeError, IndexError, ValueError) as error:
        raise ConfigError(
            f"{printable(name)} is put together from tensors that do not fit together: {error}"
        ) from None
    parts = {}
    begin = [0] * whole.ndim
    for names, group in zip(form.names, groups, strict=True):
        # A stacked tensor has one more dim than the tensor in the file.
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
    """Return the file and the header entry of each tensor in the folder, by name. Reads no values.

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
    """Return the index of the folder: name of a tensor -> name of its file. Empty without an index.

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
    """Resolve symbolic links: return the folder and the name of the file ``path/name``.

    The download cache of Hugging Face consists of links.
    """
    # Do not resolve a name that is a path. A name with a path can only come from a malicious index,
    # and `LocalFolder` rejects this name.
    if os.path.basename(name) == name:
        path, name = os.path.split(os.path.realpath(os.path.join(path, name)))
    # Do not map the file, because its pages would count as memory of the process.
    return LocalFolder(path, mapped=False), name


def _fill(tensor: Tensor, stored: _Stored, headers: _Headers) -> None:
    """Fill this rank's local shard of ``tensor``. Reads only rows that overlap the local shard."""
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
            # Never None, because each piece overlaps the local shard.
            wanted: Any = kept.intersect(piece)
            local[wanted.slices_in(kept)].copy_(values[wanted.slices_in(piece)])
            # Free the values before the next piece is read, so that one piece is in memory.
            del values
