"""Hydra at the door: from command-line words to a validated `TrainConfig` and a run directory.

Registers the schema, runs Hydra, and turns what is wrong with the words into one message that names
the key, the value, what is allowed and the nearest valid choice. Nothing behind the door knows
Hydra.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from parallel2d import files, obsolete
from parallel2d.config import (
    BUCKETINGS,
    CHECKPOINTINGS,
    COMPILES,
    OPTIMIZERS,
    PRECISIONS,
    STRATEGIES,
    CheckpointConfig,
    ConfigError,
    CustomModel,
    HuggingFaceModel,
    LaunchConfig,
    LlamaModel,
    MetricsConfig,
    ProfileConfig,
    SchedulerConfig,
    SyncConfig,
    TrainConfig,
)

_PRESETS: dict[str, dict[str, Any]] = {
    "strategy": dict(STRATEGIES),
    "bucketing": dict(BUCKETINGS),
    "precision": dict(PRECISIONS),
    "activation_checkpointing": dict(CHECKPOINTINGS),
    "compile": dict(COMPILES),
    "sync": {"every_step": SyncConfig()},
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
# whose content no schema knows
_OPEN = ("model.arguments.", "model.arguments=", "model.tensor_plan=")
_FOLDER = re.compile(r"\+*hydra\.(run|sweep)\.dir=(?P<path>.+)")
_EMPTY_FOLDER = re.compile(r"\+*hydra\.(run|sweep)\.dir=[\s'\"]*")
_BRACKET = re.compile(r"(?<!\\)([\[\]])")
_EXPECTED = {
    "IntegerNode": "a whole number",
    "FloatNode": "a number",
    "BooleanNode": "true or false",
    "StringNode": "text",
    "UnionNode": "a whole number or auto",
    "ListConfig": "a list [a,b]",
    "DictConfig": "a mapping {a: b}",
}


@dataclass(frozen=True)
class Job:
    """One composed job: its validated configuration, its directory, and the words it was started
    with."""

    config: TrainConfig
    run_dir: str
    overrides: tuple[str, ...]
    restarted: bool = False  # these workers replace others of the same job


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


def run(
    arguments: Sequence[str], task: Callable[[Job], None], *, refuse_multirun: str | None = None
) -> None:
    """Composes ``arguments`` and calls ``task`` once per job, each with a run directory of its own.

    ``refuse_multirun``: why ``-m`` cannot be used here, if it cannot. Raises `ConfigError` for
    anything wrong with the words.
    """
    register()
    words = _open_words(arguments)
    if any(word.startswith("--experimental-rerun") for word in words):
        raise ConfigError("--experimental-rerun is refused: it executes what the file contains")
    if any(_EMPTY_FOLDER.fullmatch(word) for word in words):
        raise ConfigError(
            "hydra.run.dir is empty: it would be the current folder; name one, or leave it out "
            "for a new one"
        )
    if refuse_multirun and any(word in ("-m", "--multirun") for word in words):
        raise ConfigError(f"-m is refused here: {refuse_multirun}")

    for word in words:
        if (named := _FOLDER.fullmatch(word)) is not None:
            _check_links(named["path"].strip("'\""))

    failures: list[tuple[str, Exception]] = []

    def call(composed: DictConfig) -> None:
        hydra_config = HydraConfig.get()
        overrides = tuple(hydra_config.overrides.task)
        _check_links(hydra_config.runtime.output_dir)
        try:
            task(
                Job(
                    to_config(composed), os.path.abspath(hydra_config.runtime.output_dir), overrides
                )
            )
        # kept from Hydra, which would print its own account of it; the other jobs still run
        except Exception as error:
            failures.append((" ".join(overrides), error))

    argv, full_error = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv = [argv[0], *words]
    # Hydra then hands its exceptions on instead of printing them and exiting
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        hydra.main(config_path="pkg://parallel2d.conf", config_name="train", version_base="1.3")(
            call
        )()
    # ValueError: precision=32, compile=true
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise ConfigError(_explain(words, error)) from None
    except OSError as error:
        raise ConfigError(
            f"hydra.run.dir: the run directory cannot be made or written: {error}"
        ) from None
    finally:
        sys.argv = argv
        if full_error is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = full_error
    if len(failures) > 1:
        raise ConfigError("\n".join(f"[{overrides}] {error}" for overrides, error in failures))
    if failures:
        raise failures[0][1]


def preview(arguments: Sequence[str]) -> TrainConfig | None:
    """What ``arguments`` compose to, without a run directory or any other trace.

    None where `run` may not compose one job (``-m``, ``--help``, ``--cfg``, several values for a
    key). Raises `ConfigError` for anything wrong with the words.
    """
    from hydra import compose, initialize_config_module
    from hydra._internal.utils import get_args_parser
    from hydra.core.global_hydra import GlobalHydra

    register()
    try:
        with contextlib.redirect_stderr(None):
            parsed, unknown = get_args_parser().parse_known_args(_open_words(arguments))
    except SystemExit:
        return None
    if unknown:
        name = unknown[0].lstrip("-").partition("=")[0]
        hint = (
            obsolete.answer(name)
            or f"settings are words key=value, such as {name}=VALUE if that is one"
        )
        raise ConfigError(f"{unknown[0]} is no option of this command: {hint}; --help lists all")
    if (
        parsed.help
        or parsed.hydra_help
        or parsed.cfg
        or parsed.info
        or parsed.multirun
        or parsed.config_path
    ):
        return None
    words = list(parsed.overrides)
    if parsed.config_dir:
        words.append(f"hydra.searchpath=[file://{os.path.abspath(parsed.config_dir)}]")
    GlobalHydra.instance().clear()
    try:
        with initialize_config_module("parallel2d.conf", version_base="1.3"):
            return to_config(compose(parsed.config_name or "train", overrides=words))
    except ConfigError:
        raise
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        if _may_sweep(parsed.overrides):
            return None
        raise ConfigError(_explain(_open_words(arguments), error)) from None
    finally:
        GlobalHydra.instance().clear()


def _check_links(folder: str) -> None:
    try:
        files.check_no_planted_links(folder)
    except OSError as error:
        raise ConfigError(
            f"hydra.run.dir: {files.printable(error.filename, 500)}: {error.strerror}"
        ) from None


def _may_sweep(words: Sequence[str]) -> bool:
    """Whether a word has several values: a sweep, if Hydra was told so, by ``-m`` or in a file."""
    try:
        return any(
            override.is_sweep_override()
            for override in OverridesParser.create().parse_overrides(list(words))
        )
    except HydraException:
        return False


def _open_words(arguments: Sequence[str]) -> list[str]:
    """The factory's own arguments are no keys of ours: Hydra wants ++ before a key that its schema
    does not have. In a pattern of ``model.tensor_plan={layers.*.w[qkv]: colwise}`` brackets belong
    to the pattern, which Hydra takes only with backslashes."""
    words = [
        _BRACKET.sub(r"\\\1", word) if word.lstrip("+").startswith("model.tensor_plan={") else word
        for word in arguments
    ]
    return [f"++{word}" if word.startswith(_OPEN) else word for word in words]


def to_config(composed: DictConfig) -> TrainConfig:
    """The validated dataclasses of a composed config. Raises `ConfigError` with every problem."""
    if missing := sorted(OmegaConf.missing_keys(composed)):
        raise ConfigError("\n".join(f"{key} is required and was not given" for key in missing))
    try:
        config = OmegaConf.to_object(composed)
    except OmegaConfBaseException as error:
        raise ConfigError(_first_line(error)) from None
    assert isinstance(config, TrainConfig)
    if extra := _extra_keys(composed):
        known = [key for key in _dotted_keys(composed) if not key.startswith(tuple(extra))]
        hints = ((key, obsolete.answer(key)) for key in extra)
        raise ConfigError(
            "\n".join(
                f"unknown key {key}{f': {hint}' if hint else _nearest(key, known)}"
                for key, hint in hints
            )
        )
    config.validate()
    return config


def to_yaml(config: TrainConfig) -> str:
    """The configuration as text, for workers and for people; `from_yaml` reads it back."""
    return OmegaConf.to_yaml(OmegaConf.structured(config), resolve=True)


def from_yaml(text: str) -> TrainConfig:
    """The configuration that `to_yaml` wrote. Data only: nothing in it is instantiated but the
    schema's own dataclasses."""
    loaded = OmegaConf.create(text)
    schema = OmegaConf.structured(TrainConfig)
    families = {"llama": LlamaModel, "custom": CustomModel, "hf": HuggingFaceModel}
    family = loaded.model.family
    if family not in families:
        raise ConfigError(f"model.family={family} is not one of {', '.join(families)}")
    schema.model = OmegaConf.structured(families[family])
    return to_config(OmegaConf.merge(schema, loaded))  # type: ignore[arg-type]


def _explain(words: Sequence[str], error: Exception) -> str:
    """One line per wrong word, found by trying each on its own; the error's own first line when
    none is."""
    from hydra import compose, initialize_config_module
    from hydra._internal.utils import get_args_parser
    from hydra.core.global_hydra import GlobalHydra

    arguments = get_args_parser().parse_args(list(words))
    if arguments.config_dir or arguments.config_name or arguments.config_path:
        return _first_line(error)
    GlobalHydra.instance().clear()
    lines: list[str] = []
    with initialize_config_module("parallel2d.conf", version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        groups = set(loader.list_groups("")) - {"hydra"}
        chosen: list[str] = []
        values = []
        for word in arguments.overrides:
            try:
                override = OverridesParser.create(loader).parse_override(word)
            except HydraException as wrong:
                reason = str(wrong).splitlines()[0]
                advice = "write key=value, and quote special characters"
                if word.lstrip("+").startswith("model.tensor_plan="):
                    advice = (
                        "patterns may hold * ? and [abc] here; others go in a YAML file or "
                        "come from package.module:function"
                    )
                lines.append(f"{word} cannot be read ({reason}); {advice}")
                continue
            key = str(override.key_or_group)
            if override.is_sweep_override() or key.startswith("hydra"):
                choices = [part.strip() for part in str(override.get_value_string()).split(",")]
                if key not in groups or not override.is_sweep_override():
                    continue
            else:
                choices = [
                    str(override.value() if override.is_delete() else override.get_value_string())
                ]
            if key not in groups:
                values.append((word, override))
                continue
            allowed = [
                name for name in loader.get_group_options(key) if not name.endswith("_schema")
            ]
            for choice in choices:
                if choice not in allowed:
                    hint = obsolete.strategy_answer(choice) if key == "strategy" else None
                    near = f"; {hint}" if hint else _nearest(choice, allowed)
                    lines.append(f"{key}={choice} is not one of {', '.join(allowed)}{near}")
                elif not override.is_sweep_override():
                    chosen.append(f"{key}={choice}")
        base = compose("train", overrides=chosen)
        keys = _dotted_keys(base)
        lines += [
            line for word, override in values for line in _try(base, keys, groups, word, override)
        ]
    return "\n".join(lines) or _first_line(error)


def _try(
    base: DictConfig, keys: list[str], groups: set[str], word: str, override: Any
) -> list[str]:
    key = override.key_or_group
    if override.is_delete():
        return [f"{word}: keys cannot be removed, only set"]
    node = OmegaConf.select(base, key, throw_on_missing=False) if key in keys else None
    if key not in keys:
        if (instead := obsolete.answer(key)) is not None:
            return [f"unknown key {key} (given as {word}): {instead}"]
        parent = key.rpartition(".")[0]
        siblings = [k for k in keys if k.rpartition(".")[0] == parent] if parent in keys else []
        listed = (
            f"; {parent} has {', '.join(k.rpartition('.')[2] for k in siblings)}"
            if siblings
            else ""
        )
        near = _nearest(key, [*keys, *groups], 0.8) or _nearest_last(key, siblings or keys)
        return [f"unknown key {key} (given as {word}){near}{listed}"]
    if OmegaConf.is_dict(node) and not isinstance(override.value(), dict):
        inside = ", ".join(k for k in keys if k.startswith(key + "."))
        return [f"{word}: {key} is a group of keys, not a value; set one of {inside}"]
    try:
        trial = base.copy()
        OmegaConf.update(trial, key, override.value(), merge=True)
        OmegaConf.resolve(trial)
    except OmegaConfBaseException:
        typed = _node(base, key)
        expected = _EXPECTED.get(type(typed).__name__, "of another type")
        return [f"{key}={override.value()} must be {expected}"]
    return []


def _node(base: DictConfig, key: str) -> Any:
    parent, _, last = key.rpartition(".")
    container = OmegaConf.select(base, parent) if parent else base
    return container._get_node(last)


def _dotted_keys(config: DictConfig, prefix: str = "") -> list[str]:
    keys: list[str] = []
    for key in map(str, config):
        keys.append(f"{prefix}{key}")
        node = config._get_node(key)
        if isinstance(node, DictConfig) and not node._is_missing() and not node._is_none():
            keys += _dotted_keys(node, f"{prefix}{key}.")
    return keys


def _extra_keys(config: DictConfig, prefix: str = "") -> list[str]:
    """Keys that ``+key=value`` added and that the schema does not have: nothing would read them."""
    kind = OmegaConf.get_type(config)
    known = (
        {item.name for item in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else None
    )
    extra: list[str] = []
    for key in map(str, config):
        node = config._get_node(key)
        if known is not None and key not in known:
            extra.append(f"{prefix}{key}")
        elif isinstance(node, DictConfig) and not node._is_missing() and not node._is_none():
            extra += _extra_keys(node, f"{prefix}{key}.")
    return extra


def _nearest(word: str, choices: Sequence[str], alike: float = 0.6) -> str:
    if word.lower() in choices:
        return f"; did you mean {word.lower()}?"
    close = difflib.get_close_matches(word, choices, n=1, cutoff=alike)
    return f"; did you mean {close[0]}?" if close else ""


def _nearest_last(key: str, keys: Sequence[str]) -> str:
    """As `_nearest`, by the last part of the keys alone: ``steps`` is train.steps or
    profile.steps."""
    close = difflib.get_close_matches(
        key.rpartition(".")[2], [k.rpartition(".")[2] for k in keys], n=1, cutoff=0.6
    )
    return (
        f"; did you mean {' or '.join(k for k in keys if k.rpartition('.')[2] == close[0])}?"
        if close
        else ""
    )


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if error.__cause__ is not None and len(lines) < 2:
        lines += [line.strip() for line in str(error.__cause__).splitlines()[:1]]
    return "; ".join(lines[:2])
