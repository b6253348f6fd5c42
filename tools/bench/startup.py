"""Measure the start-up of a job and its restart after a killed rank, on this machine.

    python tools/bench/startup.py [--against FOLDER] [--rounds 6]

With ``--against``, the checkout in FOLDER is measured too, in turn with this checkout. The job has
four ranks and ``strategy=hybrid``. The output is the median and the range of three figures:

* Start-up: seconds of the complete command for two steps.
* Restart: ``goodput/lost_restart_s`` of the run after one rank is killed.
* Memory of the launcher and all its descendants before the rank is killed. Shared pages are counted
  once (PSS).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

WORDS = "-m parallel2d.train strategy=hybrid launch.nproc_per_node=4 metrics.console=silent"
TRAIN = (sys.executable, *WORDS.split())
HERE = Path(__file__).resolve().parents[2]


def environment(checkout: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}


def start_up(checkout: Path) -> float:
    with tempfile.TemporaryDirectory() as folder:
        begin = time.monotonic()
        words = [*TRAIN, "train.steps=2", f"hydra.run.dir={folder}/run"]
        subprocess.run(
            words, cwd=checkout, env=environment(checkout), check=True, stderr=subprocess.DEVNULL
        )
        return time.monotonic() - begin


def last_row(run: Path) -> dict[str, float]:
    try:
        return json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    except (OSError, ValueError, IndexError):
        return {"step": 0, "goodput/lost_restart_s": 0.0}


def memory(processes: list[psutil.Process]) -> float:
    """Return the sum of the processes' MiB."""
    total = 0
    for process in processes:
        with contextlib.suppress(psutil.Error):  # it ended meanwhile
            total += process.memory_full_info().pss
    return total / 2**20


def restart(checkout: Path) -> tuple[float, float]:
    """Return the seconds of the restart and the memory before it."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run")
        words = "train.steps=1000000 checkpoint.every=10 metrics.log_every=1 launch.max_restarts=5"
        job = subprocess.Popen(
            [*TRAIN, *words.split(), f"hydra.run.dir={run}"],
            cwd=checkout,
            env=environment(checkout),
            stderr=subprocess.DEVNULL,
        )
        while last_row(run)["step"] < 15:
            time.sleep(0.05)
        launcher = psutil.Process(job.pid)
        processes = [launcher, *launcher.children(recursive=True)]
        used = memory(processes)
        next(process for process in processes if process.name() == "rank 1").kill()
        while not last_row(run)["goodput/lost_restart_s"]:
            time.sleep(0.05)
        seconds = last_row(run)["goodput/lost_restart_s"]
        job.send_signal(signal.SIGINT)
        job.wait()
        return seconds, used


def main() -> None:
    words = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    words.add_argument("--against", type=Path, metavar="FOLDER")
    words.add_argument("--rounds", type=int, default=6)
    options = words.parse_args()
    checkouts = {"this": HERE} | ({"other": options.against.resolve()} if options.against else {})
    found: dict[tuple[str, str], list[float]] = {}
    for _ in range(options.rounds):
        for checkout, folder in checkouts.items():
            seconds, used = restart(folder)
            for name, value in (
                ("start-up (s)", start_up(folder)),
                ("restart (s)", seconds),
                ("memory (MiB)", used),
            ):
                found.setdefault((name, checkout), []).append(value)
    print("| | checkout | median | from | to |\n|---|---|---|---|---|")
    for (name, checkout), values in sorted(found.items()):
        print(
            f"| {name} | {checkout} | {statistics.median(values):.2f} | {min(values):.2f} | {max(values):.2f} |"
        )


if __name__ == "__main__":
    main()
