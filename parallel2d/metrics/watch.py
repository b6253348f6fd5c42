"""Finds the ranks that the others wait for when a collective times out: `Watch`.

A thread of each rank writes its position (step, collectives begun, the last of them) into the
rendezvous store once a second: a beat. After a timeout `Watch.explain` names the late ranks. Before
that, every rank that is stuck writes the stacks of its threads, and torch's record of its last
collectives, into ``stacks/`` of the run directory.

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
        self._store = store
        self._rank = rank
        self._hosts = [host.split("/")[0] for host in hosts]
        self._run_dir = run_dir
        self._position = position
        self._patience = 0.8 * timeout_s
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
        """The late ranks, as one sentence; takes a few seconds, in which the beats of all ranks are
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
        """The newest beat of every rank, None for one that never beat."""
        beats: list[Any] = []
        for rank in range(len(self._hosts)):
            key = self._key(rank)
            # Getting a key that is not there would wait for it.
            beats.append(json.loads(self._store.get(key)) if self._store.check([key]) else None)
        return beats

    def _beat(self) -> None:
        number = 0
        last: Position | None = None
        moved_at = time.monotonic()
        dumped = False  # since the rank moved last
        while not self._end.is_set():
            now = self._position()
            stuck_s = time.monotonic() - moved_at
            if now != last:
                last = now
                moved_at = time.monotonic()
                dumped = False
            # In step 0 the model is still being built, and nothing is counted.
            elif not dumped and now.step and stuck_s > self._patience:
                dumped = True
                self.dump_stacks()
                self.dump_collectives()
            number += 1
            beat = json.dumps([number, now.step, now.collectives, now.doing])
            try:
                self._store.set(self._key(self._rank), beat)
            except Exception:  # the store is gone, which the loop notices by itself
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
            if not json.loads(record or "{}").get("entries"):
                continue
            path = os.path.join(folder, f"rank-{self._rank}.{kind}.json")
            with open(path, "wb") as file:
                file.write(record)
            written.append(path)
        return written


def describe_late(
    before: Sequence[Any], after: Sequence[Any], hosts: Sequence[str], me: int
) -> str:
    """The sentence of `Watch.explain`. ``before``, ``after``: beats [number, step, collectives,
    doing] by rank, some seconds apart; None for a rank that never beat. See [Note: late ranks]."""
    late = _describe_stopped(before, after, hosts) or _describe_behind(after, hosts)
    if after[me] is None:
        return late
    _, step, _, doing = after[me]
    return f"rank {me} waited in {doing} of step {step}; {late}"


def _describe_stopped(before: Sequence[Any], after: Sequence[Any], hosts: Sequence[str]) -> str:
    """Empty where every rank beats."""
    stopped = []
    for rank, beat in enumerate(after):
        earlier = before[rank]
        if beat is None or (earlier and earlier[0] == beat[0]):
            stopped.append(rank)
    if not stopped:
        return ""
    return (
        f"late: {_name(stopped, hosts)}, which gave no sign of life any more (stopped, or the "
        "machine is gone)"
    )


def _describe_behind(after: Sequence[Any], hosts: Sequence[str]) -> str:
    """For ranks that all beat."""
    places = [(step, collectives) for _, step, collectives, _ in after]
    last = min(places)
    if last == max(places):
        return "no rank is behind: the network between them is the suspect"
    behind = [rank for rank, place in enumerate(places) if place == last]
    step, collectives = last
    return (
        f"late: {_name(behind, hosts)}, alive but behind, at step {step} after {collectives} "
        "collectives of it"
    )


def _name(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    return ", ".join(f"rank {rank} on {hosts[rank]}" for rank in ranks)
