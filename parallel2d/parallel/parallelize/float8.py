"""Matrix products in 8-bit floating point, by torchao, in the Linear layers inside blocks:
`convert_to_float8`. Weights stay stored in `precision.storage`, gathered in `precision.param`, and
are scaled and cast around each product.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import logging
from collections.abc import Collection, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn

from parallel2d.base.config import PrecisionConfig
from parallel2d.base.errors import ConfigError
from parallel2d.parallel.model_structure import fqn_of

log = logging.getLogger(__name__)

CAPABILITY = (8, 9)  # the first with float8 matrix units
MULTIPLE = 16  # of both sides of a weight, which the float8 products of CUDA require


def check_float8(precision: PrecisionConfig, device_type: str) -> None:
    """Raises `ConfigError` where ``precision.float8`` cannot run: without torchao, on CPU, on a GPU
    without float8 units."""
    if precision.float8 == "none":
        return
    key = f"precision.float8={precision.float8}"
    if device_type != "cuda":
        raise ConfigError(
            f"{key} needs an NVIDIA GPU of compute capability 8.9 or higher, and this runs on "
            f"{device_type}; use none"
        )
    capability = torch.cuda.get_device_capability()
    if capability < CAPABILITY:
        raise ConfigError(
            f"{key} needs a GPU of compute capability 8.9 or higher, this one has "
            f"{capability[0]}.{capability[1]}"
        )
    _torchao(key)


def convert_to_float8(
    blocks: Sequence[tuple[str, nn.Module]],
    precision: PrecisionConfig,
    apart: Collection[int] = (),
    *,
    emulate: bool = False,
) -> list[str]:
    """Replaces the Linear layers inside ``blocks`` by float8 ones with the same parameters. Returns
    their names. Left as they are, and logged with the reason: layers that a pattern of
    ``precision.float8_exclude`` names, layers whose sides are no multiples of 16, a block that is
    itself a Linear, and modules whose id is in ``apart`` (those computing in fp32). ``emulate``
    computes the same roundings without float8 units, on any device. Raises `ConfigError` without
    torchao, for a pattern without a match, and when nothing is left to replace.
    """
    if precision.float8 == "none":
        return []
    torchao = _torchao(f"precision.float8={precision.float8}")
    # Kept until the end, so that no new layer has the id of an old one.
    layers: list[tuple[str, nn.Linear, bool]] = []
    for block_name, block in blocks:
        for name, module in block.named_modules(prefix=block_name):
            if isinstance(module, nn.Linear):
                layers.append((fqn_of(name), module, module is block))
    kept, chosen = _choose(layers, precision.float8_exclude, apart)
    for reason, listed in kept.items():
        log.info(
            "precision.float8: %d layers are left as they are (%s): %s",
            len(listed),
            reason,
            ", ".join(listed),
        )
    if not chosen:
        counts = [f"; {len(listed)}: {reason}" for reason, listed in kept.items()]
        raise ConfigError(
            f"precision.float8={precision.float8}: no Linear layer inside the blocks can be "
            f"converted{''.join(counts)}"
        )
    recipe = torchao.Float8LinearConfig.from_recipe_name(precision.float8)
    if emulate:
        recipe = dataclasses.replace(recipe, emulate=True)

    def is_wanted(module: nn.Module, _name: str) -> bool:
        # By identity: torchao passes names that begin inside the block.
        return id(module) in chosen

    # Block by block: a Linear outside of them, such as the model's head, stays as it is.
    for _, block in blocks:
        torchao.convert_to_float8_training(block, config=recipe, module_filter_fn=is_wanted)
    return list(chosen.values())


def _choose(
    layers: Sequence[tuple[str, nn.Linear, bool]], exclude: Sequence[str], apart: Collection[int]
) -> tuple[dict[str, list[str]], dict[int, str]]:
    """Return the names of the layers that stay, by reason, and of those to convert, by id.

    ``layers``: (FQN, layer, True if it is a block itself).
    """
    names = [name for name, _, _ in layers]
    matched = {pattern: fnmatch.filter(names, pattern) for pattern in exclude}
    unmatched = [pattern for pattern, found in matched.items() if not found]
    if unmatched:
        there = ", ".join(names[:4]) + " ..." * (len(names) > 4)
        raise ConfigError(
            f"precision.float8_exclude: {', '.join(sorted(unmatched))} matches no Linear layer "
            f"inside a block; there are {there or 'none'}"
        )
    excluded = set(chain.from_iterable(matched.values()))
    kept: dict[str, list[str]] = {}
    chosen: dict[int, str] = {}
    for name, layer, is_block in layers:
        obstacles = {
            "excluded": name in excluded,
            "computes in fp32": id(layer) in apart,
            # torchao replaces a layer on its parent, which is outside of what it is given here.
            "is a whole block": is_block,
            f"sizes are no multiples of {MULTIPLE}": any(
                size % MULTIPLE for size in layer.weight.shape
            ),
        }
        reasons = [reason for reason, holds in obstacles.items() if holds]
        if reasons:
            kept.setdefault(reasons[0], []).append(name)
        else:
            chosen[id(layer)] = name
    return kept, chosen


def _torchao(key: str) -> Any:
    """``key``: the setting that needs it, for messages."""
    # Imported here because it is an optional dependency.
    try:
        import torchao.float8
    except ImportError:
        raise ConfigError(f'{key} needs torchao: pip install "parallel2d[float8]"') from None
    return torchao.float8
