"""A process group without processes, for code that needs a mesh but no other rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed.tensor import debug

# This import registers the backend "fake", whose collectives return without communication.
from torch.testing._internal.distributed.fake_pg import FakeStore

from parallel2d.base.errors import ConfigError


@contextmanager
def fake_process_group(world_size: int, rank: int = 0) -> Iterator[None]:
    """Initialize a fake process group, in which this process is ``rank`` of ``world_size`` ranks.

    Collectives do not change their outputs. Raises `ConfigError` if a process group already exists.
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
        # torch caches the sharding of `DTensor` operators by mesh, and would use these entries for
        # an equal mesh of another process group. No public function clears the caches.
        debug._clear_fast_path_sharding_prop_cache()
        debug._clear_python_sharding_prop_cache()
