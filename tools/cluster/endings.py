"""Turns signals that ask a command to end into an exception, so that ``with`` blocks clean up
first: `until_signalled`."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Ended(BaseException):
    """A signal asked this process to end; its number is the argument."""


def _end(number: int, _frame: FrameType | None) -> NoReturn:
    for each in SIGNALS:
        signal.signal(each, signal.SIG_IGN)  # nothing interrupts the clean-up
    raise Ended(number)


def until_signalled(command: Callable[[], int]) -> int:
    """Runs ``command`` and returns its exit code, or 128 + the number of the signal that ended it. Handlers are as before then."""
    before = {number: signal.signal(number, _end) for number in SIGNALS}
    try:
        return command()
    except Ended as ended:
        return 128 + int(ended.args[0])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
