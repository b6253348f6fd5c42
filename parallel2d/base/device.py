"""Functions for the accelerator of a rank: choice of the device, streams and events, memory and
random state. The functions call the device module (`torch.get_device_module`), such as
`torch.cuda`. Code in other files mentions a type of accelerator, such as ``cuda``, only for a
feature that only this type has.

[Note: one kind of stream] FSDP2 and `torch.distributed` work with the device module's classes, such
as `torch.cuda.Stream`. The generic `torch.Stream` cannot be combined with these classes:
``torch.Stream.wait_event`` accepts a `torch.cuda.Event` without an error, but does not wait for the
event. Therefore every stream of the package comes from this module, and streams are ordered by
``wait_stream``. The device module of CPUs, `torch.cpu`, has the same names as no-ops, so no caller
needs a branch for CPUs.
"""

from __future__ import annotations

import importlib.util
import os
import weakref
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from parallel2d.base.errors import ConfigError

# File of a driver, name of its devices, and the environment variables that can hide all its devices
DRIVERS = (
    ("/dev/nvidiactl", "an NVIDIA GPU", ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES")),
    (
        "/dev/kfd",
        "an AMD GPU",
        ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
    ),
)
# Name in the log -> kernel, in order of preference
ATTENTION_KERNELS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
# Two names of the same variable. A value of the user is not changed.
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_HIDDEN = ("", "-1", "none", "void", "nodevfiles")
# the streams of `new_stream` that are in use
_streams: weakref.WeakSet[torch.Stream] = weakref.WeakSet()


def accelerator_type() -> str:
    """Return the type of the accelerators that this process can use, such as "cuda", or "cpu" if it
    has none.

    Raises:
        ConfigError: if a driver is installed and torch finds no device. Without the error, training
            would run on the much slower CPU without a message.
    """
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is not None:
        return found.type
    for path, kind, variables in DRIVERS:
        is_hidden = any(os.environ.get(name, "all").lower() in _HIDDEN for name in variables)
        if os.path.exists(path) and not is_hidden:
            raise ConfigError(
                f"this machine has the driver of {kind} ({path}), and torch {torch.__version__} "
                f"finds no device: install a build of torch for it, or set {variables[0]}= (empty) "
                "to use the CPU"
            )
    return "cpu"


def device_count() -> int:
    """Return the number of accelerators that this process can use. Raises `ConfigError` as
    `accelerator_type` does."""
    kind = accelerator_type()
    return 0 if kind == "cpu" else torch.accelerator.device_count()


def choose_device(local_rank: int) -> torch.device:
    """Make the accelerator of this rank the current device, and return it. Without accelerators,
    return the CPU.

    A process that sees one device (a Slurm task, a container) uses this device, regardless of its
    local rank. Raises `ConfigError` as `accelerator_type` does, and if the node has more ranks than
    devices.
    """
    kind, count = accelerator_type(), device_count()
    if kind == "cpu":
        return torch.device("cpu")
    if count > 1 and local_rank >= count:
        raise ConfigError(
            f"LOCAL_RANK={local_rank}, but this node has {count} devices of type {kind} and two "
            "ranks cannot share one; start fewer processes per node"
        )
    # torch reads this variable when its allocator starts. Expandable segments reduce fragmentation.
    if kind == "cuda" and not any(name in os.environ for name in _ALLOCATOR):
        os.environ[_ALLOCATOR[0]] = "expandable_segments:True"
    device = torch.device(kind, local_rank if count > 1 else 0)
    _module(kind).set_device(device)
    return device


def identity_of(device: torch.device) -> str:
    """Return a name of the device that is unique on the host; empty if none is known."""
    if device.type == "cpu":
        return ""
    # Parts of one GPU (MIG) may share its UUID.
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    index = device.index or 0
    if index < len(visible) and visible[index].startswith("MIG-"):
        return visible[index]
    properties = _module(device.type).get_device_properties(device)
    return str(getattr(properties, "uuid", ""))


def backend_for(device_type: str) -> str:
    """Return the backend string of a process group, with backends for the CPU and for this device
    type."""
    if device_type == "cpu":
        return "gloo"
    return f"cpu:gloo,{device_type}:{dist.get_default_backend_for_device(device_type)}"


def bound_device(device: torch.device) -> torch.device | None:
    """Return the ``device_id`` for `torch.distributed.init_process_group`; None without NCCL.

    With this argument NCCL connects the ranks at the start, and derives the groups of a mesh from
    this connection. Otherwise each group would connect separately.
    """
    if device.type == "cpu" or dist.get_default_backend_for_device(device.type) != "nccl":
        return None
    # NCCL runs asynchronous collectives on its own streams, which have normal priority by default.
    # FSDP2 uses high-priority streams.
    os.environ.setdefault("TORCH_NCCL_HIGH_PRIORITY", "1")
    return device


def current_device(device_type: str) -> torch.device:
    """Return the current device of this type, with its index if it has one."""
    if device_type == "cpu":
        return torch.device("cpu")
    return torch.device(device_type, _module(device_type).current_device())


def set_device(device: torch.device) -> None:
    """Make ``device`` the current device of this thread."""
    _module(device.type).set_device(device)


def properties_of_all() -> list[Any]:
    """Return the properties of each accelerator that this process can use: at least ``name`` and
    ``total_memory``."""
    kind = accelerator_type()
    found: list[Any] = []
    for index in range(device_count()):
        found.append(_module(kind).get_device_properties(index))
    return found


def name_of(device: torch.device) -> str:
    """Return the model name of the device, or ``CPU``."""
    if device.type == "cpu":
        return "CPU"
    return str(_module(device.type).get_device_name(device))


def has_fast_bf16(device_type: str) -> bool:
    """True if the current device computes matrix products in bf16 faster than in fp32."""
    if device_type == "cpu":
        return False
    module = _module(device_type)
    # CUDA emulates bf16 on older GPUs and reports it as supported.
    if hasattr(module, "get_device_capability"):
        return bool(module.get_device_capability() >= (8, 0))
    return bool(module.is_bf16_supported()) if hasattr(module, "is_bf16_supported") else False


def can_compile(device_type: str) -> bool:
    """True if torch.compile can generate kernels for this type of accelerator, with Triton."""
    return device_type not in ("", "cpu") and importlib.util.find_spec("triton") is not None


def use_tf32(device_type: str) -> None:
    """Round the inputs of fp32 matrix products to TF32 in this process. On a CPU nothing
    changes."""
    if device_type != "cpu":
        torch.set_float32_matmul_precision("high")


def attention_kernels(device_type: str) -> AbstractContextManager[object]:
    """Context that makes each call of attention use the first kernel that supports the call: cuDNN,
    flash, memory-efficient or math. Without CUDA nothing changes."""
    # Other accelerators have attention kernels that are not in `ATTENTION_KERNELS`.
    if device_type != "cuda":
        return nullcontext()
    return sdpa_kernel(list(ATTENTION_KERNELS.values()), set_priority=True)


def synchronize(device_type: str) -> None:
    """Wait on the host until the current device has finished all issued work."""
    _module(device_type).synchronize()


def empty_cache(device_type: str) -> None:
    """Return unused memory from torch's allocator to the device."""
    if device_type != "cpu":
        _module(device_type).empty_cache()


def memory_stats(device: torch.device) -> Mapping[str, Any]:
    """Return the statistics of the allocator, by torch's names; empty for the CPU."""
    if device.type == "cpu":
        return {}
    return cast(Mapping[str, Any], _module(device.type).memory_stats(device))


def reset_peak_memory(device: torch.device) -> None:
    """Reset the peak values in the `memory_stats` of an accelerator."""
    _module(device.type).reset_peak_memory_stats(device)


def free_and_total_bytes(device: torch.device) -> tuple[int, int]:
    """Return free and total memory of an accelerator."""
    free, total = _module(device.type).mem_get_info(device)
    return int(free), int(total)


def random_state(device_type: str) -> Tensor | None:
    """Return the state of the random generator of the current device, as a CPU tensor. None if the
    device is the CPU."""
    return None if device_type == "cpu" else _module(device_type).get_rng_state().cpu()


def set_random_state(device_type: str, state: Tensor) -> None:
    """Set the random generator of the current device."""
    _module(device_type).set_rng_state(state)


def preserve_rng_states() -> AbstractContextManager[None]:
    """Restore the random generators of the CPU and of the current device on exit."""
    kind = accelerator_type()
    if kind == "cpu":
        return torch.random.fork_rng(devices=[])
    devices = [_module(kind).current_device()]
    return torch.random.fork_rng(devices=devices, device_type=kind)


def timed_event(device_type: str) -> torch.Event:
    """Return a timing event of an accelerator."""
    return cast(torch.Event, _module(device_type).Event(enable_timing=True))


def new_stream(device_type: str) -> torch.Stream:
    """Return a high-priority stream for communication; FSDP2 uses high priority too. With normal
    priority, the kernels that pack and unpack messages would wait for kernels of the model."""
    stream = cast(torch.Stream, _module(device_type).Stream(priority=-1))
    if device_type != "cpu":
        _streams.add(stream)
    return stream


def new_copy_stream(device_type: str) -> torch.Stream:
    """Return a stream for copies between device and host, with normal priority."""
    return cast(torch.Stream, _module(device_type).Stream())


def communication_streams() -> list[torch.Stream]:
    """Return the streams of `new_stream` that are in use; none on CPU."""
    return list(_streams)


def current_stream(device_type: str) -> torch.Stream:
    """Return the current stream of this thread."""
    return cast(torch.Stream, _module(device_type).current_stream())


def on_stream(device_type: str, stream: torch.Stream) -> AbstractContextManager[object]:
    """Make ``stream`` the current stream of this thread inside the context."""
    return cast(AbstractContextManager[object], _module(device_type).stream(stream))


def sent_to(device: torch.device, values: Tensor) -> Tensor:
    """Copy host ``values`` to ``device`` in its current stream. The host does not wait for earlier
    work of the device."""
    if device.type == "cpu" or values.device.type != "cpu":
        return values.to(device)
    # The allocator of pinned memory reuses the copy only after the device has read it.
    return values.pin_memory().to(device, non_blocking=True)


def host_buffer(size: int, device_type: str) -> Tensor:
    """Return ``size`` bytes of CPU memory. A device can copy to this memory while the host
    continues.

    `free_host_buffer` must be called before the tensor is freed.
    """
    if device_type != "cuda":
        return torch.empty(size, dtype=torch.uint8, pin_memory=device_type != "cpu")
    # torch's allocator of pinned memory rounds up to a power of two.
    buffer = torch.empty(size, dtype=torch.uint8)
    torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), size, 0))
    return buffer


def free_host_buffer(buffer: Tensor, device_type: str) -> None:
    """Unlock the pages of a `host_buffer`."""
    if device_type == "cuda":
        torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(buffer.data_ptr()))


def keep_until_done(tensor: Tensor) -> None:
    """Keep the memory of ``tensor`` until the current stream has read it. Needed if another stream
    has allocated the tensor.

    Otherwise the allocator may reuse the memory as soon as the tensor is freed on the host.
    """
    if tensor.device.type != "cpu":
        tensor.record_stream(current_stream(tensor.device.type))


def _module(device_type: str) -> Any:
    return torch.get_device_module(device_type)
