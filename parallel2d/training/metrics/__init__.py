"""Measures a run and writes the results. Nothing here changes the behaviour of the loop."""
