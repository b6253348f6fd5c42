"""A field of a configuration with a constraint. `parallel2d.config.constraints` checks it."""

from __future__ import annotations

from dataclasses import field
from typing import Any


def option(default: Any, **constraint: Any) -> Any:
    """A dataclass field with a constraint.

    Constraints: ``choices`` (tuple), ``minimum``, ``above``, ``maximum`` (numbers), ``auto=True``
    (the word ``auto`` is allowed beside a whole number), ``fractions=True`` (or beside any number),
    ``infinite=True`` (so is infinity), ``null=True`` (so is None).
    """
    if isinstance(default, list | dict):
        return field(default_factory=lambda: type(default)(default), metadata=constraint)
    return field(default=default, metadata=constraint)
