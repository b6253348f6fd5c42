"""Whether a model fits in one process, and how many of its layers do: `fitting_model`."""

from __future__ import annotations

import copy
import os
from typing import Any

import torch

from parallel2d.config import HuggingFaceModel, LlamaModel, TrainConfig
from parallel2d.errors import ConfigError
from parallel2d.exchange import broadcast
from parallel2d.model_families import build_model
from parallel2d.runtime import Runtime

# Weights, those of the step before, gradients and their magnitudes, two moments, and what the
# parallel model has
_COPIES = 8
_SHARE = 0.6  # of the free memory


def fitting_model(config: TrainConfig, runtime: Runtime, notes: list[str]) -> Any:
    """``config.model``, or one with fewer layers where all of it does not fit in rank 0's memory.
    Collective. Raises `ConfigError` where the number of layers has no key, or one does not fit."""
    room = broadcast(free_bytes(runtime.device) * _SHARE)
    model = config.model
    needed = _bytes_of(model)
    if needed <= room:
        return model
    key = layers_key(model)
    if key is None:
        raise ConfigError(
            f"certify: one process needs {needed / 2**30:.1f} GiB for this model and has "
            f"{room / 2**30:.1f}; certify a smaller one of the same kind"
        )
    layers = _layers(model, key)
    while layers > 1:
        layers //= 2
        smaller = with_layers(model, key, layers)
        if _bytes_of(smaller) <= room:
            notes.append(
                f"{key}={layers} instead of {_layers(model, key)}: the whole model does not fit in "
                "one process"
            )
            return smaller
    raise ConfigError(
        f"certify: one process has {room / 2**30:.1f} GiB, and even one layer of this model needs "
        "more"
    )


def layers_key(model: Any) -> str | None:
    """The key that holds the number of layers."""
    if isinstance(model, LlamaModel):
        return "n_layers"
    if isinstance(model, HuggingFaceModel) and model.path is None:
        for key in ("num_hidden_layers", "n_layer", "num_layers"):
            if key in model.arguments:
                return key
    return None


def with_layers(model: Any, key: str, layers: int) -> Any:
    """A copy of ``model`` with so many layers."""
    smaller = copy.deepcopy(model)
    if isinstance(smaller, LlamaModel):
        smaller.n_layers = layers
    else:
        smaller.arguments[key] = layers
    return smaller


def _layers(model: Any, key: str) -> int:
    return int(model.n_layers if isinstance(model, LlamaModel) else model.arguments[key])


def _bytes_of(model: Any) -> float:
    module = build_model(model).module
    return 4.0 * _COPIES * sum(parameter.numel() for parameter in module.parameters())


def free_bytes(device: torch.device) -> float:
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    return float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
