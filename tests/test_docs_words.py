"""The commands of README.md and docs/ are accepted as they stand: their words compose and pass
every check.
"""

import os
import re
import shlex
from pathlib import Path

import jobs
import pytest

from parallel2d.base.config.composition import compose

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# A fenced block with its language, or an indented one
BLOCK = re.compile(r"^```([^\n]*)\n(.*?)^```|((?:^    [^\n]*\n)+)", re.DOTALL | re.MULTILINE)
# The overrides of a job follow one of these commands.
PROGRAM = re.compile(r"(?:python -m |-m |^)parallel2d[. ](?:train|certify|plan)(?= |$)")
# In the place of words that the reader chooses
ELLIPSES = ("...", "…", "<any", "overrides>", "[--list]")
# Word -> why a command with it is not composed here
ELSEWHERE = {
    "--config-dir": "needs a folder of experiments; test_config_groups.py makes one",
    "cluster=mine.yaml": "reads a file that preflight writes; test_preflight.py",
    "hydra/sweeper=optuna": "needs a plugin of Hydra; its sweepers are in test_run_records.py",
}


def lines_of(page: Path) -> list[str]:
    """The lines of the page's blocks, with continued ones joined."""
    found = BLOCK.findall(page.read_text())
    blocks = [fenced + indented for language, fenced, indented in found if not language]
    return [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]


def words_of(line: str) -> list[str] | None:
    """Return the overrides of the job that ``line`` starts (of the first job of a sweep); None for
    another program.
    """
    found = PROGRAM.search(line.strip())
    if found is None:
        return None
    given = shlex.split(os.path.expandvars(line.strip()[found.end() :]), comments=True)
    words = [word for word in given if word not in ELLIPSES]
    if "-m" in words:
        words = [word.partition(",")[0] for word in words if word != "-m"]
    return words


def commands() -> dict[str, list[str]]:
    found = {}
    for page in PAGES:
        for line in lines_of(page):
            words = words_of(line)
            if words is not None:
                found[f"{page.name}: {' '.join(words)}"] = words
    return found


def is_elsewhere(words: list[str]) -> bool:
    return any(word in ELSEWHERE for word in words)


COMPOSED = {name: words for name, words in commands().items() if not is_elsewhere(words)}


def test_documentation_has_commands():
    assert len(COMPOSED) >= 30
    given = {word for words in commands().values() for word in words}
    assert set(ELSEWHERE) <= given, "a reason that no command needs"


@pytest.mark.parametrize("name", COMPOSED)
def test_documented_command_composes(name):
    words = COMPOSED[name]
    # The quick way knows no clusters.
    if any(word.startswith("cluster=") for word in words):
        assert compose(words) is not None
    else:
        jobs.config_of(words)
