"""Options of other frameworks that mean nothing here, and what to do instead. A name flows in, an
answer for people flows out.

Used where an unknown option is refused: on the command line (`compose.py`), by
`parallel2d.parallelize` and by `parallel2d.ParallelConfig`. This module imports neither torch nor
Hydra.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from typing import NamedTuple

from parallel2d.config import ConfigError


class Obsolete(NamedTuple):
    """Where an option comes from, and what to do instead."""

    source: str
    answer: str


_FSDP1 = "FullyShardedDataParallel"
_DDP = "DistributedDataParallel"
_TITAN = "torchtitan"
_DEEPSPEED = "DeepSpeed"
_THUNDER = "thunder.distributed"
_LIGHTNING = "Lightning"

OPTIONS: dict[str, Obsolete] = {
    # How and when parameters are gathered
    "limit_all_gathers": Obsolete(
        _FSDP1, "leave it out: gathers are always limited, memory is reused without a host wait"
    ),
    "backward_prefetch": Obsolete(
        _FSDP1,
        "prefetch.backward=1 is BACKWARD_PRE, and the default; 0 is None, and the nearest to "
        "BACKWARD_POST",
    ),
    "forward_prefetch": Obsolete(_FSDP1, "prefetch.forward=N gathers N groups ahead; 0 is false"),
    "use_orig_params": Obsolete(
        _FSDP1, "leave it out: parameters always keep their own names and shapes"
    ),
    "fsdp_reshard_after_forward": Obsolete(
        _TITAN, "strategy=zero3 or hybrid reshards after forward, zero2 or hybrid_zero2 does not"
    ),
    "reshard_after_forward": Obsolete(
        "fully_shard",
        "strategy=zero3 or hybrid reshards after forward, zero2 or hybrid_zero2 does not; to a "
        "number of ranks it needs groups outside of "
        "the mesh, which hang on a part of it and whose traffic no axis accounts for: "
        "strategy=hybrid mesh.shard=N gathers within N ranks",
    ),
    # What is sharded how
    "sharding_strategy": Obsolete(
        _FSDP1,
        "strategy=zero3 (FULL_SHARD), zero2 (SHARD_GRAD_OP), ddp (NO_SHARD), hybrid (HYBRID_SHARD)",
    ),
    "auto_wrap_policy": Obsolete(
        _FSDP1,
        "bucketing=block, bucketing.blocks=[ClassName] or bucketing.policy=package.module:function",
    ),
    "wrapping_strategy": Obsolete(
        _FSDP1,
        "bucketing=block, bucketing.blocks=[ClassName] or bucketing.policy=package.module:function",
    ),
    "bucketing_strategy": Obsolete(_THUNDER, "bucketing=none, layer, block or size"),
    "zero_stage": Obsolete(
        _DEEPSPEED,
        "strategy=ddp (stage 0), zero2 (stage 2), zero3 (stage 3); stage 1 has no use of its own "
        "here",
    ),
    "process_group": Obsolete(
        _FSDP1,
        "give a mesh: parallel2d.build_mesh, or your own DeviceMesh with axes replicate and shard",
    ),
    "device_mesh": Obsolete(
        _FSDP1,
        "the mesh is the second argument of parallelize; on the command line mesh.replicate, "
        "mesh.shard",
    ),
    "device_id": Obsolete(_FSDP1, "leave it out: the device is the mesh's, one per LOCAL_RANK"),
    "device": Obsolete(_THUNDER, "leave it out: the device is the mesh's, one per LOCAL_RANK"),
    "device_ids": Obsolete(_DDP, "leave it out: the device is the mesh's, one per LOCAL_RANK"),
    "output_device": Obsolete(_DDP, "leave it out: outputs stay on the rank's own device"),
    "ignored_modules": Obsolete(
        _FSDP1,
        "parallelize(..., ignored=[module or pattern]) leaves frozen parameters out of sharding",
    ),
    "ignored_states": Obsolete(
        _FSDP1,
        "parallelize(..., ignored=[module or pattern]) leaves frozen parameters out of sharding",
    ),
    "ignored_parameters": Obsolete(
        _FSDP1,
        "parallelize(..., ignored=[module or pattern]) leaves frozen parameters out of sharding",
    ),
    "ignored_params": Obsolete(
        "fully_shard",
        "parallelize(..., ignored=[module or pattern]) leaves frozen parameters out of sharding",
    ),
    "data_parallel_shard_degree": Obsolete(_TITAN, "mesh.shard"),
    "data_parallel_replicate_degree": Obsolete(_TITAN, "mesh.replicate"),
    "tensor_parallel_degree": Obsolete(_TITAN, "mesh.tensor"),
    "context_parallel_degree": Obsolete(
        _TITAN, "there is no context parallelism here; mesh.tensor splits activations too"
    ),
    "pipeline_parallel_degree": Obsolete(
        _TITAN, "there is no pipeline parallelism here; mesh.shard and mesh.tensor split the model"
    ),
    "expert_parallel_degree": Obsolete(
        _TITAN, "there is no expert parallelism here; experts are sharded over mesh.shard"
    ),
    "enable_async_tensor_parallel": Obsolete(
        _TITAN, "leave it out: collectives of the tensor axis are not overlapped here"
    ),
    "tensor_parallel_size": Obsolete(_LIGHTNING, "mesh.tensor"),
    "data_parallel_size": Obsolete(
        _LIGHTNING, "mesh.shard for the ranks that share one copy, mesh.replicate for the copies"
    ),
    # Initial weights
    "sync_module_states": Obsolete(
        _FSDP1,
        "parallelize(..., broadcast_from=0) starts all ranks from that rank's weights and buffers",
    ),
    "param_init_fn": Obsolete(
        _FSDP1,
        "build under parallel2d.build_on_meta and give parallelize(..., init=function(module, "
        "name))",
    ),
    "init_sync": Obsolete(
        _DDP,
        "leave it out: equal weights are checked, and parallelize(..., broadcast_from=0) makes "
        "them equal",
    ),
    # Precision and memory
    "mixed_precision": Obsolete(
        _FSDP1,
        "precision=bf16, fp16 or fp32; its fields are precision.param, precision.reduce, "
        "precision.buffers",
    ),
    "mp_policy": Obsolete(
        "fully_shard",
        "precision=bf16, fp16 or fp32; its fields are precision.param, precision.reduce, "
        "precision.output",
    ),
    "mixed_precision_param": Obsolete(_TITAN, "precision.param"),
    "mixed_precision_reduce": Obsolete(_TITAN, "precision.reduce"),
    "offload_policy": Obsolete("fully_shard", "cpu_offload=true"),
    "enable_cpu_offload": Obsolete(_TITAN, "cpu_offload=true"),
    "offload_params": Obsolete(_FSDP1, "cpu_offload=true"),
    "offload_optimizer": Obsolete(
        _DEEPSPEED, "cpu_offload=true keeps parameters, gradients and optimizer state in CPU memory"
    ),
    "activation_checkpointing_policy": Obsolete(
        _LIGHTNING,
        "activation_checkpointing=full or selective, with "
        "activation_checkpointing.blocks=[ClassName] or .policy",
    ),
    "selective_ac_option": Obsolete(
        _TITAN,
        "activation_checkpointing=selective is op; activation_checkpointing=full "
        "activation_checkpointing.every=N is a number N",
    ),
    "gradient_checkpointing": Obsolete(
        "transformers", "activation_checkpointing=full or selective"
    ),
    # Gradients
    "find_unused_parameters": Obsolete(
        _DDP,
        "leave it out: a parameter without gradient is no error, and ranks may use different "
        "ones; only the groups of modules that "
        "are gathered together must be run by all ranks of a shard group",
    ),
    "gradient_as_bucket_view": Obsolete(
        _DDP, "leave it out: reduced gradients are views of their group's buffer already"
    ),
    "static_graph": Obsolete(_DDP, "leave it out: nothing is recorded from the first iteration"),
    "broadcast_buffers": Obsolete(
        _DDP,
        "parallelize(..., broadcast_from=0) spreads buffers once; afterwards ranks must compute "
        "them alike",
    ),
    "bucket_cap_mb": Obsolete(_DDP, "bucketing=size with bucketing.size_mib"),
    "local_batch_size": Obsolete(_TITAN, "train.micro_batch_size, in sequences per rank"),
    "gradient_accumulation_steps": Obsolete(
        _DEEPSPEED,
        "train.global_batch_size and train.micro_batch_size; in your own loop "
        "parallel2d.accumulate",
    ),
    "gradient_clipping": Obsolete(
        _DEEPSPEED, "optimizer.clip_norm; in your own loop parallel2d.clip_gradient_norm"
    ),
    "gradient_clip_val": Obsolete(
        _LIGHTNING, "optimizer.clip_norm; in your own loop parallel2d.clip_gradient_norm"
    ),
    "accumulate_grad_batches": Obsolete(
        _LIGHTNING,
        "train.global_batch_size and train.micro_batch_size; in your own loop "
        "parallel2d.accumulate",
    ),
    "learning_rate": Obsolete("transformers", "optimizer.lr"),
    "per_device_train_batch_size": Obsolete(
        "transformers", "train.micro_batch_size, in sequences per rank"
    ),
    "max_norm": Obsolete(
        _TITAN, "optimizer.clip_norm; in your own loop parallel2d.clip_gradient_norm"
    ),
    # How long, how often, where
    "max_epochs": Obsolete(
        _LIGHTNING,
        "train.steps; the data is read again as often as that needs, or data.epochs times",
    ),
    "max_steps": Obsolete(_LIGHTNING, "train.steps"),
    "val_check_interval": Obsolete(_LIGHTNING, "train.validate_every, in steps"),
    "limit_val_batches": Obsolete(_LIGHTNING, "train.validate_batches"),
    "log_every_n_steps": Obsolete(_LIGHTNING, "metrics.log_every"),
    "log_freq": Obsolete(_TITAN, "metrics.log_every"),
    "profile_freq": Obsolete(_TITAN, "profile.steps=[FIRST,LAST]"),
    "interval": Obsolete(_TITAN, "checkpoint.every, in steps"),
    "init_timeout_seconds": Obsolete(_TITAN, "launch.first_step_timeout"),
    "train_timeout_seconds": Obsolete(_TITAN, "launch.timeout"),
    "devices": Obsolete(_LIGHTNING, "launch.nproc_per_node"),
    "num_nodes": Obsolete(_LIGHTNING, "launch.nnodes, with launch.rdzv_endpoint, on every node"),
    "accelerator": Obsolete(_LIGHTNING, "leave it out: GPUs are used where there are some"),
    "default_root_dir": Obsolete(_LIGHTNING, "hydra.run.dir=FOLDER"),
    "config_file": Obsolete(
        _TITAN, "settings are words key=value, and files in a folder of --config-dir"
    ),
    "flavor": Obsolete(
        _TITAN, "model=PRESET chooses one; its sizes are keys of model, as in the preset"
    ),
    "converters": Obsolete(_TITAN, "precision.float8"),
    "enable_float8_linear": Obsolete(_TITAN, "precision.float8"),
    # States
    "state_dict_type": Obsolete(
        _FSDP1,
        "parallel2d.full_state for whole tensors, parallel2d.sharded_state for each rank's parts",
    ),
    "state_dict_config": Obsolete(
        _FSDP1, "parallel2d.full_state(model, optimizer, rank0_only=, cpu=)"
    ),
    "optim_state_dict_config": Obsolete(
        _FSDP1, "parallel2d.full_state(model, optimizer, rank0_only=, cpu=, key_by=)"
    ),
    "async_mode": Obsolete(_TITAN, "checkpoint.asynchronous=true, the default, or false"),
    "keep_latest_k": Obsolete(_TITAN, "checkpoint.keep_last"),
    "move_state_dict_to_cpu": Obsolete(
        _THUNDER, "parallel2d.full_state gathers tensor by tensor and moves each to CPU memory"
    ),
    "enable_tensorboard": Obsolete(_TITAN, "metrics.tensorboard"),
    "enable_profiling": Obsolete(_TITAN, "profile.steps=[FIRST,LAST]"),
    "save_top_k": Obsolete(
        _LIGHTNING,
        "checkpoint.keep_last and checkpoint.keep_every; nothing is kept by its validation loss",
    ),
    "resume_from_checkpoint": Obsolete("transformers", "checkpoint.resume=PATH, auto or never"),
    "save_distributed_checkpoint": Obsolete(
        _LIGHTNING, "leave it out: checkpoints are always sharded and load on any layout"
    ),
}

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
    ``parallelism.tensor_parallel_degree``), as a sentence."""
    found = OPTIONS.get(name.rpartition(".")[2])
    return f"{name} is an option of {found.source}: {found.answer}" if found else None


def strategy_answer(value: str) -> str | None:
    """Which strategy is meant by another framework's word for it."""
    ours = STRATEGY_VALUES.get(value.lower().rpartition(".")[2])
    return f"strategy={value} is strategy={ours} here" if ours else None


def refuse(given: Mapping[str, object], where: str, known: Collection[str]) -> None:
    """Raises `ConfigError` when ``where``, which takes the options ``known``, was ``given`` others:
    one line each."""
    lines = []
    for name in given:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
        hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(known)}"
        lines.append(answer(name) or f"{where} has no option {name}; {hint}")
    if lines:
        raise ConfigError("\n".join(lines))
