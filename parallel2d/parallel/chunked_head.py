"""Loss of a model with a Linear head, computed in chunks of rows to save memory: `ChunkedHead`.

[Note: a loss inside the head] FSDP unshards the head's weight only during the head's forward, so
the loss is computed inside this forward. `ChunkedHead` gives the targets to the head before it
calls the model. The head returns a `ChunkedLogits` with the loss instead of logits. The head must
also apply the operations of the model on its logits, such as a soft cap. Therefore a first forward
on a few rows records these operations, and every later forward checks that the model applies the
same operations. `ChunkedLogits` is a dataclass because `fully_shard` searches dataclasses for the
tensors from which backward starts. With a context axis each rank computes the loss of its slice of
the sequence, and the losses are summed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from parallel2d.base.errors import ConfigError
from parallel2d.models import adapters
from parallel2d.parallel.chunked_loss import (
    ELEMENTWISE,
    SYNONYMS,
    Operation,
    apply_all,
    cross_entropy_from_hidden,
    targets_like,
)
from parallel2d.parallel.context_axis import context_axis_of
from parallel2d.parallel.loss import cross_entropy_sum, loss_bound
from parallel2d.parallel.mesh import axis_names
from parallel2d.parallel.model_structure import by_fqn, class_name, find_blocks, fqn_of
from parallel2d.parallel.weights.named_tensors import part_of, reshard, undisturbed

_COMPARED = 480  # number of tokens in the comparison; divisible by usual sizes of the tensor axis

_REFUSED_OPERATORS = {
    "__getitem__": "indexing",
    "__setitem__": "assignment to an index",
    "__rsub__": "a subtraction from a number",
    "__rtruediv__": "a division of a number",
    "__pow__": "pow",
}


class _Record:
    """The operations that the model has applied to the logits so far.

    Not a dataclass or tuple, because `fully_shard` would search it for tensors.
    """

    def __init__(
        self, shape: torch.Size, sample: Tensor, operations: tuple[Operation, ...] = ()
    ) -> None:
        self.shape = shape
        self.sample = sample  # an empty tensor with the dtype and device of the logits
        self.operations = operations


@dataclass(eq=False)
class ChunkedLogits:
    """Takes the place of the logits in the operations of the model after the head.

    Supports elementwise operations, such as soft caps and scales, and raises `ConfigError` for all
    other operations. ``loss`` is the summed cross-entropy, or None while operations are recorded.
    """

    loss: Tensor | None
    record: _Record

    @classmethod
    def __torch_function__(
        cls, function: Any, _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = SYNONYMS.get(function.__name__, function.__name__)
        # ``args`` may be empty, because all arguments may be keywords.
        logits, *others = list(args) or [None]
        # In a commutative operation the logits may be the second argument.
        if name in ("mul", "add") and not isinstance(logits, cls):
            logits, *others = [*others, logits]
        if not isinstance(logits, cls):
            raise _refused(name)
        return logits.then(name, *others, **(kwargs or {}))

    def then(self, name: str, /, *args: Any, **kwargs: Any) -> ChunkedLogits:
        """Return the `ChunkedLogits` after the operation ``name``.

        Raises `ConfigError` for an operation that is not elementwise or uses a trained tensor.
        """
        if name not in ELEMENTWISE:
            raise _refused(name)
        for value in (*args, *kwargs.values()):
            match value:
                case ChunkedLogits():
                    raise _refused(f"{name} of two of them")
                case Tensor() if isinstance(value, DTensor) or value.numel() != 1:
                    raise _refused(f"{name} with a tensor of shape {tuple(value.shape)}")
                case Tensor(requires_grad=True):
                    raise _refused(f"{name} with a parameter, which would get no gradient,")
        operation = Operation(name, args, kwargs)
        record = self.record
        after = _Record(record.shape, operation(record.sample), (*record.operations, operation))
        return ChunkedLogits(self.loss, after)

    def __getattr__(self, name: str) -> Any:
        # Libraries also test for attributes that tensors do not have, such as `keys`.
        if name.startswith("__") or not hasattr(Tensor, name):
            raise AttributeError(name)
        raise _refused(name)

    # Attributes of logits that models read.

    shape = property(lambda logits: logits.record.shape)
    ndim = property(lambda logits: len(logits.record.shape))
    dtype = property(lambda logits: logits.record.sample.dtype)
    device = property(lambda logits: logits.record.sample.device)

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    # A tensor-parallel style calls these on the output of a Linear. The loss needs no
    # redistribution.

    placements = ()

    def redistribute(self, *_args: Any, **_kwargs: Any) -> ChunkedLogits:
        return self

    def to_local(self) -> ChunkedLogits:
        return self


# Python looks up operators in the class and does not call `__getattr__`. Operators that are not
# elementwise are also set, so that `then` raises its error for them.
def _operation(name: str) -> Callable[..., ChunkedLogits]:
    # Not `functools.partialmethod`: torch 2.14 fails to compile a model that uses one.
    return lambda logits, *args, **kwargs: logits.then(name, *args, **kwargs)


for _name in (*ELEMENTWISE, *SYNONYMS, *_REFUSED_OPERATORS):
    setattr(ChunkedLogits, _name, _operation((SYNONYMS | _REFUSED_OPERATORS).get(_name, _name)))


def _refused(what: str) -> ConfigError:
    return ConfigError(
        f"the loss cannot be computed in chunks of rows (train.loss_chunk): the model uses {what} "
        "on its logits, and only operations on each element with plain numbers can be repeated on "
        f"a chunk ({', '.join(sorted(ELEMENTWISE))}); set train.loss_chunk=null"
    )


def find_head(model: nn.Module) -> str:
    """Return the FQN of the Linear that computes the logits.

    The Linear is ``model.get_output_embeddings()``, or else the last Linear outside of the repeated
    blocks. Raises `ConfigError` when the model has none. The first forward of a `ChunkedHead`
    verifies the choice.
    """
    linear = {}
    for name, each in model.named_modules():
        if _is_plain(each):
            linear[id(each)] = fqn_of(name)
    ask = getattr(model, "get_output_embeddings", lambda: None)
    head = adapters.trained_copy(ask())
    if head is not None:
        if id(head) not in linear:
            raise ConfigError(
                f"train.loss_chunk: the head of {class_name(model)} is a {class_name(head)}, and "
                "only a plain Linear can be computed in chunks; set train.loss_chunk=null"
            )
        return linear[id(head)]
    in_blocks = chain.from_iterable(block.modules() for _, block in find_blocks(model))
    for each in in_blocks:
        linear.pop(id(each), None)
    if not linear:
        raise ConfigError(
            f"train.loss_chunk: {class_name(model)} has no Linear outside of its repeated blocks "
            "that could be its head; set train.loss_chunk=null"
        )
    return list(linear.values())[-1]


def _is_plain(module: nn.Module | None) -> bool:
    return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward


def _can_be_cut(value: Any, targets: Tensor) -> bool:
    """Return True if ``value`` has one entry per target, or is no tensor with dims."""
    if isinstance(value, Tensor) and value.ndim > 0:
        return value.shape[:2] == targets.shape[:2]
    return isinstance(value, Tensor | bool | int | float | str | None)


class ChunkedHead:
    """Summed cross-entropy of ``model`` in chunks of rows; see [Note: a loss inside the head]. ::

        model = parallelize(model, mesh, config, ...)
        head = ChunkedHead(model, chunk=1024)
        loss = head.loss(targets, tokens)     # instead of loss(model(tokens), targets)

    ``model(tokens)`` still returns logits.

    Args:
        model: a model, before or after `parallel2d.parallelize`.
        chunk: number of rows (tokens) with logits in memory at the same time.
        name: FQN of the head; default: `find_head`.
        z_loss: see `cross_entropy_sum`; used only while the model is in training mode.

    Raises:
        ConfigError: ``name`` is not an ``nn.Linear`` of ``model``.
    """

    def __init__(
        self, model: nn.Module, chunk: int, name: str | None = None, z_loss: float = 0.0
    ) -> None:
        if type(chunk) is not int or chunk < 1:
            raise ConfigError(f"chunk={chunk} must be a whole number of rows, at least 1")
        self.model = model
        self.chunk = chunk
        self.z_loss = z_loss
        self.name = name if name is not None else find_head(model)
        by_name = by_fqn(model.named_modules())
        head: Any = by_name.get(self.name)
        if not _is_plain(head):
            raise ConfigError(f"{self.name} is not a plain Linear of {class_name(model)}")
        self._head = head
        # The head and the modules that contain it, whose output may be the head's output
        self._around = {name: each for name, each in by_name.items() if head in each.modules()}
        self._forward = self._head.forward
        # Set a bound method, so that a deep copy of the model also copies this object.
        self._head.forward = self._compute
        self._operations: tuple[Operation, ...] | None = None  # after the head, once known
        self._targets: Tensor | None = None  # while the model computes a loss
        self._axis = context_axis_of(model)
        self._rows = chunk
        self._calls = 0

    def loss(self, targets: Tensor, *inputs: Any, **options: Any) -> Tensor:
        """Return ``cross_entropy_sum(model(*inputs, **options), targets)``, computed in chunks.

        The first call also compares the result with the loss from full logits; see `compare`.
        Raises RuntimeError if the model's operations on its logits differ from the first call.
        """
        if self._operations is None:
            self.compare(targets, *inputs, **options)
        assert self._operations is not None
        output = self._call(targets, self.chunk, inputs, options)
        done = output.record.operations
        if [each.key for each in done] != [each.key for each in self._operations]:
            raise RuntimeError(
                f"the model did {list(done)} with its logits, and {list(self._operations)} (with "
                "the same numbers) in its first forward, which the loss in chunks repeats; set "
                "train.loss_chunk=null"
            )
        # With known operations the head computes the loss.
        loss: Any = output.loss
        if loss.dtype.itemsize < 4:
            raise ConfigError(
                f"the loss was cast to {loss.dtype} with the outputs of a module: omit "
                "precision.output, and Linear in precision.fp32_modules, or set "
                "train.loss_chunk=null"
            )
        return loss

    def compare(self, targets: Tensor, *inputs: Any, **options: Any) -> None:
        """Record the operations on the logits, and compare the loss with the loss from full logits.

        The model runs in eval mode on the first tokens of the first sample, or on all tokens if an
        input does not have one entry per token. Collective.

        Raises `ConfigError` on every rank if the losses differ. The model then does not compute its
        logits from the output of this head.
        """
        first, options, like = self._first_tokens(targets, inputs, options)
        with undisturbed(self.model):
            output = self.model(*first, **options)
            logits = getattr(output, "logits", output)
            wanted = targets_like(like, logits)
            plain = cross_entropy_sum(logits, wanted)
            dtype = logits.dtype
            del output, logits
            self._operations = None
            self._operations = self._call(wanted, self.chunk, first, options).record.operations
            # Test with several chunks and a smaller last chunk.
            rows = min(self.chunk, max(1, wanted.numel() * 2 // 5))
            found: Any = self._call(wanted, rows, first, options).loss
        difference = (found - plain).abs().double() / plain.abs().double().clamp(min=1e-30)
        # A comparison with NaN would be False and report no difference.
        difference = difference.nan_to_num(nan=torch.inf)
        if not bool(plain.isfinite()):
            difference.zero_()  # the training step reports a non-finite loss
        if dist.is_initialized():
            dist.all_reduce(difference, dist.ReduceOp.MAX, part_of(self.model))
        if difference.item() > loss_bound(dtype):
            raise ConfigError(
                f"the loss in chunks (train.loss_chunk) differs from the plain loss by "
                f"{difference.item():.1e} of it, with a bound of {loss_bound(dtype):.0e}: "
                f"{class_name(self.model)} does not compute its logits by {self.name} and "
                f"{list(self._operations or ())}; set train.loss_chunk=null"
            )

    def record(self, targets: Tensor, *inputs: Any, **options: Any) -> None:
        """Record the operations without a comparison. For fake tensors, which have no values.

        Call this under ``torch.no_grad()``.
        """
        self._operations = None
        self._operations = self._call(targets, self.chunk, inputs, options).record.operations
        # No backward follows that would reshard the parameters.
        reshard(self.model)

    def _first_tokens(
        self, targets: Tensor, inputs: Sequence[Any], options: dict[str, Any]
    ) -> tuple[list[Any], dict[str, Any], Tensor]:
        """Return inputs, options and targets of the first tokens of the first sample.

        If an input does not have one entry per target, all inputs, options and targets are returned
        uncut.
        """
        values = [*inputs, *options.values()]
        if targets.ndim < 2 or not all(_can_be_cut(value, targets) for value in values):
            return list(inputs), options, targets
        parameter = next(self.model.parameters())
        tensor = 1
        if isinstance(parameter, DTensor) and "tensor" in axis_names(parameter.device_mesh):
            tensor = parameter.device_mesh["tensor"].size()
        context = 1 if self._axis is None else self._axis.size
        length = _COMPARED - _COMPARED % (tensor * context)

        def cut(value: Any) -> Any:
            if isinstance(value, Tensor) and value.shape[:2] == targets.shape[:2]:
                return value[:1, :length]
            return value

        shorter = {name: cut(value) for name, value in options.items()}
        return list(map(cut, inputs)), shorter, cut(targets)

    def _call(
        self, targets: Tensor, rows: int, inputs: Sequence[Any], options: dict[str, Any]
    ) -> ChunkedLogits:
        for name, module in self._around.items():
            # A backward hook gets the gradient of the module's output, which is not a tensor here.
            if module._backward_hooks or module._backward_pre_hooks:
                raise ConfigError(
                    f"train.loss_chunk: {name or class_name(module)} has a hook for its backward, "
                    "which needs the gradient of all logits, but only chunks of them exist; remove "
                    "the hook, or set train.loss_chunk=null"
                )
        apart: AbstractContextManager[None] = nullcontext()
        if self._axis is not None:
            if targets.ndim < 2:
                raise ConfigError(
                    "train.loss_chunk with a context axis: targets must be [batch, positions, ...]"
                    f", got {tuple(targets.shape)}; set train.loss_chunk=null"
                )
            targets, apart = self._axis.cut(targets, 1), self._axis.without_join()
        self._targets, self._rows, self._calls = targets, rows, 0
        try:
            with apart:
                output = self.model(*inputs, **options)
        finally:
            self._targets = None
        output = getattr(output, "logits", output)
        if not isinstance(output, ChunkedLogits) or self._calls != 1:
            raise ConfigError(
                f"train.loss_chunk: the output of {class_name(self.model)} is not the result of "
                f"one call of {self.name} ({self._calls} calls, output {class_name(output)}), so "
                "that its loss cannot be computed in chunks; set train.loss_chunk=null"
            )
        return output

    # The result is not a tensor, and compiled code can return only tensors. If the complete model
    # is compiled, it has a graph break here.
    @torch.compiler.disable
    def _compute(self, input: Tensor) -> Any:
        """Forward of the head, with the argument name of `nn.Linear.forward`."""
        targets = self._targets
        if targets is None or (self._axis is not None and self._axis.is_learning):
            return self._forward(input)
        self._calls += 1
        # Read the weight once, because a parametrization computes it on each access.
        weight = self._head.weight
        loss = None
        if self._operations is not None:
            after = functools.partial(apply_all, self._operations) if self._operations else None
            loss = cross_entropy_from_hidden(
                input,
                weight,
                targets,
                self._rows,
                bias=self._head.bias,
                after=after,
                z_loss=self.z_loss if self.model.training else 0.0,
            )
            if self._axis is not None:
                loss = self._axis.sum(loss)
        shape = torch.Size((*input.shape[:-1], weight.shape[0]))
        sample = torch.empty(0, dtype=weight.dtype, device=input.device)
        return ChunkedLogits(loss, _Record(shape, sample))
