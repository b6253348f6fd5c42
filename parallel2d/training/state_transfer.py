"""The transfer of the state to a joining replica, rank by rank (`Sender`, `Receiver`), and the
buffers that a repeated step restores (`KeptBuffers`).

[Note: nobody waits for a replica that joins] The joining replica is a member from the start of a
step, and receives the state during this step. It computes no part of this global batch: its
gradients in the reductions are zeros, and afterwards its ``.grad`` is the mean of the other
replicas. Parameters, averages and optimizer state do not change before the update, so a thread of
the donor sends them without a copy while the step runs. Forward passes may write to buffers, which
therefore follow after the last forward. Before the update, donor and joining replica wait for the
rest of the transfer; then the joining replica computes the same update as all replicas.

If forward passes have collectives across replicas, the joining replica must take part in them. It
then receives the state before the step, and all replicas wait for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from parallel2d.base.exchange import decode, encode
from parallel2d.base.files.tensor_file import bytes_of
from parallel2d.base.replicas import Quorum
from parallel2d.base.replicas.events import Member
from parallel2d.base.store.address import in_thread
from parallel2d.parallel.weights.named_tensors import (
    describe_optimizer,
    masters_were_loaded,
    model_tensors,
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
from parallel2d.training.checkpoint.manifest import Manifest, StoredFile
from parallel2d.training.checkpoint.state import (
    load_ema,
    load_model,
    load_optimizer,
    load_replica_state,
    replica_tensors,
    saved_tensors,
)


class Sender:
    """Sends the state of this rank to its peer of ``joiner``, from now until `finish`. ``state``:
    as of a checkpoint, with the ``step``."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        replicas: Quorum,
        joiner: Member,
        state: dict[str, Any],
    ) -> None:
        self._replicas, self._joiner = replicas, joiner
        reshard(model)
        spread_state(optimizer)
        tensors = saved_tensors(model, optimizer)
        # Of what this replica alone has, another one takes the state of the optimizer.
        own = replica_tensors(model, optimizer)
        tensors |= {name: own[name] for name in own if "/optimizer/" in name}
        self._tensors = tensors
        described, blocks = pack(local_parts(tensors))
        self._blocks = list(map(bytes_of, blocks))
        # The first block is the header, and each tensor that has values here is one more.
        held = []
        for name, each in described.items():
            if each.chunks:
                held.append(name)
        ids = set(map(id, model.buffers()))
        self._buffers = [at for at, name in enumerate(held, 1) if id(tensors[name]) in ids]
        self._manifest = Manifest(
            step=state["step"],
            state=state,
            optimizer=describe_optimizer(model, optimizer),
            tied=tied_names(model),
            tensors=described,
            files={STATE: StoredFile(sum(block.numel() for block in self._blocks), "")},
        )
        self._sent = in_thread(self._send_first)

    def _send_first(self) -> bool:
        """Sends all but the buffers; false where a replica was lost meanwhile."""
        self._send = send = self._replicas.link(self._joiner)
        sizes = []
        for block in self._blocks:
            sizes.append(block.numel())
        data = as_bytes(encode([self._manifest, sizes, self._buffers]).encode())
        first, _ = _divided(self._blocks, self._buffers)
        return all(map(send, [torch.tensor([len(data)]), data, *first]))

    def finish(self) -> None:
        """Sends the rest. The parameters may change afterwards."""
        if self._sent.result():
            # Again, because a buffer with gaps was copied.
            _, last = _divided(pack(local_parts(self._tensors))[1], self._buffers)
            last = list(map(bytes_of, last))
            # An end that nothing follows says that all was read before it changed.
            all(map(self._send, [*last, torch.ones(1)]))


class Receiver:
    """Takes over the state of a peer, from `begin` until `finish`."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, replicas: Quorum
    ) -> None:
        self._model, self._optimizer, self._replicas = model, optimizer, replicas

    def begin(self) -> Manifest | None:
        """Waits for what comes first, and begins to take the rest. None where the donor is lost."""
        self._send = send = self._replicas.link(self._replicas.own)
        length = torch.zeros(1, dtype=torch.int64)
        if not send(length):
            return None
        data = torch.empty(int(length), dtype=torch.uint8)
        if not send(data):
            return None
        manifest, sizes, buffers = decode(data.numpy().tobytes())
        # Zeros, because buffers are loaded before they come.
        data = torch.zeros(sum(sizes), dtype=torch.uint8)
        self._first, self._last = _divided(data.split(sizes), buffers)
        self._peer = LocalState(manifest, data, "the state of another replica")
        self._loaded = in_thread(self._load_first)
        return self._peer.manifest

    def _load_first(self) -> bool:
        """Takes and loads all but the buffers. Nothing else reads or writes what it fills: this
        replica runs no forward pass meanwhile."""
        model, optimizer = self._model, self._optimizer
        if not all(map(self._send, self._first)):
            return False
        load_model(model, self._peer)
        load_optimizer(model, optimizer, self._peer)
        masters_were_loaded(model)
        load_ema(model, self._peer, restart=False)
        load_replica_state(model, self._peer)
        return True

    def finish(self) -> bool:
        """Waits for the rest; false where the donor was lost before it had sent all."""
        rest = [*self._last, torch.ones(1)]
        if not self._loaded.result() or not all(map(self._send, rest)):
            return False
        buffers = set(map(id, self._model.buffers()))
        for name, tensor in model_tensors(self._model).items():
            if id(tensor) in buffers:
                self._peer.fill(tensor, f"model/{name}")
        return True


class KeptBuffers:
    """Copies of a model's buffers, to which forward passes write that may be done again."""

    def __init__(self, model: nn.Module) -> None:
        self._buffers = list(model.buffers())
        self._kept: dict[int, tuple[int, Tensor]] = {}  # the version of each, and its values then

    def keep(self) -> None:
        """Before a step: copies those that were written to."""
        for index in self._written():
            buffer = self._buffers[index]
            self._kept[index] = buffer._version, buffer.clone()

    def put_back(self) -> None:
        """They are as at the last `keep` again."""
        for index in self._written():
            self._buffers[index].copy_(self._kept[index][1])

    def _written(self) -> list[int]:
        versions = []
        for each in self._buffers:
            versions.append(each._version)
        kept = [self._kept.get(index, (None,))[0] for index in range(len(versions))]
        found: list[int] = []
        for index, now in enumerate(versions):
            if now != kept[index]:
                found.append(index)
        return found


def start_senders(
    model: nn.Module, optimizer: torch.optim.Optimizer, replicas: Quorum, state: dict[str, Any]
) -> list[Sender]:
    """One for each replica that has joined, where this one is their donor."""
    joined = replicas.joined if replicas.replica == replicas.donor else []
    senders: list[Sender] = []
    for joiner in joined:
        senders.append(Sender(model, optimizer, replicas, joiner, state))
    return senders


def _divided(blocks: Sequence[Tensor], last: Sequence[int]) -> tuple[list[Tensor], list[Tensor]]:
    """The ``blocks``, and those at the positions ``last``."""
    is_last = set(last)
    first = []
    for at, block in enumerate(blocks):
        if at not in is_last:
            first.append(block)
    return first, [blocks[at] for at in last]
