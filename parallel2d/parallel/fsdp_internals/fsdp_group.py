"""Groups of parameters that `fully_shard` all-gathers and reduce-scatters together, with their
gradients.
"""

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
    """Return the groups of ``model`` in the order of their ends in backward."""
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
    """Make calls of `set_requires_gradient_sync` and `set_requires_all_reduce` set the attributes
    of ``groups`` too. FSDP has no getters for these settings."""
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
            # Like FSDP, the first method sets both.
            for method, attributes in (
                ("set_requires_gradient_sync", ("reduces_gradients", "reduces_over_replicas")),
                ("set_requires_all_reduce", ("reduces_over_replicas",)),
            ):
                vars(module)[method] = noting(module, method, attributes)


class FSDPGroup:
    """Interface of the package to one FSDP parameter group.

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
        # Communication dtype of its gradients over the shard axis
        self.communication_dtype = torch.float32
        # Dtypes of FSDP's gradient sums and reduce-scatter; None: FSDP's defaults
        self._reduces_in: tuple[torch.dtype, torch.dtype] | None = None
        # True with one rank on the shard axis: unsharded gradients are used as sharded gradients
        self.is_alone = False
        # The shard axis, if every one of its ranks keeps all parameters of the group, in a mesh of
        # one rank; only some ranks may run the group
        self.replicated_over: dist.ProcessGroup | None = None
        # True if the next backward pass reduces gradients over the shard axis, and over replicas
        self.reduces_gradients = self.reduces_over_replicas = True
        # The value of `trained` while a backward pass ends the group
        self._ending: list[FSDPParameter] | None = None
        # True while the unsharded parameters are tensors that no forward has used
        self._is_new = True
        self.parameters: list[FSDPParameter] = []
        for parameter in group.fsdp_params:
            self.parameters.append(FSDPParameter(parameter, names[id(parameter.sharded_param)]))

    @property
    def module(self) -> FSDPModule:
        """The module with FSDP's public methods for this group.

        The methods of all modules of the group have the same effect.
        """
        module = self.modules[0]
        assert isinstance(module, FSDPModule)
        return module

    @property
    def trained(self) -> list[FSDPParameter]:
        """The parameters that require gradients."""
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
        """Call ``callback`` at each forward of the group that autograd records.

        The forward may start in any method of the modules. Module hooks would run only for
        ``forward``.
        """
        register = self._group._register_post_backward_hook

        # FSDP calls this once at the start of a forward, also for a group of several modules.
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
        """Call ``callback`` when the unsharded parameters are tensors that no forward has used."""
        wait = self._group.wait_for_unshard

        def wait_for_unshard() -> None:
            # Storage that is allocated in inference mode would be an inference tensor, and a later
            # all-gather outside of inference mode could not write to it.
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
        """Free unsharded parameters outside of a forward, and restore the sharded parameters."""
        self.module.reshard()

    def share_memory(self, computes_in: torch.dtype) -> None:
        """Make unsharded parameters aliases of the sharded parameters, for a shard axis of one
        rank.

        Unsharded gradients are then used as sharded gradients without a copy. Parameters with a
        storage dtype other than ``computes_in`` are still copied.
        """
        self.is_alone = True

        def note() -> None:
            self._is_new = True

        share_memory(self._group, computes_in, note)

    def accumulate_on(self, stream: torch.Stream) -> None:
        """Make FSDP accumulate reduced gradients on ``stream``. ``stream`` waits for the
        reduce-scatter before. With one rank on the shard axis FSDP runs no reduce-scatter."""
        # Stream order and lifetime. FSDP runs the all-reduce hook on ``stream`` after the
        # reduce-scatter stream, and accumulates there. The output of the reduce-scatter was
        # allocated on the reduce-scatter stream, and FSDP drops its reference on the host while
        # ``stream`` still has to read it. The caching allocator could then give this memory to the
        # next reduce-scatter, which does not wait for ``stream``. The hook records the use on
        # ``stream``, so that the allocator waits for ``stream``. For its own all-reduce FSDP keeps
        # a reference instead (pytorch pull request 180900).
        self.module.set_all_reduce_hook(keep_until_done, stream=stream)  # type: ignore[arg-type]

    def around_backward(self, before: Callable[[], None], after: Callable[[], None]) -> None:
        """Call ``before`` and ``after`` around the reduction of the group's gradients.

        ``before`` runs when autograd has computed the gradients and FSDP has not reduced them.
        ``after`` runs when all kernels that accumulate the sharded gradients are issued. FSDP's
        public hook, `set_all_reduce_hook`, runs between the two. Nothing public runs before the
        reduce-scatter, and gradients of another dtype or of partial sums must be repaired there
        (pytorch issues 190626, 194628, 196996).
        """
        group = self._group
        original = group.post_backward

        @torch.compiler.disable
        def post_backward(*unused: Any) -> None:
            self._ending = self.trained
            before()
            # `post_backward` of FSDP would fail on a group that never ran: it has no unsharded
            # parameters.
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
        """Make FSDP use the dtypes of `set_dtypes`; FSDP sets its own in the first forward."""
        if self._reduces_in is not None:
            self._group._orig_dtype, communication_dtype = self._reduces_in
            for parameter in self.trained:
                parameter.allow_any_dtype()
                parameter.narrow_unsharded_gradient(communication_dtype)

    def _end_without_reduction(self, end: Callable[[], None]) -> None:
        """Call ``end``, FSDP's ``post_backward``, which frees the parameters, without gradients.

        Without a reduction in this pass, the unsharded gradients are kept in the wide dtype, and
        autograd adds the next gradients to these sums. FSDP would cast them to the communication
        dtype (pytorch issue 194628). With one rank on the shard axis, the unsharded gradients are
        the sharded ones, and FSDP would copy them twice.
        """
        taken = []
        for each in self.trained:
            taken.append((each, each.take_unsharded_gradient()))
        end()
        if self.is_alone:
            self.release()  # also after `set_reshard_after_backward(False)` of a script
        for parameter, gradient in taken:
            if not self.reduces_gradients:
                parameter.set_unsharded_gradient(gradient)
            elif gradient is not None:
                parameter.add_gradient(gradient)

    @torch.no_grad()
    def prepare_gradients(self, fill: bool) -> None:
        """Give all unsharded gradients of the group one dtype for FSDP's reduction.

        The dtypes differ if some gradients are sums of micro-batches. ``fill``: missing gradients
        contribute zeros to the reduction.
        """
        self.module.set_reduce_scatter_unused_params(fill and not self.is_alone, recurse=False)
        trained = self.trained
        for parameter in trained:
            parameter.make_dense()
        dtypes = set()
        for each in trained:
            dtypes.add(each.unsharded_gradient_dtype)
        # None: the parameter has had no forward.
        dtypes.discard(None)
        # Sums over micro-batches already contain the sum over the tensor axis, in fp32 at least.
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
        """Sum gradients in ``wide`` and send them in ``communication_dtype`` over the shard axis.

        Parameters with a wider storage dtype sum in that dtype. FSDP sums partial gradients in the
        storage dtype or the communication dtype (pytorch issue 194628), without a setting.

        Args:
            wide: accumulation dtype.
            communication_dtype: communication dtype over the shard axis.
            shard_ranks: ranks of the shard axis.
            final: dtype of reduced gradients; None: the dtype of the parameter.

        Raises:
            ConfigError: trained parameters of several dtypes.
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
        # A shard axis of one rank sends nothing, so its gradients are not rounded.
        sends_wide = communication_dtype.itemsize >= 4 or shard_ranks == 1
        self._reduces_in = wide, wide if sends_wide else communication_dtype
        for parameter in self.parameters:
            parameter.wide = wide

    def _stored_dtype(self) -> torch.dtype | None:
        """Return the storage dtype of the trained parameters; None if it is not determined.

        Without trained parameters, the common dtype of all floating-point parameters. Raises
        `ConfigError` for trained parameters of several dtypes.
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
        """Reduce the sums of earlier backward passes, outside of a backward pass."""
        with torch.no_grad():
            self._group.post_backward()

    @torch.no_grad()
    def clear_gradients(self, set_to_none: bool) -> None:
        """Drop the gradients of the sharded parameters, or set them to zero.

        ``model.zero_grad()`` does not reach them while unsharded parameters are in the modules.
        """
        for parameter in self.trained:
            local = parameter.local_gradient
            if set_to_none:
                parameter.set_gradient(None)
            elif local is not None:
                # Keep the memory, like `zero_grad(set_to_none=False)`.
                local.zero_()

    def discard(self) -> None:
        """Drop sums that are not reduced over the shard axis."""
        for parameter in self.parameters:
            parameter.take_unsharded_gradient()


def _keep_missing_gradients(inputs: Any) -> None:
    """Keep the gradient None for inputs of a group that its forward does not use.

    All inputs pass through one autograd function of `fully_shard`, which materializes missing
    gradients as zeros by default. With zeros, weight decay would change parameters that no step has
    used.
    """
    for leaf in tree_leaves(inputs):
        node = leaf.grad_fn if isinstance(leaf, Tensor) else None
        if node is not None and node.name() == "RegisterPostBackwardFunctionBackward":
            node.set_materialize_grads(False)  # type: ignore[attr-defined]  # one node per forward
            return


@torch.no_grad()
def _sum_parts(parameters: Sequence[FSDPParameter]) -> bool:
    """Sum narrow partial gradients over the tensor axis, in fp32 and in one all-reduce.

    FSDP would sum these gradients in the compute dtype (pytorch issue 190626). Returns True if any
    gradient has fewer than 32 bits; the group must then use the accumulation dtype.
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
    """One parameter of a group.

    The optimizer updates the sharded parameter, and autograd uses the unsharded parameter. Sums of
    several backward passes that are not reduced over the shard axis stay in the ``.grad`` of the
    unsharded parameter.
    """

    def __init__(self, parameter: FSDPParam, name: str) -> None:
        self.name = name
        self._parameter = parameter
        # Hooks to call, and hooks that are unregistered at the moment
        self._hooks: dict[int, Any] = {}
        self._taken: dict[int, Any] = {}
        # Accumulation dtype of gradients, if it differs from the parameter's dtype
        self.wide: torch.dtype | None = None
        # The dtype of reduced gradients, if it is not the parameter's
        self.final: torch.dtype | None = None
        # The sharded parameter that accepts gradients of any dtype
        self._any_dtype: nn.Parameter | None = None
        # Position of this rank's first value in the flattened unsharded parameter
        self.start = first_position(parameter.sharded_param)

    @property
    def sharded(self) -> nn.Parameter:
        """The sharded parameter; looked up each time, because allocation and loading replace it."""
        return self._parameter.sharded_param

    @property
    def updated(self) -> nn.Parameter:
        """The tensor that the optimizer updates; see `model_structure.updated_as`."""
        sharded = self.sharded
        return getattr(sharded, UPDATED_AS, sharded)

    @property
    def gradient_dtype(self) -> torch.dtype:
        """Accumulation dtype of gradients; the model may have been cast since sharding."""
        return self.wide or part_of(self.sharded).dtype

    @property
    def final_dtype(self) -> torch.dtype:
        """The dtype of its reduced gradient, which the optimizer gets."""
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
        """Set the gradient that is not reduced over the shard axis, in the wide dtype."""
        whole = self.gathered
        if whole is None or gradient is None:
            return
        # Autograd adds later gradients, in the compute dtype, to this sum.
        whole.grad_dtype = None
        whole.grad = gradient.to(self.gradient_dtype)

    def narrow_unsharded_gradient(self, communication_dtype: torch.dtype) -> None:
        """Cast a wide sum to ``communication_dtype``, where this is the compute dtype.

        In all other cases FSDP casts by its policy, which it ignores for two equal dtypes.
        """
        whole = self.gathered
        if whole is not None and whole.grad is not None and whole.dtype == communication_dtype:
            whole.grad = whole.grad.to(communication_dtype)

    def zeros(self) -> Tensor | None:
        """Return an unreduced gradient of zeros in the wide dtype; None before a forward."""
        whole = self.gathered
        if whole is None:
            return None
        return torch.zeros_like(whole, dtype=self.gradient_dtype, requires_grad=False)

    def make_dense(self) -> None:
        """Make a sparse gradient dense, for example of ``nn.Embedding(sparse=True)``.

        Ranks have different rows, and FSDP reduces only dense gradients.
        """
        whole = self.gathered
        if whole is not None and whole.grad is not None and whole.grad.is_sparse:
            whole.grad = whole.grad.to_dense()

    @property
    def unsharded_gradient_dtype(self) -> torch.dtype | None:
        """Dtype of the gradient that is not reduced over the shard axis, or of zeros in its place.

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
        """The partial gradient of a replicated weight with split inputs on the tensor axis.

        It is a part of a sum, in the compute dtype. None for other parameters.
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
            # A new `DTensor`: an existing `DTensor` with an exchanged local tensor would keep its
            # storage offset, and compiled functions guard on the offset.
            self.allow_any_dtype()
            # `DTensor.from_local` takes seven times as long, longer than a small copy.
            sharded.grad = self._parameter.to_sharded_dtensor(local)

    def add_gradient(self, whole: Tensor) -> None:
        """Add ``whole``, which is also this rank's local shard, to the reduced gradient."""
        if isinstance(whole, DTensor):
            assert isinstance(self.gathered, DTensor)
            # A partial sum over the tensor axis is reduced here.
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

    # Hooks of `register_post_accumulate_grad_hook`. FSDP would call them after the reduction over
    # the shard axis only, and users expect the mean over all data ranks. The hooks are therefore
    # removed before FSDP accumulates, and called after the reduction over the replicate axis.

    def take_hooks(self) -> None:
        """Unregister the hooks and keep them."""
        # torch's dict, or None. Handles of users refer to this dict, so it is emptied and refilled,
        # never replaced.
        registered = self.sharded._post_accumulate_grad_hooks or {}
        self._hooks = self._taken = dict(registered)
        registered.clear()

    def give_hooks_back(self) -> None:
        """Register the hooks of `take_hooks` again; `call_hooks` can still call them."""
        if self._taken:
            self.sharded._post_accumulate_grad_hooks.update(self._taken)
        self._taken = {}

    def call_hooks(self) -> None:
        """Call the removed hooks once, with the parameter that has the gradient."""
        hooks, self._hooks = self._hooks, {}
        updated = self.updated
        # Like autograd, call no hook for an unused parameter.
        if updated.grad is not None:
            for hook in hooks.values():
                hook(updated)

    def forget_hooks(self) -> None:
        """Register the hooks again, and make `call_hooks` call none."""
        self.give_hooks_back()
        self._hooks = {}
