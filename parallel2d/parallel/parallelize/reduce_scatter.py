"""The custom all-gather and reduce-scatter of an FSDP group.

Before each collective is issued, an entry for the collective is written to the order of the shard
group; see [Note: one order of collectives].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parallel2d.base.device import current_device
from parallel2d.base.errors import ConfigError

# Kinds of entries: three collectives, and points such as the end of a backward pass
GATHER, SCATTER, EXCHANGE, END = range(4)
VERBS = ("gathers {}", "reduces {}", "reduces {}")


class _Ordered:
    """Base of the custom collectives.

    Args:
        enter: called with kind, size and dtype before the collective. Raises `ConfigError` if the
            collective must not be issued.
        failed: called with that error. Cleans up, and returns the error to raise.
    """

    def __init__(
        self, enter: Callable[[int, int, torch.dtype], None], failed: Callable[..., BaseException]
    ) -> None:
        self._order = enter
        self._failed = failed

    def _enter(self, kind: int, payload: Tensor) -> None:
        try:
            self._order(kind, payload.numel(), payload.dtype)
        except ConfigError as error:
            raise self._failed(error) from None

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class OrderedAllGather(_Ordered):
    """The all-gather of one FSDP group."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        self._enter(GATHER, output_tensor)
        return dist.all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)


class OrderedReduceScatter(_Ordered):
    """The reduce-scatter of one FSDP group.

    Gradients with fewer than 32 bits are exchanged by an all-to-all and summed in fp32, as in
    Megatron-LM and VeOmni. Only the contributions and the result are rounded; a reduce-scatter
    would also round every partial sum. A rank sends as many bytes as in a ring reduce-scatter.
    """

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        if input_tensor.dtype.itemsize >= 4:
            self._enter(SCATTER, input_tensor)
            return dist.reduce_scatter_single(
                output_tensor, input_tensor, op=op, group=group, async_op=async_op
            )
        assert not async_op, "the engine never asks for it"
        self._enter(EXCHANGE, input_tensor)
        # FSDP calls this method on its reduce-scatter stream, and records an event on that stream
        # after the call. All kernels below run on that stream, so the event comes after the sum,
        # and FSDP may reuse the memory of the input after the event.
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        total = received.view(group.size(), -1).sum(0, dtype=torch.float32)
        if op == dist.ReduceOp.AVG:
            total /= group.size()
        output_tensor.copy_(total)
        return None


def join(
    kind: int, numel: int, dtype: torch.dtype, group: dist.ProcessGroup, device_type: str
) -> None:
    """Contribute zeros to a collective that other ranks have issued."""
    whole = torch.zeros(numel, dtype=dtype, device=current_device(device_type))
    part = whole[: numel // group.size()].clone()
    if kind == GATHER:
        dist.all_gather_single(whole, part, group=group)
    elif kind == SCATTER:
        dist.reduce_scatter_single(part, whole, group=group)
    elif kind == EXCHANGE:
        dist.all_to_all_single(torch.empty_like(whole), whole, group=group)
