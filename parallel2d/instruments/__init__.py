"""Instruments for a job or a run: planner, parity check, preflight check, report."""
