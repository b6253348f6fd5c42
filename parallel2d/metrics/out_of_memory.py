"""Adds a sentence to an exception of a rank that runs out of memory: which rank, where, when, how
much was asked for and held (`OutOfMemoryNote`). On GPU a snapshot of the allocator is written too.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable
from typing import Any

import psutil
import torch

from parallel2d.metrics.watch import Position

log = logging.getLogger(__name__)

_GIB = 2**30
# torch on GPU and CPU, numpy: how much was asked for
_ASKED = re.compile(
    r"[Tt]ried to allocate ([\d.]+ ?(?:[KMGTPE]i?B|bytes))|Unable to allocate ([\d.]+ ?[KMGTPE]iB)"
)
_HISTORY = 200_000  # allocations and frees whose stacks are kept


class OutOfMemoryNote:
    """A context manager around everything that allocates on a rank.

    Args:
        history: on GPU, keep the Python stacks of allocations, so that the snapshot shows where
            each block came from.

    Attributes:
        position: how far the rank is; set it once there are steps.
    """

    def __init__(
        self, rank: int, host: str, run_dir: str, device: torch.device, *, history: bool = False
    ) -> None:
        self._rank = rank
        self._host = host.split("/")[0]
        self._device = device
        self._path = os.path.join(run_dir, "memory", f"rank-{rank}.pickle")
        self._history = history
        self._snapshot: str | None = None
        self.position: Callable[[], Position] | None = None

    def __enter__(self) -> OutOfMemoryNote:
        if self._device.type == "cuda":
            if self._history:
                torch.cuda.memory._record_memory_history(max_entries=_HISTORY, stacks="python")
            torch._C._cuda_attach_out_of_memory_observer(self._observe)  # type: ignore[attr-defined]
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None and is_out_of_memory(error):
            error.add_note(self.describe(error))

    def _observe(self, device: int, asked: int, total: int, free: int) -> None:
        """Called by the allocator before it raises, when what fills the memory is still there."""
        self.save(torch.cuda.memory._dump_snapshot)

    def save(self, dump: Callable[[str], None]) -> None:
        """Has ``dump`` write the snapshot of this rank; a failure of that must not hide the one
        that it is about."""
        try:
            os.makedirs(os.path.dirname(self._path), exist_ok=True)
            dump(self._path)
            self._snapshot = self._path
        except Exception as error:
            log.warning("no memory snapshot could be written to %s: %s", self._path, error)

    def describe(self, error: BaseException) -> str:
        """The sentence for a person."""
        step = self.position().step if self.position else 0
        when = f"in step {step}" if step else "before the first step"
        asked = _ASKED.search(str(error))
        what = "memory of a size that is not told"
        if asked:
            what = _readable(asked[1] or asked[2])
        parts = [
            f"rank {self._rank} on {self._host} ran out of memory {when}: it asked for {what}",
            self._held(),
        ]
        if self._snapshot:
            parts.append(f"snapshot for pytorch.org/memory_viz: {self._snapshot}")
        parts.append(
            "a smaller train.micro_batch_size, activation_checkpointing=full or more sharding need "
            "less"
        )
        return "; ".join(parts)

    def _held(self) -> str:
        """How much this rank holds, of its device or of its host."""
        if self._device.type == "cuda":
            stats = torch.cuda.memory_stats(self._device)
            allocated = stats.get("allocated_bytes.all.current", 0) / _GIB
            reserved = stats.get("reserved_bytes.all.current", 0) / _GIB
            total = torch.cuda.get_device_properties(self._device).total_memory / _GIB
            return f"it held {allocated:.2f} GiB in {reserved:.2f} GiB reserved, of {total:.2f} GiB"
        held = f"it held {resident_gib():.2f} GiB"
        host = psutil.virtual_memory()
        free_gib, total_gib = host.available / _GIB, host.total / _GIB
        return f"{held}; {free_gib:.1f} of the host's {total_gib:.1f} GiB were free"


def _readable(amount: str) -> str:
    """``amount``, a number and its unit, with many bytes as GiB."""
    number, _, unit = amount.partition(" ")
    if unit == "bytes" and int(number) >= _GIB / 100:
        return f"{int(number) / _GIB:.2f} GiB"
    return amount


def resident_gib() -> float:
    """GiB of this process's resident memory now."""
    return float(psutil.Process().memory_info().rss / _GIB)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` says that a host or a device has no memory left."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    # Of CPU memory torch raises a plain RuntimeError.
    message = "DefaultCPUAllocator: can't allocate memory"
    return isinstance(error, RuntimeError) and message in str(error)
