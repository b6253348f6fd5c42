"""Check before the first forward that a model can be split over the context axis: `ContextCheck`.

The check finds the dims of the blocks' tensors that follow the length of the sequence, and the
blocks that mix positions outside of attention.

[Note: unsplit against split] Before the first training forward, the check calls the model three
times, on few positions, without gradients and dropout. Calls 1 and 2 are unsplit and use sequences
of different lengths: if the size of a dim differs between the two calls, the dim follows the length
of the sequence. In call 3 the stacks are split. Each block gets this rank's slice of the block's
input in call 2, so that differences do not accumulate. The outputs of blocks and the inputs of
attention are compared with slices of call 2. During the check, random values replace the parameter
elements that are zero and the scales that are small, because the output of a branch that ends with
such elements would be zero. At the end the check compares the outputs of the model, and tensors
that modules in blocks store as attributes, such as auxiliary losses.
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

_MOST = 2**53  # larger than the index of any comparison
_SMALL = 0.1  # a smaller scale makes the output of its branch too small to compare
_POSITIONS = 8  # smallest number of positions of a rank in the check
# Name of a block, path of a tensor, and number of earlier tensors at this path in the forward
_Key = tuple[str, Path, int]
# Allowed difference between the split and the unsplit forward, relative to the largest value of the
# tensor
_BOUNDS = {torch.float64: 1e-6, torch.float32: 1e-4}


class ContextCheck:
    """The check of one model.

    Args:
        model: the model, with intercepted attention.
        stacks: its stacks of blocks.
        groups: process groups that must agree on the result.
        multiple: the length of the sequence must be a multiple of this number, for other axes.
        compares: False to find only the dims, for tensors without values.
    """

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
        # Shapes of the tensors of each forward, and this rank's slices of the last unsplit forward
        self._shapes: list[dict[_Key, torch.Size]] = []
        self._slices: dict[_Key, Tensor] = {}
        self._seen: Counter[tuple[str, Path]] = Counter()
        self._order: dict[int, Stack] = {}
        self._differences: dict[_Key, float] = {}
        self._position = 0  # index of the first difference among the comparisons
        # Names of the running modules, outermost first, and the module that produced each tensor
        self._running: list[str] = []
        self._made_by: dict[_Key, str] = {}
        self._is_split = False
        # Attributes of modules after the unsplit forward
        self._kept: dict[tuple[str, str], Tensor] = {}

    def run(self, args: Any, kwargs: Any) -> None:
        """Run the check on inputs of the model, and mark the stacks to split. Collective.

        Raises `ConfigError` on every rank if any rank finds a problem.
        """
        self._axis.is_learning = True
        for stack in self._stacks:
            stack.watcher = self
        try:
            with _branches_opened(self._model, self._compares), self._watched():
                sizes, expected = self._learn(args, kwargs)
                # All ranks must raise the same error here: the split forward exchanges slices
                # between ranks.
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
        """Raise the same error on every rank if any rank has a problem."""
        # Ranks may find different consequences of one cause. Report the earliest difference.
        found = (self._position if problem else _MOST, problem)
        for group in self._groups if self._compares else ():
            found = min(all_gather(found, group), key=operator.itemgetter(0))
        _, problem = found
        if problem:
            raise ConfigError(f"mesh.context={self._axis.size}: {problem}")

    def _learn(self, args: Any, kwargs: Any) -> tuple[dict[int, int], Any]:
        """Run the unsplit forwards.

        Returns the shortened length for each sequence length of the inputs, and the model's output
        for the shortened inputs.
        """
        sizes = {}
        for length in _lengths(args, kwargs):
            sizes[length] = self._shortened(length)
        if sizes:
            try:
                self._forward(args, kwargs, {length: short // 2 for length, short in sizes.items()})
                for stack in self._stacks:
                    self._find_parts(stack)
                return sizes, self._forward(args, kwargs, sizes)
            except ConfigError:
                raise
            except Exception as error:  # a model may support only one length
                log.info("mesh.context: checked on whole sequences: %s", str(error).split("\n")[0])
        self._shapes.clear()
        return {}, self._forward(args, kwargs, {})

    def _compare(self, args: Any, kwargs: Any, sizes: dict[int, int], expected: Any) -> str:
        """Run a forward with split stacks. Return a description of the problem; empty if none."""
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
        """Return the number of positions that the check uses for sequences of ``length``.

        If the context axis does not divide ``length``, it does not divide the result either.
        """
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

    # Tensors of blocks

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
        # With sequence parallelism, a tensor inside of a block may be split over the tensor axis
        # or not, so it is not compared.
        if path[0] not in ("input", "result") or not in_parts:
            self._slices[key] = self._axis.cut(tensor.detach(), dims[0], in_parts).clone()

    def _following(self, block: SplitBlock, key: _Key, shape: torch.Size) -> tuple[int, ...]:
        """Return the dims that follow the length of the sequence."""
        if len(self._shapes) == 2:
            pairs = zip(shape, self._shapes[0].get(key, shape), strict=False)
            return tuple(dim for dim, (one, other) in enumerate(pairs) if one != other)
        # After only one forward, the second dim of the block's input counts as the sequence. The
        # first dim is the batch.
        shapes = self._shapes[-1]
        whole = next((each for (name, _, _), each in shapes.items() if name == block.name), shape)
        return tuple(
            dim for dim in range(min(1, len(shape) - 1), len(shape)) if shape[dim] == whole[1]
        )

    def _find_parts(self, stack: Stack) -> None:
        """Record if the hidden states are split over the tensor axis by position: then queries have
        more positions than hidden states."""
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
            # Another block, or a module between the blocks, has computed the argument from slices.
            block.as_slices.add(path)
        if expected is None:
            return
        difference = float("inf")
        if expected.shape == tensor.shape:
            difference = _difference(tensor, expected)
        self._differences[key] = difference
        self._position += 1
        # For an argument the innermost running module is the block itself, which did not compute
        # the argument.
        running = ["", *self._running[: -1 if is_argument else None]]
        self._made_by[key] = path[1] if path[0] == "result" else running[-1]

    def input_of(self, block: SplitBlock, path: Path, own: Tensor) -> Tensor:
        """Return the block's input in the unsplit forward, so that differences do not add up."""
        expected = self._slices.get((block.name, path, self._seen[block.name, path] - 1))
        return own if expected is None or expected.shape != own.shape else expected

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Record inputs and outputs of the modules in blocks, to find the first difference."""

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

    # Conclusions

    def _choose(self, sizes: dict[int, int]) -> str:
        """Mark the stacks that have attention over positions as split.

        Returns a description of the problem; empty if none.
        """
        executed = list(self._order.values())
        for stack in executed:
            stack.is_split = any(map(_attends, stack.blocks))
        split = [stack for stack in executed if stack.is_split]
        for module, (block, name) in self._names.items():
            # In training, batch and instance norms compute statistics over positions.
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
        problems = []
        for stack in split:
            problems.append(self._problem_of_length(stack, sizes))
        return next(filter(None, problems), "")

    def _problem_of_length(self, stack: Stack, sizes: dict[int, int]) -> str:
        block = stack.blocks[0]
        shape, dims = self._shapes[-1][block.name, ("output",), 0], block.follows["output",]
        if len(dims) != 1:
            return ""
        seen = shape[dims[0]] * stack.parts
        lengths = {}
        for length, short in sizes.items():
            lengths[short] = length
        return block.problem_of_length(lengths.get(seen, seen), stack.parts)

    def _attributes(self) -> dict[tuple[str, str], Tensor]:
        """Return the floating-point attributes of modules in blocks, such as an auxiliary loss."""
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
        # Use the largest bound: a float32 tensor may hold values that were computed in 16 bits.
        bound = max((_BOUNDS.get(each.dtype, 3e-2) for each in self._slices.values()), default=0.0)
        differing = []
        for key, each in self._differences.items():
            if each > bound:
                differing.append(key)
        # Differences only inside of blocks are allowed, because a tensor inside of a block need not
        # be a slice of positions, and may hold the tokens of an expert.
        if any(path[0] not in ("input", "result") for _, path, _ in differing):
            first = differing[0]
            difference, name = self._differences[first], self._made_by[first]
            kind = class_name(self._model.get_submodule(name))
            where = f"{name} ({kind})" if name else f"{kind}, between its blocks,"
            self._position = list(self._differences).index(first)
            return (
                f"{where} mixes positions outside of F.scaled_dot_product_attention, or "
                f"counts them (unsplit and split differ by {difference:.1e}); {_ADVICE}"
            )
        problem = self._problem_of_attributes(bound)
        if problem:
            return problem
        for one, other in zip(_numbers(expected), _numbers(found), strict=False):
            # The blocks were compared with the smaller bound, each from equal inputs.
            if one.shape != other.shape or _difference(other, one) > 4 * bound:
                return (
                    f"an output of {type(self._model).__name__} of shape {tuple(one.shape)} "
                    "differs from the output for unsplit sequences: losses and states outside of "
                    "the blocks' outputs (output_router_logits, output_hidden_states, use_cache) "
                    "need mesh.context=1"
                )
        return ""


def _attends(block: SplitBlock) -> bool:
    """Return True if a call of attention of ``block`` has one query per position."""
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
    numbers: list[Tensor] = []
    for leaf in leaves:
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            numbers.append(leaf)
    return numbers


def _lengths(args: Any, kwargs: Any) -> list[int]:
    """Return the lengths of sequences among the inputs.

    A length is the second dim of [batch, length] integers, or else of [batch, length, dim].
    """
    tensors = []
    for leaf in tree_leaves((args, kwargs)):
        if isinstance(leaf, Tensor):
            tensors.append(leaf)
    found = []
    for t in tensors:
        if t.ndim == 2 and not t.is_floating_point():
            found.append(t.shape[1])
    found = found or [t.shape[1] for t in tensors if t.ndim == 3]
    return list(dict.fromkeys(found))


def _shorten(inputs: Any, sizes: dict[int, int]) -> Any:
    """Cut ``inputs`` to two samples, and each sequence of a length to ``sizes[length]``
    positions."""

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
    """Give random values to parameter elements that are zero and to small scales. Restore the
    elements at the end."""
    before: list[tuple[Tensor, Tensor, Tensor]] = []
    if opens:
        for number, parameter in enumerate(model.parameters()):
            part = local_part(parameter.detach())
            is_scale = parameter.numel() == max(parameter.shape, default=1)
            closed = part.abs() < _SMALL if is_scale else part == 0
            if part.is_floating_point() and closed.any():
                before.append((part, closed, part[closed]))
                # The seed is the parameter's number, so that ranks with the same local shard get
                # the same values.
                generator = torch.Generator().manual_seed(number)
                fan = max(1, math.prod(part.shape[1:]))
                values = torch.randn(part.shape, generator=generator) / (2 * fan**0.5)
                part.copy_(torch.where(closed, values.to(part), part))
    try:
        yield
    finally:
        for part, closed, values in before:
            part[closed] = values
