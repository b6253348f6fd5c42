"""Measures a cluster as training uses it, with all ranks at once, and writes the cluster file that
the planner reads. Start at `parallel2d.calibration.measurement.calibrate`."""
