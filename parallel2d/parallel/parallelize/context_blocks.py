"""Blocks that compute on a slice of the positions: `Stack` and `SplitBlock`.

A stack is the repeated blocks of one container, such as ``model.layers``. The first block of a
stack cuts its input into slices, and the last block joins the slices of its output. Between the
first and the last block, only ``F.scaled_dot_product_attention`` mixes positions of different
ranks; see `context_attention`. Modules outside of the stacks get full sequences.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from parallel2d.base.device import preserve_rng_states
from parallel2d.base.errors import ConfigError
from parallel2d.models.attention import grouped_attention
from parallel2d.parallel.context_axis import ContextAxis
from parallel2d.parallel.fsdp_internals.sharded_model import in_backward, saving_hooks
from parallel2d.parallel.parallelize.context_attention import (
    attend_to_all,
    attend_to_slices,
)

# Path of a tensor in the arguments of a block, or in the arguments or the result of an attention
# call
Path = tuple[Any, ...]


def map_tensors(function: Callable[[Tensor, Path], Any], value: Any, path: Path = ()) -> Any:
    """Replace each tensor in nested tuples, lists and dicts by ``function(tensor, path)``."""
    if isinstance(value, Tensor):
        return function(value, path)
    if type(value) in (tuple, list):
        return type(value)(map_tensors(function, v, (*path, i)) for i, v in enumerate(value))
    if type(value) is dict:
        return {key: map_tensors(function, v, (*path, key)) for key, v in value.items()}
    return value


def first_hidden(value: Any) -> tuple[Path, Tensor | None]:
    """Return the path and the tensor of the hidden states: the first floating-point tensor."""
    found: list[tuple[Path, Tensor]] = []

    def see(tensor: Tensor, path: Path) -> None:
        if tensor.is_floating_point() and not found:
            found.append((path, tensor))

    map_tensors(see, value)
    return found[0] if found else ((), None)


class Stack:
    """Blocks of one container, which are split over the context axis together."""

    def __init__(self, axis: ContextAxis) -> None:
        self.axis = axis
        self.blocks: list[SplitBlock] = []
        self.is_split = False  # True if the blocks compute on slices
        # True if the hidden states are also split over the tensor axis (sequence parallelism)
        self.in_parts = False
        self.feeds_head = False  # True if no other stack runs after this stack
        self.is_open = False  # True between the first and the last block of a forward
        self.watcher: Any = None  # the `ContextCheck`, while it runs
        # True if all ranks draw the same random numbers inside of the blocks
        self.draws_alike = True

    @property
    def parts(self) -> int:
        """Number of slices of the hidden states over the tensor axis."""
        tensor = self.axis.tensor
        return tensor.size() if self.in_parts and tensor is not None else 1

    def check_closed(self) -> None:
        """Raise `ConfigError` if a forward has ended between the first and the last block."""
        if self.is_open:
            self.is_open = False
            raise ConfigError(
                f"mesh.context={self.axis.size}: {self.blocks[-1].name} was not called after "
                f"{self.blocks[0].name}, so the sequence was not joined again; models that skip "
                "blocks need mesh.context=1"
            )


class SplitBlock:
    """One block of a stack.

    Before the first split forward, `context_check` sets the fields that describe the tensors of the
    block.
    """

    def __init__(self, stack: Stack, name: str, module: nn.Module) -> None:
        self.stack, self.name, self.module = stack, name, module
        # Path of a tensor -> its dims with a size that follows the length of the sequence
        self.follows: dict[Path, tuple[int, ...]] = {}
        # Paths of arguments that are slices already, because another block computed them
        self.as_slices: set[Path] = set()
        self._own = 0  # number of positions of this rank in this forward
        # Name of the running child module, and the number of its calls of attention in this forward
        self._child, self._calls = "", 0
        self._is_active = False
        self._hooks: Any = None  # the saved-tensors hooks that were active at the block's start
        # For each call of attention of a forward: are the queries split, and are the keys split?
        self.splits: list[tuple[bool, bool]] = []
        self._plain = module.forward  # the forward without checkpointing and compilation
        stack.blocks.append(self)

    def intercept(self) -> None:
        """Redirect the block's calls of attention to `attention`.

        Call this before activation checkpointing, so that the recomputation is redirected too.
        """
        self._plain = self.module.forward = self._forward_of(self.module, "")
        # A block with its own activation checkpointing calls only its children in backward.
        for name, child in self.module.named_children():
            child.forward = self._forward_of(child, name)

    def split(self) -> None:
        """Make the block cut its arguments.

        Call this after activation checkpointing, so that the checkpoint saves slices.
        """
        self.module.forward = functools.partial(self._around, self.module.forward)

    def _forward_of(self, module: nn.Module, child: str) -> Callable[..., Any]:
        """Return the forward of ``module``, the block or its ``child``, with the interception."""
        given = vars(module).get("forward")

        def forward(*args: Any, **kwargs: Any) -> Any:
            # `forward` is looked up in each call because sharding changes the class of the module
            # later. ``run`` is not a bound method, because equal blocks would then not share
            # compiled code.
            run = given or functools.partial(type(module).forward, module)
            if not torch.compiler.is_compiling():
                with self._intercepted(child):
                    return run(*args, **kwargs)
            with nullcontext() if child else _Intercept(self):
                return run(*args, **kwargs)

        return forward

    @contextmanager
    def _intercepted(self, child: str) -> Iterator[None]:
        before = self._child, self._calls, self._is_active
        self._child, self._calls, self._is_active = child, 0, True
        if not child:
            self._hooks = saving_hooks()
        try:
            with nullcontext() if before[2] else _Intercept(self):
                yield
        finally:
            self._child, self._calls, self._is_active = before

    def _around(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        stack, axis = self.stack, self.stack.axis
        given: dict[str, Any] = {"args": args, "kwargs": kwargs}
        if stack.watcher is not None:
            forward = self._plain
            self.splits.clear()
            map_tensors(lambda tensor, path: stack.watcher.see(self, path, tensor), given)
        if stack.is_split:
            given = self._cut(given)
        with nullcontext() if stack.draws_alike else self._own_numbers():
            output = forward(*given["args"], **given["kwargs"])
        if stack.watcher is not None:
            _, hidden = first_hidden(output)
            if hidden is not None:
                stack.watcher.see(self, ("output",), hidden)
        if not stack.is_split or self is not stack.blocks[-1]:
            return output
        stack.is_open = False
        return output if stack.feeds_head and not axis.joins else self._join(output)

    @contextmanager
    def _own_numbers(self) -> Iterator[None]:
        """Draw different random numbers on each rank inside of this context.

        The seed is drawn from the generator that all ranks share. Therefore modules outside of the
        blocks still draw the same numbers on all ranks, and recomputation draws the numbers of the
        forward again.
        """
        seed = int(torch.randint(2**62, ()))
        with preserve_rng_states():
            torch.manual_seed((seed + self.stack.axis.rank * 0x9E3779B97F4A7C15) % 2**63)
            yield

    # Arguments and outputs

    def _cut(self, given: dict[str, Any]) -> dict[str, Any]:
        stack, axis = self.stack, self.stack.axis
        hidden_path, hidden = first_hidden(given)
        if hidden is None:
            raise ConfigError(f"mesh.context={axis.size}: {self.name} receives no hidden states")
        (dim,) = self.follows[hidden_path]
        is_first = self is stack.blocks[0]
        if is_first:
            self._check_length(hidden.shape[dim] * stack.parts, stack.parts)
            stack.is_open = True
        elif not stack.is_open and not in_backward():
            raise ConfigError(
                f"mesh.context={axis.size}: {self.name} was called before "
                f"{stack.blocks[0].name}, which cuts the sequence; models that skip blocks need "
                "mesh.context=1"
            )
        self._own = hidden.shape[dim] * stack.parts // (axis.size if is_first else 1)

        def cut(tensor: Tensor, path: Path) -> Tensor:
            if path != hidden_path:
                return self._cut_argument(tensor, path)
            own = tensor
            if is_first:
                # Autograd saves the slice. A view would keep the memory of the full sequence alive.
                own = axis.cut(tensor, dim, stack.in_parts)
                own = own.clone(memory_format=torch.contiguous_format)
            if stack.watcher is not None:
                own = stack.watcher.input_of(self, path, own)
            return own

        found: dict[str, Any] = map_tensors(cut, given)
        return found

    def problem_of_length(self, whole: int, parts: int) -> str:
        """Return why sequences of ``whole`` positions cannot be split; empty if they can."""
        ranks = self.stack.axis.size
        if whole % (ranks * parts) == 0 and whole >= 2 * ranks:
            return ""
        return (
            f"{self.name} receives sequences of {whole} positions, which must be a multiple of "
            f"{ranks * parts} and at least {2 * ranks}: change train.seq_len, or pad batches"
        )

    def _check_length(self, whole: int, parts: int = 1) -> None:
        problem = self.problem_of_length(whole, parts)
        if problem:
            raise ConfigError(f"mesh.context={self.stack.axis.size}: {problem}")

    def _cut_argument(self, tensor: Tensor, path: Path) -> Tensor:
        axis = self.stack.axis
        dims = self.follows.get(path)
        if dims is None:
            # `ContextCheck` has not seen this argument, for example a mask that only some batches
            # have.
            whole = self._own * axis.size
            dims = tuple(dim for dim, size in enumerate(tensor.shape) if size == whole)
        if not dims or path in self.as_slices or is_mask(tensor, dims):
            return tensor
        if len(dims) > 1:
            raise ConfigError(
                f"mesh.context={axis.size}: which dim of {tuple(tensor.shape)} is the sequence, of "
                f"an argument of {self.name}?"
            )
        if tensor.shape[dims[0]] % axis.size:
            self._check_length(tensor.shape[dims[0]])
        return axis.cut(tensor, dims[0])

    def _join(self, output: Any) -> Any:
        hidden_path, _ = first_hidden(output)
        (dim,) = self.follows["output",]

        def join(tensor: Tensor, path: Path) -> Tensor:
            if path != hidden_path:
                return tensor
            return self.stack.axis.join(tensor, dim, self.stack.in_parts)

        return map_tensors(join, output)

    # Attention

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: Any,
    ) -> Tensor:
        """Replacement of ``F.scaled_dot_product_attention`` for this rank's slice of positions."""
        options = {"dropout_p": dropout_p, "is_causal": is_causal, **options}
        if torch.compiler.is_compiling():
            return self.attention_in_graph(query, key, value, attn_mask, options)
        stack = self.stack
        place = ("attention", self._child, self._calls)
        self._calls += 1
        if not self._child and stack.is_split and saving_hooks() != self._hooks:
            raise ConfigError(
                f"mesh.context={stack.axis.size}: {self.name} recomputes its attention inside of "
                "its own forward; use activation_checkpointing=full instead"
            )
        given = {"query": query, "key": key, "value": value}
        if stack.watcher is not None:
            for name, tensor in given.items():
                stack.watcher.see(self, (*place, name), tensor)
        output = self._attend(place, query, key, value, attn_mask, options)
        if stack.watcher is not None:
            stack.watcher.see(self, (*place, "result"), output)
        return output

    def attention_in_graph(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        options: dict[str, Any],
    ) -> Tensor:
        """Replacement of attention in compiled code, which must not change attributes.

        The name of this function marks redirected calls in stack traces; see `compilation`.
        """
        splits = self.splits[0] if self.stack.is_split else (False, False)
        if self.stack.is_split and any(other != splits for other in self.splits):
            raise ConfigError(f"{self.name} attends over positions and over other dims")
        return self.split_attention(*splits, query, key, value, mask, options)

    def _attend(
        self,
        place: Path,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        options: dict[str, Any],
    ) -> Tensor:
        positions = (query.ndim - 2,)
        splits_query = self.follows.get((*place, "query")) == positions
        splits_keys = self.follows.get((*place, "key")) == positions
        if self.stack.watcher is not None:
            self.splits.append((splits_query, splits_keys))
        if not self.stack.is_split:
            splits_query = splits_keys = False
        return self.split_attention(splits_query, splits_keys, query, key, value, mask, options)

    def split_attention(
        self,
        splits_query: bool,
        splits_keys: bool,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        options: dict[str, Any],
    ) -> Tensor:
        if not (splits_query or splits_keys):
            return grouped_attention(query, key, value, attn_mask=mask, **options)
        ranks = self.stack.axis.size
        if not splits_query or query.shape[-2] != self._own or query.ndim not in (3, 4):
            raise ConfigError(
                f"mesh.context={ranks}: attention of {self.name} has queries of shape "
                f"{tuple(query.shape)}, expected [batch, heads, positions, dim] with its "
                f"{self._own} positions"
            )
        if query.ndim == 3:
            query, key, value = (tensor.unsqueeze(1) for tensor in (query, key, value))
            mask = mask.unsqueeze(1) if mask is not None and mask.ndim == 3 else mask
            return self._over_positions(query, key, value, mask, splits_keys, options).squeeze(1)
        return self._over_positions(query, key, value, mask, splits_keys, options)

    def _over_positions(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        splits_keys: bool,
        options: dict[str, Any],
    ) -> Tensor:
        axis = self.stack.axis
        if not splits_keys:
            return attend_to_all(axis, query, key, value, mask, options)
        return attend_to_slices(axis, self.name, query, key, value, mask, options)


def is_mask(tensor: Tensor, dims: Sequence[int]) -> bool:
    """Return True if ``tensor`` has values for pairs of positions or for keys, such as a mask.

    Attention needs such an argument unsplit. ``dims`` are the dims that follow the sequence.
    """
    return len(dims) > 1 or (tensor.ndim == 4 and tuple(dims) == (3,))


class _Intercept(TorchFunctionMode):
    """Redirect calls of attention to ``block``."""

    def __init__(self, block: SplitBlock) -> None:
        super().__init__()
        self._block = block

    def __torch_function__(
        self, function: Any, _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function in (F.scaled_dot_product_attention, grouped_attention):
            function = self._block.attention
        # torch does not pass the call of attention inside this function to the mode.
        elif function is F.multi_head_attention_forward:
            function = _with_attention(function, self._block.attention)
        return function(*args, **(kwargs or {}))


def _with_attention(function: Any, attention: Callable[..., Tensor]) -> FunctionType:
    """Return a copy of ``function`` that calls ``attention`` instead of torch's attention."""
    names = {**function.__globals__, "scaled_dot_product_attention": attention}
    copy = FunctionType(function.__code__, names, argdefs=function.__defaults__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy
