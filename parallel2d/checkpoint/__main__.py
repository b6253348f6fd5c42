"""``python -m parallel2d.checkpoint inspect|verify|convert``: prints what a checkpoint holds,
checks that it is sound, and writes it in another format. Start at `main`.

A fault is one message on standard error and exit code 1.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from parallel2d.checkpoint.archive import Checkpoint
from parallel2d.checkpoint.convert import FORMATS, convert, guess_format, open_source
from parallel2d.checkpoint.convert import huggingface_format as huggingface
from parallel2d.checkpoint.convert.conversion import DTYPE_CHOICES, Progress
from parallel2d.checkpoint.convert.library_export import MOVED, is_library_model
from parallel2d.checkpoint.storage import describe_error, find_checkpoint
from parallel2d.errors import ConfigError
from parallel2d.files import for_terminal
from parallel2d.files.tensor_file import DTYPES, printable


def main(
    arguments: Sequence[str] | None = None, program: str = "python -m parallel2d.checkpoint"
) -> int:
    """Runs one command; returns the exit code: 0, 1 for a fault that is explained on standard
    error."""
    options = _parser(program).parse_args(arguments)
    try:
        options.run(options)
    except (ConfigError, OSError) as error:
        text = describe_error(error) if isinstance(error, OSError) else error
        print(f"error: {for_terminal(text)}", file=sys.stderr)
        return 1
    return 0


def _parser(program: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=program, description="Look at, check, convert.")
    commands = parser.add_subparsers(
        dest="command", required=True, metavar="inspect|verify|convert"
    )
    place = (
        "a checkpoint, a run directory (its newest), a Hugging Face folder, a .safetensors or "
        "torch.save file"
    )

    command = commands.add_parser("inspect", help="step, layout, names, shapes, dtypes, sizes")
    command.add_argument("path", help=place)
    command.add_argument(
        "--all", action="store_true", help="optimizer state and random generators too"
    )
    command.set_defaults(run=inspect)

    command = commands.add_parser("verify", help="reads everything and compares checksums")
    command.add_argument("path", help="a checkpoint or a run directory (its newest)")
    command.set_defaults(run=verify)

    command = commands.add_parser("convert", help="writes the weights in another format")
    command.add_argument("source", help=place)
    command.add_argument("target", help="a new file or folder")
    command.add_argument(
        "--to", choices=FORMATS, help="format of the target; told by its ending when it is a file"
    )
    command.add_argument(
        "--dtype", choices=tuple(DTYPE_CHOICES), help="dtype of the weights; default: as they are"
    )
    command.add_argument(
        "--optimizer", action="store_true", help="carry optimizer state and position too"
    )
    command.add_argument(
        "--shard-gib", type=float, default=5.0, help="size of a folder's data files (default 5)"
    )
    command.add_argument(
        "--model", action="append", default=[], metavar="KEY=VALUE",
        help="for --to hf, what the source does not tell: n_heads, n_kv_heads, norm_eps ...; of a "
        "run with model=hf, where what it began with is now: path, tokenizer",
    )  # fmt: skip
    command.set_defaults(run=run_convert)
    return parser


def inspect(options: argparse.Namespace) -> None:
    """Prints what a checkpoint holds; values are not read."""
    path = find_checkpoint(options.path)
    try:
        checkpoint = Checkpoint.open(path)
    except ConfigError:
        source = open_source(path)  # another format, or the more precise error
        print(f"{path}: {source.kind}")
        rows = [_Row(name, dtype, shape, 1) for name, (dtype, shape) in source.tensors.items()]
        _print_table(rows, options.all)
        return
    manifest = checkpoint.manifest
    mesh = " x ".join(f"{printable(axis)} {size}" for axis, size in manifest.mesh.items())
    print(
        f"{path}: step {manifest.step}, position {printable(manifest.state.get('samples'))}, {mesh}"
    )
    print(
        f"written by {manifest.world_size} ranks, {len(manifest.files)} files, "
        f"{_size(manifest.state_bytes)}"
    )
    facts = {**manifest.layout, "state": manifest.state}
    if manifest.optimizer:
        facts["optimizer"] = manifest.optimizer.get("class")
    for key, value in facts.items():
        print(f"{printable(key)}: {printable(value, 400)}")
    rows = [_Row(name, t.dtype, t.shape, len(t.chunks)) for name, t in manifest.tensors.items()]
    _print_table(rows, options.all)


class _Row(NamedTuple):
    """A tensor in the table of `inspect`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    chunks: int

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.elements * DTYPES[self.dtype].itemsize


def _print_table(rows: list[_Row], everything: bool) -> None:
    shown = rows if everything else _of_kind(rows, "model")
    width = min(max((len(row.name) for row in shown), default=4), 70)
    print(f"\n{'name':<{width}}  {'dtype':<8} {'size':>10}  {'chunks':>6}  shape")
    for row in shown:
        print(
            f"{printable(row.name):<{width}}  {row.dtype:<8} {_size(row.bytes):>10}  "
            f"{row.chunks:>6}  {list(row.shape)}"
        )
    for kind in ("model", "optimizer", "sync", "replica", "rng"):
        chosen = _of_kind(rows, kind)
        if chosen:
            elements = sum(row.elements for row in chosen)
            total = _size(sum(row.bytes for row in chosen))
            print(f"{kind}: {len(chosen)} tensors, {elements:,} elements, {total}")


def _of_kind(rows: list[_Row], kind: str) -> list[_Row]:
    return [row for row in rows if row.name.startswith(f"{kind}/")]


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def verify(options: argparse.Namespace) -> None:
    """Reads every file through; prints what was found sound."""
    path = find_checkpoint(options.path)
    checkpoint = Checkpoint.open(path, mapped=False)
    with _progress("verifying", checkpoint.manifest.state_bytes) as progress:
        checkpoint.verify(progress=progress)
    manifest = checkpoint.manifest
    size = _size(manifest.state_bytes)
    print(f"{path}: step {manifest.step}, {len(manifest.files)} files, {size}: sound")


def run_convert(options: argparse.Namespace) -> None:
    """Writes the target; prints how to train on from it where that is known."""
    if not options.shard_gib > 0:
        raise ConfigError(f"--shard-gib {options.shard_gib} must be above 0")
    target_format = options.to or guess_format(options.target)
    source = open_source(options.source)
    extra = _model_arguments(options.model, is_library_model(source))
    chosen = [n for n in source.tensors if options.optimizer or n.startswith("model/")]
    total = sum(
        math.prod(source.tensors[n][1]) * DTYPES[source.tensors[n][0]].itemsize for n in chosen
    )
    # An adapter is a small part of it, which is not worth a bar.
    with _progress("converting", total) as progress:
        written = convert(
            source,
            options.target,
            target_format,
            dtype=DTYPE_CHOICES[options.dtype] if options.dtype else None,
            optimizer=options.optimizer,
            shard_bytes=int(options.shard_gib * 2**30),
            arguments=extra,
            progress=None if target_format == "peft" else progress,
        )
    print(f"{options.target}: {written} tensors")
    if target_format == "parallel2d" and source.arguments:
        overrides = " ".join(huggingface.command_line(source.arguments))
        load = "" if options.optimizer else " checkpoint.load=model_only"
        print(
            f"train on: python -m parallel2d.train checkpoint.resume={options.target}{load} "
            f"{overrides}"
        )


def _model_arguments(items: Sequence[str], of_library: bool) -> dict[str, Any]:
    """The values of ``--model``: places of files for a model of a library, numbers for the built-in
    Llama. Raises `ConfigError` for another key and for what is no number."""
    allowed = MOVED if of_library else huggingface.ARGUMENTS
    extra: dict[str, Any] = {}
    for item in items:
        key, _, value = item.partition("=")
        if key not in allowed:
            raise ConfigError(f"--model {item}: {key} is not one of {', '.join(allowed)}")
        if of_library:
            extra[key] = value
            continue
        try:
            extra[key] = float(value) if key in ("norm_eps", "rope_theta") else int(value)
        except ValueError:
            raise ConfigError(f"--model {item}: {value} is no number") from None
    return extra


@contextmanager
def _progress(what: str, total: int) -> Iterator[Progress | None]:
    """A bar on a terminal, nothing elsewhere."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (
        TextColumn(what),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda count: bar.advance(task, count)


if __name__ == "__main__":
    sys.exit(main())
