"""``python -m parallel2d.report RUN [RUN ...]``: writes ``report.md`` and ``report.html`` about one
run, several, or all of a folder."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import replace

from parallel2d import files
from parallel2d.errors import ConfigError
from parallel2d.report.page import markdown, page
from parallel2d.report.runs import Run, find_runs, read_run

_MOST_RUNS = 24  # that can be told apart on one page


def main(
    arguments: Sequence[str] | None = None, program: str = "python -m parallel2d.report"
) -> int:
    """Writes the report and returns the exit code. It is 2, with one message, for a folder that is
    not a run directory or cannot be written to."""
    parser = argparse.ArgumentParser(
        prog=program, description="Writes report.md and report.html about one run or several."
    )
    parser.add_argument(
        "runs",
        nargs="+",
        metavar="RUN",
        help="run directory, or a folder with runs below it; the first given is the first shown",
    )
    parser.add_argument(
        "--out",
        help="folder of the report; default: the folder given, with several the current one",
    )
    parser.add_argument(
        "--markdown", action="store_true", help="report.md alone, which needs no plotly"
    )
    options = parser.parse_args(arguments)
    folder = options.out or (options.runs[0] if len(options.runs) == 1 else ".")
    try:
        runs = _read(options.runs)
        # All is made before the first is written, so a failure leaves no incomplete report.
        texts = {"report.md": markdown(runs)}
        if not options.markdown:
            texts["report.html"] = page(runs, _plotly_js())
        os.makedirs(folder, exist_ok=True)
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


def _read(given: Sequence[str]) -> list[Run]:
    """The runs that were named, and those below folders. Raises `ConfigError`.

    Below a folder, a run that has no finished step yet, or cannot be read, is left out, which is
    said.
    """
    paths = find_runs(given)
    if len(paths) > _MOST_RUNS:
        raise ConfigError(
            f"{len(paths)} runs are too many for one page, of at most {_MOST_RUNS}: name some"
        )
    runs: list[Run] = []
    left_out: list[str] = []
    for path in paths:
        try:
            runs.append(read_run(path))
        except ConfigError as error:
            if path in given:
                raise
            left_out.append(str(error))
    if not runs:
        raise ConfigError(left_out[0])
    for problem in left_out:
        print(f"parallel2d: left out: {files.for_terminal(problem)}", file=sys.stderr)
    return _tell_apart(runs)


def _plotly_js() -> str:
    """The source of plotly.js, which the library brings. Raises `ConfigError` without it."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise ConfigError(
            "report.html is drawn with plotly: pip install 'parallel2d[report]' "
            "(--markdown writes report.md alone, without it)"
        ) from None
    source: str = get_plotlyjs()
    return source


def _tell_apart(runs: list[Run]) -> list[Run]:
    """Replaces names that several runs have by the runs' paths."""
    names = [run.name for run in runs]
    return [replace(run, name=run.path) if names.count(run.name) > 1 else run for run in runs]


if __name__ == "__main__":
    sys.exit(main())
