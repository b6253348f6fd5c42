"""Pretrained weights read into a sharded model: each rank reads its own rows of each tensor, no rank the whole of any but by need.

A folder as ``save_pretrained`` leaves it (safetensors, one file or several with an index) flows in; nothing in it is executed, and
pickled weights are not read.
"""

from __future__ import annotations

import logging
import os

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from parallel2d.checkpoint.folder import LocalFolder
from parallel2d.checkpoint.tensor_file import ByteSource, Entry, parse_json, printable, read_header, read_rows
from parallel2d.config import ConfigError
from parallel2d.parallelize.initialization import local_slices
from parallel2d.parallelize.structure import canonical_name

log = logging.getLogger(__name__)

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_MAX_INDEX = 64 * 2**20  # bytes


def has_weights(path: str) -> bool:
    """Whether the folder holds safetensors weights. Raises `ConfigError` when it holds only pickled ones."""
    if any(os.path.lexists(os.path.join(path, name)) for name in (INDEX, SINGLE)):
        return True
    pickled = [
        name for name in ("pytorch_model.bin", "pytorch_model.bin.index.json") if os.path.lexists(os.path.join(path, name))
    ]
    if pickled:
        raise ConfigError(
            f"{path} holds {pickled[0]} and no safetensors: a pickle can run code, so it is not read; save the model again with "
            "safe serialization, or set model.load_weights=false"
        )
    return False


@torch.no_grad()
def load_pretrained(model: nn.Module, path: str) -> set[str]:
    """Fills ``model``, sharded or not, with the tensors of the folder ``path``; returns the canonical names that it had.

    No communication: every rank reads the byte ranges of its own rows. Values are cast to the dtype of the parameter. A name may
    carry, or lack, the prefix of the model's base (``transformer.``, ``model.``), as published weights do. Parameters outside of
    the base that the folder does not have, a new head, are left to the caller and logged.

    Raises `ConfigError` for shapes that differ and for parameters of the base that the folder does not have.
    """
    places = _places(path)
    prefix = f"{getattr(model, 'base_model_prefix', '') or ''}."
    base = prefix if prefix != "." and isinstance(getattr(model, prefix[:-1], None), nn.Module) else ""
    here: dict[int, tuple[list[str], Tensor]] = {}
    persistent = {canonical_name(name) for name in model.state_dict()}
    for name, tensor in (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)):
        if canonical_name(name) in persistent:
            here.setdefault(id(tensor), ([], tensor))[0].append(canonical_name(name))
    found: set[str] = set()
    read: set[str] = set()
    missing, wrong = [], []
    for names, tensor in here.values():
        candidates = [n for name in names for n in (name, name.removeprefix(base), f"{prefix}{name}") if n in places]
        if not candidates:
            missing += names[:1]
            continue
        source, entry = places[candidates[0]]
        read.update(candidates)
        found.update(names)
        if entry.shape != tuple(tensor.shape):
            wrong.append(f"{printable(candidates[0])} has shape {entry.shape}, the model's is {tuple(tensor.shape)}")
        else:
            _read_slice(source, entry, tensor)
    of_base = [name for name in missing if name.startswith(base)]
    if wrong or of_base:
        lines = wrong + [f"{name} is missing" for name in of_base]
        raise ConfigError(f"{path} does not fit {type(model).__name__}: {'; '.join(lines[:5])}{' ...' if lines[5:] else ''}")
    if missing:
        log.warning("%s has no %s: drawn from the seed", path, ", ".join(missing))
    if unread := sorted(set(places) - read):
        log.info("%s: %d tensors are not read, %s the first", path, len(unread), printable(unread[0]))
    return found


def _places(path: str) -> dict[str, tuple[ByteSource, Entry]]:
    folder = LocalFolder(path, mapped=False)  # a mapped file would count, page by page, as memory of the rank
    files = [SINGLE]
    if os.path.lexists(os.path.join(path, INDEX)):
        weights = parse_json(folder.read(INDEX, _MAX_INDEX), f"{folder.label}/{INDEX}").get("weight_map")
        if not isinstance(weights, dict) or not all(isinstance(file, str) for file in weights.values()):
            raise ConfigError(f"{folder.label}/{INDEX}: weight_map is no mapping of names to files")
        files = sorted(set(weights.values()))
    found: dict[str, tuple[ByteSource, Entry]] = {}
    for file in files:
        source = folder.source(file)
        for name, entry in read_header(source, f"{folder.label}/{printable(file)}").items():
            found[name] = source, entry
    return found


def _read_slice(source: ByteSource, entry: Entry, tensor: Tensor) -> None:
    """Reads rows of dim 0 only, then cuts the other dims; a rectangle cut inside rows costs a read of those whole rows."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    slices = local_slices(tensor)
    if not entry.shape:
        local.copy_(read_rows(source, entry, 0, 1))
    elif local.numel():
        rows = read_rows(source, entry, slices[0].start, slices[0].stop)
        local.copy_(rows[(slice(None), *slices[1:])])
