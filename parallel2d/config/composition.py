"""From the words of a command line to a checked `TrainConfig` and a run directory, by Hydra.

`compose` composes one job, `run_sweep` leaves several of them, or ``--cfg``, to Hydra. `words` has
what happens to the words before, `survey` what they might choose.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import hydra
from hydra._internal.callbacks import Callbacks
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import run_job
from hydra.errors import HydraException
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig, open_dict
from omegaconf.errors import OmegaConfBaseException

from parallel2d import files
from parallel2d.config.cluster import ClusterConfig
from parallel2d.config.explanation import explain
from parallel2d.config.job import (
    OPTIMIZERS,
    CheckpointConfig,
    Job,
    LaunchConfig,
    MetricsConfig,
    ProfileConfig,
    SchedulerConfig,
    TrainConfig,
)
from parallel2d.config.model_and_data import CustomModel, HuggingFaceModel, LlamaModel
from parallel2d.config.parallel import (
    AUTOMATIC,
    BUCKETINGS,
    CHECKPOINTINGS,
    COMPILES,
    PRECISIONS,
    STRATEGIES,
    SYNC_NAMES,
    StrategyConfig,
    SyncConfig,
)
from parallel2d.config.search_path import SCHEMA_GROUP, initialized
from parallel2d.config.serialization import to_config
from parallel2d.config.sweep import Outcome, SweepFolder, outcomes, table
from parallel2d.config.words import hydra_words, job_options, may_sweep
from parallel2d.errors import ConfigError, EndsSweep

_PRESETS: dict[str, dict[str, Any]] = {
    "strategy": {**STRATEGIES, AUTOMATIC: StrategyConfig(AUTOMATIC)},
    "bucketing": dict(BUCKETINGS),
    "precision": dict(PRECISIONS),
    "activation_checkpointing": dict(CHECKPOINTINGS),
    "compile": dict(COMPILES),
    "sync": {name: SyncConfig(name) for name in SYNC_NAMES},
    "optimizer": dict(OPTIMIZERS),
    "scheduler": {name: SchedulerConfig(name) for name in ("constant", "linear", "cosine", "wsd")},
    "checkpoint": {"default": CheckpointConfig()},
    "metrics": {"default": MetricsConfig()},
    "profile": {"default": ProfileConfig()},
    "launch": {"local": LaunchConfig()},
}
# What the files in conf/ build on.
_SCHEMAS = {
    "train": TrainConfig,
    "llama": LlamaModel,
    "custom": CustomModel,
    "hf": HuggingFaceModel,
    "cluster": ClusterConfig,
}
_FOLDER = re.compile(r"\+*hydra\.(run|sweep)\.dir=(?P<path>.*)")

Task = Callable[[Job], float | None]
_IN_TURN = ("BasicSweeper", "BasicLauncher")  # Hydra's own, without a plugin


@functools.cache
def register() -> None:
    """Makes the schema and the presets known to Hydra, once per process."""
    store = ConfigStore.instance()
    for group, presets in _PRESETS.items():
        for name, node in presets.items():
            store.store(group=group, name=name, node=node)
    for name, node in _SCHEMAS.items():
        store.store(group=SCHEMA_GROUP, name=name, node=node)


@dataclass(frozen=True)
class Composition:
    """One composed job. It leaves no trace until `start`."""

    config: TrainConfig
    words: tuple[str, ...]
    _composed: DictConfig  # with Hydra's own part
    _config_name: str
    _options: tuple[str, ...] = ()  # that the words need to mean the same again

    def start(self, task: Task) -> None:
        """Makes the run directory, with Hydra's records, and calls ``task``. Raises `ConfigError`
        for a directory that cannot be made."""
        for word in self.words:
            _check_run_dir(word)
        register()
        failures: list[Exception] = []

        def call(_composed: DictConfig) -> None:
            try:
                task(_job(self.config, self._options))
            except Exception as error:  # kept from Hydra, which would print it in its own way
                failures.append(error)

        # What `hydra.main` does after it has composed.
        callbacks = Callbacks(self._composed)
        callbacks.on_run_start(config=self._composed, config_name=self._config_name)
        with initialized(), _folder_errors_explained():
            result = run_job(
                task_function=call,
                config=self._composed,
                job_dir_key="hydra.run.dir",
                job_subdir_key=None,
                hydra_context=HydraContext(GlobalHydra.instance().config_loader(), callbacks),
            )
        callbacks.on_run_end(
            config=self._composed, config_name=self._config_name, job_return=result
        )
        if failures:
            raise failures[0]


def compose(arguments: Sequence[str]) -> Composition | None:
    """What ``arguments`` compose to, without a run directory or any other trace.

    None where they are no single job: ``-m``, ``--cfg``, several values for a key.
    Raises `ConfigError` for anything wrong with the words.
    """
    register()
    words = hydra_words(arguments)
    parsed = job_options(words)
    if parsed is None:
        return None
    name = parsed.config_name or "train"
    try:
        with initialized(parsed.config_dir) as hydra_instance:
            composed = hydra_instance.compose_config(name, parsed.overrides, run_mode=RunMode.RUN)
        if composed.hydra.mode == RunMode.MULTIRUN:
            return None
        composed.hydra.mode = RunMode.RUN
        config = to_config(_without_hydra(composed))
        options = _place_options(parsed.config_dir, parsed.config_name)
        return Composition(config, tuple(words), composed, name, options)
    except ConfigError:
        raise
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        if may_sweep(parsed.overrides):
            return None
        raise ConfigError(explain(words, error)) from None


def run_sweep(arguments: Sequence[str], task: Task) -> None:
    """Lets Hydra compose ``arguments`` and calls ``task`` once per job, each with a run directory
    of its own. What it returns is the job's objective. Prints a table of the jobs, best first.
    Raises `ConfigError` for anything wrong with the words, and the error of a job that failed."""
    register()
    words = hydra_words(arguments)
    if any(word.startswith("--experimental-rerun") for word in words):
        raise ConfigError("--experimental-rerun is refused: it executes what the file contains")
    for word in words:
        _check_run_dir(word)
    failures: list[Exception] = []
    begun, SweepFolder.folder = time.time() - 1, None  # file systems round times

    def call(composed: DictConfig) -> float | None:
        return _sweep_job(composed, task, failures)

    main = hydra.main(config_path="pkg://parallel2d.conf", config_name="train", version_base="1.3")
    try:
        with _command_line(words), _folder_errors_explained():
            main(call)()
    # ValueError: precision=32, compile=true
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(explain(words, error)) from None
    except _SweepEnded as ended:
        raise ended.cause from None
    finally:
        told = _tell_sweep(begun)
    if len(told) > 1:
        raise ConfigError("\n".join(told))
    if failures:
        raise failures[0]


def _sweep_job(composed: DictConfig, task: Task, failures: list[Exception]) -> float | None:
    """One job of a sweep, in whatever process Hydra's launcher runs it."""
    settings = HydraConfig.get()
    number, words = int(settings.job.num or 0), tuple(settings.overrides.task)
    run_dir = os.path.abspath(settings.runtime.output_dir)
    value, error = None, None
    try:
        value = task(_job(to_config(composed), _options_of(settings)))
    except Exception as failure:
        error = failure
    if isinstance(error, EndsSweep) and _is_own(settings.launcher):
        raise _SweepEnded(error)
    text = None if error is None else str(error)
    Outcome(number, words, value, text, run_dir).write()
    if error is None:
        return value
    if _is_own(settings.sweeper) and _is_own(settings.launcher):
        # kept from Hydra, which would print it in its own way; the other jobs still run
        failures.append(error)
        return None
    raise error


def _options_of(settings: Any) -> tuple[str, ...]:
    """Those of a sweep's command that its jobs' words need to mean the same again."""
    config_dir = None
    for source in settings.runtime.config_sources:
        # Hydra's name for what --config-dir adds.
        if source.provider == "command-line":
            config_dir = source.path
    name = settings.job.config_name
    return _place_options(config_dir, None if name == "train" else name)


def _place_options(config_dir: str | None, config_name: str | None) -> tuple[str, ...]:
    """The options that say where the configuration is; none for what was not given."""
    options: list[str] = []
    if config_dir:
        options += ["--config-dir", config_dir]
    if config_name:
        options += ["--config-name", config_name]
    return tuple(options)


class _SweepEnded(BaseException):
    """Not an Exception, since Hydra goes on to the next job after one."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


def _is_own(part: DictConfig) -> bool:
    """Whether it is what Hydra has without a plugin."""
    return str(part.get("_target_", "")).endswith(_IN_TURN)


def _tell_sweep(begun: float) -> list[str]:
    """Prints the table of a sweep's jobs; returns the errors of those that failed, with their
    words."""
    if SweepFolder.folder is None:
        return []
    jobs = outcomes(SweepFolder.folder, begun)
    if len(jobs) > 1 and any(job.error is None for job in jobs):
        lines = table(jobs, "objective", descending=SweepFolder.descending)
        print("\n".join(map(files.for_terminal, lines)), file=sys.stderr, flush=True)
    return [f"[{' '.join(job.words)}] {job.error}" for job in jobs if job.error is not None]


def _job(config: TrainConfig, options: tuple[str, ...] = ()) -> Job:
    """The job in the run directory that Hydra has just made."""
    settings = HydraConfig.get()
    run_dir = os.path.abspath(settings.runtime.output_dir)
    _check_links(run_dir)
    words = (*options, *settings.overrides.task)
    job = Job(config, run_dir, words, records=settings.output_subdir or "")
    if settings.mode != RunMode.MULTIRUN:
        return job
    # A launcher of a plugin may run several jobs at once.
    label = "" if _is_own(settings.launcher) else f"[#{settings.job.num}]"
    return dataclasses.replace(job, label=label, is_judged=not _is_own(settings.sweeper))


@contextlib.contextmanager
def _command_line(words: Sequence[str]) -> Iterator[None]:
    """Gives `hydra.main` its words, and has it hand on its exceptions instead of printing them."""
    argv, full_error = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv = [argv[0], *words]
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        yield
    finally:
        sys.argv = argv
        if full_error is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = full_error


@contextlib.contextmanager
def _folder_errors_explained() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if isinstance(error, HydraException):  # a config that does not exist is both
            raise
        raise ConfigError(
            f"hydra.run.dir: the run directory cannot be made or written: {error}"
        ) from None


def _check_run_dir(word: str) -> None:
    """Raises `ConfigError` when ``word`` names a run directory that is empty, or in which another
    user has placed links."""
    named = _FOLDER.fullmatch(word)
    if named is None:
        return
    path = named["path"].strip(" '\"")
    if not path:
        raise ConfigError(
            "hydra.run.dir is empty: it would be the current folder; name one, or leave it out for "
            "a new one"
        )
    _check_links(path)


def _check_links(folder: str) -> None:
    try:
        files.check_no_planted_links(folder)
    except OSError as error:
        where = files.printable(error.filename, 500)
        raise ConfigError(f"hydra.run.dir: {where}: {error.strerror}") from None


def _without_hydra(composed: DictConfig) -> DictConfig:
    task = composed.copy()
    with open_dict(task):
        del task["hydra"]
    return task
