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
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from parallel2d.base.errors import ConfigError
from parallel2d.parallel.mesh import live_data_ranks, sum_over_data_ranks

IGNORED = -100  # a target that is not a valid token, as in torch's cross_entropy
# See `loss_chunks`; None: `chunk_elements`.
_elements: int | None = None
_first_alone = False


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
    total = torch.zeros((), dtype=torch.float64, device=mesh.device_type).add_(valid_tokens)
    sum_over_data_ranks(total, mesh)
    return torch.where(total > 0, live_data_ranks(mesh) / total.clamp(min=1), 0.0)


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
    known = (targets.clamp(0, columns - 1) == targets) | (targets == IGNORED)
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
        places = Places.of(targets, group, first, logits.shape[1])
        log_sum, picked = sums_of_rows(logits, places, group)
        # Shorter with `loss_chunks`.
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
            # Before the next one is there.
            del part
        return gradient, None, None, None, None


class Places(NamedTuple):
    """The targets of rows among the columns of this rank."""

    # [n]: the row has a valid target
    valid: Tensor
    # [n]: its target is among the columns
    own: Tensor
    # [n, 1]: the column of its target; any where the target is not among them
    column: Tensor

    @classmethod
    def of(
        cls, targets: Tensor, group: dist.ProcessGroup | None, first: int, columns: int
    ) -> Places:
        """Find the targets of ``columns`` columns from ``first`` on. ``group``: of the ranks that
        have the other columns; None: there are none."""
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
    """The log-sum-exp of each row and the logit of its target, if that is valid, in fp32 at least.

    ``group``: of the ranks that have the other columns; None: there are none. Collective over it.
    """
    dtype = torch.promote_types(logits.dtype, torch.float32)
    sums_of_pieces = [logits[rows].to(dtype).logsumexp(1) for rows in row_pieces(logits)]
    log_sum = sums_of_pieces[0] if len(sums_of_pieces) == 1 else torch.cat(sums_of_pieces)
    # Fewer rows with `loss_chunks`
    logits, places = logits[: len(log_sum)], places.at(slice(len(log_sum)))
    # A rank may have no columns, from which nothing can be gathered.
    if not logits.shape[1]:
        value = torch.zeros_like(log_sum)
    else:
        value = logits.gather(1, places.column)[:, 0].to(dtype)
    if group is None:
        return log_sum, value
    value = torch.where(places.own, value, 0)
    # The log-sum-exp over all ranks' columns, and the logit that one rank has picked.
    largest = log_sum.clone()
    dist.all_reduce(largest, dist.ReduceOp.MAX, group)
    sums = torch.stack(((log_sum - largest).exp(), value))
    dist.all_reduce(sums, group=group)
    return largest + sums[0].log(), sums[1]


def gradient_of_rows(logits: Tensor, places: Places, log_sum: Tensor, z_loss: float) -> Tensor:
    """The gradient of the summed loss of a few rows, in fp32 at least, from `sums_of_rows`."""
    # That of a logit is its softmax, minus 1 for the target's logit; that of ignored rows is 0.
    shift = torch.where(places.valid, log_sum, torch.inf)[:, None]
    gradient = (logits - shift).exp_()
    if z_loss:
        gradient *= (1 + 2 * z_loss * log_sum)[:, None]
    if logits.shape[1]:
        shares = torch.where(places.own, -1.0, -0.0).to(gradient.dtype)
        gradient.scatter_add_(1, places.column, shares[:, None])
    return gradient


def sum_of_valid(log_sum: Tensor, picked: Tensor, places: Places, z_loss: float) -> Tensor:
    """The summed loss of the rows with a valid target, from their log-sum-exp and its logit."""
    loss = log_sum - picked
    # Not with a factor of 0: the square of a large number is infinite.
    if z_loss:
        loss = loss + z_loss * log_sum.square()
    return torch.where(places.valid, loss, 0).sum()


@contextmanager
def loss_chunks(elements: int, *, first_alone: bool = False) -> Iterator[None]:
    """For steps on tensors without storage, which fewer operators make faster: inside,
    `cross_entropy_sum` turns ``elements`` logits to fp32 at once, and with ``first_alone`` no
    others after the first of them, since all chunks take the same memory."""
    global _elements, _first_alone
    before = _elements, _first_alone
    _elements, _first_alone = elements, first_alone
    try:
        yield
    finally:
        _elements, _first_alone = before


def chunk_elements(device_type: str) -> int:
    """The logits that are turned to fp32 at once: 16 MiB of them on a CPU, where a chunk should
    stay in the cache, and 512 MiB on a GPU, where each chunk costs about 16 kernel launches."""
    return 2**22 if device_type == "cpu" else 2**27


def row_pieces(values: Tensor) -> list[slice]:
    """The rows of a matrix, in parts of about `chunk_elements` elements; at least one part."""
    elements = _elements or chunk_elements(values.device.type)
    step = max(1, elements // max(values.shape[1], 1))
    starts = range(0, max(len(values), 1), step)
    return [slice(start, start + step) for start in (starts[:1] if _first_alone else starts)]
