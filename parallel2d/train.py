"""``python -m parallel2d.train``: from the command line to a finished run.

A process that is not a rank composes the job, checks all that can be checked before a worker exists, and starts the workers. A rank
builds the parts, in the order in which the rooms stand, and hands them to the `Trainer`.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence

from parallel2d import launch
from parallel2d.compose import Job, run
from parallel2d.config import ConfigError


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 done, 1 failed, 2 a configuration that cannot run, 130 interrupted."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        place = launch.find_place()
        if place is None:
            run(words, _launch)
        else:
            return _run_rank(place, words)
    except ConfigError as error:
        print(f"parallel2d: {error}", file=sys.stderr)
        return 2
    except launch.Preempted as preempted:
        print(f"parallel2d: {preempted}", file=sys.stderr)
        return preempted.exit_code
    except launch.WorkersFailed as error:
        print(f"parallel2d: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("parallel2d: interrupted; all workers have ended", file=sys.stderr)
        return 130
    return 0


def _launch(job: Job) -> None:
    """Checks the job as far as one process can, then runs it on local workers."""
    from parallel2d.assemble import check
    from parallel2d.mesh import Topology

    workers = launch.workers_per_node(job.config.launch)
    check(job.config, Topology.single_host(workers))
    launch.start_workers(job, workers)


def _run_rank(place: launch.Place, words: Sequence[str]) -> int:
    if place.launcher == "self":
        launch.end_with_parent()
    with launch.failures_told_once(place, None):
        from parallel2d.runtime import connect

        store = connect(place)
    with launch.failures_told_once(place, store):
        job = launch.agree_on_job(place, store, words)
        return 0 if job is None else _train(job, place, store)


def _train(job: Job, place: launch.Place, store: object) -> int:
    from parallel2d import signals
    from parallel2d.assemble import build_trainer
    from parallel2d.metrics.watch import Watch, limit_waiting
    from parallel2d.runtime import process_group, seed_everything

    signals.listen()
    _log_to(job.run_dir, place)
    settings = job.config.launch
    seed_everything(job.config.train.seed + place.rank, job.config.train.deterministic)
    with process_group(place, store, timeout_s=settings.timeout, host_id=settings.host_id) as runtime:
        with launch.failures_told_once(place, store):  # inside, so that nothing waits for peers on the way out
            trainer = build_trainer(job, runtime)
            limit_waiting(trainer.mesh, settings.timeout)
            hosts = runtime.topology.hosts
            with Watch(store, place.rank, hosts, job.run_dir, settings.timeout, trainer.recorder.position) as watch:
                try:
                    trainer.run()
                except RuntimeError as error:
                    if "imed out" in str(error) or "imeout" in str(error):
                        error.add_note(watch.explain())
                    raise
            trainer.recorder.close()
    return settings.requeue_exit_code if trainer.preempted else 0


def _log_to(run_dir: str, place: launch.Place) -> None:
    """Rank 0 keeps what it logs in ``train.log``; other ranks only speak of what is wrong."""
    handler: logging.Handler
    if place.rank == 0:
        handler = logging.FileHandler(os.path.join(run_dir, "train.log"))
        handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
        logging.getLogger("parallel2d").setLevel(logging.INFO)
    else:
        handler = logging.StreamHandler(sys.stderr)
        handler.setLevel(logging.WARNING)
    logging.getLogger().addHandler(handler)


if __name__ == "__main__":
    sys.exit(main())
