"""How a model is laid over the ranks: mesh, strategy, groups, precision, recomputation. What
`parallel2d.parallelize` reads."""

from __future__ import annotations

import dataclasses
import difflib
from dataclasses import dataclass, field
from typing import Any

from parallel2d.config.options import ConfigError, option

STRATEGY_NAMES = ("ddp", "zero2", "zero3", "hybrid_zero2", "hybrid")
DTYPES = ("fp64", "fp32", "bf16", "fp16")
# What a tensor-parallel plan may say of a module; see parallelize/tensor_parallel.py. The last four
# are Hugging Face's words.
TENSOR_WORDS = (
    "colwise",
    "rowwise",
    "sequence",
    "replicate",
    "colwise_gather_output",
    "rowwise_split_input",
    "embedding_rowwise",
    "replicated_with_grad_allreduce",
)


@dataclass
class MeshConfig:
    """Sizes of the mesh axes, outermost to innermost. ``auto`` is resolved against the machines
    that are found."""

    # whole copies; only reduced gradients cross this axis
    replicate: int | str = option("auto", minimum=1, auto=True)
    # ranks that split parameters, gradients, optimizer state
    shard: int | str = option("auto", minimum=1, auto=True)
    # ranks that split each matrix; auto = 1
    tensor: int | str = option("auto", minimum=1, auto=True)
    # accept a shard or tensor group across hosts that would fit in one: up to 4x traffic
    allow_cross_node: bool = False


@dataclass
class StrategyConfig:
    """What each mesh axis does to the parameters.

    ``ddp`` keeps a full copy per rank. ``zero3`` shards parameters over all ranks and frees them
    after each module's forward; ``zero2`` keeps them gathered until backward is done (fewer
    all-gathers, more memory). The hybrids do the same inside the shard axis and all-reduce the
    sharded gradient over the replicate axis.
    """

    name: str = option("hybrid", choices=STRATEGY_NAMES)

    @property
    def reshard_after_forward(self) -> bool:
        """Whether gathered parameters are freed between forward and backward, the root group's
        included."""
        return self.name in ("zero3", "hybrid")


@dataclass
class BucketingConfig:
    """Which parameters travel in one collective.

    ``layer``: one group per module that owns parameters (most calls, least memory). ``block``: one
    group per repeated block and the root group for all else. ``size``: consecutive modules up to
    ``size_mib``. ``none``: the finest the engine allows, which is ``layer``; said in the log.
    """

    name: str = option("block", choices=("none", "layer", "block", "size"))
    # used by name=size; inf puts the whole model into the root group
    size_mib: float = option(25.0, above=0, infinite=True)
    # class names that are blocks; empty: repeated structure is detected
    blocks: list[str] = option([])
    # package.module:function, or in code a callable: (module, name) -> whether it is a block;
    # replaces detection. Outermost matches count; none at all is an error
    policy: Any = None


@dataclass
class PrefetchConfig:
    """How early parameters are gathered: how many groups ahead of the one that computes, in the
    order in which they run.

    A group costs one all-gather whenever it is issued; each step ahead keeps one more group's whole
    parameters in memory. A number larger than that of the groups means all of them. Nothing is
    gathered, and so nothing prefetched, without a shard axis.
    """

    # 0: a group is gathered when it is reached, which on GPU still overlaps, because the host runs
    # ahead of the device
    forward: int = option(0, minimum=0)
    backward: int = option(1, minimum=0)  # 0: a group is gathered when its backward begins


@dataclass
class PrecisionConfig:
    """The dtype of every tensor that mixed precision decides about."""

    name: str = "fp32"
    # sharded parameters, their gradients and the optimizer state
    storage: str = option("fp32", choices=DTYPES)
    # gathered parameters and activations; halves all-gather bytes at bf16
    param: str = option("fp32", choices=DTYPES)
    # gradients on the wire; bf16 halves the bytes and rounds the sums
    reduce: str = option("fp32", choices=DTYPES)
    loss_scaling: bool = False  # fp16 only: dynamic scaling against underflow
    # of floating-point outputs of the root module; None: whatever it computes. Blocks keep theirs
    output: str | None = None
    # of floating-point buffers; None: as built, widened with storage=fp64
    buffers: str | None = None
    # floating-point inputs are cast to `param`; false: the model must match dtypes itself
    cast_forward_inputs: bool = True
    # Gradients stay in `reduce` after the reduction instead of being cast to `storage`: half the
    # gradient memory at bf16, for optimizers of your own that read such gradients. AdamW does not,
    # so the train command refuses it
    keep_low_precision_gradients: bool = False
    # class names that compute in fp32 beside a lower `param`, each instance its own group
    fp32_modules: list[str] = option([])
    # Matrix products of the Linear layers inside blocks in 8-bit floats (needs torchao, and a GPU
    # of compute capability 8.9): one scale per tensor, or per row, which is more accurate and
    # slower. Worth its casts only with compile=block
    float8: str = option("none", choices=("none", "tensorwise", "rowwise"))
    # patterns of module names that stay as they are, such as *.attention.*
    float8_exclude: list[str] = option([])


PRECISIONS = {
    "fp64": PrecisionConfig("fp64", "fp64", "fp64", "fp64"),
    "fp32": PrecisionConfig("fp32"),
    "bf16": PrecisionConfig("bf16", "fp32", "bf16", "fp32"),
    "bf16_reduce_bf16": PrecisionConfig("bf16_reduce_bf16", "fp32", "bf16", "bf16"),
    "fp16": PrecisionConfig("fp16", "fp32", "fp16", "fp32", loss_scaling=True),
}


KEPT_OPERATORS = (
    "mm",
    "bmm",
    "addmm",
    "scaled_dot_product_*",
    "all_gather_into_tensor",
    "reduce_scatter_tensor",
    "all_reduce",
)


@dataclass
class ActivationCheckpointingConfig:
    """What backward recomputes instead of keeping. ``full`` keeps only block inputs; ``selective``
    keeps the results of the operators in ``keep`` too and recomputes the cheap rest. ``budget``
    lets the compiler choose what fits in ``memory_budget``."""

    name: str = option("none", choices=("none", "full", "selective", "budget"))
    # 2: only every second block is checkpointed, half the saving, half the cost
    every: int = option(1, minimum=1)
    # selective: operators whose results stay in memory; by default those that are expensive to
    # compute, small against what they save
    keep: list[str] = option(list(KEPT_OPERATORS))
    # budget: share of the activations; 0 recomputes all, 1 nothing
    memory_budget: float = option(0.5, minimum=0, maximum=1)
    # class names of what is checkpointed, if not the blocks of bucketing
    blocks: list[str] = option([])
    policy: Any = None  # as bucketing.policy, instead of blocks


@dataclass
class CompileConfig:
    """``block`` compiles each repeated block on its own (one compilation serves all equal
    blocks)."""

    name: str = option("none", choices=("none", "block"))
    # any backend torch.compile knows; inductor on CPU needs a C++ compiler
    backend: str = "inductor"


@dataclass
class SyncConfig:
    """What crosses the replicate axis, and when."""

    # Under gradient accumulation, per micro-batch: full = reduce-scatter and all-reduce (most
    # bytes); reduce_scatter_only = the replicate axis moves once per global batch; none = nothing
    # moves before the last one (full gradients in memory)
    during_accumulation: str = option(
        "reduce_scatter_only", choices=("full", "reduce_scatter_only", "none")
    )
    # What reduces gradients over the replicate axis: parallel2d = by parameter, right for any
    # routing of data through the model, added in fp32 at least; torch = the second axis of
    # fully_shard, for comparison, without these guarantees
    engine: str = option("parallel2d", choices=("parallel2d", "torch"))
    # gradients of neighbouring small groups that cross the replicate axis in one piece
    bucket_mib: float = option(4.0, above=0)


@dataclass
class ParallelConfig:
    """Everything `parallel2d.parallelize` needs to know beside the model and the mesh.

    Each field also takes a preset's name: ``ParallelConfig(strategy="zero3", precision="bf16")``.
    """

    strategy: StrategyConfig | str = field(default_factory=StrategyConfig)
    bucketing: BucketingConfig | str = field(default_factory=BucketingConfig)
    precision: PrecisionConfig | str = field(default_factory=PrecisionConfig)
    activation_checkpointing: ActivationCheckpointingConfig | str = field(
        default_factory=ActivationCheckpointingConfig
    )
    compile: CompileConfig | str = field(default_factory=CompileConfig)
    prefetch: PrefetchConfig = field(default_factory=PrefetchConfig)
    sync: SyncConfig = field(default_factory=SyncConfig)
    # GPU only: parameters, gradients and optimizer state live in pinned CPU memory and the
    # optimizer runs there; a step is slower by both copies and by the CPU's optimizer
    cpu_offload: bool = False
    allow_cross_node: bool = False

    def __new__(cls, *args: Any, **given: Any) -> ParallelConfig:
        """Raises `ConfigError` for options that other frameworks have, with what to do instead."""
        from parallel2d.obsolete import refuse

        known = {item.name for item in dataclasses.fields(cls)}
        refuse(
            {name: value for name, value in given.items() if name not in known},
            "ParallelConfig",
            sorted(known),
        )
        return super().__new__(cls)

    def resolved(self) -> ResolvedParallelConfig:
        """The same with every preset name replaced by its dataclass. Raises `ConfigError` listing
        every problem."""
        from parallel2d.obsolete import strategy_answer
        from parallel2d.validation import parallel_problems, problems

        values: dict[str, Any] = {}
        for name, (presets, kind) in _PRESETS.items():
            value = getattr(self, name)
            if isinstance(value, str) and presets:
                if value not in presets:
                    near = difflib.get_close_matches(value, presets, n=1, cutoff=0.5)
                    meant = f"did you mean {near[0]}?" if near else None
                    hint = (strategy_answer(value) if name == "strategy" else None) or meant
                    raise ConfigError(
                        f"{name}={value!r} is not one of {', '.join(presets)}"
                        + (f"; {hint}" if hint else "")
                    )
                value = presets[value]
            if not isinstance(value, kind):
                words = "a preset name or " if presets else ""
                raise ConfigError(
                    f"{name} must be {words}{kind.__name__}, got {type(value).__name__}"
                )
            values[name] = dataclasses.replace(value)  # type: ignore[type-var]
        if not isinstance(self.cpu_offload, bool):
            raise ConfigError(f"cpu_offload={self.cpu_offload} must be True or False")
        resolved = ResolvedParallelConfig(
            **values, cpu_offload=self.cpu_offload, allow_cross_node=self.allow_cross_node
        )
        if found := [*problems(resolved), *parallel_problems(resolved)]:
            raise ConfigError("\n".join(found))
        return resolved


@dataclass
class ResolvedParallelConfig:
    """`ParallelConfig` without preset names: what the transforms read."""

    strategy: StrategyConfig
    bucketing: BucketingConfig
    precision: PrecisionConfig
    activation_checkpointing: ActivationCheckpointingConfig
    compile: CompileConfig
    prefetch: PrefetchConfig
    sync: SyncConfig
    cpu_offload: bool
    allow_cross_node: bool


STRATEGIES = {name: StrategyConfig(name) for name in STRATEGY_NAMES}
BUCKETINGS = {name: BucketingConfig(name) for name in ("none", "layer", "block", "size")}
CHECKPOINTINGS = {
    name: ActivationCheckpointingConfig(name) for name in ("none", "full", "selective", "budget")
}
COMPILES = {name: CompileConfig(name) for name in ("none", "block")}
_PRESETS: dict[str, tuple[dict[str, Any], type]] = {
    "strategy": (STRATEGIES, StrategyConfig),
    "bucketing": (BUCKETINGS, BucketingConfig),
    "precision": (PRECISIONS, PrecisionConfig),
    "activation_checkpointing": (CHECKPOINTINGS, ActivationCheckpointingConfig),
    "compile": (COMPILES, CompileConfig),
    "prefetch": ({}, PrefetchConfig),
    "sync": ({}, SyncConfig),
}
