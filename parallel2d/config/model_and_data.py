"""The ``model`` and ``data`` sections of a configuration: which model is trained on which data."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, fields, replace
from typing import Any

from parallel2d.config.options import option


@dataclass
class LlamaModel:
    """A Llama-3-style decoder (`parallel2d.models.llama`)."""

    family: str = "llama"  # Set by the group: model=llama_8b
    dim: int = option(128, minimum=1)  # Width of the hidden states
    # Number of blocks, each attention and feed-forward
    n_layers: int = option(4, minimum=1, maximum=10_000)
    n_heads: int = option(8, minimum=1)  # Number of attention heads; divides dim
    # Number of key and value heads; fewer than n_heads: grouped-query attention
    n_kv_heads: int = option(4, minimum=1)
    hidden_dim: int = option(352, minimum=1)  # Width inside the SwiGLU feed-forward
    # Rows of the embedding, at least the tokenizer's; padded rows are never a target
    vocab_size: int = option(320, minimum=1)
    max_seq_len: int = option(2048, minimum=1)  # Longest sequence, in tokens
    norm_eps: float = option(1e-5, above=0)  # Added to the mean square inside RMSNorm
    rope_theta: float = option(500000.0, above=0)  # Base of the rotary position embedding
    tie_embeddings: bool = False  # Use the embedding's weight in the output layer too


@dataclass
class CustomModel:
    """Your own ``nn.Module``: ``model=custom model.target=package.module:factory``."""

    family: str = "custom"  # Set by the group: model=custom
    target: str = "???"  # package.module:factory; called with `arguments`, returns an nn.Module
    # Keyword arguments of the factory: model.arguments.depth=12
    arguments: dict[str, Any] = option({})
    # package.module:function(module, name) sets what `module` owns; null: reset_parameters
    init: str | None = None
    # package.module:function(output, targets) -> summed loss; null: cross-entropy of logits
    loss: str | None = None
    # With mesh.tensor: {module pattern: word}, such as {layers.*.up: colwise}. Or
    # package.module:function(model) -> {module pattern: ParallelStyle or word}; words: TENSOR_WORDS
    tensor_plan: Any = None


@dataclass
class HuggingFaceModel:
    """A ``transformers`` model from a configuration, without download:
    ``model=hf model.path=FOLDER`` or
    ``model=hf model.architecture=qwen3 model.arguments.num_hidden_layers=4``."""

    family: str = "hf"  # Set by the group: model=hf
    path: str | None = None  # Local folder with config.json; safetensors weights in it are loaded
    # Instead of path, a model type of the library: qwen3; weights come from the seed
    architecture: str | None = None
    # Set on the model's configuration: model.arguments.num_hidden_layers=4. An argument that it
    # does not have is an error
    arguments: dict[str, Any] = option({})
    # Which of the library's models is built; auto: as config.json says, or the first there is
    head: str = option(
        "auto",
        choices=("auto", "causal_lm", "masked_lm", "seq2seq_lm", "image_classification", "base"),
    )
    # Load the weights of the folder; false: weights come from the seed all the same
    load_weights: bool = True
    # package.module:function(output, targets) -> summed loss; null: cross-entropy of logits
    loss: str | None = None
    # As of model=custom; null: the plan that the library ships with the model, if any
    tensor_plan: Any = None
    # Arguments of peft.LoraConfig: {r: 8, target_modules: [q_proj, v_proj]}; null: no adapter. The
    # model of path is frozen and an adapter is trained
    adapter: Any = None


@dataclass
class DataConfig:
    """What is read and how documents become sequences. Global batch k is a function of seed, data
    and k alone."""

    # Set by the group: data=text; stdlib is the source of Python's own library
    name: str = option("stdlib", choices=("stdlib", "text", "tokens", "hf", "images"))
    # What is read: a file, folder or glob; with hf, a data set's name. text: a file, folder or glob
    # of text, .jsonl or .parquet (.gz and .zst too); tokens: a folder that `python -m
    # parallel2d.data prepare` wrote; hf: a Hugging Face data set's name, or the folder of a saved
    # one; images: a folder whose subfolders are the classes
    path: str | None = None
    # tokens, instead of path: [{path: A, weight: 0.7}, {path: B, weight: 0.3}]
    mixture: list[Any] = option([])
    # bytes, or the path of a tokenizer.json; the model's vocabulary must hold its ids
    tokenizer: str = "bytes"
    # Token that ends a document; null: the tokenizer.json's usual one, or one id more
    end_token: str | None = None
    # Field of a row that holds its text, unless rows have `prompt` and `completion`, or `segments`
    text_field: str = "text"
    # KiB from which text files are cut at a line end into several documents
    document_kib: int = option(64, minimum=1)
    subset: str | None = None  # hf: the data set's configuration
    split: str = "train"  # hf: the part that is read; documents are held out of it by hash
    # Share of documents, or images, that is held out for validation. Documents are chosen by the
    # hash of their content, images by that of their path
    validation_fraction: float = option(0.02, minimum=0, maximum=0.5)
    # Rows that may be unreadable; more of them are an error with file and line
    max_bad_rows: int = option(0, minimum=0)
    # packed: documents one behind the other; padded: one per sequence, cut if longer
    packing: str = option("packed", choices=("packed", "padded"))
    # Keep documents of a sequence apart: no attention and no target crosses into another. Batches
    # carry document ids
    intra_document_masking: bool = False
    # Further sets of data to validate on: {wiki: {path: A, name: text}}. They are read beside the
    # held-out part. An entry takes keys of this section and has the others from it, except
    # validation_fraction, which is 0 unless given: the whole set is read
    validation: dict[str, Any] = option({})
    # Times that the data is read; 0: epoch after epoch without end. Otherwise the data end there,
    # and the run with them even if train.steps are not done; train.epochs sets this, and
    # train.steps to match
    epochs: int = option(0, minimum=0)
    # What becomes of the last epoch's last global batch when it is not full. drop: it is omitted;
    # pad: it is filled with samples of weight zero; wrap: with the first ones of the next epoch
    end: str = option("drop", choices=("drop", "pad", "wrap"))
    # Processes that prepare data, or threads of a rank that decode images. auto: one per core; for
    # images up to 16. The result does not depend on it
    workers: int | str = option("auto", minimum=1, auto=True)
    # Where stdlib, text and hf are prepared; null: parallel2d in the user's cache folder
    cache_dir: str | None = None
    # images: pixels of a side, to which they are scaled and cropped; null: as the model's
    # configuration
    image_size: int | None = None
    # images: 3 (RGB) or 1 (grey); null: as the model's configuration, else 3
    channels: int | None = None


_SEQUENCES = ("packing", "intra_document_masking")
_PREPARED = ("tokenizer", "end_token", "validation_fraction", "workers", "cache_dir", *_SEQUENCES)
# The fields that each kind of data reads, beside those that all of them read.
READ_BY = {
    "stdlib": _PREPARED,
    "text": ("path", "text_field", "document_kib", "max_bad_rows", *_PREPARED),
    "tokens": ("path", "mixture", *_SEQUENCES),
    "hf": ("path", "subset", "split", "text_field", "max_bad_rows", *_PREPARED),
    "images": ("path", "validation_fraction", "workers", "image_size", "channels"),
}
# Keys that an entry of data.validation cannot have: such a set is read once, in the form in which
# the model reads the training data.
_NOT_IN_ENTRIES = (
    "validation",
    "epochs",
    "end",
    "intra_document_masking",
    "image_size",
    "channels",
)
ENTRY_KEYS = tuple(item.name for item in fields(DataConfig) if item.name not in _NOT_IN_ENTRIES)


def validation_set(data: DataConfig, entry: dict[str, Any]) -> DataConfig:
    """The data of one entry of ``data.validation``: its own keys, and those of ``data`` that are
    not given and that its kind of data reads."""
    plain = DataConfig()
    kind = entry.get("name", data.name)
    read = READ_BY.get(kind, ())
    # What only other kinds of data read would have no effect.
    conditional = set(itertools.chain.from_iterable(READ_BY.values()))
    own: dict[str, Any] = {key: getattr(plain, key) for key in conditional.difference(read)}
    own |= {"name": kind, "validation": {}, "epochs": plain.epochs, "end": plain.end}
    if "validation_fraction" in read:
        own["validation_fraction"] = 0.0
    # Either of the two says what is read.
    if "path" in entry:
        own["mixture"] = []
    elif "mixture" in entry:
        own["path"] = None
    return replace(data, **{**own, **entry})
