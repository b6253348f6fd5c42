"""Activation offload: `offload_blocks` moves the saved tensors of blocks to host memory.

[Note: stream order of offload] Each forward of a block is one `_Region`. The saved tensors of a
region stay on the device until its forward ends. At the start of the next region's forward, a side
stream begins to copy these tensors to pinned memory. At the end of that forward, the compute stream
waits for the copies and the device memory is freed. Therefore the copies overlap with compute, the
device holds at most two regions, and memory is freed without ``record_stream``. The last region,
which backward reads first, is not copied. In backward the first access to a region waits for its
copies to the device, and starts the copies of the previous region. The device memory for these
copies is allocated on the compute stream, and the side stream waits for the compute stream before
each copy.

A tensor that changes in place between its save and the end of its copy is an error in backward, as
without offload. Parameters and buffers of modules are not offloaded; FSDP frees and all-gathers
parameters. Arguments without a gradient, such as masks and rotary tables, also stay on the device,
because all blocks share them.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

from parallel2d.base.device import current_stream, new_stream, on_stream
from parallel2d.parallel.fsdp_internals.tensors import part_of, storage_of, version_of
from parallel2d.parallel.model_structure import tensor_leaves

# Saved tensors with fewer bytes are not worth a copy.
MIN_BYTES = 4096


def offload_blocks(blocks: Sequence[tuple[str, nn.Module]]) -> None:
    """Offload the tensors that ``blocks`` save for backward to host memory."""
    offloader = _Offloader()
    for name, block in blocks:
        block.forward = functools.partial(_run, offloader, name, block, block.forward)


def _run(
    offloader: _Offloader,
    name: str,
    block: nn.Module,
    forward: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Run the forward of ``block`` as one region."""
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    shared = set()
    for each in tensor_leaves((args, kwargs)):
        if not each.requires_grad:
            shared.add(storage_of(each))
    region = _Region(offloader, name, block, shared)
    before = offloader.last_region()
    region.before, offloader.last_region = weakref.ref(before or region), weakref.ref(region)
    if before is not None:
        before.send()
    try:
        with saved_tensors_hooks(region.pack, SavedTensor.unpack):
            return forward(*args, **kwargs)
    finally:
        if before is not None:
            before.release()


class _Offloader:
    """The side stream, and the most recent region."""

    def __init__(self) -> None:
        self.last_region: Callable[[], _Region | None] = lambda: None
        self._streams: dict[str, torch.Stream] = {}

    def stream(self, device_type: str) -> torch.Stream:
        if device_type not in self._streams:
            self._streams[device_type] = new_stream(device_type)
        return self._streams[device_type]


class _Memory:
    """The bytes of one storage that contains saved tensors, on the device or in host memory.

    The `SavedTensor`s of this storage keep the object alive.
    """

    def __init__(self, device: Tensor) -> None:
        self.device: Tensor | None = device
        self.host: Tensor | None = None


class SavedTensor:
    """A tensor that a block has saved for backward, on the device or in host memory."""

    def __init__(self, region: _Region, tensor: Tensor, memory: _Memory) -> None:
        self.region = region
        self.memory = memory
        # A detached alias, which shares the version counter of ``tensor``. ``tensor`` itself would
        # form a reference cycle if an autograd node saves its output. None after the copy to the
        # host.
        self.tensor: Tensor | None = tensor.detach()
        self._version = version_of(tensor)
        self._spec = tensor._spec if isinstance(tensor, DTensor) else None
        part = part_of(tensor)
        self._view = part.dtype, part.storage_offset(), part.size(), part.stride()
        self._is_changed = False

    def check(self) -> None:
        """Set ``_is_changed`` if the tensor was changed in place since it was saved."""
        if self.tensor is not None and version_of(self.tensor) != self._version:
            self._is_changed = True

    def unpack(self: SavedTensor | Tensor) -> Tensor:
        """Return the saved tensor on the device."""
        if not isinstance(self, SavedTensor):
            return self
        self.check()
        if self._is_changed:
            raise RuntimeError(
                f"a tensor that {self.region.name} needs for its gradient was modified by an "
                "inplace operation after the block had saved it: change a copy"
            )
        if self.tensor is not None:
            return self.tensor
        self.region.fetch()
        assert self.memory.device is not None
        dtype, offset, size, stride = self._view
        empty = torch.empty(0, dtype=dtype, device=self.memory.device.device)
        part = empty.set_(self.memory.device.untyped_storage(), offset, size, stride)
        if self._spec is None:
            return part
        # `from_local` would move the tensor to the device of the mesh, and record a gradient.
        return DTensor(part, self._spec, requires_grad=False)


class _Region:
    """The saved tensors of one forward of a block. See [Note: stream order of offload]."""

    def __init__(
        self, offloader: _Offloader, name: str, block: nn.Module, shared: set[int | None]
    ) -> None:
        self.name = name
        self.before: Callable[[], _Region | None] = lambda: None
        self._offloader = offloader
        self._block = block
        self._shared = shared
        # Weak references: only the autograd graph keeps the saved tensors and their memory alive.
        # The key of a memory is `storage_of`, which is unique among live storages.
        self._saved: weakref.WeakSet[SavedTensor] = weakref.WeakSet()
        self._memories: weakref.WeakValueDictionary[int | None, _Memory]
        self._memories = weakref.WeakValueDictionary()
        self._device_type = ""
        self._sent: list[_Memory] = []  # the memory whose copies to the host are in flight
        self._is_fetching = False

    def pack(self, tensor: Tensor) -> SavedTensor | Tensor:
        """Return a `SavedTensor` for ``tensor``, or ``tensor`` if it must stay on the device."""
        part = part_of(tensor)
        if type(part) is not Tensor or not _is_plain(part):
            return tensor
        if any(isinstance(each, nn.Parameter) for each in (tensor, tensor._base)):
            return tensor
        number = storage_of(part)
        if part.untyped_storage().nbytes() < MIN_BYTES or number in self._shared:
            return tensor
        # Read the parameters now: FSDP groups inside the block may have all-gathered theirs since
        # the block started.
        kept = chain(self._block.parameters(), self._block.buffers())
        if any(storage_of(each) == number for each in kept):
            return tensor
        memory = self._memories.get(number)
        if memory is None:
            memory = _Memory(_as_bytes(part))
            self._memories[number] = memory
        self._device_type = part.device.type
        saved = SavedTensor(self, tensor, memory)
        self._saved.add(saved)
        return saved

    def send(self) -> None:
        """Start the copies to the host."""
        self._sent = [each for each in self._memories.values() if each.host is None]
        if not self._sent:
            return
        side = self._offloader.stream(self._device_type)
        side.wait_stream(current_stream(self._device_type))
        with on_stream(self._device_type, side):
            for memory in self._sent:
                assert memory.device is not None
                memory.host = torch.empty(
                    memory.device.shape,
                    dtype=torch.uint8,
                    pin_memory=self._device_type != "cpu",
                )
                memory.host.copy_(memory.device, non_blocking=True)

    def release(self) -> None:
        """Wait for the copies to the host on the compute stream, and free the device memory."""
        if not self._sent:
            return
        side = self._offloader.stream(self._device_type)
        current_stream(self._device_type).wait_stream(side)
        for saved in self._saved:
            saved.check()
            saved.tensor = None
        for memory in self._sent:
            memory.device = None
        self._sent = []

    def fetch(self) -> None:
        """Make this region available on the device, and start the copies of the previous region."""
        self._prefetch()
        if not self._is_fetching:
            return
        side = self._offloader.stream(self._device_type)
        current_stream(self._device_type).wait_stream(side)
        self._is_fetching = False
        before = self.before()
        if before is not None and before is not self:
            before._prefetch()

    def __del__(self) -> None:
        # The graph was freed before backward read this region. The allocator must not reuse the
        # device memory before the copies into it have ended.
        if self._is_fetching:
            side = self._offloader.stream(self._device_type)
            current_stream(self._device_type).wait_stream(side)

    def _prefetch(self) -> None:
        """Start the copies to the device."""
        missing = []
        for each in self._memories.values():
            if each.device is None:
                missing.append(each)
        if not missing:
            return
        self._is_fetching = True
        side = self._offloader.stream(self._device_type)
        copied = []
        for each in missing:
            if each.host is not None:
                each.device = torch.empty_like(each.host, device=self._device_type)
                copied.append((each.device, each.host))
        side.wait_stream(current_stream(self._device_type))
        with on_stream(self._device_type, side):
            for on_device, host in copied:
                on_device.copy_(host, non_blocking=True)


def _is_plain(part: Tensor) -> bool:
    """True if storage, dtype, offset, size and stride describe ``part`` completely."""
    if isinstance(part, FakeTensor) or part.device.type == "meta" or part.layout != torch.strided:
        return False
    return not (part.is_conj() or part.is_neg() or part.is_inference())


def _as_bytes(part: Tensor) -> Tensor:
    """Return all bytes of the storage of ``part``."""
    return torch.empty(0, dtype=torch.uint8, device=part.device).set_(part.untyped_storage())
