"""``python -m parallel2d.report RUN [RUN ...]``: writes ``report.md`` and ``report.html`` about one
run or several."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import replace

from parallel2d import files
from parallel2d.errors import ConfigError
from parallel2d.report.page import markdown, page
from parallel2d.report.runs import Run, read_run


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the report and returns the exit code. It is 2, with one message, for a folder that is
    not a run directory or cannot be written to."""
    parser = argparse.ArgumentParser(prog="python -m parallel2d.report", description=__doc__)
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", help="run directory; the first given is the first shown"
    )
    parser.add_argument(
        "--out",
        help="folder of the report; default: the run's own, with several runs the current one",
    )
    options = parser.parse_args(arguments)
    folder = options.out or (options.runs[0] if len(options.runs) == 1 else ".")
    try:
        runs = _tell_apart([read_run(path) for path in options.runs])
        os.makedirs(folder, exist_ok=True)
        # Both are made before the first is written, so a failure leaves no incomplete report.
        texts = {"report.md": markdown(runs), "report.html": page(runs)}
        for name, text in texts.items():
            path = os.path.join(folder, name)
            files.replace(path, text)
            print(files.printable(path, 4096))
    except ConfigError as error:
        print(f"parallel2d: {files.for_terminal(error)}", file=sys.stderr)
        return 2
    except OSError as error:
        print(
            f"parallel2d: --out: {files.printable(folder)} cannot be written: {error.strerror}",
            file=sys.stderr,
        )
        return 2
    return 0


def _tell_apart(runs: list[Run]) -> list[Run]:
    """Replaces names that several runs have by the runs' paths."""
    names = [run.name for run in runs]
    return [replace(run, name=run.path) if names.count(run.name) > 1 else run for run in runs]


if __name__ == "__main__":
    sys.exit(main())
