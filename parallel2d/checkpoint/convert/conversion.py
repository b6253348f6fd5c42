"""Converts weights from any format that is read to any that is written, with one tensor in memory
at a time: `convert`.

The target is complete or absent: it is written beside its place and renamed into it. An existing
target is never overwritten. Optimizer state is converted between our format, ``torch.save`` and
safetensors on request.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from parallel2d.checkpoint.convert import huggingface_format as huggingface
from parallel2d.checkpoint.convert.adapter_export import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    AdapterFolder,
    adapter_folder,
)
from parallel2d.checkpoint.convert.library_export import (
    LibraryFolder,
    is_library_model,
    library_folder,
)
from parallel2d.checkpoint.convert.sources import TORCH_SUFFIXES, Source, facts_text
from parallel2d.checkpoint.convert.torch_file import TorchWriter
from parallel2d.checkpoint.manifest import NAME as MANIFEST
from parallel2d.checkpoint.manifest import Chunk, Manifest, StoredTensor
from parallel2d.checkpoint.storage import LocalStore
from parallel2d.errors import ConfigError
from parallel2d.files import flush_folder
from parallel2d.files.tensor_file import DTYPES, encode_header, tensor_bytes
from parallel2d.weights.geometry import Region
from parallel2d.weights.pretrained import INDEX

FORMATS = ("parallel2d", "safetensors", "hf", "peft", "torch")
_HF_DTYPES = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}

Progress = Callable[[int], object]


def guess_format(target: str) -> str:
    """The format that a target's name implies. Raises `ConfigError` when it implies none."""
    if target.endswith(".safetensors"):
        return "safetensors"
    if target.endswith(TORCH_SUFFIXES):
        return "torch"
    raise ConfigError(
        f"{target}: a folder can be in two formats; say --to hf, --to peft or --to parallel2d"
    )


def convert(
    source: Source,
    target: str,
    format: str,
    *,
    dtype: str | None = None,
    optimizer: bool = False,
    shard_bytes: int = 5 * 2**30,
    arguments: dict[str, Any] | None = None,
    progress: Progress | None = None,
) -> int:
    """Writes ``source`` to ``target``; returns how many tensors it wrote.

    Args:
        source: from `open_source`.
        target: a file for ``safetensors`` and ``torch``, a folder for the other
            formats; must not exist.
        format: one of `FORMATS`.
        dtype: safetensors name of the dtype that floating-point weights are converted to; None
            keeps each. Optimizer state is never converted.
        optimizer: convert optimizer state and the run's position too.
        shard_bytes: size at which a folder's data goes on in another file.
        arguments: of the Llama, for ``hf``, in addition to those in the source; of a ``model=hf``
            run, ``path`` and ``tokenizer``: where the folder and the tokenizer.json are now.
        progress: gets the bytes written since the last call.

    Raises:
        ConfigError: the target exists, or the source lacks what the format needs.
    """
    if os.path.lexists(target):
        raise ConfigError(f"{target} exists already; nothing is written over")
    if optimizer and format in ("hf", "peft"):
        raise ConfigError("a Hugging Face model has no place for optimizer state")
    if optimizer and not source.optimizer:
        raise ConfigError("the source holds no optimizer state")
    arguments = arguments or {}
    exported = _exported(source, format, arguments)
    plan = _Plan(source if exported is None else exported.source, dtype, optimizer, progress)
    with _published(target) as place:
        if format == "torch":
            _write_torch(plan, place)
        elif format == "safetensors":
            _write_safetensors(plan, place)
        else:
            os.mkdir(place)
            if exported is not None:
                _write_exported(plan, place, exported, shard_bytes)
            elif format == "hf":
                _write_hugging_face(plan, place, arguments, shard_bytes)
            else:
                _write_ours(plan, place, shard_bytes)
            flush_folder(place)
    return len(plan.names)


@contextlib.contextmanager
def _published(target: str) -> Iterator[str]:
    """A path beside ``target``. What was written there becomes ``target``, or is removed after an
    error."""
    parent, name = os.path.split(os.path.abspath(target))
    os.makedirs(parent, exist_ok=True)
    place = os.path.join(parent, f".converting-{name}-{os.urandom(4).hex()}")
    try:
        yield place
        os.rename(place, target)
        flush_folder(parent)
    finally:
        shutil.rmtree(place, ignore_errors=True)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(place)  # a file


class _Plan:
    """What is written: names in order, their dtypes after conversion, and how to read each."""

    def __init__(
        self, source: Source, dtype: str | None, optimizer: bool, progress: Progress | None
    ) -> None:
        self.source, self.optimizer, self._progress = source, optimizer, progress
        self.dtypes: dict[str, str] = {}
        for name, (stored, _) in source.tensors.items():
            if name.startswith("model/"):
                floating = DTYPES[stored].is_floating_point
                self.dtypes[name] = dtype if dtype and floating else stored
            elif optimizer:
                self.dtypes[name] = stored
        if not any(name.startswith("model/") for name in self.dtypes):
            raise ConfigError("the source holds no weights")
        # Widest first, so that packed values are aligned.
        self.names = sorted(self.dtypes, key=self._narrowness)

    def _narrowness(self, name: str) -> int:
        return -DTYPES[self.dtypes[name]].itemsize

    def read(self, name: str) -> Tensor:
        """The values to write, on CPU and contiguous."""
        values = self.source.read(name)
        if self._progress is not None:
            self._progress(values.nbytes)
        return values.to(DTYPES[self.dtypes[name]]).contiguous()

    def shape(self, name: str) -> tuple[int, ...]:
        return self.source.tensors[name][1]

    def size(self, name: str) -> int:
        return Region.whole(self.shape(name)).numel * DTYPES[self.dtypes[name]].itemsize

    def facts(self) -> Source:
        """The facts to store: without optimizer state, those about the weights alone."""
        if self.optimizer:
            return self.source
        return replace(self.source, step=0, state={}, optimizer={})

    def blocks(
        self, stored_as: Mapping[str, str], metadata: dict[str, str] | None = None
    ) -> Iterator[bytes | memoryview]:
        """The blocks of one safetensors file with the tensors ``stored_as``: name -> name in the
        file. Each is read just before it is written."""
        order = sorted(stored_as, key=self._narrowness)
        described = [(stored_as[name], self.dtypes[name], self.shape(name)) for name in order]
        yield encode_header(described, {"format": "pt", **(metadata or {})})
        for name in order:
            yield tensor_bytes(self.read(name))

    def shards(self, names: Sequence[str], limit: int) -> list[list[str]]:
        """Names in files of at most ``limit`` bytes, or of one tensor where that is larger."""
        result: list[list[str]] = []
        room = -1
        for name in names:
            if self.size(name) > room:
                result.append([])
                room = limit
            result[-1].append(name)
            room -= self.size(name)
        return result


def _write_safetensors(plan: _Plan, path: str) -> None:
    folder, name = os.path.split(path)
    stored_as = {name: name.removeprefix("model/") for name in plan.names}
    facts = {"parallel2d": facts_text(plan.facts())}
    LocalStore(folder).write(folder, name, plan.blocks(stored_as, facts))


def _write_ours(plan: _Plan, folder: str, shard_bytes: int) -> None:
    facts = plan.facts()
    manifest = Manifest(
        step=facts.step,
        state=facts.state,
        layout=facts.layout or {"model": facts.arguments},
        mesh={"replicate": 1, "shard": 1, "tensor": 1},
        optimizer=facts.optimizer,
        tied=facts.tied,
    )
    store = LocalStore(folder)
    for number, names in enumerate(plan.shards(plan.names, shard_bytes)):
        file = f"part-{number:05d}.safetensors"
        stored_as = {name: name for name in names}
        manifest.files[file] = store.write(folder, file, plan.blocks(stored_as))
        for name in names:
            region = Region.whole(plan.shape(name))
            chunks = (Chunk(file, region),) if region.numel else ()
            manifest.tensors[name] = StoredTensor(plan.dtypes[name], plan.shape(name), chunks)
    content = manifest.encode()
    # What could not be read again must not be written.
    Manifest.decode(content)
    store.write(folder, MANIFEST, [content])


def _write_hugging_face(
    plan: _Plan, folder: str, arguments: dict[str, Any], shard_bytes: int
) -> None:
    ours = [name for name in plan.source.tensors if name.startswith("model/")]
    theirs = {name: huggingface.theirs(name.removeprefix("model/")) for name in ours}
    arguments = {**_sizes_from_shapes(plan), **plan.source.arguments, **arguments}
    arguments["tie_embeddings"] = "output.weight" in plan.source.tied
    config = huggingface.to_config(arguments, _widest_dtype(plan))
    # Refuses what this format cannot say, before a byte of the weights is written.
    huggingface.from_config(config, "the new config.json")
    _write_shards(plan, folder, theirs, shard_bytes)
    LocalStore(folder).write(folder, "config.json", [json.dumps(config, indent=2).encode()])


def _exported(
    source: Source, format: str, arguments: dict[str, Any]
) -> LibraryFolder | AdapterFolder | None:
    """``source`` as another library saves it; None for the formats whose names are ours or the
    built-in Llama's."""
    if format == "peft":
        return adapter_folder(source)
    if format == "hf" and is_library_model(source):
        return library_folder(source, **arguments)
    return None


def _write_exported(
    plan: _Plan, folder: str, exported: LibraryFolder | AdapterFolder, shard_bytes: int
) -> None:
    # The names are those of the file already.
    theirs = {name: name.removeprefix("model/") for name in plan.source.tensors}
    store = LocalStore(folder)
    if isinstance(exported, AdapterFolder):
        store.write(folder, ADAPTER_WEIGHTS, plan.blocks(theirs))
        files = {ADAPTER_CONFIG: exported.config}
    else:
        # Before the weights: what is wrong with the files is said at once.
        files = exported.files(_widest_dtype(plan))
        _write_shards(plan, folder, theirs, shard_bytes)
    for name, content in files.items():
        store.write(folder, name, [content])


def _widest_dtype(plan: _Plan) -> str:
    """The library's name of the widest dtype of the weights."""
    floating = [dtype for dtype in plan.dtypes.values() if dtype in _HF_DTYPES]
    if not floating:
        return "float32"
    return _HF_DTYPES[max(floating, key=lambda dtype: DTYPES[dtype].itemsize)]


def _write_shards(plan: _Plan, folder: str, theirs: dict[str, str], shard_bytes: int) -> None:
    """Weights under the names ``theirs``, with an index where they are in several files."""
    store, shards = LocalStore(folder), plan.shards(list(theirs), shard_bytes)
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file = "model.safetensors"
        if len(shards) > 1:
            file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        stored_as = {name: theirs[name] for name in names}
        store.write(folder, file, plan.blocks(stored_as))
        weight_map |= dict.fromkeys(stored_as.values(), file)
    if len(shards) > 1:
        total = sum(plan.size(name) for name in theirs)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        store.write(folder, INDEX, [json.dumps(index, indent=2).encode()])


def _sizes_from_shapes(plan: _Plan) -> dict[str, Any]:
    """The Llama's arguments that follow from the shapes of its weights."""
    shapes = {name.removeprefix("model/"): plan.shape(name) for name in plan.source.tensors}
    found: dict[str, Any] = {}
    # Weights of another model may have these names and other shapes.
    embedding = shapes.get("embedding.weight", ())
    if len(embedding) == 2:
        found["vocab_size"], found["dim"] = embedding
    up = shapes.get("layers.0.feed_forward.w1.weight", ())
    if len(up) == 2:
        found["hidden_dim"] = up[0]
    matches = [re.match(r"layers\.(\d+)\.", name) for name in shapes]
    found["n_layers"] = len({match[1] for match in matches if match})
    return found


def _write_torch(plan: _Plan, path: str) -> None:
    """Weights alone: a plain ``state_dict``. With optimizer state: a dict of both, as
    ``load_state_dict`` takes them, and the names that the optimizer's numbers mean."""
    writer = TorchWriter(path)
    holes, model = {}, {}
    for name in plan.names:
        holes[name] = writer.hole(DTYPES[plan.dtypes[name]], plan.shape(name))
        if name.startswith("model/"):
            model[name.removeprefix("model/")] = holes[name]
    model |= {name: model[other] for name, other in plan.source.tied.items() if other in model}
    content: dict[str, Any] = model
    if plan.optimizer:
        state, groups, order = _optimizer_by_number(plan.source, holes)
        content = {
            "model": model,
            "optimizer": {"state": state, "param_groups": groups},
            "optimizer_names": order,
            "parallel2d": facts_text(plan.facts()),
        }
    places = dict(_leaves(writer.begin(content)))
    names_of = {id(hole): name for name, hole in holes.items()}
    for keys, hole in _leaves(content):
        # A tied parameter is in the file once.
        name = names_of.pop(id(hole), "")
        if name:
            writer.fill(places[keys], plan.read(name))
    writer.finish()


def _leaves(content: Any, keys: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Tensor]]:
    if isinstance(content, Tensor):
        yield keys, content
    elif isinstance(content, dict):
        for key, value in content.items():
            yield from _leaves(value, (*keys, key))


def _optimizer_by_number(
    source: Source, tensors: dict[str, Tensor]
) -> tuple[dict[int, Any], list[Any], list[str]]:
    """An optimizer's ``state`` and ``param_groups`` as PyTorch numbers them, and the names in that
    order."""
    names: list[str] = []
    groups: list[dict[str, Any]] = []
    for group in source.optimizer.get("groups", []):
        first = len(names)
        names += group["parameters"]
        groups.append({**group["settings"], "params": list(range(first, len(names)))})
    number = {name: index for index, name in enumerate(names)}
    state: dict[int, Any] = {}
    for full, tensor in tensors.items():
        kind, _, rest = full.partition("/")
        key, _, name = rest.partition("/")
        if kind == "optimizer" and name in number:
            state.setdefault(number[name], {})[key] = tensor
    for name, plain in source.optimizer.get("scalars", {}).items():
        if name in number:
            state.setdefault(number[name], {}).update(plain)
    return dict(sorted(state.items())), groups, names


DTYPE_CHOICES = {"fp64": "F64", "fp32": "F32", "bf16": "BF16", "fp16": "F16"}
