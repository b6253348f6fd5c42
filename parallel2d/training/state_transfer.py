"""The transfer of the state to a joining replica, rank by rank: `Sender`, `Receiver`.

[Note: join without a wait] The joining replica becomes a member at the start of a step. The joining
replica computes no samples until it has the complete state. The joining replica contributes zeros
to the gradient reductions, so its ``.grad`` after a reduction is the mean of the other replicas'
gradients. It runs the same optimizer updates as the other replicas. First the joining replica
receives the state that is not streamed, such as step counts. Then the donor, a replica with the
complete state, streams the tensors of each parameter (values, EMA weights, optimizer state) in
*units*. The donor sends the units during forward and backward, when these tensors do not change.
The joining replica writes each unit before its next update, and from then on its updates keep this
unit equal to the donor's. Therefore the donor can pause the stream after any unit when an update is
due, and no other replica waits.

The elements of a parameter are divided into several units if the optimizer updates each element
independently. A matrix that Muon updates is always one unit. In three cases the state has no units,
and all replicas wait until the donor has sent the complete state in one step: with any other
optimizer, because it may combine parameters; with ``sync=diloco``, because the replicas differ; and
if the state is smaller than `SMALL_BYTES`.

At the start of each step, the joining replica sends its position in the stream. If the donor fails,
another replica can continue from this position, because all received units remain valid. Buffers
are sent last, after the forward passes of the last step, because forward passes may write to
buffers.

If forward passes have collectives across replicas, the joining replica must take part in these
collectives. In this case the joining replica receives the complete state before the step, and all
replicas wait.
"""

from __future__ import annotations

import bisect
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from parallel2d.base.device import current_stream, new_copy_stream, on_stream
from parallel2d.base.exchange import decode, encode
from parallel2d.base.files.tensor_file import DTYPE_NAMES, bytes_of
from parallel2d.base.replicas import Quorum
from parallel2d.base.replicas.events import Member
from parallel2d.base.store.address import in_thread
from parallel2d.parallel.parallelize.optimizer_hooks import ELEMENTWISE
from parallel2d.parallel.sync.updates import outer_sync
from parallel2d.parallel.weights.geometry import Region, local_part
from parallel2d.parallel.weights.named_tensors import (
    describe_optimizer,
    masters_were_loaded,
    parameters_by_name,
    reshard,
    spread_state,
    tied_names,
)
from parallel2d.training.checkpoint.local_state import (
    STATE,
    LocalState,
    as_bytes,
    local_parts,
    pack,
)
from parallel2d.training.checkpoint.manifest import Manifest, StoredFile, StoredTensor
from parallel2d.training.checkpoint.state import (
    buffer_names,
    load_ema,
    load_model,
    load_optimizer,
    load_replica_state,
    replica_tensors,
    saved_tensors,
)
from parallel2d.training.optimizer.muon import MUON, Muon

UNIT_BYTES = 2**18  # per rank: 10 ms at 200 Mbit/s
SMALL_BYTES = 2**22  # sum over the ranks of a replica
# While gradients are reduced over the replicas, the stream pauses after each unit. The pause is
# this multiple of the time that sending the unit took, so that the gradients get most of the
# bandwidth.
_PAUSE = 3
_LOG_EVERY_S = 10.0
_END, _UNIT, _BUFFERS = range(3)  # the first element of a message: kind of the data that follows


class _Unit(NamedTuple):
    """A unit of the stream: the same fraction of the local shard of each tensor of one
    parameter."""

    parts: Sequence[Tensor]
    number: int  # index of this unit
    total: int  # number of units of these tensors

    def read(self) -> Tensor:
        """Return the values as bytes on CPU."""
        found = []
        for part in self.parts:
            found.append(bytes_of(part.view(-1)[self._range(part)]))
        return torch.cat(found).cpu()

    def write(self, data: Tensor) -> None:
        """Set the values from bytes on CPU."""
        for part, values in zip(self.parts, data.split(self._sizes), strict=True):
            # A copy, because the bytes of wider dtypes must be aligned.
            part.view(-1)[self._range(part)].copy_(values.clone().view(part.dtype))

    @property
    def nbytes(self) -> int:
        return sum(self._sizes)

    @property
    def _sizes(self) -> list[int]:
        sizes = []
        for part in self.parts:
            elements = self._range(part)
            sizes.append((elements.stop - elements.start) * part.element_size())
        return sizes

    def _range(self, part: Tensor) -> slice:
        size = part.numel()
        return slice(size * self.number // self.total, size * (self.number + 1) // self.total)


class _State:
    """The division of this rank's state into units, equal on the donor and the joining replica.

    Attributes:
        tensors: all tensors, by name.
        count: number of units of the stream.
        nbytes: bytes of all units, summed over the ranks of a replica.
        later: the names of the tensors that are not in the first message: the tensors in units, and
            the buffers.
        buffers: the local shards of the buffers, which are sent after the units.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, ranks: int) -> None:
        reshard(model)
        spread_state(optimizer)
        self.tensors = tensors = saved_tensors(model, optimizer)
        # From the state that differs between replicas, a joining replica receives only the
        # optimizer state.
        own = replica_tensors(model, optimizer)
        tensors |= {name: own[name] for name in own if "/optimizer/" in name}
        self.later = {f"model/{name}" for name in buffer_names(model)}
        self.buffers = [local_part(tensors[name].detach()) for name in sorted(self.later)]
        # `unit` creates a `_Unit` on demand, because a large model has hundreds of thousands of
        # units.
        self._parts: list[tuple[list[Tensor], int]] = []
        self._starts: list[int] = []
        self.count = self.nbytes = 0
        for names, is_elementwise in _streamed(model, optimizer, tensors):
            size = _size(tensors, names)
            units = max(1, size // (UNIT_BYTES * ranks)) if is_elementwise else 1
            parts = []
            for name in names:
                parts.append(local_part(tensors[name].detach()))
            self._parts.append((parts, units))
            self._starts.append(self.count)
            self.later.update(names)
            self.count += units
            self.nbytes += size

    def unit(self, position: int) -> _Unit:
        """Return the unit at ``position`` of the stream."""
        index = bisect.bisect_right(self._starts, position) - 1
        parts, units = self._parts[index]
        return _Unit(parts, position - self._starts[index], units)


def _streamed(
    model: nn.Module, optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]
) -> list[tuple[list[str], bool]]:
    """Return a pair for each streamed parameter: the names of its tensors, and True if its updates
    are elementwise. The list is empty if nothing is streamed."""
    is_muon = type(optimizer) is Muon
    if outer_sync(model) is not None or not (is_muon or type(optimizer) in ELEMENTWISE):
        return []
    matrices: set[int] = set()
    for group in optimizer.param_groups:
        if group.get("algorithm") == MUON:
            matrices.update(map(id, group["params"]))
    names_of: dict[str, list[str]] = defaultdict(list)
    for name, tensor in tensors.items():
        if tensor.ndim:
            names_of[name.rpartition("/")[2]].append(name)
    streamed: list[tuple[list[str], bool]] = []
    for parameter_name, parameter in parameters_by_name(model).items():
        names = names_of[parameter_name]
        # A unit is a slice of the flattened tensors, so the tensors must be contiguous.
        is_contiguous = all(local_part(tensors[name].detach()).is_contiguous() for name in names)
        if names and is_contiguous:
            streamed.append((names, id(parameter) not in matrices))
    is_small = sum(_size(tensors, names) for names, _ in streamed) < SMALL_BYTES
    return [] if is_small else streamed


def _size(tensors: Mapping[str, Tensor], names: Sequence[str]) -> int:
    """Return the size of the unsharded tensors in bytes."""
    return sum(tensors[name].numel() * tensors[name].element_size() for name in names)


class Sender:
    """Sends the state of this rank to the rank of replica ``joiner`` at the same position.
    ``state``: the values of the first message that are not tensors, including ``step``."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        quorum: Quorum,
        joiner: Member,
        state: dict[str, Any],
    ) -> None:
        self._model, self._optimizer, self._quorum = model, optimizer, quorum
        self.joiner, self._values = joiner, state
        self._send: Any = None
        self._stop = threading.Event()
        self._position = 0
        # Time and stream position at the first `progress` call
        self._since: tuple[float, int] | None = None
        self._logged_at = time.monotonic()

    def start_step(self, *, everything: bool = False) -> None:
        """Start a session, which is a thread that sends units until `finish_step`. With
        ``everything``, the thread sends all units."""
        self._state = _State(
            self._model, self._optimizer, len(self._quorum.ranks[self._quorum.replica])
        )
        self._stop.clear()
        first, described = {}, {}
        for name, tensor in self._state.tensors.items():
            if name not in self._state.later:
                first[name] = tensor
            described[name] = StoredTensor(DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), ())
        stored, packed = pack(local_parts(first))
        blocks = list(map(bytes_of, packed))
        manifest = Manifest(
            step=self._values["step"],
            state=self._values,
            optimizer=describe_optimizer(self._model, self._optimizer),
            tied=tied_names(self._model),
            tensors=described | stored,
            files={STATE: StoredFile(sum(block.numel() for block in blocks), "")},
        )
        stream = _copy_stream(self._state)
        self._session = in_thread(lambda: self._run(manifest, blocks, everything, stream))

    def finish_step(self) -> float:
        """End the session after the last forward, and return the seconds that this call waited."""
        begin = time.perf_counter()
        self._stop.set()
        self._session.result()
        return time.perf_counter() - begin

    def progress(self) -> str:
        """Return a line for the log if one is due, otherwise an empty string."""
        now, state = time.monotonic(), self._state
        if self._since is None:
            self._since = now, self._position
        if now - self._logged_at < _LOG_EVERY_S or not state.count:
            return ""
        self._logged_at = now
        share, (begin, first) = state.nbytes / state.count / 2**20, self._since
        rate = (self._position - first) * share / max(now - begin, 1e-9)
        percent = 100 * self._position // state.count
        return (
            f"replica {self.joiner[0]}: {percent} % of the state received "
            f"({self._position * share:.0f} MiB, {rate:.0f} MiB/s)"
        )

    def _run(self, manifest: Manifest, blocks: list[Tensor], everything: bool, stream: Any) -> None:
        if self._send is None:
            self._send = self._quorum.link(self.joiner)
        position = torch.zeros(1, dtype=torch.int64)
        if not self._send(position, 1):
            return
        with _copies(stream):
            if position < 0 and not self._send_first(manifest, blocks):
                return
            first = self._position = max(int(position), 0)
            if not self._send_units(everything):
                return
            self._stop.wait()
            # Buffers are sent only in a session that has no units left at its start. In this step
            # the joining replica has announced that the step completes its state (`is_last_step`).
            is_last = everything or self._position == first
            if self._position < self._state.count or not is_last:
                self._send(_message(_END))
                return
            buffers = filter(Tensor.numel, self._state.buffers)
            _send_all(self._send, (_message(_BUFFERS), *(bytes_of(each) for each in buffers)))

    def _send_first(self, manifest: Manifest, blocks: Sequence[Tensor]) -> bool:
        """Send the values and tensors that come before the units. False if a rank has failed."""
        sizes = [block.numel() for block in blocks]
        data = as_bytes(encode([manifest, sizes, sorted(self._state.later)]).encode())
        return _send_all(self._send, (torch.tensor([len(data)]), data, *blocks))

    def _send_units(self, everything: bool) -> bool:
        """Send at least one unit, and further units until `finish_step`. False if a rank has
        failed."""
        first, begun = self._position, self._quorum.begun
        while self._position < self._state.count:
            if self._stop.is_set() and self._position > first and not everything:
                break
            begin = time.monotonic()
            data = self._state.unit(self._position).read()
            if not _send_all(self._send, (_message(_UNIT), data)):
                return False
            self._position += 1
            if self._quorum.begun != begun:
                self._stop.wait(_PAUSE * (time.monotonic() - begin))
        return True


def _send_all(send: Callable[[Tensor], bool], tensors: Iterable[Tensor]) -> bool:
    """Send the ``tensors`` that have elements. False if a rank has failed before the end."""
    return all(send(each.cpu()) for each in tensors if each.numel())


class _First(LocalState):
    """The tensors of the first message. Loading does not change tensors that are sent later."""

    def __init__(self, manifest: Manifest, data: Tensor, later: set[str]) -> None:
        super().__init__(manifest, data, "the state of another replica")
        self._later = later

    def copy_into(self, name: str, region: Region, destination: Tensor) -> None:
        if name not in self._later:
            super().copy_into(name, region, destination)


class Receiver:
    """Receives the state of a peer: `begin`, then `start_step` and `finish_step` in each step until
    `is_complete`."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, quorum: Quorum) -> None:
        self._model, self._optimizer, self._quorum = model, optimizer, quorum
        self._epoch, self._send = -1, lambda *_: False
        # Number of received units, plus one after the buffers
        self._position = self._total = -1
        self._has_begun = self._is_last_step = False
        self._session: Any = None

    @property
    def is_last_step(self) -> bool:
        """True if only buffers were missing at the start of this step."""
        return self._is_last_step

    @property
    def is_complete(self) -> bool:
        """True if this replica has the complete state of the donor before the next update."""
        return self._position > self._total

    def begin(self) -> Manifest | None:
        """Receive the tensors and values that come before the units. None if the donor has
        failed."""
        self._connect()
        send, length = self._send, torch.zeros(1, dtype=torch.int64)
        if not send(torch.tensor([-1]), 1) or not send(length):
            return None
        data = torch.empty(int(length), dtype=torch.uint8)
        if not send(data):
            return None
        manifest, sizes, later = decode(data.numpy().tobytes())
        data = torch.empty(sum(sizes), dtype=torch.uint8)
        if not all(map(send, data.split(sizes))):
            return None
        model, optimizer, first = self._model, self._optimizer, _First(manifest, data, set(later))
        load_model(model, first)
        load_optimizer(model, optimizer, first)
        masters_were_loaded(model)
        load_ema(model, first, restart=False)
        load_replica_state(model, first)
        self._position = 0
        self._has_begun = True
        return manifest

    def start_step(self) -> None:
        """Start a session, which is a thread that writes units until the donor ends the session. No
        other code reads or writes these tensors meanwhile, because this replica runs no forward
        pass."""
        state = _State(self._model, self._optimizer, len(self._quorum.ranks[self._quorum.replica]))
        self._total = state.count
        self._position = min(self._position, self._total)
        self._is_last_step = self._position == self._total
        continues, self._has_begun = not self._has_begun, False
        stream = _copy_stream(state)
        self._session = in_thread(lambda: self._run(state, continues, stream))

    def finish_step(self) -> None:
        """Wait for the end of the session. Collective over the ranks of this replica: all ranks
        continue from the first unit that is missing on any of them."""
        if self._session is not None:
            self._session.result()
            self._session = None
        self._position = int(self._quorum.least(self._position))

    def _connect(self) -> None:
        if self._epoch != self._quorum.epoch:
            self._epoch, self._send = self._quorum.epoch, self._quorum.link(self._quorum.own)

    @torch.no_grad()
    def _run(self, state: _State, continues: bool, stream: Any) -> None:
        self._connect()
        if continues and not self._send(torch.tensor([self._position]), 1):
            return
        try:
            with _copies(stream):
                self._receive(state)
        finally:
            # This wait is needed even if the donor has failed, because the next update must not
            # start before all received units are copied.
            if stream is not None:
                stream.synchronize()

    def _receive(self, state: _State) -> None:
        send, message = self._send, _message(_END)
        while send(message) and message == _UNIT:
            unit = state.unit(self._position)
            data = torch.empty(unit.nbytes, dtype=torch.uint8)
            if len(data) and not send(data):
                return
            unit.write(data)
            self._position += 1
        if message == _BUFFERS and self._position == self._total:
            for buffer in filter(Tensor.numel, state.buffers):
                values = torch.empty(buffer.shape, dtype=buffer.dtype)
                if not send(bytes_of(values)):
                    return
                buffer.copy_(values)
            self._position += 1


def start_senders(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    quorum: Quorum,
    joiners: Sequence[Member],
    state: dict[str, Any],
) -> list[Sender]:
    """Return a sender for each of ``joiners`` if this replica is their donor."""
    senders = []
    for joiner in joiners if quorum.replica == quorum.donor else ():
        senders.append(Sender(model, optimizer, quorum, joiner, state))
    return senders


def _message(kind: int) -> Tensor:
    return torch.tensor([kind])


def _copies(stream: torch.Stream | None) -> AbstractContextManager[object]:
    """Run copies between host and device on ``stream`` inside the context."""
    return nullcontext() if stream is None else on_stream(stream.device.type, stream)


def _copy_stream(state: _State) -> torch.Stream | None:
    """Return a stream that follows the updates of ``state`` so far; None on CPU."""
    device_type = next(iter(state.tensors.values())).device.type
    if device_type == "cpu":
        return None
    stream = new_copy_stream(device_type)
    stream.wait_stream(current_stream(device_type))
    return stream
