"""What a run measures, and where it is written. Nothing here changes what the loop does."""
