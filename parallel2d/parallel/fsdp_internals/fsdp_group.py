"""Wrappers of FSDP2's parameter groups (`FSDPGroup`) and of their parameters (`FSDPParameter`)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from parallel2d.base.device import keep_until_done
from parallel2d.base.errors import ConfigError
from parallel2d.parallel.fsdp_internals.one_rank import share_memory
from parallel2d.parallel.fsdp_internals.sharded_model import in_backward, states
from parallel2d.parallel.fsdp_internals.tensors import part_of, quick_reads
from parallel2d.parallel.model_structure import UPDATED_AS, fqn_of, names_by_id
from parallel2d.parallel.weights.geometry import first_position
from parallel2d.parallel.weights.named_tensors import parameters_by_name


def fsdp_groups(model: nn.Module) -> list[FSDPGroup]:
    """Return the FSDP groups of ``model`` in the order of their backward passes."""
    names = names_by_id(model.named_modules())
    parameter_names = names_by_id(parameters_by_name(model).items())
    found = []
    for state, modules in states(model).items():
        called = " and ".join(fqn_of(names[id(module)]) for module in modules)
        for group in state._fsdp_param_groups:
            found.append(FSDPGroup(group, modules, called or "the root module", parameter_names))
    _note_settings(model, found)
    # Backward runs through modules approximately in reverse order of registration.
    return found[::-1]


def _note_settings(model: nn.Module, groups: Sequence[FSDPGroup]) -> None:
    """Wrap `set_requires_gradient_sync` and `set_requires_all_reduce` to record their values.

    The values are stored in ``groups``, because FSDP has no getters for them.
    """
    group_of: dict[nn.Module, FSDPGroup] = {}
    for group in groups:
        for module in group.modules:
            group_of[module] = group

    def noting(module: nn.Module, method: str, attributes: Sequence[str]) -> Callable[..., None]:
        call = getattr(module, method)

        @functools.wraps(call)
        def called(value: bool, *, recurse: bool = True) -> None:
            call(value, recurse=recurse)
            for each in module.modules() if recurse else (module,):
                if each in group_of:
                    for attribute in attributes:
                        setattr(group_of[each], attribute, value)

        return called

    for module in model.modules():
        if isinstance(module, FSDPModule):
            # As in FSDP, the first method sets both values.
            for method, attributes in (
                ("set_requires_gradient_sync", ("reduces_gradients", "reduces_over_replicas")),
                ("set_requires_all_reduce", ("reduces_over_replicas",)),
            ):
                vars(module)[method] = noting(module, method, attributes)


class FSDPGroup:
    """Wrapper of one FSDP parameter group.

    Args:
        group: torch's parameter group.
        modules: the modules that were given to `fully_shard` together.
        called: their names, for messages.
        names: FQNs of all parameters of the model, by id.
    """

    def __init__(
        self,
        group: FSDPParamGroup,
        modules: Sequence[nn.Module],
        called: str,
        names: Mapping[int, str],
    ) -> None:
        self._group = group
        self.modules = tuple(modules)
        self.called = called
        # Communication dtype of the gradients over the shard axis
        self.communication_dtype = torch.float32
        # Accumulation and communication dtype of gradients in FSDP; None: FSDP's defaults
        self._reduces_in: tuple[torch.dtype, torch.dtype] | None = None
        # True if FSDP's mesh of the group has one rank: unsharded gradients are used as sharded
        # gradients
        self.is_alone = False
        # For a replicated conditional module, which only some ranks may run: the process group of
        # the shard axis
        self.replicated_over: dist.ProcessGroup | None = None
        # True if the next backward pass reduces gradients over the shard axis, and over replicas
        self.reduces_gradients = self.reduces_over_replicas = True
        # Cached value of `trained` during FSDP's post-backward of the group
        self._ending: list[FSDPParameter] | None = None
        # True if the unsharded parameters have new tensors that `on_gather` has not reported
        self._is_new = True
        self.parameters: list[FSDPParameter] = []
        for parameter in group.fsdp_params:
            self.parameters.append(FSDPParameter(parameter, names[id(parameter.sharded_param)]))

    @property
    def module(self) -> FSDPModule:
        """A module whose `FSDPModule` methods act on this group: the first module of the group."""
        module = self.modules[0]
        assert isinstance(module, FSDPModule)
        return module

    @property
    def trained(self) -> list[FSDPParameter]:
        """The parameters that require grad."""
        if self._ending is not None:
            return self._ending
        with quick_reads():
            found: list[FSDPParameter] = []
            for each in self.parameters:
                if each.sharded.requires_grad:
                    found.append(each)
            return found

    @property
    def crosses_replicas(self) -> bool:
        """True if the next backward pass reduces gradients over both axes."""
        return self.reduces_gradients and self.reduces_over_replicas

    @property
    def has_unsharded_gradients(self) -> bool:
        """True if this rank has a gradient that is not reduced over the shard axis."""
        return any(parameter.has_unsharded_gradient for parameter in self.trained)

    def on_forward(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` at each forward of the group with gradients.

        Module hooks are not used for this, because they run only for ``forward``, and a forward may
        start in another method of a module.
        """
        register = self._group._register_post_backward_hook

        # FSDP calls this method once per forward, also for a group of several modules.
        def registered(args: Any, kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return register(args, kwargs)
            if not in_backward():
                callback()
            inputs = register(args, kwargs)
            _keep_missing_gradients(inputs)
            return inputs

        self._group._register_post_backward_hook = registered  # type: ignore

    def on_gather(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` after an all-gather that has created new unsharded tensors."""
        wait = self._group.wait_for_unshard

        def wait_for_unshard() -> None:
            # Leave inference mode: a later all-gather outside of inference mode could not write to
            # inference tensors.
            if torch.is_inference_mode_enabled():
                with torch.inference_mode(False), torch.no_grad():
                    wait()
            else:
                wait()
            if self._is_new and all(each.has_run for each in self.parameters):
                self._is_new = False
                callback()

        self._group.wait_for_unshard = wait_for_unshard  # type: ignore[method-assign]

    def release(self) -> None:
        """Reshard: free the unsharded parameters. Call this outside of a forward."""
        self.module.reshard()

    def share_memory(self, computes_in: torch.dtype) -> None:
        """Make the unsharded parameters aliases of the sharded parameters, on a mesh of one rank.

        Unsharded gradients are then used as sharded gradients without a copy. Parameters whose
        storage dtype differs from ``computes_in`` are still copied.
        """
        self.is_alone = True

        def note() -> None:
            self._is_new = True

        share_memory(self._group, computes_in, note)

    def accumulate_on(self, stream: torch.Stream) -> None:
        """Make FSDP accumulate reduced gradients on ``stream``, after the reduce-scatter.

        The call has no effect on a mesh of one rank, where FSDP runs no reduce-scatter.
        """
        # Stream order and lifetime: FSDP makes ``stream`` wait for the reduce-scatter stream, and
        # calls the all-reduce hook and accumulates on ``stream``. The output of the reduce-scatter
        # was allocated on the reduce-scatter stream. FSDP frees it on the host before ``stream``
        # has read it. The caching allocator could then give this memory to the next reduce-scatter,
        # which does not wait for ``stream``. The hook records the use on ``stream``, so that the
        # allocator waits. For its all-reduce, FSDP keeps a reference instead (pytorch pull request
        # 180900).
        self.module.set_all_reduce_hook(keep_until_done, stream=stream)  # type: ignore[arg-type]

    def around_backward(self, before: Callable[[], None], after: Callable[[], None]) -> None:
        """Call ``before`` and ``after`` around the reduction of the group's gradients.

        ``before`` runs when autograd has computed the gradients, before the reduce-scatter.
        ``after`` runs when all kernels that accumulate the sharded gradients have been issued.
        FSDP's public hook, `set_all_reduce_hook`, runs between the two. FSDP has no public hook
        before the reduce-scatter, where gradients of another dtype and partial gradients must be
        converted (pytorch issues 190626, 194628, 196996).
        """
        group = self._group
        original = group.post_backward

        @torch.compiler.disable
        def post_backward(*unused: Any) -> None:
            self._ending = self.trained
            before()
            # FSDP's `post_backward` would fail for a group that never ran, because it has no
            # unsharded parameters yet.
            if any(each.has_run for each in self.parameters):
                if self.is_alone or not self.reduces_gradients:
                    self._end_without_reduction(original)
                else:
                    self._choose_dtypes()
                    original()
            after()
            self._ending = None

        group.post_backward = post_backward  # type: ignore[method-assign]

    def _choose_dtypes(self) -> None:
        """Make FSDP use the dtypes of `set_dtypes`, which it overwrites in its first forward."""
        if self._reduces_in is not None:
            self._group._orig_dtype, communication_dtype = self._reduces_in
            for parameter in self.trained:
                parameter.allow_any_dtype()
                parameter.narrow_unsharded_gradient(communication_dtype)

    def _end_without_reduction(self, end: Callable[[], None]) -> None:
        """Call ``end``, FSDP's ``post_backward``, while the parameters have no gradients.

        ``end`` then only reshards. There are two cases. If this pass does not reduce, the unsharded
        gradients stay in the accumulation dtype, and autograd adds the next gradients to them. FSDP
        would cast them to the communication dtype (pytorch issue 194628). On a mesh of one rank,
        the unsharded gradients become the sharded gradients. FSDP would copy them twice.
        """
        taken = []
        for each in self.trained:
            taken.append((each, each.take_unsharded_gradient()))
        end()
        if self.is_alone:
            self.release()  # even if a script has called `set_reshard_after_backward(False)`
        for parameter, gradient in taken:
            if not self.reduces_gradients:
                parameter.set_unsharded_gradient(gradient)
            elif gradient is not None:
                parameter.add_gradient(gradient)

    @torch.no_grad()
    def prepare_gradients(self, fill: bool) -> None:
        """Cast all unsharded gradients of the group to the same dtype for FSDP's reduction.

        The dtypes differ if some gradients are accumulated over micro-batches. If ``fill``, missing
        gradients contribute zeros to the reduction.
        """
        self.module.set_reduce_scatter_unused_params(fill and not self.is_alone, recurse=False)
        trained = self.trained
        for parameter in trained:
            parameter.make_dense()
        dtypes = set()
        for each in trained:
            dtypes.add(each.unsharded_gradient_dtype)
        # The dtype of a parameter that had no forward is None.
        dtypes.discard(None)
        # Gradients that are accumulated over micro-batches are already summed over the tensor axis.
        if len(dtypes) > 1 or _sum_parts(trained):
            for parameter in trained:
                gradient = parameter.take_unsharded_gradient()
                parameter.set_unsharded_gradient(
                    parameter.zeros() if gradient is None else gradient
                )

    def set_dtypes(
        self,
        wide: torch.dtype,
        communication_dtype: torch.dtype,
        shard_ranks: int,
        final: torch.dtype | None = None,
    ) -> None:
        """Set the accumulation and communication dtypes of gradients over the shard axis.

        FSDP has no setting for the accumulation dtype: it uses the storage dtype or the
        communication dtype (pytorch issue 194628).

        Args:
            wide: accumulation dtype; a wider storage dtype is used instead.
            communication_dtype: communication dtype over the shard axis.
            shard_ranks: number of ranks of FSDP's mesh of the group.
            final: dtype of reduced gradients; None: the dtype of the parameter.

        Raises:
            ConfigError: trained parameters have different dtypes.
        """
        self.communication_dtype = communication_dtype
        for parameter in self.parameters:
            parameter.final = final
        stored = self._stored_dtype()
        if stored is None:
            return
        wide = torch.promote_types(wide, stored)
        if stored == wide and communication_dtype.itemsize >= 4:
            return  # FSDP uses these dtypes by default
        # With one rank there is no communication, so gradients must not be rounded.
        sends_wide = communication_dtype.itemsize >= 4 or shard_ranks == 1
        self._reduces_in = wide, wide if sends_wide else communication_dtype
        for parameter in self.parameters:
            parameter.wide = wide

    def _stored_dtype(self) -> torch.dtype | None:
        """Return the storage dtype of the trained parameters.

        If no parameter is trained, return the dtype of all floating-point parameters, or None if
        they differ. Raises `ConfigError` if trained parameters have different dtypes.
        """
        trained = self.trained
        # Without trained parameters, use all parameters that may be unfrozen later.
        considered = trained or [p for p in self.parameters if p.sharded.is_floating_point()]
        stored = sorted({parameter.sharded.dtype for parameter in considered}, key=str)
        if len(stored) == 1:
            return stored[0]
        if not trained:
            return None
        raise ConfigError(
            f"{self.called} is gathered by one all-gather, and its trained parameters are "
            f"{' and '.join(map(str, stored))}: put them into separate modules and choose "
            "bucketing=layer, or store them in one dtype"
        )

    def reduce_late(self) -> None:
        """Reduce gradients that earlier backward passes have left, outside of a backward pass."""
        with torch.no_grad():
            self._group.post_backward()

    @torch.no_grad()
    def clear_gradients(self, set_to_none: bool) -> None:
        """Remove the gradients of the sharded parameters, or set them to zero.

        ``nn.Module.zero_grad`` does not find these gradients while the modules hold unsharded
        parameters.
        """
        for parameter in self.trained:
            local = parameter.local_gradient
            if set_to_none:
                parameter.set_gradient(None)
            elif local is not None:
                # Keep the memory, like `zero_grad(set_to_none=False)`.
                local.zero_()

    def discard(self) -> None:
        """Discard gradients that are not reduced over the shard axis."""
        for parameter in self.parameters:
            parameter.take_unsharded_gradient()


def _keep_missing_gradients(inputs: Any) -> None:
    """Make inputs that the group's forward does not use keep the gradient None.

    `fully_shard` passes all inputs through one autograd function, which by default replaces missing
    gradients by zeros. With zeros an optimizer would apply weight decay to unused parameters.
    """
    for leaf in tree_leaves(inputs):
        node = leaf.grad_fn if isinstance(leaf, Tensor) else None
        if node is not None and node.name() == "RegisterPostBackwardFunctionBackward":
            node.set_materialize_grads(False)  # type: ignore[attr-defined]  # one node per forward
            return


@torch.no_grad()
def _sum_parts(parameters: Sequence[FSDPParameter]) -> bool:
    """Sum 16-bit partial gradients over the tensor axis, in fp32 and in one all-reduce.

    FSDP would sum them in the compute dtype (pytorch issue 190626). Returns True if the group has
    such gradients; all its gradients must then be cast to the accumulation dtype.
    """
    narrow: list[FSDPParameter] = []
    parts: list[Tensor] = []
    for parameter in parameters:
        part = parameter.part
        if part is not None and part.dtype.itemsize < 4:
            narrow.append(parameter)
            parts.append(part)
    if narrow:
        flat = torch.cat([part.flatten().float() for part in parts])
        dist.all_reduce(flat, group=narrow[0].tensor_group)
        totals = flat.split(list(map(Tensor.numel, parts)))
        for parameter, part, total in zip(narrow, parts, totals, strict=True):
            parameter.set_sum_of_parts(total.view(part.shape))
    return bool(narrow)


class FSDPParameter:
    """Wrapper of one parameter of an FSDP group.

    The optimizer updates the sharded parameter, and autograd uses the unsharded parameter.
    Gradients that are not reduced over the shard axis yet are in the ``.grad`` of the unsharded
    parameter.
    """

    def __init__(self, parameter: FSDPParam, name: str) -> None:
        self.name = name
        self._parameter = parameter
        # Hooks for `call_hooks`, and hooks to register again in `give_hooks_back`
        self._hooks: dict[int, Any] = {}
        self._taken: dict[int, Any] = {}
        # Accumulation dtype of gradients, if it differs from the parameter's dtype
        self.wide: torch.dtype | None = None
        # Dtype of reduced gradients, if it differs from the parameter's dtype
        self.final: torch.dtype | None = None
        # The sharded parameter for which `allow_any_dtype` was called last
        self._any_dtype: nn.Parameter | None = None
        # Position of this rank's first value in the flattened unsharded parameter
        self.start = first_position(parameter.sharded_param)

    @property
    def sharded(self) -> nn.Parameter:
        """The sharded parameter. Allocation and loading may replace it."""
        return self._parameter.sharded_param

    @property
    def updated(self) -> nn.Parameter:
        """The tensor that the optimizer updates; see `model_structure.updated_as`."""
        sharded = self.sharded
        return getattr(sharded, UPDATED_AS, sharded)

    @property
    def gradient_dtype(self) -> torch.dtype:
        """Accumulation dtype of gradients. The default is the current dtype of the parameter."""
        return self.wide or part_of(self.sharded).dtype

    @property
    def final_dtype(self) -> torch.dtype:
        """Dtype of the reduced gradient that the optimizer gets."""
        stored = part_of(self.sharded).dtype
        if self.final is None:
            return stored
        return self.final.to_complex() if stored.is_complex else self.final

    @property
    def gathered(self) -> nn.Parameter | None:
        """The unsharded parameter; None before the first forward."""
        return getattr(self._parameter, "_unsharded_param", None)

    @property
    def has_run(self) -> bool:
        """True after the first forward."""
        return self.gathered is not None

    @property
    def has_unsharded_gradient(self) -> bool:
        """True if this rank has a gradient that is not reduced over the shard axis."""
        whole = self.gathered
        return whole is not None and whole.grad is not None

    def take_unsharded_gradient(self) -> Tensor | None:
        """Remove and return the gradient that is not reduced over the shard axis."""
        whole = self.gathered
        if whole is None:
            return None
        gradient = whole.grad
        whole.grad = None
        return gradient

    def set_unsharded_gradient(self, gradient: Tensor | None) -> None:
        """Set the gradient that is not reduced over the shard axis, in the accumulation dtype."""
        whole = self.gathered
        if whole is None or gradient is None:
            return
        # `grad_dtype = None` allows autograd to add gradients of the compute dtype to this one.
        whole.grad_dtype = None
        whole.grad = gradient.to(self.gradient_dtype)

    def narrow_unsharded_gradient(self, communication_dtype: torch.dtype) -> None:
        """Cast the unsharded gradient to ``communication_dtype`` if this is the compute dtype.

        FSDP's policy casts in all other cases, but it has no effect if both dtypes are equal.
        """
        whole = self.gathered
        if whole is not None and whole.grad is not None and whole.dtype == communication_dtype:
            whole.grad = whole.grad.to(communication_dtype)

    def zeros(self) -> Tensor | None:
        """Return an unsharded gradient of zeros in the accumulation dtype; None before a
        forward."""
        whole = self.gathered
        if whole is None:
            return None
        return torch.zeros_like(whole, dtype=self.gradient_dtype, requires_grad=False)

    def make_dense(self) -> None:
        """Make a sparse gradient dense, for example of ``nn.Embedding(sparse=True)``.

        Sparse gradients of different ranks have different rows, and FSDP reduces only dense ones.
        """
        whole = self.gathered
        if whole is not None and whole.grad is not None and whole.grad.is_sparse:
            whole.grad = whole.grad.to_dense()

    @property
    def unsharded_gradient_dtype(self) -> torch.dtype | None:
        """Dtype of the unsharded gradient, or of the unsharded parameter if it has no gradient.

        None before the first forward.
        """
        whole = self.gathered
        if whole is None:
            return None
        if whole.grad is None:
            return whole.dtype
        return whole.grad.dtype

    @property
    def part(self) -> Tensor | None:
        """The local tensor of a gradient that is partial over the tensor axis; None for others.

        Replicated weights whose inputs are split over the tensor axis have partial gradients.
        """
        whole = self.gathered
        grad = None if whole is None else whole.grad
        # Without a tensor axis the gradient is a plain tensor.
        if not isinstance(grad, DTensor):
            return None
        for placement in grad.placements:
            if placement.is_partial():
                return part_of(grad)
        return None

    @property
    def tensor_group(self) -> dist.ProcessGroup:
        whole = self.gathered
        assert isinstance(whole, DTensor)
        return whole.device_mesh.get_group()

    def set_sum_of_parts(self, total: Tensor) -> None:
        """Set ``total`` as the gradient that is not reduced over the shard axis."""
        whole = self.gathered
        assert isinstance(whole, DTensor)
        whole.grad = None
        mesh, placements = whole.device_mesh, whole.placements
        self.set_unsharded_gradient(DTensor.from_local(total, mesh, placements, run_check=False))

    @property
    def local_gradient(self) -> Tensor | None:
        """This rank's local shard of the reduced gradient."""
        grad = self._parameter.sharded_param.grad
        return None if grad is None else part_of(grad)

    def set_gradient(self, local: Tensor | None) -> None:
        """Set the reduced gradient from its local shard."""
        sharded = self._parameter.sharded_param
        if local is None:
            sharded.grad = None
        else:
            # Create a new `DTensor`. If only the local tensor of the old one were replaced, its
            # storage offset would be wrong, and compiled functions guard on the offset.
            self.allow_any_dtype()
            # `DTensor.from_local` would take seven times as long.
            sharded.grad = self._parameter.to_sharded_dtensor(local)

    def add_gradient(self, whole: Tensor) -> None:
        """Add ``whole``, which is also this rank's local shard, to the reduced gradient."""
        if isinstance(whole, DTensor):
            assert isinstance(self.gathered, DTensor)
            # Reduce a gradient that is partial over the tensor axis.
            if whole.placements != self.gathered.placements:
                whole = whole.redistribute(placements=self.gathered.placements)
            whole = part_of(whole)
        local = whole.to(self.gradient_dtype)
        total = self.local_gradient
        if total is None:
            self.set_gradient(local.contiguous())
        else:
            total.add_(local)

    def cast_gradient(self, dtype: torch.dtype) -> None:
        """Cast the reduced gradient, if any, to ``dtype``."""
        local = self.local_gradient
        if local is not None and local.dtype != dtype:
            self.set_gradient(local.to(dtype))

    def finish_dtype(self) -> None:
        """Cast the reduced gradient to `final_dtype`."""
        if self._has_other_dtypes:
            self.cast_gradient(self.final_dtype)

    @property
    def _has_other_dtypes(self) -> bool:
        """True if gradients may have another dtype than the parameter."""
        return self.wide is not None or self.final is not None

    def allow_any_dtype(self) -> None:
        """Allow gradients of another dtype than the sharded parameter's."""
        sharded = self._parameter.sharded_param
        if self._has_other_dtypes and sharded is not self._any_dtype:
            sharded.grad_dtype = None
            self._any_dtype = sharded

    @property
    def local_size(self) -> torch.Size:
        return part_of(self.sharded).shape

    # Hooks of `register_post_accumulate_grad_hook`. FSDP would call them before the reduction over
    # the replicate axis, but users expect the mean over all data ranks. Therefore the hooks are
    # removed before FSDP accumulates, and called after the reduction over the replicate axis.

    def take_hooks(self) -> None:
        """Remove the hooks from the sharded parameter and store them."""
        # The handles of users refer to torch's dict of hooks, so the dict must not be replaced.
        registered = self.sharded._post_accumulate_grad_hooks or {}
        self._hooks = self._taken = dict(registered)
        registered.clear()

    def give_hooks_back(self) -> None:
        """Put the hooks of `take_hooks` back on the parameter. `call_hooks` can still call them."""
        if self._taken:
            self.sharded._post_accumulate_grad_hooks.update(self._taken)
        self._taken = {}

    def call_hooks(self) -> None:
        """Call the hooks of `take_hooks` once, with the tensor that the optimizer updates."""
        hooks, self._hooks = self._hooks, {}
        updated = self.updated
        # Like autograd, call no hook for an unused parameter.
        if updated.grad is not None:
            for hook in hooks.values():
                hook(updated)

    def forget_hooks(self) -> None:
        """Put the hooks back, without a later call by `call_hooks`."""
        self.give_hooks_back()
        self._hooks = {}
