"""Checks what the fields of a configuration mean together. Start at `validated`.

Every problem of a configuration is reported at once, one line each: the key, the value and what is
allowed.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any, TypeVar

from parallel2d.config.cluster import cluster_problems, plan_problems
from parallel2d.config.constraints import choice_problems, field_problems
from parallel2d.config.job import (
    CheckpointConfig,
    LaunchConfig,
    LoopConfig,
    OptimizerConfig,
    StopConfig,
    TrainConfig,
)
from parallel2d.config.model_and_data import (
    ENTRY_KEYS,
    READ_BY,
    CustomModel,
    DataConfig,
    HuggingFaceModel,
    LlamaModel,
    validation_set,
)
from parallel2d.config.parallel import (
    DTYPES,
    PLACEMENTS,
    TENSOR_WORDS,
    ActivationCheckpointingConfig,
    BucketingConfig,
    CompileConfig,
    ParallelConfig,
    PrecisionConfig,
    SyncConfig,
)
from parallel2d.errors import ConfigError, did_you_mean

_Config = TypeVar("_Config", bound=TrainConfig | ParallelConfig)


def validated(config: _Config) -> _Config:
    """Returns ``config``. Raises `ConfigError` with one line per problem: constraints of single
    fields first, then contradictions between fields."""
    if isinstance(config, TrainConfig):
        contradictions = _job_problems(config)
    else:
        contradictions = _parallel_problems(config)
    _refuse([*field_problems(config), *contradictions])
    return config


def check_data(data: DataConfig) -> None:
    """Raises `ConfigError` with one line per problem of a `DataConfig`."""
    _refuse([*field_problems(data, "data."), *_data_problems(data)])


def check_optimizer(optimizer: OptimizerConfig) -> None:
    """Raises `ConfigError` with one line per field of an `OptimizerConfig` that breaks its own
    constraint."""
    _refuse(list(field_problems(optimizer, "optimizer.")))


def check_steps(config: TrainConfig) -> None:
    """Raises `ConfigError` with one line per key that does not fit ``train.steps``, for where
    ``train.epochs`` has decided them."""
    _refuse([*_warmup_problems(config), *_profile_problems(config)])


def _refuse(problems: list[str]) -> None:
    if problems:
        raise ConfigError("\n".join(problems))


def _require(holds: bool, problem: str) -> Iterator[str]:
    """Yields ``problem`` unless ``holds``."""
    if not holds:
        yield problem


def _job_problems(config: TrainConfig) -> Iterator[str]:
    yield from _model_problems(config)
    yield from _parallel_problems(config)
    yield from _data_problems(config.training_data())
    yield from _optimizer_problems(config.optimizer)
    yield from _policy_problems(config)
    yield from _training_precision_problems(config)
    yield from _loop_problems(config)
    yield from _epoch_problems(config)
    # With train.epochs the steps are not known before the data are; see `check_steps`.
    if config.train.epochs is None:
        yield from _warmup_problems(config)
        yield from _profile_problems(config)
    yield from _best_problems(config)
    yield from _hook_problems(config.train.hooks)
    yield from _launch_problems(config.launch)
    yield from cluster_problems(config.cluster)
    yield from plan_problems(config.plan)


# What is trained


def _model_problems(config: TrainConfig) -> Iterator[str]:
    model = config.model
    if isinstance(model, LlamaModel):
        yield from _llama_problems(model, config.train.seq_len)
        return
    # Both take a plan for the tensor axis, and names of functions.
    yield from _tensor_plan_problems(model.tensor_plan)
    if isinstance(model, CustomModel):
        yield from _reference_problems(model, ("target", "init", "loss"))
        return
    assert isinstance(model, HuggingFaceModel)
    yield from _reference_problems(model, ("loss",))
    # One names a folder with a configuration, the other a configuration without a folder.
    named = [name for name in (model.path, model.architecture) if name is not None]
    yield from _require(
        len(named) == 1,
        "model=hf needs either model.path, the folder of a saved model, or model.architecture, "
        "such as llama or gpt2",
    )
    yield from _require(
        not config.data.intra_document_masking,
        "data.intra_document_masking=true: models of model=hf take no document ids",
    )
    if model.adapter is not None:
        yield from _adapter_problems(model, config.mesh.tensor)


def _adapter_problems(model: HuggingFaceModel, tensor: int | str) -> Iterator[str]:
    if not isinstance(model.adapter, Mapping):
        yield (
            f"model.adapter={model.adapter} must be arguments of peft.LoraConfig, such as "
            "{r: 8, target_modules: [q_proj, v_proj]}"
        )
    # An adapter is saved alone, and means nothing without the weights that it was trained on.
    yield from _require(
        model.path is not None and model.load_weights,
        "model.adapter needs model.path, the folder of a saved model, and model.load_weights=true: "
        "an adapter is trained on weights that are kept",
    )
    yield from _require(
        tensor in (1, "auto"),
        f"mesh.tensor={tensor}: a model with model.adapter is not split over a tensor axis; set "
        "mesh.tensor=1",
    )


def _llama_problems(model: LlamaModel, seq_len: int) -> Iterator[str]:
    head_dim, rest = divmod(model.dim, model.n_heads)
    yield from _require(
        rest == 0, f"model.dim={model.dim} must be a multiple of model.n_heads={model.n_heads}"
    )
    # A size that is no multiple gives no size of a head to check.
    yield from _require(
        rest != 0 or head_dim % 2 == 0,
        f"model.dim / model.n_heads = {head_dim} must be even: rotary embedding turns pairs",
    )
    # Grouped-query attention: each key and value head serves equally many query heads.
    yield from _require(
        model.n_heads % model.n_kv_heads == 0,
        f"model.n_heads={model.n_heads} must be a multiple of model.n_kv_heads={model.n_kv_heads}",
    )
    yield from _require(
        seq_len <= model.max_seq_len,
        f"train.seq_len={seq_len} is longer than model.max_seq_len={model.max_seq_len}",
    )


def _reference_problems(model: Any, keys: tuple[str, ...]) -> Iterator[str]:
    for key in keys:
        value = getattr(model, key)
        # A required field that was not given ("???") has a line of its own.
        if value in (None, "???"):
            continue
        if not _is_reference(value):
            yield f"model.{key}={value} must have the form package.module:name"


def _tensor_plan_problems(plan: Any) -> Iterator[str]:
    if plan is None:
        return
    if not isinstance(plan, dict):
        if not _is_reference(plan):
            yield (
                f"model.tensor_plan={plan} must be {{pattern: word}} or have the form "
                "package.module:function"
            )
        return
    for pattern, word in plan.items():
        if word in TENSOR_WORDS:
            continue
        near = did_you_mean(word, TENSOR_WORDS, alike=0.5)
        allowed = ", ".join(TENSOR_WORDS)
        yield f"model.tensor_plan: {pattern}: {word} is not one of {allowed}{near}"


def _is_reference(value: Any) -> bool:
    if not isinstance(value, str):
        return False
    module, colon, name = value.partition(":")
    parts = [*module.split("."), *name.split(".")]
    return bool(colon) and all(part.isidentifier() for part in parts)


# On what data

_PATHS = {
    "text": "a file, folder or glob",
    "hf": "a data set's name, or the folder of a saved one",
    "images": "a folder whose subfolders are the classes",
}


def _data_problems(data: DataConfig) -> Iterator[str]:
    yield from _without_effect("data", data, READ_BY)
    yield from _data_path_problems(data)
    yield from _image_problems(data)
    yield from _require(
        data.packing != "padded" or not data.intra_document_masking,
        "data.intra_document_masking=true has no effect with data.packing=padded: a sequence "
        "holds one document",
    )
    yield from _require(
        data.end == DataConfig().end or data.epochs > 0,
        f"data.end={data.end} has no effect with data.epochs=0, which reads without end",
    )
    for name, entry in data.validation.items():
        yield from _validation_set_problems(data, str(name), entry)


_SET_NAME = re.compile(r"[A-Za-z0-9_.-]+")
# What the values of an entry of data.validation may be, by the annotation of the field.
_KINDS: Mapping[str, tuple[type, ...]] = {
    "str": (str,),
    "str | None": (str, type(None)),
    "int": (int,),
    "int | str": (int, str),
    "float": (int, float),
    "list[Any]": (list,),
}


def _validation_set_problems(data: DataConfig, name: str, entry: Any) -> Iterator[str]:
    where = f"data.validation.{name}"
    if not _SET_NAME.fullmatch(name):
        yield f"{where}: a set's name has letters, digits, '_', '.' and '-' alone"
    if not isinstance(entry, dict):
        yield f"{where}={entry} must have the form {{path: PATH, name: text}}, with keys of data.*"
        return
    of_keys = list(_entry_problems(data, where, entry))
    yield from of_keys
    if of_keys:
        return
    own = validation_set(data, entry)
    if (own.name == "images") != (data.name == "images"):
        yield f"{where}.name={own.name} and data={data.name}: a model reads images or tokens"
    yield from field_problems(own, where + ".")
    for problem in _data_problems(own):
        yield f"{where}: {problem}"


def _entry_problems(data: DataConfig, where: str, entry: Mapping[str, Any]) -> Iterator[str]:
    """Of the keys of a validation set and the kinds of their values."""
    for key in entry:
        if key not in ENTRY_KEYS:
            near = did_you_mean(key, ENTRY_KEYS)
            yield f"{where}.{key}: a set may have {', '.join(ENTRY_KEYS)}{near}"
    for item in fields(data):
        if item.name in ENTRY_KEYS and item.name in entry:
            value = entry[item.name]
            if not isinstance(value, _KINDS[str(item.type)]):
                yield f"{where}.{item.name}={value} is no value of data.{item.name}"


def _without_effect(
    section: str, config: Any, read_by: Mapping[str, tuple[str, ...]]
) -> Iterator[str]:
    """Yields one line per field that is not at its default and that ``config.name`` does not read.

    ``read_by``: name -> the fields that it reads, of those that not all names read.
    """
    if config.name not in read_by:
        return  # an unknown name, which has a line of its own
    default = type(config)()
    conditional = set(itertools.chain.from_iterable(read_by.values()))
    for item in fields(config):
        if item.name not in conditional or item.name in read_by[config.name]:
            continue
        value = getattr(config, item.name)
        if value == getattr(default, item.name):
            continue
        readers = [name for name, names in read_by.items() if item.name in names]
        yield (
            f"{section}.{item.name}={value} has no effect with {section}={config.name}, only with "
            f"{', '.join(readers)}"
        )


def _data_path_problems(data: DataConfig) -> Iterator[str]:
    if data.name in _PATHS:
        yield from _require(
            bool(data.path), f"data.path is required with data={data.name}: {_PATHS[data.name]}"
        )
    if data.name == "tokens":
        yield from _require(
            bool(data.path) != bool(data.mixture),
            "data=tokens needs either data.path, a prepared folder, or data.mixture=[{path: A, "
            "weight: 0.7}, ...]",
        )
    for entry in data.mixture:
        yield from _require(
            isinstance(entry, dict) and set(entry) == {"path", "weight"},
            f"data.mixture has {entry}; an entry has the form {{path: FOLDER, weight: NUMBER}}",
        )


def _image_problems(data: DataConfig) -> Iterator[str]:
    # Both may be null, which a field with a constraint may not.
    yield from _require(
        data.image_size is None or data.image_size >= 1,
        f"data.image_size={data.image_size} must be at least 1, or null",
    )
    yield from _require(
        data.channels in (None, 1, 3),
        f"data.channels={data.channels} must be 1 (grey) or 3 (RGB), or null",
    )


# How gradients become updates

_ADAM = ("betas", "eps", "implementation")
# The fields that each optimizer reads, beside those that all of them read.
_UPDATED_BY = {
    "adamw": (*_ADAM, "amsgrad"),
    "adam": (*_ADAM, "amsgrad"),
    "sgd": ("implementation", "momentum", "nesterov"),
    "adafactor": ("beta2_decay", "clip_threshold"),
    "muon": (*_ADAM, "momentum", "nesterov", "adjust_lr", "newton_schulz_steps"),
}
_GROUP_KEYS = ("pattern", "lr_scale", "weight_decay", "algorithm")


def _optimizer_problems(optimizer: OptimizerConfig) -> Iterator[str]:
    yield from _without_effect("optimizer", optimizer, _UPDATED_BY)
    betas = optimizer.betas
    yield from _require(
        len(betas) == 2 and all(0 <= beta < 1 for beta in betas),
        f"optimizer.betas={betas} must be two numbers in [0, 1)",
    )
    yield from _require(
        optimizer.name != "sgd" or optimizer.implementation != "fused",
        "optimizer.implementation=fused: torch's fused SGD does not take sharded parameters; use "
        "foreach or loop",
    )
    yield from _require(
        not optimizer.nesterov or optimizer.momentum != 0,
        "optimizer.nesterov=true needs optimizer.momentum above 0",
    )
    for entry in optimizer.groups:
        yield from _group_problems(entry, optimizer.name)


def _group_problems(entry: Any, optimizer: str) -> Iterator[str]:
    has_pattern = isinstance(entry, dict) and isinstance(entry.get("pattern"), str)
    # A pattern alone would choose parameters and change nothing about them.
    if not has_pattern or len(entry) < 2:
        yield (
            f"optimizer.groups has {entry}; an entry has the form {{pattern: '*.norm*', "
            "weight_decay: 0.0, lr_scale: 0.1}"
        )
        return
    for key, value in entry.items():
        where = f"optimizer.groups: {entry['pattern']}: {key}"
        if key not in _GROUP_KEYS:
            near = did_you_mean(key, _GROUP_KEYS, alike=0.5)
            yield f"{where} is not one of {', '.join(_GROUP_KEYS)}{near}"
        elif key == "algorithm" and optimizer != "muon":
            yield f"{where}={value} has no effect with optimizer={optimizer}, only with muon"
        elif key == "algorithm":
            yield from choice_problems(where, value, ("muon", "adamw"))
        elif key != "pattern" and not _is_finite_and_not_negative(value):
            yield f"{where}={value} must be a number, at least 0"


def _is_finite_and_not_negative(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and 0 <= value < math.inf


# How the model is laid over the ranks


def _parallel_problems(config: TrainConfig | ParallelConfig) -> Iterator[str]:
    yield from _precision_problems(config.precision)
    yield from _float8_problems(config.precision)
    yield from _bucketing_problems(config.bucketing)
    yield from _checkpointing_problems(config.activation_checkpointing)
    yield from _budget_problems(config.activation_checkpointing, config.compile)
    yield from _sync_problems(config.sync)
    yield from _split_update_problems(config)


def _precision_problems(precision: PrecisionConfig) -> Iterator[str]:
    # Both may be null, which a field with choices may not.
    for key in ("output", "buffers"):
        value = getattr(precision, key)
        if value is None or value in DTYPES:
            continue
        yield f"precision.{key}={value} is not one of {', '.join(DTYPES)}, or null"
    yield from _require(
        not precision.keep_low_precision_gradients or precision.reduce != precision.storage,
        "precision.keep_low_precision_gradients=true has no effect with "
        f"precision.reduce={precision.reduce}, which is precision.storage too",
    )
    yield from _require(
        not precision.fp32_modules or precision.param in ("bf16", "fp16"),
        f"precision.fp32_modules has no effect with precision.param={precision.param}, only with "
        "bf16 and fp16",
    )


def _float8_problems(precision: PrecisionConfig) -> Iterator[str]:
    if precision.float8 == "none":
        yield from _require(
            not precision.float8_exclude,
            "precision.float8_exclude has no effect with precision.float8=none, only with "
            "tensorwise and rowwise",
        )
        return
    # The products are computed in 8 bits; what goes in and out is bf16, or fp32 for comparison.
    yield from _require(
        precision.param in ("bf16", "fp32"),
        f"precision.float8={precision.float8} needs precision.param=bf16 (or fp32), got "
        f"{precision.param}",
    )


def _bucketing_problems(bucketing: BucketingConfig) -> Iterator[str]:
    yield from _require(
        bucketing.policy is None or not bucketing.blocks,
        "bucketing.policy and bucketing.blocks both say what a block is: give one of them",
    )


# The fields that each kind of activation checkpointing reads.
_CHECKPOINTED_BY: Mapping[str, tuple[str, ...]] = {
    "none": (),
    "full": ("every", "blocks", "policy"),
    "selective": ("every", "blocks", "policy", "keep"),
    "budget": ("memory_budget",),
}
# Back ends of torch.compile that choose what backward recomputes.
_PARTITIONING = ("inductor", "aot_eager", "aot_eager_decomp_partition")


def _checkpointing_problems(checkpointing: ActivationCheckpointingConfig) -> Iterator[str]:
    name = checkpointing.name
    default = ActivationCheckpointingConfig()
    for key in ("every", "keep", "memory_budget", "blocks", "policy"):
        # An unknown name has a line of its own, and no further ones.
        if key in _CHECKPOINTED_BY.get(name, (key,)):
            continue
        if getattr(checkpointing, key) == getattr(default, key):
            continue
        readers = [reader for reader, keys in _CHECKPOINTED_BY.items() if key in keys]
        yield (
            f"activation_checkpointing.{key} needs "
            f"activation_checkpointing={' or '.join(readers)}, got {name}"
        )
    yield from _require(
        checkpointing.policy is None or not checkpointing.blocks,
        "activation_checkpointing.policy and activation_checkpointing.blocks both say what is "
        "checkpointed: give one of them",
    )


def _budget_problems(
    checkpointing: ActivationCheckpointingConfig, compilation: CompileConfig
) -> Iterator[str]:
    if checkpointing.name != "budget":
        return
    if compilation.name == "none":
        got = "compile=none"
    elif compilation.backend not in _PARTITIONING:
        got = f"compile.backend={compilation.backend}"
    else:
        return
    yield (
        "activation_checkpointing=budget needs compile=block with "
        f"compile.backend={' or '.join(_PARTITIONING)}, got {got}: the compiler chooses what is "
        "recomputed; choose full or selective without it"
    )


# What crosses the replicate axis

_DILOCO = ("every", "fragments", "delay", "mix", "outer_lr", "outer_momentum")


def _split_update_problems(config: TrainConfig | ParallelConfig) -> Iterator[str]:
    # An unknown strategy has a line of its own.
    if config.strategy.name not in PLACEMENTS or not config.strategy.splits_updates:
        return
    sync = config.sync
    strategy = config.strategy.name
    yield from _require(
        sync.name == "every_step",
        f"strategy={strategy} does not go with sync={sync.name}: each replica updates a part of "
        "the parameters for all, and with diloco replicas train on their own; use strategy=hybrid",
    )
    yield from _require(
        sync.wire != "int8",
        f"strategy={strategy} does not go with sync.wire=int8: updated parameters cross the "
        "replicate axis too, and 8 bits cannot hold them; use sync.wire=bf16",
    )
    yield from _require(
        sync.engine == "parallel2d",
        f"strategy={strategy} needs sync.engine=parallel2d, got {sync.engine}: torch's second axis "
        "does not split the optimizer",
    )
    yield from _require(
        sync.during_accumulation != "full",
        f"strategy={strategy} needs sync.during_accumulation=reduce_scatter_only or none, got "
        "full: a replica keeps no gradients of the parameters that others update",
    )


def _sync_problems(sync: SyncConfig) -> Iterator[str]:
    yield from _without_effect("sync", sync, {"every_step": (), "diloco": _DILOCO})
    yield from _require(
        sync.name != "every_step" or sync.wire != "int4",
        f"sync.wire={sync.wire} needs sync=diloco: what it loses of a single step's gradient is "
        "too much; every step takes fp32, bf16 or int8",
    )
    if sync.engine == "torch":
        yield from _require(
            sync.name == "every_step" and sync.wire == "auto",
            f"sync.engine=torch does sync=every_step with sync.wire=auto alone, got "
            f"sync={sync.name} sync.wire={sync.wire}: torch's second axis sends what "
            "precision.reduce says",
        )
    if sync.name != "diloco":
        return
    yield from _require(
        sync.fragments <= sync.every,
        f"sync.fragments={sync.fragments} must be at most sync.every={sync.every}: one fragment "
        "is exchanged in a step",
    )
    yield from _require(
        sync.delay < sync.every,
        f"sync.delay={sync.delay} must be below sync.every={sync.every}: a fragment arrives before "
        "it is sent again",
    )
    yield from _require(
        sync.during_accumulation != "full",
        "sync.during_accumulation=full has no effect with sync=diloco: gradients do not cross the "
        "replicate axis",
    )


# The loop and the launcher


def _policy_problems(config: TrainConfig) -> Iterator[str]:
    """In code a policy may be a function; in a configuration it is the name of one."""
    for section in ("bucketing", "activation_checkpointing"):
        policy = getattr(config, section).policy
        yield from _require(
            policy is None or _is_reference(policy),
            f"{section}.policy={policy} must have the form package.module:function",
        )


def _training_precision_problems(config: TrainConfig) -> Iterator[str]:
    precision = config.precision
    yield from _require(
        not precision.keep_low_precision_gradients,
        "precision.keep_low_precision_gradients=true is for optimizers of your own: "
        f"optimizer={config.optimizer.name} needs gradients in storage dtype",
    )
    yield from _require(
        not precision.loss_scaling or precision.param == "fp16",
        f"precision.loss_scaling=true needs precision.param=fp16, got {precision.param}",
    )


def _loop_problems(config: TrainConfig) -> Iterator[str]:
    train = config.train
    # Images have no length; the default is what a user who gave none has.
    yield from _require(
        config.data.name != "images" or train.seq_len == LoopConfig().seq_len,
        f"train.seq_len={train.seq_len} has no effect with data=images: an image is one sample "
        "with one target",
    )
    yield from _chunk_problems(config)
    loss = getattr(config.model, "loss", None)
    yield from _require(
        not (train.z_loss and loss),
        f"train.z_loss={train.z_loss} is added to the cross-entropy of logits, and model.loss="
        f"{loss} is a loss of its own; omit one of them",
    )
    micro = train.micro_batch_size
    whole = train.global_batch_size
    # "auto" is chosen to fit.
    if isinstance(micro, int):
        yield from _require(
            micro <= whole,
            f"train.micro_batch_size={micro} is larger than train.global_batch_size={whole}",
        )


def _chunk_problems(config: TrainConfig) -> Iterator[str]:
    chunk = config.train.loss_chunk
    if chunk is None:
        return
    yield from _require(
        config.data.name != "images",
        f"train.loss_chunk={chunk} splits the logits of tokens, and data=images has none",
    )
    loss = getattr(config.model, "loss", None)
    yield from _require(
        not loss,
        f"train.loss_chunk={chunk} computes the summed cross-entropy with the head, and model.loss="
        f"{loss} needs the whole logits; omit one of them",
    )
    output = config.precision.output
    yield from _require(
        output not in ("bf16", "fp16"),
        f"train.loss_chunk={chunk}: the output of the model is its loss, which precision.output="
        f"{output} would round; omit precision.output",
    )


def _warmup_problems(config: TrainConfig) -> Iterator[str]:
    warmup = config.scheduler.warmup_steps
    steps = config.train.steps
    yield from _require(
        warmup < max(steps, 1),
        f"scheduler.warmup_steps={warmup} must be below train.steps={steps}",
    )


def _epoch_problems(config: TrainConfig) -> Iterator[str]:
    epochs = config.train.epochs
    if epochs is None:
        return
    if isinstance(epochs, bool) or epochs < 1:
        yield f"train.epochs={epochs} must be at least 1, or null"
    of_data = config.data.epochs
    yield from _require(
        of_data in (0, epochs),
        f"train.epochs={epochs} and data.epochs={of_data} contradict each other: omit data.epochs",
    )
    # The default is what a user who gave none has.
    steps = config.train.steps
    yield from _require(
        steps == LoopConfig().steps,
        f"train.epochs={epochs} and train.steps={steps} both say when the run ends: omit one",
    )


# What ends and saves a run by what was measured

_SET_LOSS = re.compile(r"validation/(?P<name>[A-Za-z0-9_.-]+)/loss")


def _best_problems(config: TrainConfig) -> Iterator[str]:
    stop = config.train.stop
    checkpoint = config.checkpoint
    if stop.metric is None:
        for item in fields(StopConfig):
            value = getattr(stop, item.name)
            if value != getattr(StopConfig(), item.name):
                yield f"train.stop.{item.name}={value} has no effect without train.stop.metric"
    else:
        yield from _metric_problems("train.stop.metric", stop.metric, config)
    if checkpoint.keep_best is not None:
        yield from _metric_problems("checkpoint.keep_best", checkpoint.keep_best, config)
        yield from _require(
            checkpoint.enabled,
            f"checkpoint.keep_best={checkpoint.keep_best} has no effect with "
            "checkpoint.enabled=false",
        )
        return
    yield from _require(
        checkpoint.keep_best_mode == CheckpointConfig().keep_best_mode,
        f"checkpoint.keep_best_mode={checkpoint.keep_best_mode} has no effect without "
        "checkpoint.keep_best",
    )


def _metric_problems(key: str, metric: str, config: TrainConfig) -> Iterator[str]:
    """Yields a line for a metric that this job never measures."""
    if metric in ("loss", "grad_norm"):
        return
    named = [f"validation/{name}/loss" for name in config.data.validation]
    measured = ["loss", "grad_norm", "validation/loss", *named]
    if metric not in measured:
        # A hook may measure anything else.
        if not config.train.hooks or _SET_LOSS.fullmatch(metric):
            near = did_you_mean(metric, measured)
            yield (
                f"{key}={metric} is never measured: it may be {', '.join(measured)}, or a metric "
                f"of train.hooks{near}"
            )
        return
    yield from _require(
        config.train.validate_every > 0,
        f"{key}={metric} is never measured with train.validate_every=0",
    )
    reads_fraction = "validation_fraction" in READ_BY.get(config.data.name, ())
    if metric == "validation/loss" and reads_fraction and not config.data.validation_fraction:
        yield f"{key}={metric} is never measured with data.validation_fraction=0"


def _hook_problems(hooks: list[Any]) -> Iterator[str]:
    for entry in hooks:
        reference = entry.get("hook") if isinstance(entry, dict) else entry
        if not _is_reference(reference):
            yield (
                f"train.hooks has {entry}; an entry has the form package.module:Class, or "
                "{hook: package.module:Class, every: 50} with keyword arguments of the class"
            )


def _profile_problems(config: TrainConfig) -> Iterator[str]:
    steps = config.profile.steps
    last = config.train.steps
    # 1 <= first traced step <= last traced step <= last step of the run
    in_order = [1, *steps, last] == sorted([1, *steps, last])
    yield from _require(
        not steps or (len(steps) == 2 and in_order),
        f"profile.steps={steps} must be the first and the last step of a trace, within 1 and "
        f"train.steps={last}",
    )
    yield from _require(
        all(rank >= 0 for rank in config.profile.ranks),
        f"profile.ranks={config.profile.ranks} must be ranks, counted from 0",
    )


def _launch_problems(launch: LaunchConfig) -> Iterator[str]:
    first = launch.first_step_timeout
    yield from _require(
        first is None or first >= launch.timeout,
        f"launch.first_step_timeout={first} must be at least launch.timeout={launch.timeout}",
    )
    try:
        _, largest = launch.node_range
    except ConfigError as error:
        yield str(error)
        return
    # Several nodes must know where to meet; a single one must not wait for others.
    if largest > 1:
        yield from _require(
            bool(launch.rdzv_endpoint),
            f"launch.nnodes={launch.nnodes} needs launch.rdzv_endpoint=HOST:PORT, the same on "
            "every node: an address of one of them, or of a store that python -m "
            "parallel2d.launch store runs elsewhere",
        )
    else:
        yield from _require(
            not launch.rdzv_endpoint,
            f"launch.rdzv_endpoint={launch.rdzv_endpoint} has no effect with launch.nnodes=1: a "
            "single node meets nobody",
        )
