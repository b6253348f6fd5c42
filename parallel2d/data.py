"""``python -m parallel2d.data prepare | inspect | verify``: prepare, inspect and verify folders of
token shards.

After an error the command prints one message and exits with code 2.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import Progress

from parallel2d.base.config import DataConfig
from parallel2d.base.config.checks import check_data
from parallel2d.base.errors import ConfigError
from parallel2d.launching.run_command import exit_code_of
from parallel2d.training.data import token_shards as store
from parallel2d.training.data.prepare import folder_lock, prepare
from parallel2d.training.data.reading import find_units

if TYPE_CHECKING:
    from parallel2d.training.data.feed import BatchFeed as BatchFeed
    from parallel2d.training.data.feed import BatchPlan as BatchPlan
    from parallel2d.training.data.opening import open_data as open_data

# Key of the data section -> help text of the option of `prepare` that sets it
_OPTIONS = {
    "tokenizer": "bytes, or the path of a tokenizer.json or of its folder",
    "end_token": "ends a document; default: the tokenizer's usual one",
    "text_field": "of a row; default: %(default)s",
    "chat_template": "file, with --from chat; default: in the tokenizer's folder",
    "document_kib": "longer text files are cut",
    "subset": "configuration of a data set",
    "split": "part of a data set; default: %(default)s",
    "validation_fraction": "default: %(default)s",
    "max_bad_rows": "default: %(default)s",
    "workers": "processes; default: one per core",
}


def main(arguments: Sequence[str] | None = None, program: str = "python -m parallel2d.data") -> int:
    """Run one command and return the exit code."""
    options = _parser(program).parse_args(arguments)
    return exit_code_of(
        lambda: options.run(options),
        faults=(ConfigError, OSError, RuntimeError),
        interrupted="stopped; finished parts are kept, start again to continue",
    )


def _parser(program: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=program, description="Token shards for data=tokens.")
    commands = parser.add_subparsers(required=True, metavar="prepare | inspect | verify")
    text = "turn text, rows or a data set into a folder of token shards"
    command = commands.add_parser("prepare", help=text)
    command.set_defaults(run=_prepare)
    text = "file, folder, glob or data set; not given with --from stdlib"
    command.add_argument("path", nargs="?", help=text)
    text = "folder to write; started again, it is resumed"
    command.add_argument("--output", required=True, type=Path, help=text)
    kinds = ("text", "chat", "hf", "stdlib")
    command.add_argument("--from", dest="name", default="text", choices=kinds, help="default: text")
    for key, text in _OPTIONS.items():
        value = getattr(DataConfig(), key)
        kind = str if value is None else type(value)
        command.add_argument(f"--{key.replace('_', '-')}", type=kind, default=value, help=text)
    for name, function, text in (
        ("inspect", _inspect, "print what a prepared folder holds"),
        ("verify", _verify, "read every file of a prepared folder against its checksum"),
    ):
        command = commands.add_parser(name, help=text)
        command.set_defaults(run=function)
        command.add_argument("folder", type=Path)
    return parser


def _prepare(options: argparse.Namespace) -> None:
    given = {}
    for key in ("name", "path", *_OPTIONS):
        given[key] = getattr(options, key)
    if options.workers.isdecimal():
        given["workers"] = int(options.workers)
    config = DataConfig(**given)
    check_data(config)
    units, identity = find_units(config)
    with folder_lock(options.output) as lock, Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task("preparing", total=len(units))

        def show(done: int) -> None:
            bar.update(task, completed=done)

        prepared = prepare(config, units, identity, options.output, lock, show)
        show(len(units))
    print(_summary(prepared.manifest, options.output))


def _summary(manifest: dict[str, Any], folder: Path) -> str:
    splits = []
    for name, split in manifest["splits"].items():
        splits.append(f"{name} {split['tokens']:,} tokens in {split['documents']:,} documents")
    return (
        f"{folder}: {', '.join(splits)}; {manifest['bytes'] / 1e6:,.1f} MB of text; omitted: "
        f"{manifest['bad_rows']:,} bad rows, {manifest['empty_documents']:,} empty documents"
    )


def _inspect(options: argparse.Namespace) -> None:
    manifest = store.read_manifest(options.folder)
    print(_summary(manifest, options.folder))
    print(json.dumps({key: manifest[key] for key in ("tokenizer", "dtype", "content")}, indent=1))


def _verify(options: argparse.Namespace) -> None:
    print(f"{options.folder}: {store.verify(options.folder):,} bytes, every checksum is right")


# Name for custom training loops -> its module in `training.data`
_LIBRARY = {
    **dict.fromkeys(("IGNORED", "Batch"), "batch"),
    **dict.fromkeys(("BatchFeed", "BatchPlan", "EndOfData", "StepBatch"), "feed"),
    **dict.fromkeys(("OpenData", "open_data"), "opening"),
    "SampleStream": "stream",
}


def __getattr__(name: str) -> Any:
    """Import a name in `_LIBRARY` at its first use, so that the commands do not load torch."""
    if name not in _LIBRARY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"parallel2d.training.data.{_LIBRARY[name]}")
    return getattr(module, name)


if __name__ == "__main__":
    sys.exit(main())
