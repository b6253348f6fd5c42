"""Vector clocks, and the accesses of one block of memory in their order."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

# The kinds of memory. The kind of a tensor that C++ made without arguments is not known until its first use.
HOST, DEVICE, UNKNOWN = "host", "device", "unknown"

Clock = dict[int, int]
"""By the number of each actor: its operations that are certainly done."""


class Actor:
    """The host, a stream, or the NCCL stream of a process group: does one operation after the other."""

    def __init__(self, number: int, name: str, source: str = "") -> None:
        self.number = number
        self.name = name
        # The source that made the stream (`sources`)
        self.source = source
        # The operations of each actor that are certainly done before the next one of this actor begins
        self.seen: Clock = {number: 0}
        # Memory of this stream that was freed while another stream could still use it
        self.freed: list[FreedBlock] = []
        # The streams that had outstanding operations at some allocation on this stream
        self.not_awaited: set[int] = set()

    def join(self, clock: Clock) -> None:
        """Order the next operation after all that ``clock`` contains."""
        for number, count in list(clock.items()):
            if count > self.seen.get(number, 0):
                self.seen[number] = count


class Access:
    """The last operation of ``actor``, on the bytes from ``low`` to ``high`` of a block."""

    __slots__ = ("actor", "count", "high", "low", "operator", "where", "write")

    def __init__(
        self, low: int, high: int, write: bool, actor: Actor, operator: str, where: str
    ) -> None:
        self.low, self.high, self.write = low, high, write
        self.operator, self.where = operator, where
        self.actor, self.count = actor.number, actor.seen[actor.number]

    def conflicts(self, low: int, high: int, write: bool) -> bool:
        """True if an access of these bytes must be ordered with this one."""
        return (write or self.write) and self.low < high and low < self.high

    def covers(self, other: Access) -> bool:
        """True if every access that conflicts with ``other`` conflicts with this one."""
        contains = self.low <= other.low and other.high <= self.high
        return contains and (self.write or not other.write)

    def is_done_for(self, seen: Clock) -> bool:
        """True if it is certainly done for an actor with this clock."""
        return seen.get(self.actor, 0) >= self.count

    @property
    def verb(self) -> str:
        return "written" if self.write else "read"


class Block:
    """Memory from its allocation to its release."""

    def __init__(self, kind: str, stream: Actor, where: str, pinned: bool = False) -> None:
        self.kind = kind
        self.pinned = pinned
        # The current stream of the allocation: the allocator reuses the memory on this stream
        self.stream = stream
        # The place of the allocation
        self.where = where
        # The accesses that a later one could race with
        self.accesses: list[Access] = []
        # The streams that `Tensor.record_stream` was called with
        self.recorded: set[int] = set()
        # Freed blocks: this one may have been given their memory; forgotten after the first use
        self.predecessors: list[FreedBlock] = []
        # The number of storages that show this memory
        self.owners = 1
        # For the output of a functional collective: the clock of its completion, and its tensors
        self.complete: Clock | None = None
        self.kept: Any = None

    def pending_at_free(self, host: Clock) -> list[Access]:
        """The accesses of other streams that neither the stream of this block nor the host has waited for."""
        excluded = {self.stream.number, *self.recorded}
        used = [access for access in self.accesses if access.actor not in excluded]
        return not_done(not_done(used, self.stream.seen), host)


@dataclass
class FreedBlock:
    """A block that was released while accesses of it were possibly not done."""

    block: Block
    pending: list[Access]
    where: str


@dataclass
class EarlyFree:
    """Releases at one place of memory that another stream may still use.

    They are correct if the stream of the memory waits for this use before its next allocation.
    FSDP2's reduce-scatter stream waits for the default stream before each allocation. Only the end
    of the run shows whether this holds.
    """

    owner: Actor
    text: str
    # For each release: the streams that had waited for the use
    awaited_by: list[frozenset[int]] = field(default_factory=list)

    @property
    def count(self) -> int:
        """The releases for which nothing shows that the owner waits in time."""
        return sum(numbers <= self.owner.not_awaited for numbers in self.awaited_by)


def not_done(accesses: Iterable[Access], seen: Clock) -> list[Access]:
    """Return the accesses that are possibly not done for an actor with the clock ``seen``."""
    return [access for access in accesses if not access.is_done_for(seen)]


def joined(*clocks: Clock) -> Clock:
    """Return the latest count of each actor in any of ``clocks``."""
    result: Clock = {}
    for clock in clocks:
        for number, count in list(clock.items()):
            result[number] = max(count, result.get(number, 0))
    return result


def extent_of(tensor: Tensor) -> tuple[int, int] | None:
    """Return the first byte of the elements in their storage and the byte after the last; None if empty."""
    if tensor.numel() == 0:
        return None
    size = tensor.element_size()
    last = 0
    for length, step in zip(tensor.shape, tensor.stride(), strict=True):
        last += (length - 1) * abs(step)
    begin = tensor.storage_offset() * size
    return begin, begin + (last + 1) * size
