"""What a run measures, and where it is written: files and the console. Nothing here changes what
the loop does."""
