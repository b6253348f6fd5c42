"""Measure the cost of a start for several numbers of ranks: seconds, descriptors, and traffic with
the store of the job.

    python -m tools.bench.scale [--ranks 16 32 64 128] [--words WORD ...]

For each number of ranks, the script starts a job with a tiny model on this machine. It uses the
train command, with the additional arguments ``--words``. It prints:

* seconds to the end of the second step;
* the peak number of descriptors of a rank and of the launcher;
* bytes and requests that the store has received and sent until the end of the second step;
* the exponent of each figure as a power of the number of ranks: 1 means proportional.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import NamedTuple

TINY = (
    "train.steps=2", "train.validate_every=0", "train.seq_len=16", "train.micro_batch_size=1", "model.n_layers=1",
    "model.dim=16", "model.n_heads=2", "model.n_kv_heads=2", "model.hidden_dim=16", "metrics.console=silent",
    "checkpoint.every=2",
)  # fmt: skip
MARK = "STORE "


class Cost(NamedTuple):
    """Figures of one job."""

    ranks: int
    seconds: float
    rank_descriptors: int  # peak of any rank
    launcher_descriptors: int  # peak
    requests: int
    bytes: int


def launch(words: list[str]) -> int:
    """Run the train command in this process with a store that counts requests and bytes."""
    from parallel2d import train
    from parallel2d.base.store.server import StoreServer
    from parallel2d.launching import rendezvous

    counted = {"requests": 0, "bytes": 0}

    class CountingServer(StoreServer):
        def _answer(self, peer, request):  # type: ignore[no-untyped-def]
            counted["requests"] += 1
            counted["bytes"] += sum(map(len, request))
            return super()._answer(peer, request)

        def _send(self, peer, data):  # type: ignore[no-untyped-def]
            counted["bytes"] += len(data)
            super()._send(peer, data)

    rendezvous.StoreServer = CountingServer  # type: ignore[misc]
    code = train.main(words)
    print(MARK + json.dumps(counted), flush=True)
    return code


def descriptors(pid: int) -> int:
    with contextlib.suppress(OSError):
        return len(os.listdir(f"/proc/{pid}/fd"))
    return 0


def descendants(pid: int) -> list[int]:
    """Return the descendants of process ``pid``."""
    found = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            for child in Path(f"/proc/{pid}/task/{task}/children").read_text().split():
                found += [int(child), *descendants(int(child))]
    return found


def is_rank(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().startswith("rank ")
    return False


def measure(ranks: int, words: list[str]) -> Cost:
    most = {"rank": 0, "launcher": 0}
    is_over = threading.Event()

    def watch(pid: int) -> None:
        while not is_over.wait(0.2):
            most["launcher"] = max(most["launcher"], descriptors(pid))
            own = [descriptors(each) for each in descendants(pid) if is_rank(each)]
            most["rank"] = max([most["rank"], *own])

    with tempfile.TemporaryDirectory() as folder:
        command = [
            *(sys.executable, "-m", "tools.bench.scale", "--launch"),
            *(*TINY, f"launch.nproc_per_node={ranks}", f"train.global_batch_size={ranks}"),
            *(f"hydra.run.dir={folder}/run", *words),
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        begin = time.perf_counter()
        job = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        watcher = threading.Thread(target=watch, args=(job.pid,))
        watcher.start()
        output, _ = job.communicate()
        seconds = time.perf_counter() - begin
        is_over.set()
        watcher.join()
    if job.returncode:
        raise SystemExit(f"{ranks} ranks: exit code {job.returncode}")
    line = next(line for line in output.splitlines() if line.startswith(MARK))
    counted = json.loads(line.removeprefix(MARK))
    return Cost(
        ranks, seconds, most["rank"], most["launcher"], counted["requests"], counted["bytes"]
    )


def exponent(costs: list[Cost], name: str) -> float:
    """Return the slope of log(column) over log(number of ranks), by least squares."""
    points = [(math.log(each.ranks), math.log(getattr(each, name))) for each in costs]
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread


def main() -> int:
    if sys.argv[1:2] == ["--launch"]:
        return launch(sys.argv[2:])
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[16, 32, 64, 128])
    parser.add_argument("--words", nargs="*", default=[], help="further words of the job")
    options = parser.parse_args()
    names = Cost._fields[1:]
    print(f"| {' | '.join(name.replace('_', ' ') for name in Cost._fields)} |")
    print("|" + "---|" * len(Cost._fields), flush=True)
    costs = []
    for ranks in options.ranks:
        cost = measure(ranks, options.words)
        costs.append(cost)
        cells = [str(ranks), f"{cost.seconds:.1f}", *map(str, cost[2:])]
        print(f"| {' | '.join(cells)} |", flush=True)
    if len(costs) > 1:
        fitted = [f"{exponent(costs, name):.2f}" for name in names]
        print(f"| exponent | {' | '.join(fitted)} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
