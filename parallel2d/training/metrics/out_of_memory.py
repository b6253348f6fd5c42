"""Says which rank ran out of memory and what to change (`out_of_memory_named`). What was asked for,
and on GPU what the device holds, is in torch's own message, which this is added to."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator

import psutil
import torch

log = logging.getLogger(__name__)

_GIB = 2**30
_HISTORY = 200_000  # allocations and frees whose stacks are kept


@contextlib.contextmanager
def out_of_memory_named(
    rank: int, host: str, run_dir: str, device: torch.device, *, history: bool = False
) -> Iterator[None]:
    """Around everything that allocates on a rank: adds a note to the error.

    On GPU torch's snapshot of the allocator is written to ``memory/`` of the run directory.
    ``history``: it shows where each block was allocated, too.
    """
    snapshots: list[str] = []
    path = os.path.join(run_dir, "memory", f"rank-{rank}.pickle")
    if device.type == "cuda":
        if history:
            torch.cuda.memory._record_memory_history(max_entries=_HISTORY, stacks="python")
        # Called before the allocator raises, when what fills the memory is still there.
        observe = torch._C._cuda_attach_out_of_memory_observer  # type: ignore[attr-defined]
        observe(lambda *_: snapshots.extend(save_snapshot(path)))
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        # Of CPU memory torch raises a plain RuntimeError.
        of_cpu = "DefaultCPUAllocator: can't allocate memory" in str(error)
        if of_cpu or isinstance(error, MemoryError | torch.OutOfMemoryError):
            error.add_note(_describe(error, rank, host.split("/")[0], snapshots))
        raise


def save_snapshot(path: str) -> list[str]:
    """Returns the files written: a failure to write must not hide the one that it is about."""
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        torch.cuda.memory._dump_snapshot(path)
    except Exception as error:
        log.warning("no memory snapshot could be written to %s: %s", path, error)
        return []
    return [path]


def _describe(error: BaseException, rank: int, host: str, snapshots: list[str]) -> str:
    parts = [f"rank {rank} on {host} ran out of memory"]
    if not isinstance(error, torch.OutOfMemoryError):  # of the host, not of a device
        held = psutil.Process().memory_info().rss / _GIB
        memory = psutil.virtual_memory()
        free, total = memory.available / _GIB, memory.total / _GIB
        parts.append(f"it held {held:.2f} GiB; {free:.1f} of {total:.1f} GiB were free")
    parts += [f"snapshot for pytorch.org/memory_viz: {path}" for path in snapshots[-1:]]
    parts.append(
        "a smaller train.micro_batch_size, activation_checkpointing=full or more sharding need less"
    )
    return "; ".join(parts)
