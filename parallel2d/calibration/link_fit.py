"""Fits the latency and bandwidth of a link to measured collectives: `fit_link`.

The planner takes latency times steps plus bytes over bandwidth for a collective
(`parallel2d.cost.collective_time`). The fit takes the same form, so that what it finds predicts the
same collectives. All sizes count alike, because errors are relative: small messages decide the
latency and large ones the bandwidth. The sum of the errors is minimized and not that of their
squares, so that a few measurements that something else disturbed move neither.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy

_ITERATIONS = 30
_SMALLEST_ERROR = 0.02


@dataclass(frozen=True)
class CollectiveSample:
    """One measured collective. ``steps``: latencies that it costs; ``link_bytes``: bytes that the
    link carries in one direction meanwhile; ``whole_bytes``: the larger side of the collective."""

    collective: str
    whole_bytes: int
    steps: float
    link_bytes: float
    seconds: float


@dataclass(frozen=True)
class FittedLink:
    """``worst_error``: the largest relative difference between a sample and the fit."""

    bytes_per_s: float
    latency_s: float
    worst_error: float


def fit_link(samples: Sequence[CollectiveSample]) -> FittedLink:
    """The latency, at least 0, and bandwidth with the smallest sum of relative errors. Raises
    ValueError for samples in which more bytes do not take longer."""
    seconds = numpy.array([sample.seconds for sample in samples])
    rows = numpy.array([[sample.steps, sample.link_bytes] for sample in samples])
    scaled = rows / seconds[:, None]
    weights = numpy.ones(len(samples))
    # Least squares with weights that are found from the errors of the fit before.
    for _ in range(_ITERATIONS):
        latency, per_byte = _least_squares(scaled, weights)
        errors = numpy.abs(scaled @ numpy.array([latency, per_byte]) - 1)
        weights = 1 / numpy.maximum(errors, _SMALLEST_ERROR)
    if per_byte <= 0:
        raise ValueError("collectives of more bytes did not take longer")
    return FittedLink(1 / per_byte, latency, float(errors.max()))


def _least_squares(rows: numpy.ndarray, weights: numpy.ndarray) -> tuple[float, float]:
    """What is multiplied with the columns of ``rows`` to come close to 1; the first at least 0."""
    root = numpy.sqrt(weights)
    # Columns differ by many powers of ten.
    size = numpy.abs(rows).max(axis=0)
    found, *_ = numpy.linalg.lstsq(rows / size * root[:, None], root, rcond=None)
    latency, per_byte = found / size
    if latency >= 0:
        return float(latency), float(per_byte)
    alone = rows[:, 1]
    return 0.0, float((weights * alone).sum() / (weights * alone**2).sum())
