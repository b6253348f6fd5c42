"""The train commands of README.md and docs/tutorial.md are accepted as they stand: their words compose and pass every check."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import jobs
import pytest

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^```\n(.*?)^```", re.DOTALL | re.MULTILINE)
PROGRAM = ["python", "-m", "parallel2d.train"]


def commands() -> list[list[str]]:
    """The words of every train command that is one job: sweeps compose in `test_command_line.py`."""
    found = []
    for page in ("README.md", "docs/tutorial.md"):
        for block in BLOCK.findall((ROOT / page).read_text()):
            for line in block.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True)
                if words[:3] == PROGRAM and "-m" not in words[3:]:
                    found.append(words[3:])
    return found


def test_commands_were_found():
    assert len(commands()) >= 8


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_a_command_composes(words):
    jobs.config_of(words)
