"""Bytes that each sync method sends over the replicate axis."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from parallel2d.config import SyncConfig
from parallel2d.cost.collectives import sent_bytes
from parallel2d.fsdp_internals import GroupTraffic
from parallel2d.sync.blocks import BITS, BlockCode, blocks_of

_ITEM_BYTES = {"fp32": 4, "bf16": 2}


def gradient_bytes(traffic: GroupTraffic, wire: str, replicas: int, device_type: str) -> float:
    """Bytes that one rank sends of a group's gradients per reduction, mean over the ranks, with
    ``sync=every_step`` and ``sync.wire``."""
    if wire == "auto" or wire in _ITEM_BYTES:
        item = _ITEM_BYTES.get(wire, traffic.reduced_itemsize)
        # No dtype wider than that of the gradients is sent.
        item = min(item, traffic.sum_itemsize)
        return sent_bytes("all_reduce", traffic.reduced_numel * item, replicas, device_type)
    coded = _coded_bytes(traffic.reduced_shapes, wire)
    return sent_bytes("all_reduce", coded, replicas, device_type)


def split_bytes(traffic: GroupTraffic, wire: str, replicas: int, device_type: str) -> float:
    """As `gradient_bytes`, where replicas split the updates: gradients to their owners, updated
    parameters to all."""
    scattered = owned_gradient_bytes(traffic, wire, replicas, device_type)
    return scattered + updated_parameter_bytes(traffic, wire, replicas, device_type)


def owned_gradient_bytes(
    traffic: GroupTraffic, wire: str, replicas: int, device_type: str
) -> float:
    """The gradients that `split_bytes` counts."""
    item = _ITEM_BYTES.get(wire, traffic.reduced_itemsize)
    return sent_bytes("all_to_all", traffic.reduced_numel * item, replicas, device_type)


def updated_parameter_bytes(
    traffic: GroupTraffic, wire: str, replicas: int, device_type: str
) -> float:
    """The updated parameters that `split_bytes` counts."""
    item = _ITEM_BYTES["bf16"] if wire == "bf16" else traffic.stored_itemsize
    return sent_bytes("all_gather", traffic.reduced_numel * item, replicas, device_type)


def outer_bytes(traffic: GroupTraffic, sync: SyncConfig, replicas: int, device_type: str) -> float:
    """Bytes that one rank sends of a group's parameters per step with ``sync=diloco``: those of an
    exchange over the steps between two of them."""
    numel = traffic.reduced_numel
    if sync.wire in BITS:
        coded = _coded_bytes(traffic.reduced_shapes, sync.wire)
        sent = sent_bytes("all_reduce", coded, replicas, device_type)
    else:
        item = _ITEM_BYTES["bf16"] if sync.wire == "bf16" else max(4, traffic.stored_itemsize)
        sent = sent_bytes("all_reduce", numel * item, replicas, device_type)
    return sent / sync.every


def _coded_bytes(shapes: Sequence[torch.Size], wire: str) -> int:
    """Bytes of tensors of these shapes, each of which begins a block of its own."""
    row = BlockCode(BITS[wire]).row_bytes
    return sum(blocks_of(shape.numel()) * row for shape in shapes)
