"""Jobs of the train command on simulated devices: a small llama with two layers, five steps, and a
checkpoint.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jobs

from stream_simulator import processes
from stream_simulator.results import Result
from stream_simulator.simulator import Simulator
from stream_simulator.stream_operations import Site

if TYPE_CHECKING:
    from parallel2d.base.config import Job
    from parallel2d.base.runtime import Runtime

STEPS = 5
COUNTED = (
    3  # the step with counted kernels and waits: the optimizer has its state, and nothing is saved
)
SMALL = (
    "data=text",
    "data.path=corpus.txt",
    "data.cache_dir=cache",
    "train.seq_len=32",
    "train.global_batch_size=8",
    f"train.steps={STEPS}",
    "model.n_layers=2",
    "model.dim=64",
    "model.hidden_dim=96",
    "train.validate_every=0",
    "checkpoint.every=4",
    "precision=fp32",
    "compile=none",
    "metrics.console=silent",
    "metrics.tensorboard=false",
)
# The gradients of this small model fill several buckets.
BUCKETS = "sync.bucket_mib=0.15"


class Layout(NamedTuple):
    """A number of ranks, and overrides of the train command."""

    size: int
    overrides: tuple[str, ...]

    def with_overrides(self, *overrides: str) -> Layout:
        return Layout(self.size, (*self.overrides, *overrides))


HYBRID = Layout(4, ("strategy=hybrid", "mesh.replicate=2", "mesh.shard=2", BUCKETS))
FULL = Layout(4, ("strategy=hybrid_full", "mesh.replicate=2", "mesh.shard=2", BUCKETS))
DILOCO = Layout(
    4, ("strategy=hybrid", "mesh.replicate=2", "mesh.shard=2", "sync=diloco", "sync.every=2")
)
THREE = Layout(
    3,
    ("strategy=hybrid", "mesh.replicate=3", "mesh.shard=1", "train.global_batch_size=12", BUCKETS),
)
FOUR = Layout(
    4,
    ("strategy=hybrid", "mesh.replicate=4", "mesh.shard=1", "train.global_batch_size=12", BUCKETS),
)
ONE_REPLICA = Layout(4, ("strategy=hybrid", "mesh.replicate=1", "mesh.shard=2", BUCKETS))
INT4 = ("sync.wire=int4", "sync.warmup=0")
EACH_MICRO_BATCH = "train.micro_batch_size=1"

LAYOUTS = {
    # strategies
    # The path of a GPU by default; under the simulator torch.compile calls the blocks uncompiled.
    "hybrid": HYBRID.with_overrides("compile=auto"),
    "hybrid bf16": HYBRID.with_overrides("precision=bf16"),
    "hybrid_full": FULL,
    "hybrid_zero2": Layout(
        4, ("strategy=hybrid_zero2", "mesh.replicate=2", "mesh.shard=2", BUCKETS)
    ),
    "ddp": Layout(2, ("strategy=ddp", BUCKETS)),
    "zero2": Layout(2, ("strategy=zero2", BUCKETS)),
    "zero3": Layout(2, ("strategy=zero3", BUCKETS)),
    "zero3 fp16": Layout(2, ("strategy=zero3", "precision=fp16", BUCKETS)),
    "tensor": ONE_REPLICA.with_overrides("mesh.tensor=2", "compile=auto"),
    "context": Layout(2, ("strategy=hybrid", "mesh.shard=1", "mesh.context=2", BUCKETS)),
    "context and shard": ONE_REPLICA.with_overrides("mesh.context=2", "precision=bf16"),
    "context and tensor": Layout(
        4, ("strategy=hybrid", "mesh.shard=1", "mesh.context=2", "mesh.tensor=2", BUCKETS)
    ),
    # sync methods and communication formats
    "bf16 gradients": HYBRID.with_overrides("sync.wire=bf16"),
    "int8": HYBRID.with_overrides("sync.wire=int8"),
    "int4": HYBRID.with_overrides(*INT4),
    "int8, three replicas": THREE.with_overrides("sync.wire=int8"),
    "int4, three replicas": THREE.with_overrides(*INT4),
    "int8, four replicas": FOUR.with_overrides("sync.wire=int8"),
    "int4, four replicas": FOUR.with_overrides(*INT4),
    "hybrid_full int8": FULL.with_overrides("sync.wire=int8"),
    "hybrid_full int4": FULL.with_overrides(*INT4),
    "diloco": DILOCO.with_overrides("checkpoint.memory_every=1"),
    "diloco int4": DILOCO.with_overrides("sync.wire=int4", "sync.fragments=2"),
    "diloco with delay": DILOCO.with_overrides(
        "sync.every=3", "sync.delay=1", "sync.fragments=3", "sync.wire=int4"
    ),
    # accumulation
    "accumulate shards": HYBRID.with_overrides(EACH_MICRO_BATCH),
    "accumulate without reduction": HYBRID.with_overrides(
        EACH_MICRO_BATCH, "sync.during_accumulation=none", "precision=bf16"
    ),
    "reduce every micro-batch": HYBRID.with_overrides(
        EACH_MICRO_BATCH, "sync.during_accumulation=full", "sync.wire=int8"
    ),
    # memory
    "full recomputation": HYBRID.with_overrides("activation_checkpointing=full", "precision=bf16"),
    "selective recomputation": HYBRID.with_overrides("activation_checkpointing=selective"),
    "activation offload": HYBRID.with_overrides(
        "activation_checkpointing=offload", "model.n_layers=4"
    ),
    "activation offload, full": HYBRID.with_overrides(
        "activation_checkpointing=full",
        "activation_checkpointing.offload=true",
        "precision=bf16",
        "model.n_layers=3",
    ),
    "activation offload, selective": HYBRID.with_overrides(
        "activation_checkpointing=selective", "activation_checkpointing.offload=true"
    ),
    "chunked loss": HYBRID.with_overrides("train.loss_chunk=16"),
    "offload": Layout(2, ("strategy=zero3", "cpu_offload=true")),
    # groups
    "prefetch": HYBRID.with_overrides("prefetch.forward=2", "prefetch.backward=2"),
    "two reduce-scatters in flight": HYBRID.with_overrides(
        "fsdp.reduce_scatter_buffers=2", "fsdp.separate_reduce_scatter_group=true"
    ),
    "bucketing=layer": HYBRID.with_overrides("bucketing=layer", "sync.bucket_mib=0.01"),
    # optimizers
    "muon": HYBRID.with_overrides("optimizer=muon"),
    "muon, hybrid_full": FULL.with_overrides("optimizer=muon"),
    "bf16 state": HYBRID.with_overrides("optimizer.state_dtype=bf16"),
    "int8 state": HYBRID.with_overrides("optimizer.state_dtype=int8"),
    # around the step
    "EMA and validation": HYBRID.with_overrides(
        "train.ema=0.99", "train.validate_every=2", "precision=bf16"
    ),
    "in-memory checkpoints": HYBRID.with_overrides("checkpoint.memory_every=1"),
    "synchronous checkpoints": HYBRID.with_overrides("checkpoint.asynchronous=false"),
}


def prepare(job: Job, folder: str) -> tuple[Job, Runtime]:
    """Return the job with its folders, and the runtime of this simulated rank."""
    import torch
    import torch.distributed as dist

    from parallel2d.base.launcher_environment import RankIdentity
    from parallel2d.base.runtime import Runtime
    from parallel2d.base.topology import Topology

    os.chdir(folder)
    os.makedirs(job.run_dir, exist_ok=True)
    rank, world = dist.get_rank(), dist.get_world_size()
    identity = RankIdentity(rank, world, rank, 0, 1, "torchrun")
    return job, Runtime(identity, torch.device("cuda", rank), Topology.gather())


def train(simulator: Simulator, job: Job, folder: str) -> None:
    """Run all steps of a job, with its checkpoints."""
    job, runtime = prepare(job, folder)

    from parallel2d.training.assemble import build_trainer
    from parallel2d.training.data.feed import BatchFeed

    trainer = build_trainer(job, runtime)
    feed = BatchFeed(trainer.training, trainer.plan, runtime.device, start=trainer.progress.samples)
    trainer.begin(feed)
    for step in range(job.config.train.steps):
        simulator.step = step + 1
        trainer.step(feed)
    simulator.step = 0
    trainer.checkpointer.finish()
    feed.close()
    trainer.recorder.close()


def train_in_outer_groups(simulator: Simulator, job: Job, folder: str) -> None:
    """Run `train` with small modules outside of the blocks in their own groups."""
    from training import outer_groups_of_any_size

    with outer_groups_of_any_size():
        train(simulator, job, folder)


def resume(simulator: Simulator, first: Job, second: Job, folder: str) -> tuple[int, int]:
    """Run ``first``, then ``second`` from its checkpoint; return the first and last step of ``second``."""
    from parallel2d.training.assemble import build_trainer

    for job in (first, second):
        prepared, runtime = prepare(job, folder)
        trainer = build_trainer(prepared, runtime)
        begun = int(trainer.progress.step)
        trainer.run()
        trainer.recorder.close()
    return begun, int(trainer.progress.step)


def sample_text(simulator: Simulator, job: Job, folder: str) -> None:
    """Run a job with samples of text, validation and EMA weights."""
    from parallel2d.hooks import SampleText
    from parallel2d.training.assemble import build_trainer

    job, runtime = prepare(job, folder)
    trainer = build_trainer(job, runtime, hooks=[SampleText(every=1, tokens=3, temperature=0.7)])
    trainer.run()
    trainer.recorder.close()


def job_of(folder: str, overrides: Iterable[str]) -> Job:
    """Compose the job of these overrides."""
    from parallel2d.base.config import Job

    return Job(jobs.config_of([*SMALL, *overrides]), os.path.join(folder, "run"), ())


def run_jobs(
    layout: Layout,
    function: Callable[..., Any] = train,
    further: Iterable[tuple[str, ...]] = ((),),
    dropped: Iterable[Site] = (),
) -> Result:
    """Call ``function(simulator, *jobs, folder)`` on every rank of the layout, with a small
    text in the folder.

    Args:
        layout: the number of ranks, and the overrides of every job.
        function: the program of each rank.
        further: for each job, its further overrides.
        dropped: stream operations without effect.
    """
    with tempfile.TemporaryDirectory(prefix="parallel2d-simulator-") as folder:
        lines = [f"line {number} of a text, {number * number}\n" for number in range(4000)]
        Path(folder, "corpus.txt").write_text("".join(lines))
        given = [job_of(folder, (*layout.overrides, *words)) for words in further]
        return processes.run(layout.size, function, *given, folder, dropped=dropped)


def run_layout(name: str, dropped: Iterable[Site] = ()) -> Result:
    """Run the train command in one of `LAYOUTS`."""
    return run_jobs(LAYOUTS[name], dropped=dropped)
