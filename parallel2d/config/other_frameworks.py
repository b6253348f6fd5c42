"""Options of other frameworks, and what to use here instead: a table.

It is asked where an unknown option is refused: on the command line, by `parallel2d.parallelize` and
by `parallel2d.ParallelConfig`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from parallel2d.errors import ConfigError, nearest


class ForeignOption(NamedTuple):
    """Where an option comes from, and what to do instead."""

    source: str
    answer: str


_FSDP1 = "FullyShardedDataParallel"
_DDP = "DistributedDataParallel"
_TITAN = "torchtitan"
_DEEPSPEED = "DeepSpeed"
_THUNDER = "thunder.distributed"
_LIGHTNING = "Lightning"

_LOGGERS = (
    "metrics.tensorboard=true, the default; for others train.hooks=[package.module:Class], as in "
    "examples/mlflow_hook.py and examples/wandb_hook.py"
)

OPTIONS: dict[str, ForeignOption] = {
    # How and when parameters are gathered
    "limit_all_gathers": ForeignOption(
        _FSDP1, "leave it out: gathers are always limited, memory is reused without a host wait"
    ),
    "backward_prefetch": ForeignOption(
        _FSDP1,
        "prefetch.backward=1 is BACKWARD_PRE, and the default; 0 is None, and the nearest to "
        "BACKWARD_POST",
    ),
    "forward_prefetch": ForeignOption(
        _FSDP1, "prefetch.forward=N gathers N groups ahead; 0 is false"
    ),
    "use_orig_params": ForeignOption(
        _FSDP1, "leave it out: parameters always keep their own names and shapes"
    ),
    "fsdp_reshard_after_forward": ForeignOption(
        _TITAN, "strategy=zero3 or hybrid reshards after forward, zero2 or hybrid_zero2 does not"
    ),
    "reshard_after_forward": ForeignOption(
        "fully_shard",
        "strategy=zero3 or hybrid reshards after forward, zero2 or hybrid_zero2 does not; to a "
        "number of ranks it needs groups outside of the mesh, which hang on a part of it and whose "
        "traffic no axis accounts for: strategy=hybrid mesh.shard=N gathers within N ranks",
    ),
    # What is sharded how
    "sharding_strategy": ForeignOption(
        _FSDP1,
        "strategy=zero3 (FULL_SHARD), zero2 (SHARD_GRAD_OP), ddp (NO_SHARD), hybrid (HYBRID_SHARD)",
    ),
    "auto_wrap_policy": ForeignOption(
        _FSDP1,
        "bucketing=block, bucketing.blocks=[ClassName] or bucketing.policy=package.module:function",
    ),
    "wrapping_strategy": ForeignOption(
        _FSDP1,
        "bucketing=block, bucketing.blocks=[ClassName] or bucketing.policy=package.module:function",
    ),
    "bucketing_strategy": ForeignOption(_THUNDER, "bucketing=none, layer, block or size"),
    "zero_stage": ForeignOption(
        _DEEPSPEED,
        "strategy=ddp (stage 0), zero2 (stage 2), zero3 (stage 3); stage 1 has no use of its own "
        "here",
    ),
    "process_group": ForeignOption(
        _FSDP1,
        "give a mesh: parallel2d.build_mesh, or your own DeviceMesh with axes replicate and shard",
    ),
    "device_mesh": ForeignOption(
        _FSDP1,
        "the mesh is the second argument of parallelize; on the command line mesh.replicate, "
        "mesh.shard",
    ),
    "device_id": ForeignOption(
        _FSDP1, "leave it out: the device is the mesh's, one per LOCAL_RANK"
    ),
    "device": ForeignOption(_THUNDER, "leave it out: the device is the mesh's, one per LOCAL_RANK"),
    "device_ids": ForeignOption(_DDP, "leave it out: the device is the mesh's, one per LOCAL_RANK"),
    "output_device": ForeignOption(_DDP, "leave it out: outputs stay on the rank's own device"),
    "ignored_modules": ForeignOption(
        _FSDP1,
        "parallelize(..., ignored=[module or pattern]) leaves frozen parameters out of sharding",
    ),
    "ignored_states": ForeignOption(
        _FSDP1,
        "parallelize(..., ignored=[module or pattern]) leaves frozen parameters out of sharding",
    ),
    "ignored_parameters": ForeignOption(
        _FSDP1,
        "parallelize(..., ignored=[module or pattern]) leaves frozen parameters out of sharding",
    ),
    "ignored_params": ForeignOption(
        "fully_shard",
        "parallelize(..., ignored=[module or pattern]) leaves frozen parameters out of sharding",
    ),
    "data_parallel_shard_degree": ForeignOption(_TITAN, "mesh.shard"),
    "data_parallel_replicate_degree": ForeignOption(_TITAN, "mesh.replicate"),
    "tensor_parallel_degree": ForeignOption(_TITAN, "mesh.tensor"),
    "context_parallel_degree": ForeignOption(
        _TITAN, "there is no context parallelism here; mesh.tensor splits activations too"
    ),
    "pipeline_parallel_degree": ForeignOption(
        _TITAN, "there is no pipeline parallelism here; mesh.shard and mesh.tensor split the model"
    ),
    "expert_parallel_degree": ForeignOption(
        _TITAN, "there is no expert parallelism here; experts are sharded over mesh.shard"
    ),
    "enable_async_tensor_parallel": ForeignOption(
        _TITAN, "leave it out: collectives of the tensor axis are not overlapped here"
    ),
    "tensor_parallel_size": ForeignOption(_LIGHTNING, "mesh.tensor"),
    "data_parallel_size": ForeignOption(
        _LIGHTNING, "mesh.shard for the ranks that share one copy, mesh.replicate for the copies"
    ),
    # Initial weights
    "sync_module_states": ForeignOption(
        _FSDP1,
        "parallelize(..., broadcast_from=0) starts all ranks from that rank's weights and buffers",
    ),
    "param_init_fn": ForeignOption(
        _FSDP1,
        "build under parallel2d.build_on_meta and give parallelize(..., init=function(module, "
        "name))",
    ),
    "init_sync": ForeignOption(
        _DDP,
        "leave it out: equal weights are checked, and parallelize(..., broadcast_from=0) makes "
        "them equal",
    ),
    # Precision and memory
    "mixed_precision": ForeignOption(
        _FSDP1,
        "precision=bf16, fp16 or fp32; its fields are precision.param, precision.reduce, "
        "precision.buffers",
    ),
    "mp_policy": ForeignOption(
        "fully_shard",
        "precision=bf16, fp16 or fp32; its fields are precision.param, precision.reduce, "
        "precision.output",
    ),
    "mixed_precision_param": ForeignOption(_TITAN, "precision.param"),
    "mixed_precision_reduce": ForeignOption(_TITAN, "precision.reduce"),
    "offload_policy": ForeignOption("fully_shard", "cpu_offload=true"),
    "enable_cpu_offload": ForeignOption(_TITAN, "cpu_offload=true"),
    "offload_params": ForeignOption(_FSDP1, "cpu_offload=true"),
    "offload_optimizer": ForeignOption(
        _DEEPSPEED, "cpu_offload=true keeps parameters, gradients and optimizer state in CPU memory"
    ),
    "activation_checkpointing_policy": ForeignOption(
        _LIGHTNING,
        "activation_checkpointing=full or selective, with "
        "activation_checkpointing.blocks=[ClassName] or .policy",
    ),
    "selective_ac_option": ForeignOption(
        _TITAN,
        "activation_checkpointing=selective is op; activation_checkpointing=full "
        "activation_checkpointing.every=N is a number N",
    ),
    "gradient_checkpointing": ForeignOption(
        "transformers", "activation_checkpointing=full or selective"
    ),
    # Gradients
    "find_unused_parameters": ForeignOption(
        _DDP,
        "leave it out: a parameter without gradient is no error, and ranks may use different ones; "
        "only the groups of modules that are gathered together must be run by all ranks of a shard "
        "group",
    ),
    "gradient_as_bucket_view": ForeignOption(
        _DDP, "leave it out: reduced gradients are views of their group's buffer already"
    ),
    "static_graph": ForeignOption(
        _DDP, "leave it out: nothing is recorded from the first iteration"
    ),
    "broadcast_buffers": ForeignOption(
        _DDP,
        "parallelize(..., broadcast_from=0) spreads buffers once; afterwards ranks must compute "
        "them alike",
    ),
    "bucket_cap_mb": ForeignOption(_DDP, "bucketing=size with bucketing.size_mib"),
    "local_batch_size": ForeignOption(_TITAN, "train.micro_batch_size, in sequences per rank"),
    "gradient_accumulation_steps": ForeignOption(
        _DEEPSPEED,
        "train.global_batch_size and train.micro_batch_size; in your own loop "
        "parallel2d.accumulate",
    ),
    "gradient_clipping": ForeignOption(
        _DEEPSPEED, "optimizer.clip_norm; in your own loop parallel2d.clip_gradient_norm"
    ),
    "gradient_clip_val": ForeignOption(
        _LIGHTNING, "optimizer.clip_norm; in your own loop parallel2d.clip_gradient_norm"
    ),
    "accumulate_grad_batches": ForeignOption(
        _LIGHTNING,
        "train.global_batch_size and train.micro_batch_size; in your own loop "
        "parallel2d.accumulate",
    ),
    "learning_rate": ForeignOption("transformers", "optimizer.lr"),
    "per_device_train_batch_size": ForeignOption(
        "transformers", "train.micro_batch_size, in sequences per rank"
    ),
    "max_norm": ForeignOption(
        _TITAN, "optimizer.clip_norm; in your own loop parallel2d.clip_gradient_norm"
    ),
    # How long, how often, where
    "max_epochs": ForeignOption(_LIGHTNING, "train.epochs"),
    "num_train_epochs": ForeignOption("transformers", "train.epochs"),
    "max_steps": ForeignOption(_LIGHTNING, "train.steps"),
    "val_check_interval": ForeignOption(_LIGHTNING, "train.validate_every, in steps"),
    "limit_val_batches": ForeignOption(_LIGHTNING, "train.validate_batches"),
    "log_every_n_steps": ForeignOption(_LIGHTNING, "metrics.log_every"),
    "log_freq": ForeignOption(_TITAN, "metrics.log_every"),
    "profile_freq": ForeignOption(_TITAN, "profile.steps=[FIRST,LAST]"),
    "interval": ForeignOption(_TITAN, "checkpoint.every, in steps"),
    "init_timeout_seconds": ForeignOption(_TITAN, "launch.first_step_timeout"),
    "train_timeout_seconds": ForeignOption(_TITAN, "launch.timeout"),
    "devices": ForeignOption(_LIGHTNING, "launch.nproc_per_node"),
    "num_nodes": ForeignOption(
        _LIGHTNING, "launch.nnodes, with launch.rdzv_endpoint, on every node"
    ),
    "accelerator": ForeignOption(_LIGHTNING, "leave it out: GPUs are used where there are some"),
    "default_root_dir": ForeignOption(_LIGHTNING, "hydra.run.dir=FOLDER"),
    "config_file": ForeignOption(
        _TITAN, "settings are words key=value, and files in a folder of --config-dir"
    ),
    "flavor": ForeignOption(
        _TITAN, "model=PRESET chooses one; its sizes are keys of model, as in the preset"
    ),
    "converters": ForeignOption(_TITAN, "precision.float8"),
    "enable_float8_linear": ForeignOption(_TITAN, "precision.float8"),
    # States
    "state_dict_type": ForeignOption(
        _FSDP1,
        "parallel2d.full_state for whole tensors, parallel2d.sharded_state for each rank's parts",
    ),
    "state_dict_config": ForeignOption(
        _FSDP1, "parallel2d.full_state(model, optimizer, rank0_only=, cpu=)"
    ),
    "optim_state_dict_config": ForeignOption(
        _FSDP1, "parallel2d.full_state(model, optimizer, rank0_only=, cpu=, key_by=)"
    ),
    "async_mode": ForeignOption(_TITAN, "checkpoint.asynchronous=true, the default, or false"),
    "keep_latest_k": ForeignOption(_TITAN, "checkpoint.keep_last"),
    "move_state_dict_to_cpu": ForeignOption(
        _THUNDER, "parallel2d.full_state gathers tensor by tensor and moves each to CPU memory"
    ),
    "enable_tensorboard": ForeignOption(_TITAN, "metrics.tensorboard"),
    "enable_profiling": ForeignOption(_TITAN, "profile.steps=[FIRST,LAST]"),
    "save_top_k": ForeignOption(
        _LIGHTNING, "checkpoint.keep_last, and checkpoint.keep_best=METRIC for the best one"
    ),
    "metric_for_best_model": ForeignOption("transformers", "checkpoint.keep_best"),
    "early_stopping_patience": ForeignOption(
        "transformers", "train.stop.patience, with train.stop.metric"
    ),
    "early_stopping_threshold": ForeignOption(
        "transformers", "train.stop.min_delta, with train.stop.metric"
    ),
    "load_best_model_at_end": ForeignOption(
        "transformers", "checkpoint.keep_best=METRIC, and checkpoint.resume=PATH of the best one"
    ),
    "greater_is_better": ForeignOption(
        "transformers", "checkpoint.keep_best_mode=max, and train.stop.mode=max"
    ),
    "early_stopping": ForeignOption(
        _LIGHTNING, "train.stop.metric=METRIC, with train.stop.patience and train.stop.min_delta"
    ),
    "monitor": ForeignOption(_LIGHTNING, "train.stop.metric, and checkpoint.keep_best"),
    "logger": ForeignOption(_LIGHTNING, _LOGGERS),
    "loggers": ForeignOption("Composer", _LOGGERS),
    "report_to": ForeignOption("transformers", _LOGGERS),
    "callbacks": ForeignOption(_LIGHTNING, "train.hooks=[package.module:Class] (docs/hooks.md)"),
    "resume_from_checkpoint": ForeignOption(
        "transformers", "checkpoint.resume=PATH, auto or never"
    ),
    "save_distributed_checkpoint": ForeignOption(
        _LIGHTNING, "leave it out: checkpoints are always sharded and load on any layout"
    ),
}

# Options whose word some section of ours has too: they are answered where they stand alone.
_ALONE = {"epochs": ForeignOption("Keras", "train.epochs")}

# Values of `strategy` elsewhere -> ours
STRATEGY_VALUES = {
    "full_shard": "zero3",
    "shard_grad_op": "zero2",
    "no_shard": "ddp",
    "hybrid_shard": "hybrid",
    "_hybrid_shard_zero2": "hybrid_zero2",
    "fsdp": "zero3",
    "hsdp": "hybrid",
    "zero1": "zero2",
}


def answer(name: str) -> str | None:
    """What to do instead of the option ``name`` (``limit_all_gathers``,
    ``parallelism.tensor_parallel_degree``), as a sentence; None for a name that is not known."""
    found = OPTIONS.get(name.rpartition(".")[2], _ALONE.get(name))
    if found is None:
        return None
    return f"{name} is an option of {found.source}: {found.answer}"


def strategy_answer(value: str) -> str | None:
    """Which strategy another framework means by ``value``; None for a word that is not known."""
    ours = STRATEGY_VALUES.get(value.lower().rpartition(".")[2])
    if ours is None:
        return None
    return f"strategy={value} is strategy={ours} here"


def refuse(given: Mapping[str, object], where: str, known: Collection[str]) -> None:
    """Raises `ConfigError` when ``where``, which takes the options ``known``, was ``given`` others:
    one line each."""
    if given:
        raise ConfigError("\n".join(_refusal(name, where, known) for name in given))


def _refusal(name: str, where: str, known: Collection[str]) -> str:
    instead = answer(name)
    if instead is not None:
        return instead
    near = nearest(name, known)
    if near is not None:
        return f"{where} has no option {name}; did you mean {near}?"
    return f"{where} has no option {name}; it has {', '.join(known)}"
