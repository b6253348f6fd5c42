"""Signals that ask a rank to save and stop. A handler only sets a flag; the step's agreement
carries it to all ranks.

[Note: pre-emption] Slurm sends SIGTERM (or SIGUSR1 with ``--signal``) before it takes a node away.
A handler may interrupt a collective, so it must not start one: it sets a flag, the flag rides on
the next step's agreement, and all ranks save the same step.
"""

from __future__ import annotations

import signal
from typing import Any

from parallel2d.runtime import on_teardown

_requested = False
_replaced: dict[int, Any] = {}  # the handlers that were there before ours


def listen() -> None:
    """Installs the handlers, in the main thread. SIGINT ends a worker at once: its parent speaks
    for it."""
    for number, handler in (
        (signal.SIGTERM, _request),
        (signal.SIGUSR1, _request),
        (signal.SIGINT, signal.SIG_DFL),
    ):
        before = signal.signal(number, handler)
        _replaced.setdefault(number, before)
    on_teardown(stop_listening)


def stop_listening() -> None:
    """Puts back the handlers that `listen` replaced and forgets what was requested."""
    global _requested
    while _replaced:
        number, handler = _replaced.popitem()
        signal.signal(number, handler if handler is not None else signal.SIG_DFL)
    _requested = False


def preemption_requested() -> bool:
    """Whether this rank has been told to save and end."""
    return _requested


def _request(number: int, frame: Any) -> None:
    global _requested
    _requested = True
