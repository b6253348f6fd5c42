"""Translates between our Llama and Hugging Face's ``LlamaForCausalLM``: names by `theirs` and
`ours`, configurations by `to_config` and `from_config`.

Weights need no permutation, because both rotate the two halves of a head against each other. A
configuration is treated as data: known keys are read and checked, and a model that computes what
our Llama does not is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from parallel2d.errors import ConfigError
from parallel2d.files import is_count
from parallel2d.files.tensor_file import DamagedCheckpointError, printable

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
_BACK = {theirs: ours for ours, theirs in {**_TOP, **_LAYER}.items()}

# Our model argument -> key of config.json.
_SIZES = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "hidden_dim": "intermediate_size",
    "vocab_size": "vocab_size",
    "max_seq_len": "max_position_embeddings",
}
ARGUMENTS = (*_SIZES, "norm_eps", "rope_theta", "tie_embeddings")


def theirs(name: str) -> str:
    """The Hugging Face name of our Llama's parameter. Raises `ConfigError` for a name that Llama
    does not have."""
    if name in _TOP:
        return _TOP[name]
    match = re.fullmatch(r"layers\.(\d+)\.(.+)\.weight", name)
    if match is None or match[2] not in _LAYER:
        raise ConfigError(
            f"{printable(name)} is no parameter of the Llama that this conversion knows"
        )
    return f"model.layers.{match[1]}.{_LAYER[match[2]]}.weight"


def ours(name: str) -> str | None:
    """Our name of a Hugging Face parameter; None for tables that are computed, not trained. Raises
    `ConfigError` if unknown."""
    if name in _BACK:
        return _BACK[name]
    match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.weight", name)
    if match is not None and match[2] in _BACK:
        return f"layers.{match[1]}.{_BACK[match[2]]}.weight"
    if name.endswith("rotary_emb.inv_freq"):
        return None
    raise ConfigError(f"{printable(name)} is no parameter of the Llama that this conversion knows")


def find_arguments(layout: Any) -> dict[str, Any]:
    """The model's arguments inside the facts that a checkpoint keeps; empty when there are none."""
    if isinstance(layout, dict):
        if "n_heads" in layout and "n_kv_heads" in layout:
            return {key: layout[key] for key in ARGUMENTS if key in layout}
        for value in layout.values():
            if found := find_arguments(value):
                return found
    return {}


def to_config(arguments: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """``config.json`` of a model with our ``arguments``, stored in ``dtype`` (float32, bfloat16,
    float16, float64).

    Raises `ConfigError` naming the arguments that are missing and how to give them.
    """
    if missing := [key for key in ARGUMENTS if key not in arguments and key != "tie_embeddings"]:
        raise ConfigError(
            "the checkpoint does not say what a Hugging Face configuration needs; add "
            + " ".join(f"--model {key}=..." for key in missing)
        )
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **{key: arguments[ours] for ours, key in _SIZES.items()},
        "head_dim": arguments["dim"] // arguments["n_heads"],
        "rms_norm_eps": arguments["norm_eps"],
        "rope_theta": arguments["rope_theta"],
        "rope_parameters": {"rope_type": "default", "rope_theta": arguments["rope_theta"]},
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": bool(arguments.get("tie_embeddings", False)),
        "torch_dtype": dtype,
        "dtype": dtype,
    }
    return config


def from_config(config: Mapping[str, Any], what: str) -> dict[str, Any]:
    """Our arguments for a model with this ``config.json``.

    Raises `ConfigError` for a model that is no Llama or computes something ours does not (biases,
    scaled rotary embedding, heads whose size is not dim / heads), `DamagedCheckpointError` for
    numbers that cannot be.
    """
    if config.get("model_type") != "llama":
        raise ConfigError(
            f"{what}: model_type {printable(config.get('model_type'))} cannot be converted, only "
            "llama"
        )
    result: dict[str, Any] = {}
    for argument, key in _SIZES.items():
        result[argument] = _size(config, key, what)
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise DamagedCheckpointError(f"{what}: the rotary embedding's settings are no object")
    theta = config.get("rope_theta", rope.get("rope_theta", 10000.0))
    result["norm_eps"] = _positive(config.get("rms_norm_eps", 1e-6), "rms_norm_eps", what)
    result["rope_theta"] = _positive(theta, "rope_theta", what)
    result["tie_embeddings"] = config.get("tie_word_embeddings", False) is True
    head = result["dim"] // result["n_heads"]
    supported = {
        "attention_bias": config.get("attention_bias", False) is False,
        "mlp_bias": config.get("mlp_bias", False) is False,
        "hidden_act": config.get("hidden_act", "silu") == "silu",
        "rope_parameters": rope.get("rope_type", rope.get("type", "default")) == "default",
        "head_dim": config.get("head_dim") in (None, head),
    }
    wrong = []
    for key in [key for key, fits in supported.items() if not fits]:
        value = config.get(key, config.get("rope_scaling"))
        wrong.append(f"{key}={printable(value)}")
    if wrong:
        raise ConfigError(f"{what}: {', '.join(wrong)} is not what parallel2d's Llama computes")
    return result


def _size(config: Mapping[str, Any], key: str, what: str) -> Any:
    value = config.get(key)
    # Without it every head has keys of its own.
    if key == "num_key_value_heads" and key not in config:
        value = config.get("num_attention_heads")
    if not is_count(value) or value == 0:
        raise DamagedCheckpointError(
            f"{what}: {key}={printable(value)} must be a whole number above 0"
        )
    return value


def _positive(value: Any, key: str, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e12:
        raise DamagedCheckpointError(f"{what}: {key}={printable(value)} must be a number above 0")
    return float(value)


def command_line(arguments: Mapping[str, Any]) -> Sequence[str]:
    """The overrides that make ``python -m parallel2d.train`` build this model."""
    return [
        f"model.{key}={str(value).lower() if isinstance(value, bool) else value}"
        for key, value in arguments.items()
    ]
