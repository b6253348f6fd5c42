"""A pytest plugin that writes a line of JSON per test: seconds on the clock and on the CPU. `tools/tests/time.py` reads them."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

RESULTS = "PARALLEL2D_TEST_TIMES"  # the variable that says where to write


def cpu_seconds() -> float:
    """Of this process and of all below it, those included that have ended."""
    this = psutil.Process()
    total = 0.0
    for process in [this, *this.children(recursive=True)]:
        with contextlib.suppress(psutil.Error):  # it ended meanwhile
            # its own and its ended children's, user and system
            total += sum(process.cpu_times()[:4])
    return total


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[Any]:
    begin, busy = time.perf_counter(), cpu_seconds()
    result = yield
    row = {"test": item.nodeid, "wall": time.perf_counter() - begin, "cpu": cpu_seconds() - busy}
    with open(os.environ[RESULTS], "a") as file:
        file.write(json.dumps(row) + "\n")
    return result
