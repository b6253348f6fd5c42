"""Groups of parameters that `fully_shard` gathers and reduces together, and the gradients in
them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from parallel2d.base.device import keep_until_done
from parallel2d.base.errors import ConfigError
from parallel2d.parallel.fsdp_internals.one_rank import share_memory
from parallel2d.parallel.fsdp_internals.sharded_model import in_backward, states
from parallel2d.parallel.fsdp_internals.tensors import part_of, quick_reads
from parallel2d.parallel.model_structure import UPDATED_AS, fqn_of
from parallel2d.parallel.weights.geometry import first_position
from parallel2d.parallel.weights.named_tensors import parameters_by_name


def fsdp_groups(model: nn.Module) -> list[FSDPGroup]:
    """Return the groups of ``model`` in the order in which backward ends them."""
    names = {id(module): fqn_of(name) for name, module in model.named_modules()}
    parameter_names = {id(value): name for name, value in parameters_by_name(model).items()}
    found = []
    for state, modules in states(model).items():
        called = " and ".join(names[id(module)] for module in modules)
        for group in state._fsdp_param_groups:
            found.append(FSDPGroup(group, modules, called or "the root module", parameter_names))
    # Backward goes through modules in about the reverse of the order of registration.
    return found[::-1]


class FSDPGroup:
    """One group of parameters that are gathered and reduced together, as the rest of the package
    sees it.

    Args:
        group: torch's object.
        modules: modules that were given to `fully_shard` together.
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
        # The dtype in which its gradients are sent over the shard axis
        self.wire = torch.float32
        # The dtypes in which torch adds gradients and sends them; None: those of its own choice
        self._reduces_in: tuple[torch.dtype, torch.dtype] | None = None
        # With one rank on the shard axis unsharded gradients are the sharded ones.
        self.is_alone = False
        # `trained` while a backward pass ends the group
        self._ending: list[FSDPParameter] | None = None
        # Whether the gathered parameters are tensors that no forward has seen yet
        self._is_new = True
        self.parameters: list[FSDPParameter] = []
        for parameter in group.fsdp_params:
            self.parameters.append(FSDPParameter(parameter, names[id(parameter.sharded_param)]))

    @property
    def module(self) -> FSDPModule:
        """The module on which `fully_shard` has its public methods. Those of modules that were
        given together do the same."""
        module = self.modules[0]
        assert isinstance(module, FSDPModule)
        return module

    @property
    def trained(self) -> list[FSDPParameter]:
        """The parameters that require gradients."""
        if self._ending is not None:
            return self._ending
        with quick_reads():
            return [each for each in self.parameters if each.sharded.requires_grad]

    @property
    def reduces_gradients(self) -> bool:
        """True if this backward moves gradients over the shard axis
        (`set_requires_gradient_sync`)."""
        return self._group.reduce_grads

    @property
    def crosses_replicas(self) -> bool:
        """True if this backward is to be reduced over replicas too (`set_requires_all_reduce`)."""
        return self._group.reduce_grads and self._group.all_reduce_grads

    @property
    def has_whole_gradients(self) -> bool:
        """True if this rank has a gradient that is not reduced over the shard axis."""
        return any(parameter.has_whole_gradient for parameter in self.trained)

    def on_forward(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` at each forward of the group that autograd records, whatever method of
        its modules it runs. Hooks of modules see only calls of ``forward``."""
        register = self._group._register_post_backward_hook

        # torch calls this once when a forward begins, also for a group of several modules.
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
        """Call ``callback`` when gathered parameters are tensors that no forward has seen yet."""
        wait = self._group.wait_for_unshard

        def wait_for_unshard() -> None:
            # Memory that is allocated in inference mode could not be gathered into after it.
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
        """Free gathered parameters outside of a forward: the sharded ones take their places."""
        self.module.reshard()

    def share_memory(self, computes_in: torch.dtype) -> None:
        """Let gathered parameters be the memory of the sharded ones, and whole gradients become the
        sharded ones, because the shard axis has one rank. Parameters that are stored in another
        dtype than ``computes_in`` are copied as before."""
        self.is_alone = True

        def note() -> None:
            self._is_new = True

        share_memory(self._group, computes_in, note)

    def accumulate_on(self, stream: torch.Stream) -> None:
        """Let torch add reduced gradients to the sharded ones on ``stream``, which waits for the
        reduce-scatter before. With one rank on the shard axis nothing is reduced."""
        # The reduce-scatter's output is memory of torch's stream for it, and torch lets go of it on
        # the host while ``stream`` still has to read it. Without the hook the next reduce-scatter
        # could get that memory first. For its own all-reduce torch keeps a reference instead
        # (pytorch pull request 180900).
        self.module.set_all_reduce_hook(keep_until_done, stream=stream)  # type: ignore[arg-type]

    def around_backward(self, before: Callable[[], None], after: Callable[[], None]) -> None:
        """Call ``before`` when autograd has the group's gradients and they are not reduced yet, and
        ``after`` when all kernels that accumulate the sharded ones are issued.

        The hook of `set_all_reduce_hook` comes between the two, and nothing public comes before,
        where gradients of another dtype or of partial sums must be repaired (pytorch issues 190626,
        194628, 196996).
        """
        group = self._group
        original = group.post_backward

        @torch.compiler.disable
        def post_backward(*unused: Any) -> None:
            self._ending = self.trained
            before()
            # A group that never ran has no whole parameters, for which torch asks all the same.
            if any(each.has_run for each in self.parameters):
                if not group.reduce_grads:
                    self._keep_sums(original)
                elif self.is_alone:
                    self._take_whole_gradients()
                else:
                    self._choose_dtypes()
                    original()
            after()
            self._ending = None

        group.post_backward = post_backward  # type: ignore[method-assign]

    def _choose_dtypes(self) -> None:
        """Let torch add and send gradients in the dtypes of `set_dtypes`, which it looks up in the
        first forward."""
        if self._reduces_in is not None:
            self._group._orig_dtype, self._group._reduce_dtype = self._reduces_in
            for parameter in self.trained:
                parameter.allow_any_dtype()

    def _keep_sums(self, end: Callable[[], None]) -> None:
        """Leave the gradients of this pass where autograd adds those of the next one to them, in
        the wide dtype. ``end`` frees the parameters; torch would cast sums to the dtype in which
        they are sent (pytorch issue 194628)."""
        taken = [(each, each.take_whole()) for each in self.trained]
        end()
        for parameter, gradient in taken:
            parameter.set_whole(gradient)

    def _take_whole_gradients(self) -> None:
        """Make the whole gradients the sharded ones, instead of torch, which would copy them
        twice."""
        self._group._training_state = TrainingState.POST_BACKWARD
        taken = [(each, each.take_whole()) for each in self.trained]
        self.module.reshard()
        for parameter, gradient in taken:
            if gradient is not None:
                parameter.add_gradient(gradient)

    @torch.no_grad()
    def prepare_gradients(self, fill: bool) -> None:
        """Give the whole gradients one dtype, in which torch reduces them. They differ where some
        are sums of micro-batches. ``fill``: missing ones contribute zeros to the reduction."""
        self.module.set_reduce_scatter_unused_params(fill and not self.is_alone, recurse=False)
        trained = self.trained
        for parameter in trained:
            parameter.make_dense()
        dtypes = {each.whole_gradient_dtype for each in trained}
        # None: there is no gradient before the first forward.
        dtypes.discard(None)
        # Sums over micro-batches hold the parts of the tensor axis too, in fp32 at least.
        if len(dtypes) > 1 or _sum_parts(trained):
            for parameter in trained:
                gradient = parameter.take_whole()
                parameter.set_whole(parameter.zeros() if gradient is None else gradient)

    def set_dtypes(
        self,
        wide: torch.dtype,
        wire: torch.dtype,
        shard_ranks: int,
        final: torch.dtype | None = None,
    ) -> None:
        """Add gradients in ``wide``, or the dtype in which parameters are stored if that is wider,
        and send them in ``wire`` over the shard axis. Reduced gradients get the dtype ``final``;
        None: that of the parameter.

        torch adds partial sums in the dtype in which parameters are stored, or that of the wire
        (pytorch issue 194628), and has no setting for either. Raises `ConfigError` for trained
        parameters of several dtypes.
        """
        self.wire = wire
        for parameter in self.parameters:
            parameter.final = final
        stored = self._stored_dtype()
        if stored is None:
            return
        wide = torch.promote_types(wide, stored)
        if stored == wide and wire.itemsize >= 4:
            return  # torch adds in that dtype anyway
        # A shard axis of one rank sends nothing, so nothing need be rounded.
        self._reduces_in = wide, wide if wire.itemsize >= 4 or shard_ranks == 1 else wire
        for parameter in self.parameters:
            parameter.wide = wide

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
        """Reduce what earlier backward passes left, outside of a backward pass."""
        with torch.no_grad():
            self._group.post_backward()

    @torch.no_grad()
    def clear_gradients(self, set_to_none: bool) -> None:
        """Drop the gradients of sharded parameters, or set them to zero.

        ``model.zero_grad()`` does not reach them while the gathered parameters are in the modules.
        """
        for parameter in self.trained:
            local = parameter.local_gradient
            if set_to_none:
                parameter.set_gradient(None)
            elif local is not None:
                # As `zero_grad(set_to_none=False)` does: the memory is kept.
                local.zero_()

    def discard(self) -> None:
        """Drop sums that are not reduced over the shard axis."""
        for parameter in self.parameters:
            parameter.take_whole()


def _keep_missing_gradients(inputs: Any) -> None:
    """Let inputs of a group that a forward does not use have no gradient. By default the autograd
    function of `fully_shard`, through which all pass, makes zeros, with which weight decay would
    move parameters that no step has used."""
    for leaf in tree_leaves(inputs):
        node = leaf.grad_fn if isinstance(leaf, Tensor) else None
        if node is not None and node.name() == "RegisterPostBackwardFunctionBackward":
            node.set_materialize_grads(False)  # type: ignore[attr-defined]  # one has all inputs
            return


@torch.no_grad()
def _sum_parts(parameters: Sequence[FSDPParameter]) -> bool:
    """Add the parts of gradients over the tensor axis that have fewer than 32 bits, in fp32 and in
    one all-reduce. True if there were any: the group must then have the dtype of sums.

    torch would add them in the dtype that computes (pytorch issue 190626).
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
        totals = flat.split([part.numel() for part in parts])
        for parameter, part, total in zip(narrow, parts, totals, strict=True):
            parameter.set_sum_of_parts(total.view(part.shape))
    return bool(narrow)


class FSDPParameter:
    """One parameter of a group: the sharded one that the optimizer has, and the whole one that
    autograd sees. Sums of several backward passes that are not reduced over the shard axis stay in
    the ``.grad`` of the whole one."""

    def __init__(self, parameter: FSDPParam, name: str) -> None:
        self.name = name
        self._parameter = parameter
        # The hooks to call, and those of them that are not registered meanwhile
        self._hooks: dict[int, Any] = {}
        self._taken: dict[int, Any] = {}
        # The dtype in which gradients are added, if it is not the parameter's
        self.wide: torch.dtype | None = None
        # The dtype of reduced gradients, if it is not the parameter's
        self.final: torch.dtype | None = None
        # The sharded parameter whose gradient may have any dtype
        self._any_dtype: nn.Parameter | None = None
        # The position of this rank's first value in the whole parameter, flattened
        self.start = first_position(parameter.sharded_param)

    @property
    def sharded(self) -> nn.Parameter:
        """Looked up each time: allocation and loading replace it."""
        return self._parameter.sharded_param

    @property
    def updated(self) -> nn.Parameter:
        """What the optimizer updates; see `model_structure.updated_as`."""
        sharded = self.sharded
        return getattr(sharded, UPDATED_AS, sharded)

    @property
    def gradient_dtype(self) -> torch.dtype:
        """In which its gradients are added. The model may have been cast since it was sharded."""
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
        """True if there was a forward."""
        return self.gathered is not None

    @property
    def has_whole_gradient(self) -> bool:
        """True if this rank has a gradient of it that is not reduced over the shard axis."""
        whole = self.gathered
        return whole is not None and whole.grad is not None

    def take_whole(self) -> Tensor | None:
        """Take out the gradient that is not reduced over the shard axis."""
        whole = self.gathered
        if whole is None:
            return None
        gradient = whole.grad
        whole.grad = None
        return gradient

    def set_whole(self, gradient: Tensor | None) -> None:
        """Set the gradient that is not reduced over the shard axis, in the wide dtype."""
        whole = self.gathered
        if whole is None or gradient is None:
            return
        # Autograd adds gradients in the dtype that computes to it.
        whole.grad_dtype = None
        whole.grad = gradient.to(self.gradient_dtype)

    def zeros(self) -> Tensor | None:
        """A gradient of zeros in the wide dtype, not reduced over the shard axis."""
        whole = self.gathered
        if whole is None:
            return None
        return torch.zeros_like(whole, dtype=self.gradient_dtype, requires_grad=False)

    def make_dense(self) -> None:
        """Makes a sparse gradient, such as that of ``nn.Embedding(sparse=True)``, a dense one:
        ranks have different rows, and torch reduces only dense ones."""
        whole = self.gathered
        if whole is not None and whole.grad is not None and whole.grad.is_sparse:
            whole.grad = whole.grad.to_dense()

    @property
    def whole_gradient_dtype(self) -> torch.dtype | None:
        """The dtype of the gradient that is not reduced over the shard axis, or of zeros in its
        place; None before the first forward."""
        whole = self.gathered
        if whole is None:
            return None
        if whole.grad is None:
            return whole.dtype
        return whole.grad.dtype

    @property
    def part(self) -> Tensor | None:
        """The gradient of a weight that stayed whole while its inputs were split over the tensor
        axis: a part of a sum, in the dtype that computes. None for others."""
        whole = self.gathered
        grad = None if whole is None else whole.grad
        # A plain tensor where the parameter is not split or replicated over a tensor axis.
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
        """Make ``total`` the gradient that is not reduced over the shard axis."""
        whole = self.gathered
        assert isinstance(whole, DTensor)
        whole.grad = None
        mesh, placements = whole.device_mesh, whole.placements
        self.set_whole(DTensor.from_local(total, mesh, placements, run_check=False))

    @property
    def local_gradient(self) -> Tensor | None:
        """This rank's part of the reduced gradient."""
        grad = self._parameter.sharded_param.grad
        return None if grad is None else part_of(grad)

    def set_gradient(self, local: Tensor | None) -> None:
        """Set the reduced gradient from this rank's part."""
        sharded = self._parameter.sharded_param
        if local is None:
            sharded.grad = None
        else:
            # A new `DTensor`, because one whose local tensor is exchanged has the storage offset of
            # the earlier one, which compiled functions compare.
            self.allow_any_dtype()
            # `DTensor.from_local` takes seven times as long, longer than to copy a small gradient.
            sharded.grad = self._parameter.to_sharded_dtensor(local)

    def add_gradient(self, whole: Tensor) -> None:
        """Add ``whole``, which is this rank's part too, to the reduced gradient."""
        if isinstance(whole, DTensor):
            assert isinstance(self.gathered, DTensor)
            # Parts of a sum over the tensor axis are added here.
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
        """Cast the reduced gradient, if there is one, to ``dtype``."""
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
        """Let gradients have another dtype than the sharded parameter."""
        sharded = self._parameter.sharded_param
        if self._has_other_dtypes and sharded is not self._any_dtype:
            sharded.grad_dtype = None
            self._any_dtype = sharded

    @property
    def local_size(self) -> torch.Size:
        return part_of(self.sharded).shape

    # Hooks of `register_post_accumulate_grad_hook`: torch would call them after the reduction over
    # the shard axis, and they are to see the mean over all data ranks.

    def take_hooks(self) -> None:
        """Remove the hooks and keep them."""
        # A dict of torch's, or None. The handles that users have refer to it, so it is emptied and
        # filled again, never replaced.
        registered = self.sharded._post_accumulate_grad_hooks or {}
        self._hooks = self._taken = dict(registered)
        registered.clear()

    def give_hooks_back(self) -> None:
        """Register again what `take_hooks` has removed; `call_hooks` can still call them."""
        if self._taken:
            self.sharded._post_accumulate_grad_hooks.update(self._taken)
        self._taken = {}

    def call_hooks(self) -> None:
        """Call the hooks that were taken with the parameter that has the gradient, once."""
        hooks, self._hooks = self._hooks, {}
        updated = self.updated
        # Autograd calls none for a parameter that was not used.
        if updated.grad is not None:
            for hook in hooks.values():
                hook(updated)

    def forget_hooks(self) -> None:
        """`call_hooks` calls none any more."""
        self.give_hooks_back()
        self._hooks = {}
