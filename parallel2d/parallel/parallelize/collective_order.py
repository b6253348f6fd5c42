"""Checks that all ranks of a shard group issue the same collectives in the same order.

[Note: one order of collectives] The ranks of a shard group all-gather and reduce-scatter each group
of parameters together, so all ranks must run the same groups in the same order. A model that
selects blocks by its data may violate this on some ranks. torch then pairs collectives of different
groups, without an error if the collectives have equal sizes, otherwise with a hang or an abort.

Therefore each rank first writes an *entry* for its next collective to shared memory. The rank
issues the collective only if no other rank has written a different entry at this position. If
another rank has written a different entry, this rank writes a *mark* to shared memory. Then this
rank joins, with zeros, the collectives that other ranks have already issued, so that no rank waits
forever. At last this rank raises an error. The other ranks see the mark at their next entry, join
the missing collectives, and raise the same error. In the end all ranks have issued the same
collectives, and the process group remains usable.

Outside of a step, ranks first wait for each other at a *point* of the script
(`CollectiveOrder.meet`): before they gather or load a state, save a checkpoint, or reduce a value.
A point is an entry without a collective. If one rank evaluates one batch more than the other ranks,
the entry of this rank differs from the point of the other ranks, and all ranks raise an error
before the all-gathers of the extra batch are paired with other collectives.

The protocol has no lock. Each rank writes only its own cells, by single stores of 8 bytes, and
memory barriers order the write of a rank before its reads of the other cells. Therefore, if two
ranks write different entries, at least one of the two ranks reads the entry of the other rank. For
the same reason, if rank A writes an entry while rank B writes a mark, one of two cases holds: A
reads the mark and clears its entry, or B reads the entry and waits until A has issued the
collective or cleared the entry.

Ranks without shared memory, for example on several hosts, keep a hash of their collectives and
compare it at the end of each backward pass. If collectives of different sizes are paired before
that comparison, gloo ends the process and NCCL waits for its timeout;
`TORCH_DISTRIBUTED_DEBUG=DETAIL` then names both collectives.
"""

from __future__ import annotations

import atexit
import functools
import logging
import sys
import threading
import time
import weakref
import zlib
from collections import deque
from collections.abc import Sequence
from itertools import zip_longest

import torch
import torch.distributed as dist

from parallel2d.base.errors import ConfigError
from parallel2d.base.exchange import all_gather, meet_before_collectives, shared_memory
from parallel2d.base.runtime import on_teardown, seconds_to_wait
from parallel2d.parallel.parallelize.reduce_scatter import END, VERBS, join

log = logging.getLogger(__name__)

# Points: entries without a collective. If ranks differ at one of these points of a model, they
# notify the other replicas; see `ReplicaReducer.abandon`.
_POINTS_OF_MODELS = (
    "ends its backward pass",
    "gathers a state",
    "loads a state",
    "temporarily gathers full parameters",
    "averages buffers",
    "saves or restores a checkpoint",
)
_LEAVES = "leaves the process group"
_POINTS = (*_POINTS_OF_MODELS, "calls parallel2d.reduce", "calls parallel2d.barrier", _LEAVES)
_POLL_S = 0.0005

RING = 4096  # entries per rank; no rank is ahead of another rank by this many collectives
# How long a rank waits for a rank that was killed or suspended while it wrote an entry
PATIENCE_S = 5.0
_DTYPES = sorted({each for each in vars(torch).values() if isinstance(each, torch.dtype)}, key=str)

# Rows of the shared memory. Each row has one cell per rank:
# * the number of collectives that the rank has issued;
# * three rows for the difference that the rank has found: the code of this rank's entry, the other
#   rank, the code of the other rank's entry;
# * the mark: the number of this error;
# * RING rows of entries, and RING rows of their sizes.
_ISSUED, _CODE, _OTHER, _OTHER_CODE, _MARK, _ENTRIES = range(6)
_SIZES = _ENTRIES + RING
_TAG, _CODES = 36, (1 << 36) - 1  # position of the tag in an entry; mask of the code below it


class CollectiveOrder:
    """Checks the order of the collectives of one shard group, for all models on this group.

    Use `CollectiveOrder.of` to build the object.
    """

    def __init__(self, group: dist.ProcessGroup, one_host: bool, device_type: str) -> None:
        # Weak, because `_orders` maps the group weakly to this object.
        self._group = weakref.ref(group)
        self._device_type = device_type
        self._ranks = dist.get_process_group_ranks(group)
        self._own = group.rank()
        self._models: list[Sequence[str]] = []
        memory = shared_memory(group, 8 * group.size() * (_SIZES + RING)) if one_host else None
        self.shares_memory = memory is not None
        self._cells = memoryview(memory or b"").cast("q")
        # The lock serves as a memory barrier. No other thread takes it, so it never blocks.
        self._barrier = threading.Lock()
        self._issued = 0  # number of entries that this rank has issued
        self._error = 1  # number of the next error
        # The points of the script in the last difference
        self._points: set[str] = set()
        # Without shared memory: hash of the collectives since the last digest, and the last codes
        self._hash = 0
        self._recent: deque[int] = deque(maxlen=4 * RING)
        self._compared = self._recent

    @classmethod
    def of(cls, group: dist.ProcessGroup, one_host: bool, device_type: str) -> CollectiveOrder:
        """Return the `CollectiveOrder` of ``group``; the first call builds it, collectively.

        Args:
            group: the process group of the shard axis.
            one_host: True if all its ranks run on one machine.
            device_type: device type of the parameters.
        """
        if group not in _orders:
            _orders[group] = cls(group, one_host, device_type)
            meet_before_collectives(_meet)
            on_teardown(_leave)
            _leave_at_exit()
        return _orders[group]

    def add_model(self, names: Sequence[str]) -> int:
        """Register a model with FSDP groups of these ``names``. Return the model's number."""
        self._models.append(names)
        return len(self._models) - 1

    def enter(
        self, model: int, index: int, kind: int, numel: int = 0, dtype: torch.dtype = torch.uint8
    ) -> None:
        """Enter the next collective before it is issued.

        Args:
            model: number of the model, from `add_model`.
            index: number of the group in the model.
            kind: kind of collective; see `reduce_scatter`.
            numel: elements of the payload.
            dtype: dtype of the payload.

        Raises:
            ConfigError: another rank has entered a different collective.
        """
        # From the lowest bit: kind (2 bits), dtype (6), group (14), model (14)
        code = kind | _DTYPES.index(dtype) << 2 | index << 8 | (model & 0x3FFF) << 22
        if not self.shares_memory:
            self._hash = zlib.crc32(code.to_bytes(8, "little"), self._hash)
            self._recent.append(code)
            return
        tag = self._write_entry(code, numel)
        may_issue = self._error not in self._row(_MARK)
        for rank, entry in enumerate(self._row(_ENTRIES + self._issued % RING)):
            # A rank that has not reached this position has an older tag in its cell.
            if may_issue and entry >> _TAG == tag and entry != tag << _TAG | code:
                may_issue = False
                # The mark is written last, so that a rank that reads it finds the other three cells
                # complete.
                for row, value in enumerate((code, rank, entry & _CODES, self._error), _CODE):
                    self._write(row, value)
        if not may_issue:
            self._write(_ENTRIES + self._issued % RING, 0)
            raise ConfigError(self._join_others())
        self._issued += 1
        self._write(_ISSUED, self._issued)

    def meet(self, point: str) -> None:
        """Wait until all ranks have reached ``point``, one of `_POINTS`.

        Raises:
            ConfigError: another rank has entered a collective or another point.
            TimeoutError: a rank has not reached the point within the timeout.
        """
        meet_in([self], point)

    def enter_point(self, point: str) -> None:
        """Enter ``point``, without waiting for other ranks. Raises `ConfigError` like `enter`."""
        self.enter(0, _POINTS.index(point), END)

    def late_ranks(self) -> list[int]:
        """Return the ranks that have not reached this rank's position.

        Raises `ConfigError` if a rank has found a difference.
        """
        if not self.shares_memory:
            return []
        issued = self._row(_ISSUED)
        # Read the marks after the positions: a rank that has written a mark also advances its
        # position, because it joins the collectives of other ranks.
        if self._error in self._row(_MARK):
            raise ConfigError(self._join_others())
        arrived = zip(self._ranks, issued, strict=True)
        ranks: list[int] = []
        for rank, position in arrived:
            if position < self._issued:
                ranks.append(rank)
        return ranks

    def withdraw_point(self) -> None:
        """Undo `enter_point`, unless all ranks have reached the point."""
        if self.shares_memory and min(self._row(_ISSUED)) < self._issued:
            self._issued -= 1
            self._write(_ISSUED, self._issued)
            self._write(_ENTRIES + self._issued % RING, 0)

    def leave(self) -> None:
        """Enter the point at which this rank leaves the process group.

        Ranks with a different entry at this position raise an error.
        """
        if not self.shares_memory or self._group() is None:
            return
        try:
            self.enter(0, _POINTS.index(_LEAVES), END)
        except (ConfigError, RuntimeError) as error:
            log.error("%s", error)

    @property
    def differs_at_point(self) -> bool:
        """True if the last difference involved a point of the script, outside of a step."""
        return bool(self._points)

    @property
    def others_agree(self) -> bool:
        """True if the other ranks take part in the status all-reduce after the last difference."""
        return self._points <= set(_POINTS_OF_MODELS)

    def end_backward(self) -> None:
        """Enter the end of this rank's backward pass. Raises `ConfigError` like `enter`."""
        self.enter(0, 0, END)

    def acknowledge(self) -> None:
        """Allow further collectives. Call this once all ranks of the group know of the error."""
        self._error += 1

    def digest(self) -> int:
        """Return a 32-bit hash of the collectives since the last call; 0 with shared memory."""
        digest, self._hash = self._hash, 0
        self._compared, self._recent = self._recent, deque(maxlen=4 * RING)
        return digest

    def differing_on_other_hosts(self) -> str:
        """Return the error message after the digests have differed. Collective over the group."""
        # A rank with fewer collectives is reported as being at the end of its backward pass.
        for codes in zip_longest(*all_gather(list(self._compared), self._group()), fillvalue=END):
            for rank, code in enumerate(codes):
                if code != codes[0]:
                    return self._message(rank, code, 0, codes[0])
        # The lists hold only the last codes, so they may be equal although the digests differ.
        return "ranks of a shard group issued different collectives"

    def _join_others(self) -> str:
        """Join the collectives that other ranks have issued. Return the error message, which is the
        same on all ranks."""
        deadline = time.monotonic() + PATIENCE_S
        while self._others_decide() and time.monotonic() < deadline:
            time.sleep(0)
        # Several ranks may have found a difference. All ranks report the difference of the lowest
        # rank.
        finder = self._row(_MARK).index(self._error)
        issued = self._row(_ISSUED)
        furthest = issued.index(max(issued))
        while self._issued < issued[furthest]:
            code = self._row(_ENTRIES + self._issued % RING)[furthest] & _CODES
            numel = self._row(_SIZES + self._issued % RING)[furthest]
            self._write_entry(code, numel)
            self._issued += 1
            self._write(_ISSUED, self._issued)
            group = self._group()
            assert group is not None, "the process group was destroyed"
            join(code & 3, numel, _DTYPES[code >> 2 & 63], group, self._device_type)
        code, other, other_code = (self._row(row)[finder] for row in (_CODE, _OTHER, _OTHER_CODE))
        points = set()
        for each in (code, other_code):
            if each & 3 == END:
                points.add(_POINTS[each >> 8 & 0x3FFF])
        self._points = points - {_POINTS[0]}
        return self._message(finder, code, other, other_code)

    def _others_decide(self) -> bool:
        """Return True while a rank has an entry that is neither withdrawn nor issued."""
        return any(
            self._row(_ENTRIES + issued % RING)[rank] >> _TAG == self._tag(issued)
            for rank, issued in enumerate(self._row(_ISSUED))
        )

    def _row(self, row: int) -> list[int]:
        with self._barrier:
            return self._cells[row * len(self._ranks) : (row + 1) * len(self._ranks)].tolist()

    def _write(self, row: int, value: int) -> None:
        with self._barrier:
            self._cells[row * len(self._ranks) + self._own] = value

    def _write_entry(self, code: int, numel: int) -> int:
        tag = self._tag(self._issued)
        # The size is written first: a rank that reads the entry then also finds its size.
        self._write(_SIZES + self._issued % RING, numel)
        self._write(_ENTRIES + self._issued % RING, tag << _TAG | code)
        return tag

    def _tag(self, position: int) -> int:
        """Return a tag of 27 bits, which differs from the tags of older entries in the same cell.
        The tag is never zero, the value of an empty cell."""
        return (self._error % 127 + 1) << 20 | position % (1 << 20)

    def _message(self, rank: int, code: int, other: int, other_code: int) -> str:
        what = (
            f"rank {self._ranks[rank]} {self._describe(code)} while rank {self._ranks[other]} of "
            f"the same shard group {self._describe(other_code)}. "
        )
        if self._points:
            return what + (
                "All ranks of a shard group must call the model equally often, in evaluations "
                "too: give each rank as many batches"
            )
        return what + (
            "Parameters are gathered and "
            "reduced by all ranks of a shard group together, so all must run the same groups of "
            "modules in the same order. Run the same modules on all ranks of a shard group, put "
            "alternative modules into one group (bucketing=block with their common block), name a "
            "module that only some ranks run (model.conditional={vision: replicate}, or "
            "parallelize(..., conditional=); parallel2d.Always(before=NAME) gives the place of a "
            "dummy), or use mesh.shard=1"
        )

    def _describe(self, code: int) -> str:
        if code & 3 == END:
            return _POINTS[code >> 8 & 0x3FFF]
        return VERBS[code & 3].format(self._models[code >> 22][code >> 8 & 0x3FFF])


# The keys are weak: when a process group is freed, its `CollectiveOrder` and the shared memory are
# freed too.
_orders: weakref.WeakKeyDictionary[dist.ProcessGroup, CollectiveOrder] = weakref.WeakKeyDictionary()


def meet_in(orders: Sequence[CollectiveOrder], point: str) -> None:
    """Wait until the ranks of all ``orders`` have reached ``point``, one of `_POINTS`.

    This rank enters the point in every shard group before it waits in any of them. Otherwise it
    could wait in one group for a rank that itself waits for this rank in a collective of another
    group. In that other group, no entry of this rank would then show the difference.

    Raises:
        ConfigError: another rank has entered a collective or another point.
        TimeoutError: a rank has not reached the point within the timeout.
    """
    deadline = time.monotonic() + seconds_to_wait()
    entered: list[CollectiveOrder] = []
    while orders:
        late: list[int] = []
        for order in orders:
            try:
                if order not in entered:
                    order.enter_point(point)
                    entered.append(order)
                late += order.late_ranks()
            except ConfigError:
                # The error has aligned the ranks of this group. In the other groups the entry must
                # be withdrawn, because the next point of their ranks may be a different one.
                for other in entered:
                    if other is not order:
                        other.withdraw_point()
                raise
        if not late:
            return
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"rank {dist.get_rank()} {point}, and ranks {sorted(set(late))} of the same shard "
                f"group have not come to this point within {seconds_to_wait():g} s"
            )
        time.sleep(_POLL_S)


def _meet(point: str) -> None:
    """Meet in all shard groups of this process, before a collective that belongs to no model."""
    meet_in(list(_orders.values()), point)


def _leave() -> None:
    for order in list(_orders.values()):
        order.leave()


@functools.cache
def _leave_at_exit() -> None:
    """Register `_leave` for scripts that end without `teardown`."""

    def leave_after_success() -> None:
        # Python sets `sys.last_value` if an uncaught error ends the script.
        if not hasattr(sys, "last_value"):
            _leave()

    atexit.register(leave_after_success)
