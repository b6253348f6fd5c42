"""Checks what the fields of a configuration mean together. Start at `validated`.

Every problem of a configuration is reported at once, one line each: the key, the value and what is
allowed. `config.options` checks each field alone, and that what is set is read. Pairs of settings
that do not go together are tables here; what takes more to find is a function.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar

from parallel2d.base.config.job import OptimizerConfig, TrainConfig
from parallel2d.base.config.model_and_data import (
    DataConfig,
    HuggingFaceModel,
    LlamaModel,
    data_problems,
)
from parallel2d.base.config.options import (
    as_word,
    choice_problem,
    field_problems,
    is_read,
    is_reference,
)
from parallel2d.base.config.parallel import SYNC_WIRES, TENSOR_WORDS, ParallelConfig
from parallel2d.base.errors import ConfigError, did_you_mean

_Config = TypeVar("_Config", bound=TrainConfig | ParallelConfig)
# Two settings, and why they do not go together or what to use. A key without a value stands for
# every value but its default.
_Conflicts = tuple[tuple[str, str, str], ...]


def _wires_not_taken(taker: str, setting: str, reason: str) -> list[tuple[str, str, str]]:
    """Rows for the wires that ``taker`` has no use for, by the table `SYNC_WIRES`."""
    names = [wire for wire, takers in SYNC_WIRES.items() if taker not in takers]
    return [(f"sync.wire={name}", setting, reason) for name in names]


_FP8_INPUTS = "products take precision.param=bf16 (or fp32)"
_BOTH_CHOOSE = "both choose modules: give one of them"
_PARALLEL_CONFLICTS: _Conflicts = (
    ("precision.float8", "precision.param=fp64", _FP8_INPUTS),
    ("precision.float8", "precision.param=fp16", _FP8_INPUTS),
    ("bucketing.policy", "bucketing.blocks", _BOTH_CHOOSE),
    ("activation_checkpointing.policy", "activation_checkpointing.blocks", _BOTH_CHOOSE),
    ("strategy=hybrid_full", "sync=diloco", "use strategy=hybrid"),
    ("strategy=hybrid_full", "sync.engine=torch", "use sync.engine=parallel2d"),
    (
        "strategy=hybrid_full",
        "sync.during_accumulation=full",
        "use sync.during_accumulation=reduce_scatter_only or none",
    ),
    *_wires_not_taken("every_step", "sync=every_step", "use sync=diloco, or another sync.wire"),
    *_wires_not_taken(
        "hybrid_full",
        "strategy=hybrid_full",
        "updated parameters cross the replicate axis too, and so few bits cannot hold them; use "
        "sync.wire=bf16",
    ),
    ("sync.engine=torch", "sync=diloco", "use sync.engine=parallel2d"),
    ("sync.engine=torch", "sync.wire", "use sync.wire=auto, or sync.engine=parallel2d"),
    ("sync.during_accumulation=full", "sync=diloco", "it is for sync=every_step"),
)
_JOB_CONFLICTS: _Conflicts = (
    (
        "optimizer.implementation=fused",
        "optimizer=sgd",
        "torch's fused SGD does not take sharded parameters; use foreach or loop",
    ),
    ("train.seq_len", "data=custom", "the data set decides it"),
    ("train.z_loss", "train.loss", "it is added to the cross-entropy"),
    ("train.loss_chunk", "train.loss", "it chunks the head, and that loss takes whole logits"),
    ("train.loss_chunk", "precision.output=bf16", "this would round the loss; omit the latter"),
    ("train.loss_chunk", "precision.output=fp16", "this would round the loss; omit the latter"),
    ("train.epochs", "train.steps", "both say when the run ends: omit one"),
    ("checkpoint.keep_best", "checkpoint.enabled=false", "nothing is saved"),
    ("plan.scaling", "plan.dry_run=true", "one is about several layouts, the other plans one"),
)


def validated(config: _Config) -> _Config:
    """Returns ``config``. Raises `ConfigError` with one line per problem: those of single fields
    first, then contradictions between fields."""
    read: Any = config
    checks = [*_PARALLEL_CHECKS]
    if isinstance(config, TrainConfig):
        read = replace(config, data=config.training_data())
        checks += _JOB_CHECKS
        # With train.epochs the steps are not known before the data are; see `check_steps`.
        if config.train.epochs is None:
            checks.append(_step_problems)
    problems = itertools.chain.from_iterable(check(config) for check in checks)
    _refuse([*field_problems(read), *problems])
    return config


def check_data(data: DataConfig) -> None:
    """Raises `ConfigError` with one line per problem of a `DataConfig`."""
    _refuse([*field_problems(data, "data."), *data_problems(data)])


def check_optimizer(optimizer: OptimizerConfig) -> None:
    """Raises `ConfigError` with one line per field of an `OptimizerConfig` that breaks its own
    constraint."""
    _refuse(list(field_problems(optimizer, "optimizer.")))


def check_steps(config: TrainConfig) -> None:
    """Raises `ConfigError` with one line per key that does not fit ``train.steps``, for where
    ``train.epochs`` has decided them."""
    _refuse(list(_step_problems(config)))


def _refuse(problems: Sequence[str]) -> None:
    if problems:
        raise ConfigError("\n".join(problems))


def _found(conflicts: _Conflicts, config: Any) -> Iterator[str]:
    for first, second, reason in conflicts:
        both = _given(config, first), _given(config, second)
        if all(both):
            yield f"{both[0]} does not go with {both[1]}: {reason}"


def _given(config: Any, setting: str) -> str | None:
    """``setting`` with the value that ``config`` has for it; None where that is another."""
    key, _, wanted = setting.partition("=")
    group, _, name = key.partition(".")
    section = getattr(config, group)
    # A model of another family may not have the field.
    value = getattr(section, name or "name", None)
    default = getattr(type(section)(), name or "name", None)
    is_given = as_word(value) == wanted if wanted else value != default
    return f"{key}={as_word(value)}" if is_given else None


# What is trained


def _llama(config: TrainConfig) -> Iterator[str]:
    model = config.model
    if not isinstance(model, LlamaModel):
        return
    head_dim, rest = divmod(model.dim, model.n_heads)
    if rest:
        yield f"model.dim={model.dim} must be a multiple of model.n_heads={model.n_heads}"
    elif head_dim % 2:
        yield f"model.dim / model.n_heads = {head_dim} must be even: rotary embedding turns pairs"
    # Grouped-query attention: each key and value head serves equally many query heads.
    heads = f"model.n_heads={model.n_heads} must be a multiple of model.n_kv_heads="
    if model.n_heads % model.n_kv_heads:
        yield f"{heads}{model.n_kv_heads}"
    length = config.train.seq_len
    if length > model.max_seq_len:
        yield f"train.seq_len={length} is longer than model.max_seq_len={model.max_seq_len}"


def _library_model(config: TrainConfig) -> Iterator[str]:
    model = config.model
    if not isinstance(model, HuggingFaceModel):
        return
    # One names a folder with a configuration, the other a configuration without a folder.
    if (model.path is None) == (model.architecture is None):
        yield "model=hf needs either model.path, a folder, or model.architecture, such as llama"
    if config.data.intra_document_masking:
        yield "data.intra_document_masking=true: models of model=hf take no document ids"
    if model.adapter is None:
        return
    if not isinstance(model.adapter, Mapping):
        yield f"model.adapter={model.adapter} must be arguments of peft.LoraConfig: {{r: 8, ...}}"
    # An adapter is saved alone, and means nothing without the weights that it was trained on.
    if model.path is None or not model.load_weights:
        yield "model.adapter needs model.path and model.load_weights=true: weights that are kept"
    tensor = config.mesh.tensor
    if tensor not in (1, "auto"):
        yield f"mesh.tensor={tensor}: a model with model.adapter needs mesh.tensor=1"


def _tensor_plan(config: TrainConfig) -> Iterator[str]:
    plan = getattr(config.model, "tensor_plan", None)
    if isinstance(plan, dict):
        for pattern, word in plan.items():
            problem = choice_problem(f"model.tensor_plan: {pattern}", word, TENSOR_WORDS)
            yield from filter(None, [problem])
    elif plan is not None and not is_reference(plan):
        yield (
            f"model.tensor_plan={plan} must be {{pattern: word}} or have the form "
            "package.module:function"
        )


def _data(config: TrainConfig) -> Iterator[str]:
    yield from data_problems(config.training_data())
    passes = config.train.epochs
    of_data = config.data.epochs
    if passes is not None and of_data not in (0, passes):
        yield (
            f"train.epochs={passes} and data.epochs={of_data} contradict each other: omit "
            "data.epochs"
        )


# How gradients become updates

_GROUP_KEYS = ("pattern", "lr_scale", "weight_decay", "algorithm")


def _optimizer(config: TrainConfig) -> Iterator[str]:
    optimizer = config.optimizer
    if optimizer.name == "custom" and optimizer.target is None:
        yield "optimizer.target is required with optimizer=custom: package.module:build"
    betas = optimizer.betas
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        yield f"optimizer.betas={betas} must be two numbers in [0, 1)"
    if optimizer.nesterov and optimizer.momentum == 0:
        yield "optimizer.nesterov=true needs optimizer.momentum above 0"
    for entry in optimizer.groups:
        yield from _group_problems(entry, optimizer.name)
    if config.precision.keep_low_precision_gradients:
        yield "precision.keep_low_precision_gradients=true is for optimizers of your own"


def _group_problems(entry: Any, optimizer: str) -> Iterator[str]:
    has_pattern = isinstance(entry, dict) and isinstance(entry.get("pattern"), str)
    # A pattern alone would choose parameters and change nothing about them.
    if not has_pattern or len(entry) < 2:
        yield f"optimizer.groups has {entry}; an entry has the form {{pattern: a.*, lr_scale: 0.1}}"
        return
    for key, value in entry.items():
        where = f"optimizer.groups: {entry['pattern']}: {key}"
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if key == "pattern":
            continue
        if key not in _GROUP_KEYS:
            near = did_you_mean(key, _GROUP_KEYS, alike=0.5)
            yield f"{where} is not one of {', '.join(_GROUP_KEYS)}{near}"
        elif key != "algorithm":
            if not is_number or not 0 <= value < math.inf:
                yield f"{where}={value} must be a number, at least 0"
        elif optimizer != "muon":
            yield f"{where}={value} has no effect with optimizer={optimizer}, only with muon"
        else:
            yield from filter(None, [choice_problem(where, value, ("muon", "adamw"))])


# How the model is laid over the ranks

# Back ends of torch.compile that choose what backward recomputes.
_PARTITIONING = ("inductor", "aot_eager", "aot_eager_decomp_partition")


def _precision(config: TrainConfig | ParallelConfig) -> Iterator[str]:
    precision = config.precision
    if precision.keep_low_precision_gradients and precision.reduce == precision.storage:
        yield (
            "precision.keep_low_precision_gradients=true has no effect with "
            f"precision.reduce={precision.reduce}, which is precision.storage too"
        )


def _memory_budget(config: TrainConfig | ParallelConfig) -> Iterator[str]:
    compilation = config.compile
    compiles = compilation.name == "block" and compilation.backend in _PARTITIONING
    if config.activation_checkpointing.name == "budget" and not compiles:
        yield (
            "activation_checkpointing=budget needs compile=block with "
            f"compile.backend={' or '.join(_PARTITIONING)}, got compile={compilation.name}, "
            f"compile.backend={compilation.backend}: the compiler chooses what is recomputed"
        )


def _fragments(config: TrainConfig | ParallelConfig) -> Iterator[str]:
    sync = config.sync
    if sync.name != "diloco":
        return
    # One fragment is exchanged in a step, and arrives before it is sent again.
    if sync.fragments > sync.every:
        yield f"sync.fragments={sync.fragments} must be at most sync.every={sync.every}"
    if sync.delay >= sync.every:
        yield f"sync.delay={sync.delay} must be below sync.every={sync.every}"


# The loop


def _loop(config: TrainConfig) -> Iterator[str]:
    train = config.train
    micro = train.micro_batch_size
    whole = train.global_batch_size
    # "auto" is chosen to fit.
    if isinstance(micro, int) and micro > whole:
        yield f"train.micro_batch_size={micro} is larger than train.global_batch_size={whole}"
    for entry in train.hooks:
        reference = entry.get("hook") if isinstance(entry, dict) else entry
        if not is_reference(reference):
            yield (
                f"train.hooks has {entry}; an entry has the form package.module:Class, or "
                "{hook: package.module:Class, every: 50} with keyword arguments of the class"
            )


def _step_problems(config: TrainConfig) -> Iterator[str]:
    last = config.train.steps
    warmup = config.scheduler.warmup_steps
    if warmup >= max(last, 1):
        yield f"scheduler.warmup_steps={warmup} must be below train.steps={last}"
    traced = config.profile.steps
    # 1 <= first traced step <= last traced step <= last step of the run
    in_order = [1, *traced, last] == sorted([1, *traced, last])
    if traced and (len(traced) != 2 or not in_order):
        yield (
            f"profile.steps={traced} must be the first and the last step of a trace, within 1 and "
            f"train.steps={last}"
        )
    ranks = config.profile.ranks
    if any(rank < 0 for rank in ranks):
        yield f"profile.ranks={ranks} must be ranks, counted from 0"


# What ends and saves a run by what was measured

_SET_LOSS = re.compile(r"validation/(?P<name>[A-Za-z0-9_.-]+)/loss")


def _best(config: TrainConfig) -> Iterator[str]:
    asked = {
        "train.stop.metric": config.train.stop.metric,
        "checkpoint.keep_best": config.checkpoint.keep_best,
    }
    for key, metric in asked.items():
        if metric not in (None, "loss", "grad_norm"):
            yield from _validation_problems(key, str(metric), config)


def _validation_problems(key: str, metric: str, config: TrainConfig) -> Iterator[str]:
    """Yields a line for a metric, of validation or of a hook, that this job never measures."""
    named = [f"validation/{name}/loss" for name in config.data.validation]
    measured = ["loss", "grad_norm", "validation/loss", *named]
    # A hook may measure anything but the loss of a set that is not there.
    of_hook = bool(config.train.hooks) and _SET_LOSS.fullmatch(metric) is None
    (held_out,) = [item for item in fields(DataConfig) if item.name == "validation_fraction"]
    holds_out = config.data.validation_fraction or not is_read(config.data, held_out)
    if metric not in measured:
        if not of_hook:
            yield (
                f"{key}={metric} is never measured: it may be {', '.join(measured)}, or a metric "
                f"of train.hooks{did_you_mean(metric, measured)}"
            )
    elif config.train.validate_every == 0:
        yield f"{key}={metric} is never measured with train.validate_every=0"
    elif metric == "validation/loss" and not holds_out:
        yield f"{key}={metric} is never measured with data.validation_fraction=0"


# The launcher and the machines


def _nodes(config: TrainConfig) -> Iterator[str]:
    launch = config.launch
    first = launch.first_step_timeout
    if first is not None and first < launch.timeout:
        yield f"launch.first_step_timeout={first} must be at least launch.timeout={launch.timeout}"
    try:
        _, largest = launch.node_range
    except ConfigError as error:
        yield str(error)
        return
    # Several nodes must know where to meet; a single one must not wait for others.
    if largest > 1 and not launch.rdzv_endpoint:
        yield (
            f"launch.nnodes={launch.nnodes} needs launch.rdzv_endpoint=HOST:PORT, the same on "
            "every node: an address of one of them, or of a store that python -m "
            "parallel2d.launch store runs elsewhere"
        )
    if largest == 1 and launch.rdzv_endpoint:
        yield f"launch.rdzv_endpoint={launch.rdzv_endpoint} has no effect with launch.nnodes=1"


_Check = Callable[[Any], Iterator[str]]
_PARALLEL_CHECKS: tuple[_Check, ...] = (
    functools.partial(_found, _PARALLEL_CONFLICTS),
    _precision,
    _memory_budget,
    _fragments,
)
_JOB_CHECKS: tuple[_Check, ...] = (
    functools.partial(_found, _JOB_CONFLICTS),
    _llama,
    _library_model,
    _tensor_plan,
    _data,
    _optimizer,
    _loop,
    _best,
    _nodes,
)
