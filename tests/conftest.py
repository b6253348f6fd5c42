"""Fixtures: `ranks` runs a function on several gloo ranks."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest

sys.path.insert(0, os.path.dirname(__file__))  # the forked workers import test modules and `workers` by name
sys.path.append(os.path.dirname(os.path.dirname(__file__)))  # `tools` stands at the root of the repository

from workers import Pools


@pytest.fixture(scope="session")
def ranks() -> Iterator[Pools]:
    pools = Pools()
    yield pools
    pools.close()
