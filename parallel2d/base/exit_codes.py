"""The exit codes of commands and ranks. `launching.run_command` chooses the code of a command."""

from __future__ import annotations

FAILED = 1
INVALID = 2  # invalid arguments or settings
PREEMPTED = 75  # stopped by a signal and saved; the default of ``launch.requeue_exit_code``
LEFT_OUT = 76  # of a rank whose replica is not a member any more
INTERRUPTED = 130  # by Ctrl-C
LOST = 255  # of a rank after the end of the process that started it
