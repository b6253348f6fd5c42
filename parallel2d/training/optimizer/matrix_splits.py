"""Divides parameters into matrices for Muon: `matrices_in` for one parameter, and `splits_of` for
the entries of ``optimizer.matrices``.

A fused projection contains several matrices along dim 0. A stack of experts contains one matrix per
expert. The weight of a convolution is one matrix with a row per output channel.
"""

from __future__ import annotations

import fnmatch
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from parallel2d.base.errors import ConfigError
from parallel2d.parallel.model_structure import near_names
from parallel2d.parallel.weights.geometry import Region


class MatrixInside(NamedTuple):
    """One matrix of a parameter."""

    region: Region  # the rectangle in the unsharded parameter
    shape: torch.Size  # of the matrix


def matrices_in(shape: Sequence[int], entry: Mapping[str, Any]) -> list[MatrixInside]:
    """Return the matrices of a parameter of ``shape``.

    The last two dims are the rows and columns of a matrix; all earlier dims index the matrices.
    Raises ValueError with a reason if ``entry`` does not fit the shape.

    Args:
        entry: ``rows`` and ``columns`` divide each matrix further: an integer gives the number of
            equal parts, a list gives the sizes of the parts. With ``flatten`` the parameter is a
            single matrix: dim 0 gives its rows, and all other dims are flattened to its columns.
    """
    if len(shape) < 2:
        raise ValueError("it has fewer than two dims")
    if entry.get("flatten"):
        columns = math.prod(shape[1:])
        return [MatrixInside(Region.of_shape(shape), torch.Size((shape[0], columns)))]
    outer = list(itertools.product(*map(range, shape[:-2])))
    rows = _parts(shape[-2], entry.get("rows", 1), "rows")
    columns_of_each = _parts(shape[-1], entry.get("columns", 1), "columns")
    found = []
    for position, (top, height), (left, width) in itertools.product(outer, rows, columns_of_each):
        lengths = (*[1] * len(position), height, width)
        found.append(
            MatrixInside(Region((*position, top, left), lengths), torch.Size((height, width)))
        )
    return found


def _parts(size: int, given: Any, what: str) -> list[tuple[int, int]]:
    """Return the offset and the length of each part of ``size``."""
    if isinstance(given, int):
        if size % given:
            raise ValueError(f"its {size} {what} do not divide into {given} equal parts")
        given = [size // given] * given
    if sum(given) != size:
        raise ValueError(f"{what}={list(given)} sum up to {sum(given)}, and it has {size}")
    offsets = itertools.accumulate(given, initial=0)
    return list(zip(offsets, given, strict=False))


def splits_of(
    named: Mapping[str, Tensor], entries: Iterable[Mapping[str, Any]]
) -> dict[str, list[MatrixInside]]:
    """Return the matrices of each parameter that matches an entry, by FQN. If several entries
    match, the first matching entry applies.

    Raises `ConfigError` for an entry without a match, and for an entry that does not fit a shape.
    """
    found: dict[str, list[MatrixInside]] = {}
    for entry in entries:
        pattern = entry["pattern"]
        where = f"optimizer.matrices: pattern {pattern}"
        names = fnmatch.filter(named, pattern)
        if not names:
            raise ConfigError(f"{where} matches no parameter{near_names(pattern, list(named))}")
        for name in names:
            shape = named[name].shape
            try:
                found.setdefault(name, matrices_in(shape, entry))
            except ValueError as error:
                raise ConfigError(f"{where}: {name} of shape {list(shape)}: {error}") from None
    return found
