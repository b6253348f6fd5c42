"""What the words of a command line choose, and what they might choose: `survey`, for ``--help`` and
completion."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from parallel2d.config.composition import register
from parallel2d.config.explanation import explain
from parallel2d.config.search_path import choices_by_group, initialized
from parallel2d.config.words import command_options, hydra_words, may_sweep
from parallel2d.errors import ConfigError


@dataclass(frozen=True)
class Survey:
    """What the words of a command line choose, and what they might choose."""

    composed: DictConfig  # with Hydra's own part
    groups: dict[str, tuple[str, ...]]  # group -> its choices

    @property
    def chosen(self) -> dict[str, str]:
        """Group -> the choice that holds, for the groups that the configuration has."""
        choices = self.composed.hydra.runtime.choices
        return {group: str(choices[group]) for group in self.groups if group in choices}

    def section(self, key: str) -> dict[str, Any]:
        """The keys below ``key`` and their values, as plain data: ``???`` where one must be given.
        Empty for a key that is no section; the empty key is the whole configuration."""
        found = OmegaConf.select(self.composed, key) if key else self.composed
        if not OmegaConf.is_dict(found):
            return {}
        return OmegaConf.to_container(found, resolve=False)  # type: ignore[return-value]

    def value(self, key: str) -> Any:
        """The value of ``key``, as in `section`."""
        parent, _, last = key.rpartition(".")
        return self.section(parent)[last]


def survey(arguments: Sequence[str]) -> Survey:
    """What there is to choose from, and what ``arguments`` choose. Values are not checked, required
    ones may be missing, and words with several values for a sweep are left out. Raises
    `ConfigError` for words that do not compose."""
    register()
    words = hydra_words(arguments)
    parsed = command_options(words)
    if parsed is None:
        raise ConfigError(f"{' '.join(words)} cannot be read; --help alone lists all options")
    chosen = [word for word in parsed.overrides if not may_sweep([word])]
    name = parsed.config_name or "train"
    try:
        with initialized(parsed.config_dir) as hydra_instance:
            composed = hydra_instance.compose_config(name, chosen, RunMode.RUN)
            groups = choices_by_group(hydra_instance.config_loader)
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise ConfigError(explain(words, error)) from None
    return Survey(composed, groups)
