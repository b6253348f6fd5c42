"""What a step of a deep model costs, from copies with few of its equal blocks: `by_blocks`.

[Note: few of the equal blocks] A model of equal blocks costs a constant and so much per block. So a
copy is measured with one block of each stack, and for each stack a copy with two; the difference is
a block's. A third kind of copy, with the first, a middle and the last block of every stack, must
cost what follows from these. Where it does not, or where such a copy cannot run, the whole model is
measured.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from parallel2d.model_structure import join_names

# Shorter stacks are run as they are: copies of other lengths would cost as much.
_LEAST_BLOCKS = 5
# Each stack takes a run of its own.
_MOST_STACKS = 4

Figures = Mapping[Any, float]


@dataclass(frozen=True)
class EqualBlocks:
    """A run of ``count`` equal blocks in ``container``, which is called ``name`` in the model.
    ``first``: the number of the first of them."""

    name: str
    container: nn.ModuleList | nn.Sequential
    first: int
    count: int


def find_equal_blocks(model: nn.Module) -> list[EqualBlocks]:
    """The longest run of equal elements of each list of ``model``, where it is long enough to
    matter; none is inside another. Equal are the classes, parameters, buffers and plain attributes
    of the blocks and of all modules in them; an attribute may count the blocks."""
    found: list[EqualBlocks] = []

    def visit(name: str, module: nn.Module) -> None:
        if isinstance(module, nn.ModuleList | nn.Sequential):
            run = _longest_run(name, module)
            if run.count >= _LEAST_BLOCKS:
                found.append(run)
                return
        for child_name, child in module.named_children():
            visit(join_names(name, child_name), child)

    visit("", model)
    return found


def without_blocks(
    model: nn.Module, stacks: Sequence[EqualBlocks], kept: Sequence[Sequence[int]]
) -> nn.Module:
    """A copy of ``model`` that has, of each of ``stacks``, the blocks of these numbers alone,
    counted from the first of the run."""
    with _cut(stacks, kept):
        return copy.deepcopy(model)


def by_blocks(
    model: nn.Module,
    measure: Callable[[nn.Module], Figures | None],
    *,
    checks: bool = True,
) -> Figures | None:
    """What ``measure`` finds for ``model``, from short copies of it where that is sound; see
    [Note: few of the equal blocks]. ``measure`` may use up a copy, and changes nothing of
    ``model``; None: it cannot be measured. ``checks=False``: where the same model was found to be
    sound before."""
    stacks = find_equal_blocks(model)
    if stacks and len(stacks) <= _MOST_STACKS:
        found = _extended(model, stacks, measure, checks)
        if found is not None:
            return found
    return measure(model)


def _extended(
    model: nn.Module,
    stacks: Sequence[EqualBlocks],
    measure: Callable[[nn.Module], Figures | None],
    checks: bool,
) -> dict[Any, float] | None:
    """None where the cost is not a constant and so much per block."""
    one = [[0]] * len(stacks)
    base = _measured(model, stacks, one, measure)
    spread = [[0, stack.count // 2, stack.count - 1] for stack in stacks]
    check = _measured(model, stacks, spread, measure) if checks else base
    if not base or not check:
        return None
    total = dict(base)
    expected = dict(base)
    for number, stack in enumerate(stacks):
        kept = [*one[:number], [0, 1], *one[number + 1 :]]
        longer = _measured(model, stacks, kept, measure)
        if longer is None or longer.keys() != base.keys():
            return None
        for name, value in longer.items():
            of_block = value - base[name]
            total[name] += (stack.count - 1) * of_block
            expected[name] += 2 * of_block
    if not checks:
        return total
    for name, value in expected.items():
        # Some bytes are shares of a whole number, and rounded.
        if not math.isclose(value, check.get(name, math.nan), rel_tol=1e-12):
            return None
    return total


def _measured(
    model: nn.Module,
    stacks: Sequence[EqualBlocks],
    kept: Sequence[Sequence[int]],
    measure: Callable[[nn.Module], Figures | None],
) -> Figures | None:
    return measure(without_blocks(model, stacks, kept))


@contextmanager
def _cut(stacks: Sequence[EqualBlocks], kept: Sequence[Sequence[int]]) -> Iterator[None]:
    """Takes the other blocks out of the lists, so that they are not copied."""
    before = [dict(stack.container._modules) for stack in stacks]
    try:
        for stack, numbers in zip(stacks, kept, strict=True):
            _keep(stack, numbers)
        yield
    finally:
        for stack, modules in zip(stacks, before, strict=True):
            stack.container._modules.clear()
            stack.container._modules.update(modules)


def _keep(stack: EqualBlocks, numbers: Sequence[int]) -> None:
    items = list(stack.container._modules.items())
    run = items[stack.first : stack.first + stack.count]
    left = items[: stack.first]
    left += [run[number] for number in numbers]
    left += items[stack.first + stack.count :]
    modules = stack.container._modules
    modules.clear()
    for place, (name, module) in enumerate(left):
        # Lists find their elements by these names; those of a Sequential may be words.
        modules[str(place) if name.isdecimal() else name] = module


def _longest_run(name: str, container: nn.ModuleList | nn.Sequential) -> EqualBlocks:
    descriptions = [_description(block) for block in container]
    best = EqualBlocks(name, container, 0, 0)
    start = 0
    for place in range(1, len(descriptions) + 1):
        if place < len(descriptions) and _is_equal(descriptions, start, place):
            continue
        if place - start > best.count:
            best = EqualBlocks(name, container, start, place - start)
        start = place
    return best


def _is_equal(descriptions: Sequence[list[Any]], one: int, other: int) -> bool:
    """Of two blocks by their numbers. Attributes that count the blocks do not differ."""
    if len(descriptions[one]) != len(descriptions[other]):
        return False
    for (key, value), (other_key, other_value) in zip(
        descriptions[one], descriptions[other], strict=True
    ):
        if (key, value) == (other_key, other_value):
            continue
        is_number = isinstance(value, int) and isinstance(other_value, int)
        if key != other_key or not is_number or other_value - value != other - one:
            return False
    return True


def _description(block: nn.Module) -> list[Any]:
    """(key, value) of what can make blocks differ."""
    found: list[Any] = []
    for name, module in block.named_modules():
        found.append((name, type(module)))
        tensors: Mapping[str, Tensor | None]
        for tensors in (module._parameters, module._buffers):
            for key, value in tensors.items():
                found.append((key, _shape(value)))
        for key, setting in vars(module).items():
            if isinstance(setting, bool | int | float | str | tuple | None):
                found.append((key, setting))
    return found


def _shape(value: Tensor | None) -> Any:
    if value is None:
        return None
    return tuple(value.shape), value.dtype, value.requires_grad
