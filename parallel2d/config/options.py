"""A field with a constraint, and the error of a configuration that cannot run."""

from __future__ import annotations

from dataclasses import field
from typing import Any


class ConfigError(ValueError):
    """A configuration that cannot run. The message is complete: what, got what, allowed what. Shown
    without traceback."""


def option(default: Any, **constraint: Any) -> Any:
    """A dataclass field with a constraint that `problems` checks.

    Constraints: ``choices`` (tuple), ``minimum``, ``above``, ``maximum`` (numbers), ``auto=True``
        (the word ``auto`` is
    allowed beside a number), ``infinite=True`` (so is infinity).
    """
    if isinstance(default, list | dict):
        return field(default_factory=lambda: type(default)(default), metadata=constraint)
    return field(default=default, metadata=constraint)
