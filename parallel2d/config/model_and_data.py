"""The ``model`` and ``data`` sections of a configuration: which model is trained on which data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from parallel2d.config.options import option


@dataclass
class LlamaModel:
    """A Llama-3-style decoder (`parallel2d.models.llama`)."""

    family: str = "llama"
    dim: int = option(128, minimum=1)
    n_layers: int = option(4, minimum=1, maximum=10_000)
    n_heads: int = option(8, minimum=1)
    n_kv_heads: int = option(4, minimum=1)  # fewer than n_heads: grouped-query attention
    hidden_dim: int = option(352, minimum=1)  # of the SwiGLU feed-forward
    # at least the tokenizer's; padded rows are never a target
    vocab_size: int = option(320, minimum=1)
    max_seq_len: int = option(2048, minimum=1)
    norm_eps: float = option(1e-5, above=0)
    rope_theta: float = option(500000.0, above=0)
    tie_embeddings: bool = False


@dataclass
class CustomModel:
    """Your own ``nn.Module``: ``model=custom model.target=package.module:factory``."""

    family: str = "custom"
    target: str = "???"  # package.module:factory; called with `arguments`, returns an nn.Module
    arguments: dict[str, Any] = option({})  # keyword arguments of the factory
    # package.module:function(module, name) sets what `module` owns; default: reset_parameters
    init: str | None = None
    # package.module:function(output, targets) -> summed loss; default: cross-entropy of logits
    loss: str | None = None
    # {module pattern: word of TENSOR_WORDS}, or package.module:function(model) -> {module pattern:
    # ParallelStyle or word}
    tensor_plan: Any = None


@dataclass
class HuggingFaceModel:
    """A ``transformers`` model from a configuration, without download:
    ``model=hf model.path=FOLDER`` or
    ``model=hf model.architecture=qwen3 model.arguments.num_hidden_layers=4``."""

    family: str = "hf"
    # local folder: config.json, and safetensors weights, which are loaded where there are any
    path: str | None = None
    # instead of path: a model type of the library; weights come from the seed
    architecture: str | None = None
    # set on the configuration; an argument that it does not have is an error
    arguments: dict[str, Any] = option({})
    head: str = option(
        "auto",
        choices=("auto", "causal_lm", "masked_lm", "seq2seq_lm", "image_classification", "base"),
    )
    load_weights: bool = True  # false: weights come from the seed even if the folder has some
    # package.module:function(output, targets) -> summed loss; default: cross-entropy of logits
    loss: str | None = None
    # as of model=custom; None: the plan that the library ships with the model, if any
    tensor_plan: Any = None


@dataclass
class DataConfig:
    """What is read and how documents become sequences. Global batch k is a function of seed, data
    and k alone."""

    # stdlib: Python's own library's source
    name: str = option("stdlib", choices=("stdlib", "text", "tokens", "hf", "images"))
    # text: a file, folder or glob of text, .jsonl or .parquet (.gz and .zst too); tokens: a folder
    # that `python -m parallel2d.data prepare` wrote; hf: a Hugging Face data set's name, or the
    # folder of a saved one; images: a folder whose subfolders are the classes
    path: str | None = None
    # tokens, instead of path: [{path: A, weight: 0.7}, {path: B, weight: 0.3}]
    mixture: list[Any] = option([])
    # bytes, or the path of a tokenizer.json; the model's vocabulary must hold its ids
    tokenizer: str = "bytes"
    # ends a document; None: the tokenizer.json's usual one, or one id more
    end_token: str | None = None
    text_field: str = "text"  # of a row, unless rows have `prompt` and `completion`, or `segments`
    # longer text files are cut at a line end into several documents
    document_kib: int = option(64, minimum=1)
    subset: str | None = None  # hf: the data set's configuration
    split: str = "train"  # hf: the part that is read; documents are held out of it by hash
    # of documents, chosen by the hash of their content, or of images, by that of their path
    validation_fraction: float = option(0.02, minimum=0, maximum=0.5)
    # rows that cannot be read; more than these are an error with file and line
    max_bad_rows: int = option(0, minimum=0)
    # padded: one document per sequence, cut if longer
    packing: str = option("packed", choices=("packed", "padded"))
    # batches carry document ids; no target crosses into another document
    intra_document_masking: bool = False
    epochs: int = option(0, minimum=0)  # 0: epoch after epoch without end
    # the last global batch of the last epoch, when it is not full. drop: it is omitted; pad: it is
    # filled with samples of weight zero; wrap: with the first ones of the next epoch
    end: str = option("drop", choices=("drop", "pad", "wrap"))
    # processes that prepare, auto: one per core; images: threads of a rank that decode, auto: as
    # many, up to 16. The result does not depend on it
    workers: int | str = option("auto", minimum=1, auto=True)
    # where stdlib, text and hf are prepared; None: parallel2d in the user's cache folder
    cache_dir: str | None = None
    # images: pixels of a side, to which they are scaled and cropped; None: as the model's
    # configuration
    image_size: int | None = None
    # images: 3 (RGB) or 1 (grey); None: as the model's configuration, else 3
    channels: int | None = None
