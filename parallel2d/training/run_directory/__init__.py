"""The records of a run: the owner of its directory, each start as a segment, and its end. They
change only when a start is accepted; a rejected start leaves earlier records unchanged."""
