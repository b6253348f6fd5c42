"""A kind of accelerator that exists in tests only: devices named ``toy`` that torch knows by
public registration.

As a program: joins the ranks of the environment and prints the device of this one.
"""

import os
import sys
import types

import torch
import torch.distributed as dist


def register(uuids: list[str]) -> None:
    """Make this process see one toy device for each of ``uuids``."""
    module = types.ModuleType("torch.toy")
    chosen = [0]

    def set_device(device: torch.device | int) -> None:
        chosen[0] = device if isinstance(device, int) else device.index

    vars(module).update(
        is_available=lambda: True,
        device_count=lambda: len(uuids),
        current_device=lambda: chosen[0],
        set_device=set_device,
        synchronize=lambda *_: None,
        empty_cache=lambda: None,
        get_device_properties=lambda device: types.SimpleNamespace(uuid=uuids[device.index]),
    )
    torch.utils.rename_privateuse1_backend("toy")
    torch._register_device_module("toy", module)
    dist.Backend.register_backend(
        "toyccl",
        lambda store, rank, size, timeout: dist.ProcessGroupGloo(store, rank, size, timeout),
        devices=["toy"],
    )


if __name__ == "__main__":
    register(sys.argv[1].split(","))
    import parallel2d

    runtime = parallel2d.setup(timeout_s=60)
    print(runtime.device, dist.get_backend_config(), flush=True)
    parallel2d.teardown()
    os._exit(0)
