"""Modules that may have been exchanged, such as two experts: `exchanged_pairs`."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping

from torch import Size

_MOST_PAIRS = 24


def exchanged_pairs(shapes: Mapping[str, Size]) -> list[tuple[str, str]]:
    """Siblings whose parameters have the same names and ``shapes``, innermost first.

    ``shapes``: of parameters, by name.
    """
    inside: dict[str, list[tuple[str, Size]]] = defaultdict(list)
    for name, shape in shapes.items():
        parts = name.split(".")
        for depth in range(1, len(parts)):
            inside[".".join(parts[:depth])].append((".".join(parts[depth:]), shape))
    alike: dict[tuple[str, tuple[tuple[str, Size], ...]], list[str]] = defaultdict(list)
    for module, members in inside.items():
        parent = module.rpartition(".")[0]
        alike[parent, tuple(members)].append(module)
    groups = sorted(alike.items(), key=lambda item: -item[0][0].count("."))
    pairs = [pair for _, modules in groups for pair in itertools.combinations(modules, 2)]
    return pairs[:_MOST_PAIRS]


def exchanged_names(names: Iterable[str], pair: tuple[str, str]) -> dict[str, str]:
    """Each of ``names`` -> the parameter that takes its place when the two modules of ``pair`` are
    exchanged."""
    one, other = (f"{module}." for module in pair)
    found: dict[str, str] = {}
    for name in names:
        if name.startswith(one):
            found[name] = other + name.removeprefix(one)
        elif name.startswith(other):
            found[name] = one + name.removeprefix(other)
        else:
            found[name] = name
    return found
