"""Replacements in torch that report CUDA devices, with a `Simulator` behind them.

A tensor on the simulated device is a CPU tensor with a mark (`clocks.Block`) on its storage.
`patch` replaces the functions that make, move and locate tensors, torch.cuda and
torch.accelerator, and the methods of process groups: gloo carries the values.
"""

from __future__ import annotations

import contextlib
import functools
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from stream_simulator import streams
from stream_simulator.clocks import DEVICE, HOST
from stream_simulator.simulator import PLAIN, Simulator, is_on_cpu, local, real_device, tensors_in
from stream_simulator.sources import caller
from stream_simulator.stream_operations import stream_operation
from stream_simulator.streams import CudaEvent, CudaStream, Event, Stream, Work

simulator: Simulator  # set by `patch`
_is_installed = False


# Tensors


@contextlib.contextmanager
def _placed(place: str, pinned: bool = False) -> Iterator[None]:
    """Put new tensors into this place."""
    before = getattr(local, "place", None), getattr(local, "pinned", False)
    local.place, local.pinned = place, pinned
    try:
        yield
    finally:
        local.place, local.pinned = before


def _place_of(device: Any) -> str | None:
    """Return the place of a ``device`` argument; None for other devices, such as meta."""
    if device is None:
        return None
    kind = "cuda" if isinstance(device, int) else torch.device(device).type
    return {"cuda": DEVICE, "cpu": HOST}.get(kind)


def _is_device(tensor: Tensor) -> bool:
    """True if ``tensor`` is on the simulated device."""
    if type(tensor) not in PLAIN:
        for inner in ("_local_tensor", "elem"):  # of DTensor, of AsyncCollectiveTensor
            if isinstance(found := getattr(tensor, inner, None), Tensor):
                return _is_device(found)
        return False
    if not is_on_cpu(tensor) or tensor.layout != torch.strided:
        return False
    block = tensor.untyped_storage().__dict__.get("_block")
    return block is not None and block.kind == DEVICE


def _making(
    original: Callable[..., Any], default: str | None, copies: bool = False
) -> Callable[..., Any]:
    """Wrap a function that makes a tensor.

    Args:
        original: the function.
        default: the place without a ``device`` argument; None: the place of the first argument.
        copies: True if it copies values of the host, for which the host waits.
    """

    @functools.wraps(original)
    def make(*args: Any, device: Any = None, pin_memory: bool = False, **kwargs: Any) -> Any:
        place = default if device is None else _place_of(device)
        if device is not None:
            kwargs["device"] = "cpu" if place == DEVICE else device
        if place is None:
            return original(*args, **kwargs)
        # The outermost function decides.
        place = getattr(local, "place", None) or place
        with _placed(place, bool(pin_memory)):
            result = original(*args, **kwargs)
        plain = getattr(result, "_local_tensor", result)
        if type(plain) in PLAIN and is_on_cpu(plain) and plain.layout == torch.strided:
            storage = plain.untyped_storage()
            if not hasattr(storage, "_block"):  # made without an operator
                simulator.new_block(storage, place, bool(pin_memory))
        if copies and place == DEVICE:
            simulator.wait("blocking copy, host to device", simulator.current().seen)
        return result

    return make


def _moving(to: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `Tensor.to`, which copies between the places."""

    @functools.wraps(to)
    def move(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        names = ("device", "dtype", "non_blocking", "copy")
        if args and isinstance(args[0], torch.dtype):
            names = names[1:]
        given = dict(zip(names, args, strict=False)) | kwargs
        device = given.pop("other", given.pop("device", None))
        if isinstance(device, Tensor):
            device, given["dtype"] = device.device, device.dtype
        place = _place_of(device)
        if device is not None and (place is None or not is_on_cpu(self)):
            return to(self, "cpu" if place else device, **given)
        if place in (None, DEVICE if _is_device(self) else HOST):
            return to(self, **given) if given else self
        # A non-blocking copy to the host makes pinned memory.
        with _placed(place, place == HOST and bool(given.get("non_blocking"))):
            return to(self, "cpu", **{**given, "copy": True})

    return move


def _read_by_host(name: str, refused: bool = False) -> Callable[..., Any]:
    """Wrap a method that reads values on the host. ``refused``: CUDA tensors do not support it."""
    original = getattr(torch._C.TensorBase, name, None) or getattr(Tensor, name)

    @functools.wraps(original)
    def read(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        if _is_device(self):
            if refused:
                place = caller().place
                simulator.find("mismatch", (name, place), f"{name} of a device tensor at {place}")
            simulator.wait(name, simulator.current().seen)
        elif type(self) in PLAIN:
            simulator.host_access(self, False, name)
        return original(self, *args, **kwargs)

    return read


def _patch_tensors() -> None:
    """Replace the functions that move and locate tensors."""
    base: Any = torch._C.TensorBase
    tensor: Any = Tensor
    wrapper = base._make_wrapper_subclass
    tensor.device = property(
        lambda self: simulator.device if _is_device(self) else real_device(self)
    )
    tensor.is_cuda = property(lambda self: self.device.type == "cuda")
    tensor.is_cpu = property(lambda self: self.device.type == "cpu")
    tensor.get_device = lambda self: self.device.index if self.is_cuda else -1
    tensor.to = _moving(base.to)
    tensor.cpu = lambda self, **options: self.to("cpu", **options)
    tensor.cuda = lambda self, device=None, non_blocking=False: self.to(
        "cuda", non_blocking=non_blocking
    )
    tensor.pin_memory = _pin_memory
    tensor.is_pinned = lambda self, device=None: bool(simulator.block_of(self).pinned)
    tensor.record_stream = streams.record_stream
    tensor._make_wrapper_subclass = staticmethod(
        lambda *args, device=None, **options: wrapper(
            *args, device="cpu" if _place_of(device) else device, **options
        )
    )
    tensor.tolist = _read_by_host("tolist")
    tensor.numpy = _read_by_host("numpy", refused=True)
    tensor.__array__ = _read_by_host("__array__", refused=True)
    torch.as_tensor = _as_tensor_of(torch.as_tensor)
    torch.from_dlpack = torch.utils.dlpack.from_dlpack = _from_dlpack
    torch.UntypedStorage.resize_ = _resizing(torch._C.StorageBase.resize_)  # type: ignore[method-assign]


_FACTORIES = (
    "empty", "empty_strided", "empty_permuted", "ones", "zeros", "full", "arange", "eye", "linspace",
    "rand", "randn",
    "randint", "randperm", "scalar_tensor", "tril_indices", "triu_indices", "tensor",
)  # fmt: skip
_FACTORIES_LIKE = (
    "empty_like",
    "zeros_like",
    "ones_like",
    "full_like",
    "rand_like",
    "randn_like",
    "randint_like",
)
_FACTORY_METHODS = (
    "new_empty",
    "new_zeros",
    "new_ones",
    "new_full",
    "new_empty_strided",
    "new_tensor",
)


def _patch_factories() -> None:
    """Replace the functions that make new tensors."""
    for name in _FACTORIES:
        setattr(torch, name, _making(getattr(torch, name), HOST, copies=name == "tensor"))
    for name in _FACTORIES_LIKE:
        setattr(torch, name, _making(getattr(torch, name), None))
    for name in _FACTORY_METHODS:
        original = getattr(torch._C.TensorBase, name)
        setattr(Tensor, name, _making(original, None, copies=name == "new_tensor"))


def _as_tensor_of(original: Callable[..., Any]) -> Callable[..., Any]:
    def as_tensor(data: Any, dtype: Any = None, device: Any = None) -> Any:
        if device is None:
            return original(data, dtype=dtype)
        if isinstance(data, Tensor):
            return data.to(device, dtype)
        return torch.tensor(data, dtype=dtype, device=device)

    return as_tensor


@stream_operation("pin_memory", skipped=lambda tensor, *_: tensor)
def _pin_memory(self: Tensor, device: Any = None) -> Tensor:
    with _placed(HOST, pinned=True):
        copy: Tensor = torch._C.TensorBase.clone(self)  # type: ignore[arg-type]
        return copy


def _from_dlpack(tensor: Tensor) -> Tensor:
    """Return a tensor of another storage that shows the same memory."""
    alias: Tensor = torch._C._from_dlpack(torch._C._to_dlpack(tensor))  # type: ignore[attr-defined]
    if (block := simulator.block_of(tensor)) is not None:
        block.owners += 1
        simulator.share_block(alias.untyped_storage(), block)
    return alias


def _resizing(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `UntypedStorage.resize_`: frees the memory, and allocates other memory on the current stream."""

    def resize(self: Any, size: int) -> Any:
        block = self.__dict__.pop("_block", None)
        if block is None or block.kind != DEVICE:
            return original(self, size)
        block.owners = 0
        simulator.free(block)
        original(self, size)
        simulator.new_block(self, DEVICE)
        return self

    return resize


class _Runtime:
    """The library of ``torch.cuda.cudart()``."""

    @staticmethod
    def cudaHostRegister(address: int, size: int, flags: int) -> None:  # noqa: N802
        simulator.lock_pages(address)

    @staticmethod
    def cudaHostUnregister(address: int) -> None:  # noqa: N802
        pass


def _patch_cuda() -> None:
    """Replace torch.cuda, torch.accelerator, streams and events."""
    cuda: Any = torch.cuda
    accelerator: Any = torch.accelerator
    index = simulator.device.index
    streams_of_torch: Any = torch
    streams_of_torch.Stream, streams_of_torch.Event = Stream, Event
    cuda.Stream, cuda.Event = CudaStream, CudaEvent
    answers: dict[str, Any] = {
        "is_available": True, "is_initialized": True, "device_count": simulator.devices,
        "current_device": index,
        "init": None, "_lazy_init": None, "set_device": None, "empty_cache": None, "manual_seed": None,
        "manual_seed_all": None, "reset_peak_memory_stats": None, "is_current_stream_capturing": False,
        "get_device_name": "simulated", "get_device_capability": (9, 0), "mem_get_info": (8 << 30, 8 << 30),
        "is_bf16_supported": True, "max_memory_allocated": 0, "memory_allocated": 0, "_is_in_bad_fork": False,
    }  # fmt: skip
    for name, answer in answers.items():
        setattr(cuda, name, lambda *_, _answer=answer, **__: _answer)
    cuda.cudart, cuda.check_error = _Runtime, lambda *_: None
    cuda.memory_stats = lambda *_: defaultdict(int)
    cuda.get_rng_state = lambda *_: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *_: torch.set_rng_state(state)
    cuda.current_stream = lambda *_: CudaStream(actor=simulator.current())
    cuda.default_stream = lambda *_: CudaStream(actor=simulator.default)
    cuda.stream = lambda stream: stream if stream is not None else contextlib.nullcontext()
    cuda.device = lambda *_: contextlib.nullcontext()
    cuda.synchronize = accelerator.synchronize = streams.synchronize
    accelerator.current_stream = lambda *_: Stream(actor=simulator.current())
    accelerator.current_accelerator = lambda *_, **__: torch.device("cuda")
    accelerator.current_device_index = lambda: index
    accelerator.is_available, accelerator.device_count = cuda.is_available, cuda.device_count


# The methods of process groups: the positions of the written and of the read arguments
_IN_PLACE = ("allreduce", "allreduce_coalesced", "reduce", "broadcast")
_OUT_OF_PLACE = (
    "allgather",
    "_allgather_base",
    "all_gather_single",
    "all_gather_single_coalesced",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "reduce_scatter",
    "_reduce_scatter_base",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced",
    "alltoall",
    "alltoall_base",
    "all_to_all_single",
    "gather",
    "scatter",
)
_COLLECTIVES: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    **dict.fromkeys(_IN_PLACE, ((0,), (0,))),
    **dict.fromkeys(_OUT_OF_PLACE, ((0,), (1,))),
    "send": ((), (0,)),
    "recv": ((0,), ()),
    "recv_anysource": ((0,), ()),
}


def _collective(name: str) -> Callable[..., Any]:
    """Return a method of process groups that runs the collective over gloo, and reports one of NCCL."""
    original, (outputs, inputs) = getattr(dist.ProcessGroup, name), _COLLECTIVES[name]

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        # As the dispatcher does: wait for the pending outputs of functional collectives.
        args = tree_map_only(AsyncCollectiveTensor, AsyncCollectiveTensor.trigger_wait, args)
        tensors = [each for arg in args[:2] for each in tensors_in(arg)]
        if not simulator.active or not any(map(_is_device, tensors)):  # over gloo
            for each in tensors:
                simulator.host_access(each, True, name)
            return original(self, *args, **kwargs)
        given = (*args, *kwargs.values())
        options = next((each for each in given if hasattr(each, "asyncOp")), None)
        written = [each for at in outputs for each in tensors_in(args[at])]
        read = [each for at in inputs for each in tensors_in(args[at])]
        if name == "broadcast" and options is not None and options.rootRank == self.rank():
            written = []
        with _disable_current_modes():  # gloo calls operators too
            work = original(self, *args, **kwargs)
            if work is not None:
                work.wait()
        asynchronous = options is None or options.asyncOp
        end = simulator.collective(f"c10d.{name}", written, read, self.group_name, asynchronous)
        return Work(end, tensors) if asynchronous else None

    return call


def _over_gloo(original: Callable[..., Any], position: int) -> Callable[..., Any]:
    """Wrap a function with the name of a backend at ``position``: it uses gloo instead of NCCL."""

    @functools.wraps(original)
    def make(*args: Any, **kwargs: Any) -> Any:
        given = list(args)
        if len(given) > position and isinstance(given[position], str):
            given[position] = given[position].replace("nccl", "gloo")
        if isinstance(kwargs.get("backend"), str):
            kwargs["backend"] = kwargs["backend"].replace("nccl", "gloo")
        return original(*given, **kwargs)

    return make


def patch(of: Simulator) -> None:
    """Replace all of this for the rest of the process."""
    global simulator, _is_installed
    assert not _is_installed, "a process simulates one device"
    _is_installed = True
    simulator = of
    streams.attach(of)
    _patch_tensors()
    _patch_factories()
    _patch_cuda()
    for name in _COLLECTIVES:
        if hasattr(dist.ProcessGroup, name):
            setattr(dist.ProcessGroup, name, _collective(name))
    dist.init_process_group = _over_gloo(dist.init_process_group, 0)
    dist.new_group = _over_gloo(dist.new_group, 2)
