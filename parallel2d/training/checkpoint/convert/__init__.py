"""Converts weights between formats: `open_source` reads the weights and `convert` writes the
weights, one tensor at a time.

The target is written under a temporary name and renamed when it is complete. An existing target is
never overwritten. Our format, ``torch.save`` files and safetensors files can also store optimizer
state.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from torch import Tensor

from parallel2d.base.errors import ConfigError
from parallel2d.base.files import flush_folder
from parallel2d.base.files.folder import is_remote
from parallel2d.base.files.tensor_file import DTYPES
from parallel2d.training.checkpoint.convert import formats, hugging_face
from parallel2d.training.checkpoint.convert.formats import Source
from parallel2d.training.checkpoint.convert.hugging_face import llama_arguments
from parallel2d.training.checkpoint.manifest import MANIFEST, TRAINED
from parallel2d.training.checkpoint.state import names_under
from parallel2d.training.checkpoint.storage import find_checkpoint

__all__ = ["Source", "convert", "guess_format", "llama_arguments", "open_source"]

FORMATS = ("parallel2d", "safetensors", "hf", "peft", "torch")
DTYPE_CHOICES = {"fp64": "F64", "fp32": "F32", "bf16": "BF16", "fp16": "F16"}

_TORCH = (".pt", ".pth", ".bin")

Progress = Callable[[int], object]


def open_source(path: str) -> Source:
    """Open weights in any of five formats: our checkpoint, a run directory (its newest checkpoint),
    a single safetensors file, a ``torch.save`` file, or a folder with a Hugging Face Llama. Raises
    `ConfigError` for anything else."""
    if is_remote(path):
        return formats.read_ours(find_checkpoint(path))
    if os.path.isfile(path):
        status = os.stat(path)
        stored = status.st_blocks * 512
        # A sparse file could be read as far more bytes than it occupies. Some file systems do not
        # count blocks.
        if status.st_blocks > 1 and status.st_size > 4 * stored + 2**20:
            sizes = f"{status.st_size} bytes, of which {stored} are on the disk"
            raise ConfigError(
                f"{path} has {sizes}: it is a sparse file, which no program saves weights to"
            )
        if path.endswith(".safetensors"):
            return formats.read_safetensors(path)
        if path.endswith(_TORCH):
            return formats.read_torch(path)
        raise ConfigError(f"{path}: a file must end in .safetensors or {', '.join(_TORCH)}")
    if os.path.isdir(path):
        found = find_checkpoint(path)
        if os.path.lexists(os.path.join(found, MANIFEST)):
            return formats.read_ours(found)
        if os.path.lexists(os.path.join(path, "config.json")):
            return hugging_face.read_llama(path)
        raise ConfigError(f"{path} holds neither {MANIFEST} (ours) nor config.json (Hugging Face)")
    raise ConfigError(f"{path}: there is no such file or folder")


def guess_format(target: str) -> str:
    """Return the format that a target's name implies. Raises `ConfigError` if it implies none."""
    if target.endswith(".safetensors"):
        return "safetensors"
    if target.endswith(_TORCH):
        return "torch"
    raise ConfigError(f"{target} implies no format; add --to hf, --to peft or --to parallel2d")


def convert(
    source: Source,
    target: str,
    format: str,
    *,
    dtype: str | None = None,
    optimizer: bool = False,
    average: bool = False,
    shard_bytes: int = 5 * 2**30,
    arguments: Mapping[str, str] | None = None,
    progress: Progress | None = None,
) -> int:
    """Convert ``source`` to ``target`` and return the number of tensors written.

    Args:
        target: a file for ``safetensors`` and ``torch``, a folder for the other `FORMATS`.
        dtype: safetensors name for floating-point parameters; buffers and optimizer state keep
            their dtypes.
        optimizer: write the optimizer state too.
        average: write the EMA weights instead of the weights.
        shard_bytes: size above which a new file is started, for formats with several files.
        arguments: ``given`` of `write_model`.
        progress: called with the bytes read since the last call.

    Raises `ConfigError` if the target exists, or if the source lacks data that the format needs.
    """
    if os.path.lexists(target):
        raise ConfigError(f"{target} exists already and is not overwritten")
    if optimizer and format in ("hf", "peft"):
        raise ConfigError("a Hugging Face model has no place for optimizer state")
    if optimizer and not source.optimizer:
        raise ConfigError("the source holds no optimizer state")
    chosen = _chosen(source, dtype, optimizer, average, progress)
    with _published(target) as place:
        match format:
            case "hf":
                return hugging_face.write_model(chosen, place, shard_bytes, arguments or {})
            case "peft":
                return hugging_face.write_adapter(chosen, place)
            case "torch":
                formats.write_torch(chosen, place)
            case "safetensors":
                formats.write_safetensors(chosen, place)
            case _:
                formats.write_ours(chosen, place, shard_bytes)
    return len(chosen.tensors)


def _names(source: Source, kind: str, what: str) -> list[str]:
    found = names_under([kind], source.tensors)
    if not found:
        raise ConfigError(f"the source holds no {what}")
    return found


def _chosen(
    source: Source, dtype: str | None, optimizer: bool, average: bool, progress: Progress | None
) -> Source:
    """Return a source with only the tensors to write, widest dtypes first. Weights are converted to
    ``dtype`` when they are read. Without ``optimizer``, the step, the state and the optimizer's
    settings are removed."""
    weights = _names(source, "model", "weights")
    kinds = ["model", "optimizer"] if optimizer else ["model"]
    tensors = {name: source.tensors[name] for name in names_under(kinds, source.tensors)}
    stored_as: dict[str, str] = {}
    if average:
        averages = _names(source, "ema", "averages: it was not trained with train.ema")
        stored_as = {f"model/{name.removeprefix('ema/')}": name for name in averages}
    tensors |= {name: source.tensors[stored] for name, stored in stored_as.items()}
    if dtype is not None:
        buffers = {f"model/{name}" for name in source.buffers}
        for name in filter(lambda name: name not in buffers, weights):
            stored, shape = tensors[name]
            tensors[name] = dtype if DTYPES[stored].is_floating_point else stored, shape

    def read(name: str) -> Tensor:
        values = source.read(stored_as.get(name, name))
        if progress is not None:
            progress(values.nbytes)
        return values.to(DTYPES[tensors[name][0]]).contiguous()

    order = sorted(tensors, key=lambda name: DTYPES[tensors[name][0]].itemsize, reverse=True)
    chosen = replace(source, tensors={name: tensors[name] for name in order}, read=read)
    if optimizer:
        return chosen
    layout = {key: value for key, value in source.layout.items() if key != TRAINED}
    return replace(chosen, step=0, state={}, layout=layout, optimizer={})


@contextlib.contextmanager
def _published(target: str) -> Iterator[str]:
    """Yield a temporary path in the same folder as ``target``, and rename it to ``target`` at the
    end if no error occurred."""
    parent, name = os.path.split(os.path.abspath(target))
    os.makedirs(parent, exist_ok=True)
    place = os.path.join(parent, f".converting-{name}-{os.urandom(4).hex()}")
    try:
        yield place
        # The rename publishes the target. Its files are flushed before the rename, and the parent
        # folder afterwards, so that a crash leaves either a complete target or none.
        if os.path.isdir(place):
            flush_folder(place)
        os.rename(place, target)
        flush_folder(parent)
    finally:
        shutil.rmtree(place, ignore_errors=True)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(place)  # a file
