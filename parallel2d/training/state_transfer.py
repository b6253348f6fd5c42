"""The transfer of the state to a joining replica, rank by rank (`Sender`, `Receiver`), and the
buffers that a repeated step restores (`KeptBuffers`).

[Note: join without a wait] The joining replica is a member from the start of a step, and receives
the state during this step. It computes no part of this global batch: its gradients are zeros in the
reductions, and its ``.grad`` is then the mean over the other replicas. Parameters, EMA weights and
optimizer state do not change before the update, so a thread of the donor sends them without a copy
during the step. Forward passes may write to buffers, which are therefore sent after the last
forward. Before the update, donor and joining replica wait for the end of the transfer. Then all
replicas, including the joining replica, compute the same update.

If forward passes have collectives across replicas, the joining replica must take part in them. In
this case it receives the state before the step, and all replicas wait.
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
    """Sends the state of this rank to the rank at the same position of replica ``joiner``. The
    transfer starts in the constructor and ends in `finish`. ``state``: the shared values of a
    checkpoint, including ``step``."""

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
        # Of the tensors that differ between replicas, only optimizer states are sent.
        own = replica_tensors(model, optimizer)
        tensors |= {name: own[name] for name in own if "/optimizer/" in name}
        self._tensors = tensors
        described, blocks = pack(local_parts(tensors))
        self._blocks = list(map(bytes_of, blocks))
        # The first block is the header. Each tensor with values on this rank is one further block.
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
        """Send all tensors except the buffers. False if a replica fails first."""
        self._send = send = self._replicas.link(self._joiner)
        sizes = []
        for block in self._blocks:
            sizes.append(block.numel())
        data = as_bytes(encode([self._manifest, sizes, self._buffers]).encode())
        first, _ = _divided(self._blocks, self._buffers)
        return all(map(send, [torch.tensor([len(data)]), data, *first]))

    def finish(self) -> None:
        """Send the buffers, and wait for the end of the transfer. Afterwards the parameters may
        change."""
        if self._sent.result():
            # Packed again: the first `pack` has copied the values of non-contiguous buffers.
            _, last = _divided(pack(local_parts(self._tensors))[1], self._buffers)
            last = list(map(bytes_of, last))
            # A last message confirms that the receiver has read all tensors before they change.
            all(map(self._send, [*last, torch.ones(1)]))


class Receiver:
    """Receives the state of the donor. The transfer starts in `begin` and ends in `finish`."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, replicas: Quorum
    ) -> None:
        self._model, self._optimizer, self._replicas = model, optimizer, replicas

    def begin(self) -> Manifest | None:
        """Receive the manifest and return it, and receive the tensors in a thread. None if the
        donor fails first."""
        self._send = send = self._replicas.link(self._replicas.own)
        length = torch.zeros(1, dtype=torch.int64)
        if not send(length):
            return None
        data = torch.empty(int(length), dtype=torch.uint8)
        if not send(data):
            return None
        manifest, sizes, buffers = decode(data.numpy().tobytes())
        # Zeros, because `load_model` reads the buffers before they are received.
        data = torch.zeros(sum(sizes), dtype=torch.uint8)
        self._first, self._last = _divided(data.split(sizes), buffers)
        self._peer = LocalState(manifest, data, "the state of another replica")
        self._loaded = in_thread(self._load_first)
        return self._peer.manifest

    def _load_first(self) -> bool:
        """Receive and load all tensors except the buffers. No other thread accesses these tensors,
        because this replica runs no forward pass meanwhile."""
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
        """Receive the buffers, and wait for the end of the transfer. False if the donor fails
        first."""
        rest = [*self._last, torch.ones(1)]
        if not self._loaded.result() or not all(map(self._send, rest)):
            return False
        buffers = set(map(id, self._model.buffers()))
        for name, tensor in model_tensors(self._model).items():
            if id(tensor) in buffers:
                self._peer.fill(tensor, f"model/{name}")
        return True


class KeptBuffers:
    """Copies of a model's buffers, which a repeated step restores: forward passes may write to
    buffers."""

    def __init__(self, model: nn.Module) -> None:
        self._buffers = list(model.buffers())
        # By index in `_buffers`: the version of a buffer at its last copy, and the copy
        self._kept: dict[int, tuple[int, Tensor]] = {}

    def keep(self) -> None:
        """Copy the buffers that were written to since their last copy. Called before a step."""
        for index in self._written():
            buffer = self._buffers[index]
            self._kept[index] = buffer._version, buffer.clone()

    def put_back(self) -> None:
        """Restore the values of the last `keep`."""
        for index in self._written():
            self._buffers[index].copy_(self._kept[index][1])

    def _written(self) -> list[int]:
        """Return the indices of the buffers that were written to since their last copy."""
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
    """Start a `Sender` for each joined replica if this replica is the donor. Return the senders."""
    joined = replicas.joined if replicas.replica == replicas.donor else []
    senders: list[Sender] = []
    for joiner in joined:
        senders.append(Sender(model, optimizer, replicas, joiner, state))
    return senders


def _divided(blocks: Sequence[Tensor], last: Sequence[int]) -> tuple[list[Tensor], list[Tensor]]:
    """Divide ``blocks`` into the blocks at other positions, and those at the positions ``last``."""
    is_last = set(last)
    first = []
    for at, block in enumerate(blocks):
        if at not in is_last:
            first.append(block)
    return first, [blocks[at] for at in last]
