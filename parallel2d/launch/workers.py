"""Starts ranks and waits for their end: `start_workers` on this machine alone, `start_node` as one
node of several.

Both return when the job has ended well. The exceptions of `parallel2d.launch.endings` and
`ConfigError` show whether it was stopped and has saved, failed, or could not have worked.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

from parallel2d.config import Job, LaunchConfig
from parallel2d.config.serialization import to_yaml
from parallel2d.launch.agreement import recorded_run_dir
from parallel2d.launch.endings import Preempted, StoppedBySignal, StoreLost, WorkersFailed
from parallel2d.launch.network_interface import GLOO, NCCL
from parallel2d.launch.restarts import Restarts
from parallel2d.rank_environment import CONFIG, LABEL, RECORDS, RUN_DIR, WORDS


def start_workers(job: Job, nproc: int) -> None:
    """Runs ``job`` on ``nproc`` fresh workers of this machine, which communicate over loopback
    alone, and waits for them.

    Raises `ConfigError` or `WorkersFailed` with the error of the rank that failed first,
    `Preempted` when asked to end and saved, and KeyboardInterrupt after Ctrl-C; all workers have
    ended then.
    """
    from parallel2d.launch.agent import Team, last_step, launcher_environment, run_team
    from parallel2d.launch.rendezvous import meet_alone

    settings = job.config.launch
    logs = os.path.join(job.run_dir, "logs")
    inherited = {
        CONFIG: to_yaml(job.config),
        RUN_DIR: job.run_dir,
        WORDS: json.dumps(job.overrides),
        RECORDS: job.records,
        LABEL: job.label,
    }
    with launcher_environment({**inherited, **_defaults(nproc, "lo")}) as folder:
        restarts = Restarts(restart_limit(settings), lambda: last_step(folder))
        team = Team((), nproc, settings, restarts, folder, logs)
        with contextlib.closing(meet_alone(folder)) as meeting:
            newest = functools.partial(_checkpoints, job.config.checkpoint.folder, job.run_dir)
            _told_to_end(lambda: run_team(team, meeting), settings, newest)


def start_node(
    config: Any, words: Sequence[str], nproc: int, main: str = "parallel2d.train:main"
) -> None:
    """Runs this node's ``nproc`` ranks of a job that several nodes run together, and waits for its
    end.

    ``config``: the `TrainConfig` that ``words`` compose to; the job's own is composed by its rank
    0. ``main``: what each rank calls with ``words`` ("package.module:function"). When the
    rendezvous store is lost, the ranks end. The launcher waits ``launch.rendezvous_timeout``
    seconds for the store, then the job goes on from its newest checkpoint. Raises as
    `start_workers` does.
    """
    from parallel2d.launch.agent import Team, last_step, launcher_environment, run_team
    from parallel2d.launch.rendezvous import meet

    settings: LaunchConfig = config.launch
    with contextlib.ExitStack() as stack:
        meeting = meet(settings)
        stack.callback(lambda: meeting.close())
        folder = stack.enter_context(launcher_environment(_defaults(nproc, meeting.interface.name)))
        restarts = Restarts(restart_limit(settings), lambda: last_step(folder))
        team = Team(tuple(words), nproc, settings, restarts, folder, main=main)
        where = "opened here" if meeting.server else "found"
        if settings.node_range != (1, 1):
            team.say(
                f"waiting for launch.nnodes={settings.nnodes} nodes at {meeting.endpoint} "
                f"({where}), over {meeting.interface.name}"
            )
        if settings.elastic:
            meeting.wait_for_all(settings)

        def run() -> None:
            nonlocal meeting
            while True:
                try:
                    return run_team(team, meeting)
                except StoreLost as lost:
                    if meeting.server or (pause := restarts.after_failure()) is None:
                        raise WorkersFailed(
                            f"the rendezvous store at {meeting.endpoint} does not answer: {lost}"
                        ) from None
                    team.say(
                        f"the rendezvous store at {meeting.endpoint} does not answer ({lost}); the "
                        "ranks have ended, waiting for it"
                    )
                    meeting.close()
                    time.sleep(pause + 1.0)
                    meeting = meet(settings)

        _told_to_end(
            run, settings, lambda: _checkpoints(config.checkpoint.folder, recorded_run_dir(folder))
        )


def restart_limit(settings: LaunchConfig) -> int:
    """``launch.max_restarts`` as a number: ``auto`` is 0 on one node, where a person is near, and 5
    on several."""
    if settings.max_restarts == "auto":
        return 0 if settings.node_range == (1, 1) else 5
    return int(settings.max_restarts)


def _told_to_end(
    run: Callable[[], None], settings: LaunchConfig, newest: Callable[[], str | None]
) -> None:
    """Calls ``run``. When this process gets a signal to end in the meantime, raises the exception
    for what came of it."""
    from torch.distributed.elastic.multiprocessing import SignalException

    # each has a level of its own, so that of the parent has no effect
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    before = newest()
    try:
        run()
    except SignalException as error:
        if error.sigval == signal.SIGINT:
            raise KeyboardInterrupt from None
        saved = newest()
        if saved != before:
            raise Preempted(f"told to end; saved {saved}", settings.requeue_exit_code) from None
        raise StoppedBySignal(f"stopped by {signal.Signals(error.sigval).name}") from None


def _checkpoints(folder: str | None, run_dir: str | None) -> str | None:
    """The newest checkpoint of a run, by name."""
    if folder is None and run_dir is None:
        return None
    try:
        names = os.listdir(folder or os.path.join(str(run_dir), "checkpoints"))
    except OSError:
        return None
    return max((name for name in names if name.startswith("step-")), default=None)


def _defaults(nproc: int, interface: str) -> dict[str, str]:
    """Variables that workers get unless they are set: threads, the interface that gloo and NCCL
    use, and no C++ stack of every connection that breaks, since a message reports it."""
    threads = str(max(1, (os.cpu_count() or 1) // nproc))
    wanted = {
        "OMP_NUM_THREADS": threads,
        GLOO: interface,
        NCCL: interface,
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    return {name: value for name, value in wanted.items() if not os.environ.get(name)}
