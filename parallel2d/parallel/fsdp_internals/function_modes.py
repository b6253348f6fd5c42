"""Function modes at the bottom of a thread's stack."""

from __future__ import annotations

import torch
from torch.overrides import TorchFunctionMode


def _take_all() -> list[TorchFunctionMode]:
    """Empty the stack of this thread, and return its modes, the innermost first."""
    number: int = torch._C._len_torch_function_stack()
    return [torch._C._pop_torch_function_stack() for _ in range(number)]


def _put_all(modes: list[TorchFunctionMode]) -> None:
    for mode in reversed(modes):
        torch._C._push_on_torch_function_stack(mode)


def insert(mode: TorchFunctionMode) -> None:
    """Activate ``mode`` in this thread, below all modes that are active.

    A context manager would have to be left in the order in which it was entered: a script that
    leaves a mode of its own would leave this one in its place. `torch.set_default_device` does the
    same with its mode. An earlier mode of the same class leaves.
    """
    _put_all([*(each for each in _take_all() if type(each) is not type(mode)), mode])


def remove(mode: TorchFunctionMode) -> None:
    """Deactivate ``mode`` in this thread, wherever it is in the stack."""
    _put_all([each for each in _take_all() if each is not mode])
