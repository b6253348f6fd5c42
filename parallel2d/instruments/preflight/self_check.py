"""The self-check: the names of its checks, the rows of its table, and the checks that run the train
command. `gradient_checks` has the checks that run in the ranks of the preflight check."""

from __future__ import annotations

import functools
import glob
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from parallel2d.base import files
from parallel2d.base.config import SyncConfig
from parallel2d.base.errors import ConfigError

_WIRES = SyncConfig.__dataclass_fields__["wire"].metadata["choices"]
WIRES = tuple(f"sync.wire={name}" for name in _WIRES if name not in ("auto", "fp32"))
GRADIENTS = ("streams", "fp32", "bf16", *WIRES, "compile=block")
RUNS = ("resume", "memory-checkpoint", "killed-rank", "replica-loss")
CHECKED_BACKEND = "gloo"  # the backend that the check replica-loss uses; nccl2 needs several nodes
STEPS, SAVED, KILLED = 6, 3, 5
_BOUND = 1e-5  # largest allowed relative difference of losses in fp32
_KILL = (
    "train.hooks=[parallel2d.instruments.preflight.gradient_checks:KillOnce]",
    "launch.max_restarts=1",
)


def chosen_checks(only: str | None) -> list[str]:
    """Return the checks of ``--only``; all by default. Raises `ConfigError` for an unknown
    check."""
    names = [*GRADIENTS, *RUNS]
    wanted = only.split(",") if only else names
    if not set(wanted) <= set(names):
        raise ConfigError(f"--only={only} must be some of {','.join(names)}")
    return list(filter(wanted.__contains__, names))


def write_row(name: str, check: Callable[[], str], shown: bool = True) -> bool:
    """Run ``check``, and print a row of the table if ``shown``: the name at the start, then the
    seconds and the returned outcome, or the exception. False if the check failed."""
    if shown:
        print(f"{name:18}", end="", flush=True)
    begun = time.perf_counter()
    try:
        outcome = check()
    except Exception as error:  # the other checks still run
        first_line = str(error).strip().partition("\n")[0]
        outcome = f"FAILED: {type(error).__name__}: {first_line}"
    if shown:
        print(f"{time.perf_counter() - begun:6.1f} s  {outcome}", flush=True)
    return not outcome.startswith("FAILED")


def check_runs(chosen: Sequence[str], ranks: int, cluster_file: str | None = None) -> bool:
    """Run the checks of ``chosen`` that are training runs, with ``ranks`` ranks. False if a check
    failed. The outcome of ``replica-loss`` is written to ``cluster_file``, which must exist."""
    with tempfile.TemporaryDirectory(prefix="parallel2d-") as folder:
        runs = _Runs(folder, ranks)
        checks = dict(zip(RUNS, (runs.resume, runs.memory, runs.killed, runs.lost), strict=True))
        passed = []
        for name in chosen:
            if name in RUNS:
                passed.append(write_row(name, checks[name]))
        has_continued = "replica-loss" in chosen and Path(folder, "lost", "metrics.jsonl").exists()
    if cluster_file is not None and has_continued and all(passed):
        _add_backend(cluster_file)
    return all(passed)


def _add_backend(path: str) -> None:
    """Write to the cluster file the backend with which training continues after the loss of a
    replica."""
    text = Path(path).read_text()
    lines = [line for line in text.splitlines() if not line.startswith("replica_backend:")]
    lines.append(f"replica_backend: {CHECKED_BACKEND}")
    files.replace(path, "\n".join(lines) + "\n")
    print(f"written: {path}; train with cluster={path}", file=sys.stderr)


class _Runs:
    """Training runs of ``ranks`` ranks in ``folder``."""

    def __init__(self, folder: str, ranks: int) -> None:
        self._folder, self._ranks = folder, ranks
        self._layout = [f"checkpoint.every={SAVED}", "strategy=zero3"]
        if ranks % 2 == 0:
            self._layout[1:] = ["mesh.replicate=2", f"mesh.shard={ranks // 2}"]

    def resume(self) -> str:
        _ = self._expected
        saved = Path(self._folder, "undisturbed", "checkpoints", f"step-{SAVED:08d}")
        self._train("resumed", *self._layout, f"checkpoint.resume={saved}")
        return self._compared("resumed", first=SAVED + 1)

    def memory(self) -> str:
        # With one replica, all ranks restart on every kind of device. No checkpoint is saved to
        # disk.
        words = ("strategy=zero3", "checkpoint.every=0", "checkpoint.memory_every=1")
        output = self._train("memory", *words, *_KILL)
        if "\nresumed after step" not in output:
            return "FAILED: the restarted run did not resume from memory"
        return self._compared("memory")

    def killed(self) -> str:
        self._train("killed", *self._layout, *_KILL)
        return self._compared("killed")

    def lost(self) -> str:
        if self._ranks % 2:
            return "skipped: needs two replicas, so an even number of ranks"
        words = ("launch.on_replica_loss=continue", f"launch.replica_backend={CHECKED_BACKEND}")
        self._train("lost", *self._layout, *_KILL, *words)
        starts = Path(self._folder, "lost", "segments.jsonl").read_text().splitlines()
        if len(starts) != 1:
            return "FAILED: all ranks have restarted"
        return self._compared("lost")

    @functools.cached_property
    def _expected(self) -> dict[int, float]:
        self._train("undisturbed", *self._layout)
        return self._losses("undisturbed")

    def _compared(self, name: str, first: int = 1) -> str:
        """Compare the losses from step ``first`` to the end with a run without a failure, and
        return the outcome."""
        losses = self._losses(name)
        if sorted(losses) != list(range(first, STEPS + 1)):
            return f"FAILED: steps {sorted(losses)} instead of {first} to {STEPS}"
        if first == 1 and not Path(self._folder, name, "killed").exists():
            return "FAILED: no rank was killed"
        worst = max(abs(loss / self._expected[step] - 1) for step, loss in losses.items())
        outcome = "passed" if worst <= _BOUND else "FAILED"
        return f"{outcome}: largest difference of a loss {worst:.1e}, bound {_BOUND:.0e}"

    def _train(self, name: str, *words: str) -> str:
        """Run the train command, and return its output. Raises RuntimeError if it fails."""
        corpus = glob.escape(os.path.join(os.path.dirname(os.__file__), "email"))
        common = [
            *("data=text", f"data.path='{corpus}/*.py'", f"data.cache_dir={self._folder}/data"),
            *(f"train.steps={STEPS}", f"train.global_batch_size={2 * self._ranks}"),
            *("train.seq_len=32", "model.n_layers=2", "model.dim=64", "model.hidden_dim=128"),
            *(
                "precision=fp32",
                "optimizer.lr=1e-4",
                "scheduler=constant",
                "train.validate_every=0",
            ),
            *("metrics.console=plain", "metrics.tensorboard=false"),
            *(f"launch.nproc_per_node={self._ranks}", f"hydra.run.dir={self._folder}/{name}"),
        ]
        command = [sys.executable, "-m", "parallel2d.train", *common, *words]
        done = subprocess.run(command, cwd=self._folder, capture_output=True, text=True)
        if done.returncode:
            last = done.stderr.strip().rpartition("\n")[2]
            raise RuntimeError(f"train ended with {done.returncode}: {last}")
        return done.stdout + done.stderr

    def _losses(self, name: str) -> dict[int, float]:
        rows = Path(self._folder, name, "metrics.jsonl").read_text().splitlines()
        losses: dict[int, float] = {}
        for row in map(json.loads, rows):
            losses[row["step"]] = row["loss"]
        return losses
