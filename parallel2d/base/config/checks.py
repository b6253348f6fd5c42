"""Checks that compare several keys of a configuration. Start at `validated`.

One error reports all problems of a configuration, one line each, with the key, the value and the
constraint. `config.options` checks each field separately, and refuses a field that has no effect
with the other settings. In this module, pairs of incompatible settings are rows of tables; all
other checks are functions.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from parallel2d.base.config.job import OptimizerConfig, TrainConfig
from parallel2d.base.config.model_and_data import (
    CONDITIONAL,
    DataConfig,
    HuggingFaceModel,
    LlamaModel,
    data_problems,
)
from parallel2d.base.config.options import (
    as_override,
    choice_problem,
    field_problems,
    is_read,
    is_reference,
)
from parallel2d.base.config.parallel import TENSOR_WORDS, ParallelConfig
from parallel2d.base.errors import ConfigError, did_you_mean

_Config = TypeVar("_Config", bound=TrainConfig | ParallelConfig)
# Two incompatible settings and the reason. A key without a value stands for every value except the
# default.
_Conflicts = tuple[tuple[str, str, str], ...]
# (true value if the problem exists, its message)
_Problems = Iterator[tuple[object, str]]

_FP8_INPUTS = "products take precision.param=bf16 (or fp32)"
_BOTH_CHOOSE = "both choose modules: give one of them"
_PARALLEL_CONFLICTS: _Conflicts = (
    ("precision.float8", "precision.param=fp64", _FP8_INPUTS),
    ("precision.float8", "precision.param=fp16", _FP8_INPUTS),
    ("bucketing.policy", "bucketing.blocks", _BOTH_CHOOSE),
    ("activation_checkpointing.policy", "activation_checkpointing.blocks", _BOTH_CHOOSE),
    ("strategy=hybrid_full", "sync=diloco", "use strategy=hybrid"),
    ("strategy=hybrid_full", "sync.during_accumulation=full", "use reduce_scatter_only or none"),
    ("sync.during_accumulation=full", "sync=diloco", "it is for sync=every_step"),
    ("sync.warmup", "sync=diloco", "it is for sync=every_step"),
    (
        "sync.wire=int4",
        "sync.during_accumulation=full",
        "error feedback is sent once in a global batch; use reduce_scatter_only or none",
    ),
)
_JOB_CONFLICTS: _Conflicts = (
    ("data.intra_document_masking", "model.family=hf", "these models take no document ids"),
    ("optimizer.implementation=fused", "optimizer=sgd", "it takes no shards; use foreach or loop"),
    ("train.seq_len", "data=custom", "the data set decides it"),
    ("train.seq_len", "data=stream", "the samples decide it"),
    ("train.z_loss", "train.loss", "it is added to the cross-entropy"),
    ("train.loss_chunk", "train.loss", "it chunks the head, and that loss takes whole logits"),
    ("train.loss_chunk", "precision.output=bf16", "this would round the loss; omit the latter"),
    ("train.loss_chunk", "precision.output=fp16", "this would round the loss; omit the latter"),
    ("train.epochs", "train.steps", "both say when the run ends: omit one"),
    ("checkpoint.keep_best", "checkpoint.enabled=false", "nothing is saved"),
    ("plan.scaling", "plan.dry_run=true", "one is about several layouts, the other plans one"),
)


def validated(config: _Config) -> _Config:
    """Return ``config`` if it has no problem.

    Raises:
        ConfigError: with one line per problem. Problems of single fields come first, then
            contradictions between fields.
    """
    read: Any = config
    checks = [*_PARALLEL_CHECKS]
    if isinstance(config, TrainConfig):
        read = replace(config, data=config.training_data())
        checks += _JOB_CHECKS
        # With train.epochs the steps are not known before the data are; see `check_steps`.
        if config.train.epochs is None:
            checks.append(_steps)
    _refuse(field_problems(read), *(check(config) for check in checks))
    return config


def check_data(data: DataConfig) -> None:
    """Raise `ConfigError` with one line per problem of a `DataConfig`."""
    _refuse([*field_problems(data, "data."), *data_problems(data)])


def check_optimizer(optimizer: OptimizerConfig) -> None:
    """Raise `ConfigError` with one line per field that violates its constraint."""
    _refuse(
        field_problems(optimizer, "optimizer."),
        _betas(optimizer),
        _state_dtype(optimizer),
        _matrix_problems(optimizer),
    )


def check_steps(config: TrainConfig) -> None:
    """Raise `ConfigError` for keys that contradict the number of steps that ``train.epochs``
    gives."""
    _refuse((), _steps(config))


def _refuse(problems: Iterable[str], *checks: _Problems) -> None:
    """Raise `ConfigError` for ``problems``, and for the lines of ``checks`` that apply."""
    found = itertools.chain(*checks)
    lines = [*problems, *(line for is_wrong, line in found if is_wrong)]
    if lines:
        raise ConfigError("\n".join(lines))


def _conflicting(conflicts: _Conflicts, config: Any) -> _Problems:
    for first, second, reason in conflicts:
        both = _setting_text(config, first), _setting_text(config, second)
        yield all(both), f"{both[0]} does not go with {both[1]}: {reason}"


def _setting_text(config: Any, setting: str) -> str | None:
    """Return ``KEY=VALUE`` for ``setting`` if ``config`` has this value, otherwise None."""
    key, _, wanted = setting.partition("=")
    group, _, name = key.partition(".")
    section = getattr(config, group)
    # A model of another family may not have the field.
    value = getattr(section, name or "name", None)
    default = getattr(type(section)(), name or "name", None)
    is_set = as_override(value) == wanted if wanted else value != default
    return f"{key}={as_override(value)}" if is_set else None


# Model and data


def _llama(config: TrainConfig) -> _Problems:
    model = config.model
    # The check of the single field reports a number below 1.
    if not isinstance(model, LlamaModel) or min(model.n_heads, model.n_kv_heads) < 1:
        return
    heads = f"model.n_heads={model.n_heads}"
    head_dim, rest = divmod(model.dim, model.n_heads)
    # Rotary embedding rotates pairs of dims.
    is_odd = not rest and head_dim % 2
    yield rest, f"model.dim={model.dim} must be a multiple of {heads}"
    yield is_odd, f"model.dim / model.n_heads = {head_dim} must be even"
    # Grouped-query attention: each key and value head serves equally many query heads.
    unserved = model.n_heads % model.n_kv_heads
    yield unserved, f"{heads} must be a multiple of model.n_kv_heads={model.n_kv_heads}"
    length, most = config.train.seq_len, model.max_seq_len
    yield length > most, f"train.seq_len={length} is longer than model.max_seq_len={most}"


def _library_model(config: TrainConfig) -> _Problems:
    model = config.model
    if not isinstance(model, HuggingFaceModel):
        return
    # path names a folder with a configuration, architecture a configuration without a folder.
    yield (
        (model.path is None) == (model.architecture is None),
        "model=hf needs either model.path, a folder, or model.architecture, such as llama",
    )
    adapter, tensor = model.adapter, config.mesh.tensor
    if adapter is None:
        return
    yield (
        not isinstance(adapter, Mapping),
        f"model.adapter={adapter} must be arguments of peft.LoraConfig: {{r: 8, ...}}",
    )
    # A checkpoint has only the adapter, which is useless without the weights of its base model.
    yield (
        model.path is None or not model.load_weights,
        "model.adapter needs model.path and model.load_weights=true: only the adapter is saved",
    )
    yield tensor not in (1, "auto"), f"mesh.tensor={tensor}: model.adapter needs mesh.tensor=1"
    yield (
        isinstance(adapter, Mapping)
        and adapter.get("use_dora")
        and config.bucketing.name != "block",
        f"bucketing={config.bucketing.name}: use_dora of model.adapter needs bucketing=block, "
        "which gathers a layer together with its adapter",
    )


def _tensor_plan(config: TrainConfig) -> _Problems:
    plan = getattr(config.model, "tensor_plan", None)
    if isinstance(plan, dict):
        for pattern, word in plan.items():
            yield _choice(f"model.tensor_plan: {pattern}", word, TENSOR_WORDS)
    else:
        yield (
            plan is not None and not is_reference(plan),
            f"model.tensor_plan={plan} must be {{pattern: word}} or have the form "
            "package.module:function",
        )


def _conditional(config: TrainConfig) -> _Problems:
    for pattern, way in getattr(config.model, "conditional", {}).items():
        yield _choice(f"model.conditional: {pattern}", way, CONDITIONAL)


def _choice(key: str, value: object, choices: Sequence[str]) -> tuple[bool, str]:
    problem = choice_problem(key, value, choices)
    return problem is not None, str(problem)


def _data(config: TrainConfig) -> _Problems:
    for problem in data_problems(config.training_data()):
        yield True, problem
    passes, of_data = config.train.epochs, config.data.epochs
    yield (
        passes is not None and of_data not in (0, passes),
        f"train.epochs={passes} and data.epochs={of_data} contradict each other: omit data.epochs",
    )


# Optimizer

_GROUP_KEYS = ("pattern", "lr_scale", "weight_decay", "algorithm")


def _optimizer(config: TrainConfig) -> _Problems:
    optimizer = config.optimizer
    yield from _betas(optimizer)
    stands = optimizer.nesterov and optimizer.momentum == 0
    yield stands, "optimizer.nesterov=true needs optimizer.momentum above 0"
    yield from _state_dtype(optimizer)
    yield from _matrix_problems(optimizer)
    for entry in optimizer.groups:
        yield from _group_problems(entry, optimizer.name)
    yield (
        config.precision.keep_low_precision_gradients,
        "precision.keep_low_precision_gradients=true is for optimizers of your own",
    )


def _betas(optimizer: OptimizerConfig) -> _Problems:
    betas: Any = optimizer.betas
    is_pair = isinstance(betas, Sequence) and len(betas) == 2
    are_shares = is_pair and all(isinstance(beta, int | float) and 0 <= beta < 1 for beta in betas)
    yield not are_shares, f"optimizer.betas={betas} must be two numbers in [0, 1)"


def _state_dtype(optimizer: OptimizerConfig) -> _Problems:
    if optimizer.state_dtype not in ("bf16", "int8"):
        return
    where = f"optimizer.state_dtype={optimizer.state_dtype}"
    yield optimizer.amsgrad, f"{where} and optimizer.amsgrad=true exclude each other: omit one"
    has_none = optimizer.name == "sgd" and optimizer.momentum == 0
    yield has_none, f"{where} has no effect: sgd with optimizer.momentum=0 has no state"
    default = "foreach" if optimizer.name == "sgd" else "fused"
    yield (
        optimizer.implementation != default,
        f"optimizer.implementation={optimizer.implementation} has no effect with {where}, which "
        "has one implementation",
    )


def _matrix_problems(optimizer: OptimizerConfig) -> _Problems:
    for entry in optimizer.matrices:
        parts = dict(entry) if isinstance(entry, Mapping) else {}
        pattern, flatten = parts.pop("pattern", None), parts.pop("flatten", False)
        is_right = isinstance(pattern, str) and isinstance(flatten, bool)
        is_right &= not (flatten and parts) and {*parts} <= {"rows", "columns"}
        for value in parts.values():
            sizes = value if isinstance(value, list | tuple) and value else [value]
            is_right &= all(type(each) is int and each > 0 for each in sizes)
        yield (
            not is_right,
            f"optimizer.matrices has {entry}; an entry has the form {{pattern: a.*, rows: 3}}, "
            "with rows and columns (a number of parts, or their sizes), or with flatten: true",
        )


def _group_problems(entry: Any, optimizer: str) -> _Problems:
    has_pattern = isinstance(entry, dict) and isinstance(entry.get("pattern"), str)
    # An entry with only a pattern would choose parameters and change none of their settings.
    if not has_pattern or len(entry) < 2:
        form = "an entry has the form {pattern: a.*, lr_scale: 0.1}"
        yield True, f"optimizer.groups has {entry}; {form}"
        return
    for key, value in entry.items():
        where = f"optimizer.groups: {entry['pattern']}: {key}"
        if key == "algorithm" and optimizer == "muon":
            yield _choice(where, value, ("muon", "adamw"))
        elif key == "algorithm":
            yield True, f"{where}={value} has no effect with optimizer={optimizer}, only with muon"
        elif key in _GROUP_KEYS:
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            fits = key == "pattern" or (is_number and 0 <= value < math.inf)
            yield not fits, f"{where}={value} must be a number, at least 0"
        else:
            near = did_you_mean(key, _GROUP_KEYS)
            yield True, f"{where} is not one of {', '.join(_GROUP_KEYS)}{near}"


# Layout of the model over the ranks

# Backends of torch.compile that choose the activations that backward recomputes
_PARTITIONING = ("inductor", "aot_eager", "aot_eager_decomp_partition")


def _precision(config: TrainConfig | ParallelConfig) -> _Problems:
    precision = config.precision
    yield (
        precision.keep_low_precision_gradients and precision.reduce == precision.storage,
        "precision.keep_low_precision_gradients=true has no effect with "
        f"precision.reduce={precision.reduce}, which is precision.storage too",
    )


def _memory_budget(config: TrainConfig | ParallelConfig) -> _Problems:
    compilation = config.compile
    compiles = compilation.name == "block" and compilation.backend in _PARTITIONING
    yield (
        config.activation_checkpointing.name == "budget" and not compiles,
        "activation_checkpointing=budget needs compile=block with "
        f"compile.backend={' or '.join(_PARTITIONING)}: the compiler chooses the recomputed "
        "activations",
    )


def _fragments(config: TrainConfig | ParallelConfig) -> _Problems:
    sync = config.sync
    if sync.name != "diloco":
        return
    # One fragment is exchanged in a step, and arrives before it is sent again.
    every = f"sync.every={sync.every}"
    yield sync.fragments > sync.every, f"sync.fragments={sync.fragments} must be at most {every}"
    yield sync.delay >= sync.every, f"sync.delay={sync.delay} must be below {every}"


# The loop


def _loop(config: TrainConfig) -> _Problems:
    micro, whole = config.train.micro_batch_size, config.train.global_batch_size
    yield (
        isinstance(micro, int) and micro > whole,  # "auto" is chosen to fit
        f"train.micro_batch_size={micro} is larger than train.global_batch_size={whole}",
    )
    limited = config.train.memory_gib is not None
    where = f"train.memory_gib={config.train.memory_gib}"
    yield (
        limited and micro != "auto",
        f"{where} has no effect with train.micro_batch_size={micro}: omit one",
    )
    yield (
        limited and config.data.name == "stream",
        f"{where} reads samples before the first step, which data=stream would lose; set "
        "train.micro_batch_size",
    )
    for entry in config.train.hooks:
        reference = entry.get("hook") if isinstance(entry, dict) else entry
        yield (
            not is_reference(reference),
            f"train.hooks has {entry}; an entry has the form package.module:Class, or "
            "{hook: package.module:Class, every: 50} with keyword arguments of the class",
        )


def _steps(config: TrainConfig) -> _Problems:
    last, warmup = config.train.steps, config.scheduler.warmup_steps
    is_long = warmup >= max(last, 1)
    yield is_long, f"scheduler.warmup_steps={warmup} must be below train.steps={last}"
    traced = config.profile.steps
    # 1 <= first traced step <= last traced step <= last step of the run
    bounds = [1, *traced, last]
    yield (
        traced and (len(traced) != 2 or bounds != sorted(bounds)),
        f"profile.steps={traced} must be the first and the last step of a trace, within 1 and "
        f"train.steps={last}",
    )
    ranks = config.profile.ranks
    yield min(ranks, default=0) < 0, f"profile.ranks={ranks} must be ranks, counted from 0"


# Metrics that end or save a run


def _best(config: TrainConfig) -> _Problems:
    """Yield problems for metrics of validation or of a hook that this job never measures."""
    data, train = config.data, config.train
    measured = ["loss", "grad_norm"]
    if train.validate_every:
        held_out = data.__dataclass_fields__["validation_fraction"]
        if data.validation_fraction or not is_read(data, held_out):
            measured.append("validation/loss")
        for name in data.validation:
            measured.append(f"validation/{name}/loss")
    asked = {
        "train.stop.metric": train.stop.metric,
        "checkpoint.keep_best": config.checkpoint.keep_best,
    }
    for key, metric in asked.items():
        # A hook may measure any other metric, but not the loss of a validation set that does not
        # exist.
        is_from_hook = train.hooks and not re.fullmatch("validation/(.*/)?loss", str(metric))
        yield (
            metric is not None and metric not in measured and not is_from_hook,
            f"{key}={metric} is never measured in this job: it may be {', '.join(measured)}, or a "
            f"metric of train.hooks{did_you_mean(metric, measured)}",
        )


# The launcher and the machines


def _nodes(config: TrainConfig) -> _Problems:
    launch = config.launch
    first = launch.first_step_timeout
    yield (
        first is not None and first < launch.timeout,
        f"launch.first_step_timeout={first} must be at least launch.timeout={launch.timeout}",
    )
    interval, limit = launch.heartbeat_interval_s, launch.heartbeat_timeout_s
    yield (
        limit < 2 * interval,
        f"launch.heartbeat_timeout_s={limit} must be at least twice "
        f"launch.heartbeat_interval_s={interval}: one late heartbeat is not a failure",
    )
    yield (
        launch.min_replicas > 1
        and (config.strategy.placement.splits_updates or not config.replicas_survive),
        f"launch.min_replicas={launch.min_replicas} has no effect here: this job needs all of its "
        "replicas (docs/failures.md lists jobs that do not)",
    )
    try:
        _, largest = launch.node_range
    except ConfigError as error:
        yield True, str(error)
        return
    # Several nodes need a rendezvous endpoint; a single node must not wait for others.
    yield (
        largest > 1 and not launch.rdzv_endpoint,
        f"launch.nnodes={launch.nnodes} needs launch.rdzv_endpoint=HOST:PORT, the same on every "
        "node: an address of one of them, or of a store that python -m parallel2d.launch store "
        "runs elsewhere",
    )
    yield (
        largest == 1 and launch.rdzv_endpoint,
        f"launch.rdzv_endpoint={launch.rdzv_endpoint} has no effect with launch.nnodes=1",
    )


_Check = Callable[[Any], _Problems]
_PARALLEL_CHECKS: tuple[_Check, ...] = (
    functools.partial(_conflicting, _PARALLEL_CONFLICTS),
    _precision,
    _memory_budget,
    _fragments,
)
_JOB_CHECKS: tuple[_Check, ...] = (
    functools.partial(_conflicting, _JOB_CONFLICTS),
    _llama,
    _library_model,
    _tensor_plan,
    _conditional,
    _data,
    _optimizer,
    _loop,
    _best,
    _nodes,
)
