"""``python -m parallel2d.dashboard RUN [RUN ...]``: TensorBoard for the given runs, on localhost.

A run is given by its directory, or by a folder that has it somewhere below. The server listens on
localhost. Start at `main`.
"""

from __future__ import annotations

import argparse
import os
import stat
import sys
import tempfile
from collections.abc import Sequence

from parallel2d.base.errors import ConfigError
from parallel2d.launching import exit_code_of


def find_boards(paths: Sequence[str]) -> dict[str, str]:
    """Name -> ``tensorboard`` folder of every run at or below ``paths``; `ConfigError` for none."""
    found: dict[str, str] = {}
    for path in paths:
        runs = sorted(folder for folder, names, _ in os.walk(path) if "tensorboard" in names)
        if not runs:
            raise ConfigError(f"{path}: no run with a tensorboard folder here or below")
        for run in runs:
            _check_board(os.path.join(run, "tensorboard"))
            # As much of the path as tells it apart from those before.
            above, name = os.path.split(os.path.abspath(run))
            while name in found and above != os.sep:
                above, folder = os.path.split(above)
                name = f"{folder}-{name}"
            found[name] = os.path.join(run, "tensorboard")
    return found


def _check_board(board: str) -> None:
    """TensorBoard would follow links out of the run, and wait for what others write to a pipe."""
    entries = [board]
    for folder, folders, names in os.walk(board):
        entries += [os.path.join(folder, name) for name in folders + names]
    for entry in entries:
        mode = os.lstat(entry).st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            raise ConfigError(f"{entry}: neither a file nor a folder, and links are not followed")


def main(
    arguments: Sequence[str] | None = None, program: str = "python -m parallel2d.dashboard"
) -> int:
    """Serves until interrupted. Exit code 2 for folders without runs."""
    text = "TensorBoard for the given runs, on localhost."
    parser = argparse.ArgumentParser(prog=program, description=text)
    text = "run directory, or a folder with runs below it"
    parser.add_argument("runs", nargs="+", metavar="RUN", help=text)
    parser.add_argument("--port", type=int, default=6006, help="on localhost; 0 picks a free one")
    options = parser.parse_args(arguments)
    return exit_code_of(lambda: _serve(options))


def _serve(options: argparse.Namespace) -> int:
    boards = find_boards(options.runs)
    from tensorboard.program import TensorBoard

    server = TensorBoard()
    # one link per run, by the name it is shown under
    with tempfile.TemporaryDirectory(prefix="parallel2d-dashboard-") as shown:
        for name, folder in boards.items():
            link = os.path.join(shown, name)
            os.makedirs(os.path.dirname(link), exist_ok=True)
            os.symlink(os.path.abspath(folder), link)
        place = ["--host", "localhost", "--port", str(options.port)]
        server.configure(argv=["tensorboard", "--logdir", shown, *place])
        return int(server.main() or 0)


if __name__ == "__main__":
    sys.exit(main())
