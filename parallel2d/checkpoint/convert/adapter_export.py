"""The adapter in a checkpoint as the ``peft`` library saves it, without the base: `adapter_folder`.

The adapter's configuration comes from the checkpoint, which may be somebody else's: its keys are
checked, and only those that describe LoRA are written.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from parallel2d.checkpoint.convert.sources import Source
from parallel2d.errors import ConfigError
from parallel2d.files.tensor_file import printable
from parallel2d.models import adapters

ADAPTER_WEIGHTS, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"


@dataclass
class AdapterFolder:
    """The adapter's tensors under the names that peft saves, and ``adapter_config.json``."""

    source: Source
    config: bytes


def adapter_folder(source: Source) -> AdapterFolder:
    """The adapter in ``source``. Raises `ConfigError` for a checkpoint that has none, has several,
    or has one of another kind than LoRA."""
    name, plain = _settings(source)
    try:
        settings = adapters.checked_settings(plain)
    except (ImportError, ValueError) as error:
        raise ConfigError(f"the checkpoint's adapter: {error}") from None
    base = plain.get("base_model_name_or_path")
    settings.base_model_name_or_path = base if isinstance(base, str) else None
    settings.inference_mode = True  # what peft saves: an adapter is loaded to be used
    renamed: dict[str, str] = {}
    for stored in source.tensors:
        kind, _, inner = stored.partition("/")
        saved = adapters.saved_name(inner, name)
        if kind == "model" and saved is not None:
            renamed[f"model/{saved}"] = stored
    if not renamed:
        raise ConfigError(f"the checkpoint holds no weights of its adapter {printable(name)}")
    tensors = {saved: source.tensors[stored] for saved, stored in renamed.items()}
    content = json.dumps(adapters.plain_settings(settings), indent=2, sort_keys=True)
    return AdapterFolder(
        Source("parallel2d", tensors, lambda saved: source.read(renamed[saved])),
        content.encode(),
    )


def _settings(source: Source) -> tuple[str, dict[str, Any]]:
    """Name and configuration of the only adapter."""
    found = source.layout.get("adapters")
    if not isinstance(found, dict) or not found:
        raise ConfigError(
            "the checkpoint names no adapter: --to peft is for runs with model.adapter, and for "
            "peft models of your own"
        )
    if len(found) > 1:
        raise ConfigError(
            f"the checkpoint has the adapters {printable(sorted(found))}; --to peft writes one"
        )
    ((name, settings),) = found.items()
    if not isinstance(settings, dict):
        raise ConfigError(f"the checkpoint's adapter is {printable(settings)}")
    return name, settings
