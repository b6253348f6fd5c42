"""Peak memory of one step of the really parallelized model, on tensors without storage:
`trace_step`.

The model is laid out by the functions that training uses, on a process group without processes, and
its forward and backward run on fake tensors under torch's memory tracker. So what is counted is
what this code allocates, but on the device type ``cpu``: blocks that a GPU's allocator rounds up to
512 bytes, its fragmentation, and buffers of NCCL and of matrix libraries are not in it, and
attention is torch's for CPU, which keeps as much for backward as flash attention does.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping

import torch
from torch._subclasses import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker

from parallel2d.base.config import CompileConfig, TrainConfig
from parallel2d.base.errors import ConfigError
from parallel2d.base.topology import Topology
from parallel2d.parallel.cost.activation_profile import LossOf
from parallel2d.parallel.cost.fake_group import fake_process_group
from parallel2d.parallel.cost.layout import Layout
from parallel2d.parallel.cost.state_memory import state_bytes
from parallel2d.parallel.mesh import build_mesh
from parallel2d.parallel.parallelize import parallelize_on_fake_tensors
from parallel2d.parallel.parallelize.precision import input_dtype
from parallel2d.parallel.sync import accumulate
from parallel2d.parallel.sync.engine.replica_reducer import reducers_in
from parallel2d.training.data.batch import SampleShape
from parallel2d.training.model_families import ModelParts
from parallel2d.training.optimizer import build_optimizer


def trace_step(
    config: TrainConfig,
    parts: ModelParts,
    layout: Layout,
    topology: Topology,
    tensor_plan: Mapping[str, object] | None,
    sample: SampleShape,
    loss_of: LossOf,
) -> int:
    """Bytes at the fullest moment of one global batch of ``parts.module``, which is used up by it,
    with what the fullest rank keeps of the optimizer's state: that is there in every step but the
    first.

    Of more than two micro-batches two are run: the others are as the second. Raises `ConfigError`
    for what `parallelize` refuses, and for a model that tensors without storage cannot run.
    """
    # Blocks are traced as they stand: compilation happens for tensors with values.
    parallel = dataclasses.replace(layout.config, compile=CompileConfig())
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with fake_process_group(layout.shape.world_size), warnings.catch_warnings():
        # Some operators warn about tensors without storage, each once for all.
        warnings.simplefilter("ignore")
        mesh = build_mesh(
            layout.shape.spec(),
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
        with fake:
            build_optimizer(model, config.optimizer)
            for engine in reducers_in(model):
                engine.agreement.defer()
            batches = []
            for _ in range(min(layout.accumulation, 2)):
                batches.append(sample.example(layout.micro_batch_size, "cpu", floating=floating))
            tracker = FSDPMemTracker(model)
            for batch in batches:
                tracker.track_inputs(batch)
            try:
                loss = loss_of(model, *batches[0])
                with tracker:
                    during = config.sync.during_accumulation
                    for inputs, targets in accumulate(model, batches, during):
                        loss(inputs, targets).backward()
                        # Of the modules alone, which may run once only; the peak of all is kept.
                        tracker.reset_mod_stats()
            except ConfigError:
                raise
            # A model may look at values, which such tensors do not have.
            except Exception as error:
                reason = str(error).split("\n")[0]
                raise ConfigError(
                    f"plan.verify=true: {type(parts.module).__name__} does not run on tensors "
                    f"without storage ({type(error).__name__}: {reason}); use plan.verify=false"
                ) from error
    # Of the one device that there is.
    (snapshot,) = tracker.get_tracker_snapshot("peak").values()
    states = state_bytes(layout)
    return int(snapshot["Total"]) + states.optimizer + states.masters + states.outer
