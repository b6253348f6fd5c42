"""Checks that all ranks of a shard group issue the same collectives in the same order.

[Note: one order of collectives] The ranks of a shard group gather and reduce each group of
parameters together, so all must run the same groups in the same order. A model that decides by its
data which blocks to run may break that on some ranks: torch then pairs collectives of different
groups, silently where they are equal in size, and hangs or aborts where they are not. So each
collective is entered in a table in shared memory before it is issued, and compared with what the
others have entered at the same position. Entering is serialized by a file lock, so of two ranks
that differ the later one finds it out before it issues anything. It then joins what the others
have issued already, with data that nobody will use, so that none of them waits forever, and raises;
the others see the mark it left at their next collective, and raise the same. Afterwards all ranks
have issued the same collectives, and the group can go on being used.

Ranks on several hosts share no memory. They keep a hash of what they issued, which is compared at
the end of each backward pass. Where collectives of different sizes were paired, that is too late:
gloo ends the process and NCCL waits for its time-out. With `TORCH_DISTRIBUTED_DEBUG=DETAIL` torch
compares sizes before each collective, at a cost, and names both.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import mmap
import os
import tempfile
import weakref
from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parallel2d.base.device import current_device
from parallel2d.base.errors import ConfigError
from parallel2d.base.exchange import all_gather, broadcast
from parallel2d.parallel.fsdp_internals.sharded_model import AllGather, ReduceScatter

RING = 4096  # entries kept for each rank; no rank is so many collectives ahead of another

# Kinds of entries
GATHER, SCATTER, EXCHANGE, END = range(4)
_DOING = ("gathers", "reduces", "reduces", "ends its backward pass")

_DTYPES = (
    torch.uint8, torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64,
    torch.complex128, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool,
    torch.float8_e4m3fn, torch.float8_e5m2,
)  # fmt: skip


class OutOfOrder(ConfigError):  # noqa: N818 (named after what happened)
    """Ranks of one shard group do not run the same groups of parameters."""


class CollectiveOrder:
    """The order of the collectives of one shard group, for all models on it.

    See [Note: one order of collectives]. Made by `of`.
    """

    def __init__(self, group: dist.ProcessGroup, table: _Table | None, device_type: str) -> None:
        self._reference = weakref.ref(group)  # the group is the key under which `of` keeps this
        self._table = table
        self._device_type = device_type
        self._ranks = dist.get_process_group_ranks(group)
        self._models: dict[int, Sequence[str]] = {}
        self._added = 0
        self._hash = hashlib.sha256()
        self._recent: list[int] = []  # entries since the last digest
        self._compared: list[int] = []  # those of the last digest, for messages

    @property
    def _group(self) -> dist.ProcessGroup:
        group = self._reference()
        assert group is not None, "the process group was destroyed"
        return group

    @classmethod
    def of(cls, group: dist.ProcessGroup, one_host: bool, device_type: str) -> CollectiveOrder:
        """The order of ``group``, made at the first call. Collective over the group.

        ``one_host``: whether all its ranks run on one machine. ``device_type``: of the parameters.
        """
        known = _orders.get(group)
        if known is not None:
            return known
        table = None
        if one_host and group.size() > 1:
            table = _Table.shared_by(group)
        _orders[group] = cls(group, table, device_type)
        return _orders[group]

    def add_model(self, names: Sequence[str]) -> int:
        """The number of a model whose groups have these names; the same on every rank."""
        number = self._added % 4096  # 12 bits of an entry
        self._models[number] = names
        self._added += 1
        return number

    def enter(
        self, kind: int, model: int, index: int, numel: int = 0, dtype: torch.dtype = torch.uint8
    ) -> None:
        """To be called before the collective is issued: group ``index`` of ``model``, with this
        much payload. Raises `OutOfOrder` when another rank does something else."""
        # An entry from its lowest bit: kind (2 bits), dtype (6), model (12), group.
        code = kind | _DTYPES.index(dtype) << 2 | model << 8 | index << 20
        if self._table is None:
            self._hash.update(code.to_bytes(8, "little"))
            self._recent.append(code)
            # Evaluation alone calls no `digest`, which would empty this list.
            if len(self._recent) > 4 * RING:
                del self._recent[: 2 * RING]
            return
        with self._table.locked():
            if self._table.raised_elsewhere:
                missed = self._table.catch_up()
            else:
                different = self._table.differing(code)
                if different is None:
                    self._table.add(code, numel)
                    return
                missed = self._table.raise_flag(code, different)
        # After the lock is released, because the others need it to see the flag.
        for other, size in missed:
            self._join(other, size)
        raise OutOfOrder(self._message(*self._table.flag))

    def end_backward(self) -> None:
        """Enters the end of this rank's backward pass. Raises `OutOfOrder` as `enter` does."""
        self.enter(END, 0, 0)

    def acknowledge(self) -> None:
        """Makes further collectives possible after another rank has raised `OutOfOrder`."""
        self._recent = []
        if self._table is None:
            return
        with self._table.locked():
            if self._table.raised_elsewhere:
                self._table.catch_up()

    def digest(self) -> int:
        """32 bits over what was issued since the last call; 0 where entries were compared one by
        one."""
        if self._table is not None:
            return 0
        value = int.from_bytes(self._hash.digest()[:4], "little")
        self._hash = hashlib.sha256()
        self._compared = self._recent
        self._recent = []
        return value

    def differing_on_other_hosts(self) -> str:
        """The message when digests differ. Collective over the group."""
        every = all_gather(self._compared, self._group)
        # A rank that issued fewer collectives counts as one whose backward pass has ended.
        for found in zip_longest(*every, fillvalue=END):
            for rank, code in zip(self._ranks, found, strict=True):
                if code != found[0]:
                    return self._message(rank, code, self._ranks[0], found[0])
        # Lists may agree although digests differ, because long ones are cut.
        return "ranks of a shard group issued different collectives"

    def _join(self, code: int, numel: int) -> None:
        """Takes part in a collective that others have issued, with data that nobody will use."""
        kind = code & 3
        if kind == END:
            return  # an entry without a collective
        device = current_device(self._device_type)
        # Zeros, because a reduce-scatter adds them to what the others sent.
        whole = torch.zeros(numel, dtype=_DTYPES[code >> 2 & 63], device=device)
        part = whole[: numel // self._group.size()].clone()
        if kind == GATHER:
            dist.all_gather_single(whole, part, group=self._group)
        elif kind == SCATTER:
            dist.reduce_scatter_single(part, whole, group=self._group)
        elif kind == EXCHANGE:
            dist.all_to_all_single(torch.empty_like(whole), whole, group=self._group)

    def _message(self, rank: int, code: int, other_rank: int, other: int) -> str:
        return (
            f"rank {rank} {self._describe(code)} while rank {other_rank} of the same shard group "
            f"{self._describe(other)}. Parameters are gathered and reduced by all ranks of a shard "
            "group together, so all must run the same groups of modules in the same order. Let the "
            "ranks of a shard group take the same route, put modules that are chosen between into "
            "one group (bucketing=block with their common block), or shard over one rank"
        )

    def _describe(self, code: int) -> str:
        kind = code & 3
        if kind == END:
            return _DOING[END]
        names = self._models[code >> 8 & 4095]
        return f"{_DOING[kind]} {names[code >> 20]}"


# An order is freed with its process group, and with it the shared memory.
_orders: weakref.WeakKeyDictionary[dist.ProcessGroup, CollectiveOrder] = weakref.WeakKeyDictionary()


class _Table:
    """Entries of each rank of a group, in a file in shared memory that has no name any more.

    A flag is the mark that a rank leaves when its entry differs from another's.

    Layout, in 8-byte integers: the number of flags raised so far; of the last one the position at
    which all ranks begin again, and (rank, code) of both that differed; then for each rank how many
    entries it has made, and rings of codes and sizes.
    """

    _HEAD, _RANK = 6, 1 + 2 * RING

    def __init__(self, file: int, own: int, ranks: Sequence[int]) -> None:
        self._file = file
        self._ranks = ranks
        self._memory = mmap.mmap(file, self.bytes_for(len(ranks)))
        self._cells = memoryview(self._memory).cast("q")
        self._starts = [self._HEAD + number * self._RANK for number in range(len(ranks))]
        self._own = self._starts[own]
        self._rank = ranks[own]
        self._position = 0  # entries that this rank has made
        self._seen = 0  # flags that this rank has acted upon

    @classmethod
    def bytes_for(cls, ranks: int) -> int:
        return 8 * (cls._HEAD + ranks * cls._RANK)

    @classmethod
    def shared_by(cls, group: dist.ProcessGroup) -> _Table | None:
        """A new table; None, on every rank, when some cannot open what the first one made:
        containers on one host have file systems of their own. Collective."""
        ranks = dist.get_process_group_ranks(group)
        path = ""
        if group.rank() == 0:
            place = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
            made, path = tempfile.mkstemp(prefix="parallel2d-order-", dir=place)
            os.truncate(made, cls.bytes_for(len(ranks)))
            os.close(made)
        path = broadcast(path, ranks[0], group)
        try:
            # Every rank opens the file itself: a lock belongs to an opening, not to a process.
            file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            file = -1
        opened = all_gather(file >= 0, group)
        # Without its name the file disappears with the last process that has it open.
        if group.rank() == 0:
            os.unlink(path)
        if not all(opened):
            return None
        return cls(file, group.rank(), ranks)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    @property
    def raised_elsewhere(self) -> bool:
        return self._cells[0] != self._seen

    @property
    def flag(self) -> tuple[int, int, int, int]:
        """Rank and code of both ranks that differed: (rank, code, rank, code)."""
        return tuple(self._cells[2:6])  # type: ignore[return-value]

    def differing(self, code: int) -> tuple[int, int] | None:
        """(rank, code) of another rank that has entered something else at this position."""
        slot = 1 + self._position % RING
        for start, rank in zip(self._starts, self._ranks, strict=True):
            ahead = self._cells[start] - self._position
            # A rank that has not come this far has no entry here, and a ring holds the last ones.
            if start != self._own and 0 < ahead <= RING and self._cells[start + slot] != code:
                return rank, self._cells[start + slot]
        return None

    def add(self, code: int, numel: int) -> None:
        """Enters a collective of this rank at its position. To be called while `locked`, as all
        methods that read or write entries."""
        slot = self._own + 1 + self._position % RING
        self._cells[slot] = code
        self._cells[slot + RING] = numel
        self._position += 1
        self._cells[self._own] = self._position

    def raise_flag(self, code: int, other: tuple[int, int]) -> list[tuple[int, int]]:
        """Marks for the others that ``code`` differs from ``other``, another's (rank, code).
        Returns (code, size) of what they have issued from here on."""
        # All begin again behind the last entry of the rank that is furthest ahead.
        self._cells[1] = max(self._cells[start] for start in self._starts)
        self._cells[2], self._cells[3] = self._rank, code
        self._cells[4], self._cells[5] = other
        self._cells[0] += 1
        return self.catch_up()

    def catch_up(self) -> list[tuple[int, int]]:
        """Goes to where all ranks begin again after the flag. Returns what is missing until
        there."""
        missed = []
        for position in range(self._position, self._cells[1]):
            slot = 1 + position % RING
            # Any rank that was here will do: those that were have the same entry.
            start = next(start for start in self._starts if self._cells[start] > position)
            code, numel = self._cells[start + slot], self._cells[start + slot + RING]
            missed.append((code, numel))
            self.add(code, numel)
        self._seen = self._cells[0]
        return missed

    def __del__(self) -> None:
        # The constructor may have failed halfway, and at exit a view may still be open.
        with contextlib.suppress(AttributeError, OSError, BufferError):
            self._cells.release()
            self._memory.close()
            os.close(self._file)


# What is raised in place of an `OutOfOrder`; it may clean up before.
Failed = Callable[[OutOfOrder], BaseException]


class _Ordered:
    """A collective of one group of parameters, entered in the order before it is issued."""

    def __init__(self, order: CollectiveOrder, model: int, index: int, failed: Failed) -> None:
        self._order = order
        self._model = model
        self._index = index
        self._failed = failed

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def _enter(self, kind: int, payload: Tensor) -> None:
        """Raises what ``failed`` makes of `OutOfOrder`."""
        try:
            self._order.enter(kind, self._model, self._index, payload.numel(), payload.dtype)
        except OutOfOrder as error:
            raise self._failed(error) from None


class OrderedAllGather(_Ordered, AllGather):
    """The all-gather of one group of parameters."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        self._enter(GATHER, output_tensor)
        return dist.all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)


class OrderedReduceScatter(_Ordered, ReduceScatter):
    """The reduce-scatter of one group of gradients.

    A payload of fewer than 32 bits is exchanged and added in fp32, so that each contribution and
    the result are rounded once, not every partial sum (Megatron-LM and VeOmni do the same). A rank
    sends as many bytes as in a ring reduce-scatter.
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
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        total = received.view(group.size(), -1).sum(0, dtype=torch.float32)
        if op == dist.ReduceOp.AVG:
            total /= group.size()
        output_tensor.copy_(total)
        return None
