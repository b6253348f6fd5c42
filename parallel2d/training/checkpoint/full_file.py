"""Single files with unsharded tensors: `save_full` and `load_full`. A script in one process can
read and write these files with ``torch.load`` and ``torch.save``."""

from __future__ import annotations

import io
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel2d.base.errors import ConfigError
from parallel2d.base.files import replace
from parallel2d.parallel.weights.named_tensors import part_of
from parallel2d.parallel.weights.states import Models, Optimizers, full_state, load_full_state
from parallel2d.training.checkpoint.convert.formats import load_torch
from parallel2d.training.checkpoint.save import Group

Path = str | os.PathLike[str]


def save_full(path: Path, model: Models, optimizer: Optimizers | None = None, **extra: Any) -> None:
    """Write ``{"model": ..., "optimizer": ..., **extra}`` to one file, with unsharded tensors as in
    ``state_dict()`` of the unparallelized model and optimizer.

    If the write fails, no file remains. Rank 0 holds the complete unsharded state in CPU memory;
    each other rank holds one unsharded tensor at a time. Collective. Raises `ConfigError` on every
    rank if the file cannot be written.
    """
    content = full_state(model, optimizer, key_by="id") | extra
    # A barrier: the file must not be published before every rank has gathered the complete state.
    group = _ranks_of(model)
    group.all_gather(None)

    def write() -> None:
        replace(os.fspath(path), lambda file: torch.save(content, file), durable=True)

    group.on_first(write, f"save_full: {path} not written")


def load_full(path: Path, model: Models, optimizer: Optimizers | None = None) -> dict[str, Any]:
    """Load a file that `save_full` or a script in one process has written. The file contains either
    the dict of `save_full`, or only the model's state dict.

    Returns all other entries of the dict on every rank. Rank 0 reads the file one tensor at a time,
    and executes no code from it. Collective. Raises `ConfigError` on every rank if the file cannot
    be read, and as `load_full_state`.
    """
    content: dict[str, Any] = {}

    def read() -> bytes:
        found = load_torch(os.fspath(path))
        if not isinstance(found, dict):
            raise ConfigError(f"{path} holds a {type(found).__name__}, not a dict")
        is_state = all(isinstance(value, Tensor) for value in found.values())
        content.update({"model": found} if is_state else found)
        rest = io.BytesIO()
        states = ("model", "optimizer")
        torch.save({key: value for key, value in content.items() if key not in states}, rest)
        return rest.getvalue()

    rest = _ranks_of(model).on_first(read)
    load_full_state(model, optimizer, content)
    # Rank 0 has already read this content with weights_only, so the second read is safe.
    extra: dict[str, Any] = torch.load(io.BytesIO(rest), map_location="cpu", weights_only=True)
    return extra


def _ranks_of(model: Models) -> Group:
    if not dist.is_initialized():
        return Group(None)
    models = [model] if isinstance(model, nn.Module) else model.values()
    groups = set(map(part_of, models))
    if len(groups) > 1:
        raise ConfigError(
            "save_full and load_full: the models are on meshes of different ranks; use one file "
            "for each"
        )
    return Group(next(iter(groups), None) or dist.group.WORLD)
