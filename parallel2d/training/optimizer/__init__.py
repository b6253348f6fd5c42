"""The optimizer of a parallelized model: `build_optimizer`.

`build_optimizer` returns a ``torch.optim.Optimizer`` whose updates equal the updates of a single
process, on any layout. AdamW, Adam and SGD are the classes of torch, because these classes update
each element separately. Muon needs unsharded matrices and is in `muon.py`. A custom optimizer is
built by a user's function from the same parameter groups; if it needs unsharded matrices,
`whole_matrices` wraps it. The optimizers with state in bf16 or int8 are in `low_precision.py`.

[Note: parameter groups] By default, weight decay applies to parameters with two or more dims, and
not to norms and biases. With Muon, the matrices of the repeated blocks are updated by Muon, and all
other parameters by AdamW. An entry of ``optimizer.groups`` has a pattern and settings. The entry
changes these settings for all parameters whose fully qualified name (FQN) matches the pattern. If
several entries match a name, the first matching entry applies. FQNs and shapes do not depend on the
layout, so the groups and their order do not depend on the layout either.
"""

from __future__ import annotations

import fnmatch
import logging
import math
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from parallel2d.base.config import OptimizerConfig, SchedulerConfig
from parallel2d.base.config.checks import check_optimizer
from parallel2d.base.config.options import call_reference
from parallel2d.base.errors import ConfigError
from parallel2d.parallel.model_structure import hidden_matrices, near_names
from parallel2d.parallel.sync.engine.replica_reducer import engines_in
from parallel2d.parallel.sync.methods.method import needs_closure
from parallel2d.parallel.weights.named_tensors import updated_by_name
from parallel2d.training.optimizer.low_precision import low_precision_optimizer
from parallel2d.training.optimizer.matrix_splits import MatrixInside, splits_of
from parallel2d.training.optimizer.muon import ADAMW, MUON
from parallel2d.training.optimizer.muon import Muon as Muon
from parallel2d.training.optimizer.whole_matrices import whole_matrices as whole_matrices

log = logging.getLogger(__name__)

_NO_ENTRY = -1  # sorts before the number of any entry
# The arguments that select an implementation of torch's optimizers
_IMPLEMENTATIONS = {
    "fused": {"fused": True},
    "foreach": {"foreach": True},
    "loop": {"foreach": False},
}


def build_optimizer(
    model: nn.Module, config: OptimizerConfig, *, seed: int = 0
) -> torch.optim.Optimizer:
    """Return the optimizer of ``config`` for the trainable parameters of ``model``.

    Args:
        model: a parallelized model, or an unsharded model in one process.
        config: the settings.
        seed: for an unsharded model, the seed of stochastic rounding of low-precision state. For a
            parallelized model the seed of `parallelize` is used.

    Raises `ConfigError` for a ``config`` of another type, for values outside their range, for a
    model without trainable parameters, for a pattern in ``config.groups`` without a match, and if
    Muon cannot determine which matrices are hidden.
    """
    if not isinstance(config, OptimizerConfig):
        raise ConfigError(
            "the second argument of build_optimizer is an OptimizerConfig, such as "
            f"OptimizerConfig('adamw', lr=3e-4); got {config!r}"
        )
    check_optimizer(config)
    named = updated_by_name(model)
    splits: dict[Tensor, list[MatrixInside]] = {}
    for name, found in splits_of(named, config.matrices).items():
        splits[named[name]] = found
    groups = plan_groups(model, config)
    if config.state_dtype == "fp32":
        optimizer = _new_optimizer(groups, config, splits)
    else:
        _log_groups(groups)
        names: dict[Tensor, str] = {parameter: name for name, parameter in named.items()}
        seeds = [engine.keys.seed for engine in engines_in(model)]
        optimizer = low_precision_optimizer(groups, names, config, seeds[0] if seeds else seed)
    # An unsharded model has no engines.
    for engine in engines_in(model):
        engine.updates.attach(optimizer)
    return optimizer


def _log_groups(groups: list[dict[str, Any]]) -> None:
    for group in groups:
        algorithm = f"{group['algorithm']}, " if "algorithm" in group else ""
        elements = sum(map(Tensor.numel, group["params"]))
        log.info(
            f"optimizer: {len(group['params'])} tensors, {elements:,} parameters: {algorithm}"
            f"weight decay {group['weight_decay']:g}, learning rate x {group['lr_scale']:g}"
        )


def _new_optimizer(
    groups: list[dict[str, Any]],
    config: OptimizerConfig,
    splits: Mapping[Tensor, list[MatrixInside]],
) -> torch.optim.Optimizer:
    _log_groups(groups)
    if config.name == "custom":
        return _custom_optimizer(groups, config)
    beta1, beta2 = config.betas
    common: dict[str, Any] = {"lr": config.lr, **_IMPLEMENTATIONS[config.implementation]}
    if config.name in ("adamw", "adam"):
        kind = torch.optim.AdamW if config.name == "adamw" else torch.optim.Adam
        betas = (beta1, beta2)
        return kind(groups, betas=betas, eps=config.eps, amsgrad=config.amsgrad, **common)
    common |= {"momentum": config.momentum, "nesterov": config.nesterov}
    if config.name == "sgd":
        return torch.optim.SGD(groups, **common)
    return Muon(
        groups,
        ns_steps=config.newton_schulz_steps,
        adjust_lr_fn=config.adjust_lr,
        betas=(beta1, beta2),
        adamw_eps=config.eps,
        splits=splits,
        **common,
    )


def _custom_optimizer(
    groups: list[dict[str, Any]], config: OptimizerConfig
) -> torch.optim.Optimizer:
    """Build the optimizer of ``config.target``. Raises `ConfigError` if this optimizer cannot
    train."""
    assert config.target is not None
    what = f"optimizer.target={config.target}"
    optimizer = call_reference("optimizer.target", config.target, groups, **config.arguments)
    if not isinstance(optimizer, torch.optim.Optimizer):
        kind = type(optimizer).__name__
        raise ConfigError(f"{what} returned {kind}, not a torch.optim.Optimizer")
    if needs_closure(type(optimizer)):
        raise ConfigError(
            f"{what}: the step of {type(optimizer).__name__} needs a closure, and training gives "
            "none; build another optimizer"
        )
    given = _ids_in(groups)
    taken = _ids_in(optimizer.param_groups)
    if given != taken:
        raise ConfigError(
            f"{what} trains {len(taken)} tensors and was given {len(given)}: build the optimizer "
            "on the groups as they are"
        )
    for group in optimizer.param_groups:
        # If the function has set its own learning rate, `lr_scale` records the ratio, so that the
        # schedule scales this learning rate.
        if "lr" in group and group["lr"] != config.lr * group.get("lr_scale", 1.0):
            group["lr_scale"] = group["lr"] / config.lr
    if config.weight_decay and "weight_decay" not in optimizer.defaults:
        raise ConfigError(
            f"optimizer.weight_decay={config.weight_decay} has no effect: "
            f"{type(optimizer).__name__} of optimizer.target has no weight_decay"
        )
    return optimizer


def _ids_in(groups: list[dict[str, Any]]) -> set[int]:
    return set(map(id, chain.from_iterable(group["params"] for group in groups)))


def plan_groups(model: nn.Module, config: OptimizerConfig) -> list[dict[str, Any]]:
    """Return groups for a ``torch.optim.Optimizer``: ``params``, ``weight_decay``, ``lr``,
    ``lr_scale`` and, for Muon, ``algorithm``. See [Note: parameter groups].

    Args:
        model: the model: parallelized, unsharded or on meta.
        config: the ``optimizer`` section.

    Raises `ConfigError` that lists every pattern without a matching trainable parameter, with
    similar names.
    """
    named = updated_by_name(model)
    trained = {name: parameter for name, parameter in named.items() if parameter.requires_grad}
    if not trained:
        raise ConfigError("every parameter is frozen: there is nothing to train")
    entry_of = _matching_entries(list(named), set(trained), config.groups)
    hidden = hidden_matrices(model) if config.name == "muon" else set()
    splits = splits_of(named, config.matrices)
    entries: dict[int, Any] = {_NO_ENTRY: {}, **dict(enumerate(config.groups))}
    groups: dict[tuple[int, bool, bool], dict[str, Any]] = {}
    # The parameters are visited in the order of the entries, so that the first invalid entry is
    # reported.
    for name in sorted(trained, key=lambda name: entry_of.get(name, _NO_ENTRY)):
        parameter = trained[name]
        number = entry_of.get(name, _NO_ENTRY)
        is_matrix = name in splits or (parameter.ndim == 2 and name in hidden)
        settings = _settings(parameter, entries[number], config, is_hidden=is_matrix)
        is_muon = _is_muon(settings)
        # By default only matrices use Muon, so an entry has assigned this parameter to Muon.
        if is_muon and parameter.ndim != 2 and name not in splits:
            raise ConfigError(
                f"optimizer.groups: pattern {entries[number]['pattern']} gives {name} of shape "
                f"{list(parameter.shape)} to Muon, which takes matrices of two dims; an entry of "
                "optimizer.matrices names the matrices in a parameter with more dims"
            )
        # Parameters with fewer than two dims have their own group, because they have no weight
        # decay.
        is_vector = parameter.ndim < 2
        key = (number, is_vector, not is_muon)
        group = groups.setdefault(key, {"params": [], **settings})
        group["params"].append(parameter)
    # The order of the groups is part of every checkpoint. Groups with default settings come first,
    # then the groups of the entries in their order. Within each of these, matrices come before
    # vectors, and Muon's groups before AdamW's. The order depends only on names and shapes, so that
    # a resumed run finds each parameter under the same number on any layout.
    ordered = [groups[key] for key in sorted(groups)]
    if config.name == "muon" and not any(map(_is_muon, ordered)):
        raise ConfigError(
            f"optimizer=muon: {type(model).__name__} has no repeated blocks with matrices in them, "
            "so hidden matrices cannot be distinguished; name them with "
            "optimizer.groups=[{pattern: ..., algorithm: muon}], or use optimizer=adamw"
        )
    return ordered


def muon_names(model: nn.Module, config: OptimizerConfig) -> set[str]:
    """Return the FQNs of the parameters that Muon updates; empty with another optimizer. Raises
    `ConfigError` as `plan_groups`."""
    if config.name != "muon":
        return set()
    updated: set[int] = set()
    for group in filter(_is_muon, plan_groups(model, config)):
        updated.update(map(id, group["params"]))
    return {name for name, each in updated_by_name(model).items() if id(each) in updated}


def _settings(
    parameter: Tensor, entry: Mapping[str, Any], config: OptimizerConfig, is_hidden: bool
) -> dict[str, Any]:
    decay = config.weight_decay
    if parameter.ndim < 2:  # norms and biases
        decay = 0.0
    lr_scale = float(entry.get("lr_scale", 1.0))
    settings: dict[str, Any] = {
        "weight_decay": entry.get("weight_decay", decay),
        "lr_scale": lr_scale,
        "lr": config.lr * lr_scale,
    }
    if config.name == "muon":
        default = MUON if is_hidden else ADAMW
        settings["algorithm"] = entry.get("algorithm", default)
    return settings


def _is_muon(group: Mapping[str, Any]) -> bool:
    return group.get("algorithm") == MUON


def _matching_entries(
    names: Sequence[str], trained: set[str], entries: Sequence[Any]
) -> dict[str, int]:
    """Map each trainable name to the number of the first entry with a matching pattern. Raises
    `ConfigError` with one line for each entry that has no effect."""
    entry_of: dict[str, int] = {}
    problems = []
    for number, entry in enumerate(entries):
        pattern = entry["pattern"]
        where = f"optimizer.groups: pattern {pattern}"
        matching = fnmatch.filter(names, pattern)
        trainable = list(filter(trained.__contains__, matching))
        # Parameters that an earlier entry matches stay in the group of that entry.
        fresh = set(trainable).difference(entry_of)
        entry_of |= dict.fromkeys(fresh, number)
        if not matching:
            problems.append(f"{where} matches no parameter{near_names(pattern, names)}")
        elif not trainable:
            problems.append(f"{where} matches frozen parameters only, such as {matching[0]}")
        elif not fresh:
            earlier = entries[entry_of[trainable[0]]]["pattern"]
            problems.append(
                f"{where} has no effect: an earlier one, {earlier}, matches {matching[0]} first"
            )
    if problems:
        raise ConfigError("\n".join(problems))
    return entry_of
