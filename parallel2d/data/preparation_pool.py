"""Prepares units in several processes: `run_in_workers`.

A worker is ``python -m parallel2d.data.worker``. Jobs and records are lines of JSON over its pipes,
so nothing is pickled and the caller's main module is not imported again. A worker whose parent was
killed finishes its unit, reads the end of its input and exits.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from typing import IO, Any

from parallel2d.errors import ConfigError

_PACKAGE_PARENT = str(Path(__file__).resolve().parents[2])


def run_in_workers(
    jobs: list[dict[str, Any]], count: int, lock: int | None
) -> Generator[tuple[int, dict[str, Any]]]:
    """Yields (number, record) for each job (see `worker`) in the order of completion, from
    ``count`` processes that inherit the descriptor ``lock``.

    Raises the `ConfigError` of a worker, and RuntimeError with the unit's name if a worker died.
    """
    path = os.pathsep.join(filter(None, [_PACKAGE_PARENT, os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, "-m", "parallel2d.data.worker"]
    queue = list(reversed(jobs))  # the first job is taken first, from the end
    busy: dict[int, dict[str, Any]] = {}
    with contextlib.ExitStack() as stack, selectors.DefaultSelector() as selector:
        for _ in range(min(count, len(jobs))):
            # A worker that outlives this process keeps the lock, so that nobody else writes to the
            # folder until it has ended.
            worker = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=environment,
                text=True,
                pass_fds=[] if lock is None else [lock],
            )
            stack.callback(_stop, worker)
            assert worker.stdout is not None
            selector.register(worker.stdout, selectors.EVENT_READ, worker)
            _give(worker, queue, busy)
        while busy:
            for key, _ in selector.select():
                worker = key.data
                line = worker.stdout.readline()
                job = busy.pop(worker.pid)
                if not line:
                    raise RuntimeError(
                        f"the process that prepared {_describe(job)} ended with code "
                        f"{worker.wait()}; what is finished is kept, start again to go on"
                    )
                answer = json.loads(line)
                if "error" in answer:
                    raise ConfigError(answer["error"])
                if not _give(worker, queue, busy):
                    selector.unregister(worker.stdout)
                yield answer["number"], answer["record"]


def _give(
    worker: subprocess.Popen[str], queue: list[dict[str, Any]], busy: dict[int, dict[str, Any]]
) -> bool:
    """Sends the next job to an idle worker. False if no job is left."""
    if not queue:
        return False
    busy[worker.pid] = job = queue.pop()
    pipe: IO[str] | None = worker.stdin
    assert pipe is not None
    with contextlib.suppress(BrokenPipeError):  # it died, which is noticed when its answer is read
        pipe.write(json.dumps(job) + "\n")
        pipe.flush()
    return True


def _describe(job: dict[str, Any]) -> str:
    names = [file["name"] for file in job["unit"]["files"]]
    return names[0] + (f" and {len(names) - 1} more files" if len(names) > 1 else "")


def _stop(worker: subprocess.Popen[str]) -> None:
    worker.kill()
    worker.wait()
    for pipe in (worker.stdin, worker.stdout):
        with contextlib.suppress(OSError):
            if pipe is not None:
                pipe.close()
