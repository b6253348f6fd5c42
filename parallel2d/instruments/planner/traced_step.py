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

from torch._subclasses import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker

from parallel2d.base.config import CompileConfig
from parallel2d.base.errors import ConfigError
from parallel2d.base.topology import Topology
from parallel2d.parallel.cost.activation_profile import LossOf
from parallel2d.parallel.cost.fake_group import fake_process_group
from parallel2d.parallel.cost.state_memory import state_bytes
from parallel2d.parallel.mesh import build_mesh
from parallel2d.parallel.parallelize import apply_on_fake_tensors
from parallel2d.parallel.parallelize.layout import Layout
from parallel2d.parallel.sync import accumulate
from parallel2d.parallel.sync.gradient_sync import gradient_syncs
from parallel2d.training.model_families import ModelParts
from parallel2d.training.optimizer import build_optimizer


def trace_step(parts: ModelParts, layout: Layout, topology: Topology, loss_of: LossOf) -> int:
    """Bytes at the fullest moment of one global batch of ``parts.module``, which is used up by it,
    with what the fullest rank keeps of the optimizer's state: that is there in every step but the
    first.

    Of more than two micro-batches two are run: the others are as the second. Raises `ConfigError`
    for a model that tensors without storage cannot run.
    """
    config, workload = layout.config, layout.workload
    # Blocks are traced as they stand: compilation happens for tensors with values.
    plain = dataclasses.replace(layout, config=dataclasses.replace(config, compile=CompileConfig()))
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with fake_process_group(layout.shape.world_size), warnings.catch_warnings():
        # Some operators warn about tensors without storage, each once for all.
        warnings.simplefilter("ignore")
        mesh = build_mesh(
            layout.shape.spec(),
            config.strategy,
            topology=topology,
            allow_cross_node=config.allow_cross_node,
            device_type="cpu",
        )
        model = apply_on_fake_tensors(plain, parts.module, mesh, fake, parts.init, topology)
        with fake:
            build_optimizer(model, workload.optimizer)
            for engine in gradient_syncs(model):
                engine.never_agree()
            batches = [workload.example("cpu") for _ in range(min(workload.accumulation, 2))]
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
