"""``python -m parallel2d.checkpoint inspect|verify|convert``: show, verify or convert a checkpoint.

`main` is the entry point of the command. `Checkpointer` may be imported from here. After an error
the command prints one message on standard error and exits with code 1.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from parallel2d.base.errors import ConfigError
from parallel2d.base.files import for_terminal
from parallel2d.base.files.tensor_file import DTYPES, printable
from parallel2d.launching.run_command import exit_code_of
from parallel2d.training.checkpoint import Checkpointer as Checkpointer
from parallel2d.training.checkpoint.convert import (
    DTYPE_CHOICES,
    FORMATS,
    Progress,
    convert,
    guess_format,
    llama_arguments,
    open_source,
)
from parallel2d.training.checkpoint.reader import Checkpoint
from parallel2d.training.checkpoint.storage import find_checkpoint


def main(
    arguments: Sequence[str] | None = None, program: str = "python -m parallel2d.checkpoint"
) -> int:
    """Run one command and return the exit code."""
    options = _parser(program).parse_args(arguments)
    return exit_code_of(lambda: options.run(options), faults=(ConfigError, OSError), invalid=1)


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
    everything = "optimizer state and random generators too"
    command.add_argument("--all", action="store_true", help=everything)
    command.set_defaults(run=inspect)

    command = commands.add_parser("verify", help="reads everything and compares checksums")
    command.add_argument("path", help="a checkpoint or a run directory (its newest)")
    command.set_defaults(run=verify)

    command = commands.add_parser("convert", help="writes the weights in another format")
    add = command.add_argument
    add("source", help=place)
    add("target", help="a new file or folder")
    add("--to", choices=FORMATS, help="format of the target; a file's ending tells it too")
    add("--dtype", choices=tuple(DTYPE_CHOICES), help="of the weights; default: as they are")
    add("--optimizer", action="store_true", help="carry optimizer state and position too")
    add("--ema", action="store_true", help="EMA weights of train.ema instead of the weights")
    add("--shard-gib", type=float, default=5.0, help="size of a folder's data files (default 5)")
    add(
        "--model", action="append", default=[], metavar="KEY=VALUE",
        help="for --to hf, settings that the source lacks: n_heads, n_kv_heads, norm_eps ...; of a "
        "run with model=hf, the location of its base model: path, tokenizer",
    )  # fmt: skip
    command.set_defaults(run=run_convert)
    return parser


# Name, dtype, shape and number of chunks of a tensor.
_Row = tuple[str, str, tuple[int, ...], int]


def inspect(options: argparse.Namespace) -> None:
    """Print the contents of a checkpoint without reading values."""
    path = find_checkpoint(options.path)
    try:
        manifest = Checkpoint.open(path).manifest
    except ConfigError:
        source = open_source(path)  # another format, or the more precise error
        print(f"{path}: {source.kind}")
        _print_table([(name, *each, 1) for name, each in source.tensors.items()], options.all)
        return
    mesh = " x ".join(f"{printable(axis)} {size}" for axis, size in manifest.mesh.items())
    position = printable(manifest.state.get("samples"))
    size = _size(manifest.state_bytes)
    print(f"{path}: step {manifest.step}, position {position}, {mesh}")
    print(f"written by {manifest.world_size} ranks, {len(manifest.files)} files, {size}")
    facts = {**manifest.layout, "state": manifest.state}
    if manifest.optimizer:
        facts["optimizer"] = manifest.optimizer.get("class")
    for key, value in facts.items():
        print(f"{printable(key)}: {printable(value, 400)}")
    tensors = manifest.tensors.items()
    _print_table([(name, t.dtype, t.shape, len(t.chunks)) for name, t in tensors], options.all)


def _print_table(rows: list[_Row], everything: bool) -> None:
    shown = rows if everything else _of_kind(rows, "model")
    width = min(max((len(name) for name, *_ in shown), default=4), 70)
    print(f"\n{'name':<{width}}  {'dtype':<8} {'size':>10}  {'chunks':>6}  shape")
    for row in shown:
        name, dtype, shape, chunks = row
        size = _size(_bytes([row]))
        print(f"{printable(name):<{width}}  {dtype:<8} {size:>10}  {chunks:>6}  {list(shape)}")
    for kind in ("model", "ema", "optimizer", "sync", "replica", "rng"):
        chosen = _of_kind(rows, kind)
        if chosen:
            elements = sum(math.prod(shape) for _, _, shape, _ in chosen)
            total = _size(_bytes(chosen))
            print(f"{kind}: {len(chosen)} tensors, {elements:,} elements, {total}")


def _of_kind(rows: list[_Row], *kinds: str) -> list[_Row]:
    found: list[_Row] = []
    for row in rows:
        if row[0].partition("/")[0] in kinds:
            found.append(row)
    return found


def _bytes(rows: list[_Row]) -> int:
    return sum(math.prod(shape) * DTYPES[dtype].itemsize for _, dtype, shape, _ in rows)


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def verify(options: argparse.Namespace) -> None:
    """Read every file and compare its checksum. If all are right, print a line about the
    checkpoint."""
    path = find_checkpoint(options.path)
    checkpoint = Checkpoint.open(path, mapped=False)
    manifest = checkpoint.manifest
    with _progress("verifying", manifest.state_bytes) as progress:
        checkpoint.verify(progress=progress)
    size = _size(manifest.state_bytes)
    print(f"{path}: step {manifest.step}, {len(manifest.files)} files, {size}: sound")


def run_convert(options: argparse.Namespace) -> None:
    """Convert the checkpoint. If the command that trains from the result is known, print this
    command."""
    if not options.shard_gib > 0:
        raise ConfigError(f"--shard-gib {options.shard_gib} must be above 0")
    target_format = options.to or guess_format(options.target)
    arguments = dict(item.partition("=")[::2] for item in options.model)
    source = open_source(options.source)
    rows: list[_Row] = []
    for name, each in source.tensors.items():
        rows.append((name, *each, 1))
    kinds = ("model", "optimizer") if options.optimizer else ("model",)
    chosen = _of_kind(rows, *kinds)
    with _progress("converting", _bytes(chosen)) as progress:
        written = convert(
            source,
            options.target,
            target_format,
            dtype=DTYPE_CHOICES.get(options.dtype),
            optimizer=options.optimizer,
            average=options.ema,
            shard_bytes=int(options.shard_gib * 2**30),
            arguments=arguments,
            progress=progress,
        )
    print(f"{options.target}: {written} tensors")
    if _of_kind(rows, "ema") and not options.ema:
        print("not written: the EMA weights of train.ema; --ema writes them instead of the weights")
    model = llama_arguments(source.layout)
    if target_format == "parallel2d" and model:
        words = []
        for key, value in model.items():
            words.append(f"model.{key}={str(value).lower()}")
        if not options.optimizer:
            words.insert(0, "checkpoint.load=model_only")
        command = f"python -m parallel2d.train checkpoint.resume={options.target}"
        print(for_terminal(f"train on: {command} {' '.join(words)}"))


@contextmanager
def _progress(what: str, total: int) -> Iterator[Progress | None]:
    """Show a progress bar if standard error is a terminal. Yields a function that adds bytes to the
    bar, or None without a bar."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TransferSpeedColumn

    columns = what, BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda count: bar.advance(task, count)


if __name__ == "__main__":
    sys.exit(main())
