"""Hugging Face ``transformers`` models from a configuration alone: nothing is downloaded and no code of a model's folder is run.

A local folder with a ``config.json``, or an architecture's name and its arguments, flow in; a plain ``nn.Module`` flows out, and
beside it its tensor-parallel plan in words. The class is the one that the configuration names, or the
library's language, sequence-to-sequence, masked or image-classification model for that architecture.
"""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Mapping
from typing import Any

from torch import nn

HEADS = ("causal_lm", "masked_lm", "seq2seq_lm", "image_classification", "base")
WORDS = ("colwise", "rowwise", "colwise_gather_output", "embedding_rowwise", "replicated_with_grad_allreduce")
_EXPERT_WORDS = ("packed_", "moe_", "grouped_gemm", "ep_router")
# Looked through in this order when neither the configuration nor the caller names a class: an encoder that could also
# decode (BERT) is a masked model, and a pair of both (T5, BART) translates.
_MAPPINGS = {
    "seq2seq_lm": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "masked_lm": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "causal_lm": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "image_classification": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "base": "MODEL_MAPPING_NAMES",
}


def library() -> Any:
    """The ``transformers`` module. Raises ImportError naming the extra that installs it."""
    try:
        import transformers
    except ImportError as error:
        raise ImportError(f'model=hf needs the transformers library: pip install "parallel2d[hf]" ({error})') from None
    return transformers


def read_config(path: str | None, architecture: str | None, arguments: Mapping[str, Any]) -> Any:
    """The configuration of a local folder, or of an architecture (``llama``, ``gpt2``, ...), with ``arguments`` set on it.

    Raises ValueError for a folder without config.json, an architecture that the library does not have, and an argument that the
    configuration does not know: the library itself would keep that one and never read it.
    """
    transformers = library()
    if path is not None:
        if not os.path.isfile(os.path.join(path, "config.json")):
            raise ValueError(f"{path} holds no config.json; it must be the folder of a saved model, nothing is downloaded")
        config = transformers.AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    else:
        known = transformers.CONFIG_MAPPING
        if architecture not in known:
            import difflib

            near = difflib.get_close_matches(str(architecture), list(known), n=3, cutoff=0.4)
            raise ValueError(f"transformers {transformers.__version__} has no architecture {architecture!r}; near: {near}")
        config = known[architecture]()
    # attn_implementation and the like are arguments of the configuration, kept under a private name.
    unknown = [name for name in arguments if not hasattr(config, name) and not hasattr(config, f"_{name}")]
    if unknown:
        fields = sorted(name for name in config.to_dict() if not name.startswith("_"))
        raise ValueError(f"{type(config).__name__} has no {', '.join(unknown)}; it has {', '.join(fields)}")
    if arguments:
        # Made anew rather than set one by one: other values of a configuration follow from these (layer kinds, head sizes).
        given = {**(config.to_diff_dict() if path is not None else {}), **arguments}
        given.pop("model_type", None)
        config = type(config)(**given)
    if hasattr(config, "use_cache"):
        config.use_cache = False  # keys and values kept for generation would only cost memory
    return config


def model_class(config: Any, head: str = "auto") -> type[nn.Module]:
    """The class of the model. Raises ValueError when the library has none with that head for this architecture."""
    transformers = library()
    from transformers.models.auto import modeling_auto

    names = {key: getattr(modeling_auto, mapping) for key, mapping in _MAPPINGS.items()}
    if head == "auto":
        named = [name for name in (getattr(config, "architectures", None) or []) if hasattr(transformers, name)]
        if named:
            return getattr(transformers, named[0])
        head = next((key for key in names if config.model_type in names[key]), "base")
    name = names[head].get(config.model_type)
    if name is None:
        has = [key for key in names if config.model_type in names[key]]
        raise ValueError(f"{config.model_type} has no {head} model in transformers; it has {', '.join(has) or 'none'}")
    return getattr(transformers, name if isinstance(name, str) else name[0])


def build(
    path: str | None = None,
    architecture: str | None = None,
    arguments: Mapping[str, Any] | None = None,
    head: str = "auto",
) -> nn.Module:
    """The model with fresh weights (none, under a context that keeps parameters on meta), in training mode.

    Raises ValueError for what `read_config` and `model_class` refuse, ImportError without the library.
    """
    config = read_config(path, architecture, arguments or {})
    return model_class(config, head)(config).train()


def tensor_words(model: nn.Module) -> dict[str, str]:
    """The model's own tensor-parallel plan, module pattern -> word, as the library ships it; empty when it ships none.

    Expert layers, whose parameters belong to no Linear, are left out and so stay whole: every tensor rank computes them, which is
    right though not split. Raises ValueError for a plan with other words that would have to be translated.
    """
    modules = [name for name, _ in model.named_modules()]
    plan = dict(getattr(model, "_tp_plan", None) or {})
    experts = tuple(pattern for pattern, word in plan.items() if word.startswith(_EXPERT_WORDS))
    found: dict[str, str] = {}
    for pattern, word in plan.items():
        if word.startswith(_EXPERT_WORDS) or pattern.startswith(experts) or not fnmatch.filter(modules, pattern):
            continue
        if word not in WORDS:
            raise ValueError(
                f"{type(model).__name__} ships a tensor-parallel plan with {pattern}: {word}, which is not translated"
            )
        found[pattern] = word
    return found
