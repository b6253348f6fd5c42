"""Learns which tensors of the blocks follow the length of the sequence, and finds blocks in which
positions meet outside of attention: `ContextCheck`.

[Note: whole against cut] Three forwards of a few positions run before the first one, without
gradients and dropout. Two run whole, with different lengths: a dim that differs follows the
sequence. In the third the stacks are split; each block gets the input that it had before, and what
it gives to attention and returns is compared with this rank's part of before. For this time
parameters that are zero, and scales that are small, get other values: a branch that begins near
zero hides what it computes. At the end the outputs of the model, and what modules in blocks keep as
attributes, are compared: losses that blocks leave aside show there.
"""

from __future__ import annotations

import logging
import math
import operator
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from parallel2d.base.errors import ConfigError
from parallel2d.base.exchange import all_gather
from parallel2d.parallel.context_axis import ContextAxis
from parallel2d.parallel.model_structure import class_name
from parallel2d.parallel.parallelize.context_blocks import (
    Path,
    SplitBlock,
    Stack,
    first_hidden,
    map_tensors,
)
from parallel2d.parallel.weights.geometry import local_part

log = logging.getLogger(__name__)

_MOST = 2**53  # of what is compared
_SMALL = 0.1  # a scale that hides what its branch computes
_POSITIONS = 8  # of a rank, at least, in what is compared
_Key = tuple[str, Path, int]  # of a block, and which time the block has it in a forward
# By how much two ways to compute the same may differ, relative to the largest value
_BOUNDS = {torch.float64: 1e-6, torch.float32: 1e-4}


class ContextCheck:
    """``groups``: over which ranks agree; ``multiple``: of the sequence's length, other axes' too;
    ``compares``: whether tensors have values."""

    def __init__(
        self,
        model: nn.Module,
        stacks: Sequence[Stack],
        groups: Sequence[dist.ProcessGroup],
        multiple: int,
        compares: bool,
    ) -> None:
        self._model, self._stacks, self._compares = model, stacks, compares
        self._multiple, self._groups = multiple, groups
        self._axis: ContextAxis = stacks[0].axis
        self._names: dict[nn.Module, tuple[SplitBlock, str]] = {}
        for stack in stacks:
            for block in stack.blocks:
                for name, module in block.module.named_modules(prefix=block.name):
                    self._names[module] = block, name
        # Of each forward the shapes; of the whole one this rank's slices
        self._shapes: list[dict[_Key, torch.Size]] = []
        self._slices: dict[_Key, Tensor] = {}
        self._seen: Counter[tuple[str, Path]] = Counter()
        self._order: dict[int, Stack] = {}
        self._differences: dict[_Key, float] = {}
        self._position = 0  # among them, of what is wrong
        # The modules that run, outermost first, and which one has made what
        self._running: list[str] = []
        self._made_by: dict[_Key, str] = {}
        self._is_split = False
        self._kept: dict[tuple[str, str], Tensor] = {}  # what modules kept in the whole forward

    def run(self, args: Any, kwargs: Any) -> None:
        """Learns from inputs of the model, and splits the stacks. Collective. Raises `ConfigError`
        on every rank where it is not right."""
        self._axis.is_learning = True
        for stack in self._stacks:
            stack.watcher = self
        try:
            with _branches_opened(self._model, self._compares), self._watched():
                sizes, expected = self._learn(args, kwargs)
                # Before any rank depends on another one's slices.
                self._kept = self._attributes()
                self._agree(self._choose(sizes))
                self._agree(self._compare(args, kwargs, sizes, expected))
        except ConfigError:
            for stack in self._stacks:
                stack.is_split = stack.is_open = False
            raise
        finally:
            self._axis.is_learning = False
            for stack in self._stacks:
                stack.watcher = None

    def _agree(self, problem: str) -> None:
        """Raises the same error on every rank where any has a problem."""
        # What one rank finds first another one may find later, by what follows from it.
        found = (self._position if problem else _MOST, problem)
        for group in self._groups if self._compares else ():
            found = min(all_gather(found, group), key=operator.itemgetter(0))
        _, problem = found
        if problem:
            raise ConfigError(f"mesh.context={self._axis.size}: {problem}")

    def _learn(self, args: Any, kwargs: Any) -> tuple[dict[int, int], Any]:
        """Runs whole sequences. Returns their lengths, each with that of what is compared, and what
        the model gives for that."""
        sizes = {length: self._shortened(length) for length in _lengths(args, kwargs)}
        if sizes:
            try:
                self._forward(args, kwargs, {length: short // 2 for length, short in sizes.items()})
                for stack in self._stacks:
                    self._find_parts(stack)
                return sizes, self._forward(args, kwargs, sizes)
            except ConfigError:
                raise
            except Exception as error:  # a model may take one length alone
                log.info("mesh.context: checked on whole sequences: %s", str(error).split("\n")[0])
        self._shapes.clear()
        return {}, self._forward(args, kwargs, {})

    def _compare(self, args: Any, kwargs: Any, sizes: dict[int, int], expected: Any) -> str:
        """What is wrong where blocks have slices, perhaps nothing."""
        self._is_split = True
        try:
            found = self._forward(args, kwargs, sizes)
        except ConfigError as error:
            return str(error).removeprefix(f"mesh.context={self._axis.size}: ")
        except Exception as error:
            at = next(reversed(self._seen), ("the model", ()))[0]
            return (
                f"{at} cannot compute on a slice of the sequence "
                f"({type(error).__name__}: {error}); {_ADVICE}"
            )
        return self._verdict(expected, found) if self._compares else ""

    def _shortened(self, length: int) -> int:
        """How many positions of ``length`` are compared. What does not divide, does not here."""
        ranks = self._axis.size
        step = self._multiple * ranks
        least = -(-_POSITIONS * ranks // step) * step
        return min(length, least + length % step)

    def _forward(self, args: Any, kwargs: Any, sizes: dict[int, int]) -> Any:
        self._shapes.append({})
        if not self._is_split:
            self._slices.clear()
        self._seen.clear()
        self._running.clear()
        args, kwargs = _shorten(args, sizes), _shorten(kwargs, sizes)
        return self._model(*args, **kwargs)

    # What blocks have

    def see(self, block: SplitBlock, path: Path, tensor: Tensor) -> None:
        self._order[id(block.stack)] = self._order.pop(id(block.stack), block.stack)
        number = self._seen[block.name, path]
        self._seen[block.name, path] += 1
        key = (block.name, path, number)
        self._shapes[-1][key] = tensor.shape
        if self._is_split:
            self._compare_one(block, key, tensor)
            return
        block.follows[path] = dims = self._following(block, key, tensor.shape)
        if not self._compares or len(dims) != 1 or tensor.shape[dims[0]] % self._axis.size:
            return
        in_parts = block.stack.in_parts and path[0] != "attention"
        # What modules inside have may be in parts or whole.
        if path[0] not in ("input", "result") or not in_parts:
            self._slices[key] = self._axis.cut(tensor.detach(), dims[0], in_parts).clone()

    def _following(self, block: SplitBlock, key: _Key, shape: torch.Size) -> tuple[int, ...]:
        """The dims that follow the length of the sequence."""
        if len(self._shapes) == 2:
            pairs = zip(shape, self._shapes[0].get(key, shape), strict=False)
            return tuple(dim for dim, (one, other) in enumerate(pairs) if one != other)
        # Of the input of the block the second dim is taken to be the length. The first dim of more
        # than one is that of samples.
        shapes = self._shapes[-1]
        whole = next((each for (name, _, _), each in shapes.items() if name == block.name), shape)
        return tuple(
            dim for dim in range(min(1, len(shape) - 1), len(shape)) if shape[dim] == whole[1]
        )

    def _find_parts(self, stack: Stack) -> None:
        """Notes where tensor ranks have parts of the hidden states: attention has all positions."""
        shapes, tensor = self._shapes[-1], self._axis.tensor
        for (name, path, _), shape in shapes.items():
            is_query = path[0] == "attention" and path[-1] == "query"
            if tensor is not None and is_query and name == stack.blocks[0].name:
                hidden = shapes.get((name, ("output",), 0), shape)
                stack.in_parts |= shape[-2] == hidden[-2] * tensor.size()

    def _compare_one(self, block: SplitBlock, key: _Key, tensor: Tensor) -> None:
        _, path, _ = key
        expected = self._slices.get(key)
        is_argument = path[0] in ("args", "kwargs")
        if is_argument:
            dims = block.follows.get(path, ())
            whole = self._shapes[-2].get(key)
            if whole is None or len(dims) != 1:
                return
            (dim,) = dims
            if whole[dim] == tensor.shape[dim]:
                return
            # Another block, or what is between them, has made it from slices.
            block.as_slices.add(path)
        if expected is None:
            return
        difference = float("inf")
        if expected.shape == tensor.shape:
            difference = _difference(tensor, expected)
        self._differences[key] = difference
        self._position += 1
        # The block is what runs, and its arguments are what others have made.
        running = ["", *self._running[: -1 if is_argument else None]]
        self._made_by[key] = path[1] if path[0] == "result" else running[-1]

    def input_of(self, block: SplitBlock, path: Path, own: Tensor) -> Tensor:
        """That of the whole forward: differences shall not add up."""
        expected = self._slices.get((block.name, path, self._seen[block.name, path] - 1))
        return own if expected is None or expected.shape != own.shape else expected

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Sees what modules inside blocks get and return, which tells where a difference begins."""

        def see(module: nn.Module, kind: str, value: Any) -> None:
            block, name = self._names[module]
            _, hidden = first_hidden(value)
            if name != block.name and hidden is not None:
                self.see(block, (kind, name), hidden)

        def enter(module: nn.Module, inputs: Any) -> None:
            if module in self._names:
                see(module, "input", inputs)
                self._running.append(self._names[module][1])

        def leave(module: nn.Module, _inputs: Any, output: Any) -> None:
            if module in self._names:
                self._running.pop()
                see(module, "result", output)

        hooks = [
            nn.modules.module.register_module_forward_pre_hook(enter),
            nn.modules.module.register_module_forward_hook(leave),
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    # What follows

    def _choose(self, sizes: dict[int, int]) -> str:
        """Splits the stacks whose attention is over positions, or says why it cannot."""
        executed = list(self._order.values())
        for stack in executed:
            stack.is_split = any(map(_attends, stack.blocks))
        split = [stack for stack in executed if stack.is_split]
        for module, (block, name) in self._names.items():
            # The statistics of a batch or a sequence, in training.
            is_norm = isinstance(module, nn.modules.batchnorm._NormBase)
            if is_norm and block.stack.is_split:
                return f"{name} is a {type(module).__name__}, which mixes positions; {_ADVICE}"
        if not split:
            name = executed[0].blocks[0].name if executed else type(self._model).__name__
            return (
                f"{name} calls no F.scaled_dot_product_attention over positions; models of "
                "transformers do with attn_implementation=sdpa"
            )
        split[-1].feeds_head = True
        problems = [self._problem_of_length(stack, sizes) for stack in split]
        return next(filter(None, problems), "")

    def _problem_of_length(self, stack: Stack, sizes: dict[int, int]) -> str:
        block = stack.blocks[0]
        shape, dims = self._shapes[-1][block.name, ("output",), 0], block.follows["output",]
        if len(dims) != 1:
            return ""
        seen = shape[dims[0]] * stack.parts
        lengths = {short: length for length, short in sizes.items()}
        return block.problem_of_length(lengths.get(seen, seen), stack.parts)

    def _attributes(self) -> dict[tuple[str, str], Tensor]:
        """The floating-point tensors that modules in blocks keep, such as a loss of their own."""
        found: dict[tuple[str, str], Tensor] = {}
        for module, (_, name) in self._names.items():
            for attribute, value in vars(module).items():
                if isinstance(value, Tensor) and value.is_floating_point():
                    found[name, attribute] = value
        return found

    def _problem_of_attributes(self, bound: float) -> str:
        for (name, attribute), now in self._attributes().items():
            before = self._kept.get((name, attribute), now)
            if before.shape == now.shape and _difference(now, before) > bound:
                return f"{name}.{attribute} is computed from a slice of the sequence; {_ADVICE}"
        return ""

    def _verdict(self, expected: Any, found: Any) -> str:
        # The widest, since what was computed in 16 bits may be kept in 32.
        bound = max((_BOUNDS.get(each.dtype, 3e-2) for each in self._slices.values()), default=0.0)
        differing = [key for key, each in self._differences.items() if each > bound]
        # What modules inside a block have may be anything, such as the tokens of an expert.
        if any(path[0] not in ("input", "result") for _, path, _ in differing):
            first = differing[0]
            difference, name = self._differences[first], self._made_by[first]
            kind = class_name(self._model.get_submodule(name))
            where = f"{name} ({kind})" if name else f"{kind}, between its blocks,"
            self._position = list(self._differences).index(first)
            return (
                f"{where} mixes positions outside of F.scaled_dot_product_attention, or "
                f"counts them (whole and cut differ by {difference:.1e}); {_ADVICE}"
            )
        problem = self._problem_of_attributes(bound)
        if problem:
            return problem
        for one, other in zip(_numbers(expected), _numbers(found), strict=False):
            # What the blocks return was compared more strictly.
            if one.shape != other.shape or _difference(other, one) > 4 * bound:
                return (
                    f"an output of {type(self._model).__name__} of shape {tuple(one.shape)} is not "
                    "that of whole sequences: losses and states that blocks leave aside "
                    "(output_router_logits, output_hidden_states, use_cache) need mesh.context=1"
                )
        return ""


def _attends(block: SplitBlock) -> bool:
    """Whether it has queries of one for each position."""
    for path, dims in block.follows.items():
        if path[0] == "attention" and path[-1] == "query" and len(dims) == 1:
            return True
    return False


_ADVICE = "use mesh.context=1 for this model"


def _difference(found: Tensor, expected: Tensor) -> float:
    found, expected = found.detach().double(), expected.detach().double()
    same = (found == expected) | (found.isnan() & expected.isnan())
    difference = torch.where(same, 0.0, found - expected).abs()
    if not difference.numel():
        return 0.0
    largest = expected.abs().nan_to_num(0.0, 0.0, 0.0).max().clamp(min=1e-30)
    return float(difference.nan_to_num(torch.inf).max() / largest)


def _numbers(outputs: Any) -> list[Tensor]:
    leaves = tree_leaves(outputs)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def _lengths(args: Any, kwargs: Any) -> list[int]:
    """Of sequences among the inputs: the second dim of [batch, length] integers, or else of
    [batch, length, dim]."""
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    found = [t.shape[1] for t in tensors if t.ndim == 2 and not t.is_floating_point()]
    found = found or [t.shape[1] for t in tensors if t.ndim == 3]
    return list(dict.fromkeys(found))


def _shorten(inputs: Any, sizes: dict[int, int]) -> Any:
    """The first positions of at most two samples."""

    def shorten(tensor: Tensor, _path: Path) -> Tensor:
        if tensor.ndim == 1 and tensor.shape[0] in sizes:
            return tensor[: sizes[tensor.shape[0]]]
        for dim in range(1, tensor.ndim):
            size = tensor.shape[dim]
            if size in sizes:
                tensor = tensor.narrow(dim, 0, sizes[size])
        return tensor[:2] if tensor.ndim > 1 else tensor

    return map_tensors(shorten, inputs) if sizes else inputs


@contextmanager
def _branches_opened(model: nn.Module, opens: bool) -> Iterator[None]:
    """Inside, parameters have values where they are zero, and scales where they are small."""
    before: list[tuple[Tensor, Tensor, Tensor]] = []
    if opens:
        for number, parameter in enumerate(model.parameters()):
            part = local_part(parameter.detach())
            is_scale = parameter.numel() == max(parameter.shape, default=1)
            closed = part.abs() < _SMALL if is_scale else part == 0
            if part.is_floating_point() and closed.any():
                before.append((part, closed, part[closed]))
                # The same on ranks that hold the same part.
                generator = torch.Generator().manual_seed(number)
                fan = max(1, math.prod(part.shape[1:]))
                values = torch.randn(part.shape, generator=generator) / (2 * fan**0.5)
                part.copy_(torch.where(closed, values.to(part), part))
    try:
        yield
    finally:
        for part, closed, values in before:
            part[closed] = values
