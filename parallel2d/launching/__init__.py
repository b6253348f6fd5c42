"""Starts the ranks of a job: all of them on this machine, or this node's share on several. Start at
`launcher.start_workers`.

A process that torchrun or srun started is a rank already; any other starts ranks. However they were
started, all ranks get the same `Job`, which was composed once, and one run directory.
"""
