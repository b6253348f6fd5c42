"""Memory of activations over a step, as it would be without sharding: `profile_activations`.

A copy of the model that is split over the tensor axis alone runs forward and backward of one
micro-batch on tensors without storage. What it has in memory beside its parameters is noted
wherever sharding would gather or reduce a group: `MemoryEvent`. `parallel2d.cost.predicted_peak`
adds what sharding allocates there, for any sizes of the other axes.

Of equal blocks four are run; see [Note: the blocks between]. Gradients of a group's parameters are
dropped when the group has all of them, since sharding would have reduced them.

[Note: the blocks between] Of a run of n equal blocks the first two, a middle one and the last are
run. If the second and the third keep as much memory, all between keep as much, and the events of
the second stand for theirs: with what is kept by those before it. Memory at the same moment of one
block after the other grows or shrinks evenly, so the peak is in one of the first or the last ones.
Where the blocks differ, all of them are run.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from parallel2d.config import ParallelConfig
from parallel2d.cost.equal_blocks import EqualBlocks, find_equal_blocks, without_blocks
from parallel2d.cost.model_shapes import ModelShapes, collect_shapes
from parallel2d.cost.tensor_twin import on_fake_tensors, tensor_twin
from parallel2d.errors import ConfigError
from parallel2d.loss import loss_chunks
from parallel2d.model_structure import find_blocks
from parallel2d.parallelize.bucketing import bucket_modules
from parallel2d.parallelize.precision import Precision

_RUN = 4  # of each run of equal blocks


class MemoryEvent(NamedTuple):
    """A moment of a step.

    ``kind``: ``gather`` or ``free`` (before and after the forward of a group), ``gather_again``
    (its output has its gradient), ``reduce`` (its parameters have theirs), ``forward`` or
    ``backward`` (the same of a block); ``gather_many`` and ``reduce_many``: of ``times`` blocks
    that were not run. ``groups``: numbers in `ActivationProfile.shapes`. Bytes, of activations and
    whole gradients: ``most`` since the event before, ``now`` at this one.
    """

    kind: str
    groups: tuple[int, ...]
    most: int
    now: int
    block: tuple[int, int] | None = None  # the number of its stack, and of the block in it
    times: int = 1


@dataclass(frozen=True)
class ActivationProfile:
    """``shapes``: of the groups of the copy that was run, the root last; ``events`` end with the
    step."""

    shapes: ModelShapes
    events: tuple[MemoryEvent, ...]


Example = Callable[[str], tuple[Tensor, Tensor]]
StepLoss = Callable[[Tensor, Tensor], Tensor]  # of inputs and targets
# (copy of the model, inputs, targets) -> its loss
LossOf = Callable[[nn.Module, Tensor, Tensor], StepLoss]
# The tensor-parallel plan of a copy of the model.
PlanOf = Callable[[nn.Module], Mapping[str, object] | None]


def profile_activations(
    model: nn.Module,
    loss_of: LossOf,
    example: Example,
    config: ParallelConfig,
    *,
    mesh: DeviceMesh | None = None,
    plan_of: PlanOf = lambda model: None,
) -> ActivationProfile | str:
    """``model``: before `parallelize`, on meta; it stays as it is. ``loss_of``: gets a copy of it,
    which it may run on the given micro-batch. ``example(device)``: inputs and
    targets of one micro-batch. ``mesh``, ``plan_of``: with a tensor axis; a mesh of a fake process
    group will do.

    In words why there is none, for a model that tensors without storage cannot run.
    """
    stacks = find_equal_blocks(model)
    # Groups of a certain size have others in a shorter model.
    if stacks and config.bucketing.name != "size":
        kept = [[0, 1, stack.count // 2, stack.count - 1] for stack in stacks]
        part = without_blocks(model, stacks, kept)
        found = _run(part, loss_of, example, config, mesh, plan_of, stacks)
        if not isinstance(found, str):
            extended = _with_all_blocks(found, stacks)
            if extended is not None:
                return extended
    return _run(model, loss_of, example, config, mesh, plan_of)


def _run(
    model: nn.Module,
    loss_of: LossOf,
    example: Example,
    config: ParallelConfig,
    mesh: DeviceMesh | None,
    plan_of: PlanOf,
    stacks: Sequence[EqualBlocks] = (),
) -> ActivationProfile | str:
    """Of ``model`` as it is. ``stacks``: those of which it has four blocks."""
    plan = plan_of(model)
    shapes = collect_shapes(model, config, mesh=mesh, plan=plan)
    twin = tensor_twin(model, mesh, config, plan)
    groups = _groups_of(twin, config)
    # Attention has a kernel that keeps no scores on this device, and none on meta.
    try:
        with on_fake_tensors(twin, "cpu"):
            inputs, targets = example("cpu")
            loss = loss_of(twin, inputs, targets)
            log = _EventLog(twin, groups, stacks)
            with log, loss_chunks(first_alone=True):
                value = loss(inputs, targets)
                log.is_backward = True
                value.backward()
                log.end()
    except ConfigError:
        raise
    # A model may look at values, which such tensors do not have.
    except Exception as error:
        reason = str(error).split("\n")[0]
        return (
            f"{type(model).__name__} does not run on tensors without storage "
            f"({type(error).__name__}: {reason})"
        )
    return ActivationProfile(shapes, tuple(log.events))


def _groups_of(twin: nn.Module, config: ParallelConfig) -> list[list[nn.Module]]:
    """The modules of each group, the root last."""
    precision = Precision.of(config.precision, twin)
    blocks = find_blocks(twin, config.bucketing.blocks, config.bucketing.policy)
    return [*bucket_modules(twin, blocks, config.bucketing, precision.fp32_modules), [twin]]


class _EventLog(TorchDispatchMode):
    """Counts bytes of storages, and notes them at the borders of groups and blocks."""

    def __init__(
        self,
        twin: nn.Module,
        groups: Sequence[Sequence[nn.Module]],
        stacks: Sequence[EqualBlocks],
    ) -> None:
        super().__init__()
        self.events: list[MemoryEvent] = []
        self.is_backward = False
        self._now = self._most = 0
        self._sizes: dict[int, tuple[Any, int]] = {}
        for tensor in [*twin.parameters(), *twin.buffers()]:
            self._see(tensor, counts=False)
        self._trained: list[list[nn.Parameter]] = []
        self._missing: list[int] = []
        self._without_input_gradient: set[int] = set()
        self._watch_blocks(twin, stacks)
        self._watch_groups(groups)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        output = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor):
                self._see(leaf)
        return output

    def end(self) -> None:
        """Backward has ended: the root is reduced, then groups whose inputs have no gradient, or
        some of whose parameters had none."""
        root = len(self._trained) - 1
        self._reduce(root)
        for group, missing in enumerate(self._missing[:root]):
            if missing or group in self._without_input_gradient:
                self._reduce(group)
        self._note("end", ())

    def _watch_blocks(self, twin: nn.Module, stacks: Sequence[EqualBlocks]) -> None:
        for number, stack in enumerate(stacks):
            container = list(twin.get_submodule(stack.name).children())
            for place, block in enumerate(container[stack.first : stack.first + _RUN]):
                self._around(block, "forward", "", "backward", (), (number, place))

    def _watch_groups(self, groups: Sequence[Sequence[nn.Module]]) -> None:
        taken: set[int] = set()
        for number, modules in enumerate(groups):
            trained = []
            for module in modules:
                for parameter in module.parameters():
                    if id(parameter) not in taken and parameter.requires_grad:
                        trained.append(parameter)
                    taken.add(id(parameter))
            self._trained.append(trained)
            self._missing.append(len(trained))
            for parameter in trained:
                parameter.register_post_accumulate_grad_hook(self._counts_down(number))
            for module in modules:
                self._around(module, "gather", "free", "gather_again", (number,))

    def _around(
        self,
        module: nn.Module,
        before: str,
        after: str,
        back: str,
        groups: tuple[int, ...],
        block: tuple[int, int] | None = None,
    ) -> None:
        """Notes events of these kinds; an empty one is left out."""

        def enter(_module: nn.Module, *given: Any) -> None:
            if not self.is_backward:
                self._note(before, groups, block)
                if not any(tensor.requires_grad for tensor in _tensors_in(given)):
                    self._without_input_gradient.update(groups)
            # What is computed again needs the parameters of its groups.
            elif groups:
                self._note(back, groups)

        def leave(_module: nn.Module, _given: Any, output: Any) -> None:
            if self.is_backward:
                return
            if after:
                self._note(after, groups, block)
            trained = [tensor for tensor in _tensors_in(output) if tensor.requires_grad]
            if trained:
                trained[0].register_hook(lambda _: self._note(back, groups, block))

        module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True)
        module.register_forward_hook(leave)

    def _counts_down(self, group: int) -> Callable[[Tensor], None]:
        def count(_parameter: Tensor) -> None:
            self._missing[group] -= 1
            waits = group + 1 == len(self._trained) or group in self._without_input_gradient
            if self._missing[group] == 0 and not waits:
                self._reduce(group)

        return count

    def _reduce(self, group: int) -> None:
        self._missing[group] = 0
        self._note("reduce", (group,))
        for parameter in self._trained[group]:
            parameter.grad = None

    def _note(
        self, kind: str, groups: tuple[int, ...], block: tuple[int, int] | None = None
    ) -> None:
        self.events.append(MemoryEvent(kind, groups, self._most, self._now, block))
        self._most = self._now

    def _see(self, tensor: Tensor, *, counts: bool = True) -> None:
        local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        # A result that is waited for where it is used has no memory beside what is inside.
        if isinstance(local, AsyncCollectiveTensor):
            local = local.elem
        storage = local.untyped_storage()
        key = id(storage)
        if key in self._sizes and self._sizes[key][0]() is storage:
            return
        size = storage.nbytes() if counts else 0
        reference = weakref.ref(storage, lambda _: self._forget(key))
        self._sizes[key] = (reference, size)
        self._now += size
        self._most = max(self._most, self._now)

    def _forget(self, key: int) -> None:
        _, size = self._sizes.pop(key)
        self._now -= size


def _tensors_in(value: Any) -> list[Tensor]:
    """Those of dataclasses too, as `fully_shard` finds them: the loss in chunks is in one."""
    found = []
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor):
            found.append(leaf)
        elif dataclasses.is_dataclass(leaf):
            found += _tensors_in(list(vars(leaf).values()))
    return found


# Blocks that were not run


def _with_all_blocks(
    profile: ActivationProfile, stacks: Sequence[EqualBlocks]
) -> ActivationProfile | None:
    """None where the blocks of a stack differ."""
    events = list(profile.events)
    for number, stack in enumerate(stacks):
        extended = _with_stack(events, number, stack.count - _RUN)
        if extended is None:
            return None
        events = extended
    return ActivationProfile(profile.shapes, tuple(events))


def _with_stack(events: list[MemoryEvent], number: int, skipped: int) -> list[MemoryEvent] | None:
    """``events`` with ``skipped`` more blocks of the stack after its second one; see
    [Note: the blocks between]."""
    forward = _places(events, "forward", number)
    backward = _places(events, "backward", number)
    if forward is None or backward is None or backward != sorted(backward, reverse=True):
        return None
    second = events[forward[1] : forward[2]]
    third = events[forward[2] : forward[3]]
    second_back = events[backward[1] : backward[0]]
    third_back = events[backward[2] : backward[1]]
    kept = events[forward[2]].now - events[forward[1]].now
    if not _is_shifted(second, third, kept) or not _is_shifted(second_back, third_back, kept):
        return None
    if skipped == 0:
        return events
    more = kept * skipped
    gathered = _groups_in(second, "gather")
    reduced = _groups_in(second_back, "reduce")
    first_of_back = events[backward[1]]
    return [
        *events[: forward[2]],
        MemoryEvent("gather_many", gathered, 0, 0, times=skipped - 1),
        *_shifted(second, more),
        *_shifted(events[forward[2] : backward[1]], more),
        *_shifted(second_back, more),
        MemoryEvent("reduce_many", reduced, 0, 0, times=skipped - 1),
        first_of_back._replace(most=first_of_back.now),
        *events[backward[1] + 1 :],
    ]


def _places(events: Sequence[MemoryEvent], kind: str, number: int) -> list[int] | None:
    """Where the four blocks of the stack have their events of this kind."""
    found: dict[int, int] = {}
    for place, event in enumerate(events):
        if event.kind == kind and event.block is not None and event.block[0] == number:
            # A block whose output is used twice gets its gradient twice.
            found.setdefault(event.block[1], place)
    if sorted(found) != list(range(_RUN)):
        return None
    return [found[block] for block in range(_RUN)]


def _is_shifted(some: Sequence[MemoryEvent], others: Sequence[MemoryEvent], more: int) -> bool:
    """Whether the others are the same with ``more`` bytes; the first one's ``most`` is of what
    comes before it."""
    if [event.kind for event in some] != [event.kind for event in others]:
        return False
    if any(other.now != event.now + more for event, other in zip(some, others, strict=True)):
        return False
    return all(
        other.most == event.most + more for event, other in zip(some[1:], others[1:], strict=True)
    )


def _shifted(events: Iterable[MemoryEvent], more: int) -> list[MemoryEvent]:
    return [event._replace(most=event.most + more, now=event.now + more) for event in events]


def _groups_in(events: Iterable[MemoryEvent], kind: str) -> tuple[int, ...]:
    found: list[int] = []
    for event in events:
        if event.kind == kind:
            found += event.groups
    return tuple(dict.fromkeys(found))
