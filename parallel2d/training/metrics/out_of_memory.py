"""`out_of_memory_named` adds the rank, the host and the remedies to an out-of-memory error. Torch's
message already contains the requested size and, on GPU, the memory in use."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator

import psutil
import torch

log = logging.getLogger(__name__)

_GIB = 2**30
_HISTORY = 200_000  # allocations and frees with recorded stacks


@contextlib.contextmanager
def out_of_memory_named(
    rank: int, host: str, run_dir: str, device: torch.device, *, history: bool = False
) -> Iterator[None]:
    """Context for the code of one rank: add a note to each out-of-memory error.

    On GPU, torch's snapshot of the allocator is written to ``memory/`` of the run directory.

    Args:
        history: record the stack of each allocation for the snapshot.
    """
    snapshots: list[str] = []
    path = os.path.join(run_dir, "memory", f"rank-{rank}.pickle")
    if device.type == "cuda":
        if history:
            torch.cuda.memory._record_memory_history(max_entries=_HISTORY, stacks="python")
        # The observer runs before the allocator raises, while the memory is still allocated.
        observe = torch._C._cuda_attach_out_of_memory_observer  # type: ignore[attr-defined]
        observe(lambda *_: snapshots.extend(save_snapshot(path)))
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        # For CPU memory, torch raises a RuntimeError and no OutOfMemoryError.
        of_cpu = "DefaultCPUAllocator: can't allocate memory" in str(error)
        if of_cpu or isinstance(error, MemoryError | torch.OutOfMemoryError):
            error.add_note(_describe(error, rank, host.split("/")[0], snapshots))
        raise


def save_snapshot(path: str) -> list[str]:
    """Write a snapshot and return its path in a list. If the write fails, only log a warning and
    return an empty list, because the out-of-memory error must not be hidden."""
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        torch.cuda.memory._dump_snapshot(path)
    except Exception as error:
        log.warning("no memory snapshot could be written to %s: %s", path, error)
        return []
    return [path]


def _describe(error: BaseException, rank: int, host: str, snapshots: list[str]) -> str:
    parts = [f"rank {rank} on {host} ran out of memory"]
    if not isinstance(error, torch.OutOfMemoryError):  # host memory, not device memory
        held = psutil.Process().memory_info().rss / _GIB
        memory = psutil.virtual_memory()
        free, total = memory.available / _GIB, memory.total / _GIB
        parts.append(f"it held {held:.2f} GiB; {free:.1f} of {total:.1f} GiB were free")
    for path in snapshots[-1:]:
        parts.append(f"snapshot for pytorch.org/memory_viz: {path}")
    parts.append(
        "a smaller train.micro_batch_size, activation_checkpointing=full or more sharding need less"
    )
    return "; ".join(parts)
