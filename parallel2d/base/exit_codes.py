"""The exit codes of commands and ranks. `launching.run_command` chooses the code of a command."""

from __future__ import annotations

FAILED = 1
INVALID = 2  # invalid arguments or settings; also a run that a second start has taken over
PREEMPTED = 75  # stopped by a signal after a save; the default of ``launch.requeue_exit_code``
LEFT_OUT = 76  # of a rank, if the other replicas continue without its replica
INTERRUPTED = 130  # ended by Ctrl-C
LOST = 255  # of a rank, if the process that forked it has ended
