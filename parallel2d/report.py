"""``python -m parallel2d.report RUN [RUN ...]``: write ``report.md`` and ``report.html``.

The report covers one run, several runs, or all runs of a folder.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import replace

from parallel2d.base import files
from parallel2d.base.errors import ConfigError
from parallel2d.instruments.report.page import markdown, page
from parallel2d.instruments.report.runs import Run, find_runs, read_run
from parallel2d.launching.run_command import exit_code_of

_MOST_RUNS = 24  # more runs cannot be distinguished on one page


def main(
    arguments: Sequence[str] | None = None, program: str = "python -m parallel2d.report"
) -> int:
    """Write the report and return the exit code.

    If a folder is not a run directory or cannot be written, one message is printed and the code is
    2.
    """
    parser = argparse.ArgumentParser(
        prog=program, description="Writes report.md and report.html about one run or several."
    )
    run_help = "run directory, or a folder with runs below it; the first given is the first shown"
    parser.add_argument("runs", nargs="+", metavar="RUN", help=run_help)
    parser.add_argument("--out", help="folder of the report; default: RUN, or . for several")
    parser.add_argument("--markdown", action="store_true", help="only report.md, without plotly")
    options = parser.parse_args(arguments)
    return exit_code_of(lambda: _write(options))


def _write(options: argparse.Namespace) -> None:
    folder = options.out or (options.runs[0] if len(options.runs) == 1 else ".")
    runs = _read(options.runs)
    # Both texts exist before the first is written, so a failure leaves no incomplete report.
    texts = {"report.md": markdown(runs)}
    if not options.markdown:
        texts["report.html"] = page(runs)
    try:
        os.makedirs(folder, exist_ok=True)
        for name, text in texts.items():
            path = os.path.join(folder, name)
            files.replace(path, text)
            print(files.printable(path, 4096))
    except OSError as error:
        shown = files.printable(folder)
        raise ConfigError(f"--out: {shown} cannot be written: {error.strerror}") from None


def _read(given: Sequence[str]) -> list[Run]:
    """Read the given runs and the runs below given folders. Raise `ConfigError` on failure.

    A run below a given folder is omitted, with a message, if it cannot be read or has no finished
    step.
    """
    paths = find_runs(given)
    if len(paths) > _MOST_RUNS:
        raise ConfigError(
            f"{len(paths)} runs exceed the {_MOST_RUNS} runs of one page: name fewer runs"
        )
    base = os.path.commonpath([os.path.dirname(os.path.abspath(path)) for path in paths])
    runs: list[Run] = []
    for path in paths:
        try:
            # Two folders may each have a run 0.
            name = files.printable(os.path.relpath(path, base), 300)
            runs.append(replace(read_run(path), name=name))
        except ConfigError as error:
            if path in given:
                raise
            print(f"parallel2d: omitted: {files.for_terminal(error)}", file=sys.stderr)
    if not runs:
        raise ConfigError("no run can be reported")
    return runs


if __name__ == "__main__":
    sys.exit(main())
