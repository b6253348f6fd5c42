"""The ``model`` and ``data`` sections of a configuration: the model and its training data."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

from parallel2d.base.config.options import default_of, field_problems, is_read, option
from parallel2d.base.errors import did_you_mean

_reference = partial(option, reference=True)
# Values of `model.conditional`; see parallel/parallelize/conditional.py
CONDITIONAL = ("replicate", "root", "always")
_conditional = partial(
    option, {}, "Modules that only some ranks run: {vision: replicate}; or root, or always"
)


@dataclass
class LlamaModel:
    """A Llama-3-style decoder (`parallel2d.models.llama`)."""

    family: str = option("llama", "Set by the group: model=llama_8b")
    dim: int = option(128, "Width of the hidden states", min=1)
    n_layers: int = option(4, "Blocks, each attention and feed-forward", between=(1, 10000))
    n_heads: int = option(8, "Number of attention heads; divides dim", min=1)
    n_kv_heads: int = option(4, "Key and value heads; fewer: grouped-query attention", min=1)
    hidden_dim: int = option(352, "Width inside the SwiGLU feed-forward", min=1)
    vocab_size: int = option(320, "Rows of the embedding; spare rows are never targets", min=1)
    max_seq_len: int = option(2048, "Longest sequence, in tokens", min=1)
    norm_eps: float = option(1e-05, "Added to the mean square inside RMSNorm", above=0)
    rope_theta: float = option(500000.0, "Base of the rotary position embedding", above=0)
    tie_embeddings: bool = option(False, "Use the embedding's weight in the output layer too")


@dataclass
class CustomModel:
    """Your own ``nn.Module``: ``model=custom model.target=package.module:factory``."""

    family: str = option("custom", "Set by the group: model=custom")
    target: str = _reference("???", "package.module:factory(**arguments), returns an nn.Module")
    arguments: dict[str, Any] = option({}, "Arguments of the factory: model.arguments.depth=12")
    init: str | None = _reference(
        None, "package.module:function(module, name), sets its tensors; null: the factory does"
    )
    tensor_plan: Any = option(
        None,
        "With mesh.tensor: {module pattern: word}, such as {layers.*.up: colwise}. Or "
        "package.module:function(model) -> {module pattern: ParallelStyle or word}; words: "
        "TENSOR_WORDS",
    )
    conditional: dict[str, Any] = _conditional()


@dataclass
class HuggingFaceModel:
    """A ``transformers`` model from a configuration, without download:
    ``model=hf model.path=FOLDER`` or
    ``model=hf model.architecture=qwen3 model.arguments.num_hidden_layers=4``."""

    family: str = option("hf", "Set by the group: model=hf")
    path: str | None = option(None, "Local folder with config.json; its safetensors are loaded")
    architecture: str | None = option(
        None, "Instead of path, a model type of the library: qwen3; weights come from the seed"
    )
    arguments: dict[str, Any] = option(
        {}, "Set on the model's configuration: model.arguments.num_hidden_layers=4"
    )
    head: str = option(
        "auto",
        "Which of the library's models is built; auto: that of config.json, or the first",
        choices=("auto", "causal_lm", "masked_lm", "seq2seq_lm", "image_classification", "base"),
    )
    load_weights: bool = option(
        True, "Load the weights of the folder; false: draw them from the seed"
    )
    tensor_plan: Any = option(None, "As of model=custom; null: the library's own plan, if any")
    conditional: dict[str, Any] = _conditional()
    adapter: Any = option(
        None, "Adapter of the frozen model: {r: 8, target_modules: [q_proj]} of peft.LoraConfig"
    )


# Dataclass of the section `model`, by `model.family`
FAMILIES: dict[str, type] = {"llama": LlamaModel, "custom": CustomModel, "hf": HuggingFaceModel}

_hf = partial(option, read_by=("hf",))
_custom = partial(option, read_by=("custom", "stream"))
_chat = partial(option, read_by=("chat",))
_rows = partial(option, read_by=("text", "hf"))
_prepared = partial(option, read_by=("stdlib", "text", "chat", "hf"))
_sequences = partial(option, read_by=("stdlib", "text", "chat", "tokens", "hf"))


@dataclass
class DataConfig:
    """The data set and the packing of documents into sequences. Global batch k depends only on the
    seed, the data and k."""

    name: str = option(
        "stdlib", choices=("stdlib", "text", "chat", "tokens", "hf", "bin", "custom", "stream")
    )
    path: str | None = option(
        None,
        "Data to read. text: a file, folder or glob of text, .jsonl or .parquet (.gz and .zst "
        "too); chat: .jsonl or .parquet with `messages`; tokens: a folder of `python -m "
        "parallel2d.data prepare`; hf: a data set's name, or a saved one; bin: a file of token ids "
        "as uint16",
        read_by=("text", "chat", "tokens", "hf", "bin"),
        required_by=("text", "chat", "hf", "bin"),
    )
    mixture: list[Any] = option(
        [],
        "Instead of path: [{path: A, weight: 0.7}, {path: B, weight: 0.3}]. With data=stream an "
        "entry has target and arguments in place of path",
        read_by=("tokens", "stream"),
    )
    tokenizer: str = _prepared(
        "bytes",
        "bytes, or a tokenizer.json, or its folder. The model's vocabulary must hold its ids",
    )
    end_token: str | None = _prepared(
        None, "Token that ends a document; null: the tokenizer.json's usual one, or one id more"
    )
    text_field: str = _rows(
        "text", "Field of a row with its text, in place of `prompt` and `completion` or `segments`"
    )
    chat_template: str | None = _chat(
        None, "File with a chat template (Jinja); null: that in the folder of data.tokenizer"
    )
    chat_arguments: dict[str, Any] = _chat(
        {}, "Variables of the template: data.chat_arguments.enable_thinking=false"
    )
    document_kib: int = option(
        64, "KiB from which files are cut, by line", min=1, read_by=("text",)
    )
    subset: str | None = _hf(None, "The data set's configuration")
    split: str = _hf("train", "The part that is read; documents are held out of it by hash")
    validation_fraction: float = _prepared(
        0.02, "Share that is held out for validation, by hash of content", between=(0, 0.5)
    )
    max_bad_rows: int = option(
        0,
        "Rows that may be unreadable; more are an error with line",
        min=0,
        read_by=("text", "chat", "hf"),
    )
    packing: str = _sequences(
        "packed",
        "Documents one behind the other, one a row, or fitted: whole ones in rows",
        choices=("packed", "padded", "fitted"),
    )
    intra_document_masking: bool = _sequences(False, "No attention and no target crosses documents")
    validation: dict[str, Any] = option(
        {}, "Further sets to validate on, whole: {wiki: {path: A, name: text}}, with keys of data"
    )
    epochs: int = option(0, "Times that the data is read until the run ends; 0: no end", min=0)
    end: str = option(
        "drop",
        "Last global batch that is not full: omitted, padded with weight zero, or filled",
        choices=("drop", "pad", "wrap"),
        needs="epochs",
    )
    workers: int | str = option(
        "auto",
        "Processes that prepare data; or threads of a rank that read samples",
        min=1,
        read_by=("stdlib", "text", "chat", "hf", "custom", "stream"),
    )
    cache_dir: str | None = _prepared(None, "Of prepared data; null: in the user's cache folder")
    target: str | None = _custom(
        None,
        "package.module:build(**arguments), returns a data set. It has `__len__` and "
        "`__getitem__`; with data=stream `__iter__`, or it is a list of such shards. Or a pair "
        "with a function that makes a batch of a list of samples",
        reference=True,
        required_by=("custom",),
    )
    arguments: dict[str, Any] = _custom({}, "Of the function: data.arguments.folder=pictures")
    shuffle_buffer: int = option(
        1024,
        "Samples in memory, over all shards, that are shuffled; 0: none",
        min=0,
        read_by=("stream",),
    )

    @property
    def has_own_samples(self) -> bool:
        """True for samples of a function, which may be anything; False for token sequences."""
        return self.name in ("custom", "stream")


# Keys that an entry of data.validation cannot have: a validation set is read once, in the format of
# the training data.
_NOT_IN_SETS = ("validation", "epochs", "end", "intra_document_masking")
ENTRY_KEYS = tuple(item.name for item in fields(DataConfig) if item.name not in _NOT_IN_SETS)


def validation_set(data: DataConfig, entry: dict[str, Any]) -> DataConfig:
    """Return the data section of one entry of ``data.validation``. Keys that the entry does not set
    are inherited from ``data`` if the kind of data reads them."""
    own = replace(
        data,
        name=entry.get("name", data.name),
        validation={},
        epochs=0,
        validation_fraction=0.0,
        end=DataConfig().end,
    )
    for item in fields(own):
        if not is_read(own, item):
            setattr(own, item.name, default_of(item))
    # Either path (or target) or mixture names the data, so the entry replaces both.
    if "path" in entry or "target" in entry:
        own.mixture = []
    elif "mixture" in entry:
        own.path = own.target = None
    return replace(own, **entry)


_SET_NAME = re.compile(r"[A-Za-z0-9_.-]+")


def data_problems(data: DataConfig) -> Iterator[str]:
    """Yield a line for each contradiction between keys of ``data``, and for each problem of an
    entry of ``data.validation``."""
    if data.name == "tokens" and bool(data.path) == bool(data.mixture):
        yield (
            "data=tokens needs either data.path, a prepared folder, or data.mixture=[{path: A, "
            "weight: 0.7}, ...]"
        )
    if data.name == "stream" and bool(data.target) == bool(data.mixture):
        yield (
            "data=stream needs either data.target=package.module:build or data.mixture=[{target: "
            "package.module:build, weight: 0.7}, ...]"
        )
    if data.name == "stream" and data.epochs:
        yield (
            f"data=stream has no length: omit train.epochs or data.epochs={data.epochs}, and set "
            "train.steps"
        )
    for entry in data.mixture:
        key = "target" if data.name == "stream" else "path"
        optional = {"arguments"} if data.name == "stream" else set()
        if not isinstance(entry, dict) or set(entry) - optional != {key, "weight"}:
            yield f"data.mixture has {entry}; an entry has the form {{{key}: A, weight: 1}}"
    if data.packing == "padded" and data.intra_document_masking:
        yield (
            "data.intra_document_masking=true has no effect with data.packing=padded: a sequence "
            "holds one document"
        )
    for name, entry in data.validation.items():
        yield from _validation_set_problems(data, f"data.validation.{name}", str(name), entry)


def _validation_set_problems(data: DataConfig, where: str, name: str, entry: Any) -> Iterator[str]:
    if not _SET_NAME.fullmatch(name):
        yield f"{where}: a set's name has only letters, digits, '_', '.' and '-'"
    if not isinstance(entry, dict):
        yield f"{where}={entry} must have the form {{path: PATH, name: text}}, with keys of data.*"
        return
    for key in entry:
        if key not in ENTRY_KEYS:
            near = did_you_mean(key, ENTRY_KEYS)
            yield f"{where}.{key}: a set may have {', '.join(ENTRY_KEYS)}{near}"
            return
    own = validation_set(data, entry)
    of_fields = list(field_problems(own, where + "."))
    yield from of_fields
    if of_fields:
        return
    if own.has_own_samples != data.has_own_samples:
        yield f"{where}.name={own.name} and data={data.name}: all sets are custom, or none"
    for problem in data_problems(own):
        yield f"{where}: {problem}"
