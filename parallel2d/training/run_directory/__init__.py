"""The records of a run: who owns its directory, each start as a segment, and how it ended. They
change once a start is accepted; one that is refused leaves those of earlier starts as they are."""
