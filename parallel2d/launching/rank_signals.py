"""Signals that ask a rank to save and stop. Start at `listen` and `listen_to_interrupts`.

[Note: pre-emption] Slurm sends SIGTERM (or SIGUSR1 with ``--signal``) before it takes a node away.
A signal handler may run in the middle of a collective, so it must not start another collective. The
handler only sets a flag. The status all-reduce of the next step sends the flag to all ranks, and
all ranks save the same step.
"""

from __future__ import annotations

import signal
from typing import Any

from parallel2d.base.runtime import on_teardown

_requested = False
_replaced: dict[int, Any] = {}  # the handlers that `listen` has replaced, by signal


def listen() -> None:
    """Install the handlers in the main thread.

    SIGTERM and SIGUSR1 request a save and a stop. Until `listen_to_interrupts`, SIGINT ends this
    process immediately and without a traceback; its parent reports the interruption.
    """
    ours: dict[int, Any] = {
        signal.SIGTERM: _request,
        signal.SIGUSR1: _request,
        signal.SIGINT: signal.SIG_DFL,
    }
    for number, handler in ours.items():
        before = signal.signal(number, handler)
        # A second `listen` finds its own handlers, and must not record them as replaced handlers.
        _replaced.setdefault(number, before)
    on_teardown(stop_listening)


def listen_to_interrupts() -> None:
    """Make the first SIGINT request a save and a stop too; the next SIGINT ends this rank."""
    signal.signal(signal.SIGINT, _request)


def stop_listening() -> None:
    """Restore the handlers that `listen` replaced, and discard a request to stop."""
    global _requested
    while _replaced:
        number, handler = _replaced.popitem()
        # None stands for a handler that was not installed from Python and cannot be restored.
        signal.signal(number, handler if handler is not None else signal.SIG_DFL)
    _requested = False


def preemption_requested() -> bool:
    """True if a signal has asked this rank to save and end."""
    return _requested


def _request(number: int, frame: Any) -> None:
    global _requested
    _requested = True
    if number == signal.SIGINT:
        signal.signal(number, signal.SIG_DFL)
