"""Registration with Hydra: presets, schemas, and the search path of files (`initialized`)."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator
from typing import Any

from hydra import version
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType

from parallel2d.base.config import cluster, job, launch, parallel
from parallel2d.base.config.model_and_data import FAMILIES
from parallel2d.base.config.parallel import presets
from parallel2d.base.errors import ConfigError

PRESETS: dict[str, dict[str, Any]] = {
    "strategy": presets(parallel.StrategyConfig),
    "bucketing": presets(parallel.BucketingConfig),
    "precision": {
        parallel.AUTOMATIC: parallel.PrecisionConfig(parallel.AUTOMATIC),
        **parallel.PRECISIONS,
    },
    "activation_checkpointing": presets(parallel.ActivationCheckpointingConfig),
    "compile": presets(parallel.CompileConfig),
    "sync": presets(parallel.SyncConfig),
    "optimizer": dict(job.OPTIMIZERS),
    "scheduler": presets(job.SchedulerConfig),
    "checkpoint": {"default": job.CheckpointConfig()},
    "metrics": {"default": job.MetricsConfig()},
    "profile": {"default": job.ProfileConfig()},
    "launch": {"local": launch.LaunchConfig()},
}
# The base of the files in conf/, in a separate group that offers no choices to users
_SCHEMA_GROUP = "schema"
_SCHEMAS = {"train": job.TrainConfig, "cluster": cluster.ClusterConfig, **FAMILIES}


@functools.cache
def register() -> None:
    """Register the schema and the presets with Hydra, once per process."""
    store = ConfigStore.instance()
    for group, choices in {**PRESETS, _SCHEMA_GROUP: _SCHEMAS}.items():
        for name, node in choices.items():
            store.store(group=group, name=name, node=node)


@contextlib.contextmanager
def initialized(config_dir: str | None = None) -> Iterator[Any]:
    """Context with an initialized Hydra. Its search path has the configuration of the package
    and ``config_dir``, as on Hydra's command line. Raises `ConfigError` if ``config_dir`` is not a
    folder."""
    register()
    search_path = create_config_search_path("pkg://parallel2d.conf")
    if config_dir:
        if not os.path.isdir(config_dir):
            raise ConfigError(f"--config-dir={config_dir} is not a folder")
        search_path.prepend(
            provider="command-line",
            path=f"file://{os.path.abspath(config_dir)}",
            anchor=SearchPathQuery(provider="schema"),
        )
    GlobalHydra.instance().clear()
    version.setbase("1.3")
    try:
        yield Hydra.create_main_hydra2("train", search_path)
    finally:
        GlobalHydra.instance().clear()


def choices_by_group(loader: Any) -> dict[str, tuple[str, ...]]:
    """Return the choices of each config group. ``loader``: Hydra's config loader."""
    found: dict[str, tuple[str, ...]] = {}
    for name in loader.get_group_options("", ObjectType.GROUP):
        if name not in ("hydra", _SCHEMA_GROUP):
            found[name] = tuple(loader.get_group_options(name))
    return found
