"""Compares the bytes that each mesh axis moves with those that were predicted: `Deviation`."""

from __future__ import annotations

import logging
from collections.abc import Mapping

log = logging.getLogger(__name__)

TOLERANCE = 0.05  # of the prediction; beyond it the axis is named


class Deviation:
    """Warns once per axis that moves more or less than predicted. ``predicted``: bytes by key."""

    def __init__(self, predicted: Mapping[str, float]) -> None:
        self._predicted = dict(predicted)

    def check(self, row: Mapping[str, float]) -> list[str]:
        """The warnings for one row of measurements; each axis is named once in a run. They are
        logged as well."""
        found = []
        for key, expected in list(self._predicted.items()):
            measured = row.get(key)
            if measured is None:
                continue
            if abs(measured - expected) <= TOLERANCE * max(expected, 1.0):
                continue
            del self._predicted[key]
            warning = _describe(key, measured, expected)
            found.append(warning)
            log.warning("%s", warning)
        return found


def _describe(key: str, measured: float, expected: float) -> str:
    axis = key.split("/")[1]
    ratio = "not the"
    if expected:
        ratio = f"{measured / expected:.2f} times the"
    return (
        f"the {axis} axis moves {_bytes(measured)} per step and rank, {ratio} predicted "
        f"{_bytes(expected)}: look for collectives that the layout does not need"
    )


def _bytes(value: float) -> str:
    for limit, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if value >= limit:
            return f"{value / limit:.4g} {unit}"
    return f"{value:.0f} B"
