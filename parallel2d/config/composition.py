"""From the words of a command line to a checked `TrainConfig` and a run directory, by Hydra.

`compose` composes one job, `run_sweep` leaves several of them, or ``--help``, to Hydra. Only this
module and `explanation` use Hydra.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import hydra
from hydra import initialize_config_module
from hydra._internal.callbacks import Callbacks
from hydra._internal.utils import get_args_parser
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import run_job
from hydra.errors import HydraException
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig, open_dict
from omegaconf.errors import OmegaConfBaseException

from parallel2d import files
from parallel2d.config import other_frameworks
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
    BUCKETINGS,
    CHECKPOINTINGS,
    COMPILES,
    PRECISIONS,
    STRATEGIES,
    SYNC_NAMES,
    SyncConfig,
)
from parallel2d.config.serialization import to_config
from parallel2d.errors import ConfigError

_PRESETS: dict[str, dict[str, Any]] = {
    "strategy": dict(STRATEGIES),
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
_MODEL_SCHEMAS = {
    "llama_schema": LlamaModel,
    "custom_schema": CustomModel,
    "hf_schema": HuggingFaceModel,
}
# Words that begin so are about keys that no schema knows.
_OPEN = ("model.arguments.", "model.arguments=", "model.tensor_plan=")
_FOLDER = re.compile(r"\+*hydra\.(run|sweep)\.dir=(?P<path>.*)")
_BRACKET = re.compile(r"(?<!\\)([\[\]])")

Task = Callable[[Job], None]


@functools.cache
def register() -> None:
    """Makes the schema and the presets known to Hydra, once per process."""
    store = ConfigStore.instance()
    store.store(name="train_schema", node=TrainConfig)
    for group, presets in _PRESETS.items():
        for name, node in presets.items():
            store.store(group=group, name=name, node=node)
    for name, node in _MODEL_SCHEMAS.items():
        store.store(group="model", name=name, node=node)


@dataclass(frozen=True)
class Composition:
    """One composed job. It leaves no trace until `start`."""

    config: TrainConfig
    words: tuple[str, ...]
    _composed: DictConfig  # with Hydra's own part
    _config_name: str

    def start(self, task: Task) -> None:
        """Makes the run directory, with Hydra's records, and calls ``task``. Raises `ConfigError`
        for a directory that cannot be made."""
        for word in self.words:
            _check_run_dir(word)
        register()
        failures: list[Exception] = []

        def call(_composed: DictConfig) -> None:
            try:
                task(_job(self.config))
            except Exception as error:  # kept from Hydra, which would print it in its own way
                failures.append(error)

        # What `hydra.main` does after it has composed.
        callbacks = Callbacks(self._composed)
        callbacks.on_run_start(config=self._composed, config_name=self._config_name)
        with _initialized(), _folder_errors_explained():
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

    None where they are no single job: ``-m``, ``--help``, ``--cfg``, several values for a key.
    Raises `ConfigError` for anything wrong with the words.
    """
    register()
    words = _open_words(arguments)
    parsed = _parse(words)
    if parsed is None:
        return None
    overrides, name = list(parsed.overrides), parsed.config_name or "train"
    if parsed.config_dir:
        overrides.append(f"hydra.searchpath=[file://{os.path.abspath(parsed.config_dir)}]")
    try:
        with _initialized() as hydra_instance:
            composed = hydra_instance.compose_config(name, overrides, run_mode=RunMode.RUN)
        if composed.hydra.mode == RunMode.MULTIRUN:
            return None
        composed.hydra.mode = RunMode.RUN
        return Composition(to_config(_without_hydra(composed)), tuple(words), composed, name)
    except ConfigError:
        raise
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        if _may_sweep(parsed.overrides):
            return None
        raise ConfigError(explain(words, error)) from None


def run_sweep(arguments: Sequence[str], task: Task) -> None:
    """Lets Hydra compose ``arguments`` and calls ``task`` once per job, each with a run directory
    of its own. Raises `ConfigError` for anything wrong with the words."""
    register()
    words = _open_words(arguments)
    if any(word.startswith("--experimental-rerun") for word in words):
        raise ConfigError("--experimental-rerun is refused: it executes what the file contains")
    for word in words:
        _check_run_dir(word)
    failures: list[tuple[str, Exception]] = []

    def call(composed: DictConfig) -> None:
        overrides = " ".join(HydraConfig.get().overrides.task)
        try:
            task(_job(to_config(composed)))
        # kept from Hydra, which would print it in its own way; the other jobs still run
        except Exception as error:
            failures.append((overrides, error))

    main = hydra.main(config_path="pkg://parallel2d.conf", config_name="train", version_base="1.3")
    try:
        with _command_line(words), _folder_errors_explained():
            main(call)()
    # ValueError: precision=32, compile=true
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(explain(words, error)) from None
    if len(failures) > 1:
        raise ConfigError("\n".join(f"[{overrides}] {error}" for overrides, error in failures))
    if failures:
        raise failures[0][1]


def is_multirun(arguments: Sequence[str]) -> bool:
    """Whether ``-m`` is among the words."""
    return any(word in ("-m", "--multirun") for word in arguments)


def _job(config: TrainConfig) -> Job:
    """The job in the run directory that Hydra has just made."""
    settings = HydraConfig.get()
    run_dir = os.path.abspath(settings.runtime.output_dir)
    _check_links(run_dir)
    return Job(config, run_dir, tuple(settings.overrides.task))


def _parse(words: Sequence[str]) -> argparse.Namespace | None:
    """The options and overrides among ``words``; None where Hydra answers or runs a sweep. Raises
    `ConfigError` for an option that the command does not have."""
    try:
        with contextlib.redirect_stderr(None):
            parsed, unknown = get_args_parser().parse_known_args(list(words))
    except SystemExit:
        return None
    if unknown:
        name = unknown[0].lstrip("-").partition("=")[0]
        hint = other_frameworks.answer(name)
        if hint is None:
            hint = f"settings are words key=value, such as {name}=VALUE if that is one"
        raise ConfigError(f"{unknown[0]} is no option of this command: {hint}; --help lists all")
    rerun = getattr(parsed, "experimental_rerun", None)
    asked = (parsed.help, parsed.hydra_help, parsed.cfg, parsed.info, parsed.config_path, rerun)
    return None if any(asked) or parsed.multirun else parsed


@contextlib.contextmanager
def _initialized() -> Iterator[Any]:
    """Hydra with our configuration on its search path, until the end of the block."""
    GlobalHydra.instance().clear()
    try:
        with initialize_config_module("parallel2d.conf", job_name="train", version_base="1.3"):
            yield GlobalHydra.instance().hydra
    finally:
        GlobalHydra.instance().clear()


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


def _may_sweep(words: Sequence[str]) -> bool:
    """Whether a word has several values: a sweep, if Hydra was told so in a file."""
    try:
        overrides = OverridesParser.create().parse_overrides(list(words))
    except HydraException:
        return False
    return any(override.is_sweep_override() for override in overrides)


def _open_words(arguments: Sequence[str]) -> list[str]:
    """The words as Hydra must see them.

    It wants ``++`` before a key that its schema does not have, such as the arguments of a model's
    factory. In ``model.tensor_plan={layers.*.w[qkv]: colwise}`` brackets belong to the pattern,
    which Hydra takes only with backslashes.
    """
    words = []
    for word in arguments:
        if word.lstrip("+").startswith("model.tensor_plan={"):
            word = _BRACKET.sub(r"\\\1", word)
        words.append(f"++{word}" if word.startswith(_OPEN) else word)
    return words
