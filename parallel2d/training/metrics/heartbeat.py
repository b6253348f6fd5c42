"""Finds the ranks that the others wait for when a collective times out: `HeartbeatMonitor`.

A thread of each rank writes its position into the rendezvous store once a second: a heartbeat.
After a timeout `HeartbeatMonitor.explain` names the late ranks. Before that, each rank that is
stuck writes the stacks of its threads and torch's flight recorder into ``stacks/`` of the run
directory.

[Note: late ranks] A rank whose heartbeats stand still is stopped, or its machine is gone. Of those
that heartbeat, the ones with the smallest (step, collectives begun) are behind: the others wait for
them.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from parallel2d.base.files import regular
from parallel2d.base.store.address import answered_within

INTERVAL = 1.0  # seconds between heartbeats
_KEY = "parallel2d/heartbeat/{}"  # of a rank, in the store
_PATIENCE_WITH_STORE_S = 10.0  # of which the comparison of two heartbeats takes a quarter
# torch's flight recorder as JSON, by the end of a file's name. A build without CUDA has no NCCL.
_RECORDERS = {"collectives": "_dump_fr_trace_json", "nccl": "_dump_nccl_trace_json"}


@dataclass(frozen=True)
class Position:
    """How far a rank is. ``doing``: the last collective it began and its axis, for people."""

    step: int
    collectives: int
    doing: str


@dataclass
class HeartbeatMonitor:
    """Beats while it is open (a context manager)."""

    store: Any
    rank: int
    hosts: Sequence[str]  # by rank
    run_dir: str
    timeout_s: float  # of collectives; stacks are written when nothing moved for four fifths of it
    position: Callable[[], Position]  # of this rank now, called from a thread
    # Keeps the text of `explain` for the launcher while this rank is stuck, and removes it (None)
    # once the rank moves: a timeout of NCCL ends the process without an exception.
    note: Callable[[str | None], object] = lambda text: None

    def __post_init__(self) -> None:
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._send_heartbeats, name="watch", daemon=True)

    def limit(self, timeout_s: float) -> None:
        """Collectives give up after another time from now on."""
        self.timeout_s = timeout_s

    def __enter__(self) -> HeartbeatMonitor:
        self._thread.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._end.set()
        self._thread.join(timeout=5)

    def explain(self) -> str:
        """The late ranks, as one sentence; compares the heartbeats of all ranks for a few
        seconds."""
        host = self.hosts[0].split("/")[0]
        silent = (
            f"late: rank 0 on {host}, whose store does not answer (stopped, or the machine is gone)"
        )
        try:
            return answered_within(_PATIENCE_WITH_STORE_S, self._explain, silent)
        except Exception:  # the other end of the connection is gone
            return silent

    def _explain(self) -> str:
        before = self._read()
        time.sleep(2.5 * INTERVAL)
        return describe_late(before, self._read(), self.hosts, self.rank)

    def _read(self) -> list[Any]:
        """The newest heartbeat of every rank, None for one that never heartbeat."""
        heartbeats: list[Any] = [None] * len(self.hosts)
        for rank in range(len(self.hosts)):
            # Getting a key that is not there would wait for it.
            if self.store.check([_KEY.format(rank)]):
                heartbeats[rank] = json.loads(self.store.get(_KEY.format(rank)))
        return heartbeats

    def _send_heartbeats(self) -> None:
        number = 0
        last: Position | None = None
        moved_at = time.monotonic()
        dumped = False  # since the rank moved last
        while not self._end.is_set():
            now = self.position()
            if now != last:
                if dumped:
                    self.note(None)
                last, moved_at, dumped = now, time.monotonic(), False
            stuck_s = time.monotonic() - moved_at
            # In step 0 the model is still being built, and nothing is counted.
            if now.step and stuck_s > 0.8 * self.timeout_s and not dumped:
                dumped = True
                # A full disk must not end the heartbeats: this rank would seem to be stopped.
                with contextlib.suppress(OSError):
                    self._dump(now)
                # In a thread of its own, because it waits, and other ranks look at the heartbeats.
                threading.Thread(target=lambda: self.note(self.explain()), daemon=True).start()
            number += 1
            heartbeat = [number, now.step, now.collectives, now.doing]
            try:
                self.store.set(_KEY.format(self.rank), json.dumps(heartbeat))
            except Exception:  # the store is gone, which the loop notices by itself
                return
            self._end.wait(INTERVAL)

    def _dump(self, now: Position) -> None:
        """Writes the stack of every thread of this rank, and the last collectives on every process
        group as torch has recorded them (``TORCH_FR_BUFFER_SIZE`` of them; nothing with 0)."""
        path = os.path.join(self.run_dir, "stacks", f"rank-{self.rank}")
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(f"{path}.txt", "w", opener=regular) as file:
            file.write(f"step {now.step}, collective {now.collectives}: {now.doing}\n")
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
        for ending, name in _RECORDERS.items():
            dump = getattr(torch._C._distributed_c10d, name, None)
            record = dump() if dump is not None else b"{}"
            if json.loads(record).get("entries"):
                with open(f"{path}.{ending}.json", "wb", opener=regular) as file:
                    file.write(record)


def describe_late(
    before: Sequence[Any], after: Sequence[Any], hosts: Sequence[str], me: int
) -> str:
    """The sentence of `HeartbeatMonitor.explain`. ``before``, ``after``: heartbeats [number, step,
    collectives, doing] by rank, some seconds apart; None for a rank that never heartbeat. See
    [Note: late ranks]."""
    late = {}
    for rank, (earlier, later) in enumerate(zip(before, after, strict=True)):
        # A rank that began to heartbeat in between is not silent.
        if later is None or (earlier and earlier[0] == later[0]):
            late[rank] = hosts[rank]
    how = "which gave no sign of life any more (stopped, or the machine is gone)"
    if not late:
        positions = [heartbeat[1:3] for heartbeat in after]
        step, collectives = min(positions)
        late = {rank: hosts[rank] for rank, at in enumerate(positions) if at == min(positions)}
        how = f"alive but behind, at step {step} after {collectives} collectives of it"
    named = ", ".join(f"rank {rank} on {host.split('/')[0]}" for rank, host in late.items())
    sentence = f"late: {named}, {how}"
    if len(late) == len(hosts):
        sentence = "no rank is behind: the network between them is the suspect"
    if after[me] is None:
        return sentence
    _, step, _, doing = after[me]
    return f"rank {me} waited in {doing} of step {step}; {sentence}"
