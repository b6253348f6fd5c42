"""Cross-entropy from the input of the last layer, without all logits in memory:
`cross_entropy_from_hidden`.

[Note: gradients in forward] For each chunk of rows, forward computes the logits, the loss and the
gradients, and frees the logits before the next chunk. After forward the gradients of ``hidden`` and
``weight`` are known. Backward only multiplies these gradients by the gradient of the loss, a single
number. The alternative, to compute the logits again in backward, would not save memory and would
need a fourth matrix product.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from parallel2d.base.errors import ConfigError
from parallel2d.parallel.loss import (
    IGNORED,
    Places,
    check_shapes,
    check_targets,
    gradient_of_rows,
    row_pieces,
    sum_of_valid,
    sums_of_rows,
)
from parallel2d.parallel.weights.geometry import local_region

Elementwise = Callable[[Tensor], Tensor]

# Elementwise operations that a model may apply to its logits, by their names in torch.
SYNONYMS = {
    "multiply": "mul", "__mul__": "mul", "__rmul__": "mul",
    "divide": "div", "true_divide": "div", "__truediv__": "div",
    "__add__": "add", "__radd__": "add", "__sub__": "sub",
    "negative": "neg", "__neg__": "neg",
}  # fmt: skip
ELEMENTWISE = {
    *("mul", "div", "add", "sub", "neg", "tanh", "clamp", "clamp_min", "clamp_max"),
    *("to", "type", "float", "double", "half", "bfloat16", "contiguous"),
}


class Operation:
    """A method of `torch.Tensor` with its arguments: numbers, dtypes, or tensors of one element."""

    def __init__(self, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        self.name = name
        self.args = tuple(args)
        self.kwargs = dict(kwargs)

    def __call__(self, value: Tensor) -> Tensor:
        result: Tensor = getattr(value, self.name)(*self.args, **self.kwargs)
        # An argument of one element may have more dims than the chunk, and broadcasting would add
        # them to the result.
        return result.view(value.shape)

    def __repr__(self) -> str:
        return self.name

    @property
    def key(self) -> list[Any]:
        """Value that is equal for equal operations. Tensor arguments are compared by identity."""
        values = [self.name, *self.args, *chain.from_iterable(self.kwargs.items())]
        found: list[Any] = []
        for value in values:
            found.append(id(value) if isinstance(value, Tensor) else value)
        return found


def apply_all(operations: Sequence[Operation], value: Tensor) -> Tensor:
    """Apply ``operations`` to ``value`` in order."""
    for operation in operations:
        value = operation(value)
    return value


@torch.compiler.disable
def cross_entropy_from_hidden(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    chunk: int = 1024,
    *,
    bias: Tensor | None = None,
    after: Elementwise | None = None,
    z_loss: float = 0.0,
) -> Tensor:
    """Return the summed cross-entropy of ``after(hidden @ weight.T + bias)``.

    The result is the sum over all targets except -100: a scalar in fp32 (fp64 for fp64 inputs).
    Backward can run once, without ``create_graph``. Under ``torch.compile`` this function is a
    graph break. With FSDP, call this function in the forward of the module that has the weight,
    where the weight is unsharded.

    Args:
        hidden: [..., dim], the input of the last layer. If ``weight`` is a DTensor, a DTensor that
            is replicated over the tensor axis.
        weight: [vocab, dim], or a DTensor that is sharded by rows over only the tensor axis.
        targets: int64 [...], or flattened.
        chunk: number of rows (tokens) with logits in memory at the same time.
        bias: [vocab], sharded like ``weight``.
        after: elementwise function of the logits before the loss, such as a soft cap. This
            function must not depend on trained tensors.
        z_loss: factor of the squared log-sum-exp of the logits, which is added to the loss of each
            target (PaLM, Chowdhery et al. 2022).

    Raises:
        ConfigError: shapes or placements do not match.
        RuntimeError: a target has no logit.
    """
    _check(hidden, weight, targets, chunk)
    check_targets(targets, weight.shape[0])
    with_grad = torch.is_grad_enabled()
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        hidden, weight = _autocast(hidden, dtype), _autocast(weight, dtype)
        bias = None if bias is None else _autocast(bias, dtype)
    group: dist.ProcessGroup | None = None
    first = 0
    if isinstance(weight, DTensor):
        group, first = weight.device_mesh.get_group(), local_region(weight).offsets[0]
        # Each rank computes the gradient from its columns of the logits: a partial sum.
        assert isinstance(hidden, DTensor)
        hidden = hidden.to_local(grad_placements=[Partial()])
        weight = weight.to_local()
        bias = bias.to_local() if isinstance(bias, DTensor) else bias
    with torch.autocast(device, enabled=False):
        return _ChunkedCrossEntropy.apply(
            hidden.flatten(0, -2),
            weight,
            bias,
            targets.flatten(),
            _Settings(chunk, after, z_loss, group, first, with_grad),
        )


def targets_like(targets: Tensor, logits: Tensor) -> Tensor:
    """Return artificial targets for a comparison of two losses, in the shape of ``targets``.

    The artificial targets are spread over the vocabulary of ``logits``, and a fifth of the targets
    is ignored. The targets of a real batch are not used, because all of them could be ignored.
    Raises `ConfigError` if the shapes do not match.
    """
    if tuple(targets.shape) not in (tuple(logits.shape[:-1]), (logits.shape[:-1].numel(),)):
        raise ConfigError(
            f"the model has logits of shape {tuple(logits.shape)} for targets of shape "
            f"{tuple(targets.shape)}: each target needs one row"
        )
    places = torch.arange(targets.numel(), device=targets.device)
    found = (places * 7919 + 1) % logits.shape[-1]
    found[places % 5 == 4] = IGNORED
    return found.view(targets.shape)


def _autocast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast ``tensor`` like a Linear under autocast, which does not cast fp64."""
    if tensor.dtype == torch.float64:
        return tensor
    return tensor.to(dtype)


def _check(hidden: Any, weight: Any, targets: Any, chunk: Any) -> None:
    where = "cross_entropy_from_hidden"
    if not isinstance(weight, Tensor):
        raise ConfigError(f"{where}: weight is a {type(weight).__name__}, not a tensor")
    check_shapes(where, "hidden", hidden, targets)
    if not isinstance(chunk, int) or chunk < 1:
        raise ConfigError(f"{where}: chunk={chunk} must be a whole number of rows, at least 1")
    if hidden.ndim < 2 or weight.ndim != 2 or hidden.shape[-1] != weight.shape[-1]:
        raise ConfigError(
            f"{where}: hidden of shape {tuple(hidden.shape)} is [..., dim], weight of shape "
            f"{tuple(weight.shape)} is [vocab, dim]"
        )
    # A plain tensor has no placements.
    placements = [getattr(tensor, "placements", ()) for tensor in (hidden, weight)]
    if placements not in ([(), ()], [(Replicate(),), (Shard(0),)]):
        raise ConfigError(
            f"{where}: hidden is {placements[0] or 'plain'} and weight {placements[1] or 'plain'}; "
            "the weight must be plain, or split by rows over only the tensor axis with hidden "
            "replicated over it. A sharded weight is unsharded only inside the forward of its model"
        )


@dataclass(frozen=True)
class _Settings:
    """Arguments that are not part of the autograd graph."""

    chunk: int
    after: Elementwise | None
    z_loss: float
    group: dist.ProcessGroup | None  # ranks with the other columns; None: this rank has all
    first: int  # number of this rank's first column
    with_grad: bool


class _Gradients:
    """Gradient sums over the chunks, in fp32 at least; None where no gradient is needed."""

    def __init__(self, hidden: Tensor, weight: Tensor, wanted: tuple[bool, ...]) -> None:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        self.hidden = torch.zeros_like(hidden) if wanted[0] else None
        self.weight = hidden.new_zeros(weight.shape, dtype=wide) if wanted[1] else None
        self.bias = hidden.new_zeros(len(weight), dtype=wide) if wanted[2] else None

    def add(self, rows: slice, gradient: Tensor, hidden: Tensor, weight: Tensor) -> None:
        """Add the products of ``gradient``, of the logits of these ``rows``, with ``hidden``."""
        if self.hidden is not None:
            torch.mm(gradient, weight, out=self.hidden[rows])
        if self.weight is not None and self.weight.dtype == gradient.dtype:
            self.weight.addmm_(gradient.t(), hidden)
        elif self.weight is not None:
            for part in row_pieces(self.weight):
                self.weight[part] += gradient[:, part].t() @ hidden
        if self.bias is not None:
            self.bias += gradient.sum(0, dtype=self.bias.dtype)


class _ChunkedCrossEntropy(torch.autograd.Function):
    """See [Note: gradients in forward]."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        settings: _Settings,
    ) -> Tensor:
        # `needs_input_grad` is also True under no_grad.
        wanted = tuple(needs and settings.with_grad for needs in ctx.needs_input_grad[:3])
        gradients = _Gradients(hidden, weight, wanted)
        total = hidden.new_zeros((), dtype=torch.promote_types(hidden.dtype, torch.float32))
        # Without rows, compute one empty chunk, so that the gradients are zeros.
        for start in range(0, max(len(targets), 1), settings.chunk):
            rows = slice(start, start + settings.chunk)
            loss, gradient = _of_chunk(
                F.linear(hidden[rows], weight, bias), targets[rows], settings, any(wanted)
            )
            total += loss
            if gradient is not None:
                gradients.add(rows, gradient, hidden[rows], weight)
            # Free the gradient before the next chunk allocates its logits.
            del gradient
        ctx.gradients = gradients
        ctx.dtypes = (weight.dtype, None if bias is None else bias.dtype)
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        gradients, (scale,) = ctx.gradients, grad_outputs
        # The gradients were computed in forward, so autograd would treat them as constants.
        if torch.is_grad_enabled():
            raise RuntimeError(
                "the gradients of cross_entropy_from_hidden cannot be differentiated again "
                "(create_graph=True): compute this loss by cross_entropy_sum"
            )
        if gradients is None:
            raise RuntimeError(
                "the gradients of cross_entropy_from_hidden were used by an earlier backward, and "
                "are kept for one only: compute the loss again"
            )
        # Scale the gradients in place, because a copy of the weight's gradient would be large.
        ctx.gradients = None
        weight_dtype, bias_dtype = ctx.dtypes
        of_hidden = of_weight = of_bias = None
        if gradients.hidden is not None:
            of_hidden = gradients.hidden
            # With `reshape(1)` the factor is not rounded to the narrow dtype first, as a tensor
            # without dims would be on GPUs.
            for rows in row_pieces(of_hidden):
                of_hidden[rows] *= scale.reshape(1)
        if gradients.weight is not None:
            of_weight = gradients.weight.mul_(scale).to(weight_dtype)
        if gradients.bias is not None:
            of_bias = gradients.bias.mul_(scale).to(bias_dtype)
        return of_hidden, of_weight, of_bias, None, None


def _of_chunk(
    logits: Tensor, targets: Tensor, settings: _Settings, with_gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the summed loss of these rows, and its gradient, which may overwrite ``logits``."""
    raw, output = logits, logits
    if settings.after is not None:
        raw = logits.requires_grad_(with_gradient)
        with torch.set_grad_enabled(with_gradient):
            output = settings.after(raw)
    values = output.detach()
    places = Places.of(targets, settings.group, settings.first, values.shape[1])
    log_sum, picked = sums_of_rows(values, places, settings.group)
    # In the memory prediction (`loss_chunks`) fewer rows were computed.
    places = places.at(slice(len(log_sum)))
    summed = sum_of_valid(log_sum, picked, places, settings.z_loss)
    if not with_gradient:
        return summed, None
    # The graph of `after` may need its output.
    gradient = values if settings.after is None else torch.empty_like(values)
    # Compute a few rows at a time: the fp32 gradient of the chunk would need more memory than its
    # logits, and large allocations are slow on CPU.
    for rows in row_pieces(values):
        part = gradient_of_rows(values[rows], places.at(rows), log_sum[rows], settings.z_loss)
        gradient[rows] = part
        del part
    if settings.after is not None:
        (gradient,) = torch.autograd.grad(output, raw, gradient)
    return summed, gradient
