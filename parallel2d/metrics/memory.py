"""What a rank says when memory runs out: who, where, when, how much was asked for and held; on GPU
a snapshot of the allocator.

An exception passes through `OutOfMemoryNote`; if it says that memory ran out, a sentence is added
to it.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable
from typing import Any

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
        history: on GPU, keep the Python stacks of allocations, so that the snapshot tells where
            each block came from.

    Attributes:
        position: how far the rank is; set it once there are steps.
    """

    def __init__(
        self, rank: int, host: str, run_dir: str, device: torch.device, *, history: bool = False
    ) -> None:
        self._rank, self._host, self._device = rank, host.split("/")[0], device
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
        what = _readable(asked[1] or asked[2]) if asked else "memory of a size that is not told"
        parts = [
            f"rank {self._rank} on {self._host} ran out of memory {when}: it asked for {what}",
            self._held(),
        ]
        if self._snapshot:
            parts.append(f"snapshot for pytorch.org/memory_viz: {self._snapshot}")
        parts.append(
            "a smaller train.micro_batch_size, activation_checkpointing=full or more sharding "
            "need less"
        )
        return "; ".join(parts)

    def _held(self) -> str:
        if self._device.type == "cuda":
            stats = torch.cuda.memory_stats(self._device)
            allocated, reserved = (
                stats.get(f"{name}_bytes.all.current", 0) / _GIB
                for name in ("allocated", "reserved")
            )
            total = torch.cuda.get_device_properties(self._device).total_memory / _GIB
            return f"it held {allocated:.2f} GiB in {reserved:.2f} GiB reserved, of {total:.2f} GiB"
        held = f"it held {resident_gib():.2f} GiB"
        try:
            with open("/proc/meminfo") as file:
                kib = {
                    line.split(":")[0]: int(line.split()[1])
                    for line in file
                    if line.startswith("Mem")
                }
            return (
                f"{held}; {kib['MemAvailable'] / 2**20:.1f} of the host's "
                f"{kib['MemTotal'] / 2**20:.1f} GiB were free"
            )
        except (OSError, ValueError, LookupError):
            return held


def _readable(amount: str) -> str:
    number, _, unit = amount.partition(" ")
    return (
        f"{int(number) / _GIB:.2f} GiB" if unit == "bytes" and int(number) >= _GIB / 100 else amount
    )


def resident_gib() -> float:
    """GiB of this process's resident memory now; 0 where the kernel does not say."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / _GIB
    except OSError:
        return 0.0


def is_out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` says that a host or a device has no memory left."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator: can't allocate memory" in str(
        error
    )
