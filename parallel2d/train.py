"""``python -m parallel2d.train``: from the command line to a finished run.

A process that is not a rank composes the job, checks all that can be checked before a worker
exists, and starts the workers. A rank builds the parts, in the order in which the rooms stand, and
hands them to the `Trainer`.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence

from parallel2d import launch
from parallel2d.compose import Job, preview, run
from parallel2d.config import ConfigError, TrainConfig
from parallel2d.files import for_terminal


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 done, 1 failed, 2 a configuration that cannot run, 130
    interrupted."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        place = launch.find_place()
        if place is not None:
            return _run_rank(place, words)
        config = preview(words)
        if config is not None and config.launch.node_range != (1, 1):
            _launch_node(config, words)
        else:
            run(words, _launch)
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
    from parallel2d.mesh import Topology

    # ranks are forked from this process, and a fork has none of OpenMP's threads
    torch.set_num_threads(1)
    workers = launch.workers_per_node(config.launch)
    check(
        config,
        Topology.single_host(workers) if nodes == 1 else Topology.equal_hosts(nodes, workers),
    )
    return workers


def _run_rank(place: launch.Place, words: Sequence[str]) -> int:
    if place.launcher != "srun":
        launch.end_with_parent()
    with launch.failures_told_once(place, None):
        from parallel2d.runtime import connect

        config = preview(words) if place.launcher == "srun" else None  # it says where the secret is
        store = connect(place, config.launch if config else None)
    with launch.failures_told_once(place, store):
        job = launch.agree_on_job(place, store, words)
        return 0 if job is None else _train(job, place, store)


def _train(job: Job, place: launch.Place, store: object) -> int:
    from parallel2d import signals
    from parallel2d.assemble import build_trainer
    from parallel2d.metrics.memory import OutOfMemoryNote
    from parallel2d.metrics.watch import Watch
    from parallel2d.runtime import limit_waiting, process_group, seed_everything

    signals.listen()
    _log_to(job.run_dir, place)
    settings = job.config.launch
    seed_everything(job.config.train.seed + place.rank, job.config.train.deterministic)
    first = settings.longest_wait
    with process_group(
        place, store, timeout_s=settings.timeout, host_id=settings.host_id, first_timeout_s=first
    ) as runtime:
        # inside, so that nothing waits for peers on the way out
        with launch.failures_told_once(place, store):
            hosts, history = runtime.topology.hosts, job.config.metrics.memory_history
            with OutOfMemoryNote(
                place.rank, hosts[place.rank], job.run_dir, runtime.device, history=history
            ) as note:
                trainer = build_trainer(job, runtime)
                note.position = trainer.recorder.position
                position = launch.telling_progress(place, trainer.recorder.position)
                with Watch(store, place.rank, hosts, job.run_dir, first, position) as watch:

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
    launch.forget_run(place)
    return settings.requeue_exit_code if trainer.preempted else 0


def _log_to(run_dir: str, place: launch.Place) -> None:
    """Rank 0 keeps what it logs in ``train.log``; every rank speaks of errors. Anything else for
    people goes through the display."""
    logging.getLogger().handlers.clear()  # Hydra's, where this process composed
    errors = logging.StreamHandler(sys.stderr)
    errors.setLevel(logging.ERROR)
    logging.getLogger().addHandler(errors)
    if place.rank == 0:
        kept = logging.FileHandler(os.path.join(run_dir, "train.log"))
        kept.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
        logging.getLogger("parallel2d").setLevel(logging.INFO)
        logging.getLogger().addHandler(kept)


if __name__ == "__main__":
    sys.exit(main())
