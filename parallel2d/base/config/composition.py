"""Composes a checked `TrainConfig` and a run directory from command-line arguments, with Hydra.

`compose` composes one job. `survey` lists the chosen values and the choices of each group.
`config.overrides` parses the arguments first. `config.sweep` handles several jobs, and options such
as ``--cfg``.
"""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import yaml
from hydra._internal.callbacks import Callbacks
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobStatus, run_job
from hydra.errors import HydraException
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from parallel2d.base import files
from parallel2d.base.config.checks import validated
from parallel2d.base.config.error_messages import dotted_keys, explain, first_line, unknown_key
from parallel2d.base.config.job import Job, TrainConfig, with_tokens_per_batch
from parallel2d.base.config.model_and_data import FAMILIES
from parallel2d.base.config.overrides import may_sweep, parse_arguments
from parallel2d.base.config.schema import choices_by_group, initialized
from parallel2d.base.errors import ConfigError

Task = Callable[[Job], float | None]
# With these options Hydra prints an answer or runs several jobs.
_NO_SINGLE_JOB = ("help", "hydra_help", "shell_completion", "cfg", "info", "multirun")


@dataclass(frozen=True)
class Composition:
    """One composed job. A `Composition` writes no file before `start`."""

    config: TrainConfig
    words: tuple[str, ...]
    _composed: DictConfig  # including Hydra's section
    _options: tuple[str, ...]  # options that are needed to compose the same job again

    def start(self, task: Task) -> None:
        """Create the run directory and call ``task``.

        Raises:
            ConfigError: if the directory cannot be created.
        """
        if not str(self._composed.hydra.run.dir).strip():
            raise ConfigError("hydra.run.dir is empty; name a folder, or omit it for a new one")
        _check_links(self._composed.hydra.run.dir)
        # The steps of `hydra.main` after composition
        config = {"config": self._composed, "config_name": self._composed.hydra.job.config_name}
        callbacks = Callbacks(self._composed)
        callbacks.on_run_start(**config)
        with initialized(), folder_errors_explained():
            result = run_job(
                task_function=lambda _: task(job_here(self.config, self._options)),
                config=self._composed,
                job_dir_key="hydra.run.dir",
                job_subdir_key=None,
                hydra_context=HydraContext(GlobalHydra.instance().config_loader(), callbacks),
            )
        callbacks.on_run_end(**config, job_return=result)
        # The public property `return_value` would print the error in Hydra's format.
        if result.status == JobStatus.FAILED:
            raise result._return_value


def compose(arguments: Sequence[str]) -> Composition | None:
    """Compose ``arguments`` without writing a file. Return None if they do not describe a single
    job (``-m``, ``--cfg``, several values for a key).

    Raises:
        ConfigError: for wrong arguments.
    """
    parsed = parse_arguments(arguments)
    if any(map(vars(parsed).get, _NO_SINGLE_JOB)):
        return None
    name, words = parsed.config_name, parsed.overrides
    with explain_override_errors(parsed):
        with initialized(parsed.config_dir) as hydra_instance:
            # Hydra decides, because a configuration file can also select a sweep.
            if may_sweep(words) and hydra_instance.get_mode(name, words) == RunMode.MULTIRUN:
                return None
            composed = hydra_instance.compose_config(name, words, run_mode=RunMode.RUN)
        if composed.hydra.mode == RunMode.MULTIRUN:
            return None
        composed.hydra.mode = RunMode.RUN
        ours = composed.copy()
        with open_dict(ours):
            del ours["hydra"]
        options = place_options(parsed)
        return Composition(to_config(ours), (*options, *words), composed, options)


@contextlib.contextmanager
def explain_override_errors(parsed: argparse.Namespace) -> Iterator[None]:
    """Turn Hydra's errors about the overrides into a `ConfigError`."""
    try:
        yield
    except ConfigError:
        raise
    except yaml.MarkedYAMLError as error:  # in a custom file
        mark, problem = error.problem_mark, files.printable(error.problem or "not YAML")
        where = f"{mark.name}:{mark.line + 1}:{mark.column + 1}" if mark else "a YAML file"
        raise ConfigError(f"{where}: {problem}") from None
    # ValueError: precision=32, compile=true
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise ConfigError(explain(parsed, error)) from None


def to_config(composed: DictConfig) -> TrainConfig:
    """Return the checked dataclasses of a composed config. Raises `ConfigError` with all
    problems."""
    return validated(with_tokens_per_batch(_to_dataclasses(composed)))


def to_yaml(config: TrainConfig) -> str:
    """Return the configuration as YAML, for workers and for readers; `from_yaml` is the inverse."""
    return OmegaConf.to_yaml(OmegaConf.structured(config), resolve=True)


def from_yaml(text: str) -> TrainConfig:
    """Return the checked configuration that `to_yaml` wrote. The text is data: only dataclasses of
    the schema are instantiated. Raises `ConfigError` for text that does not fit the schema."""
    loaded = OmegaConf.create(text)
    family = loaded.model.family
    if family not in FAMILIES:
        raise ConfigError(f"model.family={family} is not one of {', '.join(FAMILIES)}")
    schema = OmegaConf.structured(TrainConfig)
    schema.model = OmegaConf.structured(FAMILIES[family])
    return _to_dataclasses(OmegaConf.merge(schema, loaded))  # type: ignore[arg-type]


def _to_dataclasses(composed: DictConfig) -> TrainConfig:
    missing = sorted(OmegaConf.missing_keys(composed))
    # All missing keys are reported, because OmegaConf would report only the first.
    if missing:
        raise ConfigError("\n".join(map("{} is required and was not given".format, missing)))
    try:
        config: Any = OmegaConf.to_object(composed)
    except OmegaConfBaseException as error:
        raise ConfigError(first_line(error)) from None
    # Keys that ++key=value added: the conversion drops keys that the dataclasses do not have.
    keys = dotted_keys(composed)
    unknown = []
    for key, is_known in keys.items():
        if not is_known:
            unknown.append(key)
    if unknown:
        known = [key for key in keys if not key.startswith(tuple(unknown))]
        raise ConfigError("\n".join(unknown_key(key, key, known, {}) for key in unknown))
    return config


def survey(parsed: argparse.Namespace) -> tuple[dict[str, Any], dict[str, tuple[str, ...]]]:
    """Return the composed values as dicts and lists, with ``???`` for required values, and the
    choices of each group. Values are not checked. Overrides with several values for a sweep are
    omitted.

    Raises:
        ConfigError: for overrides that do not compose.
    """
    chosen = []
    for word in parsed.overrides:
        if not may_sweep([word]):
            chosen.append(word)
    with explain_override_errors(parsed), initialized(parsed.config_dir) as hydra_instance:
        composed = hydra_instance.compose_config(parsed.config_name, chosen, RunMode.RUN)
        groups = choices_by_group(hydra_instance.config_loader)
    plain: Any = OmegaConf.to_container(composed, resolve=False)
    return plain, groups


def place_options(parsed: argparse.Namespace) -> tuple[str, ...]:
    """Return the given options that locate the configuration files: ``--config-dir`` and
    ``--config-name``."""
    options: list[str] = []
    if parsed.config_dir:
        options += ["--config-dir", parsed.config_dir]
    if parsed.config_name != "train":
        options += ["--config-name", parsed.config_name]
    return tuple(options)


def job_here(config: TrainConfig, options: tuple[str, ...]) -> Job:
    """Return the job in the run directory that Hydra has just created."""
    settings = HydraConfig.get()
    run_dir = os.path.abspath(settings.runtime.output_dir)
    _check_links(run_dir)
    words = (*options, *settings.overrides.task)
    return Job(config, run_dir, words, records=settings.output_subdir or "")


@contextlib.contextmanager
def folder_errors_explained() -> Iterator[None]:
    """Turn errors of the run directory into a `ConfigError`."""
    try:
        yield
    except OSError as error:
        # Hydra's error for a missing config is also an OSError
        if isinstance(error, HydraException):
            raise
        raise ConfigError(f"hydra.run.dir: the run directory cannot be made: {error}") from None


def _check_links(folder: str) -> None:
    try:
        files.check_run_directory(folder)
    except OSError as error:
        where = files.printable(error.filename, 500)
        raise ConfigError(f"hydra.run.dir: {where}: {error.strerror}") from None
