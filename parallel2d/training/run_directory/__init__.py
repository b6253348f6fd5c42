"""The records of a run: who owns its directory, each start as a segment, and how it ended. They
change once a start is accepted; one that is refused leaves those of earlier starts as they are."""

from parallel2d.training.run_directory.end import (
    note_failure,
    objective_missing,
    read_objective,
    summarize,
)
from parallel2d.training.run_directory.start import (
    RunClaim,
    Segment,
    accept_start,
    changes_since,
    discard_pending,
    flat,
    has_owner,
    read_segments,
)
