"""``python -m parallel2d.train``: from the command line to a finished run.

This process composes the job, checks it, and starts the ranks, which run
`parallel2d.rank.rank_main`. Under torchrun and srun this process is a rank.
"""

from __future__ import annotations

import dataclasses
import importlib
import signal
import sys
from collections.abc import Sequence

from parallel2d.base import open_files
from parallel2d.base.config.composition import Composition, compose, to_yaml
from parallel2d.base.config.help_page import information, show
from parallel2d.base.config.job import Job, TrainConfig
from parallel2d.base.config.sweep import run_sweep
from parallel2d.base.errors import ConfigError
from parallel2d.base.files import for_terminal
from parallel2d.base.launcher_environment import find_rank
from parallel2d.base.topology import Topology
from parallel2d.launching.launcher import run_once, start_node, start_workers
from parallel2d.launching.processes import (
    keep_others_from_writing,
    open_standard_streams,
    workers_per_node,
)
from parallel2d.launching.rank_processes import start_server
from parallel2d.launching.run_command import exit_code_of
from parallel2d.rank import choose_layout, rank_main
from parallel2d.training.run_directory.end import note_failure, objective_missing, read_objective
from parallel2d.training.run_directory.start import discard_pending

_PURPOSE = (
    "Trains a model with hybrid 2-D parallelism: sharded inside a node, replicated across nodes. "
    "Without arguments it trains a small Llama on the source of Python's library, on this machine."
)


def main(
    arguments: Sequence[str] | None = None,
    program: str = "python -m parallel2d.train",
    purpose: str = _PURPOSE,
) -> int:
    """Run the job of the command line and return the exit code.

    Args:
        arguments: the command line; default: ``sys.argv``.
        program: name of the command, for ``--help``.
        purpose: description of the command, for ``--help``.

    Returns:
        0 done; 1 failed, or a planned job does not fit; 2 invalid configuration; 130 interrupted.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    open_standard_streams()
    keep_others_from_writing()
    return exit_code_of(
        lambda: _run(words, program, purpose), interrupted="interrupted; all workers have ended"
    )


def _run(words: list[str], program: str, purpose: str) -> int:
    identity = find_rank()
    answer = information(words, program, purpose)
    if answer is not None:
        if identity is None or identity.rank == 0:
            show(answer)
        return 0
    if identity is not None:
        return rank_main(words)
    composition = compose(words)
    if composition is None:
        run_sweep(words, _launch)
    elif composition.config.plan.dry_run:
        return _plan(composition)
    elif composition.config.launch.node_range != (1, 1):
        # Each node runs its own check, and rank 0 of the job composes.
        config = composition.config
        workers, nodes = workers_per_node(config.launch), config.launch.node_range[1]
        _prepare_launch(config, nodes, workers)
        _check(config, nodes, workers)
        start_node(config, words, workers)
    else:
        composition.start(_launch)
    return 0


def _plan(composition: Composition) -> int:
    """Print the cost of the job. Return 1 if the job does not fit."""
    import torch

    from parallel2d.instruments.planner.layout_cost import cost_of, planned_topology
    from parallel2d.instruments.planner.plan_text import shortage, summary
    from parallel2d.training.auto_precision import resolved_for_plan

    torch.set_num_threads(1)
    config = composition.config
    topology = planned_topology(config)
    nodes = len(topology.ranks_by_host)
    config = choose_layout(config, composition.words, nodes, topology.world_size, sys.stdout)
    config = resolved_for_plan(config)
    cost = cost_of(config)
    for line in summary(config, cost):
        print(for_terminal(line))
    problem = shortage(config, cost)
    if problem is None:
        return 0
    print(f"parallel2d: {problem}", file=sys.stderr)
    return 1


def _launch(job: Job) -> float | None:
    """Check the job and run it on local workers. Return the last ``train.objective``."""
    settings = job.config.launch
    try:
        if job.config.plan.dry_run:
            raise ConfigError(
                "plan.dry_run=true plans one job: use one value for each key, without -m"
            )
        if settings.node_range != (1, 1):
            raise ConfigError(
                f"launch.nnodes={settings.nnodes} with -m: a sweep runs on one node, several nodes "
                "start one job"
            )
        workers = workers_per_node(settings)
        _prepare_launch(job.config, 1, workers)
        config = choose_layout(job.config, job.overrides, nodes=1, ranks=workers)
        _check(config, 1, workers)
        start_workers(dataclasses.replace(job, config=config), workers)
    except (Exception, KeyboardInterrupt) as error:
        note_failure(job.run_dir, str(error) or "interrupted")
        raise
    finally:
        discard_pending(job)
    value = read_objective(job.run_dir)
    if value is None and job.is_judged:
        raise ConfigError(objective_missing(job.config.train.objective, job.run_dir))
    return value


def _prepare_launch(config: TrainConfig, nodes: int, workers: int) -> None:
    """Start the server process that forks ranks, and import the agent in the meantime.

    An impossible mesh raises `ConfigError` before the imports, so that the error appears early.
    SIGINT is blocked during the imports: some libraries ignore an interrupt during their import, or
    stay half imported.
    """
    open_files.prepare_rank(nodes * workers)
    open_files.prepare_launcher(workers)
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        from parallel2d.parallel.mesh_sizes import resolve_mesh

        if not config.is_automatic:
            resolve_mesh(config, Topology.equal_hosts(nodes, workers))
        start_server()
        importlib.import_module("parallel2d.launching.agent")
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def _check(config: TrainConfig, nodes: int, workers: int) -> None:
    """Run all checks of the job that one process can run, in a fork of the server process.

    The server process has already imported the modules that the check needs.
    """
    if not config.is_automatic:  # otherwise rank 0 chooses a layout and checks it
        job = [to_yaml(config), str(nodes), str(workers)]
        run_once("parallel2d.rank:check_main", job)


if __name__ == "__main__":
    sys.exit(main())
