"""The trace of one training step on rank 0: FLOPs, memory traffic and collectives in their order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils.flop_counter import (
    flop_registry,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)

from stream_simulator import training_jobs
from stream_simulator.simulator import Simulator, tensors_in
from stream_simulator.sources import OPTIMIZER

if TYPE_CHECKING:
    from torch import Tensor

    from parallel2d.base.config import Job


class Collective(NamedTuple):
    """One collective of the step."""

    kind: str  # all_gather, reduce_scatter or all_reduce
    group: str  # name of the process group
    ranks: int  # of the group
    whole_bytes: int  # the larger side; see `sent_bytes`


class StepTrace:
    """The counts of one step."""

    def __init__(self) -> None:
        self.flops = 0
        self.kernels = 0
        self.collectives: list[Collective] = []
        # Bytes that the optimizer's kernels read and write
        self.update_bytes = 0


_KINDS = {"gather": "all_gather", "reduce_scatter": "reduce_scatter", "allreduce": "all_reduce"}


def _bytes_of(tensors: list[Tensor]) -> int:
    return sum(each.numel() * each.element_size() for each in tensors)


def _flops_of(func: Any, args: Any, kwargs: dict[str, Any], result: object) -> int:
    packet, aten = func._overloadpacket, torch.ops.aten
    # torch does not count the attention kernels of the CPU, which the simulated device runs.
    if packet is aten._scaled_dot_product_flash_attention_for_cpu:
        return int(sdpa_flop_count(*(each.shape for each in args[:3])))
    if packet is aten._scaled_dot_product_flash_attention_for_cpu_backward:
        return int(sdpa_backward_flop_count(*(each.shape for each in args[:4])))
    if packet not in flop_registry:
        return 0
    return int(flop_registry[packet](*args, **kwargs, out_val=result))


def trace(simulator: Simulator, step: int) -> StepTrace:
    """Fill the returned trace while ``step`` runs."""
    import torch.distributed as dist

    found = StepTrace()
    note_operator, note_collective = simulator.operator, simulator.collective

    def operator(func: Any, args: Any, kwargs: dict[str, Any], result: object) -> None:
        issued = len(simulator.sequence)
        note_operator(func, args, kwargs, result)
        if simulator.step != step or len(simulator.sequence) == issued:
            return
        found.kernels += 1
        found.flops += _flops_of(func, args, kwargs, result)
        if simulator.sequence[issued][1] == OPTIMIZER:
            # A tensor that the kernel changes is read and written.
            for index, argument in enumerate(func._schema.arguments):
                given = args[index] if index < len(args) else kwargs.get(argument.name)
                is_changed = argument.alias_info is not None and argument.alias_info.is_write
                # Fused optimizers declare gradients as written; only a gradient scaler changes them.
                is_changed = is_changed and argument.name != "grads"
                found.update_bytes += _bytes_of(tensors_in(given)) * (2 if is_changed else 1)

    def collective(
        name: str, written: list[Tensor], read: list[Tensor], group: str, asynchronous: bool
    ) -> Any:
        if simulator.step == step:
            kind = next((kind for part, kind in _KINDS.items() if part in name), name)
            ranks = dist.distributed_c10d._resolve_process_group(group).size()
            sizes = _bytes_of(written), _bytes_of(read)
            found.collectives.append(Collective(kind, group, ranks, max(sizes)))
        return note_collective(name, written, read, group, asynchronous)

    simulator.operator = operator  # type: ignore[method-assign]
    simulator.collective = collective  # type: ignore[method-assign]
    return found


def train(simulator: Simulator, job: Job, folder: str) -> StepTrace:
    """Run the job, and return the trace of `training_jobs.COUNTED`."""
    found = trace(simulator, training_jobs.COUNTED)
    training_jobs.train(simulator, job, folder)
    return found


def trace_of(layout: training_jobs.Layout) -> StepTrace:
    """Return the trace of rank 0."""
    found: StepTrace = training_jobs.run_jobs(layout, train).first.value
    return found
