"""Starts ranks and waits until they end: `start_workers` for a job on one node, `start_node` on
each node of a job on several nodes.

Both functions return when the job has succeeded. Otherwise both functions raise `Preempted` after a
stop with a save, `WorkersFailed` after a failure, or `ConfigError` for an invalid configuration.
"""

from __future__ import annotations

import contextlib
import functools
import glob
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from parallel2d.base.config import Job, LaunchConfig
from parallel2d.base.errors import ConfigError
from parallel2d.base.exit_codes import INTERRUPTED
from parallel2d.base.launcher_environment import JOB
from parallel2d.base.store.secret import PUBLIC_SECRET, write_secret
from parallel2d.launching.failures import (
    Preempted,
    RankFailure,
    StoppedBySignal,
    StoreLost,
    WorkersFailed,
    read_error_file,
)
from parallel2d.launching.network_interface import GLOO, NCCL
from parallel2d.launching.processes import Signalled, signals_raised
from parallel2d.launching.rank_processes import start_rank
from parallel2d.launching.shared_job import folder_errors_explained, recorded_run_dir, write_job

if TYPE_CHECKING:
    from parallel2d.launching.agent import NodeWorkers


def start_workers(job: Job, nproc: int) -> None:
    """Run ``job`` on ``nproc`` new workers of this machine, which communicate only over loopback,
    and wait for them.

    All workers have ended when this returns or raises. Raises `ConfigError` or `WorkersFailed` with
    the error of the rank that failed first; `Preempted` if the ranks saved after a signal to stop
    or Ctrl-C; KeyboardInterrupt if they did not save after Ctrl-C.
    """
    from parallel2d.launching.agent import NodeWorkers, launcher_environment, run_node
    from parallel2d.launching.rendezvous import own_rendezvous

    settings, checkpoint = job.config.launch, job.config.checkpoint
    with launcher_environment(_defaults(nproc, "lo")) as folder:
        os.environ[JOB] = write_job(job, folder)
        logs = os.path.join(job.run_dir, "logs")
        workers = NodeWorkers((), nproc, settings, folder, logs, save=checkpoint.enabled)
        with (
            contextlib.closing(own_rendezvous(folder)) as rendezvous,
            _stop_explained(workers, checkpoint.folder, lambda: job.run_dir),
        ):
            run_node(workers, rendezvous)


def run_once(main: str, words: Sequence[str]) -> None:
    """Call ``main`` ("package.module:function") with ``words`` in one child process, and wait until
    it ends. The child is forked from the same server as ranks. Raises `ConfigError` or
    `WorkersFailed` with the error of the child."""
    with folder_errors_explained(), tempfile.TemporaryDirectory(prefix="parallel2d-") as folder:
        report = os.path.join(folder, "error.json")
        environment = {**os.environ, "TORCHELASTIC_ERROR_FILE": report}
        process = start_rank(main, words, environment, None, None)
        try:
            code = process.wait()
        finally:
            process.close(signal.SIGKILL)  # after an interrupt
        error = read_error_file(report)
    if error:
        raise (ConfigError if error.config_error else WorkersFailed)(error.text)
    if code:
        raise WorkersFailed(f"the check of the job: {RankFailure(0, code, None)}")


def start_node(
    config: Any, words: Sequence[str], nproc: int, main: str = "parallel2d.rank:rank_main"
) -> None:
    """Run this node's ``nproc`` ranks of a job with several nodes, and wait for its end.

    If a store outside of this process fails, the ranks end. The launcher waits up to
    ``launch.rendezvous_timeout`` seconds for the store, and then continues the job from its newest
    checkpoint.

    Args:
        config: the `TrainConfig` composed from ``words``, for this launcher. Rank 0 composes the
            configuration of the ranks.
        words: the arguments of ``main``.
        nproc: number of ranks on this node.
        main: the function ("package.module:function") that each rank calls.

    Raises the exceptions of `start_workers`.
    """
    from parallel2d.launching.agent import NodeWorkers, launcher_environment, run_node
    from parallel2d.launching.rendezvous import find_rendezvous

    settings: LaunchConfig = config.launch
    with contextlib.ExitStack() as stack:
        if settings.node_range == (1, 1) and settings.rdzv_endpoint is None:
            own = stack.enter_context(tempfile.TemporaryDirectory(prefix="parallel2d-"))
            settings.rdzv_endpoint, settings.secret_file = "127.0.0.1:0", f"{own}/secret"
            write_secret(settings.secret_file)
        rendezvous = find_rendezvous(settings)
        # A lambda, because ``rendezvous`` may be another object when the stack closes.
        stack.callback(lambda: rendezvous.close())
        interface, endpoint = rendezvous.interface.name, rendezvous.endpoint
        folder = stack.enter_context(launcher_environment(_defaults(nproc, interface)))
        save = config.checkpoint.enabled
        workers = NodeWorkers(words, nproc, settings, folder, main=main, save=save)
        where = "opened here" if rendezvous.server else "found"
        if settings.node_range != (1, 1):
            workers.log(
                f"waiting for launch.nnodes={settings.nnodes} nodes at {endpoint} ({where}), over "
                f"{interface}"
            )
            if rendezvous.secret == PUBLIC_SECRET:
                workers.log(
                    "warning: launch.insecure=true: any process that reaches this store "
                    "decides what the ranks run"
                )
        run_dir = functools.partial(recorded_run_dir, folder)
        stack.enter_context(_stop_explained(workers, config.checkpoint.folder, run_dir))
        while True:
            try:
                return run_node(workers, rendezvous)
            except StoreLost as lost:
                gone = f"the rendezvous store at {endpoint} does not answer ({lost})"
                pause = workers.restarts.after_failure()
                if rendezvous.server or pause is None:
                    if not workers.have_saved:
                        raise WorkersFailed(gone) from None
                    workers.log(gone)
                    raise Signalled(signal.SIGTERM) from None
                workers.log(f"{gone}; the ranks have ended, waiting for it")
                rendezvous.close()
                time.sleep(pause + 1.0)
                rendezvous = find_rendezvous(settings)


@contextlib.contextmanager
def _stop_explained(
    workers: NodeWorkers, folder: str | None, run_dir: Callable[[], str | None]
) -> Iterator[None]:
    """Convert `Signalled` to an exception that says whether the run was saved. ``folder`` has the
    checkpoints; if it is None, they are in the folder that ``run_dir()`` returns, which is known
    only after the job is composed."""
    try:
        with signals_raised():
            yield
    except Signalled as error:
        is_interrupt = error.number == signal.SIGINT
        newest = _newest_checkpoint(folder, run_dir())
        if workers.has_left or (workers.have_saved and newest):
            what = "interrupted" if is_interrupt else "asked to stop"
            code = INTERRUPTED if is_interrupt else workers.settings.requeue_exit_code
            kept = "the other replicas continue" if workers.has_left else f"saved {newest}"
            raise Preempted(f"{what}; {kept}", code) from None
        lost = _lost_steps(workers, newest)
        if is_interrupt:
            raise KeyboardInterrupt(f"interrupted {lost}; all workers have ended") from None
        raise StoppedBySignal(f"stopped by {error.number.name} {lost}") from None


def _lost_steps(workers: NodeWorkers, newest: str | None) -> str:
    step = workers.last_step()
    if step < 1:
        return "before the first step"
    if not workers.save:
        return f"in step {step}, and nothing is saved (checkpoint.enabled=false)"
    if newest is None:
        return f"in step {step}, before the first checkpoint: nothing is saved"
    return f"in step {step}: the steps after {newest} are lost"


def _newest_checkpoint(folder: str | None, run_dir: str | None) -> str | None:
    if run_dir is not None:
        folder = folder or os.path.join(run_dir, "checkpoints")
    # A folder that does not exist yet has no checkpoints.
    names = glob.glob("step-*", root_dir=folder) if folder else []
    return max(names, default=None)


def _defaults(nproc: int, interface: str) -> dict[str, str]:
    """Return default variables for workers: the number of threads, the interface of gloo and NCCL,
    and the log level of torch's C++ code. With this level, a broken connection prints no C++ stack;
    the launcher's message reports the failure."""
    wanted = {
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // nproc)),
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        **dict.fromkeys((GLOO, NCCL), interface),
    }
    defaults: dict[str, str] = {}
    for name, value in wanted.items():
        if not os.environ.get(name):
            defaults[name] = value
    return defaults
