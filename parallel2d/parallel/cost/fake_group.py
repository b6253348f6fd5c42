"""A process group without processes, for code that needs a mesh but no other rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed.tensor import debug

# Registers the backend "fake": its collectives return at once and send nothing.
from torch.testing._internal.distributed.fake_pg import FakeStore

from parallel2d.base.errors import ConfigError


@contextmanager
def fake_process_group(world_size: int, rank: int = 0) -> Iterator[None]:
    """Make this process rank ``rank`` of ``world_size`` imaginary ranks in the body.

    Collectives do not change their outputs. Raises `ConfigError` if a process group exists: the
    group of a job is never replaced.
    """
    if dist.is_initialized():
        raise ConfigError(
            "a layout is planned in a process of its own, and this one has a process group already"
        )
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
        # torch caches the sharding of `DTensor` operators by mesh, and would reuse entries for a
        # mesh of another world with equal rank numbers. No public name clears these caches.
        debug._clear_fast_path_sharding_prop_cache()
        debug._clear_python_sharding_prop_cache()
