"""Files with whole tensors, which a script in one process reads and writes by ``torch.load`` and
``torch.save``: `save_full` and `load_full`."""

from __future__ import annotations

import io
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parallel2d.base.errors import ConfigError
from parallel2d.base.files import replace
from parallel2d.parallel.weights.states import Models, Optimizers, full_state, load_full_state
from parallel2d.training.checkpoint.convert.formats import load_torch
from parallel2d.training.checkpoint.save import Group

Path = str | os.PathLike[str]


def save_full(path: Path, model: Models, optimizer: Optimizers | None = None, **extra: Any) -> None:
    """Writes ``{"model": ..., "optimizer": ..., **extra}`` with whole tensors, as ``state_dict()``
    of the bare model and optimizer give them, to one file. Collective; rank 0 writes, completely or
    not at all.

    Memory: rank 0 holds the whole state in CPU memory, the others one whole tensor at a time.
    Raises `ConfigError` on every rank when the file cannot be written.
    """
    content = full_state(model, optimizer, key_by="id") | extra
    # Before the file is published: every rank has gathered the whole state.
    _world().all_gather(None)

    def write() -> None:
        replace(os.fspath(path), lambda file: torch.save(content, file), durable=True)

    _world().on_first(write, f"save_full: {path} not written")


def load_full(path: Path, model: Models, optimizer: Optimizers | None = None) -> dict[str, Any]:
    """Loads what `save_full` wrote, or a script in one process: a dict with such states, or the
    model's state dict alone. Returns the rest of the dict, on every rank. Collective; rank 0 reads,
    tensor by tensor, and no code in the file is run.

    Raises `ConfigError` on every rank for a file that cannot be read, and as `load_full_state`.
    """
    content: dict[str, Any] = {}

    def read() -> bytes:
        found = load_torch(os.fspath(path))
        if not isinstance(found, dict):
            raise ConfigError(f"{path} holds no dict but a {type(found).__name__}")
        is_state = all(isinstance(value, Tensor) for value in found.values())
        content.update({"model": found} if is_state else found)
        rest = io.BytesIO()
        states = ("model", "optimizer")
        torch.save({key: value for key, value in content.items() if key not in states}, rest)
        return rest.getvalue()

    rest = _world().on_first(read)
    load_full_state(model, optimizer, content)
    # It has been read in this way before, so it can be read again.
    extra: dict[str, Any] = torch.load(io.BytesIO(rest), map_location="cpu", weights_only=True)
    return extra


def _world() -> Group:
    return Group(dist.group.WORLD if dist.is_initialized() else None)
