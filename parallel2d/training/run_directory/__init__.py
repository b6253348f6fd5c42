"""The records of a run in its directory: the owner of the directory, a segment for each start, and
a summary at the end. A start is one launch of the training command, or a restart of its workers. A
start that is refused leaves the records unchanged."""
