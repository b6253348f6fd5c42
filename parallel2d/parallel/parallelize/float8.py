"""Float8 training of the Linear layers in blocks, by torchao: `convert_to_float8`.

Weights are stored in `precision.storage` and all-gathered in `precision.param`. Each matrix product
scales the weights and casts the weights to float8.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import logging
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import nn

from parallel2d.base.config import PrecisionConfig
from parallel2d.base.errors import ConfigError
from parallel2d.parallel.model_structure import fqn_of

log = logging.getLogger(__name__)

CAPABILITY = (8, 9)  # the first compute capability with float8 matrix units
MULTIPLE = 16  # CUDA's float8 products need weights whose sizes are multiples of this number


def check_float8(precision: PrecisionConfig, device_type: str) -> None:
    """Raise `ConfigError` if ``precision.float8`` cannot run on this machine.

    Float8 needs torchao and a GPU with float8 matrix units.
    """
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
    """Replace the Linear layers inside ``blocks`` by float8 layers with the same parameters.

    A layer is not replaced if a pattern of ``precision.float8_exclude`` matches its name, if a size
    of its weight is not a multiple of 16, if the layer itself is a block, or if its id is in
    ``apart``. The reason is logged.

    Args:
        blocks: (name, module) of the repeated blocks.
        precision: the recipe and the exclusions.
        apart: ids of modules that compute in fp32.
        emulate: True to emulate the float8 rounding on a device without float8 units.

    Returns:
        The names of the replaced layers.

    Raises:
        ConfigError: torchao is not installed, a pattern matches no layer, or no layer can be
            replaced.
    """
    if precision.float8 == "none":
        return []
    torchao = _torchao(f"precision.float8={precision.float8}")
    # Layers are identified by id. The list keeps the old layers alive, so that no new layer gets
    # the id of an old layer.
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
        counts = []
        for reason, listed in kept.items():
            counts.append(f"; {len(listed)}: {reason}")
        raise ConfigError(
            f"precision.float8={precision.float8}: no Linear layer inside the blocks can be "
            f"converted{''.join(counts)}"
        )
    recipe = torchao.Float8LinearConfig.from_recipe_name(precision.float8)
    if emulate:
        recipe = dataclasses.replace(recipe, emulate=True)

    def is_wanted(module: nn.Module, _name: str) -> bool:
        # Compare modules by identity, because torchao passes names relative to the block.
        return id(module) in chosen

    # Convert the blocks and not the model: Linear layers outside of the blocks, such as the output
    # head, must not change.
    for _, block in blocks:
        torchao.convert_to_float8_training(block, config=recipe, module_filter_fn=is_wanted)
    return list(chosen.values())


def _choose(
    layers: Sequence[tuple[str, nn.Linear, bool]], exclude: Sequence[str], apart: Collection[int]
) -> tuple[dict[str, list[str]], dict[int, str]]:
    """Select the layers to convert.

    ``layers`` are (FQN, layer, True if the layer itself is a block). Returns the names of the
    excluded layers by reason, and the names of the layers to convert by id.
    """
    names = [name for name, _, _ in layers]
    excluded: set[str] = set()
    unmatched = []
    for pattern in exclude:
        found = fnmatch.filter(names, pattern)
        excluded.update(found)
        if not found:
            unmatched.append(pattern)
    if unmatched:
        there = ", ".join(names[:4]) + " ..." * (len(names) > 4)
        raise ConfigError(
            f"precision.float8_exclude: {', '.join(sorted(unmatched))} matches no Linear layer "
            f"inside a block; there are {there or 'none'}"
        )
    kept: dict[str, list[str]] = {}
    chosen: dict[int, str] = {}
    for name, layer, is_block in layers:
        obstacles = {
            "excluded": name in excluded,
            "computes in fp32": id(layer) in apart,
            # torchao sets the new layer on the parent, which is outside of the converted block.
            "is a whole block": is_block,
            f"sizes are not multiples of {MULTIPLE}": any(
                size % MULTIPLE for size in layer.weight.shape
            ),
        }
        reason = next((reason for reason, holds in obstacles.items() if holds), None)
        if reason is not None:
            kept.setdefault(reason, []).append(name)
        else:
            chosen[id(layer)] = name
    return kept, chosen


def _torchao(key: str) -> Any:
    """Return ``torchao.float8``. Error messages name ``key``, the setting that needs torchao."""
    # Imported here, because torchao is an optional dependency.
    try:
        import torchao.float8
    except ImportError:
        raise ConfigError(f'{key} needs torchao: pip install "parallel2d[float8]"') from None
    return torchao.float8
