"""Hugging Face ``transformers`` models from a configuration: `build`.

Nothing is downloaded, and no code from a model's folder runs. The configuration comes from a local
folder with a ``config.json``, or from an architecture with arguments. If the configuration names a
class, this class is used. Otherwise the class is the library's language, sequence-to-sequence,
masked or image-classification model for the architecture.
"""

from __future__ import annotations

import difflib
import fnmatch
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from parallel2d.base.files import printable, read_json

WORDS = (
    "colwise",
    "rowwise",
    "colwise_gather_output",
    "rowwise_split_input",
    "embedding_rowwise",
    "replicated_with_grad_allreduce",
)
# Configuration fields with a number of modules: pattern of the field, largest allowed number, and
# name of the modules
_MOST = (
    (re.compile(r"(num_|n_)?(\w+_)?layers?|depths?"), 10_000, "layers"),
    (re.compile(r"(num|n)_(\w+_)?(experts|stages|blocks|codebooks|quantizers)"), 65_536, "modules"),
    (re.compile(r"num_labels|num_classes|n_classes"), 10_000_000, "labels"),
)
_FOREIGN = ("backbone", "use_timm_backbone", "use_pretrained_backbone")
_EXPERT_WORDS = ("packed_", "moe_", "grouped_gemm", "ep_router")
# Searched in this order if neither the configuration nor the caller selects a class. An
# architecture may be in several mappings: BERT can also decode, but must be a masked model; T5 and
# BART must be sequence-to-sequence models.
_MAPPINGS = {
    "seq2seq_lm": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "masked_lm": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "causal_lm": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "image_classification": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "base": "MODEL_MAPPING_NAMES",
}


def library() -> Any:
    """Return the ``transformers`` module. Raise ImportError with the extra that installs it."""
    try:
        import transformers
    except ImportError as error:
        raise ImportError(
            f'model=hf needs the transformers library: pip install "parallel2d[hf]" ({error})'
        ) from None
    return transformers


def saved_config(path: str | None, architecture: str | None, arguments: Mapping[str, Any]) -> Any:
    """Return the configuration of a local folder or an architecture, with ``arguments`` set.

    Architectures are ``llama``, ``gpt2`` and others. Raises ValueError for a folder without
    config.json, an architecture that the library does not have, and an argument that the
    configuration does not have: the library would store this argument and never read it.
    """
    transformers = library()
    known = transformers.CONFIG_MAPPING
    _check_settings(arguments)
    if path is not None:
        config = _config_of_folder(transformers, path)
    elif architecture in known:
        config = known[architecture]()
    else:
        near = difflib.get_close_matches(str(architecture), list(known), n=3, cutoff=0.4)
        raise ValueError(
            f"transformers {transformers.__version__} has no architecture {architecture!r}; near: "
            f"{near}"
        )
    # Some fields, such as attn_implementation, are stored in a private attribute.
    unknown = []
    for name in arguments:
        if not (hasattr(config, name) or hasattr(config, f"_{name}")):
            unknown.append(name)
    if unknown:
        fields = sorted(name for name in config.to_dict() if not name.startswith("_"))
        raise ValueError(
            f"{type(config).__name__} has no {', '.join(unknown)}; it has {', '.join(fields)}"
        )
    _check_settings(config.to_dict())
    if not arguments:
        return config
    # Build a new configuration instead of setting the fields, because other fields are derived from
    # them, such as kinds of layers and head sizes.
    given = config.to_diff_dict() if path is not None else {}
    given = {**given, **arguments}
    given.pop("model_type", None)
    return type(config)(**given)


def _config_of_folder(transformers: Any, path: str) -> Any:
    file = os.path.join(path, "config.json")
    if not os.path.isfile(file):
        raise ValueError(
            f"{path} holds no config.json; it must be the folder of a saved model, nothing is "
            "downloaded"
        )
    # Checked before the library reads the file without limits of size, depth and number of layers.
    # Files in the Hub's cache are links, and links are followed.
    try:
        _check_settings(read_json(os.path.realpath(file)))
    except OSError as error:
        raise ValueError(f"{path}/config.json cannot be read: {error.strerror}") from None
    return transformers.AutoConfig.from_pretrained(
        path, local_files_only=True, trust_remote_code=False
    )


def _check_settings(settings: Any) -> None:
    """Raise ValueError for settings that name files or code, and for numbers of modules that no
    model has. The library would need minutes to build so many modules.

    Args:
        settings: untrusted settings; a mapping, possibly nested. Other values are ignored.
    """
    entries = settings if isinstance(settings, Mapping) else {}
    for key, value in entries.items():
        _check_settings(value)
        shown = f"{printable(key)}={printable(value)}"
        if key == "quantization_config" and value:
            raise ValueError(
                f"{shown}: quantized weights, such as the base of QLoRA, are not loaded; use the "
                "model's weights in 16 or 32 bits"
            )
        of_others = (
            str(key).endswith("_implementation") and "/" in str(value),
            # These settings name files that other libraries read or download.
            key in _FOREIGN and value,
            key == "model_type" and str(value).startswith("timm"),
        )
        if any(of_others):
            raise ValueError(f"{shown} stands for code, files or parts of other libraries")
        numbers = value if isinstance(value, list | tuple) else [value]
        total = sum(each for each in numbers if isinstance(each, int))
        for pattern, most, unit in _MOST:
            if total > most and pattern.fullmatch(str(key)):
                raise ValueError(f"{shown} is more than {most:,} {unit}")


def model_class(config: Any, head: str) -> type[nn.Module]:
    """Return the class of the model. Raises ValueError for an unknown head, for ``auto`` with a
    configuration that names another class, and if the library has no model with that head for this
    architecture."""
    known = ("auto", *_MAPPINGS)
    if head not in known:
        raise ValueError(f"head {head!r} is not one of {', '.join(known)}")
    transformers = library()
    from transformers.models.auto import modeling_auto

    named = list(map(str, getattr(config, "architectures", None) or []))
    if head == "auto" and named:
        # A saved model names its class. A class that is defined in the folder's code is not in the
        # library. A name in a folder must not call a function of the library, so only model classes
        # are accepted.
        found, base = getattr(transformers, named[0], None), transformers.PreTrainedModel
        if isinstance(found, type) and issubclass(found, base) and found is not base:
            return found
        raise ValueError(
            f"architectures={named} of the configuration: {named[0]} is not a model class of "
            f"transformers; choose the head with model.head, one of {', '.join(_MAPPINGS)}"
        )
    # Otherwise the head selects the class; `auto` is the first head of the architecture.
    classes: dict[str, str] = {}
    for each, mapping in _MAPPINGS.items():
        names = getattr(modeling_auto, mapping).get(config.model_type)
        if isinstance(names, str):
            classes[each] = names
        elif names:
            classes[each] = names[0]  # some architectures have several names
    if head == "auto":
        head = next(iter(classes), "base")
    if head not in classes:
        has = ", ".join(classes) or "none"
        raise ValueError(f"{config.model_type} has no {head} model in transformers; it has {has}")
    return getattr(transformers, classes[head])


def build(
    path: str | None = None,
    architecture: str | None = None,
    arguments: Mapping[str, Any] | None = None,
    head: str = "auto",
) -> nn.Module:
    """Return the model in training mode, with initial weights or on meta.

    The weights are on meta under a context such as `parallel2d.build_on_meta`. Raises ValueError
    for arguments that `saved_config` and `model_class` refuse, ImportError without the library.
    """
    config = saved_config(path, architecture, arguments or {})
    _disable_cache(config)
    return model_class(config, head)(config).train()


def _disable_cache(config: Any) -> None:
    """Disable the key-value cache for generation, also in nested configurations.

    Recomputed layers must not fill this cache.
    """
    if hasattr(config, "use_cache"):
        config.use_cache = False
    for name in getattr(config, "sub_configs", ()):
        _disable_cache(getattr(config, name, None))


def has_tensor_plan(model: nn.Module) -> bool:
    """Return True if the library has a tensor-parallel plan for the model."""
    return bool(getattr(model, "_tp_plan", None))


def tensor_words(model: nn.Module) -> dict[str, str]:
    """Return the library's tensor-parallel plan as module pattern -> name of a style; empty without
    a plan.

    Expert layers are omitted, because their parameters do not belong to a Linear. They stay
    replicated, and every tensor rank computes all of them. Raises ValueError for a plan with a
    style that this package does not support.
    """
    modules = [name for name, _ in model.named_modules()]
    plan = dict(getattr(model, "_tp_plan", None) or {})
    experts = tuple(pattern for pattern, word in plan.items() if word.startswith(_EXPERT_WORDS))
    found: dict[str, str] = {}
    for pattern, word in plan.items():
        # Modules inside the experts stay replicated with them.
        if pattern.startswith(experts):
            continue
        # A plan belongs to a class, and may name modules that this configuration does not have.
        if not fnmatch.filter(modules, pattern):
            continue
        if word not in WORDS:
            raise ValueError(
                f"{type(model).__name__} ships a tensor-parallel plan with {pattern}: {word}, "
                "which is not translated; set model.tensor_plan={pattern: word} or "
                "package.module:function, or set mesh.tensor=1"
            )
        found[pattern] = word
    return found


def context_of(seq_len: int) -> int:
    """Return the number of leading positions that have no logits in an encoder-decoder.

    See `read_prefix_and_suffix`.
    """
    return max(0, seq_len // 2 - 1)


def read_prefix_and_suffix(model: nn.Module) -> None:
    """Change an encoder-decoder so that its forward takes one sequence of token ids, int64 [n, T],
    as the forward of a decoder does.

    This is the prefix language model objective (Raffel et al. 2020, section 3.2). The encoder reads
    the first h = T // 2 tokens in both directions. The decoder gets its start token and then tokens
    h to T - 1, and predicts the token after each. Logits have the shape [n, T - h + 1, vocabulary]
    and belong to the targets of positions h - 1 to T - 1; earlier targets have no logits.

    Raises ValueError if the model has no start token, or its head has no logits.
    """
    config: Any = model.config
    # The start token of the decoder.
    start = getattr(config, "decoder_start_token_id", None)
    if start is None:
        start = getattr(config, "pad_token_id", None)  # as T5 does
    if start is None:
        raise ValueError(
            f"{type(config).__name__} has no decoder_start_token_id and no pad_token_id: set "
            "model.arguments.pad_token_id"
        )
    if model_class(config, "seq2seq_lm") is not _library_class(model):
        raise ValueError(
            f"{type(model).__name__} is not a sequence-to-sequence language model; set "
            "model.head=seq2seq_lm"
        )

    def split(
        _model: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[tuple[()], dict[str, Any]] | None:
        # Other calls pass the inputs of encoder and decoder separately.
        if len(inputs) != 1 or options:
            return None
        (tokens,) = inputs
        prefix, suffix = tokens.tensor_split([tokens.shape[1] // 2], dim=1)
        first = tokens.new_full((len(tokens), 1), start)
        started = torch.cat([first, suffix], dim=1)
        return (), {"input_ids": prefix, "decoder_input_ids": started}

    model.register_forward_pre_hook(split, with_kwargs=True)


@dataclass(frozen=True)
class StoredForm:
    """The rule that builds one parameter from the stored tensors."""

    names: list[list[str]]  # groups of stored tensors
    stacked: bool  # each group is stacked along a new dim 0
    dim: int | None  # dim of the concatenation of groups; None for one group


def stored_forms(model: nn.Module, stored: Collection[str]) -> dict[str, StoredForm]:
    """Return parameter name -> form for the tensor names ``stored``.

    A saved folder has the tensor names and shapes of the model's first release. When the library
    loads it, tensors are renamed, stacked and concatenated (transformers 5: experts of Mixtral,
    Qwen-MoE, DeepSeek). The result has only parameters with another name or form; it is empty for a
    model that is not of the library. Raises ValueError for a parameter that the library builds in
    another way.
    """
    config = getattr(model, "config", None)
    kind = _library_class(model)
    if config is None or kind is None:
        return {}
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter

    # The library finds its rules by the class of a module. Sharding changes the classes in
    # ``model``, so a new model is built on meta.
    with torch.device("meta"):
        twin: Any = kind(config)
    rules: list[Any] = get_model_conversion_mapping(twin)
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    renamings = [rule for rule in rules if not isinstance(rule, WeightConverter)]
    # If two rules have the same pattern, the later rule is used, as in the library.
    by_pattern: dict[str, Any] = {}
    for rule in converters:
        by_pattern |= dict.fromkeys(rule.source_patterns, rule)
    found: dict[str, StoredForm] = {}
    for target, groups in _collected(twin, stored, renamings, converters).items():
        if None in groups:  # renamed only
            found[target] = StoredForm([groups[None]], stacked=False, dim=None)
        else:
            # One converter handles all stored names of one parameter.
            rule = by_pattern[str(next(iter(groups)))]
            found[target] = _converted_form(target, groups, rule)
    return found


def _collected(
    twin: Any, stored: Collection[str], renamings: list[Any], converters: list[Any]
) -> dict[str, dict[str | None, list[str]]]:
    """Return parameter name -> pattern of its converter -> stored names, in the library's order.

    The pattern is None if only the name changes.
    """
    from transformers.core_model_loading import dot_natural_key, rename_source_key

    names_here = twin.state_dict()
    found: dict[str, dict[str | None, list[str]]] = {}
    for name in sorted(stored, key=dot_natural_key):
        target, pattern = rename_source_key(
            name, renamings, converters, twin.base_model_prefix, names_here
        )
        if target != name:
            groups = found.setdefault(target, {})
            groups.setdefault(pattern, []).append(name)
    return found


def _converted_form(target: str, groups: Mapping[Any, list[str]], rule: Any) -> StoredForm:
    """Return the form that a converter makes of the stored names in ``groups``.

    The names are stacked, concatenated, or both in this order. Raises ValueError for other forms.
    """
    operations = [type(operation).__name__ for operation in rule.operations]
    dims = []
    for operation in rule.operations:
        dims.append(getattr(operation, "dim", None))
    stacked = operations[:1] == ["MergeModulelist"] and dims[0] == 0
    rest = operations[1:] if stacked else operations
    targets = len(rule.target_patterns)
    # Only rules with one target are supported. A converter may also split a tensor into several
    # tensors.
    if targets != 1 or rest not in ([], ["Concatenate"]):
        raise ValueError(
            f"{target} is stored in a form that cannot be read in parts "
            f"({', '.join(operations)} of {targets}); save the "
            "model's own state_dict() with safetensors, in the model's own form"
        )
    # In the order of the rule, which is the order of the concatenation.
    names = []
    for pattern in rule.source_patterns:
        if pattern in groups:
            names.append(groups[pattern])
    dim = None
    if rest:
        dim = dims[-1]
    return StoredForm(names, stacked, dim)


def _library_class(model: nn.Module) -> type[nn.Module] | None:
    """Return the ``transformers`` class of ``model`` before sharding; None for other models."""
    for kind in type(model).__mro__:
        if kind.__module__.startswith("transformers.models."):
            return kind
    return None
