"""Copies of a model's buffers: `KeptBuffers`. Forward passes may change buffers, so a repeated step
first restores the buffers.
"""

from __future__ import annotations

from torch import Tensor, nn


class KeptBuffers:
    """Copies of a model's buffers."""

    def __init__(self, model: nn.Module) -> None:
        self._buffers = list(model.buffers())
        # By index in `_buffers`: the version of a buffer at its last copy, and the copy
        self._kept: dict[int, tuple[int, Tensor]] = {}

    def keep(self) -> None:
        """Copy the buffers that were written to since their last copy. Called before a step."""
        for index in self._written():
            buffer = self._buffers[index]
            self._kept[index] = buffer._version, buffer.clone()

    def put_back(self) -> None:
        """Restore the values that the buffers had at the last call of `keep`."""
        for index in self._written():
            self._buffers[index].copy_(self._kept[index][1])

    def _written(self) -> list[int]:
        """Return the indices of the buffers that were written to since their last copy."""
        found: list[int] = []
        for index, buffer in enumerate(self._buffers):
            if index not in self._kept or self._kept[index][0] != buffer._version:
                found.append(index)
        return found
