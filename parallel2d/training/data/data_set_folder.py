"""Finds the data files in the folder of a Hugging Face data set. `saved_files` finds the files that
``save_to_disk`` wrote. `files_of_split` finds the files of a split, with or without a README.
`download` downloads the files of a data set on the Hub.

Folders are untrusted. The patterns in a README may name files outside of the folder, or network
addresses, and the data-set library would read these files and addresses. The functions in this
module return only regular files inside the folder. Only `download` uses the network, and only to
contact the Hub.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import tempfile
from typing import Any

import yaml

from parallel2d.base.config.overrides import parse_yaml
from parallel2d.base.errors import ConfigError
from parallel2d.base.files import inside, open_regular, printable, read_json
from parallel2d.training.data.tables import library

_CARDS = ("README.md", ".huggingface.yaml")
_LARGEST_CARD = 16 << 20
_FRONT_MATTER = re.compile(r"\s*---[\r\n]+(.*?)[\r\n]+---(?:\r|\n|$)", re.DOTALL)
# The keys of a configuration in a README that select files. Other keys are arguments of a reader.
_OF_FILES = {"config_name", "data_files", "default", "version", "description", "features"}
# The library would interpret a file name with one of these characters as a pattern or an address.
_NO_PLAIN_NAME = re.compile(r"[*?:\[\]\\]")


def saved_files(path: str, split: str) -> list[str]:
    """Return the Arrow files that ``save_to_disk`` wrote to ``path``, or to the subfolder of the
    split. Return an empty list for any other folder. Raises OSError for a file outside of the
    folder, and ValueError for damaged metadata."""
    folder = path
    if os.path.lexists(os.path.join(path, "dataset_dict.json")):
        folder = os.path.join(path, os.path.basename(split))
        if not os.path.isdir(folder):
            raise ValueError(f"it has no split {split}")
    state = os.path.join(folder, "state.json")
    if not os.path.lexists(state):
        return []
    described = read_json(inside(path, state))
    try:
        names = []
        for file in described["_data_files"]:
            names.append(str(file["filename"]))
    except (TypeError, KeyError):
        raise ValueError("state.json does not list the files") from None
    files: list[str] = []
    for name in names:
        files.append(inside(path, os.path.join(folder, name)))
    return files


def files_of_split(datasets: Any, path: str, subset: str | None, split: str) -> list[str]:
    """Return the data files of a split: the files that the README lists, or by default the files
    that the library finds by their names. Raises OSError for a file outside of the folder, and
    ValueError for an invalid README or file name."""
    by_split = {}
    configurations = _configurations(path)
    if configurations:
        by_split = _of_subset(configurations, subset)
    if not by_split:
        by_split = datasets.data_files.get_data_patterns(path)
    if split not in by_split:
        raise ValueError(f"its splits are {', '.join(map(printable, by_split))}")
    found = datasets.data_files.DataFilesList.from_patterns(by_split[split], base_path=path)
    for file in found:
        inside(path, file)
        name = os.path.relpath(file, path)
        if _NO_PLAIN_NAME.search(name):
            raise ValueError(f"{printable(name)} has one of the characters * ? : [ ] in its name")
    # A set, because several patterns may match the same file
    return sorted({file for file in found if os.path.basename(file) not in _CARDS})


@functools.lru_cache
def download(name: str, subset: str | None, split: str) -> str:
    """Download the files of a split of a data set on the Hub, and return their folder.

    Only the READMEs and the files of the split are downloaded: the split is determined from the
    names of all files. In the offline mode of the library, the folder contains only the files of
    earlier downloads. Raises ValueError for file names that lead out of the folder, and the errors
    of the library.
    """
    where = f"data=hf data.path={name}"
    hub = library("huggingface_hub", "hf-datasets", where)
    datasets = library("datasets", "hf-datasets", where)
    fetch = functools.partial(hub.snapshot_download, name, repo_type="dataset")
    try:
        described = hub.HfApi().dataset_info(name)
    except hub.errors.OfflineModeIsEnabled:
        return str(fetch(local_files_only=True))
    cards = fetch(revision=described.sha, allow_patterns=list(_CARDS))
    with tempfile.TemporaryDirectory() as outline:
        for sibling in described.siblings:
            path = os.path.join(outline, sibling.rfilename)
            if _leads_out(sibling.rfilename):
                raise ValueError(f"it has a file {printable(sibling.rfilename)}")
            os.makedirs(os.path.dirname(path), exist_ok=True)
            if sibling.rfilename in _CARDS:
                shutil.copy(inside(cards, os.path.join(cards, sibling.rfilename)), path)
            else:
                open(path, "x").close()
        files = files_of_split(datasets, outline, subset, split)
        wanted = [os.path.relpath(each, outline) for each in files]
    return str(fetch(revision=described.sha, allow_patterns=[*_CARDS, *wanted]))


def card_configurations(text: str, *, plain: bool = False) -> list[dict[Any, Any]]:
    """Return the ``configs`` in the front matter of a README; with ``plain``, ``text`` is a YAML
    file without a README. Raises ValueError for an invalid form, and for a file pattern that leads
    out of the folder."""
    matter = None if plain else _FRONT_MATTER.match(text)
    if not plain and matter is None:
        return []
    try:
        settings = parse_yaml(text if matter is None else matter[1])
    except (yaml.YAMLError, ConfigError) as error:
        raise ValueError(f"its README: {printable(error)}") from None
    found = settings.get("configs") if isinstance(settings, dict) else None
    if not found:
        return []
    if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
        raise ValueError("its README: configs is not a list of configurations")
    for configuration in found:
        _refuse_outside(configuration)
    return found


def _refuse_outside(configuration: dict[Any, Any]) -> None:
    """Raise ValueError for a file pattern that leads out of the folder."""
    named = [str(configuration.get("data_dir", ""))]
    for patterns in _patterns(configuration).values():
        named += patterns
    for pattern in filter(_leads_out, named):
        raise ValueError(f"its README names {printable(pattern)}, which is outside of it")


def _leads_out(pattern: str) -> bool:
    """True for an absolute path, an address, and a path with ``..``."""
    return pattern.startswith(("/", "~")) or ".." in pattern or bool(re.search(r"[:\\]", pattern))


def _configurations(path: str) -> list[dict[Any, Any]]:
    found: list[dict[Any, Any]] = []
    for name in _CARDS:
        card = os.path.join(path, name)
        if os.path.lexists(card):
            with open_regular(inside(path, card)) as file:
                text = file.read(_LARGEST_CARD).decode("utf-8", "replace")
            # As in the library, the last file with configurations takes precedence.
            found = card_configurations(text, plain=name.endswith(".yaml")) or found
    return found


def _of_subset(configurations: list[dict[Any, Any]], subset: str | None) -> dict[str, list[str]]:
    """Return split -> patterns for the configuration ``subset``, or for the default
    configuration."""
    names = []
    for each in configurations:
        names.append(str(each.get("config_name")))
    chosen = configurations[0] if len(configurations) == 1 and subset is None else None
    for name, each in zip(names, configurations, strict=True):
        is_default = name == "default" or each.get("default") is True
        if name == subset or (subset is None and is_default):
            chosen = each
    if chosen is None:
        raise ValueError(f"data.subset is one of {', '.join(map(printable, names))}")
    unread = sorted(map(str, chosen.keys() - _OF_FILES))
    if unread:
        raise ValueError(
            f"its README sets {printable(unread[0])}, which is not read: it may name files only"
        )
    return _patterns(chosen)


def _patterns(configuration: dict[Any, Any]) -> dict[str, list[str]]:
    """Return split -> patterns. ``data_files`` may have any form that the library accepts."""
    entries = configuration.get("data_files") or []
    entries = [entries] if isinstance(entries, str) else entries
    found: dict[str, list[str]] = {}
    for entry in entries:
        if isinstance(entry, str):
            entry = {"split": "train", "path": entry}
        paths = entry.get("path") if isinstance(entry, dict) else None
        paths = [paths] if isinstance(paths, str) else paths
        if not isinstance(paths, list) or not all(isinstance(each, str) for each in paths):
            raise ValueError("its README: data_files does not list splits and paths")
        found.setdefault(str(entry.get("split")), []).extend(paths)
    return found
