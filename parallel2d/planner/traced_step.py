"""Peak memory of one step of the really parallelized model, on tensors without storage:
`trace_step`.

The model is laid out by the functions that training uses, on a process group without processes, and
its forward and backward run on fake tensors under torch's memory tracker. So what is counted is
what this code allocates, but on the device type ``cpu``: blocks that a GPU's allocator rounds up to
512 bytes, its fragmentation, and buffers of NCCL and of matrix libraries are not in it, and
attention is torch's for CPU, which keeps as much for backward as flash attention does.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker

from parallel2d.config import CompileConfig, TrainConfig
from parallel2d.cost.fake_group import fake_process_group
from parallel2d.cost.state_memory import StateBytes
from parallel2d.data import BatchPlan
from parallel2d.data.batch import SampleShape
from parallel2d.errors import ConfigError
from parallel2d.mesh import MeshShape, build_mesh
from parallel2d.model_families import ModelParts
from parallel2d.optimizer import build_optimizer
from parallel2d.parallelize import parallelize_on_fake_tensors
from parallel2d.parallelize.precision import input_dtype
from parallel2d.planner.step_loss import StepLoss, step_loss
from parallel2d.sync import accumulate
from parallel2d.sync.gradient_sync import gradient_syncs
from parallel2d.topology import Topology

# The tracker's kinds, as people call them.
_KINDS = {
    "Sharded Param": "parameters",
    "Buffer": "buffers",
    "Sharded Grad": "gradients",
    "Activation": "activations",
    "Unsharded Param": "gathered parameters",
    "All Gather": "gathered parameters",
    "Unsharded Grad": "whole gradients",
    "Reduce Scatter": "whole gradients",
}


@dataclass(frozen=True)
class TracedMemory:
    """Bytes of one rank at the fullest moment of a step. ``by_kind``: their sum is ``peak``."""

    peak: int
    by_kind: dict[str, int]


def trace_step(
    config: TrainConfig,
    parts: ModelParts,
    shape: MeshShape,
    topology: Topology,
    tensor_plan: Mapping[str, object] | None,
    sample: SampleShape,
    batches: BatchPlan,
    states: StateBytes,
) -> TracedMemory:
    """Runs one global batch of ``parts.module``, which is used up by it.

    ``states``: of the fullest rank; the optimizer's state is taken from there, since it is there in
    every step but the first. Of more than two micro-batches two are run: the others are as the
    second. Raises `ConfigError` for what `parallelize` refuses, and for a model that tensors
    without storage cannot run.
    """
    _check_traceable(config)
    parallel = config.parallel()
    # Blocks are traced as they stand: compilation happens for tensors with values.
    parallel.compile = CompileConfig()
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with fake_process_group(shape.world_size), warnings.catch_warnings():
        # torch warns of each look at the address of a fake tensor, which is the same for all.
        warnings.simplefilter("ignore")
        mesh = build_mesh(
            shape.spec(),
            config.strategy,
            topology=topology,
            allow_cross_node=config.mesh.allow_cross_node,
            device_type="cpu",
        )
        model = parallelize_on_fake_tensors(
            parts.module,
            mesh,
            parallel,
            fake,
            topology=topology,
            init=parts.init,
            tensor_plan=tensor_plan,
        )
        floating = input_dtype(config.precision) or torch.float32
        example = functools.partial(
            sample.example, batches.micro_batch_size, "cpu", floating=floating
        )
        with fake:
            build_optimizer(model, config.optimizer)
            for engine in gradient_syncs(model):
                engine.never_agree()
            snapshot = _peak_of(
                model,
                step_loss(config, parts, model, *example()),
                example,
                min(batches.accumulation, 2),
                config.sync.during_accumulation,
            )
    return _with_optimizer(snapshot, states)


def _check_traceable(config: TrainConfig) -> None:
    for key, is_set in (
        ("cpu_offload=true", config.cpu_offload),
        (f"precision.float8={config.precision.float8}", config.precision.float8 != "none"),
        (
            "activation_checkpointing=budget",
            config.activation_checkpointing.compiler_budget is not None,
        ),
    ):
        if is_set:
            raise ConfigError(
                f"plan.verify=true: {key} needs a GPU or its compiler, and peak memory is traced "
                "without; use plan.verify=false"
            )


def _peak_of(
    model: nn.Module,
    loss: StepLoss,
    example: Callable[[], tuple[Tensor, Tensor]],
    micro_batches: int,
    during_accumulation: str,
) -> Mapping[Any, int]:
    """Bytes by the tracker's kinds at the fullest moment."""
    tracker = FSDPMemTracker(model)
    batches = [example() for _ in range(micro_batches)]
    for inputs, targets in batches:
        tracker.track_inputs((inputs, targets))
    try:
        with tracker:
            for inputs, targets in accumulate(model, batches, during_accumulation):
                loss(inputs, targets).backward()
                # Of the modules alone, which may run once only; the peak of all is kept.
                tracker.reset_mod_stats()
    except ConfigError:
        raise
    # A model may look at values, which such tensors do not have.
    except Exception as error:
        reason = str(error).split("\n")[0]
        raise ConfigError(
            f"plan.verify=true: {type(model).__name__} does not run on tensors without storage "
            f"({type(error).__name__}: {reason}); use plan.verify=false"
        ) from error
    # Of the one device that there is.
    (snapshot,) = tracker.get_tracker_snapshot("peak").values()
    return snapshot


def _with_optimizer(snapshot: Mapping[Any, int], states: StateBytes) -> TracedMemory:
    by_kind: dict[str, int] = {}
    for kind, size in snapshot.items():
        word = getattr(kind, "value", str(kind))
        if word == "Total" or size == 0:
            continue
        name = _KINDS.get(word, "temporary")
        by_kind[name] = by_kind.get(name, 0) + size
    for name, size in (
        ("optimizer state", states.optimizer),
        ("unrounded rows", states.masters),
        ("outer parameters", states.outer),
    ):
        if size:
            by_kind[name] = size
    return TracedMemory(sum(by_kind.values()), by_kind)
