"""How a replica that joins gets the state of another one, rank by rank: `Sender`, `Receiver`.

[Note: nobody waits for a replica that joins] It is a member when a step begins, and gets the state
until that step ends. It computes nothing of this global batch: its gradients are zeros in the
reductions, and the others' mean is in its ``.grad`` afterwards. Parameters, averages and the
optimizer's state do not change before the update, so a thread of the donor sends them as they are
while the step runs. Buffers, which forward passes may write to, follow when those have ended.
Before the update both wait for what is left, and the joiner makes the same update as all.

Where forward passes themselves talk to other replicas, the joiner's are needed too: it gets the
state before the step, for which all wait.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from parallel2d.base.config import TrainConfig
from parallel2d.base.exchange import decode, encode
from parallel2d.base.files.tensor_file import DTYPE_NAMES, DTYPES
from parallel2d.base.replicas import Replicas
from parallel2d.base.replicas.events import Member
from parallel2d.parallel.weights.geometry import Region, local_part
from parallel2d.parallel.weights.named_tensors import (
    describe_optimizer,
    masters_were_loaded,
    model_tensors,
    reshard,
    spread_state,
    tied_names,
)
from parallel2d.training.checkpoint import Checkpointer
from parallel2d.training.checkpoint.manifest import Checkpoint, Manifest, StoredTensor
from parallel2d.training.checkpoint.state import (
    load_averages,
    load_model,
    load_optimizer,
    load_replica_state,
    replica_tensors,
    saved_tensors,
)
from parallel2d.training.data.feed import BatchFeed, BatchPlan, StepBatch
from parallel2d.training.metrics.recorder import Recorder
from parallel2d.training.progress import Progress

Send = Callable[[Tensor], bool]  # of `Replicas.link`


class Trained(Protocol):
    """What a replica that joins needs of the `Trainer`, which says what it is."""

    config: TrainConfig
    model: nn.Module
    optimizer: torch.optim.Optimizer
    mesh: DeviceMesh
    plan: BatchPlan
    data_ranks: int
    progress: Progress
    recorder: Recorder
    checkpointer: Checkpointer
    upcoming: StepBatch | None
    upcoming_tokens: int
    forward_crosses: bool

    def take(self, feed: BatchFeed) -> StepBatch | None: ...
    def forward_backward(self, batch: StepBatch, tokens: int) -> Tensor: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Header(NamedTuple):
    """What comes before the tensors: a checkpoint's manifest of them, and of each its name, dtype,
    shape and the shape of this rank's part, the ``buffers`` last; tokens of the next global batch,
    and how often it is reduced over the replicas."""

    manifest: dict[str, Any]
    listed: list[tuple[str, str, list[int], list[int]]]
    buffers: int
    tokens: int
    reductions: int
    totals: dict[str, float]
    forward_crosses: bool


class Sender:
    """Sends the state of this rank to its peer of ``joiner``, from now until `finish`."""

    def __init__(
        self, trainer: Trained, replicas: Replicas, joiner: Member, totals: dict[str, float]
    ) -> None:
        self._replicas, self._joiner = replicas, joiner
        reshard(trainer.model)
        spread_state(trainer.optimizer)
        tensors = saved_tensors(trainer.model, trainer.optimizer)
        # Of what this replica alone has, another one takes the state of the optimizer.
        own = replica_tensors(trainer.model, trainer.optimizer)
        tensors |= {name: own[name] for name in own if "/optimizer/" in name}
        buffers = set(map(id, trainer.model.buffers()))
        # Sorting keeps the order of the others.
        names = sorted(tensors, key=lambda name: id(tensors[name]) in buffers)
        self._parts = [local_part(tensors[name].detach()) for name in names]
        self._buffers = sum(id(each) in buffers for each in tensors.values())
        described = zip(names, self._parts, strict=True)
        assert trainer.upcoming is not None
        is_full = trainer.config.sync.during_accumulation == "full"
        self._header = Header(
            manifest={
                "step": trainer.progress.step,
                "state": {**trainer.state_dict(), "step": trainer.progress.step},
                "optimizer": describe_optimizer(trainer.model, trainer.optimizer),
                "tied": tied_names(trainer.model),
                "mesh": {"replicate": len(replicas.ranks)},
            },
            listed=[
                (name, DTYPE_NAMES[part.dtype], list(tensors[name].shape), list(part.shape))
                for name, part in described
            ],
            buffers=self._buffers,
            tokens=trainer.upcoming_tokens,
            reductions=len(trainer.upcoming.micro_batches) if is_full else 1,
            totals=totals,
            forward_crosses=trainer.forward_crosses,
        )
        self._send: Send | None = None
        self._sent = _in_thread(self._send_first)

    def _send_first(self) -> bool:
        """Sends all but the buffers; false where a replica was lost meanwhile."""
        self._send = send = self._replicas.link(self._joiner)
        if send is None:
            return False
        data = torch.frombuffer(bytearray(encode(list(self._header)).encode()), dtype=torch.uint8)
        first = self._parts[: len(self._parts) - self._buffers]
        return send(torch.tensor([len(data)])) and send(data) and _all_through(send, first)

    def finish(self) -> None:
        """Sends the rest. The parameters may change afterwards."""
        if self._sent.result():
            assert self._send is not None
            last = self._parts[len(self._parts) - self._buffers :]
            # An end that nothing follows says that all was read before it changed.
            _all_through(self._send, [*last, torch.ones(1)])


class Receiver:
    """Takes over the state of a peer, from `header` until `finish`."""

    def __init__(self, trainer: Trained, replicas: Replicas) -> None:
        self._trainer, self._replicas = trainer, replicas
        self.reductions = 1
        self._send: Send | None = None

    def header(self) -> Header | None:
        """Waits for what comes first, and begins to take the rest. None where the donor is lost."""
        self._send = send = self._replicas.link(self._replicas.own)
        length = torch.zeros(1, dtype=torch.int64)
        if send is None or not send(length):
            return None
        data = torch.empty(int(length), dtype=torch.uint8)
        if not send(data):
            return None
        header = Header(*decode(data.numpy().tobytes()))
        self.reductions = header.reductions
        values: dict[str, Tensor] = {}
        stored: dict[str, StoredTensor] = {}
        for name, dtype, shape, local in header.listed:
            values[name] = torch.zeros(local, dtype=DTYPES[dtype])
            stored[name] = StoredTensor(dtype, tuple(shape), ())
        names = list(values)
        self._buffers = names[len(names) - header.buffers :]
        self._peer: Any = PeerState(Manifest(**header.manifest, tensors=stored), values)
        self._loaded = _in_thread(self._load_first)
        return header

    def _load_first(self) -> bool:
        """Takes and loads all but the buffers. Nothing else reads or writes what it fills: this
        replica runs no forward pass meanwhile."""
        values, trainer = self._peer.values, self._trainer
        first = [values[name] for name in values if name not in self._buffers]
        assert self._send is not None
        if not _all_through(self._send, first):
            return False
        load_model(trainer.model, self._peer, strict=True)
        load_optimizer(trainer.model, trainer.optimizer, self._peer, strict=True)
        masters_were_loaded(trainer.model)
        load_averages(trainer.model, self._peer, restart=False)
        load_replica_state(trainer.model, self._peer)
        return True

    def finish(self) -> bool:
        """Waits for the rest; false where the donor was lost before it had sent all."""
        if not self._loaded.result():
            return False
        last = [self._peer.values[name] for name in self._buffers]
        assert self._send is not None
        if not _all_through(self._send, [*last, torch.ones(1)]):
            return False
        tensors = model_tensors(self._trainer.model)
        for name in self._buffers:
            self._peer.fill(tensors[name.removeprefix("model/")], name)
        return True


class PeerState(Checkpoint):
    """The state of the same rank of another replica, read as a checkpoint is."""

    def __init__(self, manifest: Manifest, values: dict[str, Tensor]) -> None:
        self.manifest, self.tensors, self.values = manifest, manifest.tensors, values
        self.folder: Any = SimpleNamespace(label="the state of another replica")

    def fill(self, tensor: Tensor, name: str) -> None:
        part = local_part(tensor.detach())
        part.copy_(self.values[name].view_as(part))

    def read(self, name: str, region: Region | None = None) -> Tensor:
        return self.values[name]


def _all_through(send: Send, tensors: Iterable[Tensor]) -> bool:
    return all(send(each.contiguous()) for each in tensors)


def _in_thread(function: Callable[[], bool]) -> Future[bool]:
    """Runs it beside the caller, whose process may end before it has."""
    found: Future[bool] = Future()

    def run() -> None:
        try:
            found.set_result(function())
        except BaseException as error:
            found.set_exception(error)

    threading.Thread(target=run, name="replicas state", daemon=True).start()
    return found
