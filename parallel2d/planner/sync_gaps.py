"""Sync methods that the search may choose, with what they cost in loss: `methods_within`."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from parallel2d.config import SyncConfig


@dataclass(frozen=True)
class SyncGap:
    """``largest``: the relative gap of the validation loss to synchronous training, with its spread
    over seeds, as measured. ``splits``: measured with split updates, or without."""

    settings: Mapping[str, Any]
    largest: float
    splits: bool = False


_INT4 = {"name": "diloco", "wire": "int4"}

# From the table "What it costs in loss" of docs/sync.md: the gap and its spread over three seeds,
# added. Where one seed was run, its gap, if above zero, and the spread of the same method in fp32
# or bf16. A model of 0.15 M parameters on two replicas, 1,200 steps.
SYNC_GAPS = (
    SyncGap({"wire": "fp32"}, 0.0),
    SyncGap({"wire": "fp32"}, 0.0, splits=True),
    SyncGap({"wire": "bf16"}, 0.0036),
    SyncGap({"wire": "bf16"}, 0.0033, splits=True),
    SyncGap({"wire": "int8"}, 0.0044),
    SyncGap({"name": "diloco"}, 0.0179),
    SyncGap({"name": "diloco", "wire": "int8"}, 0.0171),
    SyncGap(_INT4, 0.0218),
    SyncGap({**_INT4, "fragments": 3, "delay": 5}, 0.0483),
    SyncGap({"name": "diloco", "wire": "sparse"}, 0.2141),
)


def methods_within(
    given: SyncConfig, largest: float, fixed: Collection[str], *, splits: bool
) -> list[SyncConfig]:
    """``given`` in the forms whose measured gap is at most ``largest``, without itself. Keys of
    ``fixed``, such as ``sync`` or ``sync.wire``, stay. ``splits``: replicas split the updates."""
    found = []
    for gap in SYNC_GAPS:
        if gap.largest > largest or gap.splits != splits:
            continue
        changed = dataclasses.replace(given, **gap.settings)
        if changed != given and _keeps(given, changed, fixed):
            found.append(changed)
    return found


def sync_words(given: SyncConfig, changed: SyncConfig) -> list[str]:
    """The words of a command line that turn one into the other."""
    words = []
    for item in dataclasses.fields(SyncConfig):
        value = getattr(changed, item.name)
        if value != getattr(given, item.name):
            key = "sync" if item.name == "name" else f"sync.{item.name}"
            words.append(f"{key}={value}")
    return words


def _keeps(given: SyncConfig, changed: SyncConfig, fixed: Collection[str]) -> bool:
    changes = [word.partition("=")[0] for word in sync_words(given, changed)]
    return not any(key in fixed for key in changes)
