"""Ranks from torch elastic's `start_method="forkserver"`: seconds until they run, and who outlives whom.

    python tools/bench/fork_server.py

A launcher starts two ranks, ends them and starts them again. Then one process is ended by SIGKILL: the launcher, the server that
forks the ranks, or a rank. With *precautions* a rank closes the descriptor whose other end tells the server that the launcher lives,
and asks the kernel to be killed with its parent, the server.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from multiprocessing import forkserver
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]
RANKS = 2
PRELOAD = ["torch._dynamo", "torch.utils.tensorboard", "parallel2d.assemble", "parallel2d.train"]


def rank(folder: str, start: int, precautions: bool) -> None:
    """Writes when it runs, and who it and its parent are; then waits."""
    import torch

    from parallel2d.launch.processes import end_with_parent

    seconds = time.time()
    if precautions:
        end_with_parent()
        os.close(forkserver._forkserver._forkserver_alive_fd)  # type: ignore[attr-defined]
    number = os.environ["RANK"]
    told = {
        "runs": seconds,
        "rank": os.getpid(),
        "server": os.getppid(),
        "cuda": torch.cuda.is_initialized(),
    }
    path = Path(folder, f"{start}-{number}")
    path.with_suffix(".new").write_text(json.dumps(told))
    path.with_suffix(".new").rename(path)
    time.sleep(1000)


def launch(folder: str, precautions: bool) -> None:
    """The launcher: two starts; prints a line of JSON for each."""
    import fork_server
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, start_processes

    multiprocessing.set_forkserver_preload([*PRELOAD, "fork_server"])
    for start in range(2):
        begin = time.time()
        context = start_processes(
            "worker",
            fork_server.rank,
            dict.fromkeys(range(RANKS), (folder, start, precautions)),
            {number: {"RANK": str(number)} for number in range(RANKS)},
            DefaultLogsSpecs(log_dir=f"{folder}/logs"),
            start_method="forkserver",
        )
        paths = [Path(folder, f"{start}-{number}") for number in range(RANKS)]
        while not all(path.exists() for path in paths):
            time.sleep(0.01)
        told = [json.loads(path.read_text()) for path in paths]
        line = {
            "seconds": max(each["runs"] for each in told) - begin,
            "cuda": any(each["cuda"] for each in told),
            "launcher": os.getpid(),
            "server": told[0]["server"],
            **{f"rank {number}": each["rank"] for number, each in enumerate(told)},
        }
        print(json.dumps(line), flush=True)
        if start == 0:
            context.close(signal.SIGKILL)
    time.sleep(1000)


def is_alive(process: int) -> bool:
    try:
        text = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] != "Z"


def main() -> int:
    if sys.argv[1:2] == ["launch"]:
        launch(sys.argv[2], sys.argv[3] == "with")
        return 0
    print(
        "| precautions | SIGKILL of | first start, s | second start, s | CUDA initialized | alive 4 s later |"
    )
    print("|---|---|---|---|---|---|")
    for precautions in ("without", "with"):
        for victim in ("launcher", "server", "rank 0"):
            with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
                process = subprocess.Popen(
                    [sys.executable, __file__, "launch", folder, precautions],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    text=True,
                )
                assert process.stdout is not None
                first, second = (json.loads(process.stdout.readline()) for _ in range(2))
                names = ["launcher", "server", *(f"rank {number}" for number in range(RANKS))]
                os.kill(second[victim], signal.SIGKILL)
                time.sleep(4)
                left = [name for name in names if is_alive(second[name])]
                for name in names:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(second[name], signal.SIGKILL)
                process.wait()
            print(
                f"| {precautions} | {victim} | {first['seconds']:.2f} | {second['seconds']:.2f} | "
                f"{'yes' if first['cuda'] or second['cuda'] else 'no'} | {', '.join(left) or 'none'} |",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
