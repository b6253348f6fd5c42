"""Who is late when ranks wait for each other in vain.

Each rank's position (step, collectives begun, the last of them) flows into the rendezvous store
once a second, from a thread, so that a step pays nothing. After a collective timed out, a sentence
that names the late ranks flows out; before that, every rank that is stuck writes the stacks of its
threads, and torch's record of its last collectives, into ``stacks/`` of the run directory.

[Note: late ranks] A rank whose beats stand still is stopped, or its machine is gone. Of those that
beat, the ones with the smallest (step, collectives begun) are behind: the others wait for them.
"""

from __future__ import annotations

import faulthandler
import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from parallel2d.store.address import answered_within

INTERVAL = 1.0  # seconds between beats
_PATIENCE_WITH_STORE_S = 10.0  # of which the comparison of two beats takes a quarter


@dataclass(frozen=True)
class Position:
    """How far a rank is. ``doing``: the last collective it began and its axis, for people."""

    step: int
    collectives: int
    doing: str


class Watch:
    """Beats while it is open (a context manager).

    Args:
        hosts: by rank; ``position``: of this rank now, called from a thread.
        timeout_s: after which a collective gives up; stacks are written when nothing moved for four
            fifths of it.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        hosts: Sequence[str],
        run_dir: str,
        timeout_s: float,
        position: Callable[[], Position],
    ) -> None:
        self._store, self._rank, self._hosts, self._run_dir = (
            store,
            rank,
            [h.split("/")[0] for h in hosts],
            run_dir,
        )
        self._position, self._patience = position, 0.8 * timeout_s
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="watch", daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def limit(self, timeout_s: float) -> None:
        """Collectives give up after another time from now on."""
        self._patience = 0.8 * timeout_s

    def __exit__(self, *error: Any) -> None:
        self._end.set()
        self._thread.join(timeout=5)

    def explain(self) -> str:
        """Who is late, as one sentence; takes a few seconds, in which the beats of all ranks are
        compared."""
        silent = (
            f"late: rank 0 on {self._hosts[0]}, whose store does not answer (stopped, or the "
            "machine is gone)"
        )
        return answered_within(_PATIENCE_WITH_STORE_S, self._explain, silent)

    def _explain(self) -> str:
        try:
            before = self._read()
            time.sleep(2.5 * INTERVAL)
            return describe_late(before, self._read(), self._hosts, self._rank)
        except Exception as error:  # the store may have gone with rank 0's host
            return (
                f"which rank is late is unknown: the store does not answer ({type(error).__name__})"
            )

    def _key(self, rank: int) -> str:
        return f"parallel2d/beat/{rank}"

    def _read(self) -> list[dict[str, Any] | None]:
        keys = [self._key(rank) for rank in range(len(self._hosts))]
        return [
            json.loads(self._store.get(key)) if self._store.check([key]) else None for key in keys
        ]

    def _beat(self) -> None:
        number, last, moved, dumped = 0, None, time.monotonic(), False
        while not self._end.is_set():
            now = self._position()
            if now != last:
                last, moved, dumped = now, time.monotonic(), False
            elif not dumped and now.step and time.monotonic() - moved > self._patience:
                dumped = True
                self.dump_stacks()
                self.dump_collectives()
            number += 1
            try:
                self._store.set(
                    self._key(self._rank),
                    json.dumps([number, now.step, now.collectives, now.doing]),
                )
            except Exception:  # the store is gone; the loop will hear of it in its own way
                return
            self._end.wait(INTERVAL)

    def dump_stacks(self) -> None:
        """Writes the stack of every thread of this rank to ``stacks/rank-N.txt``."""
        folder = os.path.join(self._run_dir, "stacks")
        os.makedirs(folder, exist_ok=True)
        with open(os.path.join(folder, f"rank-{self._rank}.txt"), "w") as file:
            position = self._position()
            file.write(
                f"step {position.step}, collective {position.collectives}: {position.doing}\n"
            )
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)

    def dump_collectives(self) -> list[str]:
        """Writes torch's flight recorder, the last collectives of this rank on every process group,
        as JSON: for NCCL to ``stacks/rank-N.nccl.json``, for other backends to
        ``stacks/rank-N.collectives.json``. Returns the paths.

        torch keeps the last ``TORCH_FR_BUFFER_SIZE`` of them, 2000 unless set; with 0 nothing is
        written.
        """
        folder = os.path.join(self._run_dir, "stacks")
        os.makedirs(folder, exist_ok=True)
        written = []
        for kind, name in (
            ("collectives", "_dump_fr_trace_json"),
            ("nccl", "_dump_nccl_trace_json"),
        ):
            # NCCL's is only there in builds for CUDA
            dump = getattr(torch._C._distributed_c10d, name, None)
            record = dump() if dump is not None else b""
            if json.loads(record or "{}").get("entries"):
                written.append(os.path.join(folder, f"rank-{self._rank}.{kind}.json"))
                with open(written[-1], "wb") as file:
                    file.write(record)
        return written


def describe_late(
    before: Sequence[Any], after: Sequence[Any], hosts: Sequence[str], me: int
) -> str:
    """The sentence of `Watch.explain`. ``before``, ``after``: beats [number, step, collectives,
    doing] by rank, some seconds apart; None for a rank that never beat. See [Note: late ranks]."""
    stopped = [
        rank
        for rank, beat in enumerate(after)
        if beat is None or (before[rank] and before[rank][0] == beat[0])
    ]
    alive = {
        rank: (beat[1], beat[2])
        for rank, beat in enumerate(after)
        if beat is not None and rank not in stopped
    }
    parts = []
    if after[me] is not None:
        parts.append(f"rank {me} waited in {after[me][3]} of step {after[me][1]}")
    if stopped:
        parts.append(
            f"late: {_name(stopped, hosts)}, which gave no sign of life any more (stopped, or the "
            "machine is gone)"
        )
    elif alive and min(alive.values()) < max(alive.values()):
        behind = [rank for rank, place in alive.items() if place == min(alive.values())]
        step, collectives = alive[behind[0]]
        parts.append(
            f"late: {_name(behind, hosts)}, alive but behind, at step {step} after {collectives} "
            "collectives of it"
        )
    else:
        parts.append("no rank is behind: the network between them is the suspect")
    return "; ".join(parts)


def _name(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    return ", ".join(f"rank {rank} on {hosts[rank]}" for rank in ranks)
