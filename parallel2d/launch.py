"""Who is a rank, and how ranks come to be.

A process that torchrun or srun started is a rank already; anything else starts its own local workers with torch's elastic agent.
The environment flows in; out come a `Place` (which rank this is) or running workers. Both ways end in the same `Job` on every
rank: composed once, one run directory.

[Note: one run directory] Only one process composes: the parent of self-launched workers, or rank 0 under torchrun, which
publishes configuration and directory through the rendezvous store. A worker that its agent restarts must find the directory of its first
incarnation: each node's first rank leaves a small record named after the agent process, and rank 0 asks all nodes for theirs.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import math
import os
import signal
import sys
import tempfile
import time
import traceback
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from parallel2d import compose
from parallel2d.config import ConfigError, LaunchConfig

_CONFIG, _RUN_DIR = "PARALLEL2D_CONFIG", "PARALLEL2D_RUN_DIR"  # set by the parent for the workers it starts
_FIRST_SPECIAL_STEP = 0xFFFFFFF0  # Slurm step ids from here on are shells (batch, interactive, extern), not srun steps
CPU_WORKERS = 4  # nproc_per_node=auto on a machine without accelerators


@dataclass(frozen=True)
class Place:
    """Which rank this process is. ``launcher``: ``self``, ``torchrun`` or ``srun``."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node: int
    nodes: int
    launcher: str


def find_place(environment: os._Environ[str] | dict[str, str] | None = None) -> Place | None:
    """The `Place` that the environment gives this process, or None when it is not a rank.

    torchrun: its variables. srun: those of a step with several tasks; the shell of ``salloc`` or ``srun --pty`` is not a rank.
    For srun the variables that torch needs are derived and set. Raises `ConfigError` for an incomplete set.
    """
    env = os.environ if environment is None else environment
    if "RANK" in env and "WORLD_SIZE" in env:
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in env]
        if missing:
            raise ConfigError(f"RANK and WORLD_SIZE are set but {' and '.join(missing)} not: start with torchrun, or unset them")
        launcher = "self" if _CONFIG in env else "torchrun"
    elif _is_srun_task(env):
        _set_from_slurm(env)
        launcher = "srun"
    else:
        return None
    numbers = {}
    for name, default in (
        ("RANK", None), ("WORLD_SIZE", None), ("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "1"),
        ("GROUP_RANK", "0"), ("GROUP_WORLD_SIZE", "1"), ("MASTER_PORT", None),
    ):  # fmt: skip
        text = env.get(name, default)
        if text is None or not text.isdigit():
            raise ConfigError(f"{name}={text} in the environment must be a whole number")
        numbers[name] = int(text)
    if numbers["RANK"] >= numbers["WORLD_SIZE"]:
        raise ConfigError(f"RANK={numbers['RANK']} must be below WORLD_SIZE={numbers['WORLD_SIZE']}")
    return Place(
        numbers["RANK"], numbers["WORLD_SIZE"], numbers["LOCAL_RANK"], numbers["LOCAL_WORLD_SIZE"],
        numbers["GROUP_RANK"], numbers["GROUP_WORLD_SIZE"], launcher,
    )  # fmt: skip


def _is_srun_task(env: os._Environ[str] | dict[str, str]) -> bool:
    step, tasks = env.get("SLURM_STEP_ID", ""), env.get("SLURM_STEP_NUM_TASKS", "1")
    return "SLURM_PROCID" in env and step.isdigit() and int(step) < _FIRST_SPECIAL_STEP and int(tasks) > 1


def _set_from_slurm(env: os._Environ[str] | dict[str, str]) -> None:
    tasks, nodes = int(env["SLURM_STEP_NUM_TASKS"]), int(env.get("SLURM_STEP_NUM_NODES", "1"))
    local = env.get("SLURM_STEP_TASKS_PER_NODE", str(tasks // max(nodes, 1))).split("(")[0].split(",")[0]
    env.setdefault("MASTER_ADDR", first_host(env.get("SLURM_STEP_NODELIST", "localhost")))
    env.setdefault(
        "MASTER_PORT",
        str(20000 + (int(env.get("SLURM_JOB_ID", "0")) * 7 + int(env["SLURM_STEP_ID"])) % 20000),
    )
    env["RANK"], env["WORLD_SIZE"] = env["SLURM_PROCID"], str(tasks)
    env["LOCAL_RANK"], env["LOCAL_WORLD_SIZE"] = env.get("SLURM_LOCALID", "0"), local
    env["GROUP_RANK"], env["GROUP_WORLD_SIZE"] = env.get("SLURM_NODEID", "0"), str(nodes)


def first_host(nodes: str) -> str:
    """The first host of a Slurm node list: ``gpu[03-05,9],cpu1`` -> ``gpu03``."""
    head, bracket, rest = nodes.partition("[")
    if not bracket or "," in head:
        return nodes.split(",")[0]
    return head + rest.split("]")[0].split(",")[0].split("-")[0]


def workers_per_node(config: LaunchConfig) -> int:
    """``launch.nproc_per_node`` as a number. Raises `ConfigError` for more workers than accelerators."""
    import torch

    accelerators = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    if config.nproc_per_node == "auto":
        return accelerators or CPU_WORKERS
    wanted = int(config.nproc_per_node)
    if accelerators and wanted > accelerators:
        raise ConfigError(
            f"launch.nproc_per_node={wanted}: this machine has {accelerators} accelerators, and two ranks cannot share one"
        )
    return wanted


class WorkersFailed(Exception):  # noqa: N818 (it says what happened)
    """Local workers ended with an error; the message is for a person."""


class Preempted(Exception):  # noqa: N818 (not an error)
    """The run was told to end and saved itself."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def _newest_checkpoint(job: compose.Job) -> str | None:
    folder = job.config.checkpoint.folder or os.path.join(job.run_dir, "checkpoints")
    try:
        return max((name for name in os.listdir(folder) if name.startswith("step-")), default=None)
    except OSError:
        return None


def start_workers(job: compose.Job, nproc: int) -> None:
    """Runs ``job`` on ``nproc`` fresh local workers and waits for them.

    Raises `ConfigError` or `WorkersFailed` with the first failing rank's story; KeyboardInterrupt after Ctrl-C, when all
    workers are gone.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig as ElasticConfig
    from torch.distributed.launcher.api import elastic_launch

    logs = os.path.join(job.run_dir, "logs")
    # torch 2.13 reuses the agent's store across restarts, so that workers would read the addresses of dead peers
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // nproc)))
    for name in list(logging.root.manager.loggerDict):  # each has a level of its own, so the parent's would not do
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    elastic = ElasticConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc,
        run_id=uuid.uuid4().hex[:12],
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=0,
        monitor_interval=0.1,
        logs_specs=DefaultLogsSpecs(log_dir=logs, redirects=dict.fromkeys(range(1, nproc), Std.ALL)),
        signals_to_handle="SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1",
        shutdown_timeout=job.config.launch.grace_s,
    )
    newest_before = _newest_checkpoint(job)
    inherited = {_CONFIG: compose.to_yaml(job.config), _RUN_DIR: job.run_dir}
    os.environ.update(inherited)
    try:
        elastic_launch(elastic, sys.executable)("-u", "-m", "parallel2d.train")
    except ChildFailedError as error:
        raise _told_once(error, logs) from None
    except SignalException as error:
        if error.sigval == signal.SIGINT:
            raise KeyboardInterrupt from None
        newest = _newest_checkpoint(job)
        if newest != newest_before:
            raise Preempted(f"told to end; saved {newest}", job.config.launch.requeue_exit_code) from None
        raise WorkersFailed(f"stopped by {signal.Signals(error.sigval).name}") from None
    finally:
        for name in inherited:
            os.environ.pop(name, None)


def _told_once(error: Any, logs: str) -> Exception:
    """The story of the rank that failed first, and where the others' logs are."""
    failures = sorted(error.failures.items(), key=lambda item: item[1].timestamp)
    stories = [(rank, failure, _read_story(failure.error_file)) for rank, failure in failures]
    told = sorted(((r, f, s) for r, f, s in stories if s), key=lambda item: item[2]["time"])
    rank, failure, story = told[0] if told else (*failures[0], None)
    if story and story["config_error"]:
        return ConfigError(story["text"])
    if story:
        cause = story["text"]
    elif failure.exitcode < 0:
        cause = f"it was ended by {signal.Signals(-failure.exitcode).name}"
    else:
        cause = f"it exited with code {failure.exitcode}"
    return WorkersFailed(f"rank {rank} failed first:\n{cause}\nlogs of the other ranks: {logs}")


def _read_story(path: str) -> dict[str, Any] | None:
    try:
        with open(path) as file:
            extra = json.load(file)["message"]["extraInfo"]
        return {
            "text": extra["py_callstack"],
            "config_error": extra.get("config_error", False),
            "time": extra.get("time", math.inf),
        }
    except (OSError, ValueError, KeyError, TypeError):
        return None


@contextlib.contextmanager
def failures_told_once(place: Place, store: Any) -> Iterator[None]:
    """Turns an exception on a rank into a non-zero exit and, over all ranks, one message.

    Self-launched workers leave it for the parent; otherwise the rank that is first to claim the word in ``store`` prints it.
    """
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        now = time.time()  # to the microsecond: peers fail within the same second, because this one did
        config_error = isinstance(error, ConfigError)
        interrupted = isinstance(error, KeyboardInterrupt)
        text = str(error) if config_error else "interrupted" if interrupted else traceback.format_exc().rstrip()
        path = os.environ.get("TORCHELASTIC_ERROR_FILE")
        if path and place.launcher == "self":  # torchrun would print what it finds there beside what is printed here
            info = {"py_callstack": text, "timestamp": str(int(now)), "time": now, "config_error": config_error}
            with open(path, "w") as file:
                json.dump({"message": {"message": text.splitlines()[-1] if text else "", "extraInfo": info}}, file)
        if place.launcher == "self":
            if place.rank:  # its stderr is its log
                print(text, file=sys.stderr, flush=True)
        elif _first_to_claim(store):
            prefix = "" if config_error else f"rank {place.rank} failed first:\n"
            print(f"{prefix}{text}", file=sys.stderr, flush=True)
        sys.stdout.flush()
        os._exit(1)  # peers may be inside a collective: no destructor may wait for them


def _first_to_claim(store: Any) -> bool:
    try:
        return store is None or store.add("parallel2d/failure", 1) == 1
    except Exception:  # the store went with rank 0, which has told its story
        return False


def agree_on_job(place: Place, store: Any, arguments: Sequence[str]) -> compose.Job | None:
    """The same job on every rank. Self-launched: from the parent. Otherwise rank 0 composes and publishes through ``store``.

    None when rank 0 had nothing to run (``--help``, ``--cfg``). See [Note: one run directory].
    """
    if place.launcher == "self":
        return compose.Job(compose.from_yaml(os.environ[_CONFIG]), os.environ[_RUN_DIR], ())
    if place.local_rank == 0:
        store.set(f"parallel2d/recorded/{place.node}", _recorded_run_dir() or "")
    if place.rank == 0:
        recorded = [store.get(f"parallel2d/recorded/{node}").decode() for node in range(place.nodes)]
        earlier = next((path for path in recorded if path), None)
        words = [*arguments, f"hydra.run.dir={json.dumps(earlier)}"] if earlier else list(arguments)
        jobs: list[compose.Job] = []
        try:
            compose.run(words, jobs.append, refuse_multirun="torchrun and srun start one job")
        except ConfigError as error:
            store.set("parallel2d/job", json.dumps({"error": str(error)}))
            raise
        except SystemExit:
            store.set("parallel2d/job", json.dumps(None))
            raise
        message = {"config": compose.to_yaml(jobs[0].config), "run_dir": jobs[0].run_dir} if jobs else None
        store.set("parallel2d/job", json.dumps(message))
    received = json.loads(store.get("parallel2d/job"))
    if received is None:
        return None
    if "error" in received:
        raise ConfigError(received["error"])
    if place.local_rank == 0:
        _record_run_dir(received["run_dir"])
    config = compose.from_yaml(received["config"])
    own = [word.partition("=")[2] for word in arguments if word.startswith("launch.host_id=")]
    if own:  # the one key that differs between nodes
        config.launch.host_id = own[-1]
    return compose.Job(config, received["run_dir"], ())


def _record_path() -> str:
    """Named after the agent that started this worker: process id and start time, so that no other agent can be meant."""
    agent = os.getppid()
    try:
        with open(f"/proc/{agent}/stat") as file:
            started = file.read().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        started = "unknown"
    folder = os.path.join(tempfile.gettempdir(), f"parallel2d-{os.getuid()}")
    return os.path.join(folder, f"agent-{agent}-{started}.json")


def _recorded_run_dir() -> str | None:
    try:
        with open(_record_path()) as file:
            path = json.load(file)["run_dir"]
        return path if isinstance(path, str) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _record_run_dir(run_dir: str) -> None:
    path = _record_path()
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    with open(path, "w") as file:
        json.dump({"run_dir": run_dir}, file)


def end_with_parent() -> None:
    """Has the kernel end this process when the one that started it dies, however it dies (Linux; elsewhere nothing)."""
    if sys.platform == "linux":
        parent = os.getppid()
        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:
            os._exit(1)
