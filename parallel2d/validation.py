"""What may not be: everything that is wrong with a configuration, found at once.

Dataclasses flow in, lines for people flow out. `problems` checks each field against its own
constraint; the others check what fields mean together. Each line names the key, the value and what
is allowed; nothing here raises on the first.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from parallel2d.config import (
    DTYPES,
    OPTIMIZERS,
    TENSOR_WORDS,
    ActivationCheckpointingConfig,
    BucketingConfig,
    CompileConfig,
    ConfigError,
    CustomModel,
    DataConfig,
    HuggingFaceModel,
    LaunchConfig,
    LlamaModel,
    LoopConfig,
    OptimizerConfig,
    PrecisionConfig,
    ResolvedParallelConfig,
    TrainConfig,
)


def problems(config: Any, prefix: str = "") -> Iterator[str]:
    """Yields one line per field of a dataclass tree that breaks its own constraint."""
    for item in fields(config):
        value = getattr(config, item.name)
        key = prefix + item.name
        if is_dataclass(value):
            yield from problems(value, key + ".")
        elif value == "???":
            yield f"{key} is required and was not given"
        elif _not_finite(value) and not item.metadata.get("infinite"):
            yield f"{key}={value} must be finite"
        elif item.metadata:
            yield from _constraint_problems(key, value, item.metadata)


def _not_finite(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(map(_not_finite, value))
    return isinstance(value, float) and not math.isfinite(value)


def _constraint_problems(key: str, value: Any, constraint: Any) -> Iterator[str]:
    if "choices" in constraint:
        if value not in constraint["choices"]:
            near = difflib.get_close_matches(str(value), constraint["choices"], n=1, cutoff=0.5)
            hint = f"; did you mean {near[0]}?" if near else ""
            yield f"{key}={value} is not one of {', '.join(constraint['choices'])}{hint}"
        return
    auto = constraint.get("auto", False)
    if auto and value == "auto":
        return
    bounded = {"minimum", "above", "maximum"} & set(constraint)
    if not bounded:
        return
    bounds = " and ".join(
        text.format(constraint[name])
        for name, text in (
            ("minimum", "at least {}"),
            ("above", "above {}"),
            ("maximum", "at most {}"),
        )
        if name in constraint
    )
    allowed = f"must be {'a whole number of ' if auto else ''}{bounds}{', or auto' if auto else ''}"
    if (
        not isinstance(value, int | float)
        or isinstance(value, bool)
        or (auto and not isinstance(value, int))
        or (
            math.isnan(value)
            or value < constraint.get("minimum", -math.inf)
            or value <= constraint.get("above", -math.inf)
            or value > constraint.get("maximum", math.inf)
        )
    ):
        yield f"{key}={value} {allowed}"


_SEQUENCES = ("packing", "intra_document_masking")
_PREPARED_FROM_FILES = (
    "tokenizer",
    "end_token",
    "validation_fraction",
    "workers",
    "cache_dir",
    *_SEQUENCES,
)
_READ_BY = {
    "stdlib": _PREPARED_FROM_FILES,
    "text": ("path", "text_field", "document_kib", "max_bad_rows", *_PREPARED_FROM_FILES),
    "tokens": ("path", "mixture", *_SEQUENCES),
    "hf": ("path", "subset", "split", "text_field", "max_bad_rows", *_PREPARED_FROM_FILES),
    "images": ("path", "validation_fraction", "workers", "image_size", "channels"),
}
_READ_ALWAYS = ("name", "epochs", "end")


def data_problems(data: DataConfig) -> Iterator[str]:
    """Yields one line per contradiction between the fields of a `DataConfig`, an option without
    effect included."""
    default = DataConfig()
    read = (*_READ_ALWAYS, *_READ_BY.get(data.name, ()))
    for item in fields(data):
        value = getattr(data, item.name)
        if value != getattr(default, item.name) and item.name not in read and data.name in _READ_BY:
            readers = [name for name, keys in _READ_BY.items() if item.name in keys]
            yield (
                f"data.{item.name}={value} has no effect with data={data.name}, only with "
                f"{', '.join(readers)}"
            )
    if data.name == "text" and not data.path:
        yield "data.path is required with data=text: a file, folder or glob"
    if data.name == "hf" and not data.path:
        yield "data.path is required with data=hf: a data set's name, or the folder of a saved one"
    if data.name == "images" and not data.path:
        yield "data.path is required with data=images: a folder whose subfolders are the classes"
    if data.image_size is not None and data.image_size < 1:
        yield f"data.image_size={data.image_size} must be at least 1, or null"
    if data.channels not in (None, 1, 3):
        yield f"data.channels={data.channels} must be 1 (grey) or 3 (RGB), or null"
    if data.name == "tokens" and bool(data.path) == bool(data.mixture):
        yield (
            "data=tokens needs either data.path, a prepared folder, or data.mixture=[{path: A, "
            "weight: 0.7}, ...]"
        )
    for entry in data.mixture:
        if not isinstance(entry, dict) or set(entry) != {"path", "weight"}:
            yield (
                f"data.mixture has {entry}; an entry has the form {{path: FOLDER, weight: NUMBER}}"
            )
    if data.packing == "padded" and data.intra_document_masking:
        yield (
            "data.intra_document_masking=true has no effect with data.packing=padded: a "
            "sequence holds one document"
        )
    if data.end != default.end and not data.epochs:
        yield f"data.end={data.end} has no effect with data.epochs=0, which reads without end"


def job_problems(config: TrainConfig) -> Iterator[str]:
    train, model = config.train, config.model
    if isinstance(model, LlamaModel):
        if model.dim % model.n_heads:
            yield f"model.dim={model.dim} must be a multiple of model.n_heads={model.n_heads}"
        elif (model.dim // model.n_heads) % 2:
            yield (
                f"model.dim / model.n_heads = {model.dim // model.n_heads} must be even: rotary "
                "embedding turns pairs"
            )
        if model.n_heads % model.n_kv_heads:
            yield (
                f"model.n_heads={model.n_heads} must be a multiple of "
                f"model.n_kv_heads={model.n_kv_heads}"
            )
        if train.seq_len > model.max_seq_len:
            yield (
                f"train.seq_len={train.seq_len} is longer than "
                f"model.max_seq_len={model.max_seq_len}"
            )
    elif isinstance(model, CustomModel):
        yield from _reference_problems(model, ("target", "init", "loss"))
        yield from _tensor_plan_problems(model.tensor_plan)
    elif isinstance(model, HuggingFaceModel):
        yield from _reference_problems(model, ("loss",))
        yield from _tensor_plan_problems(model.tensor_plan)
        if (model.path is None) == (model.architecture is None):
            yield (
                "model=hf needs either model.path, the folder of a saved model, or "
                "model.architecture, such as llama or gpt2"
            )
        if config.data.intra_document_masking:
            yield "data.intra_document_masking=true: models of model=hf take no document ids"
    yield from parallel_problems(config)
    yield from data_problems(config.data)
    if config.data.name == "images" and train.seq_len != LoopConfig().seq_len:
        yield (
            f"train.seq_len={train.seq_len} has no effect with data=images: an image is one "
            "sample with one target"
        )
    yield from optimizer_problems(config.optimizer)
    if config.scheduler.warmup_steps >= train.steps and config.scheduler.warmup_steps > 0:
        yield (
            f"scheduler.warmup_steps={config.scheduler.warmup_steps} must be below "
            f"train.steps={train.steps}"
        )
    precision = config.precision
    if precision.keep_low_precision_gradients:
        yield (
            "precision.keep_low_precision_gradients=true is for optimizers of your own: "
            f"optimizer={config.optimizer.name} needs "
            "gradients in storage dtype"
        )
    for section in ("bucketing", "activation_checkpointing"):
        policy = getattr(config, section).policy
        if policy is not None and not _is_reference(policy):
            yield f"{section}.policy={policy} must have the form package.module:function"
    if precision.loss_scaling and precision.param != "fp16":
        yield f"precision.loss_scaling=true needs precision.param=fp16, got {precision.param}"
    steps = config.profile.steps
    if steps and not (len(steps) == 2 and 1 <= steps[0] <= steps[1] <= train.steps):
        yield (
            f"profile.steps={steps} must be the first and the last step of a trace, within 1 "
            f"and train.steps={train.steps}"
        )
    if any(rank < 0 for rank in config.profile.ranks):
        yield f"profile.ranks={config.profile.ranks} must be ranks, counted from 0"
    yield from launch_problems(config.launch)
    if isinstance(train.micro_batch_size, int) and train.micro_batch_size > train.global_batch_size:
        yield (
            f"train.micro_batch_size={train.micro_batch_size} is larger than "
            f"train.global_batch_size={train.global_batch_size}"
        )


def launch_problems(launch: LaunchConfig) -> Iterator[str]:
    if launch.first_step_timeout is not None and not launch.first_step_timeout >= launch.timeout:
        yield (
            f"launch.first_step_timeout={launch.first_step_timeout} must be at least "
            f"launch.timeout={launch.timeout}"
        )
    try:
        _, largest = launch.node_range
    except ConfigError as error:
        yield str(error)
        return
    if largest > 1 and not launch.rdzv_endpoint:
        yield (
            f"launch.nnodes={launch.nnodes} needs launch.rdzv_endpoint=HOST:PORT, the same on "
            "every node: an address of one of them, or "
            "of a store that python -m parallel2d.launch store runs elsewhere"
        )
    if largest == 1 and launch.rdzv_endpoint:
        yield (
            f"launch.rdzv_endpoint={launch.rdzv_endpoint} has no effect with launch.nnodes=1: a "
            "single node meets nobody"
        )


_UPDATED_BY = {
    "betas": ("adamw", "adam", "muon"),
    "eps": ("adamw", "adam", "muon"),
    "implementation": ("adamw", "adam", "sgd", "muon"),
    "amsgrad": ("adamw", "adam"),
    "momentum": ("sgd", "muon"),
    "nesterov": ("sgd", "muon"),
    "beta2_decay": ("adafactor",),
    "clip_threshold": ("adafactor",),
    "adjust_lr": ("muon",),
    "newton_schulz_steps": ("muon",),
}
_GROUP_KEYS = ("pattern", "lr_scale", "weight_decay", "algorithm")


def optimizer_problems(optimizer: OptimizerConfig) -> Iterator[str]:
    """Yields one line per contradiction between the fields of an `OptimizerConfig`, an option
    without effect included."""
    default, name = OptimizerConfig(), optimizer.name
    for key, readers in _UPDATED_BY.items():
        value = getattr(optimizer, key)
        if value != getattr(default, key) and name not in readers and name in OPTIMIZERS:
            yield (
                f"optimizer.{key}={value} has no effect with optimizer={name}, only with "
                f"{', '.join(readers)}"
            )
    betas = optimizer.betas
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        yield f"optimizer.betas={betas} must be two numbers in [0, 1)"
    if name == "sgd" and optimizer.implementation == "fused":
        yield (
            "optimizer.implementation=fused: torch's fused SGD does not take sharded "
            "parameters; use foreach or loop"
        )
    if optimizer.nesterov and optimizer.momentum == 0:
        yield "optimizer.nesterov=true needs optimizer.momentum above 0"
    for entry in optimizer.groups:
        yield from _group_problems(entry, name)


def _group_problems(entry: Any, name: str) -> Iterator[str]:
    if not isinstance(entry, dict) or not isinstance(entry.get("pattern"), str) or len(entry) < 2:
        yield (
            f"optimizer.groups has {entry}; an entry has the form {{pattern: '*.norm*', "
            f"weight_decay: 0.0, lr_scale: 0.1}}"
        )
        return
    for key, value in entry.items():
        where = f"optimizer.groups: {entry['pattern']}: {key}"
        if key not in _GROUP_KEYS:
            near = difflib.get_close_matches(str(key), _GROUP_KEYS, n=1, cutoff=0.5)
            yield (
                f"{where} is not one of "
                f"{', '.join(_GROUP_KEYS)}{f'; did you mean {near[0]}?' if near else ''}"
            )
        elif key == "algorithm":
            if name != "muon":
                yield f"{where}={value} has no effect with optimizer={name}, only with muon"
            elif value not in ("muon", "adamw"):
                yield f"{where}={value} is not one of muon, adamw"
        elif key != "pattern" and (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not 0 <= value < math.inf
        ):
            yield f"{where}={value} must be a number, at least 0"


def parallel_problems(config: TrainConfig | ResolvedParallelConfig) -> Iterator[str]:
    """Yields one line per contradiction in what `parallel2d.parallelize` reads."""
    yield from precision_problems(config.precision)
    yield from bucketing_problems(config.bucketing)
    yield from checkpointing_problems(config.activation_checkpointing, config.compile)


def precision_problems(precision: PrecisionConfig) -> Iterator[str]:
    for key in ("output", "buffers"):
        value = getattr(precision, key)
        if value is not None and value not in DTYPES:
            yield f"precision.{key}={value} is not one of {', '.join(DTYPES)}, or null"
    if precision.keep_low_precision_gradients and precision.reduce == precision.storage:
        yield (
            "precision.keep_low_precision_gradients=true has no effect with "
            f"precision.reduce={precision.reduce}, which is "
            "precision.storage too"
        )
    if precision.fp32_modules and precision.param not in ("bf16", "fp16"):
        yield (
            f"precision.fp32_modules has no effect with precision.param={precision.param}, only "
            "with bf16 and fp16"
        )
    if precision.float8_exclude and precision.float8 == "none":
        yield (
            "precision.float8_exclude has no effect with precision.float8=none, only with "
            "tensorwise and rowwise"
        )
    if precision.float8 != "none" and precision.param not in ("bf16", "fp32"):
        yield (
            f"precision.float8={precision.float8} needs precision.param=bf16 (or fp32), got "
            f"{precision.param}"
        )


def bucketing_problems(bucketing: BucketingConfig) -> Iterator[str]:
    if bucketing.policy is not None and bucketing.blocks:
        yield "bucketing.policy and bucketing.blocks both say what a block is: give one of them"


# back ends that choose what backward recomputes
_PARTITIONING = ("inductor", "aot_eager", "aot_eager_decomp_partition")


def checkpointing_problems(
    checkpointing: ActivationCheckpointingConfig, compilation: CompileConfig
) -> Iterator[str]:
    name, default = checkpointing.name, ActivationCheckpointingConfig()
    read = {
        "none": (),
        "full": ("every", "blocks", "policy"),
        "selective": ("every", "blocks", "policy", "keep"),
        "budget": ("memory_budget",),
    }
    for key in ("every", "keep", "memory_budget", "blocks", "policy"):
        value = getattr(checkpointing, key)
        if name in read and key not in read[name] and value != getattr(default, key):
            readers = [reader for reader, keys in read.items() if key in keys]
            yield (
                f"activation_checkpointing.{key} needs "
                f"activation_checkpointing={' or '.join(readers)}, got {name}"
            )
    if checkpointing.blocks and checkpointing.policy is not None:
        yield (
            "activation_checkpointing.policy and activation_checkpointing.blocks both say what "
            "is checkpointed: give one of them"
        )
    if name == "budget" and (
        compilation.name == "none" or compilation.backend not in _PARTITIONING
    ):
        got = (
            f"compile.backend={compilation.backend}"
            if compilation.name != "none"
            else "compile=none"
        )
        yield (
            "activation_checkpointing=budget needs compile=block with compile.backend="
            f"{' or '.join(_PARTITIONING)}, got {got}: the compiler chooses what is recomputed; "
            "choose full or selective without it"
        )


def _reference_problems(model: Any, keys: tuple[str, ...]) -> Iterator[str]:
    for key in keys:
        value = getattr(model, key)
        if value not in (None, "???") and not _is_reference(value):
            yield f"model.{key}={value} must have the form package.module:name"


def _tensor_plan_problems(plan: Any) -> Iterator[str]:
    if isinstance(plan, dict):
        for pattern, word in plan.items():
            if word not in TENSOR_WORDS:
                near = difflib.get_close_matches(str(word), TENSOR_WORDS, n=1, cutoff=0.5)
                hint = f"; did you mean {near[0]}?" if near else ""
                yield (
                    f"model.tensor_plan: {pattern}: {word} is not one of "
                    f"{', '.join(TENSOR_WORDS)}{hint}"
                )
    elif plan is not None and not _is_reference(plan):
        yield (
            f"model.tensor_plan={plan} must be {{pattern: word}} or have the form "
            f"package.module:function"
        )


def _is_reference(value: Any) -> bool:
    if not isinstance(value, str):
        return False
    module, colon, name = value.partition(":")
    return bool(colon) and all(
        part.isidentifier() for part in [*module.split("."), *name.split(".")]
    )
