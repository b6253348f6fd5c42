"""A bucket: gradients that cross the replicate axis in one piece."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from parallel2d.sync.group import GroupParameter, ParameterGroup


class Bucket:
    """The sharded gradients of one or more neighbouring groups, as one flat tensor.

    Its methods are those of torch's ``GradBucket``, so that hooks written for
    `torch.nn.parallel.DistributedDataParallel` take it: `index`, `buffer`, `gradients`,
    `parameters`, `is_last`, `set_buffer`.
    """

    def __init__(self, index: int, groups: Sequence[ParameterGroup], last: bool) -> None:
        self.groups = groups
        self._index, self._last = index, last
        self._flat: Tensor | None = None

    @property
    def trained(self) -> list[GroupParameter]:
        """Its parameters that require gradients."""
        return [parameter for group in self.groups for parameter in group.trained]

    @property
    def wire(self) -> torch.dtype:
        """In which its gradients travel."""
        return self.groups[0].wire

    def index(self) -> int:
        """Its place in the order of reduction: the groups that backward ends first come first."""
        return self._index

    def is_last(self) -> bool:
        return self._last

    def buffer(self) -> Tensor:
        """All gradients, flat and real: those of this replica before the reduction, their mean
        after it."""
        assert self._flat is not None, "the bucket is not being reduced"
        return torch.view_as_real(self._flat).view(-1) if self._flat.is_complex() else self._flat

    def set_buffer(self, tensor: Tensor) -> None:
        """Replaces what `buffer` holds; equal in size, cast to its dtype."""
        self.buffer().copy_(tensor.view(-1))

    def gradients(self) -> list[Tensor]:
        """This rank's part of each gradient, a view of `buffer`."""
        found = []
        for parameter in self.trained:
            local = parameter.local_gradient
            assert local is not None
            found.append(local)
        return found

    def parameters(self) -> list[nn.Parameter]:
        return [parameter.sharded for parameter in self.trained]

    @torch.no_grad()
    def gather(self) -> None:
        """Makes the gradients views of one flat tensor, `buffer`.

        Nothing is copied when they are already, as the engine leaves those of a group. A parameter
        without a gradient gets zeros: another replica may have one.
        """
        parameters = self.trained
        locals_ = [parameter.local_gradient for parameter in parameters]
        self._flat = _common_storage(locals_)
        if self._flat is None:
            self._flat = self._copied(parameters, locals_)

    def _copied(
        self, parameters: Sequence[GroupParameter], locals_: Sequence[Tensor | None]
    ) -> Tensor:
        device = parameters[0].sharded.device
        dtype = parameters[0].gradient_dtype
        sizes = [parameter.local_size for parameter in parameters]
        flat = torch.empty(sum(size.numel() for size in sizes), dtype=dtype, device=device)
        begin = 0
        for parameter, size, local in zip(parameters, sizes, locals_, strict=True):
            view = flat[begin : begin + size.numel()].view(size)
            if local is None:
                view.zero_()
            else:
                view.copy_(local)
                keep_until_done(local)
            parameter.set_gradient(view)
            begin += size.numel()
        return flat

    def zeros(self) -> None:
        """Makes `buffer` zeros of the bucket's size and leaves the gradients alone."""
        parameters = self.trained
        numel = sum(parameter.local_size.numel() for parameter in parameters)
        first = parameters[0]
        self._flat = torch.zeros(numel, dtype=first.gradient_dtype, device=first.sharded.device)


def _common_storage(tensors: Sequence[Tensor | None]) -> Tensor | None:
    """One flat view of all ``tensors``; None unless they fill a piece of one storage without gaps.

    With gaps, which hold padding, its size would depend on how the gradients came about, and differ
    between replicas.
    """
    found = [tensor for tensor in tensors if tensor is not None]
    if len(found) < len(tensors) or not found:
        return None
    storage = found[0].untyped_storage().data_ptr()
    if any(t.untyped_storage().data_ptr() != storage or not t.is_contiguous() for t in found):
        return None
    begin = min(tensor.storage_offset() for tensor in found)
    end = max(tensor.storage_offset() + tensor.numel() for tensor in found)
    if end - begin != sum(tensor.numel() for tensor in found):
        return None
    return found[0].as_strided((end - begin,), (1,), begin)


def keep_until_done(tensor: Tensor) -> None:
    """Memory from another stream must not be given out again before the copy here is done."""
    if tensor.device.type != "cpu":
        tensor.record_stream(torch.accelerator.current_stream(tensor.device))
