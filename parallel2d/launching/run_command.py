"""Runs a command and converts its exceptions into exit codes: `exit_code_of`. The codes are in
`base.exit_codes`."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable

from parallel2d.base.errors import ConfigError
from parallel2d.base.exit_codes import FAILED, INTERRUPTED, INVALID
from parallel2d.base.files import for_terminal
from parallel2d.launching.failures import Preempted, WorkersFailed


def exit_code_of(
    start: Callable[[], int | None],
    *,
    faults: tuple[type[Exception], ...] = (ConfigError,),
    invalid: int = INVALID,
    interrupted: str = "interrupted",
) -> int:
    """Return the exit code of a command. Prints one line for an exception.

    Args:
        start: the command. Returns an exit code, or None for 0.
        faults: exceptions with the exit code ``invalid``.
        invalid: exit code for invalid settings.
        interrupted: message for an interrupt without one; its exit code is `INTERRUPTED`.
    """
    text: object
    try:
        return start() or 0
    except faults as error:
        text, code = error, invalid
    except Preempted as preempted:
        text, code = preempted, preempted.exit_code
    except WorkersFailed as error:
        text, code = error, FAILED
    except KeyboardInterrupt as error:
        text, code = str(error) or interrupted, INTERRUPTED
    if code == INTERRUPTED:  # another Ctrl-C ends this process without a traceback
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    print(f"parallel2d: {for_terminal(text)}", file=sys.stderr)
    return code
