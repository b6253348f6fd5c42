"""Error feedback of gradients for coarse communication formats: `ErrorFeedback`.

[Note: error feedback] Each replica sends Q(g + 0.95·e) instead of its gradient g, and keeps the
rounding error e for the next step. The error feedback changes only after a step of the optimizer. A
step that is repeated, refused or not finite does not change it. Parameters that no replica used
keep their error feedback, since their message is dropped. Error feedback is stored without the loss
scale, so that the scale may change. The storage format has 8 bits.
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

# FQN of a parameter, and the number of its part; see `ErrorFeedback.cut`.
PartName = tuple[str, int]

# A power of two, so that stored values are read and stored again without a change.
_LARGEST = 64


class StoredBlocks(NamedTuple):
    """Blocks in 8 bits: a value is its code times the scale of its block."""

    codes: Tensor  # int8 [blocks, 256]
    scales: Tensor  # fp32 [blocks, 1]

    @classmethod
    def of(cls, blocks: Tensor) -> StoredBlocks:
        """Round to the nearest code; a block that is not finite becomes zero."""
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
    """Error feedback of one model. ``names``: FQNs of the parameters with error feedback."""

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
        # Error feedback of the last reduction, until the optimizer's step or until gradients are
        # dropped
        self._next: dict[PartName, StoredBlocks] = {}

    def cut(self, local: Tensor) -> Sequence[Tensor]:
        """Return views of the parts of a local shard that have separate blocks."""
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
        """Drop sums that the optimizer's ``zero_grad`` does not reach."""
        self._next = {}

    def add_to(self, rows: Tensor, counts: Mapping[PartName, int], *, again: bool) -> None:
        """Add the error feedback to ``rows``, the blocks of gradients.

        Args:
            rows: the blocks of all parts.
            counts: number of blocks of each part.
            again: True for a second reduction before one optimizer step, which uses both gradients.
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
        """Keep ``rows``, the rounding errors of this step, for the next step."""
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
        """Scale the error feedback, so that its weight in the mean does not change."""
        for name, (codes, scales) in self._kept.items():
            self._kept[name] = StoredBlocks(codes, scales * factor)

    @torch.no_grad()
    def set_residual(self, name: str, value: Tensor) -> None:
        for number, part in enumerate(self.cut(as_real(local_part(value)))):
            self._kept[name, number] = StoredBlocks.of(to_blocks([part]))


def stored_bytes(shape: Sequence[int]) -> int:
    """Return bytes of the stored error feedback of a tensor of this ``shape``."""
    return blocks_of(math.prod(shape)) * (BLOCK + torch.float32.itemsize)


def as_stored(values: Tensor, cut: Sequence[Region]) -> Tensor:
    """Return unsharded ``values`` after each rank has stored its part, for parity checks."""
    found = torch.zeros_like(values)
    for region in cut:
        part = as_real(values[region.slices])
        stored = StoredBlocks.of(to_blocks([part])).values(part.dtype)
        as_real(found[region.slices]).copy_(stored.view(-1)[: part.numel()].view(part.shape))
    return found
