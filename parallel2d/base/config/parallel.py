"""Layout of a model over the ranks: mesh, strategy, bucketing, precision, recomputation.

`parallel2d.parallelize` reads a `ParallelConfig`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

from parallel2d.base.config.options import choice_problem, option
from parallel2d.base.errors import ConfigError

AXES = ("replicate", "shard", "context", "tensor")  # of the mesh, outermost to innermost
# Styles of a tensor-parallel plan; see parallel/parallelize/tensor_parallel.py
TENSOR_WORDS = (
    *("colwise", "rowwise", "sequence", "replicate"),
    # Styles of Hugging Face
    *("colwise_gather_output", "rowwise_split_input"),
    *("embedding_rowwise", "replicated_with_grad_allreduce"),
)


@dataclass
class MeshConfig:
    """Sizes of the mesh axes, outermost to innermost. ``auto`` is resolved for the detected
    machines."""

    replicate: int | str = option("auto", "Copies of the model; only gradients cross this", min=1)
    shard: int | str = option("auto", "Ranks that split one copy, optimizer state included", min=1)
    context: int | str = option("auto", "Ranks that split each sequence; auto is 1", min=1)
    tensor: int | str = option("auto", "Ranks that split each matrix product; auto is 1", min=1)
    allow_cross_node: bool = option(
        False, "Accept a shard or tensor group across hosts that would fit in one: up to 4x traffic"
    )


class Placement(NamedTuple):
    """Sharding of parameters, gradients and optimizer state over the mesh axes."""

    replicates: bool  # mesh.replicate may be above 1: several copies of the model
    shards: bool  # mesh.shard may be above 1: all three are sharded inside a copy
    reshard_after_forward: bool  # parameters of all groups but the root's are freed until backward
    splits_updates: bool  # each replica updates a different part of the parameters


PLACEMENTS = {
    "ddp": Placement(True, False, False, False),
    "zero2": Placement(False, True, False, False),
    "zero3": Placement(False, True, True, False),
    "hybrid_zero2": Placement(True, True, False, False),
    "hybrid": Placement(True, True, True, False),
    "hybrid_full": Placement(True, True, True, True),
}
STRATEGY_NAMES = tuple(PLACEMENTS)
# For strategy=auto, the planner chooses the layout before the ranks build the model. For
# precision=auto and compile=auto, the train command chooses the value for the device.
AUTOMATIC = "auto"


@dataclass
class StrategyConfig:
    """Sharding of parameters, gradients and optimizer state over the mesh axes.

    ``ddp`` keeps a full copy per rank. ``zero3`` shards parameters over all ranks, and reshards
    them after the forward of each module. ``zero2`` keeps parameters unsharded until backward is
    done. The hybrid strategies do the same inside the shard axis, and all-reduce the sharded
    gradient over the replicate axis. ``hybrid_full`` also splits gradients and optimizer state over
    the replicas, and sends the same number of bytes. With ``auto`` the planner chooses the strategy
    and the mesh; `parallelize` refuses ``auto``.
    """

    name: str = option("hybrid", choices=(*STRATEGY_NAMES, AUTOMATIC))

    @property
    def placement(self) -> Placement:
        """Sharding that the strategy stands for. Raises `ConfigError` for ``auto``."""
        if self.name == AUTOMATIC:
            raise ConfigError(
                "strategy=auto was not resolved: the train command does that; in code, name one of "
                f"{', '.join(STRATEGY_NAMES)}"
            )
        return PLACEMENTS[self.name]


@dataclass
class BucketingConfig:
    """Groups of parameters; the parameters of a group share one collective.

    With ``layer`` each module that owns parameters is a group (most calls, least memory). With
    ``block`` each repeated block is a group, and the root group holds all other parameters.
    ``size`` groups consecutive modules up to ``size_mib``. ``none`` asks for no grouping. The
    finest grouping of the engine is ``layer``, so ``none`` uses ``layer``; the log says this.
    """

    name: str = option("block", choices=("none", "layer", "block", "size"))
    size_mib: float = option(
        25.0,
        "MiB of parameters in a group. inf puts the whole model into the root group",
        above=0,
        infinite=True,
        read_by=("size",),
    )
    blocks: list[str] = option([], "Class names of blocks; empty: repeated structure is detected")
    policy: Any = option(
        None, "Blocks: package.module:function(module, name) -> bool", reference=True
    )


@dataclass
class PrefetchConfig:
    """Prefetch of parameters: the number of groups that are all-gathered ahead of the running
    group, in execution order.

    For each group ahead, one more set of unsharded parameters is in memory. A value above the
    number of groups means all groups.
    """

    forward: int = option(0, "Groups gathered ahead in forward; 0: each when it is reached", min=0)
    backward: int = option(1, "Groups gathered ahead in backward; 0: each when it begins", min=0)


@dataclass
class FSDPConfig:
    """Options of FSDP2 for the collectives inside a replica. They change neither bytes nor results
    in fp32.

    The methods of ``FSDPModule`` are ``set_reduce_scatter_max_input_buffers``,
    ``set_separate_reduce_scatter_group`` and ``set_symm_mem_for_comm``. With one of the last two
    options, ranks do not compare the order of their collectives. If ranks of a shard group run
    different modules, no error names them. With symmetric memory, a reduction in 16 bits rounds
    each partial sum.
    """

    reduce_scatter_buffers: int = option(
        1,
        "Reduce-scatters in flight, each with the input buffer of one group",
        min=1,
    )
    separate_reduce_scatter_group: bool = option(
        False,
        "Give reduce-scatters a process group, so that they run next to all-gathers",
    )
    symmetric_memory: bool = option(
        False,
        "GPU only: all-gathers in symmetric memory of NCCL",
    )

    @property
    def keeps_order(self) -> bool:
        """True if ranks compare the order of their collectives before they issue them."""
        return not (self.separate_reduce_scatter_group or self.symmetric_memory)


_dtype = partial(option, choices=("fp64", "fp32", "bf16", "fp16"))


@dataclass
class PrecisionConfig:
    """Dtypes of mixed precision: parameters, gradients, activations, outputs and buffers."""

    name: str = option(
        "fp32",
        "Set by the group: precision=bf16. auto: bf16 on GPUs with fast bf16 products, else fp32",
    )
    storage: str = _dtype("fp32", "Dtype of sharded parameters, gradients, optimizer state")
    param: str = _dtype("fp32", "Dtype of gathered parameters and activations")
    reduce: str = _dtype("fp32", "Dtype of gradients between ranks; rounds the sums")
    tf32: bool = option(
        True, "GPU only: fp32 matrix products round their inputs to TF32, 8 times as fast"
    )
    loss_scaling: bool = option(False, "Dynamic loss scaling", read_by=("fp16",), of="param")
    output: str | None = _dtype(None, "Dtype of the root's outputs; null: as computed")
    buffers: str | None = _dtype(None, "Dtype of buffers; null: as built, fp64 with storage=fp64")
    cast_forward_inputs: bool = option(True, "Cast inputs to `param`; false: the model must match")
    keep_low_precision_gradients: bool = option(
        False,
        "Leave gradients in `reduce` instead of casting them to `storage`. For optimizers of your "
        "own that read such gradients, at half the memory",
    )
    fp32_modules: list[str] = option(
        [],
        "Class names that compute in fp32 all the same, each instance its own group",
        read_by=("bf16", "fp16"),
        of="param",
    )
    float8: str = option(
        "none",
        "Linear layers of blocks in 8-bit floats, with a scale per tensor or row. Rows are more "
        "accurate and slower. Needs torchao, a GPU of capability 8.9 and compile=block",
        choices=("none", "tensorwise", "rowwise"),
    )
    float8_exclude: list[str] = option(
        [],
        "Patterns of module names that stay out of float8, such as *.attention.*",
        read_by=("tensorwise", "rowwise"),
        of="float8",
    )


PRECISIONS = {
    "fp64": PrecisionConfig("fp64", "fp64", "fp64", "fp64"),
    "fp32": PrecisionConfig("fp32"),
    "bf16": PrecisionConfig("bf16", "fp32", "bf16", "fp32"),
    "bf16_reduce_bf16": PrecisionConfig("bf16_reduce_bf16", "fp32", "bf16", "bf16"),
    "fp16": PrecisionConfig("fp16", "fp32", "fp16", "fp32", loss_scaling=True),
}


_blocks = partial(option, read_by=("full", "selective", "offload"))


@dataclass
class ActivationCheckpointingConfig:
    """Activations that backward recomputes. ``full`` saves only block inputs. ``selective`` also
    saves the results of the operators in ``keep`` and recomputes the cheaper results. With
    ``budget`` the compiler chooses the saved activations within ``memory_budget``. ``offload``
    recomputes nothing and keeps the saved activations of blocks in host memory."""

    name: str = option("none", choices=("none", "full", "selective", "budget", "offload"))
    every: int = _blocks(1, "Checkpoint one block in so many; 2: half the saving and cost", min=1)
    keep: list[str] = option(
        [
            *("mm", "bmm", "addmm", "scaled_dot_product_*"),
            *("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce"),
        ],
        "Operators whose results stay in memory. By default operators that are expensive to "
        "compute and small in memory",
        read_by=("selective",),
    )
    memory_budget: float = option(
        0.5, "Share of activations kept; 0: none, 1: all", between=(0, 1), read_by=("budget",)
    )
    blocks: list[str] = _blocks([], "Class names of checkpointed blocks, if not bucketing.blocks")
    policy: Any = _blocks(None, "Which modules, as bucketing.policy, not blocks", reference=True)
    offload: bool = option(
        False,
        "Keep saved block inputs and kept results in host memory",
        read_by=("full", "selective"),
    )

    @property
    def compiler_budget(self) -> float | None:
        """Share of activations that the compiler may save; None if the compiler does not choose the
        saved activations."""
        return self.memory_budget if self.name == "budget" else None

    @property
    def offloads(self) -> bool:
        """True if saved activations of blocks are in host memory."""
        return self.name == "offload" or (self.name in ("full", "selective") and self.offload)


@dataclass
class CompileConfig:
    """Parts of the model that torch.compile compiles. With ``block`` each repeated block is
    compiled separately (one compilation serves all equal blocks). ``auto`` is ``block`` on GPUs for
    a model with repeated blocks, otherwise ``none``."""

    name: str = option("none", choices=("none", "block", AUTOMATIC))
    backend: str = option(
        "inductor", "Backend; inductor needs a C++ compiler", read_by=("block", AUTOMATIC)
    )


_diloco = partial(option, read_by=("diloco",))


@dataclass
class SyncConfig:
    """Synchronization over the replicate axis; docs/sync.md recommends a method per network.

    ``every_step`` reduces the gradients of every global batch. With ``diloco`` (Douillard et al.
    2023) each replica trains independently, and every ``every`` steps the change of its parameters
    is averaged and applied to the parameters that all replicas share.
    """

    name: str = option("every_step", choices=("every_step", "diloco"))
    wire: str = option(
        "auto",
        "Communication format between replicas, independent of the shard axis. auto = "
        "precision.reduce with every_step, fp32 with diloco; bf16 = half the bytes of fp32; int8 = "
        "a quarter, rounded at random, one scale per block; int4 = an eighth, with error feedback",
        choices=("auto", "fp32", "bf16", "int8", "int4"),
    )
    warmup: float | int = option(
        0.015,
        "Steps that are sent in bf16 first, or below 1 the share of train.steps",
        min=0,
        read_by=("int4",),
        of="wire",
    )
    every: int = _diloco(30, "Steps between two exchanges of the same parameters", min=1)
    fragments: int = _diloco(1, "Parts of the model exchanged in turn, not all at once", min=1)
    delay: int = _diloco(0, "Steps of training while a fragment is exchanged", min=0)
    mix: float | int | str = _diloco(
        "auto", "Share kept of its own parameters; auto = 0, or 0.5 with a delay", between=(0, 1)
    )
    outer_lr: float | int | str = _diloco(
        "auto", "Learning rate of the outer Nesterov step; auto = 0.7", above=0
    )
    outer_momentum: float | int | str = _diloco(
        "auto", "Momentum of the outer Nesterov step; auto = 0.6", between=(0, 1)
    )
    compare_every: int = option(
        50, "Steps between comparisons of the replicas, which must be equal; 0: never", min=0
    )
    during_accumulation: str = option(
        "reduce_scatter_only",
        "Reduction in each micro-batch. full = over both axes (most bytes); reduce_scatter_only = "
        "over shards; none = nothing before the last one (whole gradients in memory)",
        choices=("full", "reduce_scatter_only", "none"),
    )
    bucket_mib: float | int | str = option(
        "auto",
        "MiB of gradients of small groups that cross at once; auto = 4, or 25 on a GPU",
        above=0,
    )

    def for_device(self, device_type: str) -> SyncConfig:
        """Return a copy without ``bucket_mib=auto``."""
        if self.bucket_mib != AUTOMATIC:
            return self
        # Buckets are larger for GPUs: over the network, small messages take as long as larger
        # messages.
        on_device = device_type not in ("", "cpu")
        return dataclasses.replace(self, bucket_mib=25.0 if on_device else 4.0)

    @property
    def bucket_bytes(self) -> int:
        """Bytes of ``bucket_mib``; with ``auto`` on a CPU."""
        return int(float(self.for_device("cpu").bucket_mib) * 2**20)


@dataclass
class ChecksConfig:
    """Checks for errors of a script, such as a write to an unsharded parameter.

    The checks cost about a microsecond per call of torch, and are removed after ``steps`` steps.
    """

    steps: int | str = option(
        2,
        "First steps of the optimizer with checks for errors of the script; 0 = off",
        min=0,
        words=("always", "off"),
    )


STRATEGIES = {name: StrategyConfig(name) for name in STRATEGY_NAMES}
_Section = TypeVar("_Section")


@dataclass(init=False)
class ParallelConfig:
    """Configuration of `parallel2d.parallelize`, in addition to the model and the mesh.

    The first five sections also take the name of a preset: ``ParallelConfig("zero3",
    precision="bf16")``.

    Raises:
        ConfigError: for an unknown name, and for a section of another type.
    """

    strategy: StrategyConfig
    bucketing: BucketingConfig
    precision: PrecisionConfig
    activation_checkpointing: ActivationCheckpointingConfig
    compile: CompileConfig
    prefetch: PrefetchConfig
    sync: SyncConfig
    checks: ChecksConfig
    fsdp: FSDPConfig
    # GPU only: parameters, gradients and optimizer state are in pinned CPU memory, and the
    # optimizer runs on the CPU. A step is slower by both copies and by the CPU optimizer.
    cpu_offload: bool
    allow_cross_node: bool  # as MeshConfig.allow_cross_node

    def __init__(
        self,
        strategy: StrategyConfig | str = "hybrid",
        bucketing: BucketingConfig | str = "block",
        precision: PrecisionConfig | str = "fp32",
        activation_checkpointing: ActivationCheckpointingConfig | str = "none",
        compile: CompileConfig | str = "none",
        prefetch: PrefetchConfig | None = None,
        sync: SyncConfig | None = None,
        cpu_offload: bool = False,
        allow_cross_node: bool = False,
        checks: ChecksConfig | None = None,
        fsdp: FSDPConfig | None = None,
    ) -> None:
        self.strategy = named_strategy(strategy)
        self.bucketing = _section("bucketing", bucketing, BucketingConfig)
        self.precision = _section("precision", precision, PrecisionConfig, PRECISIONS)
        self.activation_checkpointing = _section(
            "activation_checkpointing", activation_checkpointing, ActivationCheckpointingConfig
        )
        self.compile = _section("compile", compile, CompileConfig)
        self.prefetch = _section("prefetch", prefetch or PrefetchConfig(), PrefetchConfig)
        self.sync = _section("sync", sync or SyncConfig(), SyncConfig)
        self.checks = _section("checks", checks or ChecksConfig(), ChecksConfig)
        self.fsdp = _section("fsdp", fsdp or FSDPConfig(), FSDPConfig)
        self.cpu_offload = cpu_offload
        self.allow_cross_node = allow_cross_node


def named_strategy(strategy: StrategyConfig | str) -> StrategyConfig:
    """Return the strategy of that name. Raises `ConfigError` for an unknown name."""
    return _section("strategy", strategy, StrategyConfig, STRATEGIES)


def presets(kind: type[_Section]) -> dict[str, _Section]:
    """Return one section of ``kind`` per choice of its name, with all other keys at their
    defaults."""
    choosing = kind.__dataclass_fields__.get("name")  # type: ignore[attr-defined]
    names = choosing.metadata.get("choices", ()) if choosing else ()
    return {name: kind(name) for name in names}  # type: ignore[call-arg]


def _section(
    key: str, value: object, kind: type[_Section], named: Mapping[str, _Section] | None = None
) -> _Section:
    """Return ``value``, or a copy of the preset that it names. Raises `ConfigError` for any other
    type."""
    named = named or presets(kind)
    if isinstance(value, str) and named:
        problem = choice_problem(key, value, named)
        if problem:
            raise ConfigError(problem)
        return dataclasses.replace(named[value])  # type: ignore[type-var]
    if not isinstance(value, kind):
        allowed = f"a preset name or {kind.__name__}" if named else kind.__name__
        raise ConfigError(f"{key} must be {allowed}, got {type(value).__name__}")
    return value
