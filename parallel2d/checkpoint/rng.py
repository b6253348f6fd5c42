"""Random number generators of a rank as tensors ``rng/<rank>/<generator>``: `rng_tensors` returns
their states, `restore_rng` sets them.

The generators are torch's on CPU, torch's on the rank's accelerator, Python's and NumPy's. A state
from a checkpoint is checked before it is set. States belong to ranks, so they carry over only to a
run with as many ranks.
"""

from __future__ import annotations

import random
from typing import Any

import numpy
import torch
from torch import Tensor

from parallel2d.checkpoint.archive import Checkpoint
from parallel2d.files.tensor_file import DamagedCheckpointError

_TWISTER = 624  # words of a Mersenne Twister's state, in Python and in NumPy's legacy generator


def rng_tensors(rank: int) -> dict[str, Tensor]:
    """``rng/<rank>/<generator>`` -> state, all on CPU."""
    prefix = f"rng/{rank:05d}"
    version, words, gauss = random.getstate()
    found = {
        f"{prefix}/torch": torch.get_rng_state(),
        f"{prefix}/python": torch.tensor([version, *words], dtype=torch.int64),
        f"{prefix}/python_gauss": _optional(gauss),
    }
    state: Any = numpy.random.get_state(legacy=False)
    if state["bit_generator"] == "MT19937":
        words = [int(word) for word in state["state"]["key"]]
        found[f"{prefix}/numpy"] = torch.tensor(
            [*words, int(state["state"]["pos"])], dtype=torch.int64
        )
        found[f"{prefix}/numpy_gauss"] = _optional(state["gauss"] if state["has_gauss"] else None)
    if torch.cuda.is_available():
        found[f"{prefix}/accelerator"] = torch.cuda.get_rng_state().cpu()
    return found


def restore_rng(rank: int, checkpoint: Checkpoint) -> None:
    """Sets this rank's generators. Raises `DamagedCheckpointError` when a stored state cannot be
    one."""
    prefix = f"rng/{rank:05d}"

    def stored(name: str, dtype: str, shape: tuple[int, ...] | None) -> Tensor | None:
        tensor = checkpoint.tensors.get(f"{prefix}/{name}")
        if tensor is None:
            return None
        if tensor.dtype != dtype or (shape is not None and tensor.shape != shape):
            raise DamagedCheckpointError(
                f"{checkpoint.folder.label}: {prefix}/{name} is no state of a random generator"
            )
        return checkpoint.read(f"{prefix}/{name}")

    try:
        if (state := stored("torch", "U8", torch.get_rng_state().shape)) is not None:
            torch.set_rng_state(state)
        if torch.cuda.is_available():
            state = stored("accelerator", "U8", torch.cuda.get_rng_state().shape)
            if state is not None:
                torch.cuda.set_rng_state(state)
        words, gauss = stored("python", "I64", (_TWISTER + 2,)), stored("python_gauss", "F64", None)
        if words is not None and gauss is not None:
            version, *rest = words.tolist()
            random.setstate((version, tuple(rest), gauss.item() if gauss.numel() else None))
        words, gauss = stored("numpy", "I64", (_TWISTER + 1,)), stored("numpy_gauss", "F64", None)
        if words is not None and gauss is not None:
            _restore_numpy(words, gauss)
    except DamagedCheckpointError:
        raise
    except (ValueError, RuntimeError, TypeError, OverflowError):
        raise DamagedCheckpointError(
            f"{checkpoint.folder.label}: {prefix} is no state of a random generator"
        ) from None


def _restore_numpy(words: Tensor, gauss: Tensor) -> None:
    # NumPy sets what it is given.
    *key, position = words.tolist()
    if not 0 <= position <= _TWISTER or not all(0 <= word < 2**32 for word in key):
        raise ValueError("NumPy's generator")
    cached = gauss.item() if gauss.numel() else 0.0
    state = ("MT19937", numpy.array(key, numpy.uint32), position, int(gauss.numel() > 0), cached)
    numpy.random.set_state(state)


def _optional(value: float | None) -> Tensor:
    return torch.tensor([] if value is None else [value], dtype=torch.float64)
