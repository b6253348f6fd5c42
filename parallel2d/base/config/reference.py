"""The ``package.module:name`` values of a configuration: `is_reference`, `load_reference`."""

from __future__ import annotations

import importlib
from typing import Any

from parallel2d.base.errors import ConfigError


def is_reference(value: Any) -> bool:
    """Whether it has the form ``package.module:name``."""
    if not isinstance(value, str):
        return False
    module, colon, name = value.partition(":")
    parts = [*module.split("."), *name.split(".")]
    return bool(colon) and all(part.isidentifier() for part in parts)


def load_reference(key: str, reference: str) -> Any:
    """The callable that ``package.module:name`` names; ``key``, of the configuration, is for the
    message. Raises `ConfigError` with the reason when it cannot be imported."""
    module_name, _, name = reference.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
        # A name may have dots, such as that of a class's method.
        for part in name.split("."):
            found = getattr(found, part)
    except ImportError as error:
        raise ConfigError(f"{key}={reference} cannot be imported: {error}") from None
    except AttributeError:
        raise ConfigError(f"{key}={reference}: module {module_name} has no {name}") from None
    if not callable(found):
        raise ConfigError(f"{key}={reference} is not callable")
    return found
