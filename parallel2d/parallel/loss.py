"""The loss, and the scaling that makes the loss and its gradient independent of the layout.

[Note: the mean over valid tokens] The loss of a global batch is the sum of the losses of its valid
tokens divided by the number of valid tokens. This loss must not depend on the distribution of the
tokens over ranks and micro-batches, so the loss is not a mean of means of ranks. Each rank calls
backward on its summed loss times `token_weight`: (number of data ranks) / (valid tokens of the
global batch). The average of gradients over the data ranks divides by the number of data ranks, so
the result is the gradient of the global mean.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from parallel2d.base.errors import ConfigError
from parallel2d.parallel.mesh import live_data_ranks, sum_over_data_ranks

IGNORED = -100  # target of a token that is not valid, as in torch's cross_entropy
# Set by `loss_chunks`; None: the number of `chunk_elements`
_elements: int | None = None
_first_alone = False


def loss_bound(dtype: torch.dtype) -> float:
    """Return the allowed relative difference between two computations of the same loss."""
    return {torch.float64: 1e-10, torch.float32: 1e-4}.get(dtype, 1e-2)


def token_weight(valid_tokens: int | Tensor, mesh: DeviceMesh) -> Tensor:
    """Return a rank's factor of its summed loss before ``backward``.

    Collective over the data ranks.

    See [Note: the mean over valid tokens]. The factor is an fp64 scalar tensor on the mesh's
    device; zero when no rank has a valid token.

    Args:
        valid_tokens: number of valid tokens of this rank in all micro-batches of the global batch.
        mesh: the mesh of the model.

    Raises:
        ConfigError: the number is negative.
    """
    # Check only an int, because reading a tensor on a device would block the host.
    if isinstance(valid_tokens, int) and valid_tokens < 0:
        raise ConfigError(f"token_weight({valid_tokens}): a number of tokens is at least 0")
    total = torch.zeros((), dtype=torch.float64, device=mesh.device_type).add_(valid_tokens)
    sum_over_data_ranks(total, mesh)
    return torch.where(total > 0, live_data_ranks(mesh) / total.clamp(min=1), 0.0)


def cross_entropy_sum(logits: Any, targets: Tensor, z_loss: float = 0.0) -> Tensor:
    """Return the summed cross-entropy over targets that are not `IGNORED`.

    The result is a scalar in fp32 (fp64 for fp64 logits). The logits are converted to fp32 in
    chunks of rows.

    Args:
        logits: [..., vocab]: a tensor, a DTensor that is sharded over the last dim by tensor
            parallelism, or a model output with an attribute ``logits``.
        targets: int64 [...].
        z_loss: factor of the squared log-sum-exp of the logits, which is added to the loss of each
            target. The term keeps logits small (PaLM, Chowdhery et al. 2022, with 1e-4).

    Raises:
        ConfigError: shapes do not match.
        RuntimeError: a target has no logit.
    """
    logits = getattr(logits, "logits", logits)
    check_shapes("cross_entropy_sum", "logits", logits, targets)
    check_targets(targets, logits.shape[-1])
    # If the logits are not sharded by vocabulary, every rank computes the loss of all rows.
    if isinstance(logits, DTensor) and not logits.placements[0].is_shard(logits.ndim - 1):
        logits = logits.full_tensor()
    group, first = None, 0
    if isinstance(logits, DTensor):
        mesh = logits.device_mesh
        # `Shard` gives every rank ceil(vocab / ranks) columns; the last may have fewer or none.
        group, first = mesh.get_group(), -(-logits.shape[-1] // mesh.size()) * mesh.get_local_rank()
        logits = logits.to_local()
    return _CrossEntropySum.apply(logits.flatten(0, -2), targets.flatten(), group, first, z_loss)


def check_shapes(where: str, what: str, values: Any, targets: Any) -> None:
    """Raise `ConfigError` unless ``values`` and ``targets`` are tensors with one target per row.

    ``where`` and ``what`` name the caller and ``values`` in the message.
    """
    for name, value in ((what, values), ("targets", targets)):
        if not isinstance(value, Tensor):
            raise ConfigError(f"{where}: {name} is a {type(value).__name__}, not a tensor")
    wanted = tuple(values.shape[:-1])
    # Flattened targets are also allowed.
    if tuple(targets.shape) not in (wanted, (math.prod(wanted),)):
        raise ConfigError(
            f"{where}: {what} of shape {tuple(values.shape)} need one target for each of {wanted}, "
            f"and targets have shape {tuple(targets.shape)}"
        )


def check_targets(targets: Tensor, columns: int) -> None:
    """Raise for targets that are not token ids (`ConfigError`) or have no logit (RuntimeError).

    On GPU the check does not wait for the device.
    """
    if targets.dtype not in (torch.int64, torch.int32):
        raise ConfigError(f"targets are token numbers in int64 or int32, got {targets.dtype}")
    # `_assert_async` has kernels only for these two device types.
    if targets.device.type not in ("cpu", "cuda") or torch.compiler.is_compiling():
        return
    known = (targets.clamp(0, columns - 1) == targets) | (targets == IGNORED)
    torch._assert_async(
        known.all(),
        f"a target has no logit: the last dim of the logits is {columns}. Is the vocabulary too "
        "small, or are these only this rank's columns of a tensor-parallel head (plan: "
        "colwise_gather_output, or keep them a DTensor)?",
    )


class _CrossEntropySum(torch.autograd.Function):
    """Summed cross-entropy of logits, which may be only this rank's columns of the vocabulary.

    The columns start at ``first``. As in Megatron-LM (Shoeybi et al. 2019).
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        group: dist.ProcessGroup | None,
        first: int,
        z_loss: float,
    ) -> Tensor:
        places = Places.of(targets, group, first, logits.shape[1])
        log_sum, picked = sums_of_rows(logits, places, group)
        # Under `loss_chunks` fewer rows were computed.
        places = places.at(slice(len(log_sum)))
        ctx.save_for_backward(logits, log_sum, *places)
        ctx.z_loss = z_loss
        return sum_of_valid(log_sum, picked, places, z_loss)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        logits, log_sum, *found = ctx.saved_tensors
        (scale,), places = grad_outputs, Places(*found)
        pieces = row_pieces(logits[: len(log_sum)])
        if len(pieces) == 1 and len(log_sum) == len(logits):
            gradient = gradient_of_rows(logits, places, log_sum, ctx.z_loss)
            return gradient.mul_(scale).to(logits.dtype), None, None, None, None
        gradient = torch.empty_like(logits)
        for rows in pieces:
            part = gradient_of_rows(logits[rows], places.at(rows), log_sum[rows], ctx.z_loss)
            gradient[rows] = part.mul_(scale)
            # Free this gradient before the next one is allocated.
            del part
        return gradient, None, None, None, None


class Places(NamedTuple):
    """Positions of the targets among this rank's columns."""

    # [n]: True if the target of the row is valid
    valid: Tensor
    # [n]: True if the target is among this rank's columns
    own: Tensor
    # [n, 1]: column of the target; arbitrary if it is not among this rank's columns
    column: Tensor

    @classmethod
    def of(
        cls, targets: Tensor, group: dist.ProcessGroup | None, first: int, columns: int
    ) -> Places:
        """Locate the targets among ``columns`` columns from ``first`` on.

        ``group``: the ranks with the other columns; None: this rank has all columns.
        """
        valid = targets != IGNORED
        own = valid
        if group is not None:
            own = (targets >= first) & (targets < first + columns)
            targets = targets - first
        return cls(valid, own, targets.clamp(0, max(columns - 1, 0))[:, None])

    def at(self, rows: slice) -> Places:
        return Places(*(each[rows] for each in self))


def sums_of_rows(
    logits: Tensor, places: Places, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    """Return the log-sum-exp and the target's logit of each row, in fp32 or wider.

    ``group`` are the ranks with the other columns; None: this rank has all columns. Collective over
    ``group``.
    """
    dtype = torch.promote_types(logits.dtype, torch.float32)
    sums_of_pieces = []
    for rows in row_pieces(logits):
        sums_of_pieces.append(logits[rows].to(dtype).logsumexp(1))
    log_sum = sums_of_pieces[0] if len(sums_of_pieces) == 1 else torch.cat(sums_of_pieces)
    # Under `loss_chunks` fewer rows were computed.
    logits, places = logits[: len(log_sum)], places.at(slice(len(log_sum)))
    # A rank may have no columns, and `gather` needs one.
    if not logits.shape[1]:
        value = torch.zeros_like(log_sum)
    else:
        value = logits.gather(1, places.column)[:, 0].to(dtype)
    if group is None:
        return log_sum, value
    value = torch.where(places.own, value, 0)
    # Combine the log-sum-exp of all ranks. Only one rank has the logit of the target, and the
    # others add zero.
    largest = log_sum.clone()
    dist.all_reduce(largest, dist.ReduceOp.MAX, group)
    sums = torch.stack(((log_sum - largest).exp(), value))
    dist.all_reduce(sums, group=group)
    return largest + sums[0].log(), sums[1]


def gradient_of_rows(logits: Tensor, places: Places, log_sum: Tensor, z_loss: float) -> Tensor:
    """Return the gradient of the summed loss of a few rows, in fp32 at least."""
    # The gradient of a logit is its softmax, minus 1 at the target; it is 0 in ignored rows.
    shift = torch.where(places.valid, log_sum, torch.inf)[:, None]
    gradient = (logits - shift).exp_()
    if z_loss:
        gradient *= (1 + 2 * z_loss * log_sum)[:, None]
    if logits.shape[1]:
        shares = torch.where(places.own, -1.0, -0.0).to(gradient.dtype)
        gradient.scatter_add_(1, places.column, shares[:, None])
    return gradient


def sum_of_valid(log_sum: Tensor, picked: Tensor, places: Places, z_loss: float) -> Tensor:
    """Return the summed loss of the rows with valid targets, from `sums_of_rows`."""
    loss = log_sum - picked
    # Skipped for 0: the square of a large number is infinite, and 0 times infinity is NaN.
    if z_loss:
        loss = loss + z_loss * log_sum.square()
    return torch.where(places.valid, loss, 0).sum()


@contextmanager
def loss_chunks(elements: int, *, first_alone: bool = False) -> Iterator[None]:
    """Change the chunks of `cross_entropy_sum` inside of this context.

    For steps on fake tensors, which are faster with fewer operators.

    Args:
        elements: number of logits in a chunk.
        first_alone: True to compute only the first chunk, because all chunks need the same memory.
    """
    global _elements, _first_alone
    before = _elements, _first_alone
    _elements, _first_alone = elements, first_alone
    try:
        yield
    finally:
        _elements, _first_alone = before


def chunk_elements(device_type: str) -> int:
    """Return the number of logits that are converted to fp32 together (a chunk).

    They take 16 MiB on a CPU, so that a chunk stays in the cache, and 512 MiB on a GPU, because
    each chunk costs about 16 kernel launches.
    """
    return 2**22 if device_type == "cpu" else 2**27


def row_pieces(values: Tensor) -> list[slice]:
    """Split the rows of a matrix into parts of about `chunk_elements` elements; at least one."""
    elements = _elements or chunk_elements(values.device.type)
    step = max(1, elements // max(values.shape[1], 1))
    starts = range(0, max(len(values), 1), step)
    pieces: list[slice] = []
    for start in starts[:1] if _first_alone else starts:
        pieces.append(slice(start, start + step))
    return pieces
