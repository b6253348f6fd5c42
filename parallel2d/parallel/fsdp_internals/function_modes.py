"""Torch function modes at the bottom of a thread's stack."""

from __future__ import annotations

import torch
from torch.overrides import TorchFunctionMode


def _take_all() -> list[TorchFunctionMode]:
    """Empty the stack of this thread and return its modes, innermost first."""
    number: int = torch._C._len_torch_function_stack()
    return [torch._C._pop_torch_function_stack() for _ in range(number)]


def _put_all(modes: list[TorchFunctionMode]) -> None:
    for mode in reversed(modes):
        torch._C._push_on_torch_function_stack(mode)


def insert(mode: TorchFunctionMode) -> None:
    """Activate ``mode`` in this thread, below all active modes.

    `torch.set_default_device` inserts its mode in the same way. A context manager would not work:
    context managers exit in reverse order, so a script that exits its own mode could remove
    ``mode`` instead. An earlier mode of the same class is removed.
    """
    _put_all([*(each for each in _take_all() if type(each) is not type(mode)), mode])


def remove(mode: TorchFunctionMode) -> None:
    """Deactivate ``mode`` in this thread, at any depth of the stack."""
    _put_all([each for each in _take_all() if each is not mode])
