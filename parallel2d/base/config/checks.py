"""Checks what the fields of a configuration mean together. Start at `validated`.

Every problem of a configuration is reported at once, one line each: the key, the value and what is
allowed. `config.options` checks each field alone, and that what is set is read.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar

from parallel2d.base.config.job import LoopConfig, OptimizerConfig, TrainConfig
from parallel2d.base.config.model_and_data import (
    DataConfig,
    HuggingFaceModel,
    LlamaModel,
    data_problems,
)
from parallel2d.base.config.options import choice_problems, field_problems, is_read
from parallel2d.base.config.parallel import PLACEMENTS, SYNC_WIRES, TENSOR_WORDS, ParallelConfig
from parallel2d.base.config.reference import is_reference
from parallel2d.base.errors import ConfigError, did_you_mean

_Config = TypeVar("_Config", bound=TrainConfig | ParallelConfig)
_Check = Callable[[Any], Iterator[str]]


def validated(config: _Config) -> _Config:
    """Returns ``config``. Raises `ConfigError` with one line per problem: those of single fields
    first, then contradictions between fields."""
    read: Any = config
    checks: list[_Check] = list(_PARALLEL_CHECKS)
    if isinstance(config, TrainConfig):
        read = replace(config, data=config.training_data())
        checks += _JOB_CHECKS
        # With train.epochs the steps are not known before the data are; see `check_steps`.
        if config.train.epochs is None:
            checks += _STEP_CHECKS
    _refuse([*field_problems(read), *_problems(config, checks)])
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
    _refuse(_problems(config, _STEP_CHECKS))


def _refuse(problems: list[str]) -> None:
    if problems:
        raise ConfigError("\n".join(problems))


def _problems(config: Any, checks: Sequence[_Check]) -> list[str]:
    return list(itertools.chain.from_iterable(check(config) for check in checks))


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
            yield from choice_problems(f"model.tensor_plan: {pattern}", word, TENSOR_WORDS)
    elif plan is not None and not is_reference(plan):
        yield (
            f"model.tensor_plan={plan} must be {{pattern: word}} or have the form "
            "package.module:function"
        )


# On what data


def _data(config: TrainConfig) -> Iterator[str]:
    return data_problems(config.training_data())


# How gradients become updates

_GROUP_KEYS = ("pattern", "lr_scale", "weight_decay", "algorithm")


def _optimizer(config: TrainConfig) -> Iterator[str]:
    optimizer = config.optimizer
    betas = optimizer.betas
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        yield f"optimizer.betas={betas} must be two numbers in [0, 1)"
    if optimizer.name == "sgd" and optimizer.implementation == "fused":
        yield (
            "optimizer.implementation=fused: torch's fused SGD does not take sharded parameters; "
            "use foreach or loop"
        )
    if optimizer.nesterov and optimizer.momentum == 0:
        yield "optimizer.nesterov=true needs optimizer.momentum above 0"
    for entry in optimizer.groups:
        yield from _group_problems(entry, optimizer.name)


def _group_problems(entry: Any, optimizer: str) -> Iterator[str]:
    has_pattern = isinstance(entry, dict) and isinstance(entry.get("pattern"), str)
    # A pattern alone would choose parameters and change nothing about them.
    if not has_pattern or len(entry) < 2:
        yield f"optimizer.groups has {entry}; an entry has the form {{pattern: a.*, lr_scale: 0.1}}"
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

# Back ends of torch.compile that choose what backward recomputes.
_PARTITIONING = ("inductor", "aot_eager", "aot_eager_decomp_partition")


def _precision(config: TrainConfig | ParallelConfig) -> Iterator[str]:
    precision = config.precision
    if precision.keep_low_precision_gradients and precision.reduce == precision.storage:
        yield (
            "precision.keep_low_precision_gradients=true has no effect with "
            f"precision.reduce={precision.reduce}, which is precision.storage too"
        )
    # The products are computed in 8 bits; what goes in and out is bf16, or fp32 for comparison.
    float8, given = precision.float8, precision.param
    if float8 != "none" and given not in ("bf16", "fp32"):
        yield f"precision.float8={float8} needs precision.param=bf16 (or fp32), got {given}"


def _blocks(config: TrainConfig | ParallelConfig) -> Iterator[str]:
    for key in ("bucketing", "activation_checkpointing"):
        section = getattr(config, key)
        if section.policy is not None and section.blocks:
            yield f"{key}.policy and {key}.blocks both choose modules: give one of them"


def _memory_budget(config: TrainConfig | ParallelConfig) -> Iterator[str]:
    if config.activation_checkpointing.name != "budget":
        return
    compilation = config.compile
    if compilation.name != "block" or compilation.backend not in _PARTITIONING:
        yield (
            "activation_checkpointing=budget needs compile=block with "
            f"compile.backend={' or '.join(_PARTITIONING)}, got compile={compilation.name}, "
            f"compile.backend={compilation.backend}: the compiler chooses what is recomputed"
        )


def _split_updates(config: TrainConfig | ParallelConfig) -> Iterator[str]:
    # An unknown strategy has a line of its own.
    if config.strategy.name not in PLACEMENTS or not config.strategy.splits_updates:
        return
    sync = config.sync
    strategy = f"strategy={config.strategy.name}"
    if sync.name != "every_step":
        yield f"{strategy} does not go with sync={sync.name}; use strategy=hybrid"
    takes = SYNC_WIRES.get(sync.wire, ())
    # One that is for other methods alone has a line of its own.
    if sync.name in takes and config.strategy.name not in takes:
        yield (
            f"{strategy} does not go with sync.wire={sync.wire}: updated parameters cross the "
            "replicate axis too, and 8 bits cannot hold them; use sync.wire=bf16"
        )
    if sync.engine != "parallel2d":
        yield f"{strategy} needs sync.engine=parallel2d, got {sync.engine}"
    if sync.during_accumulation == "full":
        yield f"{strategy} needs sync.during_accumulation=reduce_scatter_only or none, got full"


def _every_step(config: TrainConfig | ParallelConfig) -> Iterator[str]:
    sync = config.sync
    takes = SYNC_WIRES.get(sync.wire, (sync.name,))
    if sync.name == "every_step" and sync.name not in takes:
        _, *able, last = [wire for wire, methods in SYNC_WIRES.items() if sync.name in methods]
        yield (
            f"sync.wire={sync.wire} needs sync={' or '.join(takes)}; every step takes "
            f"{', '.join(able)} or {last}"
        )
    if sync.engine == "torch" and (sync.name, sync.wire) != ("every_step", "auto"):
        yield (
            "sync.engine=torch does sync=every_step with sync.wire=auto alone, got "
            f"sync={sync.name} sync.wire={sync.wire}"
        )


def _diloco(config: TrainConfig | ParallelConfig) -> Iterator[str]:
    sync = config.sync
    if sync.name != "diloco":
        return
    # One fragment is exchanged in a step, and arrives before it is sent again.
    if sync.fragments > sync.every:
        yield f"sync.fragments={sync.fragments} must be at most sync.every={sync.every}"
    if sync.delay >= sync.every:
        yield f"sync.delay={sync.delay} must be below sync.every={sync.every}"
    if sync.during_accumulation == "full":
        yield "sync.during_accumulation=full has no effect with sync=diloco, only with every_step"


# The loop


def _gradients(config: TrainConfig) -> Iterator[str]:
    if config.precision.keep_low_precision_gradients:
        yield "precision.keep_low_precision_gradients=true is for optimizers of your own"


def _loss(config: TrainConfig) -> Iterator[str]:
    """Images have no length, and a loss of one's own takes whole logits."""
    train = config.train
    chunk = f"train.loss_chunk={train.loss_chunk}"
    # The default is what a user who gave none has.
    if config.data.name == "images" and train.seq_len != LoopConfig().seq_len:
        yield f"train.seq_len={train.seq_len} has no effect with data=images"
    if config.data.name == "images" and train.loss_chunk:
        yield f"{chunk} splits the logits of tokens, and data=images has none"
    own = getattr(config.model, "loss", None)
    if own and train.z_loss:
        yield f"train.z_loss={train.z_loss} is added to the cross-entropy, not to model.loss={own}"
    if own and train.loss_chunk:
        yield f"{chunk} chunks the head, and model.loss={own} needs the whole logits"
    output = config.precision.output
    if train.loss_chunk and output in ("bf16", "fp16"):
        yield f"{chunk}: precision.output={output} would round the loss; omit precision.output"


def _loop(config: TrainConfig) -> Iterator[str]:
    train = config.train
    micro = train.micro_batch_size
    whole = train.global_batch_size
    # "auto" is chosen to fit.
    if isinstance(micro, int) and micro > whole:
        yield f"train.micro_batch_size={micro} is larger than train.global_batch_size={whole}"
    epochs = f"train.epochs={train.epochs}"
    of_data = config.data.epochs
    if train.epochs is not None and of_data not in (0, train.epochs):
        yield f"{epochs} and data.epochs={of_data} contradict each other: omit data.epochs"
    # The default is what a user who gave none has.
    if train.epochs is not None and train.steps != LoopConfig().steps:
        yield f"{epochs} and train.steps={train.steps} both say when the run ends: omit one"
    for entry in train.hooks:
        reference = entry.get("hook") if isinstance(entry, dict) else entry
        if not is_reference(reference):
            yield (
                f"train.hooks has {entry}; an entry has the form package.module:Class, or "
                "{hook: package.module:Class, every: 50} with keyword arguments of the class"
            )


def _warmup(config: TrainConfig) -> Iterator[str]:
    warmup = config.scheduler.warmup_steps
    steps = config.train.steps
    if warmup >= max(steps, 1):
        yield f"scheduler.warmup_steps={warmup} must be below train.steps={steps}"


def _profile(config: TrainConfig) -> Iterator[str]:
    steps = config.profile.steps
    last = config.train.steps
    # 1 <= first traced step <= last traced step <= last step of the run
    in_order = [1, *steps, last] == sorted([1, *steps, last])
    if steps and (len(steps) != 2 or not in_order):
        yield (
            f"profile.steps={steps} must be the first and the last step of a trace, within 1 and "
            f"train.steps={last}"
        )
    ranks = config.profile.ranks
    if any(rank < 0 for rank in ranks):
        yield f"profile.ranks={ranks} must be ranks, counted from 0"


# What ends and saves a run by what was measured

_SET_LOSS = re.compile(r"validation/(?P<name>[A-Za-z0-9_.-]+)/loss")


def _best(config: TrainConfig) -> Iterator[str]:
    metric = config.train.stop.metric
    best = config.checkpoint.keep_best
    if metric is not None:
        yield from _metric_problems("train.stop.metric", metric, config)
    if best is not None:
        yield from _metric_problems("checkpoint.keep_best", best, config)
    if best is not None and not config.checkpoint.enabled:
        yield f"checkpoint.keep_best={best} has no effect with checkpoint.enabled=false"


def _metric_problems(key: str, metric: str, config: TrainConfig) -> Iterator[str]:
    """Yields a line for a metric that this job never measures."""
    named = [f"validation/{name}/loss" for name in config.data.validation]
    measured = ["loss", "grad_norm", "validation/loss", *named]
    if metric in ("loss", "grad_norm"):
        return
    if metric not in measured:
        # A hook may measure anything else.
        if not config.train.hooks or _SET_LOSS.fullmatch(metric):
            yield (
                f"{key}={metric} is never measured: it may be {', '.join(measured)}, or a metric "
                f"of train.hooks{did_you_mean(metric, measured)}"
            )
        return
    if config.train.validate_every == 0:
        yield f"{key}={metric} is never measured with train.validate_every=0"
    (held_out,) = [item for item in fields(DataConfig) if item.name == "validation_fraction"]
    holds_out = config.data.validation_fraction or not is_read(config.data, held_out)
    if metric == "validation/loss" and not holds_out:
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


def _plan(config: TrainConfig) -> Iterator[str]:
    for key in ("inside_node", "between_nodes"):
        link = getattr(config.cluster, key)
        known = [item.name for item in fields(link) if getattr(link, item.name) is not None]
        missing = [item.name for item in fields(link) if item.name not in known]
        # A bandwidth without a latency gives no time.
        if known and missing:
            yield (
                f"cluster.{key} has {', '.join(known)} and no {', '.join(missing)}: a link needs "
                "all three, or none if it is not known"
            )
    plan = config.plan
    if plan.dry_run and plan.scaling is not None:
        yield (
            f"plan.scaling={plan.scaling} is about several layouts, and plan.dry_run=true plans "
            "one: omit one of the two"
        )


_PARALLEL_CHECKS = (_precision, _blocks, _memory_budget, _split_updates, _every_step, _diloco)
_JOB_CHECKS = (
    _llama,
    _library_model,
    _tensor_plan,
    _data,
    _optimizer,
    _gradients,
    _loss,
    _loop,
    _best,
    _nodes,
    _plan,
)
_STEP_CHECKS = (_warmup, _profile)
