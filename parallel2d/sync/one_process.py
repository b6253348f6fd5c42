"""Every sync method once more, in one process on plain tensors, for proofs: `train`.

Nothing here is used by training, and no code is shared with it. Replicas are a loop, a mean is a
sum over a list, and codes are written with numpy. It is slow and meant for small models.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

Batch = tuple[Tensor, Tensor]  # inputs and targets
# How the ranks of a replica cut a parameter: in so many parts along dim 0, or in these rectangles
Cut = int | Sequence[tuple[slice, ...]]


@dataclass
class Method:
    """As the ``sync`` section of a configuration, with numbers for ``auto``."""

    name: str = "every_step"  # or diloco
    wire: str = "fp32"  # or bf16, int8, int4
    splits_updates: bool = False  # strategy=hybrid_full
    every: int = 30
    lr: float = 0.7
    momentum: float = 0.6
    mix: float = 0.0
    delay: int = 0
    # With fragments: after which step of each period a parameter is sent; the last one by default
    begins: Mapping[str, int] = field(default_factory=dict)


def train(
    model: nn.Module,
    steps: Sequence[Sequence[Batch]],
    loss: Callable[[nn.Module, Batch], Tensor],
    new_optimizer: Callable[[Sequence[Tensor]], torch.optim.Optimizer],
    method: Method,
    *,
    clip: float = math.inf,
    shards: Cut = 1,
    seed: int = 0,
) -> dict[str, Tensor]:
    """Trains ``model``; returns its parameters, with diloco those that replicas share.

    ``steps``: for each step a batch per replica. ``loss``: so scaled that the gradient of a global
    batch is the mean over the replicas. ``shards``: in how many parts each replica cuts dim 0 of a
    parameter, on which the blocks of a code depend.
    """
    run = _train_apart if method.name == "diloco" else _train_together
    return run(model, steps, loss, new_optimizer, method, clip, shards, seed)


def _train_together(  # type: ignore[no-untyped-def]
    model, steps, loss, new_optimizer, method, clip, shards, seed
) -> dict[str, Tensor]:
    """Every step: the mean of what the replicas send is the gradient."""
    named = dict(model.named_parameters())
    masters = {name: value.detach().clone() for name, value in named.items()}
    optimizer = new_optimizer(list(masters.values()))
    for step, batches in enumerate(steps, 1):
        gradients = []
        for batch in batches:
            model.zero_grad()
            loss(model, batch).backward()
            gradients.append({name: value.grad for name, value in named.items()})
        for name, master in masters.items():
            sent = [each[name] for each in gradients]
            # A parameter without dimensions is averaged with what ranks agree on, unrounded.
            wire = method.wire if master.ndim else "fp32"
            # With split updates only one replica gets the mean, which is not rounded then.
            master.grad = mean(sent, wire, shards, (seed, step, name), method.splits_updates)
        torch.nn.utils.clip_grad_norm_(list(masters.values()), clip)
        optimizer.step()
        with torch.no_grad():
            for name, value in named.items():
                rounded = method.splits_updates and method.wire == "bf16"
                value.copy_(masters[name].bfloat16() if rounded else masters[name])
    return {name: value.detach().clone() for name, value in named.items()}


def _train_apart(  # type: ignore[no-untyped-def]
    model, steps, loss, new_optimizer, method, clip, shards, seed
) -> dict[str, Tensor]:
    """DiLoCo: each replica trains on its own; in between the mean of their changes is applied."""
    outer = {name: value.detach().clone() for name, value in model.named_parameters()}
    momentum = {name: torch.zeros_like(value) for name, value in outer.items()}
    replicas = [_Replica(outer, new_optimizer) for _ in steps[0]]
    arriving: dict[str, Tensor] = {}
    for step, batches in enumerate(steps, 1):
        for replica, batch in zip(replicas, batches, strict=True):
            replica.step(model, loss, batch, clip)
        for name, shared in outer.items():
            begins = method.begins.get(name, 0)
            if step % method.every == begins:
                key = (seed, step, name)
                sent = []
                for number, replica in enumerate(replicas):
                    change, rest = shared - replica.own[name], replica.rest[name]
                    message = message_with_rest(change, rest, method.wire, shards, key, number)
                    sent.append(message)
                arriving[name] = mean(sent, method.wire, shards, key)
            if name not in arriving or (step - method.delay) % method.every != begins:
                continue
            change = arriving.pop(name)
            momentum[name].mul_(method.momentum).add_(change)
            # Nesterov: a step ahead of the momentum.
            shared -= method.lr * (change + method.momentum * momentum[name])
            for replica in replicas:
                replica.own[name].lerp_(shared, 1 - method.mix)
    return outer


class _Replica:
    """Parameters that one replica trains, and what it did not send yet."""

    def __init__(
        self,
        values: Mapping[str, Tensor],
        new_optimizer: Callable[[Sequence[Tensor]], torch.optim.Optimizer],
    ) -> None:
        self.own = {name: value.clone() for name, value in values.items()}
        self.rest = {name: torch.zeros_like(value) for name, value in values.items()}
        self.optimizer = new_optimizer(list(self.own.values()))

    def step(
        self,
        model: nn.Module,
        loss: Callable[[nn.Module, Batch], Tensor],
        batch: Batch,
        clip: float,
    ) -> None:
        """One step of the replica's own optimizer."""
        named = dict(model.named_parameters())
        with torch.no_grad():
            for name, value in named.items():
                value.copy_(self.own[name])
        model.zero_grad()
        loss(model, batch).backward()
        for name, value in named.items():
            self.own[name].grad = value.grad
        torch.nn.utils.clip_grad_norm_(list(self.own.values()), clip)
        self.optimizer.step()


def message_with_rest(
    change: Tensor, rest: Tensor, wire: str, cut: Cut, key: tuple[int, int, str], replica: int
) -> Tensor:
    """What ``replica`` has to send: ``change``, and with ``int4`` 0.95 of ``rest``, which it did
    not send before and which then holds what is not sent now."""
    if wire != "int4":
        return change
    rest.mul_(0.95).add_(change)
    message = rest.clone()
    rest -= _sent(message, wire, cut, key, f"contribution/{replica}")
    return message


def mean(
    values: Sequence[Tensor],
    wire: str,
    cut: Cut,
    key: tuple[int, int, str],
    unrounded: bool = False,
) -> Tensor:
    """The mean over replicas of what they send of ``values``, one per replica. ``key``: seed, step
    and name; ``unrounded``: the mean itself is not sent."""
    count = len(values)
    sent = [
        _sent(value, wire, cut, key, f"contribution/{replica}")
        for replica, value in enumerate(values)
    ]
    total = sum(sent[1:], sent[0]) / count
    if unrounded or count == 2:
        return total
    return _sent(total, wire, cut, key, "mean")


def _sent(value: Tensor, wire: str, cut: Cut, key: tuple[int, int, str], stage: str) -> Tensor:
    """What arrives of ``value``."""
    found = torch.empty_like(value)
    for place in _places(value, cut):
        start = _first_position(value, place)
        part = _as_real(value[place].contiguous())
        _as_real(found[place])[...] = _rounded(part, wire, key, start, stage)
    return found


def _as_real(value: Tensor) -> Tensor:
    """Complex numbers are sent as two real ones."""
    return torch.view_as_real(value) if value.is_complex() else value


def _places(value: Tensor, cut: Cut) -> list[tuple[slice, ...]]:
    """The rectangles in which ``value`` is cut."""
    if not isinstance(cut, int):
        return list(cut)
    if not value.ndim:
        return [()]
    size = max(-(-value.shape[0] // cut), 1)
    return [(slice(begin, begin + size),) for begin in range(0, value.shape[0], size)]


def _first_position(value: Tensor, place: tuple[slice, ...]) -> int:
    """The position in ``value``, flattened, of the first value of a rectangle."""
    position = 0
    for dim, length in enumerate(value.shape):
        start = place[dim].start or 0 if dim < len(place) else 0
        position = position * length + start
    return position


def _rounded(value: Tensor, wire: str, key: tuple[int, int, str], start: int, stage: str) -> Tensor:
    """``value``, as it is read from what was sent."""
    if wire == "bf16":
        return value.bfloat16().to(value.dtype)
    if wire in ("int8", "int4"):
        return _in_blocks(value, wire, key, start, stage)
    return value


def _in_blocks(
    value: Tensor, wire: str, key: tuple[int, int, str], start: int, stage: str
) -> Tensor:
    """Blocks of 256 in whole multiples of their largest magnitude over 126, rounded up or down at
    random; in 4 bits over 6, contributions to the nearest."""
    largest = 126 if wire == "int8" else 6
    flat = value.detach().cpu().numpy().reshape(-1)
    found = np.empty_like(flat)
    number = _hash("/".join(map(str, key))) ^ _hash(stage)
    for begin in range(0, len(flat), 256):
        block = flat[begin : begin + 256]
        scale = np.float32(np.abs(block).max() / largest)
        noise = _noise(number, start + begin + np.arange(len(block)))
        # What rounding takes of a contribution in 4 bits is sent later.
        if wire == "int4" and stage != "mean":
            noise = np.full_like(noise, 0.5)
        codes = np.floor(block / (scale or 1) + noise).clip(-largest, largest)
        found[begin : begin + 256] = codes * scale
    return torch.from_numpy(found).view(value.shape).to(value.device)


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little")


def _noise(key: int, positions: np.ndarray) -> np.ndarray:
    """Numbers in [0, 1): MurmurHash3's finalizer of the position times 2**32 over the golden
    ratio."""
    mixed = positions.astype(np.uint32) * np.uint32(0x9E3779B9) ^ np.uint32(key)
    mixed = (mixed ^ (mixed >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    mixed = (mixed ^ (mixed >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    mixed ^= mixed >> np.uint32(16)
    return (mixed & np.uint32(0xFFFFFF)).astype(np.float32) * np.float32(2.0**-24)
