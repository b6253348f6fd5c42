"""A whole job: its optimizer, loop, metrics, checkpoints and launch, and `TrainConfig`, which holds
everything."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from parallel2d.config.cluster import ClusterConfig, PlanConfig
from parallel2d.config.model_and_data import DataConfig
from parallel2d.config.options import option
from parallel2d.config.parallel import (
    AUTOMATIC,
    ActivationCheckpointingConfig,
    BucketingConfig,
    CompileConfig,
    MeshConfig,
    ParallelConfig,
    PrecisionConfig,
    PrefetchConfig,
    StrategyConfig,
    SyncConfig,
)
from parallel2d.errors import ConfigError

# Seconds that ranks may wait for each other in the first step, unless told otherwise.
FIRST_STEP_TIMEOUT = 1800.0
OPTIMIZER_NAMES = ("adamw", "adam", "sgd", "adafactor", "muon")


@dataclass
class OptimizerConfig:
    """How gradients become updates. Weight decay acts on matrices only, never on norms and biases,
    unless ``groups`` says so.

    ``adamw``, ``adam``, ``sgd``: elementwise, nothing is sent. ``adafactor``: row and column
    statistics instead of a second moment per element; sends those. ``muon``: hidden matrices by
    Muon, each on one rank, sent in bf16; embeddings, head, norms, biases by AdamW.
    """

    name: str = option("adamw", choices=OPTIMIZER_NAMES)  # Set by the group: optimizer=muon
    lr: float = option(1e-3, above=0)  # Learning rate at its peak; the scheduler scales it
    # adamw, adam, and muon's AdamW: decay of the first and the second moment, per step
    betas: list[float] = option([0.9, 0.95])
    # adamw, adam, and muon's AdamW: added to the root of the second moment
    eps: float = option(1e-8, above=0)
    # Weight decay of matrices; added to the gradient with adam and sgd, decoupled with others
    weight_decay: float = option(0.1, minimum=0)
    # Largest global 2-norm of the gradient; inf: never clipped, still measured
    clip_norm: float = option(1.0, above=0, infinite=True)
    # Other settings for some parameters: [{pattern: head.*, lr_scale: 0.5, weight_decay: 0}].
    # Patterns are of canonical names; with muon an entry may hold algorithm (muon, adamw); the
    # first match counts
    groups: list[Any] = option([])
    # Kernels per update: fused = one for all; foreach = one per operation; loop = the least memory.
    # fused is one per dtype and device, loop one per operation and parameter. sgd: foreach or loop
    implementation: str = option("fused", choices=("fused", "foreach", "loop"))
    # adamw, adam: divide by the largest second moment so far; a third more optimizer state
    amsgrad: bool = False
    # sgd (0: no state at all) and muon: share of the former update that is kept
    momentum: float = option(0.9, minimum=0, maximum=1)
    nesterov: bool = False  # sgd, muon: look one step ahead with the momentum
    # adafactor: the second moment forgets with 1 - step ** beta2_decay
    beta2_decay: float = option(-0.8, maximum=0)
    # adafactor: largest root mean square of an update before the rate
    clip_threshold: float = option(1.0, minimum=1)
    # muon: match_rms_adamw scales updates to the size of AdamW's; original wants 20 times the lr.
    # With match_rms_adamw one lr serves both
    adjust_lr: str = option("match_rms_adamw", choices=("match_rms_adamw", "original"))
    # muon: Newton-Schulz iterations per update, 3 matrix products each
    newton_schulz_steps: int = option(5, minimum=1, maximum=99)


OPTIMIZERS = {
    "adamw": OptimizerConfig("adamw"),
    "adam": OptimizerConfig("adam", weight_decay=0.0),
    "sgd": OptimizerConfig("sgd", lr=0.1, weight_decay=0.0, implementation="foreach"),
    "adafactor": OptimizerConfig("adafactor", lr=1e-2, weight_decay=0.0),
    "muon": OptimizerConfig("muon", momentum=0.95, nesterov=True),
}


@dataclass
class SchedulerConfig:
    """The learning rate as a function of the step alone: linear warm-up, then the named shape down
    to ``floor`` · lr."""

    # Set by the group: scheduler=wsd
    name: str = option("cosine", choices=("constant", "linear", "cosine", "wsd"))
    # Steps in which the learning rate rises to optimizer.lr
    warmup_steps: int = option(0, minimum=0)
    floor: float = option(0.1, minimum=0, maximum=1)  # Share of lr that is left at the last step
    # wsd: the last part of the run, in which the learning rate decays
    decay_fraction: float = option(0.2, above=0, maximum=1)


@dataclass
class StopConfig:
    """Ends the run, saved and with exit code 0, when a metric has stopped improving."""

    # Metric that must go on improving, such as validation/loss; null: the run is not stopped. Also
    # loss, grad_norm, validation/NAME/loss, or a metric of a hook
    metric: str | None = None
    # Measurements in a row that may bring nothing better than the best one
    patience: int = option(5, minimum=1)
    min_delta: float = option(0.0, minimum=0)  # Better by less than this counts as not better
    # Whether small or large values of the metric are better
    mode: str = option("min", choices=("min", "max"))


@dataclass
class LoopConfig:
    """The training loop. Batch sizes count sequences, or images; steps count from 1."""

    steps: int = option(300, minimum=1)  # Steps of the run, one global batch each
    # Passes over the training data, after which the run ends; null: it ends after `steps`. Sets
    # `steps`, and so the schedule of the learning rate, from the size of the data, and
    # `data.epochs`. `data.end` decides about the last global batch
    epochs: int | None = None
    # Decides the initial weights, the order of the data and dropout
    seed: int = option(0, minimum=0, maximum=2**63 - 1)
    # Sequences, or images, of a step on all ranks together
    global_batch_size: int = option(32, minimum=1)
    # Sequences, or images, that a rank computes at once; auto: largest divisor up to 8. What is
    # left of the global batch is accumulated
    micro_batch_size: int | str = option("auto", minimum=1, auto=True)
    seq_len: int = option(128, minimum=1)  # Tokens of a sequence; images have none
    # Tokens whose logits exist at a time: the loss is computed with the head in chunks; null: whole
    loss_chunk: int | None = option(None, minimum=1, null=True)
    # Times the squared log-sum-exp of a token's logits is added to its loss, in training alone
    z_loss: float = option(0.0, minimum=0)
    validate_every: int = option(100, minimum=0)  # Steps between validations; 0: never
    validate_batches: int = option(4, minimum=1)  # Global batches per validation
    # Steps in a row with a non-finite gradient, before the run ends with an error
    max_skipped_steps: int = option(20, minimum=1)
    # Steps between Python's garbage collections, on all ranks at once instead of at random
    gc_every: int = option(100, minimum=1)
    deterministic: bool = False  # Use torch.use_deterministic_algorithms; slower on GPU
    stop: StopConfig = field(default_factory=StopConfig)
    # Classes of your own that are called as the run goes: [package.module:Class]. Or {hook:
    # package.module:Class, and its keyword arguments}; called on every rank, with one small
    # exchange per step (docs/hooks.md)
    hooks: list[Any] = option([])
    # Metric whose last value the job returns to a sweep: a key of metrics.jsonl. Smaller is better
    # unless the sweeper says otherwise
    objective: str = "validation/loss"
    # Compare a few steps with one process before the first one, and refuse to go on if they differ
    certify: bool = False
    # Compare only, and do not train; `python -m parallel2d.certify` sets it
    certify_only: bool = False


@dataclass
class MetricsConfig:
    """What is written and shown."""

    # Steps between rows of metrics.jsonl; losses in between are reduced all the same
    log_every: int = option(1, minimum=1)
    # How steps are shown; rich falls back to plain off a terminal
    console: str = option("rich", choices=("rich", "plain", "silent"))
    tensorboard: bool = True  # Write the same values for TensorBoard to tensorboard/ in the run dir
    # On GPU, record where memory was allocated, for the snapshot of an out-of-memory
    memory_history: bool = False
    # Count bytes, calls and seconds per mesh axis. false: nothing is wrapped, stragglers by CPU
    # time
    communication: bool = True


@dataclass
class ProfileConfig:
    """Traces of a few steps: ``profile.steps=[10,13]`` writes ``traces/rank-N-steps-10-13.json``.
    Those steps run slower."""

    steps: list[int] = option([])  # First and last step that is traced; empty: none
    ranks: list[int] = option([0])  # Ranks that are traced; empty: all


@dataclass
class CheckpointConfig:
    """When the run saves, what it keeps, where it resumes. The loop waits for a copy to CPU memory
    only, once per save."""

    enabled: bool = True  # Save checkpoints; false: nothing is saved, resume still works
    # Steps between checkpoints; 0: not by steps. A killed run loses at most this many
    every: int = option(100, minimum=0)
    # Minutes between checkpoints, beside `every`; 0: not by time. Rank 0's clock decides
    every_minutes: float = option(0.0, minimum=0)
    # Save after the first step of this process: finds out at once whether saving works
    on_first_step: bool = False
    # Write while training goes on; false: the loop waits, and saves one copy in CPU memory
    asynchronous: bool = True
    # Newest checkpoints that are kept; 0: all. Each costs 3x the parameters with AdamW
    keep_last: int = option(3, minimum=0)
    # Checkpoints of steps that are multiples of it are never deleted; 0: none
    keep_every: int = option(0, minimum=0)
    # Metric, as train.stop.metric, whose best step is saved and kept; null: none. Each step with a
    # new best value is saved, and the best one is kept beside the newest; checkpoints/best.json
    # names it
    keep_best: str | None = None
    # Whether small or large values of checkpoint.keep_best are better
    keep_best_mode: str = option("min", choices=("min", "max"))
    # Saves in a row that may fail before the run ends with an error
    max_failures: int = option(3, minimum=1)
    # Steps between copies of the state in each node's shared memory; 0: none. Restarted workers
    # lose these steps at most instead of `every`. Costs 2x a node's share of the state in /dev/shm.
    # auto: 10 where workers are restarted (TORCHELASTIC_MAX_RESTARTS above 0). With two replicas it
    # covers lost nodes, with one lost workers
    memory_every: int | str = option("auto", minimum=0, auto=True)
    # Where checkpoints are: any path or fsspec address (s3://bucket/run); null: in the run dir
    folder: str | None = None
    # auto: from the newest sound one of this run dir; never: start afresh; or a checkpoint's path
    resume: str = "auto"
    # What is resumed; model_only: weights alone, the optimizer starts fresh
    load: str = option("all", choices=("all", "model_only"))
    # Refuse names and shapes that differ; false: they are passed over, and listed
    strict: bool = True


@dataclass
class LaunchConfig:
    """Starting workers when not under torchrun or srun: on this machine, or on every node where the
    same command is started."""

    # Workers of a node; auto: one per GPU, 4 on a machine without
    nproc_per_node: int | str = option("auto", minimum=1, auto=True)
    # Nodes of the job, or a range such as 2:4. A range lets it go on with fewer and grow again,
    # with the same global batch and loss curve
    nnodes: int | str = 1
    # HOST:PORT where nodes meet: an address of one of them, or of a store outside of them
    rdzv_endpoint: str | None = None
    # Tells jobs apart that meet at the same endpoint at the same time. Needed where the store runs
    # outside of the nodes
    job_id: str | None = None
    # File with the secret that the nodes of one job share; null: from PARALLEL2D_SECRET. What they
    # know and nobody else: a file that its owner alone can read, made by `python -m
    # parallel2d.launch secret`
    secret_file: str | None = None
    # Run on several nodes without a secret: whoever reaches the endpoint decides what the job runs
    insecure: bool = False
    # Seconds to wait for the smallest number of nodes, and for the store
    rendezvous_timeout: float = option(600.0, minimum=1)
    # Restarts in a row after failures without a step further than before. auto: 0 on one node, 5 on
    # several
    max_restarts: int | str = option("auto", minimum=0, auto=True)
    timeout: float = option(600.0, above=0)  # Seconds that a collective may wait for a late rank
    # Seconds of the same in the first step; null: 1800, or `timeout` if larger. That step compiles,
    # connects and reads from a cold file system
    first_step_timeout: float | None = None
    # Seconds that workers have to save after SIGTERM or SIGUSR1 before they are ended
    grace_s: int = option(60, minimum=1)
    # Exit code of a run that such a signal ended after saving (EX_TEMPFAIL)
    requeue_exit_code: int = option(75, minimum=1, maximum=255)
    # Replaces the detected host identity (host name and network namespace)
    host_id: str | None = None

    @property
    def longest_wait(self) -> float:
        """Seconds that ranks may wait for each other until the first step is done."""
        if self.first_step_timeout is not None:
            return self.first_step_timeout
        return max(FIRST_STEP_TIMEOUT, self.timeout)

    @property
    def node_range(self) -> tuple[int, int]:
        """``nnodes`` as (smallest, largest): ``4`` is (4, 4), ``2:4`` is (2, 4). Raises
        `ConfigError`."""
        low, colon, high = str(self.nnodes).partition(":")
        if not colon:
            high = low
        if low.isdecimal() and high.isdecimal() and 1 <= int(low) <= int(high):
            return int(low), int(high)
        raise ConfigError(
            f"launch.nnodes={self.nnodes} must be a number of nodes, at least 1, or a range such "
            "as 2:4"
        )

    @property
    def elastic(self) -> bool:
        """Whether the number of nodes may change while the job runs."""
        smallest, largest = self.node_range
        return smallest != largest


@dataclass
class TrainConfig:
    """The whole job: what ``python -m parallel2d.train`` composes."""

    mesh: MeshConfig = field(default_factory=MeshConfig)
    strategy: StrategyConfig = field(default_factory=StrategyConfig)
    bucketing: BucketingConfig = field(default_factory=BucketingConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    activation_checkpointing: ActivationCheckpointingConfig = field(
        default_factory=ActivationCheckpointingConfig
    )
    compile: CompileConfig = field(default_factory=CompileConfig)
    prefetch: PrefetchConfig = field(default_factory=PrefetchConfig)
    # GPU only: parameters, gradients and optimizer state live in CPU memory, where the optimizer
    # runs. A step is slower by both copies and by the CPU's optimizer
    cpu_offload: bool = False
    sync: SyncConfig = field(default_factory=SyncConfig)
    model: Any = "???"  # LlamaModel, CustomModel or HuggingFaceModel
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
        """The ``data`` section, which ends after ``train.epochs`` where these are given."""
        if self.train.epochs is None:
            return self.data
        return replace(self.data, epochs=self.train.epochs)

    @property
    def is_automatic(self) -> bool:
        """Whether the planner has to choose the layout first."""
        return self.strategy.name == AUTOMATIC

    def parallel(self) -> ParallelConfig:
        """The part that `parallel2d.parallelize` reads."""
        return ParallelConfig(
            strategy=self.strategy,
            bucketing=self.bucketing,
            precision=self.precision,
            activation_checkpointing=self.activation_checkpointing,
            compile=self.compile,
            prefetch=self.prefetch,
            sync=self.sync,
            cpu_offload=self.cpu_offload,
            allow_cross_node=self.mesh.allow_cross_node,
        )


@dataclass(frozen=True)
class Job:
    """One composed job: its checked configuration, its directory, and the words it was started
    with. ``label``: tells jobs apart that print to one terminal."""

    config: TrainConfig
    run_dir: str
    overrides: tuple[str, ...]
    restarted: bool = False  # these workers replace others of the same job
    label: str = ""
    records: str = ""  # folder in the run directory in which Hydra's records wait
    certified: bool = False
    is_judged: bool = False  # a sweeper chooses the next job by this one's objective
