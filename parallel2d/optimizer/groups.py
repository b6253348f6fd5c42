"""Which parameter is trained with which settings. A model and its `OptimizerConfig` flow in,
torch's parameter groups flow out.

[Note: parameter groups] Every trainable parameter has default settings: weight decay on tensors of
two and more dims, none on norms and biases; with Muon, the matrices of the repeated blocks are
Muon's and all else is AdamW's. An entry of ``optimizer.groups`` changes what it names for the
parameters whose canonical name its pattern matches; the first entry that matches a name is the one
that counts. Canonical names and shapes do not depend on the layout, so neither do the groups, their
order and their numbers.
"""

from __future__ import annotations

import difflib
import fnmatch
from typing import Any

from torch import Tensor, nn

from parallel2d.config import OptimizerConfig
from parallel2d.errors import ConfigError
from parallel2d.model_structure import canonical_name, find_blocks, owns_itself

MUON, ADAMW = "muon", "adamw"


def plan_groups(model: nn.Module, config: OptimizerConfig) -> list[dict[str, Any]]:
    """Groups for a ``torch.optim.Optimizer``: ``params``, ``weight_decay``, ``lr``, ``lr_scale``
    and, for Muon, ``algorithm``.

    ``model``: parallelized, plain or on meta. See [Note: parameter groups]. Raises `ConfigError`
    listing every pattern that matches no trainable parameter, with near names.
    """
    named = {canonical_name(name): p for name, p in model.named_parameters()}
    trained = {name: p for name, p in named.items() if p.requires_grad}
    if not trained:
        raise ConfigError("every parameter is frozen: there is nothing to train")
    entry_of = _match(list(named), set(trained), config.groups)
    hidden = hidden_matrices(model) if config.name == "muon" else {}
    groups: dict[Any, dict[str, Any]] = {}
    # Groups of the defaults come first, then those of the entries in their order.
    for name, parameter in sorted(trained.items(), key=lambda item: entry_of.get(item[0], -1)):
        entry = config.groups[entry_of[name]] if name in entry_of else {}
        settings: dict[str, Any] = {
            "weight_decay": entry.get(
                "weight_decay", config.weight_decay if parameter.ndim >= 2 else 0.0
            ),
            "lr_scale": float(entry.get("lr_scale", 1.0)),
        }
        settings["lr"] = config.lr * settings["lr_scale"]
        if config.name == "muon":
            settings["algorithm"] = entry.get("algorithm", MUON if name in hidden else ADAMW)
            if settings["algorithm"] == MUON and parameter.ndim != 2:
                raise ConfigError(
                    f"optimizer.groups: pattern {entry['pattern']} gives {name} of shape "
                    f"{list(parameter.shape)} to Muon, which takes "
                    "matrices of two dims only"
                )
        # Parameters of more and of fewer than two dims stay apart, as they do without entries.
        key = (entry_of.get(name, -1), parameter.ndim >= 2, *settings.items())
        groups.setdefault(key, {"params": [], **settings})["params"].append(parameter)
    ordered = [
        groups[key]
        for key in sorted(groups, key=lambda key: (key[0], not key[1], -_is_muon(groups[key])))
    ]
    if config.name == "muon" and not any(map(_is_muon, ordered)):
        raise ConfigError(
            f"optimizer=muon: {type(model).__name__} has no repeated blocks with matrices in "
            "them, so hidden matrices cannot be told from "
            "others; name them with optimizer.groups=[{pattern: ..., algorithm: muon}], or use "
            "optimizer=adamw"
        )
    return ordered


def _is_muon(group: dict[str, Any]) -> bool:
    return group.get("algorithm") == MUON


def describe_group(group: dict[str, Any]) -> str:
    """One line for people."""
    algorithm = f"{group['algorithm']}, " if "algorithm" in group else ""
    elements = sum(parameter.numel() for parameter in group["params"])
    return (
        f"optimizer: {len(group['params'])} tensors, {elements:,} parameters: {algorithm}weight "
        f"decay {group['weight_decay']:g}, "
        f"learning rate x {group['lr_scale']:g}"
    )


def hidden_matrices(model: nn.Module) -> dict[str, Tensor]:
    """Canonical name -> parameter of two dims inside the repeated blocks, embeddings left out: what
    Muon is meant for.

    Blocks are found as for ``bucketing=block``; single layers that repeat are no blocks here,
    because the last of them may be the head.
    """
    embeddings = {
        id(p)
        for module in model.modules()
        if isinstance(module, nn.Embedding)
        for p in module.parameters()
    }
    found: dict[str, Tensor] = {}
    for block_name, block in find_blocks(model):
        layer = block
        while (
            inner := getattr(layer, "_checkpoint_wrapped_module", getattr(layer, "_orig_mod", None))
        ) is not None:
            layer = inner
        if owns_itself(layer):
            continue
        for name, parameter in block.named_parameters(prefix=block_name):
            if parameter.ndim == 2 and id(parameter) not in embeddings:
                found[canonical_name(name)] = parameter
    return found


def _match(names: list[str], trained: set[str], entries: list[Any]) -> dict[str, int]:
    """Name -> number of the first entry whose pattern matches it."""
    entry_of: dict[str, int] = {}
    problems = []
    for number, entry in enumerate(entries):
        pattern = entry["pattern"]
        matching = [name for name in names if fnmatch.fnmatchcase(name, pattern)]
        fresh = [name for name in matching if name in trained and name not in entry_of]
        if fresh:
            entry_of |= dict.fromkeys(fresh, number)
        elif not matching:
            problems.append(
                f"optimizer.groups: pattern {pattern} matches no parameter{_near(pattern, names)}"
            )
        elif not trained.intersection(matching):
            problems.append(
                f"optimizer.groups: pattern {pattern} matches frozen parameters only, such as "
                f"{matching[0]}"
            )
        else:
            earlier = entries[entry_of[next(name for name in matching if name in entry_of)]][
                "pattern"
            ]
            problems.append(
                f"optimizer.groups: pattern {pattern} has no effect: an earlier one, {earlier}, "
                f"matches {matching[0]} first"
            )
    if problems:
        raise ConfigError("\n".join(problems))
    return entry_of


def _near(pattern: str, names: list[str]) -> str:
    word = pattern.replace("*", "").strip(".")
    close = difflib.get_close_matches(word, names, n=3, cutoff=0.4)
    parts = {part: name for name in names for part in name.split(".") if not part.isdigit()}
    for inner in word.split("."):
        close += [parts[part] for part in difflib.get_close_matches(inner, parts, n=3, cutoff=0.6)]
    return (
        f"; near: {', '.join(dict.fromkeys(close))}"
        if close
        else f"; the names begin with {', '.join(names[:3])}"
    )
