"""``python -m parallel2d.train``: from the command line to a finished run.

A process that is not a rank composes the job, checks all that can be checked before a worker
exists, and starts the workers. A rank builds the parts (`assemble`) and runs the `Trainer`.
"""

from __future__ import annotations

import dataclasses
import importlib
import logging
import os
import signal
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, TextIO

from parallel2d import launch
from parallel2d.config import Job, TrainConfig
from parallel2d.config.composition import Composition, compose, run_sweep
from parallel2d.config.information import information, show
from parallel2d.errors import ConfigError
from parallel2d.files import for_terminal
from parallel2d.run_directory import (
    discard_pending,
    note_failure,
    objective_missing,
    read_objective,
    read_segments,
    summarize,
)

if TYPE_CHECKING:
    from parallel2d.certification import Certificate
    from parallel2d.runtime import Runtime
    from parallel2d.trainer import Trainer

log = logging.getLogger("parallel2d.train")  # __main__ when it is the command


_PURPOSE = (
    "Trains a model with hybrid 2-D parallelism: sharded inside a node, replicated across nodes. "
    "Without words it trains a small Llama on the source of Python's library, on this machine."
)


def main(
    arguments: Sequence[str] | None = None,
    program: str = "python -m parallel2d.train",
    purpose: str = _PURPOSE,
) -> int:
    """Runs the job that the words describe. ``program`` and ``purpose``: how the command was called
    and what it does, for ``--help``.

    Returns the exit code: 0 done, 1 failed or planned and too large, 2 a configuration
    that cannot run, 130 interrupted."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    launch.open_standard_streams()
    try:
        return _run(words, program, purpose)
    except ConfigError as error:
        print(f"parallel2d: {for_terminal(error)}", file=sys.stderr)
        return 2
    except launch.Preempted as preempted:
        print(f"parallel2d: {for_terminal(preempted)}", file=sys.stderr)
        return preempted.exit_code
    except launch.WorkersFailed as error:
        print(f"parallel2d: {for_terminal(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("parallel2d: interrupted; all workers have ended", file=sys.stderr)
        return 130


def _run(words: list[str], program: str, purpose: str) -> int:
    """Does what the words ask for: answers, runs this rank, or starts ranks."""
    identity = launch.find_rank()
    answer = information(words, program, purpose)
    if answer is not None:
        if identity is None or identity.rank == 0:
            show(answer)
        return 0
    if identity is not None:
        return _run_rank(identity, words)
    composition = compose(words)
    if composition is None:
        run_sweep(words, _launch)
    elif composition.config.plan.dry_run:
        return _plan(composition)
    elif composition.config.launch.node_range != (1, 1):
        _launch_node(composition.config, words)
    else:
        composition.start(_launch)
    return 0


def _plan(composition: Composition) -> int:
    """Prints what the job would cost; 1 where it does not fit."""
    import torch

    from parallel2d.planner.cost_summary import shortage, summary
    from parallel2d.planner.layout_cost import cost_of
    from parallel2d.planner.machines import planned_topology

    torch.set_num_threads(1)
    config = composition.config
    topology = planned_topology(config)
    nodes = len(topology.ranks_by_host)
    config = _settled(config, composition.words, nodes, topology.world_size, sys.stdout)
    cost = cost_of(config)
    for line in summary(config, cost):
        print(for_terminal(line))
    problem = shortage(config, cost)
    if problem is None:
        return 0
    print(f"parallel2d: {problem}", file=sys.stderr)
    return 1


def _launch(job: Job) -> float | None:
    """Checks the job as far as one process can, then runs it on local workers. Returns the last
    value of ``train.objective``."""
    try:
        _launch_locally(job)
    except (Exception, KeyboardInterrupt) as error:
        text = "interrupted" if isinstance(error, KeyboardInterrupt) else str(error)
        note_failure(job.run_dir, text)
        raise
    finally:
        discard_pending(job)
    value = read_objective(job.run_dir)
    if value is None and job.is_judged:
        raise ConfigError(objective_missing(job.config.train.objective, job.run_dir))
    return value


def _launch_locally(job: Job) -> None:
    if job.config.plan.dry_run:
        raise ConfigError(
            "plan.dry_run=true plans one job: give one value for each key, without -m"
        )
    if job.config.launch.node_range != (1, 1):
        raise ConfigError(
            f"launch.nnodes={job.config.launch.nnodes} with -m: a sweep runs on one node, several "
            "nodes start one job"
        )
    _prepare_launch()
    workers = launch.workers_per_node(job.config.launch)
    config = _settled(job.config, job.overrides, nodes=1, ranks=workers)
    job = dataclasses.replace(job, config=config)
    launch.start_workers(job, _check(job.config, nodes=1))


def _settled(
    config: TrainConfig,
    words: Sequence[str],
    nodes: int,
    ranks: int,
    stream: TextIO | None = None,
) -> TrainConfig:
    """``config`` with the layout that the planner chooses for these ranks, where it is to. Says
    why, on ``stream`` (default: standard error, as a run does)."""
    if not config.is_automatic:
        return config
    # Imported here because most jobs need none of it.
    from parallel2d.planner.automatic import with_chosen_layout

    config, lines = with_chosen_layout(config, words, nodes, ranks)
    for line in lines:
        print(for_terminal(line), file=stream or sys.stderr, flush=True)
    return config


def _launch_node(config: TrainConfig, words: Sequence[str]) -> None:
    """As `_launch`, for one of several nodes: each checks for itself, rank 0 of the job
    composes."""
    _prepare_launch()
    launch.start_node(config, words, _check(config, nodes=config.launch.node_range[1]))


def _prepare_launch() -> None:
    """Starts the process that ranks are forked from, and imports what the check needs meanwhile.
    Ctrl-C waits for the imports: some libraries lose an interrupt there, or stay half imported."""
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        launch.start_server()
        importlib.import_module("parallel2d.assemble")
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def _check(config: TrainConfig, nodes: int) -> int:
    """The workers of a node, once the job was checked as far as one process can."""

    from parallel2d.assemble import check
    from parallel2d.topology import Topology

    workers = launch.workers_per_node(config.launch)
    if config.is_automatic:  # rank 0 of the job chooses a layout, which is checked there
        return workers
    if nodes == 1:
        topology = Topology.single_host(workers)
    else:
        topology = Topology.equal_hosts(nodes, workers)
    check(config, topology)
    return workers


def _run_rank(identity: launch.RankIdentity, words: Sequence[str]) -> int:
    composition = None
    if identity.launcher != "srun":
        launch.end_with_parent()
    with launch.failures_told_once(identity, None):
        from parallel2d.runtime import connect

        if identity.launcher == "srun":  # the configuration says where the secret is
            composition = compose(words)
        store = connect(identity, composition.config.launch if composition else None)
    with launch.failures_told_once(identity, store):
        job = launch.agree_on_job(identity, store, words, composition, _settled)
        if job is not None and job.config.plan.dry_run:
            raise ConfigError(
                "plan.dry_run=true plans in one process: start it without torchrun or srun"
            )
        return 0 if job is None else _train(job, identity, store)


def _train(job: Job, identity: launch.RankIdentity, store: object) -> int:
    from parallel2d.launch import signals
    from parallel2d.runtime import process_group

    signals.listen()
    _log_to(job.run_dir, identity)
    settings = job.config.launch
    with process_group(
        identity,
        store,
        timeout_s=settings.timeout,
        host_id=settings.host_id,
        first_timeout_s=settings.longest_wait,
    ) as runtime:
        # inside, so that nothing waits for peers on the way out
        with launch.failures_told_once(identity, store, job.run_dir):
            try:
                preempted = _run_trainer(job, runtime, store)
            except ConfigError:
                if runtime.is_first:
                    discard_pending(job)
                raise
    launch.forget_run(identity)
    return settings.requeue_exit_code if preempted else 0


def _run_trainer(job: Job, runtime: Runtime, store: object) -> bool:
    """Trains to the end; returns whether the run was asked to stop before."""
    from parallel2d.assemble import build_trainer
    from parallel2d.launch import signals
    from parallel2d.metrics.out_of_memory import out_of_memory_named
    from parallel2d.metrics.watch import Watch
    from parallel2d.runtime import check_shared_run_dir, limit_waiting

    identity, settings, run_dir = runtime.identity, job.config.launch, job.run_dir
    hosts, history = runtime.topology.hosts, job.config.metrics.memory_history
    host = hosts[identity.rank]
    check_shared_run_dir(run_dir)
    loop = job.config.train
    certificate = None
    if loop.certify_only or (loop.certify and not job.restarted):
        certificate = _certify(job, runtime)
        job = dataclasses.replace(job, certified=True)
    if loop.certify_only:
        return False
    with out_of_memory_named(identity.rank, host, run_dir, runtime.device, history=history):
        trainer = build_trainer(job, runtime)
        if certificate is not None and runtime.is_first:
            certificate.write(run_dir)
        trainer.stop_requested = signals.preemption_requested
        position = launch.telling_progress(identity, trainer.recorder.position)
        first = settings.longest_wait
        with Watch(store, identity.rank, hosts, run_dir, first, position) as watch:

            def tighten(watch: Watch = watch) -> None:
                limit_waiting(settings.timeout)
                watch.limit(settings.timeout)

            trainer.after_first_step = tighten
            try:
                trainer.run()
            except RuntimeError as error:
                if "imed out" in str(error) or "imeout" in str(error):
                    error.add_note(watch.explain())
                raise
        trainer.recorder.close()
        if runtime.is_first:
            _conclude(job, trainer, identity.launcher)
    return trainer.preempted


def _conclude(job: Job, trainer: Trainer, launcher: str) -> None:
    """Says how the run ended, and keeps it in ``summary.json``. Rank 0."""
    checkpointer = trainer.checkpointer
    lines = summarize(
        dataclasses.replace(job, config=trainer.config),  # steps of train.epochs are known there
        stopped=trainer.preempted,
        checkpoint=checkpointer.newest(),
        best=checkpointer.best(),
        reason=trainer.stopped,
        launcher=launcher,
    )
    for line in lines:
        trainer.recorder.say(line)


def _certify(job: Job, runtime: Runtime) -> Certificate:
    """Raises `ConfigError` on every rank if the layout does not compute what one process computes.
    Collective. Writes the certificate where no training follows."""
    from parallel2d.certification import certify_job

    certificate = certify_job(job, runtime)
    if runtime.is_first:
        print(certificate.table(), flush=True)
        if not certificate.passed and read_segments(job.run_dir):
            # Not in the place of the certificate of a start that has trained.
            certificate.write(os.path.join(job.run_dir, "refused"))
        elif job.config.train.certify_only or not certificate.passed:
            certificate.write(job.run_dir)
    if not certificate.passed:
        raise ConfigError(certificate.problems())
    return certificate


def _log_to(run_dir: str, identity: launch.RankIdentity) -> None:
    """Rank 0 keeps what it logs in ``train.log``; every rank speaks of errors. Anything else for
    people goes through the display."""
    logging.getLogger().handlers.clear()  # Hydra's, where this process composed
    logging.raiseExceptions = False  # a line that a full disk refuses is no traceback
    errors = logging.StreamHandler(sys.stderr)
    errors.setLevel(logging.ERROR)
    logging.getLogger().addHandler(errors)
    if identity.rank == 0:
        kept = logging.FileHandler(os.path.join(run_dir, "train.log"))
        kept.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
        logging.getLogger("parallel2d").setLevel(logging.INFO)
        logging.getLogger().addHandler(kept)


if __name__ == "__main__":
    sys.exit(main())
