"""Error feedback of gradients for coarse communication formats: `ErrorFeedback`.

[Note: error feedback] Each replica quantizes and sends g + 0.95·e instead of its gradient g, where
e is the rounding error of the previous step (the error feedback). The stored error feedback changes
only after a step of the optimizer, and not if a step is repeated or skipped. The error feedback of
a parameter that no replica used does not change, because its mean is discarded. Error feedback is
stored in 8 bits, divided by the loss scale, so that the loss scale may change.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Container, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from parallel2d.parallel.fsdp_internals.fsdp_group import FSDPParameter
from parallel2d.parallel.model_structure import updated_as
from parallel2d.parallel.sync.formats import ERROR_FEEDBACK_DECAY
from parallel2d.parallel.sync.formats.quantize import BLOCK, blocks_of, to_blocks
from parallel2d.parallel.sync.methods.method import ReplicatedModel, UpdateFollower
from parallel2d.parallel.weights.geometry import Region, as_real, local_part

# FQN of a parameter, and the number of a part of its local shard; see `ErrorFeedback.cut`
PartName = tuple[str, int]

# Largest code. With a power of two, values do not change when they are read and stored again.
_LARGEST = 64


class StoredBlocks(NamedTuple):
    """Blocks of values in 8 bits: a value is its code multiplied by the scale of its block."""

    codes: Tensor  # int8 [blocks, 256]
    scales: Tensor  # fp32 [blocks, 1]

    @classmethod
    def of(cls, blocks: Tensor) -> StoredBlocks:
        """Round ``blocks`` to the nearest codes. A block that is not finite becomes zero."""
        scales = blocks.abs().amax(1, keepdim=True).div_(_LARGEST).to(torch.float32)
        scales.nan_to_num_(0.0, 0.0, 0.0)
        codes = blocks.div(torch.where(scales == 0, 1, scales)).round_()
        return cls(codes.to(torch.int8), scales)

    @classmethod
    def zeros(cls, like: Tensor, count: int) -> StoredBlocks:
        """Return ``count`` blocks of zeros on the device of ``like``."""
        codes = like.new_zeros(count, BLOCK, dtype=torch.int8)
        return cls(codes, like.new_zeros(count, 1, dtype=torch.float32))

    def values(self, dtype: torch.dtype) -> Tensor:
        """Return the blocks in ``dtype``."""
        return self.codes.to(dtype).mul_(self.scales)


class ErrorFeedback(UpdateFollower):
    """Error feedback of one model, for the parameters with the FQNs ``names``."""

    follows = True
    residual_name = "gradient_residual"
    unshared_steps = 1

    def __init__(self, model: ReplicatedModel, names: Container[str]) -> None:
        self.replica = dist.get_group_rank(model.group, dist.get_rank())
        self.replicas = model.group.size()
        self._parameters: dict[str, FSDPParameter] = {}
        for group in model.groups:
            # Frozen parameters are included, because they may be trained later.
            self._parameters |= {each.name: each for each in group.parameters if each.name in names}
        if not self._parameters:
            self.residual_name = ""
        self._kept: dict[PartName, StoredBlocks] = {}
        # New error feedback from the last reduction. `_next` replaces `_kept` after the optimizer's
        # step, and is discarded if the gradients are cleared.
        self._next: dict[PartName, StoredBlocks] = {}

    def cut(self, local: Tensor) -> Sequence[Tensor]:
        """Return views of the parts of a local shard. Each part starts a new block."""
        return [local]

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        if optimizer is self._optimizer:
            return
        super().attach(optimizer)
        zero_grad = optimizer.zero_grad

        @functools.wraps(zero_grad)
        def clear(set_to_none: bool = True) -> None:
            zero_grad(set_to_none)
            self.drop_sums(set_to_none)

        optimizer.zero_grad = clear  # type: ignore[method-assign]

    def drop_sums(self, set_to_none: bool) -> None:
        """Discard state of the current gradients that the optimizer's ``zero_grad`` does not
        clear."""
        self._next = {}

    def add_to(self, rows: Tensor, counts: Mapping[PartName, int], *, again: bool) -> None:
        """Add the error feedback to ``rows``, the blocks of gradients.

        Args:
            rows: the blocks of all parts.
            counts: number of blocks of each part.
            again: True for a second reduction before the optimizer's step. The second
                reduction uses the new error feedback of the first reduction.
        """
        kept = self._kept | self._next if again else self._kept
        if kept.keys().isdisjoint(counts):
            return
        found = []
        for name, count in counts.items():
            found.append(kept.get(name) or StoredBlocks.zeros(rows, count))
        codes, scales = map(torch.cat, zip(*found, strict=True))
        factor = ERROR_FEEDBACK_DECAY * self.loss_scale
        rows.addcmul_(codes.to(rows.dtype), scales.to(rows.dtype) * factor)

    def keep(self, rows: Tensor, counts: Mapping[PartName, int]) -> None:
        """Store ``rows``, the rounding errors of this step, for the next step."""
        all_codes, all_scales = StoredBlocks.of(rows)
        all_scales /= self.loss_scale
        sizes = list(counts.values())
        parts = zip(counts, all_codes.split(sizes), all_scales.split(sizes), strict=True)
        for name, codes, scales in parts:
            self._next[name] = StoredBlocks(codes, scales)

    def after_update(self) -> None:
        for (name, number), stored in self._next.items():
            if updated_as(self._parameters[name].sharded).grad is not None:
                self._kept[name, number] = stored
        self._next = {}

    def clear_gradients(self, set_to_none: bool) -> None:
        self._next = {}

    @torch.no_grad()
    def residuals(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for name, parameter in self._parameters.items():
            whole = parameter.sharded
            if not whole.requires_grad:
                continue
            wide = torch.promote_types(whole.dtype, torch.float32)
            found[name] = torch.zeros_like(whole, dtype=wide, requires_grad=False)
            for number, part in enumerate(self.cut(as_real(local_part(found[name])))):
                if (name, number) in self._kept:
                    values = self._kept[name, number].values(part.dtype).view(-1)
                    part.copy_(values[: part.numel()].view(part.shape))
        return found

    def scale(self, factor: float) -> None:
        """Multiply the error feedback by ``factor``.

        After a change of the number of replicas this keeps its weight in the mean.
        """
        for name, (codes, scales) in self._kept.items():
            self._kept[name] = StoredBlocks(codes, scales * factor)

    @torch.no_grad()
    def set_residual(self, name: str, value: Tensor) -> None:
        for number, part in enumerate(self.cut(as_real(local_part(value)))):
            self._kept[name, number] = StoredBlocks.of(to_blocks([part]))


def stored_bytes(shape: Sequence[int]) -> int:
    """Return the bytes of the stored error feedback for a tensor of this ``shape``."""
    return blocks_of(math.prod(shape)) * (BLOCK + torch.float32.itemsize)


def as_stored(values: Tensor, cut: Sequence[Region]) -> Tensor:
    """Return unsharded ``values``, rounded as each rank stores its local shard, for parity
    checks."""
    found = torch.zeros_like(values)
    for region in cut:
        part = as_real(values[region.slices])
        stored = StoredBlocks.of(to_blocks([part])).values(part.dtype)
        as_real(found[region.slices]).copy_(stored.view(-1)[: part.numel()].view(part.shape))
    return found
