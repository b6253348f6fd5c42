"""Heartbeats of ranks: `HeartbeatMonitor`. If a collective times out, the monitor names the late
ranks, for which the other ranks wait.

Once a second, a thread of each rank writes a heartbeat with the rank's position to the rendezvous
store. After a timeout, `HeartbeatMonitor.explain` names the late ranks. Shortly before the timeout,
each rank without progress writes the stacks of its threads and torch's flight recorder to
``stacks/`` in the run directory.

[Note: late ranks] A rank is late if its heartbeat does not advance: its process is stopped, or its
machine has failed. If the heartbeats of all ranks advance, the late ranks are the ranks with the
smallest (step, number of started collectives).
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
_KEY = "parallel2d/heartbeat/{}"  # key of a rank's heartbeat in the store
_PATIENCE_WITH_STORE_S = 10.0  # four times the duration of `_explain`
# Suffix of the file -> function in torch that returns the flight recorder as JSON. A build without
# CUDA has no function for NCCL.
_RECORDERS = {"collectives": "_dump_fr_trace_json", "nccl": "_dump_nccl_trace_json"}


@dataclass(frozen=True)
class Position:
    """The progress of a rank. ``collectives``: number of collectives in this step; ``doing``: the
    last collective and its axis, as text."""

    step: int
    collectives: int
    doing: str


@dataclass
class HeartbeatMonitor:
    """Writes this rank's heartbeat while the context is open."""

    store: Any
    rank: int
    hosts: Sequence[str]  # by rank
    run_dir: str
    # Timeout of collectives; stacks are written after 80 % of this time without progress
    timeout_s: float
    # Returns the position of this rank; called in the monitor's thread
    position: Callable[[], Position]
    # Passes the text of `explain` to the launcher if this rank makes no progress, and None when it
    # makes progress again. The launcher needs the text in advance, because a timeout of NCCL ends
    # the process without an exception.
    note: Callable[[str | None], object] = lambda text: None

    def __post_init__(self) -> None:
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._send_heartbeats, name="watch", daemon=True)

    def limit(self, timeout_s: float) -> None:
        """Set the timeout of collectives from now on."""
        self.timeout_s = timeout_s

    def __enter__(self) -> HeartbeatMonitor:
        self._thread.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._end.set()
        self._thread.join(timeout=5)

    def explain(self) -> str:
        """Return a sentence that names the late ranks. The call takes a few seconds, because it
        compares two heartbeats of every rank."""
        host = self.hosts[0].split("/")[0]
        silent = (
            f"late: rank 0 on {host}, whose store does not answer (stopped, or the machine is gone)"
        )
        try:
            return answered_within(_PATIENCE_WITH_STORE_S, self._explain, silent)
        except Exception:  # the connection is broken
            return silent

    def _explain(self) -> str:
        before = self._read()
        time.sleep(2.5 * INTERVAL)
        return describe_late(before, self._read(), self.hosts, self.rank)

    def _read(self) -> list[Any]:
        """Return the newest heartbeat of every rank; None for a rank without a heartbeat."""
        heartbeats: list[Any] = [None] * len(self.hosts)
        for rank in range(len(self.hosts)):
            # `get` would wait for a missing key.
            if self.store.check([_KEY.format(rank)]):
                heartbeats[rank] = json.loads(self.store.get(_KEY.format(rank)))
        return heartbeats

    def _send_heartbeats(self) -> None:
        number = 0
        last: Position | None = None
        moved_at = time.monotonic()
        dumped = False  # True after a dump at the current position
        while not self._end.is_set():
            now = self.position()
            if now != last:
                if dumped:
                    self.note(None)
                last, moved_at, dumped = now, time.monotonic(), False
            stuck_s = time.monotonic() - moved_at
            # In step 0 the model is still being built, and no collectives are counted.
            if now.step and stuck_s > 0.8 * self.timeout_s and not dumped:
                dumped = True
                # A full disk must not end the heartbeats, because this rank would seem to be
                # stopped.
                with contextlib.suppress(OSError):
                    self._dump(now)
                # A separate thread, because `explain` waits, and the heartbeat must continue.
                threading.Thread(target=lambda: self.note(self.explain()), daemon=True).start()
            number += 1
            heartbeat = [number, now.step, now.collectives, now.doing]
            try:
                self.store.set(_KEY.format(self.rank), json.dumps(heartbeat))
            except Exception:  # the store has failed, and the loop detects this too
                return
            self._end.wait(INTERVAL)

    def _dump(self, now: Position) -> None:
        """Write the stack of every thread of this rank, and the last collectives of every process
        group from torch's flight recorder (``TORCH_FR_BUFFER_SIZE`` entries; 0 disables it)."""
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
    """Return a sentence that names the late ranks; see [Note: late ranks].

    Args:
        before, after: heartbeats [number, step, collectives, doing] by rank, some seconds apart;
            None for a rank without heartbeats.
        hosts: host by rank.
        me: this rank.
    """
    late = {}
    for rank, (earlier, later) in enumerate(zip(before, after, strict=True)):
        # A rank that sent its first heartbeat between the two reads is not late.
        if later is None or (earlier and earlier[0] == later[0]):
            late[rank] = hosts[rank]
    how = "which timed out (stopped, or the machine is gone)"
    if not late:
        positions = []
        for heartbeat in after:
            positions.append(heartbeat[1:3])
        step, collectives = min(positions)
        late = {}
        for rank, at in enumerate(positions):
            if at == min(positions):
                late[rank] = hosts[rank]
        how = f"alive but behind, at step {step} after {collectives} collectives in this step"
    named = ", ".join(f"rank {rank} on {host.split('/')[0]}" for rank, host in late.items())
    sentence = f"late: {named}, {how}"
    if len(late) == len(hosts):
        sentence = "no rank is behind: the network between the ranks may have failed"
    if after[me] is None:
        return sentence
    _, step, _, doing = after[me]
    return f"rank {me} waited in {doing} of step {step}; {sentence}"
