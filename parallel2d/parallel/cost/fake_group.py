"""A process group without processes, for what needs a mesh and no other rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed.tensor import debug

# Registers the backend "fake", whose collectives return at once and send nothing.
from torch.testing._internal.distributed.fake_pg import FakeStore

from parallel2d.base.errors import ConfigError


@contextmanager
def fake_process_group(world_size: int, rank: int = 0) -> Iterator[None]:
    """Inside, this process is ``rank`` of ``world_size`` ranks that do not exist. Collectives leave
    their outputs as they are.

    Raises `ConfigError` where there is a process group: that of a job is never replaced.
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
        # torch remembers how operators on `DTensor`s are split by mesh, and takes the mesh of
        # another world for the same one if its ranks have the same numbers. No public name does it.
        debug._clear_fast_path_sharding_prop_cache()
        debug._clear_python_sharding_prop_cache()
