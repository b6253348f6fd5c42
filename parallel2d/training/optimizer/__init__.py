"""The optimizer of a parallelized model, and the learning rate. Start at `build_optimizer`.

It returns a ``torch.optim.Optimizer`` whose update is that of a single process on any layout.
AdamW, Adam and SGD update each element on its own and so are torch's; Muon needs whole matrices,
and is in `muon.py`. Somebody's own is built by a function on the same parameter groups; one that
needs whole matrices is wrapped by `whole_matrices`.

[Note: parameter groups] Every trainable parameter has default settings: weight decay on tensors of
two and more dims, none on norms and biases; with Muon, the matrices of the repeated blocks are
Muon's and all else is AdamW's. An entry of ``optimizer.groups`` changes the settings that it names
for the parameters whose fully qualified name (FQN) its pattern matches; the first entry that
matches a name is the one that counts. FQNs and shapes do not depend on the layout, so neither do
the groups, their order and their numbers.
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
from parallel2d.training.optimizer.muon import ADAMW, MUON
from parallel2d.training.optimizer.muon import Muon as Muon
from parallel2d.training.optimizer.whole_matrices import whole_matrices as whole_matrices

log = logging.getLogger(__name__)

_NO_ENTRY = -1  # sorts before the number of any entry
# The arguments by which torch's optimizers choose among their implementations.
_IMPLEMENTATIONS = {
    "fused": {"fused": True},
    "foreach": {"foreach": True},
    "loop": {"foreach": False},
}


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """The optimizer of ``config`` over the trainable parameters of ``model``: parallelized, or
    plain on one process.

    Raises `ConfigError` for a ``config`` that is none, for a word or number that it may not have,
    without trainable parameters, for a pattern of ``config.groups`` that matches nothing, and where
    Muon cannot tell hidden matrices from others.
    """
    if not isinstance(config, OptimizerConfig):
        raise ConfigError(
            "the second argument of build_optimizer is an OptimizerConfig, such as "
            f"OptimizerConfig('adamw', lr=3e-4); got {config!r}"
        )
    check_optimizer(config)
    optimizer = _new_optimizer(plan_groups(model, config), config)
    # A plain model on one process has no engine.
    for engine in engines_in(model):
        engine.updates.attach(optimizer)
    return optimizer


def _new_optimizer(groups: list[dict[str, Any]], config: OptimizerConfig) -> torch.optim.Optimizer:
    for group in groups:
        algorithm = f"{group['algorithm']}, " if "algorithm" in group else ""
        elements = sum(parameter.numel() for parameter in group["params"])
        log.info(
            f"optimizer: {len(group['params'])} tensors, {elements:,} parameters: {algorithm}"
            f"weight decay {group['weight_decay']:g}, learning rate x {group['lr_scale']:g}"
        )
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
        **common,
    )


def _custom_optimizer(
    groups: list[dict[str, Any]], config: OptimizerConfig
) -> torch.optim.Optimizer:
    """What ``config.target`` builds. Raises `ConfigError` for what cannot be trained with."""
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
        # A rate that the function has given is its own, which the schedule scales.
        if "lr" in group and group["lr"] != config.lr * group.get("lr_scale", 1.0):
            group["lr_scale"] = group["lr"] / config.lr
    if config.weight_decay and "weight_decay" not in optimizer.defaults:
        raise ConfigError(
            f"optimizer.weight_decay={config.weight_decay} has no effect: "
            f"{type(optimizer).__name__} of optimizer.target has no weight_decay"
        )
    return optimizer


def _ids_in(groups: list[dict[str, Any]]) -> set[int]:
    return {id(each) for each in chain.from_iterable(group["params"] for group in groups)}


def plan_groups(model: nn.Module, config: OptimizerConfig) -> list[dict[str, Any]]:
    """Groups for a ``torch.optim.Optimizer``: ``params``, ``weight_decay``, ``lr``, ``lr_scale``
    and, for Muon, ``algorithm``.

    ``model``: parallelized, plain or on meta. See [Note: parameter groups]. Raises `ConfigError`
    listing every pattern that matches no trainable parameter, with near names.
    """
    named = updated_by_name(model)
    trained = {name: parameter for name, parameter in named.items() if parameter.requires_grad}
    if not trained:
        raise ConfigError("every parameter is frozen: there is nothing to train")
    entry_of = _matching_entries(list(named), set(trained), config.groups)
    hidden = hidden_matrices(model) if config.name == "muon" else set()
    entries: dict[int, Any] = {_NO_ENTRY: {}, **dict(enumerate(config.groups))}
    groups: dict[tuple[int, bool, bool], dict[str, Any]] = {}
    # In the order of the entries, so that the first entry that is wrong is the one reported.
    for name in sorted(trained, key=lambda name: entry_of.get(name, _NO_ENTRY)):
        parameter = trained[name]
        number = entry_of.get(name, _NO_ENTRY)
        is_matrix = parameter.ndim == 2 and name in hidden
        settings = _settings(parameter, entries[number], config, is_hidden=is_matrix)
        is_muon = _is_muon(settings)
        # The defaults give Muon matrices only, so any other parameter comes from an entry.
        if is_muon and parameter.ndim != 2:
            raise ConfigError(
                f"optimizer.groups: pattern {entries[number]['pattern']} gives {name} of shape "
                f"{list(parameter.shape)} to Muon, which takes matrices of two dims only"
            )
        # Parameters of more and of fewer than two dims stay apart, as they do without entries.
        is_vector = parameter.ndim < 2
        key = (number, is_vector, not is_muon)
        group = groups.setdefault(key, {"params": [], **settings})
        group["params"].append(parameter)
    # Groups of the defaults come first, then those of the entries in their order; within these,
    # matrices before vectors, and Muon's before AdamW's.
    ordered = [groups[key] for key in sorted(groups)]
    if config.name == "muon" and not any(map(_is_muon, ordered)):
        raise ConfigError(
            f"optimizer=muon: {type(model).__name__} has no repeated blocks with matrices in them, "
            "so hidden matrices cannot be told from others; name them with "
            "optimizer.groups=[{pattern: ..., algorithm: muon}], or use optimizer=adamw"
        )
    return ordered


def muon_names(model: nn.Module, config: OptimizerConfig) -> set[str]:
    """FQNs of the parameters that Muon updates; empty with another optimizer. Raises
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
    """Name -> number of the first entry whose pattern matches it. Raises `ConfigError` with one
    line per entry that has no effect."""
    entry_of: dict[str, int] = {}
    problems = []
    for number, entry in enumerate(entries):
        pattern = entry["pattern"]
        where = f"optimizer.groups: pattern {pattern}"
        matching = fnmatch.filter(names, pattern)
        trainable = [name for name in matching if name in trained]
        # What an earlier entry has taken stays with it.
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


def learning_rate(step: int, steps: int, lr: float, config: SchedulerConfig) -> float:
    """The rate used by ``step`` (from 1) of a run of ``steps``. ``wsd`` (warm-up, stable, decay; Hu
    et al. 2024, MiniCPM) holds ``lr`` and falls linearly over the last ``decay_fraction``."""
    if step <= config.warmup_steps:
        return lr * step / config.warmup_steps
    if config.name == "constant":
        return lr
    # From 0 in the first step after the warm-up to 1 in the last step of the run.
    done = step - config.warmup_steps - 1
    span = max(steps - config.warmup_steps - 1, 1)
    progress = min(done / span, 1.0)
    # Falls from `lr` to `floor * lr` as the shape falls from 1 to 0.
    shape = 1 - progress
    if config.name == "cosine":
        shape = 0.5 * (1 + math.cos(math.pi * progress))
    elif config.name == "wsd":
        # The line is above 1, and so without effect, until the last `decay_fraction` begins.
        shape = min(1.0, shape / config.decay_fraction)
    return lr * (config.floor + (1 - config.floor) * shape)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Sets the rate of every parameter group: ``lr`` times the group's ``lr_scale``, where it has
    one."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)


class LossScaler:
    """Dynamic loss scaling for fp16 (Micikevicius et al. 2018). All ranks call `update` with the
    same answer, and so hold the same scale. With ``enabled=False`` it is 1 forever."""

    def __init__(self, enabled: bool, scale: float = 2.0**16, growth_every: int = 1000) -> None:
        self.enabled = enabled
        self.scale = scale if enabled else 1.0
        self.growth_every = growth_every
        self.good_steps = 0

    def update(self, finite: bool) -> None:
        """Halves the scale after a non-finite step, doubles it after ``growth_every`` finite ones
        in a row."""
        if not self.enabled:
            return
        if not finite:
            self.good_steps = 0
            self.scale = max(self.scale / 2, 1.0)
            return
        self.good_steps += 1
        if self.good_steps % self.growth_every == 0:
            self.scale = min(self.scale * 2, 2.0**24)

    def state_dict(self) -> dict[str, float]:
        return {"scale": self.scale, "good_steps": self.good_steps}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.scale = float(state["scale"])
        self.good_steps = int(state["good_steps"])
