"""One simulated device and its host process: accesses of memory, kernels, collectives and waits of
the host.
"""

from __future__ import annotations

import functools
import itertools
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from stream_simulator.clocks import (
    DEVICE,
    HOST,
    UNKNOWN,
    Access,
    Actor,
    Block,
    Clock,
    EarlyFree,
    FreedBlock,
    extent_of,
    joined,
    not_done,
)
from stream_simulator.sources import Caller, caller

PLAIN = (Tensor, torch.nn.Parameter)  # the classes of tensors that wrap no other tensor
local = threading.local()  # of each thread: its current stream, and the place of new tensors
_device = torch._C.TensorBase.device.__get__  # before it is replaced

# CUDA makes the host wait in these: the result is a number, or its size depends on values.
_WAITING_OPERATORS = {
    "aten._local_scalar_dense",
    "aten.equal",
    "aten.is_nonzero",
    "aten.nonzero",
    "aten.masked_select",
    "aten.bincount",
    "aten._unique",
    "aten._unique2",
    "aten.unique_dim",
    "aten.unique_consecutive",
    "aten.repeat_interleave.Tensor",
    "aten._linalg_check_errors",
}
_NO_KERNEL = {
    "aten.empty",
    "aten.empty_strided",
    "aten.new_empty",
    "aten.new_empty_strided",
    "aten.empty_like",
    "aten.set_",
    "aten.resize_",
    "aten.lift_fresh",
    "aten.detach",
    "aten.detach_",
    "aten.alias",
    "aten.is_pinned",
}
_COPIES = ("aten.copy_", "aten._to_copy")
_INDEXING = ("aten.index", "aten.index_put_", "aten._index_put_impl_")
_IGNORED_NAMESPACES = ("c10d", "prim", "prims", "profiler", "_c10d_functional_autograd")


class Simulator:
    """One simulated device, and the host process that uses it.

    Args:
        devices: the number of devices that the process sees.
        index: the device that it uses.
    """

    def __init__(self, devices: int, index: int) -> None:
        self.device, self.devices = torch.device("cuda", index), devices
        self.actors = [Actor(0, "host"), Actor(1, "default stream")]
        self.host, self.default = self.actors
        # The step of the program, which the program sets
        self.step = 0
        # False: nothing is noted
        self.active = True
        # By kind and places: the text and the number of times
        self.findings: dict[tuple[str, ...], tuple[str, int]] = {}
        # By step, source, reason and place: the waits of the host, and the most operators outstanding at one
        self.waits: Counter[tuple[int, str, str, str]] = Counter()
        self.outstanding: dict[tuple[int, str, str, str], int] = {}
        # By step, source, file and operator
        self.kernels: Counter[tuple[int, str, str, str]] = Counter()
        # By step and place: collectives of the package that a stream of others (the default
        # stream, FSDP2) waits for
        self.exposed: Counter[tuple[int, str]] = Counter()
        # The sources of kernels, and the waits of the host with outstanding operators, in order, by step
        self.sequence: list[tuple[int, str]] = []
        self._early_frees: dict[tuple[str, ...], EarlyFree] = {}
        self._group_streams: dict[str, Actor] = {}
        self._alive: dict[int, object] = {}
        self._number = itertools.count(1)

    # Findings, and waits of the host

    def find(self, kind: str, key: tuple[str, ...], text: str) -> None:
        """Note a finding; findings of equal ``kind`` and ``key`` are the same one."""
        first, count = self.findings.get((kind, *key), (text, 0))
        self.findings[kind, *key] = first, count + 1

    def all_findings(self) -> dict[tuple[str, ...], tuple[str, int]]:
        """`findings`, and the early frees, which are known at the end of the run only."""
        result = dict(self.findings)
        for key, early in list(self._early_frees.items()):
            if early.count and ("reuse", *key) not in self.findings:
                result["early free", *key] = early.text, early.count
        return result

    def wait(self, reason: str, clock: Clock | None = None) -> None:
        """Make the host wait for ``clock``; without one, for the whole device."""
        by = caller()
        key = self.step, by.source, reason, by.place
        clock = joined(*(actor.seen for actor in self.actors)) if clock is None else clock
        if threading.current_thread() is not threading.main_thread():
            # The thread that issues operations neither waits nor knows of it.
            local.seen = joined(getattr(local, "seen", {}), clock)
            return
        before = dict(self.host.seen)
        self.host.join(clock)
        waited_for = sum(
            count - before.get(number, 0) for number, count in list(self.host.seen.items())
        )
        self.waits[key] += 1
        self.outstanding[key] = max(self.outstanding.get(key, 0), waited_for)
        if waited_for:
            self.sequence.append((self.step, f"wait: {reason}: {by.place}"))

    def known(self) -> Clock:
        """The operations that this thread of the host has waited for."""
        seen: Clock | None = getattr(local, "seen", None)
        return self.host.seen if seen is None else joined(self.host.seen, seen)

    # Streams

    def new_stream(self, name: str = "") -> Actor:
        """Return a new stream."""
        number = len(self.actors)
        by = caller(1)
        self.actors.append(Actor(number, name or f"stream {number} of {by.place}", by.source))
        return self.actors[-1]

    def current(self) -> Actor:
        """The current stream of this thread."""
        return getattr(local, "stream", None) or self.default

    def launch(self, actor: Actor, by: Caller, operator: str) -> None:
        """Issue an operation to ``actor``; it begins after all that the host has waited for."""
        actor.join(self.known())
        actor.seen[actor.number] += 1
        self.kernels[self.step, by.source, by.file, operator] += 1
        self.sequence.append((self.step, by.source))

    # Memory

    def block_of(self, tensor: Tensor) -> Block | None:
        """The memory of ``tensor``; None for wrappers, fake, sparse and meta tensors."""
        if type(tensor) not in PLAIN or not is_on_cpu(tensor) or tensor.layout != torch.strided:
            return None
        storage = tensor.untyped_storage()
        found: Block | None = storage.__dict__.get("_block")
        # Memory that was made without an operator (by NumPy, from a file) belongs to the host.
        return found if found is not None else self.new_block(storage, HOST)

    def new_block(self, storage: torch.UntypedStorage, kind: str, pinned: bool = False) -> Block:
        """Note ``storage`` as a new allocation on the current stream."""
        stream = self.current()
        block = Block(kind, stream, caller().place, pinned)
        if kind == DEVICE:
            # The stream may have used the memory until now, so the allocation counts as a write of
            # this stream.
            whole = Access(0, sys.maxsize, True, stream, "allocation", block.where)
            block.accesses.append(whole)
            known = joined(stream.seen, self.known())
            for each in list(self.actors):
                if known.get(each.number, 0) < each.seen[each.number]:
                    stream.not_awaited.add(each.number)
            stream.freed = [freed for freed in stream.freed if not_done(freed.pending, known)]
            block.predecessors = list(stream.freed)
        self.share_block(storage, block)
        return block

    def lock_pages(self, address: int) -> None:
        """Note that the host memory at ``address`` is page-locked."""
        for reference in list(self._alive.values()):
            storage = reference()
            if storage is not None and storage.data_ptr() == address:
                storage._block.pinned = True

    def share_block(self, storage: torch.UntypedStorage, block: Block) -> None:
        """Make ``storage`` show ``block``, which is released with the last storage that shows it."""
        number = next(self._number)

        def release_with_last(_: object) -> None:
            self._alive.pop(number, None)
            block.owners -= 1
            if block.owners == 0:
                self.free(block)

        storage._block = block
        self._alive[number] = weakref.ref(storage, release_with_last)

    def free(self, block: Block) -> None:
        """Release ``block``: the allocator may give its memory to the next allocation on its stream."""
        pending = []
        if block.kind == DEVICE and self.active:
            pending = block.pending_at_free(self.known())
        if pending:
            freed = FreedBlock(block, pending, caller().place)
            block.stream.freed.append(freed)
            for access in pending:
                self._note_early_free(freed, access)
        block.accesses, block.predecessors = [], []

    def touch(self, tensor: Tensor, write: bool, actor: Actor, operator: str, place: str) -> None:
        """Note and check an access by the last operation of ``actor``."""
        block, extent = self.block_of(tensor), extent_of(tensor)
        if block is None or extent is None:
            return
        new = Access(*extent, write, actor, operator, place)
        kept = []
        for old in block.accesses:
            is_done = old.is_done_for(actor.seen)
            if not is_done and old.conflicts(*extent, write):
                self._found_race(block, old, new)
            # An earlier access that is done and covered cannot be in a race without the new one.
            if not (is_done and new.covers(old)):
                kept.append(old)
        block.accesses = [*kept, new]
        for freed in block.predecessors:
            for access in not_done(freed.pending, actor.seen):
                self._found_reuse(block, freed, access, new)
        block.predecessors = []

    def host_access(self, tensor: Tensor, write: bool, operator: str) -> None:
        """Check an access of host memory by the host itself."""
        block, extent = self.block_of(tensor), extent_of(tensor)
        if block is None or extent is None:
            return
        for old in not_done(block.accesses, self.known()):
            if old.conflicts(*extent, write):
                self._found_host_race(old, write, operator)

    # Texts of findings

    def _by(self, access: Access) -> str:
        return f"{access.operator} on [{self.actors[access.actor].name}] at {access.where}"

    def _found_race(self, block: Block, old: Access, new: Access) -> None:
        text = (
            f"memory allocated at {block.where}\n    is {old.verb} by {self._by(old)}\n    and {new.verb} by "
            f"{self._by(new)} without an order between them"
        )
        self.find("race", (old.operator, old.where, new.operator, new.where), text)

    def _note_early_free(self, freed: FreedBlock, access: Access) -> None:
        key, owner = (freed.block.where, access.where, freed.where), freed.block.stream
        if key not in self._early_frees:
            text = (
                f"memory of [{owner.name}] allocated at {freed.block.where}\n    is {access.verb} by "
                f"{self._by(access)},\n    and freed at {freed.where}: its stream does not wait "
                f"for the other stream"
            )
            self._early_frees[key] = EarlyFree(owner, text)
        numbers = [each.number for each in self.actors if access.is_done_for(each.seen)]
        self._early_frees[key].awaited_by.append(frozenset(numbers))

    def _found_reuse(self, block: Block, freed: FreedBlock, access: Access, new: Access) -> None:
        text = (
            f"memory of [{freed.block.stream.name}] allocated at {freed.block.where}\n    is "
            f"{access.verb} by "
            f"{self._by(access)},\n    freed at {freed.where}, allocated again at {block.where},"
            f"\n    and then "
            f"{new.verb} by {self._by(new)} without an order between the two uses"
        )
        self.find("reuse", (freed.block.where, access.where, freed.where), text)

    def _found_host_race(self, old: Access, write: bool, operator: str) -> None:
        place = caller().place
        text = (
            f"memory {old.verb} by {self._by(old)}\n    is {'written' if write else 'read'} by "
            f"the host, {operator} at "
            f"{place}, which has not waited"
        )
        self.find("host race", (old.where, operator, place), text)

    # Operators

    def operator(
        self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: object
    ) -> None:
        """Note an operator that has run. `Watch` calls this after every operator."""
        name = f"{func.namespace}.{func._opname}"
        if not self.active or func.namespace in _IGNORED_NAMESPACES:
            return
        read, written = _arguments(func, args, kwargs)
        results = tensors_in(result)
        if not all(map(is_on_cpu, (*written, *results))):
            return
        place = getattr(local, "place", None)
        read = [each for each in read if is_on_cpu(each)]
        if name == "fsdp.all_gather_copy_in":  # its schema does not declare its writes
            read, written = list(args[0]), [results[0]]
        if place and name == "aten.lift_fresh":  # inside of torch.tensor: of a temporary
            read = []
        kinds = self._kinds_of((*read, *written))
        if "_like" in name or ".new_" in name:  # needs no values of its argument
            read = []
        known = DEVICE if DEVICE in kinds.values() else HOST
        kind = place or (known if kinds else UNKNOWN)
        fresh = self._allocate(results, kind)
        if func.namespace == "_c10d_functional":
            self._functional_collective(name, args, read, [*written, *fresh], results)
        elif name in _NO_KERNEL or (results and not fresh and not written):
            return  # no kernel, or a view
        elif name in _COPIES and self._transfer(name, args, kwargs, results):
            return
        elif kind == DEVICE:
            self._kernel(func, args, read, written, fresh, kinds)
        else:
            self._on_host(name, read, written)

    def _on_host(self, name: str, read: list[Tensor], written: list[Tensor]) -> None:
        for each in read:
            self.host_access(each, False, name)
        for each in written:
            self.host_access(each, True, name)

    def _kinds_of(self, tensors: Iterable[Tensor]) -> dict[int, str]:
        """By the id of each tensor with memory: the kind of the memory."""
        kinds = {}
        for each in tensors:
            if (block := self.block_of(each)) is not None:
                kinds[id(each)] = block.kind
        return kinds

    def _allocate(self, results: list[Tensor], kind: str) -> list[Tensor]:
        """Give a block to the ``results`` without one; return these."""
        fresh = []
        for each in results:
            if type(each) in PLAIN and each.layout == torch.strided:
                storage = each.untyped_storage()
                if "_block" not in storage.__dict__:
                    fresh.append(each)
        for each in fresh:
            self.new_block(each.untyped_storage(), kind, getattr(local, "pinned", False))
        return fresh

    def _transfer(
        self, name: str, args: Sequence[Any], kwargs: dict[str, Any], results: list[Tensor]
    ) -> bool:
        """Note a copy between host and device; False if the copy is of another kind."""
        target, source = (args[0], args[1]) if name == "aten.copy_" else (results[0], args[0])
        to, of = self.block_of(target), self.block_of(source)
        if to is None or of is None or {to.kind, of.kind} != {HOST, DEVICE}:
            return False
        positional = name == "aten.copy_" and len(args) > 2 and args[2]
        direction = "host to device" if of.kind == HOST else "device to host"
        stream, by = self.current(), caller()
        self.launch(stream, by, name)
        self.touch(source, False, stream, name, by.place)
        self.touch(target, True, stream, name, by.place)
        if not (kwargs.get("non_blocking") or positional):
            self.wait(f"blocking copy, {direction}", stream.seen)
        elif not (of if of.kind == HOST else to).pinned:
            self.wait(f"non-blocking copy of pageable memory, {direction}", stream.seen)
        return True

    def _kernel(
        self,
        func: Any,
        args: Sequence[Any],
        read: list[Tensor],
        written: list[Tensor],
        fresh: list[Tensor],
        kinds: dict[int, str],
    ) -> None:
        """Note a kernel in the current stream."""
        name = f"{func.namespace}.{func._opname}"
        for each in (*read, *written):
            block = self.block_of(each)
            if block is not None and block.kind == UNKNOWN:  # made in C++, as zeros of autograd
                block.kind = DEVICE
        stream, by = self.current(), caller()
        self._check_places(name, args, read, written, kinds, by.place)
        self.launch(stream, by, name)
        for each in read:
            self.touch(each, False, stream, name, by.place)
        for each in (*written, *fresh):
            self.touch(each, True, stream, name, by.place)
        # A mask and one number are a masked fill, which has a fixed size.
        is_fill = name == "aten.index_put_" and args[2].numel() == 1
        if name in _INDEXING and _has_mask(args[1]) and not is_fill:
            self.wait(f"{name} with a mask", stream.seen)
        elif _WAITING_OPERATORS & {name, f"{name}.{func._overloadname}"}:
            self.wait(name, stream.seen)

    def _check_places(
        self,
        name: str,
        args: Sequence[Any],
        read: list[Tensor],
        written: list[Tensor],
        kinds: dict[int, str],
        place: str,
    ) -> None:
        """Find tensors of the host in a kernel. Scalars may be there, and indexing copies its indices."""
        strangers = [each for each in read if kinds.get(id(each)) == HOST and each.dim() > 0]
        strangers += [each for each in written if kinds.get(id(each)) == HOST]
        if strangers and name in _INDEXING and kinds.get(id(args[0])) == DEVICE:
            self.wait(f"{name} with indices on the host", self.current().seen)
        elif strangers:
            self.find(
                "mismatch", (name, place), f"{name} gets tensors of host and device at {place}"
            )

    # Collectives

    def collective(
        self,
        name: str,
        written: list[Tensor],
        read: list[Tensor],
        group_name: str,
        asynchronous: bool,
    ) -> Clock:
        """Note a collective of NCCL; return the clock of its completion.

        An asynchronous one runs in a stream of its process group, after the work of the current
        stream so far. A synchronous one runs in the current stream (since torch 2.8).
        """
        actor, by = self.current(), caller()
        if asynchronous:
            before, actor = actor, self._stream_of_group(group_name)
            actor.join(before.seen)
        kinds = set(self._kinds_of((*written, *read)).values())
        if len(kinds) > 1:
            text = f"{name} gets tensors of {sorted(kinds)} at {by.place}"
            self.find("mismatch", (name, by.place), text)
        self.launch(actor, by, name)
        for each in read:
            self.touch(each, False, actor, name, by.place)
        for each in written:
            self.touch(each, True, actor, name, by.place)
        return dict(actor.seen)

    def _stream_of_group(self, group_name: str) -> Actor:
        if group_name not in self._group_streams:
            name = f"NCCL stream of group {group_name}"
            self._group_streams[group_name] = self.new_stream(name)
        return self._group_streams[group_name]

    def _functional_collective(
        self,
        name: str,
        args: Sequence[Any],
        read: list[Tensor],
        written: list[Tensor],
        results: list[Tensor],
    ) -> None:
        """Note a functional collective: its output keeps the work until ``wait_tensor``."""
        found = [self.block_of(each) for each in (*read, *written)]
        blocks = [block for block in found if block is not None]
        if "wrap_tensor" in name or all(block.kind != DEVICE for block in blocks):
            return
        if name.endswith("wait_tensor"):
            for block in blocks:
                if block.complete is not None:
                    self.current().join(block.complete)
                    block.complete = block.kept = None
            return
        groups = (str, torch.ScriptObject, dist.ProcessGroup)
        group = [each for each in args if isinstance(each, groups)][-1]
        if isinstance(group, torch.ScriptObject):
            group = dist.ProcessGroup.unbox(group)
        group_name = getattr(group, "group_name", group)
        complete = self.collective(name, written, read, group_name, True)
        for each in results:
            if (output := self.block_of(each)) is not None:
                output.complete, output.kept = complete, (read, written)


def real_device(tensor: Tensor) -> torch.device:
    """Return the device of the values of the tensor."""
    # A function mode of the program would get the replaced one.
    with torch._C.DisableTorchFunction():
        device: torch.device = _device(tensor)
    return device


def is_on_cpu(tensor: Tensor) -> bool:
    """True if the values of the tensor are in memory of the CPU: also true on the simulated device."""
    return bool(real_device(tensor).type == "cpu")


def tensors_in(value: object) -> list[Tensor]:
    """Return all tensors of a tensor, a list of tensors, or a list of such lists."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [each for item in value for each in tensors_in(item)]
    return []


def _has_mask(indices: Iterable[Tensor | None]) -> bool:
    return any(each is not None and each.dtype in (torch.bool, torch.uint8) for each in indices)


@functools.cache
def _schema(func: Any) -> list[tuple[str, bool]]:
    """Return the arguments of an operator, with True for the written ones."""
    return [
        (each.name, each.alias_info is not None and each.alias_info.is_write)
        for each in func._schema.arguments
    ]


def _arguments(
    func: Any, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the read and the written tensors of an operator."""
    read: list[Tensor] = []
    written: list[Tensor] = []
    for index, (name, is_written) in enumerate(_schema(func)):
        value = args[index] if index < len(args) else kwargs.get(name)
        (written if is_written else read).extend(tensors_in(value))
    return read, written


class Watch(TorchDispatchMode):
    """Reports every operator below autograd to the simulator.

    The operators of backward are included: for CPU tensors the thread that calls ``backward`` runs them.
    """

    def __init__(self, simulator: Simulator) -> None:
        super().__init__()
        self._simulator = simulator

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # A wrapper (DTensor) calls operators of its inner tensors, which arrive here. Fake tensors
        # have no memory.
        is_fake = any(issubclass(each, FakeTensor) for each in types)
        if not is_fake and any(each not in PLAIN for each in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        self._simulator.operator(func, args, kwargs or {}, result)
        return result


def install(devices: int = 1, index: int = 0) -> Simulator:
    """Simulate a device for the rest of this process; call once, before the program makes tensors.

    Args:
        devices: the number of devices that the process sees.
        index: the device that it uses.
    """
    from stream_simulator import device

    simulator = Simulator(devices, index)
    device.patch(simulator)
    Watch(simulator).__enter__()
    run = threading.Thread.run

    def watched_run(thread: threading.Thread) -> None:
        with Watch(simulator):
            run(thread)

    threading.Thread.run = watched_run  # type: ignore[method-assign]
    return simulator
