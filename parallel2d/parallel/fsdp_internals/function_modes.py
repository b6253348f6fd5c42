"""Insert and remove torch function modes below the active modes of a thread."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.overrides import TorchFunctionMode


@contextmanager
def _modes() -> Iterator[list[TorchFunctionMode]]:
    """Yield the modes of this thread, innermost first. At the end the list becomes the stack."""
    # Disable the garbage collector: if it frees a model, a callback also changes the stack.
    collects = gc.isenabled()
    gc.disable()
    try:
        number: int = torch._C._len_torch_function_stack()
        modes = []
        for _ in range(number):
            modes.append(torch._C._pop_torch_function_stack())
        yield modes
        for mode in reversed(modes):
            torch._C._push_on_torch_function_stack(mode)
    finally:
        if collects:
            gc.enable()


def insert(mode: TorchFunctionMode) -> None:
    """Activate ``mode`` in this thread, below all active modes.

    `torch.set_default_device` inserts its mode in the same way. A context manager (``with mode:``)
    would put the mode on top, and a script that exits one of its modes would remove ``mode``
    instead. An earlier mode of the same class is removed.
    """
    with _modes() as modes:
        modes[:] = [*(each for each in modes if type(each) is not type(mode)), mode]


def remove(mode: TorchFunctionMode) -> None:
    """Deactivate ``mode`` in this thread, at any depth of the stack."""
    with _modes() as modes:
        modes[:] = [each for each in modes if each is not mode]
