"""``python -m parallel2d.train``: from the command line to a finished run.

A process that is not a rank composes the job, checks all that can be checked before a worker
exists, and starts the workers. A rank builds the parts (`assemble`) and runs the `Trainer`.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from parallel2d import launch
from parallel2d.config import Job, TrainConfig
from parallel2d.config.composition import compose, run_sweep
from parallel2d.errors import ConfigError
from parallel2d.files import for_terminal

if TYPE_CHECKING:
    from parallel2d.runtime import Runtime


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 done, 1 failed, 2 a configuration that cannot run, 130
    interrupted."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        identity = launch.find_rank()
        if identity is not None:
            return _run_rank(identity, words)
        composition = compose(words)
        if composition is None:
            run_sweep(words, _launch)
        elif composition.config.launch.node_range != (1, 1):
            _launch_node(composition.config, words)
        else:
            composition.start(_launch)
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
    return 0


def _launch(job: Job) -> None:
    """Checks the job as far as one process can, then runs it on local workers."""
    if job.config.launch.node_range != (1, 1):
        raise ConfigError(
            f"launch.nnodes={job.config.launch.nnodes} with -m: a sweep runs on one node, several "
            "nodes start one job"
        )
    launch.start_workers(job, _check(job.config, nodes=1), main)


def _launch_node(config: TrainConfig, words: Sequence[str]) -> None:
    """As `_launch`, for one of several nodes: each checks for itself, rank 0 of the job
    composes."""
    launch.start_node(config, words, _check(config, nodes=config.launch.node_range[1]), main)


def _check(config: TrainConfig, nodes: int) -> int:
    """The workers of a node, once the job was checked as far as one process can."""
    import torch

    from parallel2d.assemble import check
    from parallel2d.topology import Topology

    # ranks are forked from this process, and a fork has none of OpenMP's threads
    torch.set_num_threads(1)
    workers = launch.workers_per_node(config.launch)
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
        job = launch.agree_on_job(identity, store, words, composition)
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
        with launch.failures_told_once(identity, store):
            preempted = _run_trainer(job, runtime, store)
    launch.forget_run(identity)
    return settings.requeue_exit_code if preempted else 0


def _run_trainer(job: Job, runtime: Runtime, store: object) -> bool:
    """Trains to the end; returns whether the run was asked to stop before."""
    from parallel2d.assemble import build_trainer
    from parallel2d.launch import signals
    from parallel2d.launch.run_owner import RunClaim
    from parallel2d.metrics.out_of_memory import OutOfMemoryNote
    from parallel2d.metrics.watch import Watch
    from parallel2d.runtime import check_shared_run_dir, limit_waiting

    identity, settings, run_dir = runtime.identity, job.config.launch, job.run_dir
    hosts, history = runtime.topology.hosts, job.config.metrics.memory_history
    host = hosts[identity.rank]
    check_shared_run_dir(run_dir)
    loop = job.config.train
    if loop.certify_only or (loop.certify and not job.restarted):
        _certify(job, runtime)
    if loop.certify_only:
        return False
    claim = RunClaim(run_dir) if runtime.is_first else None
    with OutOfMemoryNote(identity.rank, host, run_dir, runtime.device, history=history) as note:
        trainer = build_trainer(job, runtime)
        trainer.stop_requested = signals.preemption_requested
        if claim is not None:
            trainer.before_writing = claim.check
        note.position = trainer.recorder.position
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
    return trainer.preempted


def _certify(job: Job, runtime: Runtime) -> None:
    """Writes a certificate to the run directory. Raises `ConfigError` on every rank if the layout
    does not compute what one process computes. Collective."""
    from parallel2d.certification import certify_job

    certificate = certify_job(job, runtime)
    if runtime.is_first:
        certificate.write(job.run_dir)
        print(certificate.table(), flush=True)
    if not certificate.passed:
        raise ConfigError(certificate.problems())


def _log_to(run_dir: str, identity: launch.RankIdentity) -> None:
    """Rank 0 keeps what it logs in ``train.log``; every rank speaks of errors. Anything else for
    people goes through the display."""
    logging.getLogger().handlers.clear()  # Hydra's, where this process composed
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
