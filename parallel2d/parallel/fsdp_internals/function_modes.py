"""Torch function modes at the bottom of a thread's stack."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.overrides import TorchFunctionMode


@contextmanager
def _modes() -> Iterator[list[TorchFunctionMode]]:
    """The modes of this thread, innermost first. Changes of the list are made at the end."""
    # The garbage collector may run inside this function and free a model, which removes a mode too.
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

    `torch.set_default_device` inserts its mode in the same way. A context manager would not work:
    context managers exit in reverse order, so a script that exits its own mode could remove
    ``mode`` instead. An earlier mode of the same class is removed.
    """
    with _modes() as modes:
        modes[:] = [*(each for each in modes if type(each) is not type(mode)), mode]


def remove(mode: TorchFunctionMode) -> None:
    """Deactivate ``mode`` in this thread, at any depth of the stack."""
    with _modes() as modes:
        modes[:] = [each for each in modes if each is not mode]
