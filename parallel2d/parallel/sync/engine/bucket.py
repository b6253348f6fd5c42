"""A bucket: gradients that are reduced over the replicate axis in one collective."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from parallel2d.parallel.fsdp_internals import FSDPParameter
from parallel2d.parallel.sync.engine.group_state import GroupState, keep_until_done
from parallel2d.parallel.weights.geometry import as_real, pieces_of


class Bucket:
    """The sharded gradients of one or more neighbouring groups, as one flat tensor.

    Its methods are those of torch's ``GradBucket``, so that hooks written for
    `torch.nn.parallel.DistributedDataParallel` accept it: `index`, `buffer`, `gradients`,
    `parameters`, `is_last`, `set_buffer`. ``states``: of the groups, which have one wire.
    """

    def __init__(self, index: int, states: Sequence[GroupState], last: bool) -> None:
        self.states = states
        self.wire = states[0].wire
        # Its parameters that require gradients
        self.trained: list[FSDPParameter] = []
        for state in states:
            self.trained.extend(state.group.trained)
        self._index = index
        self._last = last
        # None until `flatten` or `fill_with_zeros`.
        self._flat: Tensor | None = None
        # The part of each parameter in it, in the order of `trained`.
        self._pieces: list[Tensor] = []

    def index(self) -> int:
        """Its number in the order of reduction, from 0: the groups that a backward pass ends first
        come first."""
        return self._index

    def is_last(self) -> bool:
        """Whether it is the last one in the order of reduction."""
        return self._last

    def buffer(self) -> Tensor:
        """All gradients, flat and real: those of this replica before the reduction, their mean over
        the replicas after it."""
        flat = self._flat
        assert flat is not None, "the bucket is not being reduced"
        # Collectives and hooks take real tensors: a complex number is sent as two.
        if flat.is_complex():
            flat = torch.view_as_real(flat).view(-1)
        return flat

    def set_buffer(self, tensor: Tensor) -> None:
        """Copies ``tensor``, of the same number of elements, into `buffer`, cast to its dtype."""
        self.buffer().copy_(tensor.view(-1))

    def gradients(self) -> list[Tensor]:
        """This rank's part of each gradient, a view of `buffer`."""
        gradients = []
        for parameter in self.trained:
            # `flatten` has given every parameter one.
            local = parameter.local_gradient
            assert local is not None
            gradients.append(local)
        return gradients

    def pieces(self) -> list[Tensor]:
        """Views of `buffer`, one for each parameter in the order of `parameters`; complex ones as
        real numbers."""
        return [as_real(each) for each in self._pieces]

    def release(self) -> None:
        """Lets go of the memory; the gradients are elsewhere by now."""
        self._flat = None
        self._pieces = []

    def parameters(self) -> list[nn.Parameter]:
        """The sharded parameters, in the order of `gradients`."""
        return [parameter.sharded for parameter in self.trained]

    @torch.no_grad()
    def flatten(self) -> None:
        """Makes the gradients views of one flat tensor, `buffer`.

        Nothing is copied when they are views of one tensor already, as the sharding engine leaves
        those of a group. A parameter without a gradient gets zeros: another replica may have one.
        """
        gradients = [parameter.local_gradient for parameter in self.trained]
        self._flat = _common_storage(gradients)
        # So it is at first with several groups: each has a storage of its own.
        if self._flat is None:
            self._flat = self._empty()
            for parameter, gradient, view in zip(
                self.trained, gradients, self._views(), strict=True
            ):
                if gradient is None:
                    view.zero_()
                else:
                    view.copy_(gradient)
                    # Nothing refers to it once this returns.
                    keep_until_done(gradient)
                parameter.set_gradient(view)
        self._pieces = self.gradients()

    def fill_with_zeros(self) -> None:
        """Makes `buffer` zeros of the bucket's size. The gradients stay as they are."""
        self._flat = self._empty().zero_()
        self._pieces = list(self._views())

    def _empty(self) -> Tensor:
        """An uninitialized flat tensor with room for this rank's gradients."""
        first = self.trained[0]
        numel = sum(parameter.local_size.numel() for parameter in self.trained)
        return torch.empty(numel, dtype=first.gradient_dtype, device=first.sharded.device)

    def _views(self) -> Iterator[Tensor]:
        """The part of each parameter in the flat tensor."""
        assert self._flat is not None
        return pieces_of(self._flat, [parameter.local_size for parameter in self.trained])


def fill_buckets(sizes: Sequence[int], kinds: Sequence[object], most_bytes: int) -> list[list[int]]:
    """Puts neighbours of one kind together, until a bucket is large enough. ``sizes``: bytes of the
    gradients of each group. Returns the indexes of the groups of each bucket. A group that is
    larger than ``most_bytes`` has a bucket of its own."""
    buckets: list[list[int]] = []
    filled = 0
    for index, (size, kind) in enumerate(zip(sizes, kinds, strict=True)):
        starts = not buckets or kind != kinds[index - 1] or filled + size > most_bytes
        if starts:
            buckets.append([])
            filled = 0
        buckets[-1].append(index)
        filled += size
    return buckets


def _common_storage(tensors: Sequence[Tensor | None]) -> Tensor | None:
    """One flat view of all ``tensors``; None unless they fill a piece of one storage without gaps.

    Gaps hold padding. A view with gaps would have a size that depends on how the gradients were
    made, and replicas could send different sizes.
    """
    # A parameter without a gradient needs zeros, for which there is no room between the others.
    found = [tensor for tensor in tensors if tensor is not None]
    if not found or len(found) < len(tensors):
        return None
    storage = found[0].untyped_storage().data_ptr()
    begin = found[0].storage_offset()
    end = begin
    filled = 0
    for tensor in found:
        is_elsewhere = tensor.untyped_storage().data_ptr() != storage
        if is_elsewhere or not tensor.is_contiguous():
            return None
        offset = tensor.storage_offset()
        # The order in storage may be another than that of the parameters.
        begin = min(begin, offset)
        end = max(end, offset + tensor.numel())
        filled += tensor.numel()
    if end - begin != filled:
        return None
    return found[0].as_strided((filled,), (1,), begin)
