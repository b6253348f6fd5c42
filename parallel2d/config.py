"""The words every room shares: typed configuration and its validation.

Plain dataclasses flow out of here and nothing flows in. They are usable without Hydra (``ParallelConfig(strategy=...)`` in
somebody's own loop) and are the schema that Hydra composes against at the door (``train.py``). Each field's comment gives
its consequence; what may not be is in `validation.py`.

This module imports neither torch nor Hydra.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any


class ConfigError(ValueError):
    """A configuration that cannot run. The message is complete: what, got what, allowed what. Shown without traceback."""


def option(default: Any, **constraint: Any) -> Any:
    """A dataclass field with a constraint that `problems` checks.

    Constraints: ``choices`` (tuple), ``minimum``, ``above``, ``maximum`` (numbers), ``auto=True`` (the word ``auto`` is
    allowed beside a number).
    """
    if isinstance(default, list | dict):
        return field(default_factory=lambda: type(default)(default), metadata=constraint)
    return field(default=default, metadata=constraint)


STRATEGY_NAMES = ("ddp", "zero2", "zero3", "hybrid_zero2", "hybrid")
DTYPES = ("fp64", "fp32", "bf16", "fp16")
OPTIMIZER_NAMES = ("adamw", "adam", "sgd", "adafactor", "muon")
# What a tensor-parallel plan may say of a module; see parallelize/tensor_parallel.py. The last three are Hugging Face's words.
TENSOR_WORDS = (
    "colwise",
    "rowwise",
    "sequence",
    "replicate",
    "colwise_gather_output",
    "embedding_rowwise",
    "replicated_with_grad_allreduce",
)


@dataclass
class MeshConfig:
    """Sizes of the mesh axes, outermost to innermost. ``auto`` is resolved against the machines that are found."""

    replicate: int | str = option("auto", minimum=1, auto=True)  # whole copies; only reduced gradients cross this axis
    shard: int | str = option("auto", minimum=1, auto=True)  # ranks that split parameters, gradients, optimizer state
    tensor: int | str = option("auto", minimum=1, auto=True)  # ranks that split each matrix; auto = 1
    allow_cross_node: bool = False  # accept a shard or tensor group across hosts that would fit in one: up to 4x traffic


@dataclass
class StrategyConfig:
    """What each mesh axis does to the parameters.

    ``ddp`` keeps a full copy per rank. ``zero3`` shards parameters over all ranks and frees them after each module's
    forward; ``zero2`` keeps them gathered until backward is done (fewer all-gathers, more memory). The hybrids do the same
    inside the shard axis and all-reduce the sharded gradient over the replicate axis.
    """

    name: str = option("hybrid", choices=STRATEGY_NAMES)

    @property
    def reshard_after_forward(self) -> bool:
        """Whether gathered parameters are freed between forward and backward, the root group's included."""
        return self.name in ("zero3", "hybrid")


@dataclass
class BucketingConfig:
    """Which parameters travel in one collective.

    ``layer``: one group per module that owns parameters (most calls, least memory). ``block``: one group per repeated block
    and the root group for all else. ``size``: consecutive modules up to ``size_mib``. ``none``: the finest the engine
    allows, which is ``layer``; said in the log.
    """

    name: str = option("block", choices=("none", "layer", "block", "size"))
    size_mib: float = option(25.0, above=0)  # used by name=size; inf puts the whole model into the root group
    blocks: list[str] = option([])  # class names that are blocks; empty: repeated structure is detected
    # package.module:function, or in code a callable: (module, name) -> whether it is a block; replaces detection. Outermost
    # matches count; none at all is an error
    policy: Any = None


@dataclass
class PrefetchConfig:
    """How early parameters are gathered: how many groups ahead of the one that computes, in the order in which they run.

    A group costs one all-gather whenever it is issued; each step ahead keeps one more group's whole parameters in memory. A number
    larger than that of the groups means all of them. Nothing is gathered, and so nothing prefetched, without a shard axis.
    """

    # 0: a group is gathered when it is reached, which on GPU still overlaps, because the host runs ahead of the device
    forward: int = option(0, minimum=0)
    backward: int = option(1, minimum=0)  # 0: a group is gathered when its backward begins


@dataclass
class PrecisionConfig:
    """The dtype of every tensor that mixed precision decides about."""

    name: str = "fp32"
    storage: str = option("fp32", choices=DTYPES)  # sharded parameters, their gradients and the optimizer state
    param: str = option("fp32", choices=DTYPES)  # gathered parameters and activations; halves all-gather bytes at bf16
    reduce: str = option("fp32", choices=DTYPES)  # gradients on the wire; bf16 halves the bytes and rounds the sums
    loss_scaling: bool = False  # fp16 only: dynamic scaling against underflow
    output: str | None = None  # of floating-point outputs of the root module; None: whatever it computes. Blocks keep theirs
    buffers: str | None = None  # of floating-point buffers; None: as built, widened with storage=fp64
    cast_forward_inputs: bool = True  # floating-point inputs are cast to `param`; false: the model must match dtypes itself
    # Gradients stay in `reduce` after the reduction instead of being cast to `storage`: half the gradient memory at bf16, for
    # optimizers of your own that read such gradients. AdamW does not, so the train command refuses it
    keep_low_precision_gradients: bool = False
    fp32_modules: list[str] = option([])  # class names that compute in fp32 beside a lower `param`, each instance its own group
    # Matrix products of the Linear layers inside blocks in 8-bit floats (needs torchao, and a GPU of compute capability 8.9): one
    # scale per tensor, or per row, which is more accurate and slower. Worth its casts only with compile=block
    float8: str = option("none", choices=("none", "tensorwise", "rowwise"))
    float8_exclude: list[str] = option([])  # patterns of module names that stay as they are, such as *.attention.*


PRECISIONS = {
    "fp64": PrecisionConfig("fp64", "fp64", "fp64", "fp64"),
    "fp32": PrecisionConfig("fp32"),
    "bf16": PrecisionConfig("bf16", "fp32", "bf16", "fp32"),
    "bf16_reduce_bf16": PrecisionConfig("bf16_reduce_bf16", "fp32", "bf16", "bf16"),
    "fp16": PrecisionConfig("fp16", "fp32", "fp16", "fp32", loss_scaling=True),
}


KEPT_OPERATORS = ("mm", "bmm", "addmm", "scaled_dot_product_*", "all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce")


@dataclass
class ActivationCheckpointingConfig:
    """What backward recomputes instead of keeping. ``full`` keeps only block inputs; ``selective`` keeps the results of the
    operators in ``keep`` too and recomputes the cheap rest. ``budget`` lets the compiler choose what fits in ``memory_budget``."""

    name: str = option("none", choices=("none", "full", "selective", "budget"))
    every: int = option(1, minimum=1)  # 2: only every second block is checkpointed, half the saving, half the cost
    # selective: operators whose results stay in memory; by default those that are expensive to compute, small against what they save
    keep: list[str] = option(list(KEPT_OPERATORS))
    memory_budget: float = option(0.5, minimum=0, maximum=1)  # budget: share of the activations; 0 recomputes all, 1 nothing
    blocks: list[str] = option([])  # class names of what is checkpointed, if not the blocks of bucketing
    policy: Any = None  # as bucketing.policy, instead of blocks


@dataclass
class CompileConfig:
    """``block`` compiles each repeated block on its own (one compilation serves all equal blocks)."""

    name: str = option("none", choices=("none", "block"))
    backend: str = "inductor"  # any backend torch.compile knows; inductor on CPU needs a C++ compiler


@dataclass
class SyncConfig:
    """What crosses the replicate axis, and when."""

    # Under gradient accumulation, per micro-batch: full = reduce-scatter and all-reduce (most bytes); reduce_scatter_only =
    # the replicate axis moves once per global batch; none = nothing moves before the last one (full gradients in memory)
    during_accumulation: str = option("reduce_scatter_only", choices=("full", "reduce_scatter_only", "none"))


@dataclass
class ParallelConfig:
    """Everything `parallel2d.parallelize` needs to know beside the model and the mesh.

    Each field also takes a preset's name: ``ParallelConfig(strategy="zero3", precision="bf16")``.
    """

    strategy: StrategyConfig | str = field(default_factory=StrategyConfig)
    bucketing: BucketingConfig | str = field(default_factory=BucketingConfig)
    precision: PrecisionConfig | str = field(default_factory=PrecisionConfig)
    activation_checkpointing: ActivationCheckpointingConfig | str = field(default_factory=ActivationCheckpointingConfig)
    compile: CompileConfig | str = field(default_factory=CompileConfig)
    prefetch: PrefetchConfig = field(default_factory=PrefetchConfig)
    # GPU only: parameters, gradients and optimizer state live in pinned CPU memory and the optimizer runs there; a step is slower by
    # both copies and by the CPU's optimizer
    cpu_offload: bool = False
    allow_cross_node: bool = False

    def __new__(cls, *args: Any, **given: Any) -> ParallelConfig:
        """Raises `ConfigError` for options that other frameworks have, with what to do instead."""
        from parallel2d.obsolete import refuse

        known = {item.name for item in dataclasses.fields(cls)}
        refuse({name: value for name, value in given.items() if name not in known}, "ParallelConfig", sorted(known))
        return super().__new__(cls)

    def resolved(self) -> ResolvedParallelConfig:
        """The same with every preset name replaced by its dataclass. Raises `ConfigError` listing every problem."""
        from parallel2d.obsolete import strategy_answer
        from parallel2d.validation import parallel_problems, problems

        values: dict[str, Any] = {}
        for name, (presets, kind) in _PRESETS.items():
            value = getattr(self, name)
            if isinstance(value, str) and presets:
                if value not in presets:
                    hint = strategy_answer(value) if name == "strategy" else None
                    raise ConfigError(f"{name}={value!r} is not one of {', '.join(presets)}" + (f"; {hint}" if hint else ""))
                value = presets[value]
            if not isinstance(value, kind):
                words = "a preset name or " if presets else ""
                raise ConfigError(f"{name} must be {words}{kind.__name__}, got {type(value).__name__}")
            values[name] = dataclasses.replace(value)  # type: ignore[type-var]
        if not isinstance(self.cpu_offload, bool):
            raise ConfigError(f"cpu_offload={self.cpu_offload} must be True or False")
        resolved = ResolvedParallelConfig(**values, cpu_offload=self.cpu_offload, allow_cross_node=self.allow_cross_node)
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
    cpu_offload: bool
    allow_cross_node: bool


STRATEGIES = {name: StrategyConfig(name) for name in STRATEGY_NAMES}
BUCKETINGS = {name: BucketingConfig(name) for name in ("none", "layer", "block", "size")}
CHECKPOINTINGS = {name: ActivationCheckpointingConfig(name) for name in ("none", "full", "selective", "budget")}
COMPILES = {name: CompileConfig(name) for name in ("none", "block")}
_PRESETS: dict[str, tuple[dict[str, Any], type]] = {
    "strategy": (STRATEGIES, StrategyConfig),
    "bucketing": (BUCKETINGS, BucketingConfig),
    "precision": (PRECISIONS, PrecisionConfig),
    "activation_checkpointing": (CHECKPOINTINGS, ActivationCheckpointingConfig),
    "compile": (COMPILES, CompileConfig),
    "prefetch": ({}, PrefetchConfig),
}


@dataclass
class LlamaModel:
    """A Llama-3-style decoder (`parallel2d.models.llama`)."""

    family: str = "llama"
    dim: int = option(128, minimum=1)
    n_layers: int = option(4, minimum=1)
    n_heads: int = option(8, minimum=1)
    n_kv_heads: int = option(4, minimum=1)  # fewer than n_heads: grouped-query attention
    hidden_dim: int = option(352, minimum=1)  # of the SwiGLU feed-forward
    vocab_size: int = option(320, minimum=1)  # at least the tokenizer's; padded rows are never a target
    max_seq_len: int = option(2048, minimum=1)
    norm_eps: float = option(1e-5, above=0)
    rope_theta: float = option(500000.0, above=0)
    tie_embeddings: bool = False


@dataclass
class CustomModel:
    """Your own ``nn.Module``: ``model=custom model.target=package.module:factory``."""

    family: str = "custom"
    target: str = "???"  # package.module:factory; called with `arguments`, returns an nn.Module
    arguments: dict[str, Any] = option({})  # keyword arguments of the factory
    init: str | None = None  # package.module:function(module, name) sets what `module` owns; default: reset_parameters
    loss: str | None = None  # package.module:function(output, targets) -> summed loss; default: cross-entropy of logits
    # {module pattern: word of TENSOR_WORDS}, or package.module:function(model) -> {module pattern: ParallelStyle or word}
    tensor_plan: Any = None


@dataclass
class HuggingFaceModel:
    """A ``transformers`` model from a configuration, without download: ``model=hf model.path=FOLDER`` or
    ``model=hf model.architecture=qwen3 model.arguments.num_hidden_layers=4``."""

    family: str = "hf"
    path: str | None = None  # local folder: config.json, and safetensors weights, which are loaded where there are any
    architecture: str | None = None  # instead of path: a model type of the library; weights come from the seed
    arguments: dict[str, Any] = option({})  # set on the configuration; an argument that it does not have is an error
    head: str = option("auto", choices=("auto", "causal_lm", "masked_lm", "seq2seq_lm", "image_classification", "base"))
    load_weights: bool = True  # false: weights come from the seed even if the folder has some
    loss: str | None = None  # package.module:function(output, targets) -> summed loss; default: cross-entropy of logits
    tensor_plan: Any = None  # as of model=custom; None: the plan that the library ships with the model, if any


@dataclass
class DataConfig:
    """What is read and how documents become sequences. Global batch k is a function of seed, data and k alone."""

    name: str = option("stdlib", choices=("stdlib", "text", "tokens", "hf", "images"))  # stdlib: Python's own library's source
    # text: a file, folder or glob of text, .jsonl or .parquet (.gz and .zst too); tokens: a folder that
    # `python -m parallel2d.data prepare` wrote; hf: a Hugging Face data set's name, or the folder of a saved one; images: a folder
    # whose subfolders are the classes
    path: str | None = None
    mixture: list[Any] = option([])  # tokens, instead of path: [{path: A, weight: 0.7}, {path: B, weight: 0.3}]
    tokenizer: str = "bytes"  # or the path of a tokenizer.json; the model's vocabulary must hold its ids
    end_token: str | None = None  # ends a document; None: the tokenizer.json's usual one, or one id more
    text_field: str = "text"  # of a row, unless rows have `prompt` and `completion`, or `segments`
    document_kib: int = option(64, minimum=1)  # longer text files are cut at a line end into several documents
    subset: str | None = None  # hf: the data set's configuration
    split: str = "train"  # hf: the part that is read; documents are held out of it by hash
    # Of documents, chosen by their content's hash, or of images, by that of their path
    validation_fraction: float = option(0.02, minimum=0, maximum=0.5)
    max_bad_rows: int = option(0, minimum=0)  # rows that cannot be read; more than these are an error with file and line
    packing: str = option("packed", choices=("packed", "padded"))  # padded: one document per sequence, cut if longer
    intra_document_masking: bool = False  # batches carry document ids; no target crosses into another document
    epochs: int = option(0, minimum=0)  # 0: epoch after epoch without end
    end: str = option("drop", choices=("drop", "pad", "wrap"))  # the last global batch: left out, weight zero, next epoch
    # Processes that prepare, auto: one per core; images: threads of a rank that decode, auto: as many, up to 16. The result is the same
    workers: int | str = option("auto", minimum=1, auto=True)
    cache_dir: str | None = None  # where stdlib, text and hf are prepared; None: parallel2d in the user's cache folder
    image_size: int | None = None  # images: pixels of a side, scaled and cropped to that; None: as the model's configuration
    channels: int | None = None  # images: 3 (RGB) or 1 (grey); None: what the model's configuration says, else 3


@dataclass
class OptimizerConfig:
    """How gradients become updates. Weight decay acts on matrices only, never on norms and biases, unless ``groups`` says so.

    ``adamw``, ``adam``, ``sgd``: elementwise, nothing is sent. ``adafactor``: row and column statistics instead of a second moment per
    element; sends those. ``muon``: hidden matrices by Muon, which gathers each one in bf16; embeddings, head, norms, biases by AdamW.
    """

    name: str = option("adamw", choices=OPTIMIZER_NAMES)
    lr: float = option(1e-3, above=0)
    betas: list[float] = option([0.9, 0.95])  # adamw, adam, and muon's AdamW
    eps: float = option(1e-8, above=0)  # the same
    weight_decay: float = option(0.1, minimum=0)  # decoupled, but with adam and sgd, where it is added to the gradient
    clip_norm: float = option(1.0, above=0)  # global 2-norm of the gradient; inf: never clipped, still measured
    # {pattern: of canonical names, with any of lr_scale, weight_decay, and with muon algorithm (muon, adamw)}; the first match counts
    groups: list[Any] = option([])
    # fused: one kernel per dtype and device; foreach: one per operation; loop: one per operation and parameter, least memory
    implementation: str = option("fused", choices=("fused", "foreach", "loop"))  # sgd: foreach or loop
    amsgrad: bool = False  # adamw, adam: divides by the largest second moment so far; a third more optimizer state
    momentum: float = option(0.9, minimum=0, maximum=1)  # sgd (0: no state at all), muon
    nesterov: bool = False  # sgd, muon
    beta2_decay: float = option(-0.8, maximum=0)  # adafactor: the second moment forgets with 1 - step ** beta2_decay
    clip_threshold: float = option(1.0, minimum=1)  # adafactor: largest root mean square of an update before the rate
    # muon: match_rms_adamw scales updates to the size of AdamW's, so that one lr serves both; original wants about 20 times the lr
    adjust_lr: str = option("match_rms_adamw", choices=("match_rms_adamw", "original"))
    newton_schulz_steps: int = option(5, minimum=1, maximum=99)  # muon: matrix products per update, 3 each


OPTIMIZERS = {
    "adamw": OptimizerConfig("adamw"),
    "adam": OptimizerConfig("adam", weight_decay=0.0),
    "sgd": OptimizerConfig("sgd", lr=0.1, weight_decay=0.0, implementation="foreach"),
    "adafactor": OptimizerConfig("adafactor", lr=1e-2, weight_decay=0.0),
    "muon": OptimizerConfig("muon", momentum=0.95, nesterov=True),
}


@dataclass
class SchedulerConfig:
    """The learning rate as a function of the step alone: linear warm-up, then the named shape down to ``floor`` · lr."""

    name: str = option("cosine", choices=("constant", "linear", "cosine", "wsd"))
    warmup_steps: int = option(0, minimum=0)
    floor: float = option(0.1, minimum=0, maximum=1)  # share of lr that is left at the last step
    decay_fraction: float = option(0.2, above=0, maximum=1)  # wsd: the last part of the run in which it decays


@dataclass
class LoopConfig:
    """The loop. Batch sizes count sequences, or images; steps count from 1."""

    steps: int = option(300, minimum=1)
    seed: int = option(0, minimum=0)
    global_batch_size: int = option(32, minimum=1)
    micro_batch_size: int | str = option("auto", minimum=1, auto=True)  # per rank; auto: largest divisor up to 8
    seq_len: int = option(128, minimum=1)  # tokens of a sequence; images have none
    validate_every: int = option(100, minimum=0)  # steps; 0: never
    validate_batches: int = option(4, minimum=1)  # global batches per validation
    max_skipped_steps: int = option(20, minimum=1)  # non-finite steps in a row before the run ends with an error
    gc_every: int = option(100, minimum=1)  # steps between collections, on all ranks at once, instead of at random
    deterministic: bool = False  # torch.use_deterministic_algorithms; slower on GPU


@dataclass
class MetricsConfig:
    """What is written and shown."""

    log_every: int = option(1, minimum=1)  # steps; losses in between are reduced all the same
    console: str = option("rich", choices=("rich", "plain", "silent"))  # rich falls back to plain off a terminal
    tensorboard: bool = True
    memory_history: bool = False  # on GPU: the snapshot that an out-of-memory leaves tells where blocks came from
    communication: bool = True  # count bytes, calls and seconds per mesh axis; false: nothing is wrapped, stragglers by CPU time


@dataclass
class ProfileConfig:
    """Traces of a few steps: ``profile.steps=[10,13]`` writes ``traces/rank-N-steps-10-13.json``. Those steps run slower."""

    steps: list[int] = option([])  # the first and the last step that is traced; empty: none
    ranks: list[int] = option([0])  # that are traced; empty: all


@dataclass
class CheckpointConfig:
    """When the run saves, what it keeps, where it resumes. The loop waits for a copy to CPU memory only, once per save."""

    enabled: bool = True  # false: nothing is saved; resume still works
    every: int = option(100, minimum=0)  # steps; 0: not by steps. A killed run loses at most this many
    every_minutes: float = option(0.0, minimum=0)  # minutes, beside `every`; 0: not by time. Rank 0's clock decides
    on_first_step: bool = False  # save after the first step of this process: finds out at once whether saving works
    asynchronous: bool = True  # false: the loop waits until the checkpoint is on disk; saves one copy in CPU memory at most
    keep_last: int = option(3, minimum=0)  # newest checkpoints that are kept; 0: all. Each costs 3x the parameters with AdamW
    keep_every: int = option(0, minimum=0)  # steps: multiples of it are never deleted; 0: none
    max_failures: int = option(3, minimum=1)  # saves in a row that may fail before the run ends with an error
    # Steps between copies of the state in each node's shared memory, so that restarted workers lose these steps at most instead of
    # `every`; 0: none. Costs 2x a node's share of the state in /dev/shm. auto: 10 where workers are restarted (TORCHELASTIC_MAX_RESTARTS
    # above 0). With two replicas it covers lost nodes, with one lost workers
    memory_every: int | str = option("auto", minimum=0, auto=True)
    folder: str | None = None  # default: checkpoints/ in the run dir; any path or fsspec address (s3://bucket/run)
    resume: str = "auto"  # auto: the newest sound one of this run dir; never: start afresh; or the path of a checkpoint
    load: str = option("all", choices=("all", "model_only"))  # model_only: weights alone, the optimizer starts fresh
    strict: bool = True  # false: names and shapes that differ are passed over, and listed, instead of refused


@dataclass
class LaunchConfig:
    """Starting workers when not under torchrun or srun: on this machine, or on every node where the same command is started."""

    nproc_per_node: int | str = option("auto", minimum=1, auto=True)  # auto: one per GPU, 4 on a machine without
    # Nodes of the job; a range such as 2:4 lets it go on with fewer and grow again, with the same global batch and loss curve
    nnodes: int | str = 1
    rdzv_endpoint: str | None = None  # HOST:PORT where nodes meet: an address of one of them, or of a store outside of them
    job_id: str = "parallel2d"  # tells jobs apart that meet at the same endpoint at the same time
    rendezvous_timeout: float = option(600.0, minimum=1)  # seconds to wait for the smallest number of nodes, and for the store
    # Failures in a row without a step further than before that are followed by a restart; auto: 0 on one node, 5 on several
    max_restarts: int | str = option("auto", minimum=0, auto=True)
    timeout: float = option(600.0, above=0)  # seconds a collective may wait for a late rank
    # Seconds the same in the first step, which compiles, connects and reads from a cold file system; null: 1800, or `timeout` if larger
    first_step_timeout: float | None = None
    grace_s: int = option(60, minimum=1)  # seconds that workers have to save after SIGTERM or SIGUSR1 before they are ended
    requeue_exit_code: int = option(75, minimum=1, maximum=255)  # of a run that such a signal ended after saving (EX_TEMPFAIL)
    host_id: str | None = None  # overrides the found host identity (host name and network namespace)

    @property
    def longest_wait(self) -> float:
        """Seconds that ranks may wait for each other until the first step is done."""
        return max(1800.0, self.timeout) if self.first_step_timeout is None else self.first_step_timeout

    @property
    def node_range(self) -> tuple[int, int]:
        """``nnodes`` as (smallest, largest): ``4`` is (4, 4), ``2:4`` is (2, 4). Raises `ConfigError`."""
        low, colon, high = str(self.nnodes).partition(":")
        if low.isdecimal() and (high.isdecimal() if colon else True):
            smallest, largest = int(low), int(high if colon else low)
            if 1 <= smallest <= largest:
                return smallest, largest
        raise ConfigError(f"launch.nnodes={self.nnodes} must be a number of nodes, at least 1, or a range such as 2:4")

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
    activation_checkpointing: ActivationCheckpointingConfig = field(default_factory=ActivationCheckpointingConfig)
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
            cpu_offload=self.cpu_offload,
            allow_cross_node=self.mesh.allow_cross_node,
        )

    def validate(self) -> None:
        """Raises `ConfigError` with one line per problem: field constraints first, then those between fields."""
        from parallel2d.validation import job_problems, problems

        found = [*problems(self), *job_problems(self)]
        if found:
            raise ConfigError("\n".join(found))
