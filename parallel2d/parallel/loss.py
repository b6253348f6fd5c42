"""The loss, and the scaling that makes it and its gradient independent of the layout.

[Note: the mean over valid tokens] The loss of a global batch is the sum over its valid tokens
divided by their number, however unevenly they fall on ranks and micro-batches; a mean of rank means
is something else. Each rank backpropagates its summed loss times `token_weight` = data ranks /
valid tokens of the global batch. Sharding averages gradients over the data ranks, which cancels the
numerator, so that what remains is exactly the gradient of the global mean.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from parallel2d.base.errors import ConfigError
from parallel2d.parallel.mesh import present_data_ranks, sum_over_data_ranks

IGNORED = -100  # a target that is not a valid token, as in torch's cross_entropy
_CHUNK_ELEMENTS = 2**22  # of logits turned to fp32 at once
_FIRST_ALONE = False  # see `loss_chunks`


def loss_bound(dtype: torch.dtype) -> float:
    """How much, relatively, one loss may differ that is computed in two ways in ``dtype``."""
    return {torch.float64: 1e-10, torch.float32: 1e-4}.get(dtype, 1e-2)


def token_weight(valid_tokens: int | Tensor, mesh: DeviceMesh) -> Tensor:
    """The factor by which a rank multiplies its summed loss before ``backward``; see
    [Note: the mean over valid tokens].

    ``valid_tokens``: those of this rank in the whole global batch (all of its micro-batches).
    Collective over the data ranks. Returns an fp64 scalar tensor on the mesh's device; zero when no
    rank has a valid token. Raises `ConfigError` for a negative number.
    """
    # A tensor may be on a device, and reading it would wait for that.
    if isinstance(valid_tokens, int) and valid_tokens < 0:
        raise ConfigError(f"token_weight({valid_tokens}): a number of tokens is at least 0")
    total = torch.as_tensor(valid_tokens, dtype=torch.float64, device=mesh.device_type).clone()
    sum_over_data_ranks(total, mesh)
    return torch.where(total > 0, present_data_ranks(mesh) / total.clamp(min=1), 0.0)


def cross_entropy_sum(logits: Any, targets: Tensor, z_loss: float = 0.0) -> Tensor:
    """Sums cross-entropy over targets that are not `IGNORED`: fp32 scalar (fp64 for fp64 logits).

    ``logits``: [..., vocab], a tensor, or a DTensor split over its last dim as tensor parallelism
    leaves it, or a model output with an attribute ``logits``; ``targets``: int64 [...];
    ``z_loss``: times the squared log-sum-exp of each valid token's logits is added to the sum,
    which keeps logits from drifting (PaLM, Chowdhery et al. 2022, with 1e-4). Only one chunk is
    ever held in full precision. Raises `ConfigError` for shapes that do not match, and RuntimeError
    for a target that has no logit.
    """
    logits = getattr(logits, "logits", logits)
    check_shapes("cross_entropy_sum", "logits", logits, targets)
    check_targets(targets, logits.shape[-1])
    # Split over another dim than the vocabulary, or not at all: every rank computes the whole.
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
    """Raises `ConfigError`, from ``where``, unless ``values``, called ``what``, and ``targets`` are
    tensors, with one target for each row."""
    for name, value in ((what, values), ("targets", targets)):
        if not isinstance(value, Tensor):
            raise ConfigError(f"{where}: {name} is a {type(value).__name__}, no tensor")
    wanted = tuple(values.shape[:-1])
    # Flat targets are taken as well.
    if tuple(targets.shape) not in (wanted, (math.prod(wanted),)):
        raise ConfigError(
            f"{where}: {what} of shape {tuple(values.shape)} need one target for each of {wanted}, "
            f"and targets have shape {tuple(targets.shape)}"
        )


def check_targets(targets: Tensor, columns: int) -> None:
    """Raises `ConfigError` for targets that are no token numbers, and RuntimeError for one without
    a logit; on GPU without waiting for the device."""
    if targets.dtype not in (torch.int64, torch.int32):
        raise ConfigError(f"targets are token numbers in int64 or int32, got {targets.dtype}")
    # `_assert_async` has kernels for these two devices alone.
    if targets.device.type not in ("cpu", "cuda") or torch.compiler.is_compiling():
        return
    known = ((targets >= 0) & (targets < columns)) | (targets == IGNORED)
    torch._assert_async(
        known.all(),
        f"a target has no logit: the last dim of the logits is {columns}. Is the vocabulary too "
        "small, or are these only this rank's columns of a tensor-parallel head (plan: "
        "colwise_gather_output, or keep them a DTensor)?",
    )


class _CrossEntropySum(torch.autograd.Function):
    """Cross-entropy where this rank may hold columns from ``first`` on (Shoeybi et al. 2019)."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        group: dist.ProcessGroup | None,
        first: int,
        z_loss: float,
    ) -> Tensor:
        log_sum, picked = sums_of_rows(logits, targets, group, first)
        # Shorter with `loss_chunks`.
        targets = targets[: len(log_sum)]
        ctx.save_for_backward(logits, targets, log_sum)
        ctx.first = first
        ctx.z_loss = z_loss
        return sum_of_valid(log_sum, picked, targets, z_loss)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        logits, targets, log_sum = ctx.saved_tensors
        (scale,) = grad_outputs
        gradient = torch.empty_like(logits)
        for rows in row_pieces(logits[: len(targets)]):
            part = gradient_of_rows(
                logits[rows], targets[rows], log_sum[rows], ctx.first, ctx.z_loss
            )
            gradient[rows] = part.mul_(scale)
            # Before the next one is there.
            del part
        return gradient, None, None, None, None


def _places(targets: Tensor, first: int, columns: int) -> tuple[Tensor, Tensor]:
    """Finds which targets are in ``columns`` columns from ``first`` on, and their indices there,
    [n, 1]; those of the others are only kept legal."""
    own = (targets >= first) & (targets < first + columns)
    return own, (targets - first).clamp(0, max(columns - 1, 0))[:, None]


def sums_of_rows(
    logits: Tensor, targets: Tensor, group: dist.ProcessGroup | None, first: int
) -> tuple[Tensor, Tensor]:
    """The log-sum-exp of each row and the logit of its target, in fp32 at least.

    ``group``: of the ranks that have the other columns; None: there are none. ``first``: the number
    of this rank's first column. Collective over ``group``.
    """
    dtype = torch.promote_types(logits.dtype, torch.float32)
    log_sum = torch.cat([logits[rows].to(dtype).logsumexp(1) for rows in row_pieces(logits)])
    # Fewer rows with `loss_chunks`
    logits, targets = logits[: len(log_sum)], targets[: len(log_sum)]
    own, index = _places(targets, first, logits.shape[1])
    value = torch.zeros_like(log_sum)
    # A rank may have no columns, from which nothing can be gathered.
    if logits.shape[1]:
        value = torch.where(own, logits.gather(1, index)[:, 0], 0).to(dtype)
    if group is None:
        return log_sum, value
    # The log-sum-exp over all ranks' columns, and the logit that one rank has picked.
    largest = log_sum.clone()
    dist.all_reduce(largest, dist.ReduceOp.MAX, group)
    sums = torch.stack(((log_sum - largest).exp(), value))
    dist.all_reduce(sums, group=group)
    return largest + sums[0].log(), sums[1]


def gradient_of_rows(
    logits: Tensor, targets: Tensor, log_sum: Tensor, first: int, z_loss: float
) -> Tensor:
    """The gradient of the summed loss of a few rows, in fp32 at least, from `sums_of_rows`."""
    # That of a logit is its softmax, minus 1 for the target's logit; that of ignored rows is 0.
    shift = torch.where(targets != IGNORED, log_sum, torch.inf)[:, None]
    gradient = (logits - shift).exp_()
    if z_loss:
        gradient *= (1 + 2 * z_loss * log_sum)[:, None]
    own, index = _places(targets, first, logits.shape[1])
    if logits.shape[1]:
        gradient.scatter_add_(1, index, -own.to(gradient.dtype)[:, None])
    return gradient


def sum_of_valid(log_sum: Tensor, picked: Tensor, targets: Tensor, z_loss: float) -> Tensor:
    """The summed loss of the rows with a valid target, from their log-sum-exp and its logit."""
    loss = log_sum - picked
    # Not with a factor of 0: the square of a large number is infinite.
    if z_loss:
        loss = loss + z_loss * log_sum.square()
    return torch.where(targets != IGNORED, loss, 0).sum()


@contextmanager
def loss_chunks(elements: int = _CHUNK_ELEMENTS, *, first_alone: bool = False) -> Iterator[None]:
    """For steps on tensors without storage, which fewer operators make faster: inside,
    `cross_entropy_sum` turns ``elements`` logits to fp32 at once, and with ``first_alone`` no
    others after the first of them, since all chunks take the same memory."""
    global _CHUNK_ELEMENTS, _FIRST_ALONE
    before = _CHUNK_ELEMENTS, _FIRST_ALONE
    _CHUNK_ELEMENTS, _FIRST_ALONE = elements, first_alone
    try:
        yield
    finally:
        _CHUNK_ELEMENTS, _FIRST_ALONE = before


def row_pieces(values: Tensor) -> list[slice]:
    """The rows of a matrix, in parts of about `_CHUNK_ELEMENTS` elements; at least one part."""
    step = max(1, _CHUNK_ELEMENTS // max(values.shape[1], 1))
    starts = range(0, max(len(values), 1), step)
    return [slice(start, start + step) for start in (starts[:1] if _FIRST_ALONE else starts)]
