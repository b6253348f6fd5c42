"""The private parts of torch's `fully_shard` that the reduction of gradients reaches.

Each use says why it is needed and which public interface or issue would make it unnecessary.
Written for torch 2.13; `tests/test_sync.py` lists what another version lacks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.distributed.tensor import DTensor

from parallel2d.errors import ConfigError

# What this module reaches, for the test: class or object, names.
REACHED: tuple[tuple[Any, tuple[str, ...]], ...] = (
    (FSDPModule, ("_get_fsdp_state", "reset_iter_state")),
    (FSDPState, ("_root_post_backward_final_callback",)),
    (
        FSDPParamGroup,
        (
            "pre_forward",
            "post_backward",
            "finalize_backward",
            "_init_mp_dtypes",
            "_reduce_scatter_process_group",
        ),
    ),
    (
        FSDPParam,
        (
            "accumulate_unsharded_grad_if_needed",
            "to_accumulated_grad_if_needed",
            "to_sharded_dtensor",
            "unsharded_param",
        ),
    ),
    (TrainingState, ("IDLE", "FORWARD")),
    (torch._C, ("_current_graph_task_id",)),
)

# What it reaches on their objects, once they have run.
KEPT: dict[type, tuple[str, ...]] = {
    FSDPState: ("_fsdp_param_groups",),
    FSDPParamGroup: (
        "modules",
        "fsdp_params",
        "mesh_info",
        "post_forward_mesh_info",
        "reduce_grads",
        "all_reduce_grads",
        "reduce_scatter_unused_params",
        "_orig_dtype",
        "_reduce_dtype",
        "_training_state",
        "_post_reduce_event",
        "_partial_reduce_output",
    ),
    FSDPParam: (
        "sharded_param",
        "sharded_size",
        "mesh_info",
        "post_forward_mesh_info",
        "reduce_dtype",
        "unsharded_accumulated_grad",
        "_unsharded_param",
    ),
}


def in_backward() -> bool:
    """Whether the calling thread is inside a backward pass: a forward that runs now is a
    recomputation of activations. torch has no public name for this."""
    return torch._C._current_graph_task_id() != -1


def states(model: nn.Module) -> list[FSDPState]:
    """What `fully_shard` keeps for each group of modules that it was given, each once. It holds the
    groups of parameters, for which there is no public accessor."""
    found = (
        module._get_fsdp_state() for module in model.modules() if isinstance(module, FSDPModule)
    )
    return list(dict.fromkeys(found))


def groups(model: nn.Module) -> list[FSDPParamGroup]:
    """Torch's groups of parameters, each once, in the order of the modules that own them."""
    found: dict[int, FSDPParamGroup] = {}
    for state in states(model):
        for group in state._fsdp_param_groups:
            found.setdefault(id(group), group)
    return list(found.values())


class GroupTraffic(NamedTuple):
    """What a group of parameters moves, counted on one rank."""

    gathered_bytes: int  # of this rank's padded parts, in the dtype in which they are gathered
    reduced_bytes: int  # of their gradients, in the dtype in which they are reduced
    reduced_itemsize: int  # bytes of one element of these; 4 for a group without gradients
    frees_after_forward: bool  # they are gathered once more for backward


def group_traffic(group: FSDPParamGroup) -> GroupTraffic:
    """Reads sizes and dtypes of one of torch's groups. Padding and the choice of dtypes have no
    public accessors."""
    policy = group.mp_policy
    gathered = reduced = 0
    narrowest = 4
    for parameter in group.fsdp_params:
        size, stored = parameter._sharded_param_data.numel(), parameter.sharded_param.dtype
        gathered += size * (policy.param_dtype or stored).itemsize
        if parameter.sharded_param.requires_grad:
            itemsize = (policy.reduce_dtype or policy.param_dtype or stored).itemsize
            reduced += size * itemsize
            narrowest = min(narrowest, itemsize)
    return GroupTraffic(gathered, reduced, narrowest, group.post_forward_mesh_info is not None)


def reduce_over_shard_alone(model: nn.Module, mesh: DeviceMesh) -> None:
    """Takes the replicate axis away from the engine; parameters keep their placements on both axes.

    With it `fully_shard` keeps the partial sums of an accumulation as one flat buffer that does not
    know which parameters it holds (`_partial_reduce_output`), so micro-batches that use different
    parameters are added into each other. A public way to shard on one axis of a mesh and keep the
    placements of both would make this unnecessary.
    """
    info = FSDPMeshInfo(mesh["shard"], shard_mesh_dim=0)
    for group in groups(model):
        holders: list[Any] = [group, *group.fsdp_params]
        for holder in holders:
            if holder.post_forward_mesh_info is not None:
                holder.post_forward_mesh_info = info
            holder.mesh_info = info


def after_backward(model: nn.Module, callback: Callable[[], None]) -> None:
    """Calls ``callback`` at the end of every backward pass, after all groups have been reduced.

    The engine queues such a callback itself, in the first hook of a backward; ours follows it.
    ``Variable._execution_engine.queue_callback``, the other way, is private too.
    """

    def wrapped(original: Callable[[], None]) -> Callable[[], None]:
        def final() -> None:
            original()
            callback()

        return final

    for state in states(model):
        original = state._root_post_backward_final_callback
        state._root_post_backward_final_callback = wrapped(original)  # type: ignore[method-assign]


class ShardedGroup:
    """One group of parameters that are gathered and reduced together, as the rest of the package
    sees it."""

    def __init__(self, group: FSDPParamGroup, name: str) -> None:
        self._group, self.called = group, name or "the root module"
        self.wire = torch.float32
        self.parameters = [ShardedParameter(parameter) for parameter in group.fsdp_params]

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        return self._group.modules

    @property
    def trained(self) -> list[ShardedParameter]:
        """Those that require gradients."""
        return [parameter for parameter in self.parameters if parameter.sharded.requires_grad]

    @property
    def reduces_gradients(self) -> bool:
        """Whether this backward moves gradients over the shard axis
        (`set_requires_gradient_sync`)."""
        return self._group.reduce_grads

    @property
    def crosses_replicas(self) -> bool:
        """Whether this backward is to be reduced over replicas too (`set_requires_all_reduce`)."""
        return self._group.reduce_grads and self._group.all_reduce_grads

    def fill_unused(self, fill: bool) -> None:
        """Whether parameters without a gradient contribute zeros in the next reduction."""
        self._group.reduce_scatter_unused_params = fill

    def on_forward(self, callback: Callable[[], None]) -> None:
        """Calls ``callback`` at each forward of the group that autograd records, whatever method of
        its modules it runs. Hooks of modules see calls of ``forward`` alone."""
        original, group = self._group.pre_forward, self._group

        def pre_forward(*given: Any) -> Any:
            entering = group._training_state != TrainingState.FORWARD
            if entering and torch.is_grad_enabled() and not in_backward():
                callback()
            return original(*given)

        group.pre_forward = pre_forward  # type: ignore[assignment, method-assign]

    def around_backward(self, before: Callable[[], None], after: Callable[[], None]) -> None:
        """Calls ``before`` when autograd has the group's gradients and they are not reduced yet,
        and ``after`` when the sharded ones have been accumulated.

        `register_post_accumulate_grad_hook` on the sharded parameters comes after that as well, but
        nothing public comes before, where gradients of another dtype or of parts must be repaired
        (pytorch issues 190626, 194628, 196996).
        """
        original = self._group.post_backward

        @torch._dynamo.disable(recursive=True)
        def post_backward(*unused: Any) -> None:
            before()
            # A group that never ran has no whole parameters, which torch asks for all the same.
            if self._group.reduce_grads or any(
                hasattr(p, "_unsharded_param") for p in self._group.fsdp_params
            ):
                original(*unused)
            after()

        self._group.post_backward = post_backward  # type: ignore[method-assign]

    def set_dtypes(self, wide: torch.dtype, wire: torch.dtype) -> None:
        """Adds gradients in ``wide``, or the dtype in which parameters are stored if that is wider,
        and sends them in ``wire``.

        The engine adds partial sums in the dtype in which parameters are stored, or that of the
        wire (pytorch issue 194628), and looks both up once, before the first forward. Raises
        `ConfigError` for trained parameters of several dtypes.
        """
        self.wire = wire
        trained = self.trained or [p for p in self.parameters if p.sharded.is_floating_point()]
        stored = sorted({parameter.sharded.dtype for parameter in trained}, key=str)
        if not stored or (len(stored) > 1 and not self.trained):
            return
        if len(stored) > 1:
            raise ConfigError(
                f"{self.called} is gathered in one piece, and its trained parameters are "
                f"{' and '.join(map(str, stored))}: put them into modules of their own and choose "
                "bucketing=layer, or store them in one dtype"
            )
        wide = torch.promote_types(wide, stored[0])
        if stored[0] != wide or wire.itemsize < 4:
            alone = self._group._reduce_scatter_process_group.size() == 1  # nothing is sent
            self._replace_dtypes(wide, wide if alone or wire.itemsize >= 4 else wire)

    def _replace_dtypes(self, wide: torch.dtype, wire: torch.dtype) -> None:
        original = self._group._init_mp_dtypes
        for parameter in self.parameters:
            parameter.gradient_dtype = wide

        def look_up() -> None:
            original()
            group = self._group
            group._orig_dtype = wide
            group._reduce_dtype = wire
            for parameter in group.fsdp_params:
                parameter.reduce_dtype = wide
                if parameter.sharded_param.requires_grad:
                    # any: it differs from the parameter's
                    parameter.sharded_param.grad_dtype = None

        self._group._init_mp_dtypes = look_up  # type: ignore[method-assign]

    def reduce_late(self) -> None:
        """Reduces what earlier backward passes left, outside of a backward pass."""
        with torch.no_grad():
            self._group.post_backward()
        self._group.finalize_backward()
        self._group._training_state = TrainingState.IDLE

    def wait_for_gradients(self, stream: torch.Stream) -> None:
        """Lets ``stream`` wait for the sharded gradients. The engine makes them in streams of its
        own."""
        event = self._group._post_reduce_event
        if event is not None:
            stream.wait_event(event)

    def discard(self) -> None:
        """Drops unsharded partial sums, which are kept outside of ``.grad``."""
        self._group._partial_reduce_output = None
        for parameter in self._group.fsdp_params:
            parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):
                parameter.unsharded_param.grad = None


class ShardedParameter:
    """One parameter of a group: the sharded one that the optimizer has, and the whole one that
    autograd sees."""

    def __init__(self, parameter: FSDPParam) -> None:
        self._parameter = parameter
        self._hooks: dict[int, Any] = {}
        self.gradient_dtype = parameter.sharded_param.dtype

    @property
    def sharded(self) -> nn.Parameter:
        """Asked for each time: allocation and loading replace it."""
        return self._parameter.sharded_param

    @property
    def _whole(self) -> nn.Parameter | None:
        """None before the first forward."""
        return getattr(self._parameter, "_unsharded_param", None)

    @property
    def has_whole_gradient(self) -> bool:
        """Whether this rank has a gradient of it that is not reduced over the shard axis."""
        if self._parameter.unsharded_accumulated_grad is not None:
            return True
        return self._whole is not None and self._whole.grad is not None

    @property
    def whole_gradient_dtype(self) -> torch.dtype | None:
        """Of the gradient of this pass that is not reduced over the shard axis, or of zeros in its
        place; None before the first forward."""
        whole = self._whole
        if whole is None:
            return None
        return whole.dtype if whole.grad is None else whole.grad.dtype

    @property
    def is_accumulated(self) -> bool:
        """Whether earlier micro-batches left an unreduced sum."""
        return self._parameter.unsharded_accumulated_grad is not None

    def accumulate(self) -> None:
        """Turns the gradient into an unreduced sum in the wide dtype, zeros if there is none, so
        that all gradients of a group have one dtype (pytorch issue 196996)."""
        parameter, whole = self._parameter, self._whole
        if whole is None or parameter.unsharded_accumulated_grad is not None:
            return
        dtype = self.gradient_dtype
        if whole.grad is not None:
            parameter.unsharded_accumulated_grad = whole.grad.to(dtype)
            whole.grad = None
        else:
            parameter.unsharded_accumulated_grad = torch.zeros_like(
                whole, dtype=dtype, requires_grad=False
            )

    @property
    def part(self) -> Tensor | None:
        """The gradient of a weight that stayed whole while its inputs were split over the tensor
        axis: a part of a sum, in the dtype that computes. None for others."""
        grad = self._whole.grad if self._whole is not None else None
        if isinstance(grad, DTensor) and any(
            placement.is_partial() for placement in grad.placements
        ):
            return grad._local_tensor
        return None

    @property
    def tensor_group(self) -> dist.ProcessGroup:
        whole = self._whole
        assert isinstance(whole, DTensor)
        return whole.device_mesh.get_group()

    def set_sum_of_parts(self, total: Tensor) -> None:
        """Makes ``total``, in the wide dtype, the unreduced sum of the gradient."""
        whole = self._whole
        assert isinstance(whole, DTensor)
        sums = DTensor.from_local(
            total.to(self.gradient_dtype), whole.device_mesh, whole.placements, run_check=False
        )
        self._parameter.unsharded_accumulated_grad, whole.grad = sums, None

    @property
    def local_gradient(self) -> Tensor | None:
        """This rank's part of the reduced gradient."""
        grad = self._parameter.sharded_param.grad
        return None if grad is None else grad._local_tensor  # type: ignore[attr-defined]

    def set_gradient(self, local: Tensor | None) -> None:
        """Sets the reduced gradient from this rank's part."""
        gradient = None if local is None else self._parameter.to_sharded_dtensor(local)
        self._parameter.sharded_param.grad = gradient

    @property
    def local_size(self) -> torch.Size:
        return self._parameter.sharded_size

    def take_hooks(self) -> list[Callable[[Tensor], object]]:
        """Removes and returns what `register_post_accumulate_grad_hook` has registered. The engine
        calls such hooks when a gradient is reduced over the shard axis alone."""
        hooks = self.sharded._post_accumulate_grad_hooks
        if not hooks:
            return []
        self._hooks = dict(hooks)
        hooks.clear()
        return list(self._hooks.values())

    def give_hooks_back(self) -> None:
        """Registers again what `take_hooks` has removed."""
        hooks = self.sharded._post_accumulate_grad_hooks
        if hooks is not None:
            hooks.update(self._hooks)
        self._hooks = {}
