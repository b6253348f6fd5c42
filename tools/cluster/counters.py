"""Kernel byte counters of the nodes' interfaces: `difference` of two snapshots, and `Series`, a
time series in a file."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# node -> interface (eth0, lo) -> {tx,rx}_{bytes,packets}
Counters = dict[str, dict[str, dict[str, int]]]


def difference(after: Counters, before: Counters) -> Counters:
    """What was counted between two snapshots."""
    return {
        node: {
            device: {key: value - before[node][device][key] for key, value in counts.items()}
            for device, counts in devices.items()
        }
        for node, devices in after.items()
    }  # fmt: skip


class Series:
    """Writes a snapshot every ``interval`` seconds, one JSON object per line: ``seconds`` since the start, ``step`` (what
    ``describe`` adds), ``nodes``."""

    def __init__(
        self,
        path: Path,
        interval: float,
        read: Callable[[], Counters],
        describe: Callable[[], dict[str, Any]],
    ) -> None:
        self._path, self._interval, self._read, self._describe = path, interval, read, describe
        self._begun = time.monotonic()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        due = self._begun
        with self._path.open("a") as file:
            while True:
                row = {
                    "seconds": round(time.monotonic() - self._begun, 3),
                    **self._describe(),
                    "nodes": self._read(),
                }
                file.write(json.dumps(row) + "\n")
                file.flush()
                due += self._interval
                if self._over.wait(max(0.0, due - time.monotonic())):
                    return

    def stop(self) -> None:
        self._over.set()
        self._thread.join()
