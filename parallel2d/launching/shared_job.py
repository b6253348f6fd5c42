"""Distributes one job to all ranks before they train: `share_job`.

[Note: one run directory] Only one process composes the job: the launcher of a single node, or rank
0. Rank 0 publishes the configuration and the run directory in the rendezvous store. Restarted
workers continue the job of the workers that they replace. Therefore the first rank of each node
writes a record of the job, and the node's launcher deletes this record when the launcher ends. At a
restart rank 0 reads the records of all nodes and uses the first existing record, so a node that is
new in the job needs no record. If a record exists, the workers were restarted. The restart counters
of elastic agents do not show restarts reliably, because these counters differ between nodes.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from parallel2d.base import files
from parallel2d.base.config.composition import Composition, compose, from_yaml, to_yaml
from parallel2d.base.config.job import Job, TrainConfig
from parallel2d.base.config.sweep import run_sweep
from parallel2d.base.errors import ConfigError
from parallel2d.base.files import private_folders as folders
from parallel2d.base.launcher_environment import AGENT, INCARNATION, JOB, RankIdentity
from parallel2d.training.run_directory.ownership import wait_for_owner

if TYPE_CHECKING:
    from parallel2d.training.metrics.late_ranks import Position

# A function that chooses the layout if the job does not set it. Its arguments are the
# configuration, the overrides, the identity of rank 0, and the number of ranks of each live node.
# The function returns the configuration with the layout, and `Job.sizes`.
ChooseLayout = Callable[
    [TrainConfig, Sequence[str], RankIdentity, Sequence[int]],
    tuple[TrainConfig, Mapping[str, int] | None],
]
PUBLISHED = "parallel2d/job"  # key of the job in the store
_RECORDED = {"run_dir", "config", "words", "records", "label"}


def share_job(
    identity: RankIdentity,
    store: Any,
    arguments: Sequence[str],
    composition: Composition | None,
    choose_layout: ChooseLayout,
) -> Job | None:
    """Return the job, which is the same on every rank. The launcher of a single node has composed
    it, or rank 0 composes it; rank 0 publishes it in ``store``. See [Note: one run directory].

    Args:
        identity: this rank.
        store: the rendezvous store.
        arguments: the overrides of the command line.
        composition: the composition of ``arguments``, if it exists already.
        choose_layout: function that rank 0 calls at each start, because the nodes may differ after
            a restart.

    Returns None if rank 0 had nothing to run (``--help``).
    """
    # True if this replica rejoins a running job
    comes_back = os.environ.get(INCARNATION, "0") != "0"
    config = None
    if not comes_back:
        config = _publish_job(identity, store, arguments, composition, choose_layout)
    received = json.loads(store.get(PUBLISHED))
    if received is None:
        return None
    if "error" in received:
        raise ConfigError(received["error"])
    if identity.local_rank == 0:
        _record_job({key: received[key] for key in _RECORDED})
    # On rank 0 `_publish_job` has returned the parsed configuration.
    config = config or from_yaml(received["chosen"])
    for word in arguments:
        if word.startswith("launch.host_id="):  # the only key that differs between nodes
            config.launch.host_id = word.partition("=")[2]
    return Job(
        config,
        received["run_dir"],
        tuple(received["words"]),
        restarted=received["restarted"] or comes_back,
        records=received["records"],
        label=received["label"],
        sizes=received["sizes"],
    )


def _record_of(job: Job) -> dict[str, Any]:
    """Return the record of a job, which its ranks read, and ranks that replace them."""
    return {
        "run_dir": job.run_dir,
        "config": to_yaml(job.config),
        "words": list(job.overrides),
        "records": job.records,
        "label": job.label,
    }


def write_job(job: Job, folder: str) -> str:
    """Write the job for the ranks of this launcher. Returns the path of the file."""
    path = os.path.join(folder, "composed.json")
    files.replace(path, json.dumps(_record_of(job)))
    return path


def _publish_job(
    identity: RankIdentity,
    store: Any,
    arguments: Sequence[str],
    composition: Composition | None,
    choose_layout: ChooseLayout,
) -> TrainConfig | None:
    """Publish this node's record and number of ranks; then, on rank 0, publish the job.

    If a record exists, the published job continues the recorded job; otherwise it is new. Its
    layout is for the current ranks. Rank 0 publishes an error before it raises the error. Returns
    the published configuration on rank 0. Returns None on the other ranks, and if rank 0 has
    nothing to run.
    """
    if identity.local_rank == 0:
        record = _recorded_job(launcher_folder()) if _is_started_again() else None
        local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        store.set(f"parallel2d/recorded/{identity.node}", json.dumps([record, local]))
    if identity.rank != 0:
        return None
    keys = []
    for node in range(identity.nodes):
        keys.append(f"parallel2d/recorded/{node}")
    records, sizes = zip(*map(json.loads, map(store.get, keys)), strict=True)
    earlier = next(filter(None, records), None)
    message: dict[str, Any] | None = None
    try:
        job = (earlier, None) if earlier else _first_job(identity, arguments, composition)
        record, config = job
        if record is None:
            return None
        config = config or from_yaml(record["config"])
        if earlier is None and not config.train.certify_only and not config.plan.dry_run:
            wait_for_owner(record["run_dir"], _log)
        chosen, mesh_sizes = choose_layout(config, record["words"], identity, sizes)
        text = record["config"] if chosen is config else to_yaml(chosen)
        restarted = earlier is not None
        message = {**record, "chosen": text, "sizes": mesh_sizes, "restarted": restarted}
        return chosen
    except ConfigError as error:
        message = {"error": str(error)}
        raise
    finally:
        # The other ranks block on this key. Every path must set the key, also after an unexpected
        # error: the other ranks would otherwise report the timeout of the store instead of the
        # error.
        store.set(PUBLISHED, json.dumps(message))


def _log(text: str) -> None:
    print(f"parallel2d: {files.for_terminal(text)}", file=sys.stderr, flush=True)


def _first_job(
    identity: RankIdentity, arguments: Sequence[str], composition: Composition | None
) -> tuple[dict[str, Any] | None, TrainConfig | None]:
    """Return the record of the job that the launcher or this process has composed, and its
    configuration if this process composed it. The record is None without a job."""
    if identity.launcher == "self":
        return files.read_json(os.environ[JOB]), None
    if not {"-m", "--multirun"}.isdisjoint(arguments):
        raise ConfigError("-m is refused here: torchrun, srun and launch.nnodes start one job")
    jobs: list[Job] = []
    composition = composition or compose(arguments)
    if composition is None:
        run_sweep(arguments, jobs.append)
    else:
        composition.start(jobs.append)
    return (_record_of(jobs[0]), jobs[0].config) if jobs else (None, None)


def launcher_folder() -> str:
    """Return the folder of the process that starts this node's workers; it may not exist yet. Our
    launchers announce their folder; the folder of another launcher is named after its process
    id."""
    return os.environ.get(AGENT) or folders.folder_of(os.getppid(), folders.temporary_place())


def recorded_run_dir(folder: str) -> str | None:
    """Return the run directory of this launcher's workers, or None before the first start."""
    return (_recorded_job(folder) or {}).get("run_dir")


@contextlib.contextmanager
def folder_errors_explained() -> Iterator[None]:
    """Convert the OSError of a folder that cannot be made private to a `ConfigError`."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"{error.filename}: {error.strerror}; remove it, or set TMPDIR to a folder of your own"
        ) from None


def _is_started_again() -> bool:
    """True if the launcher restarts failed workers, as ours and torchrun do. The next job of any
    other parent, such as a shell or a notebook, may be a different job."""
    return AGENT in os.environ or "TORCHELASTIC_RUN_ID" in os.environ


def _recorded_job(folder: str) -> dict[str, Any] | None:
    record: Any = None
    # In a folder that is not private, another user may have written the record.
    if all(map(folders.is_private, (folder, os.path.dirname(folder)))):
        with contextlib.suppress(OSError, ValueError):
            record = files.read_json(os.path.join(folder, "job.json"))
    return record if isinstance(record, dict) and record.keys() == _RECORDED else None


def _record_job(record: dict[str, Any]) -> None:
    if _is_started_again():
        folder = launcher_folder()
        with folder_errors_explained():
            folders.make_own(folder)
        files.replace(os.path.join(folder, "job.json"), json.dumps(record))


def forget_run(identity: RankIdentity) -> None:
    """Delete the record of a run that has succeeded. The launchers of this package delete their
    records without this call."""
    if identity.local_rank == 0 and AGENT not in os.environ:
        folders.remove(launcher_folder())


def recording_steps(
    identity: RankIdentity, position: Callable[[], Position]
) -> Callable[[], Position]:
    """Wrap ``position`` so that each new step is also written for the launcher's `Restarts`."""
    if identity.local_rank != 0 or AGENT not in os.environ:
        return position
    path, written = os.path.join(launcher_folder(), "step"), -1

    def record() -> Position:
        nonlocal written
        now = position()
        if now.step != written:
            written = now.step
            with contextlib.suppress(OSError):
                files.replace(path, str(now.step))
        return now

    return record
