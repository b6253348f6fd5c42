"""Groups of parameters that `fully_shard` gathers and reduces together, and the gradients in
them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor

from parallel2d.base.device import keep_until_done
from parallel2d.base.errors import ConfigError
from parallel2d.parallel.fsdp_internals.group_watch import GroupWatch, quick_reads
from parallel2d.parallel.fsdp_internals.one_rank import (
    is_alone,
    show_sharded,
    take_whole_gradients,
)
from parallel2d.parallel.fsdp_internals.sharded_model import groups, in_backward
from parallel2d.parallel.model_structure import fqn_of
from parallel2d.parallel.weights.geometry import first_position
from parallel2d.parallel.weights.named_tensors import parameters_by_name


def fsdp_groups(model: nn.Module) -> list[FSDPGroup]:
    """The groups of ``model``, named by their modules, the last of `groups` first: the order in
    which backward ends them."""
    names = {id(module): fqn_of(name) for name, module in model.named_modules()}
    parameter_names = {id(value): name for name, value in parameters_by_name(model).items()}
    found = []
    # Backward goes through modules in about the reverse of the order of registration.
    for group in reversed(groups(model)):
        called = " and ".join(names[id(module)] for module in group.modules)
        found.append(FSDPGroup(group, called, parameter_names))
    return found


class FSDPGroup:
    """One group of parameters that are gathered and reduced together, as the rest of the package
    sees it. ``called``: the names of its modules; ``names``: of all parameters, by id."""

    def __init__(self, group: FSDPParamGroup, called: str, names: Mapping[int, str]) -> None:
        self._group = group
        self.modules = group.modules
        self.called = called or "the root module"
        # The dtype in which its gradients are sent over the shard axis
        self.wire = torch.float32
        # Whether the gathered parameters are tensors that no forward has seen yet
        self._is_new = True
        self.parameters: list[FSDPParameter] = []
        for parameter in group.fsdp_params:
            name = names[id(parameter.sharded_param)]
            self.parameters.append(FSDPParameter(parameter, name))

    @property
    def trained(self) -> list[FSDPParameter]:
        """The parameters that require gradients."""
        with quick_reads():
            return [each for each in self.parameters if each.sharded.requires_grad]

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
        group = self._group
        original = group.pre_forward

        def pre_forward(*given: Any) -> Any:
            # Each module of a group comes here; the first one enters the forward of the group.
            entering = group._training_state != TrainingState.FORWARD
            if entering and torch.is_grad_enabled() and not in_backward():
                callback()
            return original(*given)

        group.pre_forward = pre_forward  # type: ignore[assignment, method-assign]

    def watch(
        self,
        storages: dict[int, str],
        before: Callable[[GroupWatch, bool], None],
        after: Callable[[FSDPGroup, GroupWatch, Any], Any],
    ) -> GroupWatch:
        """Calls ``before``, and whether its parameters are gathered already, when a forward of the
        group begins, and ``after`` with what it returns, in whose place is what ``after`` returns,
        while they are gathered. Gathers anew what changed since. ``storages``: as `GroupWatch`."""
        group = self._group
        watch = GroupWatch(group, [each.name for each in self.parameters], storages)
        gather, begin, end = group.unshard, group.pre_forward, group.post_forward

        def unshard(async_op: bool = False) -> None:
            # What was gathered ahead is of this pass.
            if group._all_gather_result is None and watch.take_updates():
                self.release()
            gather(async_op)

        def pre_forward(*given: Any) -> Any:
            if group._training_state != TrainingState.FORWARD:
                before(watch, group.is_unsharded)
            # Memory that is allocated in inference mode could not be gathered into after it.
            if torch.is_inference_mode_enabled():
                with torch.inference_mode(False), torch.no_grad():
                    result = begin(*given)
            else:
                result = begin(*given)
            if self._is_new:
                watch.remember()
                self._is_new = False
            return result

        def post_forward(module: nn.Module, inputs: Any, output: Any) -> Any:
            return end(module, inputs, after(self, watch, output))

        vars(group).update(unshard=unshard, pre_forward=pre_forward, post_forward=post_forward)
        return watch

    def share_memory(self) -> None:
        """Where the shard axis has one rank and nothing is cast, gathered parameters are the memory
        of the sharded ones."""

        def note() -> None:
            self._is_new = True

        show_sharded(self._group, note)

    def release(self) -> None:
        """Drops gathered parameters: the sharded ones take their places."""
        self._group._to_sharded()

    def around_backward(self, before: Callable[[], None], after: Callable[[], None]) -> None:
        """Calls ``before`` when autograd has the group's gradients and they are not reduced yet,
        and ``after`` when the sharded ones have been accumulated.

        `register_post_accumulate_grad_hook` on the sharded parameters comes after that as well, but
        nothing public comes before, where gradients of another dtype or of parts must be repaired
        (pytorch issues 190626, 194628, 196996).
        """
        group = self._group
        original = group.post_backward

        @torch._dynamo.disable(recursive=True)
        def post_backward(*unused: Any) -> None:
            for parameter in self.trained:
                parameter.make_dense()
            before()
            # A group that never ran has no whole parameters, which torch makes in the first forward
            # and asks for all the same.
            has_run = any(hasattr(each, "_unsharded_param") for each in group.fsdp_params)
            if group.reduce_grads and is_alone(group):
                take_whole_gradients(group)
            elif group.reduce_grads or has_run:
                original(*unused)
            after()

        group.post_backward = post_backward  # type: ignore[method-assign]

    def set_dtypes(self, wide: torch.dtype, wire: torch.dtype) -> None:
        """Adds gradients in ``wide``, or the dtype in which parameters are stored if that is wider,
        and sends them in ``wire`` over the shard axis.

        torch adds partial sums in the dtype in which parameters are stored, or that of the
        wire (pytorch issue 194628), and looks both up once, before the first forward. Raises
        `ConfigError` for trained parameters of several dtypes.
        """
        self.wire = wire
        stored = self._stored_dtype()
        if stored is None:
            return
        wide = torch.promote_types(wide, stored)
        if stored == wide and wire.itemsize >= 4:
            return  # torch adds in that dtype anyway
        group = self._group
        # A shard axis of one rank sends nothing, so nothing need be rounded.
        if wire.itemsize >= 4 or group._reduce_scatter_process_group.size() == 1:
            wire = wide
        for parameter in self.parameters:
            parameter.wide = wide
        original = group._init_mp_dtypes

        def look_up() -> None:
            original()
            # The dtype of reduced gradients and that in which they are sent.
            group._orig_dtype = wide
            group._reduce_dtype = wire
            for parameter in group.fsdp_params:
                # Of partial sums that are not reduced yet.
                parameter.reduce_dtype = wide
                if parameter.sharded_param.requires_grad:
                    # Any dtype: that of gradients may differ from the parameter's.
                    parameter.sharded_param.grad_dtype = None

        group._init_mp_dtypes = look_up  # type: ignore[method-assign]

    def _stored_dtype(self) -> torch.dtype | None:
        """The dtype of trained parameters; that of all with fractions where none is trained, None
        if these differ. Raises `ConfigError` for trained parameters of several dtypes."""
        trained = self.trained
        # Where none is trained yet, those that may be later.
        considered = trained or [p for p in self.parameters if p.sharded.is_floating_point()]
        stored = sorted({parameter.sharded.dtype for parameter in considered}, key=str)
        if len(stored) == 1:
            return stored[0]
        if not trained:
            return None
        raise ConfigError(
            f"{self.called} is gathered in one piece, and its trained parameters are "
            f"{' and '.join(map(str, stored))}: put them into modules of their own and choose "
            "bucketing=layer, or store them in one dtype"
        )

    def reduce_late(self) -> None:
        """Reduces what earlier backward passes left, outside of a backward pass."""
        with torch.no_grad():
            self._group.post_backward()
        # What torch does for each group in the callback at the end of a backward pass.
        self._group.finalize_backward()
        self._group._training_state = TrainingState.IDLE

    def accumulate_on(self, stream: torch.Stream) -> None:
        """Has torch add reduced gradients to the sharded ones on ``stream``, which waits for the
        reduce-scatter before. With one rank on the shard axis nothing is reduced."""
        module = self.modules[0]
        assert isinstance(module, FSDPModule)
        # The reduce-scatter's output is memory of torch's stream for it, and torch lets go of it on
        # the host while ``stream`` still has to read it. Without the hook the next reduce-scatter
        # could get that memory first. For its own all-reduce torch keeps a reference instead
        # (pytorch pull request 180900).
        module.set_all_reduce_hook(keep_until_done, stream=stream)  # type: ignore[arg-type]

    def discard(self) -> None:
        """Drops unsharded partial sums, which are kept outside of ``.grad``."""
        self._group._partial_reduce_output = None
        for parameter in self._group.fsdp_params:
            parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):
                parameter.unsharded_param.grad = None


class FSDPParameter:
    """One parameter of a group: the sharded one that the optimizer has, and the whole one that
    autograd sees."""

    def __init__(self, parameter: FSDPParam, name: str) -> None:
        self.name = name
        self._parameter = parameter
        # The hooks to call, and those of them that are not registered meanwhile
        self._hooks: dict[int, Any] = {}
        self._taken: dict[int, Any] = {}
        # The dtype in which gradients are added, if it is not the parameter's
        self.wide: torch.dtype | None = None
        # The position of this rank's first value in the whole parameter, flattened
        self.start = first_position(parameter.sharded_param)

    @property
    def sharded(self) -> nn.Parameter:
        """Looked up each time: allocation and loading replace it."""
        return self._parameter.sharded_param

    @property
    def gradient_dtype(self) -> torch.dtype:
        """In which its gradients are added. The model may have been cast since it was sharded."""
        return self.wide or self.sharded.dtype

    @property
    def _whole(self) -> nn.Parameter | None:
        """None before the first forward."""
        return getattr(self._parameter, "_unsharded_param", None)

    @property
    def has_whole_gradient(self) -> bool:
        """Whether this rank has a gradient of it that is not reduced over the shard axis."""
        if self.is_accumulated:
            return True
        whole = self._whole
        return whole is not None and whole.grad is not None

    def make_dense(self) -> None:
        """Makes a sparse gradient, such as that of ``nn.Embedding(sparse=True)``, a dense one:
        ranks have different rows, and torch reduces dense ones alone."""
        whole = self._whole
        if whole is not None and whole.grad is not None and whole.grad.is_sparse:
            whole.grad = whole.grad.to_dense()

    @property
    def whole_gradient_dtype(self) -> torch.dtype | None:
        """The dtype of the gradient of this pass that is not reduced over the shard axis, or of
        zeros in its place; None before the first forward."""
        whole = self._whole
        if whole is None:
            return None
        if whole.grad is None:
            return whole.dtype
        return whole.grad.dtype

    @property
    def is_accumulated(self) -> bool:
        """Whether earlier micro-batches left an unreduced sum."""
        return self._parameter.unsharded_accumulated_grad is not None

    def accumulate(self) -> None:
        """Turns the gradient into an unreduced sum in the wide dtype, zeros if there is none, so
        that all gradients of a group have one dtype (pytorch issue 196996)."""
        whole = self._whole
        if whole is None or self.is_accumulated:
            return
        dtype = self.gradient_dtype
        if whole.grad is None:
            total = torch.zeros_like(whole, dtype=dtype, requires_grad=False)
        else:
            total = whole.grad.to(dtype)
            whole.grad = None
        self._parameter.unsharded_accumulated_grad = total

    @property
    def part(self) -> Tensor | None:
        """The gradient of a weight that stayed whole while its inputs were split over the tensor
        axis: a part of a sum, in the dtype that computes. None for others."""
        whole = self._whole
        grad = None if whole is None else whole.grad
        # A plain tensor where the parameter is not split or replicated over a tensor axis.
        if not isinstance(grad, DTensor):
            return None
        for placement in grad.placements:
            if placement.is_partial():
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
        self._parameter.unsharded_accumulated_grad = sums
        whole.grad = None

    @property
    def local_gradient(self) -> Tensor | None:
        """This rank's part of the reduced gradient."""
        grad = self._parameter.sharded_param.grad
        if grad is None:
            return None
        # `to_local` would return another tensor where gradients are enabled.
        return grad._local_tensor  # type: ignore[attr-defined]

    def set_gradient(self, local: Tensor | None) -> None:
        """Sets the reduced gradient from this rank's part."""
        sharded = self._parameter.sharded_param
        if local is None:
            sharded.grad = None
        # Making a `DTensor` takes longer than copying a small gradient.
        elif sharded.grad is not None and sharded.grad.dtype == local.dtype:
            sharded.grad._local_tensor = local  # type: ignore[attr-defined]
        else:
            sharded.grad = self._parameter.to_sharded_dtensor(local)

    @property
    def local_size(self) -> torch.Size:
        return self._parameter.sharded_size

    # Hooks of `register_post_accumulate_grad_hook`: torch would call them after the reduction over
    # the shard axis, and they are to see the mean over all data ranks.

    def take_hooks(self) -> None:
        """Removes the hooks and keeps them."""
        # A dict of torch's, or None. The handles that users have refer to it, so it is emptied and
        # filled again, never replaced.
        registered = self.sharded._post_accumulate_grad_hooks or {}
        self._hooks = self._taken = dict(registered)
        registered.clear()

    def give_hooks_back(self) -> None:
        """Registers again what `take_hooks` has removed; `call_hooks` can still call them."""
        if self._taken:
            self.sharded._post_accumulate_grad_hooks.update(self._taken)
        self._taken = {}

    def call_hooks(self, updated: nn.Parameter) -> None:
        """Calls the hooks that were taken, with ``updated``, which has the gradient."""
        for hook in self._hooks.values():
            hook(updated)

    def forget_hooks(self) -> None:
        """`call_hooks` calls none any more."""
        self._hooks = {}
