"""Run the train command and draw its terminal output: docs/images/terminal.svg.

python -m tools.docs.terminal
"""

from __future__ import annotations

import io
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

PICTURE = Path(__file__).resolve().parents[2] / "docs" / "images" / "terminal.svg"
WORDS = "train.steps=40 train.validate_every=20 hydra.run.dir=first"
COLUMNS = 88


def capture() -> str:
    """Run the command in a temporary folder and return its output."""
    command = [sys.executable, "-m", "parallel2d.train", *WORDS.split()]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            command, cwd=folder, check=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        # The reader does not need the path of the temporary folder.
        return done.stdout.decode().replace(f"{folder}/", "")


if __name__ == "__main__":
    # A console with quiet=True would record nothing, so the output goes to a buffer.
    console = Console(record=True, width=COLUMNS, file=io.StringIO())
    # The last lines repeat the command line and are long.
    console.print(Text.from_ansi(capture()), overflow="ellipsis", no_wrap=True)
    console.save_svg(
        str(PICTURE), title=f"python -m parallel2d.train {WORDS}", unique_id="terminal"
    )
    print(f"wrote {PICTURE}")
