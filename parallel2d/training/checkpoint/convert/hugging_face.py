"""Reads and writes folders of ``transformers`` and ``peft``: `read_llama`, `write_model`,
`write_adapter`.

The settings in a folder or checkpoint are treated as untrusted: they are checked before a library
builds a model on meta from them. Nothing is downloaded, and no code from a folder is executed.
"""

from __future__ import annotations

import filecmp
import json
import os
import re
import shutil
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from parallel2d.base.errors import ConfigError, first_five
from parallel2d.base.files import is_number, printable, read_json
from parallel2d.base.files.tensor_file import DTYPES
from parallel2d.models import adapters, huggingface
from parallel2d.parallel.weights.pretrained import has_weights, read_headers
from parallel2d.training.checkpoint.convert.formats import Source, source_of
from parallel2d.training.checkpoint.storage import as_config_error

# Names in our Llama -> names in the library's Llama. The weights need no conversion, because both
# models apply the rotary embedding to the two halves of a head.
_TOP = {
    "embedding.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    "attention_norm": "input_layernorm",
    "feed_forward_norm": "post_attention_layernorm",
}
_ARGUMENTS = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "hidden_dim": "intermediate_size",
    "vocab_size": "vocab_size",
    "max_seq_len": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
    "rope_theta": "rope_parameters",
    "tie_embeddings": "tie_word_embeddings",
}
_SIZES = {
    "embedding.weight": ("vocab_size", "dim"),
    "layers.0.feed_forward.w1.weight": ("hidden_dim",),
}
# Settings of the library that must have the values that follow from our model's arguments
_FIXED = ("attention_bias", "mlp_bias", "hidden_act", "head_dim", "rope_parameters")
# Keys of ``given`` in `write_model` that replace paths in the checkpoint of a ``model=hf`` run
_MOVED = ("path", "tokenizer")
# Files that the library reads in addition to the weights and config.json. None of them is code or a
# pickle.
_NO_TOKENIZER = ("generation_config.json", "preprocessor_config.json")
_BESIDE = re.compile(
    r"(tokenizer|tokenizer_config|special_tokens_map|added_tokens|vocab|chat_template)"
    r"\.(json|txt|model|jinja)|merges\.txt|spiece\.model|sentencepiece\.bpe\.model"
    r"|(generation|preprocessor)_config\.json"
)
_MAX_TOKENIZER = 256 * 2**20  # bytes


def read_llama(path: str) -> Source:
    """Read a Llama folder, and map its tensors to our names. Raises `ConfigError` for another
    model, and for features that our Llama lacks: biases, scaled rotary embedding, a head dim other
    than dim / heads."""
    what = os.path.basename(os.path.abspath(path))
    with as_config_error(f"{what}/config.json"):
        arguments = _arguments_of(huggingface.saved_config(path, None, {}))
    if not has_weights(path):
        raise ConfigError(f"{what} holds no safetensors weights")
    names, tied = _llama_names(arguments["n_layers"]), {}
    if arguments["tie_embeddings"]:
        del names["output.weight"]
        tied = {"output.weight": "embedding.weight"}
    headers = read_headers(path)
    problems = []
    for name in names.values():
        if name not in headers:
            problems.append(f"{name} is missing")
    for name in sorted(headers.keys() - {*names.values(), "lm_head.weight"}):
        # A folder may also contain copies of tied weights, and tables of the rotary embedding,
        # which are not trained.
        if not name.endswith("rotary_emb.inv_freq"):
            problems.append(f"{printable(name)} is unknown")
    if problems:
        raise ConfigError(f"{what} does not fit a Llama: {first_five(problems)}")
    places = {}
    for ours, theirs in names.items():
        places[f"model/{ours}"] = headers[theirs]
    return source_of("hf", places, {"layout": {"model": arguments}, "tied": tied})


def _arguments_of(config: Any) -> dict[str, Any]:
    """Convert the library's configuration to the arguments of our Llama. Raises ValueError for a
    model that our Llama cannot represent."""
    if config.model_type != "llama":
        raise ValueError(f"a {config.model_type} cannot be converted, only a llama")
    arguments: dict[str, Any] = {}
    for ours, name in _ARGUMENTS.items():
        arguments[ours] = getattr(config, name)
    arguments["rope_theta"] = arguments["rope_theta"]["rope_theta"]
    for ours, value in arguments.items():
        if type(value) is not bool and (not is_number(value) or value <= 0):
            raise ValueError(f"{ours}={printable(value)} must be a number above 0")
    same = huggingface.saved_config(None, "llama", _library_arguments(arguments))
    for key in _FIXED:
        value = getattr(config, key)
        if value != getattr(same, key):
            raise ValueError(f"{key}={printable(value)} is not what parallel2d's Llama computes")
    return arguments


def llama_arguments(layout: Any) -> dict[str, Any]:
    """Return the arguments of our Llama that are stored in the ``layout`` of a checkpoint; empty if
    the model is not our Llama."""
    if not isinstance(layout, dict):
        return {}
    if "n_heads" in layout and "n_kv_heads" in layout:
        arguments: dict[str, Any] = {}
        for key in _ARGUMENTS:
            if key in layout:
                arguments[key] = layout[key]
        return arguments
    return next(filter(None, map(llama_arguments, layout.values())), {})


def _llama_names(layers: int) -> dict[str, str]:
    """Map our parameter names to the library's."""
    names = dict(_TOP)
    for number in range(layers):
        for ours, theirs in _LAYER.items():
            names[f"layers.{number}.{ours}.weight"] = f"model.layers.{number}.{theirs}.weight"
    return names


def _library_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Convert our Llama's arguments to the library's. Raises `ConfigError` for missing
    arguments."""
    missing = []
    for key in _ARGUMENTS:
        if key not in arguments:
            missing.append(f"--model {key}=...")
    if missing:
        raise ConfigError(
            f"the source lacks arguments that transformers needs; add {' '.join(missing)}"
        )
    found = {}
    for ours, theirs in _ARGUMENTS.items():
        found[theirs] = arguments[ours]
    rope = {"rope_type": "default", "rope_theta": arguments["rope_theta"]}
    return {**found, "rope_parameters": rope}


def _as_library_model(source: Source, given: Mapping[str, str]) -> Source:
    """Return ``source``, which is our Llama, with the parameter names and settings of the library's
    Llama."""
    arguments = llama_arguments(source.layout)
    for key, value in given.items():
        with as_config_error(f"--model {key}={value} is not a number"):
            arguments[key] = json.loads(value)
    # The shapes of the weights determine these arguments, so the user need not pass them.
    for name, keys in _SIZES.items():
        _, shape = source.tensors.get(f"model/{name}", ("", ()))
        arguments |= dict(zip(keys, shape, strict=False))
    layers = [name for name in source.tensors if name.endswith(".attention_norm.weight")]
    arguments["n_layers"] = len(layers)
    arguments["tie_embeddings"] = "output.weight" in source.tied
    names, ours_of = {}, {}
    for ours, theirs in _llama_names(len(layers)).items():
        names[f"model/{ours}"] = f"model/{theirs}"
        ours_of[f"model/{theirs}"] = f"model/{ours}"
    settings = {"path": None, "architecture": "llama", "head": "causal_lm"}
    return replace(
        source,
        tensors={names.get(name, name): each for name, each in source.tensors.items()},
        read=lambda name: source.read(ours_of[name]),
        layout={"model": {**settings, "arguments": _library_arguments(arguments)}},
        tied={_TOP.get(name, name): _TOP.get(first, first) for name, first in source.tied.items()},
    )


def write_model(source: Source, folder: str, shard_bytes: int, given: Mapping[str, str]) -> int:
    """Write a new ``folder`` for ``from_pretrained``; return the number of parameters.

    At most one file of ``shard_bytes`` is in memory at a time.

    Args:
        given: for our Llama, arguments that are missing in the source. For a ``model=hf`` run,
            ``path`` and ``tokenizer``: the current locations of the run's model.path folder and
            data.tokenizer file.

    Raises `ConfigError` for invalid settings and for weights of another model.
    """
    settings = source.layout.get("model")
    of_library = isinstance(settings, dict) and settings.get("family") == "hf"
    allowed = _MOVED if of_library else tuple(_ARGUMENTS)
    for key in given:
        if key not in allowed:
            raise ConfigError(f"--model {key}: it is not one of {', '.join(allowed)}")
    moved = given
    if not of_library:
        source, moved = _as_library_model(source, given), {}
    os.mkdir(folder)
    model = _library_model(source.layout, folder, **moved)
    stored = _stored_names(source, model)
    floating = []
    for name in stored.values():
        dtype = DTYPES[source.tensors[name][0]]
        if dtype.is_floating_point:
            floating.append(dtype)
    # The library writes the model's dtype to its configuration: here the widest dtype of the
    # weights.
    model.to(max(floating, key=lambda dtype: dtype.itemsize, default=torch.float32))
    # For a model with offloaded weights, `save_pretrained` reads the values for one file at a time
    # through this hook of accelerate. `save_pretrained` also warns that the values must fit in
    # memory.
    model.hf_device_map = {"": "disk"}
    model._hf_hook = SimpleNamespace(weights_map=_Values(source, stored))
    huggingface.library().logging.disable_progress_bar()
    with as_config_error("transformers"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(folder, max_shard_size=shard_bytes)
    return len(stored)


@dataclass
class _Values:
    """Maps the library's parameter names to values, which are read on access."""

    source: Source
    stored: Mapping[str, str]

    def __getitem__(self, name: str) -> Tensor:
        return self.source.read(self.stored[name])


def _library_model(
    layout: Mapping[str, Any], folder: str, path: str | None = None, tokenizer: str | None = None
) -> Any:
    """Build the model of this ``layout`` on meta, and copy the other files of the run's model
    folder to ``folder``."""
    if layout.get("adapters"):
        raise ConfigError(
            "the checkpoint is of a run that trained adapters (model.adapter): --to peft writes "
            "them; merge them into the model with peft's merge_and_unload"
        )
    settings = layout["model"]
    if path is not None and settings.get("path") is None:
        raise ConfigError("--model path: the run began with an architecture, not with a folder")
    path = path or settings.get("path")
    if path is not None and not os.path.isdir(str(path)):
        raise ConfigError(
            f"the run began with model.path={printable(path)}, which does not exist here; give its "
            "path with --model path=FOLDER"
        )
    with as_config_error("the checkpoint's model"):
        config = huggingface.saved_config(path, settings["architecture"], settings["arguments"])
        # The attention kernel is not part of a saved model; "eager" is always available.
        config._attn_implementation = "eager"
        # auto_map refers to code in the original folder, which is not copied.
        vars(config).pop("auto_map", None)
        with torch.device("meta"):
            model: Any = huggingface.model_class(config, settings["head"])(config)
        of_folder = []
        if path is not None:
            of_folder = list(filter(_BESIDE.fullmatch, os.listdir(path)))
        if "generation_config.json" in of_folder:
            generation = huggingface.library().GenerationConfig
            model.generation_config = generation.from_pretrained(path, local_files_only=True)
    for name in of_folder:
        shutil.copy(os.path.join(str(path), name), folder)
    _copy_tokenizer(layout.get("tokenizer"), tokenizer, folder)
    return model


def _stored_names(source: Source, model: Any) -> dict[str, str]:
    """Map the name of each parameter that the library saves to its name in ``source``. Raises
    `ConfigError` if the names or shapes of ``source`` and ``model`` differ."""
    there = {}
    for name in source.tensors:
        there[name.removeprefix("model/")] = name
    # A checkpoint stores a tied parameter under its first name, but the library may use another of
    # its names.
    there |= {name: f"model/{first}" for name, first in source.tied.items()}
    expected = model.state_dict()
    for name in (*(model._keys_to_ignore_on_save or ()), *model.all_tied_weights_keys):
        expected.pop(name, None)
    found = {}
    for name in expected:
        if name in there:
            found[name] = there[name]
    problems = []
    for name in sorted(expected.keys() - found):
        problems.append(f"{name} is missing")
    for name in sorted(source.tensors.keys() - found.values()):
        problems.append(f"{printable(name.removeprefix('model/'))} is unknown")
    for name, stored in found.items():
        shape, of_model = list(source.tensors[stored][1]), list(expected[name].shape)
        if shape != of_model:
            problems.append(f"{name} is {shape}, the model's is {of_model}")
    if problems:
        raise ConfigError(f"the weights do not fit {type(model).__name__}: {first_five(problems)}")
    return found


def _copy_tokenizer(given: Any, moved: str | None, folder: str) -> None:
    """Copy the tokenizer.json of the run's data. ``moved``: the current location of this file, if
    it has moved."""
    data = given if isinstance(given, dict) else {}
    file = moved or data.get("path")
    # The byte tokenizer has no file.
    if not isinstance(file, str) or file == "bytes":
        return
    file = os.path.realpath(os.path.expanduser(file))
    if os.path.isdir(file):
        file = os.path.join(file, "tokenizer.json")
    # A checkpoint may name any file, so only a valid tokenizer is copied.
    what = f"the run's data.tokenizer={printable(file)} is not a tokenizer.json"
    with as_config_error(f"{what} on this machine; give its path with --model tokenizer=FILE"):
        read_json(file, _MAX_TOKENIZER)["model"]["type"]
    target = os.path.join(folder, "tokenizer.json")
    # If the model folder has the same tokenizer, it is used, because it has more settings.
    if os.path.isfile(target) and filecmp.cmp(target, file, shallow=False):
        return
    for name in os.listdir(folder):
        if name not in _NO_TOKENIZER:
            os.unlink(os.path.join(folder, name))
    shutil.copy(file, target)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
    if isinstance(data.get("end_token"), str):
        settings["eos_token"] = data["end_token"]
    with open(os.path.join(folder, "tokenizer_config.json"), "w") as config:
        json.dump(settings, config)


def write_adapter(source: Source, folder: str) -> int:
    """Write a new ``folder`` with only the adapter, in peft's format; return the number of tensors.
    Raises `ConfigError` unless the checkpoint has exactly one adapter and this is a LoRA
    adapter."""
    found = source.layout.get("adapters")
    if not isinstance(found, dict) or len(found) != 1:
        listed = printable(list(found or []))
        raise ConfigError(f"the checkpoint names the adapters {listed}: --to peft writes one")
    ((adapter, plain),) = found.items()
    with as_config_error("the checkpoint's adapter"):
        settings = adapters.checked_settings(plain)
        base = plain.get("base_model_name_or_path")
        settings.base_model_name_or_path = base if isinstance(base, str) else None
        # As peft saves adapters, which are usually loaded for inference
        settings.inference_mode = True
        settings.save_pretrained(folder)
    names = {}
    for name in source.tensors:
        saved = adapters.saved_name(name.removeprefix("model/"), adapter, settings.bias)
        if saved is not None:
            names[name] = saved
    if not names:
        raise ConfigError(f"the checkpoint holds no weights of its adapter {printable(adapter)}")
    source.write_file(os.path.join(folder, "adapter_model.safetensors"), names)
    return len(names)
