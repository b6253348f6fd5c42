"""What is measured and where it is written. Numbers flow in from the loop, rows flow out to files
and the console; nothing here decides anything."""
