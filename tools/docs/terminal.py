"""Draws what a terminal shows of a real run: docs/images/terminal.svg.

python -m tools.docs.terminal
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile

from tools.docs import svg

WORDS = "train.steps=40 train.validate_every=20 hydra.run.dir=first"
COLUMNS, LINE, TOP = 88, 18, 44
INK, PAPER, DIM = "#e6e6e6", "#1b1f24", "#8b98a5"
CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def capture() -> list[str]:
    """The lines that the command prints, in a folder of its own."""
    command = [sys.executable, "-m", "parallel2d.train", *WORDS.split()]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            command,
            cwd=folder,
            check=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        # The folder of the capture is nobody's: the path of the run directory begins in it.
        shown = done.stdout.replace(f"{folder}/", "")
    lines = [CONTROL.sub("", line).rstrip() for line in shown.splitlines()]
    assert lines, "the command printed nothing"
    # Words that repeat the command line make the last lines long; they are cut with an ellipsis.
    return [line if len(line) <= COLUMNS else f"{line[: COLUMNS - 1]}…" for line in lines]


def draw(lines: list[str]) -> None:
    """The lines as white text on a dark card."""
    command = f"$ python -m parallel2d.train {WORDS}"
    width, height = 20 + COLUMNS * 8.5, TOP + LINE * (len(lines) + 1)
    parts = [svg.box(0, 0, width, height, PAPER, "none")]
    parts.append(svg.text(16, 26, command, "bold 14px", "monospace", "#9cd08f"))
    for number, line in enumerate(lines):
        name, content = line[:12], line[12:]
        y = TOP + LINE * (number + 0.6)
        # The header's first column names what the line tells; other lines have none.
        is_named = bool(re.fullmatch(r"[a-z ]{11} ", name))
        color = DIM if is_named else INK
        parts.append(svg.text(16, y, name, "14px", "monospace", color))
        parts.append(svg.text(16 + 12 * 8.43, y, content, "14px", "monospace", INK))
    title = f"What a terminal shows of: python -m parallel2d.train {WORDS}"
    svg.save("terminal.svg", width, height, title, parts)


if __name__ == "__main__":
    draw(capture())
