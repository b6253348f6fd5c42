"""`IterableStream`: a sample stream over iterables (``data=stream``).

[Note: positions in iterables] An iterable can only be read in order, but a stream must find the
sample of any position. Therefore each global batch is divided into *lanes*: blocks of consecutive
positions. Lane l reads the shards l, l + lanes, l + 2·lanes, ... one after the other. The order of
these shards differs between epochs. The number of lanes depends only on the number of shards and
the global batch size, so the position of a sample does not depend on ranks. Each rank reads the
lanes that contain its micro-batches. The samples of a lane are divided into *windows*, and an
`Order` permutes the samples in each window. At the beginning of each window, a *note* records the
position in the source. Checkpoints contain one note per lane, from which any rank can continue this
lane.
"""

from __future__ import annotations

import functools
import itertools
import json
import logging
import math
import threading
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from parallel2d.base.config import DataConfig
from parallel2d.base.config.options import call_reference
from parallel2d.base.errors import ConfigError
from parallel2d.base.exchange import all_gather
from parallel2d.base.files import is_count
from parallel2d.training.data.batch import Batch
from parallel2d.training.data.custom_data import Collation, batch_of, thread_count
from parallel2d.training.data.packing import Array
from parallel2d.training.data.sample_order import Order, Schedule
from parallel2d.training.data.stream import SampleStream

log = logging.getLogger(__name__)

_UNSHUFFLED = 64  # samples in a window if data.shuffle_buffer=0
# Most notes of a lane; a return to an earlier position reads the lane from its beginning
_MOST_NOTES = 1024
_LARGEST = 2**52
_END = object()
STATE = "stream"  # key in the state of a run

Note = dict[str, Any]  # window, epoch, part, item, source


class Shards:
    """The shards of one source. A source is an object with ``num_shards`` and ``shard(num_shards,
    index)``, such as a streamed data set of Hugging Face; or a list of iterables; or a single
    iterable."""

    def __init__(self, what: str, target: str, arguments: Mapping[str, Any]) -> None:
        self.what = f"{what}={target}"
        built = call_reference(what, target, **arguments)
        collate = None
        if isinstance(built, tuple):
            built, collate = built
        self._built = built
        self._is_sharded = callable(getattr(built, "shard", None)) and hasattr(built, "num_shards")
        _refuse_buffers(self.what, built)
        self.count = 1
        if self._is_sharded:
            self.count = int(built.num_shards)
        elif isinstance(built, list):
            self.count = len(built)
        parts = self.of_lane(0, max(1, self.count)) if self.count else []
        for part in parts:
            if not isinstance(part, Iterable) or isinstance(part, Iterator):
                raise ConfigError(
                    f"{self.what} returned {type(part).__name__}, which cannot be iterated more "
                    "than once: return an object whose __iter__ begins again, or a list of such "
                    "shards"
                )
        first = next(itertools.chain.from_iterable(map(iter, parts)), None)
        if first is None:
            raise ConfigError(f"{self.what} has no sample in its first shard")
        self.first = first
        self.collation = Collation(collate, first, self.what)

    def of_lane(self, lane: int, lanes: int) -> list[Any]:
        """Return the shards of a lane, to read one after the other."""
        if self._is_sharded:
            return [self._built.shard(num_shards=lanes, index=lane)]
        if isinstance(self._built, list):
            return self._built[lane::lanes]
        return [self._built]


def _refuse_buffers(what: str, built: Any) -> None:
    """Raise `ConfigError` for a Hugging Face data set with a shuffle buffer, because the content of
    the buffer is not part of the data set's state."""
    each = getattr(built, "_ex_iterable", None)
    while each is not None:
        if type(each).__name__.startswith("BufferShuffled"):
            raise ConfigError(
                f"{what}: the buffer of .shuffle() is filled with other samples after a resume; "
                "omit it and set data.shuffle_buffer"
            )
        each = getattr(each, "ex_iterable", None)


class _Lane:
    """Reads one lane of a source, one window at a time. The next window is read in advance."""

    def __init__(self, parts: list[Any], order: Order, parts_order: Order, what: str) -> None:
        self._parts, self._order, self._what = parts, order, what
        self._parts_order = parts_order
        self.size = order.size
        self.notes: dict[int, Note] = {0: {"window": 0, "epoch": 0, "part": 0, "item": 0}}
        self._samples: dict[int, list[Any]] = {}  # the current window
        self._next: tuple[int, Future[list[Any]]] | None = None
        self._at: Note = {"window": -1}  # note of the iterator's position
        self._iterator: Iterator[Any] = iter(())

    def start(self, window: int, pool: ThreadPoolExecutor) -> None:
        """Begin to read ``window``, unless it is in memory or being read."""
        if window in self._samples or (self._next is not None and self._next[0] == window):
            return
        if self._next is not None:
            # Wait, because only one thread at a time may use the iterator
            self._next[1].exception()
        self._next = window, pool.submit(self._read, window)

    def sample(self, index: int, pool: ThreadPoolExecutor) -> Any:
        """Return the sample at ``index`` of the lane."""
        window = index // self.size
        if window not in self._samples:
            self.start(window, pool)
            assert self._next is not None
            samples = self._next[1].result()
            self._samples = {window: samples}
            self._next = None
            self.start(window + 1, pool)
        return self._samples[window][int(self._order.index(np.array([index]))[0])]

    def note_of(self, index: int) -> Note:
        """Return the last note at or before ``index`` of the lane. Delete earlier notes, except the
        note at the beginning."""
        window = index // self.size
        last = max(at for at in list(self.notes) if at <= window)
        for at in list(self.notes):
            if 0 < at < last:
                del self.notes[at]
        return self.notes[last]

    def _read(self, window: int) -> list[Any]:
        if self._at["window"] != window:
            self._enter(max(at for at in list(self.notes) if at <= window))
            while self._at["window"] < window:
                self._take()
        return self._take()

    def _take(self) -> list[Any]:
        """Read the next window from the iterator, and note the position after it."""
        samples = [self._following() for _ in range(self.size)]
        self._at["window"] += 1
        part = self._part()
        source = None
        if self._at["item"] and hasattr(part, "state_dict") and hasattr(part, "load_state_dict"):
            source = _plain_state(self._what, part.state_dict())
        self.notes[self._at["window"]] = {**self._at, "source": source}
        if len(self.notes) > _MOST_NOTES:
            del self.notes[sorted(self.notes)[1]]  # the oldest note after the beginning of the lane
        return samples

    def _part(self) -> Any:
        number = self._at["epoch"] * len(self._parts) + self._at["part"]
        return self._parts[int(self._parts_order.index(np.array([number]))[0])]

    def _enter(self, window: int) -> None:
        """Move the iterator to the position in the note of ``window``."""
        note = dict(self.notes[window])
        source, self._at = note.pop("source", None), note
        self._iterator = self._opened()
        if source is not None:
            part = self._part()
            part.load_state_dict(source)
            self._iterator = iter(part)
            return
        for _ in range(self._at["item"]):
            next(self._iterator)

    def _opened(self) -> Iterator[Any]:
        part, epoch = self._part(), self._at["epoch"]
        if callable(getattr(part, "set_epoch", None)):
            part.set_epoch(epoch)
        return iter(part)

    def _following(self) -> Any:
        for _ in range(2 * len(self._parts) + 1):
            sample = next(self._iterator, _END)
            if sample is not _END:
                self._at["item"] += 1
                return sample
            self._at["part"] += 1
            self._at["item"] = 0
            if self._at["part"] == len(self._parts):
                self._at["part"] = 0
                self._at["epoch"] += 1
            self._iterator = self._opened()
        raise ConfigError(f"{self._what} has a lane of shards without samples")


def _plain_state(what: str, state: Any) -> Any:
    """Return a copy of a source's state. Return None, and log a warning, if the state cannot be
    stored as JSON."""
    try:
        copied = json.loads(json.dumps(state))
    except (TypeError, ValueError):
        copied = None
    if copied is None or copied != state:
        _warn(f"{what}: its state_dict is not plain JSON; a resume reads its shard from the start")
        return None
    return copied


@functools.cache
def _warn(text: str) -> None:
    log.warning(text)


class IterableStream(SampleStream):
    """The samples of iterables, read by position. See [Note: positions in iterables].

    Args:
        sources: the sources of samples. Several sources form a mixture.
        schedule: the source of each position.
        config: the ``data`` section; ``workers`` and ``shuffle_buffer`` are used.
        lanes: number of lanes.
        global_batch_size: samples per global batch; a multiple of ``lanes``.
        seed, name: determine the order in windows.
    """

    def __init__(
        self,
        sources: list[Shards],
        schedule: Schedule,
        config: DataConfig,
        *,
        lanes: int,
        global_batch_size: int,
        seed: int,
        name: str = "train",
        **_: Any,  # arguments of streams with an end, which are ignored
    ) -> None:
        self.shape = sources[0].collation.shape
        self.end, self._limit = None, math.inf
        self._length = 0  # unknown
        self._prepare, self._vocab_size = None, None
        self._sources, self._schedule = sources, schedule
        self._components = []
        self._batch_size, self.lanes = global_batch_size, lanes
        self._block_size = global_batch_size // lanes
        buffer = config.shuffle_buffer
        self._window = -(-buffer // lanes) if buffer else _UNSHUFFLED
        self._is_shuffled, self._identity = buffer > 0, (seed, name)
        self._pool = ThreadPoolExecutor(thread_count(config.workers), "parallel2d-read")
        self._open: dict[str, _Lane] = {}
        self._known: dict[str, Note] = {}  # notes of all lanes at the last save
        self._lock = threading.Lock()
        self._table = functools.cache(self._compute_table)

    def _batch(self, count: int, rows: list[int], where: Array, filler: int) -> Batch:
        """Collate the samples at the positions ``where``. If no row has a position, collate the
        first sample of the data with weight zero."""
        samples = [self._sources[0].first]
        if rows:
            places = list(map(self._place, where.tolist()))
            with self._lock:
                # Start all lanes first, so that they read their windows in parallel.
                begun, samples = set(), []
                for source, lane, index in places:
                    if (source, lane) not in begun:
                        self._lane(source, lane).start(index // self._window, self._pool)
                        begun.add((source, lane))
                    samples.append(self._lane(source, lane).sample(index, self._pool))
        return batch_of(self._sources[0].collation, samples, rows, where)

    def _place(self, position: int) -> tuple[int, int, int]:
        """Return (source, lane, index in this lane of the source) of a position."""
        batch, offset = divmod(position, self._batch_size)
        lane, within = divmod(offset, self._block_size)
        sources, before, totals = self._table(lane)
        period, at = divmod(batch * self._block_size + within, len(sources))
        source = int(sources[at])
        return source, lane, period * int(totals[source]) + int(before[at])

    def _compute_table(self, lane: int) -> tuple[Array, Array, Array]:
        """Return three arrays about one period of a lane: the source of each index, the number of
        earlier samples of this source, and the number of samples of each source."""
        period = self._schedule.period
        batches = np.arange(period // math.gcd(period, self._batch_size)) * self._batch_size
        offsets = lane * self._block_size + np.arange(self._block_size)
        sources, _ = self._schedule.locate((batches[:, None] + offsets).ravel())
        before = np.empty_like(sources)
        for source in range(len(self._sources)):
            chosen = sources == source
            before[chosen] = np.arange(int(chosen.sum()))
        return sources, before, np.bincount(sources, minlength=len(self._sources))

    def _lane(self, source: int, lane: int) -> _Lane:
        key = f"{source}/{lane}"
        if key not in self._open:
            seed, name = self._identity
            shards = self._sources[source]
            parts = shards.of_lane(lane, self.lanes)
            kind = Order if self._is_shuffled else _Identity
            opened = _Lane(
                parts,
                kind(self._window, seed, f"{name}/{key}"),
                Order(len(parts), seed, f"{name}/{key}/shards"),
                shards.what,
            )
            if (note := self._known.get(key)) is not None:
                opened.notes[note["window"]] = note
            self._open[key] = opened
        return self._open[key]

    def loads(self, first: int, count: int) -> None:
        return None

    def notes_at(self, samples: int) -> dict[str, Note]:
        """Return the notes for continuing at the position ``samples``, which is the beginning of a
        global batch. The notes of the lanes that this rank reads are current; the others are from
        the last save."""
        with self._lock:
            found = dict(self._known)
            for key, opened in self._open.items():
                source, lane = map(int, key.split("/"))
                sources, _, totals = self._table(lane)
                period, at = divmod(samples // self._batch_size * self._block_size, len(sources))
                index = period * int(totals[source]) + int((sources[:at] == source).sum())
                note = opened.note_of(index)
                if note["window"] >= found.get(key, note)["window"]:
                    found[key] = note
            return found

    def known_state(self) -> dict[str, Any]:
        return {STATE: self._known}

    def collect(self, state: Mapping[str, Any]) -> dict[str, Any]:
        known: dict[str, Note] = {}
        for notes in all_gather(self.notes_at(int(state["samples"]))):
            for key, note in notes.items():
                if note["window"] >= known.get(key, note)["window"]:
                    known[key] = note
        with self._lock:
            self._known = known
        return self.known_state()

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state``, the state of a run. Raises `ConfigError` for invalid notes."""
        known = state.get(STATE) or {}
        counts = ("window", "epoch", "part", "item")
        for note in known.values():
            if not all(is_count(note.get(key), _LARGEST) for key in counts):
                raise ConfigError("no run can continue from the checkpoint's positions in streams")
        with self._lock:
            self._open, self._known = {}, dict(known)


class _Identity(Order):
    """An order that leaves the samples of a window in the order of the source."""

    def index(self, positions: Array) -> Array:
        return positions % self.size
