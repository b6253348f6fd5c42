"""The sections ``optimizer``, ``scheduler``, ``train``, ``metrics``, ``profile`` and ``checkpoint``
of a job, and `TrainConfig`, which contains all sections. The module `launch` defines the section
``launch``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from parallel2d.base.config.cluster import ClusterConfig, PlanConfig
from parallel2d.base.config.launch import LaunchConfig
from parallel2d.base.config.model_and_data import DataConfig
from parallel2d.base.config.options import option
from parallel2d.base.config.parallel import (
    AUTOMATIC,
    ActivationCheckpointingConfig,
    BucketingConfig,
    ChecksConfig,
    CompileConfig,
    FSDPConfig,
    MeshConfig,
    ParallelConfig,
    PrecisionConfig,
    PrefetchConfig,
    StrategyConfig,
    SyncConfig,
)
from parallel2d.base.errors import ConfigError

_adam = partial(option, read_by=("adamw", "adam", "muon"))
_momentum = partial(option, read_by=("sgd", "muon"))
_muon = partial(option, read_by=("muon",))
_custom = partial(option, read_by=("custom",))


@dataclass
class OptimizerConfig:
    """The optimizer. Weight decay applies to matrices only, not to norms and biases, unless
    ``groups`` sets it.

    ``adamw``, ``adam`` and ``sgd`` update elementwise, without communication. ``muon`` updates each
    hidden matrix on one rank, which sends it in bf16; AdamW updates embeddings, head, norms and
    biases. ``custom`` is your own class or function.
    """

    name: str = option("adamw", choices=("adamw", "adam", "sgd", "muon", "custom"))
    lr: float = option(0.001, "Learning rate at its peak; the scheduler scales it", above=0)
    betas: list[float] = _adam([0.9, 0.95], "Decay of both moments; with muon, of its AdamW")
    eps: float = _adam(1e-08, "Added to the root of the second moment; with muon, AdamW's", above=0)
    weight_decay: float = option(0.1, "Decay of matrices; adam, sgd: part of the gradient", min=0)
    clip_norm: float = option(
        1.0, "Largest global 2-norm of the gradient; inf: never clipped", above=0, infinite=True
    )
    groups: list[Any] = option(
        [],
        "Other settings for some parameters: [{pattern: head.*, lr_scale: 0.5, weight_decay: 0}]. "
        "Patterns are of fully qualified names; with muon an entry may hold algorithm (muon, "
        "adamw); the first match counts",
    )
    implementation: str = option(
        "fused",
        "Kernels per update. fused = one per dtype and device; foreach = one per operation; loop "
        "= one per operation and parameter, with the least memory",
        choices=("fused", "foreach", "loop"),
        read_by=("adamw", "adam", "sgd", "muon"),
    )
    state_dtype: str = option(
        "fp32",
        "Dtype of the state of parameters with two or more dims. int8 = codes with a scale per "
        "block of a row; bf16 and int8 round stochastically. fp32 = the dtype of the parameter",
        choices=("fp32", "bf16", "int8"),
        read_by=("adamw", "adam", "sgd"),
    )
    amsgrad: bool = option(
        False, "Divide by the largest second moment; a third more state", read_by=("adamw", "adam")
    )
    momentum: float = _momentum(
        0.9, "Share of the former update that is kept; sgd with 0 has no state", between=(0, 1)
    )
    nesterov: bool = _momentum(False, "Look one step ahead with the momentum")
    adjust_lr: str = _muon(
        "match_rms_adamw",
        "With match_rms_adamw one lr serves AdamW too; original wants 20 times the lr",
        choices=("match_rms_adamw", "original"),
    )
    newton_schulz_steps: int = _muon(5, "Iterations per update, 3 products each", between=(1, 99))
    matrices: list[Any] = _muon(
        [],
        "Matrices in a parameter: [{pattern: *.wqkv.weight, rows: 3}]. rows and columns cut it "
        "into equal parts or sizes [64, 32, 32]; dims before the last two count matrices; flatten: "
        "true joins the dims after the first (convolutions)",
    )
    target: str | None = _custom(
        None,
        "package.module:build(groups, **arguments) -> torch.optim.Optimizer",
        reference=True,
        required_by=("custom",),
    )
    arguments: dict[str, Any] = _custom({}, "Of the function: optimizer.arguments.beta=0.9")


OPTIMIZERS = {
    "adamw": OptimizerConfig("adamw"),
    "adam": OptimizerConfig("adam", weight_decay=0.0),
    "sgd": OptimizerConfig("sgd", lr=0.1, weight_decay=0.0, implementation="foreach"),
    "muon": OptimizerConfig("muon", momentum=0.95, nesterov=True),
    "custom": OptimizerConfig("custom", weight_decay=0.0),
}


@dataclass
class SchedulerConfig:
    """The learning rate as a function of the step: linear warm-up, then the named schedule, which
    ends at ``floor`` · lr."""

    name: str = option("cosine", choices=("constant", "linear", "cosine", "wsd"))
    warmup_steps: int = option(0, "Steps in which the learning rate rises to optimizer.lr", min=0)
    floor: float = option(
        0.1, "Share of lr at the last step", between=(0, 1), read_by=("linear", "cosine", "wsd")
    )
    decay_fraction: float = option(
        0.2, "Last part of the run, where lr decays", above=0, max=1, read_by=("wsd",)
    )


@dataclass
class StopConfig:
    """Stop when a metric no longer improves: the run saves and ends with exit code 0."""

    metric: str | None = option(None, "Metric that must improve, also of a hook; null: never stop")
    patience: int = option(5, "Measurements in a row that may be no better", min=1, needs="metric")
    min_delta: float = option(0.0, "Better by less than this is not better", min=0, needs="metric")
    mode: str = option("min", "Which values are better", choices=("min", "max"), needs="metric")


@dataclass
class LoopConfig:
    """The training loop. Batch sizes count samples, such as sequences; steps count from 1."""

    steps: int = option(300, "Steps of the run, one global batch each", min=1)
    epochs: int | None = option(
        None, "Passes over the data; set `steps` and `data.epochs`; null: ends after `steps`", min=1
    )
    seed: int = option(0, "Decides initial weights, data order and dropout", between=(0, 2**63 - 1))
    global_batch_size: int = option(32, "Samples of a step on all ranks", min=1)
    tokens_per_batch: int | None = option(
        None,
        "Tokens of a step on all ranks, in sequences filled with whole documents. It sets "
        "`global_batch_size`, `data.packing=fitted` and `data.intra_document_masking`",
        min=1,
    )
    micro_batch_size: int | str = option(
        "auto",
        "Samples that a rank computes at once; auto: largest divisor up to 8, or by `memory_gib`",
        min=1,
    )
    memory_gib: float | None = option(
        None,
        "Memory of a rank: with micro_batch_size=auto the largest size that fits, measured before "
        "the first step. On CPU it counts the process; null: nothing is measured",
        above=0,
    )
    seq_len: int = option(128, "Tokens of a sequence; data=custom has none", min=1)
    loss: str | None = option(
        None,
        "package.module:function(output, targets); null: the model's own, or cross-entropy. It "
        "returns a sum or a mean over targets that are not -100",
        reference=True,
    )
    loss_is: str = option(
        "auto",
        "Kind of this loss. auto: a sum or a mean, detected on three samples; "
        "mean_per_micro_batch: any other, which depends on the layout",
        choices=("auto", "mean_per_micro_batch"),
    )
    loss_chunk: int | None = option(None, "Tokens whose logits exist at a time; null: all", min=1)
    z_loss: float = option(0.0, "Weight in a token's loss of the squared log-sum-exp", min=0)
    ema: float | None = option(
        None, "Decay of averages of the weights, validated and saved too", above=0, max=0.999999
    )
    validate_every: int = option(100, "Steps between validations; 0: never", min=0)
    validate_batches: int = option(4, "Global batches per validation", min=1)
    max_skipped_steps: int = option(20, "Non-finite gradients in a row before the run fails", min=1)
    gc_every: int = option(100, "Steps between garbage collections, on all ranks at once", min=1)
    deterministic: bool = option(False, "Use torch.use_deterministic_algorithms; slower on GPU")
    stop: StopConfig = field(default_factory=StopConfig)
    hooks: list[Any] = option(
        [],
        "Classes called as the run goes: [package.module:Class]. Or {hook: package.module:Class, "
        "and its arguments} (docs/hooks.md)",
    )
    objective: str = option("validation/loss", "Metric that a sweep compares, by its last value")
    certify: bool = option(False, "Compare a few steps with one process first; end if they differ")
    certify_only: bool = option(False, "Do not train then; `python -m parallel2d.certify` sets it")


@dataclass
class MetricsConfig:
    """Measurements: interval, files and console."""

    log_every: int = option(1, "Steps between rows of metrics.jsonl; all losses are reduced", min=1)
    console: str = option("rich", "How steps are shown", choices=("rich", "plain", "silent"))
    tensorboard: bool = option(True, "Write the same values to tensorboard/ in the run dir")
    memory_history: bool = option(False, "On GPU, record allocations for an out-of-memory snapshot")
    communication: bool = option(True, "Count bytes, calls, seconds per axis; false: wrap nothing")


@dataclass
class ProfileConfig:
    """Traces of a few steps: ``profile.steps=[10,13]`` writes ``traces/rank-N-steps-10-13.json``.
    The traced steps run slower."""

    steps: list[int] = option([], "First and last step that is traced; empty: none")
    ranks: list[int] = option([0], "Ranks that are traced; empty: all", needs="steps")


@dataclass
class CheckpointConfig:
    """Checkpoints: interval, retention, and the checkpoint to resume from. For each save, the loop
    waits for a copy to CPU memory, and does not wait for the write."""

    enabled: bool = option(True, "Save checkpoints; false: nothing is saved, resume still works")
    every: int = option(100, "Steps between saves, most that a crash loses; 0: not by steps", min=0)
    every_minutes: float = option(0.0, "Minutes between saves, of rank 0; 0: not by time", min=0)
    on_first_step: bool = option(False, "Save after the first step too, which shows that it works")
    asynchronous: bool = option(True, "Write while training continues; false: wait, no CPU copy")
    keep_last: int = option(3, "Newest checkpoints kept, with AdamW 3x parameters; 0: all", min=0)
    keep_every: int = option(0, "Checkpoints of its multiples are never deleted; 0: none", min=0)
    keep_best: str | None = option(
        None, "Metric of the best step, kept with the newest ones; checkpoints/best.json names it"
    )
    keep_best_mode: str = option(
        "min", "Whether small or large values are better", choices=("min", "max"), needs="keep_best"
    )
    max_failures: int = option(3, "Saves in a row that may fail before the run does", min=1)
    memory_every: int | str = option(
        "auto",
        "Steps between copies of the state in shared memory, for restarts (docs/checkpoints.md); "
        "0: none. They cost 2x each rank's part. auto: 10 where all restart or go back",
        min=0,
    )
    folder: str | None = option(
        None, "Where checkpoints are, such as s3://bucket/run (fsspec); null: in the run dir"
    )
    resume: str = option("auto", "auto: the run dir's newest sound one; never: afresh; or a path")
    load: str = option(
        "all", "State that is resumed; model_only: no optimizer", choices=("all", "model_only")
    )
    strict: bool = option(True, "Refuse names and shapes that differ; false: skip and list them")


@dataclass
class TrainConfig:
    """Configuration of a job, as ``python -m parallel2d.train`` composes it."""

    mesh: MeshConfig = field(default_factory=MeshConfig)
    strategy: StrategyConfig = field(default_factory=StrategyConfig)
    bucketing: BucketingConfig = field(default_factory=BucketingConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    activation_checkpointing: ActivationCheckpointingConfig = field(
        default_factory=ActivationCheckpointingConfig
    )
    compile: CompileConfig = field(default_factory=CompileConfig)
    prefetch: PrefetchConfig = field(default_factory=PrefetchConfig)
    fsdp: FSDPConfig = field(default_factory=FSDPConfig)
    cpu_offload: bool = option(False, "GPU only: parameters and optimizer in CPU memory; slower")
    sync: SyncConfig = field(default_factory=SyncConfig)
    checks: ChecksConfig = field(default_factory=ChecksConfig)
    model: Any = option("???", "LlamaModel, CustomModel or HuggingFaceModel")
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    train: LoopConfig = field(default_factory=LoopConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)

    def training_data(self) -> DataConfig:
        """Return the ``data`` section, with ``train.epochs`` as its end if this is set."""
        if self.train.epochs is None:
            return self.data
        return replace(self.data, epochs=self.train.epochs)

    @property
    def is_automatic(self) -> bool:
        """True if the planner has to choose the layout first."""
        return self.strategy.name == AUTOMATIC

    @property
    def replicas_survive(self) -> bool:
        """True if a failed replica does not force all ranks to restart. The other replicas continue
        without it, because each replica has the full state except for error feedback. If replicas
        split updates, the others wait for the failed replica."""
        certifies = self.train.certify or self.train.certify_only
        return self.strategy.placement.replicates and not certifies

    def parallel(self) -> ParallelConfig:
        """Return the sections that `parallel2d.parallelize` reads."""
        sync = self.sync
        if sync.warmup < 1:
            sync = replace(sync, warmup=math.ceil(sync.warmup * self.train.steps))
        return ParallelConfig(
            strategy=self.strategy,
            bucketing=self.bucketing,
            precision=self.precision,
            activation_checkpointing=self.activation_checkpointing,
            compile=self.compile,
            prefetch=self.prefetch,
            sync=sync,
            cpu_offload=self.cpu_offload,
            allow_cross_node=self.mesh.allow_cross_node,
            checks=self.checks,
            fsdp=self.fsdp,
        )


def with_tokens_per_batch(config: TrainConfig) -> TrainConfig:
    """Return ``config`` with the keys that ``train.tokens_per_batch`` sets. Raises `ConfigError`
    for keys that contradict it."""
    train, data = config.train, config.data
    if train.tokens_per_batch is None:
        return config
    given = f"train.tokens_per_batch={train.tokens_per_batch}"
    rows, rest = divmod(train.tokens_per_batch, train.seq_len)
    if rest or not rows:
        near = max(1, rows) * train.seq_len
        raise ConfigError(
            f"{given} must be a multiple of train.seq_len={train.seq_len}, such as {near}"
        )
    if train.global_batch_size not in (LoopConfig().global_batch_size, rows):
        raise ConfigError(
            f"{given} are {rows} sequences, and train.global_batch_size={train.global_batch_size}: "
            "omit one of them"
        )
    if data.has_own_samples or data.name == "bin":
        raise ConfigError(f"{given} needs data with documents, and data={data.name} has none")
    return replace(
        config,
        train=replace(train, global_batch_size=rows),
        data=replace(data, packing="fitted", intra_document_masking=True),
    )


@dataclass(frozen=True)
class Job:
    """A composed job: its checked configuration, its run directory, and the overrides of its
    command line."""

    config: TrainConfig  # checked
    run_dir: str
    overrides: tuple[str, ...]  # of the command line
    restarted: bool = False  # these workers replace ended workers of the same job
    label: str = ""  # distinguishes jobs that print to one terminal
    records: str = ""  # folder of the run directory for Hydra's records of a pending start
    certified: bool = False
    is_judged: bool = False  # a sweeper chooses the next job by the objective of this job
    # Sizes of the mesh axes over all nodes, if the job may train with missing nodes; otherwise None
    sizes: Mapping[str, int] | None = None
