"""One rank of a job, from rendezvous to exit code: `rank_main`.

The launcher of parallel2d forks processes that call `rank_main`. torchrun and srun start the train
command, which calls `rank_main`. The ranks receive the same job, build its parts and run the
`Trainer`.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from parallel2d.base import files
from parallel2d.base.config.composition import compose, from_yaml
from parallel2d.base.config.job import Job, TrainConfig
from parallel2d.base.errors import ConfigError
from parallel2d.base.launcher_environment import INCARNATION, RankIdentity, find_rank
from parallel2d.base.topology import Topology
from parallel2d.launching.failures import failures_reported_once, note_waiting
from parallel2d.launching.processes import end_with_parent
from parallel2d.launching.rank_processes import log_for_all_ranks
from parallel2d.launching.shared_job import forget_run, recording_steps, share_job
from parallel2d.training.run_directory.end import summarize
from parallel2d.training.run_directory.start import discard_pending, read_segments

log = logging.getLogger(__name__)

if TYPE_CHECKING:
    from parallel2d.base.runtime import Runtime
    from parallel2d.instruments.parity_check.parity_report import ParityReport
    from parallel2d.training.metrics.late_ranks import Position


def rank_main(words: Sequence[str]) -> int:
    """Run this rank of the job. Return the exit code.

    ``words`` are the command-line arguments of the job; they are empty if the launcher has composed
    the job. The exit code is 0 if the job is done, and ``launch.requeue_exit_code`` if the run was
    asked to stop and has saved. After an exception the process exits with code 1; one rank or the
    launcher reports the cause.
    """
    identity = find_rank()
    assert identity is not None, "launchers set the variables of a rank"
    composition = None
    if identity.launcher == "torchrun":
        end_with_parent()
    with failures_reported_once(identity, None):
        from parallel2d.base.runtime import connect

        # composed early, because the configuration has the path of the secret
        if identity.launcher == "srun":
            composition = compose(words)
        store = connect(identity, composition.config.launch if composition else None)
    with failures_reported_once(identity, store):
        job = share_job(identity, store, words, composition, _choose_size)
        if job is None:
            return 0
        if job.config.plan.dry_run:
            raise ConfigError(
                "plan.dry_run=true plans in one process: start it without torchrun or srun"
            )
        return _run_job(job, identity, store)


def check_main(words: Sequence[str]) -> int:
    """Check a job in one process before its ranks start. The process reports errors as a rank does.

    ``words``: the configuration as YAML, the number of nodes, and the number of workers per node.
    """
    text, nodes, workers = words
    with failures_reported_once(RankIdentity(0, 1, 0, 0, 1, "self"), None):
        from parallel2d.training.assemble import check
        from parallel2d.training.auto_precision import resolved_here

        check(resolved_here(from_yaml(text)), Topology.equal_hosts(int(nodes), int(workers)))
    return 0


def choose_layout(
    config: TrainConfig, words: Sequence[str], nodes: int, ranks: int, stream: TextIO | None = None
) -> TrainConfig:
    """Return ``config`` with the planner's layout for these ranks, if the layout is automatic.

    The reasons for the choice are printed on ``stream`` (default: standard error).
    """
    if not config.is_automatic:
        return config
    # Imported here because most jobs do not need the planner.
    from parallel2d.instruments.planner.automatic import with_chosen_layout

    config, lines = with_chosen_layout(config, words, nodes, ranks)
    for line in lines:
        print(files.for_terminal(line), file=stream or sys.stderr, flush=True)
    return config


def _choose_size(
    config: TrainConfig, words: Sequence[str], identity: RankIdentity, sizes: Sequence[int]
) -> tuple[TrainConfig, Mapping[str, int] | None]:
    """Return ``config`` with a layout, and the mesh sizes over all nodes, or None.

    If the job can train without some nodes, the layout is for the ranks of all nodes, and the
    replicas of missing nodes count as failed. Otherwise the layout is for the ranks of the live
    nodes, and the mesh sizes are None. ``sizes``: number of ranks of each live node.
    """
    nodes = config.launch.node_range[1]
    if identity.launcher == "nodes" and len(set(sizes)) == 1:
        whole = choose_layout(config, words, nodes, nodes * sizes[0])
        mesh_sizes = _sizes_with_missing_nodes(whole, identity, nodes, sizes[0])
        if mesh_sizes is not None:
            return whole, mesh_sizes
        config = whole if nodes == len(sizes) else config
    return choose_layout(config, words, identity.nodes, identity.world_size), None


def _sizes_with_missing_nodes(
    config: TrainConfig, identity: RankIdentity, nodes: int, local: int
) -> Mapping[str, int] | None:
    """Return the mesh sizes over all nodes if replicas may fail and no replica spans two nodes.

    Otherwise None.
    """
    from parallel2d.launching import replica_loss
    from parallel2d.parallel.mesh_sizes import resolve_mesh

    needs_all = config.strategy.placement.splits_updates
    if needs_all or not replica_loss.choose(config, identity).continues:
        return None
    shape = resolve_mesh(config, Topology.equal_hosts(nodes, local))
    divides = shape.replicate > 1 and shape.replicate % nodes == 0
    return shape.sizes if divides else None


def _run_job(job: Job, identity: RankIdentity, store: Any) -> int:
    from parallel2d.base.exchange import check_shared
    from parallel2d.base.runtime import process_group
    from parallel2d.launching import rank_signals, replica_loss
    from parallel2d.training.auto_precision import resolved_on_ranks

    rank_signals.listen()
    _log_to(job.run_dir, identity)
    settings = job.config.launch
    policy = replica_loss.choose(job.config, identity)
    if policy.reason and identity.rank == 0:
        log.warning("%s", policy.reason)
    together = identity.world_size if policy.continues else None
    if job.sizes is not None:
        world_size = math.prod(job.sizes.values())
        identity = dataclasses.replace(identity, world_size=world_size)
    with process_group(
        identity,
        store,
        timeout_s=settings.timeout,
        host_id=settings.host_id,
        first_timeout_s=settings.longest_wait,
        together=together,
        replica_backend=policy.backend,
    ) as runtime:
        # Called inside the process group, so that this rank does not wait for peers when it exits.
        with failures_reported_once(identity, store, job.run_dir):
            try:
                check_shared(job.run_dir)
                job = dataclasses.replace(job, config=resolved_on_ranks(job.config))
                report = _certify(job, runtime)
                stopped = False
                if not job.config.train.certify_only:
                    stopped = _train(job, runtime, store, report)
            except ConfigError:
                if runtime.is_first:
                    discard_pending(job)
                raise
    forget_run(identity)
    return settings.requeue_exit_code if stopped else 0


def _certify(job: Job, runtime: Runtime) -> ParityReport | None:
    """Run the parity check of the job's layout, if it is requested. Collective.

    Returns the report; None if no check is requested. If no training follows, this function also
    writes the report. Raises `ConfigError` if the results of the layout differ from the reference
    run.
    """
    loop = job.config.train
    if not loop.certify_only and (not loop.certify or job.restarted):
        return None
    from parallel2d.instruments.parity_check.training_job import certify_job

    report = certify_job(job, runtime)
    passed = report.passed
    if runtime.is_first:
        print(report.table(), flush=True)
        # Do not replace the report of an earlier start of this run that has trained.
        is_kept = not passed and read_segments(job.run_dir)
        if loop.certify_only or not passed:
            report.write(os.path.join(job.run_dir, "refused" if is_kept else ""))
    if not passed:
        raise ConfigError(report.problems())
    return report


def _train(job: Job, runtime: Runtime, store: Any, report: ParityReport | None) -> bool:
    """Train until the run ends. Return True if the run was preempted. Raises `ConfigError` if the
    run ended because a later start has taken over its run directory."""
    from parallel2d.base.device import attention_kernels, use_tf32
    from parallel2d.base.runtime import limit_waiting
    from parallel2d.launching import rank_signals
    from parallel2d.training.assemble import build_trainer
    from parallel2d.training.loss.embedding_errors import embedding_errors_named
    from parallel2d.training.metrics.late_ranks import HeartbeatMonitor
    from parallel2d.training.metrics.out_of_memory import out_of_memory_named
    from parallel2d.training.trainer_parts import LoopCallbacks

    identity, settings, run_dir = runtime.identity, job.config.launch, job.run_dir
    hosts, history = runtime.topology.hosts, job.config.metrics.memory_history
    host = hosts[identity.rank]
    if report is not None:
        job = dataclasses.replace(job, certified=True)
    kind = runtime.device.type
    if job.config.precision.tf32:
        use_tf32(kind)
    named = out_of_memory_named(identity.rank, host, run_dir, runtime.device, history=history)
    with named, attention_kernels(kind):
        trainer = build_trainer(job, runtime)
        if report is not None and runtime.is_first:
            report.write(run_dir)
        trains = trainer.has_steps()
        recorded = recording_steps(identity, trainer.recorder.position)

        def position() -> Position:
            trainer.ownership.send_heartbeat()
            return recorded()

        first = settings.longest_wait
        with HeartbeatMonitor(
            store, identity.rank, hosts, run_dir, first, position, note_waiting
        ) as monitor:

            def first_step_done() -> None:
                limit_waiting(settings.timeout)
                monitor.limit(settings.timeout)
                if job.config.checkpoint.enabled:  # from now on Ctrl-C saves a checkpoint
                    rank_signals.listen_to_interrupts()

            def take_over() -> None:
                log_for_all_ranks()
                _keep_log(run_dir)

            callbacks = LoopCallbacks(rank_signals.preemption_requested, first_step_done, take_over)
            try:
                with embedding_errors_named(trainer.model):
                    trainer.run(callbacks)
            except RuntimeError as error:
                if "imed out" in str(error) or "imeout" in str(error):
                    error.add_note(monitor.explain())
                raise
        trainer.recorder.close()
        if not trains:
            step, steps = trainer.progress.step, trainer.config.train.steps
            trainer.recorder.log(
                f"nothing to train: the run is at step {step}, train.steps={steps}"
            )
        elif runtime.is_first and not trainer.gives_way:
            lines = summarize(
                # The trainer's configuration has the number of steps of train.epochs.
                dataclasses.replace(job, config=trainer.config),
                stopped=trainer.preempted,
                checkpoint=trainer.checkpointer.newest(),
                best=trainer.checkpointer.best(),
                reason=trainer.stopped,
                launcher=identity.launcher,
            )
            for line in lines:
                trainer.recorder.log(line)
        trainer.ownership.release()
        if trainer.gives_way:
            raise ConfigError(
                f"another start of this run takes over {run_dir}: this one has ended; its newest "
                f"checkpoint is {trainer.checkpointer.newest()}"
            )
    return trainer.preempted


class _Escaped(logging.Formatter):
    """Formatter that escapes control characters: log files are printed on terminals."""

    def format(self, record: logging.LogRecord) -> str:
        return files.for_terminal(super().format(record))


def _log_to(run_dir: str, identity: RankIdentity) -> None:
    """Log messages of rank 0 to ``train.log``, and errors of every rank to standard error.

    All other output goes through the display.
    """
    # removes the handlers of Hydra, if this process has composed the job
    logging.getLogger().handlers.clear()
    logging.raiseExceptions = False  # a full disk must not print a traceback per log line
    errors = logging.StreamHandler(sys.stderr)
    errors.setLevel(logging.ERROR)
    logging.getLogger().addHandler(errors)
    if identity.rank == 0 and os.environ.get(INCARNATION, "0") == "0":
        _keep_log(run_dir)


def _keep_log(run_dir: str) -> None:
    path = os.path.join(run_dir, "train.log")
    kept = logging.StreamHandler(open(path, "a", opener=files.regular))  # noqa: SIM115
    kept.setFormatter(_Escaped("%(asctime)s %(message)s", "%H:%M:%S"))
    logging.getLogger("parallel2d").setLevel(logging.INFO)
    logging.getLogger().addHandler(kept)
