"""Training loops for `tools.bench.peers`: the same model in parallel2d and in other
implementations.

All loops have the same model, batches, loss, maximum gradient norm and optimizer. A loop differs
from the others only in the wrapper of the model, and in the documented calls of its implementation
for micro-batches, backward and clipping.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    FullyShardedDataParallel,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from parallel2d.models.llama import Block, Llama

Batch = tuple[Tensor, Tensor]
MAX_NORM = 1.0


class ModelSize(NamedTuple):
    """A model, and the sequences of a micro-batch of one rank."""

    dim: int
    layers: int
    hidden_dim: int
    vocabulary: int
    seq_len: int
    sequences: int

    def build(self, kind: type[Llama] = Llama) -> Llama:
        """Return the model with the weights of seed 0 on the CPU."""
        torch.manual_seed(0)
        return kind(
            dim=self.dim,
            n_layers=self.layers,
            n_heads=max(4, self.dim // 64),
            n_kv_heads=max(4, self.dim // 64),
            hidden_dim=self.hidden_dim,
            vocab_size=self.vocabulary,
            max_seq_len=self.seq_len,
        )


SIZES = {
    "tiny": ModelSize(32, 2, 64, 64, 16, 2),
    "small": ModelSize(256, 4, 704, 320, 64, 8),
    "medium": ModelSize(512, 8, 1408, 320, 128, 8),
    "1b": ModelSize(2048, 16, 8192, 32000, 4096, 1),  # for GPUs
}


@dataclass
class Loop:
    """The training loop of one implementation on one rank."""

    model: Callable[[Tensor], Tensor]
    optimizer: Any
    # Clips the gradients to `MAX_NORM`
    clip: Callable[[], object]
    # Yields the micro-batches of a step, and prepares the model for each
    micro_batches: Callable[[Sequence[Batch]], Iterator[Batch]]
    backward: Callable[[Tensor], object] = field(default=Tensor.backward)
    # Factor of the loss: 1 if gradients are averaged over ranks, 1 / ranks if they are summed
    scale: float = 1.0

    def step(self, batches: Sequence[Batch]) -> Tensor:
        """Run one step, and return the mean loss of this rank."""
        total = torch.zeros(())
        for inputs, targets in self.micro_batches(batches):
            logits = self.model(inputs)
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten()) / len(batches)
            self.backward(loss * self.scale)
            total = loss.detach() + total.to(loss.device)
        self.clip()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total


class Job(NamedTuple):
    """The layout of one run, on one rank."""

    layout: str  # ddp, hybrid or zero3
    size: ModelSize
    device: torch.device

    def model(self, kind: type[Llama] = Llama) -> Llama:
        return self.size.build(kind).to(self.device)

    def mesh(self) -> DeviceMesh:
        """Return the mesh of a hand-written loop: the shard axis, or two replicas of shards."""
        ranks = dist.get_world_size()
        if self.layout == "hybrid":
            names = ("dp_replicate", "fsdp")
            return init_device_mesh(self.device.type, (2, ranks // 2), mesh_dim_names=names)
        return init_device_mesh(self.device.type, (ranks,), mesh_dim_names=("fsdp",))


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, fused=True)


def clipping(
    model: nn.Module, clip: Callable[..., object] = nn.utils.clip_grad_norm_
) -> Callable[[], object]:
    return lambda: clip(model.parameters(), MAX_NORM)


def without_sync(
    no_sync: Callable[[], contextlib.AbstractContextManager[Any]],
) -> Callable[[Sequence[Batch]], Iterator[Batch]]:
    """Return ``micro_batches`` for a model that reduces gradients in each backward outside of
    ``no_sync()``."""

    def micro_batches(batches: Sequence[Batch]) -> Iterator[Batch]:
        for batch in batches[:-1]:
            with no_sync():
                yield batch
        yield batches[-1]

    return micro_batches


def parallel2d_loop(job: Job) -> Loop:
    import parallel2d

    ranks = dist.get_world_size()
    sizes = {"ddp": (ranks, 1), "hybrid": (2, ranks // 2), "zero3": (1, ranks)}[job.layout]
    spec = parallel2d.MeshSpec(replicate=sizes[0], shard=sizes[1])
    mesh = parallel2d.build_mesh(spec, job.layout, device_type=job.device.type)
    config = parallel2d.ParallelConfig(job.layout)
    model = parallel2d.parallelize(job.model(), mesh, config)
    return Loop(
        model=model,
        optimizer=adamw(model),
        clip=clipping(model, parallel2d.clip_gradient_norm),
        micro_batches=functools.partial(parallel2d.accumulate, model),
    )


def ddp_loop(job: Job) -> Loop:
    model = nn.parallel.DistributedDataParallel(job.model())
    return Loop(model, adamw(model), clipping(model), without_sync(model.no_sync))


def _fsdp2_micro_batches(model: Any, batches: Sequence[Batch]) -> Iterator[Batch]:
    """Yield the micro-batches. Only the last micro-batch reduces over the replicate axis; all
    reduce over the shard axis."""
    for number, batch in enumerate(batches):
        is_last = number == len(batches) - 1
        model.set_is_last_backward(is_last)
        model.set_requires_all_reduce(is_last)
        yield batch


def fsdp2_loop(job: Job) -> Loop:
    """The hand-written loop: `fully_shard` on each block and on the model."""
    mesh, model = job.mesh(), job.model()
    for block in model.layers:
        fully_shard(block, mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh)
    micro_batches = functools.partial(_fsdp2_micro_batches, model)
    return Loop(model, adamw(model), clipping(model), micro_batches)


def fsdp1_loop(job: Job) -> Loop:
    is_hybrid = job.layout == "hybrid"
    model = FullyShardedDataParallel(
        job.model(),
        device_mesh=job.mesh(),
        sharding_strategy=ShardingStrategy.HYBRID_SHARD
        if is_hybrid
        else ShardingStrategy.FULL_SHARD,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        use_orig_params=True,
        device_id=job.device,
    )
    micro_batches = without_sync(model.no_sync)
    return Loop(model, adamw(model), lambda: model.clip_grad_norm_(MAX_NORM), micro_batches)


class _Layers(nn.ModuleDict):
    """Blocks by number, as torchtitan has them; iteration yields the blocks."""

    def __iter__(self) -> Any:
        return iter(self.values())


class TorchtitanLlama(Llama):
    """The model, with the attributes of torchtitan's decoders."""

    enable_weight_tying = False

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        blocks = {str(number): block for number, block in enumerate(self.layers)}
        self.layers: Any = _Layers(blocks)

    @property
    def tok_embeddings(self) -> nn.Module:
        return self.embedding

    @property
    def lm_head(self) -> nn.Module:
        return self.output


def torchtitan_loop(job: Job) -> Loop:
    """torchtitan's FSDP and clipping. torchtitan sums gradients over ranks, so the loss is
    scaled."""
    from torchtitan.distributed.fsdp import apply_fsdp_to_decoder
    from torchtitan.distributed.utils import clip_grad_norm_

    model = job.model(TorchtitanLlama)
    apply_fsdp_to_decoder(model, job.mesh(), torch.float32, torch.float32, pp_enabled=False)
    if job.device.type == "cpu":
        for module in model.modules():
            if isinstance(module, FSDPModule):
                # gloo does not support the default reduction, a sum with a factor.
                module.set_force_sum_reduction_for_comms(True)
    micro_batches = functools.partial(_fsdp2_micro_batches, model)
    scale = 1 / dist.get_world_size()
    clip = clipping(model, functools.partial(clip_grad_norm_, foreach=True))
    return Loop(model, adamw(model), clip, micro_batches, scale=scale)


def fabric_loop(job: Job) -> Loop:
    """Lightning Fabric with its DDP strategy."""
    from lightning.fabric import Fabric

    accelerator = "cpu" if job.device.type == "cpu" else "auto"
    fabric = Fabric(accelerator=accelerator, devices=dist.get_world_size(), strategy="ddp")
    fabric.launch()
    plain = job.model()
    model, optimizer = fabric.setup(plain, adamw(plain))

    def no_sync() -> contextlib.AbstractContextManager[Any]:
        return fabric.no_backward_sync(model)  # type: ignore[no-any-return]

    def clip() -> None:
        fabric.clip_gradients(model, optimizer, max_norm=MAX_NORM)

    return Loop(model, optimizer, clip, without_sync(no_sync), fabric.backward)


def accelerate_loop(job: Job) -> Loop:
    """Accelerate, which wraps the model in DDP."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=job.device.type == "cpu")
    plain = job.model()
    model, optimizer = accelerator.prepare(plain, adamw(plain))
    return Loop(
        model=model,
        optimizer=optimizer,
        clip=clipping(model, accelerator.clip_grad_norm_),
        micro_batches=without_sync(lambda: accelerator.no_sync(model)),
        backward=accelerator.backward,
    )


class Peer(NamedTuple):
    """One implementation."""

    build: Callable[[Job], Loop]
    layouts: tuple[str, ...]
    # Modules that the loop imports, and that this project does not require
    modules: tuple[str, ...] = ()


SHARDED = ("hybrid", "zero3")
# In each layout, the first peer is the baseline of the ratios.
PEERS = {
    "DDP": Peer(ddp_loop, ("ddp",)),
    "FSDP2 by hand": Peer(fsdp2_loop, SHARDED),
    "FSDP1": Peer(fsdp1_loop, SHARDED),
    "torchtitan": Peer(
        torchtitan_loop,
        SHARDED,
        ("torchtitan.distributed.fsdp", "torchtitan.distributed.utils"),
    ),
    "Fabric": Peer(fabric_loop, ("ddp",), ("lightning.fabric",)),
    "accelerate": Peer(accelerate_loop, ("ddp",), ("accelerate",)),
    "parallel2d": Peer(parallel2d_loop, ("ddp", *SHARDED)),
}


def set_environment(rank: int, ranks: int, port: int) -> None:
    """Set the variables from which Fabric and Accelerate read the ranks of this host."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(ranks),
        LOCAL_WORLD_SIZE=str(ranks),
        OMP_NUM_THREADS="1",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
