"""A whole job: its optimizer, loop, metrics, checkpoints and launch, and `TrainConfig`, which holds
everything."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from parallel2d.config.model_and_data import DataConfig
from parallel2d.config.options import option
from parallel2d.config.parallel import (
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
    Muon, which gathers each one in bf16; embeddings, head, norms, biases by AdamW.
    """

    name: str = option("adamw", choices=OPTIMIZER_NAMES)
    lr: float = option(1e-3, above=0)
    betas: list[float] = option([0.9, 0.95])  # adamw, adam, and muon's AdamW
    eps: float = option(1e-8, above=0)  # the same
    # decoupled, but with adam and sgd, where it is added to the gradient
    weight_decay: float = option(0.1, minimum=0)
    # global 2-norm of the gradient; inf: never clipped, still measured
    clip_norm: float = option(1.0, above=0, infinite=True)
    # {pattern: of canonical names, with any of lr_scale, weight_decay, and with muon algorithm
    # (muon, adamw)}; the first match counts
    groups: list[Any] = option([])
    # fused: one kernel per dtype and device; foreach: one per operation; loop: one per operation
    # and parameter, least memory
    # sgd: foreach or loop
    implementation: str = option("fused", choices=("fused", "foreach", "loop"))
    # adamw, adam: divides by the largest second moment so far; a third more optimizer state
    amsgrad: bool = False
    momentum: float = option(0.9, minimum=0, maximum=1)  # sgd (0: no state at all), muon
    nesterov: bool = False  # sgd, muon
    # adafactor: the second moment forgets with 1 - step ** beta2_decay
    beta2_decay: float = option(-0.8, maximum=0)
    # adafactor: largest root mean square of an update before the rate
    clip_threshold: float = option(1.0, minimum=1)
    # muon: match_rms_adamw scales updates to the size of AdamW's, so that one lr serves both;
    # original wants about 20 times the lr
    adjust_lr: str = option("match_rms_adamw", choices=("match_rms_adamw", "original"))
    # muon: matrix products per update, 3 each
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

    name: str = option("cosine", choices=("constant", "linear", "cosine", "wsd"))
    warmup_steps: int = option(0, minimum=0)
    floor: float = option(0.1, minimum=0, maximum=1)  # share of lr that is left at the last step
    # wsd: the last part of the run in which it decays
    decay_fraction: float = option(0.2, above=0, maximum=1)


@dataclass
class LoopConfig:
    """The loop. Batch sizes count sequences, or images; steps count from 1."""

    steps: int = option(300, minimum=1)
    seed: int = option(0, minimum=0, maximum=2**63 - 1)
    global_batch_size: int = option(32, minimum=1)
    # per rank; auto: largest divisor up to 8
    micro_batch_size: int | str = option("auto", minimum=1, auto=True)
    seq_len: int = option(128, minimum=1)  # tokens of a sequence; images have none
    validate_every: int = option(100, minimum=0)  # steps; 0: never
    validate_batches: int = option(4, minimum=1)  # global batches per validation
    # non-finite steps in a row before the run ends with an error
    max_skipped_steps: int = option(20, minimum=1)
    # steps between collections, on all ranks at once, instead of at random
    gc_every: int = option(100, minimum=1)
    deterministic: bool = False  # torch.use_deterministic_algorithms; slower on GPU
    # compare a few steps with one process before the first one, and refuse to go on if they differ
    certify: bool = False
    certify_only: bool = False  # that alone; `python -m parallel2d.certify` sets it


@dataclass
class MetricsConfig:
    """What is written and shown."""

    log_every: int = option(1, minimum=1)  # steps; losses in between are reduced all the same
    # rich falls back to plain off a terminal
    console: str = option("rich", choices=("rich", "plain", "silent"))
    tensorboard: bool = True
    # on GPU: the snapshot that an out-of-memory leaves tells where blocks came from
    memory_history: bool = False
    # count bytes, calls and seconds per mesh axis; false: nothing is wrapped, stragglers by CPU
    # time
    communication: bool = True


@dataclass
class ProfileConfig:
    """Traces of a few steps: ``profile.steps=[10,13]`` writes ``traces/rank-N-steps-10-13.json``.
    Those steps run slower."""

    steps: list[int] = option([])  # the first and the last step that is traced; empty: none
    ranks: list[int] = option([0])  # that are traced; empty: all


@dataclass
class CheckpointConfig:
    """When the run saves, what it keeps, where it resumes. The loop waits for a copy to CPU memory
    only, once per save."""

    enabled: bool = True  # false: nothing is saved; resume still works
    # steps; 0: not by steps. A killed run loses at most this many
    every: int = option(100, minimum=0)
    # minutes, beside `every`; 0: not by time. Rank 0's clock decides
    every_minutes: float = option(0.0, minimum=0)
    # save after the first step of this process: finds out at once whether saving works
    on_first_step: bool = False
    # false: the loop waits until the checkpoint is on disk; saves one copy in CPU memory at most
    asynchronous: bool = True
    # newest checkpoints that are kept; 0: all. Each costs 3x the parameters with AdamW
    keep_last: int = option(3, minimum=0)
    keep_every: int = option(0, minimum=0)  # steps: multiples of it are never deleted; 0: none
    # saves in a row that may fail before the run ends with an error
    max_failures: int = option(3, minimum=1)
    # Steps between copies of the state in each node's shared memory, so that restarted workers lose
    # these steps at most instead of `every`; 0: none. Costs 2x a node's share of the state in
    # /dev/shm. auto: 10 where workers are restarted (TORCHELASTIC_MAX_RESTARTS above 0). With two
    # replicas it covers lost nodes, with one lost workers
    memory_every: int | str = option("auto", minimum=0, auto=True)
    # default: checkpoints/ in the run dir; any path or fsspec address (s3://bucket/run)
    folder: str | None = None
    # auto: the newest sound one of this run dir; never: start afresh; or the path of a checkpoint
    resume: str = "auto"
    # model_only: weights alone, the optimizer starts fresh
    load: str = option("all", choices=("all", "model_only"))
    # false: names and shapes that differ are passed over, and listed, instead of refused
    strict: bool = True


@dataclass
class LaunchConfig:
    """Starting workers when not under torchrun or srun: on this machine, or on every node where the
    same command is started."""

    # auto: one per GPU, 4 on a machine without
    nproc_per_node: int | str = option("auto", minimum=1, auto=True)
    # Nodes of the job; a range such as 2:4 lets it go on with fewer and grow again, with the same
    # global batch and loss curve
    nnodes: int | str = 1
    # HOST:PORT where nodes meet: an address of one of them, or of a store outside of them
    rdzv_endpoint: str | None = None
    # Tells jobs apart that meet at the same endpoint at the same time; needed where the store runs
    # outside of the nodes
    job_id: str | None = None
    # What the nodes of one job know and nobody else: a file that its owner alone can read, made by
    # `python -m parallel2d.launch secret`; null: the environment variable PARALLEL2D_SECRET
    secret_file: str | None = None
    # run on several nodes without a secret: whoever reaches the endpoint decides what the job runs
    insecure: bool = False
    # seconds to wait for the smallest number of nodes, and for the store
    rendezvous_timeout: float = option(600.0, minimum=1)
    # Failures in a row without a step further than before that are followed by a restart; auto: 0
    # on one node, 5 on several
    max_restarts: int | str = option("auto", minimum=0, auto=True)
    timeout: float = option(600.0, above=0)  # seconds a collective may wait for a late rank
    # Seconds the same in the first step, which compiles, connects and reads from a cold file
    # system; null: 1800, or `timeout` if larger
    first_step_timeout: float | None = None
    # seconds that workers have to save after SIGTERM or SIGUSR1 before they are ended
    grace_s: int = option(60, minimum=1)
    # of a run that such a signal ended after saving (EX_TEMPFAIL)
    requeue_exit_code: int = option(75, minimum=1, maximum=255)
    # overrides the found host identity (host name and network namespace)
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
    cpu_offload: bool = False  # as ParallelConfig.cpu_offload
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
    with."""

    config: TrainConfig
    run_dir: str
    overrides: tuple[str, ...]
    restarted: bool = False  # these workers replace others of the same job
