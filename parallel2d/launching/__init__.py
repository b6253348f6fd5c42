"""Starts the ranks of a job: all ranks on this machine, or this node's share on several machines.
Start at `launcher.start_workers`.

A process that torchrun or srun started already is a rank; any other process starts ranks. With
every launcher, all ranks get one run directory and the same `Job`, which was composed once.
"""
