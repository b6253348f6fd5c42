"""A pytest plugin that writes a line of JSON per test: wall seconds and CPU-seconds. `tools/tests/time.py` reads them."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

RESULTS = "PARALLEL2D_TEST_TIMES"  # environment variable with the path of the file


def cpu_seconds() -> float:
    """Return the CPU-seconds of this process and of all its descendants, including ended
    processes."""
    this = psutil.Process()
    total = 0.0
    for process in [this, *this.children(recursive=True)]:
        with contextlib.suppress(psutil.Error):  # it ended meanwhile
            # user and system seconds of the process and of its ended children
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
