"""A checkpoint of a ``model=hf`` run as the ``transformers`` library saves it: `library_folder`.

The model's settings come from the checkpoint, which may be somebody else's: they are data, checked
before the library builds the structure, without values, that they describe. Nothing is downloaded
and no code of a folder is run.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from parallel2d.checkpoint.convert.sources import MAX_JSON, Source
from parallel2d.errors import ConfigError, first_five
from parallel2d.files.tensor_file import DTYPE_NAMES, DTYPES, parse_json, printable
from parallel2d.models import huggingface, library_forms
from parallel2d.weights.pretrained import behind_links

# What the library reads beside weights, none of which is code or a pickle.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "tokenizer.model",
    "sentencepiece.bpe.model",
    "chat_template.jinja",
)
# What `library_folder` takes in place of what the checkpoint says.
MOVED = ("path", "tokenizer")
_MAX_FILE = 256 * 2**20  # bytes


@dataclass
class LibraryFolder:
    """The weights under the names that the library saves, and the model that they belong to."""

    source: Source
    model: Any
    path: str | None  # the folder that the run began with
    # `path` and `end_token` of the run's data; `chosen`, if the caller gave the path
    tokenizer: Mapping[str, Any]

    def files(self, dtype: str) -> dict[str, bytes]:
        """Name -> content of what is beside the weights, which are in ``dtype`` (float32, ...)."""
        config, generation = library_forms.saved_configurations(self.model, dtype)
        files = {"config.json": _json(config)}
        if generation is not None:
            files["generation_config.json"] = _json(generation)
        if self.path is not None:
            names = ("generation_config.json", "preprocessor_config.json")
            files |= _files_of_folder(self.path, names)
        return files | self._tokenizer_files()

    def _tokenizer_files(self) -> dict[str, bytes]:
        """Those of the folder, unless the run read another tokenizer.json."""
        of_run = _tokenizer_of_data(self.tokenizer)
        of_folder = {}
        if self.path is not None:
            of_folder = _files_of_folder(self.path, TOKENIZER_FILES)
        if not of_run or not of_folder:
            return of_run or of_folder
        if of_run["tokenizer.json"] == of_folder.get("tokenizer.json"):
            return of_folder  # which says more about it
        if self.tokenizer.get("chosen"):
            return of_run
        raise ConfigError(
            f"the run read data.tokenizer={printable(self.tokenizer['path'])}, which is not the "
            "tokenizer of model.path: say which one goes along with --model tokenizer=FILE"
        )


def is_library_model(source: Source) -> bool:
    """Whether the checkpoint is of a ``model=hf`` run."""
    return _settings(source).get("family") == "hf"


def _settings(source: Source) -> dict[str, Any]:
    settings = source.layout.get("model")
    if isinstance(settings, dict):
        return settings
    return {}


def library_folder(
    source: Source, path: str | None = None, tokenizer: str | None = None
) -> LibraryFolder:
    """``source`` as the library saves it. ``path`` and ``tokenizer``: where the folder of the
    run's model.path and the file of its data.tokenizer are now, if they were moved.

    Raises `ConfigError` for settings that describe no model, and for weights that do not fit it.
    """
    settings = _settings(source)
    if source.layout.get("adapters"):
        raise ConfigError(
            "the checkpoint is of a run that trained adapters (model.adapter): --to peft writes "
            "them; merge them into the model with peft's merge_and_unload"
        )
    model, path = describe_saved(settings, path)
    names = _stored_names(source, model)
    _check_shapes(source, model, names)
    parameters = {name: _on_meta(source, stored) for name, stored in names.items()}
    groups = library_forms.saved_groups(model, parameters)
    reader = _GroupReader(source, model, names)
    tensors = {}
    for group in groups:
        for saved, tensor in group.saved.items():
            tensors[f"model/{saved}"] = DTYPE_NAMES[tensor.dtype], tuple(tensor.shape)
            reader.group_of[f"model/{saved}"] = group.parameters
    renamed = Source("parallel2d", tensors, reader.read)
    data = source.layout.get("tokenizer")
    text = dict(data) if isinstance(data, dict) else {}
    if tokenizer is not None:
        text |= {"path": tokenizer, "chosen": True}
    return LibraryFolder(renamed, model, path, text)


def describe_saved(settings: Mapping[str, Any], path: str | None) -> tuple[Any, str | None]:
    """The model, on meta, that the ``model`` section of a run describes, and its folder. Raises
    `ConfigError` for a section that is damaged, and for a folder that is not there."""
    kinds = {"path": str | None, "architecture": str | None, "arguments": dict, "head": str}
    for key, kind in kinds.items():
        if not isinstance(settings.get(key), kind):
            raise ConfigError(f"the checkpoint's model.{key} is {printable(settings.get(key))}")
    head = settings["head"]
    if head not in ("auto", *huggingface.HEADS):
        raise ConfigError(f"the checkpoint's model.head is {printable(head)}")
    if settings["path"] is not None:
        path = path or settings["path"]
        if not os.path.isdir(path):
            raise ConfigError(
                f"the run began with model.path={printable(path)}, which is not here: say where it "
                "is with --model path=FOLDER"
            )
    elif path is not None:
        raise ConfigError("--model path: the run began with an architecture, not with a folder")
    try:
        model = library_forms.describe_model(
            path, settings["architecture"], settings["arguments"], head
        )
    except ImportError as error:
        raise ConfigError(str(error)) from None
    # The settings may be anything: the library raises what it likes.
    except Exception as error:
        raise ConfigError(f"the checkpoint's model: {type(error).__name__}: {error}") from error
    return model, path


def _stored_names(source: Source, model: Any) -> dict[str, str]:
    """Name in the library's model -> name of the tensor in ``source``. Raises `ConfigError` for
    names that only one of them has."""
    found: dict[str, str] = {}
    missing = []
    for name in library_forms.saved_names(model):
        stored = _stored_name(source, model, name)
        if stored is None:
            missing.append(f"{name} is missing")
        else:
            found[name] = stored
    weights = {name for name in source.tensors if name.startswith("model/")}
    left = sorted(weights - set(found.values()))
    unknown = [f"{printable(name.removeprefix('model/'))} is unknown" for name in left]
    if missing or unknown:
        raise ConfigError(
            f"the weights do not fit {type(model).__name__}: {first_five(missing + unknown)}"
        )
    return found


def _stored_name(source: Source, model: Any, name: str) -> str | None:
    """The name in ``source`` of the parameter ``name`` or of one that is tied to it."""
    # The checkpoint keeps a tied parameter under its first name, the library under one it chose.
    same = {name, source.tied.get(name)}
    same |= {first for other, first in source.tied.items() if first in same or other in same}
    same |= {other for other, first in source.tied.items() if first in same}
    for candidate in sorted(filter(None, same)):
        if f"model/{candidate}" in source.tensors:
            return f"model/{candidate}"
    return None


def _check_shapes(source: Source, model: Any, names: Mapping[str, str]) -> None:
    here = model.state_dict()
    wrong = []
    for name, stored in names.items():
        shape = source.tensors[stored][1]
        if shape != tuple(here[name].shape):
            wrong.append(f"{name} is {list(shape)}, the model's is {list(here[name].shape)}")
    if wrong:
        raise ConfigError(f"the weights do not fit {type(model).__name__}: {first_five(wrong)}")


def _on_meta(source: Source, stored: str) -> Tensor:
    dtype, shape = source.tensors[stored]
    return torch.empty(shape, dtype=DTYPES[dtype], device="meta")


class _GroupReader:
    """Reads tensors under the names that the library saves. Those of one group are made together
    and kept until one of another group is read."""

    def __init__(self, source: Source, model: Any, names: Mapping[str, str]) -> None:
        self.group_of: dict[str, list[str]] = {}
        self._source = source
        self._model = model
        self._names = names
        self._parameters: list[str] = []
        self._saved: dict[str, Tensor] = {}

    def read(self, name: str) -> Tensor:
        parameters = self.group_of[name]
        if parameters != self._parameters:
            self._saved = {}  # before the next group is read, or two would be held
            values = {each: self._source.read(self._names[each]) for each in parameters}
            self._saved = library_forms.saved_form(self._model, values)
            self._parameters = parameters
        return self._saved[name.removeprefix("model/")]


def _json(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()


def _files_of_folder(path: str, names: tuple[str, ...]) -> dict[str, bytes]:
    """The content of those files that the folder has."""
    found = {}
    for name in names:
        if os.path.lexists(os.path.join(path, name)):
            folder, leaf = behind_links(path, name)
            found[name] = folder.read(leaf, _MAX_FILE)
    return found


def _tokenizer_of_data(tokenizer: Mapping[str, Any]) -> dict[str, bytes]:
    """The files by which ``AutoTokenizer`` reads the tokenizer.json of data.tokenizer; none for
    bytes."""
    path = tokenizer.get("path")
    if not isinstance(path, str) or path == "bytes":
        return {}
    path = os.path.expanduser(path)
    if not os.path.isfile(path):
        raise ConfigError(
            f"the run's data.tokenizer={printable(path)} is not here: say where it is with --model "
            "tokenizer=FILE"
        )
    folder, name = behind_links(*os.path.split(path))
    content = folder.read(name, MAX_JSON)
    # Any other file that the checkpoint names is not copied.
    if not isinstance(parse_json(content, name).get("model"), dict):
        raise ConfigError(f"the run's data.tokenizer={printable(path)} is no tokenizer.json")
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    if isinstance(end := tokenizer.get("end_token"), str):
        settings["eos_token"] = end
    return {"tokenizer.json": content, "tokenizer_config.json": _json(settings)}
