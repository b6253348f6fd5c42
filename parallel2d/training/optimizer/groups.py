"""Decides which parameter is trained with which settings: `plan_groups` makes the parameter groups
of torch's optimizers.

[Note: parameter groups] Every trainable parameter has default settings: weight decay on tensors of
two and more dims, none on norms and biases; with Muon, the matrices of the repeated blocks are
Muon's and all else is AdamW's. An entry of ``optimizer.groups`` changes the settings that it names
for the parameters whose fully qualified name (FQN) its pattern matches; the first entry that
matches a name is the one that counts. FQNs and shapes do not depend on the layout, so neither do
the groups, their order and their numbers.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from parallel2d.base.config import OptimizerConfig
from parallel2d.base.errors import ConfigError
from parallel2d.parallel.model_structure import hidden_matrices, near_names
from parallel2d.parallel.weights.named_tensors import updated_by_name

MUON, ADAMW = "muon", "adamw"

_NO_ENTRY = -1  # sorts before the number of any entry


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
    hidden: set[str] = set()
    if config.name == "muon":
        hidden = hidden_matrices(model)
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
