"""Costs of a step of a deep model, extrapolated from copies with few blocks: `by_blocks`.

[Note: few of the equal blocks] The cost of a model with equal blocks is a constant plus a cost per
block. First a copy with one block per stack is measured. Then, for each stack, a copy with two
blocks in this stack is measured. The difference of the two costs is the cost of one block of the
stack. To check the extrapolation, a further copy with the first, a middle and the last block of
every stack is measured. If the cost of this copy differs from the extrapolated cost, or a copy
cannot run, the full model is measured.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from typing import Any

from torch import nn

# Shorter stacks are measured completely, because the copies would cost as much.
_LEAST_BLOCKS = 5

Figures = Mapping[str, float]


@dataclass(frozen=True)
class EqualBlocks:
    """A stack: ``count`` consecutive equal blocks in ``container``, from index ``first``."""

    container: nn.ModuleList | nn.Sequential
    first: int
    count: int


def find_equal_blocks(model: nn.Module) -> list[EqualBlocks]:
    """Return the longest stack of equal blocks of each list in ``model``, if it is long enough.

    No stack is inside another. Blocks are equal if their modules have the same classes and their
    tensors the same shapes and dtypes. Other differences are found by the check of `by_blocks`.
    """
    if isinstance(model, nn.ModuleList | nn.Sequential):
        runs: list[EqualBlocks] = []
        first = 0
        for _, run in groupby(model, key=_description):
            runs.append(EqualBlocks(model, first, len(list(run))))
            first += runs[-1].count
        longest = max(runs, key=lambda run: run.count, default=None)
        if longest is not None and longest.count >= _LEAST_BLOCKS:
            return [longest]
    return list(chain.from_iterable(map(find_equal_blocks, model.children())))


def _description(block: nn.Module | None) -> list[Any]:
    """Return the properties that distinguish blocks. A list may hold None instead of a block."""
    if block is None:
        return []
    found: list[Any] = []
    for name, module in block.named_modules():
        found.append((name, type(module)))
    for name, tensor in [*block.named_parameters(), *block.named_buffers()]:
        found.append((name, tensor.shape, tensor.dtype, tensor.requires_grad))
    return found


def by_blocks(model: nn.Module, measure: Callable[[nn.Module], Figures | None]) -> Figures | None:
    """Return the result of ``measure`` for ``model``, from short copies if possible.

    See [Note: few of the equal blocks]. ``measure`` may change the copies, but must not change
    ``model``. None if the model cannot be measured.
    """
    stacks = find_equal_blocks(model)
    found = _extended(model, stacks, measure) if stacks else None
    return measure(model) if found is None else found


def _extended(
    model: nn.Module,
    stacks: Sequence[EqualBlocks],
    measure: Callable[[nn.Module], Figures | None],
) -> dict[str, float] | None:
    """Extrapolate from short copies; None if the cost is not a constant plus a cost per block."""
    one = [[0]] * len(stacks)
    base = measure(_without_blocks(model, stacks, one))
    spread = []
    for stack in stacks:
        spread.append([0, stack.count // 2, stack.count - 1])
    check = measure(_without_blocks(model, stacks, spread))
    if not base or not check:
        return None
    total, expected = dict(base), dict(base)
    for number, stack in enumerate(stacks):
        kept = [*one[:number], [0, 1], *one[number + 1 :]]
        longer = measure(_without_blocks(model, stacks, kept))
        if longer is None:
            return None
        for name, value in longer.items():
            of_block = value - base[name]
            total[name] += (stack.count - 1) * of_block
            expected[name] += 2 * of_block
    # Some bytes are rounded shares of an integer.
    if not all(math.isclose(value, check[name], rel_tol=1e-12) for name, value in expected.items()):
        return None
    return total


def _without_blocks(
    model: nn.Module, stacks: Sequence[EqualBlocks], kept: Sequence[Sequence[int]]
) -> nn.Module:
    """Return a copy of ``model`` that keeps, in each of ``stacks``, only the blocks with the
    indices in ``kept``. Index 0 is the first block of the stack."""
    before = []
    for stack in stacks:
        before.append(dict(stack.container._modules))
    # Remove the other blocks from the lists during the copy, and restore the lists afterwards.
    try:
        for stack, numbers in zip(stacks, kept, strict=True):
            modules = stack.container._modules
            items = list(modules.items())
            run = items[stack.first : stack.first + stack.count]
            chosen = []
            for number in numbers:
                chosen.append(run[number])
            items[stack.first : stack.first + stack.count] = chosen
            modules.clear()
            for place, (name, module) in enumerate(items):
                # `nn.ModuleList` looks up elements by position, so renumber its elements. Children
                # of an `nn.Sequential` may have other names; keep these names.
                modules[str(place) if name.isdecimal() else name] = module
        return copy.deepcopy(model)
    finally:
        for stack, kept_before in zip(stacks, before, strict=True):
            stack.container._modules.clear()
            stack.container._modules.update(kept_before)
