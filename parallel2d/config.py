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


PRECISIONS = {
    "fp64": PrecisionConfig("fp64", "fp64", "fp64", "fp64"),
    "fp32": PrecisionConfig("fp32"),
    "bf16": PrecisionConfig("bf16", "fp32", "bf16", "fp32"),
    "bf16_reduce_bf16": PrecisionConfig("bf16_reduce_bf16", "fp32", "bf16", "bf16"),
    "fp16": PrecisionConfig("fp16", "fp32", "fp16", "fp32", loss_scaling=True),
}


@dataclass
class ActivationCheckpointingConfig:
    """What backward recomputes instead of keeping. ``full`` keeps only block inputs; ``selective`` keeps the results of
    matrix products and attention too and recomputes the cheap rest."""

    name: str = option("none", choices=("none", "full", "selective"))
    every: int = option(1, minimum=1)  # 2: only every second block is checkpointed, half the saving, half the cost


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
    allow_cross_node: bool = False

    def resolved(self) -> ResolvedParallelConfig:
        """The same with every preset name replaced by its dataclass. Raises `ConfigError` listing every problem."""
        from parallel2d.validation import bucketing_problems, precision_problems, problems

        values: dict[str, Any] = {}
        for name, (presets, kind) in _PRESETS.items():
            value = getattr(self, name)
            if isinstance(value, str):
                if value not in presets:
                    raise ConfigError(f"{name}={value!r} is not one of {', '.join(presets)}")
                value = presets[value]
            if not isinstance(value, kind):
                raise ConfigError(f"{name} must be a preset name or {kind.__name__}, got {type(value).__name__}")
            values[name] = dataclasses.replace(value)  # type: ignore[type-var]
        resolved = ResolvedParallelConfig(**values, allow_cross_node=self.allow_cross_node)
        if found := [*problems(resolved), *precision_problems(resolved.precision), *bucketing_problems(resolved.bucketing)]:
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
    allow_cross_node: bool


STRATEGIES = {name: StrategyConfig(name) for name in STRATEGY_NAMES}
BUCKETINGS = {name: BucketingConfig(name) for name in ("none", "layer", "block", "size")}
CHECKPOINTINGS = {name: ActivationCheckpointingConfig(name) for name in ("none", "full", "selective")}
COMPILES = {name: CompileConfig(name) for name in ("none", "block")}
_PRESETS: dict[str, tuple[dict[str, Any], type]] = {
    "strategy": (STRATEGIES, StrategyConfig),
    "bucketing": (BUCKETINGS, BucketingConfig),
    "precision": (PRECISIONS, PrecisionConfig),
    "activation_checkpointing": (CHECKPOINTINGS, ActivationCheckpointingConfig),
    "compile": (COMPILES, CompileConfig),
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

    name: str = option("stdlib", choices=("stdlib", "text", "tokens", "hf"))  # stdlib: Python's own library's source
    # text: a file, folder or glob of text, .jsonl or .parquet (.gz and .zst too); tokens: a folder that
    # `python -m parallel2d.data prepare` wrote; hf: a Hugging Face data set's name, or the folder of a saved one
    path: str | None = None
    mixture: list[Any] = option([])  # tokens, instead of path: [{path: A, weight: 0.7}, {path: B, weight: 0.3}]
    tokenizer: str = "bytes"  # or the path of a tokenizer.json; the model's vocabulary must hold its ids
    end_token: str | None = None  # ends a document; None: the tokenizer.json's usual one, or one id more
    text_field: str = "text"  # of a row, unless rows have `prompt` and `completion`, or `segments`
    document_kib: int = option(64, minimum=1)  # longer text files are cut at a line end into several documents
    subset: str | None = None  # hf: the data set's configuration
    split: str = "train"  # hf: the part that is read; documents are held out of it by hash
    validation_fraction: float = option(0.02, minimum=0, maximum=0.5)  # of documents, chosen by their content's hash
    max_bad_rows: int = option(0, minimum=0)  # rows that cannot be read; more than these are an error with file and line
    packing: str = option("packed", choices=("packed", "padded"))  # padded: one document per sequence, cut if longer
    intra_document_masking: bool = False  # batches carry document ids; no target crosses into another document
    epochs: int = option(0, minimum=0)  # 0: epoch after epoch without end
    end: str = option("drop", choices=("drop", "pad", "wrap"))  # the last global batch: left out, weight zero, next epoch
    workers: int | str = option("auto", minimum=1, auto=True)  # processes that prepare; the result is the same
    cache_dir: str | None = None  # where stdlib, text and hf are prepared; None: parallel2d in the user's cache folder


@dataclass
class OptimizerConfig:
    """AdamW. Weight decay acts on matrices only, never on norms and biases."""

    name: str = option("adamw", choices=("adamw",))
    lr: float = option(1e-3, above=0)
    betas: list[float] = option([0.9, 0.95])
    eps: float = option(1e-8, above=0)
    weight_decay: float = option(0.1, minimum=0)
    clip_norm: float = option(1.0, above=0)  # global 2-norm of the gradient; inf: never clipped, still measured


@dataclass
class SchedulerConfig:
    """The learning rate as a function of the step alone: linear warm-up, then the named shape down to ``floor`` · lr."""

    name: str = option("cosine", choices=("constant", "linear", "cosine", "wsd"))
    warmup_steps: int = option(0, minimum=0)
    floor: float = option(0.1, minimum=0, maximum=1)  # share of lr that is left at the last step
    decay_fraction: float = option(0.2, above=0, maximum=1)  # wsd: the last part of the run in which it decays


@dataclass
class LoopConfig:
    """The loop. Batch sizes count sequences; steps count from 1."""

    steps: int = option(300, minimum=1)
    seed: int = option(0, minimum=0)
    global_batch_size: int = option(32, minimum=1)
    micro_batch_size: int | str = option("auto", minimum=1, auto=True)  # per rank; auto: largest divisor up to 8
    seq_len: int = option(128, minimum=1)
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
    folder: str | None = None  # default: checkpoints/ in the run dir; any path or fsspec address (s3://bucket/run)
    resume: str = "auto"  # auto: the newest sound one of this run dir; never: start afresh; or the path of a checkpoint
    load: str = option("all", choices=("all", "model_only"))  # model_only: weights alone, the optimizer starts fresh
    strict: bool = True  # false: names and shapes that differ are passed over, and listed, instead of refused


@dataclass
class LaunchConfig:
    """Starting workers on this machine when not under torchrun or srun."""

    nproc_per_node: int | str = option("auto", minimum=1, auto=True)  # auto: one per GPU, 4 on a machine without
    timeout: float = option(600.0, above=0)  # seconds a collective may wait for a late rank
    grace_s: int = option(60, minimum=1)  # seconds that workers have to save after SIGTERM or SIGUSR1 before they are ended
    requeue_exit_code: int = option(75, minimum=1, maximum=255)  # of a run that such a signal ended after saving (EX_TEMPFAIL)
    host_id: str | None = None  # overrides the found host identity (host name and network namespace)


@dataclass
class TrainConfig:
    """The whole job: what ``python -m parallel2d.train`` composes."""

    mesh: MeshConfig = field(default_factory=MeshConfig)
    strategy: StrategyConfig = field(default_factory=StrategyConfig)
    bucketing: BucketingConfig = field(default_factory=BucketingConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    activation_checkpointing: ActivationCheckpointingConfig = field(default_factory=ActivationCheckpointingConfig)
    compile: CompileConfig = field(default_factory=CompileConfig)
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
            allow_cross_node=self.mesh.allow_cross_node,
        )

    def validate(self) -> None:
        """Raises `ConfigError` with one line per problem: field constraints first, then those between fields."""
        from parallel2d.validation import job_problems, problems

        found = [*problems(self), *job_problems(self)]
        if found:
            raise ConfigError("\n".join(found))
